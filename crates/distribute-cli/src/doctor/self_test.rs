//! `--run`: a job of this program itself, started by its own launcher, whose processes reduce known values over each
//! transport.

mod rank;

use std::io::{self, BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use distribute_collectives::TransportKind;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use super::report::{Check, Status};
use crate::environment;

pub(crate) use rank::rank;

/// The joint result of all processes for one transport; one line of JSON from rank 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Measured {
    transport: String,
    outcome: Result<Speed, String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Speed {
    /// Bus bandwidth as defined by nccl-tests.
    bus_bytes_per_s: f64,
    /// Time of an all-reduce of 8 bytes.
    latency_s: f64,
}

/// Returns one check for each transport, and one for the job.
pub(crate) fn run(workers: u32, transports: &[TransportKind]) -> Vec<Check> {
    if transports.is_empty() {
        return vec![Check::skipped(TOPIC, "no transport works")];
    }
    let begun = Instant::now();
    let ended = start(workers, transports).and_then(|child| Ended::of(child, begun + PATIENCE));
    judge(workers, transports, ended, begun.elapsed())
}

/// Starts the launcher. It ends all its tasks before itself; if this process is killed, their own deadlines end them.
fn start(workers: u32, transports: &[TransportKind]) -> io::Result<Child> {
    // Not a path, since the file may have been replaced by a newer build.
    let program = "/proc/self/exe";
    let mut command = Command::new(program);
    command.args([
        "run",
        "--workers",
        &workers.to_string(),
        "--grace",
        "1",
        "--only",
        "worker-0",
        "--",
        program,
        "self-test",
    ]);
    command.args(transports.iter().map(|kind| kind.name()));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Flags of the launcher, and options that are not under test.
    for name in environment::names().filter(|name| name != "DISTRIBUTE_HOST_ID") {
        if name.to_string_lossy().starts_with("DISTRIBUTE_") {
            command.env_remove(name);
        }
    }
    // The lines are parsed, not shown.
    command.env_remove("CLICOLOR_FORCE").env("NO_COLOR", "1");
    command.spawn()
}

/// The result of the job.
#[derive(Debug)]
struct Ended {
    /// `None` if it had to be stopped.
    status: Option<ExitStatus>,
    measured: Vec<Measured>,
    /// The standard error of the launcher and the processes.
    words: Vec<String>,
}

impl Ended {
    fn of(mut child: Child, deadline: Instant) -> io::Result<Self> {
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let results = read(stdout);
        let words = read(stderr);
        let status = wait(&mut child, deadline)?;
        let joined = |lines: thread::JoinHandle<Vec<String>>| lines.join().unwrap_or_default();
        let results = joined(results);
        // Lines of a task begin with its name.
        let json = results.iter().filter_map(|line| Some(line.split_once("│ ")?.1));
        let measured = json.filter_map(|json| serde_json::from_str(json).ok()).collect();
        Ok(Self { status, measured, words: joined(words) })
    }
}

pub(super) fn read(stream: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<String>> {
    thread::spawn(move || {
        stream.into_iter().flat_map(|stream| BufReader::new(stream).lines().map_while(Result::ok)).collect()
    })
}

/// Waits for a child; one that takes too long is asked to stop, and then killed. The guardian of a killed launcher ends
/// the tasks.
pub(super) fn wait(child: &mut Child, deadline: Instant) -> io::Result<Option<ExitStatus>> {
    let until = |child: &mut Child, deadline: Instant| loop {
        match child.try_wait()? {
            None if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
            ended => return io::Result::Ok(ended),
        }
    };
    if let Some(status) = until(child, deadline)? {
        return Ok(Some(status));
    }
    // The child has not been waited for, so its id cannot have been reused.
    let _ = kill_process(Pid::from_child(child), Signal::TERM);
    if until(child, deadline + STOP)?.is_none() {
        child.kill()?;
        child.wait()?;
    }
    Ok(None)
}

fn judge(workers: u32, transports: &[TransportKind], ended: io::Result<Ended>, took: Duration) -> Vec<Check> {
    let ended = match ended {
        Ok(ended) => ended,
        Err(error) => {
            return vec![
                Check::fail(TOPIC, format!("it cannot be started: {error}")).remedy("see the line open files"),
            ];
        }
    };
    let of_transport = |kind: &TransportKind| {
        let topic = format!("run {}", kind.name());
        match ended.measured.iter().find(|measured| measured.transport == kind.name()).map(|measured| &measured.outcome)
        {
            Some(Ok(Speed { bus_bytes_per_s, latency_s })) => Check::ok(
                &topic,
                format!(
                    "all-reduce of 4 MiB over {workers} processes verified, busbw {:.2} GB/s; of 8 bytes in {}",
                    bus_bytes_per_s / 1e9,
                    time(*latency_s)
                ),
            ),
            Some(Err(problem)) => Check::fail(&topic, problem),
            None => Check::fail(&topic, "no result"),
        }
    };
    let mut checks: Vec<Check> = transports.iter().map(of_transport).collect();
    let good = checks.iter().filter(|check| check.status == Status::Ok).count();
    let took = took.as_secs_f64();
    let summary = format!("{good} of {} transports passed with {workers} processes in {took:.1} s", checks.len());
    let passed = good == checks.len() && ended.status.is_some_and(|status| status.success());
    checks.push(if passed {
        Check::ok(TOPIC, summary)
    } else {
        let how = match ended.status {
            Some(status) => format!("the job ended with {status}"),
            None => format!("stopped after {} s", PATIENCE.as_secs()),
        };
        // The launcher's report names the first cause, and ends with the last line of that task.
        let cause = ended.words.iter().find_map(|line| line.strip_prefix("error: "));
        let last = ended.words.last().and_then(|line| line.strip_prefix("    "));
        let said = [cause, last].into_iter().flatten().map(|words| format!(": {words}"));
        Check::fail(TOPIC, summary).why(how + &said.collect::<String>()).details(ended.words)
    });
    checks
}

fn time(seconds: f64) -> String {
    match seconds * 1e6 {
        us if us < 1e3 => format!("{us:.1} µs"),
        us => format!("{:.1} ms", us / 1e3),
    }
}

const TOPIC: &str = "self test";

/// Time limit of the job. Its processes give up a second earlier, to report their state.
const PATIENCE: Duration = Duration::from_millis(8500);

/// Time limit of stopping the launcher: its grace, and some more.
const STOP: Duration = Duration::from_millis(1400);

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn ended(code: Option<i32>, measured: Vec<Measured>) -> io::Result<Ended> {
        let status = code.map(|code| ExitStatus::from_raw(code << 8));
        Ok(Ended { status, measured, words: WORDS.map(str::to_owned).to_vec() })
    }

    fn measured(kind: TransportKind, outcome: Result<Speed, String>) -> Measured {
        Measured { transport: kind.name().to_owned(), outcome }
    }

    const WORDS: [&str; 4] = ["worker-1  138", "error: worker-1 failed", "  its last line", "    over tcp: not done"];

    const SPEED: Speed = Speed { bus_bytes_per_s: 2.345e9, latency_s: 11.26e-6 };

    #[test]
    fn every_transport_has_a_line_and_the_job_one() {
        let kinds = [TransportKind::Shm, TransportKind::Tcp];
        let both = kinds.map(|kind| measured(kind, Ok(SPEED))).to_vec();
        let checks = judge(2, &kinds, ended(Some(0), both), Duration::from_millis(1230));
        assert_eq!(checks.iter().map(|check| check.status).collect::<Vec<_>>(), [Status::Ok; 3]);
        assert!(checks[0].found.contains("busbw 2.35 GB/s; of 8 bytes in 11.3 µs"), "{checks:?}");
        assert_eq!(checks[2].found, "2 of 2 transports passed with 2 processes in 1.2 s");
    }

    #[test]
    fn what_failed_is_named_with_the_first_cause() {
        let kinds = [TransportKind::Shm, TransportKind::Tcp];
        let one = vec![measured(TransportKind::Shm, Err("other values".to_owned()))];
        let checks = judge(2, &kinds, ended(Some(138), one), Duration::from_secs(1));
        let found: Vec<_> = checks.iter().map(|check| (check.status, check.found.as_str())).collect();
        assert_eq!(found[..2], [(Status::Fail, "other values"), (Status::Fail, "no result")]);
        assert!(
            checks[2].why.as_deref().unwrap().contains("exit status: 138: worker-1 failed: over tcp: not done"),
            "{checks:?}"
        );
        let stopped = judge(2, &kinds[..1], ended(None, vec![]), PATIENCE);
        assert!(stopped[1].why.as_deref().unwrap().starts_with("stopped after 8 s"), "{stopped:?}");
        let never = judge(2, &kinds, Err(io::ErrorKind::OutOfMemory.into()), Duration::ZERO);
        assert_eq!(never[0].status, Status::Fail);
    }

    #[test]
    fn a_job_that_does_not_end_is_ended() {
        let spawn = |script| Command::new("sh").args(["-c", script]).spawn().unwrap();
        let mut quick = spawn("exit 3");
        assert_eq!(wait(&mut quick, Instant::now() + Duration::from_secs(60)).unwrap().unwrap().code(), Some(3));
        let mut slow = spawn("exec sleep 600");
        assert_eq!(wait(&mut slow, Instant::now()).unwrap(), None);
        assert!(slow.try_wait().unwrap().is_some());
    }
}
