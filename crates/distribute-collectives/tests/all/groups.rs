//! Groups created from groups, messages between two ranks, and several groups at the same time.

use std::net::TcpListener;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use distribute_cluster::{Coordination, CoordinationOptions, FailureKind, Membership};
use distribute_collectives::{Difference, Error, Options, ProcessGroup, Rank, ReduceOp, first_difference};
use distribute_types::ErrorClass;

const DEADLINE: Duration = Duration::from_secs(20);

/// `processes * local` ranks that met through a coordination service, all in this test process.
fn groups(processes: usize, local: usize) -> Vec<ProcessGroup> {
    groups_with(processes, local, |_| DEADLINE)
}

/// Such ranks, with a timeout that each process chooses.
fn groups_with(processes: usize, local: usize, timeout: impl Fn(usize) -> Duration) -> Vec<ProcessGroup> {
    if processes == 1 {
        return ProcessGroup::local_with(local, &Options::default().timeout(timeout(0))).unwrap();
    }
    let listener = Arc::new(TcpListener::bind("127.0.0.1:0").unwrap());
    let address = listener.local_addr().unwrap().to_string();
    std::thread::scope(|scope| {
        let join = |rank: usize| {
            let membership = Membership::new(rank as u32, processes as u32, address.clone()).unwrap();
            let listener = (rank == 0).then(|| listener.clone());
            let meeting = CoordinationOptions::default().join_timeout(DEADLINE).listener(listener);
            let options = Options::default().timeout(timeout(rank));
            move || {
                let coordination = Arc::new(Coordination::start(&membership, meeting).unwrap());
                ProcessGroup::join(&coordination, local, &options).unwrap()
            }
        };
        let handles: Vec<_> = (0..processes).map(|rank| scope.spawn(join(rank))).collect();
        handles.into_iter().flat_map(|handle| handle.join().unwrap()).collect()
    })
}

