//! The same work by others: Open MPI, Gloo and TensorFlow, run in turns with ours.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::ValueEnum;
use distribute_testkit::Ports;
use serde::Deserialize;

use super::collective::{Flags, Operation, correct, measure_processes, parse_size};
use super::processes::{Children, STARTED, Tail, now};
use super::spread::spread;
use crate::error::text;

/// Who is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    /// Debian: apt-get install openmpi-bin libopenmpi-dev
    Openmpi,
    /// python3 -m venv target/peers/venv && target/peers/venv/bin/pip install torch numpy
    Gloo,
    /// python3 -m venv target/peers/tf && target/peers/tf/bin/pip install tensorflow
    Tensorflow,
}

/// A peer's line.
#[derive(Deserialize)]
struct Line {
    bytes: usize,
    time_us: f64,
}

/// Longest time of one run of a peer over all sizes.
const LIMIT: Duration = Duration::from_secs(600);

/// How often each side runs; odd, so that there is a middle one.
const ROUNDS: usize = 5;

/// Prints ours, the peer's, and how many times faster ours is; says so where the peer is not installed. The flags have
/// been [checked](Flags::check): ours does the same work.
///
/// # Errors
/// A message, if a process of either side fails or does not end in time, or if a result of ours is wrong.
pub(super) fn compare(operation: Operation, flags: &Flags, peers: &[Peer], ranks: &[usize]) -> Result<(), String> {
    let sizes: Vec<usize> = flags.sizes.iter().map(|size| parse_size(size)).collect::<Result<_, _>>()?;
    for peer in peers {
        let ways: &[(&str, &str)] = match peer {
            Peer::Openmpi => &[("shm", "Open MPI"), ("tcp", "Open MPI, btl tcp")],
            Peer::Gloo => &[("tcp", "Gloo"), ("shm", "Gloo")],
            Peer::Tensorflow => &[("grpc", "TensorFlow, RING")],
        };
        for ranks in ranks {
            for (transport, name) in ways {
                let theirs = |_: usize| peer.run(transport, *ranks, &sizes);
                let ours = |_: usize| -> Result<Vec<f64>, String> {
                    let rows = correct(measure_processes(operation, flags, transport, *ranks, "auto")?)?;
                    Ok(rows.into_iter().map(|row| row.time_us).collect())
                };
                let mut rounds = Vec::new();
                for round in 0..ROUNDS {
                    let ours = ours(round)?;
                    match theirs(round)? {
                        Some(theirs) => rounds.push((ours, theirs)),
                        None => break,
                    }
                }
                if rounds.is_empty() {
                    println!("skipped: {name} is not installed ({})", peer.set_up());
                    continue;
                }
                println!("# {ranks} ranks, {transport} against {name}; medians of {ROUNDS} runs in turns, µs");
                for (at, bytes) in sizes.iter().enumerate() {
                    let ours = spread(rounds.iter().filter_map(|(ours, _)| ours.get(at).copied()).collect()).0;
                    let theirs = spread(rounds.iter().filter_map(|(_, theirs)| theirs.get(at).copied()).collect()).0;
                    println!("{bytes:>12} {ours:>12.2} {theirs:>12.2}   {:>6.1}× as fast", theirs / ours);
                }
            }
        }
    }
    Ok(())
}

/// A Python environment with a module, in target/peers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Python {
    folder: &'static str,
    module: &'static str,
    packages: &'static str,
}

pub(crate) const TORCH: Python = Python { folder: "venv", module: "torch", packages: "torch numpy" };
pub(crate) const TENSORFLOW: Python = Python { folder: "tf", module: "tensorflow", packages: "tensorflow" };

impl Python {
    /// Returns the interpreter.
    pub(crate) fn interpreter(self) -> PathBuf {
        PathBuf::from(format!("target/peers/{}/bin/python", self.folder))
    }

    pub(crate) fn is_installed(self) -> bool {
        installed(&self.interpreter(), self.module)
    }

    /// Returns the commands that install it.
    pub(crate) fn set_up(self) -> String {
        let Python { folder, packages, .. } = self;
        format!("python3 -m venv target/peers/{folder} && target/peers/{folder}/bin/pip install {packages}")
    }

