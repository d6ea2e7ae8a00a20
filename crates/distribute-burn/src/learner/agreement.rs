//! The agreement of workers between steps.

use burn::train::Interrupter;
use distribute_collectives::ReduceOp;
use distribute_strategy::Strategy;
use distribute_values::{Axis, HostTensor, PerReplica, TensorStorage};

use crate::{Error, Result};

/// The state of one worker before a step, or the sum over all workers.
#[derive(Clone, Copy, Default)]
pub(super) struct Round {
    /// Rows of the next step, or items of a loader.
    pub(super) rows: u64,
    /// Batches that the chief has yet to validate: 1 if there is another.
    pub(super) batches: u64,
    /// 1 if training is to end early.
    pub(super) ends: u64,
}

/// The agreement of workers. In a single process it costs nothing.
pub(super) struct Agreement<'a> {
    pub(super) strategy: &'a Strategy,
    pub(super) interrupter: &'a Interrupter,
}

impl Agreement<'_> {
    /// Returns the sums over all workers, or `None` if a worker's interrupter has stopped it: then all workers' have.
    ///
    /// # Ordering
    /// All workers call this at the same point.
    ///
    /// # Errors
    /// [`Error::Learner`] if this worker's interrupter has an error, and the error of a worker that fails.
    pub(super) fn sum(&self, own: Round) -> Result<Option<Round>> {
        if let Some(error) = self.interrupter.error() {
            return Err(Error::Learner { what: "burn's learner".to_owned(), problem: error.to_string() });
        }
        let is_stopped = self.interrupter.should_stop();
        if self.strategy.topology().workers() == 1 {
            return Ok((!is_stopped).then_some(own));
        }
        let own = [own.rows, own.batches, own.ends, u64::from(is_stopped)];
        let nothing = HostTensor::new(&[own.len()], vec![0; own.len()])?;
        let mut values = vec![nothing; self.strategy.num_local_replicas()];
        values[0] = HostTensor::new(&[own.len()], own.to_vec())?;
        let sums = self.strategy.reduce(ReduceOp::Sum, &PerReplica::new(values), Axis::None)?.to_elements::<u64>()?;
        let [rows, batches, ends, stopped]: [u64; 4] = sums.try_into().map_err(|sums: Vec<u64>| Error::Learner {
            what: "the agreement of workers".to_owned(),
            problem: format!("there are {} sums, not 4", sums.len()),
        })?;
        if stopped > 0 {
            self.share_reason(is_stopped)?;
            return Ok(None);
        }
        Ok(Some(Round { rows, batches, ends }))
    }

    /// Stops this worker's interrupter with the reasons of those that were stopped.
    fn share_reason(&self, is_stopped: bool) -> Result<()> {
        let reason = self.interrupter.get_message().unwrap_or_else(|| "no reason was given".to_owned());
        let own = format!("worker {} was interrupted: {reason}\n", self.strategy.topology().worker());
        let texts = (0..self.strategy.num_local_replicas()).map(|local| {
            let text = if is_stopped && local == 0 { own.as_bytes() } else { b"\n" };
            HostTensor::new(&[text.len()], text.to_vec())
        });
        let texts = PerReplica::new(texts.collect::<Result<Vec<_>, _>>()?);
        let all = self.strategy.gather(&texts, 0)?.to_elements::<u8>()?;
        if !is_stopped {
            let all = String::from_utf8_lossy(&all);
            let reasons: Vec<&str> = all.lines().filter(|line| !line.is_empty()).collect();
            self.interrupter.stop(Some(&reasons.join("; ")));
        }
        Ok(())
    }
}
