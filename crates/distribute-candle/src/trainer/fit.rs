//! Epochs of training.

use distribute_train::preemption::{PreemptionHandler, TerminationConfig};

use super::*;

/// How long to train, on what, and what happens meanwhile.
///
/// # Examples
/// ```
/// use distribute_candle::Fit;
/// use distribute_train::callbacks::{EarlyStopping, TensorBoard};
/// let fit = Fit::epochs(20).callback(EarlyStopping::new("loss").patience(2)).callback(TensorBoard::new("runs/1"));
/// ```
#[derive(Default)]
pub struct Fit {
    epochs: u32,
    validation: Option<Dataset<(Tensor, Tensor)>>,
    callbacks: Vec<Box<dyn Callback>>,
    checkpoints: Option<(CheckpointManager, u64)>,
    termination: Option<TerminationConfig>,
    title: Option<String>,
}

impl Fit {
    /// So many passes over the data.
    pub fn epochs(epochs: u32) -> Fit {
        Fit { epochs, ..Fit::default() }
    }

    /// Evaluates this after each epoch, under names that begin with `val_`.
    pub fn validation(mut self, data: &Dataset<(Tensor, Tensor)>) -> Fit {
        self.validation = Some(data.clone());
        self
    }

    /// One more callback; they are called in the order in which they were given.
    pub fn callback(mut self, callback: impl Callback + 'static) -> Fit {
        self.callbacks.push(Box::new(callback));
        self
    }

    /// Saves at the end of each epoch and, where `every` is not 0, after so many steps; goes on from the newest checkpoint there
    /// is, in the middle of an epoch too.
    ///
    /// # Source
    /// `tf.keras.callbacks.BackupAndRestore`.
    pub fn checkpoints(mut self, checkpoints: CheckpointManager, every: u64) -> Fit {
        self.checkpoints = Some((checkpoints, every));
        self
    }

    /// When a worker is told to stop, all stop after the same step; with [`checkpoints`](Fit::checkpoints), they save first.
    /// [`fit`](Trainer::fit) then returns [`Preempted`](distribute_train::Error::Preempted).
    pub fn stop_on(mut self, config: TerminationConfig) -> Fit {
        self.termination = Some(config);
        self
    }

    /// Shows progress under this title.
    pub fn progress(mut self, title: impl Into<String>) -> Fit {
        self.title = Some(title.into());
        self
    }
}

/// Where a training stands, besides its model and optimizer.
#[derive(Default, Serialize, Deserialize)]
struct Standing {
    epochs_done: u32,
    position: Option<InputPosition>,
    /// Of the epoch under way, over all replicas.
    sums: Vec<f64>,
    history: History,
}

