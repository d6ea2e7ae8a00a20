//! Options that are refused, in words, and the parts that each of them adds.

use std::fs;

use serde_json::{Value, json};

use super::{call, compose, document, documents, kubernetes, list, print};

/// Returns the message of a call that must be refused as wrong use.
fn refused(args: &[&str]) -> String {
    let output = call(args);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
    assert!(output.stdout.is_empty());
    text
}

#[test]
fn contradictions_are_sentences() {
    let base = ["--name", "a", "--image", "b", "-n", "2"];
    for (kind, more, words) in [
        ("jobset", &["--ps", "1", "--chief", "0"][..], "parameter servers need a chief"),
        ("tfjob", &["--ps", "1", "--chief", "0"], "give --ps 0"),
        ("job", &["--memory", "1Gi", "--shared-memory", "2Gi"], "/dev/shm is part of a task's memory"),
        (
            "job",
            &["--checkpoints", "c", "--checkpoints-at", "/dev/shm/", "--shared-memory", "2Gi"],
            "cannot have one folder",
        ),
        ("job", &["--env", "A=1", "--env", "A=2"], "the variable A has several values"),
        ("job", &["--env", "RANK=1"], "RANK describes a job"),
        ("trainjob", &["--env", "PET_NNODES=1"], "PET_NNODES describes a job"),
        ("job", &["--ps", "1"], "unexpected argument '--ps'"),
        ("trainjob", &["--chief", "1"], "unexpected argument '--chief'"),
        ("job", &["--checkpoints-at", "/c"], "--checkpoints <NAME>"),
        ("job", &["--memory", "16gb"], "such as 16Gi"),
        ("job", &["--cpus", "0"], "such as 4, 0.5 or 500m"),
        ("job", &["--time-limit", "5"], "such as 90m, 12h"),
        ("job", &["--workers", "0"], "0 is not in 1..=10000"),
        ("compose", &["--time-limit", "5h"], "unexpected argument '--time-limit'"),
        ("compose", &["--ps", "300"], "303 tasks"),
        ("jobset", &["--ps", "6000"], "the addresses of all tasks do not fit into TF_CONFIG"),
    ] {
        let given: Vec<&str> =
            base.iter().copied().filter(|part| !(more.contains(&"--workers") && ["-n", "2"].contains(part))).collect();
        let text = refused(&[&[kind], &given[..], more, &["--", "c"]].concat());
        assert!(text.contains(words), "{kind} {more:?}: {text}");
    }
    for (kind, most) in [("job", 53), ("jobset", 44), ("tfjob", 52), ("trainjob", 46)] {
        let call =
            |length: usize| call(&[kind, "--name", &"a".repeat(length), "--image", "b", "-n", "1000", "--", "c"]);
        let text = String::from_utf8(call(most + 1).stderr).unwrap();
        assert!(text.contains(&format!("at most 63 characters, so {most} for the job")), "{kind}: {text}");
        assert!(call(most).status.success(), "{kind}");
    }
    let slurm = |more: &[&str]| refused(&[&["slurm", "--name", "a"], more, &["--", "c"]].concat());
    for (more, words) in [
        (&["-n", "5", "--tasks-per-node", "2"][..], "give --workers 6"),
        (&["-n", "2", "--cpus", "1.5"], "Slurm gives whole CPUs"),
        (&["-n", "2", "--partition", "a b"], "see sinfo"),
        (&["-n", "2", "--image", "a"], "unexpected argument '--image'"),
        (&["-n", "2", "--ps", "1"], "unexpected argument '--ps'"),
        (&["-n", "1024", "--tasks-per-node", "1024", "--memory", "16777215Ti"], "16 EiB"),
    ] {
        let text = slurm(more);
        assert!(text.contains(words), "{more:?}: {text}");
    }
}

