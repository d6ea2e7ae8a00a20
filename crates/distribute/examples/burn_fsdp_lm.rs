//! A language model whose parameters are sharded: `cargo run --release -p distribute --features burn --example
//! burn_fsdp_lm -- --devices CPU:0,CPU:1`
//!
//! Each replica holds a part of every weight, of its gradient and of its state; a layer's weights are gathered while it
//! computes. The model does not know. `-- --mirrored` trains the same with whole copies, to the same losses. As four
//! processes: `distribute run --workers 4 -- target/release/examples/burn_fsdp_lm --width 1024`.
#![expect(clippy::print_stdout, reason = "it prints what it measures")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Int, Tensor};
use clap::Parser;
use distribute::Error;
use distribute::burn::Clip;
use distribute::burn::prelude::*;
use distribute::train::checkpoint::CheckpointManager;
use text::Text;

#[path = "shared/files.rs"]
mod files;
#[path = "shared/text.rs"]
mod text;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains a language model with sharded parameters, gradients and optimizer state.
#[derive(Parser)]
struct Flags {
    /// Texts to train on. Default: the project's documentation.
    #[arg(long, num_args = 1..)]
    text: Vec<PathBuf>,
    /// Devices of this process, such as CPU:0,CPU:1.
    #[arg(long, value_delimiter = ',', default_value = "CPU:0")]
    devices: Vec<String>,
    /// Gives every replica a whole copy instead.
    #[arg(long)]
    mirrored: bool,
    /// Shards within each host and mirrors across hosts.
    #[arg(long, conflicts_with = "mirrored")]
    hybrid: bool,
    /// Number of steps.
    #[arg(long, default_value_t = 60)]
    steps: usize,
    /// Global batch: windows per step, over all replicas.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Number of characters in a window.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(4..=4096))]
    context: u32,
    /// Width of the layers: elements per character.
    #[arg(long, default_value_t = 128)]
    width: usize,
    /// Number of attention heads, which share the width.
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// Number of layers.
    #[arg(long, default_value_t = 3)]
    layers: usize,
    /// Learning rate of Adam.
    #[arg(long, default_value_t = 1e-3)]
    learning_rate: f64,
    /// Folder of a checkpoint, which is restored if it exists, from any number of replicas, and saved at the end.
    #[arg(long)]
    checkpoint: Option<PathBuf>,
    /// File for the losses of all steps, one a line.
    #[arg(long)]
    losses: Option<PathBuf>,
    /// Seed of initial values and of the order of windows.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

#[derive(Module, Debug)]
struct Layer {
    norm1: LayerNorm,
    attention: MultiHeadAttention,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Layer {
    fn new(flags: &Flags, device: &Device) -> Layer {
        let width = flags.width;
        Layer {
            norm1: LayerNormConfig::new(width).init(device),
            attention: MultiHeadAttentionConfig::new(width, flags.heads).with_dropout(0.0).init(device),
            norm2: LayerNormConfig::new(width).init(device),
            up: LinearConfig::new(width, 4 * width).init(device),
            down: LinearConfig::new(4 * width, width).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [windows, length, _] = x.dims();
        let later = generate_autoregressive_mask(windows, length, &x.device());
        let input = MhaInput::self_attn(self.norm1.forward(x.clone())).mask_attn(later);
        let x = self.attention.forward(input).context + x;
        self.down.forward(gelu(self.up.forward(self.norm2.forward(x.clone())))) + x
    }
}

#[derive(Module, Debug)]
struct Transformer {
    characters: Embedding,
    positions: Embedding,
    layers: Vec<Layer>,
    norm: LayerNorm,
    head: Linear,
}

impl Transformer {
    fn new(flags: &Flags, vocabulary: usize, device: &Device) -> Transformer {
        Transformer {
            characters: EmbeddingConfig::new(vocabulary, flags.width).init(device),
            positions: EmbeddingConfig::new(flags.context as usize, flags.width).init(device),
            layers: (0..flags.layers).map(|_| Layer::new(flags, device)).collect(),
            norm: LayerNormConfig::new(flags.width).init(device),
            head: LinearConfig::new(flags.width, vocabulary).init(device),
        }
    }

    /// Maps (windows, length) characters to (windows, length, vocabulary) logits of the next characters.
    fn forward(&self, text: Tensor<2, Int>) -> Tensor<3> {
        let places = Tensor::<1, Int>::arange(0..text.dims()[1] as i64, &text.device());
        let x = self.characters.forward(text) + self.positions.forward(places.unsqueeze());
        let x = self.layers.iter().fold(x, |x, layer| layer.forward(x));
        self.head.forward(self.norm.forward(x))
    }
}

fn main() -> ExitCode {
    distribute::init_logging();
    distribute::exit(run(&Flags::parse()))
}

fn run(flags: &Flags) -> distribute::Result<()> {
    if flags.heads == 0 || !flags.width.is_multiple_of(flags.heads) {
        return Err(Error::program(format!("--width {} cannot be divided among --heads {}", flags.width, flags.heads)));
    }
    // One line chooses what each replica holds.
    let (devices, several) = (flags.devices.clone(), distribute::cluster::Membership::from_env()?.is_some());
    let strategy = match (flags.mirrored, several) {
        (true, true) => MultiWorkerMirroredStrategy::builder().devices(devices).build()?,
        (true, false) => MirroredStrategy::builder().devices(devices).build()?,
        (false, _) => FullyShardedStrategy::builder().devices(devices).hybrid(flags.hybrid).build()?,
    };
    train(&strategy, flags, &Text::read(&flags.text)?)
}

fn train(strategy: &Strategy, flags: &Flags, text: &Text) -> distribute::Result<()> {
    let (batch, context) = (flags.batch, flags.context as usize);
    let windows = text.windows(&text.train, context, context / 2, batch)?;
    let data = Dataset::from_tensor_slices(windows.clone()).shuffle(windows.shape()[0], flags.seed);
    let data = strategy.distribute_dataset(&data.batch_exact(batch).repeat_forever().take(flags.steps))?;
    let model = strategy.scope(|device| {
        device.seed(flags.seed);
        Transformer::new(flags, text.vocabulary.len(), device)
    })?;
    let optimizer = Adam::new(flags.learning_rate).build(&model)?.clip(Clip::GlobalNorm(1.0))?;
    let mut checkpoints = flags.checkpoint.as_ref().map(|folder| CheckpointManager::new(folder).keep(1));
    let restored = checkpoints.as_mut().map(|checkpoints| checkpoints.restore::<()>(strategy, &[&model, &optimizer]));
    let before = restored.transpose()?.flatten().map_or(0, |(step, ())| step);
    if strategy.is_chief() {
        println!("burn_fsdp_lm · {} · {} params", strategy.describe(), model.num_parameters());
        if before > 0 {
            println!("restored the checkpoint of step {before}");
        }
    }
    let (began, mut losses) = (Instant::now(), Vec::with_capacity(flags.steps));
    for part in &data {
        let shares = strategy.run((&model, &optimizer, part?), |ctx, (model, optimizer, windows)| {
            let windows = ctx.int_tensor::<2>(&windows)?;
            let [count, length] = windows.dims();
            let logits = model.forward(windows.clone().slice([0..count, 0..length - 1])).flatten::<2>(0, 1);
            let next = windows.slice([0..count, 1..length]).flatten::<1>(0, 1);
            let loss = ctx.average_loss(cross_entropy_per_example(logits, next)?, batch * context);
            optimizer.minimize(ctx, &loss)?;
            Ok(loss.inner())
        })?;
        let loss = strategy.reduce(ReduceOp::Sum, &shares, Axis::None)?.into_scalar::<f32>();
        losses.push(loss);
        if strategy.is_chief() && losses.len() % 10 == 1 {
            println!("step {:>4}  loss {loss:.4}", losses.len());
        }
    }
    let spent = began.elapsed().as_secs_f64();
    if let Some(checkpoints) = &mut checkpoints {
        checkpoints.save(strategy, before + flags.steps as u64, &[&model, &optimizer], &())?;
        checkpoints.finish_everywhere(strategy)?;
    }
    if strategy.is_chief() {
        println!("last loss            {:.4}", losses.last().copied().unwrap_or(f32::NAN));
        println!("by frequency alone   {:.4}", text.unigram_bits() * std::f64::consts::LN_2);
        println!("characters a second  {:.0}", (losses.len() * batch * context) as f64 / spent);
        println!("peak memory          {:.0} MiB of this process", peak_mib());
        if let Some(file) = &flags.losses {
            let lines: String = losses.iter().map(|loss| format!("{loss}\n")).collect();
            std::fs::write(file, lines).map_err(Error::program)?;
        }
    }
    Ok(())
}

/// Returns the largest resident memory of this process so far; 0 where the kernel does not tell.
fn peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok()).unwrap_or(0.0) / 1024.0
}
