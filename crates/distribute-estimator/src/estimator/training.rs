//! The training loop: steps, and checkpoints, summaries and log messages between them.

use std::time::Instant;

use candle_core::Tensor;
use distribute_candle::{CandleContext, Model, Optimizer};
use distribute_input::{BoxError, Dataset, Features, InputPosition};
use distribute_strategy::Strategy;
use distribute_train::checkpoint::CheckpointManager;
use distribute_train::from_chief;
use distribute_train::preemption::PreemptionHandler;
use distribute_train::tensorboard::EventWriter;
use distribute_train::trainer::sums_of_all;
use distribute_types::ErrorClass;
use distribute_values::PerReplica;
use serde::{Deserialize, Serialize};

use super::config::Saving;
use super::spec::number;
use super::{Estimator, EstimatorModel, InputFn, Labels, Mode, RunConfig};
use crate::{Error, Result};

/// The end of a training call, which also ends at the end of its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// After this many further steps.
    Steps(u64),
    /// After this many steps in total, including earlier calls.
    MaxSteps(u64),
    /// Only at the end of the data.
    EndOfData,
}

/// The training of [`train_and_evaluate`](crate::train_and_evaluate): its data and its length.
///
/// # Source
/// `tf.estimator.TrainSpec`.
pub struct TrainSpec<'a> {
    pub(super) input: InputFn<'a, (Features, Labels)>,
    pub(super) max_steps: Option<u64>,
}

impl<'a> TrainSpec<'a> {
    /// Trains on the dataset that an input function returns, batched by the global batch.
    pub fn new(input: impl Fn() -> Result<Dataset<(Features, Labels)>, BoxError> + 'a) -> TrainSpec<'a> {
        TrainSpec { input: Box::new(input), max_steps: None }
    }

    /// Ends training after this many steps in total. Default: at the end of the data.
    pub fn max_steps(self, steps: u64) -> TrainSpec<'a> {
        TrainSpec { max_steps: Some(steps), ..self }
    }
}

/// A callback that is called after a checkpoint.
pub(super) type Saved<'a> = dyn FnMut(&Strategy, &mut CheckpointManager, bool) -> Result<()> + 'a;

/// The state of training apart from its model, its optimizer and its steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Standing {
    /// The number of completed passes over the data.
    passes: u64,
    /// The position in the current pass.
    position: Option<InputPosition>,
    /// Whether the call that wrote this had reached its end, and which end that was.
    pub(super) ended: bool,
    pub(super) max_steps: Option<u64>,
}

impl<M: EstimatorModel + Sync> Estimator<M> {
    /// Trains from the newest checkpoint on (parameters, optimizer, steps, position in the data). Returns the total
    /// number of steps.
    ///
    /// An interrupted pass over the data is finished first; after the end of the data, a call starts the next pass.
    /// Every worker must call this.
    ///
    /// # Errors
    /// [`Error::LossNotFinite`] if the loss is not finite; it is checked whenever it is logged or written, and before
    /// each checkpoint. [`Error::NoExamples`] if a pass over the data has no batch. [`Error::Train`] if a checkpoint or
    /// an event file fails, or with [`Preempted`](distribute_train::Error::Preempted) after a signal.
    /// [`Error::InputFunction`] and [`Error::Input`] if the data cannot be read, [`Error::Spec`] if the model's outputs
    /// do not fit, [`Error::Model`], [`Error::Candle`], [`Error::Strategy`] and [`Error::Values`] if a step or a
    /// collective fails.
    ///
    /// # Source
    /// `Estimator.train`.
    pub fn train(
        &self,
        input: impl Fn() -> Result<Dataset<(Features, Labels)>, BoxError>,
        until: Until,
    ) -> Result<u64> {
        self.train_with(&input, until, &mut |_, _, _| Ok(()))
    }

    /// Trains like [`train`](Estimator::train), and calls `saved` after each checkpoint, with whether it was the last.
    /// The checkpoint may still be being written.
    pub(super) fn train_with(
        &self,
        input: &dyn Fn() -> Result<Dataset<(Features, Labels)>, BoxError>,
        until: Until,
        saved: &mut Saved<'_>,
    ) -> Result<u64> {
        let strategy = self.train_strategy()?;
        strategy.report_failure_as(self.train_under(&strategy, input, until, saved), Error::failure_kind)
    }

