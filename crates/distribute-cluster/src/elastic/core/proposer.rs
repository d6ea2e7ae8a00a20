//! The proposer's part: when a member proposes, which members it takes, and the two phases.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::{Action, Ballot, Core, Message, Promise, Role};
use crate::elastic::generation::{Candidate, Change, process_of};

/// A member's attempt to have the next generation decided.
pub(super) struct Attempt {
    pub(super) ballot: Ballot,
    since: Duration,
    /// Until when those that do not answer are awaited.
    window_ends: Duration,
    /// Members that have promised, with the last moment at which each was heard.
    promised: BTreeMap<u64, Duration>,
    /// Members whose answers are awaited, because they are not believed to be gone.
    pub(super) missing: BTreeSet<u64>,
    /// The latest vote among the promises, whose value must be kept.
    inherited: Option<(Ballot, Arc<Change>)>,
    /// How the seeds that have promised describe themselves.
    seeds: BTreeMap<u64, Candidate>,
    vote: Option<Vote>,
    resend_at: Duration,
    pause: Duration,
}

/// The second phase.
struct Vote {
    change: Arc<Change>,
    votes: BTreeSet<u64>,
}

impl Attempt {
    /// Returns when it is to be looked at again.
    pub(super) fn next(&self, now: Duration) -> Duration {
        let window = self.window_ends;
        if self.vote.is_none() && window > now { window.min(self.resend_at) } else { self.resend_at }
    }

    /// Returns how many members have answered.
    pub(super) fn answered(&self) -> usize {
        self.promised.len()
    }
}

impl Core {
    /// Returns when this process is to propose the next generation, if there is a reason and nothing is under way.
    pub(super) fn proposes_at(&self) -> Option<Duration> {
        let seat = self.seat.filter(|_| self.attempt.is_none() && matches!(self.role, Role::Joining | Role::Member))?;
        let lost = self.lost.iter().filter(|join| **join < seat).count();
        let place = self.place(seat).saturating_sub(lost);
        let window = self.settings.answer_window;
        let since = match self.over {
            _ if self.base.number == 0 && place == 0 => self.started,
            _ if self.base.number == 0 => self.started + self.settings.join_window + patience(window, place),
            Some(over) if place == 0 => over,
            Some(over) => over + patience(window, place),
            None if place == 0 => self.wanted_since()?,
            None => return None,
        };
        // Places in the generation differ, also where members disagree about which of them are gone.
        let heard = self.acceptor.heard(window).map(|heard| heard + patience(window, self.place(seat)));
        Some(since.max(self.backoff).max(heard.unwrap_or_default()))
    }

    /// Returns how many members are before one.
    fn place(&self, seat: u64) -> usize {
        self.base.members.partition_point(|member| member.join_number < seat)
    }

    /// Returns since when a leader has a reason to end a generation that runs.
    fn wanted_since(&self) -> Option<Duration> {
        let stay = self.base.members.len() - self.leaving.len();
        let room = self.settings.max.saturating_sub(stay);
        let waits = self.waiting.values().map(|waiting| waiting.since).min().filter(|_| room > 0);
        // More than fill the room are not waited for.
        let window = if self.waiting.len() < room { self.settings.join_window } else { Duration::ZERO };
        let joins = waits.map(|since| since + window);
        let enough = stay + self.waiting.len().min(room) >= self.settings.min;
        let leaves = (!self.leaving.is_empty() && enough).then_some(Duration::ZERO);
        joins.into_iter().chain(leaves).min()
    }

    /// Begins an attempt under a ballot that this process has sent no value under.
    pub(super) fn begin(&mut self, now: Duration) {
        let Some(seat) = self.seat else { return };
        let first = Ballot::first(&self.base);
        let ballot = match self.highest == first && first.join_number == seat && self.sent.is_none() {
            true => first,
            false => Ballot { round: self.highest.round + 1, join_number: seat },
        };
        self.highest = ballot;
        self.acceptor.promise(ballot);
        self.acceptor.forget_proposer();
        let missing = self.base.members.iter().map(|member| member.join_number);
        let missing = missing.filter(|join| *join != seat && !self.lost.contains(join)).collect();
        let pause = self.settings.answer_window / 4;
        let window = match self.base.number {
            0 => self.settings.answer_window.max(self.settings.join_window),
            _ => self.settings.answer_window,
        };
        self.attempt = Some(Attempt {
            ballot,
            since: now,
            window_ends: now + window,
            promised: BTreeMap::from([(seat, now)]),
            missing,
            inherited: self.acceptor.accepted.clone(),
            seeds: BTreeMap::from([(seat, self.own.clone())]),
            vote: None,
            resend_at: now,
            pause,
        });
    }

