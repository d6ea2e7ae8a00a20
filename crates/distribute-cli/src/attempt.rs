//! One start of a job's tasks, on this host and the others, to their end.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use distribute_cluster::JobId;

use crate::error::Error;
use crate::host::{Host, Start, TICK};
use crate::hosts::{FromHost, Hosts, Last, Report, ToLeader, ToMember, Woken};
use crate::job::{self, Addresses, LOOPBACK, Ports, Task};
use crate::local::{Event, Local};
use crate::outcome::{Exit, Outcome, Verdict, tells_of_another};
use crate::ports::Reserved;
use crate::process;
use crate::report;
use crate::restart::Budget;
use crate::ssh::Shells;
use crate::status::Status;
use crate::supervisor::{Action, Supervisor};

/// How an attempt ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) verdict: Verdict,
    /// One element per task, like the others.
    pub(crate) outcomes: Vec<Outcome>,
    pub(crate) pids: Vec<Option<i32>>,
    pub(crate) lasts: Vec<Last>,
    /// How often each was started again alone.
    pub(crate) restarts: Vec<u32>,
    /// The rest of the chief's budget.
    pub(crate) chief: Option<Budget>,
    /// The signal that asked to end the job, whatever its tasks have ended with.
    pub(crate) asked_to_end: Option<i32>,
}

impl Ended {
    /// Returns the exit of the first cause, and the launcher's exit code.
    pub(crate) fn exit(&self) -> (Exit, u8) {
        let code = self.verdict.exit_code(&self.outcomes);
        match self.verdict {
            Verdict::Cause(rank) => (self.outcomes[rank].exit, code),
            Verdict::Success | Verdict::Interrupted(_) => (Exit::Code(code.into()), code),
        }
    }
}

/// A start of all tasks that is about to happen.
pub(crate) struct Attempt<'a> {
    pub(crate) number: u32,
    pub(crate) host: &'a Host,
    pub(crate) tasks: &'a [Task],
    /// The other hosts, if there are any.
    pub(crate) hosts: Option<&'a mut Hosts>,
    pub(crate) shells: &'a mut Shells,
    pub(crate) status: &'a mut Status,
    /// The address at which the tasks of all hosts reach this launcher.
    pub(crate) reached_at: &'a str,
    pub(crate) grace: Duration,
    /// Whether the job does without a worker that is lost.
    pub(crate) coordinated: bool,
    /// How often its chief may be started again alone, on this host.
    pub(crate) chief: Option<Budget>,
    /// The time at which the launcher began.
    pub(crate) launched: Instant,
}

