//! Several processes of this program that form a group.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use distribute_testkit::Ports;
use distribute_testkit::certificates::{Authority, Certificate};

use crate::error::text;

/// The variable that has the addresses of all ranks, for strategies that do not form their group by rank.
pub(super) const WORKERS: &str = "XTASK_BENCH_WORKERS";

/// The variable that has the time at which a process was started, in seconds since 1970.
pub(super) const STARTED: &str = "XTASK_BENCH_STARTED";

/// Returns the present time as [`STARTED`] has it.
pub(super) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Processes that are killed when this is dropped.
pub(super) struct Children(pub(super) Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Those that have ended cannot be killed; that is fine.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Children {
    /// Hands each line that the first process prints, whose output must be piped, to `line`, and waits for the end of
    /// all processes.
    ///
    /// # Errors
    /// The error of `line`; a message that names the process, if one has not ended within `limit` of this call.
    pub(super) fn finish(
        &mut self,
        limit: Duration,
        mut line: impl FnMut(&str) -> Result<(), String>,
    ) -> Result<Vec<ExitStatus>, String> {
        let (deadline, count) = (Instant::now() + limit, self.0.len());
        let late = |rank: usize| format!("rank {rank} of {count} did not end within {limit:?}");
        if let Some(stdout) = self.0.first_mut().and_then(|first| first.stdout.take()) {
            let lines = lines_of(stdout);
            loop {
                match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                    Ok(printed) => line(&printed.map_err(text)?)?,
                    Err(mpsc::RecvTimeoutError::Disconnected) => break,
                    Err(mpsc::RecvTimeoutError::Timeout) => return Err(late(0)),
                }
            }
        }
        let mut statuses = Vec::new();
        for (rank, child) in self.0.iter_mut().enumerate() {
            loop {
                match child.try_wait().map_err(text)? {
                    Some(status) => break statuses.push(status),
                    None if Instant::now() >= deadline => return Err(late(rank)),
                    None => thread::sleep(Duration::from_millis(2)),
                }
            }
        }
        Ok(statuses)
    }
}

/// Returns the lines of an output as they are read, by a thread that ends with the output or with the receiver.
pub(super) fn lines_of(output: impl Read + Send + 'static) -> mpsc::Receiver<std::io::Result<String>> {
    let (say, said) = mpsc::channel();
    thread::spawn(move || BufReader::new(output).lines().try_for_each(|line| say.send(line)));
    said
}

/// The last lines of what a process writes to its standard error, read by a thread that ends with it.
pub(super) struct Tail {
    lines: Arc<Mutex<VecDeque<String>>>,
    /// Closed at the end of the output.
    end: mpsc::Receiver<Infallible>,
}

impl Tail {
    pub(super) fn of(output: impl Read + Send + 'static) -> Tail {
        let lines: Arc<Mutex<VecDeque<String>>> = Arc::default();
        let (reads, end) = mpsc::channel();
        let kept = Arc::clone(&lines);
        thread::spawn(move || {
            let _reads = reads;
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                let mut lines = kept.lock().unwrap_or_else(PoisonError::into_inner);
                lines.push_back(String::from_utf8_lossy(&line).into_owned());
                if lines.len() > KEPT_LINES {
                    lines.pop_front();
                }
            }
        });
        Tail { lines, end }
    }

    /// Returns the lines after an introduction, once the output has ended or a second is over, since another process
    /// may hold it open; an empty text if there are none.
    pub(super) fn text(&self) -> String {
        let _ = self.end.recv_timeout(Duration::from_secs(1));
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let lines: Vec<String> = lines.iter().map(|line| format!("    {line}\n")).collect();
        if lines.is_empty() { String::new() } else { format!(", with the last errors:\n{}", lines.concat()) }
    }
}

/// The number of lines that a [`Tail`] has.
const KEPT_LINES: usize = 8;

