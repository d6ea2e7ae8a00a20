//! A character-level language model: `cargo run --release -p distribute --example char_lm -- --devices CPU:0,CPU:1`
//!
//! A small decoder-only transformer is trained on this project's own documentation, or on any files: `-- --text PATH
//! PATH`. As two processes: `distribute run --workers 2 -- target/release/examples/char_lm`. With the layers of each
//! replica split between two devices: `-- --devices CPU:0,CPU:1 --tensor-parallel 2`. With parts of them on all
//! replicas: `-- --devices CPU:0,CPU:1 --sharded`, which goes with `--tensor-parallel` too. With replicas that train
//! apart for 50 steps at a time: `-- --devices CPU:0,CPU:1 --diloco 50`. It writes at the end, with a cache of keys and
//! values.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt to write")]

use std::f64::consts::{LN_2, PI};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use cache::{KeysAndValues, remember};
use candle_core::{DType, Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Init, VarBuilder};
use clap::Parser;
use distribute::Error;
use distribute::candle::{
    AttentionMask, Clip, ColumnParallelLinear, ColumnParallelOptions, LayerNorm, Model, RowParallelLinear,
    RowParallelOptions, Sharded, VocabParallelEmbedding, add, attention, column_parallel_linear,
    gather_from_tensor_group, layer_norm, relu, row_parallel_linear, softmax, vocab_parallel_cross_entropy_per_example,
    vocab_parallel_embedding_with,
};
use distribute::input::Array;
use distribute::prelude::*;
use distribute::train::progress::{Options, Progress, Summary};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use text::Text;

#[path = "shared/apart.rs"]
mod apart;
#[path = "shared/cache.rs"]
mod cache;
#[path = "shared/files.rs"]
mod files;
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
    /// Number of neighbouring devices that share the layers of one replica.
    #[arg(long, default_value_t = 1)]
    tensor_parallel: usize,
    /// Gives each replica a part of every large parameter, gradient and average; layers are gathered one at a time.
    #[arg(long)]
    sharded: bool,
    #[command(flatten)]
    apart: apart::Apart,
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
    /// Computes all characters of the window again for each one that is written, rather than keeping their keys and
    /// values. The same is written, later.
    #[arg(long)]
    no_cache: bool,
    /// Sampling temperature: near 0 always the most likely character, 1 the learnt distribution.
    #[arg(long, default_value_t = 0.7)]
    temperature: f64,
    /// Seed of initial values, of the order of windows and of the sample.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

/// Attention to preceding characters, and a feed-forward network for each character. Of both, a tensor rank has a part:
/// some of the heads, some of the inner elements.
struct Layer {
    before: (LayerNorm, LayerNorm),
    attention: (ColumnParallelLinear, RowParallelLinear),
    dense: (ColumnParallelLinear, RowParallelLinear),
    heads: usize,
}

impl Layer {
    fn new(flags: &Flags, vb: VarBuilder<'_>) -> CandleResult<Layer> {
        let width = flags.width;
        let split = ColumnParallelOptions::default().gather_output(false);
        let joined = RowParallelOptions::default().input_is_parallel(true);
        Ok(Layer {
            before: (layer_norm(width, 1e-5, vb.pp("norm1"))?, layer_norm(width, 1e-5, vb.pp("norm2"))?),
            attention: (
                column_parallel_linear(width, 3 * width, split.bias(false).blocks(3), vb.pp("qkv"))?,
                row_parallel_linear(width, width, joined.bias(false), vb.pp("projection"))?,
            ),
            dense: (
                column_parallel_linear(width, 4 * width, split, vb.pp("dense1"))?,
                row_parallel_linear(4 * width, width, joined, vb.pp("dense2"))?,
            ),
            heads: flags.heads / flags.tensor_parallel,
        })
    }

    fn forward(&self, x: &Tensor, seen: &mut Seen) -> CandleResult<Tensor> {
        let x = add(&self.attend(&self.before.0.forward(x)?, seen)?, x)?;
        let inner = relu(&self.dense.0.forward(&self.before.1.forward(&x)?)?)?.sqr()?;
        add(&self.dense.1.forward(&inner)?, &x)
    }

