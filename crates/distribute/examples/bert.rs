//! BERT, pre-trained and fine-tuned: `cargo run --release -p distribute --example bert -- --devices CPU:0,CPU:1`
//!
//! A small BERT learns to predict masked words of this project's documentation, or of any files (`-- --text PATH
//! PATH`), and is saved with the names of Hugging Face's checkpoints. It is then loaded and fine-tuned to tell from
//! which page a passage is, of which few examples are given; the same is tried from scratch. A published checkpoint is
//! fine-tuned by `-- --load model.safetensors --vocabulary vocab.txt`, with its `--width`, `--heads` and `--layers`,
//! which are compared with a `config.json` in its folder. As two processes: `distribute run --workers 2 --
//! target/release/examples/bert`.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use accuracy::accuracy;
use candle_core::{DType, Device, Module, ModuleT, Result as CandleResult, Tensor};
use candle_nn::{Init, VarBuilder};
use checkpoint::{Checkpoint, write_config};
use clap::Parser;
use distribute::Error;
use distribute::candle::{
    AttentionMask, Clip, Dropout, Embedding, LayerNorm, Linear, Model, add, dropout, embedding_with, layer_norm,
};
use distribute::input::Array;
use distribute::prelude::*;
use distribute::train::progress::{Options, Progress};
use heads::MultiHead;
use passages::{Masked, Passages};
use word_pieces::WordPieces;

