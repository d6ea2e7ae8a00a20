//! Training in 16 bits compared with f32: `cargo run --release -p distribute --example mixed_precision`
//!
//! In mixed precision the model computes in f16 or bf16, and the optimizer updates in f32. With f16, losses are scaled
//! so that gradients do not underflow. On two replicas: `-- --devices CPU:0,CPU:1`.
#![expect(clippy::print_stdout, reason = "it prints what each has learnt")]

use std::process::ExitCode;
use std::time::Instant;

use candle_core::{DType, Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use clap::Parser;
use distribute::candle::{LossScale, ScopeOptions};
use distribute::prelude::*;
use distribute_testkit::digits::{Digits, PIXELS, Split};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains the same model on the same digits in f32, in f16 and in bf16.
#[derive(Parser)]
struct Flags {
    /// Devices of this process, such as CPU:0,CPU:1.
    #[arg(long, value_delimiter = ',', default_value = "CPU:0")]
    devices: Vec<String>,
    /// Passes over the training data.
    #[arg(long, default_value_t = 2)]
    epochs: u32,
    /// Number of training images, which are generated.
    #[arg(long, default_value_t = 8000)]
    images: usize,
}

const BATCH: usize = 64;

struct Mlp(Linear, Linear);

impl Mlp {
    fn new(vb: VarBuilder<'_>) -> CandleResult<Mlp> {
        Ok(Mlp(linear(PIXELS, 128, vb.pp("fc1"))?, linear(128, 10, vb.pp("fc2"))?))
    }
}

/// Computes in the type of the variables. Logits are in f32, because softmax is too inaccurate in 16 bits.
impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let x = x.to_dtype(self.0.weight().dtype())?;
        self.1.forward(&self.0.forward(&x)?.relu()?)?.to_dtype(DType::F32)
    }
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    distribute::init_logging();
    distribute::exit(run(&flags))
}

fn run(flags: &Flags) -> distribute::Result<()> {
    let strategy = MirroredStrategy::builder().devices(flags.devices.clone()).build()?;
    let digits = Digits::drawn(0, flags.images, 2000);
    let outcomes = [DType::F32, DType::F16, DType::BF16].map(|dtype| train(&strategy, flags, &digits, dtype));
    let outcomes = outcomes.into_iter().collect::<distribute::Result<Vec<Outcome>>>()?;

    let row = |what: &str, value: &dyn Fn(&Outcome) -> String| {
        let values: String = outcomes.iter().map(|outcome| format!("{:>12}", value(outcome))).collect();
        println!("{what:24}{values}");
    };
    let kib = |bytes: usize| format!("{} KiB", bytes.div_ceil(1024));
    row("the model computes in", &|outcome| outcome.dtype.as_str().to_owned());
    row("loss of the last epoch", &|outcome| format!("{:.4}", outcome.loss));
    row("test accuracy", &|outcome| format!("{:.2} %", outcome.accuracy));
    row("variables", &|outcome| kib(outcome.model_bytes));
    row("state of the optimizer", &|outcome| kib(outcome.state_bytes));
    row("loss scale at the end", &|outcome| outcome.scale.to_string());
    row("training time", &|outcome| format!("{:.1} s", outcome.seconds));
    println!("{WORDS}");
    Ok(())
}

/// An explanation of the numbers.
const WORDS: &str = "
In 16 bits, variables, activations and the gradients that replicas exchange take half the bytes. The optimizer keeps a
copy of the variables in f32 in addition to its moments, so that small updates are not lost. bf16 has the range of f32
and needs no loss scale. Do not expect a CPU to be faster: candle converts 16 bits to f32 there for each matrix product,
bf16 in a copy of the whole matrix, and rounds the results.";

/// The results of one training run.
struct Outcome {
    dtype: DType,
    loss: f32,
    accuracy: f64,
    model_bytes: usize,
    state_bytes: usize,
    scale: f64,
    seconds: f64,
}

fn train(strategy: &Strategy, flags: &Flags, digits: &Digits, dtype: DType) -> distribute::Result<Outcome> {
    let began = Instant::now();
    let data = tensors(&digits.train)?.shuffle(digits.train.len(), 42).batch(BATCH).prefetch(AUTOTUNE);
    let data = strategy.distribute_dataset(&data)?;
    let model = strategy.scope_with(ScopeOptions::default().dtype(dtype), Mlp::new)?;
    let optimizer = Adam::new(1e-3).build(&model)?;
    let optimizer = if dtype == DType::F16 { optimizer.scale_losses(LossScale::dynamic())? } else { optimizer };
    // A last batch that is short is a part of one.
    let (mut loss, batches) = (f32::NAN, digits.train.len() as f32 / BATCH as f32);
    for _ in 0..flags.epochs {
        let mut sum = 0.0;
        for batch in &data {
            let losses = strategy.run((&model, &optimizer, batch?), |ctx, (model, optimizer, (x, y))| {
                let loss = ctx.average_loss(&cross_entropy_per_example(&model.forward(&x)?, &y)?, BATCH)?;
                optimizer.minimize(ctx, &loss)?;
                Ok(loss.detach())
            })?;
            sum += strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.to_scalar::<f32>()?;
        }
        loss = sum / batches;
    }
    let seconds = began.elapsed().as_secs_f64();
    let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
    Ok(Outcome {
        dtype,
        loss,
        accuracy: accuracy(model.first(), &digits.test)?,
        model_bytes: model.variables().iter().map(|variable| bytes(&variable.components()[0])).sum(),
        state_bytes: optimizer.state_bytes(),
        scale: optimizer.loss_scale(),
        seconds,
    })
}

/// Computes the percentage of digits that one copy of the model classifies correctly.
fn accuracy(model: &Mlp, split: &Split) -> distribute::Result<f64> {
    let images = Tensor::from_slice(&split.images, (split.len(), PIXELS), &Device::Cpu)?;
    let found = model.forward(&images)?.argmax(1)?.to_vec1::<u32>()?;
    let correct = found.iter().zip(&split.labels).filter(|(found, label)| found == label).count();
    Ok(100.0 * correct as f64 / split.len().max(1) as f64)
}

fn tensors(split: &Split) -> distribute::Result<Dataset<(Tensor, Tensor)>> {
    let images = Tensor::from_slice(&split.images, (split.len(), PIXELS), &Device::Cpu)?;
    Ok(Dataset::from_tensor_slices((images, Tensor::from_slice(&split.labels, split.len(), &Device::Cpu)?)))
}
