//! `cargo xtask bench ps`: training steps per second against parameter servers, and what they move.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use clap::{Args, ValueEnum};
use distribute::candle::{Adagrad, ShardedEmbedding, sharded_embedding};
use distribute::device::DType as WireType;
use distribute::parameter_server::{Program, RemoteValue, Server, Updates};
use distribute::prelude::*;
use distribute_testkit::Ports;
use serde::{Deserialize, Serialize};

use super::peers::TENSORFLOW;
use super::processes::{Children, Tail, lines_of};
use super::spread::spread;
use super::train::candle::Mlp;
use crate::error::text;

/// Examples of a step.
const BATCH: usize = 64;

/// The table's rows and their width, and how many are looked up for an example: what TensorFlow's script has.
const ROWS: usize = 100_000;
const WIDTH: usize = 64;
const LOOKED_UP: usize = 32;

#[derive(Args)]
pub(crate) struct Flags {
    #[arg(long, value_enum, default_value = "mlp")]
    model: Which,
    /// How many workers, one measurement each.
    #[arg(long, value_delimiter = ',', default_value = "1,2,3")]
    workers: Vec<usize>,
    #[arg(long, default_value_t = 2)]
    servers: usize,
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Rounds; each measures every arrangement once, so that all see the same noise.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Steps in each scheduled function.
    #[arg(long, default_value_t = 1)]
    steps_per_closure: usize,
    #[arg(long, value_enum, default_value = "asynchronous")]
    updates: How,
    /// Parameters and gradients travel as bf16.
    #[arg(long)]
    bf16: bool,
    /// The same model by TensorFlow's ParameterServerStrategy, in turns with ours.
    #[arg(long)]
    compare: bool,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Which {
    Mlp,
    Embedding,
    /// Forward and backward of the MLP alone, without servers: what there is to reach.
    Compute,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum How {
    Asynchronous,
    Stale,
    Synchronous,
}

#[derive(Args)]
pub(crate) struct RankFlags {
    #[arg(long, value_enum)]
    model: Which,
    #[arg(long)]
    seconds: f64,
    #[arg(long)]
    steps_per_closure: usize,
    #[arg(long, value_enum)]
    updates: How,
    #[arg(long)]
    bf16: bool,
}

/// The results that a chief prints.
#[derive(Clone, Serialize, Deserialize)]
struct Line {
    steps: u64,
    steps_per_s: f64,
    loss: f64,
    #[serde(default)]
    pulled_bytes_per_s: f64,
    #[serde(default)]
    pushed_bytes_per_s: f64,
}

#[derive(Serialize)]
struct Row<'a> {
    bench: &'a str,
    model: String,
    by: &'a str,
    workers: usize,
    servers: usize,
    steps_per_closure: usize,
    steps_per_s: f64,
    pulled_mb_per_s: f64,
    pushed_mb_per_s: f64,
    /// Memory of the largest server: a quarter into the run, and at its end.
    server_mb: [f64; 2],
    loss: f64,
}

struct Words {
    table: ShardedEmbedding,
    head: Linear,
}

impl Words {
    fn new(vb: VarBuilder<'_>) -> CandleResult<Words> {
        Ok(Words { table: sharded_embedding(ROWS, WIDTH, vb.pp("table"))?, head: linear(WIDTH, 2, vb.pp("head"))? })
    }
}

impl Module for Words {
    fn forward(&self, ids: &Tensor) -> CandleResult<Tensor> {
        self.head.forward(&self.table.forward(ids)?.mean(1)?)
    }
}

impl Flags {
    /// Refuses settings in which TensorFlow's script does other work than ours.
    ///
    /// # Errors
    /// A message that names the setting.
    fn check(&self) -> Result<(), String> {
        let refused =
            |setting: &str, why: &str| Err(format!("--compare does not go with {setting}: {why}; leave one out"));
        match self {
            Flags { compare: false, .. } => Ok(()),
            Flags { model: Which::Compute, .. } => {
                refused("--model compute", "TensorFlow's script trains on servers, which `compute` does without")
            }
            Flags { bf16: true, .. } => refused("--bf16", "TensorFlow's script transfers f32"),
            Flags { updates: How::Stale | How::Synchronous, .. } => {
                refused("--updates", "TensorFlow's parameter servers update asynchronously only")
            }
            Flags { .. } => Ok(()),
        }
    }
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    flags.check()?;
    let python = TENSORFLOW.interpreter();
    let peers: &[&str] = match flags.compare {
        true if TENSORFLOW.is_installed() => &["distribute", "TensorFlow"],
        true => {
            println!("skipped: TensorFlow is not installed ({})", TENSORFLOW.set_up());
            &["distribute"]
        }
        false => &["distribute"],
    };
    if !flags.json {
        println!(
            "{:<12} {:>7} {:>7} {:>9} {:>12} {:>12} {:>17} {:>8}",
            "by", "workers", "servers", "steps/s", "pulled MB/s", "pushed MB/s", "server MB", "loss"
        );
    }
    for workers in &flags.workers {
        let mut all: Vec<Vec<(Line, [f64; 2])>> = vec![Vec::new(); peers.len()];
        for _ in 0..flags.rounds {
            for (peer, measured) in peers.iter().zip(&mut all) {
                measured.push(measure(flags, *workers, (*peer == "TensorFlow").then_some(&*python))?);
            }
        }
        for (peer, measured) in peers.iter().zip(all) {
            let median = |value: fn(&(Line, [f64; 2])) -> f64| spread(measured.iter().map(value).collect()).0;
            let row = Row {
                bench: "ps",
                model: format!("{:?}", flags.model).to_lowercase(),
                by: peer,
                workers: *workers,
                servers: flags.servers,
                steps_per_closure: flags.steps_per_closure,
                steps_per_s: median(|(line, _)| line.steps_per_s),
                pulled_mb_per_s: median(|(line, _)| line.pulled_bytes_per_s) / 1e6,
                pushed_mb_per_s: median(|(line, _)| line.pushed_bytes_per_s) / 1e6,
                server_mb: [median(|(_, memory)| memory[0]), median(|(_, memory)| memory[1])],
                loss: median(|(line, _)| line.loss),
            };
            match flags.json {
                true => println!("{}", serde_json::to_string(&row).map_err(text)?),
                false => println!(
                    "{:<12} {:>7} {:>7} {:>9.0} {:>12.1} {:>12.1} {:>8.1} {:>8.1} {:>8.4}",
                    row.by,
                    row.workers,
                    row.servers,
                    row.steps_per_s,
                    row.pulled_mb_per_s,
                    row.pushed_mb_per_s,
                    row.server_mb[0],
                    row.server_mb[1],
                    row.loss
                ),
            }
        }
    }
    Ok(())
}

/// One run of a cluster; what its chief prints, and the memory of its largest server in MB, early and late.
fn measure(flags: &Flags, workers: usize, python: Option<&Path>) -> Result<(Line, [f64; 2]), String> {
    let addresses = Ports::reserve(1 + workers + flags.servers).map_err(text)?.addresses();
    let (of_workers, of_servers) = addresses[1..].split_at(workers);
    let cluster = serde_json::json!({"chief": [addresses[0]], "worker": of_workers, "ps": of_servers});
    let start = |kind: &str, index: usize| {
        let config = serde_json::json!({"cluster": cluster, "task": {"type": kind, "index": index}});
        let mut command = command(flags, python)?;
        command.env("TF_CONFIG", config.to_string()).env("RAYON_NUM_THREADS", "1").env("CUDA_VISIBLE_DEVICES", "");
        let stdout = if kind == "chief" { Stdio::piped() } else { Stdio::null() };
        // TensorFlow writes of threads and drivers there.
        let stderr = match python {
            None => Stdio::inherit(),
            Some(_) if kind == "chief" => Stdio::piped(),
            Some(_) => Stdio::null(),
        };
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).spawn().map_err(text)
    };
    let mut children = Children(Vec::new());
    let tasks = (0..flags.servers).map(|index| ("ps", index)).chain((0..workers).map(|index| ("worker", index)));
    for (kind, index) in tasks.chain([("chief", 0)]) {
        children.0.push(start(kind, index)?);
    }
    let stdout = children.0.last_mut().and_then(|chief| chief.stdout.take()).ok_or("the chief has no output")?;
    let said = lines_of(stdout);
    let errors = children.0.last_mut().and_then(|chief| chief.stderr.take()).map(Tail::of);
    let errors = || errors.as_ref().map(Tail::text).unwrap_or_default();
    let servers: Vec<u32> = children.0[..flags.servers].iter().map(Child::id).collect();
    let (begun, mut memory) = (Instant::now(), Vec::new());
    let limit = Duration::from_secs_f64(flags.seconds * 2.0 + 90.0);
    loop {
        match said.recv_timeout(Duration::from_millis(200)) {
            Ok(line) => {
                let line = line.map_err(text)?;
                if let Ok(line) = serde_json::from_str::<Line>(&line) {
                    let early = memory.get(memory.len() / 4).copied().unwrap_or(0.0);
                    return Ok((line, [early, memory.last().copied().unwrap_or(0.0)]));
                }
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(format!("the chief ended without a result{}", errors()));
            }
            Err(mpsc::RecvTimeoutError::Timeout) if begun.elapsed() > limit => {
                return Err(format!("no result within {} s{}", limit.as_secs(), errors()));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                memory.push(servers.iter().map(|id| resident_mb(*id)).fold(0.0, f64::max));
            }
        }
    }
}

