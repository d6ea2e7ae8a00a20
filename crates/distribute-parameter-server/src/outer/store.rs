//! The contents of a server of outer parameters: the islands that attend, what they have agreed on, and fragments.
//!
//! This module does not deal with connections.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use distribute_cluster::{Task, printable};
use distribute_strategy::OuterNesterov;
use parking_lot::Mutex;
use tokio::sync::watch;
use tonic::Status;

use super::fragment::{Origin, OuterFragment, Rules, Taken};
use super::held::{Held, Kept, check_variables, invalid, len_bytes, not_finite, read_values};
use crate::wire::Parts;
use crate::wire::proto::{
    AttendIsland, Caller, Changes, CreateFragment, Fragment, FragmentState, LeaveIsland, OuterSettings,
};

/// All contents of a server.
#[derive(Debug)]
pub(crate) struct OuterStore {
    /// Drawn when the process started.
    incarnation: u64,
    /// The islands of the cluster.
    islands: BTreeSet<Task>,
    /// Locked before a fragment.
    state: Mutex<State>,
    /// Notified when an outer step is made, and when an island comes or goes.
    changed: watch::Sender<()>,
}

#[derive(Debug)]
struct State {
    /// The settings that islands agree on, and the island that came first.
    agreed: Option<(Task, Settings)>,
    /// The attendance of each island that attends.
    seats: BTreeMap<Task, u64>,
    /// The process that each island has attended by last, and the last ones that others have replaced.
    processes: BTreeMap<Task, u64>,
    replaced: VecDeque<u64>,
    seats_given: u64,
    /// Islands that have attended, and those whose training has ended well.
    come: BTreeSet<Task>,
    done: BTreeSet<Task>,
    /// Instant at which the last island left, if none attends.
    alone_since: Instant,
    /// For each island how often its changes were too late.
    refusals: BTreeMap<Task, u64>,
    /// Fragments of a checkpoint that no island has joined yet.
    restored: BTreeMap<u32, Kept>,
    held: BTreeMap<u32, Arc<Held>>,
}

/// The settings that all islands must have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Settings {
    rules: Rules,
    fragments: u32,
}

/// A fragment that is being received.
#[derive(Default)]
pub(crate) struct Creating(Option<(Fragment, Parts)>);

/// An island's changes that are being received.
#[derive(Default)]
pub(crate) struct Receiving(Option<(Changes, Task, Arc<Held>, Parts)>);

/// An island's changes that have arrived.
pub(crate) struct Received {
    pub(crate) island: Task,
    pub(crate) held: Arc<Held>,
    /// The outer step whose values the island has.
    pub(crate) version: u64,
    /// `None` if it asks for the newest values only.
    pub(crate) taken: Option<Taken>,
}

/// How a server's service ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OuterEnd {
    /// All islands have attended and left, at least one of them after its training.
    Done,
    /// No island has attended for too long.
    Alone,
}

impl OuterStore {
    /// Creates a store for these islands, with the fragments of a checkpoint.
    pub(crate) fn new(
        incarnation: u64,
        now: Instant,
        islands: BTreeSet<Task>,
        restored: BTreeMap<u32, Kept>,
    ) -> OuterStore {
        let state = State {
            agreed: None,
            seats: BTreeMap::new(),
            processes: BTreeMap::new(),
            replaced: VecDeque::new(),
            seats_given: 0,
            come: BTreeSet::new(),
            done: BTreeSet::new(),
            alone_since: now,
            refusals: BTreeMap::new(),
            restored,
            held: BTreeMap::new(),
        };
        OuterStore { incarnation, islands, state: Mutex::new(state), changed: watch::Sender::new(()) }
    }

