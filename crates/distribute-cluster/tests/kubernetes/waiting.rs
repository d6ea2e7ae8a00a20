//! Waits until all pods run.

use std::thread;
use std::time::{Duration, Instant};

use distribute_cluster::{FailureKind, KubernetesOptions, TaskType};
use distribute_types::ErrorClass;

use super::server::{Fault, Server};
use super::{addresses, held_up, in_phase, is_about_pods, once, pod, resolve, text};

const WORKER: TaskType = TaskType::Worker;

fn waiting(server: &Server) -> KubernetesOptions {
    once(server).wait(Duration::from_secs(20))
}

fn lists(server: &Server) -> usize {
    server.requests().iter().filter(|request| !request.is_watch).count()
}

#[test]
fn pods_that_start_are_waited_for() {
    let server = Server::start();
    server.put(in_phase(pod("distribute-0", "distribute", 1), "Pending"));
    server.put(pod("ps-0", "ps", 9));
    let options = waiting(&server)
        .job(WORKER, ["job-name=distribute"])
        .job(TaskType::Ps, ["job-name=ps"])
        .expected(vec![(WORKER, 2)]);
    let resolver = thread::scope(|scope| {
        let resolving = scope.spawn(|| resolve(options));
        server.await_watches(2);
        server.put(pod("distribute-1", "distribute", 2));
        server.put(held_up(pod("distribute-0", "distribute", 1), "Running", "CrashLoopBackOff"));
        server.put(pod("distribute-0", "distribute", 1));
        resolving.join().unwrap()
    });
    assert_eq!(addresses(&resolver.unwrap(), WORKER), ["10.1.0.1:8470", "10.1.0.2:8470"]);
    // They are watched, not listed again.
    assert_eq!(lists(&server), 2);
}

#[test]
fn a_watch_resumes_where_it_ended() {
    let server = Server::start();
    server.put(in_phase(pod("distribute-0", "distribute", 1), "Pending"));
    server.put(in_phase(pod("other", "other", 1), "Pending"));
    let status = Fault::Status(503, "overloaded".to_owned(), None);
    server.fail_watches([Fault::Ended, status, Fault::Cut, Fault::Text("{\"type\": \"MODI"), Fault::Text("?\n")]);
    thread::scope(|scope| {
        let resolving = scope.spawn(|| resolve(waiting(&server)));
        server.await_watches(6);
        server.put(pod("distribute-0", "distribute", 1));
        assert_eq!(addresses(&resolving.join().unwrap().unwrap(), WORKER), ["10.1.0.1:8470"]);
    });
    assert_eq!(lists(&server), 1);
    let versions: Vec<String> = server.requests()[1..].iter().map(|request| request.version.clone()).collect();
    assert_eq!(versions, ["2"; 6]);
}

#[test]
fn a_version_that_is_too_old_begins_a_new_list() {
    let server = Server::start();
    server.put(in_phase(pod("distribute-0", "distribute", 1), "Pending"));
    server.put(pod("distribute-1", "distribute", 2));
    let gone = Fault::Status(410, r#"{"kind": "Status", "code": 410, "message": "gone"}"#.to_owned(), None);
    server.fail_watches([Fault::Expired, gone]);
    thread::scope(|scope| {
        let resolving = scope.spawn(|| resolve(waiting(&server)));
        server.await_watches(3);
        server.remove("distribute-0");
        assert_eq!(addresses(&resolving.join().unwrap().unwrap(), WORKER), ["10.1.0.2:8470"]);
    });
    assert_eq!(lists(&server), 3);
}

#[test]
fn pods_that_do_not_come_are_named() {
    let server = Server::start();
    server.put(pod("train-0", "train", 1));
    server.put(held_up(pod("train-1", "train", 2), "Pending", "ImagePullBackOff"));
    server.put(held_up(pod("train-2", "train", 3), "Running", "CrashLoopBackOff"));
    let options = once(&server).job(WORKER, ["job-name=train"]).expected(vec![(WORKER, 5)]);
    let begin = Instant::now();
    let error = resolve(options.clone().wait(Duration::from_millis(300))).unwrap_err();
    assert!((Duration::from_millis(300)..Duration::from_secs(5)).contains(&begin.elapsed()), "{:?}", begin.elapsed());
    assert!(is_about_pods(&error));
    assert_eq!(error.class().kind, FailureKind::Retryable);
    assert_eq!(
        error.to_string(),
        "not all pods run in namespace default after 0.3 s: worker: 1 of 5 pods run, train-1 is Pending, container \
         main waits: ImagePullBackOff (back-off), train-2 is Running, container main waits: CrashLoopBackOff \
         (back-off), 2 missing with the labels job-name=train; look at `kubectl describe pod -n default`, or \
         wait longer"
    );
    let nowhere = text(resolve(options.clone().namespace(Some("nowhere".to_owned()))));
    assert!(nowhere.contains("namespace nowhere") && nowhere.contains("0 of 5 pods run"), "{nowhere}");
    let none = text(resolve(once(&server)));
    assert!(none.contains("worker: no pod has the labels job-name=distribute"), "{none}");
    for number in 3..40 {
        server.put(in_phase(pod(&format!("train-{number}"), "train", number), "Pending"));
    }
    let many = text(resolve(options.expected(vec![])));
    assert!(many.contains("1 of 40 pods run") && many.contains(", and 23 more"), "{many}");
}

#[test]
fn ended_pods_are_ignored_where_a_number_is_expected() {
    let server = Server::start();
    server.put(in_phase(pod("train-0-old", "train", 1), "Failed"));
    server.put(pod("train-0-new", "train", 2));
    server.put(pod("train-1", "train", 3));
    let mut leaving = pod("train-2", "train", 4);
    leaving["metadata"]["deletionTimestamp"] = serde_json::json!("2026-01-01T00:00:00Z");
    server.put(leaving);
    let options = once(&server).job(WORKER, ["job-name=train"]);
    let expecting = |count| options.clone().expected(vec![(WORKER, count)]);
    assert_eq!(addresses(&resolve(expecting(2)).unwrap(), WORKER), ["10.1.0.2:8470", "10.1.0.3:8470"]);
    let more = text(resolve(expecting(1)));
    assert!(more.contains("worker: 2 pods, but 1 are expected"), "{more}");
    let without = text(resolve(options.clone()));
    assert!(without.contains("2 of 4 pods run, train-0-old is Failed"), "{without}");
    assert!(without.contains("train-2 is Running, being deleted"), "{without}");
}

#[tokio::test]
async fn it_may_be_called_in_an_event_loop() {
    let server = Server::start();
    server.put(pod("distribute-0", "distribute", 1));
    assert_eq!(addresses(&resolve(once(&server)).unwrap(), WORKER), ["10.1.0.1:8470"]);
}
