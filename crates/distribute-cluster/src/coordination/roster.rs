//! The members that have joined, left or failed: the leader's decisions, without sockets or clocks.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::pulse::Pulse;
use super::wire;
use super::wire::failure::Cause;
use crate::error::seconds;
use crate::job::Digest;
use crate::planted::{Defect, planted};
use crate::text::{LONGEST, clean};
use crate::{FailureKind, JobId, Membership, Task};

/// The protocol version; incremented with every change that older members would misread.
pub(super) const VERSION: u32 = 5;

/// The number of heartbeat intervals after which a member that is silent may be gone.
const OVERDUE: u32 = 2;

/// The leader's view of the members.
pub(super) struct Roster {
    membership: Membership,
    job: JobId,
    heartbeat_interval: Duration,
    heartbeat_timeout: Duration,
    seats: BTreeMap<u32, Seat>,
    /// Ranks that are not here.
    missing: BTreeSet<u32>,
    tasks_digest: [u8; 16],
    /// Whether all members were here once.
    complete: bool,
    failure: Option<wire::Failure>,
    closing: bool,
    /// Whether a member has left since all had joined.
    departed: bool,
    visits: u64,
}

/// A member that has joined.
struct Seat {
    process: u64,
    /// Whether it has said so since its welcome. Before that it may have given up this connection.
    here: bool,
    /// Distinguishes the streams of a member that has reconnected.
    visit: u64,
    address: String,
    pulse: Pulse,
    left: bool,
}

/// The reply to a task that wants to join.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The task has a seat, and counts once it is [here](Roster::arrive); its stream has this number. If `tell`, the
    /// seat was that of an earlier stream, which ends.
    Seated { visit: u64, tell: bool },
    /// The task cannot join; if `passing`, it may retry, unless its generation is over: then it is told the leader's.
    Refused { reason: String, passing: bool, generation: u64 },
}

impl Roster {
    pub(super) fn new(membership: Membership, heartbeat_interval: Duration, heartbeat_timeout: Duration) -> Roster {
        let (seats, missing, job) = (BTreeMap::new(), (0..membership.world_size()).collect(), membership.job_id());
        let tasks_digest = digest(&membership.tasks);
        Roster {
            membership,
            job,
            heartbeat_interval,
            heartbeat_timeout,
            seats,
            missing,
            tasks_digest,
            complete: false,
            failure: None,
            closing: false,
            departed: false,
            visits: 0,
        }
    }

    /// Admits a member, or returns why not.
    pub(super) fn admit(&mut self, join: &wire::Join, address: String, now: Instant) -> Answer {
        let refused = |reason: String, passing| Answer::Refused { reason, passing, generation: 0 };
        if let Some(reason) = self.other_version(join) {
            return refused(reason, false);
        }
        match self.other_generation(join) {
            Some((ours, true)) => return refused(format!("the leader is in generation {ours} still"), true),
            Some((ours, false)) => {
                let reason = format!("its generation is over; the leader is in generation {ours}");
                return Answer::Refused { reason, passing: true, generation: ours };
            }
            None => {}
        }
        // The task may belong to the next job on this address.
        if self.closing || self.failure.is_some() {
            return refused("the leader still belongs to a job that is ending".to_owned(), true);
        }
        if let Some(reason) = self.disagreement(join).filter(|_| !planted(Defect::AnyJob)) {
            return refused(reason, false);
        }
        let Some(task) = self.membership.task_of(join.rank) else {
            return refused(format!("rank {} is outside the job", join.rank), false);
        };
        let overdue = self.heartbeat_interval.saturating_mul(OVERDUE);
        match self.seats.get_mut(&join.rank) {
            Some(seat) if seat.left || (self.complete && seat.process == join.process) => {
                return refused(format!("{task} has already left the leader's job"), true);
            }
            Some(seat) if seat.process != join.process && seat.here && !planted(Defect::TwoOfARank) => {
                let reason = format!(
                    "two processes say that they are {task}: one at {}, one at {address}; give each task an index of \
                     its own",
                    seat.address
                );
                // The one that sits there may be gone without a word, as with its machine.
                return refused(reason, seat.pulse.silence(now) > overdue);
            }
            _ => {}
        }
        self.visits += 1;
        let pulse = Pulse::new(now, self.heartbeat_timeout);
        let seat = Seat { process: join.process, here: false, visit: self.visits, address, pulse, left: false };
        let replaced = self.seats.insert(join.rank, seat).is_some();
        if !self.complete {
            self.missing.insert(join.rank);
        }
        Answer::Seated { visit: self.visits, tell: replaced }
    }

    /// Records that a member has its welcome. Returns whether the others must be told, since all are here: not of each
    /// arrival, which would be millions of messages in a job of thousands. Heartbeats tell them who is missing.
    pub(super) fn arrive(&mut self, rank: u32, visit: u64) -> bool {
        let Some(seat) = self.seat(rank, visit) else { return false };
        seat.here = true;
        self.missing.remove(&rank);
        let is_last = !self.complete && self.missing.is_empty();
        self.complete |= is_last;
        is_last
    }

