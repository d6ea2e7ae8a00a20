//! Handwritten digits that other processes smooth, as a job of two data workers and a training program.
//!
//! ```text
//! cargo build --release -p distribute-cli
//! cargo build --release -p distribute --features data-service --example data_service
//! target/release/distribute data-service --bind 127.0.0.1:5050 --workers 2 -- \
//!     target/release/examples/data_service serve
//! DISTRIBUTE_DATA_SERVICE=127.0.0.1:5050 target/release/examples/data_service CPU:0,CPU:1
//! ```
//!
//! Data workers may be killed meanwhile: the losses stay the same, bit for bit.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt")]

use std::process::ExitCode;

use candle_core::{Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use clap::Parser;
use distribute::candle::{Fit, Model, SparseCategoricalCrossentropy};
use distribute::data_service::{DataWorker, ServiceOptions, dataset};
use distribute::prelude::*;
use distribute::train::metrics::{Accuracy, Metrics};
use distribute_testkit::digits::{Digits, PIXELS, Split};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains a network to read handwritten digits that data workers serve.
#[derive(Parser)]
struct Flags {
    /// Devices of this process, such as CPU:0,CPU:1; or `serve`, for a data worker.
    #[arg(value_name = "DEVICES|serve", default_value = "CPU:0")]
    what: String,
    /// Passes over the training data.
    #[arg(long, default_value_t = 3)]
    epochs: u32,
}

struct Mlp(Linear, Linear);

impl Mlp {
    fn new(vb: VarBuilder<'_>) -> CandleResult<Mlp> {
        Ok(Mlp(linear(PIXELS, 64, vb.pp("fc1"))?, linear(64, 10, vb.pp("fc2"))?))
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        self.1.forward(&self.0.forward(x)?.relu()?)
    }
}

/// Images and their labels, in memory.
fn digits(split: &Split) -> distribute::Result<Dataset<(Tensor, Tensor)>> {
    let images = Tensor::from_slice(&split.images, (split.len(), PIXELS), &Device::Cpu)?;
    Ok(Dataset::from_tensor_slices((images, Tensor::from_slice(&split.labels, split.len(), &Device::Cpu)?)))
}

/// The mean of each pixel and its neighbours to the left and right: what is too slow for the training program.
fn smooth((image, label): (Tensor, Tensor)) -> CandleResult<(Tensor, Tensor)> {
    let sum = ((&image + image.roll(1, 0)?)? + image.roll(-1, 0)?)?;
    Ok(((sum / 3.0)?, label))
}

/// The body of a data worker.
fn serve() -> distribute::Result<()> {
    let train = Digits::standard().train;
    // Divided before the expensive part; with a list of files, each split would read files of its own.
    let smoothed = digits(&train)?.shuffle(train.len(), 42).shard_hint().map(|example| Ok(smooth(example)?));
    Ok(DataWorker::builder().dataset("digits", &smoothed).serve()?)
}

fn train(devices: &str, epochs: u32) -> distribute::Result<()> {
    let strategy = MirroredStrategy::builder().devices(devices.split(',')).build()?;
    let served: Dataset<(Tensor, Tensor)> = dataset(ServiceOptions::new("digits").splits(8))?;
    let test = digits(&Digits::standard().test)?.map(|example| Ok(smooth(example)?)).batch(1000);

    let adam = |model: &Model<Mlp>| Adam::new(1e-3).build(model);
    let metrics = Metrics::new().with(Accuracy);
    let mut trainer = Trainer::new(&strategy, Mlp::new, adam, SparseCategoricalCrossentropy, metrics)?;
    let history = trainer.fit(&served.batch(128).prefetch(AUTOTUNE), Fit::epochs(epochs).validation(&test))?;
    println!("losses: {:?}", history.of("loss"));
    println!("test accuracy: {:.4}", history.of("val_accuracy").last().unwrap_or(&0.0));
    Ok(())
}

fn main() -> ExitCode {
    distribute::init_logging();
    let flags = Flags::parse();
    distribute::exit(match flags.what.as_str() {
        "serve" => serve(),
        devices => train(devices, flags.epochs),
    })
}
