use super::crew::{End, Line, parse};
use super::*;

#[test]
fn ledgers_are_read() {
    let step = Line::Step { step: 7, members: 3, at: 1_700_000_000_123 };
    assert_eq!(parse("step 7 generation 2 members 3 at 1700000000123"), Some(step));
    let joined = Line::Joined { members: 4, chief: true, at: 9 };
    assert_eq!(parse("joined generation 2 members 4 chief true at 9"), Some(joined));
    assert_eq!(parse("noticed at 12: worker:1 at 127.0.0.1 is lost"), Some(Line::Noticed { at: 12 }));
    let end = End { steps: 2, seen: [96, 5, 6], weights: "00ff".to_owned() };
    assert_eq!(parse("end 2 examples 96 5 6 weights 00ff"), Some(Line::End(end)));
    for other in ["", "step x members 3 at 4", "end 2 examples 96", "warning: step 3 at 4"] {
        assert_eq!(parse(other), None, "{other}");
    }
}

#[test]
fn what_breaks_a_promise_is_named() {
    let promise = promise(Fault::KillWorker, Kind::Elastic, 2000).unwrap();
    let held = Measured {
        recover_ms: Some(250),
        join_ms: Some(900),
        codes: vec![0, 0, 0],
        equal: Some(true),
        ..Measured::default()
    };
    assert_eq!(promise.broken_by(&held, 1), None);
    let broken = [
        (Measured { recover_ms: Some(251), ..held.clone() }, "the next step after 251 ms, promised: 250 ms"),
        (Measured { recover_ms: None, ..held.clone() }, "the next step: never"),
        (Measured { steps_lost: 1, ..held.clone() }, "1 steps lost"),
        (Measured { examples_lost: -48, ..held.clone() }, "-48 examples lost"),
        (Measured { codes: vec![0, 138], ..held.clone() }, "an exit code 138"),
        (Measured { equal: Some(false), ..held.clone() }, "the weights differ"),
        (Measured { equal: None, ..held.clone() }, "the weights were not compared"),
    ];
    for (measured, words) in broken {
        let problem = promise.broken_by(&measured, 1).unwrap();
        assert!(problem.contains(words), "{problem}");
    }
    assert_eq!(promise.broken_by(&Measured { recover_ms: Some(900), ..held }, 4), None);
}

#[test]
fn each_fault_has_a_strategy_and_a_name_of_its_own() {
    for (at, fault) in Fault::ALL.into_iter().enumerate() {
        assert!(Kind::ALL.into_iter().any(|kind| promise(fault, kind, 2000).is_some()), "{fault:?}");
        assert!(Fault::ALL[at + 1..].iter().all(|other| other.name() != fault.name()), "{fault:?}");
    }
}

#[test]
fn faults_that_no_chosen_strategy_has_are_refused() {
    let flags = Flags { only: Some("kill-server".to_owned()), strategy: vec![Kind::Workers], ..Flags::default() };
    let problem = run(&flags).unwrap_err();
    assert!(problem.contains("kill-server under workers"), "{problem}");
}

#[test]
fn a_stage_that_cannot_be_made_is_no_skip_where_the_machine_has_the_means() {
    let folder = tempfile::tempdir().unwrap();
    match missing(Fault::DiskFull) {
        Some(why) => distribute_testkit::skipped(why),
        None => {
            Disk::mount(&folder.path().join("disk")).unwrap();
            let problem = Disk::mount(&folder.path().join("no/such/parent")).err().unwrap();
            assert!(problem.contains("No such file"), "{problem}");
        }
    }
    assert_eq!(missing(Fault::KillWorker), None);
}

/// The short form of the command, with the examples as cargo has built them for the tests of the workspace.
#[test]
fn a_killed_worker_costs_what_is_promised_in_step_and_elastic() {
    let ledger = distribute_testkit::target_binary("ledger").unwrap();
    let programs = ledger.parent().unwrap().to_owned();
    let flags = Flags { seconds: 0.5, json: true, profile: Profile::Dev, ..Flags::default() };
    let broken = table(&flags, programs, 7, &[Fault::KillWorker], &[Kind::Workers, Kind::Elastic]).unwrap();
    assert!(broken.is_empty(), "{broken:?}");
}