    fn attend(&self, x: &Tensor, seen: &mut Seen) -> CandleResult<Tensor> {
        let (batch, length, _) = x.dims3()?;
        let parts = self.attention.0.forward(x)?.reshape((batch, length, 3, self.heads, ()))?;
        let part = |at| parts.narrow(2, at, 1)?.squeeze(2)?.transpose(1, 2);
        let (queries, keys, values): (Tensor, Tensor, Tensor) = (part(0)?, part(1)?, part(2)?);
        let (keys, values) = remember(seen, (keys, values))?;
        let attended = attention(&queries, &keys, &values, AttentionMask::Causal)?;
        self.attention.1.forward(&attended.transpose(1, 2)?.flatten_from(2)?)
    }
}

/// The keys and values of the characters that a layer has seen.
type Seen = Option<KeysAndValues>;

struct Transformer {
    characters: VocabParallelEmbedding,
    positions: Tensor,
    layers: Vec<Sharded<Layer>>,
    norm: LayerNorm,
    head: ColumnParallelLinear,
}

impl Transformer {
    fn new(flags: &Flags, vocabulary: usize, vb: VarBuilder<'_>) -> CandleResult<Transformer> {
        let (width, context) = (flags.width, flags.context as usize);
        // Each tensor rank has equally many characters; those beyond the vocabulary do not occur.
        let vocabulary = vocabulary.next_multiple_of(flags.tensor_parallel);
        let small = Init::Randn { mean: 0.0, stdev: 0.02 };
        Ok(Transformer {
            characters: vocab_parallel_embedding_with(vocabulary, width, small, vb.pp("characters"))?,
            positions: vb.get_with_hints((context, width), "positions", small)?,
            layers: (0..flags.layers)
                .map(|layer| Sharded::new(vb.pp(format!("layer{layer}")), |vb| Layer::new(flags, vb)))
                .collect::<CandleResult<_>>()?,
            norm: layer_norm(width, 1e-5, vb.pp("norm"))?,
            head: column_parallel_linear(
                width,
                vocabulary,
                ColumnParallelOptions::default().gather_output(false),
                vb.pp("head"),
            )?,
        })
    }
}

impl Transformer {
    /// Returns the state of layers that have seen nothing.
    fn nothing_seen(&self) -> Vec<Seen> {
        vec![None; self.layers.len()]
    }

    /// Computes the logits of characters that continue those seen, like [`forward`](Module::forward).
    fn following(&self, text: &Tensor, seen: &mut [Seen]) -> CandleResult<Tensor> {
        let (before, length) = (seen_length(seen)?, text.dim(1)?);
        let mut x = self.characters.forward(text)?.broadcast_add(&self.positions.narrow(0, before, length)?)?;
        for (layer, seen) in self.layers.iter().zip(seen) {
            x = layer.run(&x, |layer, x| layer.forward(x, seen))?;
        }
        self.head.forward(&self.norm.forward(&x)?)
    }
}

/// Maps (windows, length) characters to (windows, length, vocabulary) logits of the next characters: on each tensor
/// rank, those of its part of the vocabulary.
impl Module for Transformer {
    fn forward(&self, text: &Tensor) -> CandleResult<Tensor> {
        self.following(text, &mut self.nothing_seen())
    }
}

/// Returns the number of characters that layers have seen.
fn seen_length(seen: &[Seen]) -> CandleResult<usize> {
    seen.first().and_then(Option::as_ref).map_or(Ok(0), |(keys, _)| keys.dim(2))
}

fn main() -> ExitCode {
    distribute::init_logging();
    distribute::exit(run(&Flags::parse()))
}

