//! Generations of an elastic job, and the changes that lead from one to the next.

use std::collections::HashSet;
use std::fmt;

use crate::job::Digest;

/// The members of an elastic job between two changes, in the order of their ranks. It is decided at most once for each
/// number.
///
/// # Examples
/// ```
/// use distribute_cluster::{ElasticMember, Generation};
///
/// let (control, service) = ("10.0.0.1:2222".to_owned(), "10.0.0.1:40123".to_owned());
/// let member = ElasticMember { join_number: 4, joined_in: 7, identity: 1 << 32, control, service };
/// let generation = Generation { number: 7, members: vec![member], next_join: 5, trained: 6 };
/// assert_eq!(generation.to_string(), "generation 7 of 1 member: 10.0.0.1:2222");
/// assert_eq!(Generation::from_bytes(&generation.to_bytes())?, generation);
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generation {
    /// Its number: 1 is the first that is decided.
    pub number: u64,
    /// Its members by rank, which is the order of their join numbers.
    pub members: Vec<ElasticMember>,
    /// The join number that the next new member gets.
    pub next_join: u64,
    /// The newest generation before this one whose members may have trained, so that no process continues without
    /// their state; 0 if none has. See [`ElasticJob::begin_training`](crate::ElasticJob::begin_training).
    pub trained: u64,
}

/// A process as a member of a generation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ElasticMember {
    /// Given out once in a job, when the process comes in. A process that was removed and joins again gets another.
    pub join_number: u64,
    /// The number of the generation in which the process came in. In that generation it needs the state of an earlier
    /// member, or a checkpoint.
    pub joined_in: u64,
    /// The process's own number, drawn at random when it starts. Its lowest 32 bits count how often it has been
    /// removed.
    pub identity: u128,
    /// The `host:port` at which it takes messages about generations.
    pub control: String,
    /// The `host:port` at which it serves [`Coordination`](crate::Coordination) when it leads.
    pub service: String,
}

impl Generation {
    /// The largest number of members.
    pub const MAX_MEMBERS: usize = 4096;

    /// Length limit of an address of a member, in bytes.
    pub const MAX_ADDRESS_BYTES: usize = 100;

    /// The last number of a generation or of a ballot's round, and the last join number but one that is given out. No
    /// job counts that far; what claims to have is refused, so that there is always a next one.
    pub(super) const LAST: u64 = u64::MAX >> 1;

    /// Generation 0: the seeds, by which the first members find each other.
    pub(super) fn of_seeds(seeds: &[String]) -> Generation {
        let seed = |(index, control): (usize, &String)| ElasticMember {
            join_number: index as u64,
            joined_in: 0,
            identity: 0,
            control: control.clone(),
            service: String::new(),
        };
        Generation { number: 0, members: seeds.iter().enumerate().map(seed).collect(), next_join: 0, trained: 0 }
    }

    /// Returns the member with a join number.
    pub(super) fn member(&self, join_number: u64) -> Option<&ElasticMember> {
        let place = self.members.binary_search_by_key(&join_number, |member| member.join_number).ok()?;
        self.members.get(place)
    }

    /// Returns the member that is a process.
    pub(super) fn find(&self, identity: u128) -> Option<&ElasticMember> {
        // The seeds of generation 0 are known by their addresses alone.
        self.members.iter().find(|member| self.number > 0 && member.identity == identity)
    }

    /// Returns the rank of a process.
    pub(super) fn rank_of(&self, identity: u128) -> Option<u32> {
        self.members.iter().position(|member| member.identity == identity).map(|rank| rank as u32)
    }

    /// Returns how many of its members decide the next generation.
    pub(super) fn majority(&self) -> usize {
        self.members.len() / 2 + 1
    }

    /// Returns the generation that a change makes of this one. No seed stays unless it is among those that come in.
    ///
    /// # Errors
    /// A sentence, if the change does not fit this generation.
    pub(super) fn apply(&self, change: &Change) -> Result<Generation, String> {
        let removed: HashSet<u64> = change.removed.iter().copied().collect();
        if let Some(stranger) = removed.iter().find(|join| self.member(**join).is_none()) {
            return Err(format!("it removes join number {stranger}, which generation {} does not have", self.number));
        }
        let stays = |member: &&ElasticMember| self.number > 0 && !removed.contains(&member.join_number);
        let mut members: Vec<ElasticMember> = self.members.iter().filter(stays).cloned().collect();
        let (number, mut next_join) = (self.number + 1, self.next_join);
        for Candidate { identity, control, service } in change.added.iter().cloned() {
            members.push(ElasticMember { join_number: next_join, joined_in: number, identity, control, service });
            next_join += 1;
        }
        let trained = if change.trains { self.number } else { self.trained };
        let next = Generation { number, members, next_join, trained };
        next.check()?;
        Ok(next)
    }

