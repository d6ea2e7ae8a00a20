//! Neural collaborative filtering: `cargo run --release -p distribute --features parameter-server --example ncf --
//! --devices CPU:0,CPU:1`
//!
//! Recommends items to users by what others have chosen: generated interactions, or MovieLens 100K's with `-- --ratings
//! ml-100k/u.data`. As two processes: `distribute run --workers 2 -- target/release/examples/ncf`; gradients of large
//! tables are then reduced by their rows. With the tables on parameter servers, from which a step fetches the rows that
//! it needs: `distribute run --ps 2 --workers 2 -- target/release/examples/ncf --sharded`.

use std::process::ExitCode;
use std::sync::Arc;

use candle_core::{Result as CandleResult, Tensor};
use clap::Parser;
use distribute::Error;
use distribute::candle::{BinaryCrossentropy, Loss, Model, ScopeOptions};
use distribute::parameter_server::{Program, RemoteValue, Server};
use distribute::prelude::*;
use distribute::strategy::DistributedDataset;
use distribute::train::progress::{Options, Progress, Summary};
use interactions::Interactions;
use model::{NeuMf, targets};

#[path = "ncf/interactions.rs"]
mod interactions;
#[path = "ncf/model.rs"]
mod model;
#[path = "shared/placement.rs"]
mod placement;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains a recommender.
#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    placement: placement::Placement,
    #[command(flatten)]
    source: interactions::Source,
    /// Trains with the variables on the parameter servers of a cluster.
    #[arg(long, conflicts_with_all = ["strategy", "devices"])]
    sharded: bool,
    /// Predictive factors: elements of the last layer.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    factors: u32,
    /// Passes over the interactions.
    #[arg(long, default_value_t = 20)]
    epochs: u32,
    /// Global batch: interactions per step, over all replicas, each with four items that the user has not met.
    #[arg(long, default_value_t = 256)]
    batch: usize,
    /// Learning rate of Adam.
    #[arg(long, default_value_t = 1e-3)]
    learning_rate: f64,
    /// Seed of initial values, of the order of interactions and of the negatives.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

/// The length of a list of recommendations.
const LIST: usize = 10;

fn main() -> ExitCode {
    let flags = Flags::parse();
    distribute::init_logging();
    distribute::exit(run(&flags))
}

fn run(flags: &Flags) -> distribute::Result<()> {
    let interactions = Arc::new(flags.source.read()?);
    if flags.sharded {
        return train_on_servers(flags, &interactions);
    }
    let strategy = flags.placement.strategy()?;
    strategy.report_failure(train(&strategy, flags, &interactions))
}

/// Computes the loss of each interaction: the mean over its item and the negatives.
fn losses(model: &NeuMf, users: &Tensor, items: &Tensor) -> CandleResult<Tensor> {
    BinaryCrossentropy.per_example(&model.forward(users, items)?, &targets(items)?)
}

fn train(strategy: &Strategy, flags: &Flags, interactions: &Arc<Interactions>) -> distribute::Result<()> {
    let data = interactions.train(flags.batch, flags.seed)?.prefetch(AUTOTUNE);
    let (data, test) = (strategy.distribute_dataset(&data)?, strategy.distribute_dataset(&interactions.test()?)?);
    let (sizes, factors) = (interactions.sizes(), flags.factors as usize);
    let model = strategy.scope_seeded(flags.seed, |vb| NeuMf::new(sizes, factors, &vb))?;
    let optimizer = Adam::new(flags.learning_rate).build(&model)?;
    let options = Options::of(strategy);
    let mut progress = start_progress(flags, interactions, &strategy.describe(), options)?;
    let mut measured = evaluate(strategy, &model, &test)?;
    strategy.declare("epochs", flags.epochs);
    let batches = interactions.batches(flags.batch);
    for epoch in 1..=flags.epochs {
        progress.epoch(epoch);
        let mut sum = 0.0;
        for (step, batch) in (1..).zip(&data) {
            let losses = strategy.run((&model, &optimizer, batch?), |ctx, (model, optimizer, (users, items))| {
                let loss = ctx.average_loss(&losses(model, &users, &items)?, flags.batch)?;
                optimizer.minimize(ctx, &loss)?;
                Ok(loss.detach())
            })?;
            sum += f64::from(strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.to_scalar::<f32>()?);
            progress.step(step, flags.batch as u64, &[("loss", sum / batches.min(step as f64))]);
        }
        measured = evaluate(strategy, &model, &test)?;
        progress.end_epoch(&measured.named());
    }
    let popularity = interactions.popularity();
    let of_popularity = evaluate_here(interactions, |_, items| by_popularity(&popularity, items))?;
    progress.finish(&summary(measured, of_popularity, strategy.num_replicas_in_sync()));
    Ok(())
}

