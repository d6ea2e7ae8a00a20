//! Islands that train apart (Decoupled DiLoCo).
//!
//! ```text
//! cargo build --release -p distribute-cli
//! cargo build --release -p distribute --features parameter-server --example islands
//! target/release/distribute run --ps 2 --workers 2 -- target/release/examples/islands
//! ```
//!
//! The chief and the workers are three islands: each trains on its own part of handwritten digits with an unchanged
//! trainer, and exchanges parameters with the servers after every 20 steps, in eight bits. None waits for another: make
//! one slow by `--slow-island 2`, or kill one.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::{Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use clap::Parser;
use distribute::candle::{Fit, Model, SparseCategoricalCrossentropy};
use distribute::parameter_server::{
    DecoupledDilocoStrategy, OuterExchange, OuterOutcome, OuterServer, OuterServerOptions,
};
use distribute::prelude::*;
use distribute::strategy::{OuterNesterov, Wire};
use distribute::train::metrics::{Accuracy, Metrics};
use distribute_testkit::digits::{Digits, PIXELS, Split};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains on handwritten digits in islands.
#[derive(Parser)]
struct Flags {
    /// Passes of each island over its part of the training data.
    #[arg(long, default_value_t = 10)]
    epochs: u32,
    /// Number of steps between two exchanges.
    #[arg(long, default_value_t = 20)]
    inner_steps: u64,
    /// Number of islands whose changes make an outer step.
    #[arg(long, default_value_t = 2)]
    quorum: usize,
    /// The island, counted from 0, that makes a pause of 10 ms in each step.
    #[arg(long)]
    slow_island: Option<usize>,
    /// Lets the servers save in this folder, and continue from it.
    #[arg(long)]
    checkpoints: Option<PathBuf>,
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
    distribute::exit(run(&Flags::parse()))
}

fn run(flags: &Flags) -> distribute::Result<()> {
    let cluster = TfConfigResolver::from_env()?;
    if cluster.task_type() == Some(TaskType::Ps) {
        let options = OuterServerOptions::default();
        let options = match &flags.checkpoints {
            Some(folder) => options.checkpoints(folder),
            None => options,
        };
        return Ok(OuterServer::start_with(&cluster, options)?.join()?);
    }
    let exchanges = Arc::new(Mutex::new(Vec::new()));
    let kept = exchanges.clone();
    let islands = DecoupledDilocoStrategy::builder(&cluster)?
        .inner_steps(flags.inner_steps)
        .fragments(2)
        // Momentum would amplify changes that come late, as those of a slow island do.
        .outer(OuterNesterov { learning_rate: 0.7, momentum: 0.0 })
        .wire(Wire::Int8)
        .quorum(flags.quorum)
        .grace(Duration::from_millis(5))
        .examples_per_step(64)
        .on_exchange(move |exchange| kept.lock().unwrap_or_else(|lock| lock.into_inner()).push(exchange.clone()));
    let (island, of) = (islands.island_index(), islands.num_islands());
    let strategy = islands.over(MirroredStrategy::builder().devices(["CPU:0"]).build()?)?;

    let digits = Digits::standard();
    let own = Dataset::from_tensor_slices(tensors(&digits.train)?).shard(of, island);
    let pause = Duration::from_millis(if flags.slow_island == Some(island) { 10 } else { 0 });
    let train = own.shuffle(digits.train.len(), 42).batch(64).map(move |batch| {
        std::thread::sleep(pause);
        Ok(batch)
    });
    let test = Dataset::from_tensor_slices(tensors(&digits.test)?).batch(1000);
    let adam = |model: &Model<Mlp>| Adam::new(1e-3).build(model);
    let metrics = Metrics::new().with(Accuracy);
    let mut trainer = Trainer::new(&strategy, Mlp::new, adam, SparseCategoricalCrossentropy, metrics)?;
    let began = std::time::Instant::now();
    let history = trainer.fit(&train, Fit::epochs(flags.epochs).progress("islands"))?;
    let spent = began.elapsed();
    println!("{history}");
    let scores = trainer.evaluate(&test)?;
    let exchanges = exchanges.lock().unwrap_or_else(|lock| lock.into_inner());
    report(island, &exchanges, spent);
    for (name, score) in scores {
        println!("island {island}: test {name} {score:.4}");
    }
    Ok(())
}

/// Prints what has become of an island's exchanges.
fn report(island: usize, exchanges: &[OuterExchange], spent: Duration) {
    let count = |is: fn(&OuterOutcome) -> bool| exchanges.iter().filter(|exchange| is(&exchange.outcome)).count();
    let counted = count(|outcome| matches!(outcome, OuterOutcome::Counted { .. }));
    let late = count(|outcome| matches!(outcome, OuterOutcome::Counted { late: 1.. }));
    let refused = count(|outcome| matches!(outcome, OuterOutcome::TooLate { .. }));
    let away = count(|outcome| matches!(outcome, OuterOutcome::Away { .. } | OuterOutcome::Unanswered { .. }));
    let [sent, received] = [|of: &OuterExchange| of.sent_bytes, |of: &OuterExchange| of.received_bytes]
        .map(|bytes| exchanges.iter().map(bytes).sum::<u64>() >> 10);
    let waited: Duration = exchanges.iter().map(|exchange| exchange.waited).sum();
    let outer_steps = exchanges.iter().map(|exchange| exchange.outer_steps).max().unwrap_or(0);
    println!(
        "island {island}: {outer_steps} outer steps; {counted} exchanges counted, {late} of them late, {refused} \
         refused, {away} without an answer; {sent} KiB sent, {received} received; exchanges took {:.2} of {:.2} s",
        waited.as_secs_f64(),
        spent.as_secs_f64()
    );
}
