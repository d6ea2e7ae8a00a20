//! Sharded variables: how their parts are created from a whole value, and gathered to one.
//!
//! A sharded variable's components are the local replicas' parts ([`ShardLayout`]). Adapters of tensor libraries gather
//! the whole when a model uses it ([`start_gather`]), inside `run`; [`Variable::whole`] and
//! [`Variable::whole_on_chief`] are for code outside. Replicas must gather in the same order. Every call carries a
//! digest of the variable's name, so that a difference is an error on all of them and never the value of another
//! variable.

use distribute_collectives::{Error as CollectiveError, Rank, Work};
use distribute_device::{BufferRef, Element};
use distribute_strategy::{ShardGroups, Strategy, get_replica_context};
use distribute_types::with_dtype;
use distribute_values::TensorStorage;

use crate::library::dtype;
use crate::parameters::overwrite;
use crate::shard_layout::tag;
use crate::tensor_split::{self, TensorSplit};
use crate::{Error, ShardLayout, TensorLibrary, Variable};

/// The whole of a sharded variable, on its way from all replicas of a shard group.
///
/// A replica may drop it without [waiting](Gathering::wait), for example if it fails: the other replicas get its part.
#[derive(Debug)]
#[must_use = "the variable comes from `wait`"]
pub struct Gathering<T: Element> {
    /// `None` once it was waited for.
    work: Option<Work<Vec<T>>>,
}

impl<T: Element> Gathering<T> {
    /// Returns whether [`wait`](Gathering::wait) would return at once.
    pub fn is_done(&self) -> bool {
        self.work.as_ref().is_none_or(Work::is_done)
    }

    /// Returns the elements of the whole variable, in row-major order and without padding.
    ///
    /// # Errors
    /// [`Mismatch`](CollectiveError::Mismatch) if another replica gathers another variable, and the errors of every
    /// collective operation.
    pub fn wait(mut self) -> Result<Vec<T>, CollectiveError> {
        let work = self.work.take();
        work.map_or_else(|| Ok(Vec::new()), |work| work.wait())
    }
}

impl<T: Element> Drop for Gathering<T> {
    fn drop(&mut self) {
        // Dropping a work waits for it, and peers may wait for this replica elsewhere.
        if let Some(work) = self.work.take().filter(|work| !work.is_done())
            && let Some(context) = get_replica_context()
        {
            context.drop_after_run(work);
        }
    }
}

/// Starts to gather the whole of a sharded variable from the parts of all replicas of a shard group.
///
/// `part` is this replica's part with its padding, `name` the variable's path. The result is `spare`, a vector whose
/// memory is used again if it has enough, and whose elements do not matter; an adapter can make a tensor of it without
/// a copy. The operation proceeds while the program computes.
///
/// # Ordering
/// Every replica of the shard group gathers the same variables in the same order, as often as the others.
///
/// # Errors
/// [`Length`](CollectiveError::Length) if `part` has another length than the layout says;
/// [`Aborted`](CollectiveError::Aborted) if the group has failed already.
///
/// # Examples
/// ```
/// use distribute_optim::backend::{ShardLayout, start_gather};
/// use distribute_strategy::{Error, FullyShardedStrategy};
///
/// let strategy = FullyShardedStrategy::builder().devices(["CPU:0", "CPU:1"]).mirror_below(1).build()?;
/// let layout = ShardLayout::of(&strategy, &[3]).expect("it is sharded");
/// let wholes = strategy.run_with((), |context, ()| {
///     let part = layout.cut(&[1.0f32, 2.0, 3.0], layout.part_of(context.local_replica_id()));
///     let groups = context.shard_groups().expect("the strategy shards");
///     let gathering = start_gather(&groups, "fc.weight", &layout, &part, Vec::new())?;
///     // … compute meanwhile …
///     Ok::<_, Error>(gathering.wait()?)
/// })?;
/// assert_eq!(wholes.values(), [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]);
/// # Ok::<(), Error>(())
/// ```
pub fn start_gather<T: Element>(
    groups: &ShardGroups,
    name: &str,
    layout: &ShardLayout,
    part: &[T],
    spare: Vec<T>,
) -> Result<Gathering<T>, CollectiveError> {
    let work = gather_work(groups, name, layout, part, spare)?;
    Ok(Gathering { work: Some(work) })
}

