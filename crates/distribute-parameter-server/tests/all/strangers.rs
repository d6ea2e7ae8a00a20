//! Callers that do not belong to the job, and invalid calls and messages.

use std::time::{Duration, Instant};

use distribute_cluster::tls::TlsFiles;
use distribute_cluster::{
    ClusterResolver, ClusterSpec, FailureKind, JobId, JobSecret, JobTls, SimpleResolver, Task, TaskType,
};
use distribute_parameter_server::{
    ClusterCoordinator, Error, FixedShardsPartitioner, ParameterServerStrategy, Program, Server, ServerOptions,
};
use distribute_rules::{OptimizerDescription, UpdateRule};
use distribute_testkit::certificates::{Authority, Certificate, Files};
use distribute_testkit::{Job, Ports, Signal};
use distribute_types::ErrorClass;
use distribute_values::{HostTensor, TensorStorage};
use tonic::Code;

use crate::harness::raw::{self, Caller, Fields};
use crate::harness::{COORDINATOR_TIMEOUT, Cluster, SOON, program, server, total, until, worker};

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(2 * SOON, future).await.unwrap() })
}

#[track_caller]
fn refused<T: std::fmt::Debug>(outcome: Result<T, tonic::Status>, code: Code, words: &str) {
    let status = outcome.unwrap_err();
    assert_eq!(status.code(), code, "{status}");
    assert!(status.message().contains(words), "{words}: {status}");
}

fn attend(session: u64) -> Fields {
    Fields::default().number(1, session).number(4, 1).number(5, 9).bytes(6, "127.0.0.1:9")
}

#[test]
fn a_stranger_changes_nothing_of_a_job() {
    let mut cluster = Cluster::start(1, 1);
    let coordinator = cluster.coordinator();
    coordinator.schedule("add", &1.0).unwrap();
    coordinator.join().unwrap();
    let running: Vec<_> = (0..20).map(|_| coordinator.schedule("add_after", &(1.0, 20)).unwrap()).collect();
    let own = cluster.resolver().job_id().unwrap();
    let other = JobId::new("another-job").unwrap();
    let leave = Fields::default().number(1, 77).number(2, 1).message();
    block_on(async {
        for (task, service) in [(server(0), "ParameterServer"), (worker(0), "Worker")] {
            let (address, name) = (cluster.address(task), task.to_string());
            let path = |method: &str| format!("{service}/{method}");
            // Any gRPC client, another job, another build, and another task's address.
            let stranger = Caller::new(&address, &name, &other, 77);
            let of_job = Caller::new(&address, &name, &own, 77);
            for (method, body) in [("Attend", attend(77).message()), ("Leave", leave.clone()), ("Run", Vec::new())] {
                let path = path(method);
                for (caller, code, words) in [
                    (stranger.with("distribute-job", ""), Code::Unauthenticated, "names no job"),
                    (stranger.with("x", "y"), Code::PermissionDenied, "to job another-job"),
                    (of_job.with("distribute-version", "1"), Code::FailedPrecondition, "version"),
                    (of_job.with("distribute-task", "ps:9"), Code::PermissionDenied, "ps:9 was called"),
                    (of_job.with("distribute-session", "x"), Code::Unauthenticated, "no session"),
                ] {
                    refused(caller.call(&path, body.clone()).await, code, words);
                }
            }
            // Of this job, with an invalid session.
            refused(of_job.call(&path("Leave"), leave.clone()).await, Code::Aborted, "another coordinator");
            let outcome = of_job.call(&path("CreateResource"), Vec::new()).await.unwrap_err();
            assert!(matches!(outcome.code(), Code::Unavailable | Code::Aborted), "{outcome}");
        }
        // The session is checked before the body, which never arrives here.
        let long = Caller::new(&cluster.address(server(0)), "ps:0", &own, 77);
        let mut open = long.open([&[0, 0x40, 0, 0, 0][..], &[7; 1000]].concat());
        refused(long.answer_to("ParameterServer/Push", &mut open).await, Code::Aborted, "another coordinator");
        let stranger = Caller::new(&cluster.address(worker(0)), "worker:0", &other, 77);
        let mut open = stranger.open(vec![0, 0x40, 0, 0, 0]);
        refused(stranger.answer_to("Worker/Run", &mut open).await, Code::PermissionDenied, "another-job");
    });
    coordinator.join().unwrap();
    coordinator.fetch::<()>(&running).unwrap();
    assert_eq!(total(&coordinator), 21.0);
    drop(coordinator);
    for task in [server(0), worker(0)] {
        assert!(cluster.end_of(task).contains("left"), "{task}");
    }
}

