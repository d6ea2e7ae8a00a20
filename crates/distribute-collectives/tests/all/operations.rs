//! Every operation with every arrangement of ranks, compared with a naive reference.

use std::time::{Duration, Instant};

use distribute_cluster::FailureKind;
use distribute_collectives::schedule::{Action, AllReduceAlgorithm, Schedule, Step, Transfer};
use distribute_collectives::{
    Algorithm, Error, Options, ProcessGroup, Rank, ReduceOp, Reduction, SparseRows, TransportKind,
};
use distribute_device::BufferMut;
use proptest::prelude::*;

use crate::harness::{each, groups, quick};

/// Arrangements of ranks (processes, ranks in each), with the transports between them.
fn arrangements(shapes: &[(usize, usize)]) -> impl Iterator<Item = (usize, usize, Options)> {
    shapes.iter().flat_map(|(processes, local)| {
        let kinds = if *processes == 1 {
            &[TransportKind::Auto][..]
        } else {
            &[TransportKind::Shm, TransportKind::Tcp, TransportKind::Grpc]
        };
        kinds.iter().map(|transport| (*processes, *local, quick().transport(*transport)))
    })
}

fn value(rank: usize, index: usize) -> i64 {
    ((rank + 1) * (index % 5 + 1)) as i64
}

fn reduced(op: ReduceOp, world: usize, index: usize) -> i64 {
    let values = (0..world).map(|rank| value(rank, index));
    match op {
        ReduceOp::Sum => values.sum(),
        ReduceOp::Mean => values.sum::<i64>() / world as i64,
        ReduceOp::Min => values.min().unwrap(),
        ReduceOp::Max => values.max().unwrap(),
        ReduceOp::BitAnd => values.fold(-1, |a, b| a & b),
        ReduceOp::BitOr => values.fold(0, |a, b| a | b),
        ReduceOp::BitXor => values.fold(0, |a, b| a ^ b),
        _ => values.product(),
    }
}

