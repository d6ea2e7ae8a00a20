//! The processes of a job in virtual time.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use distribute_testkit::simulation::Random;
use tokio::runtime::{Builder, Runtime};

use super::invariants;
use super::process::{self, Event, Journal, PORT, Spec};
use super::scenario::{Fault, STEP, Scenario, Stranger};
use crate::net::{Link, Network, act_as};

/// When everybody has ended at the latest, in microseconds: all waits of a process together.
const END: u64 = 90_000_000;

pub(super) const SECRET: &str = "the secret of the simulated job";
pub(super) const JOB: &str = "simulated";

/// The result of a scenario.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outcome {
    /// Jobs that all members have joined.
    pub(super) formed: u64,
    /// Members that learned of a failure.
    pub(super) failures: u64,
    /// Strangers that were refused.
    pub(super) refused: u64,
    pub(super) exchanges: u64,
    pub(super) virtual_seconds: u64,
}

impl Outcome {
    pub(super) fn add(&mut self, other: &Outcome) {
        self.formed += other.formed;
        self.failures += other.failures;
        self.refused += other.refused;
        self.exchanges += other.exchanges;
        self.virtual_seconds += other.virtual_seconds;
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { formed, failures, refused, exchanges, virtual_seconds } = self;
        write!(f, "{formed} jobs formed, {failures} members learned of a failure, {refused} strangers were refused, ")?;
        write!(f, "{exchanges} exchanges, {virtual_seconds} s of virtual time")
    }
}

/// A process: an event loop whose clock advances step by step.
struct Process {
    runtime: Runtime,
    place: crate::net::Place,
    /// How much faster its clock is, in thousandths.
    drift: i64,
    /// Virtual time that it has slept through, stopped or suspended.
    missed: u64,
}

/// A process as the invariants see it.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub(super) spec: Spec,
    pub(super) stranger: Option<Stranger>,
    pub(super) started: u64,
    /// When it was killed, or its machine was gone.
    pub(super) gone: Option<u64>,
}

pub(super) struct World<'a> {
    scenario: &'a Scenario,
    network: Network,
    journal: Journal,
    random: Random,
    processes: Vec<Option<Process>>,
    known: Vec<Known>,
}

