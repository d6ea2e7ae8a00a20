//! A character-level language model of burn: `cargo run --release -p distribute --features burn --example
//! burn_char_lm -- --devices CPU:0,CPU:1`
//!
//! A small decoder-only transformer is trained on this project's own documentation, or on any files: `-- --text PATH
//! PATH`. As two processes: `distribute run --workers 2 -- target/release/examples/burn_char_lm`. On a TPU, or on XLA's
//! plugin for CPUs (docs/tpus.md): `--features burn,pjrt`, and `-- --tpu`.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt to write")]

use std::f64::consts::{LN_2, PI};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use burn::module::{Initializer, Module, Param};
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::{relu, softmax};
use burn::tensor::{Device, Int, Tensor};
use clap::Parser;
use distribute::Error;
use distribute::burn::prelude::*;
use distribute::burn::{Clip, Model};
use distribute::input::Array;
use distribute::strategy::DistributedDataset;
use distribute::train::progress::{Options, Progress, Summary};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use text::Text;

#[path = "shared/files.rs"]
mod files;
#[cfg(feature = "pjrt")]
#[path = "shared/on_tpu.rs"]
mod on_tpu;
#[path = "shared/text.rs"]
mod text;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains a language model on texts and writes a sample.
#[derive(Parser)]
struct Flags {
    /// Texts to train on. Default: the project's documentation.
    #[arg(long, num_args = 1..)]
    text: Vec<PathBuf>,
    /// Devices of this process, such as CPU:0,CPU:1.
    #[arg(long, value_delimiter = ',', default_value = "CPU:0")]
    devices: Vec<String>,
    #[cfg(feature = "pjrt")]
    #[command(flatten)]
    on_tpu: on_tpu::OnTpu,
    /// Passes over the text.
    #[arg(long, default_value_t = 10)]
    epochs: u32,
    /// Maximum number of steps per pass.
    #[arg(long)]
    steps: Option<usize>,
    /// Global batch: windows per step, over all replicas.
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Number of characters in a window.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(4..=4096))]
    context: u32,
    /// Width of the layers: elements per character.
    #[arg(long, default_value_t = 96)]
    width: usize,
    /// Number of attention heads, which share the width.
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// Number of layers.
    #[arg(long, default_value_t = 3)]
    layers: usize,
    /// Learning rate of AdamW after warm-up, from which it decays along a cosine.
    #[arg(long, default_value_t = 4e-3)]
    learning_rate: f64,
    /// Number of characters to write at the end.
    #[arg(long, default_value_t = 400)]
    sample: usize,
    /// Sampling temperature: near 0 always the most likely character, 1 the learnt distribution.
    #[arg(long, default_value_t = 0.7)]
    temperature: f64,
    /// Seed of initial values, of the order of windows and of the sample.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

/// Attention to preceding characters, and a feed-forward network for each character.
#[derive(Module, Debug)]
struct Layer {
    norm1: LayerNorm,
    norm2: LayerNorm,
    qkv: Linear,
    projection: Linear,
    dense1: Linear,
    dense2: Linear,
    heads: usize,
}

impl Layer {
    fn new(flags: &Flags, device: &Device) -> Layer {
        let width = flags.width;
        Layer {
            norm1: LayerNormConfig::new(width).init(device),
            norm2: LayerNormConfig::new(width).init(device),
            qkv: LinearConfig::new(width, 3 * width).with_bias(false).init(device),
            projection: LinearConfig::new(width, width).with_bias(false).init(device),
            dense1: LinearConfig::new(width, 4 * width).init(device),
            dense2: LinearConfig::new(4 * width, width).init(device),
            heads: flags.heads,
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.attend(self.norm1.forward(x.clone())) + x;
        let inner = relu(self.dense1.forward(self.norm2.forward(x.clone()))).square();
        self.dense2.forward(inner) + x
    }

    fn attend(&self, x: Tensor<3>) -> Tensor<3> {
        let ([batch, length, width], device) = (x.dims(), x.device());
        let head = width / self.heads;
        let parts = self.qkv.forward(x).reshape([batch, length, 3, self.heads, head]);
        // Shape (batch, heads, length, head width).
        let part = |at: usize| {
            let part = parts.clone().slice([0..batch, 0..length, at..at + 1, 0..self.heads, 0..head]);
            part.reshape([batch, length, self.heads, head]).swap_dims(1, 2)
        };
        let scores = part(0).matmul(part(1).swap_dims(2, 3)).div_scalar((head as f64).sqrt());
        let later = generate_autoregressive_mask(1, length, &device).unsqueeze_dim::<4>(1);
        let weights =
            softmax(scores.mask_fill(later.expand([batch, self.heads, length, length]), f64::NEG_INFINITY), 3);
        self.projection.forward(weights.matmul(part(2)).swap_dims(1, 2).reshape([batch, length, width]))
    }
}

#[derive(Module, Debug)]
struct Transformer {
    characters: Embedding,
    positions: Param<Tensor<2>>,
    layers: Vec<Layer>,
    norm: LayerNorm,
    head: Linear,
}

impl Transformer {
    fn new(flags: &Flags, vocabulary: usize, device: &Device) -> Transformer {
        let (width, context) = (flags.width, flags.context as usize);
        let small = Initializer::Normal { mean: 0.0, std: 0.02 };
        Transformer {
            characters: EmbeddingConfig::new(vocabulary, width).with_initializer(small.clone()).init(device),
            positions: small.init([context, width], device),
            layers: (0..flags.layers).map(|_| Layer::new(flags, device)).collect(),
            norm: LayerNormConfig::new(width).init(device),
            head: LinearConfig::new(width, vocabulary).init(device),
        }
    }

