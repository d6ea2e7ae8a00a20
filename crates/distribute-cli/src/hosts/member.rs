//! A launcher that does what the leader tells it.

use std::io::BufReader;
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, select, unbounded};
use signal_hook::consts::SIGTERM;

use super::link::{Link, SILENCE, write_one};
use super::protocol::{Hello, ToLeader, ToMember};
use crate::error::Error;
use crate::host::{Host, Start, TICK};
use crate::job::Task;
use crate::local::{Event, Local};
use crate::ports::Reserved;
use crate::process;
use crate::signals::Signal;
use crate::supervisor::{Action, Supervisor};

/// A launcher that joins the leader of its job.
pub(crate) struct Member<'a> {
    pub(crate) host: &'a Host,
    pub(crate) tasks: &'a [Task],
    pub(crate) hello: Hello,
    /// The rendezvous address.
    pub(crate) address: &'a str,
    /// How long the leader may take to be there, and the other hosts after it.
    pub(crate) patience: Duration,
    pub(crate) grace: Duration,
    /// Whether it joins again when the leader is lost.
    pub(crate) rejoins: bool,
}

/// How a membership ended.
enum End {
    /// The leader says that the job has ended.
    Job { code: u8, summary: String },
    /// The leader is lost, after it has given this launcher a number or before.
    Lost { why: String, was_welcome: bool },
    /// All places of the job are taken.
    Full(String),
}

impl Member<'_> {
    /// Joins, and serves until the job has ended; returns the job's exit code.
    ///
    /// # Errors
    /// If the leader is not there in time, refuses this launcher, or is lost for good.
    pub(crate) fn serve(self) -> Result<u8, Error> {
        // When a leader was lost that had let this launcher in.
        let mut lost_at: Option<Instant> = None;
        loop {
            let (link, messages) = self.join()?;
            let (node, number, reserved, local, asked_to_end) = (None, 0, None, None, None);
            let end = Serving { member: &self, link: &link, node, number, reserved, local, asked_to_end }
                .until_end(&messages);
            match end {
                Ok(End::Job { code, summary }) => {
                    link.close();
                    if !summary.is_empty() {
                        self.host.note(summary);
                    }
                    return Ok(code);
                }
                Ok(End::Full(reason)) => {
                    link.cut();
                    // The leader may not have noticed yet that the connection with this launcher is lost.
                    let address = self.address.to_owned();
                    if !self.rejoins || lost_at.is_none_or(|at| at.elapsed() >= self.patience) {
                        return Err(Error::Refused { address, reason });
                    }
                    self.host.note(format!("the leader at {address} refuses this host for now: {reason}"));
                    self.pause(LATER)?;
                }
                Ok(End::Lost { why, was_welcome }) => {
                    link.cut();
                    if was_welcome {
                        lost_at = Some(Instant::now());
                    }
                    let lost = Error::LeaderLost { address: self.address.to_owned(), why };
                    if !self.rejoins {
                        return Err(lost);
                    }
                    self.host.note(format!("{lost}; joining again"));
                }
                Err(error) => {
                    link.close();
                    return Err(error);
                }
            }
        }
    }

    /// Connects to the leader, however much later than this launcher it starts.
    fn join(&self) -> Result<(Link, Receiver<Result<ToMember, String>>), Error> {
        let begun = Instant::now();
        let mut told = begun;
        let stream = loop {
            let why = match self.connect() {
                Ok(stream) => break stream,
                Err(error) => error.to_string(),
            };
            let waited = begun.elapsed();
            if waited >= self.patience {
                return Err(Error::NoLeader { address: self.address.to_owned(), waited, why });
            }
            if told.elapsed() >= TELL {
                told = Instant::now();
                let left = (self.patience - waited).as_secs();
                self.host.note(format!("waiting for the leader at {}, at most {left} s more: {why}", self.address));
            }
            self.pause(AGAIN)?;
        };
        let unusable = Error::system("use the connection to the leader");
        let reader = match stream.try_clone() {
            Ok(reader) => BufReader::new(reader),
            Err(error) => return Err(unusable(error)),
        };
        let (sender, messages) = unbounded();
        // Sending fails only while the launcher is ending.
        let link = Link::start(stream, reader, move |message| drop(sender.send(message)));
        Ok((link.map_err(unusable)?, messages))
    }

    fn connect(&self) -> std::io::Result<TcpStream> {
        let addresses = distribute_cluster::look_up(self.address, SILENCE)?;
        let mut last = std::io::Error::from(std::io::ErrorKind::NotFound);
        for address in addresses {
            match TcpStream::connect_timeout(&address, SILENCE) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    write_one(&stream, &ToLeader::Hello(self.hello.clone()))?;
                    return Ok(stream);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Waits; a signal that asks to end the job is an error.
    fn pause(&self, pause: Duration) -> Result<(), Error> {
        let begun = Instant::now();
        while let Some(left) = pause.checked_sub(begun.elapsed()) {
            match self.host.signals().recv_timeout(left) {
                Ok(Signal::Child | Signal::Request(_)) | Err(_) => {}
                Ok(Signal::End(signal)) => return Err(Error::Interrupted { signal }),
            }
        }
        Ok(())
    }
}

/// A launcher that has joined.
struct Serving<'a> {
    member: &'a Member<'a>,
    link: &'a Link,
    /// This host's number, once the leader has given it.
    node: Option<usize>,
    /// The attempt.
    number: u32,
    reserved: Option<Reserved>,
    local: Option<Local<'a>>,
    /// The signal that asked to end the job. The leader is told of it, and may be lost before it acts.
    asked_to_end: Option<i32>,
}

