//! The smallest custom training loop: `cargo run --release -p distribute --example custom_loop -- CPU:0,CPU:1`
//!
//! The second argument is the number of epochs. The example `mnist` is the same loop with all options.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt")]

use std::process::ExitCode;

use candle_core::{Device, Module, Tensor};
use candle_nn::linear;
use clap::Parser;
use distribute::prelude::*;
use distribute::train::metrics::{Accuracy, Metrics, Predictions, Targets, TopK};
use distribute_testkit::digits::{CLASSES, Digits, PIXELS, Split};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains a network to read handwritten digits.
#[derive(Parser)]
struct Flags {
    /// Devices of this process, such as CPU:0,CPU:1.
    #[arg(default_value = "CPU:0")]
    devices: String,
    /// Passes over the training data.
    #[arg(default_value_t = 3)]
    epochs: u32,
}

const BATCH: usize = 128;

fn dataset(split: &Split) -> distribute::Result<Dataset<(Tensor, Tensor)>> {
    let images = Tensor::from_slice(&split.images, (split.len(), PIXELS), &Device::Cpu)?;
    Ok(Dataset::from_tensor_slices((images, Tensor::from_slice(&split.labels, split.len(), &Device::Cpu)?)))
}

fn main() -> ExitCode {
    distribute::exit(run(&Flags::parse()))
}

fn run(flags: &Flags) -> distribute::Result<()> {
    let strategy = MirroredStrategy::builder().devices(flags.devices.split(',')).build()?;
    let digits = Digits::standard();
    let train = dataset(&digits.train)?.shuffle(digits.train.len(), 42).batch(BATCH).prefetch(AUTOTUNE);
    let (train, test) =
        (strategy.distribute_dataset(&train)?, strategy.distribute_dataset(&dataset(&digits.test)?.batch(1000))?);
    let model = strategy.scope(|vb| Ok((linear(PIXELS, 128, vb.pp("fc1"))?, linear(128, CLASSES, vb.pp("fc2"))?)))?;
    let optimizer = Adam::new(1e-3).build(&model)?;

    for epoch in 1..=flags.epochs {
        let (mut sum, mut steps) = (0.0, 0);
        for batch in &train {
            let losses = strategy.run((&model, &optimizer, batch?), |ctx, ((fc1, fc2), optimizer, (x, y))| {
                let logits = fc2.forward(&fc1.forward(&x)?.relu()?)?;
                let loss = ctx.average_loss(&cross_entropy_per_example(&logits, &y)?, BATCH)?;
                optimizer.minimize(ctx, &loss)?;
                Ok(loss.detach())
            })?;
            sum += strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.to_scalar::<f32>()?;
            steps += 1;
        }
        println!("epoch {epoch}: the mean of {steps} losses is {:.4}", sum / steps as f32);
    }

    let metrics = Metrics::new().with(Accuracy).with(TopK(3));
    let mut sums = metrics.zeros();
    for batch in &test {
        let parts = strategy.run((&model, batch?), |_, ((fc1, fc2), (x, y))| {
            let logits = fc2.forward(&fc1.forward(&x)?.relu()?)?.flatten_all()?.to_vec1::<f32>()?;
            let mut sums = metrics.zeros();
            metrics.update(&mut sums, &Predictions::new(&logits, CLASSES, Targets::Classes(&y.to_vec1()?))?)?;
            Ok(sums)
        })?;
        let whole = strategy.reduce(ReduceOp::Sum, &parts, Axis::None)?;
        sums.iter_mut().zip(whole).for_each(|(sum, more)| *sum += more);
    }
    for (name, value) in metrics.results(&sums) {
        println!("test {name}: {:.2} %", 100.0 * value);
    }
    Ok(())
}
