//! Undo of writes that were made during a run.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::{Result, TensorStorage, with_storage};

/// Writes a value to a component that it had before.
type Undoing = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// The values that a variable had before it was written in a run. Strategies use them to undo the writes of a failed
/// run.
///
/// A component is copied before it is written for the first time since [`begin`](Undo::begin), by its replica or by a
/// merged function. Writes outside of runs are not kept.
pub struct Undo {
    replicas: Vec<Mutex<Kept>>,
    on_read: bool,
}

/// The values of one component.
#[derive(Default)]
struct Kept {
    is_running: bool,
    /// The value that a failure restores.
    before: Option<Undoing>,
    /// The value before its replica wrote anything that depends on its batch, for on-read variables. A merged function
    /// decides for all replicas, and so its writes stay if the batch has no examples.
    before_batch: Option<Undoing>,
}

impl Undo {
    pub(super) fn new(replicas: usize, on_read: bool) -> Undo {
        Undo { replicas: (0..replicas).map(|_| Mutex::default()).collect(), on_read }
    }

    /// Returns whether this is an on-read variable, in which each replica's component depends on the examples it has
    /// seen.
    pub fn is_on_read(&self) -> bool {
        self.on_read
    }

    /// Begins to keep values of a replica's component, and makes the writes to it so far final.
    pub fn begin(&self, local: usize) {
        *self.slot(local) = Kept { is_running: true, ..Kept::default() };
    }

    /// Ends it.
    pub fn end(&self, local: usize) {
        *self.slot(local) = Kept::default();
    }

    /// Restores a replica's component; does nothing if it was not written.
    ///
    /// # Errors
    /// [`Error::Tensor`](crate::Error::Tensor) if the tensor cannot be written.
    pub fn take_back(&self, local: usize) -> Result<()> {
        let before = self.slot(local).before.take();
        before.map_or(Ok(()), |before| before())
    }

    /// Makes the writes to a replica's component final, but for what the replica wrote itself since it saw examples: a
    /// batch without examples has changed nothing.
    ///
    /// # Errors
    /// [`Error::Tensor`](crate::Error::Tensor) if the tensor cannot be written.
    pub fn take_back_batch(&self, local: usize) -> Result<()> {
        let before = self.slot(local).before_batch.take();
        before.map_or(Ok(()), |before| before())?;
        self.begin(local);
        Ok(())
    }

    /// Ends a batch of a replica within its run. What the replica wrote in it is undone if it had no examples; what a
    /// failure restores is unchanged.
    ///
    /// # Errors
    /// [`Error::Tensor`](crate::Error::Tensor) if the tensor cannot be written.
    pub fn end_batch(&self, local: usize, had_examples: bool) -> Result<()> {
        let before = self.slot(local).before_batch.take();
        before.filter(|_| !had_examples).map_or(Ok(()), |before| before())
    }

    /// Keeps a component's value before its replica changes it, unless one is kept already.
    pub(super) fn keep<L, T: TensorStorage<L>>(&self, local: usize, component: &T) -> Result<()> {
        let mut slot = self.slot(local);
        if slot.before.is_none() || (self.on_read && slot.before_batch.is_none()) {
            let value = undoing::<L, T>(component)?;
            if self.on_read {
                slot.before_batch.get_or_insert_with(|| Arc::clone(&value));
            }
            slot.before.get_or_insert(value);
        }
        Ok(())
    }

    /// Keeps a component's value before it is changed from outside its replica, unless no run is under way.
    pub(super) fn keep_merged<L, T: TensorStorage<L>>(&self, local: usize, component: &T) -> Result<()> {
        let mut slot = self.slot(local);
        if slot.is_running {
            if slot.before.is_none() {
                slot.before = Some(undoing::<L, T>(component)?);
            }
            slot.before_batch = None;
        }
        Ok(())
    }

    fn slot(&self, local: usize) -> parking_lot::MutexGuard<'_, Kept> {
        self.replicas[local].lock()
    }
}

fn undoing<L, T: TensorStorage<L>>(component: &T) -> Result<Undoing> {
    let (component, copy) = (component.clone(), component.copied()?);
    Ok(Arc::new(move || {
        with_storage::<L, T>(&[component.clone(), copy.clone()], &mut |buffers| {
            if let [component, copy] = buffers {
                component.as_bytes_mut().copy_from_slice(copy.as_bytes());
            }
        })
    }))
}

impl std::fmt::Debug for Undo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kept: Vec<bool> = (0..self.replicas.len()).map(|local| self.slot(local).before.is_some()).collect();
        f.debug_struct("Undo").field("kept", &kept).finish_non_exhaustive()
    }
}
