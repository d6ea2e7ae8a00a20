//! Tests that run in a separate process with a simulated CUDA.

use std::env;
use std::fs::File;
use std::io::{Write, stderr};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use crate::install::{command, install};

/// Returns whether this process has the simulated CUDA. If not, runs the test of that full name in a process that has
/// it, with additional environment variables, and returns false after it has passed there.
///
/// ```no_run
/// fn copies_arrive() {
///     if !simulated_cuda::inside("copies_arrive", &[("SIMULATED_CUDA_DEVICES", "1")]) {
///         return;
///     }
///     // Here CUDA can be loaded.
/// }
/// ```
///
/// # Panics
///
/// If the process cannot be started, fails, runs no such test or does not end within five minutes; the message contains
/// its output.
pub fn inside(test: &str, variables: &[(&str, &str)]) -> bool {
    if env::var_os(MARK).is_some() {
        return true;
    }
    let directory = tempfile::tempdir().expect("a directory for the links");
    install(directory.path()).expect("the simulated CUDA is built next to this test");
    let output = directory.path().join("output");
    let file = File::create(&output).expect("a file for the output");
    let mut child = command(env::current_exe().expect("the path of this test"), directory.path())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(MARK, "1")
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(file.try_clone().expect("a second handle of a file"))
        .stderr(file)
        .spawn()
        .expect("this test starts again");
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child of this process") {
            break status.to_string();
        }
        if start.elapsed() > DEADLINE {
            let _ = child.kill();
            let _ = child.wait();
            break "killed at the deadline".to_owned();
        }
        thread::sleep(Duration::from_millis(5));
    };
    let output = std::fs::read_to_string(&output).unwrap_or_default();
    let passed = status == "exit status: 0" && output.contains("1 passed");
    assert!(passed, "{test}, with the simulated CUDA: {status}\n{output}");
    // Skipped tests and their reasons are shown even if nothing failed.
    for (at, _) in output.match_indices("skipped: ") {
        let line = output[at..].lines().next().unwrap_or_default();
        // Not `eprintln!`, whose output is captured.
        let _ = stderr().write_all(format!("{line}\n").as_bytes());
    }
    false
}

const MARK: &str = "SIMULATED_CUDA_INSIDE";
const DEADLINE: Duration = Duration::from_secs(300);
