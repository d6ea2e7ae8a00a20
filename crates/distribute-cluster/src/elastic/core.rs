//! The state machine of a process of an elastic job. It has no clock, no socket and no random numbers: it is told what
//! happens and when, and returns what is to be done.
//!
//! Each generation decides the next one. Under a majority that is one decision by Paxos, whose acceptors are the
//! members of the generation; a proposer's first phase also finds out which of them are there. A register decides by
//! itself, and the first phase is that question alone. Rules on which safety rests:
//!
//! - A promise and a vote belong to a join number. A process that has lost its memory has lost its join number too.
//! - A proposer sends one value under a ballot ([`Core::begin`] takes a later one each time).
//! - Members vote only in the newest generation that they know, and only for proposals of its members.
//! - A process does not begin to train in a generation once it has proposed the next one without having begun. Since a
//!   step needs all members, none was made in a generation that the next one does not know to have trained.
//!
//! # Source
//! L. Lamport, "Paxos Made Simple" (2001), and the reconfiguration of L. Lamport, D. Malkhi and L. Zhou, "Vertical
//! Paxos and Primary-Backup Replication" (2009), in that the members of one configuration decide the next.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::generation::{Candidate, Change, Generation};

mod acceptor;
mod ending;
mod joiner;
mod learner;
mod message;
mod proposer;

pub(super) use message::{Action, Ballot, Event, Message, Promise};

use acceptor::Acceptor;
use joiner::{Joiner, Waiting};
use learner::Spread;
use proposer::Attempt;

/// Settings that do not change while a process runs.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) min: usize,
    pub(super) max: usize,
    pub(super) join_window: Duration,
    pub(super) answer_window: Duration,
    pub(super) join_timeout: Duration,
    /// Whether a majority decides; else a register does.
    pub(super) majority: bool,
    pub(super) seeds: Vec<String>,
    /// The seed that this process is, if it may decide the first generation.
    pub(super) seat: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Joining,
    Member,
    /// It has asked to leave, and its wish was granted.
    Left,
    Ended,
}

/// A process of an elastic job. Times are since any moment that stays the same.
pub(super) struct Core {
    settings: Settings,
    own: Candidate,
    role: Role,
    /// The newest generation that is known to be decided; generation 0 has the seeds.
    base: Arc<Generation>,
    /// The change that made `base` of the generation before.
    last_change: Option<Arc<Change>>,
    /// This process's join number in `base`, by which it votes.
    seat: Option<u64>,
    started: Duration,
    acceptor: Acceptor,
    attempt: Option<Attempt>,
    /// The latest ballot that this process has seen in `base`.
    highest: Ballot,
    /// The latest ballot under which it has sent a value.
    sent: Option<Ballot>,
    /// Whether this process has begun to train in `base`.
    trains: bool,
    /// Not to propose again before this moment, because another has just done so.
    backoff: Duration,
    /// Since when `base` is over for this process.
    over: Option<Duration>,
    /// Join numbers of members that are believed to be gone.
    lost: BTreeSet<u64>,
    /// Join numbers of members whose connections have ended, and when they are asked whether they are there.
    sought: BTreeMap<u64, Duration>,
    /// Join numbers of members that ask to leave.
    leaving: BTreeSet<u64>,
    /// Processes that ask to join, by what stays the same of their identities.
    waiting: BTreeMap<u128, Waiting>,
    joiner: Joiner,
    spread: Option<Spread>,
    /// When this process's own wish to leave is sent again.
    leave_at: Option<Duration>,
    /// Whether it was told that the wish was granted.
    has_left: bool,
    /// When this process gives up.
    deadline: Option<Duration>,
    /// The register's last error.
    problem: Option<String>,
    /// Whether the register was asked for a decision and has not told what became of it.
    is_unsure: bool,
    timer: Option<Duration>,
    actions: Vec<Action>,
}

impl Core {
    /// Creates the state of a process that wants to join. The lowest 32 bits of its identity are 0.
    pub(super) fn new(settings: Settings, own: Candidate, now: Duration) -> Core {
        let base = Arc::new(Generation::of_seeds(&settings.seeds));
        let first = Ballot::first(&base);
        Core {
            role: Role::Joining,
            last_change: None,
            seat: settings.seat,
            started: now,
            acceptor: Acceptor::new(first),
            attempt: None,
            highest: first,
            sent: None,
            trains: false,
            backoff: now,
            over: None,
            lost: BTreeSet::new(),
            sought: BTreeMap::new(),
            leaving: BTreeSet::new(),
            waiting: BTreeMap::new(),
            joiner: Joiner::new(now, &settings),
            spread: None,
            leave_at: None,
            has_left: false,
            deadline: Some(now.saturating_add(settings.join_timeout)),
            problem: None,
            is_unsure: false,
            timer: None,
            actions: Vec::new(),
            base,
            settings,
            own,
        }
    }

