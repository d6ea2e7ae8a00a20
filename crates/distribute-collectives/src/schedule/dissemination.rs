//! All-gather in a logarithmic number of steps.

use std::ops::Range;

use super::{Action, Schedule, Step, Transfer, part};

/// Returns the steps of an all-gather by dissemination: in each step a rank sends all parts that it has, so that their
/// number doubles.
///
/// # Cost
/// ceil(log2(n)) rounds; each rank sends (n - 1)/n of the elements, as in the ring. A round whose parts wrap around the
/// last rank takes two steps.
///
/// # Source
/// Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997;
/// without the final rotation, because parts are in their final positions from the beginning.
pub fn dissemination_all_gather(rank: usize, ranks: usize, count: usize) -> Schedule {
    let mut schedule = Schedule::new();
    let mut held = 1;
    while held < ranks {
        let moved = held.min(ranks - held);
        let (to, from) = ((rank + ranks - held) % ranks, (rank + held) % ranks);
        // The parts of this and the following ranks, from `owner` on; the second range has those after the wrap-around.
        let pieces = |owner: usize| -> [Range<usize>; 2] {
            let end = (owner + moved).min(ranks);
            let elements = |first: usize, last: usize| match first < last {
                true => part(count, ranks, first).start..part(count, ranks, last - 1).end,
                false => 0..0,
            };
            [elements(owner, end), elements(0, owner + moved - end)]
        };
        let (sent, received) = (pieces(rank), pieces(from));
        let wraps = [rank + moved > ranks, from + moved > ranks];
        let transfer = |peer, range: &Range<usize>| vec![Transfer { peer, range: range.clone(), action: Action::Copy }];
        schedule.push(Step { sends: transfer(to, &sent[0]), receives: transfer(from, &received[0]), complete: None });
        if wraps[0] || wraps[1] {
            schedule.push(Step {
                sends: if wraps[0] { transfer(to, &sent[1]) } else { Vec::new() },
                receives: if wraps[1] { transfer(from, &received[1]) } else { Vec::new() },
                complete: None,
            });
        }
        held += moved;
    }
    schedule
}
