//! Training that is killed and resumes: `cargo run --release -p distribute --example fault_tolerant`
//!
//! The program starts itself as a worker: once without interruption, and once killed with SIGKILL at steps chosen by a
//! seed and restarted each time. Both runs end with the same losses and the same model, bit for bit.
#![expect(clippy::print_stdout, reason = "it prints how both trainings went")]

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use candle_core::{Device, Module, Tensor};
use candle_nn::linear;
use clap::Parser;
use distribute::Error;
use distribute::input::InputPosition;
use distribute::prelude::*;
use distribute_testkit::digits::{Digits, PIXELS};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Kills its own training repeatedly, and checks that nothing is lost.
#[derive(Parser, Clone)]
struct Flags {
    /// Devices of the worker, such as CPU:0,CPU:1.
    #[arg(long, value_delimiter = ',', default_value = "CPU:0,CPU:1")]
    devices: Vec<String>,
    /// Steps of the training.
    #[arg(long, default_value_t = 300)]
    steps: usize,
    /// Steps between checkpoints.
    #[arg(long, default_value_t = 10)]
    checkpoint_every: u64,
    /// Number of times that it is killed.
    #[arg(long, default_value_t = 3)]
    kills: usize,
    /// Seed that chooses the steps at which it is killed.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Time limit of a worker in seconds.
    #[arg(long, default_value_t = 120)]
    deadline: u64,
    /// Trains in this folder; set when the program starts itself.
    #[arg(long, hide = true)]
    worker: Option<PathBuf>,
}

/// The state that a checkpoint keeps in addition to the model and the optimizer.
#[derive(Default, Serialize, Deserialize)]
struct Standing {
    position: Option<InputPosition>,
    losses: Vec<f32>,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    distribute::exit(match &flags.worker {
        Some(folder) => work(&flags, folder),
        None => compare(&flags),
    })
}

/// Trains in a folder, from its newest checkpoint if there is one.
fn work(flags: &Flags, folder: &Path) -> distribute::Result<()> {
    end_with_the_program_that_started_this();
    let strategy = MirroredStrategy::builder().devices(flags.devices.clone()).build()?;
    let digits = Digits::drawn(0, 4000, 0).train;
    let images = Tensor::from_slice(&digits.images, (digits.len(), PIXELS), &Device::Cpu)?;
    let data = Dataset::from_tensor_slices((images, Tensor::new(digits.labels, &Device::Cpu)?));
    let data = data.shuffle(4000, 42).batch(64).repeat_forever().take(flags.steps).prefetch(AUTOTUNE);
    let data = strategy.distribute_dataset(&data)?;
    let model = strategy.scope(|vb| Ok((linear(PIXELS, 64, vb.pp("fc1"))?, linear(64, 10, vb.pp("fc2"))?)))?;
    let optimizer = Adam::new(1e-3).build(&model)?;

    let mut checkpoints = CheckpointManager::new(folder.join("checkpoints")).keep(2);
    let restored = checkpoints.restore(&strategy, &[&model, &optimizer])?;
    let (mut step, mut standing): (u64, Standing) = restored.unwrap_or_default();
    println!("begins after step {step}");
    let mut batches = match standing.position.take() {
        Some(position) => data.iter_from(&position)?,
        None => data.iter(),
    };
    while let Some(batch) = batches.next() {
        let losses = strategy.run((&model, &optimizer, batch?), |ctx, ((fc1, fc2), optimizer, (x, y))| {
            let logits = fc2.forward(&fc1.forward(&x)?.relu()?)?;
            let loss = ctx.average_loss(&cross_entropy_per_example(&logits, &y)?, 64)?;
            optimizer.minimize(ctx, &loss)?;
            Ok(loss.detach())
        })?;
        standing.losses.push(strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.to_scalar()?);
        step += 1;
        if step.is_multiple_of(flags.checkpoint_every.max(1)) {
            standing.position = Some(batches.position()?);
            checkpoints.save(&strategy, step, &[&model, &optimizer], &standing)?;
        }
        println!("step {step}");
    }
    checkpoints.finish()?;
    model.save_safetensors(&strategy, folder.join("model.safetensors"))?;
    // `{:?}` prints enough digits to distinguish any two floats.
    let losses: String = standing.losses.iter().map(|loss| format!("{loss:?}\n")).collect();
    std::fs::write(folder.join("losses"), losses).map_err(Error::program)
}