    /// Maps (windows, length) characters to (windows, length, vocabulary) logits of the next characters.
    fn forward(&self, text: Tensor<2, Int>) -> Tensor<3> {
        let length = text.dims()[1];
        let positions = self.positions.val().narrow(0, 0, length).unsqueeze::<3>();
        let x = self.characters.forward(text) + positions;
        let x = self.layers.iter().fold(x, |x, layer| layer.forward(x));
        self.head.forward(self.norm.forward(x))
    }
}

fn main() -> ExitCode {
    distribute::init_logging();
    distribute::exit(run(&Flags::parse()))
}

/// Chooses the strategy: the only code that differs between one device and many machines.
fn choose(flags: &Flags) -> distribute::Result<Strategy> {
    #[cfg(feature = "pjrt")]
    if let Some(strategy) = flags.on_tpu.strategy()? {
        return Ok(strategy);
    }
    let devices = flags.devices.clone();
    Ok(match distribute::cluster::Membership::from_env()? {
        Some(_) => MultiWorkerMirroredStrategy::builder().devices(devices).build()?,
        None => MirroredStrategy::builder().devices(devices).build()?,
    })
}

fn run(flags: &Flags) -> distribute::Result<()> {
    let strategy = choose(flags)?;
    if flags.heads == 0 || !flags.width.is_multiple_of(flags.heads) {
        return Err(Error::program(format!("--width {} cannot be divided among --heads {}", flags.width, flags.heads)));
    }
    train(&strategy, flags, &Text::read(&flags.text)?)
}

fn train(strategy: &Strategy, flags: &Flags, text: &Text) -> distribute::Result<()> {
    let (batch, context) = (flags.batch, flags.context as usize);
    let windows = text.windows(&text.train, context, context / 2, batch)?;
    let validation = text.windows(&text.validation, context, context, 1)?;
    let data = Dataset::from_tensor_slices(windows.clone()).shuffle(windows.shape()[0], flags.seed).batch_exact(batch);
    let data = strategy.distribute_dataset(&data.take(flags.steps.unwrap_or(usize::MAX)).prefetch(AUTOTUNE))?;
    // Batches of one size, of which on a TPU each replica has an equal part: compiled steps need them.
    let of_validation = batch.min(validation.shape()[0]);
    #[cfg(feature = "pjrt")]
    let of_validation = match (strategy.pjrt(), strategy.num_replicas_in_sync()) {
        (Some(_), replicas) => (of_validation - of_validation % replicas).max(1),
        _ => of_validation,
    };
    let validation =
        strategy.distribute_dataset(&Dataset::from_tensor_slices(validation).batch_exact(of_validation))?;
    let model = strategy.scope(|device| {
        device.seed(flags.seed);
        Transformer::new(flags, text.vocabulary.len(), device)
    })?;
    let optimizer = AdamW::new(flags.learning_rate, 0.05).build(&model)?.clip(Clip::GlobalNorm(1.0))?;

    let title = format!("burn_char_lm · {} · {} params", strategy.describe(), model.num_parameters());
    let (epochs, steps_per_epoch) = (flags.epochs, data.steps().map(|steps| steps as u64));
    let is_chief = strategy.is_chief();
    let mut progress = Progress::from_env(Options { title, epochs, steps_per_epoch, ..Options::of(strategy) })?;
    let (mut spent, mut steps, mut bits) = (Duration::ZERO, 0, f64::NAN);
    for epoch in 1..=epochs {
        progress.epoch(epoch);
        let (began, mut sum) = (Instant::now(), 0.0);
        for (step, part) in (1..).zip(&data) {
            optimizer.set_learning_rate(rate(flags, steps, u64::from(epochs) * steps_per_epoch.unwrap_or(1)));
            let losses = strategy.run_step((&model, &optimizer, part?), |ctx, (model, optimizer, windows)| {
                let loss = ctx.average_loss(losses(model, ctx.int_tensor(&windows)?)?, batch * context);
                optimizer.minimize(ctx, &loss)?;
                Ok::<_, Error>(loss)
            })?;
            sum += f64::from(strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.into_scalar::<f32>());
            steps += 1;
            progress.step(step, batch as u64, &[("loss", sum / step as f64)]);
        }
        spent += began.elapsed();
        let loss = evaluate(strategy, &model, &validation)?;
        bits = loss / LN_2;
        progress.end_epoch(&[("val_loss", loss), ("val_perplexity", loss.exp()), ("val_bits", bits)]);
    }
    progress.finish(&Summary {
        examples_per_s: Some((steps * batch as u64) as f64 / spent.as_secs_f64()),
        training_time: Some(spent),
        replicas: strategy.num_replicas_in_sync() as u32,
        extra: vec![
            ("bits per character".to_owned(), format!("{bits:.3}, of text that it has not seen")),
            ("by frequency alone".to_owned(), format!("{:.3}", text.unigram_bits())),
        ],
        ..Summary::default()
    });
    let module = model.to_module(strategy)?;
    if is_chief && flags.sample > 0 {
        println!("\n{}", write(&module.valid(), flags, text)?);
    }
    Ok(())
}

/// The learning rate: warm-up over a tenth of all steps, then cosine decay to a twentieth.
fn rate(flags: &Flags, step: u64, steps: u64) -> f64 {
    let (step, steps) = (step as f64, steps as f64);
    let warm_up = (steps / 10.0).max(1.0);
    let fallen = ((step - warm_up) / (steps - warm_up).max(1.0)).clamp(0.0, 1.0);
    flags.learning_rate * ((step + 1.0) / warm_up).min(1.0) * (0.05 + 0.475 * (1.0 + (PI * fallen).cos()))
}

/// Computes the loss of each character except the first of each window.
fn losses(model: &Transformer, windows: Tensor<2, Int>) -> distribute::Result<Tensor<1>> {
    let [count, length] = windows.dims();
    let logits = model.forward(windows.clone().slice([0..count, 0..length - 1]));
    let (logits, next) = (logits.flatten(0, 1), windows.slice([0..count, 1..length]).flatten(0, 1));
    Ok(cross_entropy_per_example(logits, next)?)
}

/// Computes the mean loss over a text.
fn evaluate(
    strategy: &Strategy,
    model: &Model<Transformer>,
    data: &DistributedDataset<Array<u32>>,
) -> distribute::Result<f64> {
    let (mut loss, mut count) = (0.0, 0.0);
    for part in data {
        let sums = strategy.run_step((model, part?), |ctx, (model, windows)| {
            // Its layers do in validation what they do in training.
            let losses = losses(model, ctx.int_tensor(&windows)?)?;
            let (sum, count) = (losses.clone().sum(), losses.ones_like().sum());
            Ok::<_, Error>((ctx.weigh(sum), ctx.weigh(count)))
        })?;
        let (sums, counts): (Vec<_>, Vec<_>) = sums.into_values().into_iter().unzip();
        let total = |of_replicas| strategy.reduce(ReduceOp::Sum, &PerReplica::new(of_replicas), Axis::None);
        loss += f64::from(total(sums)?.into_scalar::<f32>());
        count += f64::from(total(counts)?.into_scalar::<f32>());
    }
    Ok(loss / f64::max(count, 1.0))
}

/// Samples from the model, one character after another.
fn write(model: &Transformer, flags: &Flags, text: &Text) -> distribute::Result<String> {
    let device = Device::flex();
    let mut random = ChaCha8Rng::seed_from_u64(flags.seed);
    let mut written = vec![text.index('\n') as i32];
    for _ in 0..flags.sample {
        let seen = &written[written.len().saturating_sub(flags.context as usize)..];
        let logits = model.forward(Tensor::<1, Int>::from_ints(seen, &device).unsqueeze());
        let last = logits.slice([0..1, seen.len() - 1..seen.len()]).flatten::<1>(0, 2);
        let chances = softmax(last.div_scalar(flags.temperature.max(1e-3)), 0).to_array()?;
        let mut point = f64::from(random.next_u32()) / f64::from(u32::MAX);
        let next = chances.as_slice().iter().position(|chance| {
            point -= f64::from(*chance);
            point <= 0.0
        });
        written.push(next.unwrap_or(0) as i32);
    }
    Ok(written.iter().map(|index| text.vocabulary[*index as usize]).collect())
}