/// Runs `body` on every rank at the same time.
fn each<R: Send>(groups: &[ProcessGroup], body: impl Fn(&ProcessGroup) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let handles: Vec<_> = groups.iter().map(|group| scope.spawn(|| body(group))).collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

const PLACEMENTS: [(usize, usize); 5] = [(1, 1), (1, 4), (4, 1), (2, 2), (3, 2)];

fn sum_of_ranks(group: &ProcessGroup, value: u32) -> u32 {
    let mut sum = [value];
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    sum[0]
}

#[test]
fn ranks_of_one_color_form_a_group_in_the_order_of_keys() {
    for (processes, local) in PLACEMENTS {
        let groups = groups(processes, local);
        let world = groups.len() as u32;
        each(&groups, |group| {
            let me = group.rank().0;
            // Odd and even ranks in separate groups, each in reverse order.
            let half = group.split(Some(me % 2), -(me as i32)).unwrap().unwrap();
            let members: Vec<u32> = (0..world).rev().filter(|rank| rank % 2 == me % 2).collect();
            assert_eq!(half.world_size(), members.len());
            assert_eq!(members[half.rank().index()], me);
            assert_eq!(half.rank_name(half.rank()), group.rank_name(group.rank()));
            let mut all = vec![0; members.len()];
            half.all_gather(&[me], &mut all).unwrap();
            assert_eq!(all, members);
            // Both groups work at the same time, and so does a group of a group.
            assert_eq!(sum_of_ranks(group, 1), world);
            let quarter = half.split(Some(half.rank().0 / 2), 0).unwrap().unwrap();
            assert_eq!(sum_of_ranks(&quarter, 1) as usize, quarter.world_size());
        });
    }
}

#[test]
fn neighbours_in_a_process_stay_together() {
    let groups = groups(2, 2);
    each(&groups, |group| {
        let node = group.split(Some((group.rank().index() / group.local_world_size()) as u32), 0).unwrap().unwrap();
        assert_eq!((node.transport_name(), node.world_size()), ("local", 2));
        let across = group.split(Some(group.rank().0 % 2), 0).unwrap().unwrap();
        assert_eq!((across.transport_name(), across.world_size()), (group.transport_name(), 2));
        assert_eq!(sum_of_ranks(&across, group.rank().0), [2, 4][group.rank().index() % 2]);
    });
}

#[test]
fn explicit_ranks_form_a_group_and_the_others_get_none() {
    for (processes, local) in PLACEMENTS {
        let groups = groups(processes, local);
        let chosen: Vec<Rank> = (0..groups.len() as u32).rev().step_by(2).map(Rank).collect();
        each(&groups, |group| match group.subgroup(&chosen).unwrap() {
            Some(some) => {
                assert_eq!(chosen[some.rank().index()], group.rank());
                assert_eq!(sum_of_ranks(&some, 1) as usize, chosen.len());
            }
            None => assert!(!chosen.contains(&group.rank())),
        });
    }
    // Several at once, and lists that do not fit together.
    let groups = groups(4, 1);
    each(&groups, |group| {
        let first = group.rank().0 / 2 * 2;
        let pair = group.subgroup(&[Rank(first), Rank(first + 1)]).unwrap().unwrap();
        assert_eq!((pair.world_size(), sum_of_ranks(&pair, group.rank().0)), (2, 2 * first + 1));
        let orders = [[Rank(0), Rank(1)], [Rank(1), Rank(0)]];
        match group.subgroup(&orders[group.rank().index() % 2]) {
            Err(Error::Length { got: 1, expected: 2, .. }) => assert!(group.rank().0 < 2),
            outcome => assert!(matches!(outcome, Ok(None)) && group.rank().0 > 1, "{outcome:?}"),
        }
    });
    let alone = self::groups(1, 1).remove(0);
    for ranks in [&[Rank(1)][..], &[Rank(0), Rank(0)]] {
        assert!(matches!(alone.subgroup(ranks), Err(Error::RankOutside { .. })));
    }
}

#[test]
fn messages_arrive_in_order_and_leave_other_operations_alone() {
    for (processes, local) in PLACEMENTS {
        let groups = groups(processes, local);
        let world = groups.len() as u32;
        if world == 1 {
            let error = groups[0].send(&[1], Rank(0)).unwrap_err().to_string();
            assert!(error.contains("a message to oneself"), "{error}");
            continue;
        }
        each(&groups, |group| {
            let me = group.rank().0;
            let (next, previous) = (Rank((me + 1) % world), Rank((me + world - 1) % world));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for round in 0..10u32 {
                        let long = vec![me * 100 + round; 50_000 * round as usize];
                        group.send(&long, next).unwrap();
                    }
                });
                scope.spawn(|| {
                    for round in 0..10u32 {
                        let mut long = vec![0; 50_000 * round as usize];
                        group.recv(&mut long, previous).unwrap();
                        assert!(long.iter().all(|value| *value == previous.0 * 100 + round));
                    }
                });
                for _ in 0..10 {
                    assert_eq!(sum_of_ranks(group, 1), world);
                }
            });
            let sent = group.start().send(vec![me; 5], next).unwrap();
            let received = group.start().recv(vec![0; 5], previous).unwrap();
            assert_eq!(received.wait().unwrap()[1], [previous.0; 5]);
            assert_eq!(sent.wait().unwrap()[0], [me; 5]);
        });
    }
}

/// Lets two threads of rank 0 send the first messages of a pair at the same time, which two threads of rank 1 receive.
fn first_messages_at_once(groups: &[ProcessGroup]) {
    let start = Barrier::new(4);
    let (start, [sender, receiver]) = (&start, groups) else { panic!("two ranks") };
    let received = std::thread::scope(|scope| {
        for value in [1u32, 2] {
            scope.spawn(move || {
                start.wait();
                sender.send(&[value], Rank(1)).unwrap();
            });
        }
        let receive = move || {
            start.wait();
            let mut value = [0u32];
            receiver.recv(&mut value, Rank(0)).unwrap();
            value[0]
        };
        [(); 2].map(|()| scope.spawn(receive)).map(|thread| thread.join().unwrap())
    });
    assert_eq!(received.iter().sum::<u32>(), 3);
}

#[test]
fn the_first_messages_of_a_pair_may_come_from_several_threads() {
    for _ in 0..300 {
        first_messages_at_once(&groups(1, 2));
    }
    first_messages_at_once(&groups(2, 1));
}

#[test]
fn the_longest_timeout_is_as_good_as_none() {
    let options = Options::default().timeout(Duration::MAX);
    for (processes, local) in [(1, 2), (2, 1), (2, 2)] {
        let groups = crate::harness::groups(processes, local, &options);
        each(&groups, |group| {
            let world = group.world_size();
            assert_eq!(sum_of_ranks(group, 1) as usize, world);
            let work = group.start().all_reduce(vec![1u32; 5], ReduceOp::Sum).unwrap();
            assert_eq!(work.wait().unwrap(), vec![world as u32; 5]);
            let half = group.split(Some(0), 0).unwrap().unwrap();
            assert_eq!(sum_of_ranks(&half, 1) as usize, world);
        });
    }
}

