//! The same work by others: Open MPI, Gloo and TensorFlow, run in turns with ours.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::ValueEnum;
use distribute_testkit::Ports;
use serde::Deserialize;

use super::collective::{Flags, Operation, correct, measure_processes, parse_size};
use super::processes::{Children, STARTED, now};
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

    /// Returns the output of rank 0 of a script; `None` where the module is not installed.
    ///
    /// # Errors
    /// A message, if the processes cannot be started, or do not end within `limit`.
    pub(super) fn run(
        self,
        script: &str,
        ranks: usize,
        arguments: &[String],
        limit: Duration,
    ) -> Result<Option<String>, String> {
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
            command.stdout(if rank == 0 { Stdio::piped() } else { Stdio::null() }).spawn().map_err(text)
        };
        let mut children = Children(Vec::new());
        for rank in 0..ranks {
            children.0.push(start(rank)?);
        }
        printed(children, limit).map(Some).map_err(|problem| format!("{script}: {problem}"))
    }
}

/// Returns what the first of some processes prints, after all have ended.
///
/// # Errors
/// A message, if they do not end within `limit`.
pub(super) fn printed(mut children: Children, limit: Duration) -> Result<String, String> {
    let mut all = String::new();
    children.finish(limit, |line| {
        all.extend([line, "\n"]);
        Ok(())
    })?;
    Ok(all)
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
        let printed = match self {
            Peer::Openmpi => {
                let Some(program) = compiled()? else { return Ok(None) };
                let mut command = Command::new("mpirun");
                command.args(["--allow-run-as-root", "--oversubscribe", "-np", &ranks.to_string()]);
                if transport == "tcp" {
                    command.args(["--mca", "btl", "tcp,self"]);
                }
                command.arg(program).arg("0").args(&sizes);
                let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(text)?;
                printed(Children(vec![child]), LIMIT).map_err(|problem| format!("mpirun: {problem}"))?
            }
            Peer::Gloo => match TORCH.run("xtask/peers/gloo.py", ranks, &of_script, LIMIT)? {
                Some(printed) => printed,
                None => return Ok(None),
            },
            Peer::Tensorflow => match TENSORFLOW.run("xtask/peers/tf_ring.py", ranks, &of_script, LIMIT)? {
                Some(printed) => printed,
                None => return Ok(None),
            },
        };
        let lines: Vec<Line> = printed.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        if lines.len() != sizes.len() || lines.iter().zip(&sizes).any(|(line, size)| line.bytes.to_string() != *size) {
            return Err(format!("{self:?} printed something else than one line per size: {printed:?}"));
        }
        Ok(Some(lines.into_iter().map(|line| line.time_us).collect()))
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
