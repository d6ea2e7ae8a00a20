//! Models of burn.

use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::activation::{gelu, log_softmax, relu};
use burn::tensor::{Device, Int, Tensor};
use distribute::input::Array;
use distribute::optim::StepTimes;
use distribute::prelude::{Dataset, Strategy};
use distribute::train::metrics::Metrics;
use distribute_burn::{
    Adam, BurnContext, BurnStrategy, Error, Fit, Inputs as Tensors, Loss, SparseCategoricalCrossentropy, Targets,
    Trainer, TrainingData,
};

use super::data::{self, BATCHES, TOKENS, VOCABULARY};
use super::{Round, Speed, in_step, independent, strategy_of};
use crate::error::text;

#[derive(Module, Debug)]
struct Mlp {
    layers: Vec<Linear>,
}

impl Mlp {
    fn new(widths: &[usize], device: &Device) -> Mlp {
        Mlp { layers: widths.windows(2).map(|pair| LinearConfig::new(pair[0], pair[1]).init(device)).collect() }
    }

    fn forward(&self, mut x: Tensor<2>) -> Tensor<2> {
        for (at, layer) in self.layers.iter().enumerate() {
            x = layer.forward(x);
            if at + 1 < self.layers.len() {
                x = relu(x);
            }
        }
        x
    }
}

#[derive(Module, Debug)]
struct Cnn {
    convolutions: Vec<Conv2d>,
    pool: MaxPool2d,
    head: Linear,
}

impl Cnn {
    fn new(device: &Device) -> Cnn {
        let convolution = |channels: [usize; 2]| {
            Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1)).init(device)
        };
        Cnn {
            convolutions: vec![convolution([1, 16]), convolution([16, 32])],
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            head: LinearConfig::new(32 * 49, 10).init(device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let rows = x.dims()[0];
        let mut x = x.reshape([rows, 1, 28, 28]);
        for convolution in &self.convolutions {
            x = self.pool.forward(relu(convolution.forward(x)));
        }
        self.head.forward(x.reshape([rows, 32 * 49]))
    }
}

const WIDTH: usize = 128;
const HEADS: usize = 4;

#[derive(Module, Debug)]
struct Block {
    norms: Vec<LayerNorm>,
    attention: MultiHeadAttention,
    up: Linear,
    down: Linear,
}

#[derive(Module, Debug)]
struct Transformer {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Transformer {
    fn new(device: &Device) -> Transformer {
        let norm = || LayerNormConfig::new(WIDTH).init(device);
        let block = |_| Block {
            norms: vec![norm(), norm()],
            attention: MultiHeadAttentionConfig::new(WIDTH, HEADS).with_dropout(0.0).init(device),
            up: LinearConfig::new(WIDTH, 4 * WIDTH).init(device),
            down: LinearConfig::new(4 * WIDTH, WIDTH).init(device),
        };
        Transformer {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            positions: EmbeddingConfig::new(TOKENS, WIDTH).init(device),
            blocks: (0..2).map(block).collect(),
            norm: norm(),
            head: LinearConfig::new(WIDTH, VOCABULARY).init(device),
        }
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let (rows, device) = (tokens.dims()[0], tokens.device());
        let positions =
            self.positions.forward(Tensor::<1, Int>::arange(0..TOKENS as i64, &device).reshape([1, TOKENS]));
        let mut x = self.tokens.forward(tokens) + positions;
        let mask = generate_autoregressive_mask(rows, TOKENS, &device);
        for block in &self.blocks {
            let input = MhaInput::self_attn(block.norms[0].forward(x.clone())).mask_attn(mask.clone());
            x = x + block.attention.forward(input).context;
            x = x.clone() + block.down.forward(gelu(block.up.forward(block.norms[1].forward(x))));
        }
        // One row for each token.
        self.head.forward(self.norm.forward(x)).reshape([rows * TOKENS, VOCABULARY])
    }
}

#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one of them on each replica")]
enum Net {
    Mlp(Mlp),
    Cnn(Cnn),
    Transformer(Transformer),
}

#[derive(Clone)]
enum Inputs {
    Numbers(Tensor<2>),
    Tokens(Tensor<2, Int>),
}

impl Net {
    fn new(model: super::Model, device: &Device) -> Net {
        match model {
            super::Model::Mlp => Net::Mlp(Mlp::new(&[784, 256, 128, 10], device)),
            super::Model::Cnn => Net::Cnn(Cnn::new(device)),
            super::Model::Transformer => Net::Transformer(Transformer::new(device)),
            super::Model::Embedding | super::Model::Resnet | super::Model::Wide => {
                let mut widths = [data::WIDTH; 6];
                widths[5] = 10;
                Net::Mlp(Mlp::new(&widths, device))
            }
        }
    }

