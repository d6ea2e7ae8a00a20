//! Transfer learning from few examples: `cargo run --release -p distribute --example transfer_learning`
//!
//! A small residual network learns the digits 0 to 5 and is saved as a plain safetensors file. Its body then helps to
//! classify 6 to 9, of which there are only a few drawings: first frozen, under a new head, and then fine-tuned at a
//! low learning rate. On two replicas: `-- --devices CPU:0,CPU:1`.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt")]

use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;

use accuracy::accuracy;
use candle_core::{Device, Module, ModuleT, Result as CandleResult, Tensor};
use candle_nn::VarBuilder;
use clap::Parser;
use conv::Conv;
use distribute::Error;
use distribute::candle::{Linear, Model, linear};
use distribute::prelude::*;
use distribute_testkit::digits::{Digits, PIXELS, SIDE, Split};

#[path = "shared/accuracy.rs"]
mod accuracy;
#[path = "shared/conv.rs"]
mod conv;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains a body on some digits, and reuses it for others.
#[derive(Parser)]
struct Flags {
    /// Devices of this process, such as CPU:0,CPU:1.
    #[arg(long, value_delimiter = ',', default_value = "CPU:0")]
    devices: Vec<String>,
    /// Number of drawings of each of the digits 0 to 5.
    #[arg(long, default_value_t = 400)]
    known: usize,
    /// Number of drawings of each of the digits 6 to 9.
    #[arg(long, default_value_t = 8)]
    new: usize,
    /// Passes over the drawings of 0 to 5.
    #[arg(long, default_value_t = 4)]
    epochs: usize,
    /// Passes over the drawings of 6 to 9, in each of the three phases.
    #[arg(long, default_value_t = 60)]
    new_epochs: usize,
    /// Channels of the first stage of the body; the second has twice as many.
    #[arg(long, default_value_t = 12)]
    width: usize,
    /// File for the first network. Default: in a folder that is removed at the end.
    #[arg(long)]
    save: Option<PathBuf>,
}

/// A body of two stages, each of which halves the sides and adds two convolutions to its input.
struct Residual {
    stages: Vec<(Conv, Conv, Conv)>,
    head: Linear,
}

impl Residual {
    fn new(width: usize, classes: usize, vb: VarBuilder<'_>) -> CandleResult<Residual> {
        let widths = [1, width, 2 * width];
        let stage = |(at, pair): (usize, &[usize])| {
            let (vb, width) = (vb.pp(format!("body.{at}")), pair[1]);
            let entry = Conv::new(pair[0], width, 2, vb.pp("entry"))?;
            Ok((entry, Conv::new(width, width, 1, vb.pp("first"))?, Conv::new(width, width, 1, vb.pp("second"))?))
        };
        let stages = widths.windows(2).enumerate().map(stage).collect::<CandleResult<_>>()?;
        Ok(Residual { stages, head: linear(2 * width, classes, vb.pp("head"))? })
    }
}

impl ModuleT for Residual {
    fn forward_t(&self, x: &Tensor, train: bool) -> CandleResult<Tensor> {
        let mut x = x.reshape((x.dim(0)?, 1, SIDE, SIDE))?;
        for (entry, first, second) in &self.stages {
            x = entry.forward_relu(&x, None, train)?;
            let inner = first.forward_relu(&x, None, train)?;
            // The order matters: candle drops the right operand of a sum if a replica has no examples.
            x = second.forward_relu(&inner, Some(&x), train)?;
        }
        self.head.forward(&x.mean((2, 3))?)
    }
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    distribute::init_logging();
    distribute::exit(run(flags))
}

