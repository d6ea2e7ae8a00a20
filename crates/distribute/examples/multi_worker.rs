//! One program in several processes: `cargo run --release -p distribute --example multi_worker`
//!
//! A single process trains alone. As two processes on this machine: `distribute run --workers 2 --
//! target/release/examples/multi_worker`; as a TFJob or manually on any machines: with TF_CONFIG. If a worker gets
//! SIGTERM, all save and end with exit code 143; if one is lost, the others end with 138. In both cases the job manager
//! restarts the same command.

use std::path::PathBuf;
use std::process::ExitCode;

use candle_core::{Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use clap::Parser;
use distribute::candle::Model;
use distribute::cluster::Membership;
use distribute::input::InputPosition;
use distribute::prelude::*;
use distribute::train::preemption::{PreemptionHandler, TerminationConfig};
use distribute::train::progress::{Options, Progress, Summary};
use distribute_testkit::digits::{Digits, PIXELS, Split};
use serde::{Deserialize, Serialize};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains on handwritten digits in all processes of the job.
#[derive(Parser)]
struct Flags {
    /// Devices of each process, such as CPU:0,CPU:1.
    #[arg(long, value_delimiter = ',', default_value = "CPU:0")]
    devices: Vec<String>,
    /// Saves checkpoints in this folder of the chief's, and resumes from the newest one in it.
    #[arg(long)]
    checkpoints: Option<PathBuf>,
    /// Passes over the training data.
    #[arg(long, default_value_t = 3)]
    epochs: u32,
    /// Per-replica batch: examples per step of each replica.
    #[arg(long, default_value_t = 64)]
    per_replica: usize,
}

/// The state that a checkpoint keeps in addition to the model and the optimizer.
#[derive(Default, Serialize, Deserialize)]
struct Standing {
    epochs_done: u32,
    position: Option<InputPosition>,
}

struct Mlp(Linear, Linear);

impl Mlp {
    fn new(vb: VarBuilder<'_>) -> CandleResult<Mlp> {
        Ok(Mlp(linear(PIXELS, 128, vb.pp("fc1"))?, linear(128, 10, vb.pp("fc2"))?))
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        self.1.forward(&self.0.forward(x)?.relu()?)
    }
}

fn main() -> ExitCode {
    distribute::init_logging();
    distribute::exit(train(&Flags::parse()))
}

fn train(flags: &Flags) -> distribute::Result<()> {
    if Membership::from_env()?.is_none() {
        eprintln!("alone; as two processes: distribute run --workers 2 -- target/release/examples/multi_worker");
    }
    // From TF_CONFIG; without it, the only worker.
    let strategy = MultiWorkerMirroredStrategy::builder().devices(flags.devices.clone()).build()?;
    // A failure of this worker alone, such as a full disk, is reported to the others.
    strategy.report_failure(train_under(&strategy, flags))
}

fn train_under(strategy: &Strategy, flags: &Flags) -> distribute::Result<()> {
    // The global batch grows with the number of replicas, so that each has enough work.
    let global_batch = flags.per_replica * strategy.num_replicas_in_sync();
    let digits = Digits::standard();
    let train = tensors(&digits.train)?.shuffle(digits.train.len(), 42).batch(global_batch).prefetch(AUTOTUNE);
    let (train, test) =
        (strategy.distribute_dataset(&train)?, strategy.distribute_dataset(&tensors(&digits.test)?.batch(1000))?);
    let model = strategy.scope(Mlp::new)?;
    let optimizer = Adam::new(1e-3).build(&model)?;

    let mut checkpoints = flags.checkpoints.as_ref().map(|folder| CheckpointManager::new(folder).keep(3));
    let restored = match &mut checkpoints {
        Some(checkpoints) => checkpoints.restore(strategy, &[&model, &optimizer])?,
        None => None,
    };
    let (mut step, mut standing): (u64, Standing) = restored.unwrap_or_default();
    if step > 0 && strategy.is_chief() {
        eprintln!("resuming after step {step}");
    }
    let preemption = PreemptionHandler::install(strategy, TerminationConfig::default())?;
    let mut progress = start_progress(strategy, flags.epochs, train.steps())?;

    for epoch in standing.epochs_done + 1..=flags.epochs {
        progress.epoch(epoch);
        let mut batches = match standing.position.take() {
            Some(position) => train.iter_from(&position)?,
            // The pass is chosen by its number, so that a resumed run reads the same data.
            None => train.iter_epoch(u64::from(epoch) - 1),
        };
        let (mut sum, mut examples, mut steps) = (0.0, 0, 0);
        while let Some(batch) = batches.next() {
            let seen = strategy.run((&model, &optimizer, batch?), |ctx, (model, optimizer, (x, y))| {
                let loss = ctx.average_loss(&cross_entropy_per_example(&model.forward(&x)?, &y)?, global_batch)?;
                optimizer.minimize(ctx, &loss)?;
                Ok((loss.detach(), x.dim(0)? as u64))
            })?;
            // Each example counts once, also in a short last batch.
            let (loss, rows) = strategy.reduce(ReduceOp::Sum, &seen, Axis::None)?;
            sum += f64::from(loss.to_scalar::<f32>()?) * global_batch as f64;
            (step, steps, examples) = (step + 1, steps + 1, examples + rows);
            progress.step(steps, global_batch as u64, &[("loss", sum / examples as f64)]);
            // The answer is the same on all workers.
            let stop = preemption.should_stop();
            if let Some(checkpoints) = checkpoints.as_mut().filter(|_| stop || step % 50 == 0) {
                standing.position = Some(batches.position()?);
                checkpoints.save(strategy, step, &[&model, &optimizer], &standing)?;
            }
            if stop {
                checkpoints.as_mut().map_or(Ok(()), |checkpoints| checkpoints.finish_everywhere(strategy))?;
                return Err(preemption.ended(step).into());
            }
        }
        standing = Standing { epochs_done: epoch, position: None };
        progress.end_epoch(&[("test_accuracy", accuracy(strategy, &model, &test)?)]);
    }
    if let Some(checkpoints) = &mut checkpoints {
        checkpoints.save(strategy, step, &[&model, &optimizer], &standing)?;
        checkpoints.finish()?;
    }
    let test_accuracy = Some(accuracy(strategy, &model, &test)?);
    let replicas = strategy.num_replicas_in_sync() as u32;
    let extra = vec![("workers".to_owned(), strategy.topology().workers().to_string())];
    progress.finish(&Summary { test_accuracy, replicas, extra, ..Summary::default() });
    Ok(())
}

/// Computes the share of test digits that are classified correctly; every replica of every worker evaluates its part.
fn accuracy(
    strategy: &Strategy,
    model: &Model<Mlp>,
    test: &distribute::strategy::DistributedDataset<(Tensor, Tensor)>,
) -> distribute::Result<f64> {
    let (mut correct, mut all) = (0.0, 0.0);
    for batch in test {
        let counts = strategy.run((model, batch?), |_, (model, (x, y))| {
            let hits = model.forward(&x)?.argmax(1)?.eq(&y)?.to_vec1::<u8>()?;
            Ok(vec![hits.iter().map(|hit| f64::from(*hit)).sum(), hits.len() as f64])
        })?;
        let counts = strategy.reduce(ReduceOp::Sum, &counts, Axis::None)?;
        (correct, all) = (correct + counts[0], all + counts[1]);
    }
    Ok(correct / f64::max(all, 1.0))
}

/// Starts the progress display, which the chief alone shows.
fn start_progress(strategy: &Strategy, epochs: u32, steps: Option<usize>) -> distribute::Result<Progress> {
    let title = format!("multi_worker · {}", strategy.describe());
    let steps_per_epoch = steps.map(|steps| steps as u64);
    Ok(Progress::from_env(Options { title, epochs, steps_per_epoch, ..Options::of(strategy) })?)
}

fn tensors(split: &Split) -> distribute::Result<Dataset<(Tensor, Tensor)>> {
    let images = Tensor::from_slice(&split.images, (split.len(), PIXELS), &Device::Cpu)?;
    Ok(Dataset::from_tensor_slices((images, Tensor::from_slice(&split.labels, split.len(), &Device::Cpu)?)))
}