    fn train_under(
        &self,
        strategy: &Strategy,
        input: &dyn Fn() -> Result<Dataset<(Features, Labels)>, BoxError>,
        until: Until,
        saved: &mut Saved<'_>,
    ) -> Result<u64> {
        strategy.check_joined()?;
        let data = input().map_err(Error::InputFunction)?;
        let global_batch = data.batch_size().unwrap_or(1);
        let data = strategy.distribute_dataset(&data)?;
        self.config.declare(strategy);
        strategy.declare("train, until", format!("{until:?}"));
        let model = self.model(strategy, Mode::Train)?;
        let optimizer = (self.optimizer)(&model)?;
        let mut run = Run::restored(&self.config, strategy, &model, &optimizer, self.checkpoints(), global_batch)?;
        // The first step compares settings too; a worker that has no step left would leave the others alone in it.
        strategy.run_with((), |context, ()| Ok::<_, Error>(context.compare_settings(Vec::new())?))?;
        let target = match until {
            Until::Steps(steps) => Some(run.steps.saturating_add(steps)),
            Until::MaxSteps(steps) => Some(steps),
            Until::EndOfData => None,
        };
        let max_steps = if let Until::MaxSteps(steps) = until { Some(steps) } else { None };
        if target.is_some_and(|target| run.steps >= target) {
            tracing::info!("there is nothing to train: {} steps are done already", run.steps);
            saved(strategy, &mut run.checkpoints, true)?;
            return Ok(run.steps);
        }
        let preemption = match &self.config.termination {
            Some(config) => Some(PreemptionHandler::install(strategy, config.clone())?),
            None => None,
        };
        // If an earlier call ended with the last batch of a pass, that pass has no batches left.
        let mut may_be_over = std::mem::take(&mut run.standing.ended);
        let position = run.standing.position.take();
        // A resumed pass may have no batches left.
        let mut is_whole_pass = position.is_none();
        let mut batches = match position {
            Some(position) => data.iter_from(&position)?,
            None => data.iter_epoch(run.standing.passes),
        };
        let mut last_losses: Option<Vec<Shares>> = None;
        loop {
            let Some(batch) = batches.next() else {
                run.standing.passes += 1;
                if std::mem::take(&mut may_be_over) {
                    (batches, is_whole_pass) = (data.iter_epoch(run.standing.passes), true);
                    continue;
                }
                if let Some(losses) = &last_losses {
                    run.finite_loss(losses)?;
                } else if is_whole_pass {
                    return Err(Error::NoExamples { what: "train on" });
                }
                tracing::info!("training ends with its data after step {}", run.steps);
                (run.standing.ended, run.standing.max_steps) = (true, max_steps);
                run.save(None)?;
                break;
            };
            may_be_over = false;
            let losses = step(strategy, &model, &optimizer, batch?, global_batch)?;
            run.steps += 1;
            let stopping = preemption.as_ref().filter(|preemption| preemption.should_stop());
            let reached = target.is_some_and(|target| run.steps >= target);
            let noticed = preemption.as_ref().is_some_and(PreemptionHandler::should_save);
            let saving = stopping.is_some() || noticed || reached || run.is_due()?;
            run.report(&losses, saving)?;
            if saving {
                if reached {
                    (run.standing.ended, run.standing.max_steps) = (true, max_steps);
                }
                run.save(Some(batches.position()?))?;
                if let Some(preemption) = stopping {
                    run.checkpoints.finish_everywhere(strategy)?;
                    return Err(preemption.ended(run.steps).into());
                }
                if reached {
                    break;
                }
                saved(strategy, &mut run.checkpoints, false)?;
            }
            last_losses = Some(losses);
        }
        run.checkpoints.finish_everywhere(strategy)?;
        run.close()?;
        saved(strategy, &mut run.checkpoints, true)?;
        Ok(run.steps)
    }
}

/// One replica's shares of the loss of a step. A replica without examples has its share of the penalty.
struct Shares {
    /// The sum over its examples, divided by the global batch.
    data: Tensor,
    penalty: Option<Tensor>,
    examples: usize,
}

/// Makes one step on all replicas. Returns the loss shares of this process's replicas.
fn step<M: EstimatorModel + Sync>(
    strategy: &Strategy,
    model: &Model<M>,
    optimizer: &Optimizer,
    batch: PerReplica<(Features, Labels)>,
    global_batch: usize,
) -> Result<Vec<Shares>> {
    let shares = strategy.run_with((model, optimizer, batch), |context, (model, optimizer, (features, labels))| {
        let spec = model.spec(&features, Some(&labels), Mode::Train)?;
        let (losses, penalty) = spec.losses(Mode::Train)?;
        let data = context.average_loss(&losses, global_batch)?;
        let penalty = penalty.map(|penalty| context.scale_regularization_loss(&penalty)).transpose()?;
        match &penalty {
            Some(penalty) => optimizer.minimize(context, &(&data + penalty)?)?,
            None => optimizer.minimize(context, &data)?,
        }
        let examples = if context.has_examples() { losses.elem_count() } else { 0 };
        Ok::<_, Error>(Shares { data: data.detach(), penalty: penalty.map(|penalty| penalty.detach()), examples })
    })?;
    Ok(shares.into_values())
}

