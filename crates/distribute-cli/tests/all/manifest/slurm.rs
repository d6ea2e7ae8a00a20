//! The script for sbatch: by a shell with commands of Slurm that only record, and by Slurm itself where it is
//! installed.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use distribute_testkit::{Slurm, skipped};
use tempfile::TempDir;

use super::{Environment, call, membership, print};

/// A folder with commands named srun and scontrol, which record how they are called.
pub(crate) struct Stage {
    folder: TempDir,
}

/// A script that ran.
pub(crate) struct Ran {
    /// The arguments of srun after `--`.
    pub(crate) arguments: Vec<String>,
    /// The variable A of srun.
    pub(crate) value: String,
    options: Vec<String>,
    code: i32,
    requeued: bool,
}

impl Stage {
    pub(crate) fn new() -> Stage {
        let stage = Stage { folder: tempfile::tempdir().unwrap() };
        let command = |name: &str, text: &str| {
            let path = stage.path(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        command(
            "srun",
            concat!(
                "#!/bin/bash\nprintf '%s\\0' \"$@\" > \"$STAGE/arguments\"\n",
                "printf '%s' \"$A\" > \"$STAGE/value\"\nexit \"$CODE\"\n"
            ),
        );
        command("scontrol", "#!/bin/bash\nprintf '%s' \"$*\" > \"$STAGE/requeued\"\n");
        stage
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs the script of a program with variables, whose tasks end with a code.
    pub(crate) fn run(&self, program: &[&str], variables: &[&str], code: i32) -> Ran {
        let flags: Vec<&str> = variables.iter().flat_map(|variable| ["--env", variable]).collect();
        self.run_with(&[&["-n", "2"], &flags[..]].concat(), program, code, None)
    }

    fn run_with(&self, flags: &[&str], program: &[&str], code: i32, restarts: Option<&str>) -> Ran {
        let script = self.path("script");
        fs::write(&script, print("slurm", &[&["--name", "null"], flags].concat(), program)).unwrap();
        let mut bash = Command::new("bash");
        let path = format!("{}:{}", self.folder.path().display(), std::env::var("PATH").unwrap());
        bash.arg(&script).env("PATH", path).env("STAGE", self.folder.path()).env("CODE", code.to_string());
        bash.env("SLURM_JOB_ID", "7").env_remove("SLURM_RESTART_COUNT").env_remove("A");
        if let Some(restarts) = restarts {
            bash.env("SLURM_RESTART_COUNT", restarts);
        }
        let output = bash.output().unwrap();
        let read = |name: &str| String::from_utf8(fs::read(self.path(name)).unwrap()).unwrap();
        let all = read("arguments");
        let mut all: Vec<String> = all.strip_suffix('\0').unwrap().split('\0').map(str::to_owned).collect();
        let arguments = all.split_off(all.iter().position(|argument| argument == "--").unwrap() + 1);
        all.pop();
        let requeued = fs::remove_file(self.path("requeued")).is_ok();
        Ran { arguments, value: read("value"), options: all, code: output.status.code().unwrap(), requeued }
    }
}

#[test]
fn a_script_has_the_options_of_sbatch() {
    let flags = [
        "--name",
        "mnist",
        "-n",
        "8",
        "--tasks-per-node",
        "4",
        "--cpus",
        "8",
        "--memory",
        "1500Mi",
        "--gpus",
        "2",
        "--time-limit",
        "30h",
        "--partition",
        "long",
        "--account",
        "a_1",
        "--grace",
        "120",
        "--port",
        "4000",
    ];
    let script = print("slurm", &flags, &["train"]);
    let option = |line: &'static str| script.lines().filter(|given| *given == format!("#SBATCH --{line}")).count();
    for line in [
        "job-name=mnist",
        "nodes=2",
        "ntasks=8",
        "ntasks-per-node=4",
        "cpus-per-task=8",
        "mem=6000M",
        "gpus-per-task=2",
        "time=1-06:00:00",
        "partition=long",
        "account=a_1",
        "signal=TERM@120",
        "open-mode=append",
        "requeue",
    ] {
        assert_eq!(option(line), 1, "{line}\n{script}");
    }
    assert_eq!(script.matches("#SBATCH").count(), 13);
    // sbatch reads no options below the first command.
    let commands = script.lines().skip_while(|line| line.starts_with('#') || line.is_empty());
    assert!(commands.into_iter().all(|line| !line.starts_with("#SBATCH")));
    assert!(script.contains("\nexport DISTRIBUTE_PORT=4000\n"), "{script}");
    let ran = Stage::new().run_with(&["-n", "2", "--cpus", "3"], &["-x"], 0, None);
    assert_eq!(ran.options, ["--kill-on-bad-exit=0", "--cpus-per-task=3"]);
    assert_eq!(Stage::new().run_with(&["-n", "2"], &["-x"], 0, None).options, ["--kill-on-bad-exit=0"]);
}

#[test]
fn a_script_requeues_what_a_restart_helps() {
    let stage = Stage::new();
    for code in [0, 1, 2, 101, 127] {
        let ran = stage.run(&["c"], &[], code);
        assert_eq!((ran.code, ran.requeued), (code, false));
    }
    for code in [137, 138, 143] {
        let ran = stage.run(&["c"], &[], code);
        assert_eq!((ran.code, ran.requeued), (0, true));
        let at = |restarts| stage.run_with(&["-n", "2", "--restarts", "5"], &["c"], code, Some(restarts));
        assert_eq!((at("4").requeued, at("5").requeued, at("5").code), (true, false, code));
        assert!(!stage.run_with(&["-n", "2", "--restarts", "0"], &["c"], code, None).requeued);
    }
}

/// Longest time of a step of the test.
const DEADLINE: Duration = Duration::from_secs(60);

/// Slurm with a folder for its scripts.
struct Cluster {
    slurm: Slurm,
    folder: TempDir,
}

impl Cluster {
    /// Starts Slurm, or says that it is not installed.
    fn start() -> Option<Cluster> {
        if let Some(program) = Slurm::missing() {
            skipped(format_args!("{program} is not installed (apt-get install slurm-wlm)"));
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        Some(Cluster { slurm: Slurm::start(folder.path()).unwrap(), folder })
    }

    fn command(&self, program: &str, args: &[&str]) -> Output {
        let mut command = Command::new(program);
        command.args(args).envs(self.slurm.environment()).current_dir(self.folder.path());
        // A job must not inherit what describes another.
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SLURM_") && name != "SLURM_CONF") {
            command.env_remove(name);
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        output
    }

    /// Waits until `found` finds something.
    fn wait<T>(&self, what: &str, mut found: impl FnMut() -> Option<T>) -> T {
        let began = Instant::now();
        loop {
            if let Some(found) = found() {
                return found;
            }
            let log = || fs::read_to_string(self.folder.path().join("slurm-1.out")).unwrap_or_default();
            assert!(began.elapsed() < DEADLINE, "no {what}: {}", log());
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Returns the environment that a task wrote.
fn environment(path: &Path) -> Option<Environment> {
    let text = fs::read_to_string(path).ok()?;
    let pairs = text.split('\0').filter_map(|pair| pair.split_once('='));
    Some(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
}

#[test]
fn slurm_starts_the_tasks_and_restarts_them_after_the_loss_of_one() {
    let Some(cluster) = Cluster::start() else { return };
    // The first time, one task has lost another.
    let task = r#"folder=$0; name=$folder/${SLURM_RESTART_COUNT:-first}-$SLURM_PROCID; env -0 > "$name.part"
        mv "$name.part" "$name"; [ -n "$SLURM_RESTART_COUNT" ] || exit 138"#;
    let [script, path] = ["mnist.sh", "x"].map(|name| cluster.folder.path().join(name));
    let (script, folder) = (script.to_str().unwrap(), path.parent().unwrap().to_str().unwrap());
    let flags = [
        "--name",
        "mnist",
        "-n",
        "2",
        "--tasks-per-node",
        "2",
        "--cpus",
        "1",
        "--time-limit",
        "5m",
        "--env",
        "A=it's $B",
    ];
    let output = call(&[&["slurm"], &flags[..], &["-o", script, "--", "bash", "-c", task, folder]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    cluster.command("sbatch", &["--test-only", script]);
    // The test itself took the first number.
    let job = String::from_utf8(cluster.command("sbatch", &["--parsable", script]).stdout).unwrap();
    let job = job.trim();
    check(&cluster, "first");
    // Slurm waits for two minutes before it starts a job anew.
    cluster.wait("requeued job", || {
        let state = cluster.command("squeue", &["--noheader", "--format", "%T %r", "--jobs", job]).stdout;
        (String::from_utf8(state).unwrap().trim() == "PENDING BeginTime").then_some(())
    });
    cluster.command("scontrol", &["update", &format!("JobId={job}"), "StartTime=now"]);
    check(&cluster, "1");
    cluster.wait("end", || {
        let shown = String::from_utf8(cluster.command("scontrol", &["show", "job", job]).stdout).unwrap();
        shown.contains("JobState=COMPLETED").then_some(())
    });
}

/// Checks the places of both tasks, from what they wrote.
fn check(cluster: &Cluster, attempt: &str) {
    let mut leaders = BTreeMap::new();
    for rank in 0..2 {
        let path = cluster.folder.path().join(format!("{attempt}-{rank}"));
        let environment = cluster.wait("task", || environment(&path));
        let found = membership(&environment);
        assert_eq!((found.rank, found.world_size(), found.source), (rank, 2, "Slurm"));
        assert_eq!(environment["A"], "it's $B");
        leaders.insert(found.leader_address.clone(), found.job_id());
    }
    assert_eq!(leaders.len(), 1, "{leaders:?}");
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let leader = leaders.keys().next().unwrap();
    assert!(leader.starts_with(&format!("{}:", host.trim().split('.').next().unwrap())), "{leader}");
}
