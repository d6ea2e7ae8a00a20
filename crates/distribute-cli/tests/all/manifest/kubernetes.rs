//! Pods as Kubernetes and its operators make them of the printed files.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Environment, list, text};

/// A pod, whose container runs one task.
#[derive(Debug)]
pub(crate) struct Pod {
    /// The name by which others reach it, if it has one.
    pub(crate) host: Option<String>,
    pub(crate) role: String,
    pub(crate) index: u64,
    pub(crate) environment: Environment,
    pub(crate) command: Vec<String>,
}

/// Returns the pods of a Job. A headless Service gives them host names.
///
/// # Source
/// Kubernetes' reference: "Completion mode", "Labels, annotations and taints", "DNS for Services and Pods".
pub(crate) fn job(documents: &[Value]) -> Vec<Pod> {
    let kind = |kind: &str| documents.iter().find(|object| object["kind"] == kind);
    let (job, service) = (kind("Job").unwrap(), kind("Service"));
    let name = text(job, "/metadata/name");
    pods(&job["spec"], name, &[])
        .map(|(pod, labels, subdomain)| {
            let host = service.filter(|service| is_headless(service, subdomain.as_deref(), &labels));
            let host = host.and_then(|_| Some(format!("{name}-{}.{}", pod.index, subdomain?)));
            Pod { host, role: "worker".to_owned(), ..pod }
        })
        .collect()
}

/// Returns the pods of a JobSet, in the order of its roles.
///
/// # Source
/// JobSet's API: `Network`, `GenJobName`, the label `jobset-uid`.
pub(crate) fn job_set(object: &Value) -> Vec<Pod> {
    let name = text(object, "/metadata/name");
    let network = &object["spec"]["network"];
    let subdomain = network["subdomain"].as_str().unwrap_or(name);
    let is_published = network["enableDNSHostnames"] != false && network["publishNotReadyAddresses"] != false;
    let mut all = Vec::new();
    for replicated in list(object, "/spec/replicatedJobs") {
        let role = text(replicated, "/name");
        assert!(replicated.get("replicas").is_none_or(|replicas| *replicas == 1));
        let job = format!("{name}-{role}-0");
        let uid = ("jobset.sigs.k8s.io/jobset-uid".to_owned(), "a-set".to_owned());
        for (pod, _, _) in pods(&replicated["template"]["spec"], &job, &[uid]) {
            let host = is_published.then(|| format!("{job}-{}.{subdomain}", pod.index));
            all.push(Pod { host, role: role.to_owned(), ..pod });
        }
    }
    all
}

/// Returns the pods of a TFJob, in the order of its roles.
///
/// # Source
/// Kubeflow's training operator 1.9: `genClusterSpec`, `SetClusterSpec`, `GetPortFromTFJob`.
pub(crate) fn tf_job(object: &Value) -> Vec<Pod> {
    const CONTAINER: &str = "tensorflow";
    let (name, namespace) = (text(object, "/metadata/name"), object["metadata"]["namespace"].as_str());
    let specs = object["spec"]["tfReplicaSpecs"].as_object().unwrap();
    let host = |role: &str, index: u64| {
        format!("{name}-{}-{index}.{}.svc", role.to_lowercase(), namespace.unwrap_or("default"))
    };
    let total: u64 = specs.values().map(|spec| spec["replicas"].as_u64().unwrap()).sum();
    let mut cluster = BTreeMap::new();
    for (role, spec) in specs.iter().filter(|(role, _)| *role != "Evaluator") {
        let container = named(list(spec, "/template/spec/containers"), CONTAINER).unwrap();
        let port =
            named(list(container, "/ports"), "tfjob-port").map_or(2222, |port| port["containerPort"].as_u64().unwrap());
        let addresses: Vec<_> =
            (0..spec["replicas"].as_u64().unwrap()).map(|index| format!("{}:{port}", host(role, index))).collect();
        cluster.insert(role.to_lowercase(), addresses);
    }
    let mut all = Vec::new();
    for role in ["Chief", "Worker", "PS", "Evaluator"] {
        let Some(spec) = specs.get(role) else { continue };
        let container = named(list(spec, "/template/spec/containers"), CONTAINER).unwrap();
        for index in 0..spec["replicas"].as_u64().unwrap() {
            let task = serde_json::json!({"type": role.to_lowercase(), "index": index});
            let config = serde_json::json!({"cluster": cluster, "task": task, "environment": "cloud"}).to_string();
            let mut environment = environment(container, &BTreeMap::new(), &BTreeMap::new());
            if total > 1 {
                environment.insert("TF_CONFIG".to_owned(), config);
            }
            let (host, command) = (Some(host(role, index)), command(container, &environment));
            all.push(Pod { host, role: role.to_lowercase(), index, environment, command });
        }
    }
    all
}

