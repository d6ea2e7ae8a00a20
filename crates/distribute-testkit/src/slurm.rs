//! Slurm's own daemons on this machine: one node of two processors, without root and without munge.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::{Error, Ports, hook};

/// A controller and a node. Dropping it ends both, as does the end of the thread that started it.
///
/// # Examples
///
/// ```no_run
/// use distribute_testkit::{Slurm, skipped};
/// # fn main() -> Result<(), distribute_testkit::Error> {
/// if let Some(program) = Slurm::missing() {
///     skipped(format_args!("{program} is not installed"));
///     return Ok(());
/// }
/// let slurm = Slurm::start("/tmp/of-this-test".as_ref())?;
/// // Commands such as sbatch read this environment.
/// let environment = slurm.environment();
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Slurm {
    daemons: Vec<Child>,
    configuration: String,
}

/// How long the node may take to appear.
const READY: Duration = Duration::from_secs(30);

impl Slurm {
    /// Returns the first of its programs that is not installed, if any.
    #[must_use]
    pub fn missing() -> Option<&'static str> {
        let is_missing = |program: &&str| Command::new(program).arg("-V").output().is_err();
        ["slurmctld", "slurmd", "srun", "sbatch", "sinfo"].into_iter().find(is_missing)
    }

    /// Starts the daemons in a folder, and waits until the node is idle, for at most 30 s.
    ///
    /// # Errors
    /// [`Error::Slurm`] if a daemon cannot be started, or the node does not become idle; [`Error::Port`] if there are
    /// no free ports.
    pub fn start(folder: &Path) -> Result<Slurm, Error> {
        let folder = folder.join("slurm");
        for part in ["state", "spool"] {
            fs::create_dir_all(folder.join(part)).map_err(failed)?;
        }
        let host = fs::read_to_string("/proc/sys/kernel/hostname").map_err(failed)?;
        let host = host.trim().split('.').next().unwrap_or_default().to_owned();
        let configuration = format!("{}/slurm.conf", folder.display());
        fs::write(&configuration, configured(&folder, &host)?).map_err(failed)?;
        let mut slurm = Slurm { daemons: Vec::new(), configuration };
        for program in ["slurmctld", "slurmd"] {
            let log = fs::File::create(folder.join(program).with_extension("out")).map_err(failed)?;
            let mut daemon = Command::new(program);
            daemon.arg("-D").arg("-f").arg(&slurm.configuration).stdin(Stdio::null());
            if program == "slurmd" {
                daemon.args(["-N", &host]);
            }
            let log_too = log.try_clone().map_err(failed)?;
            hook::die_with_parent(&mut daemon);
            slurm.daemons.push(daemon.stdout(log).stderr(log_too).spawn().map_err(failed)?);
        }
        slurm.wait(&folder)?;
        Ok(slurm)
    }

    /// Returns the environment of its commands.
    #[must_use]
    pub fn environment(&self) -> [(&str, &str); 1] {
        [("SLURM_CONF", &self.configuration)]
    }

    fn wait(&self, folder: &Path) -> Result<(), Error> {
        let began = Instant::now();
        loop {
            let mut sinfo = Command::new("sinfo");
            sinfo.args(["--noheader", "--format", "%t"]).envs(self.environment());
            let output = sinfo.output().map_err(failed)?;
            if String::from_utf8_lossy(&output.stdout).trim() == "idle" {
                return Ok(());
            }
            if began.elapsed() > READY {
                let log = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
                let log = format!("{}{}", log("slurmctld.log"), log("slurmd.log"));
                return Err(Error::Slurm { problem: "its node is not idle".to_owned(), log });
            }
            thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        for daemon in self.daemons.iter_mut().rev() {
            // One that has ended by itself is not an error here.
            drop(daemon.kill());
            drop(daemon.wait());
        }
    }
}

fn failed(error: io::Error) -> Error {
    Error::Slurm { problem: error.to_string(), log: String::new() }
}

fn configured(folder: &Path, host: &str) -> Result<String, Error> {
    let ports = Ports::reserve(2)?.addresses();
    let port = |index: usize| ports[index].rsplit_once(':').map_or("", |(_, port)| port).to_owned();
    let user = Command::new("id").arg("-un").output().map_err(failed)?;
    let user = String::from_utf8_lossy(&user.stdout).trim().to_owned();
    let folder = folder.display();
    Ok(format!(
        "ClusterName=distribute
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={}
SlurmdPort={}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
",
        port(0),
        port(1)
    ))
}
