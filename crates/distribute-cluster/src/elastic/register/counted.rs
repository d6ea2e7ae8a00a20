//! The steps of a register's file, which are counted, and end where a test says.

use std::io::{Error as IoError, Result as IoResult};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

/// The operations of a register on its files.
#[derive(Clone, Debug, Default)]
pub(super) struct Steps(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    taken: Vec<(&'static str, PathBuf)>,
    /// The number of the step that is not taken any more, nor those after it.
    kill_at: Option<usize>,
}

impl Steps {
    pub(super) fn before(&self, step: &'static str, path: &Path) -> IoResult<()> {
        let mut state = self.0.lock();
        if state.kill_at.is_some_and(|at| state.taken.len() + 1 >= at) {
            return Err(IoError::other("the process is killed"));
        }
        state.taken.push((step, path.to_owned()));
        Ok(())
    }

    pub(super) fn kill_at(&self, step: usize) {
        self.0.lock().kill_at = Some(step);
    }

    pub(super) fn taken(&self) -> Vec<(&'static str, PathBuf)> {
        self.0.lock().taken.clone()
    }
}
