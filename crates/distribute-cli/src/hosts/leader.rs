//! The launcher that decides for all hosts.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, select, unbounded};

use super::link::{Link, write_one};
use super::protocol::{Command, Hello, ToLeader, ToMember};
use super::rendezvous::{Door, Guest};
use super::roll_call::{Present, numbers};
use crate::error::Error;
use crate::outcome::signal_name;
use crate::signals::Signal;

/// The hosts of a job, as its leader sees them.
#[derive(Debug)]
pub(crate) struct Hosts {
    door: Door,
    /// The introduction of the leader's own host, if it has tasks.
    own: Option<Hello>,
    /// The command that every launcher must have been started with.
    command: Command,
    /// The hosts that are expected, if their names are known.
    expected: Vec<String>,
    /// The first host whose build of the program is known, and the digest of that build.
    build: Option<(String, u64)>,
    /// Launchers that have introduced themselves. They are let in once no news of others is left: one may take the
    /// place of a host whose loss has been told.
    introduced: VecDeque<Guest>,
    /// Hosts that wait for their numbers.
    waiting: Vec<Member>,
    /// Hosts by number.
    nodes: Vec<Node>,
    sender: Sender<(u64, Result<ToLeader, String>)>,
    inbound: Receiver<(u64, Result<ToLeader, String>)>,
    arrivals: u64,
    notes: Sender<String>,
}

#[derive(Debug)]
struct Member {
    id: u64,
    hello: Hello,
    address: String,
    link: Link,
}

#[derive(Debug)]
struct Node {
    host: String,
    address: String,
    link: Option<(u64, Link)>,
}

/// Why a launcher is not let in.
#[derive(Debug)]
struct Refusal {
    reason: String,
    /// Whether it may be let in later.
    for_now: bool,
}

impl Refusal {
    fn of(reason: String) -> Refusal {
        Refusal { reason, for_now: false }
    }
}

/// News of a host.
#[derive(Debug)]
pub(crate) struct FromHost {
    pub(crate) node: usize,
    pub(crate) report: Report,
}

/// A message of a host, or its loss.
#[derive(Debug)]
pub(crate) enum Report {
    Message(ToLeader),
    /// Its launcher is lost.
    Lost(String),
}

/// The event that ended a wait.
#[derive(Debug)]
pub(crate) enum Woken {
    Signal(Signal),
    Host(FromHost),
    /// The time is up, or something happened that the hosts have dealt with.
    Nothing,
}

impl Woken {
    /// Waits for a signal, or for news of a host if the job has several.
    pub(crate) fn wait(hosts: Option<&mut Hosts>, signals: &Receiver<Signal>, timeout: Duration) -> Woken {
        match hosts {
            Some(hosts) => hosts.wait(signals, timeout),
            None => signals.recv_timeout(timeout).map_or(Woken::Nothing, Woken::Signal),
        }
    }

    /// Returns the signal that asks to end the job, to this launcher or to that of another host.
    pub(crate) fn asks_to_end(&self) -> Option<i32> {
        let signal = match self {
            Woken::Signal(signal) => *signal,
            Woken::Host(FromHost { report: Report::Message(ToLeader::Signal(signal)), .. }) => Signal::from(*signal),
            Woken::Host(_) | Woken::Nothing => return None,
        };
        match signal {
            Signal::End(signal) => Some(signal),
            Signal::Child | Signal::Request(_) => None,
        }
    }
}

impl Hosts {
    /// Creates a job whose hosts are about to join. The leader's own host has tasks if `own` introduces it.
    pub(crate) fn new(
        door: Door,
        own: Option<Hello>,
        command: Command,
        expected: Vec<String>,
        notes: Sender<String>,
    ) -> Hosts {
        let (sender, inbound) = unbounded();
        let build = own.as_ref().and_then(|own| Some((own.host.clone(), own.program_digest?)));
        Hosts {
            door,
            own,
            command,
            expected,
            build,
            introduced: VecDeque::new(),
            waiting: Vec::new(),
            nodes: Vec::new(),
            sender,
            inbound,
            arrivals: 0,
            notes,
        }
    }

