use super::*;
use crate::process_manager::Meeting;

fn from(vars: &[(&str, &str)]) -> Result<Option<Membership>> {
    Membership::from_vars(|name| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
}

fn found(vars: &[(&str, &str)]) -> Membership {
    from(vars).unwrap().unwrap()
}

const TF: &str = r#"{"cluster": {"chief": ["c:1"], "worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}"#;

const RANKS: [(&str, &str); 4] = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "29500")];

#[test]
fn the_first_description_wins_and_others_are_named() {
    assert_eq!(from(&[]).unwrap(), None);
    let slurm = [("SLURM_PROCID", "3"), ("SLURM_STEP_NODELIST", "n[1-3]")];
    let membership = found(&[&[("TF_CONFIG", TF), ("RANK", "2"), ("WORLD_SIZE", "3")][..], &slurm].concat());
    assert_eq!((membership.rank, membership.world_size(), membership.source), (2, 3, "TF_CONFIG"));
    assert_eq!(membership.leader_address, "c:1");
    assert_eq!(membership.advertised_host.as_deref(), Some("b"));
    assert_eq!(membership.also_seen, ["RANK and WORLD_SIZE", "Slurm"]);
    assert_eq!((membership.named(1), membership.named(9)), ("worker:0 at a:1".to_owned(), "rank 9".to_owned()));
    let membership = found(&[&RANKS[..], &slurm, &[("OMPI_COMM_WORLD_RANK", "7")]].concat());
    assert_eq!((membership.rank, membership.source), (1, "RANK and WORLD_SIZE"));
    assert_eq!(membership.also_seen, ["Open MPI", "Slurm"]);
    assert_eq!(membership.advertised_host, None);
}

