//! Densely connected networks, in a custom loop: `cargo run --release -p distribute --example densenet -- --devices
//! CPU:0,CPU:1`
//!
//! DenseNet-BC on the pictures of the example `resnet`: drawn shapes, or CIFAR-10 with `--data FOLDER`. The published
//! one is `--depth 100 --growth 12 --batch 64 --epochs 300`. As two processes: `distribute run --workers 2 --
//! target/release/examples/densenet`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use accuracy::accuracy;
use candle_core::{Module, ModuleT, Result as CandleResult, Tensor};
use candle_nn::{BatchNormConfig, Conv2dConfig, VarBuilder};
use clap::Parser;
use distribute::Error;
use distribute::candle::{Conv2d, Linear, SyncBatchNorm, conv2d_no_bias, linear, sync_batch_norm};
use distribute::prelude::*;
use distribute::train::progress::{Options, Progress, Summary};
use weight_decay::penalty;

#[path = "shared/accuracy.rs"]
mod accuracy;
#[path = "shared/pictures.rs"]
mod pictures;
#[path = "shared/placement.rs"]
mod placement;
#[path = "shared/weight_decay.rs"]
mod weight_decay;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains a densely connected network.
#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    placement: placement::Placement,
    #[command(flatten)]
    source: pictures::Source,
    /// Layers of the network: 100 in the paper, or another 6n + 4.
    #[arg(long, default_value_t = 16)]
    depth: usize,
    /// Channels that each layer adds, which are 12 in the paper.
    #[arg(long, default_value_t = 6)]
    growth: usize,
    /// Passes over the training pictures.
    #[arg(long, default_value_t = 8)]
    epochs: u32,
    /// Global batch: pictures per step, over all replicas; 64 in the paper.
    #[arg(long, default_value_t = 32)]
    batch: usize,
    /// Learning rate of SGD, which is divided by ten after half and after three quarters of all passes.
    #[arg(long, default_value_t = 0.1)]
    learning_rate: f64,
    /// Weight decay of convolutions and of the last layer.
    #[arg(long, default_value_t = 1e-4)]
    weight_decay: f64,
    /// Seed of initial values, and of the order and variants of pictures.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

/// Batch normalisation over the global batch, a ReLU and a convolution.
struct Conv(SyncBatchNorm, Conv2d);

impl Conv {
    fn new(from: usize, to: usize, kernel: usize, vb: VarBuilder<'_>) -> CandleResult<Conv> {
        let config = Conv2dConfig { padding: kernel / 2, ..Conv2dConfig::default() };
        let norm = sync_batch_norm(from, BatchNormConfig::default(), vb.pp("norm"))?;
        Ok(Conv(norm, conv2d_no_bias(from, to, kernel, config, vb.pp("conv"))?))
    }
}

impl ModuleT for Conv {
    fn forward_t(&self, x: &Tensor, train: bool) -> CandleResult<Tensor> {
        self.1.forward(&self.0.forward_relu(x, None, train)?)
    }
}

/// A part of the body.
enum Stage {
    /// Adds channels that are computed from all channels so far: 4k by a 1 × 1 convolution, and k from these.
    Dense(Conv, Conv),
    /// Halves the channels and the sides.
    Transition(Conv),
}

impl ModuleT for Stage {
    fn forward_t(&self, x: &Tensor, train: bool) -> CandleResult<Tensor> {
        match self {
            Stage::Dense(bottleneck, conv) => {
                let new = conv.forward_t(&bottleneck.forward_t(x, train)?, train)?;
                Tensor::cat(&[x, &new], 1)
            }
            Stage::Transition(conv) => conv.forward_t(x, train)?.avg_pool2d(2),
        }
    }
}

/// A DenseNet-BC for small pictures: three dense blocks, between which channels and sides are halved.
///
/// # Source
/// Huang et al., "Densely connected convolutional networks", 2017, sections 3 and 4.2.
struct DenseNet {
    entry: Conv2d,
    body: Vec<Stage>,
    exit: SyncBatchNorm,
    head: Linear,
}

impl DenseNet {
    fn new(depth: usize, growth: usize, vb: &VarBuilder<'_>) -> CandleResult<DenseNet> {
        let config = Conv2dConfig { padding: 1, ..Conv2dConfig::default() };
        let (mut channels, of_block) = (2 * growth, (depth - 4) / 6);
        let entry = conv2d_no_bias(pictures::CHANNELS, channels, 3, config, vb.pp("entry"))?;
        let mut body = Vec::with_capacity(3 * of_block + 2);
        for at in 0..3 * of_block {
            if at > 0 && at % of_block == 0 {
                let vb = vb.pp(format!("transitions.{}", at / of_block));
                body.push(Stage::Transition(Conv::new(channels, channels / 2, 1, vb)?));
                channels /= 2;
            }
            let vb = vb.pp(format!("layers.{at}"));
            let bottleneck = Conv::new(channels, 4 * growth, 1, vb.pp("bottleneck"))?;
            body.push(Stage::Dense(bottleneck, Conv::new(4 * growth, growth, 3, vb.pp("dense"))?));
            channels += growth;
        }
        let exit = sync_batch_norm(channels, BatchNormConfig::default(), vb.pp("exit"))?;
        Ok(DenseNet { entry, body, exit, head: linear(channels, pictures::CLASSES, vb.pp("head"))? })
    }

