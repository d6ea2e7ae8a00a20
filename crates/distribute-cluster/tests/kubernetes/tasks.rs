//! Which tasks the pods are: TensorFlow's five scenarios, and the process's own task.

use distribute_cluster::{ClusterResolver, KubernetesLocation, KubernetesOptions, Membership, Task, TaskType};
use serde_json::json;

use super::server::Server;
use super::{addresses, in_phase, is_about_pods, once, pod, resolve, resolve_with, text};

const WORKER: TaskType = TaskType::Worker;

#[test]
fn one_pod_is_one_worker() {
    let server = Server::start();
    server.put(pod("distribute-0", "distribute", 7));
    server.put(pod("other-0", "other", 8));
    server.put_in("elsewhere", pod("distribute-1", "distribute", 9));
    let resolver = resolve(once(&server)).unwrap();
    assert_eq!(addresses(&resolver, WORKER), ["10.1.0.7:8470"]);
    assert_eq!(resolver.master(None, None, None).unwrap(), "");
    assert_eq!((resolver.task(), resolver.rpc_layer(), resolver.environment()), (None, None, ""));
}

#[test]
fn pods_are_sorted_by_name() {
    let server = Server::start();
    for (name, number) in [("b-2", 2), ("b-10", 10), ("a-11", 11), ("b-1", 1)] {
        server.put(pod(name, "distribute", number));
    }
    let resolver = resolve(once(&server)).unwrap();
    assert_eq!(addresses(&resolver, WORKER), ["10.1.0.11:8470", "10.1.0.1:8470", "10.1.0.2:8470", "10.1.0.10:8470"]);
    // All of them find the same.
    assert_eq!(resolve(once(&server)).unwrap(), resolver);
}

#[test]
fn arguments_of_master_override_the_own_task() {
    let server = Server::start();
    server.put(pod("distribute-0", "distribute", 1));
    server.put(pod("distribute-1", "distribute", 2));
    let resolver = resolve(once(&server)).unwrap();
    assert!(resolver.master(None, None, None).unwrap_err().to_string().contains("which task's address"));
    assert_eq!(resolver.master(Some(WORKER), Some(0), Some("test")).unwrap(), "test://10.1.0.1:8470");
    let own = resolve(once(&server).task(Some(Task::new(WORKER, 1)))).unwrap();
    assert_eq!(own.master(None, None, Some("grpc")).unwrap(), "grpc://10.1.0.2:8470");
    assert_eq!(own.master(None, Some(0), Some("")).unwrap(), "10.1.0.1:8470");
    assert!(own.master(Some(TaskType::Ps), Some(0), None).is_err());
}

#[test]
fn a_pod_that_does_not_run_is_an_error() {
    let server = Server::start();
    server.put(pod("distribute-0", "distribute", 1));
    server.put(in_phase(pod("distribute-1", "distribute", 2), "Failed"));
    let error = resolve(once(&server)).unwrap_err();
    assert!(is_about_pods(&error), "{error}");
    let text = error.to_string();
    assert!(text.contains("worker: 1 of 2 pods run, distribute-1 is Failed"), "{text}");
}

#[test]
fn several_selectors_and_jobs() {
    let server = Server::start();
    for (name, job, number) in [("z-0", "first", 1), ("a-0", "second", 2), ("p-0", "ps", 3), ("z-1", "first", 4)] {
        server.put(pod(name, job, number));
    }
    let options =
        once(&server).job(WORKER, ["job-name=first", "job-name=second"]).job(TaskType::Ps, ["job-name=ps"]).port(7000);
    let resolver = resolve(options).unwrap();
    assert_eq!(addresses(&resolver, WORKER), ["10.1.0.1:7000", "10.1.0.4:7000", "10.1.0.2:7000"]);
    assert_eq!(addresses(&resolver, TaskType::Ps), ["10.1.0.3:7000"]);
}

#[test]
fn a_membership_comes_of_it() {
    let server = Server::start();
    for number in 0..3 {
        server.put(pod(&format!("distribute-{number}"), "distribute", number + 1));
    }
    let resolver = resolve_with(&[("HOSTNAME", "distribute-2")], once(&server)).unwrap();
    let membership = Membership::from_resolver(&resolver).unwrap().unwrap();
    assert_eq!((membership.rank, membership.world_size()), (2, 3));
    assert_eq!(membership.leader_address, "10.1.0.1:8470");
    assert_eq!(membership.advertised_host.as_deref(), Some("10.1.0.3"));
    let first = resolve_with(&[("HOSTNAME", "distribute-0")], once(&server)).unwrap();
    assert_eq!(Membership::from_resolver(&first).unwrap().unwrap().job_id(), membership.job_id());
    let named = resolve_with(&[("DISTRIBUTE_JOB_ID", "j")], once(&server)).unwrap();
    assert_eq!(named.job_id().unwrap().name(), "j");
    let without = resolve(once(&server)).unwrap();
    let text = Membership::from_resolver(&without).unwrap_err().to_string();
    assert!(text.contains("which task this process is"), "{text}");
}

