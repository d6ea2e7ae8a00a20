//! The register in a Lease.

use std::time::Duration;

use distribute_cluster::{
    Authority, ElasticMember, ElasticOptions, Error, Generation, JobId, KubernetesAccess, KubernetesOptions,
    LeaseRegister, Membership, Register, TfConfigResolver,
};
use serde_json::{Value, json};

use super::pod;
use super::server::{Fault, Server};

fn register_of(server: &Server, name: &str, job: &str, variables: &[(&str, &str)]) -> LeaseRegister {
    register_in("default", server, name, job, variables)
}

/// Returns the register in a Lease of a namespace, for a process in namespace `default`.
fn register_in(namespace: &str, server: &Server, name: &str, job: &str, variables: &[(&str, &str)]) -> LeaseRegister {
    let access = Some(KubernetesAccess::Url(server.url()));
    let options = KubernetesOptions::default().access(access).namespace(Some("default".into()));
    let find = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    LeaseRegister::from_vars(name, Some(namespace), &JobId::new(job).unwrap(), options, find).unwrap()
}

fn register(server: &Server) -> LeaseRegister {
    register_of(server, "mnist", "j", &[])
}

/// Returns a generation with a number, led by a process.
fn generation(number: u64, leader: u128) -> Generation {
    let member = ElasticMember {
        join_number: 0,
        joined_in: 1,
        identity: leader << 32,
        control: "10.0.0.1:2222".into(),
        service: "10.0.0.1:2223".into(),
    };
    Generation { number, members: vec![member], next_join: 1, trained: number - 1 }
}

fn problem(error: Error) -> String {
    assert!(matches!(error, Error::Kubernetes { .. }), "{error:?}");
    error.to_string()
}

#[test]
fn each_number_is_decided_once_however_many_try() {
    let server = Server::start();
    let register = register(&server);
    assert_eq!(register.read().unwrap(), None);
    assert!(!register.has_ended().unwrap());
    let error = problem(register.decide(&generation(2, 1)).unwrap_err());
    assert!(error.contains("it holds generation 0, although the one before 2 was decided"), "{error}");
    for number in 1..=3 {
        let winners: Vec<Generation> = std::thread::scope(|scope| {
            let deciders: Vec<_> = (1..=6u128)
                .map(|leader| {
                    let register = register.clone();
                    scope.spawn(move || register.decide(&generation(number, leader)).unwrap())
                })
                .collect();
            deciders.into_iter().map(|decider| decider.join().unwrap()).collect()
        });
        assert!(winners.iter().all(|winner| *winner == winners[0]), "{winners:?}");
        assert_eq!(register.read().unwrap().as_ref(), Some(&winners[0]));
    }
    // One that comes late gets what is there.
    assert_eq!(register.decide(&generation(1, 9)).unwrap().number, 3);
    register.end().unwrap();
    register.end().unwrap();
    assert!(register.has_ended().unwrap() && register.read().unwrap().unwrap().number == 3);
    let lease = server.lease("mnist").unwrap();
    assert_eq!(lease["spec"]["leaseTransitions"], 3, "{lease:#}");
}

#[test]
fn a_conflict_is_read_and_an_answer_that_is_lost_is_looked_up() {
    let server = Server::start();
    let register = register(&server);
    // The write has its effect, but the process does not learn it.
    server.fail_leases([Fault::Slow(Duration::ZERO), Fault::Lost]);
    assert_eq!(register.decide(&generation(1, 1)).unwrap(), generation(1, 1));
    assert_eq!(server.lease_requests(), ["GET", "POST", "GET"]);
    // Another process decides between the read and the write, so that the write is refused.
    let conflict = json!({"kind": "Status", "code": 409, "reason": "Conflict", "message": "modified"}).to_string();
    server.fail_leases([Fault::Slow(Duration::ZERO), Fault::Status(409, conflict, None)]);
    assert_eq!(register.decide(&generation(2, 1)).unwrap(), generation(2, 1));
    assert_eq!(server.lease_requests()[3..], ["GET", "PUT", "GET", "PUT"]);
    // What may pass is asked again.
    for fault in [Fault::Status(500, "{}".into(), None), Fault::Status(429, "{}".into(), None), Fault::Text("<html>")] {
        server.fail_leases([fault]);
        assert_eq!(register.read().unwrap(), Some(generation(2, 1)));
    }
}

