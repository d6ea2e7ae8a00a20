//! Bundles of programs that are scripts: nothing is built.

use super::*;

fn needs(libraries: &[&str], glibc: Option<Version>) -> Needs {
    Needs { libraries: libraries.iter().map(|library| (*library).to_owned()).collect(), glibc, is_x86_64: true }
}

#[test]
fn programs_run_on_old_systems_without_cuda() {
    let [distribute, _] = PROGRAMS;
    assert_eq!(distribute.can_start(&needs(&["libc.so.6", "libgcc_s.so.1"], Some((2, 36)))), Ok(()));
    let error = distribute.can_start(&needs(&["libc.so.6"], Some((2, 38)))).unwrap_err();
    assert_eq!(error, "distribute needs glibc 2.38, and bundles must run on 2.36; build on an older system");
    let error = distribute.can_start(&needs(&["libc.so.6", "libcuda.so.1"], None)).unwrap_err();
    assert_eq!(error, "distribute needs libcuda.so.1, which other machines may not have");
    assert_eq!(TRAINING.can_start(&needs(&["libcuda.so.1", "libstdc++.so.6"], Some((2, 34)))), Ok(()));
}

#[test]
fn what_is_too_large_is_refused() {
    assert_eq!(fits(60 << 20), Ok(()));
    assert!(fits(61 << 20).is_err_and(|error| error.starts_with("the folder holds 61.0 MiB, more than the 60 MiB")));
}

#[test]
fn sizes_of_folders_add_up() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("bin")).unwrap();
    fs::write(folder.path().join("bin/a"), [0; 1000]).unwrap();
    fs::write(folder.path().join("b"), [0; 24]).unwrap();
    assert_eq!(total(folder.path()), Ok(1024));
}

#[test]
fn cargo_names_the_file() {
    let messages = r#"{"reason":"compiler-artifact","target":{"name":"serde"},"executable":null}
{"reason":"compiler-artifact","target":{"name":"distribute"},"executable":null}
{"reason":"compiler-artifact","target":{"name":"distribute"},"executable":"/x/bundle/distribute"}
{"reason":"build-finished","success":true}"#;
    assert_eq!(executable(messages, "distribute"), Some(PathBuf::from("/x/bundle/distribute")));
    assert_eq!(executable(messages, "other"), None);
}

/// The script with programs and a Python that are scripts themselves, run without a GPU of its own.
struct Fake {
    folder: tempfile::TempDir,
}

/// How a run ended.
struct Ended {
    code: Option<i32>,
    printed: String,
    report: Value,
}

impl Fake {
    fn new(programs: &[(&str, &str)]) -> Fake {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("bin")).unwrap();
        for (name, content) in FILES {
            place(&folder.path().join(name), content.as_bytes()).unwrap();
        }
        for (name, lines) in programs {
            let script = format!("#!/bin/sh\n{lines}\n");
            place(&folder.path().join(name), script.as_bytes()).unwrap();
        }
        Fake { folder }
    }

    fn run(&self, arguments: &[&str]) -> Ended {
        let reports = self.folder.path().join("reports");
        let mut script = Command::new("sh");
        script.arg(self.folder.path().join("run.sh")).args(arguments).arg(&reports);
        script.env("PYTHON", self.folder.path().join("python"));
        for name in ["OUT", "DISTRIBUTE_NVRTC_LIBRARY", "DISTRIBUTE_NCCL_LIBRARY"] {
            script.env_remove(name);
        }
        let output = script.output().unwrap();
        let report = fs::read_to_string(reports.join("report.json")).unwrap();
        Ended {
            code: output.status.code(),
            printed: String::from_utf8_lossy(&output.stdout).into_owned(),
            report: serde_json::from_str(&report).unwrap_or_else(|error| panic!("{error}: {report}")),
        }
    }
}

impl Ended {
    /// The name and status of every part.
    fn parts(&self) -> Vec<(&str, &str)> {
        let parts = self.report["parts"].as_array().unwrap();
        parts.iter().map(|part| (part["name"].as_str().unwrap(), part["status"].as_str().unwrap())).collect()
    }
}

const DOCTOR: (&str, &str) = ("bin/distribute", "echo \"ok  gpu  \\\"H200\\\" with $1\"");
const CHECKS: (&str, &str) = (
    "bin/distribute-gpu-checks",
    "while [ $# -gt 0 ]; do [ $1 = --report ] && mkdir -p $2 && echo '{\"checks\": []}' >$2/report.json; shift; done
    echo \"nvrtc $DISTRIBUTE_NVRTC_LIBRARY\"; echo '2 passed, 0 failed, 0 skipped'",
);
const NO_PYTHON: (&str, &str) = ("python", "exit 1");

#[test]
fn without_a_gpu_the_rest_is_skipped_and_nothing_fails() {
    let nothing = ("bin/distribute-gpu-checks", "echo 'skipped: no NVIDIA driver is loaded'");
    let ended = Fake::new(&[DOCTOR, nothing, NO_PYTHON]).run(&[]);
    assert_eq!(ended.code, Some(0), "{}", ended.printed);
    let skipped = ["checks", "nccl", "bench", "agreement", "processes", "training", "torch"];
    let skipped = skipped.map(|name| (name, "skipped"));
    assert_eq!(ended.parts(), [&[("doctor", "passed")], &skipped[..]].concat());
    assert_eq!(ended.report["parts"][1]["detail"], "no NVIDIA driver is loaded");
    assert!(ended.printed.contains("nothing failed"), "{}", ended.printed);
}