    /// Returns the weights that decay: those of all layers, without the scales of normalisations.
    fn weights(&self) -> impl Iterator<Item = &Tensor> {
        let of_body = self.body.iter().flat_map(|stage| match stage {
            Stage::Dense(bottleneck, conv) => vec![bottleneck.1.weight(), conv.1.weight()],
            Stage::Transition(conv) => vec![conv.1.weight()],
        });
        of_body.chain([self.entry.weight(), self.head.weight()])
    }
}

impl ModuleT for DenseNet {
    fn forward_t(&self, x: &Tensor, train: bool) -> CandleResult<Tensor> {
        let x = self.entry.forward(x)?;
        let x = self.body.iter().try_fold(x, |x, stage| stage.forward_t(&x, train))?;
        self.head.forward(&self.exit.forward_relu(&x, None, train)?.mean((2, 3))?)
    }
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    distribute::init_logging();
    let strategy = flags.placement.strategy();
    distribute::exit(strategy.and_then(|strategy| strategy.report_failure(train(&strategy, &flags))))
}

fn train(strategy: &Strategy, flags: &Flags) -> distribute::Result<()> {
    let Flags { depth, growth, .. } = *flags;
    if depth < 10 || !(depth - 4).is_multiple_of(6) || growth == 0 {
        let problem =
            format!("--depth {depth} --growth {growth} cannot be built; give a depth of 6n + 4 and a growth above 0");
        return Err(Error::program(problem));
    }
    let pictures = flags.source.read()?;
    let data = strategy.distribute_dataset(&pictures.train(flags.batch, flags.seed)?)?;
    let test = strategy.distribute_dataset(&pictures.test(flags.batch)?)?;
    let model = strategy.scope_seeded(flags.seed, |vb| DenseNet::new(depth, growth, &vb))?;
    let optimizer = Sgd::new(flags.learning_rate).momentum(0.9).nesterov().build(&model)?;

    let title = format!("densenet-bc-{depth} · {} · {} params", strategy.describe(), model.num_parameters());
    let batches = pictures.batches(flags.batch);
    let (epochs, steps_per_epoch) = (flags.epochs, Some(batches.ceil() as u64));
    let mut progress = Progress::from_env(Options { title, epochs, steps_per_epoch, ..Options::of(strategy) })?;
    let (mut training_time, mut seen, mut test_accuracy) = (Duration::ZERO, 0, 0.0);
    strategy.declare("epochs", epochs);
    for epoch in 1..=epochs {
        progress.epoch(epoch);
        optimizer.set_learning_rate(rate(flags, epoch));
        let (began, mut sum) = (Instant::now(), 0.0);
        for (step, batch) in (1..).zip(&data) {
            let losses = strategy.run((&model, &optimizer, batch?), |ctx, (model, optimizer, (x, y))| {
                let loss =
                    ctx.average_loss(&cross_entropy_per_example(&model.forward_t(&x, true)?, &y)?, flags.batch)?;
                // The penalty is the same on all replicas, and each adds a part of it.
                let penalty = ctx.scale_regularization_loss(&penalty(model.weights(), flags.weight_decay)?)?;
                optimizer.minimize(ctx, &(&loss + penalty)?)?;
                Ok(loss.detach())
            })?;
            sum += f64::from(strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.to_scalar::<f32>()?);
            let rows = flags.batch as f64 * (batches + 1.0 - step as f64).min(1.0);
            seen += rows.round() as u64;
            progress.step(step, rows.round() as u64, &[("loss", sum / batches.min(step as f64))]);
        }
        training_time += began.elapsed();
        test_accuracy = accuracy(strategy, &model, &test)?;
        progress.end_epoch(&[("test_accuracy", test_accuracy)]);
    }
    progress.finish(&Summary {
        test_accuracy: Some(test_accuracy),
        examples_per_s: Some(seen as f64 / training_time.as_secs_f64()),
        training_time: Some(training_time),
        replicas: strategy.num_replicas_in_sync() as u32,
        ..Summary::default()
    });
    Ok(())
}

/// The learning rate of an epoch, counted from 1.
fn rate(flags: &Flags, epoch: u32) -> f64 {
    match 4 * (epoch - 1) {
        quarters if quarters >= 3 * flags.epochs => flags.learning_rate / 100.0,
        quarters if quarters >= 2 * flags.epochs => flags.learning_rate / 10.0,
        _ => flags.learning_rate,
    }
}
