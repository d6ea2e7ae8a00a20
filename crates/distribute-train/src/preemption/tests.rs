use std::sync::atomic::AtomicU32;

use distribute_cluster::{Authority, FileRegister, Membership};
use distribute_optim::{HostError, HostLoss, HostModel, Sgd};
use distribute_strategy::MultiWorkerMirroredStrategy;
use distribute_types::ErrorClass;
use distribute_values::HostTensor;

use super::*;

#[test]
fn grace_ends_early_enough_for_some_steps_more() {
    let (mut grace, start, period) = (Grace::default(), Instant::now(), Duration::from_secs(20));
    let at = |seconds: u64| start + Duration::from_secs(seconds);
    for seconds in 0..10 {
        assert!(!grace.is_over(false, period, at(seconds)));
    }
    // The signal came at 10, so the grace ends at 30, less four steps of a second and a twentieth of the period.
    for seconds in 10..25 {
        assert!(!grace.is_over(true, period, at(seconds)), "{seconds}");
    }
    assert!(grace.is_over(true, period, at(25)));
}

#[test]
fn a_step_longer_than_the_grace_ends_it_at_once() {
    let (mut grace, start) = (Grace::default(), Instant::now());
    assert!(!grace.is_over(false, Duration::from_secs(5), start));
    assert!(grace.is_over(true, Duration::from_secs(5), start + Duration::from_secs(9)));
}

#[test]
fn a_grace_without_an_end_is_never_over() {
    let (mut grace, start) = (Grace::default(), Instant::now());
    for (seconds, is_told) in [(0, false), (5, true), (5_000_000, true)] {
        assert!(!grace.is_over(is_told, Duration::MAX, start + Duration::from_secs(seconds)));
    }
    let config = TerminationConfig::default().watch(|| true).grace_period(Duration::MAX);
    let handler = handler(config);
    await_request(&handler, Request::Save);
    assert!(!handler.should_stop() && !handler.has_to_end());
}

/// A handler of a strategy of one replica, without signals, so that tests do not share them.
fn handler(config: TerminationConfig) -> PreemptionHandler {
    let strategy = Strategy::default_strategy().unwrap();
    let config = config.signals(Vec::new()).watch_every(Duration::ZERO);
    PreemptionHandler::install(&strategy, config).unwrap()
}

/// Waits until a worker's request is made, which the next step would carry.
fn await_request(handler: &PreemptionHandler, request: Request) {
    await_that(|| handler.strategy.request_flag(request).load(Ordering::Relaxed));
}

fn await_that(is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_watcher_is_asked_until_it_says_so_and_makes_the_request_of_a_signal() {
    for (grace_period, request, other) in
        [(Duration::ZERO, Request::Leave, Request::Save), (Duration::from_secs(600), Request::Save, Request::Leave)]
    {
        let calls = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&calls);
        let config = TerminationConfig::default().grace_period(grace_period);
        let handler = handler(config.watch(move || counted.fetch_add(1, Ordering::Relaxed) == 2));
        await_request(&handler, request);
        assert!(!handler.strategy.request_flag(other).load(Ordering::Relaxed));
        assert_eq!(calls.load(Ordering::Relaxed), 3);
        // The first signal after the event does not count as the second one, which would end the process.
        assert!(!handler.signalled.load(Ordering::Relaxed));
        await_that(|| handler.watching.as_ref().is_some_and(Watching::has_event));
    }
}

#[test]
fn the_grace_period_begins_with_the_event() {
    let config = TerminationConfig::default().grace_period(Duration::from_millis(1));
    let handler = handler(config.watch(|| true));
    await_that(|| handler.watching.as_ref().is_some_and(Watching::has_event));
    // Asked of all workers, which stop after the next step.
    await_that(|| !handler.should_stop() && handler.strategy.request_flag(Request::Leave).load(Ordering::Relaxed));
}

#[test]
fn a_watcher_that_panics_ends_the_training_with_its_message() {
    let config = TerminationConfig::default().grace_period(Duration::from_secs(600));
    let handler = handler(config.watch(|| panic!("no such file")).on_exit(|_| panic!("not called")));
    await_request(&handler, Request::Leave);
    let error = handler.ended(7);
    assert!(matches!(&error, Error::WatcherPanicked { step: 7, problem } if problem == "no such file"), "{error}");
    assert!(error.to_string().contains("panicked: no such file; training has stopped after step 7"), "{error}");
}