/// Returns the pods of a TrainJob whose runtime has a policy for torch.
///
/// # Source
/// Kubeflow Trainer 2.3: the plugins `torch` (`EnforceMLPolicy`) and `jobset`.
pub(crate) fn train_job(object: &Value) -> Vec<Pod> {
    let (name, trainer) = (text(object, "/metadata/name"), &object["spec"]["trainer"]);
    let nodes = trainer["numNodes"].as_u64().unwrap();
    let given = trainer["numProcPerNode"].as_u64().map(|each| each.to_string());
    let has_gpus = trainer.pointer("/resourcesPerNode/limits/nvidia.com~1gpu").is_some();
    // Without a number it takes that of the CPUs.
    let processes = given.unwrap_or_else(|| if has_gpus { "auto" } else { "4" }.to_owned());
    let host = |index: u64| format!("{name}-node-0-{index}.{name}");
    (0..nodes)
        .map(|index| {
            let labels = BTreeMap::from([("jobset.sigs.k8s.io/jobset-uid".to_owned(), "a-set".to_owned())]);
            let mut environment = environment(trainer, &labels, &BTreeMap::new());
            for (variable, value) in [
                ("PET_NNODES", nodes.to_string()),
                ("PET_NPROC_PER_NODE", processes.clone()),
                ("PET_NODE_RANK", index.to_string()),
                ("PET_MASTER_ADDR", host(0)),
                ("PET_MASTER_PORT", "29500".to_owned()),
                ("JOB_COMPLETION_INDEX", index.to_string()),
            ] {
                environment.insert(variable.to_owned(), value);
            }
            let command = command(trainer, &environment);
            Pod { host: Some(host(index)), role: "worker".to_owned(), index, environment, command }
        })
        .collect()
}

/// Returns the pods of the specification of an indexed Job, without host names.
fn pods<'a>(
    spec: &'a Value,
    job: &'a str,
    labels: &[(String, String)],
) -> impl Iterator<Item = (Pod, BTreeMap<String, String>, Option<String>)> + use<'a> {
    assert_eq!(spec["completionMode"], "Indexed");
    assert_eq!(spec["completions"], spec["parallelism"], "all ranks run at once");
    let template = &spec["template"]["spec"];
    // A policy for exit codes is refused with any other.
    assert_eq!(template["restartPolicy"], "Never");
    let container = &list(template, "/containers")[0];
    let mut labels: BTreeMap<_, _> = labels.iter().cloned().collect();
    labels.insert("batch.kubernetes.io/job-name".to_owned(), job.to_owned());
    labels.insert("batch.kubernetes.io/controller-uid".to_owned(), format!("uid-of-{job}"));
    (0..spec["completions"].as_u64().unwrap()).map(move |index| {
        let annotation = ("batch.kubernetes.io/job-completion-index".to_owned(), index.to_string());
        let mut environment = environment(container, &labels, &BTreeMap::from([annotation]));
        environment.entry("JOB_COMPLETION_INDEX".to_owned()).or_insert(index.to_string());
        let command = command(container, &environment);
        let pod = Pod { host: None, role: String::new(), index, environment, command };
        (pod, labels.clone(), template["subdomain"].as_str().map(str::to_owned))
    })
}

/// Returns whether a Service gives host names to pods with a subdomain, before they are ready.
fn is_headless(service: &Value, subdomain: Option<&str>, labels: &BTreeMap<String, String>) -> bool {
    let spec = &service["spec"];
    let selected = spec["selector"]
        .as_object()
        .unwrap()
        .iter()
        .all(|(key, value)| labels.get(key).is_some_and(|label| value == label));
    selected
        && service["metadata"]["name"].as_str() == subdomain
        && spec["clusterIP"] == "None"
        && spec["publishNotReadyAddresses"] == true
}

fn named<'a>(list: &'a [Value], name: &str) -> Option<&'a Value> {
    list.iter().find(|item| item["name"] == name)
}

/// Returns the variables of a container as the kubelet sets them.
fn environment(
    container: &Value,
    labels: &BTreeMap<String, String>,
    annotations: &BTreeMap<String, String>,
) -> Environment {
    let mut environment = Environment::new();
    for variable in container["env"].as_array().into_iter().flatten() {
        let value = match variable["value"].as_str() {
            Some(value) => expanded(value, &environment),
            None => {
                let path = text(variable, "/valueFrom/fieldRef/fieldPath");
                let (kind, key) = path.strip_suffix("']").and_then(|path| path.split_once("['")).unwrap();
                let of = if kind == "metadata.labels" { labels } else { annotations };
                assert!(["metadata.labels", "metadata.annotations"].contains(&kind), "{path}");
                // One that is missing is empty.
                of.get(key).cloned().unwrap_or_default()
            }
        };
        let before = environment.insert(text(variable, "/name").to_owned(), value);
        assert_eq!(before, None, "{variable} is given twice");
    }
    environment
}

/// Returns the program that a container runs.
fn command(container: &Value, environment: &Environment) -> Vec<String> {
    list(container, "/command").iter().map(|part| expanded(part.as_str().unwrap(), environment)).collect()
}

/// Replaces references such as `$(NAME)` to variables that are known, and `$$` by `$`.
///
/// # Source
/// Kubernetes' `third_party/forked/golang/expansion`.
fn expanded(text: &str, environment: &Environment) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        let reference = after.strip_prefix('(').and_then(|inner| inner.split_once(')'));
        match (after.strip_prefix('$'), reference) {
            (Some(next), _) => {
                out.push('$');
                rest = next;
            }
            (None, Some((name, next))) => {
                match environment.get(name) {
                    Some(value) => out.push_str(value),
                    None => out.push_str(&format!("$({name})")),
                }
                rest = next;
            }
            (None, None) => {
                out.push('$');
                rest = after;
            }
        }
    }
    out + rest
}

#[test]
fn references_are_replaced_as_kubernetes_does() {
    let environment = Environment::from([("A".to_owned(), "1".to_owned())]);
    for (text, expected) in
        [("$(A)", "1"), ("$$(A)", "$(A)"), ("$(B)", "$(B)"), ("$A $", "$A $"), ("$$$(A)", "$1"), ("$(A", "$(A")]
    {
        assert_eq!(expanded(text, &environment), expected);
    }
}
