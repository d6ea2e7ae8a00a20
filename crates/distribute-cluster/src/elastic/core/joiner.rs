//! The part of a process that asks to join, and of those that it asks.

use std::time::Duration;

use super::{Action, Core, Message, Role, Settings};
use crate::elastic::generation::{Candidate, Generation, check_address, process_of};

/// The requests to join that a process sends.
pub(super) struct Joiner {
    at: Duration,
    pause: Duration,
    /// The number of times that it has asked.
    asked: usize,
    /// The one that proposes the next generation, as a member has said, and when it last answered.
    hint: Option<(String, Duration)>,
    /// When the register is read again; `None` without one.
    read_at: Option<Duration>,
    /// Whether any member has answered.
    pub(super) was_answered: bool,
    /// Whether a member of a generation has answered, which has the same options.
    pub(super) is_expected: bool,
}

impl Joiner {
    pub(super) fn new(now: Duration, settings: &Settings) -> Joiner {
        let read_at = (!settings.majority).then_some(now);
        let pause = settings.answer_window / 4;
        Joiner { at: now, pause, asked: 0, hint: None, read_at, was_answered: false, is_expected: false }
    }

    /// Returns when it asks again.
    pub(super) fn next(&self) -> Option<Duration> {
        Some(self.read_at.map_or(self.at, |read_at| read_at.min(self.at)))
    }
}

/// A process that waits to be let in.
pub(super) struct Waiting {
    pub(super) candidate: Candidate,
    pub(super) since: Duration,
    heard: Duration,
}

impl Waiting {
    /// Returns whether it has asked lately.
    pub(super) fn is_fresh(&self, now: Duration, answer_window: Duration) -> bool {
        now <= self.heard + answer_window * FRESH
    }
}

/// The number of answer windows for which a request to join counts.
const FRESH: u32 = 4;

impl Core {
    /// Asks the one that proposes, and another one in turn in case the first is gone.
    pub(super) fn ask_to_join(&mut self, now: Duration) {
        let window = self.settings.answer_window;
        self.waiting.retain(|_, waiting| waiting.is_fresh(now, window));
        if !self.seeks() {
            return;
        }
        if self.joiner.read_at.is_some_and(|at| now >= at) {
            self.joiner.read_at = Some(now + window * 2);
            self.actions.push(Action::ReadRegister);
        }
        if now < self.joiner.at {
            return;
        }
        self.joiner.at = now + self.joiner.pause;
        self.joiner.pause = (self.joiner.pause * 3 / 2).min(window);
        // A seed that is asked for its promise is known by it.
        let is_asked = self.acceptor.heard(window).is_some_and(|heard| now <= heard + window * 3);
        if self.base.number == 0 && self.seat.is_some() && (self.attempt.is_some() || is_asked) {
            return;
        }
        if self.role == Role::Member {
            if self.over.is_some() {
                self.ask_around();
            }
            return;
        }
        if self.joiner.hint.as_ref().is_some_and(|(_, answered)| now > *answered + window * 3) {
            self.joiner.hint = None;
        }
        let own = &self.own.control;
        // Members that are known may all be gone, so seeds are asked too.
        let contacts = self.base.members.iter().map(|member| &member.control);
        let contacts: Vec<&String> = contacts.chain(&self.settings.seeds).filter(|contact| *contact != own).collect();
        let hint = self.joiner.hint.as_ref().map(|(hint, _)| hint).filter(|hint| *hint != own);
        let Some(first) = hint.or_else(|| contacts.first().copied()) else { return };
        let mut asked = vec![first.clone()];
        if let Some(other) = contacts.get(self.joiner.asked % contacts.len().max(1))
            && *other != first
        {
            asked.push((*other).clone());
        }
        self.joiner.asked += 1;
        for contact in asked {
            let message = Message::Join { have: self.base.number, candidate: self.own.clone() };
            self.send(contact, message);
        }
    }

    /// Returns whether this process looks for a generation that it is in, or for a decision that may have been made.
    pub(super) fn seeks(&self) -> bool {
        self.role == Role::Joining || self.role == Role::Member && (self.over.is_some() || self.is_unsure)
    }

    /// Asks for a later generation: those of this one may all be in it, or gone.
    fn ask_around(&mut self) {
        let contacts = self.base.members.len() + self.settings.seeds.len();
        let place = self.joiner.asked % contacts.max(1);
        self.joiner.asked += 1;
        let members = self.base.members.iter().map(|member| &member.control);
        let contact = members.chain(&self.settings.seeds).nth(place).cloned();
        if let Some(to) = contact.filter(|contact| *contact != self.own.control) {
            self.send(to, Message::Ask { have: self.base.number });
        }
    }

    pub(super) fn on_wait(&mut self, now: Duration, from: &str, leader: String, number: u64) {
        if self.role != Role::Joining || check_address(&leader).is_err() {
            return;
        }
        self.joiner.was_answered = true;
        self.joiner.is_expected |= number > 0;
        let hint = self.joiner.hint.as_ref().map(|(hint, _)| hint.as_str());
        // Only the one that proposes, or was said to, can name another.
        if hint.is_none_or(|hint| hint == from) || leader == from {
            if leader != from && hint != Some(&leader) {
                self.joiner.at = self.joiner.at.min(now + self.settings.answer_window / 16);
            }
            self.joiner.hint = Some((leader, now));
        }
    }

    pub(super) fn on_join(&mut self, now: Duration, from: String, have: u64, candidate: Candidate) {
        if have > self.base.number {
            return self.send(from, Message::Ask { have: self.base.number });
        }
        if candidate.control != from || check_address(&candidate.service).is_err() {
            return;
        }
        if self.base.find(candidate.identity).is_some() || (self.role == Role::Left && self.base.number > 0) {
            return self.tell_newer(from, have);
        }
        let process = process_of(candidate.identity);
        let known = self.base.members.iter().filter(|_| self.base.number > 0);
        let mut earlier =
            known.filter(|member| member.control == candidate.control || process_of(member.identity) == process);
        let earlier = earlier.next().map(|member| (member.join_number, member.identity));
        if let Some((join, identity)) = earlier.filter(|_| self.role == Role::Member) {
            if process_of(identity) == process && identity > candidate.identity {
                // A message that was delayed.
                return;
            }
            // Another process has its address, so it is gone.
            if self.seat == Some(join) {
                return;
            }
            self.lose(join);
            self.end_generation(now);
        }
        let leader = self.proposer();
        let number = self.base.number;
        if self.seat.is_some() || number > 0 {
            self.send(from, Message::Wait { leader, number });
        }
        if self.seat.is_none() || self.waiting.len() >= Generation::MAX_MEMBERS {
            return;
        }
        let entry = self.waiting.entry(process);
        let waiting = entry.or_insert_with(|| Waiting { candidate: candidate.clone(), since: now, heard: now });
        if candidate.identity >= waiting.candidate.identity {
            waiting.candidate = candidate;
            waiting.heard = now;
        }
    }

    /// Begins to ask anew.
    pub(super) fn join_again(&mut self, now: Duration) {
        self.joiner = Joiner::new(now, &self.settings);
    }

    pub(super) fn on_read(&mut self, now: Duration, read: Result<Option<Generation>, String>) {
        match read {
            Ok(Some(generation)) if self.is_newer(&generation) => self.on_registered(now, Ok(generation)),
            Ok(_) => (self.problem, self.is_unsure) = (None, false),
            Err(problem) => self.problem = Some(problem),
        }
    }
}
