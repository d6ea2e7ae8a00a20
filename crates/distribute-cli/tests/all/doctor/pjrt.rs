//! Lines of the doctor on PJRT plugins, with simulated ones.

use std::path::Path;
use std::time::Instant;

use distribute_testkit::JobBuilder;
use serde_json::Value;
use simulated_pjrt::{Fail, Script, install};

use super::{doctor, json, of, outcome};

/// Builds `distribute doctor --json` without variables that would name a plugin.
fn report() -> JobBuilder {
    let names = ["DISTRIBUTE_PJRT_PLUGIN", "TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY", "VIRTUAL_ENV"];
    names.iter().fold(doctor(&["--json"]), |job, name| job.without_env(*name))
}

/// Returns the lines of a report about a simulated plugin of this name.
fn lines(folder: &Path, name: &str, script: &Script) -> Vec<Value> {
    let plugin = install(folder, script).unwrap();
    let path = folder.join(name);
    std::fs::rename(plugin.path(), &path).unwrap();
    let outcome = outcome(report().env("DISTRIBUTE_PJRT_PLUGIN", path.to_str().unwrap()));
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    json(&outcome)
}

#[test]
fn a_pjrt_plugin_is_told_with_its_versions_and_its_devices() {
    let folder = tempfile::tempdir().unwrap();
    let checks = lines(folder.path(), "plugin.so", &Script { devices: 3, ..Script::default() });
    let plugin = of(&checks, "pjrt");
    let found = plugin["found"].as_str().unwrap();
    assert_eq!(plugin["status"], "ok", "{plugin}");
    let path = folder.path().join("plugin.so");
    assert!(found.starts_with(path.to_str().unwrap()), "{found}");
    assert!(found.contains(", named by DISTRIBUTE_PJRT_PLUGIN, PJRT 0.81, StableHLO "), "{found}");
    let devices = of(&checks, "pjrt devices");
    assert!(devices["found"].as_str().unwrap().contains(": 3 of kind "), "{devices}");
    of(&checks, "tpu chips");
    // The name alone says that a file is libtpu; it is opened, and its devices are not.
    if of(&checks, "tpu chips")["status"] == "skipped" {
        let checks = lines(folder.path(), "libtpu.so", &Script::default());
        let (plugin, devices) = (of(&checks, "pjrt"), of(&checks, "pjrt devices"));
        assert!(plugin["remedy"].as_str().unwrap().contains("TPU_SKIP_MDS_QUERY=1"), "{plugin}");
        assert_eq!((&devices["status"], &plugin["status"]), (&"skipped".into(), &"warn".into()), "{devices}");
    }
}

#[test]
fn a_pjrt_plugin_that_fails_or_is_missing_is_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let fail = vec![Fail::new("PJRT_Plugin_Initialize", 1, 10, "another process holds the lock")];
    let checks = lines(folder.path(), "plugin.so", &Script { fail, ..Script::default() });
    let plugin = of(&checks, "pjrt");
    assert_eq!(plugin["status"], "warn", "{plugin}");
    assert!(plugin["found"].as_str().unwrap().contains("another process holds the lock"), "{plugin}");

    let checks = json(&outcome(report().env("DISTRIBUTE_PJRT_PLUGIN", "/no/such/plugin.so")));
    let plugin = of(&checks, "pjrt");
    assert!(plugin["found"].as_str().unwrap().contains("/no/such/plugin.so"), "{plugin}");
    assert!(plugin["remedy"].as_str().unwrap().contains("DISTRIBUTE_PJRT_PLUGIN"), "{plugin}");

    // Without `python3` in PATH there is not a package to find, and the loader knows no libtpu.so.
    let checks = json(&outcome(report().env("PATH", folder.path().to_str().unwrap())));
    let plugin = of(&checks, "pjrt");
    assert!(plugin["found"].as_str().unwrap().ends_with("and none is installed"), "{plugin}");
}

#[test]
fn a_pjrt_plugin_that_hangs_does_not_hold_the_report_up() {
    let folder = tempfile::tempdir().unwrap();
    let slow_ms = [("PJRT_Client_Create".to_owned(), 600_000)].into();
    let began = Instant::now();
    let checks = lines(folder.path(), "plugin.so", &Script { slow_ms, ..Script::default() });
    if of(&checks, "tpu chips")["status"] == "skipped" {
        assert!(began.elapsed().as_secs() < 30, "{:?}", began.elapsed());
    }
    assert_eq!(of(&checks, "pjrt")["status"], "ok");
    let devices = of(&checks, "pjrt devices");
    assert_eq!(devices["status"], "warn", "{devices}");
    assert!(devices["found"].as_str().unwrap().contains("the client of PJRT plugin "), "{devices}");
}
