//! A training that keeps a ledger: `cargo run --release -p distribute --features full --example ledger`
//!
//! Each task prints every step that it has made, with the time, the members that made it and the examples so far, and
//! when it noticed that another task was lost. So what a fault costs can be read from its output, under every strategy:
//! start it as several tasks, such as `distribute run --workers 3 -- target/release/examples/ledger --strategy workers
//! --checkpoints run/ledger`, and kill one of them. `cargo xtask faults` does so.
#![expect(clippy::print_stdout, reason = "its output is its ledger")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use candle_core::{Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use clap::{Parser, ValueEnum};
use distribute::Error;
use distribute::candle::Sharded;
use distribute::input::InputPosition;
use distribute::parameter_server::{ParameterServerOptions, Program, Server, ServerOptions};
use distribute::prelude::*;
use distribute::strategy::DilocoStrategy;
use distribute::train::elastic::{self, Standing};
use distribute::train::preemption::{PreemptionHandler, TerminationConfig};
use distribute::types::ErrorClass;
use distribute_testkit::digits::{Digits, PIXELS};
use serde::{Deserialize, Serialize};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains, and prints when each step was made.
#[derive(Parser)]
struct Flags {
    /// How the tasks train together.
    #[arg(long, value_enum, default_value = "workers")]
    strategy: Kind,
    /// Steps of the training.
    #[arg(long, default_value_t = 200)]
    steps: u64,
    /// Milliseconds that each step takes at least.
    #[arg(long, default_value_t = 5)]
    pause: u64,
    /// Saves checkpoints in this folder, and resumes from the newest one in it.
    #[arg(long)]
    checkpoints: Option<PathBuf>,
    /// Steps between checkpoints.
    #[arg(long, default_value_t = 20)]
    every: u64,
    /// Seconds of silence after which a task counts as lost.
    #[arg(long, default_value_t = 10.0)]
    silence: f64,
    /// Largest number of workers of an elastic job.
    #[arg(long, default_value_t = 8)]
    most: u32,
    /// Steps that replicas of `diloco` train apart.
    #[arg(long, default_value_t = 10)]
    inner_steps: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// MultiWorkerMirrored: in step.
    Workers,
    /// The same, while workers are lost and join.
    Elastic,
    /// FullySharded.
    Sharded,
    /// Diloco over MultiWorkerMirrored.
    Diloco,
    /// ParameterServer.
    Servers,
}

/// The state of the loop, apart from the model and the optimizer.
#[derive(Clone, Default, Serialize, Deserialize)]
struct Loop {
    steps: u64,
    epoch: u64,
    /// The position in the epoch, if it has begun.
    position: Option<InputPosition>,
    seen: Seen,
}

impl Standing for Loop {
    fn commits(&self) -> u64 {
        self.steps
    }
}

/// The number of examples, the sum of their numbers, and that of the squares: a lost or repeated one changes them.
type Seen = [u64; 3];

const BATCH: usize = 48;
const EXAMPLES: usize = 4800;

fn main() -> ExitCode {
    distribute::init_logging();
    let flags = Flags::parse();
    let outcome = match flags.strategy {
        Kind::Servers => serve_or_coordinate(&flags),
        _ => strategy(&flags).and_then(|strategy| strategy.report_failure(train(&strategy, &flags))),
    };
    distribute::exit(outcome)
}

fn strategy(flags: &Flags) -> distribute::Result<Strategy> {
    let silence = Duration::from_secs_f64(flags.silence);
    let workers = MultiWorkerMirroredStrategy::builder().heartbeat_timeout(silence).devices(["CPU:0"]);
    Ok(match flags.strategy {
        Kind::Elastic => workers.elastic(1..=flags.most).build()?,
        Kind::Sharded => {
            let sharded = FullyShardedStrategy::builder().heartbeat_timeout(silence).devices(["CPU:0"]);
            sharded.mirror_below(1000).build()?
        }
        Kind::Diloco => DilocoStrategy::builder().inner_steps(flags.inner_steps).over(workers.build()?)?,
        Kind::Workers | Kind::Servers => workers.build()?,
    })
}

/// The model, whose first layer is gathered and dropped where it is sharded.
struct Mlp(Sharded<Linear>, Linear);

impl Mlp {
    fn new(vb: VarBuilder<'_>) -> CandleResult<Mlp> {
        Ok(Mlp(Sharded::new(vb.pp("fc1"), |vb| linear(PIXELS, 64, vb))?, linear(64, 10, vb.pp("fc2"))?))
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        self.1.forward(&self.0.run(x, |layer, x| layer.forward(x)?.relu())?)
    }
}

