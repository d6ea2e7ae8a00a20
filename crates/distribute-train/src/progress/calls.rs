//! The calls of process groups in which a task is.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The activity of one rank of a task in one process group, as part of its [vital signs](super::Vitals).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GroupCall {
    /// The group's name.
    pub group: String,
    /// A digest of the group's members, which tells groups of the same name apart.
    pub members: u64,
    /// The number of ranks in the group.
    pub world_size: u32,
    /// The rank.
    pub rank: u32,
    /// The rank's name, such as `worker:1`.
    pub name: String,
    /// The number of calls that the rank has made: it has entered every call with a lower sequence number.
    pub calls: u64,
    /// The call in which the rank is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub now: Option<CallNow>,
    /// The last call that has ended, as text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<String>,
    /// Time since it ended, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_ago_s: Option<f64>,
}

/// A call of a process group that has not ended.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CallNow {
    /// The operation, such as `all_reduce`.
    pub operation: String,
    /// Position in the group's order of calls, from 0.
    pub sequence: u64,
    /// The call as text, such as `all_reduce #7 of 1024 f32, sum`.
    pub call: String,
    /// Bytes of the rank's values.
    pub bytes: u64,
    /// Time since the rank entered the call, in seconds.
    pub since_s: f64,
    /// Time for which a thread of the rank is blocked in it, in seconds; `None` while it runs in the background.
    pub blocked_s: Option<f64>,
}

/// Reads what the ranks of this process do in their process groups; without one, the vital signs lack it.
///
/// # Examples
/// ```
/// use distribute_train::progress::{CallSource, GroupCall, Options};
///
/// let calls = CallSource::new(|| vec![GroupCall { group: "world".into(), world_size: 2, ..GroupCall::default() }]);
/// let options = Options { calls, ..Options::default() };
/// ```
#[derive(Clone, Default)]
pub struct CallSource(Option<Arc<Read>>);

type Read = dyn Fn() -> Vec<GroupCall> + Send + Sync;

impl CallSource {
    /// Creates a source from a function. It is called about once a second, from a thread of its own.
    pub fn new(read: impl Fn() -> Vec<GroupCall> + Send + Sync + 'static) -> CallSource {
        CallSource(Some(Arc::new(read)))
    }

    /// Returns what the source tells: at most [`MOST`] entries, of which those that wait come first.
    pub(super) fn read(&self) -> Vec<GroupCall> {
        let mut calls = self.0.as_ref().map(|read| read()).unwrap_or_default();
        calls.sort_by_key(|call| match &call.now {
            Some(CallNow { blocked_s: Some(_), .. }) => 0,
            Some(_) => 1,
            None => 2,
        });
        calls.truncate(MOST);
        calls
    }
}

#[cfg(feature = "checkpoint")]
impl CallSource {
    /// Creates the source of all process groups in this process.
    pub fn of_process() -> CallSource {
        CallSource::new(|| distribute_collectives::present().into_iter().map(GroupCall::from).collect())
    }
}

#[cfg(feature = "checkpoint")]
impl From<distribute_collectives::Presence> for GroupCall {
    fn from(presence: distribute_collectives::Presence) -> GroupCall {
        GroupCall {
            group: presence.group,
            members: presence.members,
            world_size: u32::try_from(presence.world_size).unwrap_or(u32::MAX),
            rank: presence.rank.0,
            name: presence.name,
            calls: presence.calls,
            now: presence.call.map(|call| CallNow {
                operation: call.kind.name().to_owned(),
                sequence: call.sequence,
                call: call.call,
                bytes: call.bytes,
                since_s: call.since.as_secs_f64(),
                blocked_s: call.blocked.map(|blocked| blocked.as_secs_f64()),
            }),
            last_ago_s: presence.last.as_ref().map(|last| last.ago.as_secs_f64()),
            last: presence.last.map(|last| last.call),
        }
    }
}

impl PartialEq for CallSource {
    fn eq(&self, other: &CallSource) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl Eq for CallSource {}

impl fmt::Debug for CallSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "CallSource(a function)" } else { "CallSource(none)" })
    }
}

/// Maximum number of entries in a report.
const MOST: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_wait_come_first_and_the_number_is_bounded() {
        let call = |rank: u32| {
            let now = |blocked_s| Some(CallNow { blocked_s, ..CallNow::default() });
            let now = [None, now(None), now(Some(1.0))][rank as usize % 3].clone();
            GroupCall { rank, now, ..GroupCall::default() }
        };
        let source = CallSource::new(move || (0..300).map(call).collect());
        let calls = source.read();
        assert_eq!(calls.len(), MOST);
        assert!(calls[..100].iter().all(|call| call.rank % 3 == 2), "{calls:?}");
        assert!(calls[100..].iter().all(|call| call.rank % 3 == 1), "{calls:?}");
        assert_eq!(CallSource::default().read(), []);
    }
}
