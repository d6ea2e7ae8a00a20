//! Starts the process that opens the plugin, and reads what it tells.

use std::io;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Step;
use crate::doctor::seen::{Seen, within};
use crate::doctor::self_test;

/// Begins the lines of the process, as opposed to those of the plugin.
pub(super) const MARK: &str = "distribute-pjrt ";

/// Returns the time that a plugin has. TPUs take several seconds.
pub(super) fn patience(chips: Option<u32>) -> Duration {
    Duration::from_secs(if chips.is_some() { 60 } else { 10 })
}

/// Returns the variables that the process gets in addition: without chips, those by which libtpu asks no metadata
/// server.
pub(super) fn added(seen: &Seen, chips: Option<u32>) -> Vec<(&'static str, &'static str)> {
    let unset = |(name, _): &(&str, &str)| chips.is_none() && seen.variable(name).is_none();
    WITHOUT_CHIPS.into_iter().filter(unset).collect()
}

/// Starts the process.
pub(super) fn start(added: &[(&str, &str)], patience: Duration) -> io::Result<Running> {
    // Not a path, since the file may have been replaced by a newer build.
    let mut command = Command::new("/proc/self/exe");
    command.arg("probe-pjrt").envs(added.iter().copied());
    run(command, patience)
}

fn run(mut command: Command, patience: Duration) -> io::Result<Running> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    // It ends by itself and says why; the rest is for one that cannot.
    Ok(Running { child, deadline: Instant::now() + patience + ANSWER })
}

/// The process.
pub(super) struct Running {
    child: Child,
    deadline: Instant,
}

/// The end of the process, and all that it told.
#[derive(Debug)]
pub(super) struct Ended {
    /// `None` if it had to be stopped.
    pub(super) status: Option<ExitStatus>,
    pub(super) steps: Vec<Step>,
    /// Other lines, of the plugin.
    pub(super) words: Vec<String>,
}

impl Ended {
    pub(super) fn of(running: Running) -> io::Result<Self> {
        let Running { mut child, deadline } = running;
        let (stdout, stderr) = (self_test::read(child.stdout.take()), self_test::read(child.stderr.take()));
        let status = self_test::wait(&mut child, deadline)?;
        let (mut steps, mut words) = (Vec::new(), Vec::new());
        // A process of the plugin's own may hold the pipes.
        let lines = |stream: JoinHandle<Vec<String>>| within(ANSWER, move || stream.join().unwrap_or_default());
        for line in lines(stdout).unwrap_or_default() {
            match line.strip_prefix(MARK).and_then(|json| serde_json::from_str(json).ok()) {
                Some(step) => steps.push(step),
                None if line.is_empty() => {}
                None => words.push(line),
            }
        }
        words.extend(lines(stderr).unwrap_or_default());
        Ok(Self { status, steps, words })
    }
}

/// Time for the process to report that the plugin took too long.
const ANSWER: Duration = Duration::from_secs(1);

/// Variables that libtpu reads instead of asking a metadata server, and one by which other processes may use it
/// meanwhile.
const WITHOUT_CHIPS: [(&str, &str); 5] = [
    ("TPU_SKIP_MDS_QUERY", "1"),
    ("TPU_ACCELERATOR_TYPE", "v5litepod-8"),
    ("TPU_WORKER_ID", "0"),
    ("TPU_WORKER_HOSTNAMES", "localhost"),
    ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
];

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Runs a shell in place of the process that opens a plugin.
    pub(crate) fn shell(script: &str, patience: Duration) -> Ended {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let mut running = run(command, patience).unwrap();
        running.deadline -= ANSWER;
        Ended::of(running).unwrap()
    }

    #[test]
    fn steps_are_told_from_what_the_plugin_prints() {
        let script = format!("echo hello; echo '{MARK}\"no_devices\"'; echo '{MARK}nonsense'; echo warning >&2");
        let ended = shell(&script, Duration::from_secs(60));
        assert_eq!(ended.steps, [Step::NoDevices]);
        assert_eq!(ended.words, ["hello".to_owned(), format!("{MARK}nonsense"), "warning".to_owned()]);
        assert!(ended.status.is_some_and(|status| status.success()));
    }

    #[test]
    fn libtpu_is_kept_from_the_metadata_server_only_without_chips_and_ones_own_settings_stay() {
        let seen = Seen::variables_only(&[("TPU_WORKER_ID", "3")]);
        let names: Vec<_> = added(&seen, None).iter().map(|(name, _)| *name).collect();
        assert!(names.contains(&"TPU_SKIP_MDS_QUERY") && !names.contains(&"TPU_WORKER_ID"), "{names:?}");
        assert_eq!(added(&seen, Some(4)), []);
    }
}
