use serde_json::{Value, json};

use super::*;
use crate::{SimpleResolver, TfConfigResolver};

fn simple(cluster: &Value) -> Box<dyn ClusterResolver> {
    Box::new(SimpleResolver { spec: ClusterSpec::from_json(cluster).unwrap(), ..SimpleResolver::default() })
}

fn union(clusters: &[Value]) -> Result<Value> {
    UnionResolver::new(clusters.iter().map(simple).collect())?.cluster_spec().map(|spec| spec.to_json())
}

/// Covers jobs given as lists, maps, maps without missing indices, and both; contradictions are checked by their
/// message.
#[test]
fn every_overlap() {
    let (a, b, c, d) = ("a:1", "b:1", "c:1", "d:1");
    let cases: Vec<(Vec<Value>, Result<Value, &str>)> = vec![
        // One description, two that share no job, and empty ones.
        (vec![json!({"worker": [a, b]})], Ok(json!({"worker": [a, b]}))),
        (vec![json!({"worker": [a]}), json!({"ps": [b]})], Ok(json!({"worker": [a], "ps": [b]}))),
        (vec![json!({"worker": [a]}), json!({})], Ok(json!({"worker": [a]}))),
        (vec![json!({"worker": [a]}), json!({"worker": []})], Ok(json!({"worker": [a]}))),
        (vec![json!({}), json!({})], Ok(json!({}))),
        // Lists are concatenated in order.
        (vec![json!({"worker": [a, b]}), json!({"worker": [c]})], Ok(json!({"worker": [a, b, c]}))),
        (
            vec![json!({"worker": [c]}), json!({"worker": [a]}), json!({"worker": [b]})],
            Ok(json!({"worker": [c, a, b]})),
        ),
        (
            vec![json!({"worker": [a], "ps": [b]}), json!({"worker": [c], "ps": [d]})],
            Ok(json!({"worker": [a, c], "ps": [b, d]})),
        ),
        // A map without missing indices is a list.
        (vec![json!({"worker": {"0": a}}), json!({"worker": {"0": b}})], Ok(json!({"worker": [a, b]}))),
        // Maps are merged by index.
        (vec![json!({"worker": {"1": a}}), json!({"worker": {"3": b}})], Ok(json!({"worker": {"1": a, "3": b}}))),
        (vec![json!({"worker": {"1": b}}), json!({"worker": {"0": a, "2": c}})], Ok(json!({"worker": [a, b, c]}))),
        (vec![json!({"worker": {"1": a}}), json!({"worker": {"1": b}})], Err("two resolvers describe worker:1")),
        (vec![json!({"worker": {"1": a}}), json!({"worker": {"1": a}})], Err("two resolvers describe worker:1")),
        // A list and a map.
        (vec![json!({"worker": [a]}), json!({"worker": {"1": b}})], Ok(json!({"worker": [a, b]}))),
        (vec![json!({"worker": {"3": d}}), json!({"worker": [a, b]})], Ok(json!({"worker": {"0": a, "1": b, "3": d}}))),
        (vec![json!({"worker": [a, b]}), json!({"worker": {"1": c}})], Err("two resolvers describe worker:1")),
        // Missing indices in one job do not change how another is merged.
        (
            vec![json!({"worker": {"2": a}, "ps": [b]}), json!({"worker": {"5": c}, "ps": [d]})],
            Ok(json!({"worker": {"2": a, "5": c}, "ps": [b, d]})),
        ),
        // Unions that no cluster may have.
        (vec![json!({"chief": [a]}), json!({"chief": [b]})], Err("at most one chief")),
        (vec![json!({"worker": [a]}), json!({"worker": [a]})], Err("worker:0 and worker:1 have the same address")),
        (vec![json!({"worker": [a]}), json!({"ps": [a]})], Err("have the same address")),
    ];
    for (clusters, want) in cases {
        match (union(&clusters), want) {
            (Ok(got), Ok(want)) => assert_eq!(got, want, "{clusters:?}"),
            (Err(error), Err(words)) => {
                let text = error.to_string();
                assert!(text.starts_with("UnionResolver: ") && text.contains(words), "{clusters:?}: {text}");
            }
            (got, want) => panic!("{clusters:?}: {got:?} instead of {want:?}"),
        }
    }
    assert!(union(&[]).unwrap_err().to_string().contains("no resolver was given"));
}

#[test]
fn what_this_process_is_comes_from_the_first() {
    let resolver = |cluster: &Value, index, layer: &str| {
        Box::new(SimpleResolver {
            spec: ClusterSpec::from_json(cluster).unwrap(),
            master: format!("master{index}:1"),
            task_type: Some(TaskType::Worker),
            task_id: Some(index),
            rpc_layer: Some(layer.to_owned()),
            environment: format!("environment{index}"),
            num_accelerators: [("GPU".to_owned(), index as usize)].into(),
            ..SimpleResolver::default()
        }) as Box<dyn ClusterResolver>
    };
    let first = resolver(&json!({"worker": ["a:1", "b:1"]}), 1, "grpc");
    let union = UnionResolver::new(vec![first, resolver(&json!({"ps": ["p:1"]}), 0, "http")]).unwrap();
    assert_eq!(union.task(), Some(Task::new(TaskType::Worker, 1)));
    assert_eq!((union.rpc_layer(), union.environment()), (Some("grpc"), "environment1"));
    assert_eq!(union.num_accelerators()["GPU"], 1);
    assert_eq!(union.master(None, None, None).unwrap(), "grpc://master1:1");
    assert_eq!(union.master(None, None, Some("")).unwrap(), "master1:1");
    assert_eq!(union.master(Some(TaskType::Ps), Some(0), None).unwrap(), "grpc://p:1");
    assert_eq!(union.master(Some(TaskType::Ps), Some(0), Some("x")).unwrap(), "x://p:1");
    assert!(union.master(Some(TaskType::Ps), Some(1), None).is_err());
}

#[test]
fn an_identity_that_was_given_is_kept() {
    let worker = simple(&json!({"worker": ["a:1"]}));
    let named = SimpleResolver { job_id: Some(JobId::new("mine").unwrap()), ..SimpleResolver::of(&*worker).unwrap() };
    let ps = || simple(&json!({"ps": ["p:1"]}));
    let of = |first: Box<dyn ClusterResolver>| UnionResolver::new(vec![first, ps()]).unwrap().job_id().unwrap();
    assert_eq!(of(Box::new(named)).name(), "mine");
    let whole = ClusterSpec::from_json(&json!({"worker": ["a:1"], "ps": ["p:1"]})).unwrap();
    assert_eq!(of(worker), JobId::of_cluster(&whole));
    let sparse = r#"{"sparseCluster": {"worker": {"1": "b:1"}}, "task": {"type": "worker", "index": 1}}"#;
    let part = TfConfigResolver::from_json(sparse).unwrap();
    let alone = UnionResolver::new(vec![Box::new(part.clone())]).unwrap();
    assert_eq!((alone.is_partial(), alone.job_id().unwrap()), (true, JobId::unknown()));
    assert!(!UnionResolver::new(vec![Box::new(part), simple(&json!({"worker": {"0": "a:1"}}))]).unwrap().is_partial());
}
