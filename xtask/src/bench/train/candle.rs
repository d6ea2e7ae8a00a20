//! Models of candle.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Conv2d, Conv2dConfig, Embedding, Linear, VarBuilder, VarMap, conv2d, embedding, linear};
use distribute::Error;
use distribute::candle::{Fit, LayerNorm, SparseCategoricalCrossentropy, layer_norm};
use distribute::optim::SparseGradients;
use distribute::prelude::*;
use distribute::train::callbacks::ModelCheckpoint;
use distribute::train::elastic::{self, Standing};
use serde::{Deserialize, Serialize};

use super::data::{self, BATCHES, TOKENS, VOCABULARY};
use super::{Measured, Model, in_step, independent, strategy_of};
use crate::error::text;

pub(crate) struct Mlp([Linear; 3]);

impl Mlp {
    pub(crate) fn new(vb: &VarBuilder<'_>) -> CandleResult<Mlp> {
        Ok(Mlp([linear(784, 256, vb.pp("fc1"))?, linear(256, 128, vb.pp("fc2"))?, linear(128, 10, vb.pp("fc3"))?]))
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let [fc1, fc2, fc3] = &self.0;
        fc3.forward(&fc2.forward(&fc1.forward(x)?.relu()?)?.relu()?)
    }
}

struct Cnn {
    convolutions: [Conv2d; 2],
    head: Linear,
}

impl Cnn {
    fn new(vb: &VarBuilder<'_>) -> CandleResult<Cnn> {
        let padded = Conv2dConfig { padding: 1, ..Conv2dConfig::default() };
        let convolutions = [conv2d(1, 16, 3, padded, vb.pp("conv1"))?, conv2d(16, 32, 3, padded, vb.pp("conv2"))?];
        Ok(Cnn { convolutions, head: linear(32 * 49, 10, vb.pp("head"))? })
    }
}

impl Module for Cnn {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let mut x = x.reshape(((), 1, 28, 28))?;
        for convolution in &self.convolutions {
            x = convolution.forward(&x)?.relu()?.max_pool2d(2)?;
        }
        self.head.forward(&x.flatten_from(1)?)
    }
}

const WIDTH: usize = 128;
const HEADS: usize = 4;

struct Block {
    norms: [LayerNorm; 2],
    qkv: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
}

struct Transformer {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
    mask: Tensor,
}

impl Transformer {
    fn new(vb: &VarBuilder<'_>) -> CandleResult<Transformer> {
        let block = |vb: VarBuilder<'_>| {
            Ok(Block {
                norms: [layer_norm(WIDTH, 1e-5, vb.pp("norm1"))?, layer_norm(WIDTH, 1e-5, vb.pp("norm2"))?],
                qkv: linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?,
                out: linear(WIDTH, WIDTH, vb.pp("out"))?,
                up: linear(WIDTH, 4 * WIDTH, vb.pp("up"))?,
                down: linear(4 * WIDTH, WIDTH, vb.pp("down"))?,
            })
        };
        let mask: Vec<f32> =
            (0..TOKENS * TOKENS).map(|at| if at % TOKENS > at / TOKENS { f32::NEG_INFINITY } else { 0.0 }).collect();
        Ok(Transformer {
            tokens: embedding(VOCABULARY, WIDTH, vb.pp("tokens"))?,
            positions: embedding(TOKENS, WIDTH, vb.pp("positions"))?,
            blocks: (0..2).map(|at| block(vb.pp(format!("block{at}")))).collect::<CandleResult<_>>()?,
            norm: layer_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            head: linear(WIDTH, VOCABULARY, vb.pp("head"))?,
            mask: Tensor::from_vec(mask, (TOKENS, TOKENS), &Device::Cpu)?,
        })
    }

    fn attend(&self, block: &Block, x: &Tensor) -> CandleResult<Tensor> {
        let rows = x.dim(0)?;
        let qkv = block.qkv.forward(x)?.reshape((rows, TOKENS, 3, HEADS, WIDTH / HEADS))?;
        let part = |at: usize| qkv.narrow(2, at, 1)?.squeeze(2)?.transpose(1, 2)?.contiguous();
        let scores = (part(0)?.matmul(&part(1)?.t()?)? / ((WIDTH / HEADS) as f64).sqrt())?;
        let weights = candle_nn::ops::softmax(&scores.broadcast_add(&self.mask)?, 3)?;
        let mixed = weights.matmul(&part(2)?)?.transpose(1, 2)?.reshape((rows, TOKENS, WIDTH))?;
        block.out.forward(&mixed)
    }
}