fn gather_work<T: Element>(
    groups: &ShardGroups,
    name: &str,
    layout: &ShardLayout,
    part: &[T],
    spare: Vec<T>,
) -> Result<Work<Vec<T>>, CollectiveError> {
    let group = groups.gathers();
    let own = without_padding(groups, layout, part)?;
    let mut whole = spare;
    whole.resize(layout.len(), T::default());
    whole[layout.range(group.rank().index())].copy_from_slice(own);
    group.parts(&layout.counts()).tag(tag(name)).start().all_gather_in_place(whole)
}

/// Returns the elements of this replica's part without its padding.
fn without_padding<'a, T: Element>(
    groups: &ShardGroups,
    layout: &ShardLayout,
    part: &'a [T],
) -> Result<&'a [T], CollectiveError> {
    let (got, expected) = (part.len(), layout.part_len());
    let count = layout.range(groups.gathers().rank().index()).len();
    match part.get(..count) {
        Some(own) if got == expected => Ok(own),
        _ => {
            let remedy = "pass the component of the variable that the layout was made for";
            Err(CollectiveError::Length { what: "part of a sharded variable", got, expected, remedy })
        }
    }
}

/// Returns the parts of this process's replicas, with their padding, of a value that one replica has: the first of all,
/// in the chief's process.
///
/// Every process calls this, outside `run`, for the same variables in the same order. The chief passes the elements of
/// the whole; other processes' are not read. So no process needs more memory than its own parts and one whole variable.
///
/// # Errors
/// [`Length`](CollectiveError::Length) if the chief's value has another length than the layout says, and the errors of
/// every collective operation.
///
/// # Examples
/// ```
/// use distribute_optim::backend::{ShardLayout, scatter_whole};
/// use distribute_strategy::FullyShardedStrategy;
///
/// let strategy = FullyShardedStrategy::builder().devices(["CPU:0", "CPU:1"]).mirror_below(1).build()?;
/// let layout = ShardLayout::of(&strategy, &[3]).expect("it is sharded");
/// let parts = scatter_whole(&strategy, "fc.weight", &layout, vec![1.0f32, 2.0, 3.0])?;
/// assert_eq!(parts, [[1.0, 2.0], [3.0, 0.0]]);
/// # Ok::<(), distribute_strategy::Error>(())
/// ```
pub fn scatter_whole<T: Element>(
    strategy: &Strategy,
    name: &str,
    layout: &ShardLayout,
    whole: Vec<T>,
) -> Result<Vec<Vec<T>>, CollectiveError> {
    scatter_wholes(strategy, name, layout, vec![whole; strategy.tensor_parallel()])
}

