//! Training loops whose processes join and leave.

use distribute_collectives::{Rank, on_local_ranks};
use distribute_strategy::{Gathering, Missing, Strategy};
use distribute_types::{ErrorClass, FailureKind, Scope};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::checkpoint::{Checkpointed, Snapshot};
use crate::{Error, Result};

/// The state of a training loop apart from its model and optimizer: all that a process needs which joins it.
pub trait Standing: Serialize + DeserializeOwned {
    /// Returns the strategy's [`commits`](Strategy::commits) after the last step that this state describes. It is
    /// compared with what optimizers have done, so that no step is made twice because a loop has not noted it.
    fn commits(&self) -> u64;

    /// Returns a number that grows whenever the state changes without a step of an optimizer, such as the number of the
    /// epoch. Of two processes that have made as many steps, the one with the larger number is further. Default: 0.
    fn progress(&self) -> u64 {
        0
    }
}

/// The members of a generation, with which this process now trains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined<S> {
    /// The number of the generation.
    pub generation: u64,
    /// The number of its members.
    pub members: usize,
    /// The state that this process has taken over from another, with its model and optimizer; `None` if it has kept its
    /// own.
    pub adopted: Option<S>,
    /// Whether no member had a state: the job begins, with the first member's model and optimizer.
    pub begins: bool,
}

/// The key under which a loop's state travels.
const STATE: &str = "elastic";

/// Runs a training loop, again and again if the strategy is elastic and processes join or are lost, and returns what
/// `body` returns at its end.
///
/// Before each call of `body` all members take over the model, the optimizer and the state of the process that is
/// furthest, unless they are as far. `body` continues from `state`, and changes it at once when `run` has returned, so
/// that it describes all steps of `parts` when a later operation fails. The data of the step that failed are divided
/// anew: begin a pass again at its [position](distribute_strategy::DistributedIterator::position). Under a strategy
/// that is not elastic `body` runs once.
///
/// # Errors
/// The error of `body`, if it is of this process alone or the strategy is not elastic; the errors of [`join`].
///
/// # Examples
/// ```
/// use distribute_collectives::ReduceOp;
/// use distribute_input::{Dataset, InputPosition};
/// use distribute_strategy::{Error, Strategy};
/// use distribute_train::elastic::{self, Standing};
/// use distribute_values::Axis;
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Default, Serialize, Deserialize)]
/// struct Sum {
///     commits: u64,
///     steps: u64,
///     position: Option<InputPosition>,
///     sum: i64,
/// }
///
/// impl Standing for Sum {
///     fn commits(&self) -> u64 {
///         self.commits                                // none here: no optimizer makes a step
///     }
///     fn progress(&self) -> u64 {
///         self.steps
///     }
/// }
///
/// let strategy = Strategy::default_strategy()?;       // or MultiWorkerMirroredStrategy::builder().elastic(1..=8)
/// let data = strategy.distribute_dataset(&Dataset::range(0..10).batch(4))?;
/// let sum = elastic::run(&strategy, &[], Sum::default(), |state| {
///     let mut batches = match &state.position {
///         Some(position) => data.iter_from(position)?,
///         None => data.iter_epoch(0),
///     };
///     while let Some(batch) = batches.get_next_as_optional()? {
///         let parts = strategy.run_with(batch, |context, rows| {
///             Ok::<_, Error>(context.weight() as i64 * rows.as_slice().iter().sum::<i64>())
///         })?;
///         state.sum += strategy.reduce(ReduceOp::Sum, &parts, Axis::None)?;
///         (state.commits, state.steps) = (strategy.commits(), state.steps + 1);
///         state.position = Some(batches.position()?);
///     }
///     Ok::<_, distribute_train::Error>(state.sum)
/// })?;
/// assert_eq!(sum, 45);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn run<S: Standing, R, E: From<Error> + ErrorClass>(
    strategy: &Strategy,
    parts: &[&dyn Checkpointed],
    mut state: S,
    mut body: impl FnMut(&mut S) -> Result<R, E>,
) -> Result<R, E> {
    if strategy.elastic().is_none() {
        return body(&mut state);
    }
    let mut stands = false;
    loop {
        let joined = join(strategy, parts, stands.then_some(&state))?;
        state = joined.adopted.unwrap_or(state);
        stands = true;
        let outcome =
            body(&mut state).and_then(|result| Ok(strategy.end_job().map(|()| result).map_err(Error::from)?));
        match outcome {
            Err(error) if is_of_members(&error) => tracing::warn!("{error}"),
            outcome => return strategy.report_failure_as(outcome, ErrorClass::failure_kind),
        }
    }
}

/// Returns whether an error says that a member of the job was lost, left or joined: then the others [`join`] again. It
/// does not for errors of this process alone, such as those of its disk.
pub fn is_of_members(error: &impl ErrorClass) -> bool {
    let class = error.class();
    class.scope != Scope::Caller && class.kind == FailureKind::Retryable
}