#[path = "shared/accuracy.rs"]
mod accuracy;
#[path = "bert/checkpoint.rs"]
mod checkpoint;
#[path = "shared/files.rs"]
mod files;
#[path = "shared/heads.rs"]
mod heads;
#[path = "shared/passages.rs"]
mod passages;
#[path = "shared/placement.rs"]
mod placement;
#[path = "shared/word_pieces.rs"]
mod word_pieces;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Pre-trains BERT on texts, and fine-tunes it to tell them apart.
#[derive(Parser)]
struct Flags {
    /// Texts, each of which is a page. Default: the project's documentation.
    #[arg(long, num_args = 1..)]
    text: Vec<PathBuf>,
    #[command(flatten)]
    placement: placement::Placement,
    /// Checkpoint to fine-tune, with the names of Hugging Face's BERT. `--width`, `--heads` and `--layers` must be
    /// those of a config.json in its folder; without this file, `--heads` is required. Default: a model that is
    /// pre-trained first.
    #[arg(long, requires = "vocabulary")]
    load: Option<PathBuf>,
    /// Word pieces, one on each line. Default: the characters and the most frequent words of the texts.
    #[arg(long)]
    vocabulary: Option<PathBuf>,
    /// Number of word pieces, without `--vocabulary`.
    #[arg(long, default_value_t = 3000, conflicts_with = "vocabulary")]
    pieces: usize,
    /// File for the pre-trained model; `config.json` and `vocab.txt` are written to its folder. Default: in a folder
    /// that is removed at the end.
    #[arg(long, conflicts_with = "load")]
    save: Option<PathBuf>,
    /// Steps of pre-training.
    #[arg(long, default_value_t = 2000)]
    steps: u64,
    /// Global batch: examples per step, over all replicas.
    #[arg(long, default_value_t = 32)]
    batch: usize,
    /// Number of word pieces of an example.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(8..=512))]
    length: u16,
    /// Width of the layers: elements per word piece.
    #[arg(long, default_value_t = 96)]
    width: usize,
    /// Number of attention heads, which share the width. Default: 4.
    #[arg(long)]
    heads: Option<usize>,
    /// Number of layers.
    #[arg(long, default_value_t = 2)]
    layers: usize,
    /// Probability with which elements are dropped in training.
    #[arg(long, default_value_t = 0.1)]
    dropout: f64,
    /// Learning rate of pre-training after warm-up, from which it falls to 0.
    #[arg(long, default_value_t = 3e-3)]
    learning_rate: f64,
    /// Number of pages to tell apart, the longest ones.
    #[arg(long, default_value_t = 8)]
    classes: usize,
    /// Number of passages of each page to fine-tune on.
    #[arg(long, default_value_t = 16)]
    examples: usize,
    /// Passes over these passages.
    #[arg(long, default_value_t = 40)]
    epochs: u64,
    /// Learning rate of fine-tuning.
    #[arg(long, default_value_t = 5e-4)]
    tuning_rate: f64,
    /// Seed of initial values, of dropout, and of the passages.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

impl Flags {
    fn heads(&self) -> usize {
        self.heads.unwrap_or(4)
    }
}

/// The number of positions of published models, and the epsilon of their normalisations.
const POSITIONS: usize = 512;
const EPSILON: f64 = 1e-12;
const SMALL: Init = Init::Randn { mean: 0.0, stdev: 0.02 };

fn linear(from: usize, to: usize, vb: &VarBuilder<'_>) -> CandleResult<Linear> {
    let bias = vb.get_with_hints(to, "bias", Init::Const(0.0))?;
    Ok(Linear::new(vb.get_with_hints((to, from), "weight", SMALL)?, Some(bias)))
}

fn embedding(count: usize, width: usize, vb: &VarBuilder<'_>) -> CandleResult<Embedding> {
    embedding_with((count, width), "weight", SMALL, vb.clone())
}

/// A layer of the encoder. Weights of attention are not dropped, unlike in the paper.
struct Layer {
    attention: MultiHead,
    attention_norm: LayerNorm,
    intermediate: Linear,
    output: Linear,
    output_norm: LayerNorm,
    dropouts: [Dropout; 2],
}

impl Layer {
    fn new(flags: &Flags, vb: &VarBuilder<'_>) -> CandleResult<Layer> {
        let (width, attention, output) = (flags.width, vb.pp("attention"), vb.pp("output"));
        let of_itself = |name| linear(width, width, &attention.pp("self").pp(name));
        Ok(Layer {
            attention: MultiHead {
                query: of_itself("query")?,
                key: of_itself("key")?,
                value: of_itself("value")?,
                output: linear(width, width, &attention.pp("output.dense"))?,
                heads: flags.heads(),
            },
            attention_norm: layer_norm(width, EPSILON, attention.pp("output.LayerNorm"))?,
            intermediate: linear(width, 4 * width, &vb.pp("intermediate.dense"))?,
            output: linear(4 * width, width, &output.pp("dense"))?,
            output_norm: layer_norm(width, EPSILON, output.pp("LayerNorm"))?,
            dropouts: [
                dropout(flags.dropout, attention.pp("output.dropout"))?,
                dropout(flags.dropout, output.pp("dropout"))?,
            ],
        })
    }

    fn forward(&self, x: &Tensor, padding: &Tensor, train: bool) -> CandleResult<Tensor> {
        let attended =
            self.attention.attend(x, &self.attention.keys_and_values(x)?, AttentionMask::Additive(padding))?;
        let x = self.attention_norm.forward(&add(&self.dropouts[0].forward_t(&attended, train)?, x)?)?;
        let inner = self.output.forward(&self.intermediate.forward(&x)?.gelu_erf()?)?;
        self.output_norm.forward(&add(&self.dropouts[1].forward_t(&inner, train)?, &x)?)
    }
}

/// The encoder, with the names of `BertModel`.
struct Bert {
    words: Embedding,
    positions: Embedding,
    segments: Embedding,
    norm: LayerNorm,
    dropout: Dropout,
    layers: Vec<Layer>,
    pooler: Linear,
    padding: u32,
}

impl Bert {
    fn new(flags: &Flags, pieces: &WordPieces, vb: &VarBuilder<'_>) -> CandleResult<Bert> {
        let (width, embeddings) = (flags.width, vb.pp("embeddings"));
        Ok(Bert {
            words: embedding(pieces.len(), width, &embeddings.pp("word_embeddings"))?,
            positions: embedding(POSITIONS, width, &embeddings.pp("position_embeddings"))?,
            segments: embedding(2, width, &embeddings.pp("token_type_embeddings"))?,
            norm: layer_norm(width, EPSILON, embeddings.pp("LayerNorm"))?,
            dropout: dropout(flags.dropout, embeddings.pp("dropout"))?,
            layers: (0..flags.layers)
                .map(|at| Layer::new(flags, &vb.pp(format!("encoder.layer.{at}"))))
                .collect::<CandleResult<_>>()?,
            pooler: linear(width, width, &vb.pp("pooler.dense"))?,
            padding: pieces.padding,
        })
    }

