//! Residual networks on small pictures: `cargo run --release -p distribute --example resnet -- --devices CPU:0,CPU:1`
//!
//! ResNet-20 to ResNet-110 as published for CIFAR-10, whose binary files it reads: `-- --data cifar-10-batches-bin
//! --width 16 --batch 128 --epochs 164`. Without them, a narrow network learns drawn shapes. As two processes:
//! `distribute run --workers 2 -- target/release/examples/resnet`.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt")]

use std::process::ExitCode;

use candle_core::{Module, ModuleT, Result as CandleResult, Tensor};
use candle_nn::VarBuilder;
use clap::Parser;
use conv::Conv;
use distribute::Error;
use distribute::candle::{Fit, Linear, Model, SparseCategoricalCrossentropy, linear, max_pool2d_with_stride};
use distribute::prelude::*;
use distribute::train::callbacks::LearningRateSchedule;
use distribute::train::metrics::{Accuracy, Metrics};
use weight_decay::penalty;

#[path = "shared/conv.rs"]
mod conv;
#[path = "shared/pictures.rs"]
mod pictures;
#[path = "shared/placement.rs"]
mod placement;
#[path = "shared/weight_decay.rs"]
mod weight_decay;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains a residual network.
#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    placement: placement::Placement,
    #[command(flatten)]
    source: pictures::Source,
    /// Layers of the network: 20, 32, 44, 56, 110 or another 6n + 2.
    #[arg(long, default_value_t = 20)]
    depth: usize,
    /// Channels of the first stage, which is 16 in the paper; the second and third have twice and four times as many.
    #[arg(long, default_value_t = 8)]
    width: usize,
    /// Passes over the training pictures.
    #[arg(long, default_value_t = 8)]
    epochs: u32,
    /// Global batch: pictures per step, over all replicas; 128 in the paper.
    #[arg(long, default_value_t = 32)]
    batch: usize,
    /// Learning rate of SGD, which is divided by ten after half and after three quarters of all steps.
    #[arg(long, default_value_t = 0.1)]
    learning_rate: f64,
    /// Weight decay of convolutions and of the last layer.
    #[arg(long, default_value_t = 1e-4)]
    weight_decay: f64,
    /// Seed of initial values, and of the order and variants of pictures.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

/// Two convolutions that are added to their input. The first of a stage halves the sides and doubles the channels.
struct Block {
    first: Conv,
    second: Conv,
    widens: bool,
}

impl Block {
    fn new(from: usize, to: usize, vb: VarBuilder<'_>) -> CandleResult<Block> {
        let (widens, stride) = (from != to, if from == to { 1 } else { 2 });
        let first = Conv::new(from, to, stride, vb.pp("first"))?;
        Ok(Block { first, second: Conv::new(to, to, 1, vb.pp("second"))?, widens })
    }
}

impl ModuleT for Block {
    fn forward_t(&self, x: &Tensor, train: bool) -> CandleResult<Tensor> {
        let inner = self.first.forward_relu(x, None, train)?;
        let shortcut = if self.widens { narrowed(x)? } else { x.clone() };
        self.second.forward_relu(&inner, Some(&shortcut), train)
    }
}

/// Returns every second row and column, and as many channels of zeros as there are channels: the paper's shortcut
/// without parameters, its option A.
fn narrowed(x: &Tensor) -> CandleResult<Tensor> {
    max_pool2d_with_stride(x, 1, 2)?.pad_with_zeros(1, 0, x.dim(1)?)
}

/// A residual network for small pictures, which does not depend on distribution.
///
/// # Source
/// He et al., "Deep residual learning for image recognition", 2015, section 4.2.
struct ResNet {
    entry: Conv,
    blocks: Vec<Block>,
    head: Linear,
}

impl ResNet {
    fn new(depth: usize, width: usize, vb: &VarBuilder<'_>) -> CandleResult<ResNet> {
        let of_stage = (depth - 2) / 6;
        let mut blocks = Vec::with_capacity(3 * of_stage);
        for at in 0..3 * of_stage {
            let to = width << (at / of_stage);
            let from = if at > 0 && at % of_stage == 0 { to / 2 } else { to };
            blocks.push(Block::new(from, to, vb.pp(format!("blocks.{at}")))?);
        }
        let entry = Conv::new(pictures::CHANNELS, width, 1, vb.pp("entry"))?;
        Ok(ResNet { entry, blocks, head: linear(4 * width, pictures::CLASSES, vb.pp("head"))? })
    }

    /// Returns the weights that decay: those of all layers, without the scales of normalisations.
    fn weights(&self) -> impl Iterator<Item = &Tensor> {
        let convs = self.blocks.iter().flat_map(|block| [&block.first, &block.second]).chain([&self.entry]);
        convs.map(|conv| conv.0.weight()).chain([self.head.weight()])
    }
}

impl ModuleT for ResNet {
    fn forward_t(&self, x: &Tensor, train: bool) -> CandleResult<Tensor> {
        let x = self.entry.forward_relu(x, None, train)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward_t(&x, train))?;
        self.head.forward(&x.mean((2, 3))?)
    }
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    distribute::init_logging();
    let strategy = flags.placement.strategy();
    distribute::exit(strategy.and_then(|strategy| strategy.report_failure(train(&strategy, &flags))))
}

fn train(strategy: &Strategy, flags: &Flags) -> distribute::Result<()> {
    let Flags { depth, width, weight_decay, .. } = *flags;
    if depth < 8 || !(depth - 2).is_multiple_of(6) || width == 0 {
        let problem =
            format!("--depth {depth} --width {width} cannot be built; give a depth of 6n + 2 and a width above 0");
        return Err(Error::program(problem));
    }
    let pictures = flags.source.read()?;
    let (data, test) = (pictures.train(flags.batch, flags.seed)?, pictures.test(flags.batch)?);
    let model = strategy.scope_seeded(flags.seed, |vb| ResNet::new(depth, width, &vb))?;
    let sgd = |model: &Model<ResNet>| Sgd::new(flags.learning_rate).momentum(0.9).build(model);
    let metrics = Metrics::new().with(Accuracy);
    let mut trainer = Trainer::of_model(strategy, model, sgd, SparseCategoricalCrossentropy, metrics)?
        .regularize(move |model| penalty(model.weights(), weight_decay));
    let (rate, steps) = (flags.learning_rate, u64::from(flags.epochs) * pictures.batches(flags.batch).ceil() as u64);
    let stepped = LearningRateSchedule::by_step(move |step| match 4 * step {
        step if step >= 3 * steps => rate / 100.0,
        step if step >= 2 * steps => rate / 10.0,
        _ => rate,
    });
    let fit = Fit::epochs(flags.epochs).validation(&test).callback(stepped).progress(format!("resnet-{depth}"));
    let history = trainer.fit(&data, fit)?;
    if strategy.is_chief() {
        println!("{history}");
        println!("test accuracy {:.2} %", 100.0 * history.last("val_accuracy").unwrap_or_default());
    }
    Ok(())
}
