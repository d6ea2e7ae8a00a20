//! The acceptor's part: promises and votes of a member.

use std::cmp::Ordering;
use std::sync::Arc;
use std::time::Duration;

use super::{Ballot, Core, Message, Promise};
use crate::elastic::generation::Change;

/// A member's promise and vote in the newest generation that it knows.
pub(super) struct Acceptor {
    pub(super) promised: Ballot,
    pub(super) accepted: Option<(Ballot, Arc<Change>)>,
    /// The address of the proposer of the latest ballot.
    pub(super) proposer: Option<String>,
    /// When that proposer was first and last heard of.
    heard: Option<(Duration, Duration)>,
}

impl Acceptor {
    /// The acceptor of a generation in which nothing was voted for.
    pub(super) fn new(first: Ballot) -> Acceptor {
        Acceptor { promised: first, accepted: None, proposer: None, heard: None }
    }

    /// Promises to vote for no ballot before this one; returns whether that was not promised to a later one already.
    pub(super) fn promise(&mut self, ballot: Ballot) -> bool {
        let promises = ballot >= self.promised;
        if promises {
            self.promised = ballot;
        }
        promises
    }

    /// Votes, unless a later ballot was promised.
    pub(super) fn accept(&mut self, ballot: Ballot, change: Arc<Change>) -> bool {
        let votes = self.promise(ballot);
        if votes {
            self.accepted = Some((ballot, change));
        }
        votes
    }

    /// Returns until when another proposer counts as active: some time after it was last heard of, but not forever if
    /// it comes to no decision.
    pub(super) fn heard(&self, answer_window: Duration) -> Option<Duration> {
        self.heard.map(|(first, last)| last.min(first + answer_window * STUBBORN))
    }

    /// Begins to count anew for how long others come to no decision.
    pub(super) fn forget_proposer(&mut self) {
        (self.proposer, self.heard) = (None, None);
    }

    fn hear(&mut self, now: Duration, from: String) {
        let first = match (&self.proposer, self.heard) {
            (Some(proposer), Some((first, _))) if *proposer == from => first,
            _ => now,
        };
        self.heard = Some((first, now));
        self.proposer = Some(from);
    }
}

/// The number of answer windows for which a proposer that comes to no decision keeps others from trying.
const STUBBORN: u32 = 8;

impl Core {
    pub(super) fn on_prepare(&mut self, now: Duration, from: String, base: u64, ballot: Ballot) {
        let Some(voter) = self.voter_for(&from, base, ballot) else { return };
        if !self.hears(now, &from, ballot) {
            return self.send(from, Message::Nack { base, ballot, promised: self.acceptor.promised });
        }
        self.acceptor.promise(ballot);
        let accepted = self.acceptor.accepted.clone();
        let candidate = (base == 0).then(|| self.own.clone());
        let is_leaving = self.leave_at.is_some();
        self.send(from, Message::Promise(Promise { base, ballot, voter, accepted, candidate, is_leaving }));
    }

    pub(super) fn on_accept(&mut self, now: Duration, from: String, base: u64, ballot: Ballot, change: Arc<Change>) {
        let Some(voter) = self.voter_for(&from, base, ballot) else { return };
        if self.base.apply(&change).is_err() {
            return;
        }
        if !self.hears(now, &from, ballot) {
            return self.send(from, Message::Nack { base, ballot, promised: self.acceptor.promised });
        }
        if self.acceptor.accept(ballot, change) {
            self.send(from, Message::Accepted { base, ballot, voter });
        }
    }

    /// Returns by which join number this process votes on a proposal. Proposals about other generations are answered
    /// here, those of strangers are ignored.
    fn voter_for(&mut self, from: &str, base: u64, ballot: Ballot) -> Option<u64> {
        match base.cmp(&self.base.number) {
            Ordering::Less => {
                self.tell_newer(from.to_owned(), base);
                return None;
            }
            Ordering::Greater => {
                self.send(from.to_owned(), Message::Ask { have: self.base.number });
                return None;
            }
            Ordering::Equal => {}
        }
        let owns = ballot.round > 0 || ballot == Ballot::first(&self.base);
        self.seat.filter(|_| owns && self.is_from(ballot.join_number, from))
    }

    /// Takes note of another's ballot; returns whether it may be followed. A register needs no promises.
    fn hears(&mut self, now: Duration, from: &str, ballot: Ballot) -> bool {
        self.highest = self.highest.max(ballot);
        if self.settings.majority && ballot < self.acceptor.promised {
            return false;
        }
        self.acceptor.hear(now, from.to_owned());
        if self.settings.majority && self.attempt.as_ref().is_some_and(|attempt| attempt.ballot < ballot) {
            self.attempt = None;
        }
        true
    }
}
