//! Handwritten digits on any strategy: `cargo run --release --example mnist -- --devices CPU:0,CPU:1`
//!
//! Two exercises compare trainings, in a table and as a picture: `-- --batch-sweep --plot batches.svg` and `--
//! --compare-one-and-many --devices CPU:0,CPU:1 --plot replicas.svg`.
#![expect(clippy::print_stdout, reason = "it prints comparisons")]

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use candle_core::{Device, Module, Result as CandleResult, Tensor};
use candle_nn::VarBuilder;
use clap::{Parser, ValueEnum};
use distribute::Error;
use distribute::candle::{Conv2d, Linear, Model, conv2d, linear, relu};
use distribute::collectives::Compression;
use distribute::input::InputPosition;
use distribute::prelude::*;
use distribute::train::metrics::{Accuracy, CrossEntropy, Metrics, Predictions, Targets};
use distribute::train::preemption::{PreemptionHandler, TerminationConfig};
use distribute::train::progress::{Options, Progress, Summary};
use distribute::train::tensorboard::EventWriter;
use distribute_testkit::digits::{CLASSES, Digits, PIXELS, SIDE, Split};
use serde::{Deserialize, Serialize};

#[path = "shared/apart.rs"]
mod apart;
#[path = "mnist/exercises.rs"]
mod exercises;
#[path = "shared/idx.rs"]
mod idx;
#[path = "shared/placement.rs"]
mod placement;
#[path = "mnist/plot.rs"]
mod plot;

/// candle allocates megabytes per operation, which the system's allocator returns to the system and requests again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains a classifier of handwritten digits.
#[derive(Clone, Parser)]
struct Flags {
    #[command(flatten)]
    placement: placement::Placement,
    /// Passes over the training data.
    #[arg(long, default_value_t = 5)]
    epochs: u32,
    /// Global batch: examples per step, over all replicas.
    #[arg(long, default_value_t = 128)]
    batch: usize,
    /// The model.
    #[arg(long, value_enum, default_value = "mlp")]
    model: Architecture,
    /// Folder with the MNIST IDX files. Default: generated digits.
    #[arg(long)]
    data: Option<PathBuf>,
    /// Learning rate of Adam.
    #[arg(long, default_value_t = 1e-3)]
    learning_rate: f64,
    /// Compression of gradients: none, f16, bf16, top-k:SHARE or power-sgd:RANK.
    #[arg(long, default_value = "none")]
    compress: Compression,
    /// Shards the optimizer's state over the replicas (ZeRO stage 1).
    #[arg(long)]
    zero1: bool,
    #[command(flatten)]
    apart: apart::Apart,
    /// Saves checkpoints in this folder, and resumes from the newest one in it.
    #[arg(long)]
    checkpoints: Option<PathBuf>,
    /// Steps between checkpoints.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..))]
    checkpoint_every: u64,
    /// Writes event files for TensorBoard to this folder.
    #[arg(long)]
    tensorboard: Option<PathBuf>,
    /// Seed of initial values and of the order of examples.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Writes the loss of every step to this file, one per line.
    #[arg(long)]
    losses: Option<PathBuf>,
    #[command(flatten)]
    exercises: exercises::Exercises,
}

/// The result of a training.
struct Outcome {
    steps: u64,
    training_time: Duration,
    examples_per_s: f64,
    /// On the test digits, 0 to 1.
    accuracy: f64,
}