#[test]
fn all_parts_are_in_the_report() {
    let row =
        r#"{"framework":"candle","model":"mlp","dtype":"f32","batch":8,"samples_per_second":1234.5,"step_ms":6.78901}"#;
    let theirs = concat!(
        r#"{"framework": "torch", "model": "mlp", "dtype": "f32", "batch": 8, "#,
        r#""samples_per_second": 9.5, "step_ms": 7}"#,
        "\n",
        r#"{"what": "torch: Adam", "bytes": 10, "microseconds": 1.25, "gigabytes_per_second": 8.0}"#
    );
    let training = ("bin/distribute-gpu-training", &*format!("echo '{row}'; echo 'not measured: cnn: why'"));
    let python = format!("case $1 in -c) exit 0 ;; -) echo \"$(dirname \"$0\")/lib\" ;; *) echo '{theirs}' ;; esac");
    let fake = Fake::new(&[DOCTOR, CHECKS, training, ("python", &python)]);
    fs::create_dir(fake.folder.path().join("lib")).unwrap();
    fs::write(fake.folder.path().join("lib/libnvrtc.so.13"), "").unwrap();
    let ended = fake.run(&[]);
    assert_eq!(ended.code, Some(0), "{}", ended.printed);
    assert!(ended.parts().iter().all(|(_, status)| *status == "passed"), "{}", ended.printed);
    assert_eq!(ended.parts().len(), 8);
    assert!(ended.report["checks"]["checks"].is_array() && ended.report["bench"].is_object());
    assert_eq!(ended.report["training"][0]["step_ms"], 6.78901);
    assert_eq!(ended.report["torch"].as_array().map(Vec::len), Some(2));
    let lines = ended.printed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let lines: Vec<Vec<&str>> = lines.collect();
    assert!(lines.contains(&vec!["mlp", "f32", "candle", "8", "1234", "6.789"]), "{}", ended.printed);
    assert!(lines.contains(&vec!["mlp", "f32", "torch", "8", "9", "7"]), "{}", ended.printed);
    assert!(lines.contains(&vec!["torch:", "Adam", "1.2", "8.0"]), "{}", ended.printed);
    assert!(ended.printed.contains("not measured: cnn: why"), "{}", ended.printed);
    let checks = fs::read_to_string(fake.folder.path().join("reports/checks.log")).unwrap();
    assert!(checks.contains("lib/libnvrtc.so.13"), "{checks}");
}

#[test]
fn what_fails_is_named_and_the_rest_goes_on() {
    let checks =
        ("bin/distribute-gpu-checks", "echo 'FAILED   kernels: \"seed\" 7'; echo '0 passed, 1 failed'; exit 1");
    let training = (
        "bin/distribute-gpu-training",
        "echo 'x: error while loading shared libraries: libcublas.so.13: none' >&2; exit 127",
    );
    let ended = Fake::new(&[DOCTOR, checks, training, NO_PYTHON]).run(&[]);
    assert_eq!(ended.code, Some(1), "{}", ended.printed);
    let statuses = ["doctor", "checks", "nccl", "bench", "agreement", "processes", "training"]
        .into_iter()
        .zip(["passed", "FAILED", "FAILED", "FAILED", "skipped", "passed", "skipped"]);
    assert_eq!(ended.parts()[..7], statuses.collect::<Vec<_>>());
    assert_eq!(ended.report["parts"][1]["detail"], "exit status 1: FAILED   kernels: \"seed\" 7");
    assert_eq!(ended.report["parts"][4]["detail"], "this machine lacks a library: libcublas.so.13: none");
    assert!(ended.printed.contains("3 of the parts failed"), "{}", ended.printed);
}

#[test]
fn parts_are_run_alone_if_they_are_named() {
    let fake = Fake::new(&[DOCTOR, CHECKS, NO_PYTHON]);
    let ended = fake.run(&["--only", "torch,checks"]);
    assert_eq!(ended.parts(), [("checks", "passed"), ("torch", "skipped")]);
    let mut script = Command::new("sh");
    let output = script.arg(fake.folder.path().join("run.sh")).args(["--only", "check"]).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && told.starts_with("run.sh: check is none of doctor,checks,"), "{told}");
}

#[test]
fn what_hangs_is_stopped_at_the_limit() {
    let doctor = ("bin/distribute", "echo begun; sleep 60");
    let ended = Fake::new(&[doctor, CHECKS, NO_PYTHON]).run(&["--limit", "2"]);
    assert_eq!(ended.code, Some(1), "{}", ended.printed);
    assert_eq!(ended.parts()[..2], [("doctor", "FAILED"), ("checks", "skipped")]);
    let detail = ended.report["parts"][0]["detail"].as_str().unwrap();
    assert!(detail.starts_with("stopped at its limit of ") && detail.ends_with("behind: begun"), "{detail}");
    assert_eq!(ended.report["parts"][1]["detail"], "the 2 s for everything are over");
}

#[test]
fn the_end_of_the_output_is_short() {
    let lines = "i=0; while [ $i -lt 400 ]; do echo \"FAILED   check $i of many, with a long sentence on what \
    was wrong\"; i=$((i + 1)); done";
    let table = "echo '          time µs'; i=0; while [ $i -lt 400 ]; do echo \"all-reduce of some MiB over \
    some ranks  $i\"; i=$((i + 1)); done";
    let checks = ("bin/distribute-gpu-checks", &*format!("{lines}\n{table}\nexit 1"));
    let ended = Fake::new(&[DOCTOR, checks, NO_PYTHON]).run(&[]);
    assert!(ended.printed.len() < 12_000, "{} bytes", ended.printed.len());
    assert!(ended.printed.contains("3 of the parts failed"), "{}", ended.printed);
}