fn check_all(processes: usize, local: usize, count: usize, op: ReduceOp, options: &Options) {
    let groups = groups(processes, local, options);
    let world = processes * local;
    each(&groups, |group| {
        let me = group.rank().index();
        let mine: Vec<i64> = (0..count).map(|index| value(me, index)).collect();
        let want: Vec<i64> = (0..count).map(|index| reduced(op, world, index)).collect();

        let mut values = mine.clone();
        group.all_reduce(&mut values, op).unwrap();
        assert_eq!(values, want);

        let cut = count / 3;
        let mut values = mine.clone();
        let (head, tail) = values.split_at_mut(cut);
        group.all_reduce_list(&mut [BufferMut::from(head), BufferMut::from(tail)], op).unwrap();
        assert_eq!(values, want);

        let work: Vec<_> = (0..3).map(|_| group.start().all_reduce(mine.clone(), op).unwrap()).collect();
        for work in work {
            assert_eq!(work.wait().unwrap(), want);
        }

        for root in 0..world {
            let mut values = mine.clone();
            group.broadcast(&mut values, Rank(root as u32)).unwrap();
            assert_eq!(values, (0..count).map(|index| value(root, index)).collect::<Vec<_>>());
            let mut values = mine.clone();
            group.reduce(&mut values, op, Rank(root as u32)).unwrap();
            assert!(me != root || values == want);
        }

        let everything: Vec<i64> = (0..world).flat_map(|rank| (0..count).map(move |i| value(rank, i))).collect();
        let mut gathered = vec![0; count * world];
        group.all_gather(&mine, &mut gathered).unwrap();
        assert_eq!(gathered, everything);

        let input: Vec<i64> = (0..count * world).map(|index| value(me, index)).collect();
        let part: Vec<i64> = (me * count..(me + 1) * count).map(|index| reduced(op, world, index)).collect();
        let mut output = vec![0; count];
        group.reduce_scatter(&input, &mut output, op).unwrap();
        assert_eq!(output, part);
        let [_, output] = group.start().reduce_scatter(input, vec![0; count], op).unwrap().wait().unwrap();
        assert_eq!(output, part);
        let [_, gathered] = group.start().all_gather(mine, vec![0; count * world]).unwrap().wait().unwrap();
        assert_eq!(gathered, everything);
        group.barrier().unwrap();
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn operations_agree_with_a_naive_reference(
        processes in 1usize..=4, local in 1usize..=3, count in 0usize..700, op in 0usize..8,
        algorithm in 0usize..4, kind in 0usize..3,
    ) {
        let algorithm = Algorithm::BUILT_IN[algorithm].clone();
        let transport = [TransportKind::Shm, TransportKind::Tcp, TransportKind::Grpc][kind];
        check_all(processes, local, count, ReduceOp::ALL[op], &quick().algorithm(algorithm).transport(transport));
    }
}

#[test]
fn long_messages_arrive_whole() {
    for (processes, local, options) in arrangements(&[(1, 2), (2, 1), (2, 2), (3, 1)]) {
        check_all(processes, local, 300_001, ReduceOp::Sum, &options);
    }
}

#[test]
fn two_ranks_agree_bit_for_bit_wherever_they_are() {
    let run = |(processes, local, options): (usize, usize, Options)| {
        let groups = groups(processes, local, &options);
        each(&groups, |group| {
            let mut values: Vec<f32> =
                (0..50_000).map(|i| ((i * 7919 + group.rank().index() * 104_729) % 1013) as f32 / 977.0).collect();
            group.all_reduce(&mut values, ReduceOp::Mean).unwrap();
            values
        })
    };
    let results: Vec<_> = arrangements(&[(1, 2), (2, 1)]).map(run).collect();
    assert_eq!(results.len(), 4);
    for result in &results {
        assert_eq!(result, &results[0]);
        assert_eq!(result[0], result[1]);
    }
}

#[test]
fn different_calls_are_an_error_on_all_ranks_that_names_both() {
    for (processes, local, options) in arrangements(&[(1, 3), (3, 1), (2, 2)]) {
        let groups = groups(processes, local, &options);
        let errors = each(&groups, |group| {
            let mut values = vec![1.0f32; if group.rank().0 == 1 { 5 } else { 4 }];
            group.all_reduce(&mut values, ReduceOp::Sum).unwrap_err()
        });
        for error in &errors {
            let text = error.to_string();
            assert!(text.contains("of 4 f32") && text.contains("of 5 f32"), "{processes}x{local}: {text}");
        }
        let again = each(&groups, |group| group.barrier().unwrap_err());
        assert!(again.iter().all(|error| matches!(error, Error::Aborted { .. })), "{again:?}");
    }
}

#[test]
fn a_missing_rank_is_named_at_the_deadline() {
    for (processes, local, options) in arrangements(&[(1, 3), (3, 1), (2, 2)]) {
        let options = options.timeout(Duration::from_millis(300));
        let groups = groups(processes, local, &options);
        let started = Instant::now();
        let outcomes = each(&groups, |group| {
            if group.rank().0 == 1 {
                return None;
            }
            group.all_reduce(&mut [1.0f32], ReduceOp::Sum).err()
        });
        assert!(started.elapsed() < Duration::from_secs(5));
        let name = groups[0].rank_name(Rank(1)).to_owned();
        let named = outcomes.iter().flatten().filter(|error| error.to_string().contains(&name)).count();
        assert!(named >= 1, "{processes}x{local}: {outcomes:?}");
        assert!(outcomes.iter().flatten().any(|error| matches!(error, Error::Deadline { .. })), "{outcomes:?}");
    }
}

#[test]
fn a_rank_that_leaves_is_noticed_at_once() {
    for (processes, local, options) in arrangements(&[(1, 2), (2, 1)]) {
        let mut groups = groups(processes, local, &options);
        drop(groups.pop());
        let started = Instant::now();
        let error = groups[0].all_reduce(&mut [1.0f32; 10], ReduceOp::Sum).unwrap_err();
        assert!(matches!(error, Error::PeerLeft { .. }), "{error}");
        assert!(started.elapsed() < Duration::from_secs(2));
    }
}

#[test]
fn an_abort_ends_the_wait_of_every_rank_with_its_reason() {
    for (processes, local, options) in arrangements(&[(1, 3), (3, 1), (2, 2)]) {
        let groups = groups(processes, local, &options);
        let started = Instant::now();
        let errors = each(&groups, |group| {
            if group.rank().0 == 0 {
                group.abort("the loss is not a number", FailureKind::Permanent);
            }
            group.all_reduce(&mut [1.0f32; 1000], ReduceOp::Sum).unwrap_err().to_string()
        });
        assert!(
            errors.iter().all(|error| error.contains("the loss is not a number")),
            "{processes}x{local}: {errors:?}"
        );
        assert!(started.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn work_that_is_dropped_or_out_of_order_is_safe() {
    let groups = groups(1, 2, &quick());
    each(&groups, |group| {
        let mut works: Vec<_> =
            (0..200).map(|i| group.start().all_reduce(vec![i as f32; 100], ReduceOp::Sum).unwrap()).collect();
        drop(works.remove(3));
        works.reverse();
        let last = works.remove(0).wait().unwrap();
        assert_eq!(last, vec![398.0; 100]);
        drop(works);
    });
}

#[test]
fn wrong_arguments_are_sentences() {
    let group = ProcessGroup::local(1).unwrap().remove(0);
    let error = group.all_gather(&[1.0f32; 3], &mut [0.0; 4]).unwrap_err().to_string();
    assert!(error.contains("got 4 elements, expected 3"), "{error}");
    let error = group.broadcast(&mut [1.0f32], Rank(1)).unwrap_err().to_string();
    assert!(error.contains("root 1 is outside the group"), "{error}");
    let (mut a, mut b) = ([1.0f32], [1i64]);
    let error = group
        .all_reduce_list(&mut [BufferMut::from(&mut a[..]), BufferMut::from(&mut b[..])], ReduceOp::Sum)
        .unwrap_err();
    assert!(error.to_string().contains("slice 1 holds i64"), "{error}");
    assert!(ProcessGroup::local(0).is_err());
    group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap();
}

/// Returns the elements that rank `from` has for rank `to`.
fn block(from: usize, to: usize, len: usize) -> Vec<i64> {
    (0..len).map(|index| (from * 10_000 + to * 100 + index % 100) as i64).collect()
}

/// Returns a length for every pair of ranks; some are zero.
fn length(from: usize, to: usize, scale: usize) -> usize {
    (from * 3 + to * 5 + 1) % 4 * scale
}

fn check_exchanges(processes: usize, local: usize, scale: usize, options: &Options) {
    let groups = groups(processes, local, options);
    let world = processes * local;
    each(&groups, |group| {
        let me = group.rank().index();

        let input: Vec<i64> = (0..world).flat_map(|to| block(me, to, scale)).collect();
        let want: Vec<i64> = (0..world).flat_map(|from| block(from, me, scale)).collect();
        let mut output = vec![0; input.len()];
        group.all_to_all(&input, &mut output).unwrap();
        assert_eq!(output, want);
        let work = group.start().all_to_all(input, vec![0; output.len()]).unwrap();
        assert_eq!(work.wait().unwrap()[1], want);

        let send: Vec<usize> = (0..world).map(|to| length(me, to, scale)).collect();
        let receive: Vec<usize> = (0..world).map(|from| length(from, me, scale)).collect();
        let input: Vec<i64> = (0..world).flat_map(|to| block(me, to, send[to])).collect();
        let want: Vec<i64> = (0..world).flat_map(|from| block(from, me, receive[from])).collect();
        let mut output = vec![0; want.len()];
        group.parts(&send).all_to_all(&input, &mut output, &receive).unwrap();
        assert_eq!(output, want);
        let work = group.parts(&send).start().all_to_all(input, vec![0; want.len()], &receive).unwrap();
        assert_eq!(work.wait().unwrap()[1], want);

        let counts: Vec<usize> = (0..world).map(|rank| length(rank, 1, scale)).collect();
        let mine = block(me, 0, counts[me]);
        let everything: Vec<i64> = (0..world).flat_map(|rank| block(rank, 0, counts[rank])).collect();
        let mut output = vec![0; everything.len()];
        group.parts(&counts).all_gather(&mine, &mut output).unwrap();
        assert_eq!(output, everything);
        let work = group.parts(&counts).start().all_gather(mine.clone(), vec![0; everything.len()]).unwrap();
        assert_eq!(work.wait().unwrap()[1], everything);
        let placed: Vec<i64> = (0..world).flat_map(|rank| block(rank, 7, scale)).collect();

        for root in 0..world {
            let (is_root, root) = (root == me, Rank(root as u32));
            let at_root = |len: usize| vec![0i64; if is_root { len } else { 0 }];
            let mut output = at_root(everything.len());
            group.parts(&counts).gather(&mine, &mut output, root).unwrap();
            assert!(!is_root || output == everything);
            let work = group.parts(&counts).start().gather(mine.clone(), at_root(everything.len()), root).unwrap();
            assert!(!is_root || work.wait().unwrap()[1] == everything);
            let mut output = at_root(world * scale);
            group.gather(&block(me, 7, scale), &mut output, root).unwrap();
            assert!(!is_root || output == placed);
            let work = group.start().gather(block(me, 7, scale), at_root(world * scale), root).unwrap();
            assert!(!is_root || work.wait().unwrap()[1] == placed);

            let input = if is_root { everything.clone() } else { Vec::new() };
            let mut output = vec![0; counts[me]];
            group.parts(&counts).scatter(&input, &mut output, root).unwrap();
            assert_eq!(output, mine);
            let work = group.parts(&counts).start().scatter(input, vec![0; counts[me]], root).unwrap();
            assert_eq!(work.wait().unwrap()[1], mine);
            let input = if is_root { placed.clone() } else { Vec::new() };
            let mut output = vec![0; scale];
            group.scatter(&input, &mut output, root).unwrap();
            assert_eq!(output, block(me, 7, scale));
            let work = group.start().scatter(input, vec![0; scale], root).unwrap();
            assert_eq!(work.wait().unwrap()[1], block(me, 7, scale));
        }

        let total: usize = counts.iter().sum();
        let start: usize = counts[..me].iter().sum();
        let input: Vec<i64> = (0..total).map(|index| value(me, index)).collect();
        let want: Vec<i64> = (start..start + counts[me]).map(|i| reduced(ReduceOp::Sum, world, i)).collect();
        let mut output = vec![0; counts[me]];
        group.parts(&counts).reduce_scatter(&input, &mut output, ReduceOp::Sum).unwrap();
        assert_eq!(output, want);
        let work = group.parts(&counts).start().reduce_scatter(input, output, ReduceOp::Sum).unwrap();
        assert_eq!(work.wait().unwrap()[1], want);
        let values: Vec<i64> = (0..total).map(|index| value(me, index)).collect();
        let work = group.parts(&counts).start().reduce_scatter_in_place(values, ReduceOp::Sum).unwrap();
        assert_eq!(work.wait().unwrap()[start..start + counts[me]], want);

        // Row 5 on all ranks, row `me` only on this one, and none on the last one.
        let last = world - 1;
        let rows: &[i64] = if me == last { &[] } else { &[5, -(me as i64)] };
        let own_rows = SparseRows { indices: rows.to_vec(), values: vec![1i64; rows.len() * 3] };
        let sums = own_rows.all_reduce(group, 3, ReduceOp::Sum).unwrap();
        let own = (0..last).rev().map(|rank| -(rank as i64));
        assert_eq!(sums.indices, own.chain((last > 0).then_some(5)).collect::<Vec<_>>());
        let fives = if last > 0 { &sums.values[sums.values.len() - 3..] } else { &[] };
        assert!(fives.iter().all(|value| *value == last as i64));
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn exchanges_agree_with_a_naive_reference(
        processes in 1usize..=4, local in 1usize..=3, scale in 0usize..300, kind in 0usize..3,
    ) {
        let transport = [TransportKind::Shm, TransportKind::Tcp, TransportKind::Grpc][kind];
        check_exchanges(processes, local, scale, &quick().transport(transport));
    }
}

#[test]
fn numbers_of_rows_that_no_memory_holds_are_an_error() {
    let numbers = [u64::MAX, i64::MAX as u64, i64::MAX as u64 / 16];
    for told in numbers {
        each(&groups(1, 2, &quick()), |group| {
            if group.rank() == Rank(1) {
                // In place of its own number of rows, and their length.
                group.parts(&[2, 2]).tag(ReduceOp::Sum as u32).all_gather(&[told, 2], &mut [0; 4]).unwrap();
                return;
            }
            let rows = SparseRows { indices: vec![1], values: vec![1.0, 2.0] };
            let error = rows.all_reduce(group, 2, ReduceOp::Sum).unwrap_err();
            assert!(matches!(error, Error::Length { .. }) && error.to_string().contains("memory"), "{error}");
        });
    }
}

#[test]
fn long_exchanges_arrive_whole() {
    for (processes, local, options) in arrangements(&[(1, 2), (2, 1), (2, 2)]) {
        check_exchanges(processes, local, 300_000, &options);
    }
}

#[test]
fn counts_that_do_not_match_are_an_error_that_names_both_sides() {
    for (processes, local, options) in arrangements(&[(1, 2), (2, 1)]) {
        let groups = groups(processes, local, &options);
        let errors = each(&groups, |group| {
            let receive = if group.rank().0 == 0 { [1, 2] } else { [3, 1] };
            let mut output = vec![0u8; receive.iter().sum()];
            group.parts(&[1, 2]).all_to_all(&[1, 2, 3], &mut output, &receive).unwrap_err().to_string()
        });
        assert!(errors.iter().any(|error| error.contains("all_to_all_v #0")), "{errors:?}");
    }
}

#[test]
fn tags_and_counts_that_differ_between_processes_are_a_mismatch() {
    type Operation = fn(&ProcessGroup) -> distribute_collectives::Result<()>;
    let tagged: [Operation; 3] = [
        |group| {
            let (counts, mut all) = (vec![3; group.world_size()], vec![0u8; 3 * group.world_size()]);
            group.parts(&counts).tag(group.process() as u32).gather(&[1; 3], &mut all, Rank(0))
        },
        |group| {
            let (counts, all) = (vec![3; group.world_size()], vec![0u8; 3 * group.world_size()]);
            group.parts(&counts).tag(group.process() as u32).scatter(&all, &mut [0; 3], Rank(0))
        },
        |group| {
            let (counts, all) = (vec![3; group.world_size()], vec![0u8; 3 * group.world_size()]);
            let parts = group.parts(&counts).tag(group.process() as u32);
            parts.start().all_to_all(all.clone(), all, &counts)?.wait().map(drop)
        },
    ];
    for (processes, local, options) in arrangements(&[(2, 1), (2, 2)]) {
        for (operation, run) in tagged.iter().enumerate() {
            let outcomes = each(&groups(processes, local, &options), run);
            let found = outcomes.iter().any(|outcome| matches!(outcome, Err(Error::Mismatch { .. })));
            assert!(found, "{operation} {processes} {local} {:?}: {outcomes:?}", options.transport);
        }
    }
    // The parts that move have equal lengths on both sides.
    let outcomes = each(&groups(3, 1, &quick()), |group| {
        let counts = if group.rank() == Rank(2) { [1, 5, 1] } else { [1, 1, 1] };
        group.parts(&counts).gather(&[1u8], &mut [0; 3], Rank(0))
    });
    assert!(matches!(outcomes[0], Err(Error::Mismatch { .. })), "{outcomes:?}");
}

#[test]
fn roots_that_differ_between_processes_are_an_error_at_the_next_barrier_at_the_latest() {
    for (processes, local, options) in arrangements(&[(2, 1), (2, 2), (4, 1)]) {
        let root = |group: &ProcessGroup| {
            let last = group.process() + 1 == group.world_size() / group.local_world_size();
            Rank(if last { group.world_size() as u32 - 1 } else { 0 })
        };
        // A rank may pass one barrier before it hears of the abort.
        let barriers = |group: &ProcessGroup| group.barrier().and_then(|()| group.barrier());
        let broadcast = each(&groups(processes, local, &options), |group| {
            group.broadcast(&mut [group.rank().0; 3], root(group)).and_then(|()| barriers(group))
        });
        let scatter = each(&groups(processes, local, &options), |group| {
            let all = vec![group.rank().0; group.world_size()];
            group.scatter(&all, &mut [0], root(group)).and_then(|()| barriers(group))
        });
        for outcomes in [broadcast, scatter] {
            assert!(outcomes.iter().all(Result::is_err), "{processes} {local} {outcomes:?}");
            let named = |outcome: &distribute_collectives::Result<()>| match outcome {
                Err(error @ Error::Mismatch { .. }) => error.to_string().contains(", root "),
                _ => false,
            };
            assert!(outcomes.iter().any(named), "{processes} {local} {outcomes:?}");
        }
    }
}

/// A custom algorithm: every rank sends to rank 0, which sends the result back.
struct Star;

impl AllReduceAlgorithm for Star {
    fn name(&self) -> &str {
        "star"
    }

    fn schedule(&self, rank: usize, ranks: usize, count: usize) -> Schedule {
        let one = |peer, action| vec![Transfer { peer, range: 0..count, action }];
        if rank > 0 {
            let send = Step { sends: one(0, Action::Combine), ..Step::default() };
            return vec![send, Step { receives: one(0, Action::Copy), ..Step::default() }];
        }
        let collect = (1..ranks).map(|peer| Step { receives: one(peer, Action::Combine), ..Step::default() });
        let done = Step { complete: Some(0..count), ..Step::default() };
        let spread = (1..ranks).map(|peer| Step { sends: one(peer, Action::Copy), ..Step::default() });
        collect.chain([done]).chain(spread).collect()
    }
}

#[test]
fn an_algorithm_of_the_callers_own_reduces_over_every_transport() {
    for (processes, local, options) in arrangements(&[(3, 1), (2, 2)]) {
        let options = options.algorithm(Algorithm::custom(Star));
        let groups = groups(processes, local, &options);
        let world = groups.len();
        each(&groups, |group| {
            assert_eq!(group.algorithm_for(1).name(), "star");
            let mut values: Vec<i64> = (0..500).map(|index| value(group.rank().index(), index)).collect();
            group.all_reduce(&mut values, ReduceOp::Mean).unwrap();
            assert!((0..500).zip(&values).all(|(index, got)| *got == reduced(ReduceOp::Mean, world, index)));
        });
    }
}

#[test]
fn reductions_of_the_callers_own_run_over_every_transport() {
    let widest = Reduction::new(|a: f32, b: f32| if a.abs() >= b.abs() { a } else { b });
    for (processes, local, options) in arrangements(&[(1, 3), (3, 1), (2, 2)]) {
        let groups = groups(processes, local, &options);
        let world = groups.len();
        each(&groups, |group| {
            let me = group.rank().index();
            // Rank r has the greatest magnitude at indices that are r modulo the world size.
            let mine = |index: usize| if index % world == me { -9.0 - index as f32 } else { me as f32 };
            let want = |index: usize| -9.0 - index as f32;
            let mut values: Vec<f32> = (0..1000).map(mine).collect();
            group.all_reduce(&mut values, &widest).unwrap();
            assert!((0..1000).zip(&values).all(|(index, got)| *got == want(index)));
            let input: Vec<f32> = (0..50 * world).map(mine).collect();
            let mut part = vec![0.0; 50];
            group.reduce_scatter(&input, &mut part, &widest).unwrap();
            assert!((me * 50..).zip(&part).all(|(index, got)| *got == want(index)));
            let mut values: Vec<f32> = (0..10).map(mine).collect();
            group.reduce(&mut values, &widest, Rank(1)).unwrap();
            assert!(me != 1 || (0..10).zip(&values).all(|(index, got)| *got == want(index)));
            let error = group.all_reduce(&mut [1.0f32], ReduceOp::BitAnd).unwrap_err().to_string();
            assert!(error.contains("band of f32 values is not defined"), "{error}");
        });
    }
}

#[test]
fn reductions_in_place_and_apart_are_not_mixed_in_a_process() {
    let errors = each(&groups(1, 2, &quick()), |group| {
        let (parts, values) = (group.parts(&[1, 2]), vec![1u8; 3]);
        if group.rank().0 == 0 {
            let values: Box<[u8]> = values.into();
            parts.start().reduce_scatter_in_place(values, ReduceOp::Sum).unwrap().wait().unwrap_err()
        } else {
            parts.start().reduce_scatter(values, vec![0; 2], ReduceOp::Sum).unwrap().wait().unwrap_err()
        }
    });
    for error in &errors {
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("both called reduce_scatter_v #0") && text.contains("in place"), "{text}");
    }
    let group = ProcessGroup::local(1).unwrap().remove(0);
    let two = [vec![1u8], vec![2]];
    let error = group.parts(&[2]).start().reduce_scatter_in_place(two, ReduceOp::Sum).unwrap_err().to_string();
    assert!(error.contains("got 2 elements, expected 1; pass one slice"), "{error}");
}

#[test]
fn counts_whose_sum_no_memory_holds_are_refused() {
    let groups = groups(1, 2, &quick());
    // Their sum wraps to 3, which is the length of the buffers.
    let counts = [usize::MAX, 4];
    let errors = each(&groups, |group| {
        let mut three = [0u8; 3];
        [
            group.parts(&counts).reduce_scatter(&[1u8; 3], &mut [0; 3], ReduceOp::Sum).unwrap_err(),
            group.parts(&counts).all_gather(&[1u8; 3], &mut three).unwrap_err(),
            group.parts(&counts).all_to_all(&[1u8; 3], &mut three, &counts).unwrap_err(),
        ]
    });
    for error in errors.iter().flatten() {
        assert!(matches!(error, Error::Length { .. }) && error.to_string().contains("counts of"), "{error}");
    }
}
