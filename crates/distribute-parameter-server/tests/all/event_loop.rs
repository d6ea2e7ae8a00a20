//! Programs whose `main` runs an event loop of its own.

use std::sync::Arc;
use std::time::Duration;

use distribute_cluster::{ClusterSpec, SimpleResolver, Task, TaskType};
use distribute_device::{BufferMut, BufferRef, DType};
use distribute_parameter_server::{
    ClusterCoordinator, Error, ParameterServerStrategy, Program, Server, ServerOptions, Versions, WorkerContext,
};
use distribute_strategy::Strategy;
use distribute_testkit::Ports;
use distribute_train::checkpoint::CheckpointManager;
use distribute_values::{HostTensor, TensorStorage};

use crate::harness::{Cluster, SILENCE, SOON};

/// Runs as `#[tokio::main]` with one thread does.
pub(crate) fn within_an_event_loop(run: impl FnOnce()) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { run() });
}

fn cluster(tasks: &[(TaskType, usize)]) -> ClusterSpec {
    let ports = Ports::reserve(tasks.iter().map(|(_, count)| count).sum()).unwrap();
    let mut addresses = ports.addresses().into_iter();
    tasks.iter().fold(ClusterSpec::new(), |spec, (kind, count)| {
        spec.with_job(*kind, addresses.by_ref().take(*count).collect::<Vec<_>>()).unwrap()
    })
}

fn task(spec: &ClusterSpec, kind: TaskType) -> SimpleResolver {
    let Task { kind, index } = Task::new(kind, 0);
    SimpleResolver { spec: spec.clone(), task_type: Some(kind), task_id: Some(index), ..SimpleResolver::default() }
}

/// Starts a server and a worker in this process.
fn serve(spec: &ClusterSpec, program: impl Fn() -> Program) -> [Server; 2] {
    let options = ServerOptions::default().coordinator_timeout(SOON).silence(SILENCE);
    [TaskType::Ps, TaskType::Worker].map(|kind| Server::start_with(&task(spec, kind), program(), options).unwrap())
}

fn double(worker: &WorkerContext, by: f64) -> Result<f64, Error> {
    let weights = worker.variable("w")?;
    worker.assign_add(&weights, &HostTensor::new(&[3], vec![by; 3])?)?;
    Ok(2.0 * by)
}

#[test]
fn servers_workers_and_the_coordinator_work_within_an_event_loop() {
    let folder = tempfile::tempdir().unwrap();
    let spec = cluster(&[(TaskType::Ps, 1), (TaskType::Worker, 1), (TaskType::Chief, 1)]);
    let program = || Program::new().function("double", double);
    within_an_event_loop(|| {
        let tasks = serve(&spec, program);
        let builder = ParameterServerStrategy::builder(&task(&spec, TaskType::Chief)).options(Cluster::options());
        let strategy = builder.restore_servers_from(folder.path()).build().unwrap();
        let weights = strategy.variable("w", &HostTensor::new(&[3], vec![1.0f64; 3]).unwrap()).unwrap();
        let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
        let value = coordinator.schedule("double", &0.5).unwrap();
        coordinator.join().unwrap();
        assert_eq!(value.fetch::<f64>().unwrap(), 1.0);
        let read = || weights.read::<f64>().unwrap().to_elements::<f64>().unwrap();
        assert_eq!(read(), [1.5; 3]);
        let (local, mut checkpoints) = (Strategy::default_strategy().unwrap(), CheckpointManager::new(folder.path()));
        checkpoints.save(&local, 1, &[&strategy], &()).unwrap();
        weights.assign(&HostTensor::new(&[3], vec![9.0f64; 3]).unwrap()).unwrap();
        assert!(checkpoints.restore::<()>(&local, &[&strategy]).unwrap().is_some());
        assert_eq!(read(), [1.5; 3]);
        drop((coordinator, weights, strategy));
        tasks.into_iter().for_each(|task| task.join().unwrap());
    });
}

#[test]
fn a_strategy_whose_servers_do_not_come_is_an_error_within_an_event_loop() {
    let spec = cluster(&[(TaskType::Ps, 1), (TaskType::Worker, 1), (TaskType::Chief, 1)]);
    within_an_event_loop(|| {
        let options = Cluster::options().connect_timeout(Duration::from_millis(10));
        let builder = ParameterServerStrategy::builder(&task(&spec, TaskType::Chief)).options(options);
        assert!(matches!(builder.build(), Err(Error::Unreachable { .. })));
    });
}

/// A tensor that reads a variable while it is written, as one of a library that transfers lazily may.
#[derive(Clone)]
struct Reading(Arc<dyn Fn() -> f64 + Send + Sync>, HostTensor);

/// The marker of that library.
struct OfReading;

impl TensorStorage<OfReading> for Reading {
    fn dtype(&self) -> distribute_values::Result<DType> {
        self.1.dtype()
    }

    fn shape(&self) -> Vec<usize> {
        TensorStorage::shape(&self.1)
    }

    fn read(&self, visit: &mut dyn FnMut(BufferRef<'_>)) -> distribute_values::Result<()> {
        self.1.read(visit)
    }

    fn write(&self, visit: &mut dyn FnMut(BufferMut<'_>)) -> distribute_values::Result<()> {
        assert_eq!((self.0)(), 1.0);
        self.1.write(visit)
    }

    fn beside(&self, shape: &[usize], elements: BufferRef<'_>) -> distribute_values::Result<Reading> {
        Ok(Reading(self.0.clone(), self.1.beside(shape, elements)?))
    }
}

#[test]
fn a_tensor_may_use_variables_while_they_are_pulled_into_it() {
    let pulls = |worker: &WorkerContext, (): ()| {
        let weights = worker.variable("w")?;
        let first = weights.clone();
        let read = move || first.read::<f64>().unwrap().to_elements::<f64>().unwrap()[0];
        let tensor = Reading(Arc::new(read), HostTensor::new(&[3], vec![0.0f64; 3])?);
        worker.pull_into(&mut Versions::default(), &[weights], std::slice::from_ref(&tensor))?;
        Ok::<_, Error>(tensor.1.to_elements::<f64>()?)
    };
    let spec = cluster(&[(TaskType::Ps, 1), (TaskType::Worker, 1), (TaskType::Chief, 1)]);
    let program = || Program::new().function("pulls", pulls);
    let tasks = serve(&spec, program);
    let builder = ParameterServerStrategy::builder(&task(&spec, TaskType::Chief)).options(Cluster::options());
    let strategy = builder.build().unwrap();
    strategy.variable("w", &HostTensor::new(&[3], vec![1.0f64; 3]).unwrap()).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let value = coordinator.schedule("pulls", &()).unwrap();
    assert_eq!(value.fetch::<Vec<f64>>().unwrap(), [1.0; 3]);
    drop((coordinator, strategy));
    tasks.into_iter().for_each(|task| task.join().unwrap());
}
