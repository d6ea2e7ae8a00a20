//! Training that continues while its processes are killed and join again:
//! `cargo run --release -p distribute --example elastic`
//!
//! The program starts itself as several workers, kills or freezes one of them every few seconds, any but the last that
//! trains, and starts another in its place. The others repeat the step that failed and train on; a new one gets the
//! state of a live one. At the end each step was made once, with all of its examples.
#![expect(clippy::print_stdout, reason = "it prints how the training went")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use candle_core::{Device, Module, Tensor};
use candle_nn::linear;
use clap::Parser;
use distribute::Error;
use distribute::cluster::JobSecret;
use distribute::input::InputPosition;
use distribute::prelude::*;
use distribute::train::elastic::{self, Standing};
use distribute_testkit::Ports;
use distribute_testkit::digits::{Digits, PIXELS};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Kills its own workers while they train, and checks that nothing is lost.
#[derive(Parser, Clone)]
struct Flags {
    /// Workers at the same time.
    #[arg(long, default_value_t = 4)]
    workers: u32,
    /// Seconds of the training.
    #[arg(long, default_value_t = 20.0)]
    seconds: f64,
    /// Seconds between two faults; 0 for none.
    #[arg(long, default_value_t = 2.0)]
    every: f64,
    /// Freezes every second worker that it would kill, for twice the heartbeat timeout.
    #[arg(long)]
    freeze: bool,
    /// Seconds of silence after which a worker counts as lost.
    #[arg(long, default_value_t = 1.0)]
    heartbeat: f64,
    /// Seed that chooses the workers.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Milliseconds that each step takes at least.
    #[arg(long, default_value_t = 5, overrides_with = "pause")]
    pause: u64,
    /// Trains once more afterwards, with the same numbers of workers for the same steps and without faults, from
    /// checkpoint to checkpoint, and compares the weights bit for bit.
    #[arg(long)]
    verify: bool,
    /// Trains with workers that do not change, and without faults, to compare the speed.
    #[arg(long, conflicts_with_all = ["freeze", "verify"])]
    plain: bool,
    /// Trains as a worker, in this folder; set when the program starts itself.
    #[arg(long, hide = true)]
    worker: Option<PathBuf>,
    /// Trains as a worker that does not change, from a checkpoint in that folder up to this step.
    #[arg(long, hide = true, requires = "worker")]
    until: Option<u64>,
}

/// The state that a worker needs which joins others, apart from the model and the optimizer.
#[derive(Default, Serialize, Deserialize)]
struct Loop {
    commits: u64,
    epoch: u64,
    /// The position in the epoch, if it has begun.
    position: Option<InputPosition>,
    /// The sums of all examples' numbers and of their squares, over all steps.
    seen: [u64; 2],
    ends: bool,
}

impl Standing for Loop {
    fn commits(&self) -> u64 {
        self.commits
    }
}

const BATCH: usize = 48;
/// The file of the workers' secret, which others of the machine's users cannot read.
const SECRET: &str = "secret";
const EXAMPLES: usize = 4800;

fn main() -> ExitCode {
    distribute::init_logging();
    let flags = Flags::parse();
    distribute::exit(match &flags.worker {
        Some(folder) => work(&flags, folder),
        None => disturb(&flags),
    })
}

