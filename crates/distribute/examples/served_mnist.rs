//! Parameter servers without a custom loop.
//!
//! ```text
//! cargo build --release -p distribute-cli
//! cargo build --release -p distribute --features parameter-server --example served_mnist
//! target/release/distribute run --ps 2 --workers 3 -- target/release/examples/served_mnist
//! ```
//!
//! Every task makes the same description of the training. Started alone, without servers, the program trains two
//! replicas in its process instead. With a folder, `served_mnist runs/1`, it keeps the best model there, and resumes
//! from there.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::LazyLock;

use candle_core::{Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use clap::Parser;
use distribute::candle::{ServedFit, SparseCategoricalCrossentropy};
use distribute::parameter_server::Server;
use distribute::prelude::*;
use distribute::train::callbacks::{BackupAndRestore, EarlyStopping, ModelCheckpoint};
use distribute::train::metrics::{Accuracy, Metrics};
use distribute_testkit::digits::{Digits, PIXELS, Split};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains a network to read handwritten digits, on parameter servers if there are any.
#[derive(Parser)]
struct Flags {
    /// Folder for the best model and the state from which a run resumes.
    folder: Option<PathBuf>,
    /// Passes over the training data.
    #[arg(long, default_value_t = 4)]
    epochs: u32,
}

static DIGITS: LazyLock<Digits> = LazyLock::new(Digits::standard);

const BATCH: usize = 64;

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

/// Returns the part of an input pipeline.
fn part(split: &Split, context: &InputContext) -> CandleResult<Dataset<(Tensor, Tensor)>> {
    let images = Tensor::from_slice(&split.images, (split.len(), PIXELS), &Device::Cpu)?;
    let all = Dataset::from_tensor_slices((images, Tensor::from_slice(&split.labels, split.len(), &Device::Cpu)?));
    Ok(all.shard(context.num_input_pipelines, context.input_pipeline_id))
}

fn training() -> ServedTraining<Mlp> {
    let metrics = Metrics::new().with(Accuracy);
    ServedTraining::new(Mlp::new, Adam::new(1e-3), SparseCategoricalCrossentropy, metrics)
        .dataset("train", |context: &InputContext| {
            part(&DIGITS.train, context).map(|all| all.shuffle(4000, 7).batch(BATCH))
        })
        .dataset("test", |context: &InputContext| part(&DIGITS.test, context).map(|all| all.batch(BATCH)))
}

fn main() -> ExitCode {
    distribute::init_logging();
    distribute::exit(run(Flags::parse()))
}

fn run(flags: Flags) -> distribute::Result<()> {
    let (cluster, training) = (TfConfigResolver::from_env()?, training());
    if let Some(TaskType::Worker | TaskType::Ps) = cluster.task_type() {
        return Ok(Server::start(&cluster, training.program())?.join()?);
    }
    let mut trainer = match cluster.cluster_spec()?.num_tasks(TaskType::Ps) {
        0 => training.under(&MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?)?,
        _ => training.on_servers(&ParameterServerStrategy::builder(&cluster).build()?)?,
    };
    let mut fit = ServedFit::epochs(flags.epochs)
        .steps_per_epoch((DIGITS.train.len() / BATCH) as u64)
        .validation(&trainer.data("test")?)
        .callback(EarlyStopping::new("val_loss").patience(2))
        .progress("served_mnist");
    if let Some(folder) = flags.folder {
        fit = fit
            .callback(ModelCheckpoint::new(folder.join("best")).best("val_loss").set_aside_other_runs())
            .callback(BackupAndRestore::new(folder.join("backup")).every_steps(100));
    }
    println!("{}", trainer.fit("train", fit)?);
    println!("test accuracy {:.2} %", 100.0 * trainer.evaluate("test")?[1].1);
    let first = Tensor::from_slice(&DIGITS.test.images[..10 * PIXELS], (10, PIXELS), &Device::Cpu)?;
    let taken = trainer.predict(&first)?.argmax(1)?.to_vec1::<u32>()?;
    println!("the first ten test digits are {:?}, and were taken for {taken:?}", &DIGITS.test.labels[..10]);
    Ok(())
}
