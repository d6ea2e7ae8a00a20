//! A cluster of real processes: servers and workers are this test program started again, the coordinator is the test.
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(clippy::print_stdout, reason = "processes say how far they are")]

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub(crate) mod raw;

use distribute_cluster::{ClusterSpec, SimpleResolver, Task, TaskType, TfConfigResolver};
use distribute_input::{Array, Dataset, InputContext, LookupTable, UnknownKeys};
use distribute_parameter_server::{
    ClusterCoordinator, Error, EvaluationShard, Gradient, ParameterServerOptions, ParameterServerStrategy,
    PerWorkerIterator, Program, Server, ServerOptions, Versions, WorkerContext,
};
use distribute_testkit::{Job, Ports, Signal, show_log};
use distribute_values::{HostTensor, TensorStorage};

/// Long enough for anything on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// The silence after which a frozen process counts as lost in these tests.
pub(crate) const SILENCE: Duration = Duration::from_secs(3);

/// The variable for how many seconds tasks wait for a coordinator.
pub(crate) const COORDINATOR_TIMEOUT: &str = "TEST_COORDINATOR_TIMEOUT";

/// The body of a started process.
#[test]
#[ignore = "a process that other tests start"]
fn task() {
    serve();
}

/// The body of a started process, called by the test of that name.
pub(crate) fn serve() {
    if std::env::var_os("TF_CONFIG").is_none() {
        return;
    }
    show_log();
    let cluster = TfConfigResolver::from_env().unwrap();
    let seconds = std::env::var(COORDINATOR_TIMEOUT).map_or(SOON.as_secs(), |seconds| seconds.parse().unwrap());
    let coordinator_timeout = Duration::from_secs(seconds);
    let options = ServerOptions::default().silence(SILENCE).coordinator_timeout(coordinator_timeout);
    let server = Server::start_with(&cluster, program(), options).unwrap();
    println!("serving");
    match server.join() {
        Ok(()) => println!("left"),
        Err(error) => println!("ended: {error}"),
    }
}

pub(crate) fn program() -> Program {
    let number = |value: f64| HostTensor::scalar(value);
    Program::new()
        .function("add", move |worker: &WorkerContext, by: f64| {
            worker.assign_add(&worker.variable("total")?, &number(by))?;
            Ok::<_, Error>(worker.worker_index())
        })
        .function("add_itself", move |worker: &WorkerContext, by: f64| {
            worker.variable("total")?.assign_add(&number(by))
        })
        .function("set", move |worker: &WorkerContext, (to, less): (f64, f64)| {
            let total = worker.variable("total")?;
            worker.assign(&total, &number(to))?;
            worker.assign_sub(&total, &number(less))
        })
        .function("add_after", move |worker: &WorkerContext, (by, milliseconds): (f64, u64)| {
            std::thread::sleep(Duration::from_millis(milliseconds));
            worker.assign_add(&worker.variable("total")?, &number(by))?;
            Ok::<_, Error>(())
        })
        .function("nested", |_: &WorkerContext, x: i64| {
            Ok::<_, Error>((x, BTreeMap::from([("double".to_owned(), 2 * x)]), vec![Some(x), None]))
        })
        .function("fail", |_: &WorkerContext, message: String| Err::<(), String>(message))
        .function("fail_after", |_: &WorkerContext, (message, milliseconds): (String, u64)| {
            std::thread::sleep(Duration::from_millis(milliseconds));
            Err::<(), String>(message)
        })
        .function("panic", |_: &WorkerContext, message: String| -> Result<(), Error> { panic!("{message}") })
        .function("forever", |worker: &WorkerContext, (): ()| {
            println!("forever begins");
            while !worker.is_cancelled() {
                std::thread::sleep(Duration::from_millis(5));
            }
            println!("forever is cancelled");
            Ok::<_, Error>(())
        })
        .function("die", |_: &WorkerContext, (): ()| -> Result<(), Error> { std::process::abort() })
        .function("next", |worker: &WorkerContext, data: PerWorkerIterator<Array<i64>>| {
            let element = worker.next(&data)?;
            Ok::<_, Error>((worker.worker_index(), *element.item().unwrap_or(&-1)))
        })
        .function("next_of_wrong_type", |worker: &WorkerContext, data: PerWorkerIterator<Array<f32>>| {
            worker.next(&data).map(drop)
        })
        .function("kept", |worker: &WorkerContext, (): ()| {
            let count = worker.keep("count", || Ok::<_, Error>(AtomicU64::new(0)))?;
            Ok::<_, Error>(count.fetch_add(1, Ordering::Relaxed))
        })
        .function("lasting", |worker: &WorkerContext, (): ()| {
            let count = worker.keep_lasting("count", || Ok::<_, Error>(AtomicU64::new(0)))?;
            Ok::<_, Error>(count.fetch_add(1, Ordering::Relaxed))
        })
        .function("ids", ids)
        .function("sum_of_part", |_: &WorkerContext, (part, until): (EvaluationShard, u64)| {
            std::thread::sleep(Duration::from_millis(20));
            Ok::<_, Error>((part.index as u64..until).step_by(part.of).sum::<u64>())
        })
        .function("regress", regress)
        .function("push", push)
        .function("pulled", pulled)
        .dataset("numbers", |context: &InputContext| {
            let first = 100 * context.input_pipeline_id as i64;
            Ok::<_, Error>(Dataset::range(first..first + 5))
        })
        .dataset("broken", |_: &InputContext| -> Result<Dataset<Array<i64>>, String> { Err("no such file".to_owned()) })
}