    /// Returns how the version or the named job of a caller that has not proved the job's secret differs.
    pub(super) fn other_job_or_version(&self, join: &wire::Join) -> Option<String> {
        let named = !self.job.is_derived() && join.job.as_ref().is_some_and(|job| !job.derived);
        self.other_version(join).or_else(|| self.other_job(join.job.as_ref()).filter(|_| named))
    }

    fn other_version(&self, join: &wire::Join) -> Option<String> {
        let (leader, theirs) = (self.membership.tasks[0], join.version);
        (theirs != VERSION).then(|| {
            format!(
                "it speaks version {theirs} of the protocol, {leader} version {VERSION}; start the same build on every \
                 task"
            )
        })
    }

    /// Returns the leader's generation if a member comes for another one of the same elastic job, and whether that is
    /// a later one.
    fn other_generation(&self, join: &wire::Join) -> Option<(u64, bool)> {
        let ((elastic, ours), job) = (self.job.generation()?, join.job.as_ref()?);
        let differs = job.elastic == elastic.as_slice() && job.generation != ours;
        differs.then_some((ours, job.generation > ours))
    }

    /// Returns how a member's description of the job differs from the leader's.
    fn disagreement(&self, join: &wire::Join) -> Option<String> {
        let here = &self.membership;
        let leader = here.tasks[0];
        let other_job = self.other_job(join.job.as_ref());
        // If both identities are derived, the difference of the descriptions is more informative.
        if other_job.is_some() && !(self.job.is_derived() && join.job.as_ref().is_some_and(|job| job.derived)) {
            return other_job;
        }
        if join.world_size != here.world_size() {
            let (theirs, ours) = (join.world_size, here.world_size());
            return Some(format!(
                "it was told that the job has {theirs} tasks, but {leader} was told {ours}; give every task the same \
                 description"
            ));
        }
        if join.rank >= join.world_size {
            return Some(format!("rank {} is outside a job of {}", join.rank, join.world_size));
        }
        if join.tasks_digest == self.tasks_digest.as_slice() {
            return other_job.or_else(|| self.other_heartbeats(join));
        }
        let differs = |(ours, theirs): &(&Task, &String)| ours.to_string() != **theirs;
        let first = here.tasks.iter().zip(&join.tasks).zip(0..).find(|(pair, _)| differs(pair));
        Some(match first {
            Some(((ours, theirs), rank)) => {
                let theirs = clean(theirs, LONGEST);
                format!(
                    "it calls rank {rank} {theirs}, but {leader} calls it {ours}; give every task the same description"
                )
            }
            None => format!("it knows other tasks of the job than {leader} does; give every task the same description"),
        })
    }

    /// Returns how a member's heartbeats differ from the leader's: one that sends them seldom would be taken for lost.
    fn other_heartbeats(&self, join: &wire::Join) -> Option<String> {
        let theirs = [join.heartbeat_interval_us, join.heartbeat_timeout_us].map(Duration::from_micros);
        let ours = [self.heartbeat_interval, self.heartbeat_timeout];
        if theirs.map(micros) == ours.map(micros) {
            return None;
        }
        let [[interval, timeout], [our_interval, our_timeout]] =
            [&theirs, &ours].map(|all| all.each_ref().map(seconds));
        Some(format!(
            "it sends a heartbeat every {interval} s and waits for {timeout} s, but {} does so every {our_interval} s \
             and waits for {our_timeout} s; set heartbeat_interval and heartbeat_timeout alike on all tasks",
            self.membership.tasks[0]
        ))
    }

    /// Returns how a caller's job differs from the leader's.
    fn other_job(&self, job: Option<&wire::Job>) -> Option<String> {
        let (ours, leader) = (&self.job, self.membership.tasks[0]);
        match job {
            Some(job) if job.id == ours.to_bytes().as_slice() => None,
            Some(job) if job.derived && ours.is_derived() => Some(format!(
                "it was told of another cluster ({}) than {leader} ({ours}); give every task the same addresses, or \
                 set DISTRIBUTE_JOB_ID alike on all tasks of one job",
                clean(&job.name, LONGEST)
            )),
            _ => Some(format!(
                "it belongs to job {}, but {leader} leads job {ours}; give each job an address of its own, or, if it \
                 is one job, set DISTRIBUTE_JOB_ID alike on all of its tasks",
                job.map_or_else(|| "(none)".to_owned(), |job| clean(&job.name, LONGEST))
            )),
        }
    }

    pub(super) fn heard(&mut self, rank: u32, visit: u64, now: Instant) {
        if let Some(seat) = self.seat(rank, visit) {
            seat.pulse.heard(now);
        }
    }