/// Trains until the file `end` is there.
fn work(flags: &Flags, folder: &Path) -> distribute::Result<()> {
    end_with_the_program_that_started_this();
    let builder = MultiWorkerMirroredStrategy::builder()
        .heartbeat_timeout(Duration::from_secs_f64(flags.heartbeat))
        .devices(["CPU:0"]);
    let strategy = match flags.plain || flags.until.is_some() {
        false => builder.elastic(1..=flags.workers).build()?,
        true => builder.build()?,
    };
    let digits = Digits::drawn(0, EXAMPLES, 0).train;
    let images = Tensor::from_slice(&digits.images, (EXAMPLES, PIXELS), &Device::Cpu)?;
    let numbers = Tensor::arange(0u32, EXAMPLES as u32, &Device::Cpu)?;
    let data = Dataset::from_tensor_slices((images, Tensor::new(digits.labels, &Device::Cpu)?, numbers));
    let data = strategy.distribute_dataset(&data.shuffle(EXAMPLES, 42).batch(BATCH))?;
    let model = strategy.scope(|vb| Ok((linear(PIXELS, 64, vb.pp("fc1"))?, linear(64, 10, vb.pp("fc2"))?)))?;
    let optimizer = Adam::new(1e-3).build(&model)?;
    let end = folder.join("end");
    let mut checkpoints = CheckpointManager::new(folder.join("checkpoints")).keep(1);
    let restored = flags.until.map(|_| checkpoints.restore::<Loop>(&strategy, &[&model, &optimizer])).transpose()?;
    let state = restored.flatten().map(|(_, state)| state).unwrap_or_default();
    let state = elastic::run(&strategy, &[&model, &optimizer], state, |state| {
        let before = state.commits;
        let mut batches = match &state.position {
            Some(position) => data.iter_from(position)?,
            None => data.iter_epoch(state.epoch),
        };
        while !state.ends && flags.until != Some(state.commits) {
            let Some(batch) = batches.next() else {
                (state.epoch, state.position) = (state.epoch + 1, None);
                batches = data.iter_epoch(state.epoch);
                continue;
            };
            let arguments = (&model, &optimizer, batch?);
            let sums = strategy.run(arguments, |ctx, ((fc1, fc2), optimizer, (x, y, numbers))| {
                std::thread::sleep(Duration::from_millis(flags.pause));
                let logits = fc2.forward(&fc1.forward(&x)?.relu()?)?;
                let loss = ctx.average_loss(&cross_entropy_per_example(&logits, &y)?, BATCH)?;
                let mut sums = [0, 0, u64::from(ctx.replica_id() == 0 && flags.until.is_none() && end.exists())];
                for number in numbers.to_vec1::<u32>()?.into_iter().map(u64::from).filter(|_| ctx.has_examples()) {
                    (sums[0], sums[1]) = (sums[0] + number, sums[1] + number * number);
                }
                // Before the step is made: afterwards a failure would leave it undescribed.
                ctx.group().all_reduce(&mut sums, ReduceOp::Sum)?;
                optimizer.minimize(ctx, &loss)?;
                Ok(sums)
            })?;
            let [one, two, asks] = strategy.local_results(&sums)[0];
            state.seen = [state.seen[0] + one, state.seen[1] + two];
            state.ends = asks > 0;
            state.commits = if flags.until.is_some() { before } else { 0 } + strategy.commits();
            state.position = Some(batches.position()?);
            let generation = strategy.generation().unwrap_or_default();
            let members = strategy.topology().workers();
            println!("step {} generation {generation} members {members} at {}", state.commits, now());
        }
        if flags.until.is_some() {
            checkpoints.save(&strategy, state.commits, &[&model, &optimizer], state)?;
            checkpoints.finish()?;
        }
        Ok::<_, Error>((state.commits, state.seen))
    })?;
    let (steps, seen) = state;
    let bits = model.variables().iter().map(|variable| Ok(variable.components()[0].flatten_all()?.to_vec1::<f32>()?));
    let bits = bits.collect::<distribute::Result<Vec<_>>>()?;
    let digest = bits.iter().flatten().fold(0u64, |digest, x| digest.rotate_left(5) ^ u64::from(x.to_bits()));
    println!("end {steps} {} {} {digest:016x}", seen[0], seen[1]);
    Ok(())
}

/// Returns the milliseconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

/// Ends the worker when its parent is gone, because standard input then ends.
fn end_with_the_program_that_started_this() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(1);
    });
}

/// A line that a worker has printed.
enum Line {
    Step { worker: usize, step: u64, generation: u64, members: u32, at: u64 },
    End { steps: u64, seen: [u64; 2], digest: String },
}

/// A fault, and when the others had recovered.
struct Fault {
    what: &'static str,
    at: u64,
    /// The last step that was made before it.
    step: u64,
    generation: u64,
    /// Milliseconds until the next step of another worker.
    recovered: Option<u64>,
}

