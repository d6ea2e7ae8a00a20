//! A large embedding on parameter servers.
//!
//! ```text
//! cargo build --release -p distribute-cli
//! cargo build --release -p distribute --features parameter-server --example sharded_embedding
//! target/release/distribute run --ps 2 --workers 3 -- target/release/examples/sharded_embedding
//! ```
//!
//! 100,000 words have vectors of 64 numbers, 25 MB, sharded over the servers. A step fetches the rows of its words and
//! sends their gradient: a few hundred KB. With `--here` the same model trains in one process, for comparison, where
//! each step updates the vectors of all words.

#![expect(clippy::print_stdout, reason = "an example says what it has found")]

use std::process::ExitCode;
use std::time::Instant;

use candle_core::{Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use clap::Parser;
use distribute::candle::{Adagrad, ShardedEmbedding, sharded_embedding};
use distribute::parameter_server::{Program, Server};
use distribute::prelude::*;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Learns whether sentences of made-up words are cheerful.
#[derive(Parser)]
struct Flags {
    /// Total number of steps.
    #[arg(long, default_value_t = 3000)]
    steps: u64,
    /// Words of the language.
    #[arg(long, default_value_t = 100_000)]
    words: u32,
    /// Trains in this process only, one step after another.
    #[arg(long)]
    here: bool,
}

const WIDTH: usize = 64;
const BATCH: usize = 64;
const WORDS_IN_SENTENCE: usize = 32;

struct Mood {
    words: ShardedEmbedding,
    head: Linear,
}

impl Mood {
    fn new(words: u32, vb: VarBuilder<'_>) -> CandleResult<Mood> {
        Ok(Mood {
            words: sharded_embedding(words as usize, WIDTH, vb.pp("words"))?,
            head: linear(WIDTH, 2, vb.pp("head"))?,
        })
    }
}

impl Module for Mood {
    fn forward(&self, sentences: &Tensor) -> CandleResult<Tensor> {
        self.head.forward(&self.words.forward(sentences)?.mean(1)?)
    }
}

/// Generates sentences of words, some much more frequent than others. The label is whether more of the words are
/// cheerful (even numbers) than not.
fn sentences(number: u64, of: u32) -> CandleResult<(Tensor, Tensor)> {
    let mut state = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut draw = move || {
        // A step of xorshift64*; any generator would work.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
    };
    let (mut words, mut labels) = (Vec::new(), Vec::new());
    for _ in 0..BATCH {
        let sentence: Vec<u32> = (0..WORDS_IN_SENTENCE).map(|_| (draw().powi(6) * f64::from(of)) as u32).collect();
        let cheerful = sentence.iter().filter(|word| **word % 2 == 0).count();
        labels.push(u32::from(2 * cheerful > WORDS_IN_SENTENCE));
        words.extend(sentence);
    }
    Ok((
        Tensor::from_vec(words, (BATCH, WORDS_IN_SENTENCE), &Device::Cpu)?,
        Tensor::from_vec(labels, BATCH, &Device::Cpu)?,
    ))
}

/// Makes one step on the sentences with this number, of this many words.
fn train_step(worker: &WorkerContext, (number, words): (u64, u32)) -> distribute::Result<f32> {
    let model = worker.model("mood", |vb| Mood::new(words, vb))?;
    let (words, labels) = sentences(number, words)?;
    let loss = cross_entropy_per_example(&model.forward(&words)?, &labels)?.mean_all()?;
    model.minimize(&loss)?;
    Ok(loss.to_scalar()?)
}

fn main() -> ExitCode {
    distribute::init_logging();
    distribute::exit(run(&Flags::parse()))
}

fn run(flags: &Flags) -> distribute::Result<()> {
    if flags.here {
        return train_here(flags);
    }
    let cluster = TfConfigResolver::from_env()?;
    let program = Program::new().function("train_step", train_step);
    if let Some(TaskType::Worker | TaskType::Ps) = cluster.task_type() {
        return Ok(Server::start(&cluster, program)?.join()?);
    }
    let servers = cluster.cluster_spec()?.num_tasks(TaskType::Ps);
    let strategy =
        ParameterServerStrategy::builder(&cluster).partitioner(MinSizePartitioner::new(1 << 20, servers)).build()?;
    let new = |vb: VarBuilder<'_>| Mood::new(flags.words, vb);
    strategy.create_model(optimizer(), new)?;
    let coordinator = ClusterCoordinator::new(&strategy, program)?;
    let begun = Instant::now();
    for number in 0..flags.steps {
        coordinator.schedule("train_step", &(number, flags.words))?;
    }
    coordinator.join()?;
    let seconds = begun.elapsed().as_secs_f64();
    report(&strategy.read_model(new)?, flags, seconds)
}

fn optimizer() -> Adagrad {
    Adagrad::new(0.2)
}

/// Trains the same model on the same sentences in one process.
fn train_here(flags: &Flags) -> distribute::Result<()> {
    let strategy = Strategy::default_strategy()?;
    let model = strategy.scope(|vb| Mood::new(flags.words, vb))?;
    let optimizer = optimizer().build(&model)?;
    let begun = Instant::now();
    for number in 0..flags.steps {
        let (words, labels) = sentences(number, flags.words)?;
        strategy.run((&model, &optimizer), |ctx, (model, optimizer)| {
            let loss = ctx.average_loss(&cross_entropy_per_example(&model.forward(&words)?, &labels)?, BATCH)?;
            Ok(optimizer.minimize(ctx, &loss)?)
        })?;
    }
    report(model.first(), flags, begun.elapsed().as_secs_f64())
}

/// Reports the model's accuracy on unseen sentences.
fn report(model: &Mood, flags: &Flags, seconds: f64) -> distribute::Result<()> {
    let Flags { steps, words: of, .. } = *flags;
    let (mut hits, mut all) = (0.0, 0.0);
    for number in 1_000_000..1_000_040 {
        let (words, labels) = sentences(number, of)?;
        hits += f64::from(
            model
                .forward(&words)?
                .argmax(1)?
                .eq(&labels)?
                .to_dtype(candle_core::DType::F32)?
                .sum_all()?
                .to_scalar::<f32>()?,
        );
        all += BATCH as f64;
    }
    println!("steps {steps} steps_per_second {:.0} test accuracy {:.2} %", steps as f64 / seconds, 100.0 * hits / all);
    Ok(())
}
