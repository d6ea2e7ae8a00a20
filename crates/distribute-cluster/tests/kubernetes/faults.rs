//! An API server that refuses, fails, or is silent.

use std::time::{Duration, Instant};

use distribute_cluster::{Error, FailureKind, KubernetesAccess, KubernetesOptions};
use distribute_types::ErrorClass;
use serde_json::json;

use super::server::{Fault, Server};
use super::{once, pod, resolve, text};

fn status(code: u16, message: &str) -> Fault {
    Fault::Status(code, json!({"kind": "Status", "code": code, "message": message}).to_string(), None)
}

/// A server with a pod, which fails the next list.
fn failing_once(fault: Fault) -> Server {
    let server = Server::start();
    server.put(pod("distribute-0", "distribute", 1));
    server.fail_lists([fault]);
    server
}

/// The error of a server that fails all lists.
fn failing(fault: Fault) -> Error {
    let server = Server::start();
    server.fail_always(fault);
    resolve(once(&server).request_timeout(Duration::from_secs(1))).unwrap_err()
}

#[test]
fn what_may_pass_is_asked_again() {
    for fault in [
        status(500, "boom"),
        status(503, "busy"),
        status(429, "slow down"),
        Fault::Truncated,
        Fault::Cut,
        Fault::Text("<html>"),
        Fault::Slow(Duration::from_millis(300)),
    ] {
        let server = failing_once(fault.clone());
        let resolved = resolve(once(&server));
        assert!(resolved.is_ok(), "{fault:?}: {:?}", resolved.err());
        let slow = matches!(fault, Fault::Slow(_));
        assert_eq!(server.requests().len(), if slow { 1 } else { 2 }, "{fault:?}");
    }
}

#[test]
fn the_server_says_when_to_ask_again() {
    let server = failing_once(Fault::Status(429, "later".to_owned(), Some(1)));
    let begin = Instant::now();
    resolve(once(&server)).unwrap();
    assert!(begin.elapsed() >= Duration::from_secs(1), "{:?}", begin.elapsed());
    // A pause beyond the limit is not waited for.
    let server = failing_once(Fault::Status(429, "later".to_owned(), Some(60)));
    let begin = Instant::now();
    let text = text(resolve(once(&server)));
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    assert!(text.contains("too many for 5 s (429), and asks for a pause of 60 s"), "{text}");
}

#[test]
fn what_does_not_pass_is_a_sentence() {
    for (fault, words, kind) in [
        (status(400, "unable to parse"), "does not accept the label selector job-name=distribute (400", false),
        (status(401, "Unauthorized"), "it does not accept the credentials (401: Unauthorized)", false),
        (status(404, "not found"), "it knows no pods of namespace default (404: not found); check the", false),
        (status(429, "slow"), "it has refused requests as too many for 1 s (429);", true),
        (status(500, "boom"), "it has failed for 1 s (500: boom)", true),
        (Fault::Truncated, "its answers have not been lists of pods for 1 s: EOF", true),
        (Fault::Text("<html>"), "its answers have not been lists of pods for 1 s: expected value", true),
        (Fault::Text("{}"), "missing field `items`", true),
        (Fault::Slow(Duration::from_secs(20)), "it has not answered for 1 s", true),
    ] {
        let begin = Instant::now();
        let error = failing(fault.clone());
        let text = error.to_string();
        assert!(text.starts_with("the API server http://127.0.0.1:") && text.contains(words), "{fault:?}: {text}");
        assert!(begin.elapsed() < Duration::from_secs(10), "{fault:?}: {:?}", begin.elapsed());
        let expected = if kind { FailureKind::Retryable } else { FailureKind::Configuration };
        assert_eq!(error.class().kind, expected, "{fault:?}");
    }
}

#[test]
fn a_failure_says_more_than_the_silence_after_it() {
    let server = Server::start();
    server.fail_lists([status(500, "boom"), Fault::Slow(Duration::from_secs(20))]);
    let text = text(resolve(once(&server).request_timeout(Duration::from_secs(1))));
    assert!(text.contains("it has failed for 1 s (500: boom)"), "{text}");
    assert_eq!(server.requests().len(), 2);
}

#[test]
fn a_refusal_has_the_missing_role_ready() {
    let message = "pods is forbidden: User \"system:serviceaccount:team:trainer\" cannot list resource \"pods\" in API \
                   group \"\" in the namespace \"default\"";
    let error = failing(status(403, message));
    let text = error.to_string();
    assert!(text.contains("pods of namespace default may not be listed or watched (403: pods is forbidden"), "{text}");
    let yaml = text.split_once("`kubectl apply -f`:\n").unwrap().1;
    assert_eq!(
        yaml,
        r#"apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: distribute-pods
  namespace: default
rules:
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: distribute-pods
  namespace: default
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: distribute-pods
subjects:
- kind: ServiceAccount
  name: trainer
  namespace: team
"#
    );
    assert_eq!(error.class().kind, FailureKind::Configuration);
}

#[test]
fn a_watch_that_is_refused_ends_the_wait() {
    let server = Server::start();
    server.fail_watches([status(403, "pods is forbidden: User \"alice\" cannot watch resource \"pods\"")]);
    let begin = Instant::now();
    let text = text(resolve(once(&server).wait(Duration::from_secs(20))));
    assert!(text.contains("- kind: User\n  name: \"alice\"\n"), "{text}");
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

#[test]
fn a_server_that_fails_for_long_ends_the_wait() {
    let server = Server::start();
    server.fail_watches(std::iter::repeat_n(status(500, "boom"), 1000));
    let options = once(&server).wait(Duration::from_secs(20)).request_timeout(Duration::from_secs(1));
    let text = text(resolve(options));
    assert!(text.contains("it has failed for 1 s (500: boom)"), "{text}");
}

#[test]
fn a_server_that_is_not_there_is_a_sentence() {
    let unused = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = unused.local_addr().unwrap();
    drop(unused);
    let options = KubernetesOptions::default()
        .access(Some(KubernetesAccess::Url(format!("http://{address}"))))
        .wait(Duration::ZERO)
        .request_timeout(Duration::from_millis(300));
    let text = text(resolve(options));
    assert!(text.contains("it cannot be reached: ") && text.contains("refused"), "{text}");
}