/// Returns the parts of this process's ranks like [`scatter_whole`], of a variable that is split among tensor ranks:
/// the chief passes the elements of each rank's part of it, in the order of their places.
///
/// # Errors
/// The errors of [`scatter_whole`] occur in the same cases.
pub fn scatter_wholes<T: Element>(
    strategy: &Strategy,
    name: &str,
    layout: &ShardLayout,
    wholes: Vec<Vec<T>>,
) -> Result<Vec<Vec<T>>, CollectiveError> {
    let (first, ranks, tag) = (strategy.topology().first_replica(), strategy.tensor_parallel(), tag(name));
    let counts = layout.counts();
    let mut wholes = wholes.into_iter();
    // The first shard group gets its parts from the first replica.
    let scattered = strategy.on_shard_groups(|local, groups| {
        let replica = first + local / ranks;
        if replica >= layout.parts() {
            return Ok::<_, CollectiveError>(None);
        }
        let input = if replica == 0 { wholes.next().unwrap_or_default() } else { Vec::new() };
        let output = vec![T::default(); counts[replica]];
        groups.gathers().parts(&counts).tag(tag).start().scatter(input, output, Rank(0)).map(Some)
    })?;
    let mut parts: Vec<Vec<T>> = (0..strategy.num_local_replicas())
        .map(|local| vec![T::default(); layout.range(layout.part_of(local)).len()])
        .collect();
    for (part, scattered) in parts.iter_mut().zip(scattered) {
        if let Some([_, own]) = scattered {
            *part = own;
        }
    }
    // The others get theirs from the replicas that they mirror.
    let mut own = parts.into_iter().map(Some).collect::<Vec<_>>();
    let mirrored = strategy.on_shard_groups(|local, groups| match groups.mirrors() {
        Some(mirrors) => {
            let part = own[local].take().unwrap_or_default();
            mirrors.start().broadcast(part, Rank(0)).map(Some)
        }
        None => Ok::<_, CollectiveError>(None),
    })?;
    let parts = own.into_iter().zip(mirrored).map(|(own, mirrored)| {
        let mut part = mirrored.or(own).unwrap_or_default();
        part.resize(layout.part_len(), T::default());
        part
    });
    Ok(parts.collect())
}

impl<L: TensorLibrary> Variable<L> {
    /// Returns one value of a variable for all replicas: the whole of a sharded one, the joined parts of one that is
    /// split among tensor ranks, else the first replica's component, which is a live handle. Every process calls this,
    /// outside `run`.
    ///
    /// # Cost
    /// Every replica of the process receives the whole of a sharded variable.
    ///
    /// # Errors
    /// The collective's error if a process is missing or fails, and the library's if a tensor cannot be read or
    /// created.
    pub fn whole(&self, strategy: &Strategy) -> Result<L::Tensor, L::Error> {
        match self.layout() {
            None => Ok(tensor_split::whole::<L, _>(self.components(), self.tensor_split())?),
            Some(layout) => whole::<L>(strategy, self.name(), (layout, self.tensor_split()), self.components()),
        }
    }

    /// Writes the parts of a whole value that the chief has to the components of a sharded variable in all processes.
    /// Every process calls this, outside `run`; `value` is read in the chief's.
    ///
    /// # Errors
    /// [`Error::ShardedElsewhere`] if the variable is not sharded; the collective's error if the value has another
    /// number of elements, or a process is missing or fails; the library's if a tensor cannot be read or written.
    pub fn overwrite_by_chief(&self, strategy: &Strategy, value: Option<&L::Tensor>) -> Result<(), L::Error> {
        let layout = self.layout().ok_or_else(|| elsewhere(self.name()))?;
        with_dtype!(dtype::<L>(&self.components()[0])?, T => {
            let of_place = |place| -> distribute_values::Result<Vec<T>> {
                match (value, self.tensor_split()) {
                    (Some(value), Some(split)) => {
                        tensor_split::part::<L, _>(split, value, layout.shape(), place)?.to_elements::<T>()
                    }
                    (Some(value), None) => value.to_elements::<T>(),
                    (None, _) => Ok(Vec::new()),
                }
            };
            let wholes = (0..strategy.tensor_parallel()).map(of_place).collect::<distribute_values::Result<_>>()?;
            let parts = scatter_wholes(strategy, self.name(), layout, wholes)?;
            for (component, part) in self.components().iter().zip(&parts) {
                let part = component.beside(&component.shape(), BufferRef::from(&part[..]))?;
                overwrite::<L>(std::slice::from_ref(component), &part)?;
            }
        });
        Ok(())
    }