    /// Returns the number that identifies this process.
    pub(crate) fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Returns a receiver of changes that happen from now on.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Begins the attendance of an island, and ends an earlier one of the same.
    pub(crate) fn attend(&self, request: &AttendIsland) -> Result<(Task, u64), Status> {
        let island = self.island(&request.island)?;
        let settings = request.settings.as_ref().ok_or_else(|| invalid("an attendance without settings"))?;
        let settings = Settings::of(settings, self.islands.len())?;
        let mut state = self.state.lock();
        if state.replaced.contains(&request.process) {
            return Err(replaced(island));
        }
        if state.seats.is_empty() && state.held.is_empty() {
            // Islands that are started again may have corrected them.
            state.agreed = None;
        }
        match state.agreed {
            Some((first, agreed)) => agreed.check(first, settings, island)?,
            None => state.agreed = Some((island, settings)),
        }
        let earlier = state.processes.insert(island, request.process).filter(|earlier| *earlier != request.process);
        state.replaced.extend(earlier);
        if state.replaced.len() > REPLACED_KEPT {
            state.replaced.pop_front();
        }
        state.seats_given += 1;
        let seat = state.seats_given;
        state.seats.insert(island, seat);
        state.come.insert(island);
        state.done.remove(&island);
        drop(state);
        self.changed.send_replace(());
        Ok((island, seat))
    }

    /// Returns whether this is an island's current attendance.
    pub(crate) fn attends(&self, island: Task, seat: u64) -> bool {
        self.state.lock().seats.get(&island) == Some(&seat)
    }

    /// Ends the attendance of an island that is lost, unless another one has begun.
    pub(crate) fn lose(&self, island: Task, seat: u64, now: Instant) {
        self.end_attendance(island, seat, now, false);
    }

    /// Ends the attendance of an island that leaves.
    pub(crate) fn leave(&self, request: &LeaveIsland, now: Instant) -> Result<(), Status> {
        let (island, seat) = self.admit(request.caller.as_ref())?;
        self.end_attendance(island, seat, now, request.done);
        Ok(())
    }

    fn end_attendance(&self, island: Task, seat: u64, now: Instant, done: bool) {
        let mut state = self.state.lock();
        if state.seats.get(&island) != Some(&seat) {
            return;
        }
        state.seats.remove(&island);
        if done {
            state.done.insert(island);
        }
        if state.seats.is_empty() {
            state.alone_since = now;
        }
        drop(state);
        self.changed.send_replace(());
    }

    /// Returns whether a fragment is here, if it is like that of the caller.
    pub(crate) fn join(&self, request: &Fragment) -> Result<FragmentState, Status> {
        let (island, _) = self.admit(request.caller.as_ref())?;
        let settings = self.check_fragment(request)?;
        let mut state = self.state.lock();
        state.check_agreed(settings, island)?;
        if let Some(kept) = state.restored.get(&request.fragment) {
            check_variables(request.fragment, island, &kept.known(), &request.variables)?;
            let kept = state.restored.remove(&request.fragment).unwrap_or_default();
            let variables = kept.known();
            let fragment = OuterFragment::new(&settings.rules, kept.values, kept.momentum, kept.version);
            let held = Held::new(variables, settings.rules, fragment.sent_after(kept.sent_after));
            state.held.insert(request.fragment, Arc::new(held));
        }
        match state.held.get(&request.fragment) {
            Some(held) => {
                check_variables(request.fragment, island, &held.variables, &request.variables)?;
                let fragment = held.state.lock();
                Ok(FragmentState { held: true, version: fragment.version(), sent_after: fragment.steps_of(island) })
            }
            None => Ok(FragmentState::default()),
        }
    }