    pub(super) fn on_promise(&mut self, now: Duration, from: &str, promise: Promise) {
        let Promise { base, ballot, voter, accepted, candidate, is_leaving } = promise;
        let is_from = base == self.base.number && self.is_from(voter, from);
        let Some(attempt) = self.attempt.as_mut().filter(|attempt| is_from && attempt.ballot == ballot) else { return };
        attempt.promised.insert(voter, now);
        attempt.missing.remove(&voter);
        let latest = attempt.inherited.as_ref().map(|(ballot, _)| *ballot);
        if accepted.as_ref().is_some_and(|(ballot, _)| Some(*ballot) > latest) {
            attempt.inherited = accepted;
        }
        if let Some(candidate) = candidate.filter(|candidate| base == 0 && candidate.control == from) {
            attempt.seeds.insert(voter, candidate);
        }
        if is_leaving {
            self.leaving.insert(voter);
        }
    }

    pub(super) fn on_nack(&mut self, now: Duration, from: &str, base: u64, ballot: Ballot, promised: Ballot) {
        let known = base == self.base.number && self.base.members.iter().any(|member| member.control == from);
        if known && self.attempt.as_ref().is_some_and(|attempt| attempt.ballot == ballot && promised > ballot) {
            self.highest = self.highest.max(promised);
            self.attempt = None;
            let before = self.base.members.iter().take_while(|member| Some(member.join_number) < self.seat);
            self.backoff =
                now + patience(self.settings.answer_window, before.count()) + self.settings.answer_window / 4;
        }
    }

    pub(super) fn on_accepted(&mut self, now: Duration, from: &str, base: u64, ballot: Ballot, voter: u64) {
        let is_from = base == self.base.number && self.is_from(voter, from);
        let Some(attempt) = self.attempt.as_mut().filter(|attempt| is_from && attempt.ballot == ballot) else { return };
        if let Some(vote) = &mut attempt.vote {
            vote.votes.insert(voter);
            self.count(now);
        }
    }

    /// Takes an attempt as far as it can go now.
    pub(super) fn drive(&mut self, now: Duration) {
        let Some(attempt) = &self.attempt else { return };
        let is_full = self.base.number == 0 && attempt.promised.len() + self.waiting.len() >= self.settings.max;
        if attempt.vote.is_none() && (is_full || attempt.missing.is_empty() || now >= attempt.window_ends) {
            self.propose(now);
        }
        self.resend(now);
    }

    /// Sends what was not answered yet, also to members that are believed to be gone: they are not awaited, but they
    /// vote, and they learn that this process proposes.
    fn resend(&mut self, now: Duration) {
        let window = self.settings.answer_window;
        let majority = self.settings.majority;
        let Some(attempt) = self.attempt.as_mut().filter(|attempt| now >= attempt.resend_at) else { return };
        if attempt.vote.is_some() && !majority {
            self.attempt = None;
            self.is_unsure = true;
            self.problem = Some("it does not answer".to_owned());
            return;
        }
        let (base, ballot) = (self.base.number, attempt.ballot);
        let later = now >= attempt.window_ends;
        let message = match &attempt.vote {
            Some(Vote { change, .. }) => Message::Accept { base, ballot, change: change.clone() },
            None => Message::Prepare { base, ballot },
        };
        let quiet = |heard: Option<&Duration>| heard.is_none_or(|at| now >= *at + window);
        let wanted = |join: &u64| match &attempt.vote {
            Some(Vote { votes, .. }) => !votes.contains(join) && (later || attempt.promised.contains_key(join)),
            None => quiet(attempt.promised.get(join)),
        };
        let asked = self.base.members.iter().filter(|member| member.control != self.own.control);
        let asked = asked.filter(|member| wanted(&member.join_number)).map(|member| member.control.clone());
        let sends: Vec<Action> = asked.map(|to| Action::Send { to, message: message.clone() }).collect();
        self.actions.extend(sends);
        attempt.resend_at = now + attempt.pause;
        attempt.pause = (attempt.pause * 3 / 2).min(window * 2);
    }

