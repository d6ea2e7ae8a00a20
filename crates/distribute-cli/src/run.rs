//! `distribute run`: one job, on this host or several, started again when it fails and may be.

use std::ffi::OsString;
use std::hash::Hasher;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

use distribute_cluster::look_up;

use crate::args::Run;
use crate::attempt::{Attempt, Ended};
use crate::environment;
use crate::error::Error;
use crate::host::{Host, Settings};
use crate::hosts::{Command, Door, Hello, Hosts, Member, Role, Woken, find_role};
use crate::job::{LOOPBACK, Roles, Task};
use crate::outcome::{Exit, Verdict, signal_name};
use crate::output::{self, Output};
use crate::process;
use crate::report;
use crate::restart::{Budget, Decision};
use crate::ssh::{self, Shells};
use crate::status::{Reports, Status};

/// Runs a job to its end; returns the launcher's exit code.
pub(crate) fn run(args: &Run) -> Result<u8, Error> {
    args.check()?;
    refuse_to_train_alone(args)?;
    if let Some(elastic) = args.elastic {
        return crate::elastic::run(args, elastic);
    }
    let nodes = args.nodes();
    let workers = args.workers.unwrap_or_else(|| args.workers_per_node.unwrap_or(1) * nodes as u32);
    let roles = Roles { chief: args.chief.max(args.ps.min(1)), workers, ps: args.ps, evaluator: args.evaluator };
    if workers < nodes as u32 {
        return Err(Error::FewWorkers { workers, nodes });
    }
    let tasks = roles.tasks(nodes);
    let host = Host::new(settings(args), &tasks)?;
    let ended = match (args.hosts.as_deref(), args.rendezvous.as_deref()) {
        (Some(_), _) => over_ssh(args, &host, &tasks, roles),
        (None, Some(address)) if nodes > 1 => at_rendezvous(args, &host, &tasks, roles, address),
        (None, _) => {
            let status = status(args, &host, &tasks, Reports::OfThisHost)?;
            let shells = Shells::default();
            let reached_at = LOOPBACK;
            Job::new(args, &host, &tasks, shells, status, reached_at).run(None)
        }
    };
    host.close();
    let (code, text) = ended?;
    output::say(&text);
    Ok(code)
}

/// Refuses a single worker where this launcher is one of several processes of a job: each would train a copy of its
/// own, and all would seem to succeed.
fn refuse_to_train_alone(args: &Run) -> Result<(), Error> {
    let workers = args.elastic.map(|elastic| elastic.max).or(args.workers).or(args.workers_per_node);
    let is_alone = workers == Some(1) && args.chief == 0 && args.ps == 0 && args.nodes() == 1 && args.hosts.is_none();
    if !is_alone {
        return Ok(());
    }
    match environment::place_in_job()? {
        None => Ok(()),
        Some(place) => Err(Error::Options {
            problem: "a job of one worker in each of several processes: each would train alone",
            given: format!("{}: this is {} of {} processes", place.source, place.task(), place.world_size()),
            expected: "--nnodes N --rendezvous HOST:PORT for one job of all; or DISTRIBUTE_ALONE=1 if each is to \
                       train alone"
                .to_owned(),
        }),
    }
}

/// Returns how the tasks of a job are started and shown.
pub(crate) fn settings(args: &Run) -> Settings {
    Settings {
        program: args.program.clone(),
        log_dir: args.log_dir.clone(),
        only: args.only.clone(),
        quiet: args.quiet,
        timestamps: args.timestamps,
        cpus_per_worker: args.cpus_per_worker,
        progress: true,
        // Launchers of several hosts have no protected channel by which they could share one.
        tls: args.tls,
        draws_secret: args.hosts.is_none() && args.nodes() == 1,
    }
}

/// Says what protects the connections of a job on several hosts.
fn note_secret(host: &Host) {
    if !environment::gives_secret() && !environment::gives_certificate() {
        host.note(
            "the job has no secret, so that any process that reaches its ports can join it: set \
             DISTRIBUTE_JOB_SECRET_FILE on every host, use TLS, or run it in a private network"
                .to_owned(),
        );
    }
}

/// Starts the status page, if it is wanted.
pub(crate) fn status(args: &Run, host: &Host, tasks: &[Task], reports: Reports) -> Result<Status, Error> {
    Status::start(&args.status, tasks, &args.program[0], reports, &host.notes())
}

