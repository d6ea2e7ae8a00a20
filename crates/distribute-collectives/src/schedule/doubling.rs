//! Recursive doubling: partners at distance 1, 2, 4, … exchange all their values.

use super::{Action, Schedule, Step, Transfer};

/// Returns the steps of an all-reduce in which every exchange doubles the number of ranks whose values are combined.
///
/// If the number of ranks is not a power of two, the ranks beyond the greatest power of two first send their values to
/// a partner and receive the result at the end.
///
/// # Cost
/// log2(n) steps (two more if n is not a power of two); each rank sends all its elements in each.
///
/// # Source
/// Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
pub fn recursive_doubling_all_reduce(rank: usize, ranks: usize, count: usize) -> Schedule {
    let core = if ranks.is_power_of_two() { ranks } else { ranks.next_power_of_two() / 2 };
    let everything = |peer, action| vec![Transfer { peer, range: 0..count, action }];
    let mut schedule = Schedule::new();
    let partner_beyond = (rank + core < ranks).then_some(rank + core);
    if rank >= core {
        let partner = rank - core;
        schedule.push(Step { sends: everything(partner, Action::Combine), ..Step::default() });
        schedule.push(Step { receives: everything(partner, Action::Copy), ..Step::default() });
        return schedule;
    }
    if let Some(beyond) = partner_beyond {
        schedule.push(Step { receives: everything(beyond, Action::Combine), ..Step::default() });
    }
    let mut distance = 1;
    while distance < core {
        let peer = rank ^ distance;
        schedule.push(Step {
            sends: everything(peer, Action::Combine),
            receives: everything(peer, Action::Combine),
            complete: None,
        });
        distance *= 2;
    }
    match schedule.last_mut() {
        Some(last) => last.complete = Some(0..count),
        None => schedule.push(Step { complete: Some(0..count), ..Step::default() }),
    }
    if let Some(beyond) = partner_beyond {
        schedule.push(Step { sends: everything(beyond, Action::Copy), ..Step::default() });
    }
    schedule
}
