//! `cargo xtask bench train`: samples per second of the MLP 784-256-128-10.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Linear, VarBuilder, VarMap, linear};
use clap::{Args, ValueEnum};
use distribute::Error;
use distribute::candle::{Fit, SparseCategoricalCrossentropy};
use distribute::collectives::on_local_ranks;
use distribute::prelude::*;
use distribute::train::callbacks::ModelCheckpoint;
use serde::{Deserialize, Serialize};

use super::processes;
use super::spread::spread;
use crate::error::text;

/// Examples of each replica's step.
const BATCH: usize = 64;

#[derive(Args)]
pub(crate) struct Flags {
    /// Seconds that each arrangement trains, several times over.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Rounds; each measures every arrangement once, so that all see the same noise.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// The comparison: with `fit`, `Trainer::fit` with and without checkpoints to a custom loop; with `audit`, steps
    /// whose parameters are compared never, as by default, and always.
    #[arg(long, value_enum, default_value = "all")]
    api: Api,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Api {
    All,
    Fit,
    Audit,
}

#[derive(Args)]
pub(crate) struct RankFlags {
    /// The measurement of this process.
    #[arg(long)]
    arrangement: String,
    #[arg(long)]
    seconds: f64,
}

#[derive(Serialize, Deserialize)]
struct Row {
    bench: String,
    model: String,
    strategy: String,
    replicas: usize,
    processes: usize,
    batch: usize,
    samples_per_s: f64,
    /// To the first row, per replica.
    ratio: f64,
}

pub(super) struct Mlp([Linear; 3]);

impl Mlp {
    pub(super) fn new(vb: &VarBuilder<'_>) -> CandleResult<Mlp> {
        Ok(Mlp([linear(784, 256, vb.pp("fc1"))?, linear(256, 128, vb.pp("fc2"))?, linear(128, 10, vb.pp("fc3"))?]))
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let [fc1, fc2, fc3] = &self.0;
        fc3.forward(&fc2.forward(&fc1.forward(x)?.relu()?)?.relu()?)
    }
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let arrangements = match flags.api {
        Api::All => [
            ("candle", "plain candle, two independent processes", 2, 2),
            ("one", "Mirrored", 1, 1),
            ("mirrored", "Mirrored", 2, 1),
            ("fit", "Mirrored, Trainer::fit", 2, 1),
            ("workers", "MultiWorkerMirrored", 2, 2),
        ]
        .as_slice(),
        Api::Fit => &[
            ("mirrored", "Mirrored, a loop of one's own", 2, 1),
            ("fit", "Mirrored, Trainer::fit", 2, 1),
            ("checkpoints", "Mirrored, fit, saving every 50 steps", 2, 1),
        ],
        Api::Audit => &[
            ("audit-never", "Mirrored, never audited", 2, 1),
            ("mirrored", "Mirrored, audited by default", 2, 1),
            ("audit-always", "Mirrored, audited in every step", 2, 1),
            ("workers-audit-never", "MultiWorkerMirrored, never audited", 2, 2),
            ("workers", "MultiWorkerMirrored, audited by default", 2, 2),
            ("workers-audit-always", "MultiWorkerMirrored, audited in every step", 2, 2),
        ],
    };
    let mut rates: Vec<Vec<f64>> = vec![Vec::new(); arrangements.len()];
    for _ in 0..flags.rounds {
        for ((name, _, _, count), rates) in arrangements.iter().zip(&mut rates) {
            let arguments: Vec<String> =
                ["bench", "rank", "train", "--arrangement", name, "--seconds", &flags.seconds.to_string()]
                    .map(str::to_owned)
                    .into();
            let limit = Duration::from_secs_f64(flags.seconds * 4.0 + 60.0);
            processes::run(*count, &arguments, "auto", "auto", limit, |line| {
                rates.push(line.trim().parse::<f64>().map_err(|error| format!("{error}: {line}"))?);
                Ok(())
            })?;
        }
    }
    let medians: Vec<f64> = rates.into_iter().map(|rates| spread(rates).0).collect();
    if !flags.json {
        println!(
            "{:<42} {:>8} {:>9} {:>6} {:>12} {:>6}",
            "strategy", "replicas", "processes", "batch", "samples/s", "ratio"
        );
    }
    for ((_, strategy, replicas, processes), rate) in arrangements.iter().zip(&medians) {
        let row = Row {
            bench: "train".to_owned(),
            model: "mlp-784-256-128-10".to_owned(),
            strategy: (*strategy).to_owned(),
            replicas: *replicas,
            processes: *processes,
            batch: BATCH,
            samples_per_s: *rate,
            ratio: rate / (medians[0] * *replicas as f64 / arrangements[0].2 as f64),
        };
        match flags.json {
            true => println!("{}", serde_json::to_string(&row).map_err(text)?),
            false => println!(
                "{:<42} {:>8} {:>9} {:>6} {:>12.0} {:>6.2}",
                row.strategy, row.replicas, row.processes, row.batch, row.samples_per_s, row.ratio
            ),
        }
    }
    Ok(())
}

/// One process of one arrangement; rank 0 prints samples per second of all replicas.
pub(crate) fn run_rank(flags: &RankFlags) -> Result<(), String> {
    let time = Duration::from_secs_f64(flags.seconds);
    let rate = match flags.arrangement.as_str() {
        "candle" => plain_candle(time),
        "one" => MirroredStrategy::builder()
            .build()
            .map_err(text)
            .and_then(|strategy| ours(&strategy, time, None).map_err(text)),
        name @ ("mirrored" | "audit-never" | "audit-always") => MirroredStrategy::builder()
            .devices(["CPU:0", "CPU:1"])
            .build()
            .map_err(text)
            .and_then(|strategy| ours(&strategy, time, audit_every(name)).map_err(text)),
        api @ ("fit" | "checkpoints") => MirroredStrategy::builder()
            .devices(["CPU:0", "CPU:1"])
            .build()
            .map_err(text)
            .and_then(|strategy| fit(&strategy, time, api == "checkpoints").map_err(text)),
        name @ ("workers" | "workers-audit-never" | "workers-audit-always") => MultiWorkerMirroredStrategy::builder()
            .build()
            .map_err(text)
            .and_then(|strategy| ours(&strategy, time, audit_every(name)).map_err(text)),
        other => Err(format!("arrangement {other:?} is not known")),
    }?;
    println!("{rate}");
    Ok(())
}

/// Examples and their classes, the same for all arrangements.
fn data(examples: usize) -> CandleResult<(Tensor, Tensor)> {
    let pixels: Vec<f32> = (0..examples * 784).map(|i| ((i * 2_654_435_761) % 1000) as f32 / 1000.0).collect();
    let labels: Vec<u32> = (0..examples).map(|i| (i * 7 % 10) as u32).collect();
    Ok((Tensor::from_vec(pixels, (examples, 784), &Device::Cpu)?, Tensor::from_vec(labels, examples, &Device::Cpu)?))
}

/// Trains without distribution: candle's own model, loss and AdamW. The other process does the same; they meet only to
/// begin and to end at the same time.
fn plain_candle(time: Duration) -> Result<f64, String> {
    let group = ProcessGroup::from_env().map_err(text)?;
    let steps = || -> CandleResult<f64> {
        use candle_nn::Optimizer as _;
        let (x, y) = data(BATCH * 32)?;
        let variables = VarMap::new();
        let model = Mlp::new(&VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
        let mut optimizer = candle_nn::AdamW::new(
            variables.all_vars(),
            candle_nn::ParamsAdamW { lr: 1e-3, weight_decay: 0.0, ..Default::default() },
        )?;
        let mut step = |index: usize| -> CandleResult<()> {
            let start = index % 32 * BATCH;
            let logits = model.forward(&x.narrow(0, start, BATCH)?)?;
            optimizer.backward_step(&candle_nn::loss::cross_entropy(&logits, &y.narrow(0, start, BATCH)?)?)
        };
        (0..50).try_for_each(&mut step)?;
        group.barrier().map_err(candle_core::Error::wrap)?;
        let started = Instant::now();
        let mut count = 0;
        while started.elapsed() < time {
            step(count)?;
            count += 1;
        }
        Ok((count * BATCH) as f64 / started.elapsed().as_secs_f64())
    };
    let mut rate = [steps().map_err(text)?];
    group.all_reduce(&mut rate, ReduceOp::Sum).map_err(text)?;
    Ok(rate[0])
}

/// After how many steps an arrangement compares its parameters, where that is not left to the default.
fn audit_every(arrangement: &str) -> Option<u64> {
    match arrangement {
        name if name.ends_with("never") => Some(0),
        name if name.ends_with("always") => Some(1),
        _ => None,
    }
}

fn ours(strategy: &Strategy, time: Duration, audit_every: Option<u64>) -> distribute::Result<f64> {
    let replicas = strategy.num_replicas_in_sync();
    let global_batch = BATCH * replicas;
    let data = Dataset::from_tensor_slices(data(global_batch * 32)?).batch(global_batch).repeat_forever();
    let model = strategy.scope(|vb| Mlp::new(&vb))?;
    let optimizer = Adam::new(1e-3).build(&model)?;
    let optimizer = match audit_every {
        Some(steps) => optimizer.audit_every(steps),
        None => optimizer,
    };
    let mut batches = strategy.distribute_dataset(&data)?.iter();
    let mut step = || -> distribute::Result<()> {
        let Some(batch) = batches.next() else { return Ok(()) };
        strategy.run((&model, &optimizer, batch?), |ctx, (model, optimizer, (x, y))| {
            let loss = ctx.average_loss(&cross_entropy_per_example(&model.forward(&x)?, &y)?, global_batch)?;
            Ok(optimizer.minimize(ctx, &loss)?)
        })?;
        Ok(())
    };
    (0..50).try_for_each(|_| step())?;
    // Workers must make the same number of steps, so time decides only through an estimate that they share.
    let started = Instant::now();
    (0..50).try_for_each(|_| step())?;
    let own = started.elapsed().as_secs_f64() / 50.0;
    let estimate = on_local_ranks(&strategy.groups(), |_, group| group.start().all_reduce(vec![own], ReduceOp::Max))?;
    let estimate = estimate.map_or(own, |estimate| estimate[0]);
    let count = ((time.as_secs_f64() / estimate) as usize).max(50);
    let started = Instant::now();
    (0..count).try_for_each(|_| step())?;
    Ok((count * global_batch) as f64 / started.elapsed().as_secs_f64())
}

/// The same training without a loop of its own; with checkpoints, if wanted, every 50 steps.
fn fit(strategy: &Strategy, time: Duration, checkpoints: bool) -> distribute::Result<f64> {
    let folder = tempfile::tempdir().map_err(Error::program)?;
    let global_batch = BATCH * strategy.num_replicas_in_sync();
    let data = Dataset::from_tensor_slices(data(global_batch * 32)?).batch(global_batch);
    let adam = |model: &_| Adam::new(1e-3).build(model);
    let metrics = distribute::train::metrics::Metrics::new();
    let mut trainer = Trainer::new(strategy, |vb| Mlp::new(&vb), adam, SparseCategoricalCrossentropy, metrics)?;
    let mut run = |passes: usize| -> distribute::Result<Duration> {
        let started = Instant::now();
        let fit = match checkpoints {
            true => Fit::epochs(1).callback(ModelCheckpoint::new(folder.path()).every_steps(50).keep(2)),
            false => Fit::epochs(1),
        };
        trainer.fit(&data.clone().repeat(passes), fit)?;
        Ok(started.elapsed())
    };
    run(2)?;
    let estimate = run(2)?.as_secs_f64() / 2.0;
    let passes = ((time.as_secs_f64() / estimate) as usize).max(2);
    Ok((passes * 32 * global_batch) as f64 / run(passes)?.as_secs_f64())
}
