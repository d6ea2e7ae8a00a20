//! How far one worker moves running statistics, which all workers do.

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Tensor};
use distribute_parameter_server::WorkerContext;

use crate::Result;

/// Keeps changes of statistics from the servers that are not finite: a sum with one has no value ever after.
#[derive(Default)]
pub(super) struct Changes {
    /// Whether a warning has named a statistic.
    warned: AtomicBool,
}

impl Changes {
    /// Returns what is sent for a change that layers have made to a statistic, and whether that is the change. Zeros
    /// are sent for one that is not finite, since a function makes the same changes whenever it runs.
    pub(super) fn sent(&self, name: &str, change: Tensor) -> Result<(Tensor, bool)> {
        if is_finite(&change)? {
            return Ok((change, true));
        }
        if !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "{name} became NaN or infinite on this worker and stays as it was on the servers: candle's batch_norm \
                 has no variance for a batch of one row, and f16 on the wire has no numbers above 65504; give each \
                 batch two rows or more, and send bf16"
            );
        }
        Ok((change.zeros_like()?, false))
    }
}

/// Returns whether all elements are finite.
fn is_finite(tensor: &Tensor) -> Result<bool> {
    // Zero times infinity is NaN, like zero times NaN.
    Ok((tensor * 0.0)?.sum_all()?.to_dtype(DType::F32)?.to_scalar::<f32>()? == 0.0)
}

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
    use candle_core::Device;

    use super::*;

    #[test]
    fn changes_that_are_not_finite_are_sent_as_zeros() {
        let changes = Changes::default();
        for (number, is_sent) in [(1e38, true), (-0.0, true), (f32::NAN, false), (f32::NEG_INFINITY, false)] {
            let change = Tensor::new(&[1.0, number], &Device::Cpu).unwrap();
            let (sent, as_made) = changes.sent("mean", change).unwrap();
            let expected = if is_sent { [1.0, number] } else { [0.0; 2] };
            assert_eq!((sent.to_vec1::<f32>().unwrap(), as_made), (expected.to_vec(), is_sent));
        }
    }

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
