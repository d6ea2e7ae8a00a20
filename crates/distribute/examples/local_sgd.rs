//! A strategy of one's own: `cargo run --release -p distribute --example local_sgd -- --devices CPU:0,CPU:1`
//!
//! `LocalSgd` is written here, over the interface `StrategyExtended`: replicas of any other strategy train apart, and
//! become their mean every few steps. It is compared with the strategy that it is built over, which sums
//! gradients in each step. As two processes: `distribute run --workers 2 -- target/release/examples/local_sgd`.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt")]

use std::process::ExitCode;

use accuracy::accuracy;
use candle_core::{Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use clap::Parser;
use distribute::prelude::*;
use distribute::strategy::{LocalUpdates, Replicas, StrategyExtended};
use distribute_testkit::digits::{CLASSES, Digits, PIXELS, Split};

#[path = "shared/accuracy.rs"]
mod accuracy;
#[path = "shared/placement.rs"]
mod placement;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains a classifier of handwritten digits, with sums in each step and apart.
#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    placement: placement::Placement,
    /// Steps that replicas train apart.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,
    /// Steps at the beginning that are all followed by the mean.
    #[arg(long, default_value_t = 0)]
    together: u64,
    /// Passes over the training data.
    #[arg(long, default_value_t = 3)]
    epochs: u32,
    /// Number of digits to train on.
    #[arg(long, default_value_t = 16_000)]
    images: usize,
    /// Global batch: examples per step, over all replicas.
    #[arg(long, default_value_t = 128)]
    batch: usize,
    /// Learning rate of SGD with momentum.
    #[arg(long, default_value_t = 0.05)]
    learning_rate: f64,
}

/// Replicas that train apart and become their mean: after each of the first `together` steps, and then every `every`.
///
/// # Source
/// Stich, "Local SGD converges fast and communicates little", 2019; with `together`, Lin et al., "Don't use large
/// mini-batches, use local SGD", 2020.
struct LocalSgd {
    over: Strategy,
    every: u64,
    together: u64,
}

impl LocalSgd {
    fn over(over: Strategy, every: u64, together: u64) -> Strategy {
        // Workers with other numbers would wait for each other; now they are told.
        over.declare("steps apart", every);
        over.declare("steps together", together);
        Strategy::new(LocalSgd { over, every, together })
    }
}

impl StrategyExtended for LocalSgd {
    fn name(&self) -> &'static str {
        "LocalSgd"
    }

    fn describe(&self) -> String {
        format!("LocalSgd every {} steps over {}", self.every, self.over.describe())
    }

    fn replicas(&self) -> &Replicas {
        self.over.extended().replicas()
    }

    fn local_updates(&self) -> Option<&dyn LocalUpdates> {
        Some(self)
    }
}

impl LocalUpdates for LocalSgd {
    fn is_due(&self, steps: u64) -> bool {
        steps <= self.together || (steps - self.together).is_multiple_of(self.every)
    }
}

/// Does not depend on distribution.
struct Mlp(Linear, Linear);

impl Mlp {
    fn new(vb: VarBuilder<'_>) -> CandleResult<Mlp> {
        Ok(Mlp(linear(PIXELS, 128, vb.pp("fc1"))?, linear(128, CLASSES, vb.pp("fc2"))?))
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        self.1.forward(&self.0.forward(x)?.relu()?)
    }
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    distribute::init_logging();
    distribute::exit(flags.placement.strategy().and_then(|over| over.report_failure(compare(&over, &flags))))
}

fn compare(over: &Strategy, flags: &Flags) -> distribute::Result<()> {
    let digits = Digits::drawn(0, flags.images, flags.images.div_ceil(4));
    let apart = LocalSgd::over(over.clone(), flags.every, flags.together);
    for strategy in [over, &apart] {
        train(strategy, flags, &digits)?;
    }
    Ok(())
}

/// Trains under a strategy, and prints the result.
fn train(strategy: &Strategy, flags: &Flags, digits: &Digits) -> distribute::Result<()> {
    let data = tensors(&digits.train)?.shuffle(digits.train.len(), 42).batch(flags.batch).prefetch(AUTOTUNE);
    let data = strategy.distribute_dataset(&data)?;
    let model = strategy.scope(Mlp::new)?;
    let optimizer = Sgd::new(flags.learning_rate).momentum(0.9).build(&model)?;
    // A last batch that is short is a part of one.
    let batches = digits.train.len().max(1) as f32 / flags.batch as f32;
    let (mut steps, mut exchanges, mut loss) = (0, 0, 0.0);
    for _ in 0..flags.epochs {
        let mut sum = 0.0;
        for batch in &data {
            let losses = strategy.run((&model, &optimizer, batch?), |ctx, (model, optimizer, (x, y))| {
                let per_example = cross_entropy_per_example(&model.forward(&x)?, &y)?;
                let loss = ctx.average_loss(&per_example, flags.batch)?;
                optimizer.minimize(ctx, &loss)?;
                Ok(loss.detach())
            })?;
            sum += strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.to_scalar::<f32>()?;
            steps += 1;
            let local = strategy.extended().local_updates();
            exchanges += u64::from(local.is_none_or(|local| local.is_due(steps)));
        }
        loss = sum / batches;
    }
    // Between two means there are several models.
    optimizer.synchronize(strategy)?;
    let test = strategy.distribute_dataset(&tensors(&digits.test)?.batch(1000))?;
    let accuracy = accuracy(strategy, &model, &test)?;
    if strategy.is_chief() {
        println!("{}:", strategy.describe());
        println!("  {exchanges} exchanges in {steps} steps, loss {loss:.4}, test accuracy {:.2} %", 100.0 * accuracy);
    }
    Ok(())
}

fn tensors(split: &Split) -> distribute::Result<Dataset<(Tensor, Tensor)>> {
    let images = Tensor::from_slice(&split.images, (split.len(), PIXELS), &Device::Cpu)?;
    Ok(Dataset::from_tensor_slices((images, Tensor::from_slice(&split.labels, split.len(), &Device::Cpu)?)))
}