/// Runs a job whose launchers meet at an address.
fn at_rendezvous(args: &Run, host: &Host, tasks: &[Task], roles: Roles, address: &str) -> Result<(u8, String), Error> {
    let hello = hello(args, roles, args.node_rank.map(|rank| rank as usize), args.node_address.clone());
    let role = find_role(address).map_err(|source| Error::Rendezvous { address: address.to_owned(), source })?;
    match role {
        Role::Leader(listener) => {
            let refused = |source| Error::Rendezvous { address: address.to_owned(), source };
            let door = Door::open(listener).map_err(refused)?;
            let own_address = hello.address.clone().unwrap_or_else(|| host_of(address));
            let status = status(args, host, tasks, Reports::OfAllHosts)?;
            let (command, reached_at) = (hello.command.clone(), own_address.clone());
            let own = Hello { address: Some(own_address), ..hello };
            host.note(format!("this host leads the job at {address}"));
            note_secret(host);
            let mut hosts = Hosts::new(door, Some(own), command, Vec::new(), host.notes());
            let shells = Shells::default();
            let ended = Job::new(args, host, tasks, shells, status, &reached_at).run(Some(&mut hosts));
            finish(hosts, ended)
        }
        Role::Member => {
            let patience = Duration::from_secs(args.join_timeout.into());
            let grace = Duration::from_secs(args.grace.into());
            let rejoins = args.max_restarts() > 0;
            let code = Member { host, tasks, hello, address, patience, grace, rejoins }.serve()?;
            Ok((code, String::new()))
        }
    }
}

/// Runs a job on other hosts, whose launchers are started by `ssh` and join this one.
fn over_ssh(args: &Run, host: &Host, tasks: &[Task], roles: Roles) -> Result<(u8, String), Error> {
    let names = args.hosts.clone().unwrap_or_default();
    let refused = |address: &str| {
        let address = address.to_owned();
        move |source| Error::Rendezvous { address, source }
    };
    let (listener, address) = match args.rendezvous.as_deref() {
        Some(address) => match find_role(address).map_err(refused(address))? {
            Role::Leader(listener) => (listener, address.to_owned()),
            Role::Member => return Err(refused(address)(std::io::ErrorKind::AddrNotAvailable.into())),
        },
        None => {
            let first = names.first().map_or("", |name| name.rsplit('@').next().unwrap_or_default());
            let own = own_address_towards(first).map_err(refused(first))?;
            let listener = TcpListener::bind((own, 0)).map_err(refused(first))?;
            let address = listener.local_addr().map_err(refused(first))?;
            (listener, address.to_string())
        }
    };
    let door = Door::open(listener).map_err(refused(&address))?;
    let id = distribute_cluster::JobId::random().map_err(std::io::Error::other);
    let id = id.map_err(Error::system("name the job"))?.name().to_owned();
    let folder = std::env::current_dir().map_err(Error::system("read the current folder"))?;
    let program = ssh::own_program().map_err(Error::system("find this program's own file"))?;
    note_secret(host);
    // Before the first launcher is started, which an address that cannot be used would leave behind.
    let status = status(args, host, tasks, Reports::OfAllHosts)?;
    let remote = remote_command(args, program, &address, &id);
    let mut shells = Shells::new(&args.ssh_command(), &folder, &remote, &environment::paths())?;
    for (node, name) in names.iter().enumerate() {
        shells.start(host, name, node)?;
    }
    let command = Command { id, ..hello(args, roles, None, None).command };
    let mut hosts = Hosts::new(door, None, command, names, host.notes());
    let reached_at = host_of(&address);
    let mut job = Job::new(args, host, tasks, shells, status, &reached_at);
    let ended = job.run(Some(&mut hosts));
    let ended = finish(hosts, ended);
    job.shells.close(host);
    ended
}

/// Tells all launchers of the end.
fn finish(hosts: Hosts, ended: Result<(u8, String), Error>) -> Result<(u8, String), Error> {
    let (code, summary) = match &ended {
        Ok((0, _)) => (0, String::new()),
        Ok((code, text)) => {
            let error = text.lines().find(|line| line.contains("error:")).unwrap_or_default();
            (*code, format!("the job ended with exit code {code}: {}", console::strip_ansi_codes(error)))
        }
        Err(error) => (error.exit_code(), format!("the job ended: {error}")),
    };
    hosts.end(code, summary.trim_end_matches([':', ' ']));
    ended
}

