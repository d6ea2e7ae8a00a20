//! The identity of a run.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::str::FromStr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// The identity of a training run, from its first step to its last, over all restarts.
///
/// A folder of checkpoints belongs to one run. The chief draws the id when a run starts; every worker of the run has
/// the same one, and restoring a checkpoint continues the run that saved it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RunId(u64);

impl RunId {
    /// Draws a unique id.
    pub(super) fn draw() -> RunId {
        RunId(random())
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl FromStr for RunId {
    type Err = String;

    fn from_str(text: &str) -> Result<RunId, String> {
        let digits = text.len() == 16 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let number = if digits { u64::from_str_radix(text, 16).ok() } else { None };
        number.map(RunId).ok_or_else(|| format!("{text:?} is not the id of a run, which is 16 hexadecimal digits"))
    }
}

impl TryFrom<String> for RunId {
    type Error = String;

    fn try_from(text: String) -> Result<RunId, String> {
        text.parse()
    }
}

impl From<RunId> for String {
    fn from(run: RunId) -> String {
        run.to_string()
    }
}

/// Returns the end of a temporary name. It identifies this process, so that files left by others can be told apart, and
/// is unique.
pub(super) fn temporary_suffix() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{}{}", process_suffix(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Returns the part of [`temporary_suffix`] that is common to this process. Process ids would not do, since containers
/// that share a folder may have equal ones.
#[cfg(not(test))]
pub(super) fn process_suffix() -> String {
    PROCESS.clone()
}

/// Returns the same as outside of tests, or what [`act_as`] has set.
#[cfg(test)]
pub(super) fn process_suffix() -> String {
    ACTED.with_borrow(|acted| acted.clone().unwrap_or_else(|| PROCESS.clone()))
}

/// Makes this thread a part of another process; of a simulation, which has several in one.
#[cfg(test)]
pub(super) fn act_as(process: u64) {
    ACTED.set(Some(format!("{process:016x}-")));
}

static PROCESS: LazyLock<String> = LazyLock::new(|| format!("{:016x}-", random()));

#[cfg(test)]
thread_local! {
    static ACTED: std::cell::RefCell<Option<String>> = const { std::cell::RefCell::new(None) };
}

/// Returns 64 bits from the operating system, by way of the keys that the standard library draws for its hash tables.
fn random() -> u64 {
    RandomState::new().hash_one((std::process::id(), std::time::SystemTime::now()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_and_come_back_from_text() {
        let (one, other) = (RunId::draw(), RunId::draw());
        assert_ne!(one, other);
        assert_eq!(one.to_string().parse(), Ok(one));
        for wrong in ["", "12", "+23456789abcdef0", "0123456789ABCDEF", "0123456789abcdef0"] {
            assert!(wrong.parse::<RunId>().is_err(), "{wrong}");
        }
    }
}