/// The state of a run in addition to its model and optimizer.
#[derive(Default, Serialize, Deserialize)]
struct Standing {
    epochs_done: u32,
    /// Steps of the current epoch.
    steps: u64,
    loss_sum: f64,
    position: Option<InputPosition>,
    /// The losses of all steps.
    losses: Vec<f32>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Architecture {
    Mlp,
    Cnn,
}

/// The models, which do not depend on distribution.
enum Net {
    Mlp { fc1: Linear, fc2: Linear },
    Cnn { conv1: Conv2d, conv2: Conv2d, fc: Linear },
}

impl Net {
    fn new(architecture: Architecture, vb: &VarBuilder<'_>) -> CandleResult<Net> {
        Ok(match architecture {
            Architecture::Mlp => {
                Net::Mlp { fc1: linear(PIXELS, 128, vb.pp("fc1"))?, fc2: linear(128, 10, vb.pp("fc2"))? }
            }
            Architecture::Cnn => Net::Cnn {
                conv1: conv2d(1, 8, 5, Default::default(), vb.pp("conv1"))?,
                conv2: conv2d(8, 16, 5, Default::default(), vb.pp("conv2"))?,
                fc: linear(16 * 4 * 4, 10, vb.pp("fc"))?,
            },
        })
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        match self {
            Net::Mlp { fc1, fc2 } => fc2.forward(&relu(&fc1.forward(x)?)?),
            Net::Cnn { conv1, conv2, fc } => {
                let x = x.reshape((x.dim(0)?, 1, SIDE, SIDE))?;
                let x = conv2.forward_relu_max_pool(&conv1.forward_relu_max_pool(&x, 2)?, 2)?;
                fc.forward(&x.flatten_from(1)?)
            }
        }
    }
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    distribute::init_logging();
    if flags.exercises.is_chosen() {
        return distribute::exit(flags.exercises.run(&flags));
    }
    let trained = choose(&flags).and_then(|strategy| strategy.report_failure(train(&strategy, &flags)));
    distribute::exit(trained.map(drop))
}

/// Chooses the strategy: the only code that differs between one device and many machines.
fn choose(flags: &Flags) -> distribute::Result<Strategy> {
    flags.apart.over(flags.placement.strategy()?)
}

fn train(strategy: &Strategy, flags: &Flags) -> distribute::Result<Outcome> {
    let digits = match &flags.data {
        Some(folder) => idx::digits(folder)?,
        None => Digits::standard(),
    };
    let train = tensors(&digits.train)?.shuffle(digits.train.len(), flags.seed).batch(flags.batch).prefetch(AUTOTUNE);
    let test = tensors(&digits.test)?.batch(1000);
    let (train, test) = (strategy.distribute_dataset(&train)?, strategy.distribute_dataset(&test)?);
    let model = strategy.scope_seeded(flags.seed, |vb| Net::new(flags.model, &vb))?;
    let optimizer = Adam::new(flags.learning_rate).build(&model)?.compress(flags.compress.clone())?;
    let whole_state = optimizer.state_bytes();
    let optimizer = if flags.zero1 { optimizer.zero1()? } else { optimizer };
    let mut checkpoints = flags.checkpoints.as_ref().map(|folder| CheckpointManager::new(folder).keep(3));
    let restored = match &mut checkpoints {
        Some(checkpoints) => checkpoints.restore(strategy, &[&model, &optimizer])?,
        None => None,
    };
    let (mut steps_done, mut run) = restored.unwrap_or_else(|| (0, Standing::default()));
    let began_at = steps_done;
    if began_at > 0 && strategy.is_chief() {
        eprintln!("resuming after step {began_at}");
    }
    let preemption = match &checkpoints {
        Some(_) => Some(PreemptionHandler::install(strategy, TerminationConfig::default())?),
        None => None,
    };
    let mut boards = match flags.tensorboard.as_ref().filter(|_| strategy.is_chief()) {
        Some(folder) => {
            Some([EventWriter::create(folder.join("train"))?, EventWriter::create(folder.join("validation"))?])
        }
        None => None,
    };
    let mut progress = start_progress(strategy, flags, model.num_parameters(), train.steps())?;
    // A last batch that is short is a part of one.
    let batches_per_epoch = digits.train.len() as f64 / flags.batch as f64;
    let mut accuracy = None;
    let (mut training_time, mut waited, mut seen) = (Duration::ZERO, Duration::ZERO, 0);
    strategy.declare("epochs", flags.epochs);
    for epoch in run.epochs_done + 1..=flags.epochs {
        progress.epoch(epoch);
        let started = Instant::now();
        let mut batches = match run.position.take() {
            Some(position) => train.iter_from(&position)?,
            None => train.iter(),
        };
        while let Some(batch) = batches.next() {
            let losses_of_replicas =
                strategy.run((&model, &optimizer, batch?), |ctx, (model, optimizer, (x, y))| {
                    let per_example = cross_entropy_per_example(&model.forward(&x)?, &y)?;
                    let loss = ctx.average_loss(&per_example, flags.batch)?;
                    optimizer.minimize(ctx, &loss)?;
                    Ok(loss.detach())
                })?;
            let loss = strategy.reduce(ReduceOp::Sum, &losses_of_replicas, Axis::None)?.to_scalar::<f32>()?;
            run.losses.push(loss);
            let rows = flags.batch.min(digits.train.len().saturating_sub(run.steps as usize * flags.batch));
            seen += rows;
            run.steps += 1;
            run.loss_sum += f64::from(loss);
            steps_done += 1;
            let mean = run.loss_sum / batches_per_epoch.min(run.steps as f64);
            progress.step(run.steps, rows as u64, &[("loss", mean)]);
            if let (Some(checkpoints), Some(preemption)) = (&mut checkpoints, &preemption) {
                let stop = preemption.should_stop();
                if stop || steps_done % flags.checkpoint_every == 0 {
                    run.position = Some(batches.position()?);
                    checkpoints.save(strategy, steps_done, &[&model, &optimizer], &run)?;
                }
                if stop {
                    checkpoints.finish_everywhere(strategy)?;
                    return Err(preemption.ended(steps_done).into());
                }
            }
        }
        let loss = run.loss_sum / batches_per_epoch;
        (run.epochs_done, run.steps, run.loss_sum, run.position) = (epoch, 0, 0.0, None);
        training_time += started.elapsed();
        waited += batches.waited();
        optimizer.synchronize(strategy)?;
        let measured = evaluate(strategy, &model, &test)?;
        accuracy = Some(measured[0].1);
        progress.end_epoch(&[("test_accuracy", measured[0].1), ("test_loss", measured[1].1)]);
        if let Some([train, validation]) = &mut boards {
            train.scalar("epoch_loss", u64::from(epoch), loss)?;
            for (name, value) in &measured {
                validation.scalar(&format!("epoch_{name}"), u64::from(epoch), *value)?;
            }
            for variable in model.variables() {
                let values = variable.components()[0].flatten_all()?.to_vec1::<f32>()?;
                train.histogram(variable.name(), u64::from(epoch), values.into_iter().map(f64::from))?;
            }
            train.flush()?;
            validation.flush()?;
        }
    }
    if let Some(checkpoints) = &mut checkpoints {
        checkpoints.finish()?;
    }
    let accuracy = match accuracy {
        Some(accuracy) => accuracy,
        // No epoch was left.
        None => {
            optimizer.synchronize(strategy)?;
            evaluate(strategy, &model, &test)?[0].1
        }
    };
    let (times, steps) = (optimizer.times(), steps_done - began_at);
    let per_second = |amount: f64| (steps > 0).then(|| amount / training_time.as_secs_f64());
    let examples_per_s = per_second(seen as f64);
    let kib = |bytes: usize| bytes.div_ceil(1024);
    let state = format!("{} KiB per replica, of {} KiB", kib(optimizer.state_bytes()), kib(whole_state));
    progress.finish(&Summary {
        test_accuracy: Some(accuracy),
        examples_per_s,
        training_time: (steps > 0).then_some(training_time),
        communication: per_second(times.communication.as_secs_f64()),
        input_wait: per_second(waited.as_secs_f64()),
        replicas: strategy.num_replicas_in_sync() as u32,
        extra: if flags.zero1 { vec![("optimizer state".to_owned(), state)] } else { Vec::new() },
        ..Summary::default()
    });
    write_losses(strategy, flags, &run.losses)?;
    Ok(Outcome { steps, training_time, examples_per_s: examples_per_s.unwrap_or(0.0), accuracy })
}

/// Measures loss and accuracy on the test digits; every replica evaluates its part of them.
fn evaluate(
    strategy: &Strategy,
    model: &Model<Net>,
    test: &distribute::strategy::DistributedDataset<(Tensor, Tensor)>,
) -> distribute::Result<Vec<(String, f64)>> {
    let metrics = Metrics::new().with(Accuracy).with(CrossEntropy);
    let mut sums = metrics.zeros();
    for batch in test {
        let of_replicas = strategy.run((model, batch?), |_, (model, (x, y))| {
            let mut sums = metrics.zeros();
            let logits = model.forward(&x)?.flatten_all()?.to_vec1::<f32>()?;
            let labels = y.to_vec1::<u32>()?;
            metrics.update(&mut sums, &Predictions::new(&logits, CLASSES, Targets::Classes(&labels))?)?;
            Ok(sums)
        })?;
        let of_batch = strategy.reduce(ReduceOp::Sum, &of_replicas, Axis::None)?;
        sums.iter_mut().zip(of_batch).for_each(|(sum, more)| *sum += more);
    }
    Ok(metrics.results(&sums))
}

fn tensors(split: &Split) -> distribute::Result<Dataset<(Tensor, Tensor)>> {
    let images = Tensor::from_slice(&split.images, (split.len(), PIXELS), &Device::Cpu)?;
    let labels = Tensor::from_slice(&split.labels, split.len(), &Device::Cpu)?;
    Ok(Dataset::from_tensor_slices((images, labels)))
}

fn start_progress(
    strategy: &Strategy,
    flags: &Flags,
    parameters: usize,
    steps: Option<usize>,
) -> distribute::Result<Progress> {
    let replicas = strategy.num_replicas_in_sync();
    let title = format!(
        "mnist · {} · batch {} ({} per replica) · lr {} · seed {} · {parameters} params",
        strategy.describe(),
        flags.batch,
        flags.batch.div_ceil(replicas),
        flags.learning_rate,
        flags.seed
    );
    let options = Options {
        title,
        epochs: flags.epochs,
        steps_per_epoch: steps.map(|steps| steps as u64),
        ..Options::of(strategy)
    };
    Ok(Progress::from_env(options)?)
}

fn write_losses(strategy: &Strategy, flags: &Flags, losses: &[f32]) -> distribute::Result<()> {
    if let Some(path) = flags.losses.as_ref().filter(|_| strategy.is_chief()) {
        let write = || -> std::io::Result<()> {
            let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
            losses.iter().try_for_each(|loss| writeln!(file, "{loss:?}"))?;
            file.flush()
        };
        write().map_err(Error::program)?;
    }
    Ok(())
}