/// Returns the command that the other hosts run: this one, told where to join.
fn remote_command(args: &Run, program: OsString, address: &str, id: &str) -> Vec<OsString> {
    let mut command: Vec<OsString> = vec![program, "run".into()];
    let mut option = |name: &str, value: String| command.push(format!("--{name}={value}").into());
    option("nnodes", args.nodes().to_string());
    option("rendezvous", address.to_owned());
    option("rendezvous-id", id.to_owned());
    let optional = [
        ("workers", args.workers),
        ("workers-per-node", args.workers_per_node),
        ("cpus-per-worker", args.cpus_per_worker),
    ];
    optional
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
        .for_each(|(name, value)| option(name, value.to_string()));
    for (name, value) in [
        ("chief", args.chief),
        ("ps", args.ps),
        ("evaluator", args.evaluator),
        ("grace", args.grace),
        ("join-timeout", args.join_timeout),
        ("max-restarts", args.max_restarts()),
    ] {
        option(name, value.to_string());
    }
    let texts = [("only", args.only.clone()), ("log-dir", args.log_dir.as_deref().map(path_text))];
    texts.into_iter().filter_map(|(name, value)| Some((name, value?))).for_each(|(name, value)| option(name, value));
    let switches = [("--timestamps", args.timestamps), ("--quiet", args.quiet)];
    command.extend(switches.into_iter().filter(|(_, on)| *on).map(|(name, _)| name.into()));
    command.push("--".into());
    command.extend(args.program.iter().cloned());
    command
}

fn path_text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Returns how this launcher introduces itself.
fn hello(args: &Run, roles: Roles, node: Option<usize>, address: Option<String>) -> Hello {
    let program: Vec<String> = args.program.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    let id = args.rendezvous_id.clone().unwrap_or_default();
    let command = Command { id, nodes: args.nodes(), roles, program };
    Hello::new(ssh::host_name(), address, node, command, digest(&args.program))
}

/// Returns a digest of the program's file, if it is one.
fn digest(program: &[OsString]) -> Option<u64> {
    let mut file = std::fs::File::open(program.first()?).ok()?;
    let mut hasher = twox_hash::XxHash3_64::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer).ok()? {
            0 => return Some(hasher.finish()),
            count => hasher.write(&buffer[..count]),
        }
    }
}

/// Returns the host of `host:port`, without the brackets of an IPv6 address.
fn host_of(address: &str) -> String {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']').to_owned()
}

/// Returns the address of the interface towards a host. Nothing is sent.
fn own_address_towards(host: &str) -> std::io::Result<IpAddr> {
    let found = look_up(&format!("{host}:22"), LOOKUP)?;
    let target = found.first().copied().unwrap_or(SocketAddr::from((Ipv4Addr::LOCALHOST, 22)));
    let any: IpAddr =
        if target.is_ipv6() { std::net::Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(target)?;
    Ok(socket.local_addr()?.ip())
}

/// A job, as the launcher that decides for it sees it.
struct Job<'a> {
    args: &'a Run,
    host: &'a Host,
    tasks: &'a [Task],
    shells: Shells,
    status: Status,
    /// The address at which the tasks of all hosts reach this launcher.
    reached_at: &'a str,
    begun: Instant,
    /// How often the chief was started again alone, in all attempts.
    chief_starts: u32,
    /// The rest of its budget of restarts alone, if any are allowed.
    chief: Option<Budget>,
}

