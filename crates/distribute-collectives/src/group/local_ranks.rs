//! Calls that one thread makes for all ranks of its process.

use distribute_cluster::FailureKind;

use super::ProcessGroup;
use super::work::Work;
use crate::Error;
use crate::engine::memory::OwnedBuffers;

/// Starts an operation on each of this process's ranks, waits for all of them, and returns the last one's memory.
///
/// For code that acts for all ranks of its process, outside their threads. If every rank gets the same result, it does
/// not matter which one is returned.
///
/// # Errors
/// The first error of starting an operation or of waiting for it.
///
/// # Examples
/// ```
/// use distribute_collectives::{Error, ProcessGroup, ReduceOp, on_local_ranks};
/// let ranks = ProcessGroup::local(3)?;
/// let sum = on_local_ranks(&ranks, |local, rank| rank.start().all_reduce(vec![local as u64], ReduceOp::Sum))?;
/// assert_eq!(sum, Some(vec![3]));
/// # Ok::<(), Error>(())
/// ```
pub fn on_local_ranks<B: OwnedBuffers, E: From<Error>>(
    ranks: &[ProcessGroup],
    begin: impl FnMut(usize, &ProcessGroup) -> Result<Work<B>, E>,
) -> Result<Option<B>, E> {
    let mut last = None;
    for work in begin_each(ranks, begin)? {
        last = Some(work.wait()?);
    }
    Ok(last)
}

/// Starts an operation on each of this process's ranks, waits for all of them, and returns the memory of each. Unlike
/// those of [`on_local_ranks`], the ranks may be members of different groups.
///
/// # Errors
/// The first error of starting an operation or of waiting for it.
///
/// # Examples
/// ```
/// use distribute_collectives::{Error, ProcessGroup, Rank, on_each_local_rank};
/// let ranks: Vec<ProcessGroup> = (0..2).map(|_| ProcessGroup::local(1)).collect::<Result<Vec<_>, _>>()?.into_iter()
///     .flatten().collect();
/// let own = on_each_local_rank(&ranks, |local, rank| rank.start().broadcast(vec![local as u64], Rank(0)))?;
/// assert_eq!(own, [[0], [1]]);
/// # Ok::<(), Error>(())
/// ```
pub fn on_each_local_rank<B: OwnedBuffers, E: From<Error>>(
    ranks: &[ProcessGroup],
    begin: impl FnMut(usize, &ProcessGroup) -> Result<Work<B>, E>,
) -> Result<Vec<B>, E> {
    begin_each(ranks, begin)?.into_iter().map(|work| Ok(work.wait()?)).collect()
}

/// Starts an operation on each of this process's ranks.
fn begin_each<B: OwnedBuffers, E: From<Error>>(
    ranks: &[ProcessGroup],
    mut begin: impl FnMut(usize, &ProcessGroup) -> Result<Work<B>, E>,
) -> Result<Vec<Work<B>>, E> {
    let mut works = Vec::with_capacity(ranks.len());
    for (local, rank) in ranks.iter().enumerate() {
        match begin(local, rank) {
            Ok(work) => works.push(work),
            Err(error) => {
                // Works that were started wait for the other ranks, which will not make the call any more.
                if !works.is_empty() {
                    let reason = "an operation could not be begun on every rank of its process";
                    ranks[..=local].iter().for_each(|begun| begun.abort(reason, FailureKind::Permanent));
                }
                return Err(error);
            }
        }
    }
    Ok(works)
}