impl<'a> World<'a> {
    pub(super) fn new(scenario: &'a Scenario) -> World<'a> {
        let faults = scenario.faults.clone();
        let (slow, seed) = (faults.clone(), scenario.seed);
        let delays = move |now: u64, [connection, end, piece]: [u64; 3]| {
            let is_slow = |fault: &Fault| match fault {
                Fault::Slow { from, until, most } if (*from..*until).contains(&now) => *most,
                _ => 0,
            };
            let most = slow.iter().map(is_slow).max().unwrap_or(0).max(30_000);
            let mut random = Random::new(seed ^ (connection << 40) ^ (end << 32) ^ piece);
            Random::new(random.number()).between(500, most)
        };
        let is_open = move |link: &Link, at: u64| {
            !faults.iter().any(|fault| match fault {
                Fault::Cut { one, other, one_way, from, until } if (*from..*until).contains(&at) => {
                    let (one, other) = (host(*one), host(*other));
                    let forth = link.from == one && link.to == other;
                    // A process reaches itself.
                    one != other && (forth || !one_way && link.from == other && link.to == one)
                }
                _ => false,
            })
        };
        World {
            scenario,
            network: Network::new(Box::new(delays), Box::new(is_open)),
            journal: Journal::default(),
            random: Random::new(scenario.seed ^ 0x0707),
            processes: Vec::new(),
            known: Vec::new(),
        }
    }

    /// Runs the scenario, and checks what the processes have told.
    pub(super) fn run(mut self) -> Result<Outcome, String> {
        let end = self.play();
        let events = self.journal.events();
        let outcome = invariants::check(self.scenario, &self.known, &events, end);
        outcome.map_err(|problem| {
            let lines = events.iter().rev().take(40).rev();
            let lines: String =
                lines.map(|(at, process, event)| format!("\n    {at:>9} {process} {event:?}")).collect();
            format!("{problem}\nthe last events:{lines}")
        })
    }

    /// Returns what the processes have told, without what was drawn by the system.
    pub(super) fn trace(mut self) -> Vec<String> {
        self.play();
        let events = self.journal.events().into_iter();
        events
            .map(|(at, process, event)| match event {
                Event::Leads(_) => format!("{at} {process} leads"),
                Event::Joined { .. } => format!("{at} {process} joined"),
                event => format!("{at} {process} {event:?}"),
            })
            .collect()
    }

    /// Runs all processes until they have ended; returns when that was, `None` if some have not in time.
    fn play(&mut self) -> Option<u64> {
        let mut begins: Vec<(u64, usize, Option<Stranger>)> = Vec::new();
        for (rank, at) in self.scenario.starts.iter().enumerate() {
            begins.push((*at, rank, None));
        }
        for fault in &self.scenario.faults {
            match fault {
                Fault::Restart { rank, at } => begins.push((*at, *rank as usize, None)),
                Fault::Stranger { kind, at } => begins.push((*at, 0, Some(*kind))),
                _ => {}
            }
        }
        let mut done = vec![false; self.scenario.faults.len()];
        let mut begun = vec![false; begins.len()];
        // The numbers of processes are those of their descriptions.
        self.known = begins.iter().enumerate().map(|(process, begin)| self.describe(process, *begin)).collect();
        self.processes = begins.iter().map(|_| None).collect();
        let mut now = 0;
        while now < END {
            now += STEP;
            self.journal.set(now);
            for (process, (at, ..)) in begins.iter().enumerate() {
                if *at <= now && !begun[process] {
                    begun[process] = true;
                    self.start(process);
                }
            }
            for (place, fault) in self.scenario.faults.iter().enumerate() {
                if !done[place] && self.strike(fault, now) {
                    done[place] = true;
                }
            }
            self.network.advance(now);
            let mut order: Vec<usize> = (0..self.processes.len()).collect();
            for place in 1..order.len() {
                order.swap(place, self.random.between(0, place as u64 + 1) as usize);
            }
            for process in order {
                self.step(process, now);
            }
            if begun.iter().all(|begun| *begun) && self.processes.iter().all(Option::is_none) {
                return Some(now);
            }
        }
        act_as(None);
        None
    }

    fn describe(&self, process: usize, (started, rank, stranger): (u64, usize, Option<Stranger>)) -> Known {
        let Scenario { seed, ranks, secret, rounds, impatient, .. } = *self.scenario;
        let secret = secret.then_some(SECRET);
        let rank = rank as u32;
        let spec = Spec { process, rank, ranks, job: JOB, secret, rounds, seed, impatient, leads: rank == 0 };
        let other = |rank| Spec { rank, leads: false, ..spec.clone() };
        let spec = match stranger {
            // A leader of another job takes the address if it is free.
            Some(Stranger::OtherJob { rank }) => Spec { job: "another", leads: rank == 0, ..other(rank) },
            Some(Stranger::Twin { rank } | Stranger::FalseClaim { rank }) => other(rank),
            Some(Stranger::NoSecret { rank }) => Spec { secret: None, ..other(rank) },
            Some(Stranger::WrongSecret { rank }) => {
                Spec { secret: Some("another secret, of the same length"), ..other(rank) }
            }
            _ => spec,
        };
        Known { spec, stranger, started, gone: None }
    }

    fn start(&mut self, process: usize) {
        let Known { spec, stranger, .. } = &self.known[process];
        let place = self.network.place(process, if spec.leads { host(0) } else { host(process) });
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().expect("an event loop");
        // The job's leader is at the address of the process that began as rank 0.
        let (leader, journal, spec) = (host(0), self.journal.clone(), spec.clone());
        let address = SocketAddr::new(leader, PORT);
        act_as(Some(&place));
        match stranger {
            Some(Stranger::Garbage) => {
                let length = self.random.between(1, 300);
                let mut bytes: Vec<u8> = (0..length).map(|_| self.random.number() as u8).collect();
                // Some begin as members do.
                if self.random.percent(50) {
                    bytes.splice(..0, *[b"distcoor", b"dst-sec1"][self.random.between(0, 2) as usize]);
                }
                drop(runtime.spawn(process::caller(bytes, process, address, journal)));
            }
            Some(Stranger::Silent) => drop(runtime.spawn(process::caller(Vec::new(), process, address, journal))),
            Some(Stranger::Replay) => {
                let draw = self.random.number();
                drop(runtime.spawn(process::replay(self.network.clone(), draw, process, address, journal)));
            }
            Some(Stranger::FalseClaim { .. }) => drop(runtime.spawn(process::false_claim(spec, leader, journal))),
            _ => drop(runtime.spawn(process::member(spec, place.clone(), leader, journal))),
        }
        act_as(None);
        let drift = if self.scenario.clocks { self.random.between(0, 101) as i64 - 50 } else { 0 };
        self.processes[process] = Some(Process { runtime, place, drift, missed: 0 });
    }

    /// Makes a fault take place if it is time; returns whether it was.
    fn strike(&mut self, fault: &Fault, now: u64) -> bool {
        match *fault {
            Fault::Kill { process, at } if at <= now => {
                self.end(process, now);
                true
            }
            Fault::Vanish { process, at } if at <= now => {
                self.network.vanish(process);
                self.end(process, now);
                true
            }
            Fault::Leap { process, at, by } if at <= now => {
                if let Some(process) = &mut self.processes[process] {
                    process.missed += by;
                }
                true
            }
            Fault::Break { process, at, draw } if at <= now => {
                self.network.break_one(draw, |one, other| one == process || other == process)
            }
            _ => false,
        }
    }

    /// Ends a process at once.
    fn end(&mut self, process: usize, now: u64) {
        if let Some(ended) = self.processes[process].take() {
            act_as(Some(&ended.place));
            drop(ended.runtime);
            act_as(None);
            self.known[process].gone = Some(now);
        }
    }

    /// Runs a process for a step, unless it is stopped.
    fn step(&mut self, process: usize, now: u64) {
        let frozen = self.scenario.faults.iter().any(|fault| {
            matches!(fault, Fault::Freeze { process: frozen, from, until }
                if *frozen == process && (*from..*until).contains(&now))
        });
        let Some(running) = &mut self.processes[process] else { return };
        if frozen {
            running.missed += STEP;
            return;
        }
        act_as(Some(&running.place));
        let missed = std::mem::take(&mut running.missed);
        let own = STEP as i64 * (1000 + running.drift) / 1000;
        running.runtime.block_on(async move {
            if missed > 0 {
                tokio::time::advance(Duration::from_micros(missed)).await;
            }
            tokio::time::sleep(Duration::from_micros(own as u64)).await;
        });
        act_as(None);
        if self.journal.has_ended(process)
            && let Some(ended) = self.processes[process].take()
        {
            act_as(Some(&ended.place));
            drop(ended.runtime);
            act_as(None);
        }
    }
}

/// Returns the address of a process's machine.
pub(super) fn host(process: usize) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, process as u8 + 1).into()
}