/// Looks words up in this worker's copy of a table. Returns the worker, the number of copies that it has made, and the
/// ids.
fn ids(worker: &WorkerContext, words: Vec<String>) -> Result<(usize, u64, Vec<i64>), Error> {
    static MADE: AtomicU64 = AtomicU64::new(0);
    let table = worker.keep("vocabulary", || {
        MADE.fetch_add(1, Ordering::Relaxed);
        LookupTable::<String>::vocabulary(["the", "of"])?.unknown(UnknownKeys::Buckets(3))
    })?;
    let ids = words.iter().map(|word| table.id(word)).collect::<Result<_, _>>()?;
    Ok((worker.worker_index(), MADE.load(Ordering::Relaxed), ids))
}

/// Makes one step of y = w·x on the examples of that step; returns the loss.
fn regress(worker: &WorkerContext, (optimizer, milliseconds, step): (u32, u64, u64)) -> Result<f64, Error> {
    let weights = worker.variable("w")?;
    let w = weights.read::<f64>()?.to_elements::<f64>()?;
    std::thread::sleep(Duration::from_millis(milliseconds));
    let mut gradient = vec![0.0; w.len()];
    let mut loss = 0.0;
    for example in 0..8u64 {
        let x: Vec<f64> =
            (0..w.len()).map(|at| (((step * 8 + example) * 31 + at as u64 * 17) % 13) as f64 / 6.0 - 1.0).collect();
        let y: f64 = x.iter().enumerate().map(|(at, x)| (at as f64 - 2.0) * x).sum();
        let error = x.iter().zip(&w).map(|(x, w)| x * w).sum::<f64>() - y;
        loss += error * error / 8.0;
        gradient.iter_mut().zip(&x).for_each(|(gradient, x)| *gradient += 2.0 * error * x / 8.0);
    }
    let gradient = Gradient::new(&weights, &HostTensor::new(&[w.len()], gradient)?)?;
    worker.push(optimizer, &[gradient])?;
    Ok(loss)
}

/// Pushes gradients of 1 to the weights, and then takes some time; returns whether they counted.
fn push(worker: &WorkerContext, (optimizer, times, milliseconds): (u32, usize, u64)) -> Result<bool, Error> {
    let weights = worker.variable("w")?;
    let mut counted = true;
    for _ in 0..times {
        let ones = HostTensor::new(weights.shape(), vec![1.0; weights.shape().iter().product()])?;
        counted &= worker.push(optimizer, &[Gradient::new(&weights, &ones)?])?;
    }
    println!("has pushed");
    std::thread::sleep(Duration::from_millis(milliseconds));
    Ok(counted)
}

/// Fetches what has changed of the weights since the last call on this worker, and returns them.
fn pulled(worker: &WorkerContext, (): ()) -> Result<Vec<f64>, Error> {
    let weights = worker.variable("w")?;
    let zeros = || HostTensor::new(weights.shape(), vec![0.0f64; weights.shape().iter().product()]);
    let kept = worker.keep("pulled", || Ok::<_, Error>(Mutex::new((Versions::default(), [zeros()?]))))?;
    let mut kept = kept.lock().unwrap();
    let (versions, copies) = &mut *kept;
    worker.pull_into(versions, &[weights], copies)?;
    Ok(copies[0].to_elements::<f64>()?)
}

/// Processes of servers and workers.
pub(crate) struct Cluster {
    spec: ClusterSpec,
    tasks: BTreeMap<Task, Job>,
    env: Vec<(String, String)>,
}