#[test]
fn the_own_pod_is_found() {
    let server = Server::start();
    server.put(pod("distribute-0-xyz", "distribute", 1));
    // As in an indexed Job, whose pods have a host name of their own.
    let mut indexed = pod("distribute-1-abc", "distribute", 2);
    indexed["spec"]["hostname"] = json!("distribute-1");
    server.put(indexed);
    let task = |variables: &[(&str, &str)], options: KubernetesOptions| {
        resolve_with(variables, options).map(|resolver| resolver.task().map(|task| task.index))
    };
    let found = |variables: &[(&str, &str)]| task(variables, once(&server)).unwrap();
    assert_eq!(found(&[("HOSTNAME", "distribute-0-xyz")]), Some(0));
    assert_eq!(found(&[("HOSTNAME", "distribute-1")]), Some(1));
    assert_eq!(found(&[("HOSTNAME", "distribute-1-abc")]), None);
    assert_eq!(found(&[("HOSTNAME", "node7"), ("POD_IP", "10.1.0.2")]), Some(1));
    assert_eq!(found(&[("HOSTNAME", "distribute-0-xyz"), ("POD_NAME", "distribute-1-abc")]), Some(1));
    assert_eq!(found(&[("HOSTNAME", ""), ("POD_NAME", "")]), None);
    let unknown = text(resolve_with(&[("POD_NAME", "x")], once(&server)));
    assert!(unknown.contains("POD_NAME names a pod that the label selectors do not select. Given: x."), "{unknown}");
    let host = [("POD_NAME", "x"), ("HOSTNAME", "distribute-0-xyz")];
    assert_eq!(task(&host, once(&server).pod(Some("distribute-1-abc".to_owned()))).unwrap(), Some(1));
    assert_eq!(task(&host, once(&server).task(Some(Task::new(WORKER, 9)))).unwrap(), Some(9));
    assert!(text(resolve(once(&server).pod(Some("y".to_owned())))).contains("pod names a pod"));
}

#[test]
fn off_the_cluster_tasks_have_the_addresses_of_their_nodes() {
    let server = Server::start();
    server.put(pod("distribute-0", "distribute", 1));
    server.put(pod("distribute-1", "distribute", 2));
    let off = || once(&server).location(KubernetesLocation::OffCluster);
    assert_eq!(addresses(&resolve(off()).unwrap(), WORKER), ["10.9.0.1:8470", "10.9.0.2:8470"]);
    let mut neighbour = pod("distribute-2", "distribute", 3);
    neighbour["status"]["hostIP"] = json!("10.9.0.1");
    server.put(neighbour);
    let text = text(resolve(off()));
    assert!(text.contains("the pods distribute-0 and distribute-2 have one address. Given: 10.9.0.1"), "{text}");
    assert_eq!(addresses(&resolve(once(&server)).unwrap(), WORKER).len(), 3);
}

#[test]
fn ipv6_addresses_are_in_brackets() {
    let server = Server::start();
    let mut six = pod("distribute-0", "distribute", 1);
    six["status"]["podIP"] = json!("fd00::5");
    server.put(six);
    assert_eq!(addresses(&resolve(once(&server)).unwrap(), WORKER), ["[fd00::5]:8470"]);
}

#[test]
fn pods_that_cannot_be_a_cluster_are_errors() {
    let server = Server::start();
    server.put(pod("a-0", "a", 1));
    server.put(pod("a-1", "a", 2));
    let twice = once(&server).job(WORKER, ["job-name=a", "job-name=a"]);
    let twice = text(resolve(twice));
    assert!(twice.contains("several selectors select the pod a-0, for worker:0 and for worker:2"), "{twice}");
    let chiefs = text(resolve(once(&server).job(TaskType::Chief, ["job-name=a"])));
    assert!(chiefs.starts_with("Kubernetes: ") && chiefs.contains("chief"), "{chiefs}");
}

#[test]
fn long_lists_come_in_pages() {
    let server = Server::start();
    server.page(2);
    for number in 0..7 {
        server.put(pod(&format!("distribute-{number}"), "distribute", number + 1));
    }
    let resolver = resolve(once(&server)).unwrap();
    assert_eq!(addresses(&resolver, WORKER).len(), 7);
    assert_eq!(server.requests().len(), 4);
}
