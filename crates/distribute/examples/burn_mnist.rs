//! Handwritten digits with a burn model: `cargo run --release -p distribute --features burn --example burn_mnist`
//!
//! On two replicas: `-- --devices CPU:0,CPU:1`; as two processes: `distribute run --workers 2 --
//! target/release/examples/burn_mnist`; on a TPU, or on XLA's plugin for CPUs (docs/tpus.md): `--features burn,pjrt`,
//! and `-- --tpu`. It has no loop of its own: `Trainer` fits, saves and resumes.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt")]

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, activation::relu};
use clap::{Parser, ValueEnum};
use distribute::Error;
use distribute::burn::prelude::*;
use distribute::burn::{Fit, Model, SparseCategoricalCrossentropy};
use distribute::collectives::Compression;
use distribute::input::Array;
use distribute::train::callbacks::{BackupAndRestore, TensorBoard};
use distribute::train::history::History;
use distribute::train::metrics::{Accuracy, Metrics};
use distribute::train::preemption::TerminationConfig;
use distribute_testkit::digits::{CLASSES, Digits, PIXELS, SIDE, Split};

#[path = "shared/idx.rs"]
mod idx;
#[cfg(feature = "pjrt")]
#[path = "shared/on_tpu.rs"]
mod on_tpu;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains a classifier of handwritten digits.
#[derive(Parser)]
struct Flags {
    /// Devices of this process, such as CPU:0,CPU:1.
    #[arg(long, value_delimiter = ',', default_value = "CPU:0")]
    devices: Vec<String>,
    #[cfg(feature = "pjrt")]
    #[command(flatten)]
    on_tpu: on_tpu::OnTpu,
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
    /// Writes the loss of every epoch to this file, one per line.
    #[arg(long)]
    losses: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Architecture {
    Mlp,
    Cnn,
}

/// The models, which do not depend on distribution.
#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "each replica has one value of it")]
enum Net {
    Mlp(Mlp),
    Cnn(Cnn),
}

#[derive(Module, Debug)]
struct Mlp {
    fc1: Linear,
    fc2: Linear,
}

#[derive(Module, Debug)]
struct Cnn {
    conv1: Conv2d,
    conv2: Conv2d,
    pool: MaxPool2d,
    fc: Linear,
}

impl Net {
    fn new(architecture: Architecture, device: &Device) -> Net {
        match architecture {
            Architecture::Mlp => Net::Mlp(Mlp {
                fc1: LinearConfig::new(PIXELS, 128).init(device),
                fc2: LinearConfig::new(128, CLASSES).init(device),
            }),
            Architecture::Cnn => Net::Cnn(Cnn {
                conv1: Conv2dConfig::new([1, 8], [5, 5]).init(device),
                conv2: Conv2dConfig::new([8, 16], [5, 5]).init(device),
                pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
                fc: LinearConfig::new(16 * 4 * 4, CLASSES).init(device),
            }),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Net::Mlp(mlp) => mlp.fc2.forward(relu(mlp.fc1.forward(x))),
            Net::Cnn(cnn) => {
                let images = x.dims()[0];
                let x = x.reshape([images, 1, SIDE, SIDE]);
                let x = relu(cnn.pool.forward(cnn.conv1.forward(x)));
                let x = relu(cnn.pool.forward(cnn.conv2.forward(x)));
                cnn.fc.forward(x.reshape([images, 16 * 4 * 4]))
            }
        }
    }
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    distribute::init_logging();
    distribute::exit(choose(&flags).and_then(|strategy| train(&strategy, &flags)))
}

/// Chooses the strategy: the only code that differs between one device and many machines.
fn choose(flags: &Flags) -> distribute::Result<Strategy> {
    #[cfg(feature = "pjrt")]
    if let Some(strategy) = flags.on_tpu.strategy()? {
        return Ok(strategy);
    }
    let devices = flags.devices.clone();
    Ok(match distribute::cluster::Membership::from_env()? {
        Some(_) => MultiWorkerMirroredStrategy::builder().devices(devices).build()?,
        None => MirroredStrategy::builder().devices(devices).build()?,
    })
}

fn train(strategy: &Strategy, flags: &Flags) -> distribute::Result<()> {
    let digits = match &flags.data {
        Some(folder) => idx::digits(folder)?,
        None => Digits::standard(),
    };
    let train = dataset(&digits.train)?.shuffle(digits.train.len(), flags.seed).batch(flags.batch).prefetch(AUTOTUNE);
    let test = dataset(&digits.test)?.batch(1000);
    let build = |device: &Device| {
        device.seed(flags.seed);
        Net::new(flags.model, device)
    };
    let adam = |model: &Model<Net>| {
        let optimizer = Adam::new(flags.learning_rate).build(model)?.compress(flags.compress.clone())?;
        Ok(if flags.zero1 { optimizer.zero1()? } else { optimizer })
    };
    let metrics = Metrics::new().with(Accuracy);
    let mut trainer = Trainer::new(strategy, build, Net::forward, adam, SparseCategoricalCrossentropy, metrics)?;
    let mut fit = Fit::epochs(flags.epochs).validation(&test).progress("burn_mnist");
    if let Some(folder) = &flags.checkpoints {
        let backup = BackupAndRestore::new(folder).every_steps(flags.checkpoint_every).keep_at_end();
        fit = fit.callback(backup).stop_on(TerminationConfig::default());
    }
    if let Some(folder) = &flags.tensorboard {
        fit = fit.callback(TensorBoard::new(folder).histograms(1));
    }
    let history = trainer.fit(&train, fit)?;
    if strategy.is_chief() {
        let accuracy = history.last("val_accuracy").unwrap_or_default();
        println!("test accuracy {:.2} %", 100.0 * accuracy);
        write_losses(flags, &history)?;
    }
    Ok(())
}

fn dataset(split: &Split) -> distribute::Result<Dataset<(Array<f32>, Array<u32>)>> {
    let images = Array::new([split.len(), PIXELS], split.images.clone())?;
    Ok(Dataset::from_tensor_slices((images, Array::from(split.labels.clone()))))
}

fn write_losses(flags: &Flags, history: &History) -> distribute::Result<()> {
    let Some(path) = &flags.losses else { return Ok(()) };
    let write = || -> std::io::Result<()> {
        let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
        history.of("loss").iter().try_for_each(|loss| writeln!(file, "{loss:?}"))?;
        file.flush()
    };
    write().map_err(Error::program)
}
