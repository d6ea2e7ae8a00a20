//! Starting the launchers of other hosts by the user's own `ssh`.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded};
use rustix::process::Pid;

use crate::error::Error;
use crate::host::Host;
use crate::local::STREAMS;
use crate::outcome::Exit;
use crate::output::{Follow, Stream, Tail, ends_within};
use crate::process;

/// The processes that start launchers on other hosts, and pass their output on.
#[derive(Debug, Default)]
pub(crate) struct Shells {
    /// The program and its arguments, before the host.
    program: Vec<String>,
    /// The folder that the hosts run it in, and what they run, both as a shell reads them.
    folder: String,
    command: String,
    /// The variables with the paths of the job's secret and certificate, and a space after each. The secret itself is
    /// never a part of a command, which other users of a host can see.
    paths: String,
    shells: Vec<Shell>,
}

#[derive(Debug)]
struct Shell {
    host: String,
    pid: Pid,
    exit: Option<Exit>,
    /// Whether another one was started for its host, so that its end says nothing about that host's launcher.
    is_superseded: bool,
    tail: Tail,
    /// Disconnected once its streams have ended.
    followed: Receiver<()>,
}

impl Shells {
    /// Describes the command for every host: `program` in the folder that the launcher is in. `paths` are the variables
    /// that name files on every host, as far as the user has given them.
    ///
    /// # Errors
    /// [`Error::Ssh`] if a part cannot be written for a shell.
    pub(crate) fn new(
        ssh: &str,
        folder: &Path,
        command: &[OsString],
        paths: &[(&str, OsString)],
    ) -> Result<Shells, Error> {
        let unusable = |given: &str| Error::Ssh { given: given.to_owned() };
        let program = shlex::split(ssh).filter(|parts| !parts.is_empty()).ok_or_else(|| unusable(ssh))?;
        let text =
            |part: &std::ffi::OsStr| part.to_str().map(str::to_owned).ok_or_else(|| unusable(&part.to_string_lossy()));
        let parts = command.iter().map(|part| text(part)).collect::<Result<Vec<_>, _>>()?;
        let quoted = |parts: &[&str]| shlex::try_join(parts.iter().copied()).map_err(|_| unusable(&parts.join(" ")));
        let folder = quoted(&[&text(folder.as_os_str())?])?;
        let parts: Vec<&str> = parts.iter().map(|part| &part[..]).collect();
        let path = |(name, path): &(&str, OsString)| {
            let path = text(path)?;
            Ok(format!("{} ", quoted(&[&format!("{name}={path}")])?))
        };
        let paths = paths.iter().map(path).collect::<Result<String, Error>>()?;
        Ok(Shells { program, folder, command: quoted(&parts)?, paths, shells: Vec::new() })
    }

    /// Starts the launcher of a host, and tells it its number.
    ///
    /// # Errors
    /// [`Error::Program`] or [`Error::Start`] if there is no such program.
    pub(crate) fn start(&mut self, this: &Host, host: &str, node: usize) -> Result<(), Error> {
        let mut program: Vec<OsString> = self.program.iter().map(OsString::from).collect();
        let (folder, command) = (&self.folder, &self.command);
        let paths = &self.paths;
        let remote = format!("cd {folder} && exec env DISTRIBUTE_NODE_RANK={node} {paths}{command}");
        program.extend([host.into(), remote.into()]);
        let is_over = |shell: &Shell| shell.host == host && shell.exit.is_some();
        let (ended, others): (Vec<Shell>, Vec<Shell>) = self.shells.drain(..).partition(is_over);
        self.shells = others;
        // Before the next one registers itself, which may get one of these ids.
        ended.iter().for_each(|shell| this.guardian().forget(shell.pid));
        let started = process::spawn(&program, Vec::new(), this.guardian());
        let started =
            started.map_err(|source| Error::start(&format!("the launcher of {host}"), &program[0], source))?;
        let tail = Tail::default();
        let (done, followed) = bounded(0);
        let follow = |stream| Follow {
            rank: None,
            stream,
            tail: tail.clone(),
            log: None,
            show: Some(this.output()),
            note: this.notes(),
            done: done.clone(),
        };
        let out = follow(Stream::Stdout).start(format!("{host}-stdout"), started.stdout);
        let err = out.and_then(|()| follow(Stream::Stderr).start(format!("{host}-stderr"), started.stderr));
        err.map_err(Error::system("start a thread"))?;
        for shell in self.shells.iter_mut().filter(|shell| shell.host == host) {
            shell.is_superseded = true;
        }
        let host = host.to_owned();
        self.shells.push(Shell { host, pid: started.pid, exit: None, is_superseded: false, tail, followed });
        Ok(())
    }

    /// Handles the end of a process, which may be one of these.
    pub(crate) fn ended(&mut self, pid: Pid, exit: Exit) {
        if let Some(shell) = self.shells.iter_mut().find(|shell| shell.pid == pid) {
            shell.exit = Some(exit);
        }
    }

    /// Returns an error if the launcher of one of these hosts has ended.
    ///
    /// # Errors
    /// [`Error::NoLauncher`].
    pub(crate) fn check(&self, hosts: &[&str]) -> Result<(), Error> {
        let ended = |shell: &&Shell| !shell.is_superseded && hosts.contains(&&shell.host[..]) && shell.exit.is_some();
        let Some(shell) = self.shells.iter().find(ended) else { return Ok(()) };
        let exit = shell.exit.map(|exit| exit.to_string()).unwrap_or_default();
        let last = shell.tail.lines().pop().unwrap_or_else(|| "it printed nothing".to_owned());
        Err(Error::NoLauncher { host: shell.host.clone(), program: self.program[0].clone(), exit, last })
    }

    /// Waits for the processes to end by themselves, once the launchers have been told to, and until what they have
    /// printed is shown. A connection that they share may hold a stream open, so this wait is limited as well.
    pub(crate) fn close(&mut self, this: &Host) {
        let deadline = Instant::now() + CLOSING;
        while self.shells.iter().any(|shell| shell.exit.is_none()) && Instant::now() < deadline {
            while let Some((pid, exit)) = process::reap() {
                self.ended(pid, exit);
            }
            // A signal shortens the wait for nothing but the next look.
            let _ = this.signals().recv_timeout(Duration::from_millis(100));
        }
        for shell in self.shells.iter().filter(|shell| shell.exit.is_none()) {
            process::signal_group(shell.pid, signal_hook::consts::SIGTERM);
        }
        let until = Instant::now() + STREAMS;
        for shell in &self.shells {
            ends_within(&shell.followed, until.saturating_duration_since(Instant::now()));
            this.guardian().forget(shell.pid);
        }
    }
}

/// How long the launchers of other hosts may take to end.
const CLOSING: Duration = Duration::from_secs(10);

/// Returns the name of this host.
pub(crate) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Returns the path of this program, for the other hosts to start the same.
pub(crate) fn own_program() -> io::Result<OsString> {
    std::env::current_exe().map(Into::into)
}
