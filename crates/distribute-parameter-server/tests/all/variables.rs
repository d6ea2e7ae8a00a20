//! Variables on servers: the places of their shards, reads and writes. Servers are threads of this process.

use distribute_cluster::{ClusterSpec, SimpleResolver, TaskType};
use distribute_device::DType;
use distribute_parameter_server::{
    Error, FixedShardsPartitioner, Gradient, ParameterServerOptions, ParameterServerStrategy,
    ParameterServerStrategyBuilder, Placement, Program, Server, ShardedVariable,
};
use distribute_rules::{OptimizerDescription, UpdateRule};
use distribute_testkit::Ports;
use distribute_values::{HostTensor, Scatter, TensorStorage};

fn cluster(
    servers: usize,
    settle: impl FnOnce(ParameterServerStrategyBuilder) -> ParameterServerStrategyBuilder,
) -> (Vec<Server>, ParameterServerStrategy) {
    let ports = Ports::reserve(servers + 1).unwrap();
    let addresses = ports.addresses();
    drop(ports);
    let spec = ClusterSpec::new()
        .with_job(TaskType::Ps, addresses[..servers].to_vec())
        .and_then(|spec| spec.with_job(TaskType::Worker, addresses[servers..].to_vec()))
        .unwrap();
    let task = |kind, index| SimpleResolver {
        spec: spec.clone(),
        task_type: Some(kind),
        task_id: Some(index),
        ..SimpleResolver::default()
    };
    let start = |index| Server::start(&task(TaskType::Ps, index as u32), Program::new()).unwrap();
    let running = (0..servers).map(start).collect();
    (running, settle(ParameterServerStrategy::builder(&task(TaskType::Chief, 0))).build().unwrap())
}

fn rows(rows: usize, width: usize) -> HostTensor<f32> {
    HostTensor::new(&[rows, width], (0..rows * width).map(|at| at as f32).collect()).unwrap()
}

fn values(tensor: &HostTensor<f32>) -> Vec<f32> {
    tensor.to_elements().unwrap()
}

fn places(variable: &ShardedVariable) -> Vec<(usize, std::ops::Range<usize>)> {
    variable.shards().iter().map(|shard| (shard.server, shard.rows.clone())).collect()
}

#[test]
fn five_rows_in_two_shards_on_two_servers() {
    let (_servers, strategy) = cluster(2, |builder| builder.partitioner(FixedShardsPartitioner::new(2)));
    let table = strategy.variable("table", &rows(5, 2)).unwrap();
    assert_eq!(places(&table), [(0, 0..3), (1, 3..5)]);
    assert_eq!((table.shape(), table.dtype()), (&[5, 2][..], DType::F32));
    // A scalar stays whole.
    let scalar = strategy.variable("scalar", &HostTensor::scalar(1.0f32)).unwrap();
    assert_eq!(scalar.shards().len(), 1);
    assert_eq!(values(&table.read().unwrap()), values(&rows(5, 2)));
}

#[test]
fn variables_take_turns_or_go_where_there_is_least() {
    for (placement, expected) in [(Placement::RoundRobin, [0, 1, 0, 1]), (Placement::ByteBalanced, [0, 1, 1, 1])] {
        let (_servers, strategy) = cluster(2, |builder| builder.placement(placement));
        let sizes = [100, 10, 20, 10];
        let servers: Vec<usize> = (0..4)
            .map(|at| strategy.variable(&format!("v{at}"), &rows(sizes[at], 1)).unwrap().shards()[0].server)
            .collect();
        assert_eq!(servers, expected, "{placement:?}");
    }
}

#[test]
fn one_variable_reads_and_writes_as_a_whole_and_by_rows() {
    let (_servers, strategy) = cluster(2, |builder| builder.partitioner(FixedShardsPartitioner::new(3)));
    let table = strategy.variable("table", &rows(7, 2)).unwrap();
    // Slices over shards.
    assert_eq!(values(&table.slice(2..4).unwrap()), [4.0, 5.0, 6.0, 7.0]);
    assert_eq!(values(&table.slice(5..).unwrap()), [10.0, 11.0, 12.0, 13.0]);
    assert_eq!(table.slice::<f32>(..).unwrap().shape(), [7, 2]);
    assert_eq!(table.slice::<f32>(3..3).unwrap().shape(), [0, 2]);
    // Rows in any order, also twice.
    let picked = table.embedding_lookup::<f32>(&[6, 0, 6]).unwrap();
    assert_eq!((picked.shape(), values(&picked)), (vec![3, 2], vec![12.0, 13.0, 0.0, 1.0, 12.0, 13.0]));
    // Writes.
    table.assign_add(&HostTensor::new(&[7, 2], vec![1.0f32; 14]).unwrap()).unwrap();
    table.assign_sub(&HostTensor::new(&[7, 2], vec![0.5f32; 14]).unwrap()).unwrap();
    table.scatter(Scatter::Add, &[6, 0, 6], &HostTensor::new(&[3, 2], vec![100.0f32; 6]).unwrap()).unwrap();
    table.scatter(Scatter::Min, &[3], &HostTensor::new(&[1, 2], vec![-1.0f32, 99.0]).unwrap()).unwrap();
    let all = values(&table.read().unwrap());
    assert_eq!((&all[..2], &all[6..8], &all[12..]), (&[100.5, 101.5][..], &[-1.0, 7.5][..], &[212.5, 213.5][..]));
    table.assign(&rows(7, 2)).unwrap();
    assert_eq!(values(&table.read().unwrap()), values(&rows(7, 2)));
    assert_eq!(strategy.find("table").unwrap().name(), "table");
    assert!(strategy.find("chair").is_none());
}