#[test]
fn lengths_that_differ_are_an_error_that_names_both() {
    for (processes, local) in [(1, 2), (2, 1)] {
        let groups = groups(processes, local);
        let errors = each(&groups, |group| match group.rank().0 {
            0 => group.send(&[1u8, 2, 3], Rank(1)).err(),
            _ => group.recv(&mut [0u8; 4], Rank(0)).err(),
        });
        let error = errors[1].as_ref().unwrap().to_string();
        assert!(error.contains("send #0") && error.contains('3') && error.contains('4'), "{error}");
        // Between processes the sender may have returned before.
        assert!(processes == 2 || errors[0].is_some());
        // The group itself remains usable.
        each(&groups, |group| assert_eq!(sum_of_ranks(group, 1), 2));
    }
}

/// Lets rank 1 wait for a message while `end` runs, and returns its error and how long it waited after that.
fn waiting_for_a_message(groups: &[ProcessGroup], end: impl FnOnce()) -> (Error, Duration) {
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let error = groups[1].recv(&mut [0u8], Rank(0)).unwrap_err();
            (error, Instant::now())
        });
        std::thread::sleep(Duration::from_millis(50));
        let at = Instant::now();
        end();
        let (error, noticed) = receiver.join().unwrap();
        (error, noticed.saturating_duration_since(at))
    })
}

#[test]
fn an_abort_ends_messages_between_two_ranks() {
    let abort = |group: &ProcessGroup| group.abort("the model is broken", FailureKind::Permanent);
    // Whether the two have exchanged a message before, and the rank that aborts. Processes that are not connected yet
    // learn only of what happens in their own.
    for (processes, local, is_connected, aborts) in
        [(1, 2, true, 0), (1, 2, false, 0), (2, 1, true, 0), (2, 1, true, 1), (2, 1, false, 1)]
    {
        let groups = groups(processes, local);
        if is_connected {
            each(&groups, |group| match group.rank().0 {
                0 => group.send(&[7u8], Rank(1)).unwrap(),
                _ => group.recv(&mut [0u8], Rank(0)).unwrap(),
            });
        }
        let (error, waited) = waiting_for_a_message(&groups, || abort(&groups[aborts]));
        let is_told = matches!(error, Error::Aborted { .. }) && error.to_string().contains("the model is broken");
        assert!(is_told && waited < Duration::from_secs(1), "{processes} × {local}: {error} after {waited:?}");
        // Neither the pair nor a new one is used afterwards.
        for (from, to) in [(aborts, 1 - aborts), (1 - aborts, aborts)] {
            if processes == 1 || from == aborts {
                let later = groups[from].send(&[7u8], Rank(to as u32)).unwrap_err();
                assert!(matches!(later, Error::Aborted { .. }), "{later}");
            }
        }
    }
}

#[test]
fn a_message_of_an_idle_rank_is_not_waited_for() {
    for is_connected in [true, false] {
        let groups = groups(1, 2);
        if is_connected {
            each(&groups, |group| match group.rank().0 {
                0 => group.send(&[7u8], Rank(1)).unwrap(),
                _ => group.recv(&mut [0u8], Rank(0)).unwrap(),
            });
        } else {
            groups[0].set_idle(true);
        }
        let (error, waited) = waiting_for_a_message(&groups, || groups[0].set_idle(true));
        assert!(matches!(error, Error::Absent { .. }) && waited < Duration::from_secs(1), "{error} after {waited:?}");
    }
}

#[test]
fn a_message_arrives_after_an_earlier_one_was_given_up() {
    let timeout = |process| if process == 0 { Duration::from_secs(1) } else { DEADLINE };
    let groups = groups_with(2, 1, timeout);
    // No rank receives it.
    let error = groups[0].send(&[1u8], Rank(1)).unwrap_err();
    assert!(matches!(error, Error::Connect { .. }) && error.to_string().contains("has not called recv"), "{error}");
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let mut value = [0u8];
            groups[1].recv(&mut value, Rank(0)).map(|()| value[0])
        });
        // It finds what the sender has left.
        std::thread::sleep(Duration::from_millis(100));
        let until = Instant::now() + DEADLINE;
        while let Err(error) = groups[0].send(&[2u8], Rank(1)) {
            assert!(Instant::now() < until, "{error}");
        }
        assert_eq!(receiver.join().unwrap().unwrap(), 2);
    });
}