/// Returns the transport of a name such as `tcp` or `tcp+tls`, and whether it uses TLS.
pub(super) fn kind_of(transport: &str) -> (&str, bool) {
    match transport.strip_suffix("+tls") {
        Some(kind) => (kind, true),
        None => (transport, false),
    }
}

/// The processes of one measurement.
pub(crate) struct Ranks<'a> {
    pub(crate) count: usize,
    pub(crate) transport: &'a str,
    pub(crate) algorithm: &'a str,
    /// The threads that a replica's operations are divided among; all cores, if none are given.
    pub(crate) threads: Option<usize>,
}

/// Starts processes of this program with the arguments, as ranks of one group on loopback, and hands each line that
/// rank 0 prints to `line`. For a transport with TLS, such as `tcp+tls`, they get certificates of an authority that is
/// made for this run.
pub(crate) fn run(
    ranks: &Ranks<'_>,
    arguments: &[String],
    limit: Duration,
    line: impl FnMut(&str) -> Result<(), String>,
) -> Result<(), String> {
    let Ranks { count, transport, algorithm, threads } = *ranks;
    let program = std::env::current_exe().map_err(text)?;
    let ports = Ports::reserve(1 + count).map_err(text)?;
    let port = ports.numbers()[0];
    // Where elastic workers find each other.
    let workers = ports.addresses().split_off(1);
    drop(ports);
    let mut children = Children(Vec::new());
    let (kind, uses_tls) = kind_of(transport);
    let folder = tempfile::tempdir().map_err(text)?;
    let mut certificates = Vec::new();
    if uses_tls {
        let issued = Authority::new().and_then(|own| own.issue(folder.path(), "rank", &Certificate::valid()));
        let files = issued.map_err(text)?;
        certificates = vec![
            ("DISTRIBUTE_TLS_CA", files.authority),
            ("DISTRIBUTE_TLS_CERT", files.certificate),
            ("DISTRIBUTE_TLS_KEY", files.key),
        ];
    }
    for rank in 0..count {
        let child = Command::new(&program)
            .args(arguments)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", count.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("DISTRIBUTE_PORT", port.to_string())
            .env("DISTRIBUTE_TRANSPORT", kind)
            .env("DISTRIBUTE_ALGORITHM", algorithm)
            .env(WORKERS, workers.join(","))
            .env(STARTED, now().to_string())
            .env_remove("RAYON_NUM_THREADS")
            .envs(threads.map(|threads| ("RAYON_NUM_THREADS", threads.to_string())))
            .envs(certificates.iter().map(|(name, path)| (*name, path)))
            .stdin(Stdio::null())
            .stdout(if rank == 0 { Stdio::piped() } else { Stdio::null() })
            .spawn()
            .map_err(text)?;
        children.0.push(child);
    }
    let statuses = children.finish(limit, line)?;
    match statuses.iter().position(|status| !status.success()) {
        None => Ok(()),
        Some(rank) => Err(format!("rank {rank} of {count} ended with {}", statuses[rank])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Children {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::piped());
        Children(vec![command.spawn().unwrap()])
    }

    #[test]
    fn processes_that_do_not_end_are_an_error_at_the_limit() {
        for script in ["echo first; exec sleep 60", "echo first; exec >&-; exec sleep 60"] {
            let (began, mut lines) = (Instant::now(), Vec::new());
            let line = |line: &str| {
                lines.push(line.to_owned());
                Ok(())
            };
            let problem = shell(script).finish(Duration::from_secs(1), line).unwrap_err();
            assert_eq!(problem, "rank 0 of 1 did not end within 1s");
            assert_eq!(lines, ["first"]);
            assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        }
    }

    #[test]
    fn the_ends_of_processes_are_returned() {
        let statuses = shell("exit 3").finish(Duration::from_secs(30), |_| Ok(())).unwrap();
        assert_eq!(statuses.iter().map(ExitStatus::code).collect::<Vec<_>>(), [Some(3)]);
    }
}
