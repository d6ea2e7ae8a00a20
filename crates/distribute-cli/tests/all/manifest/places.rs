//! Each task of each kind of job file finds its rank, the number of processes and the leader.

use distribute_cluster::{ClusterResolver, TaskType, TfConfigResolver};

use super::kubernetes::{Pod, job, job_set, tf_job, train_job};
use super::{document, documents, membership, print};

const FLAGS: [&str; 4] = ["--name", "mnist", "--image", "mnist:1"];

fn flags<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&FLAGS, more].concat()
}

/// Checks the tasks that train, in the order of ranks, and returns the others.
fn check(pods: Vec<Pod>, expected: u32, port: u16) -> Vec<Pod> {
    let (training, others): (Vec<_>, Vec<_>) =
        pods.into_iter().partition(|pod| ["chief", "worker"].contains(&pod.role.as_str()));
    assert_eq!(training.len(), expected as usize);
    let leader = format!("{}:{port}", training[0].host.as_deref().unwrap());
    let mut identities = Vec::new();
    for (pod, rank) in training.iter().zip(0..) {
        let found = membership(&pod.environment);
        assert_eq!((found.rank, found.world_size()), (rank, expected), "{pod:#?}");
        if expected > 1 {
            assert_eq!(found.leader_address, leader, "{pod:#?}");
        }
        assert_eq!(found.also_seen, [""; 0], "{pod:#?}");
        identities.push(found.job_id());
    }
    identities.dedup();
    assert_eq!(identities.len(), 1, "{identities:?}");
    others
}

#[test]
fn of_a_job() {
    for workers in [1, 2, 13] {
        let file = print("job", &flags(&["-n", &workers.to_string(), "--port", "3333"]), &["train"]);
        let pods = job(&documents(&file));
        assert_eq!(pods.last().unwrap().host, Some(format!("mnist-{}.mnist", workers - 1)));
        assert!(pods.iter().all(|pod| membership(&pod.environment).job_id().name() == "uid-of-mnist"));
        assert!(check(pods, workers, 3333).is_empty());
    }
}

#[test]
fn of_a_job_set() {
    for workers in [1, 2, 11] {
        let file = print("jobset", &flags(&["-n", &workers.to_string()]), &["train"]);
        let pods = job_set(&document(&file));
        assert!(pods.iter().all(|pod| membership(&pod.environment).job_id().name() == "a-set"));
        assert!(check(pods, workers, 2222).is_empty());
    }
    let file = print("jobset", &flags(&["-n", "2", "--chief", "1", "--port", "7000"]), &["train"]);
    assert!(check(job_set(&document(&file)), 3, 7000).is_empty());
}

#[test]
fn of_a_tf_job() {
    for workers in [2, 11] {
        let file = print("tfjob", &flags(&["-n", &workers.to_string(), "--namespace", "team"]), &["train"]);
        assert!(check(tf_job(&document(&file)), workers, 2222).is_empty());
    }
    let file = print("tfjob", &flags(&["-n", "2", "--chief", "1", "--port", "7000"]), &["train"]);
    assert!(check(tf_job(&document(&file)), 3, 7000).is_empty());
    // The operator sets no TF_CONFIG for a single task, which trains alone.
    let file = print("tfjob", &flags(&["-n", "1"]), &["train"]);
    let alone = &tf_job(&document(&file))[0].environment;
    assert_eq!(distribute_cluster::Membership::from_vars(|name| alone.get(name).cloned()).unwrap(), None);
}

#[test]
fn of_a_train_job() {
    for (workers, more) in [(1, &[][..]), (2, &["--cpus", "8"]), (3, &["--gpus", "4"])] {
        let workers_flag = workers.to_string();
        let file = print("trainjob", &flags(&[&["-n", &workers_flag], more].concat()), &["train"]);
        let pods = train_job(&document(&file));
        assert!(pods.iter().all(|pod| membership(&pod.environment).job_id().name() == "a-set"));
        assert!(check(pods, workers, 29_500).is_empty());
    }
}

/// Returns the tasks of a job with parameter servers and an evaluator, of the kinds that have them.
pub(crate) fn with_all_roles() -> [Vec<Pod>; 3] {
    let file = |kind| document(&print(kind, &flags(&["-n", "3", "--ps", "2", "--evaluator", "1"]), &["train"]));
    [job_set(&file("jobset")), tf_job(&file("tfjob")), super::compose::pods(&file("compose"))]
}

#[test]
fn of_parameter_servers_and_an_evaluator() {
    for pods in with_all_roles() {
        let address = |role: &str, index: usize| {
            let pod = pods.iter().filter(|pod| pod.role == role).nth(index).unwrap();
            format!("{}:2222", pod.host.as_deref().unwrap())
        };
        let roles = [("chief", TaskType::Chief, 1), ("worker", TaskType::Worker, 3), ("ps", TaskType::Ps, 2)];
        for pod in &pods {
            let resolver = TfConfigResolver::from_vars(|name| pod.environment.get(name).cloned()).unwrap();
            assert_eq!(resolver.task_type().unwrap().name(), pod.role);
            assert_eq!(u64::from(resolver.task_id().unwrap()), pod.index);
            let spec = resolver.cluster_spec().unwrap();
            for (role, kind, count) in roles {
                let found: Vec<_> = spec.job_tasks(kind).into_iter().map(|task| task.unwrap().to_owned()).collect();
                let expected: Vec<_> = (0..count).map(|index| address(role, index)).collect();
                assert_eq!(found, expected, "{pod:#?}");
            }
            assert_eq!(spec.num_tasks(TaskType::Evaluator), 0);
        }
        let others = check(pods, 4, 2222);
        let names: Vec<_> = others.iter().map(|pod| format!("{}:{}", pod.role, pod.index)).collect();
        assert_eq!(names, ["ps:0", "ps:1", "evaluator:0"]);
        assert_eq!(membership(&others[2].environment).world_size(), 1);
    }
}
