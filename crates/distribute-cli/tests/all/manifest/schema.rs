//! The printed files against the types of Kubernetes and the schemas of operators and Compose.

use k8s_openapi::api::batch::v1::{Job, JobTemplateSpec};
use k8s_openapi::api::core::v1::{PodTemplateSpec, Service};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{document, documents, list, print};

pub(crate) const COMPOSE: &str = include_str!("../../schemas/compose.json");
const TF_JOB: &str = include_str!("../../schemas/tfjob.json");
const JOB_SET: &str = include_str!("../../schemas/jobset.json");
const TRAIN_JOB: &str = include_str!("../../schemas/trainjob.json");

/// Options with all parts that a file may have.
const CONTAINER: [&str; 24] = [
    "--name",
    "mnist",
    "--image",
    "registry.example/mnist:1",
    "-n",
    "3",
    "--cpus",
    "500m",
    "--memory",
    "16Gi",
    "--gpus",
    "2",
    "--checkpoints",
    "data",
    "--checkpoints-at",
    "/data",
    "--shared-memory",
    "2Gi",
    "--namespace",
    "team",
    "--time-limit",
    "12h",
    "--env",
    "A=yes",
];

/// Returns files with few parts and with all.
fn files(kind: &str) -> Vec<String> {
    let full: &[&str] = match kind {
        "job" => &["--grace", "90", "--restarts", "5", "--port", "1234"],
        "trainjob" => &["--grace", "90", "--runtime", "ours"],
        _ => &["--grace", "90", "--ps", "2", "--evaluator", "1"],
    };
    let few = ["--name", "a", "--image", "b", "-n", "1"];
    vec![print(kind, &few, &["c"]), print(kind, &[&CONTAINER, full].concat(), &["c", "--d"])]
}

/// Checks that a type has all fields of a value: it drops those that it does not know.
fn is_known<T: DeserializeOwned + Serialize>(value: &Value) {
    let typed: T = serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error}\n{value:#}"));
    assert_eq!(&serde_json::to_value(typed).unwrap(), value);
}

#[test]
fn a_job_and_its_service_are_of_kubernetes() {
    for file in files("job") {
        let all = documents(&file);
        assert_eq!(all.len(), 2);
        is_known::<Service>(&all[0]);
        is_known::<Job>(&all[1]);
    }
}

#[test]
fn a_field_that_kubernetes_does_not_know_is_found() {
    let mut all = documents(&files("job")[0]);
    all[1]["spec"]["template"]["spec"]["subDomain"] = json!("a");
    let typed: Job = serde_json::from_value(all[1].clone()).unwrap();
    assert_ne!(serde_json::to_value(typed).unwrap(), all[1]);
}

#[test]
fn templates_of_operators_are_of_kubernetes() {
    for file in files("jobset") {
        let file = document(&file);
        assert_eq!(problems(&file, JOB_SET), [""; 0]);
        for job in list(&file, "/spec/replicatedJobs") {
            is_known::<JobTemplateSpec>(&job["template"]);
        }
    }
    for file in files("tfjob") {
        let file = document(&file);
        assert_eq!(problems(&file, TF_JOB), [""; 0]);
        for replica in file["spec"]["tfReplicaSpecs"].as_object().unwrap().values() {
            is_known::<PodTemplateSpec>(&replica["template"]);
        }
    }
    for file in files("trainjob") {
        assert_eq!(problems(&document(&file), TRAIN_JOB), [""; 0]);
    }
    for file in files_of_compose() {
        assert_eq!(problems(&document(&file), COMPOSE), [""; 0]);
    }
}

fn files_of_compose() -> [String; 2] {
    let few = ["--name", "a", "--image", "b", "-n", "1"];
    [
        print("compose", &few, &["c"]),
        print("compose", &[&few[..], &["--gpus", "1", "--checkpoints", "d"]].concat(), &["c"]),
    ]
}

#[test]
fn the_schemas_find_mistakes() {
    let change = |schema: &str, kind: &str, pointer: &str, name: &str, value: Value| {
        let mut file =
            document(&if kind == "compose" { files_of_compose()[0].clone() } else { files(kind)[1].clone() });
        let object = file.pointer_mut(pointer).unwrap().as_object_mut().unwrap();
        match value {
            Value::Null => drop(object.remove(name).unwrap()),
            value => drop(object.insert(name.to_owned(), value)),
        }
        problems(&file, schema)
    };
    let job = "/spec/replicatedJobs/0";
    for (found, expected) in [
        (change(JOB_SET, "jobset", "/spec", "netWork", json!({})), "/spec/netWork: not a field"),
        (change(JOB_SET, "jobset", job, "replicas", json!("1")), "/spec/replicatedJobs/0/replicas: not of a type"),
        (
            change(TRAIN_JOB, "trainjob", "/spec", "activeDeadlineSeconds", json!(0)),
            "/spec/activeDeadlineSeconds: below 1",
        ),
        (change(JOB_SET, "jobset", job, "name", Value::Null), "/spec/replicatedJobs/0: no name"),
        (change(JOB_SET, "jobset", "", "apiVersion", json!("v1")), "/apiVersion: not jobset.x-k8s.io/v1alpha2"),
        (
            change(JOB_SET, "jobset", "/spec/successPolicy", "operator", json!("Some")),
            "/spec/successPolicy/operator: not one of the values",
        ),
        (
            change(TF_JOB, "tfjob", "/spec/tfReplicaSpecs", "Worker", json!(1)),
            "/spec/tfReplicaSpecs/Worker: not of a type",
        ),
        (
            change(TF_JOB, "tfjob", "/spec/tfReplicaSpecs/Worker", "count", json!(1)),
            "/spec/tfReplicaSpecs/Worker/count: not a field",
        ),
        (
            change(TRAIN_JOB, "trainjob", "/spec/trainer", "image", json!("i".repeat(501))),
            "/spec/trainer/image: longer than 500",
        ),
        (change(TRAIN_JOB, "trainjob", "/spec/runtimeRef", "name", Value::Null), "/spec/runtimeRef: no name"),
        (change(COMPOSE, "compose", "/services/worker-0", "shm", json!("1gb")), "/services/worker-0/shm: not a field"),
        (
            change(COMPOSE, "compose", "/services/worker-0", "entrypoint", json!([1])),
            "/services/worker-0/entrypoint: of none of the forms",
        ),
    ] {
        assert_eq!(found, [expected]);
    }
}