#[test]
fn what_others_have_written_into_the_lease_stays() {
    let server = Server::start();
    // Made beforehand, where the pods may not create any.
    server.put_lease(json!({"metadata": {"name": "mnist", "labels": {"team": "a"}, "annotations": {"note": "b"}}}));
    let register = register(&server);
    assert_eq!(register.read().unwrap(), None);
    register.decide(&generation(1, 1)).unwrap();
    let lease = server.lease("mnist").unwrap();
    assert_eq!(
        (&lease["metadata"]["labels"]["team"], &lease["metadata"]["annotations"]["note"]),
        (&"a".into(), &"b".into())
    );
    assert_eq!(register.read().unwrap(), Some(generation(1, 1)));
}

#[test]
fn the_lease_belongs_to_the_controller_of_the_pod() {
    let server = Server::start();
    let mut own = pod("mnist-0", "mnist", 1);
    own["metadata"]["ownerReferences"] = json!([
        {"apiVersion": "v1", "kind": "Other", "name": "x", "uid": "0"},
        {"apiVersion": "batch/v1", "kind": "Job", "name": "mnist", "uid": "4f1", "controller": true,
            "blockOwnerDeletion": true},
    ]);
    server.put(own);
    register_of(&server, "mnist", "j", &[("POD_NAME", "mnist-0")]).decide(&generation(1, 1)).unwrap();
    let owner = json!([{"apiVersion": "batch/v1", "kind": "Job", "name": "mnist", "uid": "4f1"}]);
    assert_eq!(server.lease("mnist").unwrap()["metadata"]["ownerReferences"], owner);
    // Another namespace may have a pod of the same name, and does not own objects of this one.
    let mut stranger = pod("mnist-0", "mnist", 2);
    stranger["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "batch/v1", "kind": "Job", "name": "mnist", "uid": "8a2", "controller": true}]);
    server.put_in("research", stranger);
    register_in("research", &server, "far", "j", &[("POD_NAME", "mnist-0")]).decide(&generation(1, 1)).unwrap();
    assert_eq!(server.lease_in("research", "far").unwrap()["metadata"]["ownerReferences"], Value::Null);
    // A pod that is not found does not matter.
    register_of(&server, "other", "j", &[("HOSTNAME", "elsewhere")]).decide(&generation(1, 1)).unwrap();
    assert_eq!(server.lease("other").unwrap()["metadata"]["ownerReferences"], Value::Null);
}

#[test]
fn a_lease_of_another_job_is_refused() {
    let server = Server::start();
    register(&server).decide(&generation(1, 1)).unwrap();
    let stranger = register_of(&server, "mnist", "k", &[]);
    for error in
        [stranger.read().unwrap_err(), stranger.decide(&generation(1, 2)).unwrap_err(), stranger.end().unwrap_err()]
    {
        let error = problem(error);
        assert!(error.contains("it belongs to the job with the identity "), "{error}");
        assert!(error.contains("kubectl delete lease mnist -n default"), "{error}");
    }
    server.put_lease(json!({"metadata": {"name": "scheduler"}, "spec": {"holderIdentity": "node-7"}}));
    let error = problem(register_of(&server, "scheduler", "j", &[]).decide(&generation(1, 1)).unwrap_err());
    assert!(error.contains("it belongs to node-7"), "{error}");
    assert_eq!(server.lease("scheduler").unwrap()["spec"]["holderIdentity"], "node-7");
}

#[test]
fn damage_is_a_sentence() {
    let server = Server::start();
    let register = register(&server);
    register.decide(&generation(1, 1)).unwrap();
    let good = server.lease("mnist").unwrap();
    let text = good["metadata"]["annotations"]["distribute/generation"].as_str().unwrap();
    for (damaged, words) in [
        ("%%%".to_owned(), "it is not base64"),
        ("AAAA".to_owned(), "it holds no generation"),
        (text[..text.len() / 8 * 4].to_owned(), "it holds no generation"),
        ("A".repeat(400_000), "it is too long"),
    ] {
        let mut lease = good.clone();
        lease["metadata"]["annotations"]["distribute/generation"] = json!(damaged);
        server.put_lease(lease);
        let error = problem(register.decide(&generation(2, 1)).unwrap_err());
        assert!(error.contains("distribute/generation is damaged") && error.contains(words), "{error}");
        assert!(register.read().is_err());
    }
}

#[test]
fn a_refusal_names_the_role_that_helps() {
    let server = Server::start();
    let message =
        "leases.coordination.k8s.io \"mnist\" is forbidden: User \"system:serviceaccount:default:train\" cannot get";
    let status = json!({"kind": "Status", "code": 403, "reason": "Forbidden", "message": message}).to_string();
    server.fail_leases([Fault::Status(403, status.clone(), None)]);
    let error = problem(register(&server).decide(&generation(1, 1)).unwrap_err());
    assert!(error.contains("this process may not decide a generation in the Lease mnist"), "{error}");
    assert!(error.contains("resources: [leases]\n  verbs: [get, create, update]\n"), "{error}");
    assert!(error.contains("- kind: ServiceAccount\n  name: train\n"), "{error}");
    // The same for a write.
    server.fail_leases([Fault::Slow(Duration::ZERO), Fault::Status(403, status, None)]);
    assert!(problem(register(&server).end().unwrap_err()).contains("may not record the job's end in the Lease mnist"));
    assert_eq!(server.lease_requests(), ["GET", "GET", "POST"], "it is not asked again");
    server.fail_leases([Fault::Status(404, "404 page not found".into(), None)]);
    assert!(problem(register(&server).read().unwrap_err()).contains("it knows no Leases of namespace default"));
}

#[test]
fn a_server_that_always_fails_is_given_up_within_the_deadline() {
    let server = Server::start();
    server.fail_leases_always(Fault::Status(
        429,
        json!({"message": "slow", "details": {"retryAfterSeconds": 60}}).to_string(),
        None,
    ));
    let begun = std::time::Instant::now();
    let error = problem(register(&server).read().unwrap_err());
    assert!(error.contains("could not read the Lease mnist") && error.contains("429"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(10), "a pause that is longer than the deadline is not begun");
    // No server listens.
    let url = Server::start().url();
    let access = Some(KubernetesAccess::Url(url));
    let options = KubernetesOptions::default().access(access).request_timeout(Duration::from_millis(500));
    let register =
        LeaseRegister::from_vars("mnist", Some("default"), &JobId::new("j").unwrap(), options, |_| None).unwrap();
    let begun = std::time::Instant::now();
    let error = problem(register.has_ended().unwrap_err());
    assert!(error.contains("cannot be asked to read the Lease mnist"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(15));
}

#[test]
fn a_generation_that_does_not_fit_is_refused_before_it_is_sent() {
    let server = Server::start();
    let member = |number: u64| ElasticMember {
        join_number: number,
        joined_in: 1,
        identity: u128::from(number) << 32,
        control: format!("{number:0>99}:1"),
        service: format!("{number:0>98}:2"),
    };
    let huge = Generation { number: 1, members: (0..4096).map(member).collect(), next_join: 4096, trained: 0 };
    let error = problem(register(&server).decide(&huge).unwrap_err());
    assert!(error.contains("generation 1 of 4096 members has ") && error.contains("file:/folder"), "{error}");
    assert_eq!(server.lease_requests(), Vec::<String>::new());
    // One that just fits does not exceed what the annotations of an object hold.
    let fits = Generation { number: 1, members: (0..700).map(member).collect(), next_join: 4096, trained: 0 };
    assert!(fits.to_bytes().len() > 150_000, "{}", fits.to_bytes().len());
    register(&server).decide(&fits).unwrap();
    let annotations = server.lease("mnist").unwrap()["metadata"]["annotations"].clone();
    let size = |(key, value): (&String, &Value)| key.len() + value.as_str().unwrap().len();
    assert!(annotations.as_object().unwrap().iter().map(size).sum::<usize>() < 256 * 1024);
    assert!(LeaseRegister::MAX_GENERATION_BYTES.div_ceil(3) * 4 + 200 < 256 * 1024);
}

#[test]
fn the_variable_names_the_lease() {
    let config = r#"{"cluster": {"worker": ["10.0.0.1:1", "10.0.0.2:1"]}, "task": {"type": "worker", "index": 0}}"#;
    let resolver = TfConfigResolver::from_json(config).unwrap();
    let membership = Membership::from_resolver(&resolver).unwrap().unwrap();
    let options = |given: &str| {
        let find = |name: &str| match name {
            "DISTRIBUTE_GENERATIONS" => Some(given.to_owned()),
            "DISTRIBUTE_JOB_ID" => Some("mnist-1".to_owned()),
            _ => None,
        };
        ElasticOptions::from_vars(&membership, 1..=2, None, find)
    };
    for given in ["lease:mnist", "lease:mnist.v2@team-1"] {
        assert!(matches!(options(given).unwrap().authority, Authority::Register(_)), "{given}");
    }
    for given in ["lease:", "lease:Mnist", "lease:a@b@c", "lease:a@", "leases:a"] {
        let error = options(given).unwrap_err();
        assert!(matches!(error, Error::Config { .. }), "{given}: {error}");
    }
}