    /// Returns what `read` makes of the output of rank 0 of a script; `None` where the module is not installed.
    ///
    /// # Errors
    /// A message, if the processes cannot be started, and the errors of [`printed`].
    pub(super) fn run<T>(
        self,
        script: &str,
        ranks: usize,
        arguments: &[String],
        limit: Duration,
        read: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, String> {
        if !self.is_installed() {
            return Ok(None);
        }
        let python = self.interpreter();
        let ports = Ports::reserve(ranks).map_err(text)?;
        let (workers, master) = (ports.addresses(), ports.release()[0]);
        let start = |rank: usize| {
            let config = serde_json::json!({
                "cluster": { "worker": workers }, "task": { "type": "worker", "index": rank },
            });
            let mut command = Command::new(&python);
            command.arg(script).args(arguments).env("OMP_NUM_THREADS", "1").env("TF_CONFIG", config.to_string());
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
            command.env(STARTED, now().to_string());
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", master.to_string());
            command.env("GLOO_SOCKET_IFNAME", "lo");
            command.stdout(if rank == 0 { Stdio::piped() } else { Stdio::null() });
            command.stderr(Stdio::piped()).spawn().map_err(text)
        };
        let mut children = Children(Vec::new());
        for rank in 0..ranks {
            children.0.push(start(rank)?);
        }
        printed(script, children, limit, read).map(Some)
    }
}

/// Returns what `read` makes of the output of the first of some processes, after all have ended. If one has failed
/// after the output was complete, such as in its last clean-up, a line says so.
///
/// # Errors
/// A message that names the program, if they do not end within `limit`, or if `read` cannot use what was printed; it
/// has the end of each process that has failed, and the last lines of its errors where they are piped.
pub(super) fn printed<T>(
    name: &str,
    children: Children,
    limit: Duration,
    read: impl FnOnce(&str) -> Result<T, String>,
) -> Result<T, String> {
    let (value, failures) = judged(children, limit, read).map_err(|problem| format!("{name}: {problem}"))?;
    if !failures.is_empty() {
        eprintln!("remark: {name} had printed its results, and {failures}");
    }
    Ok(value)
}

/// Returns also how processes have ended that have failed; an empty text, if none has.
fn judged<T>(
    mut children: Children,
    limit: Duration,
    read: impl FnOnce(&str) -> Result<T, String>,
) -> Result<(T, String), String> {
    let count = children.0.len();
    let errors: Vec<Option<Tail>> = children.0.iter_mut().map(|child| child.stderr.take().map(Tail::of)).collect();
    let said = |rank: usize| errors.get(rank).and_then(Option::as_ref).map(Tail::text).unwrap_or_default();
    let mut all = String::new();
    let ended = children.finish(limit, |line| {
        all.extend([line, "\n"]);
        Ok(())
    });
    let statuses = match ended {
        Ok(statuses) => statuses,
        Err(problem) => {
            // Otherwise those that hang would keep their outputs open.
            drop(children);
            return Err((0..count).fold(problem, |problem, rank| problem + &said(rank)));
        }
    };
    let failed = statuses.iter().enumerate().filter(|(_, status)| !status.success());
    let failures: Vec<String> =
        failed.map(|(rank, status)| format!("rank {rank} of {count} ended with {status}{}", said(rank))).collect();
    let failures = failures.join("; ");
    match read(&all) {
        Ok(value) => Ok((value, failures)),
        Err(problem) if failures.is_empty() => Err(problem),
        Err(problem) => Err(format!("{failures}; {problem}")),
    }
}

impl Peer {
    fn set_up(self) -> String {
        match self {
            Peer::Openmpi => "apt-get install openmpi-bin libopenmpi-dev".to_owned(),
            Peer::Gloo => TORCH.set_up(),
            Peer::Tensorflow => TENSORFLOW.set_up(),
        }
    }

