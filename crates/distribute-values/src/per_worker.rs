//! State that belongs to a worker rather than to a replica.

use distribute_collectives::{ProcessGroup, on_local_ranks};
use distribute_device::BufferRef;
use distribute_types::with_dtype;

use crate::combine::Form;
use crate::elements::{Arithmetic, assign};
use crate::{Assignment, Error, Result, TensorStorage};

/// A variable with a separate value in each worker process, such as a count of examples read or of retries.
///
/// Workers' values are not kept equal. The replicas of one process share its value; each write is atomic, in
/// unspecified order.
///
/// # Examples
/// ```
/// use distribute_collectives::{ProcessGroup, on_local_ranks};
/// use distribute_values::{Assignment, HostTensor, PerWorkerVariable, TensorStorage};
///
/// let groups = ProcessGroup::local(2)?;                        // two replicas of one worker
/// let skipped = PerWorkerVariable::new("skipped", HostTensor::scalar(0.0));
/// skipped.assign(Assignment::Add, &HostTensor::scalar(3.0))?;
/// let all = skipped.read_all(&groups)?;
/// assert_eq!(all.len(), 1);
/// assert_eq!(all[0].to_elements::<f64>()?, [3.0]);
/// # Ok::<(), distribute_values::Error>(())
/// ```
///
/// # Source
/// `tf.Variable(per_worker_variable=True)` of TensorFlow's parameter server strategy.
#[derive(Clone, Debug)]
pub struct PerWorkerVariable<T> {
    name: String,
    value: T,
}

impl<T> PerWorkerVariable<T> {
    /// Creates this worker's variable.
    pub fn new(name: &str, value: T) -> PerWorkerVariable<T> {
        PerWorkerVariable { name: name.to_owned(), value }
    }

    /// Returns the variable's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns a live handle on this worker's value, which reflects later writes.
    pub fn live(&self) -> &T {
        &self.value
    }

    /// Returns a snapshot of this worker's value, which later writes do not change.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the tensor cannot be copied.
    pub fn read_value<L>(&self) -> Result<T>
    where
        T: TensorStorage<L>,
    {
        self.value.copied()
    }

    /// Writes this worker's value, inside or outside a replica.
    ///
    /// # Errors
    /// [`Error::Shape`] if shapes differ; [`Error::Device`] if types differ; [`Error::Tensor`] if the tensor cannot be
    /// read or written.
    pub fn assign<L>(&self, assignment: Assignment, value: &T) -> Result<()>
    where
        T: TensorStorage<L>,
    {
        let (got, expected) = (value.shape(), self.value.shape());
        if got != expected {
            let remedy = "assign a value of the variable's shape";
            return Err(Error::Shape { what: "assign", replica: 0, got, expected, remedy });
        }
        with_dtype!(value.dtype()?, E => {
            // The elements are copied first, since `value` may be the variable itself.
            let elements = value.to_elements::<E>()?;
            let mut outcome = Ok(());
            self.value.write(&mut |target| outcome = assign(assignment, target, BufferRef::from(&elements[..])))?;
            outcome
        })
    }

    /// Returns every worker's value, in the order of workers. Every worker must call this on its variable of the same
    /// name, outside replicas; `groups` holds the local ranks of the group of all replicas.
    ///
    /// # Errors
    /// [`Error::VariableOrder`] if workers' values differ in shape or type, or some workers read another variable;
    /// [`Error::Collective`] if a worker is missing or fails; [`Error::Tensor`] or [`Error::Device`] if a value cannot
    /// be read or created.
    pub fn read_all<L>(&self, groups: &[ProcessGroup]) -> Result<Vec<T>>
    where
        T: TensorStorage<L>,
    {
        let read = with_dtype!(self.value.dtype()?, E => self.read_typed::<L, E>(groups));
        read.map_err(|error| error.in_variable(&self.name))
    }

    fn read_typed<L, E: Arithmetic>(&self, groups: &[ProcessGroup]) -> Result<Vec<T>>
    where
        T: TensorStorage<L>,
    {
        let own = self.value.to_elements::<E>()?;
        let tag = Form::of_variable(&self.name).within("of each worker").tag(&self.value.shape());
        let gathered = on_local_ranks(groups, |_, group| {
            group.start().tag(tag).all_gather(own.clone(), vec![E::default(); own.len() * group.world_size()])
        })?;
        let [_, all] = gathered.unwrap_or_default();
        // All replicas of a worker contribute the same.
        let (world_size, replicas) =
            groups.first().map_or((0, 1), |group| (group.world_size(), group.local_world_size().max(1)));
        let (workers, stride) = (world_size / replicas, own.len() * replicas);
        let value = |worker: usize| {
            let elements = &all[worker * stride..worker * stride + own.len()];
            self.value.beside(&self.value.shape(), BufferRef::from(elements))
        };
        (0..workers).map(value).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostTensor;

    #[test]
    fn every_worker_has_a_value_also_if_it_has_no_elements() {
        for (shape, len) in [(vec![], 1), (vec![2, 3], 6), (vec![0], 0), (vec![3, 0], 0)] {
            let groups = ProcessGroup::local(2).unwrap();
            let variable = PerWorkerVariable::new("seen", HostTensor::new(&shape, vec![7i64; len]).unwrap());
            let all = variable.read_all(&groups).unwrap();
            assert_eq!(all.len(), 1, "{shape:?}");
            assert_eq!((all[0].shape(), all[0].to_elements::<i64>().unwrap()), (shape, vec![7; len]));
        }
    }
}
