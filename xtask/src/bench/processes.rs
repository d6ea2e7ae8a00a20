//! Several processes of this program that form a group.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
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
    mut line: impl FnMut(&str) -> Result<(), String>,
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
    let deadline = Instant::now() + limit;
    if let Some(stdout) = children.0[0].stdout.take() {
        for printed in BufReader::new(stdout).lines() {
            line(&printed.map_err(text)?)?;
        }
    }
    for (rank, child) in children.0.iter_mut().enumerate() {
        loop {
            match child.try_wait().map_err(text)? {
                Some(status) if status.success() => break,
                Some(status) => return Err(format!("rank {rank} of {count} ended with {status}")),
                None if Instant::now() >= deadline => {
                    return Err(format!("rank {rank} of {count} did not end in time"));
                }
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }
    Ok(())
}
