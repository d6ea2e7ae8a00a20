//! Workers that are killed repeatedly under load, for two seconds or DISTRIBUTE_TEST_SOAK_SECONDS; `cargo xtask ci`
//! takes ten.
#![expect(clippy::print_stdout, reason = "a long test says what it has seen")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use distribute_parameter_server::{ClusterCoordinator, CoordinatorOptions, Delivery, FixedShardsPartitioner};
use distribute_rules::{OptimizerDescription, UpdateRule};
use distribute_testkit::Signal;
use distribute_values::{HostTensor, TensorStorage};

use crate::harness::{Cluster, SILENCE, program, server, total, worker};

fn seconds() -> Duration {
    let seconds = std::env::var("DISTRIBUTE_TEST_SOAK_SECONDS").map_or(2.0, |seconds| seconds.parse().unwrap());
    Duration::from_secs_f64(seconds)
}

/// Schedules while workers are killed, frozen and restarted; returns the number of scheduled steps, and their total.
fn soak(delivery: Delivery, time: Duration) -> (u64, f64) {
    let mut cluster = Cluster::start(2, 3);
    let strategy = cluster.strategy();
    strategy.untrained("total", &HostTensor::scalar(0.0)).unwrap();
    let options = CoordinatorOptions::default().delivery(delivery).queue_size(200).max_attempts(1000);
    let coordinator = ClusterCoordinator::with_options(&strategy, program(), options).unwrap();
    let stop = AtomicBool::new(false);
    let (mut kills, mut freezes) = (0, 0);
    let scheduled = std::thread::scope(|scope| {
        let scheduling = scope.spawn(|| {
            let mut scheduled = 0;
            while !stop.load(Ordering::Relaxed) {
                coordinator.schedule("add_after", &(1.0, scheduled % 8)).unwrap();
                scheduled += 1;
            }
            scheduled
        });
        let begun = Instant::now();
        let mut draw = 1u64;
        while begun.elapsed() < time {
            draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let victim = worker((draw >> 40) as u32 % 3);
            std::thread::sleep(Duration::from_millis(300 + (draw >> 50) % 900));
            if (draw >> 33).is_multiple_of(5) {
                cluster.signal(victim, Signal::STOP);
                std::thread::sleep(SILENCE + SILENCE / 2);
                cluster.signal(victim, Signal::CONT);
                freezes += 1;
            } else {
                cluster.signal(victim, Signal::KILL);
                cluster.restart(victim);
                kills += 1;
            }
        }
        stop.store(true, Ordering::Relaxed);
        scheduling.join().unwrap()
    });
    coordinator.join().unwrap();
    let total = total(&coordinator);
    println!("{delivery:?}: {scheduled} steps, {kills} kills, {freezes} freezes: {total} counted");
    assert!(kills + freezes > 0);
    (scheduled, total)
}

#[test]
fn every_step_counts_exactly_once_whoever_is_killed() {
    let (scheduled, total) = soak(Delivery::EffectivelyOnce, seconds());
    assert_eq!(total, scheduled as f64);
}

#[test]
fn without_tokens_every_step_counts_at_least_once() {
    let (scheduled, total) = soak(Delivery::AtLeastOnce, seconds());
    assert!(total >= scheduled as f64 && total <= 1.1 * scheduled as f64, "{scheduled} {total}");
}

/// Returns the resident memory of a process, in KiB.
fn resident(id: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn the_servers_memory_stays_as_it_is() {
    let cluster = Cluster::start(2, 3);
    let strategy = distribute_parameter_server::ParameterServerStrategy::builder(&cluster.resolver())
        .options(Cluster::options())
        .partitioner(FixedShardsPartitioner::new(2))
        .build()
        .unwrap();
    let weights = strategy.variable("w", &HostTensor::new(&[50_000], vec![0.0f64; 50_000]).unwrap()).unwrap();
    let rule = UpdateRule::Sgd { momentum: 0.9, nesterov: false };
    let optimizer = strategy.optimizer(OptimizerDescription { learning_rate: 1e-9, rule }, &[&weights]).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let (begun, mut step, mut used) = (Instant::now(), 0u64, Vec::new());
    while begun.elapsed() < seconds() {
        for _ in 0..100 {
            coordinator.schedule("regress", &(optimizer, 0u64, step)).unwrap();
            step += 1;
        }
        coordinator.join().unwrap();
        used.push([0, 1].map(|index| resident(cluster.pid(server(index)))).into_iter().max().unwrap());
    }
    let (early, late) = (used[used.len() / 3], *used.last().unwrap());
    println!("{step} steps of 400 KB: {early} KiB, then {late} KiB");
    assert!(late < early + early / 4 + 8 * 1024, "{used:?}");
    assert!(weights.read::<f64>().unwrap().to_elements::<f64>().unwrap().iter().all(|x| x.is_finite()));
}
