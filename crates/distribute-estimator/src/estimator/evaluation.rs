//! Evaluation and prediction with a checkpoint.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use candle_core::Tensor;
use distribute_candle::Model;
use distribute_input::{BoxError, Dataset, Features, InputOptions};
use distribute_strategy::Strategy;
use distribute_train::checkpoint::Snapshot;
use distribute_train::from_chief;
use distribute_train::tensorboard::EventWriter;
use distribute_train::trainer::compare_settings;
use distribute_types::ErrorClass;
use distribute_values::PerReplica;

use super::spec::{Measure, Sums};
use super::{Estimator, EstimatorModel, InputFn, Labels, Mode, Scores};
use crate::{Error, Result};

/// An evaluation: its data, and when [`train_and_evaluate`](crate::train_and_evaluate) runs it.
///
/// # Source
/// `tf.estimator.EvalSpec`.
pub struct EvalSpec<'a> {
    pub(super) input: InputFn<'a, (Features, Labels)>,
    steps: Option<usize>,
    name: Option<String>,
    pub(super) start_delay: Duration,
    pub(super) throttle: Duration,
}

impl<'a> EvalSpec<'a> {
    /// Evaluates the dataset that an input function returns, batched by the global batch.
    pub fn new(input: impl Fn() -> Result<Dataset<(Features, Labels)>, BoxError> + 'a) -> EvalSpec<'a> {
        let (start_delay, throttle) = (Duration::from_secs(120), Duration::from_secs(600));
        EvalSpec { input: Box::new(input), steps: None, name: None, start_delay, throttle }
    }

    /// Evaluates this many batches. Default: all.
    pub fn steps(self, steps: usize) -> EvalSpec<'a> {
        EvalSpec { steps: Some(steps), ..self }
    }

    /// Writes scores to `eval_NAME` instead of `eval`, to distinguish several evaluations.
    pub fn name(self, name: impl Into<String>) -> EvalSpec<'a> {
        EvalSpec { name: Some(name.into()), ..self }
    }

    /// Sets the time before an evaluator task's first evaluation. Default: 2 minutes.
    pub fn start_delay(self, delay: Duration) -> EvalSpec<'a> {
        EvalSpec { start_delay: delay, ..self }
    }

    /// Sets the minimum time between the starts of two evaluations, except before the last one. Default: 10 minutes.
    pub fn throttle(self, time: Duration) -> EvalSpec<'a> {
        EvalSpec { throttle: time, ..self }
    }
}

/// The sums of this process's replicas.
struct Totals {
    replicas: Vec<Vec<f64>>,
    measures: Vec<Measure>,
}

impl<M: EstimatorModel + Sync> Estimator<M> {
    /// Computes the loss and the metrics of the newest checkpoint, and writes them to `model_dir/eval` for TensorBoard.
    ///
    /// They are means over all examples, independent of batch boundaries. Every worker must call this, with the same
    /// [`steps`](EvalSpec::steps) and metrics of the same names, which are compared.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if nothing was trained, [`Error::NoExamples`] if the dataset is empty,
    /// [`Error::InputFunction`] and [`Error::Input`] if the data cannot be read, [`Error::Spec`] if the model's outputs
    /// do not fit, [`Error::Train`] if workers differ in what is compared, [`Error::Model`], [`Error::Candle`],
    /// [`Error::Strategy`] and [`Error::Values`] if the forward pass or a collective fails.
    ///
    /// # Source
    /// `Estimator.evaluate`.
    pub fn evaluate(&self, spec: &EvalSpec<'_>) -> Result<Scores> {
        self.evaluated(spec, None).map(|(_, scores)| scores)
    }

    /// Evaluates the checkpoint in a folder such as `model_dir/step-00000500`; see [`evaluate`](Estimator::evaluate).
    ///
    /// # Errors
    /// The errors of [`evaluate`](Estimator::evaluate) occur in the same cases.
    pub fn evaluate_checkpoint(&self, spec: &EvalSpec<'_>, checkpoint: impl AsRef<Path>) -> Result<Scores> {
        self.evaluated(spec, Some(checkpoint.as_ref())).map(|(_, scores)| scores)
    }

