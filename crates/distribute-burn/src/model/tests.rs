use std::cell::Cell;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use distribute_cluster::Membership;
use distribute_strategy::{CommunicationOptions, FullyShardedStrategy, MultiWorkerMirroredStrategy};
use distribute_testkit::Ports;
use distribute_train::metrics::Metrics;

use super::*;
use crate::{MeanSquaredError, Sgd, Trainer};

/// Runs two workers, whose strategies live until both have returned, and returns their errors.
fn errors_of_two(work: impl Fn(u32, &Strategy) -> Result<()> + Sync) -> [String; 2] {
    let mirrored =
        |membership| MultiWorkerMirroredStrategy::builder().membership(membership).devices(["CPU:0", "CPU:1"]);
    errors_of_two_under(|membership| mirrored(membership).communication(a_minute()).build(), work)
}

fn errors_of_two_under(
    build: impl Fn(Membership) -> distribute_strategy::Result<Strategy> + Sync,
    work: impl Fn(u32, &Strategy) -> Result<()> + Sync,
) -> [String; 2] {
    let address = format!("127.0.0.1:{}", Ports::reserve(1).unwrap().release()[0]);
    let built = &Barrier::new(2);
    let worker = &|rank: u32| {
        let strategy = build(Membership::new(rank, 2, &address).unwrap()).unwrap();
        // One that fails sooner would end the building of the other strategy.
        built.wait();
        (work(rank, &strategy).unwrap_err().to_string(), strategy)
    };
    let began = Instant::now();
    let told = std::thread::scope(|scope| {
        let workers = [0, 1].map(|rank| scope.spawn(move || worker(rank)));
        workers.map(|worker| worker.join().unwrap())
    });
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    told.map(|(error, _)| error)
}

fn a_minute() -> CommunicationOptions {
    CommunicationOptions::default().timeout(Duration::from_secs(60))
}

#[test]
fn a_worker_that_has_no_whole_variables_lets_none_wait_for_a_module() {
    let sharded = |membership| FullyShardedStrategy::builder().membership(membership).devices(["CPU:0"]);
    let sharded = |membership| sharded(membership).mirror_below(1).communication(a_minute()).build();
    let told = errors_of_two_under(sharded, |rank, strategy| {
        let model = strategy.scope(|device| LinearConfig::new(3, 1).init(device))?;
        model.parameters().set_torn(rank == 1);
        let told = model.to_module(strategy).map(drop);
        model.parameters().set_torn(false);
        model.to_module(strategy)?;
        told
    });
    assert_eq!(told[0], format!("on worker:1: {}", told[1]));
}

#[test]
fn a_model_that_cannot_be_built_on_one_worker_is_an_error_of_all() {
    let told = errors_of_two(|rank, strategy| {
        let built = Cell::new(0);
        // The second replica of the second worker has another shape.
        let outputs = || if rank == 1 { 1 + built.replace(1) } else { 1 };
        strategy.scope(|device| LinearConfig::new(3, outputs()).init(device)).map(drop)
    });
    assert!(told[0].contains(&told[1]), "{told:?}");
}

#[test]
fn an_optimizer_that_cannot_be_built_on_one_worker_is_an_error_of_all() {
    let told = errors_of_two(|rank, strategy| {
        let optimizer = |model: &Model<Linear>| match rank {
            0 => Sgd::new(0.1).build(model),
            _ => Err(Error::DrawnByRanks { path: "the settings".to_owned(), ranks: 2 }),
        };
        let build = |device: &Device| LinearConfig::new(3, 1).init(device);
        let forward = |model: &Linear, x: Tensor<2>| model.forward(x);
        let loss = MeanSquaredError;
        Trainer::<_, _, Tensor<2>, 2>::new(strategy, build, forward, optimizer, loss, Metrics::new())?;
        strategy.scope(build).map(drop)
    });
    for told in told {
        assert!(told.contains("the settings"), "{told}");
    }
}