impl Cluster {
    /// Starts all tasks, and returns when they serve.
    pub(crate) fn start(servers: u32, workers: u32) -> Cluster {
        Cluster::prepare(servers, workers).begin_all()
    }

    /// Describes the cluster without starting tasks.
    pub(crate) fn prepare(servers: u32, workers: u32) -> Cluster {
        show_log();
        let ports = Ports::reserve(servers as usize + workers as usize).unwrap();
        let addresses = ports.addresses();
        drop(ports);
        let (of_servers, of_workers) = addresses.split_at(servers as usize);
        let spec = ClusterSpec::new().with_job(TaskType::Ps, of_servers.to_vec()).unwrap();
        let spec = spec.with_job(TaskType::Worker, of_workers.to_vec()).unwrap();
        // The chief does not listen, but belongs to the description from which the job's identity is derived.
        let spec = spec.with_job(TaskType::Chief, ["127.0.0.1:9"]).unwrap();
        Cluster { spec, tasks: BTreeMap::new(), env: Vec::new() }
    }

    /// Sets a variable of the tasks that are started from now on.
    pub(crate) fn env(mut self, name: &str, value: &str) -> Cluster {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts all tasks, and returns when they serve.
    pub(crate) fn begin_all(mut self) -> Cluster {
        let tasks: Vec<Task> = self.spec.tasks().filter(|task| task.kind != TaskType::Chief).collect();
        for task in tasks {
            self.begin(task);
        }
        for task in self.tasks.keys() {
            self.wait_for(*task, "serving");
        }
        self
    }

    /// Starts a task, at its fixed address.
    pub(crate) fn begin(&mut self, task: Task) {
        let config = serde_json::json!({
            "cluster": self.spec.to_json(), "task": {"type": task.kind.name(), "index": task.index},
        });
        let job = Job::of_test("harness::task").unwrap().env("TF_CONFIG", config.to_string());
        let job = self.env.iter().fold(job, |job, (name, value)| job.env(name, value));
        self.tasks.insert(task, job.start().unwrap());
    }

    pub(crate) fn restart(&mut self, task: Task) {
        self.begin(task);
        self.wait_for(task, "serving");
    }

    pub(crate) fn signal(&mut self, task: Task, signal: Signal) {
        self.tasks[&task].kill(0, signal).unwrap();
        if signal == Signal::KILL {
            self.tasks.get_mut(&task).unwrap().wait(0, SOON).unwrap();
        }
    }

    pub(crate) fn address(&self, task: Task) -> String {
        self.spec.task_address(task).unwrap().to_owned()
    }

    pub(crate) fn pid(&self, task: Task) -> u32 {
        self.tasks[&task].pid(0).unwrap()
    }

    pub(crate) fn wait_for(&self, task: Task, words: &str) {
        self.tasks[&task].wait_for_line(0, words, SOON).unwrap();
    }

    /// Waits for a task to end and returns its output.
    pub(crate) fn end_of(&mut self, task: Task) -> String {
        self.tasks.get_mut(&task).unwrap().wait(0, SOON).unwrap().stdout
    }

    pub(crate) fn resolver(&self) -> SimpleResolver {
        let (spec, task_type) = (self.spec.clone(), Some(TaskType::Chief));
        SimpleResolver { spec, task_type, task_id: Some(0), ..SimpleResolver::default() }
    }

    pub(crate) fn options() -> ParameterServerOptions {
        ParameterServerOptions::default().silence(SILENCE).connect_timeout(SOON).server_timeout(SOON)
    }

    pub(crate) fn strategy(&self) -> ParameterServerStrategy {
        ParameterServerStrategy::builder(&self.resolver()).options(Cluster::options()).build().unwrap()
    }

    /// Returns a coordinator with a variable `total`.
    pub(crate) fn coordinator(&self) -> ClusterCoordinator {
        let strategy = self.strategy();
        strategy.untrained("total", &HostTensor::scalar(0.0)).unwrap();
        ClusterCoordinator::new(&strategy, program()).unwrap()
    }
}

pub(crate) const fn worker(index: u32) -> Task {
    Task::new(TaskType::Worker, index)
}

pub(crate) const fn server(index: u32) -> Task {
    Task::new(TaskType::Ps, index)
}

/// Returns the sum so far.
pub(crate) fn total(coordinator: &ClusterCoordinator) -> f64 {
    let total = coordinator.strategy().find("total").unwrap();
    total.read::<f64>().unwrap().to_elements::<f64>().unwrap()[0]
}

/// Waits until a condition holds.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !is_so() {
        assert!(Instant::now() < end, "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