impl<'a> Job<'a> {
    fn new(
        args: &'a Run,
        host: &'a Host,
        tasks: &'a [Task],
        shells: Shells,
        status: Status,
        reached_at: &'a str,
    ) -> Job<'a> {
        let chief = (args.chief_restarts > 0).then(|| budget(args, args.chief_restarts).of_option("--chief-restarts"));
        let begun = Instant::now();
        Job { args, host, tasks, shells, status, reached_at, begun, chief_starts: 0, chief }
    }

    /// Runs attempts until one ends well or no further one is allowed. Returns the exit code, and what to print last.
    fn run(&mut self, mut hosts: Option<&mut Hosts>) -> Result<(u8, String), Error> {
        let mut budget = budget(self.args, self.args.max_restarts());
        for number in 0.. {
            let ended = self.attempt(number, hosts.as_deref_mut());
            let exit = match &ended {
                Ok(ended) if matches!(ended.verdict, Verdict::Success | Verdict::Interrupted(_)) => {
                    return Ok((ended.exit().1, self.report(ended, hosts.as_deref())));
                }
                // Tasks may fail while they are being stopped, which does not start the job again.
                Ok(ended @ Ended { asked_to_end: Some(signal), .. }) => {
                    let why = match self.args.max_restarts() {
                        0 => String::new(),
                        _ => format!("distribute: not started again: {} has stopped the job\n", signal_name(*signal)),
                    };
                    return Ok((ended.exit().1, self.report(ended, hosts.as_deref()) + &why));
                }
                Ok(ended) => ended.exit().0,
                Err(error) if error.exit_code() == LOST => Exit::Lost,
                Err(_) => Exit::Code(CONFIGURATION),
            };
            let text = match &ended {
                Ok(ended) => self.report(ended, hosts.as_deref()),
                Err(error) => report::error(error),
            };
            match budget.after(exit, self.begun.elapsed()) {
                Decision::Restart { pause, count, of } => {
                    // Fails only once the screen has ended.
                    let _ = self.host.output().send(Output::Report(text));
                    let pause_text = pause.as_secs();
                    self.host.note(format!("starting the job again in {pause_text} s: restart {count} of {of}"));
                    self.pause(pause, hosts.as_deref_mut())?;
                }
                Decision::GiveUp(why) => {
                    let ended = ended?;
                    let why = if why.is_empty() { why } else { format!("distribute: not started again: {why}\n") };
                    return Ok((ended.exit().1, text + &why));
                }
            }
        }
        Err(Error::Addresses)
    }

    fn attempt(&mut self, number: u32, mut hosts: Option<&mut Hosts>) -> Result<Ended, Error> {
        if let Some(hosts) = hosts.as_deref_mut() {
            if number > 0 {
                self.start_lost_launchers(hosts)?;
            }
            let shells = &mut self.shells;
            let check = |missing: &[&str]| {
                while let Some((pid, exit)) = process::reap() {
                    shells.ended(pid, exit);
                }
                shells.check(missing)
            };
            hosts.assemble(self.host.signals(), Duration::from_secs(self.args.join_timeout.into()), check)?;
            if number == 0 {
                self.host.note(format!("all {} hosts have joined: {}", hosts.names().len(), hosts.names().join(", ")));
            }
        }
        let grace = Duration::from_secs(self.args.grace.into());
        let coordinated = self.args.ps > 0;
        let (chief, launched) = (self.chief.clone(), self.begun);
        // Each start has a number of its own, by which its logs are told apart.
        let number = number + self.chief_starts;
        let Job { host, tasks, shells, status, reached_at, .. } = self;
        let ended =
            Attempt { number, host, tasks, hosts, shells, status, reached_at, grace, coordinated, chief, launched }
                .run()?;
        self.chief_starts += ended.restarts.iter().sum::<u32>();
        self.chief = ended.chief.clone().or(self.chief.take());
        Ok(ended)
    }

    /// Starts the launchers of lost hosts again, if this one has started them.
    fn start_lost_launchers(&mut self, hosts: &Hosts) -> Result<(), Error> {
        let missing = hosts.missing_nodes().map(|(node, name)| self.shells.start(self.host, name, node));
        missing.collect()
    }

    fn report(&self, ended: &Ended, hosts: Option<&Hosts>) -> String {
        let names = hosts.map(Hosts::names).unwrap_or_default();
        let is_revived = ended.restarts.iter().any(|restarts| *restarts > 0);
        let line = |(at, task): (usize, &Task)| report::Line {
            task: *task,
            host: names.get(task.node).cloned(),
            pid: ended.pids[at],
            outcome: ended.outcomes[at],
            starts: is_revived.then(|| 1 + ended.restarts[at]),
            last: &ended.lasts[at],
        };
        let lines: Vec<_> = self.tasks.iter().enumerate().map(line).collect();
        report::report(&lines, ended.verdict)
    }

    /// Waits before a restart. A signal that asks to end the job does so, also one that was sent before, and however
    /// short the pause is.
    fn pause(&self, pause: Duration, mut hosts: Option<&mut Hosts>) -> Result<(), Error> {
        let begun = Instant::now();
        loop {
            let left = pause.saturating_sub(begun.elapsed());
            let woken = Woken::wait(hosts.as_deref_mut(), self.host.signals(), left);
            if let Some(signal) = woken.asks_to_end() {
                return Err(Error::Interrupted { signal });
            }
            if left.is_zero() && matches!(woken, Woken::Nothing) {
                return Ok(());
            }
        }
    }
}

/// Returns a budget of restarts with the window and the pauses that the user has given.
fn budget(args: &Run, most: u32) -> Budget {
    let seconds = |seconds: u32| Duration::from_secs(seconds.into());
    Budget::new(most, args.restart_window.map(seconds), seconds(args.restart_backoff))
}

const LOOKUP: Duration = Duration::from_secs(10);

/// The exit codes of errors that a restart may help against, and of those that it does not.
const LOST: u8 = 138;
const CONFIGURATION: i32 = 2;
