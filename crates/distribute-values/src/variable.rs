//! State with one component per replica.

use std::sync::Arc;

use distribute_collectives::{ProcessGroup, Rank, ReduceOp};
use distribute_device::BufferRef;
use distribute_types::with_dtype;

use crate::combine::{Form, begin_reduce, broadcast_as};
use crate::elements::{assign, assign_share};
use crate::{Axis, Error, Result, TensorStorage};

/// Whether code runs in a replica, outside all replicas or in an update, which determines whether an access means a
/// component or the whole variable.
#[derive(Clone, Copy, Debug)]
pub enum CallContext<'a> {
    /// Inside a replica.
    Replica {
        /// Index among the replicas of this process.
        local: usize,
        /// The replica's rank in the group of all replicas.
        group: &'a ProcessGroup,
    },
    /// Outside all replicas. Every process of the group makes the same calls.
    Cross {
        /// The local ranks of the group of all replicas.
        groups: &'a [ProcessGroup],
    },
    /// In an update of one component from outside the replicas.
    Update {
        /// Index among the replicas of this process.
        local: usize,
    },
}

/// A variable with one component per local replica.
///
/// # Ordering
/// The operations that communicate carry the variable's name, so all ranks must use the same variables, under the same
/// names and in the same order.
///
/// # Errors
/// Synchronization, aggregation and [`CallContext`] determine which operations are allowed; others return
/// [`Error::Variable`] with the reason. An operation that communicates returns [`Error::VariableOrder`] if other ranks
/// use another variable or use this one in another way.
///
/// # Examples
/// ```
/// use distribute_collectives::ProcessGroup;
/// use distribute_values::{Aggregation, Assignment, DistributedVariable, HostTensor, CallContext};
/// use distribute_values::{TensorStorage, VariableOptions};
///
/// let groups = ProcessGroup::local(2)?;
/// let components = vec![HostTensor::scalar(0.0), HostTensor::scalar(0.0)];
/// let seen = DistributedVariable::new("examples_seen", components, VariableOptions::on_read(Aggregation::Sum))?;
/// for (local, group) in groups.iter().enumerate() {
///     seen.assign(CallContext::Replica { local, group }, Assignment::Add, &HostTensor::scalar(32.0))?;
/// }
/// assert_eq!(seen.read_value(CallContext::Cross { groups: &groups })?.to_elements::<f64>()?, [64.0]);
/// # Ok::<(), distribute_values::Error>(())
/// ```
///
/// # Source
/// `tf.Variable` created under a `tf.distribute` strategy. TensorFlow's documentation and code disagree about writes
/// without aggregation inside a replica; this follows the documentation, by which they are errors.
#[derive(Clone, Debug)]
pub struct DistributedVariable<T> {
    name: String,
    components: Vec<T>,
    options: VariableOptions,
    /// Whether all components are the same storage.
    shared: bool,
    /// Shared by clones, which are handles on the same components.
    undo: Option<Arc<Undo>>,
}

impl<T> DistributedVariable<T> {
    /// Creates a variable from its components, one per local replica.
    ///
    /// # Errors
    /// [`Error::VariableOptions`] for a mean of integers, [`Error::Shape`] if components have different shapes.
    pub fn new<L>(name: &str, components: Vec<T>, options: VariableOptions) -> Result<DistributedVariable<T>>
    where
        T: TensorStorage<L>,
    {
        if let Some(first) = components.first() {
            let dtype = first.dtype()?;
            if options.aggregation == Aggregation::Mean && !dtype.is_float() {
                return Err(Error::VariableOptions {
                    name: name.to_owned(),
                    dtype,
                    problem: "a mean of integers is not an integer; use Aggregation::Sum, or a floating-point type",
                });
            }
            let expected = first.shape();
            for (replica, component) in components.iter().enumerate() {
                let got = component.shape();
                if got != expected {
                    let remedy = "all components of a variable have one shape";
                    return Err(Error::Shape { what: "variable", replica, got, expected, remedy });
                }
            }
        }
        Ok(DistributedVariable { name: name.to_owned(), components, options, shared: false, undo: None })
    }

    /// Creates a variable of one component that all `replicas` of this process share.
    ///
    /// Replicas read it without a copy of their own; their writes are aggregated first and then written once.
    ///
    /// # Errors
    /// [`Error::VariableOptions`] for a mean of integers, and for an on-read variable, whose components differ.
    ///
    /// # Source
    /// The variables of `tf.distribute.experimental.CentralStorageStrategy`.
    pub fn shared<L>(
        name: &str,
        component: T,
        replicas: usize,
        options: VariableOptions,
    ) -> Result<DistributedVariable<T>>
    where
        T: TensorStorage<L>,
    {
        if options.synchronization == Synchronization::OnRead {
            let (name, dtype) = (name.to_owned(), component.dtype()?);
            let problem =
                "the components of an on-read variable differ, so they cannot be shared; give each replica one";
            return Err(Error::VariableOptions { name, dtype, problem });
        }
        // Clones are handles on the same storage.
        let variable = DistributedVariable::new(name, vec![component; replicas], options)?;
        Ok(DistributedVariable { shared: true, ..variable })
    }

