use proptest::prelude::*;

use super::*;

fn message(cluster: &Value) -> String {
    ClusterSpec::from_json(cluster).unwrap_err().to_string()
}

#[test]
fn lists_and_sparse_maps_are_read_and_written() {
    let cluster = json!({"chief": ["c:1"], "worker": {"1": "b:2", "3": "d:2"}, "ps": []});
    let spec = ClusterSpec::from_json(&cluster).unwrap();
    assert_eq!(spec.task_indices(TaskType::Worker), [1, 3]);
    assert_eq!(spec.job_tasks(TaskType::Worker), [None, Some("b:2"), None, Some("d:2")]);
    assert_eq!(spec.job_tasks(TaskType::Ps), []);
    assert_eq!(spec.to_json(), json!({"chief": ["c:1"], "worker": {"1": "b:2", "3": "d:2"}}));
    assert_eq!(spec.num_tasks(TaskType::Ps), 0);
    assert_eq!(spec.jobs().collect::<Vec<_>>(), [TaskType::Chief, TaskType::Worker]);
    assert_eq!(spec.tasks().map(|task| task.to_string()).collect::<Vec<_>>(), ["chief:0", "worker:1", "worker:3"]);
    let dense = ClusterSpec::from_json(&json!({"worker": {"1": "b:2", "0": "a:2"}})).unwrap();
    assert_eq!(dense.to_json(), json!({"worker": ["a:2", "b:2"]}));
    assert!(ClusterSpec::from_json(&json!({})).unwrap().is_empty());
}

#[test]
fn every_mistake_is_a_sentence() {
    for (cluster, words) in [
        (json!(["a:1"]), "it is not an object"),
        (json!({"wroker": ["a:1"]}), "Did you mean worker?"),
        (json!({"localhost": ["a:1"]}), "chief, worker, ps or evaluator"),
        (json!({"worker": "a:1"}), "not a list of addresses"),
        (json!({"worker": null}), "not a list of addresses"),
        (json!({"worker": [1]}), "not a string"),
        (json!({"worker": {"0": ["a:1"]}}), "not a string"),
        (json!({"worker": {"x": "a:1"}}), "not a whole number"),
        (json!({"worker": {"-1": "a:1"}}), "not a whole number"),
        (json!({"worker": {"4000000000": "a:1"}}), "too large"),
        (json!({"worker": {"0": "a:1", "00": "b:1"}}), "worker:0 is given twice"),
        (json!({"worker": ["a"]}), "the address of worker:0 has no port"),
        (json!({"worker": [":1"]}), "has no host"),
        (json!({"worker": ["a:0"]}), "between 1 and 65535"),
        (json!({"worker": ["a:65536"]}), "between 1 and 65535"),
        (json!({"worker": ["fd00::1:22"]}), "without brackets"),
        (json!({"worker": ["a:1", "a:1"]}), "worker:0 and worker:1 have the same address"),
        (json!({"worker": ["a:1", "A:1"]}), "worker:0 and worker:1 have the same address"),
        (json!({"ps": ["a:1"], "worker": ["b:1", "a:1"]}), "ps:0 and worker:1 have the same address"),
        (json!({"chief": ["a:1", "b:1"]}), "at most one chief"),
        (json!({"chief": ["a:1"], "master": ["b:1"]}), "chief:0 is given twice"),
        (json!({"chief": {"0": "a:1", "1": "b:1"}}), "at most one chief"),
        (json!({"evaluator": ["a:1", "b:1"]}), "at most one evaluator"),
    ] {
        let text = message(&cluster);
        let complete = ["cluster: ", "Given: ", "Expected: "].iter().all(|part| text.contains(part));
        assert!(text.contains(words) && complete, "{cluster}: {text}");
    }
}

#[test]
fn a_task_that_is_not_there_is_explained() {
    let spec = ClusterSpec::new().with_job(TaskType::Worker, ["a:1", "b:1", "c:1"]).unwrap();
    let text = spec.task_address(Task::new(TaskType::Worker, 3)).unwrap_err().to_string();
    assert!(
        text.contains("index 3 is outside job \"worker\", which has 3 addresses") && text.contains("0, 1, 2"),
        "{text}"
    );
    let text = spec.task_address(Task::new(TaskType::Ps, 0)).unwrap_err().to_string();
    assert!(text.contains("job \"ps\" has no tasks"), "{text}");
    let many = (0..50).map(|index| format!("w{index}:1"));
    let spec = ClusterSpec::new().with_job(TaskType::Worker, many).unwrap();
    let text = spec.task_address(Task::new(TaskType::Worker, 50)).unwrap_err().to_string();
    assert!(text.contains("one of 0 to 49"), "{text}");
}

#[test]
fn large_clusters_are_read_at_once_and_larger_ones_refused() {
    let tasks = |count: usize| -> Vec<String> { (0..count).map(|index| format!("worker-{index}.job:2222")).collect() };
    let started = std::time::Instant::now();
    let spec = ClusterSpec::from_json(&json!({"worker": tasks(20_000)})).unwrap();
    assert_eq!(spec.num_tasks(TaskType::Worker), 20_000);
    let members: Vec<u32> = [0, 10_000, 19_999]
        .iter()
        .map(|index| crate::Membership::from_cluster(&spec, Task::new(TaskType::Worker, *index)).unwrap().rank)
        .collect();
    assert_eq!(members, [0, 10_000, 19_999]);
    let text = ClusterSpec::from_json(&json!({"worker": tasks(ClusterSpec::MAX_TASKS + 1)})).unwrap_err().to_string();
    assert!(text.contains("it has more than 100000 tasks"), "{text}");
    // A quadratic implementation would take minutes.
    assert!(started.elapsed() < std::time::Duration::from_secs(10), "{:?}", started.elapsed());
    let text = spec.task_address(Task::new(TaskType::Worker, 20_000)).unwrap_err().to_string();
    assert!(text.contains("one of 0 to 19999") && text.len() < 1000, "{text}");
    let sparse = (0..20_000_u32).map(|index| (2 * index, format!("w{index}:1")));
    let sparse = ClusterSpec::new().with_sparse_job(TaskType::Worker, sparse).unwrap();
    let text = sparse.task_address(Task::new(TaskType::Worker, 1)).unwrap_err().to_string();
    assert!(text.contains("60, 62 and 19968 more") && text.len() < 1000, "{text}");
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(indices in prop::collection::btree_set(0u32..40, 0..20), chief: bool) {
        let mut spec = ClusterSpec::new()
            .with_sparse_job(TaskType::Worker, indices.iter().map(|index| (*index, format!("w{index}:1"))))
            .unwrap();
        if chief {
            spec = spec.with_job(TaskType::Chief, ["c:1"]).unwrap();
        }
        prop_assert_eq!(ClusterSpec::from_json(&spec.to_json()).unwrap(), spec.clone());
        prop_assert_eq!(spec.job_tasks(TaskType::Worker).iter().flatten().count(), indices.len());
    }
}