/// Ends the worker when its parent is gone, because standard input then ends.
fn end_with_the_program_that_started_this() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(1);
    });
}

/// Trains twice, without and with kills, and compares the results.
fn compare(flags: &Flags) -> distribute::Result<()> {
    // With a handler, Ctrl-C returns from here, so that temporary files are removed.
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, interrupted.clone()).map_err(Error::program)?;
    }
    let (calm, killed) = (tempfile::tempdir().map_err(Error::program)?, tempfile::tempdir().map_err(Error::program)?);

    Worker::start(flags, calm.path())?.watch(None, &interrupted)?;
    println!("undisturbed: {} steps", flags.steps);
    let mut random = ChaCha8Rng::seed_from_u64(flags.seed);
    // Not at the very end, where a worker could finish before the signal.
    let mut ends: Vec<u64> =
        (0..flags.kills).map(|_| 1 + random.next_u64() % (flags.steps as u64 * 4 / 5).max(1)).collect();
    ends.sort_unstable();
    for end in ends.into_iter().map(Some).chain([None]) {
        let (from, to) = Worker::start(flags, killed.path())?.watch(end, &interrupted)?;
        let how = if end.is_some() { "killed" } else { "at its end" };
        println!("began after step {from:3}, {how} after step {to:3}");
    }

    let read = |folder: &Path, file| std::fs::read(folder.join(file)).map_err(Error::program);
    for file in ["losses", "model.safetensors"] {
        if read(calm.path(), file)? != read(killed.path(), file)? {
            return Err(Error::program(format!("{file} of the training that was killed differs from the other's")));
        }
    }
    let losses = String::from_utf8_lossy(&read(killed.path(), "losses")?).into_owned();
    let (first, last) = (losses.lines().next().unwrap_or_default(), losses.lines().last().unwrap_or_default());
    println!("{} losses from {first} to {last}, equal bit for bit, and so are the models", losses.lines().count());
    Ok(())
}

/// A worker process and its output. The process is killed on drop.
struct Worker {
    process: Child,
    lines: Receiver<String>,
    deadline: Instant,
}

impl Worker {
    fn start(flags: &Flags, folder: &Path) -> distribute::Result<Worker> {
        let mut command = Command::new(std::env::current_exe().map_err(Error::program)?);
        command.arg("--worker").arg(folder).args(["--devices", &flags.devices.join(",")]);
        command.args(["--steps", &flags.steps.to_string()]);
        command.args(["--checkpoint-every", &flags.checkpoint_every.to_string()]);
        // Ctrl-C reaches only this process, which then ends the worker.
        command.process_group(0);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(Error::program)?;
        let (sender, lines) = channel();
        if let Some(stdout) = process.stdout.take() {
            // The thread ends with the process.
            std::thread::spawn(move || {
                BufReader::new(stdout).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
            });
        }
        Ok(Worker { process, lines, deadline: Instant::now() + Duration::from_secs(flags.deadline) })
    }

    /// Waits until the worker ends, or kills it after a step. Returns the steps after which it began and ended.
    fn watch(mut self, kill_after: Option<u64>, interrupted: &AtomicBool) -> distribute::Result<(u64, u64)> {
        let (mut from, mut step) = (0, 0);
        loop {
            match self.lines.recv_timeout(Duration::from_millis(50)) {
                Ok(line) => {
                    let number = line.rsplit(' ').next().and_then(|number| number.parse().ok()).unwrap_or(step);
                    if line.starts_with("begins") {
                        from = number;
                    }
                    step = number;
                }
                Err(RecvTimeoutError::Timeout) => {}
                // The worker has closed its output.
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if kill_after.is_some_and(|end| step >= end) {
                return Ok((from, step));
            }
            if interrupted.load(Ordering::Relaxed) {
                return Err(Error::program("interrupted; the worker and its files are gone"));
            }
            if Instant::now() > self.deadline {
                return Err(Error::program(format!("the worker hangs after step {step}; see --deadline")));
            }
        }
        let status = self.process.wait().map_err(Error::program)?;
        if status.success() {
            return Ok((from, step));
        }
        Err(Error::program(format!("the worker has failed after step {step}: {status}")))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SIGKILL, so the worker cannot save anything.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