/// Joins the next generation of an elastic job: for programs that cannot use [`run`].
///
/// `own` is this process's state; `None` before its first generation. Afterwards all members have the model, the
/// optimizer and the state of the one that is furthest; members that are as far keep theirs. Members that are lost
/// meanwhile are left out.
///
/// # Errors
/// [`Error::Strategy`] if too few members are left, if a majority is needed and not there, if the newest state is lost
/// with the processes that had it, or if the strategy is not elastic; [`Error::Part`] if a part cannot be saved or
/// loaded.
pub fn join<S: Standing>(strategy: &Strategy, parts: &[&dyn Checkpointed], own: Option<&S>) -> Result<Joined<S>> {
    if let Some((described, made)) = own.map(|own| (own.commits(), strategy.commits()))
        && described != made
    {
        return Err(Error::Undescribed { described, made });
    }
    let mut adopted = None;
    for attempt in 1.. {
        let own = adopted.as_ref().or(own);
        let gathering = strategy.next_generation(own.map(Standing::progress))?;
        let (generation, members) = (gathering.number(), gathering.states().members());
        let begins = !gathering.states().newest().exists;
        let settled = settle(strategy, parts, own, &gathering).and_then(|taken| {
            adopted = taken.or(adopted.take());
            Ok(gathering.begin()?)
        });
        match settled {
            Ok(()) => return Ok(Joined { generation, members, adopted, begins }),
            Err(error) if !is_of_members(&error) || attempt == ATTEMPTS => return Err(error),
            Err(error) => tracing::debug!("{error}"),
        }
    }
    Err(distribute_strategy::Error::Fixed.into())
}

/// The number of generations in a row that may end before their members have the same state.
const ATTEMPTS: u32 = 20;

/// Forms the groups of a generation, and gives all members the state of the one that is furthest. Returns the state
/// that this process has taken over.
fn settle<S: Standing>(
    strategy: &Strategy,
    parts: &[&dyn Checkpointed],
    own: Option<&S>,
    gathering: &Gathering<'_>,
) -> Result<Option<S>> {
    let states = gathering.states();
    let (source, newest, missing) = (states.source(), states.newest(), states.missing(states.rank()));
    let (is_source, sent) = (states.rank() == source, states.most_missing());
    let document = match is_source && sent > Missing::Nothing {
        true => document(strategy, parts, own, sent == Missing::Values)?,
        false => Vec::new(),
    };
    gathering.form()?;
    let mut adopted = None;
    if sent > Missing::Nothing
        && let Some(document) = broadcast(strategy, source, document, missing > Missing::Nothing)?
    {
        let snapshot = Snapshot::from_bytes(&document)?;
        if missing == Missing::Values {
            parts.iter().try_for_each(|part| part.load(strategy, &snapshot)).map_err(Error::Part)?;
            strategy.set_commits(newest.commits);
        }
        adopted = snapshot.get_state(STATE)?;
    }
    if is_source && newest.exists {
        let (generation, members) = (gathering.number(), states.members());
        tracing::info!("generation {generation}: {members} processes, after {} steps", newest.commits);
    }
    Ok(adopted)
}

/// Returns all that another process needs. This process trains by itself meanwhile, so nothing is exchanged.
fn document<S: Standing>(
    strategy: &Strategy,
    parts: &[&dyn Checkpointed],
    own: Option<&S>,
    with_tensors: bool,
) -> Result<Vec<u8>> {
    let mut snapshot = Snapshot::new(strategy.commits());
    if with_tensors {
        parts.iter().try_for_each(|part| part.save(strategy, &mut snapshot)).map_err(Error::Part)?;
    }
    if let Some(own) = own {
        snapshot.put_state(STATE, own)?;
    }
    snapshot.check_put_once()?;
    snapshot.to_bytes()
}

/// Sends the document of the process with this rank, in pieces and with its digest. Returns it on the members that
/// lack it; the others take part, and keep no more than a piece.
fn broadcast(strategy: &Strategy, source: usize, document: Vec<u8>, lacks: bool) -> Result<Option<Vec<u8>>> {
    let root = source * strategy.topology().replicas_per_worker();
    let is_source = strategy.topology().worker() == source;
    let from_source = |values: Vec<u64>| -> Result<Vec<u64>> {
        let all =
            on_local_ranks(&strategy.groups(), |_, group| group.start().broadcast(values.clone(), Rank::of(root)))?;
        Ok(all.unwrap_or_default())
    };
    let digest = |bytes: &[u8]| u64::from(crc32c::crc32c(bytes));
    let header = from_source(vec![document.len() as u64, digest(&document)])?;
    let (length, expected) = (header.first().copied().unwrap_or(0), header.get(1).copied().unwrap_or(0));
    let no_memory =
        || Error::Part(format!("another process sends {length} bytes, for which there is no memory").into());
    let length = usize::try_from(length).map_err(|_| no_memory())?;
    let mut received = Vec::new();
    if lacks {
        // The length comes from another process, so a failed allocation must not abort.
        received.try_reserve_exact(length).map_err(|_| no_memory())?;
    }
    for begin in (0..length).step_by(PIECE) {
        let piece = begin..length.min(begin + PIECE);
        let bytes = if is_source { document[piece.clone()].to_vec() } else { vec![0; piece.len()] };
        let all =
            on_local_ranks(&strategy.groups(), |_, group| group.start().broadcast(bytes.clone(), Rank::of(root)))?;
        if lacks {
            received.extend_from_slice(&all.unwrap_or_default());
        }
    }
    match received.len() == length && digest(&received) == expected {
        _ if !lacks => Ok(None),
        true => Ok(Some(received)),
        false => Err(Error::Part("the state that another process sent has arrived damaged".into())),
    }
}

/// Bytes of each operation by which a state is sent.
const PIECE: usize = 16 << 20;