    /// Evaluates a checkpoint; returns what was read from it, and the scores.
    pub(super) fn evaluated(&self, spec: &EvalSpec<'_>, checkpoint: Option<&Path>) -> Result<(Snapshot, Scores)> {
        let strategy = self.eval_strategy()?;
        told(&strategy, self.evaluated_under(&strategy, spec, checkpoint))
    }

    fn evaluated_under(
        &self,
        strategy: &Strategy,
        spec: &EvalSpec<'_>,
        checkpoint: Option<&Path>,
    ) -> Result<(Snapshot, Scores)> {
        let data = strategy.distribute_dataset(&(spec.input)().map_err(Error::InputFunction)?)?;
        let steps = spec.steps.map_or_else(|| "all".to_owned(), |steps| steps.to_string());
        compare_settings(strategy, &[format!("evaluate, steps: {steps}")])?;
        let (model, snapshot) = self.restored(strategy, Mode::Eval, checkpoint)?;
        let mut totals: Option<Totals> = None;
        for batch in data.iter().take(spec.steps.unwrap_or(usize::MAX)) {
            let of_step = strategy.run_with((&model, batch?), |context, (model, (features, labels))| {
                let mut sums = model.spec(&features, Some(&labels), Mode::Eval)?.sums()?;
                if !context.has_examples() {
                    sums.sums.fill(0.0);
                }
                Ok::<_, Error>(sums)
            })?;
            totals = Some(Totals::with(totals, of_step)?);
        }
        let totals = totals.ok_or(Error::NoExamples { what: "evaluate" })?;
        compare_settings(strategy, &[format!("evaluate, metrics: [{}]", names(&totals.measures).join(", "))])?;
        let whole = distribute_train::trainer::sums_of_all(strategy, &totals.replicas)?;
        let loss = if whole[1] == 0.0 { 0.0 } else { whole[0] / whole[1] };
        let mut scores: Scores = Measure::results(&totals.measures, &whole[2..]).into_iter().collect();
        scores.insert("loss".to_owned(), loss);
        let writes = self.config.is_chief() && strategy.is_chief();
        let written = if writes { self.write(spec, snapshot.step(), &scores) } else { Ok(()) };
        from_chief(strategy, written)?;
        scores.insert("global_step".to_owned(), snapshot.step() as f64);
        Ok((snapshot, scores))
    }

    /// Returns predictions by name, with one row per element of a batched dataset, in order. Every worker must call
    /// this, with predictions of the same names, which are compared.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if nothing was trained, [`Error::NoExamples`] if the dataset is empty,
    /// [`Error::InputFunction`] and [`Error::Input`] if the data cannot be read, [`Error::Spec`] if the model's outputs
    /// do not fit, [`Error::Train`] if workers differ in what is compared, [`Error::Model`], [`Error::Candle`],
    /// [`Error::Strategy`] and [`Error::Values`] if the forward pass or a collective fails.
    ///
    /// # Source
    /// `Estimator.predict`.
    pub fn predict(&self, input: impl Fn() -> Result<Dataset<Features>, BoxError>) -> Result<BTreeMap<String, Tensor>> {
        let strategy = self.eval_strategy()?;
        told(&strategy, self.predicted(&strategy, &input))
    }

    fn predicted(
        &self,
        strategy: &Strategy,
        input: &dyn Fn() -> Result<Dataset<Features>, BoxError>,
    ) -> Result<BTreeMap<String, Tensor>> {
        // All workers read the data together, so that rows are given to replicas in order, and outputs are returned in
        // it.
        let options = InputOptions::default().deterministic(true);
        let data = strategy.distribute_dataset_with(&input().map_err(Error::InputFunction)?, options)?;
        let (model, _) = self.restored(strategy, Mode::Predict, None)?;
        let mut parts: BTreeMap<String, Vec<Tensor>> = BTreeMap::new();
        let mut names: Option<Vec<String>> = None;
        for batch in &data {
            let of_step = strategy.run_with((&model, batch?), |_, (model, features)| {
                model.spec(&features, None, Mode::Predict)?.into_predictions()
            })?;
            let examples: Vec<bool> = (0..of_step.len()).map(|local| of_step.has_examples(local)).collect();
            let named = by_name(of_step.into_values())?;
            let of_batch: Vec<String> = named.iter().map(|(name, _)| name.clone()).collect();
            match &names {
                Some(names) if *names != of_batch => {
                    let problem = "its predictions differ from batch to batch; give the same for every one".to_owned();
                    return Err(Error::Spec { mode: Mode::Predict, problem });
                }
                Some(_) => {}
                None => {
                    compare_settings(strategy, &[format!("predict, names: [{}]", of_batch.join(", "))])?;
                    names = Some(of_batch);
                }
            }
            for (name, values) in named {
                let values = PerReplica::new(values).with_examples(&examples);
                parts.entry(name).or_default().push(strategy.gather(&values, 0)?);
            }
        }
        if parts.is_empty() {
            return Err(Error::NoExamples { what: "predict" });
        }
        parts.into_iter().map(|(name, parts)| Ok((name, Tensor::cat(&parts, 0)?))).collect()
    }

