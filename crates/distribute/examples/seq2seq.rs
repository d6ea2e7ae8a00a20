//! Translation by a transformer: `cargo run --release -p distribute --example seq2seq -- --devices CPU:0,CPU:1`
//!
//! The encoder and decoder of "Attention is all you need" learn to write dates in any form as ISO dates, or to
//! translate the pairs of a file: `-- --pairs FILE`, with a source, a tab and a target on each line. As two processes:
//! `distribute run --workers 2 -- target/release/examples/seq2seq`. With beam search: `-- --beam 4`.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use beam::{Decoder, Search};
use cache::{KeysAndValues, remember};
use candle_core::{D, DType, Device, Module, ModuleT, Result as CandleResult, Tensor};
use candle_nn::{Init, VarBuilder};
use clap::Parser;
use distribute::Error;
use distribute::candle::{
    AttentionMask, Clip, Dropout, Embedding, LayerNorm, Linear, Model, add, dropout, embedding_with, layer_norm,
};
use distribute::prelude::*;
use distribute::strategy::DistributedDataset;
use distribute::train::progress::{Options, Progress, Summary};
use heads::MultiHead;
use pairs::{BEGIN, END, Limits, PADDING, Pairs, UNKNOWN, Unit, trimmed};
use positions::sinusoids;
use sublayers::{FeedForward, multi_head};

#[path = "shared/beam.rs"]
mod beam;
#[path = "shared/cache.rs"]
mod cache;
#[path = "shared/heads.rs"]
mod heads;
#[path = "shared/pairs.rs"]
mod pairs;
#[path = "shared/placement.rs"]
mod placement;
#[path = "shared/positions.rs"]
mod positions;
#[path = "shared/sublayers.rs"]
mod sublayers;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains an encoder and a decoder on pairs, and translates pairs that were held out.
#[derive(Parser)]
struct Flags {
    /// File of pairs: a source, a tab and a target on each line. Default: generated dates.
    #[arg(long)]
    pairs: Option<PathBuf>,
    /// Takes the characters of `--pairs` as tokens, in place of words.
    #[arg(long, requires = "pairs")]
    characters: bool,
    /// Number of generated dates.
    #[arg(long, default_value_t = 20_000, conflicts_with = "pairs")]
    dates: usize,
    /// Number of pairs that are not trained on.
    #[arg(long, default_value_t = 1000)]
    held_out: usize,
    /// Maximum number of tokens of a text; pairs with longer ones are left out.
    #[arg(long, default_value_t = 40)]
    length: usize,
    /// Maximum number of tokens of each vocabulary.
    #[arg(long, default_value_t = 8000)]
    vocabulary: usize,
    #[command(flatten)]
    placement: placement::Placement,
    /// Passes over the pairs.
    #[arg(long, default_value_t = 6)]
    epochs: u32,
    /// Maximum number of steps per pass.
    #[arg(long)]
    steps: Option<usize>,
    /// Global batch: pairs per step, over all replicas.
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Width of the layers: elements per token.
    #[arg(long, default_value_t = 64)]
    width: usize,
    /// Number of attention heads, which share the width.
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// Number of layers of the encoder, and of the decoder.
    #[arg(long, default_value_t = 2)]
    layers: usize,
    /// Factor of the learning rate, which rises during warm-up and then falls with the square root of the step.
    #[arg(long, default_value_t = 0.5)]
    learning_rate: f64,
    /// Number of steps of warm-up.
    #[arg(long, default_value_t = 600)]
    warm_up: u64,
    /// Label smoothing: the share of the target's probability that all tokens divide.
    #[arg(long, default_value_t = 0.1)]
    smoothing: f64,
    /// Probability with which elements are dropped in training.
    #[arg(long, default_value_t = 0.0)]
    dropout: f64,
    /// Number of hypotheses of beam search; 1 decodes greedily.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    beam: u16,
    /// Computes all tokens of a translation again for each one that follows, rather than keeping their keys and values.
    /// The same is written, later.
    #[arg(long)]
    no_cache: bool,
    /// Number of held-out pairs to show.
    #[arg(long, default_value_t = 5)]
    samples: usize,
    /// Seed of initial values, of the dates and of the order of pairs.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

/// A number that is added to the scores of what is not to be seen.
const HIDDEN: f64 = -1e9;

struct EncoderLayer {
    attention: MultiHead,
    dense: FeedForward,
    dropout: Dropout,
    norms: [LayerNorm; 2],
}

impl EncoderLayer {
    fn new(flags: &Flags, vb: &VarBuilder<'_>) -> CandleResult<EncoderLayer> {
        let norm = |name| layer_norm(flags.width, 1e-5, vb.pp(name));
        let attention = multi_head(flags.width, flags.heads, &vb.pp("attention"))?;
        Ok(EncoderLayer {
            attention,
            dense: FeedForward::new(flags.width, vb)?,
            dropout: dropout(flags.dropout, vb.pp("dropout"))?,
            norms: [norm("norm1")?, norm("norm2")?],
        })
    }

