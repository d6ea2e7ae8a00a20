//! The invariants, which hold for the events of all processes of a scenario.

use std::collections::BTreeMap;
use std::time::Duration;

use super::process::{Event, read_value};
use super::scenario::{Fault, HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, JOIN_TIMEOUT, STEP, Scenario, Stranger};
use super::world::{Known, Outcome};
use crate::Incarnation;

type Events = [(u64, usize, Event)];

/// The longest time of a message and its answer without a fault, in microseconds.
const DELAY: u64 = 60_000;

/// Checks a scenario; `end` is when all processes had ended.
pub(super) fn check(
    scenario: &Scenario,
    known: &[Known],
    events: &Events,
    end: Option<u64>,
) -> Result<Outcome, String> {
    let Some(end) = end else { return Err("a process has not ended in time".to_owned()) };
    let checked = Checked { scenario, known, events };
    checked.leaders()?;
    checked.joins()?;
    checked.exchanges()?;
    checked.values()?;
    checked.failures_are_seen()?;
    checked.failures_are_real()?;
    checked.calm()?;
    Ok(checked.outcome(end))
}

struct Checked<'a> {
    scenario: &'a Scenario,
    known: &'a [Known],
    events: &'a Events,
}

impl Checked<'_> {
    fn of(&self, process: usize) -> impl Iterator<Item = (u64, &Event)> {
        self.events.iter().filter(move |(_, of, _)| *of == process).map(|(at, _, event)| (*at, event))
    }

    fn joined(&self, process: usize) -> Option<(u64, Incarnation)> {
        self.of(process).find_map(|(at, event)| match event {
            Event::Joined { incarnation } => Some((at, *incarnation)),
            _ => None,
        })
    }

    /// Returns when a process was over, by itself or by a fault.
    fn over(&self, process: usize) -> Option<u64> {
        let ended = self.of(process).find(|(_, event)| **event == Event::Ends).map(|(at, _)| at);
        ended.into_iter().chain(self.known[process].gone).min()
    }

    fn leader_of(&self, incarnation: Incarnation) -> Option<usize> {
        self.events.iter().find(|(_, _, event)| *event == Event::Leads(incarnation)).map(|(_, process, _)| *process)
    }

    /// Only processes of the job that have proved its secret are admitted, and strangers are not.
    fn leaders(&self) -> Result<(), String> {
        for (at, process, event) in self.events {
            match event {
                Event::Joined { incarnation } => {
                    let leader = self.leader_of(*incarnation).ok_or("a member has joined a job without a leader")?;
                    let (member, leader) = (&self.known[*process].spec, &self.known[leader].spec);
                    if member.job != leader.job {
                        return Err(format!("process {process} of job {} has joined job {}", member.job, leader.job));
                    }
                    if member.secret != leader.secret {
                        return Err(format!("process {process} has joined without the secret"));
                    }
                }
                // Without a secret, nothing tells a recorded call from one that is made again.
                Event::Admitted if self.scenario.secret => {
                    let stranger = self.known[*process].stranger;
                    return Err(format!("process {process}, {stranger:?}, was admitted at {at}"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Each rank of a job is one process; one that has not joined has an error in time, which names the missing
    /// members.
    fn joins(&self) -> Result<(), String> {
        let mut ranks: BTreeMap<([u8; 16], u32), usize> = BTreeMap::new();
        for (at, process, event) in self.events {
            match event {
                Event::Joined { incarnation } => {
                    let rank = self.known[*process].spec.rank;
                    if let Some(other) = ranks.insert((incarnation.to_bytes(), rank), *process) {
                        return Err(format!("rank {rank} is held by the processes {other} and {process}"));
                    }
                    for rank in 0..self.scenario.ranks {
                        let there = |known: &Known| known.spec.rank == rank && known.started <= *at;
                        if !self.known.iter().any(there) {
                            return Err(format!("process {process} has joined before rank {rank} was there"));
                        }
                    }
                }
                Event::NotJoined { took, error, names } => {
                    let stopped = Duration::from_micros(self.stopped(*process) + 2 * STEP);
                    if *took > JOIN_TIMEOUT + Duration::from_secs(1) + stopped {
                        return Err(format!("process {process} has waited {took:?} to join: {error}"));
                    }
                    if names.as_ref().is_some_and(|names| !names.contains("worker:")) {
                        return Err(format!("an error names none of the missing: {error}"));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns how long a process was stopped, in all, or its clock leapt.
    fn stopped(&self, process: usize) -> u64 {
        let of = |fault: &Fault| match fault {
            Fault::Freeze { process: of, from, until } if *of == process => until - from,
            Fault::Leap { process: of, by, .. } if *of == process => *by,
            _ => 0,
        };
        self.scenario.faults.iter().map(of).sum()
    }

    /// No exchange ends before all have entered it, and each value is one that its member had given and not taken back.
    fn exchanges(&self) -> Result<(), String> {
        let slowest = DELAY + 2 * self.slowest() + 4 * STEP;
        for (at, process, event) in self.events {
            let Event::Passes { round, values, .. } = event else { continue };
            if values.len() != self.scenario.ranks as usize {
                return Err(format!("process {process} passes exchange {round} with {} values", values.len()));
            }
            let began = self.of(*process).filter(|(began, event)| {
                began <= at && matches!(event, Event::Enters { round: of, .. } if of == round)
            });
            let began = began.map(|(began, _)| began).max().unwrap_or(0);
            for (rank, value) in (0..).zip(values) {
                let Some([of_rank, of, of_round, attempt]) = read_value(value) else {
                    return Err(format!("process {process} gets a value that none gave: {value:?}"));
                };
                if of_rank != rank || of_round != *round {
                    return Err(format!(
                        "process {process} gets the value of rank {of_rank}, exchange {of_round} for {rank}, {round}"
                    ));
                }
                let entered = |(entered, event): (u64, &Event)| {
                    entered <= *at && *event == (Event::Enters { round: *round, attempt })
                };
                if !self.of(of as usize).any(entered) {
                    return Err(format!(
                        "process {process} passes exchange {round} before process {of} has entered it"
                    ));
                }
                let missed = self.of(of as usize).find_map(|(missed, event)| match event {
                    Event::Misses { round: of, attempt: which, .. } if of == round && *which == attempt => Some(missed),
                    _ => None,
                });
                // A message that takes it back may take its time.
                let cut =
                    self.scenario.faults.iter().any(|fault| matches!(fault, Fault::Cut { .. } | Fault::Freeze { .. }));
                if let Some(missed) = missed.filter(|missed| !cut && missed + slowest < began) {
                    return Err(format!(
                        "process {process}, which entered exchange {round} at {began}, counts process {of}, which gave \
                         up attempt {attempt} at {missed}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// A value that is read was put, and one's own is the last that one has put.
    fn values(&self) -> Result<(), String> {
        for (at, process, event) in self.events {
            let Event::Got { key, value } = event else { continue };
            let own = self.known[*process].spec.rank.to_string() == *key;
            let mut puts = self.events.iter().filter(|(put, of, event)| {
                put <= at && matches!(event, Event::Put { key: of_key, .. } if of_key == key) && (!own || of == process)
            });
            let last = puts.next_back().map(|(_, _, event)| event);
            if own && !matches!(last, Some(Event::Put { value: put, .. }) if put == value) {
                return Err(format!("process {process} reads {value:?} of key {key}, after {last:?}"));
            }
            if read_value(value).is_none_or(|[rank, ..]| rank.to_string() != *key) {
                return Err(format!("process {process} reads {value:?} of key {key}, which none put"));
            }
        }
        Ok(())
    }

    fn slowest(&self) -> u64 {
        let most = |fault: &Fault| if let Fault::Slow { most, .. } = fault { *most } else { 0 };
        self.scenario.faults.iter().map(most).max().unwrap_or(0)
    }

    /// A member that is gone, or stopped for long, is reported to all others in time.
    fn failures_are_seen(&self) -> Result<(), String> {
        let timeout = HEARTBEAT_TIMEOUT.as_micros() as u64;
        let stops: u64 = (0..self.known.len()).map(|process| self.stopped(process)).sum();
        let bound = timeout + timeout / 8 + 2 * HEARTBEAT_INTERVAL.as_micros() as u64;
        // Clocks differ by a twentieth; who is stopped itself notices later.
        let bound = bound * 11 / 10 + DELAY + 2 * self.slowest() + stops + 8 * STEP;
        for (process, known) in self.known.iter().enumerate() {
            let Some((joined, incarnation)) = self.joined(process) else { continue };
            let gone = known.gone.filter(|gone| *gone > joined && self.over(process) == Some(*gone));
            let frozen = self.scenario.faults.iter().find_map(|fault| match fault {
                Fault::Freeze { process: of, from, until } if *of == process && until - from > 2 * timeout + DELAY => {
                    Some((*from).max(joined))
                }
                _ => None,
            });
            let frozen = frozen.filter(|from| self.over(process).is_none_or(|over| over > from + bound));
            let Some(lost) = gone.into_iter().chain(frozen).min() else { continue };
            for other in (0..self.known.len()).filter(|other| *other != process) {
                let Some((other_joined, of)) = self.joined(other) else { continue };
                let until = lost.max(other_joined) + bound;
                let over = self.over(other);
                let knows = self.of(other).any(|(at, event)| at <= until && matches!(event, Event::Failure { .. }));
                if of == incarnation && !knows && over.is_none_or(|over| over > until) {
                    return Err(format!(
                        "process {process} was lost at {lost}, and process {other} does not know by {until}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// No process is reported to be lost without a reason.
    fn failures_are_real(&self) -> Result<(), String> {
        let timeout = HEARTBEAT_TIMEOUT.as_micros() as u64;
        // Silence in which a message may have been under way, or was about to be sent, counts too.
        let least =
            (timeout * 9 / 10).saturating_sub(HEARTBEAT_INTERVAL.as_micros() as u64 * 11 / 10 + DELAY + 4 * STEP);
        let mut stopped = 0;
        let caused = self.scenario.faults.iter().any(|fault| match fault {
            Fault::Kill { .. } | Fault::Vanish { .. } | Fault::Break { .. } => true,
            Fault::Freeze { from, until, .. } => {
                stopped += until - from;
                stopped > least
            }
            Fault::Cut { from, until, one, other, .. } => {
                stopped += if one == other { 0 } else { until - from };
                stopped > least
            }
            Fault::Slow { most, .. } => {
                stopped += most;
                stopped > least
            }
            Fault::Leap { .. } | Fault::Restart { .. } | Fault::Stranger { .. } => false,
        });
        // A member whose time to join is over leaves others behind.
        let given_up = self.events.iter().any(|(_, process, event)| {
            matches!(event, Event::NotJoined { .. }) && self.known[*process].stranger.is_none()
        });
        match self.events.iter().find(|(_, _, event)| matches!(event, Event::Failure { .. })) {
            Some((at, process, Event::Failure { rank })) if !caused && !given_up => {
                Err(format!("process {process} takes rank {rank} for lost at {at}, and it is there"))
            }
            _ => Ok(()),
        }
    }

    /// Without faults, whatever strangers do, all members join and exchange everything.
    fn calm(&self) -> Result<(), String> {
        let is_calm = |fault: &Fault| match fault {
            Fault::Stranger { kind, at } => match kind {
                // One that is there first takes the place of a member, or the port of the leader.
                Stranger::Twin { .. } => false,
                Stranger::OtherJob { rank: 0 } => *at > self.scenario.starts[0],
                Stranger::NoSecret { .. } | Stranger::FalseClaim { .. } | Stranger::Replay => self.scenario.secret,
                Stranger::WrongSecret { .. } => true,
                _ => true,
            },
            Fault::Leap { by, .. } => *by < 2_000_000,
            _ => false,
        };
        // A member that gives up an exchange that the others complete stays behind.
        if self.scenario.impatient || !self.scenario.faults.iter().all(is_calm) {
            return Ok(());
        }
        for process in 0..self.scenario.ranks as usize {
            let passed = self.of(process).filter(|(_, event)| matches!(event, Event::Passes { .. })).count();
            if passed != self.scenario.rounds as usize {
                return Err(format!(
                    "process {process} passes {passed} of {} exchanges, without a fault",
                    self.scenario.rounds
                ));
            }
        }
        Ok(())
    }

    fn outcome(&self, end: u64) -> Outcome {
        let count = |is: fn(&Event) -> bool| self.events.iter().filter(|(_, _, event)| is(event)).count() as u64;
        let refused = self
            .known
            .iter()
            .enumerate()
            .filter(|(process, known)| known.stranger.is_some() && self.joined(*process).is_none());
        let formed = (0..self.known.len()).any(|process| self.joined(process).is_some());
        Outcome {
            formed: u64::from(formed),
            failures: count(|event| matches!(event, Event::Failure { .. })),
            refused: refused.count() as u64,
            exchanges: count(|event| matches!(event, Event::Passes { .. })),
            virtual_seconds: end / 1_000_000,
        }
    }
}
