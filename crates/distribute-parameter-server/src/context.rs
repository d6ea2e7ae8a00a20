//! The context that a function of a program gets on the worker that runs it.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use distribute_device::DType;
use distribute_input::DatasetIter;
use distribute_values::{Scatter, TensorStorage};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::parameters::{Gradient, Traffic, VariableInfo, Versions};
use crate::variable::ShardedVariable;
use crate::wire::proto::Origin;
use crate::worker::{Attendance, Objects};
use crate::{Error, Result, numbers};

/// The worker that runs a function of a [`Program`](crate::Program): its index among the workers, the variables on the
/// servers, and objects that it keeps between calls.
pub struct WorkerContext {
    attendance: Arc<Attendance>,
    origin: Origin,
    /// Numbers the changes of this call, so that a change is recognised when the call is repeated elsewhere.
    changes: AtomicU32,
    /// The optimizers to which this call has pushed.
    pushed: Mutex<BTreeSet<u32>>,
    /// Whether gradients had counted in an earlier round, as those of a step that is scheduled again.
    had_counted: AtomicBool,
}

/// A handle on each worker's iterator over a dataset, to be passed as an argument of scheduled functions.
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
        WorkerContext {
            attendance,
            origin,
            changes: AtomicU32::new(0),
            pushed: Mutex::default(),
            had_counted: AtomicBool::new(false),
        }
    }

    /// Returns whether the function has pushed gradients that are a part of its round.
    pub(crate) fn has_pushed(&self) -> bool {
        !self.pushed.lock().is_empty() && !self.had_counted.load(Ordering::Relaxed)
    }

    /// Returns the index of this worker.
    ///
    /// # Source
    /// `tf.distribute.coordinator.experimental_get_current_worker_index`.
    pub fn worker_index(&self) -> usize {
        self.attendance.worker as usize
    }

    /// Returns the number of workers.
    pub fn num_workers(&self) -> usize {
        self.attendance.workers as usize
    }

    /// Returns the number of this closure, which is the same when it runs again because its worker was lost. Numbers
    /// rise in the order of scheduling; each coordinator of a strategy starts from another number.
    pub fn closure(&self) -> u64 {
        self.origin.closure
    }

    /// Returns whether the coordinator has given this worker up, so that the result is no longer needed; long functions
    /// should check it regularly.
    pub fn is_cancelled(&self) -> bool {
        self.attendance.over.load(Ordering::Acquire)
    }

    /// Returns the next element of this worker's dataset.
    ///
    /// # Errors
    /// [`Error::EndOfData`] after the last element; [`Error::Input`] if the dataset fails; [`Error::WrongTask`] if this
    /// worker has no such iterator, its elements have another type, or another thread uses it for too long;
    /// [`Error::Cancelled`] if the coordinator has given this worker up.
    pub fn next<T: 'static>(&self, iterator: &PerWorkerIterator<T>) -> Result<T> {
        let worker = self.attendance.worker;
        if self.is_cancelled() {
            // The element belongs to functions of the next coordinator.
            return Err(given_up("an element"));
        }
        let resource = self.attendance.resources.lock().get(&iterator.resource).cloned();
        let resource = resource.ok_or_else(|| Error::WrongTask {
            task: format!("worker:{worker}"),
            problem: "it has no dataset of this number; pass an iterator that create_per_worker_dataset has made"
                .to_owned(),
        })?;
        resource.iterator.with(&resource.dataset, worker, |iterator| {
            let elements = iterator.downcast_mut::<DatasetIter<T>>().ok_or_else(|| Error::WrongTask {
                task: format!("worker:{worker}"),
                problem: format!(
                    "the elements of dataset {:?} are not {}; declare the function with the dataset's own type",
                    resource.dataset,
                    std::any::type_name::<T>()
                ),
            })?;
            let end = || Error::EndOfData { name: resource.dataset.clone(), worker };
            Ok(elements.next().ok_or_else(end)??)
        })
    }

    /// Returns a variable on the servers, to be read, and changed by the methods of this context.
    ///
    /// # Errors
    /// [`Error::UnknownVariable`] if there is none of this name; [`Error::ServerLost`], which functions should pass on:
    /// the closure then runs again later.
    pub fn variable(&self, name: &str) -> Result<ShardedVariable> {
        let parameters = &self.attendance.parameters;
        let info = parameters.block_on(parameters.variable(name))?;
        Ok(ShardedVariable::new(info, parameters.clone()))
    }

    /// Returns all variables on the servers, by name.
    ///
    /// # Errors
    /// [`Error::ServerLost`], which functions should pass on.
    pub fn variables(&self) -> Result<BTreeMap<String, ShardedVariable>> {
        let parameters = &self.attendance.parameters;
        parameters.block_on(parameters.refresh())?;
        let variable = |(name, info): (&String, &Arc<VariableInfo>)| {
            (name.clone(), ShardedVariable::new(info.clone(), parameters.clone()))
        };
        Ok(parameters.table().variables.iter().map(variable).collect())
    }

    /// Replaces all elements of a variable, once for this closure however often it runs.
    ///
    /// # Errors
    /// [`Error::Variable`] if shape or type differ; [`Error::Values`] if `value` cannot be read; [`Error::ServerLost`]
    /// or [`Error::Cancelled`], which functions should pass on.
    pub fn assign<L, T: TensorStorage<L>>(&self, variable: &ShardedVariable, value: &T) -> Result<()> {
        self.change(|origin| variable.assign_as(origin, Scatter::Update, None, value))
    }

    /// Adds to a variable, once for this closure however often it runs.
    ///
    /// # Errors
    /// The errors of [`assign`](WorkerContext::assign).
    pub fn assign_add<L, T: TensorStorage<L>>(&self, variable: &ShardedVariable, value: &T) -> Result<()> {
        self.change(|origin| variable.assign_as(origin, Scatter::Add, None, value))
    }

    /// Subtracts from a variable, once for this closure however often it runs.
    ///
    /// # Errors
    /// The errors of [`assign`](WorkerContext::assign).
    pub fn assign_sub<L, T: TensorStorage<L>>(&self, variable: &ShardedVariable, value: &T) -> Result<()> {
        self.change(|origin| variable.assign_as(origin, Scatter::Sub, None, value))
    }

    /// Changes some rows of a variable, once for this closure however often it runs. Rows are written in order; one may
    /// be named more than once.
    ///
    /// # Errors
    /// The errors of [`assign`](WorkerContext::assign), and [`Error::Variable`] if there is no such row, or if whole
    /// numbers are divided by zero.
    pub fn scatter<L, T: TensorStorage<L>>(
        &self,
        variable: &ShardedVariable,
        scatter: Scatter,
        rows: &[usize],
        values: &T,
    ) -> Result<()> {
        self.change(|origin| variable.assign_as(origin, scatter, Some(rows), values))
    }

    /// Sends gradients to the servers, whose optimizer applies them. Returns whether they counted: with
    /// [`Updates::Synchronous`], those of the slowest workers are dropped. There a function pushes to an optimizer
    /// once, since it makes one contribution to a step.
    ///
    /// [`Updates::Synchronous`]: crate::Updates::Synchronous
    ///
    /// # Errors
    /// [`Error::ServerLost`] or [`Error::Cancelled`], which functions should pass on; [`Error::Variable`] or
    /// [`Error::Refused`] if a gradient does not fit; [`Error::Option`] for a second push to the same optimizer with
    /// [`Updates::Synchronous`].
    pub fn push(&self, optimizer: u32, gradients: &[Gradient]) -> Result<bool> {
        let parameters = &self.attendance.parameters;
        let is_first = self.pushed.lock().insert(optimizer);
        if !is_first && parameters.table().contributions.contains_key(&optimizer) {
            let what = "with synchronous updates the number of pushes of a function to one optimizer";
            let expected = "one push of the sum of its gradients";
            return Err(Error::Option { what, given: "2".to_owned(), expected });
        }
        let (counted, had_counted) =
            self.change(|origin| parameters.block_on(parameters.push(origin, optimizer, gradients)))?;
        self.had_counted.fetch_or(had_counted, Ordering::Relaxed);
        Ok(counted)
    }

    /// Returns the optimizer that updates a variable on the servers, if there is one.
    ///
    /// # Errors
    /// [`Error::ServerLost`], which functions should pass on.
    pub fn optimizer_of(&self, variable: &ShardedVariable) -> Result<Option<u32>> {
        let parameters = &self.attendance.parameters;
        let known = || parameters.table().updated_by.get(variable.name()).copied();
        if known().is_none() {
            // It may have been created meanwhile.
            parameters.block_on(parameters.refresh())?;
        }
        Ok(known())
    }

    /// Returns how many functions' gradients make one step of an optimizer: 1, or the contributions of
    /// [`Updates::Synchronous`](crate::Updates::Synchronous).
    pub fn contributions(&self, optimizer: u32) -> usize {
        self.attendance.parameters.table().contributions.get(&optimizer).map_or(1, |count| *count as usize)
    }

    /// Fetches the parts of some variables that have changed since `versions` into tensors of their shapes and types,
    /// in place.
    ///
    /// # Errors
    /// [`Error::ServerLost`], which functions should pass on; [`Error::Variable`] if a tensor does not fit.
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
        parameters.pull(versions, &infos, &mut show)
    }

    /// Returns the bytes that this worker has transferred so far.
    pub fn traffic(&self) -> Traffic {
        self.attendance.parameters.traffic()
    }

    /// Returns an object that this worker keeps between calls, created by `make` on first use. It is dropped when the
    /// worker is restarted or a coordinator attaches: another one, or the same one after their connection had broken.
    ///
    /// # Errors
    /// The error of `make`.
    pub fn keep<T: Any + Send + Sync, E>(&self, name: &str, make: impl FnOnce() -> Result<T, E>) -> Result<Arc<T>, E> {
        kept_in(&self.attendance.kept, name, make)
    }

    /// Returns an object that this worker keeps between calls, as [`keep`](WorkerContext::keep) does, and also when the
    /// connection to its coordinator had broken, or that one is
    /// [restarted in place](crate::ParameterServerOptions::restart_in_place): for positions in data and other state
    /// that depends on no coordinator. Variables do, and must not be kept here. A function that was given up because of
    /// the connection may still use the object.
    ///
    /// # Errors
    /// The error of `make`.
    pub fn keep_lasting<T: Any + Send + Sync, E>(
        &self,
        name: &str,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<Arc<T>, E> {
        kept_in(&self.attendance.lasting, name, make)
    }

    /// Makes this closure's next change, unless the closure is cancelled.
    fn change<T>(&self, make: impl FnOnce(&Origin) -> Result<T>) -> Result<T> {
        // Another coordinator waits for this lock after it has cancelled the closure.
        let _changing = self.attendance.changing.read();
        if self.is_cancelled() {
            return Err(given_up("a change"));
        }
        make(&Origin { change: self.changes.fetch_add(1, Ordering::Relaxed), ..self.origin.clone() })
    }
}

fn given_up(what: &str) -> Error {
    Error::Cancelled { what: what.to_owned(), why: "the coordinator has given this worker up".to_owned() }
}

/// Returns an object by its name and type, created by `make` if there is none.
fn kept_in<T: Any + Send + Sync, E>(
    objects: &Mutex<Objects>,
    name: &str,
    make: impl FnOnce() -> Result<T, E>,
) -> Result<Arc<T>, E> {
    let key = format!("{name}\n{}", std::any::type_name::<T>());
    let kept = objects.lock().get(&key).cloned();
    if let Some(kept) = kept.and_then(|kept| kept.downcast::<T>().ok()) {
        return Ok(kept);
    }
    // Calls run one at a time, so no other has created it meanwhile.
    let made = Arc::new(make()?);
    objects.lock().insert(key, made.clone());
    Ok(made)
}