    fn forward(&self, x: &Tensor, mask: &Tensor, train: bool) -> CandleResult<Tensor> {
        let attended = self.attention.attend(x, &self.attention.keys_and_values(x)?, AttentionMask::Additive(mask))?;
        let x = self.norms[0].forward(&add(&self.dropout.forward_t(&attended, train)?, x)?)?;
        self.norms[1].forward(&add(&self.dropout.forward_t(&self.dense.forward(&x)?, train)?, &x)?)
    }
}

struct DecoderLayer {
    /// Attention to the preceding tokens of the target.
    itself: MultiHead,
    /// Attention to the source.
    source: MultiHead,
    dense: FeedForward,
    dropout: Dropout,
    norms: [LayerNorm; 3],
}

/// The keys and values that a layer of the decoder attends to: of the source, and of the target so far.
struct Seen {
    source: KeysAndValues,
    target: Option<KeysAndValues>,
}

impl DecoderLayer {
    fn new(flags: &Flags, vb: &VarBuilder<'_>) -> CandleResult<DecoderLayer> {
        let norm = |name| layer_norm(flags.width, 1e-5, vb.pp(name));
        Ok(DecoderLayer {
            itself: multi_head(flags.width, flags.heads, &vb.pp("self_attention"))?,
            source: multi_head(flags.width, flags.heads, &vb.pp("source_attention"))?,
            dense: FeedForward::new(flags.width, vb)?,
            dropout: dropout(flags.dropout, vb.pp("dropout"))?,
            norms: [norm("norm1")?, norm("norm2")?, norm("norm3")?],
        })
    }

    fn forward(&self, x: &Tensor, seen: &mut Seen, padding: &Tensor, train: bool) -> CandleResult<Tensor> {
        let joined = |norm: usize, branch: Tensor, x: &Tensor| {
            self.norms[norm].forward(&add(&self.dropout.forward_t(&branch, train)?, x)?)
        };
        let target = remember(&mut seen.target, self.itself.keys_and_values(x)?)?;
        let x = joined(0, self.itself.attend(x, &target, AttentionMask::Causal)?, x)?;
        let x = joined(1, self.source.attend(&x, &seen.source, AttentionMask::Additive(padding))?, &x)?;
        joined(2, self.dense.forward(&x)?, &x)
    }
}

/// The model; the table of target tokens also computes the logits.
struct Seq2Seq {
    source: Embedding,
    target: Embedding,
    positions: Tensor,
    dropout: Dropout,
    encoder: Vec<EncoderLayer>,
    decoder: Vec<DecoderLayer>,
    /// Whether it keeps keys and values of the tokens that it writes.
    caches: bool,
}

/// A state of decoding: the sources, and the targets so far.
struct State {
    layers: Vec<Seen>,
    padding: Tensor,
    length: usize,
    train: bool,
}

impl Seq2Seq {
    fn new(flags: &Flags, (source, target): (usize, usize), vb: &VarBuilder<'_>) -> CandleResult<Seq2Seq> {
        let (width, longest) = (flags.width, flags.length + 2);
        let table = |tokens, name: &str| {
            let small = Init::Randn { mean: 0.0, stdev: (width as f64).powf(-0.5) };
            embedding_with((tokens, width), "weight", small, vb.pp(name))
        };
        let layer = |name, at| vb.pp(format!("{name}.{at}"));
        Ok(Seq2Seq {
            source: table(source, "source")?,
            target: table(target, "target")?,
            positions: sinusoids(longest, width)?,
            dropout: dropout(flags.dropout, vb.pp("dropout"))?,
            caches: !flags.no_cache,
            encoder: (0..flags.layers)
                .map(|at| EncoderLayer::new(flags, &layer("encoder", at)))
                .collect::<CandleResult<_>>()?,
            decoder: (0..flags.layers)
                .map(|at| DecoderLayer::new(flags, &layer("decoder", at)))
                .collect::<CandleResult<_>>()?,
        })
    }

