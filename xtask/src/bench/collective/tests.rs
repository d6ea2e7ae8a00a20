use clap::FromArgMatches;

use super::*;

const ALL: [Operation; 5] =
    [Operation::AllReduce, Operation::AllGather, Operation::ReduceScatter, Operation::Broadcast, Operation::AllToAll];

fn flags(arguments: &[&str]) -> Flags {
    let command = Flags::augment_args(clap::Command::new("allreduce").no_binary_name(true));
    Flags::from_arg_matches(&command.get_matches_from(arguments)).unwrap()
}

#[test]
fn only_the_same_work_is_compared() {
    for arguments in [["--dtype", "f16"], ["--op", "max"], ["--algorithm", "auto,ring"], ["--reps", "3"]] {
        assert_eq!(flags(&arguments).check(Operation::AllReduce), Ok(()));
        let problem =
            flags(&[&arguments[..], &["--compare", "gloo"]].concat()).check(Operation::AllReduce).unwrap_err();
        assert!(problem.contains(&format!("leave {} out", arguments[0])), "{problem}");
    }
    let same = flags(&["--compare", "gloo,openmpi", "--dtype", "f32", "--op", "sum", "--algorithm", "auto"]);
    assert_eq!(same.check(Operation::AllReduce), Ok(()));
    assert!(same.check(Operation::AllGather).unwrap_err().contains("allgather"));
}

/// Runs a body on each of two ranks.
fn on_two<T: Send>(body: impl Fn(&ProcessGroup) -> T + Sync) -> Vec<T> {
    let groups = ProcessGroup::local(2).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups.iter().map(|group| scope.spawn(|| body(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn results_are_verified_after_any_number_of_calls() {
    for operation in ALL {
        let wrong = on_two(|group| {
            let mut work = Work::<f32>::new(operation, group, ReduceOp::Sum, 64);
            let make = |x| x as f32;
            let mut wrong = work.verify(make).unwrap();
            for _ in 0..3 {
                work.call().unwrap();
                // What is not reduced in place is read again by each call, and its results are right after each.
                wrong += if work.input.is_empty() { 0 } else { work.wrong(make) };
                wrong += work.verify(make).unwrap();
            }
            wrong
        });
        assert_eq!(wrong, [0, 0], "{operation:?}");
    }
}

#[test]
fn a_call_that_does_nothing_is_wrong() {
    for operation in ALL {
        let wrong = on_two(|group| {
            let mut work = Work::<f32>::new(operation, group, ReduceOp::Sum, 64);
            work.verify(|x| x as f32).unwrap();
            // The output is zero now, and no call follows.
            work.wrong(|x| x as f32)
        });
        assert!(wrong.iter().all(|wrong| *wrong > 0), "{operation:?}: {wrong:?}");
    }
}

#[test]
fn rows_with_wrong_elements_give_no_speed() {
    let row = |wrong| {
        let rows = on_two(|group| measure_on(Operation::AllReduce, &flags(&["--reps", "5"]), group, 1024).unwrap());
        Row { wrong, ..rows.into_iter().next().unwrap() }
    };
    assert_eq!(correct(vec![row(0)]).unwrap().len(), 1);
    let problem = correct(vec![row(0), row(7)]).err().unwrap();
    assert!(problem.starts_with("7 elements of allreduce over local"), "{problem}");
}
