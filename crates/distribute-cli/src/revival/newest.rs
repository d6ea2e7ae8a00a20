//! The newest generation of an elastic job, from which the launcher learns whether its state is lost.

use std::time::Duration;

use distribute_cluster::{ElasticMember, Generation};
use signal_hook::consts::SIGTERM;

use super::{Action, Note, Phase, Plan, Revival};
use crate::outcome::Exit;

/// The members of the newest generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Newest {
    pub(crate) number: u64,
    /// The newest generation before this one that may have trained, or 0.
    pub(crate) trained: u64,
    pub(crate) members: Vec<Member>,
}

/// A member of a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) rank: usize,
    /// The generation in which it came in.
    pub(crate) joined_in: u64,
}

impl Newest {
    /// Returns the members of a generation, given the ports of all ranks; `None` if a member is not among them, so that
    /// the launcher does not know which of its processes that is.
    pub(crate) fn of(generation: &Generation, ports: &[u16]) -> Option<Newest> {
        let member = |member: &ElasticMember| {
            let port: u16 = member.control.rsplit_once(':')?.1.parse().ok()?;
            let rank = ports.iter().position(|of_rank| *of_rank == port)?;
            Some(Member { rank, joined_in: member.joined_in })
        };
        let members = generation.members.iter().map(member).collect::<Option<_>>()?;
        Some(Newest { number: generation.number, trained: generation.trained, members })
    }

    /// Returns whether no process that lives can continue the job, after the end of one. `is_known` tells whether a
    /// member is the newest process of its rank, and `lives` whether that one lives.
    ///
    /// Only members let others in, so those that wait do so in vain once all members are gone. Members of which none
    /// was in the newest generation that has trained find out that they lack its state, and give up one after another:
    /// the first one that does speaks for all.
    pub(crate) fn is_lost_without(
        &self,
        ended: usize,
        gave_up: bool,
        is_known: impl Fn(&Member) -> bool,
        lives: impl Fn(usize) -> bool,
    ) -> bool {
        let known: Vec<&Member> = self.members.iter().filter(|member| is_known(member)).collect();
        let has_trained = |member: &&Member| member.joined_in <= self.trained;
        let mut of_last = known.iter().filter(|member| member.rank == ended || lives(member.rank));
        !known.iter().any(|member| lives(member.rank)) || gave_up && self.trained > 0 && !of_last.any(has_trained)
    }
}

impl Revival {
    /// Takes the newest generation of the job; `None` if there is none, or the launcher does not know its members.
    pub(crate) fn handle_newest(&mut self, newest: Option<Newest>) {
        self.newest = newest;
    }

    /// Handles the start of a task, after the newest generation.
    pub(crate) fn handle_start(&mut self, rank: usize) {
        self.tasks[rank].begun_after = self.newest.as_ref().map_or(0, |newest| newest.number);
    }

    /// After the end of a task, marks the others as stranded if none of them can continue the job.
    pub(super) fn strand(&mut self, rank: usize, exit: Exit) {
        let Some(newest) = self.newest.as_ref().filter(|_| self.phase == Phase::Running) else { return };
        let tasks = &self.tasks;
        let trains = |rank: usize| tasks[rank].plan == Plan::Run && !tasks[rank].is_stranded;
        let is_known = |member: &Member| member.joined_in > tasks[member.rank].begun_after;
        if newest.is_lost_without(rank, exit.blames_others(), is_known, trains) {
            for task in self.tasks.iter_mut().filter(|task| task.plan == Plan::Run) {
                task.is_stranded = true;
            }
        }
    }

    /// Begins another job with all tasks. Those that run wait for members of the lost one, and are stopped.
    pub(super) fn begin_another(&mut self, now: Duration) {
        self.jobs_lost += 1;
        self.newest = None;
        self.actions.push_back(Action::Note(Note::AllLost { running: self.living() }));
        for task in &mut self.tasks {
            (task.starts_in_job, task.begun_after) = (0, 0);
            if let Some(supervisor) = task.supervisor.as_mut().filter(|_| task.plan == Plan::Run) {
                supervisor.stop(SIGTERM, now);
            }
        }
    }

    /// Returns how many tasks run that are not stranded.
    pub(super) fn training(&self) -> usize {
        self.tasks.iter().filter(|task| task.plan == Plan::Run && !task.is_stranded).count()
    }
}