impl Serving<'_> {
    fn until_end(mut self, messages: &Receiver<Result<ToMember, String>>) -> Result<End, Error> {
        let signals = self.member.host.signals().clone();
        let joined = Instant::now();
        loop {
            self.reap();
            if self.node.is_none() && joined.elapsed() > self.member.patience + SILENCE {
                let address = self.member.address.to_owned();
                return Err(Error::NoLeader {
                    address,
                    waited: joined.elapsed(),
                    why: "it is there, but has not begun the job".to_owned(),
                });
            }
            select! {
                recv(signals) -> signal => match signal {
                    Ok(Signal::Child) | Err(_) => {}
                    Ok(Signal::End(signal)) if self.node.is_none() => return Err(Error::Interrupted { signal }),
                    Ok(signal) => self.pass_on(signal),
                },
                recv(messages) -> message => match message {
                    Ok(Ok(ToMember::End { code, summary })) => {
                        self.stop();
                        return Ok(End::Job { code, summary });
                    }
                    Ok(Ok(ToMember::Refused { reason, for_now: true })) => return Ok(End::Full(reason)),
                    Ok(Ok(ToMember::Refused { reason, for_now: false })) => {
                        return Err(Error::Refused { address: self.member.address.to_owned(), reason });
                    }
                    Ok(Ok(message)) => self.obey(message)?,
                    Ok(Err(why)) => return self.lost(why),
                    Err(_) => return self.lost("its connection has ended".to_owned()),
                },
                default(TICK) => {}
            }
        }
    }

    /// Tells the leader of a signal to this launcher.
    fn pass_on(&mut self, signal: Signal) {
        match signal {
            Signal::Child => {}
            Signal::Request(signal) => self.link.send(&ToLeader::Signal(signal)),
            Signal::End(signal) => {
                self.asked_to_end.get_or_insert(signal);
                self.link.send(&ToLeader::Signal(signal));
            }
        }
    }

    /// Stops the tasks without a leader. A launcher that was asked to end the job does not look for another one.
    fn lost(&mut self, why: String) -> Result<End, Error> {
        if self.local.is_some() {
            self.member.host.note(format!("the leader is lost ({why}); stopping the tasks of this host"));
        }
        self.stop();
        if let Some(signal) = self.asked_to_end {
            return Err(Error::Interrupted { signal });
        }
        let why = match self.node {
            Some(_) => why,
            None => format!("{why}, before it began the job; it was stopped, or another program uses this port"),
        };
        Ok(End::Lost { why, was_welcome: self.node.is_some() })
    }

    fn obey(&mut self, message: ToMember) -> Result<(), Error> {
        match message {
            ToMember::Welcome { node, hosts } => {
                let names = hosts.join(", ");
                self.member.host.note(format!("all {} hosts have joined ({names}); this one is {node}", hosts.len()));
                self.node = Some(node);
            }
            ToMember::Prepare { attempt } => {
                // What is left of an attempt that the leader has given up.
                self.stop();
                self.number = attempt;
                let own = |task: &&Task| Some(task.node) == self.node;
                let tasks = self.member.tasks.iter().filter(own).count();
                match Reserved::new(tasks, Ipv4Addr::UNSPECIFIED.into()) {
                    Ok(reserved) => {
                        self.link.send(&ToLeader::Ready { attempt, ports: reserved.ports().clone() });
                        self.reserved = Some(reserved);
                    }
                    Err(source) => self.fail(attempt, &Error::Ports { tasks, source }),
                }
            }
            ToMember::Start { attempt, job, addresses, reports_to } if attempt == self.number => {
                drop(self.reserved.take());
                let node = self.node.unwrap_or_default();
                let start = Start { addresses, job, attempt, reports_to };
                match self.member.host.start(self.member.tasks, node, &start) {
                    Ok(local) => {
                        let pids = local.pids().map(|(_, pid)| pid).collect();
                        self.link.send(&ToLeader::Started { attempt, pids });
                        self.local = Some(local);
                    }
                    Err(error) => self.fail(attempt, &error),
                }
            }
            ToMember::Signal { attempt, rank, signal, leader_only } if attempt == self.number => {
                if let Some(local) = &self.local {
                    local.signal(rank, signal, leader_only);
                }
            }
            // Of an attempt that is over.
            ToMember::Start { .. } | ToMember::Signal { .. } => {}
            ToMember::End { .. } | ToMember::Refused { .. } => {}
        }
        Ok(())
    }

    fn fail(&self, attempt: u32, error: &Error) {
        let details = error.details().into_iter().map(|(label, text)| (label.to_owned(), text)).collect();
        let (problem, code) = (error.to_string(), error.exit_code());
        self.link.send(&ToLeader::Failed { attempt, problem, details, code });
    }

    /// Reports the ends of tasks.
    fn reap(&mut self) {
        let attempt = self.number;
        while let Some((pid, exit)) = process::reap() {
            let event = self.local.as_mut().and_then(|local| local.ended(pid, exit));
            event.into_iter().for_each(|event| self.tell(event));
        }
        let Some(local) = &mut self.local else { return };
        local.gone().into_iter().for_each(|event| self.link.send(&message(attempt, event)));
        if local.is_done() {
            self.link.send(&ToLeader::Ended { attempt, lasts: local.lasts() });
            self.local = None;
        }
    }

    fn tell(&self, event: Event) {
        self.link.send(&message(self.number, event));
    }

    /// Ends tasks that the leader no longer supervises.
    fn stop(&mut self) {
        let Some(mut local) = self.local.take() else { return };
        let begun = Instant::now();
        let ranks: Vec<usize> = local.pids().map(|(rank, _)| rank).collect();
        let mut supervisor = Supervisor::new(ranks.len(), self.member.grace);
        let position = |rank: usize| ranks.iter().position(|it| *it == rank);
        let handle = |supervisor: &mut Supervisor, event: Event| match event {
            Event::Exit { rank, exit, leftover } => {
                position(rank).into_iter().for_each(|at| supervisor.handle_exit(at, exit, leftover, begun.elapsed()));
            }
            Event::Gone { rank } => position(rank).into_iter().for_each(|at| supervisor.handle_gone(at)),
        };
        local.so_far().for_each(|event| handle(&mut supervisor, event));
        supervisor.handle_signal(SIGTERM, begun.elapsed());
        while !supervisor.is_done() {
            while let Some((pid, exit)) = process::reap() {
                local.ended(pid, exit).into_iter().for_each(|event| handle(&mut supervisor, event));
            }
            local.gone().into_iter().for_each(|event| handle(&mut supervisor, event));
            supervisor.handle_timeout(begun.elapsed());
            while let Some(action) = supervisor.poll_action() {
                match action {
                    Action::Signal { rank, signal } => local.signal(ranks[rank], signal, false),
                    Action::SignalLeader { rank, signal } => local.signal(ranks[rank], signal, true),
                    Action::Note(_) | Action::Start { .. } => {}
                }
            }
            let timeout = supervisor.poll_timeout().map(|at| at.saturating_sub(begun.elapsed()));
            let signal = self.member.host.signals().recv_timeout(timeout.unwrap_or(TICK).min(TICK));
            if let Ok(signal) = signal {
                supervisor.handle_signal(signal, begun.elapsed());
                self.pass_on(signal);
            }
        }
    }
}

fn message(attempt: u32, event: Event) -> ToLeader {
    match event {
        Event::Exit { rank, exit, leftover } => ToLeader::Exit { attempt, rank, exit, leftover },
        Event::Gone { rank } => ToLeader::Gone { attempt, rank },
    }
}

/// How often a missing leader is named.
const TELL: Duration = Duration::from_secs(5);

/// The pause after a refusal for now.
const LATER: Duration = Duration::from_secs(1);

/// The pause between two attempts to reach the leader.
const AGAIN: Duration = Duration::from_millis(250);
