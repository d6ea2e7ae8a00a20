//! The present calls of the ranks of this process.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use distribute_types::{FNV64, fnv1a_64};

use crate::engine::Engine;
use crate::sync::lock;
use crate::{Kind, Rank};

/// The activity of one rank of this process in one of its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Presence {
    /// The group's name.
    pub group: String,
    /// A digest of the names of the group's ranks. It tells groups of the same name apart.
    pub members: u64,
    /// The number of ranks in the group.
    pub world_size: usize,
    /// This rank's index.
    pub rank: Rank,
    /// This rank's name, such as `worker:1`.
    pub name: String,
    /// The number of calls that this rank has made; it has entered every call with a lower sequence number.
    pub calls: u64,
    /// The call in which the rank is: the oldest one for which a thread is blocked, else the oldest one that runs in
    /// the background. An operation in the background whose result was not fetched yet counts, although it may be over.
    pub call: Option<PresentCall>,
    /// The last call that has ended.
    pub last: Option<EndedCall>,
}

/// A call that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PresentCall {
    /// The kind of operation.
    pub kind: Kind,
    /// Position in the group's order of calls, from 0.
    pub sequence: u64,
    /// The call as text, as errors print it.
    pub call: String,
    /// Bytes of this rank's values.
    pub bytes: u64,
    /// Time since the rank entered it.
    pub since: Duration,
    /// Time for which a thread of the rank is blocked in it; `None` while it runs in the background.
    pub blocked: Option<Duration>,
}

/// A call that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EndedCall {
    /// The call as text, as errors print it.
    pub call: String,
    /// Time since it ended.
    pub ago: Duration,
}

/// Returns what the ranks of this process do at this moment, for every group that lives, in the order in which the
/// groups were formed.
///
/// It may be called from any thread, also while all others are blocked. Device groups that NCCL runs are not part of
/// it: their calls return before the operation is over.
///
/// # Cost
/// One lock of each rank's recorder, which is held for some microseconds.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use distribute_collectives::{ProcessGroup, Rank, present};
///
/// let ranks = ProcessGroup::local(2)?;
/// std::thread::scope(|scope| {
///     scope.spawn(|| ranks[0].barrier());
///     let waits = || present().into_iter().find(|one| one.rank == Rank(0) && one.call.is_some());
///     let waiting = loop {
///         if let Some(waiting) = waits() {
///             break waiting;
///         }
///         std::thread::sleep(Duration::from_millis(1));
///     };
///     assert_eq!(waiting.call.map(|call| call.sequence), Some(0));
///     ranks[1].barrier()
/// })?;
/// # Ok::<(), distribute_collectives::Error>(())
/// ```
pub fn present() -> Vec<Presence> {
    let engines: Vec<Arc<Engine>> = lock(&ENGINES).iter().filter_map(Weak::upgrade).collect();
    engines.iter().flat_map(|engine| of_engine(engine)).collect()
}

/// Adds an engine to those whose ranks are [`present`].
pub(crate) fn add(engine: &Arc<Engine>) {
    let mut engines = lock(&ENGINES);
    engines.retain(|known| known.strong_count() > 0);
    engines.push(Arc::downgrade(engine));
}

/// The engines of this process, in the order in which they were made.
static ENGINES: Mutex<Vec<Weak<Engine>>> = Mutex::new(Vec::new());

fn of_engine(engine: &Engine) -> Vec<Presence> {
    let context = &engine.context;
    let names = context.names.iter().flat_map(|name| name.bytes().chain([0]));
    let members = fnv1a_64(FNV64, names);
    let of_rank = |local: usize| {
        let (calls, call, last) = engine.recorders[local].present();
        let (group, name) = (context.name.clone(), context.local_name(local));
        let world_size = context.world_size();
        Presence { group, members, world_size, rank: context.rank(local), name, calls, call, last }
    };
    // A rank that has dropped its handle has left.
    (0..context.local_ranks).filter(|local| !engine.has_left(*local)).map(of_rank).collect()
}