#[test]
fn empty_and_local_descriptions_are_no_membership() {
    assert_eq!(from(&[("TF_CONFIG", "{}")]).unwrap(), None);
    assert_eq!(from(&[("TF_CONFIG", r#"{"task": {"type": "chief", "index": 0}}"#)]).unwrap(), None);
    assert_eq!(from(&[("WORLD_SIZE", "1")]).unwrap(), None);
    // A batch script of Slurm, which is one process.
    assert_eq!(from(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_NODELIST", "n[1-4]")]).unwrap(), None);
    let one = r#"{"cluster": {"worker": ["a:1"]}}"#;
    assert_eq!(found(&[("TF_CONFIG", one)]).world_size(), 1);
}

#[test]
fn ranks_and_ports() {
    let membership = found(&RANKS);
    assert_eq!((membership.rank, membership.leader_address.as_str(), membership.is_leader()), (1, "h:29501", false));
    assert_eq!(found(&[&RANKS[..], &[("DISTRIBUTE_PORT", "7000")]].concat()).leader_address, "h:7000");
    let no_master_port = [&RANKS[..3], &[("DISTRIBUTE_PORT", "7000")]].concat();
    assert_eq!(found(&no_master_port).leader_address, "h:7000");
    for host in ["fd00::1", "[fd00::1]"] {
        let v6 = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", host), ("MASTER_PORT", "5")];
        assert_eq!(found(&v6).leader_address, "[fd00::1]:6");
    }
    let alone = found(&[("RANK", "0"), ("WORLD_SIZE", "1")]);
    assert_eq!((alone.world_size(), alone.leader_address.as_str()), (1, ""));
    let mpi =
        [("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "4"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "9")];
    let membership = found(&mpi);
    assert_eq!(
        (membership.rank, membership.source, membership.task().to_string()),
        (3, "Open MPI", "worker:3".to_owned())
    );
}

#[test]
fn pods_of_kubeflow() {
    let torch = [
        ("PET_NODE_RANK", "1"),
        ("PET_NNODES", "2"),
        ("PET_NPROC_PER_NODE", "auto"),
        ("PET_MASTER_ADDR", "train-node-0-0.train"),
        ("PET_MASTER_PORT", "29500"),
    ];
    let membership = found(&torch);
    assert_eq!((membership.rank, membership.leader_address.as_str()), (1, "train-node-0-0.train:29500"));
    // torchrun in such a pod describes its own processes.
    let inside =
        [&torch[..], &[("RANK", "5"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")]].concat();
    assert_eq!((found(&inside).rank, found(&inside).also_seen), (5, vec!["PET_NODE_RANK and PET_NNODES"]));
    let jax =
        [("JAX_PROCESS_ID", "2"), ("JAX_NUM_PROCESSES", "3"), ("JAX_COORDINATOR_ADDRESS", "train-node-0-0.train:6666")];
    let membership = found(&jax);
    assert_eq!((membership.rank, membership.leader_address.as_str()), (2, "train-node-0-0.train:6666"));
    assert_eq!(found(&[&jax[..], &[("DISTRIBUTE_PORT", "7")]].concat()).leader_address, "train-node-0-0.train:7");
}

#[test]
fn launchers_of_one_host_need_no_address() {
    let mpi = |namespace: &'static str| {
        found(&[
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_RANK", "1"),
            ("PMIX_NAMESPACE", namespace),
        ])
    };
    let (one, same, other) = (mpi("7"), mpi("7"), mpi("8"));
    assert!(one.leader_address.starts_with("127.0.0.1:") && one.leader_address == same.leader_address);
    assert_ne!(one.leader_address, other.leader_address);
    let horovod = [
        ("HOROVOD_RANK", "1"),
        ("HOROVOD_SIZE", "2"),
        ("HOROVOD_LOCAL_SIZE", "2"),
        ("HOROVOD_GLOO_RENDEZVOUS_PORT", "4000"),
    ];
    assert_eq!(found(&horovod).leader_address, "127.0.0.1:4001");
}

#[test]
fn the_process_manager_of_mpich_is_asked() {
    let from = |vars: &[(&str, &str)], meeting: Meeting| {
        let variable = |name: &str| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        launchers::membership(&variable, &|_| Ok(meeting.clone())).unwrap().unwrap()
    };
    let hydra = [("PMI_RANK", "1"), ("PMI_SIZE", "4"), ("PMI_FD", "8"), ("MPI_LOCALNRANKS", "4")];
    let job = |host: Option<&str>| Meeting { job: "kvs_1_0_vm".to_owned(), host: host.map(str::to_owned) };
    let here = from(&hydra, job(None));
    assert_eq!((here.rank, here.world_size(), here.job_id().name()), (1, 4, "kvs_1_0_vm"));
    let port = here.leader_address.strip_prefix("127.0.0.1:").unwrap();
    assert!(port.parse::<u16>().is_ok_and(|port| port >= 61_440), "{port}");
    let hosts = from(&[&hydra[..3], &[("MPI_LOCALNRANKS", "2")]].concat(), job(Some("node1")));
    assert_eq!(hosts.leader_address, format!("node1:{port}"));
    // Slurm sets PMI's variables for its own tasks.
    let slurm = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "4"), ("SLURM_STEP_NODELIST", "n1")];
    assert_eq!(from(&[&hydra[..3], &slurm].concat(), job(None)).source, "Slurm");
}

#[test]
fn clouds() {
    let hosts = r#"["algo-2", "algo-1"]"#;
    let membership = found(&[("SM_HOSTS", hosts), ("SM_CURRENT_HOST", "algo-2")]);
    assert_eq!((membership.rank, membership.leader_address.as_str()), (1, "algo-1:2223"));
    let spec = |pool: &str| {
        let cluster = r#"{"workerpool0": ["c:2222"], "workerpool1": ["a:2222", "b:2222"], "workerpool3": ["e:2222"]}"#;
        format!(r#"{{"cluster": {cluster}, "environment": "cloud", "task": {{"type": "{pool}", "index": 0}}}}"#)
    };
    let membership = found(&[("CLUSTER_SPEC", &spec("workerpool1"))]);
    assert_eq!((membership.rank, membership.world_size(), membership.leader_address.as_str()), (1, 3, "c:2222"));
    assert_eq!(found(&[("CLUSTER_SPEC", &spec("workerpool3"))]).task().to_string(), "evaluator:0");
}

#[test]
fn a_process_of_several_never_trains_alone_unasked() {
    let alone = r#"{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}"#;
    let signs: [(&[(&str, &str)], &str); 13] = [
        (&[("JAX_NUM_PROCESSES", "2")], "JAX_NUM_PROCESSES is set, but JAX_PROCESS_ID is not"),
        (&[("JAX_COORDINATOR_ADDRESS", "h:1")], "JAX_PROCESS_ID is not"),
        (&[("PET_NNODES", "2")], "PET_NODE_RANK is not"),
        (&[("HOROVOD_SIZE", "2")], "HOROVOD_RANK is not"),
        (&[("PMI_SIZE", "2")], "PMI_RANK is not"),
        (&[("JOB_COMPLETION_INDEX", "3")], "JOB_COMPLETION_INDEX=3"),
        (&[("TPU_WORKER_HOSTNAMES", "a,b"), ("TPU_WORKER_ID", "0")], "TPU_WORKER_HOSTNAMES"),
        (&[("PMIX_RANK", "1"), ("PMIX_NAMESPACE", "x")], "PMIX_RANK=1"),
        (&[("TF_CONFIG", "{}"), ("JOB_COMPLETION_INDEX", "1")], "JOB_COMPLETION_INDEX=1"),
        (
            &[("TF_CONFIG", alone), ("PMI_RANK", "0"), ("PMI_SIZE", "2")],
            "TF_CONFIG and PMI_RANK and PMI_SIZE contradict",
        ),
        (
            &[("RANK", "0"), ("WORLD_SIZE", "1"), ("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")],
            "Open MPI",
        ),
        (&[("PET_NODE_RANK", "0"), ("PET_NNODES", "2"), ("PET_NPROC_PER_NODE", "4")], "PET_NPROC_PER_NODE"),
        (&[("PET_NODE_RANK", "0"), ("PET_NNODES", "1:4")], "PET_NNODES is a range"),
    ];
    for (vars, words) in signs {
        let text = from(vars).unwrap_err().to_string();
        assert!(text.contains(words), "{vars:?}: {text}");
        assert_eq!(from(&[vars, &[("DISTRIBUTE_ALONE", "1")]].concat()).unwrap(), None, "{vars:?}");
    }
    let text = from(&[("DISTRIBUTE_ALONE", "yes")]).unwrap_err().to_string();
    assert!(text.contains("neither 0 nor 1"), "{text}");
    // One process each, by any name.
    for vars in [&[("PMI_RANK", "0"), ("PMI_SIZE", "1")][..], &[("PET_NNODES", "1"), ("PET_NODE_RANK", "0")]] {
        assert_eq!(found(vars).world_size(), 1, "{vars:?}");
    }
    assert_eq!(from(&[("JOB_COMPLETION_INDEX", "0")]).unwrap(), None);
}

#[test]
fn two_descriptions_of_the_processes_agree_or_are_both_named() {
    let jax = [("JAX_PROCESS_ID", "1"), ("JAX_NUM_PROCESSES", "2"), ("JAX_COORDINATOR_ADDRESS", "h:1")];
    assert_eq!(found(&[&RANKS[..], &jax].concat()).rank, 1);
    let text = from(&[&RANKS[..], &[("JAX_PROCESS_ID", "0")], &jax[1..]].concat()).unwrap_err().to_string();
    assert!(text.contains("RANK and WORLD_SIZE and JAX_PROCESS_ID and JAX_NUM_PROCESSES contradict"), "{text}");
}

#[test]
fn slurm_steps() {
    let slurm =
        [("SLURM_PROCID", "2"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "5"), ("SLURM_STEP_NODELIST", "n[3-6]")];
    let membership = found(&slurm);
    assert_eq!((membership.rank, membership.world_size(), membership.source), (2, 4, "Slurm"));
    assert_eq!(membership.leader_address, "n3:61445");
    let later = [&[("SLURM_JOB_ID", "8196")][..], &slurm].concat();
    assert_eq!(found(&later).leader_address, "n3:61444");
    assert_eq!(found(&[&slurm[..], &[("SLURM_STEP_NUM_TASKS", "3")]].concat()).world_size(), 3);
    assert_eq!(found(&[&slurm[..], &[("DISTRIBUTE_PORT", "70")]].concat()).leader_address, "n3:70");
    assert_eq!(found(&[&slurm[..], &[("MASTER_ADDR", "x")]].concat()).leader_address, "x:61445");
    assert_eq!(found(&[&slurm[..], &[("MASTER_ADDR", "x"), ("MASTER_PORT", "8")]].concat()).leader_address, "x:9");
}

#[test]
fn only_tasks_of_a_step_have_the_gpus_of_one() {
    let of = |vars: &[(&str, &str)]| {
        let all = [vars, &[("SLURM_GPUS_PER_TASK", "h100:2"), ("SLURM_STEP_NODELIST", "n[1-2]")]].concat();
        let variable = |name: &str| all.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        found(&all).gpus_per_task_from_vars(variable)
    };
    let slurm = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2")];
    assert_eq!(of(&slurm), Some(2));
    // A script that gives each task its place in another form.
    assert_eq!(of(&[&slurm[..], &RANKS].concat()), Some(2));
    // A step of one launcher on each node, which starts processes of its own.
    let inside = [("RANK", "3"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "5")];
    assert_eq!(of(&[&slurm[..], &inside].concat()), None);
    assert_eq!(found(&RANKS).gpus_per_task_from_vars(|_| None), None);
}

#[test]
fn the_leader_of_a_heterogeneous_step_is_on_the_first_host_of_the_first_component() {
    let step = [
        ("SLURM_PROCID", "2"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_JOB_ID", "6"),
        ("SLURM_STEP_NODELIST", "n[1-3]"),
        ("SLURM_HET_SIZE", "2"),
    ];
    let lists = [
        ("SLURM_JOB_ID_HET_GROUP_0", "5"),
        ("SLURM_JOB_NODELIST_HET_GROUP_0", "n[2-3]"),
        ("SLURM_JOB_NODELIST_HET_GROUP_1", "n1"),
    ];
    let membership = found(&[&step[..], &lists].concat());
    assert_eq!((membership.rank, membership.leader_address.as_str()), (2, "n2:61445"));
    let text = from(&step).unwrap_err().to_string();
    assert!(text.contains("SLURM_HET_SIZE: it is set, but SLURM_JOB_NODELIST_HET_GROUP_0 is not"), "{text}");
    let master = [("MASTER_ADDR", "n2"), ("MASTER_PORT", "29500")];
    assert_eq!(found(&[&step[..], &master].concat()).leader_address, "n2:29501");
}

#[test]
fn an_evaluator_is_alone_and_a_parameter_server_no_member() {
    let evaluator = TF.replace("worker\", \"index\": 1", "evaluator\", \"index\": 0");
    let membership = found(&[("TF_CONFIG", &evaluator), ("RANK", "3"), ("WORLD_SIZE", "4")]);
    assert_eq!(
        (membership.world_size(), membership.rank, membership.task().to_string()),
        (1, 0, "evaluator:0".to_owned())
    );
    let ps = TF.replace("\"chief\"", "\"ps\"").replace("worker\", \"index\": 1", "ps\", \"index\": 0");
    let error = from(&[("TF_CONFIG", &ps)]).unwrap_err().to_string();
    assert!(error.contains("ps:0 is a parameter server, which is not a member"), "{error}");
    let worker = ps.replace("ps\", \"index\"", "worker\", \"index\"");
    let membership = found(&[("TF_CONFIG", &worker)]);
    assert_eq!((membership.world_size(), membership.leader_address.as_str()), (2, "a:1"));
}

#[test]
fn the_jobs_identity() {
    let name = |vars: &[(&str, &str)]| found(vars).job_id().to_string();
    let given = ("DISTRIBUTE_JOB_ID", "mine");
    let torchrun = ("TORCHELASTIC_RUN_ID", "run-7");
    let slurm = [
        ("SLURM_PROCID", "2"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_JOB_ID", "5"),
        ("SLURM_STEP_ID", "1"),
        ("SLURM_STEP_NODELIST", "n[3-6]"),
    ];
    let mpi = [
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "h"),
        ("MASTER_PORT", "9"),
        ("OMPI_MCA_ess_base_jobid", "77"),
    ];
    // An explicit identity overrides all others.
    for source in [&[("TF_CONFIG", TF)][..], &RANKS, &slurm, &mpi] {
        assert_eq!(name(&[source, &[given, torchrun]].concat()), "mine");
    }
    assert_eq!(name(&[&RANKS[..], &[torchrun]].concat()), "run-7");
    assert_eq!(name(&slurm), "slurm-5.1");
    // A job that is requeued has the same number, and numbers its steps anew.
    for (restarts, expected) in [("0", "slurm-5.1"), (" 2 ", "slurm-5.1-2")] {
        assert_eq!(name(&[&slurm[..], &[("SLURM_RESTART_COUNT", restarts)]].concat()), expected);
    }
    assert_eq!(name(&mpi), "77");
    assert_eq!(name(&[&mpi[..], &[("PMIX_NAMESPACE", "prterun-h-3@1")]].concat()), "prterun-h-3@1");
    // Identities that may name only a part of the job.
    let lists = [("SLURM_JOB_NODELIST_HET_GROUP_0", "n[3-4]"), ("SLURM_JOB_NODELIST_HET_GROUP_1", "n[5-6]")];
    let het = [&slurm[..], &[("SLURM_HET_SIZE", "2")], &lists].concat();
    let lists = [("SLURM_JOB_NODELIST_PACK_GROUP_0", "n[3-4]"), ("SLURM_JOB_NODELIST_PACK_GROUP_1", "n[5-6]")];
    let pack = [&slurm[..], &[("SLURM_PACK_SIZE", "2")], &lists].concat();
    let none = [&RANKS[..], &[("TORCHELASTIC_RUN_ID", "none")]].concat();
    let beside = [&[("TF_CONFIG", TF), torchrun][..], &slurm].concat();
    let unnamed = [&slurm[..3], &slurm[4..]].concat();
    for vars in [&RANKS[..], &none, &het, &pack, &unnamed, &beside] {
        assert!(found(vars).job_id().is_derived(), "{vars:?}");
    }
    assert_eq!(found(&beside).job_id(), found(&[("TF_CONFIG", TF)]).job_id());
    let text = from(&[&RANKS[..], &[("DISTRIBUTE_JOB_ID", "a b")]].concat()).unwrap_err().to_string();
    assert!(text.starts_with("DISTRIBUTE_JOB_ID: it has the character ' '"), "{text}");
}

#[test]
fn all_tasks_of_a_description_derive_the_same_identity() {
    let task =
        |kind: &str, index: u32| TF.replace("\"worker\", \"index\": 1", &format!("\"{kind}\", \"index\": {index}"));
    let job = |json: &str| found(&[("TF_CONFIG", json)]).job_id();
    assert!(job(TF) == job(&task("chief", 0)) && job(TF) == job(&task("worker", 0)) && job(TF).is_derived());
    assert_ne!(job(TF), job(&TF.replace("b:2", "b:3")));
    let ranks = |rank: u32| Membership::new(rank, 3, "h:1").unwrap().job_id();
    assert_eq!(ranks(0), ranks(2));
    // Each task of a sparse cluster knows another part.
    let sparse = |index: u32| {
        let json = format!(
            r#"{{"sparseCluster": {{"worker": {{"{index}": "w{index}:1"}}, "ps": ["p:1"]}},
                "task": {{"type": "worker", "index": {index}}}}}"#
        );
        let resolver = TfConfigResolver::from_json(&json).unwrap();
        resolver.job_id().unwrap()
    };
    assert_eq!(sparse(0), sparse(3));
    let resolver = TfConfigResolver::from_vars(|name| match name {
        "TF_CONFIG" => Some(TF.to_owned()),
        "DISTRIBUTE_JOB_ID" => Some("mine".to_owned()),
        _ => None,
    });
    assert_eq!(resolver.unwrap().job_id().unwrap().name(), "mine");
}

#[test]
fn a_task_that_knows_only_a_part_of_the_cluster_does_not_train() {
    let of = |cluster: &str, task: &str| format!(r#"{{{cluster}, "task": {task}}}"#);
    let (first, second) = (r#"{"type": "worker", "index": 0}"#, r#"{"type": "worker", "index": 1}"#);
    for (cluster, task) in [
        (r#""sparseCluster": {"worker": {"1": "b:1"}}"#, second),
        (r#""sparseCluster": {"worker": {"0": "a:1"}, "ps": ["p:1"]}"#, first),
        (r#""sparseCluster": {"chief": ["c:1"]}"#, r#"{"type": "chief", "index": 0}"#),
        // The same in the form of a complete cluster.
        (r#""cluster": {"worker": {"1": "b:1"}, "ps": ["p:1"]}"#, second),
    ] {
        let json = of(cluster, task);
        let text = from(&[("TF_CONFIG", &json)]).unwrap_err().to_string();
        let words = "TF_CONFIG: it describes only a part of the cluster, so that ";
        assert!(text.starts_with(words) && text.contains("enableDynamicWorker"), "{json}: {text}");
        assert_eq!(from(&[("TF_CONFIG", &json), ("DISTRIBUTE_ALONE", "1")]).unwrap(), None, "{json}");
        let resolver = TfConfigResolver::from_json(&json).unwrap();
        let text = Membership::from_resolver(&SimpleResolver::of(&resolver).unwrap()).unwrap_err().to_string();
        assert!(text.starts_with("cluster resolver: it describes only a part"), "{json}: {text}");
    }
    // An evaluator is alone anyway, and tasks with indices that are left out may all know each other.
    let evaluator = of(r#""sparseCluster": {"worker": {"0": "a:1"}}"#, r#"{"type": "evaluator", "index": 0}"#);
    assert_eq!(found(&[("TF_CONFIG", &evaluator)]).world_size(), 1);
    let gap = of(r#""cluster": {"worker": {"1": "b:1", "3": "d:1"}}"#, second);
    assert_eq!(found(&[("TF_CONFIG", &gap)]).world_size(), 2);
}

#[test]
fn the_cluster_of_a_membership_has_its_identity() {
    let membership = found(&[("TF_CONFIG", TF), ("DISTRIBUTE_JOB_ID", "mine")]);
    assert_eq!(membership.cluster().unwrap().job_id().unwrap(), membership.job_id());
}

#[test]
fn explicit_memberships_are_checked() {
    assert_eq!(Membership::new(1, 2, "[::1]:7").unwrap().task().to_string(), "worker:1");
    assert!(Membership::new(0, 1, "").is_ok());
    for (rank, size, address, words) in
        [(2, 2, "h:1", "rank 2 is outside"), (0, 0, "h:1", "outside a job of 0"), (0, 2, "h", "no port")]
    {
        let text = Membership::new(rank, size, address).unwrap_err().to_string();
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn every_mistake_is_a_sentence() {
    let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")];
    for (vars, words) in [
        (vec![("TF_CONFIG", "  ")], "TF_CONFIG is set, but empty"),
        (vec![("RANK", ""), ("WORLD_SIZE", "")], "RANK is set, but empty"),
        (vec![("RANK", ""), ("TF_CONFIG", TF)], "RANK is set, but empty"),
        (vec![("WORLD_SIZE", " ")], "WORLD_SIZE is set, but empty"),
        (vec![("OMPI_COMM_WORLD_RANK", "")], "OMPI_COMM_WORLD_RANK is set, but empty"),
        (vec![("RANK", "0"), ("WORLD_SIZE", "100001")], "WORLD_SIZE is too large"),
        (vec![("RANK", "1 2"), ("WORLD_SIZE", "4")], "RANK is not a whole number"),
        (vec![("TF_CONFIG", TF), ("RANK", "x"), ("WORLD_SIZE", "3")], "RANK is not a whole number"),
        (vec![("RANK", "0")], "RANK is set, but WORLD_SIZE is not"),
        (vec![("WORLD_SIZE", "2")], "RANK is not"),
        (vec![("RANK", "2"), ("WORLD_SIZE", "2")], "RANK=2 is outside WORLD_SIZE=2"),
        (vec![("RANK", "0"), ("WORLD_SIZE", "0")], "outside WORLD_SIZE=0"),
        (vec![("RANK", "x"), ("WORLD_SIZE", "2")], "RANK is not a whole number"),
        (vec![("RANK", "-1"), ("WORLD_SIZE", "2")], "RANK is not a whole number"),
        (vec![("RANK", "0"), ("WORLD_SIZE", "2.0")], "WORLD_SIZE is not a whole number"),
        (vec![("RANK", "0"), ("WORLD_SIZE", "4000000000")], "WORLD_SIZE is too large"),
        (vec![("RANK", "0"), ("WORLD_SIZE", "2")], "MASTER_ADDR does not say"),
        (RANKS[..3].to_vec(), "neither MASTER_PORT"),
        ([&RANKS[..3], &[("MASTER_PORT", "65535")]].concat(), "no port after it"),
        ([&RANKS[..3], &[("MASTER_PORT", "x")]].concat(), "MASTER_PORT is not a port"),
        ([&RANKS[..3], &[("MASTER_PORT", "0")]].concat(), "MASTER_PORT is not a port"),
        ([&RANKS[..], &[("DISTRIBUTE_PORT", "65536")]].concat(), "DISTRIBUTE_PORT is not a port"),
        ([&RANKS[..], &[("DISTRIBUTE_PORT", "29500")]].concat(), "DISTRIBUTE_PORT and MASTER_PORT are the same"),
        ([&[("MASTER_ADDR", "h:29500")][..], &RANKS].concat(), "MASTER_ADDR is not a host"),
        ([&[("MASTER_ADDR", "http://h")][..], &RANKS].concat(), "MASTER_ADDR is not a host"),
        (vec![("OMPI_COMM_WORLD_RANK", "0")], "OMPI_COMM_WORLD_SIZE is not"),
        (vec![("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2")], "MASTER_ADDR does not say"),
        (vec![("PMI_RANK", "0"), ("PMI_SIZE", "2")], "MASTER_ADDR is not set, and the process manager"),
        (vec![("PMI_RANK", "2"), ("PMI_SIZE", "2")], "PMI_RANK=2 is outside PMI_SIZE=2"),
        (vec![("JAX_PROCESS_ID", "0"), ("JAX_NUM_PROCESSES", "2")], "JAX_COORDINATOR_ADDRESS is not set"),
        (vec![("PET_NODE_RANK", "0"), ("PET_NNODES", "2")], "PET_MASTER_ADDR is not set"),
        (vec![("SM_HOSTS", "algo-1"), ("SM_CURRENT_HOST", "algo-1")], "SM_HOSTS is not a list"),
        (vec![("SM_HOSTS", "[\"a\"]"), ("SM_CURRENT_HOST", "b")], "SM_CURRENT_HOST is not in SM_HOSTS"),
        (vec![("CLUSTER_SPEC", "{}")], "it has no cluster"),
        ([&slurm[..], &[("SLURM_STEP_NODELIST", "n[1")]].concat(), "SLURM_STEP_NODELIST is not a list"),
        ([&slurm[..], &[("SLURM_STEP_NODELIST", "n1"), ("SLURM_JOB_ID", "x")]].concat(), "SLURM_JOB_ID"),
        (vec![("TF_CONFIG", TF), ("RANK", "0"), ("WORLD_SIZE", "3")], "contradict each other"),
        (vec![("TF_CONFIG", TF), ("RANK", "2"), ("WORLD_SIZE", "4")], "RANK and WORLD_SIZE with rank 2 of 4"),
    ] {
        let text = from(&vars).unwrap_err().to_string();
        let complete = ["Given: ", "Expected: "].iter().all(|part| text.contains(part));
        assert!(text.contains(words) && complete, "{vars:?}: {text}");
    }
}