/// A task of ours, or of TensorFlow's where a Python is given.
fn command(flags: &Flags, python: Option<&Path>) -> Result<Command, String> {
    let (seconds, steps) = (flags.seconds.to_string(), flags.steps_per_closure.to_string());
    let model = format!("{:?}", flags.model).to_lowercase();
    if let Some(python) = python {
        let mut command = Command::new(python);
        command.args(["xtask/peers/tf_ps.py", &seconds, &model, &steps]);
        return Ok(command);
    }
    let mut command = Command::new(std::env::current_exe().map_err(text)?);
    let updates = format!("{:?}", flags.updates).to_lowercase();
    command.args(["bench", "rank", "ps", "--model", &model, "--seconds", &seconds, "--updates", &updates]);
    command.args(["--steps-per-closure", &steps]);
    if flags.bf16 {
        command.arg("--bf16");
    }
    Ok(command)
}

/// Memory that a process really uses.
fn resident_mb(id: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok()).unwrap_or(0.0) / 1e3
}

/// One task of a cluster; the chief prints a line.
pub(crate) fn run_rank(flags: &RankFlags) -> Result<(), String> {
    let cluster = TfConfigResolver::from_env().map_err(text)?;
    let program = Program::new()
        .function("mlp", mlp_steps)
        .function("embedding", embedding_steps)
        .function("compute", compute_steps);
    match cluster.task_type() {
        Some(TaskType::Worker | TaskType::Ps) => Server::start(&cluster, program).and_then(Server::join).map_err(text),
        _ => coordinate(flags, &cluster, program).map_err(text),
    }
}

