//! How new the states of processes are.

use prost::Message as _;

use crate::messages::ElasticStateVersion;
use crate::{Error, Result};

/// How new the state of a process is. The larger one is the newer: fields are compared in their order.
///
/// # Examples
/// ```
/// use distribute_cluster::StateVersion;
///
/// // It was frozen after a step that the others have repeated without it, in a later generation.
/// let frozen = StateVersion { generation: 3, exists: true, commits: 12, progress: 0 };
/// let others = StateVersion { generation: 4, ..frozen };
/// assert!(others > frozen && StateVersion::default() < frozen);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateVersion {
    /// The newest generation with whose state this process has begun; 0 for none. Of those that have begun with the
    /// same, none is more than a step ahead of another.
    pub generation: u64,
    /// Whether there is a state at all.
    pub exists: bool,
    /// The number of steps that have changed it.
    pub commits: u64,
    /// A number that grows when it changes without a step.
    pub progress: u64,
}

impl StateVersion {
    /// Returns it as bytes, for [`Coordination::exchange`](crate::Coordination::exchange).
    pub fn to_bytes(&self) -> Vec<u8> {
        let StateVersion { generation, exists, commits, progress } = *self;
        ElasticStateVersion { generation, exists, commits, progress }.encode_to_vec()
    }

    /// Reads it from [`to_bytes`](StateVersion::to_bytes).
    ///
    /// # Errors
    /// [`Error::Config`] if they are other bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<StateVersion> {
        let read =
            Some(bytes).filter(|bytes| bytes.len() <= MAX_BYTES).and_then(|all| ElasticStateVersion::decode(all).ok());
        let Some(ElasticStateVersion { generation, exists, commits, progress }) = read else {
            let (given, remedy) = (format!("{} bytes", bytes.len()), "Use one build for all processes.");
            return Err(Error::config("state version", "the bytes are not those of one", given, "a version", remedy));
        };
        Ok(StateVersion { generation, exists, commits, progress })
    }
}

/// Length limit of a version's bytes: four numbers of at most ten, with a tag each.
const MAX_BYTES: usize = 44;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn versions_arrive_as_they_were_sent(numbers: [u64; 3], exists: bool, bytes: Vec<u8>) {
            let [generation, commits, progress] = numbers;
            let version = StateVersion { generation, exists, commits, progress };
            prop_assert_eq!(StateVersion::from_bytes(&version.to_bytes()).unwrap(), version);
            // Other bytes are an error or a version, and harm nothing.
            let _ = StateVersion::from_bytes(&bytes);
        }
    }
}
