//! What a function of a program finds on the worker that runs it.

use std::any::Any;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use distribute_device::DType;
use distribute_input::DatasetIter;
use distribute_values::{Scatter, TensorStorage};
use serde::{Deserialize, Serialize};

use crate::lock::lock;
use crate::parameters::{Gradient, Traffic, VariableInfo, Versions};
use crate::variable::ShardedVariable;
use crate::wire::proto::Origin;
use crate::worker::Attendance;
use crate::{Error, Result, numbers};

/// The worker that runs a function of a [`Program`](crate::Program): its place among the workers, the variables on the servers,
/// and what stays here from one call to the next.
pub struct WorkerContext {
    attendance: Arc<Attendance>,
    origin: Origin,
    /// Counts what this call changes, so that a change is known when the call is made again elsewhere.
    changes: AtomicU32,
}

/// One iterator over a dataset on each worker: an argument of scheduled functions, and useless elsewhere.
///
/// # Source
/// The `PerWorkerValues` iterators of `ClusterCoordinator.create_per_worker_dataset`.
#[derive(Debug, Serialize, Deserialize)]
pub struct PerWorkerIterator<T> {
    pub(crate) resource: u64,
    #[serde(skip)]
    of: PhantomData<fn() -> T>,
}

impl<T> PerWorkerIterator<T> {
    pub(crate) fn new(resource: u64) -> PerWorkerIterator<T> {
        PerWorkerIterator { resource, of: PhantomData }
    }
}

impl<T> Clone for PerWorkerIterator<T> {
    fn clone(&self) -> Self {
        PerWorkerIterator::new(self.resource)
    }
}

impl WorkerContext {
    pub(crate) fn new(attendance: Arc<Attendance>, origin: Origin) -> WorkerContext {
        WorkerContext { attendance, origin, changes: AtomicU32::new(0) }
    }

    /// The index of this worker.
    ///
    /// # Source
    /// `tf.distribute.coordinator.experimental_get_current_worker_index`.
    pub fn worker_index(&self) -> usize {
        self.attendance.worker as usize
    }

    /// The number of workers.
    pub fn num_workers(&self) -> usize {
        self.attendance.workers as usize
    }

    /// The number of this closure, the same when it runs again because its worker was lost. Rising in the order of scheduling;
    /// each coordinator of a strategy counts on from another number.
    pub fn closure(&self) -> u64 {
        self.origin.closure
    }

    /// Whether the coordinator has given this worker up, so that nobody wants the result any more; functions that take long
    /// look at it now and then.
    pub fn is_cancelled(&self) -> bool {
        self.attendance.over.load(Ordering::Acquire)
    }

