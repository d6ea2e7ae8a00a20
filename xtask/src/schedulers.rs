//! `cargo xtask schedulers`: starts the example mnist by the launchers and schedulers that are installed, and compares
//! its losses with those of `distribute run`, bit for bit.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;
use distribute_testkit::{Job, Slurm};

use crate::error::text;
use crate::hosts::none_of;
use crate::launched::{build, read, shown};

#[derive(Args, Default)]
pub(crate) struct Flags {
    /// Tries launchers whose names contain this only.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

/// A launcher of two processes.
struct Launcher {
    name: &'static str,
    /// The program, of which the first one that is installed is taken.
    programs: &'static [&'static str],
    /// A part of what `--version` prints, where several launchers have programs of one name.
    version: &'static str,
    arguments: &'static [&'static str],
    install: &'static str,
}

const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "mpirun of Open MPI",
        programs: &["mpirun.openmpi", "mpirun"],
        version: "Open",
        arguments: &["--oversubscribe", "-n", "2"],
        install: "apt-get install openmpi-bin",
    },
    Launcher {
        name: "mpiexec of MPICH",
        programs: &["mpiexec.hydra", "mpiexec.mpich", "mpiexec"],
        version: "HYDRA",
        arguments: &["-n", "2"],
        install: "apt-get install mpich",
    },
    Launcher {
        name: "mpiexec, as two hosts",
        programs: &["mpiexec.hydra", "mpiexec.mpich", "mpiexec"],
        version: "HYDRA",
        // Both are this host; its process manager treats them as two.
        arguments: &["-launcher", "fork", "-hosts", "127.0.0.1,127.0.0.2", "-ppn", "1", "-n", "2"],
        install: "apt-get install mpich",
    },
    Launcher {
        name: "torchrun",
        programs: &["torchrun"],
        version: "",
        arguments: &["--no-python", "--standalone", "--nproc-per-node", "2"],
        install: "pip install torch",
    },
];

const MNIST: &[&str] = &["--epochs", "1", "--losses"];

/// Longest time of one job.
const DEADLINE: Duration = Duration::from_secs(120);

const SLURM: &str = "Slurm";

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let is_wanted = |name: &str| flags.only.as_deref().is_none_or(|only| name.contains(only));
    let names = LAUNCHERS.iter().map(|launcher| launcher.name).chain([SLURM]);
    if !names.clone().any(is_wanted) {
        return Err(none_of(flags.only.as_deref(), names));
    }
    let programs = build("mnist")?;
    let folder = tempfile::tempdir().map_err(text)?;
    let stage = Stage { programs: &programs, folder: folder.path() };
    let ours = ["run".as_ref(), "--workers".as_ref(), "2".as_ref(), "--".as_ref()];
    let expected = stage.losses("distribute run", &programs.join("distribute"), &ours, &[])?;
    println!("{:<28} {} losses, the last {}", "distribute run --workers 2", expected.len(), shown(&expected));
    let mut differ = Vec::new();
    let mut compare = |name: &str, losses: Vec<u32>, began: Instant| {
        let verdict = if losses == expected { "the same losses, bit for bit" } else { "OTHER LOSSES" };
        println!("{name:<28} {verdict}, {:.1} s", began.elapsed().as_secs_f64());
        if losses != expected {
            differ.push(format!("{name}: {} losses, the last {}", losses.len(), shown(&losses)));
        }
    };
    for launcher in LAUNCHERS.iter().filter(|launcher| is_wanted(launcher.name)) {
        let Some(program) = launcher.program() else {
            println!("skipped: {}, which is not installed ({})", launcher.name, launcher.install);
            continue;
        };
        let began = Instant::now();
        let arguments: Vec<&OsStr> = launcher.arguments.iter().map(|argument| argument.as_ref()).collect();
        // Open MPI does not start programs of root unless told twice.
        let environment = [("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")];
        let losses = stage.losses(launcher.name, program.as_ref(), &arguments, &environment)?;
        compare(launcher.name, losses, began);
    }
    if is_wanted(SLURM) {
        match Slurm::missing() {
            Some(missing) => println!("skipped: Slurm, {missing} is not installed (apt-get install slurm-wlm)"),
            None => {
                let slurm = Slurm::start(folder.path()).map_err(text)?;
                let began = Instant::now();
                compare("srun of Slurm", stage.by_srun(&slurm)?, began);
                let began = Instant::now();
                compare("sbatch of Slurm", stage.by_sbatch(&slurm)?, began);
            }
        }
    }
    match differ.is_empty() {
        true => Ok(()),
        false => Err(format!("launchers with other losses than distribute run:\n  {}", differ.join("\n  "))),
    }
}