#[test]
fn a_dropped_handler_asks_no_more_and_waits_for_no_function() {
    let (enter, entered) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel();
    let (released, enter) = (Mutex::new(released), Mutex::new(enter));
    let hangs = move || {
        enter.lock().send(()).unwrap();
        released.lock().recv_timeout(Duration::from_secs(30)).unwrap();
        true
    };
    let handler = handler(TerminationConfig::default().watch(hangs));
    let flag = handler.strategy.request_flag(Request::Leave);
    entered.recv_timeout(Duration::from_secs(30)).unwrap();
    let shared = Arc::clone(&handler.watching.as_ref().unwrap().shared());
    drop(handler);
    release.send(()).unwrap();
    // The thread holds the other handle.
    await_that(|| Arc::strong_count(&shared) == 1);
    assert!(!flag.load(Ordering::Relaxed));
}

#[test]
fn the_exit_function_gets_the_step_before_the_error() {
    let seen = Arc::new(AtomicU32::new(0));
    let noted = Arc::clone(&seen);
    let config =
        TerminationConfig::default().exit_code(9).on_exit(move |step| noted.store(step as u32, Ordering::Relaxed));
    let handler = handler(config);
    assert!(matches!(handler.ended(5), Error::Preempted { step: 5, exit_code: 9 }));
    assert_eq!(seen.load(Ordering::Relaxed), 5);
}

#[test]
fn equal_configurations_have_the_same_functions() {
    let config = TerminationConfig::default().watch(|| false).on_exit(|_| {});
    assert_eq!(config, config.clone());
    assert_ne!(config, config.clone().watch(|| true));
    assert_ne!(config, config.clone().on_exit(|step| println!("{step}")));
    assert_ne!(config, TerminationConfig::default());
    assert!(format!("{config:?}").contains("Watcher(function)"), "{config:?}");
}

#[test]
fn after_a_step_it_saves_once_if_asked_and_ends_after_the_request_to_leave() {
    let handler = handler(TerminationConfig::default());
    let strategy = &handler.strategy;
    let weight = HostTensor::new(&[1], vec![0.5f32]).unwrap();
    let model = HostModel::new(strategy, [("w", weight)]).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let saves = AtomicU32::new(0);
    let step = |number: u64| {
        let gradient = || HostTensor::new(&[1], vec![0.25f32]);
        strategy
            .run_with(&optimizer, |context, optimizer| {
                optimizer.minimize(context, &HostLoss(vec![Some(gradient()?)]))?;
                Ok::<_, HostError>(())
            })
            .unwrap();
        handler.after_step(number, || {
            saves.fetch_add(1, Ordering::Relaxed);
            Ok::<(), Error>(())
        })
    };
    step(1).unwrap();
    assert_eq!(saves.load(Ordering::Relaxed), 0);
    strategy.request(Request::Save);
    step(2).unwrap();
    step(3).unwrap();
    assert_eq!(saves.load(Ordering::Relaxed), 1);
    strategy.request(Request::Save);
    strategy.request(Request::Leave);
    assert!(matches!(step(4), Err(Error::Preempted { step: 4, exit_code: 143 })));
    assert_eq!(saves.load(Ordering::Relaxed), 2);
    // An error of saving is returned in place of the end.
    let error = handler.after_step(5, || Err(Error::Chief("the disk is full".to_owned())));
    assert!(matches!(error, Err(Error::Chief(_))));
}

/// The variable that makes a process one that gets signals; its value says when.
const ROLE: &str = "DISTRIBUTE_TEST_SIGNALS";

fn installed() -> PreemptionHandler {
    PreemptionHandler::install(&Strategy::default_strategy().unwrap(), TerminationConfig::default()).unwrap()
}

/// Returns the strategy of a process that is the only one of an elastic job.
fn elastic(folder: &std::path::Path, least: u32) -> Strategy {
    let membership = Membership::new(0, 1, "127.0.0.1:1").unwrap();
    let register = Arc::new(FileRegister::new(folder, &membership.job_id()).unwrap());
    let membership = Membership {
        addresses: distribute_testkit::Ports::reserve(1).unwrap().addresses().into_iter().map(Some).collect(),
        advertised_host: Some("127.0.0.1".to_owned()),
        ..membership
    };
    let builder = MultiWorkerMirroredStrategy::builder().membership(membership).devices(["CPU:0"]);
    builder.elastic(least..=2).generations(Authority::Register(register)).build().unwrap()
}

