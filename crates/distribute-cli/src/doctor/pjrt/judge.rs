//! The checks that follow from the steps of the process.

use std::io;
use std::time::Duration;

use pjrt_sys::{ENV_PLUGIN, ENV_SKIP_METADATA, ENV_TPU_LIBRARY};

use super::Step;
use super::child::Ended;
use crate::doctor::report::Check;
use crate::doctor::seen::{Seen, count};

/// Reports the chips on the PCI bus.
pub(super) fn chips(chips: Option<u32>) -> Check {
    match chips {
        Some(chips) => Check::ok("tpu chips", format!("{} on the PCI bus", count(chips as usize, "chip"))),
        None => Check::skipped("tpu chips", "none on the PCI bus"),
    }
}

/// Checks the plugin and its devices by what the process told.
pub(super) fn plugin(seen: &Seen, chips: Option<u32>, patience: Duration, ended: io::Result<Ended>) -> Vec<Check> {
    let Ended { status, steps, words } = match ended {
        Ok(ended) => ended,
        Err(error) => {
            let problem = format!("the process that opens the plugin cannot be started: {error}");
            return vec![Check::warn(PLUGIN, problem).remedy("see the line open files")];
        }
    };
    let named_by = [ENV_PLUGIN, ENV_TPU_LIBRARY].into_iter().find(|name| seen.variable(name).is_some());
    let (mut found, mut done, mut devices) = (Vec::new(), false, Vec::new());
    let mut problem = None;
    for step in steps {
        match step {
            Step::Opened { path, version } => {
                let by = named_by.map_or("found by the search".to_owned(), |name| format!("named by {name}"));
                found.extend([path, by, format!("PJRT {version}")]);
            }
            Step::Initialised { stablehlo } => {
                found.extend(stablehlo.map(|(oldest, newest)| format!("StableHLO {oldest} to {newest}")));
                done = true;
            }
            Step::NoDevices => devices.push(
                Check::skipped(DEVICES, "not opened: it is libtpu, and there is not a TPU chip")
                    .why("programs can be compiled for TPUs, and not be run"),
            ),
            Step::Devices { platform, software, kinds } => {
                let kinds = if kinds.is_empty() { "none of this process".to_owned() } else { kinds.join(", ") };
                devices.push(Check::ok(DEVICES, format!("{platform}: {kinds}")).details([software]));
            }
            Step::Absent { attempts } => return vec![absent(chips, attempts)],
            Step::Failed { problem: words } => problem = Some(words),
        }
    }
    if problem.is_none() && devices.is_empty() {
        problem = Some(match status {
            Some(status) => format!("the process that opened the plugin ended with {status}"),
            None => format!("the plugin had not answered after {} s, and its process was killed", patience.as_secs()),
        });
    }
    let needs_skip = chips.is_none() && seen.variable(ENV_SKIP_METADATA).is_none() && is_idle(&devices);
    let mut checks = Vec::new();
    match (problem, done) {
        (Some(problem), false) => {
            found.push(problem);
            checks.push(broken(PLUGIN, found.join(", "), named_by).details(words));
        }
        (problem, _) => {
            let check = match needs_skip {
                true => Check::warn(PLUGIN, found.join(", "))
                    .why("without a TPU chip programs refuse libtpu, which would ask a metadata server for minutes")
                    .remedy(format!("set {ENV_SKIP_METADATA}=1 for programs that compile by it")),
                false => Check::ok(PLUGIN, found.join(", ")),
            };
            checks.push(check.details(words));
            checks.extend(problem.map(|problem| broken(DEVICES, problem, named_by)));
        }
    }
    checks.extend(devices);
    checks
}

/// Whether the plugin is libtpu without a chip.
fn is_idle(devices: &[Check]) -> bool {
    devices.iter().any(|check| check.status == crate::doctor::report::Status::Skipped)
}

/// No plugin is named, and none is installed.
fn absent(chips: Option<u32>, attempts: Vec<String>) -> Check {
    let found = format!("no plugin is named by {ENV_PLUGIN} or {ENV_TPU_LIBRARY}, and none is installed");
    let check = match chips {
        None => Check::skipped(PLUGIN, found).why("there is not a TPU chip that would need one"),
        Some(_) => Check::warn(PLUGIN, found)
            .why("TPU chips are used by libtpu alone")
            .remedy(format!("pip install libtpu, or name its file by {ENV_TPU_LIBRARY}")),
    };
    check.details(attempts)
}

/// A plugin that does not work: programs that open it get an error, or worse.
fn broken(topic: &str, problem: String, named_by: Option<&str>) -> Check {
    let check = Check::warn(topic, problem).why("programs that open the plugin fail as this one did");
    match named_by {
        Some(name) => check.remedy(format!("name another file by {name}, or unset it")),
        None => check.remedy(format!("install libtpu anew, or name another plugin by {ENV_PLUGIN}")),
    }
}

