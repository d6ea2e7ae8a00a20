//! This process's place in a job whose members change.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use distribute_cluster::{Coordination, CoordinationOptions, FailureCause, FailureKind};
use distribute_cluster::{ElasticJob, ElasticOptions, Generation, HeldState, Membership, StateVersion};
use distribute_collectives::ProcessGroup;
use parking_lot::{Mutex, MutexGuard, RwLock};

use crate::{Error, Result};

/// How the processes change that train together.
pub(crate) struct Elastic {
    /// This process among those that begin the job.
    membership: Membership,
    options: ElasticOptions,
    coordination: CoordinationOptions,
    /// Whether this process has met the members of a generation.
    has_joined: AtomicBool,
    /// This process's place in the job, from its first generation on.
    job: Mutex<Option<Arc<ElasticJob>>>,
    /// The generation in which this process trains.
    present: Arc<Mutex<Option<Present>>>,
    /// The ranks of this process in the present groups.
    groups: Groups,
    /// Whether the training loop has ended on all members.
    has_ended: AtomicBool,
    held: Mutex<HeldState>,
}

/// The groups of a process's ranks, which change between runs.
type Groups = Arc<RwLock<Arc<Vec<ProcessGroup>>>>;

struct Present {
    number: u64,
    coordination: Weak<Coordination>,
}

/// The members of a generation that have met, and how new the state of each of them is.
pub(crate) struct Met {
    pub(crate) generation: Generation,
    pub(crate) coordination: Arc<Coordination>,
    pub(crate) versions: Vec<StateVersion>,
}

impl Elastic {
    pub(crate) fn new(
        membership: Membership,
        options: ElasticOptions,
        coordination: CoordinationOptions,
        groups: Groups,
    ) -> Elastic {
        let (job, present, held) = (Mutex::default(), Arc::default(), Mutex::default());
        let (has_joined, has_ended) = (AtomicBool::new(false), AtomicBool::new(false));
        Elastic { membership, options, coordination, has_joined, job, present, groups, has_ended, held }
    }

    /// Returns an error if this process is one of several and has joined none of them.
    pub(crate) fn check_joined(&self) -> Result<()> {
        let (membership, processes) = (&self.membership, self.membership.world_size());
        if processes == 1 || self.has_joined.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (described_by, task) = (membership.source, membership.task().to_string());
        Err(Error::NotJoined { described_by, task, processes })
    }

    /// Returns the smallest and the largest number of processes.
    pub(crate) fn members(&self) -> RangeInclusive<u32> {
        self.options.members.clone()
    }

    /// Returns the number of the present generation.
    pub(crate) fn generation(&self) -> Option<u64> {
        self.present.lock().as_ref().map(|present| present.number)
    }

