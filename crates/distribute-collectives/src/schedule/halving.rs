//! Recursive halving and doubling: partners at distance n/2, n/4, … exchange halves of decreasing size, and then of
//! increasing size.

use std::ops::Range;

use super::{Action, Schedule, Step, Transfer};

/// Returns the steps of an all-reduce: a reduce-scatter by recursive halving, then an all-gather by recursive doubling.
///
/// Every element is combined by exactly one rank, pairwise along the bits of the ranks, so all ranks get the same bits,
/// which depend on the number of ranks. If this is not a power of two, the ranks beyond the greatest power of two first
/// send their values to a partner and receive the result at the end.
///
/// # Cost
/// 2 log2(n) steps (two more if n is not a power of two); each rank sends 2 (n - 1)/n of its elements, as in the ring,
/// in far fewer steps.
///
/// # Source
/// Rabenseifner, "Optimization of collective reduction operations", 2004.
pub fn halving_doubling_all_reduce(rank: usize, ranks: usize, count: usize) -> Schedule {
    let core = if ranks.is_power_of_two() { ranks } else { ranks.next_power_of_two() / 2 };
    let one = |peer, range: Range<usize>, action| vec![Transfer { peer, range, action }];
    let mut schedule = Schedule::new();
    if rank >= core {
        let partner = rank - core;
        schedule.push(Step { sends: one(partner, 0..count, Action::Combine), ..Step::default() });
        schedule.push(Step { receives: one(partner, 0..count, Action::Copy), ..Step::default() });
        return schedule;
    }
    let beyond = (rank + core < ranks).then_some(rank + core);
    if let Some(beyond) = beyond {
        schedule.push(Step { receives: one(beyond, 0..count, Action::Combine), ..Step::default() });
    }
    let mut mine = 0..count;
    let mut halves = Vec::new();
    let mut distance = core / 2;
    while distance > 0 {
        let middle = mine.start + mine.len().div_ceil(2);
        let (lower, upper) = (mine.start..middle, middle..mine.end);
        let (keep, give) = if rank & distance == 0 { (lower, upper) } else { (upper, lower) };
        let peer = rank ^ distance;
        schedule.push(Step {
            sends: one(peer, give.clone(), Action::Combine),
            receives: one(peer, keep.clone(), Action::Combine),
            complete: None,
        });
        halves.push((peer, give));
        mine = keep;
        distance /= 2;
    }
    match schedule.last_mut() {
        Some(last) => last.complete = Some(mine.clone()),
        None => schedule.push(Step { complete: Some(mine.clone()), ..Step::default() }),
    }
    for (peer, given) in halves.into_iter().rev() {
        schedule.push(Step {
            sends: one(peer, mine.clone(), Action::Copy),
            receives: one(peer, given.clone(), Action::Copy),
            complete: None,
        });
        mine = mine.start.min(given.start)..mine.end.max(given.end);
    }
    if let Some(beyond) = beyond {
        schedule.push(Step { sends: one(beyond, 0..count, Action::Copy), ..Step::default() });
    }
    schedule
}