    /// Sends a value, if there is one and those that have promised suffice.
    fn propose(&mut self, now: Duration) {
        let Some(attempt) = &self.attempt else { return };
        if self.settings.majority && attempt.promised.len() < self.quorum() {
            return;
        }
        let change = match &attempt.inherited {
            Some((_, change)) if self.settings.majority => change.clone(),
            _ => match self.change(now, false).or_else(|| self.change(now, true)) {
                Some(change) => Arc::new(change),
                None => return,
            },
        };
        if self.base.number > 0 && self.over.is_none() && change.removed.is_empty() && change.added.is_empty() {
            // Those that asked to join are gone.
            self.attempt = None;
            self.backoff = now + self.settings.answer_window;
            return;
        }
        let Ok(next) = self.base.apply(&change) else { return };
        let Some(attempt) = &mut self.attempt else { return };
        (attempt.resend_at, attempt.pause) = (now, self.settings.answer_window / 4);
        attempt.window_ends = now + self.settings.answer_window;
        let ballot = attempt.ballot;
        self.sent = Some(ballot);
        if !self.settings.majority {
            attempt.vote = Some(Vote { change, votes: BTreeSet::new() });
            attempt.resend_at = now + self.settings.answer_window * REGISTER;
            return self.actions.push(Action::Decide(next));
        }
        let votes = match self.acceptor.accept(ballot, change.clone()) {
            true => self.seat.into_iter().collect(),
            false => BTreeSet::new(),
        };
        attempt.vote = Some(Vote { change, votes });
        self.count(now);
    }

    /// Returns which members stay and which processes come in, or `None` as long as they are too few. Members that are
    /// believed to be gone and do answer can be `trusted`.
    fn change(&self, now: Duration, trusted: bool) -> Option<Change> {
        let attempt = self.attempt.as_ref()?;
        let (min, max, window) = (self.settings.min, self.settings.max, self.settings.answer_window);
        let fresh = |heard: &Duration| now <= *heard + window * FRESH;
        let stays = |join: &u64| {
            let there = Some(*join) == self.seat || attempt.promised.get(join).is_some_and(fresh);
            let gone = self.lost.contains(join) && !trusted;
            there && self.base.number > 0 && !gone && !self.leaving.contains(join)
        };
        let joins = self.base.members.iter().map(|member| member.join_number);
        let (kept, removed): (Vec<u64>, Vec<u64>) = joins.partition(stays);
        let removed = if self.base.number == 0 { Vec::new() } else { removed };
        let seeds = attempt.seeds.iter().filter(|(join, _)| {
            self.base.number == 0 && (Some(**join) == self.seat || attempt.promised.get(join).is_some_and(fresh))
        });
        let mut others: Vec<_> = self.waiting.values().filter(|waiting| waiting.is_fresh(now, window)).collect();
        others.sort_by_key(|waiting| (waiting.since, waiting.candidate.identity));
        let mut known = HashSet::new();
        let added = seeds.map(|(_, seed)| seed).chain(others.into_iter().map(|waiting| &waiting.candidate));
        let added = added.filter(|candidate| known.insert(process_of(candidate.identity)));
        let mut added: Vec<Candidate> = added.take(max.saturating_sub(kept.len())).cloned().collect();
        if self.base.number == 0 {
            // Seeds get their ranks in the order in which they are named.
            let places: HashMap<&String, usize> = self.settings.seeds.iter().zip(0..).collect();
            added.sort_by_key(|candidate| places.get(&candidate.control).copied().unwrap_or(usize::MAX));
        }
        let size = kept.len() + added.len();
        let gathered = self.base.number > 0 || size == max || now >= attempt.since + self.settings.join_window;
        (size >= min && gathered).then_some(Change { removed, added, trains: self.trains })
    }

    /// Decides, if a majority has voted.
    fn count(&mut self, now: Duration) {
        let quorum = self.quorum();
        let voted = self.attempt.as_ref().and_then(|attempt| attempt.vote.as_ref());
        let Some(change) = voted.filter(|vote| vote.votes.len() >= quorum).map(|vote| vote.change.clone()) else {
            return;
        };
        if let Ok(next) = self.base.apply(&change) {
            let before = self.base.clone();
            self.adopt(now, Arc::new(next), Some(change.clone()));
            self.begin_to_spread(now, &before);
        }
    }

    fn quorum(&self) -> usize {
        self.base.majority()
    }

    /// The register's answer.
    pub(super) fn on_registered(&mut self, now: Duration, decided: Result<crate::elastic::Generation, String>) {
        match decided {
            Ok(generation) => {
                let (before, next) = (self.base.clone(), Arc::new(generation));
                let vote = self.attempt.as_ref().and_then(|attempt| attempt.vote.as_ref());
                let own = vote.map(|vote| vote.change.clone());
                let own = own.filter(|change| before.apply(change).is_ok_and(|made| made == *next));
                if !self.is_newer(&next) {
                    self.attempt = None;
                    self.backoff = now + self.settings.answer_window;
                } else if own.is_some() {
                    self.adopt(now, next, own);
                    self.begin_to_spread(now, &before);
                } else if next.check().is_ok() {
                    self.learn_of_register(now, next);
                }
            }
            Err(problem) => {
                self.problem = Some(problem);
                self.is_unsure = true;
                self.attempt = None;
                self.backoff = now + self.settings.answer_window;
            }
        }
    }
}