/// Trains by steps of workers, asynchronously.
fn train_on_servers(flags: &Flags, interactions: &Arc<Interactions>) -> distribute::Result<()> {
    let (sizes, factors, seed) = (interactions.sizes(), flags.factors as usize, flags.seed);
    let step = move |worker: &WorkerContext, data: PerWorkerIterator<(Tensor, Tensor)>| {
        let (users, items) = worker.next(&data)?;
        let model = worker.model("ncf", |vb| NeuMf::new(sizes, factors, &vb))?;
        let loss = losses(&model, &users, &items)?.mean_all()?;
        model.minimize(&loss)?;
        Ok::<f32, Error>(loss.to_scalar()?)
    };
    // Every worker reads all interactions, in an order of its own.
    let (all, batch) = (interactions.clone(), flags.batch);
    let data = move |context: &InputContext| {
        let data = all.train(batch, seed.wrapping_add(2 * context.input_pipeline_id as u64));
        data.map(|data| data.repeat_forever().prefetch(2))
    };
    let program = Program::new().function("step", step).dataset("interactions", data);
    let cluster = TfConfigResolver::from_env()?;
    if let Some(TaskType::Worker | TaskType::Ps) = cluster.task_type() {
        return Ok(Server::start(&cluster, program)?.join()?);
    }
    let servers = cluster.cluster_spec()?.num_tasks(TaskType::Ps);
    let partitioner = MinSizePartitioner::new(1 << 12, servers);
    let strategy = ParameterServerStrategy::builder(&cluster).partitioner(partitioner).build()?;
    let build = |vb| NeuMf::new(sizes, factors, &vb);
    strategy.create_model_with(ScopeOptions::default().seed(seed), Adam::new(flags.learning_rate), build)?;
    let coordinator = ClusterCoordinator::new(&strategy, program)?;
    let data = coordinator.create_per_worker_dataset::<(Tensor, Tensor)>("interactions")?.iter();
    let title = format!("{servers} servers");
    let mut progress = start_progress(flags, interactions, &title, Options::default())?;
    let judge = || {
        let model = strategy.read_model(build)?;
        evaluate_here(interactions, |users, items| Ok(model.forward(users, items)?))
    };
    let mut measured = judge()?;
    for epoch in 1..=flags.epochs {
        progress.epoch(epoch);
        let steps = 0..interactions.batches(flags.batch).ceil() as u64;
        let values: Vec<RemoteValue> = steps.map(|_| coordinator.schedule("step", &data)).collect::<Result<_, _>>()?;
        let mut sum = 0.0;
        for (step, value) in (1..).zip(&values) {
            // The function's own error is returned by `join`, once.
            let Ok(loss) = value.fetch::<f32>() else { break };
            sum += f64::from(loss);
            progress.step(step, flags.batch as u64, &[("loss", sum / step as f64)]);
        }
        coordinator.join()?;
        measured = judge()?;
        progress.end_epoch(&measured.named());
    }
    let popularity = interactions.popularity();
    let of_popularity = evaluate_here(interactions, |_, items| by_popularity(&popularity, items))?;
    progress.finish(&summary(measured, of_popularity, 0));
    Ok(())
}