    /// Returns what is to be done at the start.
    pub(super) fn start(&mut self, now: Duration) -> Vec<Action> {
        self.handle(now, Event::Timer)
    }

    /// Takes an event and returns what is to be done. `now` never goes back.
    pub(super) fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        if self.role == Role::Ended {
            return Vec::new();
        }
        match event {
            Event::Message { from, message } => self.on_message(now, from, message),
            // It has fired, perhaps a little early.
            Event::Timer => self.timer = None,
            Event::Closed { address } => self.look_for(now, &address),
            Event::Unanswered { address } => self.look_for(now + self.settings.answer_window / 8, &address),
            Event::Gone { address } => self.on_gone(now, &address),
            Event::Suspect { generation, ranks } => self.on_suspect(now, generation, &ranks),
            Event::Leave => self.on_leave_asked(now),
            Event::Read(read) => self.on_read(now, read),
            Event::Registered(decided) => self.on_registered(now, decided),
            Event::Ended if self.seeks() => {
                self.role = Role::Ended;
                return vec![Action::JobEnded];
            }
            Event::Ended => {}
        }
        self.look(now);
        std::mem::take(&mut self.actions)
    }

    /// Returns whether this process may train in a generation from now on: all of its members have the state that it
    /// begins with, as far as this one knows. It may not once the generation is over, or the next one is proposed.
    pub(super) fn begin_training(&mut self, generation: u64) -> bool {
        let is_present = self.role == Role::Member && self.base.number == generation && self.over.is_none();
        self.trains |= is_present && self.sent.is_none();
        self.trains && is_present
    }

    /// Ends this process if it knows of no generation yet, and returns whether it did.
    pub(super) fn give_up(&mut self) -> bool {
        let is_beginning = self.role == Role::Joining && self.base.number == 0 && !self.joiner.is_expected;
        if is_beginning {
            self.role = Role::Ended;
        }
        is_beginning
    }

    /// Returns the newest decided generation; number 0 before the first.
    #[cfg(any(test, fuzzing))]
    pub(super) fn newest(&self) -> &Arc<Generation> {
        &self.base
    }

    /// Returns whether this process is a member of the newest generation that it knows, and that is not over for it.
    #[cfg(test)]
    pub(super) fn is_active(&self) -> bool {
        self.role == Role::Member && self.over.is_none()
    }

    /// Returns whether this process is a member of the newest generation that it knows.
    #[cfg(test)]
    pub(super) fn is_member(&self) -> bool {
        self.role == Role::Member
    }

    /// Returns this process as it would join.
    pub(super) fn own(&self) -> &Candidate {
        &self.own
    }

    fn on_message(&mut self, now: Duration, from: String, message: Message) {
        match message {
            Message::Join { have, candidate } => self.on_join(now, from, have, candidate),
            Message::Wait { leader, number } => self.on_wait(now, &from, leader, number),
            Message::Prepare { base, ballot } => self.on_prepare(now, from, base, ballot),
            Message::Promise(promise) => self.on_promise(now, &from, promise),
            Message::Accept { base, ballot, change } => self.on_accept(now, from, base, ballot, change),
            Message::Accepted { base, ballot, voter } => self.on_accepted(now, &from, base, ballot, voter),
            Message::Nack { base, ballot, promised } => self.on_nack(now, &from, base, ballot, promised),
            Message::Decided { number, change } => self.on_decided(now, from, number, &change),
            Message::Whole(generation) => self.on_whole(now, from, generation),
            Message::Notice { number } => self.on_notice(from, number),
            Message::Learned { number } => self.on_learned(from, number),
            Message::Ask { have } => self.tell_newer(from, have),
            Message::Leave { base, join_number } => self.on_leave(&from, base, join_number),
        }
    }

    /// Records that the newest generation is over for this process.
    fn on_suspect(&mut self, now: Duration, generation: u64, ranks: &[u32]) {
        if self.role != Role::Member || generation != self.base.number {
            return;
        }
        let joins = ranks.iter().filter_map(|rank| self.base.members.get(*rank as usize));
        let joins: Vec<u64> = joins.map(|member| member.join_number).filter(|join| Some(*join) != self.seat).collect();
        joins.into_iter().for_each(|join| self.lose(join));
        self.end_generation(now);
    }

    /// Finds out from a moment on whether a member is gone, if this process waits for it. A question that is lost with
    /// its connection is asked again: the system of a process that ends may take connections for a moment longer.
    fn look_for(&mut self, at: Duration, address: &str) {
        if let Some(join) = self.other_at(address).filter(|join| !self.lost.contains(join)) {
            self.sought.insert(join, at);
        }
    }

    /// Asks members of which this process does not know whether they are gone.
    fn seek(&mut self, now: Duration) {
        if self.role != Role::Member || self.trains {
            self.sought.clear();
        }
        let due: Vec<u64> = self.sought.iter().filter(|(_, at)| now >= **at).map(|(join, _)| *join).collect();
        for join in due {
            self.sought.remove(&join);
            if let Some(control) = self.base.member(join).map(|member| member.control.clone()) {
                self.send(control, Message::Ask { have: self.base.number });
            }
        }
    }

    /// Records that a member is gone, so that its answer is not awaited. A generation in which this process has not
    /// begun to train can do without it no more; later the members find out by themselves.
    fn on_gone(&mut self, now: Duration, address: &str) {
        let Some(join) = self.other_at(address) else { return };
        self.lose(join);
        if self.role == Role::Member && !self.trains {
            self.end_generation(now);
        }
    }

    /// Returns the join number of another member at an address. Seeds may not have been started yet.
    fn other_at(&self, address: &str) -> Option<u64> {
        let members = self.base.members.iter().filter(|_| self.base.number > 0);
        let mut others = members.filter(|member| member.control == address && Some(member.join_number) != self.seat);
        others.next().map(|member| member.join_number)
    }

    fn on_leave_asked(&mut self, now: Duration) {
        match self.role {
            Role::Member => self.leave_at = Some(now),
            Role::Joining | Role::Left | Role::Ended => {
                self.role = Role::Left;
                self.deadline = None;
            }
        }
    }

    fn on_leave(&mut self, from: &str, base: u64, join_number: u64) {
        if base == self.base.number && self.is_from(join_number, from) {
            self.leaving.insert(join_number);
        }
    }

    fn end_generation(&mut self, now: Duration) {
        if self.over.is_none() {
            self.over = Some(now);
            self.join_again(now + self.settings.answer_window * 2);
            self.deadline = Some(now.saturating_add(self.settings.join_timeout));
        }
    }

    fn lose(&mut self, join: u64) {
        self.lost.insert(join);
        self.sought.remove(&join);
        if let Some(attempt) = &mut self.attempt {
            attempt.missing.remove(&join);
        }
        let control = self.base.member(join).map(|member| &member.control);
        if control.is_some() && control == self.acceptor.proposer.as_ref() {
            // It comes to no decision any more.
            self.acceptor.forget_proposer();
        }
    }

    /// Does what the time demands, and sets the timer.
    fn look(&mut self, now: Duration) {
        if self.deadline.is_some_and(|deadline| now >= deadline) && matches!(self.role, Role::Joining | Role::Member) {
            let reason = self.reason_to_end();
            self.role = Role::Ended;
            self.actions.push(Action::End(reason));
            return;
        }
        self.seek(now);
        self.ask_to_leave(now);
        self.ask_to_join(now);
        if self.proposes_at().is_some_and(|at| now >= at) {
            self.begin(now);
        }
        self.drive(now);
        self.spread(now);
        if self.role == Role::Left && self.spread.is_none() && !self.has_left {
            // The others know it, if this process was the one to tell them.
            self.has_left = true;
            self.actions.push(Action::Left);
        }
        let times = [
            self.deadline,
            self.sought.values().min().copied(),
            self.leave_at.filter(|_| self.role == Role::Member),
            self.joiner.next().filter(|_| self.seeks()),
            self.proposes_at(),
            self.attempt.as_ref().map(|attempt| attempt.next(now)),
            self.spread.as_ref().map(|spread| spread.at),
        ];
        let next = times.into_iter().flatten().min();
        if let Some(at) = next
            && next != self.timer
        {
            self.actions.push(Action::Timer(at));
        }
        self.timer = next;
    }

    /// Tells the proposer of the next generation that this member wants to leave.
    fn ask_to_leave(&mut self, now: Duration) {
        let (Some(at), Some(seat)) = (self.leave_at, self.seat) else { return };
        if self.role != Role::Member || now < at {
            return;
        }
        self.leaving.insert(seat);
        let leader = self.proposer();
        if leader != self.own.control {
            self.send(leader, Message::Leave { base: self.base.number, join_number: seat });
        }
        self.leave_at = Some(now + self.settings.answer_window / 2);
    }

    /// Returns the address of the one that proposes next, as far as is known.
    fn proposer(&self) -> String {
        let heard = self.acceptor.proposer.clone();
        let attempting = self.attempt.as_ref().map(|_| self.own.control.clone());
        let first = || self.base.members.iter().find(|member| !self.lost.contains(&member.join_number));
        let leader = attempting.or(heard).or_else(|| first().map(|member| member.control.clone()));
        leader.unwrap_or_else(|| self.own.control.clone())
    }

    /// Returns whether the member with this join number is at an address.
    fn is_from(&self, join: u64, from: &str) -> bool {
        self.base.member(join).is_some_and(|member| member.control == from)
    }

    fn send(&mut self, to: String, message: Message) {
        self.actions.push(Action::Send { to, message });
    }
}

impl Ballot {
    /// The ballot that the leader of a generation owns: nothing was voted for before it.
    fn first(base: &Generation) -> Ballot {
        Ballot { round: 0, join_number: base.members.first().map_or(0, |leader| leader.join_number) }
    }
}