/// Trains, disturbs the training, and tells how it went.
fn disturb(flags: &Flags) -> distribute::Result<()> {
    // With a handler, Ctrl-C returns from here, so that processes and files are removed.
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, interrupted.clone()).map_err(Error::program)?;
    }
    let folder = tempfile::tempdir().map_err(Error::program)?;
    JobSecret::create_file(folder.path().join(SECRET))?;
    let (sender, lines) = channel();
    let mut workers = Vec::new();
    let port = free_port()?;
    for rank in 0..flags.workers {
        workers.push(match flags.plain {
            false => Worker::start(flags, folder.path(), workers.len(), &sender)?,
            true => Worker::start_fixed(flags, folder.path(), (rank, flags.workers, port), None, &sender)?,
        });
    }
    let mut random = ChaCha8Rng::seed_from_u64(flags.seed);
    let mut job = Job {
        lines,
        last: (0, 0),
        members: BTreeMap::new(),
        faults: Vec::new(),
        trains: BTreeMap::new(),
        joins: Vec::new(),
        ends: Vec::new(),
    };
    let deadline = Instant::now() + Duration::from_secs_f64(flags.seconds + 120.0);
    // The faults begin when all are there.
    while job.members.values().next_back().is_none_or(|(_, members)| *members < flags.workers) {
        job.read(Duration::from_millis(20), &workers)?;
        check(&interrupted, deadline, "not all workers have joined")?;
    }
    let began = Instant::now();
    let mut due = began + Duration::from_secs_f64(flags.every.max(0.01));
    let mut thaws: Vec<(usize, Instant)> = Vec::new();
    while began.elapsed().as_secs_f64() < flags.seconds {
        job.read(Duration::from_millis(1), &workers)?;
        check(&interrupted, deadline, "the training hangs")?;
        for (worker, _) in thaws.extract_if(.., |(_, at)| *at <= Instant::now()) {
            workers[worker].signal(Signal::CONT)?;
        }
        if flags.plain || flags.every <= 0.0 || Instant::now() < due {
            continue;
        }
        let is_frozen = |worker: usize| thaws.iter().any(|(frozen, _)| *frozen == worker);
        let trains: Vec<usize> = job.newest().filter(|worker| workers[*worker].lives && !is_frozen(*worker)).collect();
        // What all have learnt is lost with the last that trains, so that one is left in peace.
        if trains.len() < 2 {
            continue;
        }
        due = Instant::now() + Duration::from_secs_f64(flags.every);
        let chosen = trains[random.next_u64() as usize % trains.len()];
        if flags.freeze && job.faults.len() % 2 == 1 {
            workers[chosen].signal(Signal::STOP)?;
            thaws.push((chosen, Instant::now() + Duration::from_secs_f64(2.0 * flags.heartbeat)));
            job.fault("frozen", chosen);
        } else {
            workers[chosen].signal(Signal::KILL)?;
            workers[chosen].lives = false;
            job.fault("killed", chosen);
            workers.push(Worker::start(flags, folder.path(), workers.len(), &sender)?);
        }
    }
    for (worker, _) in thaws {
        workers[worker].signal(Signal::CONT)?;
    }
    std::fs::write(folder.path().join("end"), "").map_err(Error::program)?;
    // One that has not joined by then finds no others.
    while job.ends.is_empty() || job.ends.len() < job.trains.keys().filter(|at| workers[**at].lives).count() {
        job.read(Duration::from_millis(20), &workers)?;
        check(&interrupted, deadline, "the training does not end")?;
    }
    for at in job.trains.keys().copied().filter(|at| workers[*at].lives).collect::<Vec<_>>() {
        let worker = &mut workers[at];
        let status = worker.wait()?;
        if !status.success() {
            return Err(Error::program(format!("a worker has failed: {status}")));
        }
    }
    job.tell(began.elapsed())?;
    if flags.verify { job.verify(flags, folder.path()) } else { Ok(()) }
}

fn check(interrupted: &AtomicBool, deadline: Instant, problem: &str) -> distribute::Result<()> {
    match (interrupted.load(Ordering::Relaxed), Instant::now() > deadline) {
        (true, _) => Err(Error::program("interrupted; the workers and their files are gone")),
        (_, true) => Err(Error::program(problem)),
        _ => Ok(()),
    }
}

/// The job, as far as its workers have told.
struct Job {
    lines: Receiver<Line>,
    /// The last step, and its generation.
    last: (u64, u64),
    /// The generation that made each step, and the number of its members. A process that is lost may tell late of a
    /// step that the others have repeated in a later generation.
    members: BTreeMap<u64, (u64, u32)>,
    faults: Vec<(usize, Fault)>,
    /// Workers that have made a step, and the newest generation in which they have.
    trains: BTreeMap<usize, u64>,
    /// Milliseconds from the start of each worker that has replaced another until its first step.
    joins: Vec<u64>,
    ends: Vec<(u64, [u64; 2], String)>,
}

impl Job {
    /// Returns the workers that have made a step in the newest generation.
    fn newest(&self) -> impl Iterator<Item = usize> {
        let newest = self.trains.values().copied().max();
        self.trains.iter().filter(move |(_, generation)| Some(**generation) == newest).map(|(worker, _)| *worker)
    }

