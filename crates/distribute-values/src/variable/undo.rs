//! What replicas wrote in the middle of a run, taken back.

use std::sync::{Mutex, PoisonError};

use crate::{Result, TensorStorage, with_storage};

/// What undoes one replica's writes.
type Undoing = Box<dyn FnOnce() -> Result<()> + Send>;

/// The values that a variable had before replicas wrote it, for strategies, which take back what a failed run has written.
///
/// A component is copied when its replica writes it for the first time since it was [forgotten](Undo::forget); writes outside
/// of replicas are not kept.
pub struct Undo {
    replicas: Vec<Mutex<Option<Undoing>>>,
    on_read: bool,
}

impl Undo {
    pub(super) fn new(replicas: usize, on_read: bool) -> Undo {
        Undo { replicas: (0..replicas).map(|_| Mutex::default()).collect(), on_read }
    }

    /// Whether each replica's component is its own, made of the examples that it has seen: whether it is an on-read variable.
    pub fn is_on_read(&self) -> bool {
        self.on_read
    }

    /// Makes what a replica has written final.
    pub fn forget(&self, local: usize) {
        self.slot(local).take();
    }

    /// Puts back what a replica's component was before; nothing where it was not written.
    ///
    /// # Errors
    /// The tensor's library refuses the write.
    pub fn take_back(&self, local: usize) -> Result<()> {
        let undoing = self.slot(local).take();
        undoing.map_or(Ok(()), |undoing| undoing())
    }

    /// Keeps a component's value, which is about to change, unless one is kept already.
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

    fn slot(&self, local: usize) -> std::sync::MutexGuard<'_, Option<Undoing>> {
        self.replicas[local].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Undo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kept: Vec<bool> = (0..self.replicas.len()).map(|local| self.slot(local).is_some()).collect();
        f.debug_struct("Undo").field("kept", &kept).finish_non_exhaustive()
    }
}
