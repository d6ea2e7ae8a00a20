use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::super::{Coordinator, TpuApi};
use super::*;
use crate::RequestOptions;
use crate::http::AccessToken;
use crate::http::stand_in::{Answer, StandIn};

const NODE: &str = "/v2/projects/p/locations/z/nodes/pod";
const NODE_V1: &str = "/v1/projects/p/locations/z/nodes/pod";
const ROOT: &str = "/computeMetadata/v1";

type Vars = Vec<(&'static str, String)>;

/// The service and the metadata server, in one.
fn service() -> StandIn {
    let server = StandIn::start();
    let document = json!({"rootUrl": format!("{}/", server.url()), "servicePath": "", "name": "tpu"});
    ["v1", "v2"]
        .into_iter()
        .fold(server, |server, version| server.on(&format!("/$discovery/tpu/{version}"), [Answer::json(&document)]))
}

fn machine(server: StandIn) -> StandIn {
    let token = r#"{"access_token": "machine", "expires_in": 3599, "token_type": "Bearer"}"#;
    server
        .on(&format!("{ROOT}/project/project-id"), [Answer::metadata("p")])
        .on(&format!("{ROOT}/instance/zone"), [Answer::metadata("projects/1/zones/z")])
        .on(&format!("{ROOT}/instance/service-accounts/default/token"), [Answer::metadata(token)])
}

fn vars(server: &StandIn) -> Vars {
    vec![
        ("TPU_API_DISCOVERY_URL", format!("{}/$discovery/{{api}}/{{apiVersion}}", server.url())),
        ("GCE_METADATA_HOST", server.host()),
    ]
}

fn requests() -> RequestOptions {
    RequestOptions::default().first_delay(Duration::from_millis(1)).timeout(Duration::from_secs(20))
}

/// Options for a TPU by its name, with its place.
fn options() -> TpuOptions {
    let options = TpuOptions::default().tpu("pod").requests(requests());
    options.project("p".to_owned()).zone("z".to_owned()).access_token(AccessToken::new("given"))
}

fn from(vars: &Vars, options: TpuOptions) -> Result<TpuResolver> {
    let find = |name: &str| vars.iter().rev().find(|(key, _)| *key == name).map(|(_, value)| value.clone());
    TpuResolver::from_vars(find, options)
}

fn set(vars: &[(&'static str, &str)]) -> Vars {
    vars.iter().map(|(key, value)| (*key, (*value).to_owned())).collect()
}

fn pod_v1() -> Value {
    let endpoints: Vec<Value> =
        [8, 9, 10, 11].map(|last| json!({"ipAddress": format!("10.2.3.{last}"), "port": 8470})).into_iter().collect();
    json!({"name": "projects/p/locations/z/nodes/pod", "state": "READY", "health": "HEALTHY",
        "acceleratorType": "v2-32", "networkEndpoints": endpoints})
}

fn single(state: &str, health: &str) -> Answer {
    Answer::json(&json!({
        "state": state,
        "health": health,
        "acceleratorType": "v5litepod-4",
        "runtimeVersion": "v2-alpha-tpuv5-lite",
        "networkEndpoints": [{"ipAddress": "10.1.2.3", "port": 8470, "accessConfig": {"externalIp": "1.2.3.4"}}],
    }))
}

fn workers(resolver: &TpuResolver) -> Vec<String> {
    let spec = resolver.cluster_spec().unwrap();
    spec.job_tasks(TaskType::Worker).into_iter().flatten().map(str::to_owned).collect()
}

#[test]
fn a_local_tpu_is_a_program_of_one_process() {
    for vars in [set(&[]), set(&[("TPU_NAME", "local")])] {
        let target = if vars.is_empty() { "local" } else { "" };
        let resolver = from(&vars, TpuOptions::default().tpu(target)).unwrap();
        assert!(resolver.is_local() && resolver.cluster_spec().unwrap().is_empty());
        assert_eq!(resolver.master(None, None, None).unwrap(), "");
        assert_eq!(Membership::from_resolver(&resolver).unwrap(), None);
        assert!(resolver.recoverable().unwrap());
        resolver.wait_for_healthy(Duration::ZERO, Duration::ZERO).unwrap();
    }
    let coordinated = TpuOptions::default().tpu("local").coordinator(Coordinator::At("c:1".to_owned()));
    assert!(from(&set(&[]), coordinated).unwrap_err().to_string().contains("a local TPU has no other tasks"));
}

#[test]
fn the_cores_of_a_local_tpu_are_those_on_the_bus() {
    let folder = tempfile::tempdir().unwrap();
    let local = |vars: &[(&'static str, &str)]| {
        let mut resolver = from(&set(vars), TpuOptions::default().tpu("local")).unwrap();
        resolver.pci = folder.path().to_owned();
        resolver
    };
    let text = local(&[]).cores_per_task().unwrap_err().to_string();
    assert!(text.contains("there is no TPU on this machine") && local(&[]).num_accelerators().is_empty(), "{text}");
    for chip in ["0", "1", "2", "3"] {
        std::fs::create_dir(folder.path().join(chip)).unwrap();
        std::fs::write(folder.path().join(chip).join("vendor"), "0x1ae0\n").unwrap();
        std::fs::write(folder.path().join(chip).join("device"), "0x005e\n").unwrap();
    }
    assert_eq!(local(&[]).num_accelerators()["TPU"], 8);
    assert_eq!(local(&[("TPU_VISIBLE_CHIPS", "0,1")]).num_accelerators()["TPU"], 4);
}

#[test]
fn endpoints_need_no_service() {
    let resolver = from(&set(&[]), TpuOptions::default().tpu("grpc://10.1.2.3:8470")).unwrap();
    assert_eq!(workers(&resolver), ["10.1.2.3:8470"]);
    assert_eq!(resolver.master(None, None, None).unwrap(), "grpc://10.1.2.3:8470");
    assert_eq!((resolver.task(), resolver.rpc_layer()), (Some(Task::new(TaskType::Worker, 0)), Some("grpc")));
    assert_eq!((resolver.environment(), resolver.num_accelerators().len()), ("", 0));
    let resolver = from(&set(&[]), TpuOptions::default().tpu("grpc://a,grpc://b").port(9000)).unwrap();
    assert_eq!(workers(&resolver), ["a:9000", "b:9000"]);
    let text = from(&set(&[]), TpuOptions::default().tpu("grpc://a,grpc://a")).unwrap_err().to_string();
    assert!(text.starts_with("Cloud TPU: worker:0 and worker:1 have the same address"), "{text}");
}

#[test]
fn gke_names_one_or_many_endpoints() {
    let one = set(&[("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "grpc://10.120.27.5:8470"), ("TPU_NAME", "other")]);
    let resolver = from(&one, TpuOptions::default()).unwrap();
    assert_eq!(workers(&resolver), ["10.120.27.5:8470"]);
    let many = "grpc://10.120.27.5:8470,grpc://10.120.27.6:8470,grpc://10.120.27.7:8470,grpc://10.120.27.8:8470";
    let many = set(&[("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", many), ("TPU_ACCELERATOR_TYPE", "v3-32")]);
    let resolver = from(&many, TpuOptions::default().own_task(OwnTask::Index(3))).unwrap();
    assert_eq!(workers(&resolver).len(), 4);
    assert_eq!(resolver.master(None, None, None).unwrap(), "grpc://10.120.27.8:8470");
    assert_eq!(resolver.master(Some(TaskType::Worker), Some(1), Some("http")).unwrap(), "http://10.120.27.6:8470");
    assert_eq!(resolver.num_accelerators()["TPU"], 8);
    let membership = Membership::from_resolver(&resolver).unwrap().unwrap();
    assert_eq!((membership.rank, membership.world_size()), (3, 4));
    let three = "grpc://a,grpc://b,grpc://c";
    let unequal = set(&[("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", three), ("TPU_ACCELERATOR_TYPE", "v3-32")]);
    let text = from(&unequal, TpuOptions::default()).unwrap().cores_per_task().unwrap_err().to_string();
    assert!(text.contains("unequal on 3 tasks"), "{text}");
}

#[test]
fn a_pod_is_looked_up_each_time() {
    let server = service().on(NODE_V1, [Answer::json(&pod_v1())]);
    let resolver = from(&vars(&server), options().api(TpuApi::V1)).unwrap();
    assert_eq!(server.seen().len(), 0);
    assert_eq!(workers(&resolver), ["10.2.3.8:8470", "10.2.3.9:8470", "10.2.3.10:8470", "10.2.3.11:8470"]);
    assert_eq!(resolver.num_accelerators()["TPU"], 8);
    let seen = server.seen();
    assert_eq!((seen[0].path.as_str(), seen[0].header("authorization")), ("/$discovery/tpu/v1", ""));
    assert_eq!((seen[1].path.as_str(), seen[1].header("authorization")), (NODE_V1, "Bearer given"));
    assert_eq!(server.count(NODE_V1), 2);
    let membership = Membership::from_resolver(&resolver).unwrap().unwrap();
    assert_eq!((membership.world_size(), membership.leader_address.as_str()), (4, "10.2.3.8:8470"));
    // One look-up serves the cluster and its identity.
    assert_eq!(server.count(NODE_V1), 3);
}

#[test]
fn both_versions_and_their_forms_of_ports_are_read() {
    let old = json!({"state": "READY", "ipAddress": "10.1.2.3", "port": "8470"});
    let server = service().on(NODE_V1, [Answer::json(&old)]).on(NODE, [single("READY", "HEALTHY")]);
    assert_eq!(workers(&from(&vars(&server), options().api(TpuApi::V1)).unwrap()), ["10.1.2.3:8470"]);
    let resolver = from(&vars(&server), options()).unwrap();
    assert_eq!(workers(&resolver), ["10.1.2.3:8470"]);
    assert_eq!(resolver.runtime_version().unwrap().as_deref(), Some("v2-alpha-tpuv5-lite"));
    assert_eq!(resolver.num_accelerators()["TPU"], 4);
    assert_eq!(workers(&from(&vars(&server), options().port(9000)).unwrap()), ["10.1.2.3:9000"]);
    let config = json!({"acceleratorConfig": {"type": "V4", "topology": "2x2x2"},
        "networkEndpoints": [{"ipAddress": "fd00::1"}, {"ipAddress": "10.0.0.1", "port": 7}]});
    server.change(NODE, Answer::json(&config));
    assert_eq!(workers(&resolver), ["[fd00::1]:8470", "10.0.0.1:7"]);
    assert_eq!(resolver.cores_per_task().unwrap(), Some(8));
    server.change(NODE, Answer::json(&json!({"state": "READY"})));
    let text = resolver.cluster_spec().unwrap_err().to_string();
    assert!(text.contains("the TPU \"pod\" has no network endpoints"), "{text}");
}

#[test]
fn workers_of_tensorflow_are_refused() {
    let mut node = pod_v1();
    node["tensorflowVersion"] = json!("2.15.0");
    let server = service().on(NODE_V1, [Answer::json(&node)]);
    let text = from(&vars(&server), options().api(TpuApi::V1)).unwrap().cluster_spec().unwrap_err().to_string();
    assert!(text.contains("workers of TensorFlow, which run its graphs alone. Given: TensorFlow 2.15.0"), "{text}");
    // A port says that servers of this library listen there.
    assert_eq!(workers(&from(&vars(&server), options().api(TpuApi::V1).port(9000)).unwrap()).len(), 4);

    let version = StandIn::start().on("/requestversion", [Answer::text(r#"{"currentVersion": "2.15.0"}"#)]);
    let mut resolver =
        from(&set(&[]), TpuOptions::default().tpu("grpc://127.0.0.1:8470").requests(requests())).unwrap();
    resolver.version_port = version.host().rsplit_once(':').unwrap().1.parse().unwrap();
    assert_eq!(resolver.runtime_version().unwrap().as_deref(), Some("2.15.0"));
    let text = resolver.check_workers().unwrap_err().to_string();
    assert!(text.contains("127.0.0.1:8470, with TensorFlow 2.15.0") && text.contains("TPU VM"), "{text}");
    drop(version);
    assert_eq!(resolver.runtime_version().unwrap(), None);
    resolver.check_workers().unwrap();
}

#[test]
fn a_tpu_that_is_not_ready_is_an_error() {
    let server = service();
    let resolver = from(&vars(&server), options()).unwrap();
    for (state, kind) in [
        ("CREATING", FailureKind::Retryable),
        ("REPAIRING", FailureKind::Retryable),
        ("PREEMPTED", FailureKind::Permanent),
    ] {
        server.change(NODE, single(state, "HEALTHY"));
        let error = resolver.cluster_spec().unwrap_err();
        let words = format!("the TPU \"pod\" is not yet ready; state: {state:?}.");
        assert!(error.to_string().starts_with(&words), "{error}");
        assert_eq!(error.class().kind, kind);
        assert!(resolver.num_accelerators().is_empty());
    }
    server.change(NODE, single("READY", "TIMEOUT"));
    assert_eq!(workers(&resolver), ["10.1.2.3:8470"]);
}

#[test]
fn project_zone_and_token_come_from_the_metadata_server() {
    let server = machine(service()).on(NODE, [single("READY", "HEALTHY")]);
    let mut vars = vars(&server);
    vars.push(("TPU_NAME", "pod".to_owned()));
    let resolver = from(&vars, TpuOptions::default().requests(requests())).unwrap();
    assert_eq!(workers(&resolver), ["10.1.2.3:8470"]);
    assert_eq!(server.seen().last().unwrap().header("authorization"), "Bearer machine");
    vars.retain(|(name, _)| *name != "TPU_NAME");
    let config = r#"{"tpu_node_name": "pod", "project": "p", "zone": "z"}"#;
    vars.push(("TPU_CONFIG", config.to_owned()));
    server.change(&format!("{ROOT}/project/project-id"), Answer::metadata("other"));
    assert_eq!(workers(&from(&vars, TpuOptions::default().requests(requests())).unwrap()), ["10.1.2.3:8470"]);
}

#[test]
fn a_metadata_server_that_fails_is_named() {
    let server = machine(service());
    let resolver = from(&vars(&server), TpuOptions::default().tpu("pod").requests(requests())).unwrap();
    for (path, answer, words) in [
        (
            "project/project-id",
            Answer::status(404).header("metadata-flavor", "Google"),
            "the metadata server's project/",
        ),
        ("project/project-id", Answer::text("p"), "so it is not the metadata server"),
        ("project/project-id", Answer::metadata("p/q"), "the project is not a name"),
        ("project/project-id", Answer::status(503).header("metadata-flavor", "Google"), "status 503"),
        (
            "instance/service-accounts/default/token",
            Answer::metadata("{\"access_token\": \"x"),
            "the answer ends in the middle of its JSON",
        ),
    ] {
        let path = format!("{ROOT}/{path}");
        server.change(&path, answer);
        let text = resolver.cluster_spec().unwrap_err().to_string();
        assert!(text.starts_with("Cloud TPU: ") && text.contains(words), "{text}");
        server.change(&format!("{ROOT}/project/project-id"), Answer::metadata("p"));
    }
}

#[test]
fn refusals_say_what_to_do() {
    let server = service();
    let resolver = from(&vars(&server), options()).unwrap();
    for (answer, words) in [
        (Answer::error(401, "expired"), "expired. The access token is not valid, or no longer"),
        (Answer::error(403, "denied"), "Grant the account the permission tpu.nodes.get in project p"),
        (Answer::error(404, "no pod"), "Check the TPU's name, the project p and the zone z"),
        (Answer::text("{\"state\": \"RE"), "the answer ends in the middle of its JSON"),
        (Answer::text(vec![b' '; (4 << 20) + 1]), "at most 4194304 are read"),
        (Answer::status(429).header("retry-after", "600"), "(ask again in 600 s)"),
        (Answer::json(&json!({"networkEndpoints": [{"ipAddress": "a", "port": 70_000}]})), "is not the expected JSON"),
    ] {
        server.change(NODE, answer);
        let text = resolver.cluster_spec().unwrap_err().to_string();
        assert!(text.starts_with("Cloud TPU: the TPU \"pod\": ") && text.contains(words), "{text}");
    }
    server.change(NODE, Answer::status(500));
    let server = server.on(NODE, [Answer::status(503), single("READY", "HEALTHY")]);
    assert_eq!(workers(&resolver), ["10.1.2.3:8470"]);
    server.change(NODE, single("READY", "HEALTHY").after(Duration::from_secs(10)));
    let began = Instant::now();
    let hasty = from(&vars(&server), options().requests(requests().timeout(Duration::from_millis(200)))).unwrap();
    let text = hasty.cluster_spec().unwrap_err().to_string();
    assert!(text.contains("it was not completed within 0.2 s; no answer"), "{text}");
    assert!(began.elapsed() < Duration::from_secs(5));
    server.change("/$discovery/tpu/v2", Answer::json(&json!({"rootUrl": "ftp://x", "servicePath": ""})));
    let text = resolver.cluster_spec().unwrap_err().to_string();
    assert!(text.contains("rootUrl of the discovery document is not a URL"), "{text}");
    server.change("/$discovery/tpu/v2", Answer::json(&json!({"rootUrl": "http://192.0.2.1/"})));
    let text = resolver.cluster_spec().unwrap_err().to_string();
    assert!(text.contains("an access token would be sent to 192.0.2.1 without TLS"), "{text}");
}

#[test]
fn the_task_and_its_job_are_options() {
    let server = service().on(NODE, [Answer::json(&pod_v1())]);
    let options = options().job(TaskType::Ps).task_type(TaskType::Chief).own_task(OwnTask::Index(0));
    let resolver = from(&vars(&server), options.coordinator(Coordinator::At("10.0.0.9:7000".to_owned()))).unwrap();
    assert_eq!(resolver.task(), Some(Task::new(TaskType::Chief, 0)));
    let spec = resolver.cluster_spec().unwrap();
    assert_eq!((spec.num_tasks(TaskType::Ps), spec.num_tasks(TaskType::Worker)), (4, 0));
    assert_eq!(resolver.master(None, None, None).unwrap(), "grpc://10.0.0.9:7000");
    assert_eq!(resolver.master(Some(TaskType::Ps), Some(2), Some("")).unwrap(), "10.2.3.10:8470");
    assert!(resolver.master(Some(TaskType::Ps), Some(4), None).is_err());
}

#[test]
fn a_coordinator_is_a_job_of_its_own() {
    let server = service()
        .on(NODE, [Answer::json(&pod_v1())])
        .on(&format!("{ROOT}/instance/network-interfaces/0/ip"), [Answer::metadata("10.128.1.5")]);
    let here = options().coordinator(Coordinator::Here { port: 7000 });
    let resolver = from(&vars(&server), here).unwrap();
    let spec = resolver.cluster_spec().unwrap();
    assert_eq!(spec.job_tasks(TaskType::Chief), [Some("10.128.1.5:7000")]);
    assert_eq!(spec.num_tasks(TaskType::Worker), 4);
    let malformed = TpuOptions::default().tpu("grpc://a").coordinator(Coordinator::At("c".to_owned()));
    assert!(from(&set(&[]), malformed).unwrap_err().to_string().contains("the address of chief:0 has no port"));
}

#[test]
fn the_own_index_is_that_of_the_own_address() {
    let own = format!("{ROOT}/instance/network-interfaces/0/ip");
    let server = service().on(NODE, [Answer::json(&pod_v1())]).on(&own, [Answer::metadata("10.2.3.10")]);
    let resolver = from(&vars(&server), options().own_task(OwnTask::ByAddress)).unwrap();
    assert_eq!(resolver.task_id(), Some(2));
    server.change(NODE, single("READY", "HEALTHY"));
    assert!(resolver.cluster_spec().is_err());
}

#[test]
fn it_is_healthy_when_the_service_says_so() {
    let server = service().on(
        NODE,
        [single("CREATING", ""), single("READY", "TIMEOUT"), Answer::status(429), single("READY", "HEALTHY")],
    );
    let resolver = from(&vars(&server), options().requests(requests().attempts(1))).unwrap();
    resolver.wait_for_healthy(Duration::from_secs(20), Duration::from_millis(1)).unwrap();
    assert_eq!(server.count(NODE), 4);
    server.change(NODE, single("READY", "UNHEALTHY_MAINTENANCE"));
    let text = resolver.wait_for_healthy(Duration::from_millis(30), Duration::from_millis(10)).unwrap_err().to_string();
    let words = "the TPU \"pod\" is not healthy after 0.03 s: state \"READY\", health \"UNHEALTHY_MAINTENANCE\"";
    assert!(text.starts_with(words), "{text}");
    server.change(NODE, single("PREEMPTED", ""));
    let error = resolver.wait_for_healthy(Duration::from_secs(20), Duration::from_secs(20)).unwrap_err();
    assert_eq!(error.class().kind, FailureKind::Permanent, "{error}");
    server.change(NODE, Answer::status(403));
    let error = resolver.wait_for_healthy(Duration::from_secs(20), Duration::from_secs(20)).unwrap_err();
    assert!(matches!(error, Error::Service { .. }), "{error}");
}

#[test]
fn a_tpu_that_is_gone_or_ran_out_of_memory_is_not_recoverable() {
    let server = service();
    let resolver = from(&vars(&server), options()).unwrap();
    let recoverable = |state: &str, symptom: Option<(&str, Duration)>| {
        let symptoms: Vec<Value> = symptom
            .iter()
            .map(|(kind, age)| {
                let time = humantime::format_rfc3339_nanos(SystemTime::now() - *age).to_string();
                json!({"createTime": time, "symptomType": kind, "details": "", "workerId": "0"})
            })
            .collect();
        server.change(NODE, Answer::json(&json!({"state": state, "symptoms": symptoms})));
        resolver.recoverable().unwrap()
    };
    let (young, old) = (Duration::from_secs(30), Duration::from_secs(95));
    assert!(recoverable("READY", None) && recoverable("REPAIRING", None));
    assert!(!recoverable("PREEMPTED", None) && !recoverable("TERMINATED", None));
    assert!(!recoverable("READY", Some(("OUT_OF_MEMORY", young))));
    assert!(!recoverable("READY", Some(("HBM_OUT_OF_MEMORY", young))));
    assert!(recoverable("READY", Some(("OUT_OF_MEMORY", old))) && recoverable("READY", Some(("LOW_MEMORY", young))));
}

#[test]
fn the_slice_of_a_tpu_vm_comes_from_the_metadata_server() {
    let attribute = |name: &str| format!("{ROOT}/instance/attributes/{name}");
    let env = "ACCELERATOR_TYPE: 'v5litepod-8'\nHOST_BOUNDS: '1,2,1'\nCHIPS_PER_HOST_BOUNDS: '2,2,1'\nWORKER_ID: '1'\n";
    let server = StandIn::start()
        .on(&attribute("tpu-env"), [Answer::metadata(env)])
        .on(&attribute("accelerator-type"), [Answer::metadata("v5litepod-8")])
        .on(&attribute("agent-worker-number"), [Answer::metadata("1")])
        .on(&attribute("worker-network-endpoints"), [Answer::metadata("w-0:1:10.0.0.1,w-1:2:10.0.0.2")]);
    let vars = vars(&server);
    let options = || TpuOptions::default().requests(requests());
    let resolver = from(&vars, options()).unwrap();
    assert_eq!(workers(&resolver), ["10.0.0.1:8470", "10.0.0.2:8470"]);
    assert_eq!((resolver.task_id(), resolver.cores_per_task().unwrap()), (Some(1), Some(4)));
    let mut overridden = vars.clone();
    overridden.extend(set(&[("TPU_WORKER_ID", "0"), ("DISTRIBUTE_PORT", "9000")]));
    let resolver = from(&overridden, options()).unwrap();
    assert_eq!((resolver.task_id(), workers(&resolver)[1].as_str()), (Some(0), "10.0.0.2:9000"));

    // Without the metadata server nothing names a TPU.
    let mut silent = vars.clone();
    silent.extend(set(&[("TPU_SKIP_MDS_QUERY", "1")]));
    let before = server.seen().len();
    let text = from(&silent, options()).unwrap_err().to_string();
    assert!(
        text.contains("nothing names a TPU. Given: no name. Expected: a name, `local`, grpc://host:port"),
        "{text}"
    );
    silent.extend(set(&[("TPU_WORKER_HOSTNAMES", "a,b"), ("TPU_WORKER_ID", "1")]));
    assert_eq!(workers(&from(&silent, options()).unwrap()), ["a:8470", "b:8470"]);
    let mut whole = vars;
    whole.extend(set(&[("TPU_WORKER_HOSTNAMES", "a,b"), ("TPU_WORKER_ID", "1")]));
    assert_eq!(from(&whole, options()).unwrap().task_id(), Some(1));
    assert_eq!(server.seen().len(), before);
}

#[test]
fn off_the_cloud_nothing_names_a_tpu() {
    let closed = set(&[("GCE_METADATA_HOST", "127.0.0.1:1")]);
    let text = from(&closed, TpuOptions::default().requests(requests())).unwrap_err().to_string();
    assert!(text.contains("nothing names a TPU. Given: no name; Cloud TPU: the metadata server's"), "{text}");
    let port = set(&[("TPU_SKIP_MDS_QUERY", "true"), ("DISTRIBUTE_PORT", "0")]);
    assert!(from(&port, TpuOptions::default()).unwrap_err().to_string().contains("DISTRIBUTE_PORT: it is not a port"));
    assert!(from(&closed, TpuOptions::default().tpu("a/b")).unwrap_err().to_string().contains("the TPU's name is not"));
    assert!(from(&closed, TpuOptions::default().tpu("a").port(0)).unwrap_err().to_string().contains("the port is 0"));
}

#[test]
fn several_slices_meet_at_their_coordinator() {
    let base = set(&[
        ("TPU_WORKER_HOSTNAMES", "c,d"),
        ("TPU_WORKER_ID", "1"),
        ("MEGASCALE_NUM_SLICES", "2"),
        ("MEGASCALE_SLICE_ID", "1"),
    ]);
    let text = from(&base, TpuOptions::default()).unwrap().membership().unwrap_err().to_string();
    assert!(
        text.contains("the hosts of 2 slices are needed, and those of one are known. Given: c:8470, d:8470"),
        "{text}"
    );
    let mut led = base.clone();
    led.extend(set(&[("MEGASCALE_COORDINATOR_ADDRESS", "a:8080")]));
    let resolver = from(&led, TpuOptions::default()).unwrap();
    let membership = resolver.membership().unwrap().unwrap();
    assert_eq!((membership.rank, membership.world_size(), membership.leader_address.as_str()), (3, 4, "a:8470"));
    assert_eq!(membership.named(2), "worker:2 at c:8470");
    assert!(resolver.cluster_spec().is_err() && Membership::from_resolver(&resolver).is_err());
    let mut first = led.clone();
    first.extend(set(&[("MEGASCALE_SLICE_ID", "0"), ("TPU_WORKER_ID", "0"), ("TPU_WORKER_HOSTNAMES", "a,b")]));
    let leader = from(&first, TpuOptions::default()).unwrap().membership().unwrap().unwrap();
    assert!(leader.is_leader() && leader.job_id() == membership.job_id());
    led.extend(set(&[("TPU_WORKER_HOSTNAMES", "a,b,c,d"), ("TPU_HOST_BOUNDS", "1,1,2"), ("DISTRIBUTE_JOB_ID", "j")]));
    let whole = from(&led, TpuOptions::default()).unwrap();
    let membership = whole.membership().unwrap().unwrap();
    assert_eq!((membership.rank, membership.leader_address.as_str()), (3, "a:8470"));
    assert_eq!((workers(&whole).len(), membership.job_id().name()), (4, "j"));
}
