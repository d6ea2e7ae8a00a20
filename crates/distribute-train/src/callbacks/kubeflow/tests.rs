use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use distribute_types::{Class, ErrorClass};
use tempfile::TempDir;

use super::stand_in::{Answer, PATH, Seen, StandIn};
use super::*;
use crate::callbacks::tests::Toy;
use crate::callbacks::tests::roles::two_workers;

/// A status that is posted to a stand-in, with the files of a pod.
struct Mounted {
    folder: TempDir,
    warnings: Arc<Mutex<Vec<String>>>,
}

impl Mounted {
    fn new(server: &StandIn) -> (Mounted, KubeflowStatus) {
        let folder = tempfile::tempdir().unwrap();
        let (ca_cert, token) = (folder.path().join("ca.crt"), folder.path().join("token"));
        let any = StandIn::with_tls();
        let authority = if server.authority().is_empty() { any.authority() } else { server.authority() };
        fs::write(&ca_cert, authority).unwrap();
        fs::write(&token, "secret-1\n").unwrap();
        let mut status = KubeflowStatus::new(&server.url(), ca_cert, token).unwrap();
        let warnings = Arc::<Mutex<Vec<String>>>::default();
        let kept = Arc::clone(&warnings);
        status.settings.warn = Arc::new(move |text| kept.lock().unwrap().push(text.to_owned()));
        status.settings.interval = Duration::from_millis(1);
        (Mounted { folder, warnings }, status)
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    fn warnings(&self) -> Vec<String> {
        self.warnings.lock().unwrap().clone()
    }

    /// Waits for a warning.
    fn warning(&self) -> String {
        let deadline = Instant::now() + DEADLINE;
        while self.warnings().is_empty() {
            assert!(Instant::now() < deadline, "there is no warning");
            std::thread::sleep(Duration::from_millis(5));
        }
        self.warnings()[0].clone()
    }
}

/// Reports that an epoch of 100 has ended.
fn note(status: &mut KubeflowStatus, epoch: u32) {
    status.progress(&Status { epoch, epochs: 100, ..Status::default() }, true);
}

/// Reports one epoch after another until the server has seen a request for each.
fn note_each(status: &mut KubeflowStatus, server: &StandIn, epochs: std::ops::RangeInclusive<u32>) -> Vec<Seen> {
    for epoch in epochs {
        let before = server.seen().len();
        note(status, epoch);
        server.wait_for(before + 1);
    }
    server.seen()
}

const DEADLINE: Duration = Duration::from_secs(30);

#[test]
fn all_variables_or_none_are_set() {
    let from = |given: &[(&str, &str)]| {
        let given: HashMap<_, _> = given.iter().copied().collect();
        KubeflowStatus::from_vars(|name| given.get(name).map(OsString::from))
    };
    let [url, ca_cert, token] = VARIABLES;
    assert!(from(&[]).unwrap().is_none());
    assert!(from(&[(url, ""), (ca_cert, ""), (token, "")]).unwrap().is_none());
    let address = format!("https://kubeflow-trainer-controller-manager.kubeflow-system.svc:10443{PATH}");
    let all = [(url, address.as_str()), (ca_cert, "/a/ca.crt"), (token, "/a/token")];
    assert!(from(&all).unwrap().is_some());
    for some in [&all[..1], &all[1..], &[all[0], all[2]], &[all[0], all[1], (token, "")]] {
        let error = from(some).unwrap_err();
        let text = error.to_string();
        let (set, missing) = text.split_once(" present, ").unwrap();
        for (name, value) in all.map(|(name, _)| (name, some.iter().find(|(known, _)| *known == name))) {
            let is_set = value.is_some_and(|(_, value)| !value.is_empty());
            assert_eq!((set.contains(name), missing.contains(name)), (is_set, !is_set), "{text}");
        }
        assert_eq!(error.class(), Class::CONFIGURATION);
    }
}

#[test]
fn a_token_is_sent_over_tls_or_within_this_machine() {
    let outcome = |url: &str| KubeflowStatus::new(url, "/a/ca.crt", "/a/token").map_err(|error| error.to_string());
    for url in ["https://trainer:10443/status", "http://localhost:1/status", "http://127.0.0.1:1/", "http://[::1]/"] {
        outcome(url).unwrap();
    }
    for (url, problem) in [
        ("http://trainer:10443/status", "sent without TLS"),
        ("ftp://trainer/status", "nothing is posted by ftp"),
        ("trainer", "relative URL"),
    ] {
        let text = outcome(url).unwrap_err();
        assert!(text.contains(problem) && text.contains(url) && text.contains("KUBEFLOW_TRAINER_SERVER_URL"), "{text}");
    }
}

#[test]
fn a_training_is_posted_over_tls() {
    let server = StandIn::with_tls();
    let (mounted, mut status) = Mounted::new(&server);
    let mut toy = Toy::new();
    toy.train(&mut status, "val_loss", &[2.0, 1.0, f64::NAN]);
    let seen = server.seen();
    for request in &seen {
        assert_eq!(request.request, format!("POST {PATH}"));
        assert_eq!(request.header("authorization"), Some("Bearer secret-1"));
        assert_eq!(request.header("content-type"), Some("application/json"));
    }
    let last = seen.last().unwrap();
    assert_eq!((last.percent(), last.body["trainerStatus"]["estimatedRemainingSeconds"].as_u64()), (100, Some(0)));
    assert_eq!((last.metric("currentEpoch"), last.metric("totalEpochs")), (Some("3"), Some("3")));
    assert_eq!((last.metric("loss"), last.metric("val_loss")), (Some("NaN"), Some("NaN")));
    assert!(seen.iter().rev().skip(1).all(|request| request.percent() < 100), "{seen:#?}");
    assert_eq!(mounted.warnings(), [""; 0]);
}

#[test]
fn a_resumed_epoch_continues_where_it_was_left() {
    let server = StandIn::start();
    let (_mounted, mut status) = Mounted::new(&server);
    let mut toy = Toy::new();
    // Two of four epochs are done, and two of three steps of the third.
    (toy.epoch, toy.step, toy.epochs) = (3, 8, 4);
    toy.show(&[], |training| status.train_begin(training)).unwrap();
    toy.show(&[], |training| status.epoch_begin(training)).unwrap();
    assert_eq!(server.wait_for(1)[0].percent(), 66);
    std::thread::sleep(2 * NOTE_INTERVAL);
    toy.step = 9;
    toy.show(&[("loss", 0.5)], |training| status.step_end(training)).unwrap();
    assert_eq!(server.wait_for(2)[1].percent(), 75);
    toy.show(&[("loss", 0.5)], |training| status.epoch_end(training)).unwrap();
    (toy.epoch, toy.step) = (4, 9);
    server.wait_for(3);
    std::thread::sleep(2 * NOTE_INTERVAL);
    toy.show(&[], |training| status.epoch_begin(training)).unwrap();
    assert_eq!(server.wait_for(4)[3].percent(), 75);
}

#[test]
fn steps_of_an_epoch_are_learned_from_the_one_before() {
    let server = StandIn::start();
    let (_mounted, mut status) = Mounted::new(&server);
    let mut toy = Toy::new();
    (toy.steps_per_epoch, toy.epochs) = (None, 2);
    toy.show(&[], |training| status.train_begin(training)).unwrap();
    for (epoch, step, percent) in [(1, 4, 0), (2, 6, 75)] {
        toy.epoch = epoch;
        toy.show(&[], |training| status.epoch_begin(training)).unwrap();
        std::thread::sleep(2 * NOTE_INTERVAL);
        toy.step = step;
        toy.show(&[], |training| status.step_end(training)).unwrap();
        server.wait_for(1);
        let deadline = Instant::now() + DEADLINE;
        while server.seen().last().unwrap().percent() != percent {
            assert!(Instant::now() < deadline, "{:#?}", server.seen());
            std::thread::sleep(Duration::from_millis(5));
        }
        toy.show(&[], |training| status.epoch_end(training)).unwrap();
    }
}

#[test]
fn a_server_of_another_authority_is_refused_until_the_file_names_it() {
    let (server, other) = (StandIn::with_tls(), StandIn::with_tls());
    let (mounted, mut status) = Mounted::new(&server);
    fs::write(mounted.path("ca.crt"), other.authority()).unwrap();
    status.start().unwrap();
    note(&mut status, 1);
    let warning = mounted.warning();
    assert!(warning.contains("cannot be reached") && warning.contains("certificate"), "{warning}");
    assert_eq!(server.seen().len(), 0, "no token is sent to it");
    fs::write(mounted.path("ca.crt"), server.authority()).unwrap();
    note(&mut status, 2);
    assert_eq!(server.wait_for(1)[0].percent(), 2);
    assert_eq!(mounted.warnings().len(), 1);
}

#[test]
fn connections_are_used_again_and_tokens_read_again() {
    let server = StandIn::with_tls();
    let (mounted, mut status) = Mounted::new(&server);
    status.start().unwrap();
    note_each(&mut status, &server, 1..=2);
    // As kubelet replaces it: by a name that then leads elsewhere.
    fs::write(mounted.path("new"), "secret-2").unwrap();
    fs::rename(mounted.path("new"), mounted.path("token")).unwrap();
    let seen = note_each(&mut status, &server, 3..=3);
    let tokens: Vec<_> = seen.iter().map(|request| request.header("authorization").unwrap()).collect();
    assert_eq!(tokens, ["Bearer secret-1", "Bearer secret-1", "Bearer secret-2"]);
    assert!(seen.iter().all(|request| request.connection == seen[0].connection), "{seen:#?}");
    assert_eq!(mounted.warnings(), [""; 0]);
}

#[test]
fn a_training_continues_through_all_failures_with_one_warning() {
    let server = StandIn::start();
    let (mounted, mut status) = Mounted::new(&server);
    status.settings.request = Duration::from_millis(300);
    server.answer([
        Answer::Status(401, "Unauthorized"),
        Answer::Status(403, "Forbidden"),
        Answer::Status(404, "Train job not found"),
        Answer::Status(422, "spec.metrics: Too many"),
        Answer::Status(500, "Internal error"),
        Answer::Status(302, ""),
        Answer::Close,
        Answer::Silence(DEADLINE),
    ]);
    status.start().unwrap();
    let seen = note_each(&mut status, &server, 1..=9);
    assert_eq!(seen.iter().map(Seen::percent).collect::<Vec<_>>(), (1..=9).collect::<Vec<_>>());
    status.finish();
    assert_eq!(server.wait_for(10)[9].percent(), 100);
    let warnings = mounted.warnings();
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
    let expected = "the status of the TrainJob is not updated: localhost:";
    assert!(
        warnings[0].starts_with(expected) && warnings[0].contains("401 Unauthorized (Unauthorized)"),
        "{warnings:?}"
    );
}

#[test]
fn each_failure_says_what_it_is() {
    for (answer, expected) in [
        (Answer::Status(403, "Forbidden"), "answers 403 Forbidden (Forbidden); see whether the token is the one"),
        (Answer::Status(404, "Not found"), "answers 404 Not Found (Not found); see whether the TrainJob exists"),
        (Answer::Status(422, "a\nb"), "answers 422 Unprocessable Entity (a b); see whether this version"),
        (Answer::Status(500, ""), "answers 500 Internal Server Error; see the log of Kubeflow Trainer's controller"),
        (Answer::Close, "cannot be reached: "),
        (Answer::Silence(DEADLINE), "does not answer within 0.2 s"),
    ] {
        let server = StandIn::start();
        server.answer([answer]);
        let (mounted, mut status) = Mounted::new(&server);
        status.settings.request = Duration::from_millis(200);
        status.start().unwrap();
        note(&mut status, 1);
        let warning = mounted.warning();
        assert!(warning.contains(expected) && warning.contains("training continues"), "{warning}");
    }
}

#[test]
fn files_that_are_missing_or_unusable_are_named_and_looked_at_again() {
    let unusable: [(&str, Option<&[u8]>, &str); 6] = [
        ("token", None, "os error 2"),
        ("token", Some(b" \n"), "it has no token"),
        ("token", Some(b"a\nb"), "no header can carry"),
        ("token", Some(&[b'a'; 65 * 1024]), "it has over 65536 bytes"),
        ("ca.crt", Some(b"not PEM"), "it has none in PEM"),
        ("ca.crt", Some(b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n"), "no certificate can be read"),
    ];
    for (name, content, expected) in unusable {
        let server = StandIn::with_tls();
        let (mounted, mut status) = Mounted::new(&server);
        let path = mounted.path(name);
        let usable = fs::read(&path).unwrap();
        match content {
            Some(content) => fs::write(&path, content).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        status.start().unwrap();
        note(&mut status, 1);
        let warning = mounted.warning();
        assert!(warning.contains(expected) && warning.contains(&path.display().to_string()), "{warning}");
        fs::write(&path, usable).unwrap();
        note(&mut status, 2);
        assert_eq!(server.wait_for(1)[0].percent(), 2);
        assert_eq!(mounted.warnings().len(), 1);
    }
}

#[test]
fn posts_keep_their_interval_and_the_newest_state_wins() {
    let server = StandIn::start();
    let (mounted, status) = Mounted::new(&server);
    let interval = Duration::from_secs(1);
    let mut status = status.every(interval);
    status.start().unwrap();
    note(&mut status, 1);
    server.wait_for(1);
    (2..=60).for_each(|epoch| note(&mut status, epoch));
    assert_eq!(server.wait_for(2)[1].percent(), 60, "those between are not posted");
    (61..=70).for_each(|epoch| note(&mut status, epoch));
    let ended = Instant::now();
    status.finish();
    let seen = server.seen();
    assert_eq!(seen.iter().map(Seen::percent).collect::<Vec<_>>(), [1, 60, 100]);
    // The interval counts from when a post begins, and the server sees its end.
    assert!(seen[1].at - seen[0].at > interval / 2, "{:?}", seen[1].at - seen[0].at);
    assert!(seen[2].at - ended < interval, "the last one does not wait");
    assert_eq!(mounted.warnings(), [""; 0]);
}

#[test]
fn a_training_waits_for_nothing_but_its_end_and_not_long_for_that() {
    let server = StandIn::start();
    server.answer([Answer::Silence(2 * DEADLINE), Answer::Silence(2 * DEADLINE)]);
    let (mounted, mut status) = Mounted::new(&server);
    (status.settings.request, status.settings.end) = (2 * DEADLINE, Duration::from_millis(200));
    status.start().unwrap();
    let begun = Instant::now();
    note(&mut status, 1);
    server.wait_for(1);
    (2..=90).for_each(|epoch| note(&mut status, epoch));
    status.finish();
    assert!(begun.elapsed() < DEADLINE, "{:?}", begun.elapsed());
    assert_eq!(server.seen().len(), 1);
    assert!(mounted.warnings()[0].contains("the last state is not accepted within 0.2 s"), "{:?}", mounted.warnings());
}

#[test]
fn the_last_state_is_posted_again_where_that_may_help() {
    let posts = |answer: Answer| {
        let server = StandIn::start();
        let (mounted, mut status) = Mounted::new(&server);
        status.start().unwrap();
        note_each(&mut status, &server, 1..=1);
        server.answer([answer]);
        status.finish();
        assert_eq!(mounted.warnings().len(), 1);
        server.seen().iter().map(Seen::percent).collect::<Vec<_>>()
    };
    assert_eq!(posts(Answer::Status(500, "Internal error")), [1, 100, 100]);
    assert_eq!(posts(Answer::Status(403, "Forbidden")), [1, 100]);
}

#[test]
fn a_training_that_an_error_ends_keeps_its_last_status() {
    let server = StandIn::start();
    let (_mounted, mut status) = Mounted::new(&server);
    status.settings.request = 2 * DEADLINE;
    status.start().unwrap();
    note_each(&mut status, &server, 1..=1);
    // Also while a post is under way.
    server.answer([Answer::Silence(2 * DEADLINE)]);
    note_each(&mut status, &server, 2..=2);
    let begun = Instant::now();
    drop(status);
    assert!(begun.elapsed() < DEADLINE, "{:?}", begun.elapsed());
    assert_eq!(server.seen().iter().map(Seen::percent).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn metrics_that_are_left_out_are_told_once() {
    let server = StandIn::start();
    let (mounted, mut status) = Mounted::new(&server);
    status.start().unwrap();
    let metrics: Vec<_> = (0..300).map(|at| (format!("m{at}"), 1.0)).collect();
    for (epoch, count) in [(1, 1), (2, 2)] {
        status.progress(&Status { epoch, epochs: 100, metrics: metrics.clone(), ..Status::default() }, true);
        server.wait_for(count);
    }
    status.finish();
    let warnings = mounted.warnings();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("lacks 46 metrics"), "{warnings:?}");
}

#[test]
fn a_custom_loop_reports_its_progress_and_other_tasks_do_not() {
    use crate::progress::{Form, Options, Progress, Summary};
    for is_chief in [true, false] {
        let server = StandIn::start();
        let (_mounted, status) = Mounted::new(&server);
        let options = Options { epochs: 2, steps_per_epoch: Some(4), is_chief, ..Options::default() };
        let mut progress = Progress::new(options, Form::Off).unwrap().with_kubeflow(status).unwrap();
        progress.epoch(1);
        progress.step(1, 8, &[("loss", 0.5)]);
        progress.end_epoch(&[("val_loss", 0.25)]);
        if is_chief {
            let deadline = Instant::now() + DEADLINE;
            while server.seen().last().is_none_or(|newest| newest.metric("val_loss") != Some("0.25")) {
                assert!(Instant::now() < deadline, "{:#?}", server.seen());
                std::thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(server.seen().last().unwrap().percent(), 50);
        }
        progress.finish(&Summary::default());
        let seen = server.seen();
        assert_eq!(seen.last().map(Seen::percent), is_chief.then_some(100), "{seen:#?}");
    }
    let progress = Progress::new(Options::default(), Form::Off).unwrap();
    drop(progress.with_kubeflow(None).unwrap());
}

#[test]
fn nothing_of_the_token_is_shown() {
    let server = StandIn::start();
    let (mounted, mut status) = Mounted::new(&server);
    status.start().unwrap();
    note_each(&mut status, &server, 1..=1);
    assert!(!format!("{status:?}").contains("secret"), "{status:?}");
    assert!(Path::new(&mounted.path("token")).exists());
}

#[test]
fn the_chief_posts_while_it_is_the_chief() {
    let server = StandIn::with_tls();
    let (_mounted, mut status) = Mounted::new(&server);
    let [chief, other] = two_workers();
    let mut toy = Toy::new();
    (toy.epochs, toy.epoch, toy.strategy) = (9, 1, other.clone());
    toy.show(&[], |training| status.train_begin(training)).unwrap();
    let mut shows = |strategy: &distribute_strategy::Strategy, status: &mut KubeflowStatus| {
        toy.strategy = strategy.clone();
        toy.show(&[], |training| {
            status.members_changed(training)?;
            status.epoch_begin(training)?;
            status.epoch_end(training)
        })
        .unwrap();
    };
    shows(&other, &mut status);
    assert!(status.poster.is_none());
    shows(&chief, &mut status);
    server.wait_for(1);
    shows(&other, &mut status);
    assert!(status.poster.is_none());
    shows(&chief, &mut status);
    server.wait_for(2);
}