/// Images, labels, and the examples' numbers.
fn digits() -> distribute::Result<Dataset<(Tensor, Tensor, Tensor)>> {
    let digits = Digits::drawn(0, EXAMPLES, 0).train;
    let images = Tensor::from_slice(&digits.images, (EXAMPLES, PIXELS), &Device::Cpu)?;
    let numbers = Tensor::arange(0u32, EXAMPLES as u32, &Device::Cpu)?;
    let data = Dataset::from_tensor_slices((images, Tensor::new(digits.labels, &Device::Cpu)?, numbers));
    Ok(data.shuffle(EXAMPLES, 42).batch(BATCH))
}

fn count(numbers: &Tensor) -> CandleResult<Seen> {
    let numbers = numbers.to_vec1::<u32>()?.into_iter().map(u64::from);
    Ok(numbers.fold([0; 3], |[count, sum, squares], number| [count + 1, sum + number, squares + number * number]))
}

fn add(seen: &mut Seen, more: Seen) {
    seen.iter_mut().zip(more).for_each(|(seen, more)| *seen += more);
}

fn train(strategy: &Strategy, flags: &Flags) -> distribute::Result<()> {
    let data = strategy.distribute_dataset(&digits()?)?;
    let model = strategy.scope(Mlp::new)?;
    let optimizer = Adam::new(1e-3).build(&model)?;
    let mut checkpoints = flags.checkpoints.as_ref().map(|folder| CheckpointManager::new(folder).keep(2));
    // The workers of an elastic job get the state from each other.
    let restored = match &mut checkpoints {
        Some(checkpoints) if flags.strategy != Kind::Elastic => {
            checkpoints.restore::<Loop>(strategy, &[&model, &optimizer])?
        }
        _ => None,
    };
    let state = restored.map(|(_, state)| state).unwrap_or_default();
    let preemption = PreemptionHandler::install(strategy, TerminationConfig::default())?;
    println!("begins after step {} at {}", state.steps, now());
    let state = elastic::run(strategy, &[&model, &optimizer], state, |state| {
        let members = strategy.topology().workers();
        let (generation, chief) = (strategy.generation().unwrap_or_default(), strategy.is_chief());
        println!("joined generation {generation} members {members} chief {chief} at {}", now());
        let mut batches = match &state.position {
            Some(position) => data.iter_from(position)?,
            None => data.iter_epoch(state.epoch),
        };
        let mut step = |state: &mut Loop| {
            let Some(batch) = batches.next() else {
                (state.epoch, state.position) = (state.epoch + 1, None);
                batches = data.iter_epoch(state.epoch);
                return Ok(());
            };
            let arguments = (&model, &optimizer, batch?);
            let seen = strategy.run(arguments, |ctx, (model, optimizer, (x, y, numbers))| {
                std::thread::sleep(Duration::from_millis(flags.pause));
                let loss = ctx.average_loss(&cross_entropy_per_example(&model.forward(&x)?, &y)?, BATCH)?;
                let mut seen = if ctx.has_examples() { count(&numbers)? } else { [0; 3] };
                // Before the step is made: afterwards a failure would leave it undescribed.
                ctx.group().all_reduce(&mut seen, ReduceOp::Sum)?;
                optimizer.minimize(ctx, &loss)?;
                Ok(seen)
            })?;
            add(&mut state.seen, strategy.local_results(&seen)[0]);
            // A member may have made more steps than it has told, of which the others then have the results.
            state.steps = if strategy.elastic().is_some() { strategy.commits() } else { state.steps + 1 };
            state.position = Some(batches.position()?);
            println!("step {} generation {generation} members {members} at {}", state.steps, now());
            if strategy.elastic().is_some() && preemption.is_told() {
                strategy.leave_job()?;
                return Err(preemption.ended(state.steps).into());
            }
            if let Some(checkpoints) = &mut checkpoints {
                let (stops, saved) = (preemption.should_stop(), state.steps.is_multiple_of(flags.every.max(1)));
                if stops || saved || state.steps == flags.steps {
                    checkpoints.save(strategy, state.steps, &[&model, &optimizer], state)?;
                }
                if stops {
                    checkpoints.finish_everywhere(strategy)?;
                    return Err(preemption.ended(state.steps).into());
                }
            }
            Ok::<_, Error>(())
        };
        while state.steps < flags.steps {
            // The optimizer may have made the step before the failure.
            step(state).inspect_err(|error| println!("noticed at {}: {error}", now()))?;
        }
        Ok::<_, Error>(state.clone())
    })?;
    checkpoints.as_mut().map_or(Ok(()), CheckpointManager::finish)?;
    optimizer.synchronize(strategy)?;
    let bits = model.variables().iter().map(|variable| Ok(variable.components()[0].flatten_all()?.to_vec1::<f32>()?));
    tell_the_end(state.steps, state.seen, &bits.collect::<distribute::Result<Vec<_>>>()?);
    Ok(())
}

