//! The checkpoint from which a snapshot was read.

use std::path::{Path, absolute};

use serde::{Deserialize, Serialize};

use super::manifest::Manifest;

/// Identifies a checkpoint by its folder of checkpoints and its contents: a step, and a sequence number, may be given
/// again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Origin {
    /// The folder of checkpoints, as a text in which bytes that are not UTF-8 are replaced.
    root: String,
    sequence: u64,
    /// The checksum of the manifest.
    crc32c: u32,
}

impl Origin {
    /// Returns the origin of what is read from a checkpoint's folder.
    pub(super) fn of(path: &Path, manifest: &Manifest) -> Origin {
        let root = path.parent().unwrap_or(Path::new(""));
        Origin { root: text(root), sequence: manifest.sequence, crc32c: manifest.crc32c }
    }

    /// Returns the sequence number and the checksum.
    pub(super) fn mark(&self) -> (u64, u32) {
        (self.sequence, self.crc32c)
    }

    /// Returns whether the checkpoint was read in this folder of checkpoints, given by the same path.
    pub(super) fn is_in(&self, root: &Path) -> bool {
        self.root == text(root)
    }
}

fn text(root: &Path) -> String {
    // The present folder's own path is empty, for which there is no absolute one.
    let root = if root.as_os_str().is_empty() { Path::new(".") } else { root };
    absolute(root).unwrap_or_else(|_| root.to_owned()).to_string_lossy().into_owned()
}
