//! Parameter servers, and a loop that schedules steps on workers.
//!
//! ```text
//! cargo build --release -p distribute-cli
//! cargo build --release -p distribute --features parameter-server --example parameter_server
//! target/release/distribute run --ps 2 --workers 3 -- target/release/examples/parameter_server
//! ```
//!
//! Every task runs the same program: servers hold the variables, workers compute gradients, and the chief schedules
//! steps and evaluates the model. If a worker is killed while it trains, its steps run again on another worker. The
//! program also runs as a TFJob without changes. An evaluator, which is not part of the cluster, evaluates the
//! checkpoints.

#![expect(clippy::print_stdout, reason = "an example says what it has found")]

use std::path::PathBuf;
use std::process::ExitCode;

use candle_core::{Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use clap::{Parser, ValueEnum};
use distribute::parameter_server::{Program, RemoteValue, Server, Updates};
use distribute::prelude::*;
use distribute::train::checkpoint::{Checkpointed, SidecarEvaluator};
use distribute::train::progress::{Options, Progress, Summary};
use distribute_testkit::digits::{Digits, PIXELS, Split};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains on handwritten digits with parameter servers.
#[derive(Parser)]
struct Flags {
    /// Passes over the training data.
    #[arg(long, default_value_t = 3)]
    epochs: u32,
    /// How the workers' updates are synchronized.
    #[arg(long, default_value = "async")]
    updates: How,
    /// Saves checkpoints in this folder, resumes from the newest one, and restores servers from it.
    #[arg(long)]
    checkpoints: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum How {
    /// Each gradient is applied when it arrives.
    Async,
    /// No worker is more than one round ahead.
    Stale,
    /// Each step applies the mean of all workers' gradients.
    Sync,
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

const BATCH: usize = 64;

/// Runs one step on any free worker.
fn train_step(worker: &WorkerContext, data: PerWorkerIterator<(Tensor, Tensor)>) -> distribute::Result<f32> {
    let (x, y) = worker.next(&data)?;
    let model = worker.model("mlp", Mlp::new)?;
    let loss = cross_entropy_per_example(&model.forward(&x)?, &y)?.mean_all()?;
    model.minimize(&loss)?;
    Ok(loss.to_scalar()?)
}

/// Every worker reads all digits, each in its own order.
fn digits(context: &InputContext) -> distribute::Result<Dataset<(Tensor, Tensor)>> {
    let train = tensors(&Digits::standard().train)?;
    Ok(train.shuffle(10_000, context.input_pipeline_id as u64).batch(BATCH).repeat_forever().prefetch(2))
}

fn main() -> ExitCode {
    distribute::init_logging();
    distribute::exit(run(&Flags::parse()))
}

fn run(flags: &Flags) -> distribute::Result<()> {
    let cluster = TfConfigResolver::from_env()?;
    let program = Program::new().function("train_step", train_step).dataset("digits", digits);
    match cluster.task_type() {
        Some(TaskType::Worker | TaskType::Ps) => Ok(Server::start(&cluster, program)?.join()?),
        Some(TaskType::Evaluator) => evaluate(flags),
        _ => coordinate(flags, &cluster, program),
    }
}

fn coordinate(flags: &Flags, cluster: &TfConfigResolver, program: Program) -> distribute::Result<()> {
    let workers = cluster.cluster_spec()?.num_tasks(TaskType::Worker);
    let updates = match flags.updates {
        How::Async => Updates::Asynchronous,
        How::Stale => Updates::BoundedStaleness { rounds: 1 },
        How::Sync => Updates::Synchronous { contributions: workers, backups: 0 },
    };
    let mut builder =
        ParameterServerStrategy::builder(cluster).partitioner(MinSizePartitioner::new(256 << 10, 2)).updates(updates);
    if let Some(folder) = &flags.checkpoints {
        builder = builder.restore_servers_from(folder);
    }
    let strategy = builder.build()?;
    strategy.create_model(Adam::new(1e-3), Mlp::new)?;
    // The chief's own work, such as saving, is done in one process.
    let here = Strategy::default_strategy()?;
    let mut checkpoints = flags.checkpoints.as_ref().map(|folder| CheckpointManager::new(folder).keep(3));
    let restored = match &mut checkpoints {
        Some(checkpoints) => checkpoints.restore::<u32>(&here, &[&strategy])?,
        None => None,
    };
    let done = restored.map_or(0, |(_, epochs)| epochs);

    let digits = Digits::standard();
    let steps = (digits.train.len() / BATCH) as u64;
    let title = format!("parameter_server · {workers} workers · {} servers", strategy.num_servers());
    let mut progress = Progress::from_env(Options {
        title,
        epochs: flags.epochs,
        steps_per_epoch: Some(steps),
        ..Options::default()
    })?;
    let coordinator = ClusterCoordinator::new(&strategy, program)?;
    let data = coordinator.create_per_worker_dataset::<(Tensor, Tensor)>("digits")?.iter();
    // The model is evaluated with the values that are on the servers now.
    let judge = || accuracy(&strategy.read_model(Mlp::new)?, &digits.test);
    let mut test_accuracy = judge()?;
    for epoch in done + 1..=flags.epochs {
        progress.epoch(epoch);
        let losses: Vec<RemoteValue> =
            (0..steps).map(|_| coordinator.schedule("train_step", &data)).collect::<Result<_, _>>()?;
        let mut sum = 0.0;
        for (step, loss) in (1..).zip(&losses) {
            // The function's own error is returned by `join`, once.
            let Ok(loss) = loss.fetch::<f32>() else { break };
            sum += f64::from(loss);
            progress.step(step, BATCH as u64, &[("loss", sum / step as f64)]);
        }
        coordinator.join()?;
        test_accuracy = judge()?;
        progress.end_epoch(&[("test_accuracy", test_accuracy)]);
        if let Some(checkpoints) = &mut checkpoints {
            checkpoints.save(&here, steps * u64::from(epoch), &[&strategy], &epoch)?;
        }
    }
    checkpoints.map_or(Ok(()), |mut checkpoints| checkpoints.finish())?;
    progress.finish(&Summary { test_accuracy: Some(test_accuracy), replicas: workers as u32, ..Summary::default() });
    Ok(())
}

/// Evaluates every checkpoint, independently of the cluster.
fn evaluate(flags: &Flags) -> distribute::Result<()> {
    let Some(folder) = &flags.checkpoints else {
        return Err(distribute::Error::program(
            "the evaluator reads checkpoints; give every task --checkpoints FOLDER",
        ));
    };
    let (here, digits) = (Strategy::default_strategy()?, Digits::standard());
    let model = here.scope(Mlp::new)?;
    let last = u64::from(flags.epochs) * (digits.train.len() / BATCH) as u64;
    SidecarEvaluator::new(folder).until_step(last).run(|snapshot| {
        model.load(&here, snapshot).map_err(distribute::Error::program)?;
        println!("step {}: test accuracy {:.2} %", snapshot.step(), 100.0 * accuracy(model.first(), &digits.test)?);
        Ok(())
    })
}

/// Computes the share of test digits that a model classifies correctly.
fn accuracy(model: &Mlp, test: &Split) -> distribute::Result<f64> {
    let images = Tensor::from_slice(&test.images, (test.len(), PIXELS), &Device::Cpu)?;
    let labels = Tensor::from_slice(&test.labels, test.len(), &Device::Cpu)?;
    let hits = model.forward(&images)?.argmax(1)?.eq(&labels)?.to_vec1::<u8>()?;
    Ok(hits.iter().map(|hit| f64::from(*hit)).sum::<f64>() / test.len() as f64)
}

fn tensors(split: &Split) -> distribute::Result<Dataset<(Tensor, Tensor)>> {
    let images = Tensor::from_slice(&split.images, (split.len(), PIXELS), &Device::Cpu)?;
    Ok(Dataset::from_tensor_slices((images, Tensor::from_slice(&split.labels, split.len(), &Device::Cpu)?)))
}