    fn fault(&mut self, what: &'static str, worker: usize) {
        let (step, generation) = self.last;
        self.faults.push((worker, Fault { what, at: now(), step, generation, recovered: None }));
    }

    fn read(&mut self, patience: Duration, workers: &[Worker]) -> distribute::Result<()> {
        match self.lines.recv_timeout(patience) {
            Ok(Line::Step { worker, step, generation, members, at }) => {
                self.last = self.last.max((step, generation));
                let last = self.members.entry(step).or_insert((generation, members));
                *last = (*last).max((generation, members));
                if self.trains.insert(worker, generation).is_none() && !self.faults.is_empty() {
                    self.joins.push(at.saturating_sub(workers[worker].began));
                }
                for (of, fault) in &mut self.faults {
                    // The next step after the fault that needed others than the lost one.
                    if fault.recovered.is_none() && *of != worker && generation > fault.generation && step > fault.step
                    {
                        fault.recovered = Some(at.saturating_sub(fault.at));
                    }
                }
            }
            Ok(Line::End { steps, seen, digest }) => self.ends.push((steps, seen, digest)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(Error::program("all workers have ended")),
        }
        match workers.iter().all(|worker| !worker.lives) {
            true => Err(Error::program("no worker lives")),
            false => Ok(()),
        }
    }

    /// Repeats the training with the same members, and compares.
    fn verify(&self, flags: &Flags, folder: &Path) -> distribute::Result<()> {
        let mut phases: Vec<(u32, u64)> = Vec::new();
        for (step, (_, members)) in &self.members {
            match phases.last_mut() {
                Some((of, until)) if of == members => *until = *step,
                _ => phases.push((*members, *step)),
            }
        }
        let mut digest = String::new();
        for (members, until) in &phases {
            let (sender, lines) = channel();
            let port = free_port()?;
            let start = |rank| Worker::start_fixed(flags, folder, (rank, *members, port), Some(*until), &sender);
            let mut workers = (0..*members).map(start).collect::<distribute::Result<Vec<_>>>()?;
            for worker in &mut workers {
                let status = worker.wait()?;
                if !status.success() {
                    return Err(Error::program(format!("a worker that was not disturbed has failed: {status}")));
                }
            }
            drop((workers, sender));
            for line in lines {
                if let Line::End { digest: of_phase, .. } = line {
                    digest = of_phase;
                }
            }
        }
        match self.ends.first() {
            Some((_, _, expected)) if *expected == digest => {
                println!("the same steps without faults, by {} changes of members: equal bit for bit", phases.len());
                Ok(())
            }
            other => Err(Error::program(format!("without faults the weights are {digest}, with faults {other:?}"))),
        }
    }

    fn tell(&self, took: Duration) -> distribute::Result<()> {
        for (_, Fault { what, step, generation, recovered, .. }) in &self.faults {
            let recovered = recovered.map_or("never".to_owned(), |recovered| format!("{recovered} ms"));
            println!("{what} in generation {generation} after step {step}: the next step {recovered} later");
        }
        let Some((steps, seen, digest)) = self.ends.first() else { return Err(Error::program("no worker has ended")) };
        if let Some(other) = self.ends.iter().find(|end| (&end.0, &end.1, &end.2) != (steps, seen, digest)) {
            return Err(Error::program(format!("workers end differently: {:?} and {other:?}", self.ends[0])));
        }
        let expected = expected(*steps);
        if *seen != expected {
            return Err(Error::program(format!(
                "{steps} steps have seen examples that sum up to {seen:?}, not {expected:?}"
            )));
        }
        let all = self.faults.len();
        println!(
            "{steps} steps in {:.1} s, each with all of its examples; weights {digest} on all workers",
            took.as_secs_f64()
        );
        if let Some([least, median, most]) = spread(self.faults.iter().filter_map(|(_, fault)| fault.recovered)) {
            println!("{all} faults: next step after {least} ms at least, {median} ms in the middle, {most} ms at most");
        }
        if let Some([least, median, most]) = spread(self.joins.iter().copied()) {
            let all = self.joins.len();
            println!(
                "{all} joined: first step after {least} ms at least, {median} ms in the middle, {most} ms at most"
            );
        }
        Ok(())
    }
}

/// Returns the least, the middle and the largest of some times.
fn spread(times: impl Iterator<Item = u64>) -> Option<[u64; 3]> {
    let mut times: Vec<u64> = times.collect();
    times.sort_unstable();
    Some([*times.first()?, times[times.len() / 2], *times.last()?])
}

/// Returns a port that nothing listens on.
fn free_port() -> distribute::Result<u16> {
    Ok(Ports::reserve(1).map_err(Error::program)?.release()[0])
}

/// Returns the sums of the numbers, and of the squares of the numbers, of all examples of these many steps. Passes have
/// whole batches.
fn expected(steps: u64) -> [u64; 2] {
    let data = Dataset::range(0..EXAMPLES as i64).shuffle(EXAMPLES, 42).batch(BATCH);
    let rows = (0..).flat_map(|_| data.iter()).take(steps as usize).filter_map(Result::ok);
    rows.fold([0, 0], |sums, rows| {
        rows.as_slice().iter().fold(sums, |[one, two], row| [one + *row as u64, two + (*row * *row) as u64])
    })
}

/// A worker process. It is killed on drop.
struct Worker {
    process: Child,
    lives: bool,
    /// When it was started, in milliseconds since 1970.
    began: u64,
}

impl Worker {
    fn start(flags: &Flags, folder: &Path, worker: usize, sender: &Sender<Line>) -> distribute::Result<Worker> {
        let mut command = Worker::command(flags, folder)?;
        // The members find each other in this folder.
        command.env("DISTRIBUTE_GENERATIONS", format!("file:{}", folder.join("generations").display()));
        command.envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")]);
        Worker::started(command, worker, sender)
    }

