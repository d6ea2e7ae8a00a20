//! Whose state a generation begins with, and which one a process holds.

use std::cmp::Reverse;

use super::generation::Generation;
use super::state_version::StateVersion;
use crate::{Error, Result};

/// The states of a generation's members, which have told each other how new they are. The others take over that of the
/// [source](MemberStates::source).
///
/// # Examples
/// ```
/// use distribute_cluster::{ElasticMember, Generation, MemberStates, Missing, StateVersion};
///
/// let member = |join_number: u64| ElasticMember {
///     join_number,
///     joined_in: 2,
///     identity: u128::from(join_number),
///     control: format!("10.0.0.{join_number}:2222"),
///     service: format!("10.0.0.{join_number}:2223"),
/// };
/// let members = vec![member(1), member(2)];
/// let generation = Generation { number: 7, members, next_join: 3, trained: 6 };
/// let behind = StateVersion { generation: 5, exists: true, commits: 80, progress: 0 };
/// let newest = StateVersion { generation: 6, exists: true, commits: 97, progress: 0 };
/// let states = MemberStates::new(&generation, 0, vec![behind, newest])?;
/// assert_eq!((states.source(), states.missing(0)), (1, Missing::Values));
/// assert!(MemberStates::new(&generation, 0, vec![behind, StateVersion::default()]).is_err());
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MemberStates {
    generation: u64,
    rank: usize,
    versions: Vec<StateVersion>,
    source: usize,
}

/// The part of the source's state that a member lacks and takes over; each one includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Missing {
    /// It has the newest state.
    Nothing,
    /// It has the values of all variables, and is behind in the loop around its steps.
    Progress,
    /// Its variables have other values.
    Values,
}

impl MemberStates {
    /// Finds the source in a generation: of the members with the newest state, the first. `rank` is this process's
    /// rank among them, and `versions` has those of all by rank.
    ///
    /// # Errors
    /// [`Error::Outdated`] if no member has begun with the state of the newest generation that may have
    /// [trained](Generation::trained): those who are here may be many steps behind it, or begin the job anew. One such
    /// member is enough, since it is behind the others by a step at most. [`Error::Config`] if there is no version of
    /// `rank`.
    pub fn new(generation: &Generation, rank: usize, versions: Vec<StateVersion>) -> Result<MemberStates> {
        if rank >= versions.len() {
            let given = format!("rank {rank} of {}", versions.len());
            let remedy = "Exchange the versions among all members.";
            return Err(Error::config("member states", "there is no version of this process", given, "one", remedy));
        }
        let newest = versions.iter().enumerate().max_by_key(|(rank, version)| (**version, Reverse(*rank)));
        match newest {
            Some((source, version)) if version.generation >= generation.trained => {
                Ok(MemberStates { generation: generation.number, rank, source, versions })
            }
            _ => Err(Error::Outdated { generation: generation.number, trained: generation.trained }),
        }
    }

    /// Returns the number of the generation.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns this process's rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of members.
    pub fn members(&self) -> usize {
        self.versions.len()
    }

    /// Returns the rank of the member whose state the others take over.
    pub fn source(&self) -> usize {
        self.source
    }

    /// Returns how new the state of the source is.
    pub fn newest(&self) -> StateVersion {
        self.versions[self.source]
    }

    /// Returns what the member with a rank takes over from the source.
    pub fn missing(&self, rank: usize) -> Missing {
        let (version, newest) = (self.versions[rank], self.newest());
        let has_older_values = version.generation < newest.generation || version.commits < newest.commits;
        match rank == self.source {
            true => Missing::Nothing,
            false if !version.exists || has_older_values => Missing::Values,
            false if version < newest => Missing::Progress,
            false => Missing::Nothing,
        }
    }

    /// Returns the most that a member takes over.
    pub fn most_missing(&self) -> Missing {
        (0..self.members()).map(|rank| self.missing(rank)).max().unwrap_or(Missing::Nothing)
    }
}

/// Which state a process holds: the newest generation with whose state it has begun. A process tells the others that
/// it is as new as a generation only when it has all that the generation began with.
#[derive(Clone, Copy, Debug, Default)]
pub struct HeldState {
    /// 0 for none.
    generation: u64,
    /// If no process had a state then: the number of steps of this one, which has what the generation began with as
    /// long as it has made no more.
    first: Option<u64>,
}

impl HeldState {
    /// Returns how new this process's state is, given its number of steps, and its
    /// [progress](StateVersion::progress); `None` if it has no state.
    pub fn version(&self, commits: u64, progress: Option<u64>) -> StateVersion {
        let generation = if progress.is_some() || self.first == Some(commits) { self.generation } else { 0 };
        match progress {
            Some(progress) => StateVersion { generation, exists: true, commits, progress },
            None => StateVersion { generation, ..StateVersion::default() },
        }
    }

    /// Notes that a process that has made `commits` steps belongs to a generation from now on, if it need not take over
    /// anything.
    pub fn meet(&mut self, states: &MemberStates, commits: u64) {
        if states.missing(states.rank) == Missing::Nothing {
            self.take(states, commits);
        }
    }

    /// Notes that a process that has made `commits` steps has the state with which a generation begins, its own or that
    /// of the source.
    pub fn take(&mut self, states: &MemberStates, commits: u64) {
        let first = (!states.newest().exists).then_some(commits);
        *self = HeldState { generation: states.generation, first };
    }
}