    /// Encodes sources of shape (pairs, length).
    fn encode(&self, sources: &Tensor, train: bool) -> CandleResult<State> {
        let (pairs, length) = sources.dims2()?;
        let padding = (sources.eq(PADDING)?.to_dtype(DType::F32)? * HIDDEN)?.reshape((pairs, 1, 1, length))?;
        let x = self.embed(&self.source, sources, (0, train))?;
        let x = self.encoder.iter().try_fold(x, |x, layer| layer.forward(&x, &padding, train))?;
        let seen = |layer: &DecoderLayer| Ok(Seen { source: layer.source.keys_and_values(&x)?, target: None });
        let layers = self.decoder.iter().map(seen).collect::<CandleResult<_>>()?;
        Ok(State { layers, padding, length: 0, train })
    }

    /// Maps (pairs, length) tokens that continue targets to (pairs, length, vocabulary) logits of those that follow.
    fn decode(&self, tokens: &Tensor, state: &mut State) -> CandleResult<Tensor> {
        let (seen, length) = (state.length, tokens.dim(1)?);
        state.length += length;
        let mut x = self.embed(&self.target, tokens, (seen, state.train))?;
        for (layer, seen) in self.decoder.iter().zip(&mut state.layers) {
            x = layer.forward(&x, seen, &state.padding, state.train)?;
        }
        Linear::new(self.target.embeddings().clone(), None).forward(&x)
    }

    fn embed(&self, table: &Embedding, tokens: &Tensor, (first, train): (usize, bool)) -> CandleResult<Tensor> {
        let scaled = (table.forward(tokens)? * (self.positions.dim(1)? as f64).sqrt())?;
        let x = scaled.broadcast_add(&self.positions.narrow(0, first, tokens.dim(1)?)?)?;
        self.dropout.forward_t(&x, train)
    }

    /// Translates sources of shape (pairs, length).
    fn translate(&self, sources: &Tensor, search: Search) -> CandleResult<Vec<Vec<u32>>> {
        let mut state = self.encode(sources, false)?;
        let pairs = sources.dim(0)?;
        let rows: Vec<u32> = (0..pairs as u32).flat_map(|pair| (0..search.beam).map(move |_| pair)).collect();
        let rows = Tensor::from_vec(rows, pairs * search.beam, &Device::Cpu)?;
        state.padding = state.padding.index_select(&rows, 0)?;
        for seen in &mut state.layers {
            seen.source = select(&seen.source, &rows)?;
        }
        let again = (!self.caches).then(|| vec![Vec::new(); pairs * search.beam]);
        search.run(pairs, &mut Translating { model: self, state, again })
    }
}

/// Selects the keys and values of some rows.
fn select((keys, values): &KeysAndValues, rows: &Tensor) -> CandleResult<KeysAndValues> {
    let of = |x: &Tensor| Ok::<_, candle_core::Error>(x.contiguous()?.index_select(rows, 0)?.detach());
    Ok((of(keys)?, of(values)?))
}

/// A model that translates.
struct Translating<'a> {
    model: &'a Seq2Seq,
    state: State,
    /// The tokens of each row, if they are to be computed again in each step.
    again: Option<Vec<Vec<u32>>>,
}

impl Decoder for Translating<'_> {
    fn step(&mut self, tokens: &[u32]) -> CandleResult<Vec<Vec<f32>>> {
        let new = match &mut self.again {
            Some(rows) => {
                rows.iter_mut().zip(tokens).for_each(|(row, token)| row.push(*token));
                self.state.layers.iter_mut().for_each(|seen| seen.target = None);
                self.state.length = 0;
                Tensor::new(rows.clone(), &Device::Cpu)?
            }
            None => Tensor::new(tokens, &Device::Cpu)?.unsqueeze(1)?,
        };
        let logits = self.model.decode(&new, &mut self.state)?;
        let logits = logits.narrow(1, new.dim(1)? - 1, 1)?.squeeze(1)?.detach();
        candle_nn::ops::log_softmax(&logits.contiguous()?, D::Minus1)?.to_vec2()
    }

    fn reorder(&mut self, rows: &[u32]) -> CandleResult<()> {
        if let Some(again) = &mut self.again {
            *again = rows.iter().map(|row| again[*row as usize].clone()).collect();
            return Ok(());
        }
        // The sources of a pair's rows are equal.
        let rows = Tensor::new(rows, &Device::Cpu)?;
        for seen in self.state.layers.iter_mut().filter_map(|seen| seen.target.as_mut()) {
            *seen = select(seen, &rows)?;
        }
        Ok(())
    }
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    distribute::init_logging();
    distribute::exit(flags.placement.strategy().and_then(|strategy| strategy.report_failure(train(&strategy, &flags))))
}