    /// Receives the values of a fragment, or a part of them, and creates it once all have arrived; then returns whether
    /// it was here before, and has stayed as it is.
    pub(crate) fn create(
        &self,
        creating: &mut Creating,
        mut message: CreateFragment,
    ) -> Result<Option<FragmentState>, Status> {
        let part = std::mem::take(&mut message.payload);
        let (fragment, mut parts) = match creating.0.take() {
            Some(coming) => coming,
            None => {
                let fragment = message.fragment.ok_or_else(|| invalid("values of no fragment"))?;
                self.admit(fragment.caller.as_ref())?;
                self.check_fragment(&fragment)?;
                let parts = Parts::up_to(len_bytes(&fragment.variables)?);
                (fragment, parts)
            }
        };
        parts.push(part)?;
        if message.more {
            creating.0 = Some((fragment, parts));
            return Ok(None);
        }
        let (island, _) = self.admit(fragment.caller.as_ref())?;
        let settings = self.check_fragment(&fragment)?;
        let values = read_values(parts, len_bytes(&fragment.variables)?)?;
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Err(invalid(not_finite(island, "outer parameters", &fragment.variables, at)));
        }
        let number = fragment.fragment;
        let joined = self.join(&fragment)?;
        if joined.held {
            return Ok(Some(joined));
        }
        let created = OuterFragment::new(&settings.rules, values, Vec::new(), 0);
        let created = Arc::new(Held::new(fragment.variables, settings.rules, created));
        // Another island may have been faster by now; the first one's values count.
        let held = {
            let mut state = self.state.lock();
            state.check_agreed(settings, island)?;
            state.held.entry(number).or_insert_with(|| created.clone()).clone()
        };
        let version = held.state().0;
        Ok(Some(FragmentState { held: !Arc::ptr_eq(&held, &created), version, sent_after: 0 }))
    }

    /// Receives an island's changes, or a part of them; returns what becomes of them once all have arrived.
    pub(crate) fn receive(
        &self,
        receiving: &mut Receiving,
        mut message: Changes,
        now: Instant,
    ) -> Result<Option<Received>, Status> {
        let (part, more) = (std::mem::take(&mut message.payload), message.more);
        let (about, island, held, mut parts) = match receiving.0.take() {
            Some(coming) => coming,
            None => {
                let (island, _) = self.admit(message.caller.as_ref())?;
                let held = self.held(message.fragment)?;
                let parts = Parts::up_to(held.expected_bytes(&message));
                (message, island, held, parts)
            }
        };
        parts.push(part)?;
        if more {
            receiving.0 = Some((about, island, held, parts));
            return Ok(None);
        }
        // The island may be given up by now.
        self.admit(about.caller.as_ref())?;
        self.advance(&held, now);
        let version = about.version;
        if about.examples == 0 {
            return Ok(Some(Received { island, held, version, taken: None }));
        }
        let changes = held.decode(&about, parts)?;
        let process = self.state.lock().processes.get(&island).copied().unwrap_or_default();
        let taken = {
            let mut fragment = held.state.lock();
            if !fragment.is_finite() {
                return Err(Status::failed_precondition(format!(
                    "the outer parameters of fragment {} are no longer finite after {} outer steps; lower the outer \
                     learning rate, and start again from a checkpoint",
                    about.fragment,
                    fragment.version()
                )));
            }
            let from = Origin { island, version, examples: about.examples, steps: about.steps, process };
            fragment.take(now, &held.rules, from, changes).map_err(|unfit| held.describe(about.fragment, island, unfit))
        }?;
        if let Taken::TooLate { late } = taken {
            *self.state.lock().refusals.entry(island).or_default() += 1;
            tracing::warn!(
                "changes of fragment {} by {island} were refused: they are {late} outer steps late, and {} are allowed",
                about.fragment,
                held.rules.staleness
            );
        }
        self.advance(&held, now);
        Ok(Some(Received { island, held, version, taken: Some(taken) }))
    }

    /// Makes the outer step of a fragment if it is due.
    pub(crate) fn advance(&self, held: &Held, now: Instant) {
        let known: BTreeSet<Task> = self.state.lock().seats.keys().copied().collect();
        let is_made = held.state.lock().advance(now, &held.rules, &known);
        if is_made {
            self.changed.send_replace(());
        }
    }

    /// Returns how often an island's changes were too late.
    pub(crate) fn refusals(&self, island: Task) -> u64 {
        self.state.lock().refusals.get(&island).copied().unwrap_or(0)
    }

    /// Returns copies of all fragments, for a checkpoint: those that no island has joined, too.
    pub(crate) fn kept(&self) -> BTreeMap<u32, Kept> {
        let (mut all, held) = {
            let state = self.state.lock();
            (state.restored.clone(), state.held.clone())
        };
        all.extend(held.into_iter().map(|(number, held)| (number, held.kept())));
        all
    }

    /// Returns the sum of all fragments' outer steps.
    pub(crate) fn outer_steps(&self) -> u64 {
        let (restored, held) = {
            let state = self.state.lock();
            (state.restored.values().map(|kept| kept.version).sum::<u64>(), state.held.clone())
        };
        held.values().fold(restored, |steps, held| steps.saturating_add(held.state.lock().version()))
    }

    /// Returns how the service ends, or else for how long no island has attended, if none does.
    pub(crate) fn end(&self, now: Instant, timeout: Duration) -> Result<OuterEnd, Option<Duration>> {
        let state = self.state.lock();
        if !state.seats.is_empty() {
            return Err(None);
        }
        let alone = now.saturating_duration_since(state.alone_since);
        let have_all_come = state.come.is_superset(&self.islands);
        match state.done.is_empty() {
            false if have_all_come || alone >= timeout => Ok(OuterEnd::Done),
            true if alone >= timeout => Ok(OuterEnd::Alone),
            _ => Err(Some(alone)),
        }
    }

    /// Returns the island of a call, unless it has been given up or replaced.
    fn admit(&self, caller: Option<&Caller>) -> Result<(Task, u64), Status> {
        let caller = caller.ok_or_else(|| invalid("a call of no island"))?;
        let island = self.island(&caller.island)?;
        match self.state.lock().seats.get(&island) {
            Some(seat) if *seat == caller.seat => Ok((island, *seat)),
            Some(_) => Err(replaced(island)),
            None => Err(Status::not_found(format!("{island} does not attend, or was silent for too long"))),
        }
    }

    fn island(&self, name: &str) -> Result<Task, Status> {
        let island = name.parse().ok().filter(|island| self.islands.contains(island));
        island.ok_or_else(|| {
            let known: Vec<String> = self.islands.iter().map(Task::to_string).collect();
            let (name, known) = (printable(name, 80), known.join(", "));
            Status::permission_denied(format!("{name} is not an island of the cluster, which has {known}"))
        })
    }

    /// Checks the number of a fragment and the size of its variables.
    fn check_fragment(&self, fragment: &Fragment) -> Result<Settings, Status> {
        let settings = self.state.lock().agreed.map(|(_, settings)| settings);
        let settings = settings.ok_or_else(|| invalid("a fragment before an attendance"))?;
        if fragment.fragment >= settings.fragments || fragment.variables.is_empty() {
            let (number, count) = (fragment.fragment, fragment.variables.len());
            let problem = format!("fragment {number} of {} with {count} variables", settings.fragments);
            return Err(invalid(problem));
        }
        len_bytes(&fragment.variables)?;
        Ok(settings)
    }

    fn held(&self, fragment: u32) -> Result<Arc<Held>, Status> {
        let held = self.state.lock().held.get(&fragment).cloned();
        held.ok_or_else(|| Status::failed_precondition(format!("fragment {fragment} has not been joined")))
    }
}

