//! The ring: each rank communicates only with its two neighbours.

use super::{Action, Schedule, Step, Transfer, part};

/// Returns the steps of an all-reduce, as reduce-scatter followed by all-gather.
///
/// Part p is combined in the order p+1, p+2, …, p (ranks modulo n), so results depend on the number of ranks, and are
/// the same for equal numbers.
///
/// # Cost
/// 2 (n - 1) steps; each rank sends 2 (n - 1)/n of its elements, which is the least possible.
///
/// # Source
/// Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
pub fn ring_all_reduce(rank: usize, ranks: usize, count: usize) -> Schedule {
    let mut schedule = ring_reduce_scatter(rank, ranks, count);
    schedule.extend(ring_all_gather(rank, ranks, count));
    schedule
}

/// Returns the steps of a reduce-scatter: rank r gets part r of the result; its other parts hold intermediate values.
///
/// # Cost
/// n - 1 steps; each rank sends (n - 1)/n of its elements.
pub fn ring_reduce_scatter(rank: usize, ranks: usize, count: usize) -> Schedule {
    let (next, previous) = neighbours(rank, ranks);
    let mut schedule: Schedule = (1..ranks)
        .map(|step| Step {
            sends: transfer(next, count, ranks, (rank + ranks - step) % ranks, Action::Combine),
            receives: transfer(previous, count, ranks, (rank + 2 * ranks - step - 1) % ranks, Action::Combine),
            complete: None,
        })
        .collect();
    match schedule.last_mut() {
        Some(last) => last.complete = Some(part(count, ranks, rank)),
        None => schedule.push(Step { complete: Some(0..count), ..Step::default() }),
    }
    schedule
}

/// Returns the steps of an all-gather: every rank starts with its own part and ends with all of them.
///
/// # Cost
/// n - 1 steps; each rank sends (n - 1)/n of the elements.
pub fn ring_all_gather(rank: usize, ranks: usize, count: usize) -> Schedule {
    let (next, previous) = neighbours(rank, ranks);
    (0..ranks - 1)
        .map(|step| Step {
            sends: transfer(next, count, ranks, (rank + ranks - step) % ranks, Action::Copy),
            receives: transfer(previous, count, ranks, (rank + 2 * ranks - step - 1) % ranks, Action::Copy),
            complete: None,
        })
        .collect()
}

/// Returns the steps of a reduce-scatter with parts of the given lengths: rank r gets `counts[r]` elements.
pub fn ring_reduce_scatter_v(rank: usize, counts: &[usize]) -> Schedule {
    let ranks = counts.len();
    let (next, previous) = neighbours(rank, ranks);
    let move_part = |peer, index: usize| {
        let start = counts[..index].iter().sum();
        vec![Transfer { peer, range: start..start + counts[index], action: Action::Combine }]
    };
    let mut schedule: Schedule = (1..ranks)
        .map(|step| Step {
            sends: move_part(next, (rank + ranks - step) % ranks),
            receives: move_part(previous, (rank + 2 * ranks - step - 1) % ranks),
            complete: None,
        })
        .collect();
    let start: usize = counts[..rank].iter().sum();
    let own = start..start + counts[rank];
    match schedule.last_mut() {
        Some(last) => last.complete = Some(own),
        None => schedule.push(Step { complete: Some(own), ..Step::default() }),
    }
    schedule
}

/// Returns the steps of an all-gather with parts of the given lengths: rank r contributes `counts[r]` elements.
pub fn ring_all_gather_v(rank: usize, counts: &[usize]) -> Schedule {
    let ranks = counts.len();
    let (next, previous) = neighbours(rank, ranks);
    let move_part = |peer, index: usize| {
        let start = counts[..index].iter().sum();
        vec![Transfer { peer, range: start..start + counts[index], action: Action::Copy }]
    };
    (0..ranks - 1)
        .map(|step| Step {
            sends: move_part(next, (rank + ranks - step) % ranks),
            receives: move_part(previous, (rank + 2 * ranks - step - 1) % ranks),
            complete: None,
        })
        .collect()
}

fn neighbours(rank: usize, ranks: usize) -> (usize, usize) {
    ((rank + 1) % ranks, (rank + ranks - 1) % ranks)
}

fn transfer(peer: usize, count: usize, ranks: usize, index: usize, action: Action) -> Vec<Transfer> {
    vec![Transfer { peer, range: part(count, ranks, index), action }]
}