#[test]
fn commands_of_the_help_and_of_the_documents_print_files() {
    let help = |kind: &[&str]| String::from_utf8(call(&[kind, &["--help"]].concat()).stdout).unwrap();
    let kinds = ["job", "jobset", "tfjob", "trainjob", "slurm", "compose"];
    let mut texts = vec![include_str!("../../../../../docs/manifests.md").to_owned()];
    texts.extend([&[][..]].into_iter().chain(kinds.iter().map(std::slice::from_ref)).map(help));
    let mut commands = Vec::new();
    for text in &texts {
        // A line that ends in a backslash is continued.
        let text = text.replace("\\\n", " ");
        let found =
            text.lines().filter(|line| line.trim().starts_with("distribute manifest ") && line.contains(" -- "));
        let found: Vec<_> = found.map(|line| line.split(" | ").next().unwrap().to_owned()).collect();
        assert!(!found.is_empty(), "{text}");
        commands.extend(found);
    }
    for command in &commands {
        let mut words = shlex::split(command).unwrap();
        // Printed, not written.
        if let Some(at) = words.iter().position(|word| word == "-o") {
            words.drain(at..at + 2);
        }
        let output = call(&words.iter().skip(2).map(String::as_str).collect::<Vec<_>>());
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(!output.stdout.is_empty());
    }
    assert!(
        kinds.iter().all(|kind| commands.iter().filter(|command| command.contains(&format!(" {kind} "))).count() >= 2)
    );
}

#[test]
fn a_file_is_written_once_and_is_what_is_printed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.yaml");
    let args = ["job", "--name", "a", "--image", "b", "-n", "2", "-o", path.to_str().unwrap(), "--", "c"];
    let output = call(&args);
    assert!(output.status.success() && output.stdout.is_empty());
    let printed = print("job", &["--name", "a", "--image", "b", "-n", "2"], &["c"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), printed);
    assert!(refused(&args).contains("exists already"));
    let nowhere = ["job", "--name", "a", "--image", "b", "-n", "2", "-o", "/nowhere/a", "--", "c"];
    assert_eq!(call(&nowhere).status.code(), Some(1));
}

#[test]
fn every_option_of_a_container_is_in_the_pod() {
    let flags = [
        "--name",
        "a",
        "--image",
        "b",
        "-n",
        "2",
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
        "--grace",
        "90",
    ];
    let limits = json!({"limits": {"cpu": "500m", "memory": "16Gi", "nvidia.com/gpu": "2"}});
    let mounts = json!([
        {"name": "checkpoints", "mountPath": "/data"},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]);
    let volumes = json!([
        {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}},
    ]);
    for (kind, pod, limit) in [
        ("job", "/spec/template/spec", "/spec/activeDeadlineSeconds"),
        (
            "jobset",
            "/spec/replicatedJobs/0/template/spec/template/spec",
            "/spec/replicatedJobs/0/template/spec/activeDeadlineSeconds",
        ),
        ("tfjob", "/spec/tfReplicaSpecs/Worker/template/spec", "/spec/runPolicy/activeDeadlineSeconds"),
    ] {
        let all = documents(&print(kind, &flags, &["c"]));
        assert!(all.iter().all(|object| object["metadata"] == json!({"name": "a", "namespace": "team"})));
        let object = all.last().unwrap();
        let pod = object.pointer(pod).unwrap();
        let container = &list(pod, "/containers")[0];
        assert_eq!((&container["resources"], &container["volumeMounts"]), (&limits, &mounts), "{kind}");
        assert_eq!((&pod["volumes"], &pod["terminationGracePeriodSeconds"]), (&volumes, &json!(90)), "{kind}");
        assert_eq!(object.pointer(limit), Some(&json!(43_200)), "{kind}");
    }
    let object = document(&print("trainjob", &flags, &["c"]));
    assert_eq!(object["metadata"]["namespace"], "team");
    assert_eq!(object["spec"]["trainer"]["resourcesPerNode"], limits);
    assert_eq!(object["spec"]["activeDeadlineSeconds"], 43_200);
    let patch = "/spec/runtimePatches/0/trainingRuntimeSpec/template/spec/replicatedJobs/0";
    let job = object.pointer(patch).unwrap();
    let pod = job.pointer("/template/spec/template/spec").unwrap();
    assert_eq!((&job["name"], &pod["containers"][0]["name"]), (&json!("node"), &json!("node")));
    assert_eq!((&pod["containers"][0]["volumeMounts"], &pod["volumes"]), (&mounts, &volumes));
    assert_eq!(pod["terminationGracePeriodSeconds"], 90);
}