const PLUGIN: &str = "pjrt";
const DEVICES: &str = "pjrt devices";

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;
    use crate::doctor::pjrt::child::MARK;
    use crate::doctor::pjrt::child::tests::shell;
    use crate::doctor::report::Status;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn judge(variables: &[(&str, &str)], chips: Option<u32>, steps: Vec<Step>) -> Vec<Check> {
        let ended = Ended { status: Some(ExitStatus::from_raw(0)), steps, words: vec!["a word".to_owned()] };
        plugin(&Seen::variables_only(variables), chips, PATIENCE, Ok(ended))
    }

    fn opened(path: &str) -> Step {
        Step::Opened { path: path.to_owned(), version: "0.81".to_owned() }
    }

    fn initialised() -> Step {
        Step::Initialised { stablehlo: Some(("0.9.0".to_owned(), "1.13.3".to_owned())) }
    }

    #[test]
    fn a_plugin_is_told_with_its_versions_and_devices() {
        let kinds = vec!["4 of kind \"cpu\"".to_owned()];
        let devices = Step::Devices { platform: "cpu".to_owned(), software: "xla".to_owned(), kinds };
        let checks = judge(&[(ENV_PLUGIN, "/p.so")], None, vec![opened("/p.so"), initialised(), devices]);
        let found: Vec<_> = checks.iter().map(|check| (check.status, check.found.as_str())).collect();
        let first = "/p.so, named by DISTRIBUTE_PJRT_PLUGIN, PJRT 0.81, StableHLO 0.9.0 to 1.13.3";
        assert_eq!(found, [(Status::Ok, first), (Status::Ok, "cpu: 4 of kind \"cpu\"")]);
        assert_eq!(
            (checks[0].details.as_slice(), checks[1].details.as_slice()),
            (&["a word".into()][..], &["xla".into()][..])
        );
    }

    #[test]
    fn libtpu_without_chips_needs_a_variable() {
        let steps = || vec![opened("/libtpu.so"), initialised(), Step::NoDevices];
        let without = judge(&[(ENV_TPU_LIBRARY, "/libtpu.so")], None, steps());
        assert_eq!((without[0].status, without[1].status), (Status::Warn, Status::Skipped));
        assert!(without[0].remedy.as_deref().unwrap().contains("TPU_SKIP_MDS_QUERY=1"), "{without:?}");
        let with = judge(&[(ENV_SKIP_METADATA, "1")], None, steps());
        assert_eq!((with[0].status, with[1].status), (Status::Ok, Status::Skipped));
        assert!(with[0].found.contains("/libtpu.so, found by the search, PJRT 0.81"), "{with:?}");
    }

    #[test]
    fn no_plugin_matters_where_there_are_chips() {
        let absent = |chips| judge(&[], chips, vec![Step::Absent { attempts: vec!["libtpu.so: no".to_owned()] }]);
        assert_eq!((absent(Some(4))[0].status, absent(None)[0].status), (Status::Warn, Status::Skipped));
        let check = &absent(None)[0];
        assert_eq!(
            check.found,
            "no plugin is named by DISTRIBUTE_PJRT_PLUGIN or TPU_LIBRARY_PATH, and none is installed"
        );
        assert_eq!(check.details, ["libtpu.so: no"]);
        assert_eq!((chips(Some(1)).found.as_str(), chips(None).status), ("1 chip on the PCI bus", Status::Skipped));
    }

    #[test]
    fn a_plugin_that_fails_says_how_far_it_came() {
        let failed = |steps: Vec<Step>| {
            let failed = Step::Failed { problem: "code 10".to_owned() };
            judge(&[(ENV_PLUGIN, "/p.so")], None, [steps, vec![failed]].concat())
        };
        let at_once = failed(vec![]);
        assert_eq!((at_once.len(), at_once[0].status, at_once[0].found.as_str()), (1, Status::Warn, "code 10"));
        assert!(at_once[0].remedy.as_deref().unwrap().contains("another file by DISTRIBUTE_PJRT_PLUGIN"));
        let later = failed(vec![opened("/p.so"), initialised()]);
        let found: Vec<_> = later.iter().map(|check| (check.topic.as_str(), check.status)).collect();
        assert_eq!(found, [("pjrt", Status::Ok), ("pjrt devices", Status::Warn)]);
    }

    #[test]
    fn a_plugin_that_hangs_or_crashes_is_a_line_of_the_report() {
        let seen = Seen::variables_only(&[(ENV_PLUGIN, "/p.so")]);
        let step = serde_json::to_string(&opened("/p.so")).unwrap();
        let judge = |script: &str, patience| {
            let ended = shell(&format!("echo '{MARK}{step}'; {script}"), patience);
            plugin(&seen, None, patience, Ok(ended)).swap_remove(0)
        };
        let crashed = judge("kill -SEGV $$", Duration::from_secs(60));
        assert!(crashed.found.contains("/p.so, ") && crashed.found.contains("signal: 11"), "{crashed:?}");
        let hung = judge("exec sleep 600", Duration::from_millis(300));
        assert!(hung.found.contains("had not answered after 0 s, and its process was killed"), "{hung:?}");
        assert_eq!((crashed.status, hung.status), (Status::Warn, Status::Warn));
        let never = plugin(&seen, None, PATIENCE, Err(io::ErrorKind::OutOfMemory.into()));
        assert_eq!(never[0].status, Status::Warn);
    }
}
