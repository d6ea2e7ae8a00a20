//! How far one worker moves running statistics, which all workers do.

use distribute_parameter_server::WorkerContext;

/// Returns by what the change is divided that a worker's layers have made to running statistics.
///
/// Contributions to one step are averaged. Workers that do not wait for each other compute changes from values that the
/// others are changing: with each whole, those of more than 15 workers and a momentum of 0.1 overshoot further and
/// further. So all workers together move statistics as far as four at most.
pub(super) fn divisor(worker: &WorkerContext, optimizer: u32) -> f64 {
    divisor_of(worker.contributions(optimizer), worker.num_workers())
}

fn divisor_of(contributions: usize, workers: usize) -> f64 {
    (contributions as f64).max(workers as f64 / MOST_AT_ONCE)
}

const MOST_AT_ONCE: f64 = 4.0;

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a statistic that workers have moved in turns, each from the value before the turns of all others.
    fn moved(workers: usize, steps: usize, divisor: f64) -> f64 {
        let (mut servers, mut pulled) = (0.0, vec![0.0; workers]);
        for turn in 0..steps * workers {
            let of_worker = &mut pulled[turn % workers];
            servers += 0.1 * (1.0 - *of_worker) / divisor;
            *of_worker = servers;
        }
        servers
    }

    #[test]
    fn statistics_of_many_workers_become_those_of_the_data() {
        for workers in [1, 2, 4, 16, 64, 256] {
            let statistic = moved(workers, 100, divisor_of(1, workers));
            assert!((statistic - 1.0).abs() < 1e-3, "{workers} workers: {statistic}");
        }
        assert!(moved(64, 100, 1.0).abs() > 10.0);
    }

    #[test]
    fn few_workers_and_contributions_to_one_step_move_them_as_before() {
        assert_eq!([divisor_of(1, 1), divisor_of(1, 4), divisor_of(3, 3), divisor_of(20, 20)], [1.0, 1.0, 3.0, 20.0]);
    }
}