    /// Starts the worker with this rank among workers that do not change.
    fn start_fixed(
        flags: &Flags,
        folder: &Path,
        (rank, size, port): (u32, u32, u16),
        until: Option<u64>,
        sender: &Sender<Line>,
    ) -> distribute::Result<Worker> {
        let mut command = Worker::command(flags, folder)?;
        match until {
            // The last of two flags counts; the pause changes no result.
            Some(until) => command.args(["--until", &until.to_string(), "--pause", "0"]),
            None => command.arg("--plain"),
        };
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("DISTRIBUTE_PORT", port.to_string());
        Worker::started(command, rank as usize, sender)
    }

    fn command(flags: &Flags, folder: &Path) -> distribute::Result<Command> {
        let mut command = Command::new(std::env::current_exe().map_err(Error::program)?);
        command.arg("--worker").arg(folder).args(["--workers", &flags.workers.to_string()]);
        command.args(["--heartbeat", &flags.heartbeat.to_string(), "--pause", &flags.pause.to_string()]);
        command.env("DISTRIBUTE_JOB_ID", "elastic-example").env("RAYON_NUM_THREADS", "1");
        command.env("DISTRIBUTE_JOB_SECRET_FILE", folder.join(SECRET));
        Ok(command)
    }

    fn started(mut command: Command, worker: usize, sender: &Sender<Line>) -> distribute::Result<Worker> {
        // Ctrl-C reaches only this process, which then ends the workers.
        command.process_group(0);
        let began = now();
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(Error::program)?;
        if let Some(stdout) = process.stdout.take() {
            let sender = sender.clone();
            // The thread ends with the process.
            std::thread::spawn(move || {
                let lines = BufReader::new(stdout).lines().map_while(Result::ok);
                lines.filter_map(|line| parse(&line, worker)).try_for_each(|line| sender.send(line))
            });
        }
        Ok(Worker { process, lives: true, began })
    }

    fn wait(&mut self) -> distribute::Result<ExitStatus> {
        // Its end would end the worker, and `wait` closes it.
        let input = self.process.stdin.take();
        let status = self.process.wait().map_err(Error::program);
        drop(input);
        status
    }

    fn signal(&self, signal: Signal) -> distribute::Result<()> {
        let pid = Pid::from_child(&self.process);
        kill_process(pid, signal).map_err(Error::program)
    }
}

fn parse(line: &str, worker: usize) -> Option<Line> {
    let words: Vec<&str> = line.split(' ').collect();
    let number = |at: usize| words.get(at)?.parse::<u64>().ok();
    match *words.first()? {
        "step" => Some(Line::Step {
            worker,
            step: number(1)?,
            generation: number(3)?,
            members: number(5)? as u32,
            at: number(7)?,
        }),
        "end" => {
            Some(Line::End { steps: number(1)?, seen: [number(2)?, number(3)?], digest: (*words.get(4)?).to_owned() })
        }
        _ => None,
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SIGKILL, so the worker cannot save anything.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