    fn forward(&self, x: Inputs) -> Tensor<2> {
        match (self, x) {
            (Net::Mlp(model), Inputs::Numbers(x)) => model.forward(x),
            (Net::Cnn(model), Inputs::Numbers(x)) => model.forward(x),
            (Net::Transformer(model), Inputs::Tokens(x)) => model.forward(x),
            (_, Inputs::Numbers(x)) => x,
            (_, Inputs::Tokens(x)) => x.float(),
        }
    }
}

pub(super) fn run(arrangement: &str, model: super::Model, time: Duration) -> Result<Round, String> {
    match arrangement {
        "independent" => plain(model, time),
        name @ ("fit" | "tpu-fit") => fitted(&strategy_of(name)?, model, time, 1),
        name @ "tpu-fit-many" => fitted(&strategy_of(name)?, model, time, 8),
        "tpu" => in_programs(&strategy_of("tpu")?, model, time),
        name => ours(&strategy_of(name)?, model, time, name == "mirrored-own"),
    }
}

/// Returns the number of batches that are repeated.
fn count(model: super::Model) -> usize {
    if model == super::Model::Wide { 2 } else { BATCHES }
}

/// Returns the batches of one replica.
fn batches(model: super::Model, replica: usize, device: &Device) -> Vec<(Inputs, Tensor<1, Int>)> {
    let (batch, count) = (model.batch(), count(model));
    let rows = batch * count;
    let signed = |all: &[u32]| all.iter().map(|x| *x as i32).collect::<Vec<i32>>();
    (0..count)
        .map(|at| {
            let at = (at + replica) % count;
            let targets = |all: &[u32], per_row: usize| {
                Tensor::<1, Int>::from_ints(&signed(&all[at * batch * per_row..][..batch * per_row])[..], device)
            };
            if model == super::Model::Transformer {
                let (tokens, next) = data::sequences(rows);
                let tokens = targets(&tokens, TOKENS).reshape([batch, TOKENS]);
                return (Inputs::Tokens(tokens), targets(&next, TOKENS));
            }
            let width = if model == super::Model::Wide { data::WIDTH } else { 784 };
            let pixels = data::pixels(rows * width);
            let x = Tensor::<1>::from_floats(&pixels[at * batch * width..][..batch * width], device);
            (Inputs::Numbers(x.reshape([batch, width])), targets(&data::labels(rows), 1))
        })
        .collect()
}

/// Trains without distribution: burn's own loss and AdamW.
fn plain(model: super::Model, time: Duration) -> Result<Round, String> {
    let device = Device::flex().autodiff();
    let batches = batches(model, 0, &device);
    let loss = CrossEntropyLossConfig::new().init(&device);
    let mut optimizer: ModuleOptimizer = own();
    let mut net = Some(Net::new(model, &device));
    independent(time, model.batch(), |index| -> Result<(), String> {
        let (x, y) = batches[index % batches.len()].clone();
        let current = net.take().ok_or("the model is gone")?;
        let gradients = loss.forward(current.forward(x), y).backward();
        let gradients = GradientsParams::from_grads(gradients, &current);
        net = Some(optimizer.step(1e-3, current, gradients));
        Ok(())
    })
}

fn own() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.0).init()
}

fn ours(strategy: &Strategy, model: super::Model, time: Duration, with_own: bool) -> Result<Round, String> {
    let replicas = strategy.num_replicas_in_sync();
    let global_batch = model.batch() * replicas;
    let rows = if model == super::Model::Transformer { global_batch * TOKENS } else { global_batch };
    let net = strategy.scope(|device| Net::new(model, device)).map_err(text)?;
    let optimizer = match with_own {
        true => net.optimizer(own(), 1e-3, "AdamW"),
        false => Adam::new(1e-3).build(&net),
    };
    let optimizer = optimizer.map_err(text)?;
    let device = Device::flex().autodiff();
    let first = strategy.topology().first_replica();
    let of_replicas: Vec<_> =
        (0..strategy.num_local_replicas()).map(|local| batches(model, first + local, &device)).collect();
    let speed = in_step(strategy, time, global_batch, |index| {
        strategy
            .run_with((&net, &optimizer), |context, (net, optimizer)| {
                let batches = &of_replicas[context.local_replica_id()];
                let (x, y) = batches[index % batches.len()].clone();
                let logits = net.forward(x);
                let losses = log_softmax(logits, 1).gather(1, y.unsqueeze_dim(1)).neg();
                optimizer.minimize(context, &context.average_loss(losses, rows))?;
                Ok::<_, Error>(())
            })
            .map(drop)
    })?;
    Ok(Round::of(speed, optimizer.times()))
}

/// The inputs and the targets of some batches, in arrays.
enum Arrays {
    Numbers(Array<f32>, Array<u32>),
    Tokens(Array<u32>, Array<u32>),
}