fn run(flags: &Flags) -> distribute::Result<()> {
    let (devices, ranks) = (flags.devices.clone(), flags.tensor_parallel);
    let strategy = match distribute::cluster::Membership::from_env()? {
        _ if flags.sharded => FullyShardedStrategy::builder().devices(devices).tensor_parallel(ranks).build()?,
        Some(_) => MultiWorkerMirroredStrategy::builder().devices(devices).tensor_parallel(ranks).build()?,
        None => MirroredStrategy::builder().devices(devices).tensor_parallel(ranks).build()?,
    };
    if flags.heads == 0 || !flags.width.is_multiple_of(flags.heads) {
        return Err(Error::program(format!("--width {} cannot be divided among --heads {}", flags.width, flags.heads)));
    }
    if !flags.heads.is_multiple_of(ranks) {
        let heads = flags.heads;
        return Err(Error::program(format!("--heads {heads} cannot be divided among --tensor-parallel {ranks}")));
    }
    let strategy = flags.apart.over(strategy)?;
    train(&strategy, flags, &Text::read(&flags.text)?)
}

fn train(strategy: &Strategy, flags: &Flags, text: &Text) -> distribute::Result<()> {
    let (batch, context) = (flags.batch, flags.context as usize);
    let windows = tensor(&text.windows(&text.train, context, context / 2, batch)?)?;
    let validation = tensor(&text.windows(&text.validation, context, context, 1)?)?;
    let data = Dataset::from_tensor_slices(windows.clone()).shuffle(windows.dim(0)?, flags.seed).batch_exact(batch);
    let data = strategy.distribute_dataset(&data.take(flags.steps.unwrap_or(usize::MAX)).prefetch(AUTOTUNE))?;
    let validation = strategy.distribute_dataset(&Dataset::from_tensor_slices(validation).batch(batch))?;
    let model = strategy.scope_seeded(flags.seed, |vb| Transformer::new(flags, text.vocabulary.len(), vb))?;
    let optimizer = AdamW::new(flags.learning_rate, 0.05).build(&model)?.clip(Clip::GlobalNorm(1.0))?;

    let title = format!("char_lm · {} · {} params", strategy.describe(), model.num_parameters());
    let (epochs, steps_per_epoch) = (flags.epochs, data.steps().map(|steps| steps as u64));
    let is_chief = strategy.is_chief();
    let mut progress = Progress::from_env(Options { title, epochs, steps_per_epoch, ..Options::of(strategy) })?;
    let (mut spent, mut steps, mut bits) = (Duration::ZERO, 0, f64::NAN);
    for epoch in 1..=epochs {
        progress.epoch(epoch);
        let (began, mut sum) = (Instant::now(), 0.0);
        for (step, part) in (1..).zip(&data) {
            optimizer.set_learning_rate(rate(flags, steps, u64::from(epochs) * steps_per_epoch.unwrap_or(1)));
            let losses = strategy.run((&model, &optimizer, part?), |ctx, (model, optimizer, windows)| {
                let loss = ctx.average_loss(&losses(model, &windows)?, batch * context)?;
                optimizer.minimize(ctx, &loss)?;
                Ok(loss.detach())
            })?;
            sum += f64::from(strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.to_scalar::<f32>()?);
            steps += 1;
            progress.step(step, batch as u64, &[("loss", sum / step as f64)]);
        }
        spent += began.elapsed();
        optimizer.synchronize(strategy)?;
        let loss = evaluate(strategy, &model, &validation)?;
        bits = loss / LN_2;
        progress.end_epoch(&[("val_loss", loss), ("val_perplexity", loss.exp()), ("val_bits", bits)]);
    }
    let began = Instant::now();
    // By the first replica, on all of its tensor ranks; sharded, every replica has a part of each layer.
    let written = strategy.run(&model, |ctx, model| match ctx.replica_id() {
        replica if replica == 0 || flags.sharded => Ok(Some(write(model, flags, text)?)),
        _ => Ok(None),
    })?;
    let characters_per_s = flags.sample as f64 / began.elapsed().as_secs_f64();
    let mut extra = vec![
        ("bits per character".to_owned(), format!("{bits:.3}, of text that it has not seen")),
        ("by frequency alone".to_owned(), format!("{:.3}", text.unigram_bits())),
    ];
    if flags.sample > 0 {
        extra.insert(0, ("writing".to_owned(), format!("{characters_per_s:.0} characters/s")));
    }
    progress.finish(&Summary {
        examples_per_s: Some((steps * batch as u64) as f64 / spent.as_secs_f64()),
        training_time: Some(spent),
        replicas: strategy.num_replicas_in_sync() as u32,
        extra,
        ..Summary::default()
    });
    if let (true, Some(Some(written))) = (is_chief && flags.sample > 0, written.values().first()) {
        println!("\n{written}");
    }
    Ok(())
}