/// Returns the loss of a step: the mean over the examples of its batch, which may have fewer than the global batch,
/// and the penalty. Every worker must call this.
fn loss_of(strategy: &Strategy, shares: &[Shares], global_batch: usize) -> Result<f64> {
    let own = shares.iter().map(|Shares { data, penalty, examples }| {
        let penalty = penalty.as_ref().map_or(Ok(0.0), number)?;
        Ok(vec![number(data)? * global_batch as f64, penalty, *examples as f64])
    });
    let whole = sums_of_all(strategy, &own.collect::<Result<Vec<_>>>()?)?;
    Ok(whole[0] / whole[2].max(1.0) + whole[1])
}

/// A training run in progress.
struct Run<'a, M> {
    config: &'a RunConfig,
    strategy: &'a Strategy,
    model: &'a Model<M>,
    optimizer: &'a Optimizer,
    checkpoints: CheckpointManager,
    global_batch: usize,
    standing: Standing,
    steps: u64,
    saved: Instant,
    events: Option<EventWriter>,
    /// The time and the step at which the speed was last logged.
    logged: (Instant, u64),
}

impl<'a, M> Run<'a, M> {
    /// Restores the newest checkpoint, or starts from the beginning.
    fn restored(
        config: &'a RunConfig,
        strategy: &'a Strategy,
        model: &'a Model<M>,
        optimizer: &'a Optimizer,
        mut checkpoints: CheckpointManager,
        global_batch: usize,
    ) -> Result<Run<'a, M>> {
        let (steps, standing) = checkpoints.restore(strategy, &[model, optimizer])?.unwrap_or_default();
        if steps > 0 {
            tracing::info!("resuming after step {steps}");
        }
        let events = match strategy.is_chief() && config.save_summary_steps > 0 {
            true => Some(EventWriter::create(&config.model_dir)?),
            false => None,
        };
        let now = Instant::now();
        let logged = (now, steps);
        Ok(Run {
            config,
            strategy,
            model,
            optimizer,
            checkpoints,
            global_batch,
            standing,
            steps,
            saved: now,
            events,
            logged,
        })
    }

    /// Returns whether a checkpoint is due after this step, with the same answer on all workers.
    fn is_due(&self) -> Result<bool> {
        match self.config.saving() {
            Saving::Steps(steps) => Ok(self.steps.is_multiple_of(steps)),
            Saving::Every(time) if self.strategy.topology().workers() == 1 => Ok(self.saved.elapsed() >= time),
            // Clocks differ, so the chief's decides; a broadcast in every step would be expensive.
            Saving::Every(time) if self.steps.is_multiple_of(self.config.steps_between_words()) => {
                from_chief(self.strategy, Ok(self.saved.elapsed() >= time))
            }
            Saving::Every(_) => Ok(false),
        }
    }

    fn save(&mut self, position: Option<InputPosition>) -> Result<()> {
        self.standing.position = position;
        self.checkpoints.save(self.strategy, self.steps, &[self.model, self.optimizer], &self.standing)?;
        self.saved = Instant::now();
        Ok(())
    }

    /// Writes and logs the loss and the speed when due. Also called before a save, since a model whose loss is not
    /// finite is not saved.
    fn report(&mut self, losses: &[Shares], saving: bool) -> Result<()> {
        let is_time = |every: u64| every > 0 && self.steps.is_multiple_of(every);
        let (write, say) = (is_time(self.config.save_summary_steps), is_time(self.config.log_step_count_steps));
        if !write && !say && !saving {
            return Ok(());
        }
        let step = self.steps;
        let loss = self.finite_loss(losses)?;
        let speed = (step - self.logged.1) as f64 / self.logged.0.elapsed().as_secs_f64().max(f64::MIN_POSITIVE);
        if say && self.strategy.is_chief() {
            tracing::info!("step {step}: loss {loss:.6}, {speed:.1} steps/s");
        }
        if let Some(events) = &mut self.events {
            if write {
                events.scalar("loss", step, loss)?;
            }
            if say {
                events.scalar("global_step/sec", step, speed)?;
            }
        }
        if say {
            self.logged = (Instant::now(), step);
        }
        self.flush()
    }

    /// Returns the loss of the last step, which must be finite. Every worker must call this.
    fn finite_loss(&self, losses: &[Shares]) -> Result<f64> {
        let loss = loss_of(self.strategy, losses, self.global_batch)?;
        if loss.is_finite() { Ok(loss) } else { Err(Error::LossNotFinite { loss, step: self.steps }) }
    }

    fn flush(&mut self) -> Result<()> {
        Ok(self.events.as_mut().map_or(Ok(()), EventWriter::flush)?)
    }

    /// Writes all events out.
    fn close(&mut self) -> Result<()> {
        Ok(self.events.take().map_or(Ok(()), EventWriter::close)?)
    }
}