    /// Returns which state this process holds.
    pub(crate) fn held(&self) -> MutexGuard<'_, HeldState> {
        self.held.lock()
    }

    /// Asks whether this process may train in a generation from now on.
    pub(crate) fn begin_training(&self, generation: u64) -> Result<()> {
        let job = self.job.lock().clone();
        job.map_or(Ok(()), |job| Ok(job.begin_training(generation)?))
    }

    /// Meets the members of the next generation, and tells them how new this process's state is. `lost` has the ranks
    /// of the present one that this process knows to be lost.
    pub(crate) fn next(&self, lost: &[u32], version: StateVersion) -> Result<Met> {
        if self.has_ended.load(Ordering::Relaxed) {
            let problem = "this elastic strategy has run its training loop to the end, and a process that joins begins \
                           with the first; build another strategy for another loop";
            return Err(Error::Elastic { problem: problem.to_owned() });
        }
        let (job, after) = self.enter()?;
        let mut generation = match after {
            None => job.generation(),
            Some(after) => {
                job.suspect(after, lost);
                job.next_generation(after)?
            }
        };
        let (began, mut patience) = (Instant::now(), FIRST_MEETING);
        loop {
            match self.meet(&job, &generation, version, patience) {
                Ok(met) => return Ok(met),
                Err((error, _)) if began.elapsed() > self.coordination.join_timeout => return Err(error),
                // A member of another generation may have been refused: they share the leader's port.
                Err((error, lost)) => {
                    tracing::debug!("the members of generation {} did not meet: {error}", generation.number);
                    job.suspect(generation.number, &lost);
                    generation = job.next_generation(generation.number)?;
                    // One that answers, and does not come, is still in the computation of its step.
                    patience = (patience * 2).min(LAST_MEETING);
                }
            }
        }
    }

    /// Notes that the training loop has ended on all members.
    pub(crate) fn end(&self) {
        self.present.lock().take();
        self.has_ended.store(true, Ordering::Relaxed);
        let job = self.job.lock().clone();
        if let Some(Err(error)) = job.map(|job| job.end()) {
            // The work is done; only processes that come too late wait longer.
            tracing::warn!("{error}");
        }
    }

    /// Leaves the job. Returns whether this process was in it.
    pub(crate) fn leave(&self) -> bool {
        let job = self.job.lock().take();
        self.present.lock().take();
        // If too few would remain, the job does not continue without this process, and the request would not be
        // granted.
        let is_asked = |job: &ElasticJob| job.generation().members.len() > *self.options.members.start() as usize;
        job.inspect(|job| {
            if is_asked(job) {
                job.leave()
            }
        })
        .is_some()
    }

    /// Returns this process's place in the job, and the generation that it was in; joins the job on the first call.
    fn enter(&self) -> Result<(Arc<ElasticJob>, Option<u64>)> {
        let mut held = self.job.lock();
        let after = self.present.lock().take().map(|present| present.number);
        if let Some(job) = &*held {
            return Ok((job.clone(), after));
        }
        let job = Arc::new(ElasticJob::join(self.options.clone())?);
        let (present, groups) = (self.present.clone(), self.groups.clone());
        // Collectives of the generation that has ended fail, and their callers ask for the next one.
        job.on_change(move |newer| {
            let ended =
                present.lock().as_ref().filter(|present| present.number < newer).map(|of| of.coordination.clone());
            let Some(coordination) = ended else { return };
            // One that trains alone has no others who would tell it.
            groups.read().iter().for_each(|group| group.abort(CHANGED, FailureKind::Retryable));
            if let Some(coordination) = coordination.upgrade() {
                // It waits for an acknowledgement, which must not hold up the callers of callbacks.
                let report = move || coordination.report_failure(CHANGED, FailureKind::Retryable);
                let _ = std::thread::Builder::new().name("members-changed".to_owned()).spawn(report);
            }
        });
        Ok((held.insert(job).clone(), after))
    }

    /// Meets the other members of a generation. Returns the error and the members that were lost, if they do not meet.
    fn meet(
        &self,
        job: &ElasticJob,
        generation: &Generation,
        version: StateVersion,
        patience: Duration,
    ) -> Result<Met, (Error, Vec<u32>)> {
        let plain = |error: distribute_cluster::Error| (Error::from(error), Vec::new());
        let options = self.coordination.clone().join_timeout(patience);
        let coordination = Arc::new(job.coordinate(generation, options).map_err(plain)?);
        let (number, weak) = (generation.number, Arc::downgrade(&coordination));
        *self.present.lock() = Some(Present { number, coordination: weak });
        match coordination.exchange("elastic/version", &version.to_bytes(), patience.max(EXCHANGE)) {
            Ok(versions) => {
                let versions = versions.iter().map(|bytes| StateVersion::from_bytes(bytes));
                let versions = versions.collect::<Result<_, _>>().map_err(plain)?;
                self.has_joined.store(true, Ordering::Relaxed);
                Ok(Met { generation: generation.clone(), coordination, versions })
            }
            Err(error) => Err((error.into(), lost(&coordination))),
        }
    }
}

/// Returns the ranks that a generation has lost, as far as its members know.
pub(crate) fn lost(coordination: &Coordination) -> Vec<u32> {
    let failure = coordination.await_failure(TOLD);
    let lost = failure.filter(|failure| matches!(failure.cause, FailureCause::Lost { .. }));
    lost.map(|failure| failure.rank).into_iter().collect()
}

/// The reason for which the collectives of a generation are aborted when the next one is decided.
const CHANGED: &str = "the members of the job change";

/// How long a failed collective waits to be told which member was lost.
const TOLD: Duration = Duration::from_millis(50);

/// How long the members of a generation, all of which answered when it was decided, get to meet. Then those are left
/// out that do not answer any more, and the others get twice as long.
const FIRST_MEETING: Duration = Duration::from_millis(300);
const LAST_MEETING: Duration = Duration::from_secs(30);

/// How long the members that have met may take to tell each other how new their states are.
const EXCHANGE: Duration = Duration::from_secs(5);