    /// Maps tokens and segments of shape (examples, length) to (examples, length, width).
    fn forward(&self, tokens: &Tensor, segments: &Tensor, train: bool) -> CandleResult<Tensor> {
        let (examples, length) = tokens.dims2()?;
        let padding = (tokens.eq(self.padding)?.to_dtype(DType::F32)? * -1e9)?.reshape((examples, 1, 1, length))?;
        let x = add(&self.words.forward(tokens)?, &self.segments.forward(segments)?)?;
        let x = x.broadcast_add(&self.positions.embeddings().narrow(0, 0, length)?)?;
        let x = self.dropout.forward_t(&self.norm.forward(&x)?, train)?;
        self.layers.iter().try_fold(x, |x, layer| layer.forward(&x, &padding, train))
    }

    /// Maps (examples, length, width) to (examples, width), from the first token of each.
    fn pool(&self, x: &Tensor) -> CandleResult<Tensor> {
        self.pooler.forward(&x.narrow(1, 0, 1)?.squeeze(1)?.contiguous()?)?.tanh()
    }
}

/// The encoder with the heads of pre-training, with the names of `BertForPreTraining`. The table of words also computes
/// the logits.
struct Pretraining {
    bert: Bert,
    transform: (Linear, LayerNorm),
    bias: Tensor,
    follows: Linear,
}

impl Pretraining {
    fn new(flags: &Flags, pieces: &WordPieces, vb: &VarBuilder<'_>) -> CandleResult<Pretraining> {
        let (width, predictions) = (flags.width, vb.pp("cls.predictions"));
        let norm = layer_norm(width, EPSILON, predictions.pp("transform.LayerNorm"))?;
        Ok(Pretraining {
            bert: Bert::new(flags, pieces, &vb.pp("bert"))?,
            transform: (linear(width, width, &predictions.pp("transform.dense"))?, norm),
            bias: predictions.get_with_hints(pieces.len(), "bias", Init::Const(0.0))?,
            follows: linear(width, 2, &vb.pp("cls.seq_relationship"))?,
        })
    }

