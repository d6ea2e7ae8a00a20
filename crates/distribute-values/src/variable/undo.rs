//! Undo of writes that replicas made during a run.

use parking_lot::Mutex;

use crate::{Result, TensorStorage, with_storage};

/// Undoes one replica's writes.
type Undoing = Box<dyn FnOnce() -> Result<()> + Send>;

/// The values that a variable had before replicas wrote it. Strategies use them to undo the writes of a failed run.
///
/// A component is copied when its replica writes it for the first time since [`forget`](Undo::forget); writes outside
/// replicas are not kept.
pub struct Undo {
    replicas: Vec<Mutex<Option<Undoing>>>,
    on_read: bool,
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

    /// Makes a replica's writes final.
    pub fn forget(&self, local: usize) {
        self.slot(local).take();
    }

    /// Restores a replica's component; does nothing if it was not written.
    ///
    /// # Errors
    /// [`Error::Tensor`](crate::Error::Tensor) if the tensor cannot be written.
    pub fn take_back(&self, local: usize) -> Result<()> {
        let undoing = self.slot(local).take();
        undoing.map_or(Ok(()), |undoing| undoing())
    }

    /// Keeps a component's value before it changes, unless one is kept already.
    pub(super) fn keep<L, T: TensorStorage<L>>(&self, local: usize, component: &T) -> Result<()> {
        let mut slot = self.slot(local);
        if slot.is_none() {
            let (component, copy) = (component.clone(), component.copied()?);
            *slot = Some(Box::new(move || {
                with_storage::<L, T>(&[component, copy], &mut |buffers| {
                    if let [component, copy] = buffers {
                        component.as_bytes_mut().copy_from_slice(copy.as_bytes());
                    }
                })
            }));
        }
        Ok(())
    }

    fn slot(&self, local: usize) -> parking_lot::MutexGuard<'_, Option<Undoing>> {
        self.replicas[local].lock()
    }
}

impl std::fmt::Debug for Undo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kept: Vec<bool> = (0..self.replicas.len()).map(|local| self.slot(local).is_some()).collect();
        f.debug_struct("Undo").field("kept", &kept).finish_non_exhaustive()
    }
}