    /// Makes the variable keep a component's value before a replica writes it, so that the write can be undone.
    #[must_use]
    pub fn undoable(self) -> DistributedVariable<T> {
        let on_read = self.options.synchronization == Synchronization::OnRead;
        let undo = Arc::new(Undo::new(self.components.len(), on_read));
        DistributedVariable { undo: Some(undo), ..self }
    }

    /// Returns the kept values, if the variable is [`undoable`](DistributedVariable::undoable).
    pub fn undo(&self) -> Option<&Arc<Undo>> {
        self.undo.as_ref()
    }

    /// Returns the variable's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns when and how components are combined.
    pub fn options(&self) -> VariableOptions {
        self.options
    }

    /// Returns the components of this process's replicas: live handles, which reflect later writes.
    pub fn components(&self) -> &[T] {
        &self.components
    }

    /// Returns whether all replicas of this process share one component.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// Sets every component to the value of the first replica's. Every process of the group must call this.
    ///
    /// # Errors
    /// [`Error::Collective`] if a process is missing or fails; [`Error::Tensor`] if a component cannot be read or
    /// written.
    pub fn share_initial<L>(&self, groups: &[ProcessGroup]) -> Result<()>
    where
        T: TensorStorage<L>,
    {
        let first = self.first_of_all(groups)?;
        self.write_all(Assignment::Set, &first)
    }

