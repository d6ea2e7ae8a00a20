//! The suite in its brief form; `cargo xtask conformance` runs the whole.

use std::collections::BTreeSet;
use std::sync::mpsc;
use std::time::Duration;

use distribute_conformance::{Case, Outcome, is_tried, run_within};
use distribute_testkit::{Job, show_skips};

/// Longest time of the suite, which takes some two minutes of one core in an optimized build.
const DEADLINE: Duration = Duration::from_secs(1800);

#[test]
fn every_promise_holds_under_every_kind_of_strategy() {
    let suite = Job::builder(env!("CARGO_BIN_EXE_distribute-conformance")).arg("--brief");
    let outcome = suite.start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(outcome.success(), "{}{}", outcome.stdout, outcome.stderr);
    assert!(outcome.stdout.contains(" 0 failed"), "{}", outcome.stdout);
    show_skips(&outcome.stderr);
}

#[test]
fn a_scenario_that_does_not_end_has_failed() {
    let (_hold, held) = mpsc::channel::<()>();
    let outcome = run_within(Duration::from_millis(20), move || {
        let _ = held.recv();
        Outcome::Passed
    });
    assert_eq!(outcome, Outcome::Failed("it did not end within 20ms".to_owned()));
    assert_eq!(run_within(Duration::from_secs(10), || Outcome::Passed), Outcome::Passed);
}

#[test]
fn a_scenario_that_panics_outside_of_its_body_has_failed() {
    let outcome = run_within(Duration::from_secs(10), || panic!("as planned"));
    assert_eq!(outcome, Outcome::Failed("its thread ended without an outcome".to_owned()));
}

#[test]
fn outcomes_come_back_from_what_processes_print() {
    let why = "nothing: of that".to_owned();
    for outcome in [Outcome::Passed, Outcome::NotApplicable(why), Outcome::Failed("how".to_owned())] {
        assert_eq!(Outcome::read(&format!("a line\n{outcome}\n"), "", true), outcome);
    }
    assert!(matches!(Outcome::read("", "a panic", true), Outcome::Failed(how) if how.contains("a panic")));
}

#[test]
fn a_process_that_passes_and_crashes_at_its_end_has_failed() {
    for told in ["outcome: passed\n", "outcome: not applicable: there is one replica\n"] {
        let outcome = Outcome::read(told, "double free", false);
        assert!(matches!(&outcome, Outcome::Failed(how) if how.contains("double free")), "{outcome}");
    }
}

#[test]
fn processes_must_tell_the_same() {
    let (passed, none) = (Outcome::Passed, Outcome::NotApplicable("there is one replica".to_owned()));
    let failed = Outcome::Failed("how".to_owned());
    assert_eq!(Outcome::of_all(&[passed.clone(), passed.clone()]), passed);
    assert_eq!(Outcome::of_all(&[none.clone(), none.clone()]), none);
    assert_eq!(Outcome::of_all(&[passed.clone(), none.clone(), failed.clone()]), failed);
    for told in [[passed.clone(), none.clone()], [none, passed]] {
        let outcome = Outcome::of_all(&told);
        assert!(matches!(&outcome, Outcome::Failed(how) if how.contains("and rank 1 `")), "{outcome}");
    }
    assert!(matches!(Outcome::of_all(&[]), Outcome::Failed(_)));
}

#[test]
fn a_scenario_that_no_strategy_has_tried_is_noticed() {
    let (passed, none) = (Outcome::Passed, Outcome::NotApplicable("there is one replica".to_owned()));
    let failed = Outcome::Failed("how".to_owned());
    assert!(is_tried([(false, &none), (false, &passed), (true, &none)]));
    assert!(!is_tried([(false, &none), (true, &none)]));
    // Others refuse what compiled programs do.
    assert!(!is_tried([(false, &none), (true, &passed)]));
    // It is told already.
    assert!(is_tried([(false, &none), (true, &failed)]));
    assert!(!is_tried([]));
}

fn may_be_refused(name: &str, error: &str) -> bool {
    Case::all().find(|case| case.name == name).expect("a name of a scenario").may_be_refused(error)
}

#[test]
fn only_named_scenarios_may_be_refused_and_only_in_their_words() {
    let of_candle = "a replica was to be on TPU:0: candle computes on CPUs and GPUs; train a model of burn";
    let scale = "a loss scale does not go with a step in one compiled program: leave scale_losses out";
    assert!(may_be_refused("candle: a dense model trains as on one replica", of_candle));
    assert!(may_be_refused("burn: a step that is not finite is left out on all replicas", scale));
    for error in [of_candle, scale, "replica 1 computes something else than replica 0"] {
        assert!(!may_be_refused("burn: a dense model trains as on one replica", error), "{error}");
        assert!(!may_be_refused("reduce combines the replicas' values", error), "{error}");
    }
    assert!(!may_be_refused("burn: a step that is not finite is left out on all replicas", of_candle));
}

#[test]
fn each_scenario_has_a_name_of_its_own() {
    let names: Vec<String> = Case::all().map(|case| case.name).collect();
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
}