impl<M: Module + Sync> Trainer<M> {
    /// Trains; the losses and metrics of each epoch, those of an earlier run that it goes on from included.
    ///
    /// # Errors
    /// Those of the data, of candle, of callbacks, of checkpoints, and of the collectives.
    pub fn fit(&mut self, data: &Dataset<(Tensor, Tensor)>, mut fit: Fit) -> Result<History> {
        let global_batch = data.batch_size().unwrap_or(1);
        let train = self.strategy.distribute_dataset(data)?;
        let validation = fit.validation.as_ref().map(|data| self.strategy.distribute_dataset(data)).transpose()?;
        let (mut steps, mut standing) = (0, Standing::default());
        if let Some((checkpoints, _)) = &mut fit.checkpoints
            && let Some(restored) = checkpoints.restore(&self.strategy, &[&self.model, &self.optimizer])?
        {
            (steps, standing) = restored;
        }
        let preemption = match fit.termination.take() {
            Some(config) => Some(PreemptionHandler::install(&self.strategy, config)?),
            None => None,
        };
        let mut progress = self.show(&fit, train.steps())?;
        for epoch in standing.epochs_done + 1..=fit.epochs {
            let mut learning_rate = self.optimizer.learning_rate();
            fit.callbacks.iter_mut().try_for_each(|callback| callback.epoch_begin(epoch, &mut learning_rate))?;
            self.optimizer.set_learning_rate(learning_rate);
            if let Some(progress) = &mut progress {
                progress.epoch(epoch);
            }
            let mut sums = self.zeros();
            if self.strategy.is_chief() {
                // What was seen before it was stopped counts once.
                sums[0].iter_mut().zip(&standing.sums).for_each(|(sum, before)| *sum += before);
            }
            let mut batches = match standing.position.take() {
                Some(position) => train.iter_from(&position)?,
                // By its number, so that a training that goes on sees the data that it would have seen.
                None => train.iter_epoch(u64::from(epoch) - 1),
            };
            let mut step = 0;
            while let Some(batch) = batches.next() {
                add(&mut sums, self.step(batch?, global_batch)?);
                (steps, step) = (steps + 1, step + 1);
                if let Some(progress) = &mut progress {
                    let (loss, count) =
                        sums.iter().fold((0.0, 0.0), |(loss, count), sums| (loss + sums[0], count + sums[1]));
                    progress.step(step, global_batch as u64, &[("loss", loss / f64::max(count, 1.0))]);
                }
                let stopping = preemption.as_ref().filter(|preemption| preemption.should_stop());
                if let Some((checkpoints, every)) = &mut fit.checkpoints
                    && (stopping.is_some() || (*every > 0 && steps % *every == 0))
                {
                    (standing.position, standing.sums) = (Some(batches.position()?), self.whole(&sums)?);
                    checkpoints.save(&self.strategy, steps, &[&self.model, &self.optimizer], &standing)?;
                }
                if let Some(preemption) = stopping {
                    if let Some((checkpoints, _)) = &mut fit.checkpoints {
                        checkpoints.finish()?;
                    }
                    return Err(preemption.ended(steps).into());
                }
            }
            let mut values = self.results(&sums)?;
            if let Some(validation) = &validation {
                let of_validation = self.evaluate_distributed(validation)?;
                values.extend(of_validation.into_iter().map(|(name, value)| (format!("val_{name}"), value)));
            }
            if let Some(progress) = &mut progress {
                let shown: Vec<(&str, f64)> = values.iter().map(|(name, value)| (name.as_str(), *value)).collect();
                progress.end_epoch(&shown);
            }
            standing.history.push(epoch, &values);
            let stop = self.end_epoch(epoch, &values, &mut fit.callbacks)?;
            (standing.epochs_done, standing.position, standing.sums) = (epoch, None, Vec::new());
            if let Some((checkpoints, _)) = &mut fit.checkpoints {
                checkpoints.save(&self.strategy, steps, &[&self.model, &self.optimizer], &standing)?;
            }
            if let Some(why) = stop {
                tracing::info!("training ends after epoch {epoch}: {why}");
                break;
            }
        }
        if let Some((checkpoints, _)) = &mut fit.checkpoints {
            checkpoints.finish()?;
        }
        Ok(standing.history)
    }

    /// One step of all replicas; the sums of those of this process.
    fn step(&self, batch: PerReplica<(Tensor, Tensor)>, global_batch: usize) -> Result<PerReplica<Vec<f64>>> {
        self.strategy.run_with((&self.model, &self.optimizer, batch), |context, (model, optimizer, (x, y))| {
            let outputs = model.forward(&x)?;
            let losses = self.loss.per_example(&outputs, &y)?;
            let sums = self.sums_of(&outputs.detach(), &y, &losses.detach())?;
            optimizer.minimize(context, &context.average_loss(&losses, global_batch)?)?;
            Ok(sums)
        })
    }

    /// Calls the callbacks; why the training ends, if it does.
    fn end_epoch(
        &self,
        epoch: u32,
        values: &[(String, f64)],
        callbacks: &mut [Box<dyn Callback>],
    ) -> Result<Option<String>> {
        let (mut learning_rate, mut stop) = (self.optimizer.learning_rate(), None);
        for callback in callbacks {
            let is_chief = self.strategy.is_chief();
            let mut end = EpochEnd { epoch, values, is_chief, learning_rate: &mut learning_rate, stop: &mut stop };
            callback.epoch_end(&mut end)?;
        }
        self.optimizer.set_learning_rate(learning_rate);
        Ok(stop)
    }

    fn show(&self, fit: &Fit, steps: Option<usize>) -> Result<Option<Progress>> {
        let Some(title) = &fit.title else { return Ok(None) };
        let strategy = &self.strategy;
        let options = progress::Options {
            title: format!("{title} · {} · {} params", strategy.describe(), self.model.num_parameters()),
            epochs: fit.epochs,
            steps_per_epoch: steps.map(|steps| steps as u64),
            task: strategy.coordination().map_or("worker:0".to_owned(), |c| c.membership().task().to_string()),
            is_chief: strategy.is_chief(),
        };
        Ok(Some(Progress::from_env(options)?))
    }
}
