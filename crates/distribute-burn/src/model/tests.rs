use std::cell::Cell;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use distribute_cluster::Membership;
use distribute_strategy::{CommunicationOptions, MultiWorkerMirroredStrategy};
use distribute_testkit::Ports;
use distribute_train::metrics::Metrics;

use super::*;
use crate::{MeanSquaredError, Sgd, Trainer};

/// Runs two workers, whose strategies live until both have returned, and returns their errors.
fn errors_of_two(work: impl Fn(u32, &Strategy) -> Result<()> + Sync) -> [String; 2] {
    let address = format!("127.0.0.1:{}", Ports::reserve(1).unwrap().release()[0]);
    let built = &Barrier::new(2);
    let worker = &|rank: u32| {
        let strategy = MultiWorkerMirroredStrategy::builder()
            .devices(["CPU:0", "CPU:1"])
            .membership(Membership::new(rank, 2, &address).unwrap())
            .communication(CommunicationOptions::default().timeout(Duration::from_secs(60)))
            .build()
            .unwrap();
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