/// Asserts that coordinators with these proofs end at once, for good, and with these words.
fn coordinators_are_refused<P>(
    strategy: impl Fn(Option<P>) -> Result<ParameterServerStrategy, Error>,
    cases: [(Option<P>, &str); 2],
) {
    let began = Instant::now();
    for (given, words) in cases {
        let error = strategy(given).unwrap_err();
        assert!(matches!(error, Error::Secret { .. }) && error.to_string().contains(words), "{error}");
        assert_eq!(error.failure_kind(), FailureKind::Configuration, "{error}");
    }
    assert!(began.elapsed() < SOON / 2, "{:?}", began.elapsed());
}

/// Runs functions of a coordinator of the job. A caller that knows everything of the job but its proofs is refused
/// meanwhile, with these words, before its body, which never arrives.
fn job_is_not_affected(cluster: &Cluster, of_job: ParameterServerStrategy, words: &str) {
    of_job.untrained("total", &HostTensor::scalar(0.0)).unwrap();
    let coordinator = ClusterCoordinator::new(&of_job, program()).unwrap();
    drop(of_job);
    coordinator.schedule("add", &1.0).unwrap();
    coordinator.join().unwrap();
    let own = cluster.resolver().job_id().unwrap();
    block_on(async {
        for (task, method) in [(server(0), "ParameterServer/Push"), (worker(0), "Worker/Run")] {
            let caller = Caller::new(&cluster.address(task), &task.to_string(), &own, 77);
            let mut open = caller.open([&[0, 0x40, 0, 0, 0][..], &[7; 1000]].concat());
            refused(caller.answer_to(method, &mut open).await, Code::Unauthenticated, words);
        }
    });
    coordinator.schedule("add", &1.0).unwrap();
    coordinator.join().unwrap();
    assert_eq!(total(&coordinator), 2.0);
}

#[test]
fn tasks_without_the_jobs_secret_take_no_part() {
    let secret = "the secret of this one job";
    let mut cluster = Cluster::prepare(1, 1).env("DISTRIBUTE_JOB_SECRET", secret).begin_all();
    let of = |text: &str| Some(JobSecret::new(text).unwrap());
    let strategy = |secret: Option<JobSecret>| {
        let options = Cluster::options().secret(secret);
        ParameterServerStrategy::builder(&cluster.resolver()).options(options).build()
    };
    let wrong = of("the secret of another job");
    coordinators_are_refused(
        strategy,
        [
            (wrong, "do not have the same secret; set DISTRIBUTE_JOB_SECRET_FILE"),
            (None, "this process has no secret, and the other side has one; set DISTRIBUTE_JOB_SECRET_FILE"),
        ],
    );
    job_is_not_affected(&cluster, strategy(of(secret)).unwrap(), "this process has no secret");
    for task in [server(0), worker(0)] {
        let printed = cluster.end_of(task);
        assert!(printed.contains("left") && !printed.contains(secret), "{task}: {printed}");
    }
}

#[test]
fn tasks_without_a_certificate_of_the_jobs_authority_take_no_part() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new().unwrap();
    let issue =
        |authority: &Authority, stem: &str| authority.issue(folder.path(), stem, &Certificate::valid()).unwrap();
    let opened = |files: &Files| JobTls::open(TlsFiles::new(&files.authority, &files.certificate, &files.key)).unwrap();
    let tasks = issue(&authority, "tasks");
    let path = |path: &std::path::Path| path.to_string_lossy().into_owned();
    let mut cluster = Cluster::prepare(1, 1)
        .env("DISTRIBUTE_TLS_CA", &path(&tasks.authority))
        .env("DISTRIBUTE_TLS_CERT", &path(&tasks.certificate))
        .env("DISTRIBUTE_TLS_KEY", &path(&tasks.key))
        .begin_all();
    let strategy = |tls: Option<JobTls>| {
        ParameterServerStrategy::builder(&cluster.resolver()).options(Cluster::options().tls(tls)).build()
    };
    let other = opened(&issue(&Authority::new().unwrap(), "other"));
    coordinators_are_refused(
        strategy,
        [
            (Some(other), "the certificate of the other side is not of the authority that this process trusts"),
            (None, "this process does not use TLS, and the other side does; give every process"),
        ],
    );
    let chief = strategy(Some(opened(&issue(&authority, "chief")))).unwrap();
    job_is_not_affected(&cluster, chief, "this process does not use TLS");
    for task in [server(0), worker(0)] {
        assert!(cluster.end_of(task).contains("left"), "{task}");
    }
}