    /// Checks what comes from outside.
    ///
    /// # Errors
    /// A sentence, if it is not a generation that can be decided.
    pub(super) fn check(&self) -> Result<(), String> {
        let number = self.number;
        if number == 0 || self.members.is_empty() || self.members.len() > Generation::MAX_MEMBERS {
            let (members, limit) = (self.members.len(), Generation::MAX_MEMBERS);
            return Err(format!("generation {number} has {members} members; 1 to {limit} are allowed"));
        }
        if number > Generation::LAST || self.next_join > Generation::LAST {
            return Err(format!("generation {number} with next join number {} is beyond the last one", self.next_join));
        }
        if self.trained >= number {
            return Err(format!("generation {number} follows generation {}, which has trained", self.trained));
        }
        if let Some(pair) = self.members.windows(2).find(|pair| pair[0].join_number >= pair[1].join_number) {
            let join = pair[1].join_number;
            return Err(format!("join number {join} is not in its order in generation {number}"));
        }
        if self.members.last().is_some_and(|last| last.join_number >= self.next_join) {
            return Err(format!("the next join number of generation {number} is taken already"));
        }
        let mut known = HashSet::with_capacity(self.members.len());
        for member in &self.members {
            if !known.insert(member.identity) || member.joined_in == 0 || member.joined_in > number {
                return Err(format!("{} of generation {number} is there twice, or from nowhere", member.control));
            }
            for address in [&member.control, &member.service] {
                check_address(address)?;
            }
        }
        Ok(())
    }

    /// Returns a digest of its number and members, so that two jobs never take each other's generations for their own.
    pub(super) fn digest(&self) -> [u8; 16] {
        let mut digest = Digest::new("generation");
        digest.number(self.number);
        digest.number(self.next_join);
        digest.number(self.trained);
        digest.number(self.members.len() as u64);
        for member in &self.members {
            digest.number(member.join_number);
            digest.number((member.identity >> 64) as u64);
            digest.number(member.identity as u64);
        }
        digest.finish()
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let members = self.members.len();
        let shown: Vec<&str> = self.members.iter().take(SHOWN).map(|member| member.control.as_str()).collect();
        let more = if members > SHOWN { ", …" } else { "" };
        let s = if members == 1 { "" } else { "s" };
        write!(f, "generation {} of {members} member{s}: {}{more}", self.number, shown.join(", "))
    }
}

/// The number of addresses in the text of a generation.
const SHOWN: usize = 8;

/// A process that asks to join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) identity: u128,
    pub(super) control: String,
    pub(super) service: String,
}

/// Returns what stays the same of an identity when a process joins again.
pub(super) fn process_of(identity: u128) -> u128 {
    identity >> 32
}

/// The value that is decided: what becomes of the generation before. Join numbers follow from it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Change {
    /// Join numbers of those that are no longer members.
    pub(super) removed: Vec<u64>,
    /// Processes that come in, in the order of their new join numbers.
    pub(super) added: Vec<Candidate>,
    /// Whether members of the generation before may have trained in it.
    pub(super) trains: bool,
}

/// Checks an address by its length and form, before it is kept.
///
/// # Errors
/// A sentence, if it is too long or has another form.
pub(super) fn check_address(address: &str) -> Result<(), String> {
    let limit = Generation::MAX_ADDRESS_BYTES;
    let shown = crate::text::clean(address, limit);
    if address.len() > limit {
        return Err(format!("the address {shown} has {} bytes; at most {limit} are allowed", address.len()));
    }
    match crate::host::split(address) {
        Ok((host, _)) if !host.is_empty() && host.chars().all(|c| c.is_ascii_graphic()) => Ok(()),
        _ => Err(format!("the address {shown:?} is not of the form host:port")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(identity: u128) -> Candidate {
        Candidate { identity, control: format!("h{identity}:1"), service: format!("h{identity}:2") }
    }

    #[test]
    fn join_numbers_are_given_once_and_order_the_ranks() {
        let change = |removed: &[u64], added: &[u128]| {
            let added = added.iter().copied().map(candidate).collect();
            Change { removed: removed.to_vec(), added, ..Change::default() }
        };
        let seeds = Generation::of_seeds(&["a:1".to_owned(), "b:1".to_owned()]);
        let first = seeds.apply(&change(&[], &[7, 8, 9])).unwrap();
        assert_eq!((first.number, first.next_join, first.rank_of(8)), (1, 3, Some(1)));
        let second = first.apply(&change(&[0], &[7 + 1]));
        assert!(second.unwrap_err().contains("h8:1 of generation 2 is there twice"));
        let second = first.apply(&change(&[0], &[10])).unwrap();
        let joins: Vec<(u64, u64)> = second.members.iter().map(|m| (m.join_number, m.joined_in)).collect();
        assert_eq!(joins, [(1, 1), (2, 1), (3, 2)]);
        assert_eq!(second.to_string(), "generation 2 of 3 members: h8:1, h9:1, h10:1");
        assert!(second.apply(&change(&[0], &[])).unwrap_err().contains("join number 0"));
        assert!(second.apply(&change(&[1, 2, 3], &[])).unwrap_err().contains("0 members"));
        let far = Candidate { control: "x".repeat(99) + ":1", ..candidate(11) };
        let far = Change { added: vec![far], ..Change::default() };
        assert!(second.apply(&far).unwrap_err().contains("101 bytes"));
    }

    #[test]
    fn the_newest_generation_that_has_trained_is_carried_on() {
        let added = |identity, trains| Change { added: vec![candidate(identity)], trains, ..Change::default() };
        let mut generation = Generation::of_seeds(&["a:1".to_owned()]);
        let mut trained = Vec::new();
        for (identity, trains) in [(1, false), (2, true), (3, false), (4, true)] {
            generation = generation.apply(&added(identity, trains)).unwrap();
            trained.push(generation.trained);
        }
        assert_eq!(trained, [0, 1, 1, 3]);
        let ahead = Generation { trained: 4, ..generation };
        assert!(ahead.check().unwrap_err().contains("generation 4 follows generation 4"));
    }
}