impl Module for Transformer {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let positions = self.positions.forward(&Tensor::arange(0u32, TOKENS as u32, &Device::Cpu)?)?;
        let mut x = self.tokens.forward(x)?.broadcast_add(&positions)?;
        for block in &self.blocks {
            x = (&x + self.attend(block, &block.norms[0].forward(&x)?)?)?;
            let hidden = block.up.forward(&block.norms[1].forward(&x)?)?.gelu()?;
            x = (&x + block.down.forward(&hidden)?)?;
        }
        // One row for each token.
        self.head.forward(&self.norm.forward(&x)?)?.flatten(0, 1)
    }
}

/// The mean of words, of which few occur in a step.
struct Words(Embedding, Linear);

impl Words {
    fn new(vb: &VarBuilder<'_>) -> CandleResult<Words> {
        let [words, width] = data::WORDS;
        Ok(Words(embedding(words, width, vb.pp("words"))?, linear(width, 10, vb.pp("head"))?))
    }
}

impl Module for Words {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        self.1.forward(&self.0.forward(x)?.mean(1)?)
    }
}

enum Net {
    Words(Words),
    Mlp(Mlp),
    Cnn(Cnn),
    Transformer(Transformer),
}

impl Net {
    fn new(model: Model, vb: &VarBuilder<'_>) -> CandleResult<Net> {
        Ok(match model {
            Model::Embedding => Net::Words(Words::new(vb)?),
            Model::Cnn => Net::Cnn(Cnn::new(vb)?),
            Model::Transformer => Net::Transformer(Transformer::new(vb)?),
            Model::Mlp | Model::Wide => Net::Mlp(Mlp::new(vb)?),
        })
    }

    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        match self {
            Net::Words(model) => model.forward(x),
            Net::Mlp(model) => model.forward(x),
            Net::Cnn(model) => model.forward(x),
            Net::Transformer(model) => model.forward(x),
        }
    }
}

pub(super) fn run(arrangement: &str, model: Model, time: Duration) -> Result<Measured, String> {
    match arrangement {
        "independent" => plain(model, time),
        name @ ("fit" | "checkpoints") => fit(&strategy_of(name)?, time, name == "checkpoints").map_err(text),
        name => ours(&strategy_of(name)?, model, time, name),
    }
}

/// Returns the examples of some batches of this size.
fn data(model: Model, batch: usize) -> CandleResult<(Tensor, Tensor)> {
    let (rows, cpu) = (batch * BATCHES, &Device::Cpu);
    Ok(match model {
        Model::Transformer => {
            let (tokens, next) = data::sequences(rows);
            (Tensor::from_vec(tokens, (rows, TOKENS), cpu)?, Tensor::from_vec(next, (rows, TOKENS), cpu)?)
        }
        Model::Embedding => (
            Tensor::from_vec(data::words(rows * TOKENS), (rows, TOKENS), cpu)?,
            Tensor::from_vec(data::labels(rows), rows, cpu)?,
        ),
        _ => (
            Tensor::from_vec(data::pixels(rows * 784), (rows, 784), cpu)?,
            Tensor::from_vec(data::labels(rows), rows, cpu)?,
        ),
    })
}

