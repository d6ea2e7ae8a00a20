//! PJRT plugins, the libraries of TPUs and of other devices of XLA, and the TPU chips of this machine.
//!
//! A plugin runs in a process of its own, `probe`, which may hang or crash; `child` starts it and reads its lines.

#[cfg(feature = "pjrt")]
mod child;
#[cfg(feature = "pjrt")]
mod judge;
#[cfg(feature = "pjrt")]
mod probe;

use super::report::Check;
use super::seen::Seen;

#[cfg(feature = "pjrt")]
pub(crate) use probe::probe;

/// Checks the TPU chips, the plugin that programs would open, and its devices.
#[cfg(feature = "pjrt")]
pub(crate) fn pjrt(seen: &Seen) -> Vec<Check> {
    let chips = distribute_cluster::tpu::local_chips();
    let (patience, added) = (child::patience(chips), child::added(seen, chips));
    let ended = child::start(&added, patience).and_then(child::Ended::of);
    let mut checks = vec![judge::chips(chips)];
    checks.extend(judge::plugin(seen, chips, patience, ended));
    checks
}

#[cfg(not(feature = "pjrt"))]
pub(crate) fn pjrt(_seen: &Seen) -> Vec<Check> {
    vec![Check::skipped("pjrt", UNSUPPORTED)]
}

/// Ends at once: a build with the feature reports what it opens.
#[cfg(not(feature = "pjrt"))]
pub(crate) fn probe() -> std::process::ExitCode {
    eprintln!("{UNSUPPORTED}");
    std::process::ExitCode::FAILURE
}

#[cfg(not(feature = "pjrt"))]
const UNSUPPORTED: &str = "this build has no support for PJRT plugins (Cargo feature pjrt)";

/// A step of the process that opens the plugin; one line of JSON each.
#[cfg(feature = "pjrt")]
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
enum Step {
    /// The plugin is loaded.
    Opened { path: String, version: String },
    /// It is initialised; the versions of StableHLO that it reads, if it tells them.
    Initialised { stablehlo: Option<(String, String)> },
    /// Its devices are not opened, since there are none.
    NoDevices,
    /// It has devices: the platform, the version of its software, and the kinds of devices of this process.
    Devices { platform: String, software: String, kinds: Vec<String> },
    /// No plugin was named, and none of these files is one.
    Absent { attempts: Vec<String> },
    /// An error ended it.
    Failed { problem: String },
}