    /// Builds the model with the values of a checkpoint, or of the newest. The folder is not changed, since another
    /// process may be writing to it.
    fn restored(&self, strategy: &Strategy, mode: Mode, checkpoint: Option<&Path>) -> Result<(Model<M>, Snapshot)> {
        let model = self.model(strategy, mode)?;
        let (checkpoints, parts) = (self.checkpoints(), [&model as _]);
        let snapshot = match checkpoint {
            Some(checkpoint) => checkpoints.restore_from(strategy, checkpoint, &parts)?,
            None => {
                let found = checkpoints.restore_newest(strategy, &parts)?;
                found.ok_or_else(|| Error::NoCheckpoint { folder: self.config.model_dir.clone() })?
            }
        };
        Ok((model, snapshot))
    }

    fn write(&self, spec: &EvalSpec<'_>, step: u64, scores: &Scores) -> Result<()> {
        let folder = spec.name.as_ref().map_or("eval".to_owned(), |name| format!("eval_{name}"));
        let mut events = EventWriter::create(self.config.model_dir.join(folder))?;
        for (name, value) in scores {
            events.scalar(name, step, *value)?;
        }
        Ok(events.close()?)
    }
}

/// Reports a failure of this worker to the others, which would wait for it in their next step.
fn told<R>(strategy: &Strategy, outcome: Result<R>) -> Result<R> {
    match outcome {
        // All workers have these, and may continue together.
        Err(Error::NoCheckpoint { .. } | Error::NoExamples { .. } | Error::Train(_)) => outcome,
        outcome => strategy.report_failure_as(outcome, Error::failure_kind),
    }
}

impl Totals {
    /// Adds the sums of another step.
    fn with(totals: Option<Totals>, of_step: PerReplica<Sums>) -> Result<Totals> {
        let of_step = of_step.into_values();
        let mut totals = totals.unwrap_or_else(|| Totals {
            replicas: of_step.iter().map(|sums| vec![0.0; sums.sums.len()]).collect(),
            measures: of_step.first().map(|sums| sums.measures.clone()).unwrap_or_default(),
        });
        for (all, Sums { sums, measures }) in totals.replicas.iter_mut().zip(of_step) {
            if all.len() != sums.len() || names(&totals.measures) != names(&measures) {
                let problem = "its metrics differ from batch to batch; give the same for every one".to_owned();
                return Err(Error::Spec { mode: Mode::Eval, problem });
            }
            all.iter_mut().zip(sums).for_each(|(sum, more)| *sum += more);
        }
        Ok(totals)
    }
}

fn names(measures: &[Measure]) -> Vec<&str> {
    measures.iter().map(Measure::name).collect()
}

/// Collects each prediction's values over the replicas.
fn by_name(replicas: Vec<Vec<(String, Tensor)>>) -> Result<Vec<(String, Vec<Tensor>)>> {
    let mut named: Vec<(String, Vec<Tensor>)> = Vec::new();
    for (replica, predictions) in replicas.into_iter().enumerate() {
        for (index, (name, values)) in predictions.into_iter().enumerate() {
            if replica == 0 {
                named.push((name, vec![values]));
            } else if let Some((_, all)) = named.get_mut(index).filter(|(known, _)| *known == name) {
                all.push(values);
            } else {
                let problem =
                    format!("prediction {name:?} is not made on every replica; give the same for every batch");
                return Err(Error::Spec { mode: Mode::Predict, problem });
            }
        }
    }
    Ok(named)
}