impl Attempt<'_> {
    /// Starts the tasks and supervises them until none is left.
    ///
    /// # Errors
    /// If a task cannot be started anywhere, or a host is lost before that.
    pub(crate) fn run(mut self) -> Result<Ended, Error> {
        // A new identity for each attempt: what is left of the last one cannot join it.
        let job = JobId::random().map_err(std::io::Error::other).map_err(Error::system("name the job"))?;
        let own = self.hosts.as_ref().map_or(Some(0), |hosts| hosts.own_node());
        let addresses = self.addresses(own)?;
        let begun = Instant::now();
        let reports_to = self.status.environment(self.reached_at).map(|(_, address)| address);
        let start = Start { addresses, job: job.name().to_owned(), attempt: self.number, reports_to };
        let local = match own {
            Some(node) => self.host.start(self.tasks, node, &start)?,
            None => Local::new(self.host.guardian()),
        };
        for node in self.others(own) {
            let Start { addresses, job, attempt, reports_to } = start.clone();
            self.send(node, &ToMember::Start { attempt, job, addresses, reports_to });
        }
        let mut pids = vec![None; self.tasks.len()];
        for (rank, pid, tail) in local.tails() {
            pids[rank] = Some(pid);
            self.status.started(rank, pid, Some(tail));
        }
        let workers = self.tasks.iter().filter(|task| self.coordinated && task.job == "worker");
        // A coordinator reschedules the work of a lost worker on another one.
        let mut supervisor =
            Supervisor::new(self.tasks.len(), self.grace).with_expendable(workers.map(|task| task.rank));
        if let (Some(budget), Some(chief)) = (self.chief.take(), self.tasks.iter().find(|task| task.job == "chief")) {
            let budget = budget.counted_from(begun.saturating_duration_since(self.launched));
            supervisor = supervisor.with_revivable(chief.rank, budget);
        }
        let mut running = Running {
            supervisor,
            start,
            again: None,
            lasts: self.tasks.iter().map(|task| Last { rank: task.rank, ..Last::default() }).collect(),
            untold: self.others(own).collect(),
            attempt: self,
            local,
            pids,
            own,
            begun,
            failure: None,
            late: None,
        };
        running.until_done();
        running.finish()
    }

    /// Lets all hosts reserve ports.
    fn addresses(&mut self, own: Option<usize>) -> Result<Addresses, Error> {
        let count = |node: usize| self.tasks.iter().filter(|task| task.node == node).count();
        let reserve = |node: usize, on: IpAddr| {
            let tasks = count(node);
            Reserved::new(tasks, on).map_err(|source| Error::Ports { tasks, source })
        };
        let Some(hosts) = &mut self.hosts else {
            let ports = reserve(0, Ipv4Addr::LOCALHOST.into())?.release();
            return Ok(Addresses { hosts: vec![LOOPBACK.to_owned()], ports: vec![ports] });
        };
        let names = hosts.names();
        let mut all: Vec<Option<Ports>> = vec![None; names.len()];
        (0..names.len()).for_each(|node| hosts.send(node, &ToMember::Prepare { attempt: self.number }));
        // Held until the others have theirs.
        let held = own.map(|node| reserve(node, Ipv4Addr::UNSPECIFIED.into())).transpose()?;
        let begun = Instant::now();
        let is_missing = |all: &[Option<Ports>]| {
            all.iter().enumerate().find(|(node, ports)| Some(*node) != own && ports.is_none()).map(|(node, _)| node)
        };
        while let Some(missing) = is_missing(&all) {
            let lost = |node: usize, why: String| Error::HostLost { host: names[node].clone(), why };
            let Some(left) = PREPARING.checked_sub(begun.elapsed()) else {
                return Err(lost(missing, format!("it reserved no ports within {} s", PREPARING.as_secs())));
            };
            if !hosts.is_there(missing) {
                return Err(lost(missing, "its launcher has ended".to_owned()));
            }
            let woken = hosts.wait(self.host.signals(), left.min(TICK));
            if let Some(signal) = woken.asks_to_end() {
                return Err(Error::Interrupted { signal });
            }
            match woken {
                Woken::Host(FromHost { node, report: Report::Message(ToLeader::Ready { attempt, ports }) }) => {
                    if attempt == self.number && ports.tasks.len() == count(node) {
                        all[node] = Some(ports);
                    }
                }
                Woken::Host(FromHost {
                    node,
                    report: Report::Message(ToLeader::Failed { attempt, problem, details, code }),
                }) if attempt == self.number => {
                    return Err(Error::Remote { host: names[node].clone(), problem, details, code });
                }
                Woken::Host(FromHost { node, report: Report::Lost(why) }) => return Err(lost(node, why)),
                Woken::Signal(_) | Woken::Host(_) | Woken::Nothing => {}
            }
        }
        if let (Some(node), Some(held)) = (own, held) {
            all[node] = Some(held.release());
        }
        Ok(Addresses { hosts: hosts.addresses(), ports: all.into_iter().flatten().collect() })
    }

    fn others(&self, own: Option<usize>) -> impl Iterator<Item = usize> + use<> {
        let nodes = self.hosts.as_ref().map_or(0, |hosts| hosts.names().len());
        (0..nodes).filter(move |node| Some(*node) != own)
    }

    fn send(&self, node: usize, message: &ToMember) {
        if let Some(hosts) = &self.hosts {
            hosts.send(node, message);
        }
    }
}

/// An attempt whose tasks run.
struct Running<'a> {
    attempt: Attempt<'a>,
    own: Option<usize>,
    local: Local<'a>,
    /// How the tasks were started.
    start: Start,
    /// The newest start of a task that was started again alone.
    again: Option<Local<'a>>,
    supervisor: Supervisor,
    pids: Vec<Option<i32>>,
    lasts: Vec<Last>,
    /// The other hosts that have not told yet what their tasks left behind.
    untold: Vec<usize>,
    begun: Instant,
    /// Why a host could not start its tasks.
    failure: Option<Error>,
    /// The signal that asked to end the job once no task was left.
    late: Option<i32>,
}