/// The number of answer windows for which an answer shows that a member is there.
const FRESH: u32 = 6;

/// The number of answer windows after which the register is asked anew.
const REGISTER: u32 = 60;

/// Returns how long a member waits for others to propose: longer than an attempt takes, and the longer the later its
/// place. Places are spread over as many answer windows as their number has bits, so that few try at once and the last
/// does not wait for long.
fn patience(answer_window: Duration, place: usize) -> Duration {
    let place = u32::try_from(place).unwrap_or(u32::MAX - 1) + 1;
    let bits = place.ilog2();
    answer_window * 3 / 2 + answer_window * bits + answer_window / (1 << bits) * (place - (1 << bits))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::core::{Event, Settings};
    use crate::elastic::generation::Generation;

    const WINDOW: Duration = Duration::from_millis(500);

    /// The process at a place among the seeds.
    fn candidate(place: u128) -> Candidate {
        Candidate { identity: place << 64, control: format!("n{place}:1"), service: format!("s{place}:1") }
    }

    /// Returns an event of a message of the leader.
    fn tells(message: Message) -> Event {
        Event::Message { from: candidate(0).control, message }
    }

    /// Returns rank 1 of a first generation of three.
    fn member() -> Core {
        let seeds: Vec<String> = (0..3).map(|place| candidate(place).control).collect();
        let settings = Settings {
            min: 1,
            max: 4,
            join_window: WINDOW,
            answer_window: WINDOW,
            join_timeout: WINDOW * 100,
            majority: true,
            seeds: seeds.clone(),
            seat: Some(1),
        };
        let first = Change { added: (0..3).map(candidate).collect(), ..Change::default() };
        let first = Generation::of_seeds(&seeds).apply(&first).unwrap();
        let mut core = Core::new(settings, candidate(1), Duration::ZERO);
        core.handle(Duration::ZERO, tells(Message::Whole(Arc::new(first))));
        core
    }

    fn proposes(actions: &[Action]) -> bool {
        actions.iter().any(|action| matches!(action, Action::Send { message: Message::Prepare { .. }, .. }))
    }

    #[test]
    fn a_proposer_that_is_lost_is_succeeded_at_once() {
        let mut core = member();
        // The leader lets another process in, and is killed in between.
        let mut now = WINDOW * 10;
        core.handle(now, tells(Message::Prepare { base: 1, ballot: Ballot { round: 0, join_number: 0 } }));
        now += Duration::from_millis(5);
        let actions = core.handle(now, Event::Suspect { generation: 1, ranks: vec![0] });
        assert!(proposes(&actions), "{actions:?}");
    }

    #[test]
    fn a_member_whose_connection_ends_is_asked_until_it_answers_or_is_gone() {
        let (mut core, address) = (member(), candidate(0).control);
        let asks = |actions: &[Action]| {
            let asks = |action: &Action| match action {
                Action::Send { to, message: Message::Ask { have: 1 } } => *to == address,
                _ => false,
            };
            actions.iter().any(asks)
        };
        let mut now = WINDOW * 10;
        let actions = core.handle(now, Event::Closed { address: address.clone() });
        assert!(asks(&actions), "{actions:?}");
        // Its system takes the connection that asks, and closes it when the process has ended.
        for _ in 0..3 {
            let actions = core.handle(now, Event::Unanswered { address: address.clone() });
            let again = actions.iter().find_map(|action| match action {
                Action::Timer(at) => Some(*at),
                _ => None,
            });
            assert!(!asks(&actions) && again.is_some_and(|at| at > now && at < now + WINDOW), "{actions:?}");
            now = again.unwrap();
            let actions = core.handle(now, Event::Timer);
            assert!(asks(&actions), "{actions:?}");
        }
        let actions = core.handle(now, Event::Gone { address: address.clone() });
        assert!(proposes(&actions), "{actions:?}");
        let actions = core.handle(now, Event::Unanswered { address: address.clone() });
        assert!(!asks(&actions) && !asks(&core.handle(now + WINDOW, Event::Timer)), "{actions:?}");
    }

    #[test]
    fn members_that_train_are_not_asked_for() {
        let (mut core, address) = (member(), candidate(0).control);
        core.handle(WINDOW, Event::Unanswered { address });
        assert!(core.begin_training(1));
        let actions = core.handle(WINDOW * 2, Event::Timer);
        assert!(!actions.iter().any(|action| matches!(action, Action::Send { .. })), "{actions:?}");
    }
}