    /// Computes the loss of each masked token, and of whether each second segment follows the first.
    fn losses(&self, (tokens, segments, positions, were, follows): &Masked) -> CandleResult<(Tensor, Tensor)> {
        let (examples, length) = tokens.dims2()?;
        let x = self.bert.forward(tokens, segments, true)?;
        let first = Tensor::arange_step(0, (examples * length) as u32, length as u32, &Device::Cpu)?.unsqueeze(1)?;
        let masked = x.flatten_to(1)?.index_select(&positions.broadcast_add(&first)?.flatten_all()?, 0)?;
        let masked = self.transform.1.forward(&self.transform.0.forward(&masked)?.gelu_erf()?)?;
        let logits = Linear::new(self.bert.words.embeddings().clone(), Some(self.bias.clone())).forward(&masked)?;
        // In Hugging Face's models 0 says that the second segment follows.
        let order = self.follows.forward(&self.bert.pool(&x)?)?;
        let other = (1.0 - follows.to_dtype(DType::F32)?)?.to_dtype(DType::U32)?;
        let words = cross_entropy_per_example(&logits, &were.flatten_all()?)?;
        Ok((words, cross_entropy_per_example(&order, &other)?))
    }
}

/// The encoder with a head for classes, with the names of `BertForSequenceClassification`.
struct Classifier {
    bert: Bert,
    dropout: Dropout,
    head: Linear,
}

impl Classifier {
    fn new(flags: &Flags, pieces: &WordPieces, vb: &VarBuilder<'_>) -> CandleResult<Classifier> {
        Ok(Classifier {
            bert: Bert::new(flags, pieces, &vb.pp("bert"))?,
            dropout: dropout(flags.dropout, vb.pp("dropout"))?,
            head: linear(flags.width, flags.classes, &vb.pp("classifier"))?,
        })
    }
}

/// Maps tokens of shape (examples, length) to logits of shape (examples, classes).
impl ModuleT for Classifier {
    fn forward_t(&self, tokens: &Tensor, train: bool) -> CandleResult<Tensor> {
        let x = self.bert.pool(&self.bert.forward(tokens, &tokens.zeros_like()?, train)?)?;
        self.head.forward(&self.dropout.forward_t(&x, train)?)
    }
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    distribute::init_logging();
    distribute::exit(flags.placement.strategy().and_then(|strategy| strategy.report_failure(run(&strategy, &flags))))
}

fn run(strategy: &Strategy, flags: &Flags) -> distribute::Result<()> {
    let (width, heads) = (flags.width, flags.heads());
    if heads == 0 || !width.is_multiple_of(heads) {
        return Err(Error::program(format!("--width {width} cannot be divided among --heads {heads}")));
    }
    let texts = files::read(&flags.text)?;
    let pieces = match &flags.vocabulary {
        Some(path) => WordPieces::read(path)?,
        None => WordPieces::new(&texts, flags.pieces)?,
    };
    let passages = Arc::new(Passages::new(pieces, &texts, usize::from(flags.length))?);
    let folder = tempfile::tempdir().map_err(Error::program)?;
    let path = match &flags.load {
        Some(path) => path.clone(),
        None => {
            let path = flags.save.clone().unwrap_or_else(|| folder.path().join("model.safetensors"));
            pretrain(strategy, flags, &passages, &path)?;
            path
        }
    };
    fine_tune(strategy, flags, &passages, &Checkpoint::open(strategy, flags, path)?)
}

/// Pre-trains a model, and saves it.
fn pretrain(strategy: &Strategy, flags: &Flags, passages: &Arc<Passages>, path: &Path) -> distribute::Result<()> {
    let (batch, seed, drawn) = (flags.batch, flags.seed, passages.clone());
    let draw = move |step: Array<i64>| Ok(drawn.draw(batch, seed.wrapping_add(step.as_slice()[0] as u64))?);
    let data = Dataset::range(0..flags.steps as i64).map(draw).unbatch().batch(batch).prefetch(AUTOTUNE);
    let data = strategy.distribute_dataset(&data)?;
    let model = strategy.scope_seeded(seed, |vb| Pretraining::new(flags, &passages.pieces, &vb))?;
    let optimizer = AdamW::new(flags.learning_rate, 0.01).build(&model)?.clip(Clip::GlobalNorm(1.0))?;
    let title = format!("bert · {} · {} params", strategy.describe(), model.num_parameters());
    let options = Options { title, epochs: 1, steps_per_epoch: Some(flags.steps), ..Options::of(strategy) };
    let mut progress = Progress::from_env(options)?;
    progress.epoch(1);
    let (mut recent, mut recent_order) = (f64::NAN, f64::NAN);
    for (step, part) in (0..).zip(&data) {
        optimizer.set_learning_rate(rate(flags.learning_rate, step, flags.steps));
        let losses = strategy.run((&model, &optimizer, part?), |ctx, (model, optimizer, masked)| {
            let (words, order) = model.losses(&masked)?;
            let words = ctx.average_loss(&words, batch * passages.masked())?;
            let order = ctx.average_loss(&order, batch)?;
            optimizer.minimize(ctx, &(&words + &order)?)?;
            Ok(Tensor::stack(&[words.detach(), order.detach()], 0)?)
        })?;
        let losses = strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.to_vec1::<f32>()?;
        let average =
            |old: f64, new: f32| if old.is_nan() { f64::from(new) } else { 0.98 * old + 0.02 * f64::from(new) };
        (recent, recent_order) = (average(recent, losses[0]), average(recent_order, losses[1]));
        progress.step(step + 1, batch as u64, &[("loss", recent), ("order", recent_order)]);
    }
    progress.end_epoch(&[]);
    if strategy.is_chief() {
        println!("pre-training: loss {recent:.4} of masked words, {recent_order:.4} of the order of passages");
        passages.pieces.write(&path.with_file_name("vocab.txt"))?;
        write_config(flags, passages.pieces.len(), &path.with_file_name("config.json"))?;
    }
    Ok(model.save_safetensors(strategy, path)?)
}

/// Trains classifiers on few passages: with other initial values, and with those of a checkpoint.
fn fine_tune(
    strategy: &Strategy,
    flags: &Flags,
    passages: &Passages,
    checkpoint: &Checkpoint,
) -> distribute::Result<()> {
    let [few, test] = passages.classes(flags.classes, flags.examples)?;
    if strategy.is_chief() {
        println!("the page of a passage, from {} passages; {} others are tested:", few.0.dim(0)?, test.0.dim(0)?);
    }
    for loads in [false, true] {
        let model = strategy.scope_seeded(flags.seed, |vb| Classifier::new(flags, &passages.pieces, &vb))?;
        if loads {
            checkpoint.load(strategy, &model)?;
        }
        let (loss, accuracy) = fit(strategy, flags, &model, (&few, &test))?;
        if strategy.is_chief() {
            let from = if loads { "from the checkpoint" } else { "from scratch" };
            println!("  {from:20} {accuracy:5.1} %, loss {loss:.4}");
        }
    }
    Ok(())
}

/// Trains a classifier; returns the loss of its last pass, and the percentage of passages that it then classifies
/// correctly.
fn fit(
    strategy: &Strategy,
    flags: &Flags,
    model: &Model<Classifier>,
    (few, test): (&(Tensor, Tensor), &(Tensor, Tensor)),
) -> distribute::Result<(f64, f64)> {
    let optimizer = AdamW::new(flags.tuning_rate, 0.01).build(model)?.clip(Clip::GlobalNorm(1.0))?;
    let count = few.0.dim(0)?;
    let batch = flags.batch.min(count);
    let data = Dataset::from_tensor_slices(few.clone()).shuffle(count, flags.seed).batch_exact(batch);
    let data = strategy.distribute_dataset(&data)?;
    let (steps_per_epoch, mut step, mut loss) = ((count / batch) as u64, 0, f64::NAN);
    for _ in 0..flags.epochs {
        let mut sum = 0.0;
        for part in &data {
            optimizer.set_learning_rate(rate(flags.tuning_rate, step, flags.epochs * steps_per_epoch));
            let losses = strategy.run((model, &optimizer, part?), |ctx, (model, optimizer, (tokens, pages))| {
                let per_example = cross_entropy_per_example(&model.forward_t(&tokens, true)?, &pages)?;
                let loss = ctx.average_loss(&per_example, batch)?;
                optimizer.minimize(ctx, &loss)?;
                Ok(loss.detach())
            })?;
            sum += f64::from(strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.to_scalar::<f32>()?);
            step += 1;
        }
        loss = sum / steps_per_epoch as f64;
    }
    let test = strategy.distribute_dataset(&Dataset::from_tensor_slices(test.clone()).batch(128))?;
    Ok((loss, 100.0 * accuracy(strategy, model, &test)?))
}

/// The learning rate: warm-up over a tenth of all steps, then a straight line to 0.
fn rate(highest: f64, step: u64, steps: u64) -> f64 {
    let (step, steps) = (step as f64, steps.max(1) as f64);
    highest * ((step + 1.0) / (steps / 10.0)).min((steps - step) / (steps * 0.9)).min(1.0)
}