impl Running<'_> {
    fn until_done(&mut self) {
        loop {
            self.reap();
            self.supervisor.handle_timeout(self.begun.elapsed());
            while let Some(action) = self.supervisor.poll_action() {
                self.act(action);
            }
            self.attempt.status.poll();
            if self.supervisor.is_done() {
                return;
            }
            let timeout = self.supervisor.poll_timeout().map(|at| at.saturating_sub(self.begun.elapsed()));
            self.wait(timeout.unwrap_or(TICK).min(TICK));
        }
    }

    /// Collects what the tasks left behind.
    fn finish(mut self) -> Result<Ended, Error> {
        let begun = Instant::now();
        for last in self.local.lasts().into_iter().chain(self.again.as_ref().map(Local::lasts).unwrap_or_default()) {
            self.keep(last);
        }
        while let Some(left) = LASTS.checked_sub(begun.elapsed()) {
            let Some(hosts) = &mut self.attempt.hosts else { break };
            self.untold.retain(|node| hosts.is_there(*node));
            if self.untold.is_empty() {
                break;
            }
            let woken = hosts.wait(self.attempt.host.signals(), left);
            self.late = self.late.or(woken.asks_to_end());
            if let Woken::Host(FromHost { node, report: Report::Message(ToLeader::Ended { attempt, lasts }) }) = woken
                && attempt == self.attempt.number
            {
                self.told(node, lasts);
            }
        }
        for node in &self.untold {
            let host = self.host_name(*node);
            let waited = LASTS.as_secs();
            self.attempt.host.note(format!("host {host} has not told within {waited} s how its tasks ended"));
        }
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        let mut outcomes = self.supervisor.outcomes();
        for (outcome, last) in outcomes.iter_mut().zip(&self.lasts) {
            outcome.told = tells_of_another(&last.lines);
        }
        let verdict = Verdict::of(&outcomes, self.supervisor.interrupted());
        let (restarts, chief) = (self.supervisor.restarts(), self.supervisor.take_budget());
        let asked_to_end = self.supervisor.asked_to_end().or(self.late);
        Ok(Ended { verdict, outcomes, pids: self.pids, lasts: self.lasts, restarts, chief, asked_to_end })
    }

    /// Keeps what a host's tasks left behind.
    fn told(&mut self, node: usize, lasts: Vec<Last>) {
        self.untold.retain(|other| *other != node);
        let tasks = self.attempt.tasks;
        let is_of_node = |last: &Last| tasks.get(last.rank).is_some_and(|task| task.node == node);
        lasts.into_iter().filter(is_of_node).for_each(|last| self.keep(last));
    }

    fn keep(&mut self, last: Last) {
        if let Some(slot) = self.lasts.get_mut(last.rank) {
            *slot = last;
        }
    }

    fn wait(&mut self, timeout: Duration) {
        let signals = self.attempt.host.signals();
        match Woken::wait(self.attempt.hosts.as_deref_mut(), signals, timeout) {
            Woken::Nothing => {}
            Woken::Signal(signal) => self.supervisor.handle_signal(signal, self.begun.elapsed()),
            Woken::Host(news) => self.hear(news),
        }
    }

    fn reap(&mut self) {
        while let Some((pid, exit)) = process::reap() {
            let event = self.again.as_mut().and_then(|again| again.ended(pid, exit));
            match event.or_else(|| self.local.ended(pid, exit)) {
                Some(event) => self.handle(event),
                None => self.attempt.shells.ended(pid, exit),
            }
        }
        let gone = self.again.as_mut().map(Local::gone).unwrap_or_default();
        gone.into_iter().chain(self.local.gone()).for_each(|event| self.handle(event));
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Exit { rank, exit, leftover } => {
                self.attempt.status.ended(rank, exit);
                self.supervisor.handle_exit(rank, exit, leftover, self.begun.elapsed());
            }
            Event::Gone { rank } => self.supervisor.handle_gone(rank),
        }
    }

    /// Handles news of another host. What concerns another attempt, or another host's tasks, is left out.
    fn hear(&mut self, FromHost { node, report }: FromHost) {
        let number = self.attempt.number;
        let tasks = self.attempt.tasks;
        let is_of_node = |rank: usize| tasks.get(rank).is_some_and(|task| task.node == node);
        let of_node = || tasks.iter().filter(|task| task.node == node).map(|task| task.rank);
        match report {
            Report::Message(ToLeader::Exit { attempt, rank, exit, leftover })
                if attempt == number && is_of_node(rank) =>
            {
                self.handle(Event::Exit { rank, exit, leftover });
            }
            Report::Message(ToLeader::Gone { attempt, rank }) if attempt == number && is_of_node(rank) => {
                self.handle(Event::Gone { rank });
            }
            Report::Message(ToLeader::Started { attempt, pids }) if attempt == number => {
                for (rank, pid) in of_node().zip(pids) {
                    self.pids[rank] = Some(pid);
                    self.attempt.status.started(rank, pid, None);
                }
            }
            Report::Message(ToLeader::Failed { attempt, problem, details, code }) if attempt == number => {
                self.untold.retain(|other| *other != node);
                let host = self.host_name(node);
                self.failure.get_or_insert(Error::Remote { host, problem, details, code });
                of_node().for_each(|rank| {
                    self.supervisor.handle_exit(rank, Exit::Code(code.into()), false, self.begun.elapsed());
                });
            }
            Report::Message(ToLeader::Ended { attempt, lasts }) if attempt == number => self.told(node, lasts),
            Report::Message(ToLeader::Signal(signal)) => {
                self.supervisor.handle_signal(signal, self.begun.elapsed());
            }
            Report::Message(_) => {}
            Report::Lost(why) => {
                // Another launcher may take its place, which knows nothing of its tasks.
                self.untold.retain(|other| *other != node);
                self.attempt.host.note(format!("host {} is lost: {why}", self.host_name(node)));
                for rank in of_node() {
                    self.handle(Event::Exit { rank, exit: Exit::Lost, leftover: false });
                    self.handle(Event::Gone { rank });
                }
            }
        }
    }

    fn host_name(&self, node: usize) -> String {
        self.attempt.hosts.as_ref().and_then(|hosts| hosts.names().get(node).cloned()).unwrap_or_default()
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Start { rank, count } => {
                if let Err(error) = self.start_again(rank, count) {
                    self.failure.get_or_insert(error);
                    // As a shell says that it finds no program.
                    self.handle(Event::Exit { rank, exit: Exit::Code(127), leftover: false });
                }
            }
            Action::Signal { rank, signal } => {
                self.attempt.status.signalled(rank, signal);
                self.signal(rank, signal, false);
            }
            Action::SignalLeader { rank, signal } => self.signal(rank, signal, true),
            Action::Note(note) => {
                self.attempt.host.note(report::note(&note, self.attempt.tasks, self.attempt.grace));
            }
        }
    }

    /// Starts a task of this host again, with the same place in the job.
    fn start_again(&mut self, rank: usize, count: u32) -> Result<(), Error> {
        let Attempt { host, tasks, number, .. } = self.attempt;
        let (task, Start { addresses, job, reports_to, .. }) = (&tasks[rank], &self.start);
        let mut env = job::environment(tasks, task, addresses).ok_or(Error::Addresses)?;
        let shared = host.shared_environment(job, number + count, tasks.len());
        env.extend(shared.into_iter().map(|(name, value)| (name, Some(value))));
        env.extend(reports_to.as_ref().map(|address| ("DISTRIBUTE_STATUS_ADDR", Some(address.clone()))));
        // Its lines come before those of the next start.
        self.again.as_ref().unwrap_or(&self.local).wait_for_streams(|of| of == rank);
        let place = host.places(tasks.len())?.into_iter().nth(rank).flatten();
        let local = host.start_alone(task, number + count, env, place.as_ref())?;
        for (rank, pid, tail) in local.tails() {
            self.pids[rank] = Some(pid);
            self.attempt.status.started(rank, pid, Some(tail));
        }
        self.again = Some(local);
        Ok(())
    }

    fn signal(&self, rank: usize, signal: i32, leader_only: bool) {
        let node = self.attempt.tasks[rank].node;
        match Some(node) == self.own {
            true => {
                // One of them has ended.
                self.local.signal(rank, signal, leader_only);
                if let Some(again) = &self.again {
                    again.signal(rank, signal, leader_only);
                }
            }
            false => {
                let attempt = self.attempt.number;
                self.attempt.send(node, &ToMember::Signal { attempt, rank, signal, leader_only });
            }
        }
    }
}

/// How long the hosts have to reserve ports.
const PREPARING: Duration = Duration::from_secs(30);

/// How long the hosts have to tell what their tasks left behind.
const LASTS: Duration = Duration::from_secs(5);