impl State {
    /// Checks that a fragment is made with the settings that islands agree on now.
    fn check_agreed(&self, settings: Settings, island: Task) -> Result<(), Status> {
        match self.agreed {
            Some((_, agreed)) if agreed == settings => Ok(()),
            _ => Err(Status::aborted(format!(
                "{island} was given up while its call arrived, and islands have agreed on other settings since"
            ))),
        }
    }
}

impl Settings {
    fn of(given: &OuterSettings, islands: usize) -> Result<Settings, Status> {
        let outer = OuterNesterov { learning_rate: given.learning_rate, momentum: given.momentum };
        outer.check().map_err(|error| invalid(error.to_string()))?;
        let quorum = given.quorum as usize;
        if quorum == 0 || quorum > islands || given.fragments == 0 {
            let fragments = given.fragments;
            return Err(invalid(format!("a quorum of {quorum} of {islands} islands, and {fragments} fragments")));
        }
        let grace = Duration::from_micros(given.grace_us);
        let rules = Rules { outer, quorum, grace, staleness: given.staleness };
        Ok(Settings { rules, fragments: given.fragments })
    }

    /// Compares an island's settings with those of the first one.
    fn check(&self, first: Task, given: Settings, island: Task) -> Result<(), Status> {
        if *self == given {
            return Ok(());
        }
        let told = |of: &Settings| {
            let Rules { outer, quorum, grace, staleness } = of.rules;
            format!("{outer:?}, quorum {quorum}, grace {grace:?}, staleness {staleness}, fragments {}", of.fragments)
        };
        Err(Status::permission_denied(format!(
            "{island} has ({}), and {first}, which came first, ({}); give every island the same",
            told(&given),
            told(self)
        )))
    }
}

fn replaced(island: Task) -> Status {
    Status::aborted(format!("another process attends as {island} by now; give each task one process"))
}

/// The number of replaced processes that a server remembers, so that none of them takes its place back.
const REPLACED_KEPT: usize = 1024;

#[cfg(test)]
mod tests;
