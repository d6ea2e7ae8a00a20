//! The invariants, which hold at every moment.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use crate::elastic::core::Message;
use crate::elastic::generation::Generation;

/// The decisions of all processes together, and the identities that may be in them.
#[derive(Default)]
pub(super) struct Invariants {
    pub(super) decided: BTreeMap<u64, Arc<Generation>>,
    /// Identities that have asked to join, or are seeds.
    asked: HashSet<u128>,
    given: HashSet<u64>,
}

impl Invariants {
    pub(super) fn asks(&mut self, identity: u128) {
        self.asked.insert(identity);
    }

    /// Checks what a process sends.
    pub(super) fn sends(&mut self, identity: u128, message: &Message) -> Result<(), String> {
        match message {
            Message::Join { candidate, .. } => self.asks(candidate.identity),
            Message::Promise(promise) => {
                if let Some(candidate) = &promise.candidate {
                    self.asks(candidate.identity);
                }
            }
            Message::Prepare { base, .. } | Message::Accept { base, .. } if *base > 0 => {
                let known = self.decided.get(base).ok_or("a proposal about a generation that was not decided")?;
                if known.find(identity).is_none() {
                    return Err(format!("{identity:x} proposes after generation {base}, of which it is not a member"));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Checks a generation that a process takes as decided.
    pub(super) fn decides(&mut self, generation: &Arc<Generation>, min: usize, max: usize) -> Result<(), String> {
        let number = generation.number;
        if let Some(known) = self.decided.get(&number) {
            return match known == generation {
                true => Ok(()),
                false => Err(format!("two values of generation {number}:\n{known:?}\n{generation:?}")),
            };
        }
        generation.check()?;
        let size = generation.members.len();
        if size < min || size > max {
            return Err(format!("generation {number} has {size} members"));
        }
        if number > 1 && !self.decided.contains_key(&(number - 1)) {
            return Err(format!("generation {number} was decided before the one before it"));
        }
        let before = self.decided.get(&(number - 1));
        for member in &generation.members {
            let join = member.join_number;
            if member.joined_in == number {
                if !self.asked.contains(&member.identity) {
                    return Err(format!("join number {join} of generation {number} did not ask to join"));
                }
                if !self.given.insert(join) {
                    return Err(format!("join number {join} was given twice, again in generation {number}"));
                }
            } else if before.and_then(|before| before.member(join)) != Some(member) {
                return Err(format!("join number {join} of generation {number} was not in the one before"));
            }
        }
        self.decided.insert(number, generation.clone());
        Ok(())
    }

    /// Checks that the processes that are active in the newest generation are those of one value of it, given the
    /// generation of each that is active.
    pub(super) fn one_side<'a>(&self, active: impl Iterator<Item = (u128, &'a Arc<Generation>)>) -> Result<(), String> {
        let Some((number, newest)) = self.decided.last_key_value() else { return Ok(()) };
        for (identity, generation) in active.filter(|(_, generation)| generation.number == *number) {
            if generation != newest || newest.find(identity).is_none() {
                return Err(format!("{identity:x} is active in generation {number}, whose members are others"));
            }
        }
        Ok(())
    }
}