#[test]
fn a_grace_period_is_refused_in_an_elastic_job() {
    let folder = tempfile::tempdir().unwrap();
    let config = TerminationConfig::default().grace_period(Duration::from_secs(1)).signals(Vec::new());
    let error = PreemptionHandler::install(&elastic(folder.path(), 1), config).unwrap_err();
    assert!(matches!(error, Error::Elastic { .. }) && error.to_string().contains("grace_period"), "{error}");
}

fn raise() {
    signal_hook::low_level::raise(SIGTERM).unwrap();
}

#[test]
#[ignore = "a process that another test starts"]
fn gets_signals() {
    match std::env::var(ROLE).unwrap_or_default().as_str() {
        "after the end" => {
            drop(installed());
            raise();
        }
        "before the end and after" => {
            let handler = installed();
            raise();
            assert!(handler.is_told());
            drop(handler);
            raise();
        }
        "twice" => {
            let handler = installed();
            raise();
            assert!(handler.is_told());
            raise();
        }
        "after the end of one of two" => {
            let (one, other) = (installed(), installed());
            drop(one);
            raise();
            assert!(other.is_told());
        }
        "after a second beginning" => {
            drop(installed());
            let handler = installed();
            raise();
            assert!(handler.is_told());
        }
        "in an elastic job" => {
            let folder = tempfile::tempdir().unwrap();
            let strategy = elastic(folder.path(), 1);
            let handler = PreemptionHandler::install(&strategy, TerminationConfig::default()).unwrap();
            let gathering = strategy.next_generation(None).unwrap();
            gathering.form().unwrap();
            gathering.begin().unwrap();
            let saves = AtomicU32::new(0);
            let after_step = |step: u64| {
                handler.after_step(step, || {
                    saves.fetch_add(1, Ordering::Relaxed);
                    Ok::<(), Error>(())
                })
            };
            after_step(1).unwrap();
            raise();
            let error = after_step(2).unwrap_err();
            assert!(matches!(error, Error::Preempted { step: 2, exit_code: 143 }), "{error}");
            assert_eq!((saves.load(Ordering::Relaxed), strategy.generation()), (1, None));
        }
        "while it waits for others" => {
            let folder = tempfile::tempdir().unwrap();
            let strategy = elastic(folder.path(), 2);
            let _handler = PreemptionHandler::install(&strategy, TerminationConfig::default()).unwrap();
            let raising = std::thread::spawn(|| {
                std::thread::sleep(Duration::from_millis(200));
                raise();
            });
            let error = strategy.next_generation(None).err().unwrap();
            assert!(error.exit_code() == 143 && error.to_string().contains("told to stop"), "{error}");
            raising.join().unwrap();
        }
        "after the end, where the program handles it itself" => {
            let seen = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register(SIGTERM, Arc::clone(&seen)).unwrap();
            drop(installed());
            raise();
            assert!(seen.load(Ordering::SeqCst));
        }
        _ => {}
    }
}

#[test]
fn a_signal_that_cannot_be_handled_is_an_error() {
    let config = TerminationConfig::default().signals(vec![SIGTERM, 9]);
    let error = PreemptionHandler::install(&Strategy::default_strategy().unwrap(), config).unwrap_err();
    assert!(matches!(error, Error::Signal { signal: 9, .. }), "{error}");
}

#[test]
fn a_signal_has_its_default_effect_after_the_handler_has_gone() {
    let signalled = |role: &str| {
        let job = distribute_testkit::Job::of_test("preemption::tests::gets_signals").unwrap().env(ROLE, role);
        job.start().unwrap().wait(0, Duration::from_secs(60)).unwrap()
    };
    for role in ["after the end", "before the end and after", "twice"] {
        let outcome = signalled(role);
        assert_eq!(outcome.signal, Some(SIGTERM), "{role}: {outcome:?}");
    }
    let mut survives = vec![
        "after the end of one of two",
        "after a second beginning",
        "in an elastic job",
        "while it waits for others",
    ];
    if cfg!(target_os = "linux") {
        survives.push("after the end, where the program handles it itself");
    }
    for role in survives {
        let outcome = signalled(role);
        assert!(outcome.passed(), "{role}: {outcome:?}");
    }
}
