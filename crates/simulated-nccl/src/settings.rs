//! The settings of the simulation in the environment.

use std::collections::HashMap;
use std::env;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use nccl_sys::{Code, Version};

use crate::functions::is_exported;

static SETTINGS: LazyLock<Settings> = LazyLock::new(Settings::from_env);

struct Settings {
    version: Version,
    trace: bool,
    failures: Vec<Injection>,
    calls: Mutex<HashMap<&'static str, u64>>,
}

#[derive(Debug, PartialEq, Eq)]
struct Injection {
    function: String,
    nth: u64,
    code: Code,
    /// How long the call takes before it fails.
    delay: Duration,
}

/// Returns the version that `ncclGetVersion` reports.
pub(crate) fn version() -> Version {
    SETTINGS.version
}

/// Returns whether calls are traced on standard error.
pub(crate) fn trace() -> bool {
    SETTINGS.trace
}

/// Returns whether two ranks may share a device.
pub(crate) fn ranks_may_share_a_device() -> bool {
    version() >= Version::new(2, 30, 0) && env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1")
}

/// Counts a call and returns the code that it must fail with, if any.
pub(crate) fn injected(function: &'static str) -> Option<Code> {
    let settings = &*SETTINGS;
    if settings.failures.is_empty() {
        return None;
    }
    let mut calls = settings.calls.lock().unwrap_or_else(PoisonError::into_inner);
    let nth = calls.entry(function).or_default();
    *nth += 1;
    let failure = settings.failures.iter().find(|failure| failure.function == function && failure.nth == *nth);
    drop(calls);
    failure.map(|failure| {
        thread::sleep(failure.delay);
        failure.code
    })
}

impl Settings {
    /// Reads the settings.
    ///
    /// # Panics
    /// If a variable is malformed: a test that injects a failure must not pass without it.
    fn from_env() -> Self {
        let version = env::var("SIMULATED_NCCL_VERSION").ok();
        let version = version.map(|version| {
            version.parse().unwrap_or_else(|_| panic!("SIMULATED_NCCL_VERSION={version} is not a number such as 22809"))
        });
        let failures = env::var("SIMULATED_NCCL_FAIL").unwrap_or_default();
        Self {
            version: version.map_or(Version::new(2, 28, 9), Version::from_code),
            trace: env::var("SIMULATED_NCCL_TRACE").is_ok_and(|value| value == "1"),
            failures: parse(&failures).unwrap_or_else(|wrong| {
                panic!(
                    "SIMULATED_NCCL_FAIL: {wrong:?} is not function:nth:code of a function that is exported, such as \
                     ncclAllReduce:2:3"
                )
            }),
            calls: Mutex::default(),
        }
    }
}

fn parse(failures: &str) -> Result<Vec<Injection>, &str> {
    let one = |text: &str| {
        let mut parts = text.trim().splitn(4, ':');
        // Another one is never called.
        let function = parts.next().filter(|function| is_exported(function))?.to_owned();
        let nth = parts.next()?.parse().ok()?;
        let code = Code(parts.next()?.parse().ok()?);
        let delay = Duration::from_micros(parts.next().unwrap_or("0").parse().ok()?);
        Some(Injection { function, nth, code, delay })
    };
    failures.split(';').filter(|text| !text.trim().is_empty()).map(|text| one(text).ok_or(text)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_read_and_nonsense_is_told() {
        let injection = |function: &str, nth, code, microseconds| {
            let (function, delay) = (function.to_owned(), Duration::from_micros(microseconds));
            Injection { function, nth, code: Code(code), delay }
        };
        assert_eq!(
            parse("ncclSend:2:3; ncclRecv:1:6:1500;"),
            Ok(vec![injection("ncclSend", 2, 3, 0), injection("ncclRecv", 1, 6, 1500)])
        );
        assert_eq!(parse(""), Ok(vec![]));
        assert_eq!(parse("ncclSend:2:3;ncclRecv:first:6"), Err("ncclRecv:first:6"));
        assert_eq!(parse("ncclSend:2:3:long"), Err("ncclSend:2:3:long"));
        assert_eq!(parse("ncclSend:2:3;ncclSent:2:3"), Err("ncclSent:2:3"));
        assert!(parse("ncclCommGetAsyncError:1:6").is_ok());
    }
}