    /// One run over all sizes; `None` where the peer is not installed.
    fn run(self, transport: &str, ranks: usize, sizes: &[usize]) -> Result<Option<Vec<f64>>, String> {
        let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
        let of_script: Vec<String> = ["0".to_owned()].into_iter().chain(sizes.iter().cloned()).collect();
        let read = |printed: &str| self.times(printed, &sizes);
        match self {
            Peer::Openmpi => {
                let Some(program) = compiled()? else { return Ok(None) };
                let mut command = Command::new("mpirun");
                command.args(["--allow-run-as-root", "--oversubscribe", "-np", &ranks.to_string()]);
                if transport == "tcp" {
                    command.args(["--mca", "btl", "tcp,self"]);
                }
                command.arg(program).arg("0").args(&sizes).stdin(Stdio::null());
                let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(text)?;
                printed("mpirun", Children(vec![child]), LIMIT, read).map(Some)
            }
            Peer::Gloo => TORCH.run("xtask/peers/gloo.py", ranks, &of_script, LIMIT, read),
            Peer::Tensorflow => TENSORFLOW.run("xtask/peers/tf_ring.py", ranks, &of_script, LIMIT, read),
        }
    }

    /// Returns the times of the lines, one for each size.
    fn times(self, printed: &str, sizes: &[String]) -> Result<Vec<f64>, String> {
        let lines: Vec<Line> = printed.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        if lines.len() != sizes.len() || lines.iter().zip(sizes).any(|(line, size)| line.bytes.to_string() != *size) {
            return Err(format!("{self:?} printed something else than one line per size: {printed:?}"));
        }
        Ok(lines.into_iter().map(|line| line.time_us).collect())
    }
}

/// Whether a Python has a module.
pub(crate) fn installed(python: &Path, module: &str) -> bool {
    let output = Command::new(python).args(["-c", &format!("import {module}")]).stderr(Stdio::null()).output();
    output.is_ok_and(|output| output.status.success())
}

/// The Open MPI program, compiled where there is a compiler for it.
fn compiled() -> Result<Option<PathBuf>, String> {
    let program = PathBuf::from("target/peers/openmpi");
    std::fs::create_dir_all("target/peers").map_err(text)?;
    let compile = Command::new("mpicc").args(["-O2", "-o"]).arg(&program).arg("xtask/peers/openmpi.c").status();
    match compile {
        Ok(status) if status.success() => Ok(Some(program)),
        Ok(status) => Err(format!("mpicc failed: {status}")),
        Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a process for each script; `read` takes one line `row`.
    fn run(scripts: &[&str], limit: Duration) -> Result<(usize, String), String> {
        let start = |script: &&str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().unwrap()
        };
        let read = |printed: &str| match printed.matches("row\n").count() {
            0 => Err("there are no rows".to_owned()),
            rows => Ok(rows),
        };
        judged(Children(scripts.iter().map(start).collect()), limit, read)
    }

    #[test]
    fn a_peer_that_fails_before_it_prints_is_an_error_with_its_last_words() {
        let limit = Duration::from_secs(30);
        let script = "for line in 1 2 3 4 5 6 7 8 9 10 11; do echo line $line >&2; done; exit 3";
        let problem = run(&[script, "exit 0"], limit).unwrap_err();
        assert!(problem.starts_with("rank 0 of 2 ended with exit status: 3, with the last errors:\n"), "{problem}");
        assert!(problem.contains("line 11") && !problem.contains("line 1\n"), "{problem}");
        assert!(problem.ends_with("; there are no rows"), "{problem}");
        assert_eq!(run(&["exit 0"], limit).unwrap_err(), "there are no rows");
        let problem = run(&["echo stuck >&2; exec sleep 60"], Duration::from_millis(300)).unwrap_err();
        assert!(problem.contains("did not end within 300ms") && problem.contains("stuck"), "{problem}");
    }

    #[test]
    fn a_peer_that_fails_after_it_has_printed_is_remarked_on() {
        let limit = Duration::from_secs(30);
        assert_eq!(run(&["echo row; echo all is well >&2"], limit), Ok((1, String::new())));
        let (rows, failures) = run(&["echo row; echo row", "echo bye >&2; kill -SEGV $$"], limit).unwrap();
        assert_eq!(rows, 2);
        assert!(failures.starts_with("rank 1 of 2 ended with signal: 11") && failures.contains("bye"), "{failures}");
    }
}
