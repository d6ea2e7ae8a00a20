//! Exchanges of single elements, in numbers that are not rounded.

use super::*;
use crate::event_loop::within_an_event_loop;

const SCALAR: [(&str, usize); 1] = [("w", 1)];

/// An island of a model with these variables, all of whose elements are 1.
fn island(builder: DecoupledDilocoBuilder, rate: f64, lens: [(&str, usize); 1]) -> Quadratic {
    let variables = lens.map(|(name, len)| (name, HostTensor::new(&[len], vec![1.0; len]).unwrap()));
    Quadratic::of(builder.over(one_device()).unwrap(), rate, variables)
}

/// Every step is an exchange, and each island's changes are an outer step at once.
fn at_once(spec: &ClusterSpec, index: usize) -> DecoupledDilocoBuilder {
    builder(spec, index).inner_steps(1).outer(MEAN).quorum(1).grace(Duration::ZERO)
}

#[test]
fn changes_are_weighted_by_examples() {
    let spec = cluster(1, 2);
    let server = server(&spec, 0);
    let results = islands(2, |index| {
        let builder = builder(&spec, index).inner_steps(2).outer(MEAN).quorum(2);
        let island = island(builder.examples_per_step([1, 3][index]), 0.5, SCALAR);
        for _ in 0..2 {
            island.step(|_, _| [5.0, 9.0][index]).unwrap();
        }
        island.values()
    });
    // From 1 three quarters of the way: 4 and 7, of which the second has three times as many examples.
    assert_eq!(results, [[6.25], [6.25]]);
    server.join().unwrap();
}

#[test]
fn an_island_mixes_its_own_parameters_with_the_outer_ones() {
    let spec = cluster(1, 1);
    let server = server(&spec, 0);
    let outer = OuterNesterov { learning_rate: 0.5, momentum: 0.0 };
    let island = island(at_once(&spec, 0).outer(outer).mixing(0.5), 0.5, SCALAR);
    // The inner step is to 2, the outer one to 1.5; then to 2.375 and, from 1.5, to 1.9375.
    for expected in [1.75, 2.15625] {
        island.step(|_, _| 3.0).unwrap();
        assert_eq!(island.values(), [expected]);
    }
    drop(island);
    server.join().unwrap();
}

#[test]
fn an_island_and_its_server_work_within_an_event_loop() {
    let spec = cluster(1, 1);
    within_an_event_loop(|| {
        let folder = tempfile::tempdir().unwrap();
        let options = OuterServerOptions::default().silence(SILENCE).island_timeout(SOON).checkpoints(folder.path());
        let server = OuterServer::start_with(&resolver(&spec, TaskType::Ps, 0), options).unwrap();
        let island = island(at_once(&spec, 0), 0.5, SCALAR);
        island.step(|_, _| 3.0).unwrap();
        assert_eq!(island.values(), [2.0]);
        drop(island);
        server.join().unwrap();
        assert!(CheckpointManager::new(folder.path().join("ps-0")).read_newest().unwrap().is_some());
    });
}

#[test]
fn changes_without_an_outer_step_count_later_and_are_not_sent_again() {
    let spec = cluster(1, 2);
    let server = server(&spec, 0);
    let options = |index| {
        let builder = builder(&spec, index).inner_steps(1).outer(MEAN).quorum(2).grace(Duration::from_millis(10));
        watched(builder.examples_per_step([1, 2][index]))
    };
    let (of_first, seen) = options(0);
    let first = island(of_first, 0.5, SCALAR);
    for expected in [2.0, 2.5] {
        first.step(|_, _| 3.0).unwrap();
        assert_eq!(first.values(), [expected], "it trains on with its own");
    }
    let second = island(options(1).0, 0.5, SCALAR);
    second.step(|_, _| 5.0).unwrap();
    // Both have two examples: one has moved by 1 and 0.5, the other by 2.
    assert_eq!(second.values(), [2.75]);
    first.step(|_, _| 7.0).unwrap();
    assert_eq!(first.values(), [2.75], "the outer parameters replace its own, which count in the next outer step");
    // From 2.75 to 4.875 by the second; by the first from 2.5 to 4.75 before.
    second.step(|_, _| 7.0).unwrap();
    // (1 * 2.25 + 2 * 2.125) / 3
    let expected = 2.75 + 6.5 / 3.0;
    assert!((second.values()[0] - expected).abs() < 1e-6, "{:?}, not {expected}", second.values());
    let late: Vec<_> = seen.lock().unwrap().iter().map(|exchange| exchange.outcome.clone()).collect();
    let counted = |late| OuterOutcome::Counted { late };
    assert_eq!(late, [OuterOutcome::Joined, counted(0), counted(0), counted(1)]);
    drop((first, second));
    server.join().unwrap();
}

#[test]
fn an_island_that_is_too_late_is_told_and_continues_from_the_outer_parameters() {
    let spec = cluster(1, 2);
    let server = server(&spec, 0);
    let options = |index| at_once(&spec, index).staleness(2);
    let first = island(options(0), 0.5, SCALAR);
    first.step(|_, _| 3.0).unwrap();
    let (of_second, seen) = watched(options(1));
    let second = island(of_second, 0.5, SCALAR);
    second.step(|_, _| 3.0).unwrap();
    // Two later outer steps are allowed, three are not.
    for (steps, outcome) in [(2, OuterOutcome::Counted { late: 2 }), (3, OuterOutcome::TooLate { late: 3 })] {
        for _ in 0..steps {
            first.step(|_, _| 3.0).unwrap();
        }
        let before = first.values();
        second.step(|_, _| 100.0).unwrap();
        let last = seen.lock().unwrap().last().unwrap().clone();
        assert_eq!((&last.outcome, last.is_newer), (&outcome, true));
        let was_refused = matches!(outcome, OuterOutcome::TooLate { .. });
        assert_eq!((last.refusals, second.values() == before), (u64::from(was_refused), was_refused));
    }
    drop((first, second));
    server.join().unwrap();
}

#[test]
fn what_eight_bits_lose_is_sent_later() {
    let spec = cluster(1, 1);
    let server = server(&spec, 0);
    let island = island(at_once(&spec, 0).wire(Wire::Int8), 1.0, [("w", 2)]);
    for _ in 0..50 {
        let values = island.values();
        // Each step moves them by 127 and 0.1: a tenth of what one message can tell.
        island.step(|_, at| values[at] + [127.0, 0.1][at]).unwrap();
    }
    let values = island.values();
    assert_eq!(values[0], 1.0 + 50.0 * 127.0);
    assert!((values[1] - 6.0).abs() <= 0.51, "{}", values[1]);
    drop(island);
    server.join().unwrap();
}