#[test]
fn connections_that_say_nothing_of_use_are_closed() {
    let mut cluster = Cluster::start(1, 1);
    let coordinator = cluster.coordinator();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let settings = [&preface[..], &[0, 0, 0, 4, 0, 0, 0, 0, 0]].concat();
    let garbage: Vec<u8> = (0..4096u32).map(|at| ((at * 7919) >> 3) as u8).collect();
    // A frame that announces 16 MiB.
    let endless = [&settings[..], &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat();
    block_on(async {
        let mut all = tokio::task::JoinSet::new();
        for task in [server(0), worker(0)] {
            for bytes in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &preface[..5], &settings, &garbage, &endless] {
                let (address, bytes) = (cluster.address(task), bytes.to_vec());
                all.spawn(async move { raw::closed_after(&address, &bytes).await });
            }
        }
        while let Some(closed) = all.join_next().await {
            closed.unwrap();
        }
    });
    coordinator.schedule("add", &1.0).unwrap();
    coordinator.join().unwrap();
    assert_eq!(total(&coordinator), 1.0);
    drop(coordinator);
    assert!(cluster.end_of(worker(0)).contains("left"));
}

/// A server in this process, and a caller of its job without a strategy.
fn alone(options: ServerOptions) -> (Server, SimpleResolver, String) {
    let ports = Ports::reserve(2).unwrap();
    let addresses = ports.addresses();
    drop(ports);
    let spec = ClusterSpec::new()
        .with_job(TaskType::Ps, [addresses[0].clone()])
        .and_then(|spec| spec.with_job(TaskType::Worker, [addresses[1].clone()]))
        .unwrap();
    let task = |kind| SimpleResolver {
        spec: spec.clone(),
        task_type: Some(kind),
        task_id: Some(0),
        ..SimpleResolver::default()
    };
    (
        Server::start_with(&task(TaskType::Ps), Program::new(), options).unwrap(),
        task(TaskType::Chief),
        addresses[0].clone(),
    )
}

