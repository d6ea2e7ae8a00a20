//! Models of candle.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result as CandleResult, Tensor};
use candle_nn::{VarBuilder, VarMap};
use distribute::Error;
use distribute::candle::{Fit, SparseCategoricalCrossentropy};
use distribute::optim::SparseGradients;
use distribute::prelude::*;
use distribute::train::callbacks::ModelCheckpoint;
use distribute::train::elastic::{self, Standing};
use serde::{Deserialize, Serialize};

use super::data::{self, BATCHES, TOKENS};
use super::{Model, Round, Speed, in_step, independent, strategy_of};
use crate::error::text;

mod models;

use models::{Net, Ours, Plain};

pub(crate) type Mlp = models::Mlp<Ours>;

pub(super) fn run(arrangement: &str, model: Model, time: Duration) -> Result<Round, String> {
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
        _ => {
            let pixels = if model == Model::Resnet { 3 * 32 * 32 } else { 784 };
            let pictures = Tensor::from_vec(data::pixels(rows * pixels), (rows, pixels), cpu)?;
            (pictures, Tensor::from_vec(data::labels(rows), rows, cpu)?)
        }
    })
}

/// Trains without distribution: candle's own layers, loss and AdamW.
fn plain(model: Model, time: Duration) -> Result<Round, String> {
    use candle_nn::Optimizer as _;
    let built = || -> CandleResult<_> {
        let variables = VarMap::new();
        let net = Net::<Plain>::new(model, &VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
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

fn ours(strategy: &Strategy, model: Model, time: Duration, arrangement: &str) -> Result<Round, String> {
    // An elastic strategy trains by itself until it joins the others.
    let members = strategy.elastic().map_or(strategy.num_replicas_in_sync(), |members| *members.end() as usize);
    let global_batch = model.batch() * members;
    let per_example = if model == Model::Transformer { TOKENS } else { 1 };
    let built = || -> distribute::Result<_> {
        let data = Dataset::from_tensor_slices(data(model, global_batch)?).batch(global_batch).repeat_forever();
        let net = strategy.scope(|vb| Net::<Ours>::new(model, &vb))?;
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
    let speed = in_step(strategy, time, global_batch, |_| -> distribute::Result<()> {
        let Some(batch) = batches.next() else { return Ok(()) };
        strategy.run((&net, &optimizer, batch?), |ctx, (net, optimizer, (x, y))| {
            let losses = cross_entropy_per_example(&net.forward(&x)?, &y.flatten_all()?)?;
            Ok(optimizer.minimize(ctx, &ctx.average_loss(&losses, global_batch * per_example)?)?)
        })?;
        Ok(())
    })?;
    Ok(Round::of(speed, optimizer.times()))
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
fn fit(strategy: &Strategy, time: Duration, checkpoints: bool) -> distribute::Result<Round> {
    let folder = tempfile::tempdir().map_err(Error::program)?;
    let global_batch = Model::Mlp.batch() * strategy.num_replicas_in_sync();
    let data = Dataset::from_tensor_slices(data(Model::Mlp, global_batch)?).batch(global_batch);
    let adam = |model: &_| Adam::new(1e-3).build(model);
    let metrics = distribute::train::metrics::Metrics::new();
    let mut trainer = Trainer::new(strategy, |vb| Mlp::new(&vb), adam, SparseCategoricalCrossentropy, metrics)?;
    let mut runs = 0;
    let mut run = |passes: usize| -> distribute::Result<Duration> {
        // Each is a training of its own, so it saves in a folder of its own.
        runs += 1;
        let folder = folder.path().join(runs.to_string());
        let started = Instant::now();
        let fit = match checkpoints {
            true => Fit::epochs(1).callback(ModelCheckpoint::new(folder).every_steps(50).keep(2)),
            false => Fit::epochs(1),
        };
        trainer.fit(&data.clone().repeat(passes), fit)?;
        Ok(started.elapsed())
    };
    run(2)?;
    let estimate = run(2)?.as_secs_f64() / 2.0;
    let passes = ((time.as_secs_f64() / estimate) as usize).max(2);
    let samples_per_s = (passes * BATCHES * global_batch) as f64 / run(passes)?.as_secs_f64();
    Ok(Round::of(Speed { samples_per_s, first_step_s: None }, trainer.optimizer().times()))
}
