//! TensorFlow's TPU tutorial: `cargo run --release -p distribute --features burn,logging,pjrt --example tpu`
//!
//! On a machine with a TPU it runs there. Without one, `cargo xtask pjrt --fetch` installs XLA's plugin for CPUs, and
//! with its path in DISTRIBUTE_PJRT_PLUGIN, `-- --replicas 8` trains on eight devices of it. `--custom-loop` trains by
//! a loop of its own instead of `Trainer`.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt")]

use std::path::PathBuf;
use std::process::ExitCode;

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use clap::Parser;
use distribute::burn::prelude::*;
use distribute::burn::{Fit, Model, SparseCategoricalCrossentropy, cross_entropy_per_example};
use distribute::input::Array;
use distribute::strategy::TpuStrategy;
use distribute::train::metrics::{Accuracy, Metrics};
use distribute_testkit::digits::{CLASSES, Digits, PIXELS, SIDE, Split};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains a classifier of handwritten digits on a TPU.
#[derive(Parser)]
struct Flags {
    /// Replicas, each on one core. Default: all cores.
    #[arg(long)]
    replicas: Option<usize>,
    /// Passes over the training data.
    #[arg(long, default_value_t = 3)]
    epochs: u32,
    /// Examples per step and replica.
    #[arg(long, default_value_t = 25)]
    batch_per_replica: usize,
    /// Steps that are started without waiting for the results of those before.
    #[arg(long, default_value_t = 10)]
    steps_per_execution: usize,
    /// Trains by a loop of its own.
    #[arg(long)]
    custom_loop: bool,
    /// Writes the programs that are compiled to this folder.
    #[arg(long)]
    dump_programs: Option<PathBuf>,
}

#[derive(Module, Debug)]
struct Net {
    first: Conv2d,
    second: Conv2d,
    third: Linear,
    last: Linear,
}

impl Net {
    fn new(device: &Device) -> Net {
        let conv = |from, to| Conv2dConfig::new([from, to], [3, 3]).with_stride([2, 2]);
        Net {
            first: conv(1, 16).with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1)).init(device),
            second: conv(16, 16).with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1)).init(device),
            third: LinearConfig::new(16 * 7 * 7, 64).init(device),
            last: LinearConfig::new(64, CLASSES).init(device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let images = x.dims()[0];
        let x = relu(self.first.forward(x.reshape([images, 1, SIDE, SIDE])));
        let x = relu(self.second.forward(x)).reshape([images, 16 * 7 * 7]);
        self.last.forward(relu(self.third.forward(x)))
    }
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    distribute::init_logging();
    distribute::exit(train(&flags))
}

fn train(flags: &Flags) -> distribute::Result<()> {
    let mut tpu = TpuStrategy::builder();
    if let Some(replicas) = flags.replicas {
        tpu = tpu.replicas(replicas);
    }
    if let Some(folder) = &flags.dump_programs {
        tpu = tpu.dump_programs(folder);
    }
    let strategy = tpu.build()?;
    println!("{}", strategy.describe());
    let digits = Digits::standard();
    let batch = flags.batch_per_replica * strategy.num_replicas_in_sync();
    let shuffled = dataset(&digits.train)?.shuffle(digits.train.len(), 42);
    if flags.custom_loop {
        // One compiled program serves batches of one size; the trainer pads the last one.
        return custom_loop(&strategy, flags, &shuffled.batch_exact(batch).prefetch(AUTOTUNE), batch);
    }
    let train = shuffled.batch(batch).prefetch(AUTOTUNE);
    let test = dataset(&digits.test)?.batch(batch);
    let adam = |model: &Model<Net>| Adam::new(1e-3).build(model);
    let metrics = Metrics::new().with(Accuracy);
    let mut trainer = Trainer::new(&strategy, Net::new, Net::forward, adam, SparseCategoricalCrossentropy, metrics)?;
    let fit = Fit::epochs(flags.epochs).validation(&test).steps_per_execution(flags.steps_per_execution);
    let history = trainer.fit(&train, fit)?;
    println!("test accuracy {:.2} %", 100.0 * history.last("val_accuracy").unwrap_or_default());
    Ok(())
}

fn custom_loop(
    strategy: &Strategy,
    flags: &Flags,
    train: &Dataset<(Array<f32>, Array<u32>)>,
    global_batch: usize,
) -> distribute::Result<()> {
    let model = strategy.scope(Net::new)?;
    let optimizer = Adam::new(1e-3).build(&model)?;
    for epoch in 0..flags.epochs {
        let (mut total, mut steps) = (0.0, 0);
        for batch in strategy.distribute_dataset(train)? {
            let losses = strategy.run_step((&model, &optimizer, batch?), |context, (model, optimizer, (x, y))| {
                let (x, y) = (context.tensor::<2>(&x)?, context.int_tensor::<1>(&y)?);
                let loss = context.average_loss(cross_entropy_per_example(model.forward(x), y)?, global_batch);
                optimizer.minimize(context, &loss)?;
                Ok::<_, distribute::Error>(loss)
            })?;
            total += strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.into_scalar::<f32>();
            steps += 1;
        }
        println!("epoch {epoch}: loss {:.4}", total / steps.max(1) as f32);
    }
    Ok(())
}

fn dataset(split: &Split) -> distribute::Result<Dataset<(Array<f32>, Array<u32>)>> {
    let images = Array::new([split.len(), PIXELS], split.images.clone())?;
    Ok(Dataset::from_tensor_slices((images, Array::from(split.labels.clone()))))
}
