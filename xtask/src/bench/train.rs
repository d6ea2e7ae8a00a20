//! `cargo xtask bench train`: samples per second of small models, for each tensor library.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use distribute::collectives::on_local_ranks;
use distribute::optim::StepTimes;
use distribute::prelude::*;
use distribute::strategy::TpuStrategy;
use serde::{Deserialize, Serialize};

use self::compared::Peer;
use self::plot::Bar;
use super::processes::{self, Ranks};
use super::spread::spread;
use crate::error::text;

mod burn;
pub(super) mod candle;
mod compared;
mod data;
mod plot;

/// Steps before the measurement.
const WARM_UP: usize = 20;

#[derive(Args)]
pub(crate) struct Flags {
    /// Seconds that each arrangement trains, several times over.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Rounds; each measures every arrangement once, so that all see the same noise.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Tensor libraries.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "candle")]
    library: Vec<Library>,
    /// Models. `wide` has 268 MB of parameters and is for burn only: mirrored and fully sharded, and their memory.
    /// `embedding` and `resnet` are for candle only; the gradient of `embedding` is reduced by rows and as a whole.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "mlp")]
    model: Vec<Model>,
    /// Processes of the arrangements of several processes.
    #[arg(long, default_value_t = 2)]
    processes: usize,
    /// The comparison: with `fit`, `Trainer::fit` with and without checkpoints to a custom loop; with `audit`, steps
    /// whose parameters are compared never, as by default, and always; with `elastic`, the same steps by workers that
    /// may be lost and join; these three are of candle's MLP. With `scaling`, 1, 2 and 4 replicas of one thread each,
    /// in one process and in several, however many cores there are.
    #[arg(long, value_enum, default_value = "all")]
    api: Api,
    /// Draws the rates of several replicas as an SVG picture, as multiples of the fastest peer's.
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Also train the same models by torch, in one process on all cores and by its DistributedDataParallel, or by
    /// TensorFlow's MirroredStrategy and MultiWorkerMirroredStrategy, where they are installed in target/peers.
    #[arg(long, value_enum, value_delimiter = ',')]
    compare: Vec<Peer>,
    /// The transport between processes: auto, shm, tcp or grpc.
    #[arg(long, default_value = "auto")]
    transport: String,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Api {
    All,
    Fit,
    Audit,
    Elastic,
    Scaling,
}

/// Returns the name of a value on the command line.
fn named(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Library {
    Candle,
    Burn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Model {
    /// 784-256-128-10.
    Mlp,
    /// Two convolutions of 16 and 32 channels with max-pooling, and a linear layer, on 28 × 28 pixels.
    Cnn,
    /// ResNet-20 on pictures of 32 × 32. Batch normalisation is over all replicas in ours, and within each in others.
    Resnet,
    /// Two pre-norm blocks of width 128 with four heads, on 32 tokens.
    Transformer,
    /// Four square layers of width 4096.
    Wide,
    /// 100 000 words of 64 elements, the mean of 32 of them, and a linear layer.
    Embedding,
}

impl Model {
    /// Examples of each replica's step.
    fn batch(self) -> usize {
        match self {
            Model::Transformer => 16,
            Model::Mlp | Model::Cnn | Model::Resnet | Model::Embedding | Model::Wide => 64,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Model::Mlp => "mlp-784-256-128-10",
            Model::Cnn => "cnn-16-32",
            Model::Resnet => "resnet-20",
            Model::Transformer => "transformer-2x128",
            Model::Wide => "wide-4x4096",
            Model::Embedding => "embedding-100k×64",
        }
    }
}

#[derive(Args)]
pub(crate) struct RankFlags {
    #[arg(long, value_enum)]
    library: Library,
    #[arg(long, value_enum)]
    model: Model,
    /// The measurement of this process.
    #[arg(long)]
    arrangement: String,
    #[arg(long)]
    seconds: f64,
}

#[derive(Serialize, Deserialize)]
struct Row {
    bench: String,
    library: String,
    model: String,
    strategy: String,
    replicas: usize,
    processes: usize,
    batch: usize,
    samples_per_s: f64,
    /// To the first row of the same library and model, per replica.
    ratio: f64,
    /// The share of `minimize` that the first replica spends in collectives: what backward does not hide.
    communication: f64,
    /// The largest resident memory of the first process.
    peak_mib: f64,
    /// From the start of the first process to the end of its first step; without a loop that the bench sees, none.
    first_step_s: Option<f64>,
    /// The slowest and the fastest round, in samples a second.
    least: f64,
    most: f64,
}

impl Row {
    /// Returns the row of an arrangement; `unit` is the rate of a replica whose ratio is 1.
    fn of(
        library: &str,
        model: Model,
        &(_, strategy, replicas, processes): &Arrangement,
        rounds: &[Round],
        unit: f64,
    ) -> Row {
        let (samples_per_s, least, most) = spread(rounds.iter().map(|round| round.samples_per_s).collect());
        let first_steps: Vec<f64> = rounds.iter().filter_map(|round| round.first_step_s).collect();
        Row {
            bench: "train".to_owned(),
            library: library.to_owned(),
            model: model.name().to_owned(),
            strategy: strategy.to_owned(),
            replicas,
            processes,
            batch: model.batch(),
            samples_per_s,
            ratio: samples_per_s / (unit * replicas as f64),
            communication: spread(rounds.iter().map(|round| round.communication).collect()).0,
            peak_mib: rounds.iter().map(|round| round.peak_mib).fold(0.0, f64::max),
            first_step_s: (!first_steps.is_empty()).then(|| spread(first_steps).0),
            least,
            most,
        }
    }

    fn bar(&self) -> Bar {
        let Row { model, library, strategy, replicas, samples_per_s, .. } = self;
        let name = format!("{library}: {strategy}, {replicas}");
        let is_peer = Library::from_str(library, true).is_err();
        Bar { model: model.clone(), name, samples_per_s: *samples_per_s, is_peer }
    }

    fn print(&self, json: bool) -> Result<(), String> {
        match json {
            true => println!("{}", serde_json::to_string(self).map_err(text)?),
            false => println!(
                "{:<7} {:<19} {:<42} {:>8} {:>9} {:>5} {:>10.0} {:>6.3} {:>7.1} {:>9.0} {:>7} {:>7.0}..{:.0}",
                self.library,
                self.model,
                self.strategy,
                self.replicas,
                self.processes,
                self.batch,
                self.samples_per_s,
                self.ratio,
                100.0 * self.communication,
                self.peak_mib,
                self.first_step_s.map_or_else(String::new, |seconds| format!("{seconds:.2}")),
                self.least,
                self.most
            ),
        }
        Ok(())
    }
}

/// The measurement of one round: the line that the first process prints, ours or a peer's.
#[derive(Serialize, Deserialize)]
struct Round {
    /// The rate of all replicas together.
    samples_per_s: f64,
    /// The share of steps in collectives; peers do not tell it.
    #[serde(default)]
    communication: f64,
    /// The largest resident memory of the first process.
    peak_mib: f64,
    /// From the start of the first process to the end of its first step.
    first_step_s: Option<f64>,
}

/// How fast steps were.
struct Speed {
    /// The rate of all replicas together.
    samples_per_s: f64,
    first_step_s: Option<f64>,
}

impl Round {
    fn of(Speed { samples_per_s, first_step_s }: Speed, times: StepTimes) -> Round {
        let total = times.total.as_secs_f64();
        let communication = if total > 0.0 { times.communication.as_secs_f64() / total } else { 0.0 };
        Round { samples_per_s, communication, peak_mib: peak_mib(), first_step_s }
    }
}

/// Makes the steps before the measurement. Returns the time from the start of the process to the end of the first one.
fn warm_up<E: std::fmt::Display>(mut step: impl FnMut(usize) -> Result<(), E>) -> Result<Option<f64>, String> {
    let started = std::env::var(processes::STARTED).ok().and_then(|started| started.parse::<f64>().ok());
    step(0).map_err(text)?;
    let first_step_s = started.map(|started| processes::now() - started);
    (1..WARM_UP).try_for_each(step).map_err(text)?;
    Ok(first_step_s)
}

/// A way to train: its name, its description, replicas and processes.
type Arrangement = (&'static str, &'static str, usize, usize);

/// The name of an arrangement whose replica has more than one thread.
const ALL_CORES: &str = "all-cores";

fn arrangements(flags: &Flags, library: Library, model: Model) -> Result<Vec<Arrangement>, String> {
    let processes = flags.processes;
    let fits = library == Library::Candle && model == Model::Mlp;
    Ok(match flags.api {
        Api::Scaling if model == Model::Wide => return Err("--api scaling is not of the model wide".to_owned()),
        Api::Fit | Api::Audit | Api::Elastic if !fits => {
            return Err("--api fit, audit and elastic are of candle's MLP".to_owned());
        }
        Api::All if model == Model::Wide && library == Library::Candle => {
            return Err("the model wide is for burn: give --library burn".to_owned());
        }
        Api::All | Api::Scaling if matches!(model, Model::Embedding | Model::Resnet) && library == Library::Burn => {
            return Err(format!("the model {} is for candle: give --library candle", named(&model)));
        }
        Api::All if model == Model::Embedding => vec![
            ("one", "Mirrored", 1, 1),
            (ALL_CORES, "Mirrored, all cores", 1, 1),
            ("mirrored", "Mirrored, by rows", 2, 1),
            ("mirrored-whole", "Mirrored, whole gradients", 2, 1),
            ("workers", "MultiWorkerMirrored, by rows", processes, processes),
            ("workers-whole", "MultiWorkerMirrored, whole gradients", processes, processes),
        ],
        Api::All if model == Model::Wide => vec![
            ("workers", "MultiWorkerMirrored", processes, processes),
            ("sharded", "FullySharded", processes, processes),
            ("sharded-in-turn", "FullySharded, overlap(false)", processes, processes),
            ("mirrored", "Mirrored", 2, 1),
        ]
        .into_iter()
        .chain(compiled())
        .collect(),
        Api::All => {
            let mut all = vec![
                ("independent", "no strategy, independent processes", 2, 2),
                ("one", "Mirrored", 1, 1),
                (ALL_CORES, "Mirrored, all cores", 1, 1),
                ("mirrored", "Mirrored", 2, 1),
            ];
            if fits {
                all.push(("fit", "Mirrored, Trainer::fit", 2, 1));
            }
            all.push(("workers", "MultiWorkerMirrored", processes, processes));
            if library == Library::Burn {
                all.push(("mirrored-own", "Mirrored, burn's own AdamW", 2, 1));
                all.push(("sharded", "FullySharded", processes, processes));
                all.push(("fit", "Mirrored, Trainer::fit", 2, 1));
                all.extend(compiled());
            }
            all
        }
        Api::Scaling => vec![
            ("one", "Mirrored", 1, 1),
            ("mirrored", "Mirrored", 2, 1),
            ("mirrored-4", "Mirrored", 4, 1),
            ("workers", "MultiWorkerMirrored", 2, 2),
            ("workers", "MultiWorkerMirrored", 4, 4),
        ],
        Api::Fit => vec![
            ("mirrored", "Mirrored, a loop of one's own", 2, 1),
            ("fit", "Mirrored, Trainer::fit", 2, 1),
            ("checkpoints", "Mirrored, fit, saving every 50 steps", 2, 1),
        ],
        Api::Elastic => vec![
            ("workers", "MultiWorkerMirrored", processes, processes),
            ("elastic", "MultiWorkerMirrored, elastic", processes, processes),
        ],
        Api::Audit => vec![
            ("audit-never", "Mirrored, never audited", 2, 1),
            ("mirrored", "Mirrored, audited by default", 2, 1),
            ("audit-always", "Mirrored, audited in every step", 2, 1),
            ("workers-audit-never", "MultiWorkerMirrored, never audited", 2, 2),
            ("workers", "MultiWorkerMirrored, audited by default", 2, 2),
            ("workers-audit-always", "MultiWorkerMirrored, audited in every step", 2, 2),
        ],
    })
}

/// Returns the arrangements of compiled programs, on XLA's plugin for CPUs.
fn compiled() -> Vec<Arrangement> {
    if std::env::var_os("DISTRIBUTE_PJRT_PLUGIN").is_none() {
        println!("skipped: Tpu on XLA's plugin for CPUs: DISTRIBUTE_PJRT_PLUGIN does not name it (xtask pjrt --fetch)");
        return Vec::new();
    }
    vec![
        ("tpu", "Tpu on XLA:CPU, run_step", 2, 1),
        ("tpu-fit", "Tpu on XLA:CPU, Trainer::fit", 2, 1),
        ("tpu-fit-many", "Tpu on XLA:CPU, steps_per_execution(8)", 2, 1),
    ]
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    if !flags.json {
        println!(
            "{:<7} {:<19} {:<42} {:>8} {:>9} {:>5} {:>10} {:>6} {:>7} {:>9} {:>7} {:>7}",
            "library",
            "model",
            "strategy",
            "replicas",
            "processes",
            "batch",
            "samples/s",
            "ratio",
            "comm %",
            "peak MiB",
            "first s",
            "rounds"
        );
    }
    flags.compare.iter().for_each(|peer| peer.say_if_missing());
    let mut rows = Vec::new();
    for library in &flags.library {
        for model in &flags.model {
            rows.extend(measure(flags, *library, *model, &arrangements(flags, *library, *model)?)?);
        }
    }
    match &flags.plot {
        Some(path) => plot::draw(path, &rows.iter().filter(|row| row.replicas > 1).map(Row::bar).collect::<Vec<Bar>>()),
        None => Ok(()),
    }
}

fn measure(flags: &Flags, library: Library, model: Model, arrangements: &[Arrangement]) -> Result<Vec<Row>, String> {
    let of_peer = |peer: &Peer| match flags.api {
        Api::Scaling => [2, 4].map(|count| peer.arrangements(count).pop()).into_iter().flatten().collect(),
        _ => peer.arrangements(flags.processes),
    };
    let compared: Vec<(Peer, Arrangement)> = match model {
        // The peers do not have it.
        Model::Wide => Vec::new(),
        _ => flags.compare.iter().flat_map(|peer| of_peer(peer).into_iter().map(|of| (*peer, of))).collect(),
    };
    let mut ours: Vec<Vec<Round>> = arrangements.iter().map(|_| Vec::new()).collect();
    let mut of_peers: Vec<Vec<Round>> = compared.iter().map(|_| Vec::new()).collect();
    for _ in 0..flags.rounds {
        for (arrangement, rounds) in arrangements.iter().zip(&mut ours) {
            rounds.push(measure_round(flags, library, model, arrangement)?);
        }
        for ((peer, arrangement), rounds) in compared.iter().zip(&mut of_peers) {
            rounds.extend(peer.run(flags, model, arrangement)?);
        }
    }
    let unit = spread(ours[0].iter().map(|round| round.samples_per_s).collect()).0 / arrangements[0].2 as f64;
    let of_library = named(&library);
    let ours = arrangements.iter().zip(ours).map(|(arrangement, rounds)| (&*of_library, arrangement, rounds));
    let of_peers = compared.iter().zip(of_peers).map(|((peer, of), rounds)| (peer.name(), of, rounds));
    let rows: Vec<Row> = ours
        .chain(of_peers.filter(|(_, _, rounds)| !rounds.is_empty()))
        .map(|(library, arrangement, rounds)| Row::of(library, model, arrangement, &rounds, unit))
        .collect();
    rows.iter().try_for_each(|row| row.print(flags.json))?;
    Ok(rows)
}

/// Trains by one arrangement of ours.
fn measure_round(
    flags: &Flags,
    library: Library,
    model: Model,
    &(name, _, _, count): &Arrangement,
) -> Result<Round, String> {
    let arguments = ["--library", &named(&library), "--model", &named(&model), "--arrangement", name, "--seconds"];
    let arguments = ["bench", "rank", "train"].into_iter().chain(arguments).map(str::to_owned);
    let arguments: Vec<String> = arguments.chain([flags.seconds.to_string()]).collect();
    let limit = Duration::from_secs_f64(flags.seconds * 8.0 + 120.0);
    let threads = (name != ALL_CORES).then_some(1);
    let ranks = Ranks { count, transport: &flags.transport, algorithm: "auto", threads };
    let mut measured = None;
    processes::run(&ranks, &arguments, limit, |line| {
        measured = Some(serde_json::from_str(line).map_err(text)?);
        Ok(())
    })?;
    measured.ok_or_else(|| format!("the first process of {name} printed nothing"))
}

/// One process of one arrangement; rank 0 prints its [`Round`].
pub(crate) fn run_rank(flags: &RankFlags) -> Result<(), String> {
    let time = Duration::from_secs_f64(flags.seconds);
    let round = match flags.library {
        Library::Candle => candle::run(&flags.arrangement, flags.model, time),
        Library::Burn => burn::run(&flags.arrangement, flags.model, time),
    }?;
    println!("{}", serde_json::to_string(&round).map_err(text)?);
    Ok(())
}

/// Returns the largest resident memory of this process so far, in MiB; 0 where the kernel does not tell.
fn peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kib.unwrap_or(0.0) / 1024.0
}

/// Builds the strategy of an arrangement.
fn strategy_of(arrangement: &str) -> Result<Strategy, String> {
    match arrangement {
        "one" | ALL_CORES => MirroredStrategy::builder().build(),
        "elastic" => return elastic(),
        name if name.starts_with("workers") => MultiWorkerMirroredStrategy::builder().build(),
        name if name.starts_with("tpu") => TpuStrategy::builder().replicas(2).build(),
        "sharded" => FullyShardedStrategy::builder().build(),
        "sharded-in-turn" => FullyShardedStrategy::builder().overlap(false).build(),
        "mirrored-4" => MirroredStrategy::builder().devices(["CPU:0", "CPU:1", "CPU:2", "CPU:3"]).build(),
        _ => MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build(),
    }
    .map_err(text)
}

/// Builds the strategy of workers that may be lost, which waits for all of them before the first step.
fn elastic() -> Result<Strategy, String> {
    let variable = |name: &str| std::env::var(name).map_err(|error| format!("{name}: {error}"));
    let workers = variable(processes::WORKERS)?;
    let workers: Vec<&str> = workers.split(',').collect();
    let index: usize = variable("RANK")?.parse().map_err(text)?;
    let task = serde_json::json!({ "type": "worker", "index": index });
    let config = serde_json::json!({ "cluster": { "worker": workers }, "task": task }).to_string();
    let builder = MultiWorkerMirroredStrategy::builder();
    let builder = builder.cluster_resolver(&TfConfigResolver::from_json(&config).map_err(text)?).map_err(text)?;
    builder.elastic(workers.len() as u32..=workers.len() as u32).build().map_err(text)
}

/// Makes steps without a strategy for some time. The other process does the same; they meet only to begin and to end at
/// the same time. Returns the samples per second of both.
fn independent<E: std::fmt::Display>(
    time: Duration,
    batch: usize,
    mut step: impl FnMut(usize) -> Result<(), E>,
) -> Result<Round, String> {
    let group = ProcessGroup::from_env().map_err(text)?;
    let first_step_s = warm_up(&mut step)?;
    group.barrier().map_err(text)?;
    let started = Instant::now();
    let mut count = 0;
    while started.elapsed() < time {
        step(count).map_err(text)?;
        count += 1;
    }
    let mut rate = [(count * batch) as f64 / started.elapsed().as_secs_f64()];
    group.all_reduce(&mut rate, ReduceOp::Sum).map_err(text)?;
    Ok(Round::of(Speed { samples_per_s: rate[0], first_step_s }, StepTimes::default()))
}

/// Makes steps under a strategy for about some time. The samples per second are those of all replicas.
fn in_step<E: std::fmt::Display>(
    strategy: &Strategy,
    time: Duration,
    global_batch: usize,
    mut step: impl FnMut(usize) -> Result<(), E>,
) -> Result<Speed, String> {
    let first_step_s = warm_up(&mut step)?;
    // Workers must make the same number of steps, so time decides only through an estimate that they share.
    let started = Instant::now();
    (0..WARM_UP).try_for_each(&mut step).map_err(text)?;
    let own = started.elapsed().as_secs_f64() / WARM_UP as f64;
    let estimate = on_local_ranks(&strategy.groups(), |_, group| group.start().all_reduce(vec![own], ReduceOp::Max));
    let estimate = estimate.map_err(text)?.map_or(own, |estimate| estimate[0]);
    let count = ((time.as_secs_f64() / estimate) as usize).max(5);
    let started = Instant::now();
    (0..count).try_for_each(&mut step).map_err(text)?;
    let samples_per_s = (count * global_batch) as f64 / started.elapsed().as_secs_f64();
    Ok(Speed { samples_per_s, first_step_s })
}
