//! Decisions that are the same on all workers.

use super::Session;
use crate::Result;
use crate::trainer::{Trainee, sums_of_all};

impl<T: Trainee> Session<'_, T> {
    /// Ends training after this epoch, because a worker requests it.
    pub(super) fn end(&mut self) {
        self.stop.get_or_insert_with(|| "another worker asked for it".to_owned());
    }

    /// Makes the decisions of callbacks at the end of an epoch the same everywhere: any worker can end training, and
    /// the chief sets the learning rate.
    pub(super) fn agree(&mut self) -> Result<()> {
        let (trainer, strategy) = (self.trainer, self.trainer.strategy());
        if strategy.topology().workers() == 1 {
            return Ok(());
        }
        let rate = if strategy.is_chief() { trainer.learning_rate() } else { 0.0 };
        let agreed = self.sum_over_workers(&[f64::from(u8::from(self.stop.is_some())), rate])?;
        if agreed[0] > 0.0 {
            self.end();
        }
        trainer.set_learning_rate(agreed[1]);
        Ok(())
    }

    /// Returns whether something `is` so on any worker. Every worker calls this.
    pub(super) fn is_on_any(&self, is: bool) -> Result<bool> {
        match self.trainer.strategy().topology().workers() {
            1 => Ok(is),
            _ => Ok(self.sum_over_workers(&[f64::from(u8::from(is))])?[0] > 0.0),
        }
    }

    fn sum_over_workers(&self, of_worker: &[f64]) -> Result<Vec<f64>> {
        let strategy = self.trainer.strategy();
        let mut of_replicas = vec![vec![0.0; of_worker.len()]; strategy.num_local_replicas()];
        // One replica of each worker; all of its ranks, if it has several.
        for of_rank in of_replicas.iter_mut().take(strategy.tensor_parallel()) {
            of_rank.copy_from_slice(of_worker);
        }
        sums_of_all(strategy, &of_replicas)
    }
}