#[test]
fn a_type_on_the_wire_rounds_nothing_that_the_coordinator_reads() {
    let (_servers, strategy) =
        cluster(2, |builder| builder.wire(DType::BF16).partitioner(FixedShardsPartitioner::new(2)));
    let elements = vec![1.0 + f32::EPSILON, 0.1, 1.0 / 3.0, 1e-30];
    let table = strategy.variable("table", &HostTensor::new(&[4, 1], elements.clone()).unwrap()).unwrap();
    assert_eq!(values(&table.read().unwrap()), elements);
    assert_eq!(values(&table.slice(..).unwrap()), elements);
    assert_eq!(values(&table.embedding_lookup(&[2, 0]).unwrap()), [elements[2], elements[0]]);
    // Rows for a step of training are rounded.
    let round = |x: f32| distribute_device::bf16::from_f32(x).to_f32();
    assert_eq!(values(&table.pull_rows(&[2, 0]).unwrap()), [round(elements[2]), round(elements[0])]);
}

#[test]
fn nobody_needs_to_hold_all_initial_values() {
    let (_servers, strategy) = cluster(2, |builder| builder.partitioner(FixedShardsPartitioner::new(2)));
    let mut asked = Vec::new();
    let table = strategy
        .variable_by_parts("table", &[5, 2], |rows| {
            asked.push(rows.clone());
            Ok(rows.flat_map(|row| [row as f32; 2]).collect())
        })
        .unwrap();
    assert_eq!(asked, [0..3, 3..5]);
    assert_eq!(values(&table.slice(2..4).unwrap()), [2.0, 2.0, 3.0, 3.0]);
    let error = strategy.variable_by_parts("short", &[5, 2], |_| Ok(vec![0.0f32])).unwrap_err().to_string();
    assert!(error.contains("1 elements, and 6 are expected"), "{error}");
}

#[test]
fn initial_values_and_partitioners_may_use_the_strategy() {
    let (_servers, strategy) = cluster(1, |builder| builder);
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let inner = strategy.clone();
        let made = strategy.variable_by_parts("outer", &[2], |rows| {
            let other = inner.variable("inner", &rows_of_ones(rows.len()))?;
            Ok(values(&other.read()?))
        });
        let outcome = made.map(|outer| values(&outer.read().unwrap()));
        // A name whose variable was not created can be used again.
        let failed = strategy.variable_by_parts::<f32>("late", &[1], |_| {
            Err(Error::Variable { name: "late".to_owned(), problem: "no file".to_owned() })
        });
        assert!(failed.is_err());
        strategy.variable("late", &rows(1, 1)).unwrap();
        done.send(outcome).unwrap();
    });
    let outcome = is_done.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    assert_eq!(outcome.unwrap(), [1.0, 1.0]);
}

fn rows_of_ones(count: usize) -> HostTensor<f32> {
    HostTensor::new(&[count], vec![1.0; count]).unwrap()
}

