use std::sync::Barrier;
use std::time::{Duration, Instant};

use candle_nn::linear;
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
        let build = |vb: VarBuilder<'static>| match rank {
            0 => linear(3, 1, vb),
            _ => candle_core::bail!("the weights are gone"),
        };
        strategy.scope(build).map(drop)
    });
    for told in told {
        assert!(told.contains("the weights are gone"), "{told}");
    }
}

#[test]
fn an_optimizer_that_cannot_be_built_on_one_worker_is_an_error_of_all() {
    let told = errors_of_two(|rank, strategy| {
        let optimizer = |model: &Model<_>| match rank {
            0 => Sgd::new(0.1).build(model),
            _ => Err(candle_core::Error::Msg("the settings are gone".to_owned()).into()),
        };
        let build = |vb: VarBuilder<'static>| linear(3, 1, vb);
        Trainer::new(strategy, build, optimizer, MeanSquaredError, Metrics::new())?;
        strategy.scope(build).map(drop)
    });
    for told in told {
        assert!(told.contains("the settings are gone"), "{told}");
    }
}