    /// Records that a member leaves and returns whether the roster changed.
    pub(super) fn leave(&mut self, rank: u32, visit: u64) -> bool {
        match (self.complete, self.seat(rank, visit)) {
            (_, None) => return false,
            (true, Some(seat)) => {
                seat.left = true;
                self.departed = true;
            }
            (false, Some(_)) => drop(self.unseat(rank)),
        }
        true
    }

    /// Records that a member's stream has ended and returns whether the roster changed.
    pub(super) fn broke(&mut self, rank: u32, visit: u64, now: Instant) -> bool {
        let Some(seat) = self.seat(rank, visit) else { return false };
        let silence = seat.pulse.silence(now);
        self.lose(rank, "its process ended or its connection broke".to_owned(), silence)
    }

    /// Records the members that have fallen silent and returns whether there are any.
    pub(super) fn look(&mut self, now: Instant) -> bool {
        let timeout = self.heartbeat_timeout;
        let here = self.seats.iter_mut().filter(|(_, seat)| !seat.left);
        let silences: Vec<(u32, Duration)> = here.map(|(rank, seat)| (*rank, seat.pulse.silence(now))).collect();
        let silent = silences.into_iter().filter(|(_, silence)| *silence > timeout && !planted(Defect::SilenceIgnored));
        silent.fold(false, |changed, (rank, silence)| {
            let how = "it gives no sign of life; its process is stopped, or the network between is broken".to_owned();
            self.lose(rank, how, silence) || changed
        })
    }

    /// Records a member's report of its own failure and returns whether the roster changed. Reports before all have
    /// joined are ignored: no work can have failed yet.
    pub(super) fn report(&mut self, rank: u32, visit: u64, report: &wire::Report) -> bool {
        let cause = Cause::Reported(clean(&report.message, LONGEST));
        self.complete && self.seat(rank, visit).is_some() && self.fail(rank, cause, report.kind)
    }

    /// Records that the leader leaves.
    pub(super) fn close(&mut self) {
        self.closing = true;
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing
    }

    /// Returns whether a stream has nothing more to send.
    pub(super) fn is_over(&self, rank: u32, visit: u64) -> bool {
        self.closing || self.seats.get(&rank).is_none_or(|seat| seat.left || seat.visit != visit)
    }

    pub(super) fn failure(&self) -> Option<&wire::Failure> {
        self.failure.as_ref()
    }

    /// Returns whether a member has left since all had joined.
    pub(super) fn anyone_has_left(&self) -> bool {
        self.departed
    }

    pub(super) fn has_left(&self, rank: u32) -> bool {
        self.seats.get(&rank).is_some_and(|seat| seat.left)
    }

    pub(super) fn world_size(&self) -> u32 {
        self.membership.world_size()
    }

    /// Returns the state that is sent to every member.
    pub(super) fn state(&self) -> wire::State {
        let missing = self.missing.iter().filter(|_| !self.complete).take(MAX_TOLD).copied().collect();
        let missing_count = if self.complete { 0 } else { self.missing.len() as u32 };
        wire::State { missing, missing_count, failure: self.failure.clone(), closing: self.closing }
    }

    fn seat(&mut self, rank: u32, visit: u64) -> Option<&mut Seat> {
        self.seats.get_mut(&rank).filter(|seat| seat.visit == visit && !seat.left)
    }

    /// Removes a lost member. Before all have joined it may come back; afterwards its loss is the job's failure.
    fn lose(&mut self, rank: u32, how: String, silence: Duration) -> bool {
        if !self.complete {
            return self.unseat(rank);
        }
        if let Some(seat) = self.seats.get_mut(&rank) {
            seat.left = true;
            self.departed = true;
        }
        let last_heard_ms = u64::try_from(silence.as_millis()).unwrap_or(u64::MAX);
        self.fail(rank, Cause::Lost(wire::Lost { how, last_heard_ms }), FailureKind::Retryable.code())
    }

    /// Frees a seat and returns whether it was taken.
    fn unseat(&mut self, rank: u32) -> bool {
        let sat = self.seats.remove(&rank).is_some();
        sat && self.missing.insert(rank)
    }

    /// Keeps the first failure and returns whether this is it.
    fn fail(&mut self, rank: u32, cause: Cause, kind: u32) -> bool {
        let first = self.failure.is_none();
        self.failure.get_or_insert(wire::Failure { rank, cause: Some(cause), kind });
        first
    }
}

/// Returns the whole microseconds of an option, by which members compare it.
pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Returns the digest that members compare in place of the names of all tasks.
pub(super) fn digest(tasks: &[Task]) -> [u8; 16] {
    let mut digest = Digest::new("tasks");
    tasks.iter().for_each(|task| digest.text(&task.to_string()));
    digest.finish()
}

/// The number of missing ranks that are sent to members; bounded to keep messages of a large job small.
const MAX_TOLD: usize = 32;

#[cfg(test)]
mod tests;