    /// The next element of this worker's dataset.
    ///
    /// # Errors
    /// [`Error::EndOfData`] after the last one; the dataset's own; [`Error::Variable`] where the iterator is of another type.
    pub fn next<T: 'static>(&self, iterator: &PerWorkerIterator<T>) -> Result<T> {
        let worker = self.attendance.worker;
        let resource = lock(&self.attendance.resources).get(&iterator.resource).cloned();
        let resource = resource.ok_or_else(|| Error::WrongTask {
            task: format!("worker:{worker}"),
            problem: "it has no dataset of this number; pass an iterator that create_per_worker_dataset has made"
                .to_owned(),
        })?;
        resource.iterator.with(&resource.dataset, worker, |iterator| {
            let elements = iterator.downcast_mut::<DatasetIter<T>>().ok_or_else(|| Error::WrongTask {
                task: format!("worker:{worker}"),
                problem: format!(
                    "the elements of dataset {:?} are no {}; declare the function with the dataset's own type",
                    resource.dataset,
                    std::any::type_name::<T>()
                ),
            })?;
            let end = || Error::EndOfData { name: resource.dataset.clone(), worker };
            Ok(elements.next().ok_or_else(end)??)
        })
    }

    /// A variable on the servers.
    ///
    /// # Errors
    /// [`Error::UnknownVariable`]; [`Error::ServerLost`], which functions pass on: the closure then runs again later.
    pub fn variable(&self, name: &str) -> Result<ShardedVariable> {
        let parameters = &self.attendance.parameters;
        let info = parameters.block_on(parameters.variable(name))?;
        Ok(ShardedVariable::new(info, parameters.clone()))
    }

    /// All variables on the servers, by name.
    ///
    /// # Errors
    /// [`Error::ServerLost`], which functions pass on.
    pub fn variables(&self) -> Result<BTreeMap<String, ShardedVariable>> {
        let parameters = &self.attendance.parameters;
        parameters.block_on(parameters.refresh())?;
        let variable = |(name, info): (&String, &Arc<VariableInfo>)| {
            (name.clone(), ShardedVariable::new(info.clone(), parameters.clone()))
        };
        Ok(parameters.table().variables.iter().map(variable).collect())
    }

    /// Adds to a variable, once for this closure however often it runs.
    ///
    /// # Errors
    /// As [`variable`](WorkerContext::variable); the elements do not fit.
    pub fn assign_add<L, T: TensorStorage<L>>(&self, variable: &ShardedVariable, value: &T) -> Result<()> {
        variable.assign_as(&self.change()?, Scatter::Add, None, value)
    }

    /// Changes some rows of a variable, once for this closure however often it runs; a row that is named more than once is
    /// written more than once, in order.
    ///
    /// # Errors
    /// As [`assign_add`](WorkerContext::assign_add).
    pub fn scatter<L, T: TensorStorage<L>>(
        &self,
        variable: &ShardedVariable,
        scatter: Scatter,
        rows: &[usize],
        values: &T,
    ) -> Result<()> {
        variable.assign_as(&self.change()?, scatter, Some(rows), values)
    }

    /// Sends gradients to the servers, whose optimizer applies them. Whether they counted: with [`Updates::Synchronous`], those
    /// of the slowest workers do not.
    ///
    /// [`Updates::Synchronous`]: crate::Updates::Synchronous
    ///
    /// # Errors
    /// [`Error::ServerLost`], [`Error::Cancelled`], which functions pass on; [`Error::Refused`] where something does not fit.
    pub fn push(&self, optimizer: u32, gradients: &[Gradient]) -> Result<bool> {
        let parameters = &self.attendance.parameters;
        parameters.block_on(parameters.push(&self.change()?, optimizer, gradients))
    }

    /// The optimizer that updates a variable on the servers, where there is one.
    ///
    /// # Errors
    /// [`Error::ServerLost`], which functions pass on.
    pub fn optimizer_of(&self, variable: &ShardedVariable) -> Result<Option<u32>> {
        let parameters = &self.attendance.parameters;
        let known = || parameters.table().updated_by.get(variable.name()).copied();
        if known().is_none() {
            // It may have been made meanwhile.
            parameters.block_on(parameters.refresh())?;
        }
        Ok(known())
    }

    /// Fetches what of some variables has changed since `versions` into tensors of their shapes and types, in place.
    ///
    /// # Errors
    /// [`Error::ServerLost`], which functions pass on; [`Error::Variable`] for a tensor that does not fit.
    pub fn pull_into<L, T: TensorStorage<L>>(
        &self,
        versions: &mut Versions,
        variables: &[ShardedVariable],
        tensors: &[T],
    ) -> Result<()> {
        let infos: Vec<Arc<VariableInfo>> = variables.iter().map(|variable| variable.info().clone()).collect();
        let parameters = &self.attendance.parameters;
        let mut show = |place: usize, start: usize, dtype, bytes: &[u8]| {
            let misfit = || Error::Variable {
                name: variables[place].name().to_owned(),
                problem: "the tensor to pull it into has another shape or type".to_owned(),
            };
            let mut fits = false;
            tensors.get(place).ok_or_else(misfit)?.write(&mut |mut target| {
                let (own, size) = (target.dtype(), target.dtype().size_bytes());
                let len = bytes.len() / DType::size_bytes(dtype);
                let range = start.saturating_mul(size)..start.saturating_add(len).saturating_mul(size);
                let place = target.as_bytes_mut().get_mut(range);
                fits = place.is_some_and(|place| numbers::copy_into(bytes, dtype, place, own));
            })?;
            if fits { Ok(()) } else { Err(misfit()) }
        };
        parameters.block_on(parameters.pull(versions, &infos, &mut show))
    }

    /// What this worker has moved so far.
    pub fn traffic(&self) -> Traffic {
        self.attendance.parameters.traffic()
    }

    /// Something that this worker keeps from one call to the next, made when it is first asked for: until the worker is started
    /// again, or another coordinator comes.
    ///
    /// # Errors
    /// What `make` returns.
    pub fn keep<T: Any + Send + Sync, E>(&self, name: &str, make: impl FnOnce() -> Result<T, E>) -> Result<Arc<T>, E> {
        let key = format!("{name}\n{}", std::any::type_name::<T>());
        let kept = lock(&self.attendance.kept).get(&key).cloned();
        if let Some(kept) = kept.and_then(|kept| kept.downcast::<T>().ok()) {
            return Ok(kept);
        }
        // One call runs at a time, so nobody makes it meanwhile.
        let made = Arc::new(make()?);
        lock(&self.attendance.kept).insert(key, made.clone());
        Ok(made)
    }

    /// The next change of this closure, unless nobody wants it any more.
    fn change(&self) -> Result<Origin> {
        if self.is_cancelled() {
            let why = "the coordinator has given this worker up".to_owned();
            return Err(Error::Cancelled { what: "a change".to_owned(), why });
        }
        Ok(Origin { change: self.changes.fetch_add(1, Ordering::Relaxed), ..self.origin.clone() })
    }
}