#[test]
fn what_does_not_fit_is_refused_in_words() {
    let (_servers, strategy) = cluster(1, |builder| builder.partitioner(FixedShardsPartitioner::new(2)));
    let table = strategy.variable("table", &rows(4, 2)).unwrap();
    let scalar = strategy.variable("scalar", &HostTensor::scalar(1.0f32)).unwrap();
    let counts = strategy.untrained("counts", &HostTensor::new(&[2], vec![7i64, 8]).unwrap()).unwrap();
    let divisors = HostTensor::new(&[2], vec![2i64, 0]).unwrap();
    let wrong = [
        scalar.embedding_lookup::<f32>(&[0]).err(),
        scalar.pull_rows::<f32>(&[]).err(),
        counts.scatter(Scatter::Div, &[0, 1], &divisors).err(),
        strategy.variable("table", &rows(4, 2)).err(),
        strategy.variable("half", &HostTensor::new(&[1], vec![distribute_device::bf16::ONE]).unwrap()).err(),
        table.read::<f64>().err(),
        table.slice::<f32>(2..9).err(),
        table.embedding_lookup::<f32>(&[4]).err(),
        table.assign(&rows(3, 2)).err(),
        table.assign(&HostTensor::new(&[4, 2], vec![0i64; 8]).unwrap()).err(),
        table.scatter(Scatter::Add, &[4], &rows(1, 2)).err(),
        table.slice::<f32>(..=usize::MAX).err(),
        Gradient::of_rows(&table, vec![1, 4], &rows(2, 2)).err(),
        Gradient::new(&table, &rows(2, 4)).err(),
        Gradient::of_rows(&table, vec![0, 1, 3], &rows(2, 3)).err(),
    ];
    let words = [
        "no rows, being a scalar",
        "no rows, being a scalar",
        "has a zero",
        "one of this name",
        "f32 or f64",
        "f64 was asked for",
        "rows 2..9",
        "row 4",
        "[4, 2]",
        "i64",
        "row 4",
        "outside its shape",
        "its gradient is of row 4",
        "a gradient of shape [2, 4] is given, and [4, 2] is expected",
        "a gradient of shape [2, 3] is given, and [3, 2] is expected",
    ];
    for (error, words) in wrong.into_iter().zip(words) {
        let error = error.unwrap();
        assert!(matches!(error, Error::Variable { .. }) && error.to_string().contains(words), "{words}: {error}");
    }
    assert_eq!(counts.read::<i64>().unwrap().to_elements::<i64>().unwrap(), [7, 8]);
    table.scatter(Scatter::Div, &[0], &HostTensor::new(&[1, 2], vec![0.0f32, 1.0]).unwrap()).unwrap();
    assert!(table.read::<f32>().unwrap().to_elements::<f32>().unwrap()[0].is_nan());
    let lamb = UpdateRule::Lamb { beta1: 0.9, beta2: 0.999, epsilon: 1e-6, weight_decay: 0.01 };
    let error = strategy.optimizer(OptimizerDescription { learning_rate: 0.1, rule: lamb }, &[&table]).unwrap_err();
    assert!(error.to_string().contains("whole variables"), "{error}");
    let counter = strategy.untrained("counter", &HostTensor::scalar(0i64)).unwrap();
    counter.assign_add(&HostTensor::scalar(3i64)).unwrap();
    assert_eq!(counter.read::<i64>().unwrap().to_elements::<i64>().unwrap(), [3]);
    let sgd = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
    let error = strategy.optimizer(OptimizerDescription { learning_rate: 0.1, rule: sgd }, &[&counter]).unwrap_err();
    assert!(error.to_string().contains("untrained"), "{error}");
    let error = strategy.optimizer(OptimizerDescription { learning_rate: -0.1, rule: sgd }, &[&table]).unwrap_err();
    assert!(error.to_string().contains("learning rate"), "{error}");
}

#[test]
fn servers_answer_health_checks() {
    let (servers, _strategy) = cluster(1, |builder| builder);
    let address = format!("http://{}", servers[0].address());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let status = runtime.block_on(async {
        let channel = tonic::transport::Endpoint::from_shared(address).unwrap().connect().await.unwrap();
        let mut client = tonic_health::pb::health_client::HealthClient::new(channel);
        let request = tonic_health::pb::HealthCheckRequest { service: String::new() };
        client.check(request).await.unwrap().into_inner().status()
    });
    assert_eq!(status, tonic_health::pb::health_check_response::ServingStatus::Serving);
}

#[test]
fn a_port_that_is_in_use_and_tasks_that_do_not_serve_are_told() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let spec = ClusterSpec::new()
        .with_job(TaskType::Ps, [address.clone()])
        .and_then(|spec| spec.with_job(TaskType::Worker, ["127.0.0.1:9"]))
        .unwrap();
    let task = |kind| SimpleResolver {
        spec: spec.clone(),
        task_type: Some(kind),
        task_id: Some(0),
        ..SimpleResolver::default()
    };
    let error = Server::start(&task(TaskType::Ps), Program::new()).unwrap_err();
    assert!(matches!(error, Error::Listen { .. }) && error.to_string().contains(&address), "{error}");
    let error = Server::start(&task(TaskType::Chief), Program::new()).unwrap_err();
    assert!(matches!(error, Error::WrongTask { .. }), "{error}");
    let error = ParameterServerStrategy::builder(&task(TaskType::Worker)).build().unwrap_err();
    assert!(matches!(error, Error::WrongTask { .. }), "{error}");
    drop(taken);
    // A server that does not appear is named.
    let options = ParameterServerOptions::default().connect_timeout(std::time::Duration::from_millis(300));
    let error = ParameterServerStrategy::builder(&task(TaskType::Chief)).options(options).build().unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("ps:0") && error.to_string().contains(&address), "{error}");
}
