//! Handwritten digits without a custom loop: `cargo run --release -p distribute --example keras_mnist`
//!
//! On two replicas: `-- CPU:0,CPU:1`; as two processes: `distribute run --workers 2 --
//! target/release/examples/keras_mnist`. With a folder, `-- CPU:0 runs/1`, it writes event files, a table and the best
//! model there, and resumes from there after Ctrl-C.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt")]

use std::path::PathBuf;
use std::process::ExitCode;

use candle_core::{Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use clap::Parser;
use distribute::candle::{Fit, Model, SparseCategoricalCrossentropy};
use distribute::prelude::*;
use distribute::train::callbacks::{
    BackupAndRestore, CsvLogger, EarlyStopping, LearningRateSchedule, ModelCheckpoint, TensorBoard,
};
use distribute::train::metrics::{Accuracy, Metrics, TopK};
use distribute::train::preemption::{SIGINT, SIGTERM, TerminationConfig};
use distribute_testkit::digits::{Digits, PIXELS, Split};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains a network to read handwritten digits.
#[derive(Parser)]
struct Flags {
    /// Devices of this process, such as CPU:0,CPU:1.
    #[arg(default_value = "CPU:0")]
    devices: String,
    /// Folder for event files, a table, the best model and the state from which a run resumes.
    folder: Option<PathBuf>,
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

fn tensors(split: &Split) -> distribute::Result<(Tensor, Tensor)> {
    let images = Tensor::from_slice(&split.images, (split.len(), PIXELS), &Device::Cpu)?;
    Ok((images, Tensor::from_slice(&split.labels, split.len(), &Device::Cpu)?))
}

fn main() -> ExitCode {
    distribute::init_logging();
    distribute::exit(run(Flags::parse()))
}

fn run(flags: Flags) -> distribute::Result<()> {
    let devices = flags.devices.split(',');
    let strategy = match distribute::cluster::Membership::from_env()? {
        Some(_) => MultiWorkerMirroredStrategy::builder().devices(devices).build()?,
        None => MirroredStrategy::builder().devices(devices).build()?,
    };
    let digits = Digits::standard();
    let train = Dataset::from_tensor_slices(tensors(&digits.train)?)
        .shuffle(digits.train.len(), 42)
        .batch(128)
        .prefetch(AUTOTUNE);
    let (images, labels) = tensors(&digits.test)?;
    let test = Dataset::from_tensor_slices((images.clone(), labels.clone())).batch(1000);

    let adam = |model: &Model<Mlp>| Adam::new(1e-3).build(model);
    let metrics = Metrics::new().with(Accuracy).with(TopK(3));
    let mut trainer = Trainer::new(&strategy, Mlp::new, adam, SparseCategoricalCrossentropy, metrics)?;
    let mut fit = Fit::epochs(6)
        .validation(&test)
        .callback(EarlyStopping::new("val_loss").patience(2))
        .callback(LearningRateSchedule::new(|epoch, rate| if epoch < 5 { rate } else { 3e-4 }))
        .progress("keras_mnist");
    if let Some(folder) = flags.folder {
        fit = fit
            .callback(TensorBoard::new(&folder).histograms(1).every_steps(10))
            .callback(CsvLogger::new(folder.join("history.csv")))
            .callback(ModelCheckpoint::new(folder.join("best")).best("val_loss").set_aside_other_runs())
            .callback(BackupAndRestore::new(folder.join("backup")).every_steps(50))
            .stop_on(TerminationConfig::default().signals(vec![SIGINT, SIGTERM]));
    }
    let history = trainer.fit(&train, fit)?;
    let predicted = trainer.predict(&Dataset::from_tensor_slices(images).batch(1000))?.argmax(1)?;
    if strategy.is_chief() {
        println!("{history}");
        let (predicted, labels) =
            (predicted.narrow(0, 0, 10)?.to_vec1::<u32>()?, labels.narrow(0, 0, 10)?.to_vec1::<u32>()?);
        println!("the first ten test digits are {labels:?}, and were taken for {predicted:?}");
    }
    Ok(())
}
