//! The learner's part: decided generations come in and are told to others.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::{Acceptor, Action, Ballot, Core, Message, Role};
use crate::elastic::generation::{Change, Generation};

/// A decided generation that is told to those that it concerns, until they acknowledge it.
pub(super) struct Spread {
    /// The news for each address.
    pending: BTreeMap<String, News>,
    pub(super) at: Duration,
    pause: Duration,
    times: u32,
}

#[derive(Clone, Copy)]
enum News {
    /// The change of the generation before, which its process knows.
    Change,
    Whole,
    /// The number alone, because its process most likely knows the generation.
    Number,
}

/// How often a decided generation is told to a process that does not acknowledge it: for about eight answer windows. A
/// member that is silent for as long is gone.
const TIMES: u32 = 5;

impl Core {
    pub(super) fn is_newer(&self, generation: &Generation) -> bool {
        generation.number > self.base.number
    }

    /// Takes a decided generation as the newest.
    pub(super) fn adopt(&mut self, now: Duration, next: Arc<Generation>, change: Option<Arc<Change>>) {
        let was_member = self.role == Role::Member || self.base.find(self.own.identity).is_some();
        let first = Ballot::first(&next);
        self.base = next;
        self.last_change = change;
        self.acceptor = Acceptor::new(first);
        (self.highest, self.sent, self.trains, self.backoff) = (first, None, false, now);
        (self.attempt, self.spread, self.over, self.problem) = (None, None, None, None);
        self.is_unsure = false;
        self.lost.clear();
        self.sought.clear();
        self.leaving.clear();
        let base = self.base.clone();
        self.waiting.retain(|_, waiting| base.find(waiting.candidate.identity).is_none());
        self.seat = self.base.find(self.own.identity).map(|member| member.join_number);
        let is_member = self.seat.is_some() && self.role != Role::Left;
        if is_member {
            self.role = Role::Member;
            self.deadline = None;
        } else if self.role == Role::Left {
            self.seat = None;
        } else if was_member && self.leave_at.is_some() {
            self.role = Role::Left;
            self.deadline = None;
        } else {
            if was_member {
                self.own.identity += 1;
                self.deadline = Some(now.saturating_add(self.settings.join_timeout));
                self.role = Role::Joining;
            }
            self.join_again(now);
        }
        self.actions.push(Action::Decided { generation: base, is_member });
    }

    /// Takes a generation that the register holds.
    pub(super) fn learn_of_register(&mut self, now: Duration, next: Arc<Generation>) {
        self.adopt(now, next, None);
        self.pass_on(now, "");
    }

    /// Begins to tell the newest generation to its members and to those of the one before.
    pub(super) fn begin_to_spread(&mut self, now: Duration, before: &Generation) {
        let change = if before.number == 0 { News::Whole } else { News::Change };
        let knew = before.members.iter().map(|member| (member.control.clone(), change));
        let new = self.base.members.iter().filter(|member| member.joined_in == self.base.number);
        let mut pending: BTreeMap<String, News> = knew.collect();
        pending.extend(new.map(|member| (member.control.clone(), News::Whole)));
        self.begin_spread(now, pending);
    }

    /// Makes sure that all members learn a generation that this process has not proposed, should its proposer be gone:
    /// each tells the leader, which tells all.
    fn pass_on(&mut self, now: Duration, from: &str) {
        let Some(leader) = self.base.members.first().filter(|_| self.role == Role::Member) else { return };
        if leader.identity == self.own.identity {
            let all = self.base.members.iter().map(|member| (member.control.clone(), News::Number));
            self.begin_spread(now, all.collect());
        } else if leader.control != from {
            self.begin_spread(now, BTreeMap::from([(leader.control.clone(), News::Number)]));
        }
    }

    fn begin_spread(&mut self, now: Duration, mut pending: BTreeMap<String, News>) {
        pending.remove(&self.own.control);
        self.spread = Some(Spread { pending, at: now, pause: self.settings.answer_window / 4, times: 0 });
    }

    pub(super) fn spread(&mut self, now: Duration) {
        let Some(spread) = self.spread.as_mut().filter(|spread| now >= spread.at) else { return };
        if spread.times == TIMES || spread.pending.is_empty() {
            let pending = self.spread.take().map(|spread| spread.pending).unwrap_or_default();
            let silent = self.base.members.iter().filter(|member| pending.contains_key(&member.control));
            let silent: Vec<u64> = silent.map(|member| member.join_number).collect();
            if self.role == Role::Member && !silent.is_empty() {
                silent.into_iter().for_each(|join| self.lose(join));
                self.end_generation(now);
            }
            return;
        }
        spread.times += 1;
        spread.at = now + spread.pause;
        spread.pause *= 2;
        let number = self.base.number;
        for (to, news) in &spread.pending {
            let message = match (news, &self.last_change) {
                (News::Number, _) => Message::Notice { number },
                (News::Change, Some(change)) => Message::Decided { number, change: change.clone() },
                _ => Message::Whole(self.base.clone()),
            };
            self.actions.push(Action::Send { to: to.clone(), message });
        }
    }

    /// Tells the newest generation to a process that knows an earlier one.
    pub(super) fn tell_newer(&mut self, to: String, have: u64) {
        let number = self.base.number;
        if have >= number {
            return;
        }
        let message = match &self.last_change {
            Some(change) if have + 1 == number && have > 0 => Message::Decided { number, change: change.clone() },
            _ => Message::Whole(self.base.clone()),
        };
        self.send(to, message);
    }

    pub(super) fn on_decided(&mut self, now: Duration, from: String, number: u64, change: &Arc<Change>) {
        match number.cmp(&(self.base.number + 1)) {
            Ordering::Greater => self.send(from, Message::Ask { have: self.base.number }),
            Ordering::Less => self.acknowledge(from),
            Ordering::Equal => {
                if let Ok(next) = self.base.apply(change) {
                    self.adopt(now, Arc::new(next), Some(change.clone()));
                    self.pass_on(now, &from);
                    self.acknowledge(from);
                }
            }
        }
    }

    pub(super) fn on_whole(&mut self, now: Duration, from: String, generation: Arc<Generation>) {
        if self.is_newer(&generation) && generation.check().is_ok() {
            self.adopt(now, generation, None);
            self.pass_on(now, &from);
        }
        self.acknowledge(from);
    }

    pub(super) fn on_notice(&mut self, from: String, number: u64) {
        match number > self.base.number {
            true => self.send(from, Message::Ask { have: self.base.number }),
            false => self.acknowledge(from),
        }
    }

    fn acknowledge(&mut self, to: String) {
        self.send(to, Message::Learned { number: self.base.number });
    }

    pub(super) fn on_learned(&mut self, from: String, number: u64) {
        match number.cmp(&self.base.number) {
            Ordering::Less => self.tell_newer(from, number),
            Ordering::Greater => self.send(from, Message::Ask { have: self.base.number }),
            Ordering::Equal => {
                if let Some(spread) = &mut self.spread {
                    spread.pending.remove(&from);
                    if spread.pending.is_empty() {
                        self.spread = None;
                    }
                }
            }
        }
    }
}