    /// Returns a variable's value like [`whole`](Variable::whole), in the chief's process only: other processes send
    /// it their parts of a sharded variable and get `None`.
    ///
    /// # Errors
    /// The errors of [`whole`](Variable::whole) occur in the same cases.
    pub fn whole_on_chief(&self, strategy: &Strategy) -> Result<Option<L::Tensor>, L::Error> {
        match self.layout() {
            None if strategy.is_chief() => {
                Ok(Some(tensor_split::whole::<L, _>(self.components(), self.tensor_split())?))
            }
            None => Ok(None),
            Some(layout) => {
                whole_on_chief::<L>(strategy, self.name(), (layout, self.tensor_split()), self.components())
            }
        }
    }
}

/// Gathers a whole tensor from the local replicas' parts, for every process.
fn whole<L: TensorLibrary>(
    strategy: &Strategy,
    name: &str,
    (layout, split): (&ShardLayout, Option<TensorSplit>),
    components: &[L::Tensor],
) -> Result<L::Tensor, L::Error> {
    with_dtype!(dtype::<L>(&components[0])?, T => {
        let wholes = strategy.on_shard_groups(|local, groups| {
            let part = components[local].to_elements::<T>()?;
            Ok::<_, L::Error>(Some(gather_work(groups, name, layout, &part, Vec::new())?))
        })?;
        let whole = joined::<L, T>(&components[0], (layout, split), wholes.into_iter().flatten())?;
        Ok(whole.ok_or_else(|| elsewhere(name))?)
    })
}

/// Gathers a whole tensor from the replicas' parts, for the chief.
pub(crate) fn whole_on_chief<L: TensorLibrary>(
    strategy: &Strategy,
    name: &str,
    (layout, split): (&ShardLayout, Option<TensorSplit>),
    components: &[L::Tensor],
) -> Result<Option<L::Tensor>, L::Error> {
    let (first, ranks) = (strategy.topology().first_replica(), strategy.tensor_parallel());
    let counts = layout.counts();
    with_dtype!(dtype::<L>(&components[0])?, T => {
        let gathered = strategy.on_shard_groups(|local, groups| {
            let replica = first + local / ranks;
            if replica >= layout.parts() {
                return Ok::<_, L::Error>(None);
            }
            let part = without_padding(groups, layout, &components[local].to_elements::<T>()?)?.to_vec();
            let whole = if replica == 0 { vec![T::default(); layout.len()] } else { Vec::new() };
            Ok(Some(groups.gathers().parts(&counts).tag(tag(name)).start().gather(part, whole, Rank(0))?))
        })?;
        if !strategy.is_chief() {
            return Ok(None);
        }
        let wholes = gathered.into_iter().flatten().map(|[_, whole]| whole);
        let whole = joined::<L, T>(&components[0], (layout, split), wholes)?;
        Ok(Some(whole.ok_or_else(|| elsewhere(name))?))
    })
}

/// Returns the whole of a variable from what the first replica's ranks have gathered, in the order of their places: one
/// rank's, or the joined parts of all if the variable is split among them. Returns `None` if nothing was gathered.
fn joined<L: TensorLibrary, T: Element>(
    like: &L::Tensor,
    (layout, split): (&ShardLayout, Option<TensorSplit>),
    gathered: impl Iterator<Item = Vec<T>>,
) -> Result<Option<L::Tensor>, L::Error> {
    let parts = gathered.take(split.map_or(1, |split| split.parts()));
    let parts = parts.map(|whole| like.of_elements(layout.shape(), whole));
    let mut parts = parts.collect::<distribute_values::Result<Vec<_>>>()?;
    Ok(match split {
        Some(split) if parts.len() == split.parts() => Some(tensor_split::joined::<L, _>(split, &parts)?),
        Some(_) => None,
        None => parts.pop(),
    })
}

/// Returns the error of a sharded variable under a strategy that does not shard.
pub(crate) fn elsewhere(name: &str) -> Error {
    Error::ShardedElsewhere { name: name.to_owned() }
}

#[cfg(test)]
mod meshes;
#[cfg(test)]
mod offload;
#[cfg(test)]
mod tests;