fn coordinate(flags: &RankFlags, cluster: &TfConfigResolver, program: Program) -> distribute::Result<()> {
    let spec = cluster.cluster_spec()?;
    let (workers, servers) = (spec.num_tasks(TaskType::Worker), spec.num_tasks(TaskType::Ps));
    let updates = match flags.updates {
        How::Asynchronous => Updates::Asynchronous,
        How::Stale => Updates::BoundedStaleness { rounds: 1 },
        How::Synchronous => Updates::Synchronous { contributions: workers, backups: 0 },
    };
    let mut builder = ParameterServerStrategy::builder(cluster).updates(updates);
    if flags.bf16 {
        builder = builder.wire(WireType::BF16);
    }
    let (strategy, function) = match flags.model {
        Which::Mlp => {
            let strategy = builder.partitioner(MinSizePartitioner::new(256 << 10, servers)).build()?;
            strategy.create_model(Adam::new(1e-3), |vb| Mlp::new(&vb))?;
            (strategy, "mlp")
        }
        Which::Compute => (builder.build()?, "compute"),
        Which::Embedding => {
            let strategy = builder.partitioner(MinSizePartitioner::new(1 << 20, servers)).build()?;
            strategy.create_model(Adagrad::new(0.05), Words::new)?;
            (strategy, "embedding")
        }
    };
    let coordinator = ClusterCoordinator::new(&strategy, program)?;
    let batch = |closures: usize| -> distribute::Result<Vec<(f64, u64, u64)>> {
        let values: Vec<RemoteValue> = (0..closures)
            .map(|_| coordinator.schedule(function, &flags.steps_per_closure))
            .collect::<Result<_, _>>()?;
        coordinator.join()?;
        Ok(coordinator.fetch(&values)?)
    };
    batch(50)?;
    let (begun, mut steps, mut pulled, mut pushed, mut loss) = (Instant::now(), 0, 0, 0, 0.0);
    while begun.elapsed().as_secs_f64() < flags.seconds {
        let values = batch(100)?;
        steps += (values.len() * flags.steps_per_closure) as u64;
        for (last, down, up) in values {
            (loss, pulled, pushed) = (last, pulled + down, pushed + up);
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let line = Line {
        steps,
        steps_per_s: steps as f64 / seconds,
        loss,
        pulled_bytes_per_s: pulled as f64 / seconds,
        pushed_bytes_per_s: pushed as f64 / seconds,
    };
    println!("{}", serde_json::to_string(&line).map_err(distribute::Error::program)?);
    Ok(())
}

/// The arithmetic of steps, and nothing else.
fn compute_steps(worker: &WorkerContext, steps: usize) -> distribute::Result<(f64, u64, u64)> {
    let kept = worker.keep("model", || {
        let variables = candle_nn::VarMap::new();
        let model = Mlp::new(&VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
        Ok::<_, candle_core::Error>((model, images()?))
    })?;
    let (model, (x, y)) = &*kept;
    let mut last = 0.0;
    for _ in 0..steps {
        let loss = cross_entropy_per_example(&model.forward(x)?, y)?.mean_all()?;
        loss.backward()?;
        last = f64::from(loss.to_scalar::<f32>()?);
    }
    Ok((last, 0, 0))
}

fn images() -> candle_core::Result<(Tensor, Tensor)> {
    let images: Vec<f32> = (0..BATCH * 784).map(|at| ((at * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let labels: Vec<u32> = (0..BATCH as u32).map(|at| at * 7 % 10).collect();
    Ok((Tensor::from_vec(images, (BATCH, 784), &Device::Cpu)?, Tensor::from_vec(labels, BATCH, &Device::Cpu)?))
}

/// Steps on a batch that the worker keeps; the last loss, and the bytes that were pulled and pushed.
fn mlp_steps(worker: &WorkerContext, steps: usize) -> distribute::Result<(f64, u64, u64)> {
    let batch = worker.keep("batch", images)?;
    train(worker, steps, |worker| worker.model("mlp", |vb| Mlp::new(&vb)), &batch)
}

fn embedding_steps(worker: &WorkerContext, steps: usize) -> distribute::Result<(f64, u64, u64)> {
    let batch = worker.keep("ids", || {
        let first = worker.worker_index() as u64 + 1;
        let id = |at: u64| (first.wrapping_mul(at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as u32 % ROWS as u32;
        let ids: Vec<u32> = (0..(BATCH * LOOKED_UP) as u64).map(id).collect();
        let labels: Vec<u32> = (0..BATCH as u32).map(|at| at % 2).collect();
        Ok::<_, candle_core::Error>((
            Tensor::from_vec(ids, (BATCH, LOOKED_UP), &Device::Cpu)?,
            Tensor::from_vec(labels, BATCH, &Device::Cpu)?,
        ))
    })?;
    train(worker, steps, |worker| worker.model("words", Words::new), &batch)
}

fn train<'a, M: Module + Send + Sync + 'static>(
    worker: &'a WorkerContext,
    steps: usize,
    model: impl Fn(&'a WorkerContext) -> distribute::candle::Result<distribute::candle::WorkerModel<'a, M>>,
    (x, y): &(Tensor, Tensor),
) -> distribute::Result<(f64, u64, u64)> {
    let before = worker.traffic();
    let mut last = 0.0;
    for _ in 0..steps {
        let model = model(worker)?;
        let loss = cross_entropy_per_example(&model.forward(x)?, y)?.mean_all()?;
        model.minimize(&loss)?;
        last = f64::from(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?);
    }
    let after = worker.traffic();
    Ok((last, after.pulled_bytes - before.pulled_bytes, after.pushed_bytes - before.pushed_bytes))
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;

    use super::*;

    fn check(arguments: &[&str]) -> Result<(), String> {
        let command = Flags::augment_args(clap::Command::new("ps").no_binary_name(true));
        Flags::from_arg_matches(&command.get_matches_from(arguments)).unwrap().check()
    }

    #[test]
    fn only_the_same_work_is_compared() {
        for (name, arguments) in [
            ("--model compute", &["--model", "compute"][..]),
            ("--bf16", &["--bf16"]),
            ("--updates", &["--updates", "stale"]),
            ("--updates", &["--updates", "synchronous"]),
        ] {
            assert_eq!(check(arguments), Ok(()));
            let problem = check(&[arguments, &["--compare"]].concat()).unwrap_err();
            assert!(problem.contains(&format!("--compare does not go with {name}: ")), "{problem}");
        }
        for model in ["mlp", "embedding"] {
            assert_eq!(check(&["--compare", "--model", model, "--updates", "asynchronous"]), Ok(()));
        }
    }
}