fn read(flags: &Flags) -> distribute::Result<Pairs> {
    if flags.heads == 0 || !flags.width.is_multiple_of(2 * flags.heads) {
        let (width, heads) = (flags.width, flags.heads);
        return Err(Error::program(format!("--width {width} is not a multiple of 2 × --heads {heads}; give one")));
    }
    let (pairs, unit) = match &flags.pairs {
        Some(path) => (pairs::read(path, flags.seed)?, if flags.characters { Unit::Character } else { Unit::Word }),
        None => (pairs::dates(flags.dates, flags.seed), Unit::Character),
    };
    let (held_out, length, vocabulary) = (flags.held_out, flags.length, flags.vocabulary);
    Pairs::new(pairs, &Limits { unit, held_out, length, vocabulary })
}

fn train(strategy: &Strategy, flags: &Flags) -> distribute::Result<()> {
    let pairs = read(flags)?;
    let (count, batch, length) = (pairs.train.sources.dim(0)?, flags.batch, flags.length);
    let (held_out, Pairs { beyond_limit, known, .. }) = (pairs.held_out.sources.dim(0)?, &pairs);
    if strategy.is_chief() {
        println!(
            "pairs: {count} to train on, {held_out} held out; {beyond_limit} left out by --length {length}, {known} \
             because a held-out pair has their source or target"
        );
    }
    if count < batch {
        return Err(Error::program(format!(
            "{count} pairs are fewer than --batch {batch}, so that there is no step to train; give more pairs, a \
             smaller --batch or --held-out, or a larger --length"
        )));
    }
    // Losses are sums over tokens, divided by the number of tokens in an average batch.
    let tokens = pairs.train.targets.gt(BEGIN)?.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>()?;
    let tokens = (tokens / count as f64 * batch as f64).round() as usize;
    let data = pairs.train.dataset().shuffle(count, flags.seed).batch_exact(batch);
    let data = strategy.distribute_dataset(&data.take(flags.steps.unwrap_or(usize::MAX)).prefetch(AUTOTUNE))?;
    let held_out = strategy.distribute_dataset(&pairs.held_out.dataset().batch(256))?;
    let sizes = (pairs.source.len(), pairs.target.len());
    let model = strategy.scope_seeded(flags.seed, |vb| Seq2Seq::new(flags, sizes, &vb))?;
    let optimizer =
        Adam::new(rate(flags, 0)).betas(0.9, 0.98).epsilon(1e-9).build(&model)?.clip(Clip::GlobalNorm(1.0))?;

    let title = format!("seq2seq · {} · {} params", strategy.describe(), model.num_parameters());
    let (epochs, steps_per_epoch) = (flags.epochs, data.steps().map(|steps| steps as u64));
    let mut progress = Progress::from_env(Options { title, epochs, steps_per_epoch, ..Options::of(strategy) })?;
    let (mut spent, mut steps, mut held_out_loss) = (Duration::ZERO, 0, f64::NAN);
    for epoch in 1..=epochs {
        progress.epoch(epoch);
        let (began, mut sum) = (Instant::now(), 0.0);
        for (step, part) in (1..).zip(&data) {
            optimizer.set_learning_rate(rate(flags, steps));
            let losses = strategy.run((&model, &optimizer, part?), |ctx, (model, optimizer, pairs)| {
                let loss = ctx.average_loss(&losses(model, &pairs, (flags.smoothing, true))?.0, tokens)?;
                optimizer.minimize(ctx, &loss)?;
                Ok(loss.detach())
            })?;
            sum += f64::from(strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.to_scalar::<f32>()?);
            steps += 1;
            progress.step(step, batch as u64, &[("loss", sum / step as f64)]);
        }
        spent += began.elapsed();
        held_out_loss = evaluate(strategy, &model, &held_out)?;
        progress.end_epoch(&[("val_loss", held_out_loss)]);
    }
    let search = Search { beam: usize::from(flags.beam), length: flags.length + 1, begin: BEGIN, end: END };
    let began = Instant::now();
    let (matches, all) = exact_matches(strategy, &model, &held_out, search)?;
    let decoding = began.elapsed().as_secs_f64();
    progress.finish(&Summary {
        examples_per_s: Some((steps * batch as u64) as f64 / spent.as_secs_f64()),
        training_time: Some(spent),
        replicas: strategy.num_replicas_in_sync() as u32,
        extra: vec![
            ("held-out loss".to_owned(), format!("{held_out_loss:.5} per token")),
            ("exact matches".to_owned(), format!("{:.1} % of {all} pairs, in {decoding:.1} s", 100.0 * matches / all)),
        ],
        ..Summary::default()
    });
    show(strategy, &model, &pairs, (flags.samples, search))
}