/// Returns the examples of this many batches.
fn arrays(model: super::Model, batch: usize, count: usize) -> distribute::Result<Arrays> {
    let rows = batch * count;
    if model == super::Model::Transformer {
        let (tokens, next) = data::sequences(rows);
        return Ok(Arrays::Tokens(Array::new([rows, TOKENS], tokens)?, Array::new([rows, TOKENS], next)?));
    }
    let width = if model == super::Model::Wide { data::WIDTH } else { 784 };
    Ok(Arrays::Numbers(Array::new([rows, width], data::pixels(rows * width))?, Array::from(data::labels(rows))))
}

/// Trains by a loop whose steps are compiled programs.
fn in_programs(strategy: &Strategy, model: super::Model, time: Duration) -> Result<Round, String> {
    let global_batch = model.batch() * strategy.num_replicas_in_sync();
    let rows = if model == super::Model::Transformer { global_batch * TOKENS } else { global_batch };
    let net = strategy.scope(|device| Net::new(model, device)).map_err(text)?;
    let optimizer = Adam::new(1e-3).build(&net).map_err(text)?;
    let examples = arrays(model, model.batch(), 1).map_err(text)?;
    let speed = in_step(strategy, time, global_batch, |_| {
        let step = strategy.run_step((&net, &optimizer), |context, (net, optimizer)| {
            let (x, y) = match &examples {
                Arrays::Numbers(x, y) => (Inputs::Numbers(context.tensor(x)?), context.int_tensor::<1>(y)?),
                Arrays::Tokens(x, y) => {
                    let y = context.int_tensor::<2>(y)?;
                    (Inputs::Tokens(context.int_tensor(x)?), y.flatten::<1>(0, 1))
                }
            };
            let losses = log_softmax(net.forward(x), 1).gather(1, y.unsqueeze_dim(1)).neg();
            optimizer.minimize(context, &context.average_loss(losses, rows))?;
            Ok::<_, Error>(())
        });
        step.map(drop)
    })?;
    Ok(Round::of(speed, optimizer.times()))
}

/// Trains by `Trainer::fit`.
fn fitted(strategy: &Strategy, model: super::Model, time: Duration, steps: usize) -> Result<Round, String> {
    let global_batch = model.batch() * strategy.num_replicas_in_sync();
    let (batches, settings) = (count(model), (time, steps, global_batch));
    let rate = match arrays(model, global_batch, batches).map_err(text)? {
        Arrays::Numbers(x, y) => {
            let data = Dataset::from_tensor_slices((x, y)).batch(global_batch);
            fit::<Tensor<2>, Tensor<1, Int>, _, 2>(
                strategy,
                (model, |net, x| net.forward(Inputs::Numbers(x))),
                (batches, |passes| data.clone().repeat(passes)),
                settings,
            )
        }
        Arrays::Tokens(x, y) => {
            let data = Dataset::from_tensor_slices((x, y)).batch(global_batch);
            let forward = |net: &Net, x: Tensor<2, Int>| {
                let rows = x.dims()[0];
                net.forward(Inputs::Tokens(x)).reshape([rows, TOKENS, VOCABULARY])
            };
            fit::<Tensor<2, Int>, Tensor<2, Int>, _, 3>(
                strategy,
                (model, forward),
                (batches, |passes| data.clone().repeat(passes)),
                settings,
            )
        }
    };
    let speed = Speed { samples_per_s: rate.map_err(text)?, first_step_s: None };
    Ok(Round::of(speed, StepTimes::default()))
}

/// Returns the samples per second of a trainer. `data` returns some passes over a number of batches.
fn fit<X: Tensors, Y: Targets, T: TrainingData<X, Y>, const D: usize>(
    strategy: &Strategy,
    (model, forward): (super::Model, fn(&Net, X) -> Tensor<D>),
    (batches, data): (usize, impl Fn(usize) -> T),
    (time, steps, global_batch): (Duration, usize, usize),
) -> distribute_burn::Result<f64>
where
    SparseCategoricalCrossentropy: Loss<D, Y>,
{
    let adam = |model: &_| Adam::new(1e-3).build(model);
    let loss = SparseCategoricalCrossentropy;
    let new = |device: &Device| Net::new(model, device);
    let mut trainer = Trainer::new(strategy, new, forward, adam, loss, Metrics::new())?;
    let mut run = |passes: usize| -> distribute_burn::Result<f64> {
        let started = Instant::now();
        trainer.fit(&data(passes), Fit::epochs(1).steps_per_execution(steps))?;
        Ok(started.elapsed().as_secs_f64())
    };
    run(2)?;
    let estimate = run(2)? / 2.0;
    let passes = ((time.as_secs_f64() / estimate) as usize).max(2);
    Ok((passes * batches * global_batch) as f64 / run(passes)?)
}