/// Trains without distribution: candle's own loss and AdamW.
fn plain(model: Model, time: Duration) -> Result<Measured, String> {
    use candle_nn::Optimizer as _;
    let built = || -> CandleResult<_> {
        let variables = VarMap::new();
        let net = Net::new(model, &VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
        let settings = candle_nn::ParamsAdamW { lr: 1e-3, weight_decay: 0.0, ..Default::default() };
        Ok((net, candle_nn::AdamW::new(variables.all_vars(), settings)?, data(model, model.batch())?))
    };
    let (net, mut optimizer, (x, y)) = built().map_err(text)?;
    let batch = model.batch();
    independent(time, batch, |index| -> CandleResult<()> {
        let start = index % BATCHES * batch;
        let logits = net.forward(&x.narrow(0, start, batch)?)?;
        let targets = y.narrow(0, start, batch)?.flatten_all()?;
        optimizer.backward_step(&candle_nn::loss::cross_entropy(&logits, &targets)?)
    })
}

/// After how many steps an arrangement compares its parameters, where that is not left to the default.
fn audit_every(arrangement: &str) -> Option<u64> {
    match arrangement {
        name if name.ends_with("never") => Some(0),
        name if name.ends_with("always") => Some(1),
        _ => None,
    }
}

fn ours(strategy: &Strategy, model: Model, time: Duration, arrangement: &str) -> Result<Measured, String> {
    // An elastic strategy trains by itself until it joins the others.
    let members = strategy.elastic().map_or(strategy.num_replicas_in_sync(), |members| *members.end() as usize);
    let global_batch = model.batch() * members;
    let per_example = if model == Model::Transformer { TOKENS } else { 1 };
    let built = || -> distribute::Result<_> {
        let data = Dataset::from_tensor_slices(data(model, global_batch)?).batch(global_batch).repeat_forever();
        let net = strategy.scope(|vb| Net::new(model, &vb))?;
        let optimizer = Adam::new(1e-3).build(&net)?.sparse_gradients(match arrangement {
            name if name.ends_with("whole") => SparseGradients::Whole,
            _ => SparseGradients::Rows,
        });
        let optimizer = match audit_every(arrangement) {
            Some(steps) => optimizer.audit_every(steps),
            None => optimizer,
        };
        Ok((net, optimizer, strategy.distribute_dataset(&data)?))
    };
    let (net, optimizer, batches) = built().map_err(text)?;
    if strategy.elastic().is_some() {
        elastic::join::<Steps>(strategy, &[&net, &optimizer], None).map_err(text)?;
    }
    let mut batches = batches.iter();
    let samples_per_s = in_step(strategy, time, global_batch, |_| -> distribute::Result<()> {
        let Some(batch) = batches.next() else { return Ok(()) };
        strategy.run((&net, &optimizer, batch?), |ctx, (net, optimizer, (x, y))| {
            let losses = cross_entropy_per_example(&net.forward(&x)?, &y.flatten_all()?)?;
            Ok(optimizer.minimize(ctx, &ctx.average_loss(&losses, global_batch * per_example)?)?)
        })?;
        Ok(())
    })?;
    Ok(Measured::of(samples_per_s, optimizer.times()))
}

/// The state of an elastic training that no process joins later.
#[derive(Serialize, Deserialize)]
struct Steps;

impl Standing for Steps {
    fn commits(&self) -> u64 {
        0
    }
}

/// The same training without a loop of its own; with checkpoints, if wanted, every 50 steps.
fn fit(strategy: &Strategy, time: Duration, checkpoints: bool) -> distribute::Result<Measured> {
    let folder = tempfile::tempdir().map_err(Error::program)?;
    let global_batch = Model::Mlp.batch() * strategy.num_replicas_in_sync();
    let data = Dataset::from_tensor_slices(data(Model::Mlp, global_batch)?).batch(global_batch);
    let adam = |model: &_| Adam::new(1e-3).build(model);
    let metrics = distribute::train::metrics::Metrics::new();
    let mut trainer = Trainer::new(strategy, |vb| Mlp::new(&vb), adam, SparseCategoricalCrossentropy, metrics)?;
    let mut run = |passes: usize| -> distribute::Result<Duration> {
        let started = Instant::now();
        let fit = match checkpoints {
            true => Fit::epochs(1).callback(ModelCheckpoint::new(folder.path()).every_steps(50).keep(2)),
            false => Fit::epochs(1),
        };
        trainer.fit(&data.clone().repeat(passes), fit)?;
        Ok(started.elapsed())
    };
    run(2)?;
    let estimate = run(2)?.as_secs_f64() / 2.0;
    let passes = ((time.as_secs_f64() / estimate) as usize).max(2);
    let samples_per_s = (passes * BATCHES * global_batch) as f64 / run(passes)?.as_secs_f64();
    Ok(Measured::of(samples_per_s, trainer.optimizer().times()))
}