fn run(flags: Flags) -> distribute::Result<()> {
    let strategy = MirroredStrategy::builder().devices(flags.devices).build()?;
    let folder = tempfile::tempdir().map_err(Error::program)?;
    let path = flags.save.unwrap_or_else(|| folder.path().join("digits.safetensors"));
    let digits = Digits::drawn(0, 10 * flags.known, 1000);

    let known = examples(&digits.train, 0..6, flags.known)?.shuffle(6 * flags.known, 1).batch(64).prefetch(AUTOTUNE);
    let model = strategy.scope(|vb| Residual::new(flags.width, 6, vb))?;
    fit(&strategy, &model, Adam::new(3e-3), &known, flags.epochs, true)?;
    let accuracy = evaluate(&strategy, &model, &examples(&digits.test, 0..6, usize::MAX)?.batch(200))?;
    println!("the digits 0 to 5, from {} drawings of each: {accuracy:.1} %", flags.known);
    model.save_safetensors(&strategy, &path)?;

    let few = examples(&digits.train, 6..10, flags.new)?.shuffle(4 * flags.new, 2).batch(4 * flags.new);
    let test = examples(&digits.test, 6..10, usize::MAX)?.batch(200);
    println!("the digits 6 to 9, from {} drawings of each:", flags.new);
    let model = strategy.scope(|vb| Residual::new(flags.width, 4, vb))?;
    fit(&strategy, &model, Adam::new(3e-3), &few, flags.new_epochs, true)?;
    println!("  from scratch                      {:5.1} %", evaluate(&strategy, &model, &test)?);

    let mut model = strategy.scope(|vb| Residual::new(flags.width, 4, vb))?;
    let report =
        model.load_safetensors_as(&strategy, &path, |name| name.starts_with("body.").then(|| name.to_owned()))?;
    model.freeze(|name| name.starts_with("body."))?;
    fit(&strategy, &model, Adam::new(1e-2), &few, flags.new_epochs, false)?;
    println!("  a new head on the body, frozen    {:5.1} %", evaluate(&strategy, &model, &test)?);
    model.unfreeze(|_| true)?;
    fit(&strategy, &model, Adam::new(3e-4), &few, flags.new_epochs, false)?;
    println!("  all of that trained on, gently    {:5.1} %", evaluate(&strategy, &model, &test)?);
    println!("{} variables came from the file; it has no use for {}", report.loaded.len(), report.unused.join(", "));
    Ok(())
}

/// Trains all variables that are not frozen. If `train` is false, batch normalisation keeps its statistics, which a few
/// examples would degrade.
fn fit(
    strategy: &Strategy,
    model: &Model<Residual>,
    adam: Adam,
    data: &Dataset<(Tensor, Tensor)>,
    epochs: usize,
    train: bool,
) -> distribute::Result<()> {
    let optimizer = adam.build(model)?;
    let (batch, data) = (data.batch_size().unwrap_or(1), strategy.distribute_dataset(data)?);
    for _ in 0..epochs {
        for part in &data {
            strategy.run((model, &optimizer, part?), |ctx, (model, optimizer, (x, y))| {
                let per_example = cross_entropy_per_example(&model.forward_t(&x, train)?, &y)?;
                Ok(optimizer.minimize(ctx, &ctx.average_loss(&per_example, batch)?)?)
            })?;
        }
    }
    Ok(())
}

/// Computes the percentage of examples that the model classifies correctly.
fn evaluate(strategy: &Strategy, model: &Model<Residual>, data: &Dataset<(Tensor, Tensor)>) -> distribute::Result<f64> {
    Ok(100.0 * accuracy(strategy, model, &strategy.distribute_dataset(data)?)?)
}

/// Selects `of_each` images of each of some digits, which become the classes from 0 on.
fn examples(split: &Split, digits: Range<u32>, of_each: usize) -> distribute::Result<Dataset<(Tensor, Tensor)>> {
    let (mut images, mut labels, mut taken) = (Vec::new(), Vec::new(), [0; 10]);
    for (at, digit) in split.labels.iter().enumerate().filter(|(_, digit)| digits.contains(digit)) {
        taken[*digit as usize] += 1;
        if taken[*digit as usize] <= of_each {
            images.extend_from_slice(split.image(at));
            labels.push(digit - digits.start);
        }
    }
    let count = labels.len();
    let images = Tensor::from_vec(images, (count, PIXELS), &Device::Cpu)?;
    Ok(Dataset::from_tensor_slices((images, Tensor::from_vec(labels, count, &Device::Cpu)?)))
}
