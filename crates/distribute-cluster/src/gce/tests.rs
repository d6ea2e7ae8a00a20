use std::time::Duration;

use distribute_types::{ErrorClass, FailureKind};
use serde_json::{Value, json};

use super::*;
use crate::Membership;
use crate::http::stand_in::{Answer, StandIn};

const LIST: &str = "/compute/v1/projects/p/zones/z/instanceGroups/g/listInstances";

fn instance_path(name: &str) -> String {
    format!("/compute/v1/projects/p/zones/z/instances/{name}")
}

fn item(name: &str, status: &str) -> Value {
    let url = format!("https://www.googleapis.com/compute/v1/projects/p/zones/z/instances/{name}");
    json!({"instance": url, "status": status, "namedPorts": []})
}

fn instance(address: &str, status: &str) -> Answer {
    Answer::json(&json!({
        "name": "x",
        "status": status,
        "networkInterfaces": [{"name": "nic0", "networkIP": address}, {"networkIP": "192.168.0.1"}],
    }))
}

/// A group of running members, each with its name and address.
fn group(members: &[(&str, &str)]) -> StandIn {
    let items: Vec<Value> = members.iter().map(|(name, _)| item(name, "RUNNING")).collect();
    let server = StandIn::start().on(LIST, [Answer::json(&json!({"items": items}))]);
    members
        .iter()
        .fold(server, |server, (name, address)| server.on(&instance_path(name), [instance(address, "RUNNING")]))
}

fn options(server: &StandIn) -> GceOptions {
    let requests = RequestOptions::default().first_delay(Duration::from_millis(1)).timeout(Duration::from_secs(20));
    GceOptions::new("g", 8470)
        .project("p".to_owned())
        .zone("z".to_owned())
        .access_token(AccessToken::new("t"))
        .base_url(server.url())
        .requests(requests)
}

fn resolver(options: GceOptions) -> GceResolver {
    GceResolver::from_vars(|_| None, options).unwrap()
}

fn addresses(resolver: &GceResolver, job: TaskType) -> Vec<String> {
    let spec = resolver.cluster_spec().unwrap();
    spec.job_tasks(job).into_iter().flatten().map(str::to_owned).collect()
}

