//! Handwritten digits without a loop of one's own: `cargo run --release -p distribute --example keras_mnist`
//!
//! On two replicas: `-- CPU:0,CPU:1`; as two processes: `distribute run --workers 2 -- target/release/examples/keras_mnist`.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt")]

use candle_core::{Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use distribute::digits::{Digits, PIXELS, Split};
use distribute::prelude::*;
use distribute::train::callbacks::{EarlyStopping, LearningRateSchedule};
use distribute::train::metrics::{Accuracy, Metrics, TopK};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

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

fn main() -> distribute::Result<()> {
    distribute::init_logging();
    let devices: Vec<String> =
        std::env::args().nth(1).unwrap_or("CPU:0".to_owned()).split(',').map(str::to_owned).collect();
    let strategy = match distribute::cluster::Membership::from_env()? {
        Some(_) => MultiWorkerMirroredStrategy::builder().devices(devices).build()?,
        None => MirroredStrategy::builder().devices(devices).build()?,
    };
    let digits = Digits::load(None)?;
    let train = Dataset::from_tensor_slices(tensors(&digits.train)?)
        .shuffle(digits.train.len(), 42)
        .batch(128)
        .prefetch(AUTOTUNE);
    let (images, labels) = tensors(&digits.test)?;
    let test = Dataset::from_tensor_slices((images.clone(), labels.clone())).batch(1000);

    let adam = |model: &Model<Mlp>| Adam::new(1e-3).build(model);
    let metrics = Metrics::new().with(Accuracy).with(TopK(3));
    let mut trainer = Trainer::new(&strategy, Mlp::new, adam, SparseCategoricalCrossentropy, metrics)?;
    let fit = Fit::epochs(6)
        .validation(&test)
        .callback(EarlyStopping::new("val_loss").patience(1))
        .callback(LearningRateSchedule::new(|epoch, rate| if epoch < 5 { rate } else { 3e-4 }))
        .progress("keras_mnist");
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
