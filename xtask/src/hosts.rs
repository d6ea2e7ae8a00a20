//! `cargo xtask hosts`: jobs on several hosts, each of which is a network namespace of this machine with an interface,
//! an address and a name of its own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use distribute_testkit::{Job, Outcome};

use crate::error::text;
use crate::launched::{build, compare, read, shown};

#[derive(Args, Default)]
pub(crate) struct Flags {
    /// Runs only scenarios whose names contain this.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

/// A job, which says what it has shown.
type Scenario = fn(&Stage) -> Result<String, String>;

/// Longest time of one job.
const DEADLINE: Duration = Duration::from_secs(180);

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let scenarios = chosen(flags.only.as_deref())?;
    if let Some(why) = Hosts::missing() {
        println!("skipped: {why}");
        return Ok(());
    }
    let hosts = Hosts::create(3)?;
    let folder = tempfile::tempdir().map_err(text)?;
    let stage = Stage { programs: build("mnist")?, folder: folder.path().to_owned(), hosts };
    let mut failed = Vec::new();
    for (name, scenario) in scenarios {
        let began = Instant::now();
        let said = scenario(&stage);
        let seconds = began.elapsed().as_secs_f64();
        match said {
            Ok(said) => println!("{name:<34} {said}, {seconds:.1} s"),
            Err(why) => {
                println!("{name:<34} FAILED, {seconds:.1} s");
                failed.push(format!("{name}: {why}"));
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n")) }
}

const SCENARIOS: [(&str, Scenario); 6] = [
    ("two hosts", |stage| stage.same_losses(2)),
    ("three hosts, the leader last", |stage| stage.same_losses(3)),
    ("two hosts over ssh", Stage::over_ssh),
    ("a host that is lost", Stage::lost_host),
    ("a worker killed, restarts allowed", Stage::restarted),
    ("a host replaced, restarts allowed", Stage::replaced),
];

/// Returns the scenarios whose names contain a text, if one is given.
///
/// # Errors
/// A message with all names, if there is none.
fn chosen(only: Option<&str>) -> Result<Vec<(&'static str, Scenario)>, String> {
    let chosen: Vec<_> =
        SCENARIOS.into_iter().filter(|(name, _)| only.is_none_or(|only| name.contains(only))).collect();
    match chosen.is_empty() {
        false => Ok(chosen),
        true => Err(none_of(only, SCENARIOS.iter().map(|(name, _)| *name))),
    }
}

/// Returns the error of a text that is a part of no name.
pub(crate) fn none_of(only: Option<&str>, names: impl Iterator<Item = &'static str>) -> String {
    let names: Vec<&str> = names.collect();
    format!("no name contains {:?}; give --only a part of one of: {}", only.unwrap_or_default(), names.join("; "))
}

/// Namespaces that are connected by a switch, which has one of its own. They are removed when this is dropped.
pub(crate) struct Hosts {
    names: Vec<String>,
    switch: String,
}

impl Hosts {
    /// Returns why hosts cannot be made here, if they cannot: it makes a namespace, a switch and a cable.
    pub(crate) fn missing() -> Option<String> {
        let probe = Hosts { names: Vec::new(), switch: unique("probe") };
        let tried = ip(&["netns", "add", &probe.switch])
            .and_then(|()| ip(&["-n", &probe.switch, "link", "add", "bridge", "type", "bridge"]))
            .and_then(|()| ip(&["-n", &probe.switch, "link", "add", "one", "type", "veth", "peer", "name", "other"]));
        let why = tried.err()?;
        Some(format!("network namespaces cannot be made here ({why}); this takes root and iproute2"))
    }

    /// # Errors
    /// A message, if a command of iproute2 fails; where hosts are not [missing](Hosts::missing), that is a defect.
    pub(crate) fn create(count: usize) -> Result<Hosts, String> {
        let name = unique;
        let names = (0..count).map(|index| name(&index.to_string())).collect();
        // From here on, a failure removes what is there.
        let hosts = Hosts { names, switch: name("switch") };
        ip(&["netns", "add", &hosts.switch])?;
        ip(&["-n", &hosts.switch, "link", "add", "bridge", "type", "bridge"])?;
        ip(&["-n", &hosts.switch, "link", "set", "bridge", "up"])?;
        for (index, host) in hosts.names.iter().enumerate() {
            let (port, address) = (format!("port{index}"), format!("{}/24", address(index)));
            ip(&["netns", "add", host])?;
            let pair = ["link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", host];
            ip(&[&["-n", &hosts.switch], &pair[..]].concat())?;
            ip(&["-n", &hosts.switch, "link", "set", &port, "master", "bridge", "up"])?;
            ip(&["-n", host, "address", "add", &address, "dev", "eth0"])?;
            ip(&["-n", host, "link", "set", "eth0", "up"])?;
            ip(&["-n", host, "link", "set", "lo", "up"])?;
        }
        Ok(hosts)
    }

    /// Returns the name of a host's namespace.
    pub(crate) fn name(&self, index: usize) -> &str {
        &self.names[index]
    }

    /// Drops what a host sends to the others, and not what it receives, or ends that: its packets are addressed to a
    /// network card that no host has.
    pub(crate) fn mute(&self, index: usize, muted: bool) -> Result<(), String> {
        for peer in (0..self.names.len()).filter(|peer| *peer != index).map(address) {
            let neighbour = ["-n", &self.names[index], "neighbour"];
            match muted {
                true => {
                    let to_none = ["replace", &peer, "lladdr", "02:00:00:00:00:fe", "dev", "eth0", "nud", "permanent"];
                    ip(&[&neighbour[..], &to_none].concat())?;
                }
                false => ip(&[&neighbour[..], &["delete", &peer, "dev", "eth0"]].concat())?,
            }
        }
        Ok(())
    }

    /// Limits what a host sends to some kilobits a second, with a long queue, or ends that.
    pub(crate) fn throttle(&self, index: usize, kilobits: Option<u32>) -> Result<(), String> {
        let qdisc = ["netns", "exec", &self.names[index], "tc", "qdisc"];
        match kilobits {
            Some(kilobits) => {
                let rate = format!("{kilobits}kbit");
                let limits = ["add", "dev", "eth0", "root", "tbf", "rate", &rate, "burst", "4k", "limit", "1m"];
                ip(&[&qdisc[..], &limits].concat())
            }
            None => ip(&[&qdisc[..], &["delete", "dev", "eth0", "root"]].concat()),
        }
    }

    /// Connects a host to the switch, or pulls its cable.
    pub(crate) fn connect(&self, index: usize, state: &str) -> Result<(), String> {
        ip(&["-n", &self.switch, "link", "set", &format!("port{index}"), state])
    }

    /// Returns the processes of a host that run the example.
    fn workers(&self, index: usize) -> Result<Vec<u32>, String> {
        let output = Command::new("ip").args(["netns", "pids", &self.names[index]]).output().map_err(text)?;
        let pids = String::from_utf8_lossy(&output.stdout);
        let pids = pids.lines().filter_map(|pid| pid.trim().parse::<u32>().ok());
        let runs_example = |pid: &u32| {
            let program = std::fs::read_link(format!("/proc/{pid}/exe"));
            program.is_ok_and(|program| program.ends_with("examples/mnist"))
        };
        Ok(pids.filter(runs_example).collect())
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in self.names.iter().chain([&self.switch]) {
            // Those that were not made are not there.
            let _ = Command::new("ip").args(["netns", "delete", name]).output();
        }
    }
}

/// Returns a name of a namespace that no other process, and nothing else of this one, has.
fn unique(suffix: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("distribute-{}-{}-{suffix}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| format!("ip: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("ip {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// Returns the address of a host.
pub(crate) fn address(index: usize) -> String {
    format!("10.77.0.{}", index + 1)
}

struct Stage {
    programs: PathBuf,
    folder: PathBuf,
    hosts: Hosts,
}

impl Stage {
    /// Starts the launcher of a host: the same command on each.
    fn launcher(&self, index: usize, flags: &[&str], example: &[&str]) -> Result<Job, String> {
        let enter = "hostname \"$1\" && shift && exec \"$@\"";
        let name = format!("node-{index}");
        let launcher = self.programs.join("distribute");
        let mnist = self.programs.join("examples/mnist");
        let job = Job::builder("ip").args(["netns", "exec", &self.hosts.names[index], "unshare", "--uts"]);
        let job = job.args(["sh", "-c", enter, "sh", &name]).arg(launcher).arg("run").args(flags);
        // Shared memory would join hosts that real ones do not.
        let job = job.arg("--").arg(mnist).args(example).env("DISTRIBUTE_HOST_ID", name);
        job.start().map_err(text)
    }

    fn flags<'f>(&self, nodes: &'f str, rendezvous: &'f str) -> [&'f str; 8] {
        ["--nnodes", nodes, "--rendezvous", rendezvous, "--workers", nodes, "--grace", "5"]
    }

    /// Returns the losses of one host with as many workers.
    fn expected(&self, workers: usize, epochs: &str) -> Result<Vec<u32>, String> {
        let file = self.folder.join(format!("expected-{workers}-{epochs}"));
        let workers = workers.to_string();
        let job = Job::builder(self.programs.join("distribute")).args(["run", "--workers", &workers, "--"]);
        let job = job.arg(self.programs.join("examples/mnist")).args(["--epochs", epochs, "--losses"]).arg(&file);
        ended_well(&job.start().map_err(text)?.wait_all(DEADLINE).map_err(text)?)?;
        read(&file)
    }

    fn same_losses(&self, nodes: usize) -> Result<String, String> {
        let file = self.folder.join(format!("losses-{nodes}"));
        let example = ["--epochs", "1", "--losses", &file.to_string_lossy()];
        let (count, rendezvous) = (nodes.to_string(), format!("{}:29400", address(0)));
        let flags = self.flags(&count, &rendezvous);
        let mut jobs = Vec::new();
        // The leader is the last one.
        for index in (0..nodes).rev() {
            jobs.push(self.launcher(index, &flags, &example)?);
            if index == 1 {
                jobs[0].wait_for_line(0, "waiting for the leader", DEADLINE).map_err(text)?;
            }
        }
        for job in &mut jobs {
            ended_well(&job.wait_all(DEADLINE).map_err(text)?)?;
        }
        let (losses, expected) = (read(&file)?, self.expected(nodes, "1")?);
        compare(&losses, &expected)?;
        Ok(format!("the losses of one host, bit for bit ({}, the last {})", losses.len(), shown(&losses)))
    }

    fn lost_host(&self) -> Result<String, String> {
        let rendezvous = format!("{}:29401", address(0));
        let flags = self.flags("3", &rendezvous);
        let mut jobs =
            (0..3).map(|index| self.launcher(index, &flags, &["--epochs", "1000"])).collect::<Result<Vec<_>, _>>()?;
        jobs[0].wait_for_line(0, "epoch=2", DEADLINE).map_err(text)?;
        let began = Instant::now();
        self.hosts.connect(2, "down")?;
        let outcomes = self.all_end(&mut jobs);
        let took = began.elapsed().as_secs_f64();
        self.hosts.connect(2, "up")?;
        let outcomes = outcomes?;
        let codes: Vec<_> = outcomes.iter().map(|outcome| outcome.code).collect();
        if codes != [Some(138); 3] {
            return Err(format!("exit codes {codes:?}\n{}", shown_outcomes(&outcomes)));
        }
        let names_it = outcomes[0].stderr.contains("host node-2 is lost: no sign of life for 10 s");
        let stops = outcomes[2].stderr.contains("the leader is lost");
        match names_it && stops {
            true => Ok(format!("named, and all hosts ended with 138 within {took:.1} s of the cut")),
            false => Err(shown_outcomes(&outcomes)),
        }
    }

    /// Starts launchers on two hosts by ssh, from a third one.
    fn over_ssh(&self) -> Result<String, String> {
        const SSHD: &str = "/usr/sbin/sshd";
        if !Path::new(SSHD).exists() {
            return Ok("skipped: sshd is not installed (apt-get install openssh-server)".to_owned());
        }
        let key = self.folder.join("key").to_string_lossy().into_owned();
        let made =
            Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f", &key]).status().map_err(text)?;
        if !made.success() {
            return Err(format!("ssh-keygen ended with {made}"));
        }
        // sshd asks for the folder of its unprivileged part, which its service makes otherwise.
        std::fs::create_dir_all("/run/sshd").map_err(text)?;
        let server = |index: usize| {
            let job = Job::builder("ip").args(["netns", "exec", &self.hosts.names[index], SSHD, "-D", "-e"]);
            let job = job.args(["-f", "/dev/null", "-p", "2222", "-h", &key, "-o", "StrictModes=no", "-o"]);
            job.arg(format!("AuthorizedKeysFile={key}.pub")).start().map_err(text)
        };
        let servers = [server(1)?, server(2)?];
        for server in &servers {
            server.wait_for_line(0, "listening on 0.0.0.0", DEADLINE).map_err(text)?;
        }
        let ssh = format!(
            "--ssh=ssh -q -i '{key}' -p 2222 -o BatchMode=yes -o StrictHostKeyChecking=no \
             -o UserKnownHostsFile=/dev/null"
        );
        let file = self.folder.join("losses-ssh");
        let hosts = format!("{},{}", address(1), address(2));
        let job = Job::builder("ip").args(["netns", "exec", &self.hosts.names[0]]);
        let job = job.arg(self.programs.join("distribute")).args(["run", "--hosts", &hosts, &ssh, "-n", "2", "--"]);
        // All of them have this host's name, and its shared memory.
        let job = job.args(["env", "DISTRIBUTE_TRANSPORT=tcp"]).arg(self.programs.join("examples/mnist"));
        let job = job.args(["--epochs", "1", "--losses"]).arg(&file);
        ended_well(&job.start().map_err(text)?.wait_all(DEADLINE).map_err(text)?)?;
        drop(servers);
        let (losses, expected) = (read(&file)?, self.expected(2, "1")?);
        compare(&losses, &expected)?;
        Ok("the losses of one host, bit for bit".to_owned())
    }

    /// Starts three hosts with restarts allowed and checkpoints in a folder that they share.
    fn start_with_restarts(&self, port: u16, folder: &str) -> Result<(Vec<Job>, RestartFlags), String> {
        let checkpoints = self.folder.join(folder);
        let file = self.folder.join(format!("losses-{folder}"));
        let rendezvous = format!("{}:{port}", address(0));
        let mut flags: Vec<String> = self.flags("3", &rendezvous).map(str::to_owned).into();
        flags.extend(["--max-restarts", "2"].map(str::to_owned));
        let example = ["--epochs", "4", "--checkpoint-every", "100", "--checkpoints"].map(str::to_owned);
        let mut example: Vec<String> = example.into();
        let paths = [checkpoints.to_string_lossy(), "--losses".into(), file.to_string_lossy()];
        example.extend(paths.map(|text| text.into_owned()));
        let restart = RestartFlags { flags, example, losses: file };
        let jobs = (0..3).map(|index| restart.start(self, index)).collect::<Result<Vec<_>, _>>()?;
        jobs[0].wait_for_line(0, "epoch=1/4", DEADLINE).map_err(text)?;
        Ok((jobs, restart))
    }

    fn restarted(&self) -> Result<String, String> {
        let (mut jobs, restart) = self.start_with_restarts(29402, "restarted")?;
        let worker = *self.hosts.workers(1)?.first().ok_or("no worker runs on node-1")?;
        kill(worker)?;
        let outcomes = self.all_end(&mut jobs)?;
        restart.went_on(self, &outcomes)
    }

    fn replaced(&self) -> Result<String, String> {
        let (mut jobs, restart) = self.start_with_restarts(29403, "replaced")?;
        // The launcher of the host dies, and its tasks with it; then its manager starts it again.
        drop(jobs.remove(2));
        jobs[0].wait_for_line(0, "restart 1 of 2", DEADLINE).map_err(text)?;
        jobs.push(restart.start(self, 2)?);
        let outcomes = self.all_end(&mut jobs)?;
        restart.went_on(self, &outcomes)
    }

    fn all_end(&self, jobs: &mut [Job]) -> Result<Vec<Outcome>, String> {
        let one = |job: &mut Job| job.wait(0, DEADLINE).map_err(text);
        jobs.iter_mut().map(one).collect()
    }
}

/// A job that is started again after failures.
struct RestartFlags {
    flags: Vec<String>,
    example: Vec<String>,
    losses: PathBuf,
}

impl RestartFlags {
    fn start(&self, stage: &Stage, index: usize) -> Result<Job, String> {
        let [flags, example] =
            [&self.flags, &self.example].map(|list| list.iter().map(|it| &it[..]).collect::<Vec<_>>());
        stage.launcher(index, &flags, &example)
    }

    /// Checks that the job resumed from a checkpoint, and ended as if nothing had happened.
    fn went_on(&self, stage: &Stage, outcomes: &[Outcome]) -> Result<String, String> {
        ended_well(outcomes)?;
        let resumed = outcomes.iter().find_map(|outcome| outcome.stderr.lines().find(|line| line.contains("resuming")));
        let resumed = resumed.and_then(|line| line.rsplit_once("resuming ")).ok_or_else(|| shown_outcomes(outcomes))?.1;
        let (losses, expected) = (read(&self.losses)?, stage.expected(3, "4")?);
        compare(&losses, &expected)?;
        Ok(format!("resumed {resumed}; the losses of an undisturbed run, bit for bit"))
    }
}

fn kill(pid: u32) -> Result<(), String> {
    let status = Command::new("kill").args(["-9", &pid.to_string()]).status().map_err(text)?;
    if status.success() { Ok(()) } else { Err(format!("process {pid} cannot be killed")) }
}

fn ended_well(outcomes: &[Outcome]) -> Result<(), String> {
    match outcomes.iter().all(Outcome::success) {
        true => Ok(()),
        false => Err(shown_outcomes(outcomes)),
    }
}

fn shown_outcomes(outcomes: &[Outcome]) -> String {
    outcomes.iter().map(|outcome| format!("{:?}\n{}\n{}\n", outcome.code, outcome.stdout, outcome.stderr)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_scenario_has_is_refused() {
        let problem = run(&Flags { only: Some("no such host".to_owned()) }).unwrap_err();
        assert!(problem.contains("\"no such host\"") && problem.contains("two hosts over ssh"), "{problem}");
        assert_eq!(chosen(Some("restarts")).unwrap().len(), 2);
        assert_eq!(chosen(None).unwrap().len(), SCENARIOS.len());
    }

    #[test]
    fn hosts_that_are_not_missing_can_be_made() {
        match Hosts::missing() {
            Some(why) => distribute_testkit::skipped(why),
            None => assert_eq!(Hosts::create(2).map(|hosts| hosts.names.len()), Ok(2)),
        }
    }
}
