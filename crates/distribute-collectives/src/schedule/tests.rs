//! Schedules run in memory, all ranks at once, against a naive reference.

use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;

use super::*;

/// Runs every rank's schedule; `complete` ranges are divided by `divisor`. Each rank advances when its messages have
/// arrived.
fn run(schedules: &[Schedule], data: &mut [Vec<u64>], divisor: u64) {
    let mut wires: HashMap<(usize, usize), VecDeque<Vec<u64>>> = HashMap::new();
    let mut at = vec![0; schedules.len()];
    let mut sent = vec![false; schedules.len()];
    loop {
        let mut progress = false;
        for (rank, schedule) in schedules.iter().enumerate() {
            let Some(step) = schedule.get(at[rank]) else { continue };
            if !sent[rank] {
                for send in &step.sends {
                    wires.entry((rank, send.peer)).or_default().push_back(data[rank][send.range.clone()].to_vec());
                }
                sent[rank] = true;
                progress = true;
            }
            let ready =
                step.receives.iter().all(|from| wires.get(&(from.peer, rank)).is_some_and(|wire| !wire.is_empty()));
            if ready {
                for from in &step.receives {
                    let message = wires.get_mut(&(from.peer, rank)).and_then(VecDeque::pop_front).unwrap();
                    assert_eq!(message.len(), from.range.len(), "a message fits where it is received");
                    for (target, value) in data[rank][from.range.clone()].iter_mut().zip(message) {
                        match from.action {
                            Action::Copy => *target = value,
                            Action::Combine => *target += value,
                        }
                    }
                }
                if let Some(range) = &step.complete {
                    data[rank][range.clone()].iter_mut().for_each(|x| *x /= divisor);
                }
                at[rank] += 1;
                sent[rank] = false;
                progress = true;
            }
        }
        if !progress {
            break;
        }
    }
    for (rank, schedule) in schedules.iter().enumerate() {
        assert_eq!(at[rank], schedule.len(), "rank {rank} is stuck");
    }
    assert!(wires.values().all(VecDeque::is_empty), "every message is received");
}

fn values(ranks: usize, count: usize) -> Vec<Vec<u64>> {
    (0..ranks).map(|r| (0..count).map(|i| ((r + 1) * 1000 + i) as u64).collect()).collect()
}

fn sums(data: &[Vec<u64>]) -> Vec<u64> {
    (0..data[0].len()).map(|i| data.iter().map(|values| values[i]).sum()).collect()
}

proptest! {
    #[test]
    fn all_reduce_is_the_mean_everywhere(
        ranks in 1usize..=17, count in 0usize..60, algorithm in 0..Algorithm::BUILT_IN.len(),
    ) {
        let mut data = values(ranks, count);
        let expected: Vec<u64> = sums(&data).iter().map(|sum| sum / ranks as u64).collect();
        let algorithm = &Algorithm::BUILT_IN[algorithm];
        let schedules: Vec<_> = (0..ranks).map(|rank| algorithm.schedule(rank, ranks, count)).collect();
        run(&schedules, &mut data, ranks as u64);
        for values in data {
            prop_assert_eq!(&values, &expected);
        }
    }

    #[test]
    fn hosts_reduce_among_themselves_first(hosts in proptest::collection::vec(0usize..4, 1..=17), count in 0usize..60) {
        let ranks = hosts.len();
        let mut data = values(ranks, count);
        let expected: Vec<u64> = sums(&data).iter().map(|sum| sum / ranks as u64).collect();
        let schedules: Vec<_> = (0..ranks).map(|rank| hierarchical_all_reduce(rank, &hosts, count)).collect();
        run(&schedules, &mut data, ranks as u64);
        for values in data {
            prop_assert_eq!(&values, &expected);
        }
    }

    #[test]
    fn parts_of_any_length_are_scattered_and_gathered(counts in proptest::collection::vec(0usize..9, 1..=17)) {
        let (ranks, total) = (counts.len(), counts.iter().sum());
        let mut data = values(ranks, total);
        let expected = sums(&data);
        let schedules: Vec<_> = (0..ranks).map(|rank| ring_reduce_scatter_v(rank, &counts)).collect();
        run(&schedules, &mut data, 1);
        let schedules: Vec<_> = (0..ranks).map(|rank| ring_all_gather_v(rank, &counts)).collect();
        run(&schedules, &mut data, 1);
        for values in data {
            prop_assert_eq!(&values, &expected);
        }
    }

    #[test]
    fn reduce_scatter_leaves_each_its_part(ranks in 1usize..=17, count in 0usize..60) {
        let mut data = values(ranks, count);
        let expected = sums(&data);
        let schedules: Vec<_> = (0..ranks).map(|rank| ring_reduce_scatter(rank, ranks, count)).collect();
        run(&schedules, &mut data, 1);
        for (rank, values) in data.iter().enumerate() {
            let range = part(count, ranks, rank);
            prop_assert_eq!(&values[range.clone()], &expected[range]);
        }
    }

    #[test]
    fn all_gather_brings_every_part(ranks in 1usize..=17, count in 0usize..60, ring: bool) {
        let mut data = values(ranks, count);
        let expected: Vec<u64> = (0..ranks).flat_map(|rank| data[rank][part(count, ranks, rank)].to_vec()).collect();
        let make = if ring { ring_all_gather } else { dissemination_all_gather };
        let schedules: Vec<_> = (0..ranks).map(|rank| make(rank, ranks, count)).collect();
        run(&schedules, &mut data, 1);
        for values in data {
            prop_assert_eq!(&values, &expected);
        }
    }

    #[test]
    fn trees_reach_and_collect_from_everyone(ranks in 1usize..=17, root in 0usize..17, count in 0usize..20) {
        let root = root % ranks;
        let mut data = values(ranks, count);
        let expected = data[root].clone();
        let schedules: Vec<_> = (0..ranks).map(|rank| binomial_broadcast(rank, ranks, root, count)).collect();
        run(&schedules, &mut data, 1);
        for values in data {
            prop_assert_eq!(&values, &expected);
        }
        let mut data = values(ranks, count);
        let expected = sums(&data);
        let schedules: Vec<_> = (0..ranks).map(|rank| binomial_reduce(rank, ranks, root, count)).collect();
        run(&schedules, &mut data, 1);
        prop_assert_eq!(&data[root], &expected);
    }

    #[test]
    fn nobody_passes_the_barrier_before_all_have_come(ranks in 1usize..=17) {
        // The knowledge of a rank: its own arrival, and what the ranks that sent to it knew at that time.
        let schedules: Vec<_> = (0..ranks).map(|rank| dissemination_barrier(rank, ranks)).collect();
        let mut knows: Vec<u32> = (0..ranks).map(|rank| 1 << rank).collect();
        for step in 0..schedules[0].len() {
            let before = knows.clone();
            for (rank, schedule) in schedules.iter().enumerate() {
                knows[rank] |= before[schedule[step].receives[0].peer];
            }
        }
        prop_assert!(knows.iter().all(|known| *known == (1 << ranks) - 1));
    }

    #[test]
    fn parts_cover_everything_once(count in 0usize..1000, parts in 1usize..=17) {
        let mut next = 0;
        for index in 0..parts {
            let range = part(count, parts, index);
            prop_assert_eq!(range.start, next);
            next = range.end;
        }
        prop_assert_eq!(next, count);
    }
}