    /// Returns the number of the leader's own host.
    pub(crate) fn own_node(&self) -> Option<usize> {
        self.own.as_ref()?.node
    }

    /// Returns the names of the hosts, by number.
    pub(crate) fn names(&self) -> Vec<String> {
        self.nodes.iter().map(|node| node.host.clone()).collect()
    }

    /// Returns the addresses at which the hosts reach each other, by number.
    pub(crate) fn addresses(&self) -> Vec<String> {
        self.nodes.iter().map(|node| node.address.clone()).collect()
    }

    /// Returns whether a host's launcher is there.
    pub(crate) fn is_there(&self, node: usize) -> bool {
        Some(node) == self.own_node() || self.nodes.get(node).is_some_and(|node| node.link.is_some())
    }

    /// Waits until all hosts are there; tells every few seconds who is missing. `check` is called with the expected
    /// hosts that are missing, and may end the wait.
    ///
    /// # Errors
    /// [`Error::HostsMissing`] at the deadline, [`Error::Interrupted`] by a signal, and those of `check`.
    pub(crate) fn assemble(
        &mut self,
        signals: &Receiver<Signal>,
        patience: Duration,
        mut check: impl FnMut(&[&str]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let begun = Instant::now();
        let mut told = begun;
        loop {
            if self.number() {
                return Ok(());
            }
            check(&self.expected_missing())?;
            let waited = begun.elapsed();
            if waited >= patience {
                return Err(Error::HostsMissing { missing: self.missing(), waited });
            }
            if told.elapsed() >= TELL {
                told = Instant::now();
                let left = (patience - waited).as_secs();
                self.note(format!("waiting for {}, at most {left} s more", self.missing()));
            }
            // Other news is late, of an attempt that is over.
            if let Some(signal) = self.wait(signals, TELL.min(patience - waited)).asks_to_end() {
                return Err(Error::Interrupted { signal });
            }
        }
    }

    /// Waits for a signal, or for news of a host.
    pub(crate) fn wait(&mut self, signals: &Receiver<Signal>, timeout: Duration) -> Woken {
        let (guests, inbound) = (self.door.guests().clone(), self.inbound.clone());
        if let Ok((id, message)) = inbound.try_recv() {
            return self.receive(id, message);
        }
        if let Some(guest) = self.introduced.pop_front() {
            self.admit(guest);
            return Woken::Nothing;
        }
        select! {
            recv(signals) -> signal => signal.map_or(Woken::Nothing, Woken::Signal),
            recv(inbound) -> message => match message {
                Ok((id, message)) => self.receive(id, message),
                Err(_) => Woken::Nothing,
            },
            recv(guests) -> guest => {
                self.introduced.extend(guest);
                Woken::Nothing
            }
            default(timeout) => Woken::Nothing,
        }
    }

    /// Sends a message to a host, unless it is lost.
    pub(crate) fn send(&self, node: usize, message: &ToMember) {
        if let Some((_, link)) = self.nodes.get(node).and_then(|node| node.link.as_ref()) {
            link.send(message);
        }
    }

    /// Tells all launchers that the job has ended.
    pub(crate) fn end(self, code: u8, summary: &str) {
        let end = ToMember::End { code, summary: summary.to_owned() };
        let waiting = self.waiting.into_iter().map(|member| member.link);
        let links = self.nodes.into_iter().filter_map(|node| Some(node.link?.1)).chain(waiting);
        // All have the message before one of them is waited for.
        let links: Vec<_> = links.inspect(|link| link.send(&end)).collect();
        links.into_iter().for_each(Link::close);
    }

    fn note(&self, note: String) {
        // Fails only once the screen has ended.
        let _ = self.notes.send(note);
    }

    fn receive(&mut self, id: u64, message: Result<ToLeader, String>) -> Woken {
        let of_node = |node: &Node| node.link.as_ref().is_some_and(|(of, _)| *of == id);
        if let Some(node) = self.nodes.iter().position(of_node) {
            let report = match message {
                Ok(message) => {
                    if let ToLeader::Signal(signal) = message {
                        let host = &self.nodes[node].host;
                        self.note(format!("the launcher of host {host} was sent {}", signal_name(signal)));
                    }
                    Report::Message(message)
                }
                Err(why) => {
                    if let Some((_, link)) = self.nodes[node].link.take() {
                        link.cut();
                    }
                    Report::Lost(why)
                }
            };
            return Woken::Host(FromHost { node, report });
        }
        if let (Err(why), Some(at)) = (message, self.waiting.iter().position(|member| member.id == id)) {
            let member = self.waiting.remove(at);
            self.note(format!("host {} has left before the job began: {why}", member.hello.host));
            member.link.cut();
        }
        Woken::Nothing
    }

    /// Lets a launcher join, or refuses it.
    fn admit(&mut self, guest: Guest) {
        let Guest { stream, reader, peer, hello } = guest;
        let slot = match self.place(&hello) {
            Ok(slot) => slot,
            Err(Refusal { reason, for_now }) => {
                self.note(format!("host {} is refused: {reason}", hello.host));
                // It learns of the refusal by the end of the connection, too.
                let _ = write_one(&stream, &ToMember::Refused { reason, for_now });
                return;
            }
        };
        self.arrivals += 1;
        let (id, sender) = (self.arrivals, self.sender.clone());
        // Sending fails only while the launcher is ending.
        let received = move |message| drop(sender.send((id, message)));
        let Ok(link) = Link::start(stream, reader, received) else { return };
        match (&self.build, hello.program_digest) {
            (Some((first, known)), Some(digest)) if *known != digest => {
                self.note(format!("host {} has another build of the program than host {first}", hello.host));
            }
            (None, Some(digest)) => self.build = Some((hello.host.clone(), digest)),
            _ => {}
        }
        let address = hello.address.clone().unwrap_or_else(|| peer.to_string());
        match slot {
            Some(node) => {
                self.nodes[node] = Node { host: hello.host.clone(), address, link: Some((id, link)) };
                self.welcome(node);
                self.note(format!("host {} takes the place of the lost one", hello.host));
            }
            None => self.waiting.push(Member { id, hello, address, link }),
        }
    }

    /// Returns the number that a launcher takes over, or `None` if all of them are still to be given.
    fn place(&self, hello: &Hello) -> Result<Option<usize>, Refusal> {
        let nodes = self.command.nodes;
        if let Some(difference) = self.command.difference(&hello.command) {
            return Err(Refusal::of(format!("{difference}; start the same command on every host")));
        }
        if let Some(wanted) = hello.node.filter(|wanted| *wanted >= nodes) {
            return Err(Refusal::of(format!("--node-rank {wanted} is not below --nnodes {nodes}")));
        }
        if self.nodes.is_empty() {
            let present = self.waiting.iter().map(|member| &member.hello).chain(&self.own);
            let same = present.clone().find(|other| hello.node.is_some() && other.node == hello.node);
            return match same {
                Some(other) => Err(Refusal::of(format!("host {} has its --node-rank already", other.host))),
                None if present.count() < nodes => Ok(None),
                None => Err(Refusal::of(format!("{nodes} hosts have joined already"))),
            };
        }
        let lost = |node: &usize| !self.is_there(*node) && hello.node.is_none_or(|wanted| wanted == *node);
        let reason = || format!("all {nodes} hosts have joined already");
        // One of them may be lost without anybody knowing yet.
        let slot = (0..nodes).find(lost).ok_or_else(|| Refusal { reason: reason(), for_now: true });
        slot.map(Some)
    }

    /// Gives the hosts their numbers if all are there, and returns whether they are.
    fn number(&mut self) -> bool {
        if !self.nodes.is_empty() {
            return (0..self.nodes.len()).all(|node| self.is_there(node));
        }
        if self.waiting.len() + usize::from(self.own.is_some()) < self.command.nodes {
            return false;
        }
        let own = self.own.iter().map(|own| Present { host: &own.host, wanted: own.node, leads: true });
        let of_member = |member: &Member| (member.hello.host.clone(), member.hello.node);
        let others: Vec<_> = self.waiting.iter().map(of_member).collect();
        let others = others.iter().map(|(host, wanted)| Present { host, wanted: *wanted, leads: false });
        let given = numbers(&own.chain(others).collect::<Vec<_>>());
        let mut nodes: Vec<(usize, Node)> = Vec::new();
        let mut given = given.into_iter();
        if let Some(own) = &mut self.own {
            own.node = given.next();
            let address = own.address.clone().unwrap_or_default();
            nodes.extend(own.node.map(|number| (number, Node { host: own.host.clone(), address, link: None })));
        }
        for (member, number) in self.waiting.drain(..).zip(given) {
            let link = Some((member.id, member.link));
            nodes.push((number, Node { host: member.hello.host, address: member.address, link }));
        }
        nodes.sort_by_key(|(number, _)| *number);
        self.nodes = nodes.into_iter().map(|(_, node)| node).collect();
        (0..self.nodes.len()).for_each(|node| self.welcome(node));
        true
    }

    fn welcome(&self, node: usize) {
        self.send(node, &ToMember::Welcome { node, hosts: self.names() });
    }

    /// Returns the expected hosts that are missing, by their numbers.
    pub(crate) fn missing_nodes(&self) -> impl Iterator<Item = (usize, &str)> {
        let is_missing = |node: usize| match self.nodes.is_empty() {
            true => self.waiting.iter().all(|member| member.hello.node != Some(node)),
            false => !self.is_there(node),
        };
        let expected = self.expected.iter().enumerate();
        expected.filter(move |(node, _)| is_missing(*node)).map(|(node, name)| (node, &name[..]))
    }

    /// Returns the names of expected hosts that are missing.
    fn expected_missing(&self) -> Vec<&str> {
        self.missing_nodes().map(|(_, name)| name).collect()
    }

    /// Returns who is missing, in words.
    fn missing(&self) -> String {
        let (there, mut missing): (Vec<&str>, Vec<&str>) = match self.nodes.is_empty() {
            true => {
                let there: Vec<&str> =
                    self.waiting.iter().map(|it| &it.hello).chain(&self.own).map(|it| &it.host[..]).collect();
                (there, Vec::new())
            }
            false => {
                let (there, lost): (Vec<usize>, Vec<usize>) =
                    (0..self.nodes.len()).partition(|node| self.is_there(*node));
                let names = |nodes: Vec<usize>| nodes.into_iter().map(|node| &self.nodes[node].host[..]).collect();
                (names(there), names(lost))
            }
        };
        if self.nodes.is_empty() {
            missing = self.expected_missing();
        }
        let all = self.command.nodes;
        let joined = if there.is_empty() { String::new() } else { format!(" ({})", there.join(", ")) };
        let which = if missing.is_empty() { String::new() } else { format!(": {}", missing.join(", ")) };
        format!("{} of {all} hosts{which}; joined: {}{joined}", all - there.len(), there.len())
    }
}

/// How often missing hosts are named.
const TELL: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};

    use signal_hook::consts::{SIGTERM, SIGUSR2};

    use super::*;
    use crate::job::Roles;

    #[test]
    fn a_launcher_that_waits_for_others_is_not_missing() {
        let roles = Roles { workers: 2, ..Roles::default() };
        let command = Command { id: String::new(), nodes: 2, roles, program: vec!["train".to_owned()] };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let guest = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let hello = Hello::new("a".to_owned(), None, Some(0), command.clone(), None);
        write_one(&guest, &ToLeader::Hello(hello)).unwrap();
        let expected = vec!["a".to_owned(), "b".to_owned()];
        let (notes, _noted) = unbounded();
        let mut hosts = Hosts::new(Door::open(listener).unwrap(), None, command, expected, notes);
        let (_sender, signals) = unbounded();
        let begun = Instant::now();
        while hosts.waiting.is_empty() && begun.elapsed() < Duration::from_secs(20) {
            hosts.wait(&signals, Duration::from_millis(100));
        }
        assert_eq!(hosts.missing_nodes().collect::<Vec<_>>(), [(1, "b")]);
    }

    /// Returns a leader of launchers on this many hosts, of which its own is none; where they connect; and its notes.
    fn leader_without_tasks(nodes: usize) -> (Hosts, SocketAddr, Receiver<String>) {
        let command = Command { id: String::new(), nodes, roles: Roles::default(), program: Vec::new() };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (notes, noted) = unbounded();
        (Hosts::new(Door::open(listener).unwrap(), None, command, Vec::new(), notes), address, noted)
    }

    /// Handles news until something holds.
    fn wait_until(hosts: &mut Hosts, mut holds: impl FnMut(&mut Hosts) -> bool) {
        let (_sender, signals) = unbounded();
        let begun = Instant::now();
        while !holds(hosts) {
            assert!(begun.elapsed() < Duration::from_secs(20));
            hosts.wait(&signals, Duration::from_millis(10));
        }
    }

    /// Connects a launcher, and waits until it has introduced itself.
    fn introduce(hosts: &Hosts, address: SocketAddr, name: &str, digest: u64) -> TcpStream {
        let before = hosts.door.guests().len();
        let guest = TcpStream::connect(address).unwrap();
        let hello = Hello::new(name.to_owned(), None, None, hosts.command.clone(), Some(digest));
        write_one(&guest, &ToLeader::Hello(hello)).unwrap();
        let begun = Instant::now();
        while hosts.door.guests().len() == before && begun.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(1));
        }
        guest
    }

    #[test]
    fn a_launcher_takes_the_place_of_one_whose_loss_is_told_at_the_same_time() {
        let (mut hosts, address, noted) = leader_without_tasks(1);
        let mut links = vec![introduce(&hosts, address, "a", 1)];
        wait_until(&mut hosts, Hosts::number);
        for id in 1..=100 {
            links.push(introduce(&hosts, address, "a", 1));
            hosts.sender.send((id, Err("lost".to_owned()))).unwrap();
            wait_until(&mut hosts, |hosts| {
                assert!(noted.try_iter().all(|note| !note.contains("refused")), "{id}");
                hosts.arrivals > id
            });
        }
    }

    #[test]
    fn builds_of_the_program_are_compared_where_this_host_has_no_tasks() {
        let (mut hosts, address, noted) = leader_without_tasks(3);
        let _links = [("a", 1), ("b", 2), ("c", 1)].map(|(name, digest)| {
            let (link, before) = (introduce(&hosts, address, name, digest), hosts.arrivals);
            wait_until(&mut hosts, |hosts| hosts.arrivals > before);
            link
        });
        let notes: Vec<String> = noted.try_iter().collect();
        assert_eq!(notes, ["host b has another build of the program than host a"]);
    }

    #[test]
    fn only_a_request_to_end_ends_the_job_whichever_launcher_gets_it() {
        let of_host =
            |signal| Woken::Host(FromHost { node: 1, report: Report::Message(ToLeader::Signal(signal)) }).asks_to_end();
        assert_eq!([SIGTERM, SIGUSR2].map(of_host), [Some(SIGTERM), None]);
        let here = |signal: i32| Woken::Signal(signal.into()).asks_to_end();
        assert_eq!([SIGTERM, SIGUSR2].map(here), [Some(SIGTERM), None]);
        assert_eq!(Woken::Nothing.asks_to_end(), None);
    }
}