#[test]
fn one_member_is_a_cluster() {
    let server = group(&[("a", "10.123.45.67")]);
    let resolver = resolver(options(&server));
    assert_eq!(addresses(&resolver, TaskType::Worker), ["10.123.45.67:8470"]);
    assert_eq!(resolver.task(), Some(Task::new(TaskType::Worker, 0)));
    assert_eq!(resolver.master(None, None, None).unwrap(), "grpc://10.123.45.67:8470");
    assert_eq!(resolver.master(None, None, Some("")).unwrap(), "10.123.45.67:8470");
    let list = &server.seen()[0];
    assert_eq!((list.method.as_str(), list.body.as_str()), ("POST", r#"{"instanceState":"ALL"}"#));
    assert_eq!(list.header("authorization"), "Bearer t");
}

#[test]
fn members_are_sorted_by_their_addresses_and_listed_each_time() {
    let server = group(&[("a", "10.1.2.5"), ("b", "10.1.2.3"), ("c", "10.1.2.4")]);
    let options = options(&server).own_task(OwnTask::Index(2)).rpc_layer("test");
    let resolver = resolver(options);
    assert_eq!(addresses(&resolver, TaskType::Worker), ["10.1.2.3:8470", "10.1.2.4:8470", "10.1.2.5:8470"]);
    assert_eq!(resolver.master(None, None, None).unwrap(), "test://10.1.2.5:8470");
    assert_eq!(resolver.master(Some(TaskType::Worker), Some(0), Some("grpc")).unwrap(), "grpc://10.1.2.3:8470");
    assert!(resolver.master(Some(TaskType::Ps), Some(0), None).is_err());
    assert_eq!(server.count(LIST), 4);
    server.change(LIST, Answer::json(&json!({"items": [item("b", "RUNNING")]})));
    assert_eq!(addresses(&resolver, TaskType::Worker), ["10.1.2.3:8470"]);
}

#[test]
fn the_job_of_the_members_is_an_option() {
    let server = group(&[("a", "10.1.2.3")]);
    let resolver = resolver(options(&server).task_type(TaskType::Ps));
    assert_eq!(addresses(&resolver, TaskType::Ps), ["10.1.2.3:8470"]);
    assert_eq!(resolver.task(), Some(Task::new(TaskType::Ps, 0)));
    assert_eq!((resolver.rpc_layer(), resolver.environment()), (Some("grpc"), ""));
}

#[test]
fn groups_of_several_jobs_are_united() {
    let (workers, servers) = (group(&[("a", "10.1.2.3")]), group(&[("a", "10.1.3.3")]));
    let union = crate::UnionResolver::new(vec![
        Box::new(resolver(options(&workers))),
        Box::new(resolver(options(&servers).task_type(TaskType::Ps))),
    ]);
    let spec = union.unwrap().cluster_spec().unwrap();
    assert_eq!(spec.to_json(), json!({"worker": ["10.1.2.3:8470"], "ps": ["10.1.3.3:8470"]}));
}

#[test]
fn pages_are_followed() {
    let first = json!({"items": [item("a", "RUNNING")], "nextPageToken": "two/2"});
    let empty = json!({"nextPageToken": "three"});
    let server = group(&[("a", "10.0.0.1"), ("b", "10.0.0.2")]);
    server.change(LIST, Answer::json(&first));
    let server = server.on(LIST, [Answer::json(&empty), Answer::json(&json!({"items": [item("b", "RUNNING")]}))]);
    assert_eq!(addresses(&resolver(options(&server)), TaskType::Worker), ["10.0.0.1:8470", "10.0.0.2:8470"]);
    let pages: Vec<_> = server.seen().into_iter().filter(|seen| seen.path.starts_with(LIST)).collect();
    let queries: Vec<&str> = pages.iter().filter_map(|seen| Some(seen.path.split_once('?')?.1)).collect();
    assert_eq!(queries, ["maxResults=500", "maxResults=500&pageToken=two%2F2", "maxResults=500&pageToken=three"]);
}

#[test]
fn members_that_do_not_run_are_left_out_and_named_if_none_runs() {
    let server = group(&[("a", "10.0.0.1"), ("b", "10.0.0.2")]);
    let items = [item("a", "RUNNING"), item("b", "RUNNING"), item("c", "STAGING"), item("d", "RUNNING")];
    server.change(LIST, Answer::json(&json!({"items": items})));
    // `b` stops between the two requests, and `d` is deleted.
    server.change(&instance_path("b"), instance("10.0.0.2", "STOPPING"));
    assert_eq!(addresses(&resolver(options(&server)), TaskType::Worker), ["10.0.0.1:8470"]);
    server.change(&instance_path("a"), instance("10.0.0.1", "TERMINATED"));
    let error = resolver(options(&server)).cluster_spec().unwrap_err();
    let words = "the instance group \"g\" in z has no running member: a (TERMINATED), b (STOPPING), c (STAGING), d \
        (deleted). Start its members";
    assert!(error.to_string().starts_with(words), "{error}");
    assert_eq!(error.class().kind, FailureKind::Retryable);
    server.change(LIST, Answer::json(&json!({"kind": "compute#instanceGroupsListInstances"})));
    let error = resolver(options(&server)).cluster_spec().unwrap_err();
    assert!(error.to_string().contains("\"g\" in z has no members"), "{error}");
}

#[test]
fn project_zone_token_and_index_come_from_the_metadata_server() {
    let server = group(&[("a", "10.0.0.2"), ("b", "10.0.0.1")]);
    let root = "/computeMetadata/v1";
    let metadata = StandIn::start()
        .on(&format!("{root}/project/project-id"), [Answer::metadata("p\n")])
        .on(&format!("{root}/instance/zone"), [Answer::metadata("projects/123/zones/z")])
        .on(&format!("{root}/instance/network-interfaces/0/ip"), [Answer::metadata("10.0.0.2")])
        .on(
            &format!("{root}/instance/service-accounts/default/token"),
            [Answer::metadata(r#"{"access_token": "machine", "expires_in": 3599, "token_type": "Bearer"}"#)],
        );
    let host = metadata.host();
    let variable = |name: &str| (name == "GCE_METADATA_HOST").then(|| host.clone());
    let options =
        GceOptions { project: None, zone: None, access_token: None, ..options(&server).own_task(OwnTask::ByAddress) };
    let resolver = GceResolver::from_vars(variable, options.clone()).unwrap();
    assert!(server.seen().iter().all(|seen| seen.header("authorization") == "Bearer machine"));
    let membership = Membership::from_resolver(&resolver).unwrap().unwrap();
    assert_eq!((membership.rank, membership.world_size()), (1, 2));
    assert_eq!(membership.leader_address, "10.0.0.1:8470");
    assert_eq!(membership.job_id(), JobId::of_cluster(&resolver.cluster_spec().unwrap()));

    // A member that leaves changes the indices of the others.
    server.change(LIST, Answer::json(&json!({"items": [item("a", "RUNNING")]})));
    let text = resolver.cluster_spec().unwrap_err().to_string();
    assert!(text.contains("the members have changed: this machine, 10.0.0.2, had index 1"), "{text}");
    metadata.change(&format!("{root}/instance/network-interfaces/0/ip"), Answer::metadata("10.0.0.9"));
    let text = GceResolver::from_vars(variable, options.clone()).unwrap_err().to_string();
    assert!(text.contains("0 of the addresses are this machine's, 10.0.0.9"), "{text}");
    metadata.change(&format!("{root}/instance/service-accounts/default/token"), Answer::text("{}"));
    let text = GceResolver::from_vars(variable, options).unwrap_err().to_string();
    assert!(text.contains("service-accounts/default/token") && text.contains("pass an access token"), "{text}");
}

#[test]
fn a_strategy_gets_its_membership() {
    let server = group(&[("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.3")]);
    let resolver = resolver(options(&server).own_task(OwnTask::Index(2)));
    let membership = Membership::from_resolver(&resolver).unwrap().unwrap();
    assert_eq!((membership.rank, membership.world_size()), (2, 3));
    assert_eq!(membership.advertised_host.as_deref(), Some("10.0.0.3"));
    // One list serves the cluster and its identity.
    assert_eq!(server.count(LIST), 1);
    let named = |name: &str| (name == "DISTRIBUTE_JOB_ID").then(|| "j".to_owned());
    let named = GceResolver::from_vars(named, options(&server)).unwrap();
    assert_eq!(Membership::from_resolver(&named).unwrap().unwrap().job_id().name(), "j");
}

#[test]
fn refusals_say_what_to_do() {
    let server = StandIn::start();
    let text = |answer: Answer| {
        server.change(LIST, answer);
        resolver(options(&server)).cluster_spec().unwrap_err().to_string()
    };
    for (answer, words) in [
        (Answer::error(401, "invalid credentials"), "The access token is not valid, or no longer"),
        (Answer::error(403, "denied"), "Grant the account the permission compute.instanceGroups.list in project p"),
        (Answer::error(404, "no g"), "no g. Check the name, the project p and the zone z"),
        (Answer::text("{\"items\": ["), "the answer ends in the middle of its JSON"),
        (Answer::text("[]"), "the answer is not the expected JSON"),
        (Answer::json(&json!({"items": [item("..", "RUNNING")]})), "a member's name is not a name"),
        (Answer::json(&json!({"nextPageToken": "again"})), "the list does not end after 1000 pages"),
    ] {
        let text = text(answer);
        assert!(text.starts_with("Compute Engine: ") && text.contains(words), "{text}");
    }
    let later = [Answer::status(500), Answer::status(429), Answer::json(&json!({"items": [item("a", "RUNNING")]}))];
    let server = later.into_iter().fold(StandIn::start(), |server, answer| server.on(LIST, [answer]));
    let server = server.on(&instance_path("a"), [instance("10.0.0.1", "RUNNING")]);
    assert_eq!(addresses(&resolver(options(&server)), TaskType::Worker), ["10.0.0.1:8470"]);
}

#[test]
fn options_are_checked_before_anything_is_sent() {
    let server = StandIn::start();
    let wrong = |options: GceOptions| GceResolver::from_vars(|_| None, options).unwrap_err().to_string();
    for (options, words) in [
        (GceOptions { instance_group: "a/b".to_owned(), ..options(&server) }, "the instance group is not a name"),
        (options(&server).project("p?".to_owned()), "the project is not a name"),
        (options(&server).zone(String::new()), "the zone is not a name"),
        (GceOptions { port: 0, ..options(&server) }, "the port is 0"),
        (options(&server).base_url("ftp://x"), "base_url is not a URL"),
    ] {
        let text = wrong(options);
        assert!(text.contains(words), "{text}");
    }
    let malformed =
        GceResolver::from_vars(|name| (name == "DISTRIBUTE_JOB_ID").then(|| "a b".into()), options(&server));
    assert!(malformed.is_err() && server.seen().is_empty());
}