/// The schedule of Vaswani et al., 2017, equation 3.
fn rate(flags: &Flags, step: u64) -> f64 {
    let (step, warm_up) = ((step + 1) as f64, flags.warm_up.max(1) as f64);
    flags.learning_rate * (flags.width as f64).powf(-0.5) * step.powf(-0.5).min(step * warm_up.powf(-1.5))
}

/// Computes the loss of each token of the targets, 0 for padding, from those before it; also returns the number of
/// tokens.
fn losses(
    model: &Seq2Seq,
    (sources, targets): &(Tensor, Tensor),
    (smoothing, train): (f64, bool),
) -> CandleResult<(Tensor, f64)> {
    let (sources, targets) = (trimmed(sources)?, trimmed(targets)?);
    let length = targets.dim(1)? - 1;
    let logits = model
        .decode(&targets.narrow(1, 0, length)?.contiguous()?, &mut model.encode(&sources, train)?)?
        .flatten_to(1)?;
    let next = targets.narrow(1, 1, length)?.flatten_all()?;
    let losses = cross_entropy_per_example(&logits, &next)?;
    let losses = if smoothing > 0.0 {
        // The cross-entropy with the smoothed distribution (Szegedy et al., 2016, section 7) differs by the logit of
        // the target above the mean.
        let target = logits.gather(&next.unsqueeze(1)?, 1)?.squeeze(1)?;
        (losses + ((target - logits.mean(1)?)? * smoothing)?)?
    } else {
        losses
    };
    let is_token = next.ne(PADDING)?.to_dtype(DType::F32)?;
    let tokens = f64::from(is_token.sum_all()?.to_scalar::<f32>()?);
    Ok(((losses * is_token)?, tokens))
}

/// Computes the mean loss per token.
fn evaluate(
    strategy: &Strategy,
    model: &Model<Seq2Seq>,
    data: &DistributedDataset<(Tensor, Tensor)>,
) -> distribute::Result<f64> {
    let (mut loss, mut count) = (0.0, 0.0);
    for part in data {
        let sums = strategy.run((model, part?), |_, (model, pairs)| {
            let (losses, tokens) = losses(model, &pairs, (0.0, false))?;
            Ok(vec![losses.detach().to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>()?, tokens])
        })?;
        let sums = strategy.reduce(ReduceOp::Sum, &sums, Axis::None)?;
        (loss, count) = (loss + sums[0], count + sums[1]);
    }
    Ok(loss / f64::max(count, 1.0))
}

/// Counts the pairs whose translation is the target, and all pairs.
fn exact_matches(
    strategy: &Strategy,
    model: &Model<Seq2Seq>,
    data: &DistributedDataset<(Tensor, Tensor)>,
    search: Search,
) -> distribute::Result<(f64, f64)> {
    let (mut matches, mut all) = (0.0, 0.0);
    for part in data {
        let counts = strategy.run((model, part?), |_, (model, (sources, targets))| {
            let (written, targets) = (model.translate(&trimmed(&sources)?, search)?, targets.to_vec2::<u32>()?);
            let is_equal = |(written, target): &(&Vec<u32>, &Vec<u32>)| {
                let target = target.iter().copied().filter(|token| *token > END);
                !written.contains(&UNKNOWN) && target.eq(written.iter().copied())
            };
            let matches = written.iter().zip(&targets).filter(is_equal).count();
            Ok(vec![matches as f64, targets.len() as f64])
        })?;
        let counts = strategy.reduce(ReduceOp::Sum, &counts, Axis::None)?;
        (matches, all) = (matches + counts[0], all + counts[1]);
    }
    Ok((matches, all))
}

/// Translates the first held-out pairs on the chief.
fn show(
    strategy: &Strategy,
    model: &Model<Seq2Seq>,
    pairs: &Pairs,
    (samples, search): (usize, Search),
) -> distribute::Result<()> {
    let held_out = &pairs.held_out;
    let samples = samples.min(held_out.sources.dim(0)?);
    if samples == 0 || !strategy.is_chief() {
        return Ok(());
    }
    let (sources, targets) = (held_out.sources.narrow(0, 0, samples)?, held_out.targets.narrow(0, 0, samples)?);
    let written = model.first().translate(&trimmed(&sources)?, search)?;
    let rows = sources.to_vec2::<u32>()?.into_iter().zip(targets.to_vec2::<u32>()?);
    println!();
    for ((source, target), written) in rows.zip(&written) {
        let (source, target) = (pairs.source.text(&source), pairs.target.text(&target));
        let written = pairs.target.text(written);
        let remark = if written == target { String::new() } else { format!(", expected {target}") };
        println!("{source} → {written}{remark}");
    }
    Ok(())
}