impl Launcher {
    fn program(&self) -> Option<&'static str> {
        self.programs.iter().copied().find(|program| {
            let output = Command::new(program).arg("--version").output();
            output.is_ok_and(|output| {
                let said = [output.stdout, output.stderr].concat();
                String::from_utf8_lossy(&said).contains(self.version)
            })
        })
    }
}

/// Where jobs run.
struct Stage<'a> {
    programs: &'a Path,
    folder: &'a Path,
}

impl Stage<'_> {
    /// Has Slurm start mnist at once; returns the bits of its losses.
    fn by_srun(&self, slurm: &Slurm) -> Result<Vec<u32>, String> {
        self.losses("srun", "srun".as_ref(), &["-n".as_ref(), "2".as_ref()], &slurm.environment())
    }

    /// Has Slurm start mnist from a script; returns the bits of its losses.
    fn by_sbatch(&self, slurm: &Slurm) -> Result<Vec<u32>, String> {
        let [batch, output, losses] = ["batch.sh", "batch.out", "sbatch"].map(|name| self.folder.join(name));
        let mnist = self.programs.join("examples/mnist");
        let script = format!("#!/bin/sh\nexec srun {} {} {}\n", mnist.display(), MNIST.join(" "), losses.display());
        std::fs::write(&batch, script).map_err(text)?;
        let arguments: [&OsStr; 5] =
            ["-n2".as_ref(), "--wait".as_ref(), "--output".as_ref(), output.as_os_str(), batch.as_os_str()];
        self.job("sbatch", "sbatch".as_ref(), &arguments, &slurm.environment())?;
        read(&losses)
    }

    /// Has a launcher start mnist; returns the bits of its losses.
    fn losses(
        &self,
        name: &str,
        launcher: &Path,
        arguments: &[&OsStr],
        environment: &[(&str, &str)],
    ) -> Result<Vec<u32>, String> {
        let file = self.folder.join(name.replace(' ', "-"));
        let mnist = self.programs.join("examples/mnist");
        let mut all = arguments.to_vec();
        all.push(mnist.as_os_str());
        all.extend(MNIST.iter().map(|argument| -> &OsStr { argument.as_ref() }));
        all.push(file.as_os_str());
        self.job(name, launcher, &all, environment)?;
        read(&file)
    }

    fn job(
        &self,
        name: &str,
        launcher: &Path,
        arguments: &[&OsStr],
        environment: &[(&str, &str)],
    ) -> Result<(), String> {
        let mut job = Job::builder(launcher).args(arguments);
        for (variable, value) in environment {
            job = job.env(*variable, *value);
        }
        let outcomes = job.start().map_err(text)?.wait_all(DEADLINE).map_err(|error| format!("{name}: {error}"))?;
        match outcomes.iter().find(|outcome| !outcome.success()) {
            None => Ok(()),
            Some(outcome) => Err(format!("{name} failed: {}\n{}", outcome.stdout, outcome.stderr)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_launcher_has_is_refused() {
        let problem = run(&Flags { only: Some("no such launcher".to_owned()) }).unwrap_err();
        assert!(problem.contains("\"no such launcher\"") && problem.contains("torchrun; Slurm"), "{problem}");
    }
}
