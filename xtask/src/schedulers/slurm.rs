//! Slurm's own daemons on this machine: one node of two processors, without root and without munge.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use distribute_testkit::Ports;

use crate::error::text;

/// A controller and a node. Dropping it ends both.
pub(super) struct Slurm {
    daemons: Vec<Child>,
    configuration: String,
}

/// How long the node may take to appear.
const READY: Duration = Duration::from_secs(30);

impl Slurm {
    /// Starts the daemons in a folder, and waits until the node is idle; or returns the program that is missing.
    pub(super) fn start(folder: &Path) -> Result<Result<Slurm, &'static str>, String> {
        let is_missing = |program: &&str| Command::new(program).arg("-V").output().is_err();
        if let Some(missing) = ["slurmctld", "slurmd", "srun", "sinfo"].into_iter().find(is_missing) {
            return Ok(Err(missing));
        }
        let folder = folder.join("slurm");
        for part in ["state", "spool"] {
            fs::create_dir_all(folder.join(part)).map_err(text)?;
        }
        let host = fs::read_to_string("/proc/sys/kernel/hostname").map_err(text)?;
        let host = host.trim().split('.').next().unwrap_or_default().to_owned();
        let configuration = format!("{}/slurm.conf", folder.display());
        fs::write(&configuration, configured(&folder, &host)?).map_err(text)?;
        let mut slurm = Slurm { daemons: Vec::new(), configuration };
        for program in ["slurmctld", "slurmd"] {
            let log = fs::File::create(folder.join(program).with_extension("out")).map_err(text)?;
            let mut daemon = Command::new(program);
            daemon.arg("-D").arg("-f").arg(&slurm.configuration).stdin(Stdio::null());
            if program == "slurmd" {
                daemon.args(["-N", &host]);
            }
            let log_too = log.try_clone().map_err(text)?;
            slurm.daemons.push(daemon.stdout(log).stderr(log_too).spawn().map_err(text)?);
        }
        slurm.wait(&folder)?;
        Ok(Ok(slurm))
    }

    /// The environment of its commands.
    pub(super) fn environment(&self) -> [(&str, &str); 1] {
        [("SLURM_CONF", &self.configuration)]
    }

    fn wait(&self, folder: &Path) -> Result<(), String> {
        let began = Instant::now();
        loop {
            let mut sinfo = Command::new("sinfo");
            sinfo.args(["--noheader", "--format", "%t"]).envs(self.environment());
            let output = sinfo.output().map_err(text)?;
            if String::from_utf8_lossy(&output.stdout).trim() == "idle" {
                return Ok(());
            }
            if began.elapsed() > READY {
                let log = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
                return Err(format!("Slurm's node is not idle:\n{}{}", log("slurmctld.log"), log("slurmd.log")));
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

fn configured(folder: &Path, host: &str) -> Result<String, String> {
    let ports = Ports::reserve(2).map_err(text)?.addresses();
    let port = |index: usize| ports[index].rsplit_once(':').map_or("", |(_, port)| port).to_owned();
    let user = Command::new("id").arg("-un").output().map_err(text)?;
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