#[test]
fn what_makes_no_sense_is_refused_and_the_server_stays() {
    let options = ServerOptions::default().message_timeout(Duration::from_secs(1));
    let (_server, chief, address) = alone(options);
    let id = chief.job_id().unwrap();
    block_on(async {
        let caller = Caller::new(&address, "ps:0", &id, 42);
        let mut hold = caller.open(Fields::default().number(1, 42).message());
        let attending = tokio::spawn({
            let caller = caller.with("x", "y");
            async move { caller.answer_to("ParameterServer/Attend", &mut hold).await }
        });
        let shard = |rows: u64, width: u64| {
            let shape =
                Fields::default().number(1, 42).bytes(3, "w").bytes(5, [&varint(rows)[..], &varint(width)].concat());
            shape.number(7, rows).number(8, 1).number(9, 1)
        };
        let create = |message: Fields| {
            let caller = &caller;
            async move { caller.call("ParameterServer/Create", message.message()).await }
        };
        // The first one may arrive before the attendance has begun.
        let made = shard(3, 2).bytes(15, [0; 24]);
        while create(made.clone()).await.is_err_and(|status| status.code() == Code::Unavailable) {}
        for (message, words) in [
            (shard(1 << 40, 1 << 40), "larger than any memory"),
            (shard(1 << 36, 1), "0 bytes arrived"),
            (shard(3, 2).number(6, u64::MAX).bytes(15, [0; 24]), "from row"),
            (shard(3, 2).bytes(15, [0; 25]), "at most 24"),
            (shard(3, 2).number(11, 1).bytes(15, [0; 8]), "before all parts"),
            (shard(3, 2).number(4, 99).bytes(15, [0; 24]), "data type"),
        ] {
            refused(create(message).await, Code::InvalidArgument, words);
        }
        // An impossible length, and bytes that are not a message.
        let call = |method: &str, bytes: Vec<u8>| {
            let (caller, path) = (&caller, format!("ParameterServer/{method}"));
            async move { caller.call(&path, bytes).await }
        };
        refused(call("Pull", vec![0, 0x7f, 0xff, 0xff, 0xff]).await, Code::InvalidArgument, "at most");
        refused(call("Push", vec![0, 0x7f, 0xff, 0xff, 0xff]).await, Code::InvalidArgument, "at most");
        refused(call("Describe", vec![0, 0, 1, 0, 0]).await, Code::InvalidArgument, "at most");
        for garbage in [vec![1, 2, 3, 4, 5, 6], vec![0, 0, 0, 0, 3, 0xff, 0xff, 0xff]] {
            assert!(call("Pull", garbage.clone()).await.is_err() && call("Assign", garbage).await.is_err());
        }
        // A message whose end never arrives.
        assert!(call("Push", vec![0, 0, 0, 0, 9, 1]).await.is_err());
        let mut half = caller.open(vec![0, 0, 0, 0, 9, 1]);
        let answer = caller.answer_to("ParameterServer/Push", &mut half).await;
        refused(answer, Code::DeadlineExceeded, "nothing further of the call arrived");
        refused(call("Nothing", Vec::new()).await, Code::Unimplemented, "no method");
        let rows = |rows: &[u64]| rows.iter().flat_map(|row| row.to_le_bytes()).collect::<Vec<u8>>();
        let pull = |wanted: Fields| {
            let bytes = Fields::default().number(1, 42).inside(3, wanted).message();
            call("Pull", bytes)
        };
        refused(pull(Fields::default().bytes(3, rows(&[3]))).await, Code::InvalidArgument, "there is no row 3");
        refused(pull(Fields::default().bytes(3, [1, 2])).await, Code::InvalidArgument, "rows are not numbers");
        refused(pull(Fields::default().number(1, 9)).await, Code::Unavailable, "shard 9");
        refused(pull(Fields::default().bytes(4, "slot")).await, Code::InvalidArgument, "no slot");
        let origin = Fields::default().number(1, 42).number(3, 1);
        let assign = |fields: Fields| call("Assign", fields.inside(1, origin.clone()).message());
        refused(assign(Fields::default().number(4, 9).bytes(15, [0; 24])).await, Code::InvalidArgument, "operation");
        refused(assign(Fields::default().number(3, 1).bytes(15, [0; 24])).await, Code::InvalidArgument, "elements of");
        refused(assign(Fields::default().bytes(15, [0; 23])).await, Code::InvalidArgument, "23 bytes");
        refused(
            assign(Fields::default().bytes(5, rows(&[7])).bytes(15, [0; 8])).await,
            Code::InvalidArgument,
            "no row 7",
        );
        // All contents are unchanged.
        let elements = pull(Fields::default()).await.unwrap();
        assert_eq!(elements.len(), 1);
        assert!(elements[0].ends_with(&[0; 24]), "{elements:?}");
        attending.abort();
    });
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// A session that is later than any coordinator's.
const LATER: u64 = 1 << 63;

#[test]
fn a_pull_asks_for_no_more_than_its_limit() {
    let (_server, chief, address) = alone(ServerOptions::default());
    let strategy = ParameterServerStrategy::builder(&chief).build().unwrap();
    // Rows of 8 MiB.
    let table = strategy.variable("w", &HostTensor::new(&[2, 2 << 20], vec![1.0f32; 4 << 20]).unwrap()).unwrap();
    assert_eq!(table.shards().len(), 1);
    block_on(async {
        // A later session than the strategy's, whose place it takes.
        let caller = Caller::new(&address, "ps:0", &chief.job_id().unwrap(), LATER);
        let mut hold = caller.open(Fields::default().number(1, LATER).message());
        let holder = caller.with("x", "y");
        let holding = tokio::spawn(async move { holder.answer_to("ParameterServer/Attend", &mut hold).await });
        let width = 2u64 << 20;
        let shape = [varint(1), varint(width)].concat();
        let about = Fields::default().number(1, LATER).bytes(3, "w").bytes(5, shape).number(7, 1).number(8, 1);
        let part = vec![0u8; width as usize * 4];
        let message = about.bytes(15, part).message();
        while caller
            .call("ParameterServer/Create", message.clone())
            .await
            .is_err_and(|status| matches!(status.code(), Code::Unavailable | Code::Aborted))
        {}
        // 32 KB that request 32 GiB.
        let rows = vec![0u8; 8 * 4096];
        let bytes = Fields::default().number(1, LATER).inside(3, Fields::default().bytes(3, rows)).message();
        refused(caller.call("ParameterServer/Pull", bytes).await, Code::InvalidArgument, "ask for at most");
        holding.abort();
    });
}

#[test]
fn a_coordinator_that_answers_pings_and_says_nothing_is_lost() {
    let options = ServerOptions::default().silence(Duration::from_secs(1));
    let (_server, chief, address) = alone(options);
    block_on(async {
        let caller = Caller::new(&address, "ps:0", &chief.job_id().unwrap(), 42);
        // The connection and the call stay open: its body has no end.
        let mut hold = caller.open(Fields::default().number(1, 42).message());
        let states = caller.answer_to("ParameterServer/Attend", &mut hold).await.unwrap();
        assert!(states.len() > 1, "{states:?}");
        assert!(!hold.send(Vec::new()).await || states.len() < 100);
    });
}

/// The body of a started process: a coordinator that attends, and does nothing else.
#[test]
#[ignore = "a process that other tests start"]
fn coordinating() {
    let Ok(config) = std::env::var("TEST_CLUSTER") else { return };
    let resolver = distribute_cluster::TfConfigResolver::from_json(&config).unwrap();
    let strategy = ParameterServerStrategy::builder(&resolver).options(Cluster::options()).build().unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    coordinator.schedule("nested", &1).unwrap();
    coordinator.join().unwrap();
    println!("coordinating");
    std::thread::sleep(10 * SOON);
}

#[test]
fn a_coordinator_whose_host_has_vanished_is_noticed() {
    let mut cluster = Cluster::prepare(1, 1).env(COORDINATOR_TIMEOUT, "1").begin_all();
    let config = serde_json::json!({
        "cluster": cluster.resolver().spec.to_json(), "task": {"type": "chief", "index": 0},
    });
    let chief =
        Job::of_test("strangers::coordinating").unwrap().env("TEST_CLUSTER", config.to_string()).start().unwrap();
    chief.wait_for_line(0, "coordinating", SOON).unwrap();
    // Its connections stay open, but nothing is sent on them any more.
    chief.kill(0, Signal::STOP).unwrap();
    for task in [server(0), worker(0)] {
        let said = cluster.end_of(task);
        assert!(said.contains(&format!("ended: {task}: no coordinator for 1 s")), "{said}");
    }
    chief.kill(0, Signal::KILL).unwrap();
}

fn ends(cluster: &mut Cluster, tasks: &[Task], words: &str) {
    for task in tasks {
        let said = cluster.end_of(*task);
        assert!(said.contains(words), "{task}: {said}");
        assert_eq!(said.matches(words).count(), 1, "{task}: {said}");
    }
}

#[test]
fn an_error_that_would_come_again_ends_all_tasks() {
    let tasks = [server(0), worker(0)];
    // A program that workers do not have.
    let mut cluster = Cluster::start(1, 1);
    let strategy = cluster.strategy();
    let newer =
        program().function("newer", |_: &distribute_parameter_server::WorkerContext, (): ()| Ok::<_, Error>(()));
    let coordinator = ClusterCoordinator::new(&strategy, newer).unwrap();
    let mut error = None;
    until("it is told", || {
        error = coordinator.schedule("newer", &()).and_then(|_| coordinator.join()).err();
        error.is_some()
    });
    let error = error.unwrap();
    assert!(!error.is_retryable(), "{error}");
    drop((coordinator, strategy));
    ends(&mut cluster, &tasks, &format!("ends with its job, whose coordinator has failed: {error}"));
    // A function that fails.
    let mut cluster = Cluster::start(1, 1);
    let coordinator = cluster.coordinator();
    coordinator.schedule("fail", &"bad luck").unwrap();
    let error = coordinator.join().unwrap_err();
    drop(coordinator);
    ends(&mut cluster, &tasks, &format!("whose coordinator has failed: {error}"));
    // A variable that no server may have.
    let mut cluster = Cluster::start(1, 1);
    let strategy = cluster.strategy();
    strategy.variable("w", &HostTensor::scalar(distribute_device::bf16::ONE)).unwrap_err();
    drop(strategy);
    ends(&mut cluster, &tasks, "f32 or f64");
    // A coordinator that continues after an error ends successfully.
    let mut cluster = Cluster::start(1, 1);
    let coordinator = cluster.coordinator();
    coordinator.schedule("fail", &"bad luck").unwrap();
    coordinator.join().unwrap_err();
    coordinator.schedule("add", &1.0).unwrap();
    coordinator.join().unwrap();
    drop(coordinator);
    ends(&mut cluster, &tasks, "left");
}

#[test]
fn a_coordinator_of_another_job_ends_nobody() {
    let mut cluster = Cluster::start(1, 1);
    // The same workers, and a server that does not exist.
    let address = Ports::reserve(1).unwrap().addresses().remove(0);
    let mut resolver = cluster.resolver();
    resolver.spec = ClusterSpec::new()
        .with_job(TaskType::Ps, [address])
        .and_then(|spec| spec.with_job(TaskType::Worker, [cluster.address(worker(0))]))
        .unwrap();
    let options = Cluster::options().connect_timeout(Duration::from_millis(300));
    let error = ParameterServerStrategy::builder(&resolver).options(options).build().unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    // And one that reaches a server of this job.
    resolver.spec = ClusterSpec::new()
        .with_job(TaskType::Ps, [cluster.address(server(0))])
        .and_then(|spec| spec.with_job(TaskType::Worker, ["127.0.0.1:9"]))
        .unwrap();
    let error = ParameterServerStrategy::builder(&resolver).options(Cluster::options()).build().unwrap_err();
    assert!(matches!(error, Error::Refused { .. }) && !error.is_retryable(), "{error}");
    assert!(error.to_string().contains("DISTRIBUTE_JOB_ID"), "{error}");
    // They serve their own coordinator.
    let coordinator = cluster.coordinator();
    coordinator.schedule("add", &2.0).unwrap();
    coordinator.join().unwrap();
    assert_eq!(total(&coordinator), 2.0);
    drop(coordinator);
    ends(&mut cluster, &[server(0), worker(0)], "left");
}

#[test]
fn long_payloads_arrive_whole() {
    let (_server, chief, _) = alone(ServerOptions::default());
    let strategy =
        ParameterServerStrategy::builder(&chief).partitioner(FixedShardsPartitioner::new(1)).build().unwrap();
    // 40 MiB in a shard, in rows of 20 MiB, where a message has at most 32.
    let (rows, width) = (2usize, 5usize << 20);
    let values: Vec<f32> = (0..rows * width).map(|at| (at % 8191) as f32).collect();
    let table = strategy.variable("w", &HostTensor::new(&[rows, width], values.clone()).unwrap()).unwrap();
    let read = || table.read::<f32>().unwrap().to_elements::<f32>().unwrap();
    assert!(read() == values);
    let picked = table.embedding_lookup::<f32>(&[1, 0, 1]).unwrap().to_elements::<f32>().unwrap();
    assert!(picked == [&values[width..], &values[..width], &values[width..]].concat());
    let twice: Vec<f32> = values.iter().map(|x| 2.0 * x).collect();
    table.assign_add(&HostTensor::new(&[rows, width], values.clone()).unwrap()).unwrap();
    assert!(read() == twice);
    let rule = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
    strategy.optimizer(OptimizerDescription { learning_rate: 1.0, rule }, &[&table]).unwrap();
    table
        .scatter(
            distribute_values::Scatter::Sub,
            &[1, 0],
            &HostTensor::new(&[rows, width], [&values[width..], &values[..width]].concat()).unwrap(),
        )
        .unwrap();
    assert!(read() == values);
}