/// How well lists of ten recommendations are, as sums over users.
#[derive(Clone, Copy, Default)]
struct Quality {
    /// Users whose latest item is in their list.
    hits: f64,
    /// Normalized discounted cumulative gains: 1 / log2(1 + place) for an item in the list.
    gains: f64,
    users: f64,
}

impl Quality {
    /// Measures rows of scores, of which the first is that of the item to predict.
    fn of(scores: &Tensor) -> distribute::Result<Quality> {
        let mut quality = Quality::default();
        for row in scores.to_vec2::<f32>()? {
            // A score that is not a number, of this item or of another, comes before it.
            let behind = row[1..].iter().filter(|score| **score < row[0]).count();
            let before = row.len() - 1 - behind;
            if before < LIST {
                quality.hits += 1.0;
                quality.gains += 1.0 / (before as f64 + 2.0).log2();
            }
            quality.users += 1.0;
        }
        Ok(quality)
    }

    fn add(&mut self, sums: &[f64]) {
        self.hits += sums[0];
        self.gains += sums[1];
        self.users += sums[2];
    }

    fn sums(&self) -> Vec<f64> {
        vec![self.hits, self.gains, self.users]
    }

    fn named(&self) -> [(&'static str, f64); 2] {
        let users = self.users.max(1.0);
        [("hit_rate", self.hits / users), ("ndcg", self.gains / users)]
    }
}

/// Measures the model on the test; every replica evaluates its part.
fn evaluate(
    strategy: &Strategy,
    model: &Model<NeuMf>,
    test: &DistributedDataset<(Tensor, Tensor)>,
) -> distribute::Result<Quality> {
    let mut quality = Quality::default();
    for batch in test {
        let sums = strategy.run((model, batch?), |_, (model, (users, items))| {
            Ok(Quality::of(&model.forward(&users, &items)?)?.sums())
        })?;
        quality.add(&strategy.reduce(ReduceOp::Sum, &sums, Axis::None)?);
    }
    Ok(quality)
}

/// Measures scores of the whole test in this process.
fn evaluate_here(
    interactions: &Interactions,
    score: impl Fn(&Tensor, &Tensor) -> distribute::Result<Tensor>,
) -> distribute::Result<Quality> {
    let mut quality = Quality::default();
    for batch in &interactions.test()? {
        let (users, items) = batch?;
        quality.add(&Quality::of(&score(&users, &items)?)?.sums());
    }
    Ok(quality)
}

/// Scores items by the number of users who have met them.
fn by_popularity(popularity: &[f32], items: &Tensor) -> distribute::Result<Tensor> {
    let counts: Vec<f32> =
        items.flatten_all()?.to_vec1::<u32>()?.iter().map(|item| popularity[*item as usize]).collect();
    Ok(Tensor::from_vec(counts, items.shape(), items.device())?)
}

fn start_progress(
    flags: &Flags,
    interactions: &Interactions,
    place: &str,
    options: Options,
) -> distribute::Result<Progress> {
    let (users, items) = interactions.sizes();
    let title = format!("ncf · {users} users · {items} items · {place}");
    let steps_per_epoch = Some(interactions.batches(flags.batch).ceil() as u64);
    Ok(Progress::from_env(Options { title, epochs: flags.epochs, steps_per_epoch, ..options })?)
}

fn summary(measured: Quality, of_popularity: Quality, replicas: usize) -> Summary {
    let line = |quality: Quality| {
        let [(_, hit_rate), (_, ndcg)] = quality.named();
        format!("{:.2} % and {ndcg:.4}", 100.0 * hit_rate)
    };
    let extra = vec![
        (format!("hit rate and NDCG at {LIST}"), line(measured)),
        ("by popularity alone".to_owned(), line(of_popularity)),
    ];
    Summary { replicas: replicas as u32, extra, ..Summary::default() }
}