#[test]
fn each_start_with_a_register_has_an_identity() {
    let base = ["--name", "mnist", "--image", "mnist:1", "-n", "3"];
    let elastic = [&base[..], &["--env", "DISTRIBUTE_GENERATIONS=lease:mnist"]].concat();
    let ids = |kind: &str, flags: &[&str]| {
        let all = documents(&print(kind, flags, &["train"]));
        let pods = match kind {
            "job" => kubernetes::job(&all),
            "jobset" => kubernetes::job_set(&all[0]),
            "tfjob" => kubernetes::tf_job(&all[0]),
            _ => kubernetes::train_job(&all[0]),
        };
        pods.into_iter().map(|pod| pod.environment.get("DISTRIBUTE_JOB_ID").cloned()).collect::<Vec<_>>()
    };
    for kind in ["job", "jobset", "tfjob", "trainjob"] {
        let ids = ids(kind, &elastic);
        assert!(ids.len() == 3 && ids[0].is_some() && ids.iter().all(|id| *id == ids[0]), "{kind}: {ids:?}");
    }
    let of_tf_job = |flags: &[&str]| ids("tfjob", flags).swap_remove(0);
    assert!(of_tf_job(&[&base[..], &["--env", "DISTRIBUTE_STORE=file:/shared"]].concat()).is_some());
    assert!(of_tf_job(&elastic).is_some_and(|id| id.starts_with("mnist-") && id.len() == "mnist-".len() + 8));
    assert_ne!(of_tf_job(&elastic), of_tf_job(&elastic));
    assert_eq!(of_tf_job(&[&base[..], &["--env", "DISTRIBUTE_GENERATIONS="]].concat()), None);
    // Compose refuses to start without the variable.
    let file = document(&print("compose", &elastic, &["train"]));
    let reference = "${DISTRIBUTE_JOB_ID:?set it to a name of this start}";
    assert_eq!(file["services"]["worker-2"]["environment"]["DISTRIBUTE_JOB_ID"], reference);
    assert!(
        compose::pods(&document(&print("compose", &base, &["train"])))
            .iter()
            .all(|pod| { !pod.environment.contains_key("DISTRIBUTE_JOB_ID") })
    );
    let script = print("slurm", &["--name", "a", "-n", "2", "--env", "DISTRIBUTE_GENERATIONS=file:/data/g"], &["c"]);
    assert!(
        script.contains("\nexport DISTRIBUTE_JOB_ID=\"slurm-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}\"\n"),
        "{script}"
    );
    assert!(!print("slurm", &["--name", "a", "-n", "2"], &["c"]).contains("DISTRIBUTE_JOB_ID"));
}

#[test]
fn gpus_are_for_tasks_that_compute() {
    let flags = ["--name", "a", "--image", "b", "-n", "1", "--gpus", "1", "--ps", "1", "--evaluator", "1"];
    let object = document(&print("tfjob", &flags, &["c"]));
    let has_gpus = |role: &str| {
        let container = &object["spec"]["tfReplicaSpecs"][role]["template"]["spec"]["containers"][0];
        container.pointer("/resources/limits/nvidia.com~1gpu").is_some()
    };
    assert_eq!(["Chief", "Worker", "PS", "Evaluator"].map(has_gpus), [false, true, false, true]);
    let object =
        document(&print("tfjob", &["--name", "a", "--image", "b", "-n", "1", "--gpus", "1", "--chief", "1"], &["c"]));
    let chief = &object["spec"]["tfReplicaSpecs"]["Chief"]["template"]["spec"]["containers"][0];
    assert_eq!(chief["resources"]["limits"]["nvidia.com/gpu"], "1");
}