fn tell_the_end(steps: u64, [count, sum, squares]: Seen, values: &[Vec<f32>]) {
    let digest = values.iter().flatten().fold(0u64, |digest, x| digest.rotate_left(5) ^ u64::from(x.to_bits()));
    println!("end {steps} examples {count} {sum} {squares} weights {digest:016x}");
}

/// Makes one step on any free worker; returns the examples that it has seen.
fn served_step(worker: &WorkerContext, (data, pause): (PerWorkerIterator<Batch>, u64)) -> distribute::Result<Seen> {
    println!("works at {}", now());
    std::thread::sleep(Duration::from_millis(pause));
    let (x, y, numbers) = worker.next(&data)?;
    let model = worker.model("mlp", Mlp::new)?;
    model.minimize(&cross_entropy_per_example(&model.forward(&x)?, &y)?.mean_all()?)?;
    Ok(count(&numbers)?)
}

type Batch = (Tensor, Tensor, Tensor);

fn serve_or_coordinate(flags: &Flags) -> distribute::Result<()> {
    let silence = Duration::from_secs_f64(flags.silence);
    let cluster = TfConfigResolver::from_env()?;
    let program = Program::new()
        .function("step", served_step)
        .dataset("digits", |_: &InputContext| Ok::<_, Error>(digits()?.repeat_forever()));
    println!("begins after step 0 at {}", now());
    if let Some(TaskType::Worker | TaskType::Ps) = cluster.task_type() {
        return Ok(Server::start_with(&cluster, program, ServerOptions::default().silence(silence))?.join()?);
    }
    let mut builder = ParameterServerStrategy::builder(&cluster);
    builder = builder.options(ParameterServerOptions::default().silence(silence));
    if let Some(folder) = &flags.checkpoints {
        builder = builder.restore_servers_from(folder);
    }
    // A coordinator that is started again finds what its servers have made meanwhile.
    let strategy = builder.restart_in_place().partitioner(MinSizePartitioner::new(64 << 10, 2)).build()?;
    let outcome = coordinate(flags, &strategy, program);
    if let Err(error) = &outcome {
        // Of its own, such as one of its disk: the others then end with it.
        strategy.report_failure(error, error.failure_kind());
    }
    outcome
}

fn coordinate(flags: &Flags, strategy: &ParameterServerStrategy, program: Program) -> distribute::Result<()> {
    strategy.create_model(Adam::new(1e-3), Mlp::new)?;
    // The coordinator's own work, such as saving, is done in one process.
    let here = Strategy::default_strategy()?;
    let mut checkpoints = flags.checkpoints.as_ref().map(|folder| CheckpointManager::new(folder).keep(2));
    let restored = match &mut checkpoints {
        Some(checkpoints) => checkpoints.restore::<Loop>(&here, &[strategy])?,
        None => None,
    };
    let mut state = restored.map(|(_, state)| state).unwrap_or_default();
    // Steps that were made after the checkpoint, of which the servers alone know.
    let first = strategy.confirm_steps(state.steps)?;
    state.seen[0] += (first - state.steps) * BATCH as u64;
    state.steps = first;
    println!("joined generation 0 members 1 chief true after step {} at {}", state.steps, now());
    let coordinator = ClusterCoordinator::new(strategy, program)?;
    let data = coordinator.create_per_worker_dataset::<Batch>("digits")?.iter();
    while state.steps < flags.steps {
        let until = (state.steps + flags.every.max(1)).min(flags.steps);
        let steps = (state.steps..until).map(|step| coordinator.schedule_step(step, "step", &(&data, flags.pause)));
        for step in steps.collect::<Result<Vec<_>, _>>()? {
            // The function's own error is returned by `join`, once.
            let Ok(seen) = step.fetch::<Seen>() else { break };
            add(&mut state.seen, seen);
            state.steps += 1;
            println!("step {} generation 0 members {} at {}", state.steps, coordinator.workers().len(), now());
        }
        coordinator.join().inspect_err(|error| println!("noticed at {}: {error}", now()))?;
        if let Some(checkpoints) = &mut checkpoints {
            checkpoints.save(&here, state.steps, &[strategy], &state)?;
        }
    }
    checkpoints.as_mut().map_or(Ok(()), CheckpointManager::finish)?;
    tell_the_end(state.steps, state.seen, &[]);
    Ok(())
}

/// Returns the milliseconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}