fn tensor(windows: &Array<u32>) -> CandleResult<Tensor> {
    Tensor::from_slice(windows.as_slice(), windows.shape(), &Device::Cpu)
}

/// The learning rate: warm-up over a tenth of all steps, then cosine decay to a twentieth.
fn rate(flags: &Flags, step: u64, steps: u64) -> f64 {
    let (step, steps) = (step as f64, steps as f64);
    let warm_up = (steps / 10.0).max(1.0);
    let fallen = ((step - warm_up) / (steps - warm_up).max(1.0)).clamp(0.0, 1.0);
    flags.learning_rate * ((step + 1.0) / warm_up).min(1.0) * (0.05 + 0.475 * (1.0 + (PI * fallen).cos()))
}

/// Computes the loss of each character except the first of each window.
fn losses(model: &Transformer, windows: &Tensor) -> CandleResult<Tensor> {
    let length = windows.dim(1)? - 1;
    let logits = model.forward(&windows.narrow(1, 0, length)?.contiguous()?)?;
    vocab_parallel_cross_entropy_per_example(&logits.flatten_to(1)?, &windows.narrow(1, 1, length)?.flatten_all()?)
}

/// Computes the mean loss over a text.
fn evaluate(
    strategy: &Strategy,
    model: &Model<Transformer>,
    data: &distribute::strategy::DistributedDataset<Tensor>,
) -> distribute::Result<f64> {
    let (mut loss, mut count) = (0.0, 0.0);
    for part in data {
        let sums = strategy.run((model, part?), |_, (model, windows)| {
            let losses = losses(model, &windows)?.detach().to_dtype(DType::F64)?;
            Ok(vec![losses.sum_all()?.to_scalar::<f64>()?, losses.elem_count() as f64])
        })?;
        let sums = strategy.reduce(ReduceOp::Sum, &sums, Axis::None)?;
        (loss, count) = (loss + sums[0], count + sums[1]);
    }
    Ok(loss / f64::max(count, 1.0))
}

/// Samples from the model, one character after another. Each passes through the model once, until the positions of a
/// window are used up; the second half of the window then begins the next one.
fn write(model: &Transformer, flags: &Flags, text: &Text) -> distribute::Result<String> {
    let mut random = ChaCha8Rng::seed_from_u64(flags.seed);
    let mut written = vec![text.index('\n')];
    let (context, mut window, mut seen) = (flags.context as usize, 0, model.nothing_seen());
    for _ in 0..flags.sample {
        let is_full = written.len() > window + context;
        if is_full || flags.no_cache {
            seen = model.nothing_seen();
        }
        window = if is_full { written.len() - context / 2 } else { window };
        let new = &written[window + seen_length(&seen)?..];
        let logits = model.following(&Tensor::new(new, &Device::Cpu)?.unsqueeze(0)?, &mut seen)?;
        let logits = logits.detach().get(0)?.get(new.len() - 1)?;
        let logits = match get_replica_context().and_then(|ctx| ctx.tensor_group()) {
            Some(group) => gather_from_tensor_group(&group, &logits)?,
            None => logits,
        };
        let logits = logits.narrow(0, 0, text.vocabulary.len())?;
        let chances = softmax(&(logits / flags.temperature.max(1e-3))?)?.to_vec1::<f32>()?;
        let mut point = f64::from(random.next_u32()) / f64::from(u32::MAX);
        let next = chances.iter().position(|chance| {
            point -= f64::from(*chance);
            point <= 0.0
        });
        written.push(next.unwrap_or(0) as u32);
    }
    Ok(written.iter().map(|index| text.vocabulary[*index as usize]).collect())
}
