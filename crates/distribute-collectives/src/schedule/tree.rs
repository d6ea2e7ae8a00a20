//! Binomial trees for one-to-all and all-to-one, and the dissemination barrier.

use super::{Action, Schedule, Step, Transfer};

/// Returns the steps of a broadcast from `root`: each rank that has the values sends them, so the number of holders
/// doubles in each step.
///
/// # Cost
/// ceil(log2(n)) steps; each rank receives once.
pub fn binomial_broadcast(rank: usize, ranks: usize, root: usize, count: usize) -> Schedule {
    let relative = (rank + ranks - root) % ranks;
    let absolute = |relative: usize| (relative + root) % ranks;
    let everything = |relative| vec![Transfer { peer: absolute(relative), range: 0..count, action: Action::Copy }];
    let mut schedule = Schedule::new();
    let mut distance = ranks.next_power_of_two() / 2;
    while distance > 0 {
        if relative.is_multiple_of(2 * distance) {
            if relative + distance < ranks {
                schedule.push(Step { sends: everything(relative + distance), ..Step::default() });
            }
        } else if relative % (2 * distance) == distance {
            schedule.push(Step { receives: everything(relative - distance), ..Step::default() });
        }
        distance /= 2;
    }
    schedule
}

/// Returns the steps of a reduce to `root`: the broadcast's tree in reverse. Other ranks end with intermediate values.
///
/// # Cost
/// ceil(log2(n)) steps; each rank sends once.
pub fn binomial_reduce(rank: usize, ranks: usize, root: usize, count: usize) -> Schedule {
    let mut schedule: Schedule = binomial_broadcast(rank, ranks, root, count)
        .into_iter()
        .rev()
        .map(|step| Step { sends: combining(step.receives), receives: combining(step.sends), complete: None })
        .collect();
    if rank == root {
        match schedule.last_mut() {
            Some(last) => last.complete = Some(0..count),
            None => schedule.push(Step { complete: Some(0..count), ..Step::default() }),
        }
    }
    schedule
}

/// Returns the steps of a reduce to `root` in rank order: [`binomial_reduce`] to rank 0, whose tree joins neighbours,
/// and a message from there to `root`.
///
/// # Cost
/// ceil(log2(n)) + 1 steps; each rank sends once, rank 0 only to `root`.
pub fn ordered_reduce(rank: usize, ranks: usize, root: usize, count: usize) -> Schedule {
    let mut schedule = binomial_reduce(rank, ranks, 0, count);
    if root != 0 {
        let move_all = |peer| vec![Transfer { peer, range: 0..count, action: Action::Copy }];
        if rank == 0 {
            schedule.push(Step { sends: move_all(root), ..Step::default() });
        } else if rank == root {
            schedule.push(Step { receives: move_all(0), ..Step::default() });
        }
    }
    schedule
}

/// Returns the steps of a reduce-scatter in rank order: [`binomial_reduce`] to rank 0, which sends every other rank its
/// part.
///
/// # Cost
/// ceil(log2(n)) + 1 steps; each rank sends all elements once, rank 0 all but its part.
pub fn ordered_reduce_scatter(rank: usize, counts: &[usize]) -> Schedule {
    let starts: Vec<usize> = counts.iter().scan(0, |end, count| Some(std::mem::replace(end, *end + count))).collect();
    let part = |rank: usize| starts[rank]..starts[rank] + counts[rank];
    let mut schedule = binomial_reduce(rank, counts.len(), 0, counts.iter().sum());
    let deal = |peer, of| Transfer { peer, range: part(of), action: Action::Copy };
    match rank {
        0 => schedule.push(Step { sends: (1..counts.len()).map(|peer| deal(peer, peer)).collect(), ..Step::default() }),
        _ => schedule.push(Step { receives: vec![deal(0, rank)], ..Step::default() }),
    }
    schedule
}

/// Returns the steps of a barrier of empty messages: in step k each rank sends to the rank 2^k after it.
///
/// # Source
/// Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988.
pub fn dissemination_barrier(rank: usize, ranks: usize) -> Schedule {
    let empty = |peer| vec![Transfer { peer, range: 0..0, action: Action::Copy }];
    let mut schedule = Schedule::new();
    let mut distance = 1;
    while distance < ranks {
        schedule.push(Step {
            sends: empty((rank + distance) % ranks),
            receives: empty((rank + ranks - distance) % ranks),
            complete: None,
        });
        distance *= 2;
    }
    schedule
}

fn combining(transfers: Vec<Transfer>) -> Vec<Transfer> {
    transfers.into_iter().map(|transfer| Transfer { action: Action::Combine, ..transfer }).collect()
}
