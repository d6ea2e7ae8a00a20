use proptest::prelude::*;

use super::*;

const TWO_JOBS: &str = r#"{"cluster": {"ps": ["ps0:2222", "ps1:2222"], "worker": ["worker0:2222", "worker1:2222"]},
    "rpc_layer": "grpc", "task": {"type": "ps", "index": 0}}"#;

fn read(json: &str) -> Result<TfConfigResolver> {
    TfConfigResolver::from_json(json)
}

fn master(json: &str) -> String {
    read(json).unwrap().master(None, None, None).unwrap()
}

#[test]
fn cluster_task_and_layer_are_read() {
    let resolver = read(TWO_JOBS).unwrap();
    let spec = resolver.cluster_spec().unwrap();
    assert_eq!(spec.job_tasks(TaskType::Ps), [Some("ps0:2222"), Some("ps1:2222")]);
    assert_eq!(spec.task_address(Task::new(TaskType::Worker, 1)).unwrap(), "worker1:2222");
    assert_eq!((resolver.task_type(), resolver.task_id()), (Some(TaskType::Ps), Some(0)));
    assert_eq!((resolver.rpc_layer(), resolver.environment()), (Some("grpc"), ""));
    assert!(!resolver.is_local());
}

#[test]
fn the_master_is_this_task_unless_another_is_named() {
    let resolver = read(TWO_JOBS).unwrap();
    assert_eq!(resolver.master(None, None, None).unwrap(), "grpc://ps0:2222");
    assert_eq!(resolver.master(None, Some(1), None).unwrap(), "grpc://ps1:2222");
    assert_eq!(resolver.master(Some(TaskType::Worker), Some(1), Some("test")).unwrap(), "test://worker1:2222");
    assert_eq!(resolver.master(Some(TaskType::Worker), None, Some("")).unwrap(), "worker0:2222");
    assert!(resolver.master(Some(TaskType::Worker), Some(2), None).is_err());
    assert!(resolver.master(Some(TaskType::Chief), Some(0), None).is_err());
    assert_eq!(master(&TWO_JOBS.replace(r#""rpc_layer": "grpc","#, "")), "ps0:2222");
}

#[test]
fn a_session_master_counts_before_everything() {
    let json = TWO_JOBS.replace("\"rpc_layer\"", "\"session_master\": \"m:2222\", \"rpc_layer\"");
    assert_eq!(master(&json), "m:2222");
    assert_eq!(read(&json).unwrap().master(Some(TaskType::Worker), Some(1), Some("x")).unwrap(), "m:2222");
}

#[test]
fn programs_of_one_process_have_no_master() {
    for json in [
        "",
        "  ",
        "{}",
        r#"{"cluster": {}}"#,
        r#"{"environment": "cloud"}"#,
        r#"{"task": {"type": "worker", "index": 0}}"#,
    ] {
        assert_eq!(master(json), "", "{json}");
        assert!(read(json).unwrap().is_local(), "{json}");
    }
    assert_eq!(master(r#"{"cluster": {"worker": ["worker0:2222"]}}"#), "");
    assert_eq!(master(r#"{"cluster": {"worker": ["worker0:2222"]}, "task": {"type": "worker", "index": 0}}"#), "");
    assert_eq!(TfConfigResolver::from_vars(|_| None).unwrap(), TfConfigResolver::default());
}

#[test]
fn overrides_count_before_the_text() {
    let overrides = TfConfigOverrides {
        task_type: Some(TaskType::Worker),
        task_id: Some(0),
        rpc_layer: Some("test".to_owned()),
        environment: Some("lab".to_owned()),
    };
    let other = TWO_JOBS.replace("\"index\": 0", "\"index\": 1");
    let resolver = TfConfigResolver::with_overrides(&other, overrides.clone()).unwrap();
    assert_eq!(resolver.task(), Some(Task::new(TaskType::Worker, 0)));
    assert_eq!(resolver.master(None, None, None).unwrap(), "test://worker0:2222");
    assert_eq!(resolver.environment(), "lab");
    let without_task = r#"{"cluster": {"worker": ["a:1", "b:1"]}}"#;
    assert!(TfConfigResolver::with_overrides(without_task, overrides.clone()).is_ok());
    let none = TfConfigOverrides { rpc_layer: Some(String::new()), ..TfConfigOverrides::default() };
    assert_eq!(TfConfigResolver::with_overrides(TWO_JOBS, none).unwrap().master(None, None, None).unwrap(), "ps0:2222");
    let outside = TfConfigOverrides { task_id: Some(9), ..overrides };
    assert!(TfConfigResolver::with_overrides(TWO_JOBS, outside).is_err());
}

#[test]
fn an_index_may_be_a_string() {
    let resolver = read(&TWO_JOBS.replace("\"index\": 0", "\"index\": \"1\"")).unwrap();
    assert_eq!(resolver.task(), Some(Task::new(TaskType::Ps, 1)));
}

#[test]
fn the_forms_of_tfjob() {
    let sparse = r#"{"sparseCluster": {"worker": {"1": "b:1"}},
        "task": {"type": "worker", "index": 1}, "environment": "cloud"}"#;
    let resolver = read(sparse).unwrap();
    assert_eq!(resolver.environment(), "cloud");
    assert_eq!(resolver.cluster_spec().unwrap().task_indices(TaskType::Worker), [1]);
    assert!(read(&sparse.replacen('{', "{\"cluster\": null, ", 1)).is_ok());
    assert!(read(&sparse.replacen('{', "{\"cluster\": {}, ", 1)).is_ok());
    let evaluator = read(r#"{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}"#).unwrap();
    assert_eq!(evaluator.task(), Some(Task::new(TaskType::Evaluator, 0)));
    let old = r#"{"cluster": {"master": ["a:1"], "worker": ["b:1"]}, "task": {"type": "master", "index": 0}}"#;
    assert_eq!(read(old).unwrap().task_type(), Some(TaskType::Chief));
}

#[test]
fn every_mistake_is_a_sentence() {
    let one = |task: &str| format!(r#"{{"cluster": {{"worker": ["a:1"]}}, "task": {task}}}"#);
    for (json, words) in [
        (
            r#"{"cluster": {"worker": ["a:1"]}"#.to_owned(),
            "it is not JSON: EOF while parsing an object at line 1 column 31",
        ),
        ("{\"cluster\":\n {'worker': 1}}".to_owned(), "line 2 column 3"),
        ("[1]".to_owned(), "it is not an object"),
        (r#"{"cluster": {"worker": ["a:1", "b:1"]}}"#.to_owned(), "it has a cluster but no task"),
        (r#"{"cluster": {"worker": ["a:1"]}, "rpc_layer": 3}"#.to_owned(), "rpc_layer is not a string"),
        (r#"{"task": {"type": "worker", "index": 1}}"#.to_owned(), "it has task worker:1 but no cluster"),
        (r#"{"cluster": {}, "task": {"type": "ps", "index": 0}}"#.to_owned(), "it has task ps:0 but no cluster"),
        (r#"{"cluster": ["a:1"], "task": {"type": "worker", "index": 0}}"#.to_owned(), "it is not an object"),
        (
            r#"{"cluster": {"worker": []}, "task": {"type": "worker", "index": 0}}"#.to_owned(),
            "job \"worker\" has no tasks",
        ),
        (r#"{"cluster": {"worker": {}}}"#.to_owned(), "job \"worker\" has no tasks"),
        (
            r#"{"cluster": {"chief": ["a:1"], "worker": []}, "task": {"type": "chief", "index": 0}}"#.to_owned(),
            "job \"worker\" has no tasks",
        ),
        (r#"{"cluster": {"ps": []}, "task": {"type": "worker", "index": 0}}"#.to_owned(), "none of its jobs has tasks"),
        (
            r#"{"clutser": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}"#.to_owned(),
            "Did you mean cluster?",
        ),
        (r#"{"Cluster": {"worker": ["a:1"]}}"#.to_owned(), "Did you mean cluster?"),
        (r#"{"sparsecluster": {"worker": ["a:1"]}}"#.to_owned(), "Did you mean sparseCluster?"),
        (r#"{"Task": {"type": "worker", "index": 0}}"#.to_owned(), "Did you mean task?"),
        (one(r#"{"type": "worker", "Index": 0}"#), "Did you mean task.index?"),
        (
            r#"{"cluster": {"worker": ["a:1"]}, "cluster": {"worker": ["a:1", "b:1"]}}"#.to_owned(),
            "key \"cluster\" stands twice in one object",
        ),
        (
            r#"{"cluster": {"worker": ["a:1"], "ps": ["p:1"], "worker": ["b:1"]}}"#.to_owned(),
            "key \"worker\" stands twice",
        ),
        (r#"{"cluster": {"worker": {"0": "a:1", "0": "b:1"}}}"#.to_owned(), "key \"0\" stands twice"),
        (one(r#"{"type": "worker", "index": 0, "index": 0}"#), "key \"index\" stands twice"),
        (r#"{"rpc_layer": "a", "rpc_layer": "b"}"#.to_owned(), "key \"rpc_layer\" stands twice"),
        (one("3"), "task is not an object"),
        (one(r#"{"index": 0}"#), "task has no type"),
        (one(r#"{"type": 1, "index": 0}"#), "task.type is not a string"),
        (one(r#"{"type": "worker"}"#), "task has no index"),
        (one(r#"{"type": "wroker", "index": 0}"#), "Did you mean worker?"),
        (one(r#"{"type": "worker", "index": -1}"#), "not a whole number"),
        (one(r#"{"type": "worker", "index": 1.5}"#), "not a whole number"),
        (one(r#"{"type": "worker", "index": "one"}"#), "not a whole number"),
        (one(r#"{"type": "worker", "index": null}"#), "not a whole number"),
        (one(r#"{"type": "worker", "index": 5000000000}"#), "not a whole number"),
        (one(r#"{"type": "worker", "index": 1}"#), "index 1 is outside job \"worker\""),
        (one(r#"{"type": "ps", "index": 0}"#), "job \"ps\" has no tasks"),
        (one(r#"{"type": "chief", "index": 0}"#), "job \"chief\" has no tasks"),
        (one(r#"{"type": "evaluator", "index": 1}"#), "at most one evaluator"),
        (
            r#"{"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "chief", "index": 0}}"#.to_owned(),
            "at most one chief",
        ),
        (
            r#"{"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 0}}"#.to_owned(),
            "the same address",
        ),
    ] {
        let text = read(&json).unwrap_err().to_string();
        let complete = ["TF_CONFIG: ", "Given: ", "Expected: "].iter().all(|part| text.contains(part));
        assert!(text.contains(words) && complete, "{json}: {text}");
    }
}

#[test]
fn what_is_set_to_nothing_is_no_local_program() {
    for value in ["", " \n"] {
        let text = TfConfigResolver::from_vars(|_| Some(value.to_owned())).unwrap_err().to_string();
        assert!(text.starts_with("TF_CONFIG: it is set, but empty"), "{text}");
    }
}

#[test]
fn sentences_stay_on_one_line_and_in_bounds() {
    let job = format!("x{}", "\n\u{1b}[2J".repeat(1000));
    let json = serde_json::json!({"cluster": {&job: ["a:1"]}, "task": {"type": &job, "index": 0}}).to_string();
    let host = serde_json::json!({"cluster": {"worker": [format!("{job}:1")]}}).to_string();
    let layer = serde_json::json!({"rpc_layer": [job]}).to_string();
    for json in [json, host, layer, "{\n\n\u{1b}[2J\u{202e}".to_owned()] {
        let text = read(&json).unwrap_err().to_string();
        assert!(text.len() < 8000 && text.chars().all(|c| !c.is_control() && c != '\u{202e}'), "{text}");
    }
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text in "\\PC*") {
        let _ = read(&text);
    }

    #[test]
    fn no_cut_of_a_good_text_makes_it_panic(cut in 1..TWO_JOBS.len()) {
        prop_assert!(read(&TWO_JOBS[..cut]).unwrap_err().to_string().contains("it is not JSON"));
    }
}