    /// Returns a snapshot of the value as seen from `context`, which later writes do not change.
    ///
    /// Inside a replica, this is its component, without communication. Outside, it is the common value of an on-write
    /// variable, or the combination of an on-read variable's components on all processes, for which every process must
    /// call this.
    ///
    /// # Errors
    /// [`Error::Variable`] for an on-read variable without aggregation outside a replica; [`Error::Collective`] if a
    /// process is missing or fails; [`Error::Tensor`] if a component cannot be read.
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::ProcessGroup;
    /// use distribute_values::{Assignment, CallContext, DistributedVariable, HostTensor};
    /// use distribute_values::{TensorStorage, VariableOptions};
    ///
    /// let groups = ProcessGroup::local(1)?;
    /// let context = CallContext::Cross { groups: &groups };
    /// let v = DistributedVariable::new("v", vec![HostTensor::scalar(1.0)], VariableOptions::default())?;
    /// let (before, live) = (v.read_value(context)?, v.live(context)?);
    /// v.assign(context, Assignment::Set, &HostTensor::scalar(2.0))?;
    /// assert_eq!(before.to_elements::<f64>()?, [1.0]);
    /// assert_eq!(live.to_elements::<f64>()?, [2.0]);
    /// # Ok::<(), distribute_values::Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.Variable.read_value`.
    pub fn read_value<L>(&self, context: CallContext<'_>) -> Result<T>
    where
        T: TensorStorage<L>,
    {
        match (context, self.options.synchronization, self.options.aggregation) {
            (CallContext::Cross { groups }, Synchronization::OnRead, aggregation) => match aggregation {
                Aggregation::Sum => self.combined(groups, ReduceOp::Sum),
                Aggregation::Mean => self.combined(groups, ReduceOp::Mean),
                Aggregation::OnlyFirstReplica => self.first_of_all(groups),
                Aggregation::None => Err(self.refuse(
                    "it cannot be read outside a replica, because it has no aggregation; give it one, or read \
                    components()",
                )),
            },
            _ => self.live(context)?.copied(),
        }
    }

    /// Returns a live handle on the component that `context` sees, which shares its storage and reflects later writes.
    /// Nothing is copied. Outside the replicas, it is an on-write variable's first component.
    ///
    /// # Errors
    /// [`Error::Variable`] for an on-read variable outside a replica, whose value is computed from all components and
    /// so has no storage of its own.
    pub fn live<L>(&self, context: CallContext<'_>) -> Result<T>
    where
        T: TensorStorage<L>,
    {
        match (context, self.options.synchronization) {
            (CallContext::Replica { local, .. } | CallContext::Update { local }, _) => {
                Ok(self.component(local)?.clone())
            }
            (CallContext::Cross { .. }, Synchronization::OnWrite) => Ok(self.component(0)?.clone()),
            (CallContext::Cross { .. }, Synchronization::OnRead) => Err(self.refuse(
                "outside a replica its value is combined from all components, so there is nothing to view; use \
                read_value()",
            )),
        }
    }

    /// Writes `value` as seen from `context`.
    ///
    /// Inside a replica, on-write: the replicas' values are aggregated first, so every replica must call this. Inside a
    /// replica, on-read: writes this component only. Outside: writes every component; setting an on-read sum gives each
    /// replica its share of the value, where integers spread their remainder over the first replicas.
    ///
    /// # Errors
    /// [`Error::Variable`] if the rules forbid the write; [`Error::Shape`] if shapes differ; [`Error::Collective`] if a
    /// replica is missing or fails; [`Error::Tensor`] or [`Error::Device`] if the value does not fit or a tensor cannot
    /// be written.
    pub fn assign<L>(&self, context: CallContext<'_>, assignment: Assignment, value: &T) -> Result<()>
    where
        T: TensorStorage<L>,
    {
        let expected = self.component(0)?.shape();
        if value.shape() != expected {
            let remedy = "assign a value of the variable's shape";
            return Err(Error::Shape { what: "assign", replica: 0, got: value.shape(), expected, remedy });
        }
        match (context, self.options.synchronization) {
            (CallContext::Update { local }, _) => self.write_merged(local, assignment, value),
            (CallContext::Replica { local, .. }, Synchronization::OnRead) => self.write_own(local, assignment, value),
            (CallContext::Replica { local, .. }, Synchronization::OnWrite) if self.writes_locally() => {
                self.write_own(local, assignment, value)
            }
            (CallContext::Replica { local, group }, Synchronization::OnWrite) => {
                let aggregated = self.aggregate(group, assignment, value)?;
                if !self.shared {
                    return self.write_own(local, assignment, &aggregated);
                }
                self.write_shared(local, group, || self.write_own(local, assignment, &aggregated))
            }
            (CallContext::Cross { .. }, Synchronization::OnWrite) => self.write_all(assignment, value),
            (CallContext::Cross { groups }, Synchronization::OnRead) => match (self.options.aggregation, assignment) {
                (Aggregation::Sum, Assignment::Set) => self.write_shares(groups, value),
                (Aggregation::Sum, _) => Err(self.refuse(
                    "adding to a sum outside a replica would count the value once per replica; add inside one replica, \
                    or \
                     set the whole sum",
                )),
                _ => self.write_all(assignment, value),
            },
        }
    }

    /// Returns the value to save in a checkpoint, which does not depend on the number of replicas. Every process must
    /// call this, outside replicas.
    ///
    /// An on-read variable is combined as on a read.
    ///
    /// # Errors
    /// [`Error::Variable`] for an on-read variable without aggregation; [`Error::Collective`] if a process is missing
    /// or fails; [`Error::Tensor`] if a component cannot be read.
    ///
    /// # Source
    /// The saveables of `tf.distribute`'s sync-on-read variables.
    pub fn save<L>(&self, groups: &[ProcessGroup]) -> Result<T>
    where
        T: TensorStorage<L>,
    {
        self.read_value(CallContext::Cross { groups })
    }

    /// Restores a value that was saved under any number of replicas. An on-read sum is spread over the replicas, with
    /// the remainder of integers over the first ones; every other variable gets the value in each component.
    ///
    /// # Errors
    /// [`Error::Shape`] if the saved value has another shape; [`Error::Tensor`] or [`Error::Device`] if it cannot be
    /// written.
    pub fn restore<L>(&self, groups: &[ProcessGroup], saved: &T) -> Result<()>
    where
        T: TensorStorage<L>,
    {
        self.assign(CallContext::Cross { groups }, Assignment::Set, saved)
    }

    /// Returns whether a replica's write stays in its own copy.
    fn writes_locally(&self) -> bool {
        self.options.local_writes && self.options.aggregation == Aggregation::None && !self.shared
    }

    fn component(&self, local: usize) -> Result<&T> {
        let missing = Error::Components { what: "the variable", got: self.components.len(), expected: local + 1 };
        self.components.get(local).ok_or(missing)
    }

    /// Lets the first replica write a shared component. All replicas have made the call, so none reads any more; none
    /// proceeds before the component is written.
    fn write_shared(&self, local: usize, group: &ProcessGroup, write: impl FnOnce() -> Result<()>) -> Result<()> {
        if local == 0 {
            write()?;
        }
        Ok(group.barrier()?)
    }

    /// Keeps a component's value before its replica writes it.
    fn keep<L>(&self, local: usize) -> Result<()>
    where
        T: TensorStorage<L>,
    {
        let component = self.component(local)?;
        self.undo.as_ref().map_or(Ok(()), |undo| undo.keep(local, component))
    }

    /// Keeps a component's value before a merged function writes it.
    fn keep_merged<L>(&self, local: usize) -> Result<()>
    where
        T: TensorStorage<L>,
    {
        let component = self.component(local)?;
        self.undo.as_ref().map_or(Ok(()), |undo| undo.keep_merged(local, component))
    }

    /// Writes a replica's own component.
    fn write_own<L>(&self, local: usize, assignment: Assignment, value: &T) -> Result<()>
    where
        T: TensorStorage<L>,
    {
        self.keep(local)?;
        self.write(local, assignment, value)
    }

    fn write<L>(&self, local: usize, assignment: Assignment, value: &T) -> Result<()>
    where
        T: TensorStorage<L>,
    {
        self.change(local, value, |target, value| assign(assignment, target, value))
    }

    /// Writes a component from outside its replica.
    fn write_merged<L>(&self, local: usize, assignment: Assignment, value: &T) -> Result<()>
    where
        T: TensorStorage<L>,
    {
        self.keep_merged(local)?;
        self.write(local, assignment, value)
    }

    fn write_all<L>(&self, assignment: Assignment, value: &T) -> Result<()>
    where
        T: TensorStorage<L>,
    {
        (0..self.copies()).try_for_each(|local| self.write_merged(local, assignment, value))
    }

    /// Returns the number of distinct components.
    fn copies(&self) -> usize {
        if self.shared { 1 } else { self.components.len() }
    }

    fn write_shares<L>(&self, groups: &[ProcessGroup], value: &T) -> Result<()>
    where
        T: TensorStorage<L>,
    {
        groups.iter().enumerate().try_for_each(|(local, group)| {
            let (n, index) = (group.world_size(), group.rank().index());
            self.keep_merged(local)?;
            self.change(local, value, |target, value| assign_share(n, index, target, value))
        })
    }

    /// Changes one component in place, given a value that may share its storage.
    fn change<L>(
        &self,
        local: usize,
        value: &T,
        change: impl Fn(distribute_device::BufferMut<'_>, BufferRef<'_>) -> Result<()>,
    ) -> Result<()>
    where
        T: TensorStorage<L>,
    {
        // The value is copied first: it may be the very component that is written, whose storage would be locked twice.
        let dtype = value.dtype()?;
        with_dtype!(dtype, E => {
            let elements = value.to_elements::<E>()?;
            let mut outcome = Ok(());
            self.component(local)?.write(&mut |target| outcome = change(target, BufferRef::from(&elements[..])))?;
            outcome
        })
    }

    fn aggregate<L>(&self, group: &ProcessGroup, assignment: Assignment, value: &T) -> Result<T>
    where
        T: TensorStorage<L>,
    {
        let op = match self.options.aggregation {
            Aggregation::Sum => Some(ReduceOp::Sum),
            Aggregation::Mean => Some(ReduceOp::Mean),
            Aggregation::OnlyFirstReplica => None,
            Aggregation::None => {
                return Err(self.refuse(
                    "a replica cannot write it, because the copies would differ; give it an aggregation, write it \
                    outside \
                     the replicas, or ask for local_writes",
                ));
            }
        };
        let tag = self.form().within(&format!("{assignment:?}")).tag(&value.shape());
        let aggregated = with_dtype!(value.dtype()?, E => {
            let (elements, start) = (value.to_elements::<E>()?, group.start().tag(tag));
            let work = match op {
                Some(op) => start.all_reduce(elements, op),
                None => start.broadcast(elements, Rank(0)),
            };
            work.and_then(|work| work.wait())
                .map_err(Error::from)
                .and_then(|elements| value.beside(&value.shape(), BufferRef::from(&elements[..])))
        });
        aggregated.map_err(|error| error.in_variable(&self.name))
    }

    /// Returns the form of this variable's values in collectives, which no other variable has.
    fn form(&self) -> Form {
        Form::of_variable(&self.name)
    }

    fn combined<L>(&self, groups: &[ProcessGroup], op: ReduceOp) -> Result<T>
    where
        T: TensorStorage<L>,
    {
        let components: Vec<&T> = self.components.iter().collect();
        let combined = begin_reduce(groups, op, &components, &Axis::None, (None, self.form())).and_then(|wait| wait());
        combined.map_err(|error| error.in_variable(&self.name))
    }

    fn first_of_all<L>(&self, groups: &[ProcessGroup]) -> Result<T>
    where
        T: TensorStorage<L>,
    {
        let first = broadcast_as(groups, self.component(0)?, Rank(0), self.form());
        first.map_err(|error| error.in_variable(&self.name))
    }

    fn refuse(&self, problem: &'static str) -> Error {
        Error::Variable {
            name: self.name.clone(),
            synchronization: self.options.synchronization,
            aggregation: self.options.aggregation,
            problem,
        }
    }
}

mod options;
mod scatter;
mod undo;

pub use options::{Aggregation, Assignment, Synchronization, VariableOptions};
pub use scatter::Scatter;
pub use undo::Undo;

#[cfg(test)]
mod tests;
