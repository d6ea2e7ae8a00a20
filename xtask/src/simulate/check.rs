//! The simulation against real runs between processes of this machine.

use distribute::collectives::Algorithm;
use distribute::collectives::schedule::Link;

use super::network::{Network, Topology};
use crate::bench::collective::median_seconds;

const SIZES: [usize; 4] = [4, 64 << 10, 1 << 20, 16 << 20];

const RANKS: [usize; 4] = [2, 3, 4, 8];

/// Takes the link's figures from two ranks, and prints for more of them how the times that follow compare with real
/// ones.
///
/// Where ranks share cores, each has its part of them: latencies and times per byte grow by ranks / cores.
pub(super) fn run(transport: &str) -> Result<(), String> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let link = calibrate(transport)?;
    println!(
        "{transport}, {cores} cores: latency {:.2} µs, {:.2} GB/s each way, combining {:.1} GB/s, from runs of 2 ranks",
        link.latency_s * 1e6,
        1e-9 / link.per_byte_s,
        1e-9 / link.per_combined_byte_s
    );
    println!(
        "{:>5} {:>18} {:>10} {:>13} {:>13} {:>15}",
        "ranks", "algorithm", "size", "simulated µs", "measured µs", "simulated/meas."
    );
    let (mut best_agrees, mut cases) = (0, 0);
    for ranks in RANKS {
        let share = (ranks as f64 / cores as f64).max(1.0);
        let shared = Link {
            latency_s: link.latency_s * share,
            per_byte_s: link.per_byte_s * share,
            per_combined_byte_s: link.per_combined_byte_s * share,
        };
        let topology = Topology { ranks, per_host: ranks, across: shared, inside: shared, straggler: None };
        let mut simulated = Vec::new();
        let mut measured = Vec::new();
        for algorithm in Algorithm::BUILT_IN {
            let real = median_seconds(transport, ranks, algorithm.name(), &SIZES)?;
            let model = SIZES.map(|bytes| Network::new(&topology).run(|rank| algorithm.schedule(rank, ranks, bytes)));
            for ((bytes, model), real) in SIZES.iter().zip(model).zip(&real) {
                println!(
                    "{ranks:>5} {:>18} {bytes:>10} {:>13.1} {:>13.1} {:>15.2}",
                    algorithm.name(),
                    model * 1e6,
                    real * 1e6,
                    model / real
                );
            }
            simulated.push(model.to_vec());
            measured.push(real);
        }
        for size in 0..SIZES.len() {
            let least = |of: &[Vec<f64>]| of.iter().map(|times| times[size]).fold(f64::INFINITY, f64::min);
            // The algorithm that the simulation prefers is right if it is nearly the fastest in reality.
            let chosen = simulated.iter().position(|times| times[size] <= least(&simulated)).unwrap_or(0);
            best_agrees += usize::from(measured[chosen][size] <= 1.25 * least(&measured));
            cases += 1;
        }
    }
    println!(
        "the algorithm that is fastest in the simulation is within 25 % of the fastest run in {best_agrees} of \
        {cases} cases"
    );
    Ok(())
}

/// The latency from the shortest message, the time per byte from a long one.
fn calibrate(transport: &str) -> Result<Link, String> {
    let shortest = median_seconds(transport, 2, Algorithm::RecursiveDoubling.name(), &[4])?[0];
    let bytes = 16 << 20;
    let long = median_seconds(transport, 2, Algorithm::Ring.name(), &[bytes])?[0];
    let per_combined_byte_s = Link::SHARED_MEMORY.per_combined_byte_s;
    // Two steps of half the bytes, of which one combines.
    let per_byte_s = ((long - 2.0 * shortest) / bytes as f64 - per_combined_byte_s / 2.0).max(1e-12);
    Ok(Link { latency_s: shortest, per_byte_s, per_combined_byte_s })
}
