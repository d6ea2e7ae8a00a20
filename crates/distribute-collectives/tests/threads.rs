//! Every operation between threads, with few elements: small enough for Miri, which detects data races and invalid
//! memory accesses (`cargo xtask miri`).
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::thread;

use distribute_collectives::{ProcessGroup, Rank, ReduceOp, Reduction};
use distribute_device::BufferMut;

/// Enough for several chunks, except under an interpreter.
const LEN: usize = if cfg!(miri) { 11 } else { 20_011 };

fn on_threads(ranks: usize, body: impl Fn(&ProcessGroup) + Sync) {
    let groups = ProcessGroup::local(ranks).unwrap();
    let body = &body;
    thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || body(&group));
        }
    });
}

fn mine(group: &ProcessGroup, len: usize) -> Vec<u32> {
    (0..len as u32).map(|index| index + group.rank().0).collect()
}

fn sum(group: &ProcessGroup, index: usize) -> u32 {
    let ranks = group.world_size() as u32;
    ranks * index as u32 + ranks * (ranks - 1) / 2
}

fn check(group: &ProcessGroup, values: &[u32], first: usize) {
    for (index, value) in values.iter().enumerate() {
        assert_eq!(*value, sum(group, first + index));
    }
}

const RANKS: [usize; 3] = [1, 2, 3];

#[test]
fn values_are_combined() {
    for ranks in RANKS {
        on_threads(ranks, |group| {
            let me = group.rank().index();
            let mut values = mine(group, LEN);
            group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
            check(group, &values, 0);

            let mut values = mine(group, LEN);
            group.all_reduce(&mut values, &Reduction::new(|a: u32, b: u32| a + b)).unwrap();
            check(group, &values, 0);

            let (mut a, mut b) = (mine(group, 3), mine(group, LEN));
            let mut list = [BufferMut::from(&mut a[..]), BufferMut::from(&mut b[..])];
            group.all_reduce_list(&mut list, ReduceOp::Sum).unwrap();
            check(group, &a, 0);
            check(group, &b, 0);

            let root = Rank(ranks as u32 - 1);
            let mut values = mine(group, LEN);
            group.reduce(&mut values, ReduceOp::Sum, root).unwrap();
            if group.rank() == root {
                check(group, &values, 0);
            }

            let mut part = vec![0; LEN];
            group.reduce_scatter(&mine(group, LEN * ranks), &mut part, ReduceOp::Sum).unwrap();
            check(group, &part, me * LEN);
        });
    }
}

#[test]
fn values_are_moved() {
    for ranks in RANKS {
        on_threads(ranks, |group| {
            let me = group.rank().0;
            let mut values = mine(group, LEN);
            group.broadcast(&mut values, Rank(0)).unwrap();
            assert!(values.iter().enumerate().all(|(index, value)| *value == index as u32));

            let mut all = vec![0; LEN * ranks];
            group.all_gather(&vec![me; LEN], &mut all).unwrap();
            assert!(all.iter().enumerate().all(|(index, value)| *value as usize == index / LEN));

            let mut received = vec![0; LEN * ranks];
            group.all_to_all(&vec![me; LEN * ranks], &mut received).unwrap();
            assert_eq!(received, all);

            let mut gathered = if me == 0 { vec![0; LEN * ranks] } else { Vec::new() };
            group.gather(&vec![me; LEN], &mut gathered, Rank(0)).unwrap();
            let mut back = vec![9; LEN];
            group.scatter(&gathered, &mut back, Rank(0)).unwrap();
            assert_eq!(back, vec![me; LEN]);

            if ranks > 1 {
                match me {
                    0 => group.send(&[7u32; 3], Rank(1)).unwrap(),
                    1 => {
                        let mut message = [0u32; 3];
                        group.recv(&mut message, Rank(0)).unwrap();
                        assert_eq!(message, [7; 3]);
                    }
                    _ => {}
                }
            }
            group.barrier().unwrap();
        });
    }
}

#[test]
fn several_operations_run_at_once_and_may_be_dropped() {
    for ranks in RANKS {
        on_threads(ranks, |group| {
            let first = group.start().all_reduce(mine(group, LEN), ReduceOp::Sum).unwrap();
            let dropped = group.start().all_reduce(mine(group, LEN), ReduceOp::Max).unwrap();
            let last = group.start().all_gather(mine(group, 2), vec![0; 2 * ranks]).unwrap();
            drop(dropped);
            let [_, all] = last.wait().unwrap();
            assert_eq!(all.len(), 2 * ranks);
            check(group, &first.wait().unwrap(), 0);

            let counts: Vec<usize> = (0..ranks).collect();
            let values: Vec<u32> = (0..counts.iter().sum::<usize>() as u32).collect();
            let work = group.parts(&counts).start().reduce_scatter_in_place(values, ReduceOp::Sum).unwrap();
            let (me, values) = (group.rank().index(), work.wait().unwrap());
            let start = counts[..me].iter().sum::<usize>();
            assert!((start..start + me).all(|index| values[index] as usize == index * ranks));
        });
    }
}

#[test]
fn failures_give_the_memory_back() {
    on_threads(2, |group| {
        let error = match group.rank().0 {
            0 => group.all_reduce(&mut [1u32; 4], ReduceOp::Sum),
            _ => group.all_reduce(&mut [1u32; 5], ReduceOp::Sum),
        };
        assert!(error.unwrap_err().to_string().contains("all_reduce #0 of 4 u32"));
    });
    on_threads(2, |group| {
        if group.rank().0 == 0 {
            // The other rank leaves without making the call.
            let work = group.start().all_reduce(vec![1u32; 4], ReduceOp::Sum).unwrap();
            assert!(work.wait().is_err());
        }
    });
}
