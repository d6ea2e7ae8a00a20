//! Training with evaluation, in one process or as the tasks of a cluster.

use std::time::Instant;

use distribute_cluster::{ClusterResolver, TaskType, TfConfigResolver};
use distribute_train::from_chief;

use super::{Estimator, EstimatorModel, EvalSpec, Scores, TrainSpec, Until};
use crate::{Error, Result};

/// Trains and evaluates checkpoints meanwhile. Returns the scores of the last one if this process has evaluated.
///
/// Without TF_CONFIG, or with one task in it, training pauses for an evaluation after a checkpoint, at most as often as
/// [`EvalSpec::throttle`] allows, and ends with one. With several tasks, chief and workers train under
/// [`RunConfig::train_distribute`](crate::RunConfig::train_distribute), and the evaluator evaluates the newest
/// checkpoint in `model_dir`, which it must be able to read, until it has evaluated the last one. A checkpoint that was
/// there before the evaluator, and was saved at the end of the data, may be an earlier job's: it is the last one only
/// if no other follows within the time of [`RunConfig::wait_for_checkpoints`](crate::RunConfig::wait_for_checkpoints).
///
/// # Errors
/// The errors of [`Estimator::train`] and [`Estimator::evaluate`]; [`Error::Cluster`] if TF_CONFIG is invalid;
/// [`Error::Configuration`] for a cluster with parameter servers, or a strategy that does not span the workers;
/// [`distribute_train::Error::NoNewCheckpoint`] if an evaluator finds no new checkpoint in time.
///
/// # Examples
/// ```
/// use distribute_candle::Sgd;
/// use distribute_estimator::{
///     Error, EvalSpec, FeatureColumns, LinearRegressor, Numeric, RunConfig, TrainSpec, train_and_evaluate,
/// };
/// use distribute_input::{Column, Dataset, Features};
///
/// # let folder = tempfile::tempdir().expect("a folder can be made");
/// # let model_dir = folder.path().join("squares");
/// let columns = FeatureColumns::new().with(Numeric::new("x").bucketized([2.0, 4.0, 6.0]));
/// let squares = LinearRegressor::new(&columns).build(|model| Sgd::new(0.2).build(model), RunConfig::new(model_dir))?;
/// let input = || {
///     let features = Features::new([("x", Column::from(vec![1, 3, 5, 7]))])?;
///     Ok(Dataset::from_tensor_slices((features, Column::from(vec![1., 9., 25., 49.]))).batch(4))
/// };
/// let train = TrainSpec::new(|| Ok(input()?.repeat_forever())).max_steps(100);
/// let scores = train_and_evaluate(&squares, &train, &EvalSpec::new(input))?;
/// assert!(scores.is_some_and(|scores| scores["loss"] < 1.0));
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `tf.estimator.train_and_evaluate`.
pub fn train_and_evaluate<M: EstimatorModel + Sync>(
    estimator: &Estimator<M>,
    train: &TrainSpec<'_>,
    eval: &EvalSpec<'_>,
) -> Result<Option<Scores>> {
    train_and_evaluate_as(&TfConfigResolver::from_env()?, estimator, train, eval)
}

/// Runs [`train_and_evaluate`] as the task that a resolver describes instead of TF_CONFIG.
///
/// # Errors
/// The errors of [`train_and_evaluate`] occur in the same cases.
pub fn train_and_evaluate_as<M: EstimatorModel + Sync>(
    cluster: &dyn ClusterResolver,
    estimator: &Estimator<M>,
    train: &TrainSpec<'_>,
    eval: &EvalSpec<'_>,
) -> Result<Option<Scores>> {
    let (spec, task) = (cluster.cluster_spec()?, cluster.task());
    let wrong = |problem: String| Error::Configuration { what: "train_and_evaluate", problem };
    if spec.num_tasks(TaskType::Ps) > 0 {
        let problem = "the cluster has parameter servers, and an Estimator trains without; name chief, worker and \
                       evaluator tasks only, and give RunConfig::train_distribute a MultiWorkerMirroredStrategy";
        return Err(wrong(problem.to_owned()));
    }
    let trainers = spec.num_tasks(TaskType::Chief) + spec.num_tasks(TaskType::Worker);
    if let Some(task) = task.filter(|task| task.kind == TaskType::Evaluator) {
        let workers = estimator.eval_strategy()?.topology().workers();
        if workers > 1 {
            return Err(wrong(format!(
                "{task} is alone, but the strategy of RunConfig::eval_distribute has {workers} workers; give one of a \
                 single process"
            )));
        }
        return estimator.evaluate_until_the_end(train.max_steps, eval).map(Some);
    }
    let workers = estimator.train_strategy()?.topology().workers();
    if trainers > 1 && workers != trainers {
        return Err(wrong(format!(
            "{trainers} tasks of the cluster train, but the strategy of RunConfig::train_distribute has {workers}; \
             give a MultiWorkerMirroredStrategy on all of them"
        )));
    }
    if trainers > 1 || spec.num_tasks(TaskType::Evaluator) > 0 {
        let until = train.max_steps.map_or(Until::EndOfData, Until::MaxSteps);
        estimator.train_with(&*train.input, until, &mut |_, _, _| Ok(()))?;
        return Ok(None);
    }
    here(estimator, train, eval)
}

/// Trains and evaluates in this process, and in those that train with it.
fn here<M: EstimatorModel + Sync>(
    estimator: &Estimator<M>,
    train: &TrainSpec<'_>,
    eval: &EvalSpec<'_>,
) -> Result<Option<Scores>> {
    let (mut evaluated, mut scores) = (None::<Instant>, None);
    let until = train.max_steps.map_or(Until::EndOfData, Until::MaxSteps);
    estimator.train_with(&*train.input, until, &mut |strategy, checkpoints, last| {
        let due = last || evaluated.is_none_or(|evaluated| evaluated.elapsed() >= eval.throttle);
        // Clocks of workers differ, so the chief's decides.
        if from_chief(strategy, Ok::<_, Error>(due))? {
            checkpoints.finish_everywhere(strategy)?;
            evaluated = Some(Instant::now());
            scores = Some(estimator.evaluate(eval)?);
        }
        Ok(())
    })?;
    Ok(scores)
}