#[test]
fn exit_codes_decide_about_restarts() {
    let rules = json!([
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": "task", "operator": "In", "values": [1, 2, 101]}},
        {"action": "Ignore", "onExitCodes": {"containerName": "task", "operator": "In", "values": [143]}},
    ]);
    let base = ["--name", "a", "--image", "b", "-n", "2"];
    let with = |kind: &str, more: &[&str]| documents(&print(kind, &[&base, more].concat(), &["c"])).pop().unwrap();
    let job = with("job", &["--restarts", "7"]);
    assert_eq!((&job["spec"]["backoffLimitPerIndex"], &job["spec"]["maxFailedIndexes"]), (&json!(7), &json!(0)));
    assert_eq!(job["spec"]["podFailurePolicy"]["rules"], rules);
    // The rules name the container.
    assert_eq!(job["spec"]["template"]["spec"]["containers"][0]["name"], "task");

    let spec = |set: &Value| set["spec"]["replicatedJobs"][0]["template"]["spec"].clone();
    let set = with("jobset", &["--restarts", "7"]);
    assert_eq!(set["spec"]["failurePolicy"]["maxRestarts"], 7);
    let reasons = json!(["PodFailurePolicy", "DeadlineExceeded"]);
    let rule = json!({"name": "permanent", "action": "FailJobSet", "onJobFailureReasons": reasons});
    assert_eq!(set["spec"]["failurePolicy"]["rules"], json!([rule]));
    assert_eq!((&spec(&set)["backoffLimit"], &spec(&set)["podFailurePolicy"]["rules"]), (&json!(0), &rules));
    // A task of a job with parameter servers is restarted alone.
    let set = with("jobset", &["--restarts", "7", "--ps", "1"]);
    assert_eq!(set["spec"]["failurePolicy"], json!({"maxRestarts": 0}));
    assert_eq!((&spec(&set)["backoffLimitPerIndex"], &spec(&set)["backoffLimit"]), (&json!(7), &Value::Null));
    let set = with("jobset", &["--evaluator", "1", "--chief", "1"]);
    let success = json!({"operator": "All", "targetReplicatedJobs": ["chief", "worker"]});
    assert_eq!(set["spec"]["successPolicy"], success);

    let job = with("tfjob", &["--ps", "1"]);
    let policies = job["spec"]["tfReplicaSpecs"].as_object().unwrap().values().map(|spec| &spec["restartPolicy"]);
    assert!(policies.eq(["ExitCode"; 3]));
    assert_eq!(job["spec"]["runPolicy"]["cleanPodPolicy"], "Running");
    assert_eq!(job["spec"].get("successPolicy"), None);
    assert_eq!(with("tfjob", &[])["spec"]["successPolicy"], "AllWorkers");
}

#[test]
fn files_are_the_same_each_time_and_no_line_has_a_tab_or_ends_in_a_space() {
    for kind in ["job", "jobset", "tfjob", "trainjob", "compose"] {
        let file = || print(kind, &["--name", "a", "--image", "b", "-n", "3", "--env", "B=1", "--env", "A=2"], &["c"]);
        let text = file();
        assert_eq!(text, file());
        assert!(text.starts_with("# ") && text.ends_with('\n'), "{text}");
        assert!(text.lines().all(|line| !line.ends_with(' ') && !line.contains('\t')), "{text}");
    }
}

#[test]
fn a_full_disk_is_an_error_also_where_the_file_is_printed() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_distribute"));
    command.args(["manifest", "slurm", "--name", "a", "-n", "2", "--", "c"]).stdout(full);
    let output = command.output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && errors.contains("cannot write standard output"), "{errors}");
}