#[cfg(test)]
mod tests {
    use candle_nn::VarBuilder;
    use distribute_candle::{CandleStrategy, Sgd};
    use distribute_input::Column;
    use distribute_strategy::MirroredStrategy;

    use super::super::EstimatorSpec;
    use super::*;

    /// A model whose examples have the loss 0, and whose penalty is 4.
    struct Penalized(Tensor);

    impl EstimatorModel for Penalized {
        fn spec(&self, features: &Features, _: Option<&Labels>, _: Mode) -> Result<EstimatorSpec> {
            let weight = self.0.sum_all()?;
            let losses = (weight.broadcast_as(features.examples())? * 0.0)?;
            Ok(EstimatorSpec::new().loss(&losses).penalty(&weight))
        }
    }

    #[test]
    fn the_loss_of_a_step_has_the_whole_penalty_if_a_replica_has_no_examples() {
        let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build().unwrap();
        let build = |vb: VarBuilder<'static>| {
            Ok(Penalized(vb.get_with_hints(1, "weight", candle_nn::init::Init::Const(4.0))?))
        };
        let model = strategy.scope(build).unwrap();
        let optimizer = Sgd::new(0.0).build(&model).unwrap();
        let features = Features::new([("x", Column::from(vec![1.0f32]))]).unwrap();
        let data = Dataset::from_tensor_slices((features, Column::from(vec![1.0f32]))).batch(1);
        let data = strategy.distribute_dataset(&data).unwrap();
        let batch = data.iter().next().unwrap().unwrap();
        assert_eq!(batch.examples(), Some(&[true, false][..]));
        let losses = step(&strategy, &model, &optimizer, batch, 1).unwrap();
        assert_eq!(loss_of(&strategy, &losses, 1).unwrap(), 4.0);
    }

    /// A model whose examples have the loss 1, whatever its weight.
    struct Constant(Tensor);

    impl EstimatorModel for Constant {
        fn spec(&self, features: &Features, _: Option<&Labels>, _: Mode) -> Result<EstimatorSpec> {
            let weight = self.0.sum_all()?;
            let loss = ((&weight - weight.detach())? + 1.0)?;
            Ok(EstimatorSpec::new().loss(&loss.broadcast_as(features.examples())?))
        }
    }

    #[test]
    fn the_reported_loss_of_a_short_batch_is_the_mean_over_its_examples() {
        let folder = tempfile::tempdir().unwrap();
        for replicas in [1, 2] {
            let devices: Vec<String> = (0..replicas).map(|index| format!("CPU:{index}")).collect();
            let strategy = MirroredStrategy::builder().devices(devices).build().unwrap();
            let folder = folder.path().join(replicas.to_string());
            let config = RunConfig::new(&folder).save_summary_steps(2).train_distribute(&strategy);
            let build = |_: Mode, vb: VarBuilder<'static>| {
                Ok(Constant(vb.get_with_hints(1, "weight", candle_nn::init::Init::Const(4.0))?))
            };
            let estimator = Estimator::new(build, |model| Sgd::new(0.0).build(model), config).unwrap();
            let input = || {
                let features = Features::new([("x", Column::from(vec![1.0f32; 3]))])?;
                Ok(Dataset::from_tensor_slices((features, Column::from(vec![1.0f32; 3]))).batch(2).repeat_forever())
            };
            estimator.train(input, Until::Steps(2)).unwrap();
            let entries = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
            let is_events = |path: &std::path::PathBuf| path.to_string_lossy().contains("tfevents");
            let events = std::fs::read(entries.into_iter().find(is_events).unwrap()).unwrap();
            // The name, and the value as a fixed32 of field 2.
            let at = events.windows(4).position(|bytes| bytes == b"loss").unwrap();
            let after = &events[at..(at + 64).min(events.len())];
            assert!(after.windows(5).any(|bytes| bytes[0] == 0x15 && bytes[1..] == 1f32.to_le_bytes()), "{after:?}");
        }
    }
}