#[test]
fn a_receiver_that_leaves_is_noticed_by_its_sender() {
    let mut groups = groups(1, 2);
    let receiver = groups.pop().unwrap();
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| groups[0].send(&[1u8], Rank(1)).unwrap_err());
        drop(receiver);
        let error = sender.join().unwrap();
        assert!(matches!(error, Error::PeerLeft { .. }), "{error}");
    });
}

#[test]
fn several_groups_work_at_once_from_several_threads() {
    for (processes, local) in [(1, 2), (2, 1), (2, 2)] {
        let groups = groups(processes, local);
        let world = groups.len() as u32;
        each(&groups, |group| {
            let parts: Vec<ProcessGroup> = (0..3).map(|_| group.split(Some(0), 0).unwrap().unwrap()).collect();
            std::thread::scope(|scope| {
                for (index, part) in parts.iter().enumerate() {
                    scope.spawn(move || {
                        for round in 0..100u32 {
                            let mut values = vec![round; 1 + 700 * index];
                            part.all_reduce(&mut values, ReduceOp::Sum).unwrap();
                            assert!(values.iter().all(|value| *value == round * world));
                        }
                    });
                }
            });
        });
    }
}

/// Returns what every process finds if process p of `processes` passes the description `lines(p)`.
fn differences(processes: usize, lines: impl Fn(usize) -> Vec<String> + Sync) -> Vec<Option<Difference>> {
    let groups = groups(processes, 2);
    std::thread::scope(|scope| {
        let handles: Vec<_> = groups
            .chunks(2)
            .enumerate()
            .map(|(process, ranks)| {
                let lines = &lines;
                scope.spawn(move || first_difference(ranks, &lines(process)).unwrap())
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

#[test]
fn descriptions_that_differ_are_told_line_by_line() {
    let text = |values: &[&str]| values.iter().map(|text| (*text).to_owned()).collect::<Vec<String>>();
    assert_eq!(differences(3, |_| text(&["lr 0.1", "seed 7"])), [None, None, None]);
    assert_eq!(differences(2, |_| Vec::new()), [None, None]);
    let found = differences(3, |process| text(&["lr 0.1", if process == 2 { "seed 8" } else { "seed 7" }]));
    let difference = |mine: &str, theirs: &str, rank| {
        let (mine, theirs) = (Some(mine.to_owned()), Some(theirs.to_owned()));
        Some(Difference { line: 1, mine, theirs, rank: Rank(rank) })
    };
    let seven = difference("seed 7", "seed 8", 4);
    assert_eq!(found, [seven.clone(), seven, difference("seed 8", "seed 7", 0)]);
    // One description is longer; a line with breaks is still one line.
    let found = differences(2, |process| if process == 0 { text(&["a"]) } else { text(&["a", "b\nc"]) });
    let [Some(shorter), Some(longer)] = &found[..] else { panic!("{found:?}") };
    assert_eq!((shorter.line, &shorter.mine, shorter.theirs.as_deref()), (1, &None, Some("b c")));
    assert_eq!((longer.line, longer.mine.as_deref(), &longer.theirs), (1, Some("b c"), &None));
}

#[test]
fn the_first_cause_and_its_kind_reach_every_rank_once() {
    for kind in [FailureKind::Configuration, FailureKind::Permanent, FailureKind::Retryable] {
        for (processes, local) in [(1, 3), (3, 1)] {
            let groups = groups(processes, local);
            let cause = format!(" was aborted by {}: the models differ", groups[0].rank_name(Rank(1)));
            let errors = each(&groups, |group| {
                if group.rank().0 == 1 {
                    group.abort("the models differ", kind);
                }
                let error = group.all_reduce(&mut [0u32], ReduceOp::Sum).unwrap_err();
                // The error is passed on by a rank that was aborted itself.
                group.abort(&format!("worker {} failed: {error}", group.rank()), FailureKind::Retryable);
                [error, group.barrier().unwrap_err()]
            });
            for error in errors.iter().flatten() {
                assert_eq!(error.failure_kind(), kind, "{error}");
                assert!(matches!(error, Error::Aborted { .. }) && error.to_string().ends_with(&cause), "{error}");
                assert_eq!(error.to_string().matches("aborted by").count(), 1, "{error}");
            }
        }
    }
}