/// Returns what a schema forbids in a value.
///
/// The schemas have a form of their own, which ../../schemas/README.md describes.
pub(crate) fn problems(value: &Value, schema: &str) -> Vec<String> {
    let schema: Value = serde_json::from_str(schema).unwrap();
    let mut found = Vec::new();
    for name in ["apiVersion", "kind"] {
        if let Some(expected) = schema[name].as_str().filter(|expected| value[name] != **expected) {
            found.push(format!("/{name}: not {expected}"));
        }
    }
    check(value, &schema, &schema["definitions"], "", &mut found);
    found
}

fn check(value: &Value, schema: &Value, definitions: &Value, path: &str, found: &mut Vec<String>) {
    if let Some(name) = schema["ref"].as_str() {
        let referred = definitions.get(name).unwrap_or_else(|| panic!("no definition {name}"));
        return check(value, referred, definitions, path, found);
    }
    let mut wrong = |problem: String| found.push(format!("{path}: {problem}"));
    let types: Vec<&str> = match &schema["type"] {
        Value::Null => Vec::new(),
        Value::Array(types) => types.iter().map(|name| name.as_str().unwrap()).collect(),
        name => vec![name.as_str().unwrap()],
    };
    if !types.is_empty() && !types.iter().any(|name| is_of(value, name)) {
        return wrong(format!("not of a type {types:?}").split(" [").next().unwrap().to_owned());
    }
    if schema["enum"].as_array().is_some_and(|values| !values.contains(value)) {
        wrong("not one of the values".to_owned());
    }
    let bound = |name: &str| schema[name].as_u64();
    if value.as_f64().zip(schema["minimum"].as_f64()).is_some_and(|(value, least)| value < least) {
        wrong(format!("below {}", schema["minimum"]));
    }
    if value.as_f64().zip(schema["maximum"].as_f64()).is_some_and(|(value, most)| value > most) {
        wrong(format!("above {}", schema["maximum"]));
    }
    let length = value.as_str().map(|text| text.chars().count() as u64);
    if length.zip(bound("maxLength")).is_some_and(|(length, most)| length > most) {
        wrong(format!("longer than {}", schema["maxLength"]));
    }
    if length.zip(bound("minLength")).is_some_and(|(length, least)| length < least) {
        wrong("too short".to_owned());
    }
    if let Some(items) = value.as_array() {
        if bound("maxItems").is_some_and(|most| items.len() as u64 > most) {
            wrong("too many items".to_owned());
        }
        for (place, item) in items.iter().enumerate().filter(|_| !schema["items"].is_null()) {
            check(item, &schema["items"], definitions, &format!("{path}/{place}"), found);
        }
    }
    if let Some(object) = value.as_object() {
        fields(object, schema, definitions, path, found);
    }
    if let Some(forms) = schema["oneOf"].as_array() {
        let fits = |form: &&Value| {
            let mut found = Vec::new();
            check(value, form, definitions, path, &mut found);
            found.is_empty()
        };
        if !forms.iter().any(|form| fits(&form)) {
            found.push(format!("{path}: of none of the forms"));
        }
    }
}

fn fields(
    object: &serde_json::Map<String, Value>,
    schema: &Value,
    definitions: &Value,
    path: &str,
    found: &mut Vec<String>,
) {
    for name in schema["required"].as_array().into_iter().flatten() {
        if !object.contains_key(name.as_str().unwrap()) {
            found.push(format!("{path}: no {}", name.as_str().unwrap()));
        }
    }
    let (known, others) = (schema["properties"].as_object(), &schema["others"]);
    // An object without a description may have any fields.
    let is_open = schema["open"] == true || known.is_none() && others.is_null();
    for (name, value) in object {
        let path = format!("{path}/{name}");
        match known.and_then(|known| known.get(name)) {
            Some(schema) => check(value, schema, definitions, &path, found),
            None if !others.is_null() => check(value, others, definitions, &path, found),
            None if is_open => {}
            None => found.push(format!("{path}: not a field")),
        }
    }
}

fn is_of(value: &Value, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "null" => value.is_null(),
        other => panic!("a type {other}"),
    }
}
