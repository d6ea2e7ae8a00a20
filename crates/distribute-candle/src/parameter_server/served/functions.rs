//! The functions of workers: a step, a part of an evaluation, the description of a dataset.

use std::collections::BTreeSet;

use candle_core::{ModuleT, Tensor};
use distribute_input::{Cardinality, Dataset, DatasetIter, InputContext};
use distribute_parameter_server::{EvaluationShard, Program, WorkerContext};
use distribute_strategy::Strategy;
use distribute_train::trainer;
use distribute_values::PerReplica;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::ServedTraining;
use crate::trainer::{of_examples, weighted_by_class};
use crate::{CandleContext, CandleWorker, Error, Examples, ReplicatedModel, Result, WorkerModel};

pub(super) const STEP: &str = "served.step";
pub(super) const EVALUATE: &str = "served.evaluate";
pub(super) const DESCRIBE: &str = "served.describe";

/// The name under which a worker keeps the model.
const MODEL: &str = "served";

/// The arguments of a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Step {
    /// The optimizer of the coordinator's model.
    pub(super) optimizer: u32,
    /// The name of the dataset.
    pub(super) dataset: String,
    /// The number of the call of `fit`; each begins with new iterators.
    pub(super) run: u64,
    /// The number of a worker's first pass over its data.
    pub(super) first_pass: u64,
    /// The number of the next pass of a worker that has begun already and reads its data anew. It rises with each step,
    /// and so faster than the pass of any worker.
    pub(super) next_pass: u64,
    /// Workers that are known to have made a step of this run.
    pub(super) begun: BTreeSet<usize>,
    pub(super) class_weights: Vec<f32>,
}

/// The result of a step.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Made {
    /// The index of the worker that has made it.
    pub(super) worker: usize,
    pub(super) sums: Vec<f64>,
}

/// A worker's place in a dataset.
struct Reading {
    run: u64,
    dataset: Dataset<Examples>,
    pass: u64,
    batches: DatasetIter<Examples>,
}

pub(super) fn add<M: ModuleT + Send + Sync + 'static>(program: Program, training: &ServedTraining<M>) -> Program {
    let [step, evaluate, describe] = [(); 3].map(|()| training.clone());
    program
        .function(STEP, move |worker: &WorkerContext, arguments: Step| step.step(worker, &arguments))
        .function(EVALUATE, move |worker: &WorkerContext, (part, name): (EvaluationShard, String)| {
            evaluate.evaluate(worker, part, &name)
        })
        .function(DESCRIBE, move |worker: &WorkerContext, (_, name): (EvaluationShard, String)| {
            Ok::<_, Error>(describe.find(&name)?.open(&pipeline_of(worker))?.batch_size())
        })
}

impl<M: ModuleT + Send + Sync + 'static> ServedTraining<M> {
    /// Makes a step on the worker's next batch; `None` if the worker has no data.
    fn step(&self, worker: &WorkerContext, step: &Step) -> Result<Option<Made>> {
        let Some(examples) = self.next(worker, step)? else { return Ok(None) };
        let sums = match self.replicas_per_worker {
            0..=1 => self.step_of_one(worker, step, examples)?,
            _ => self.step_of_replicas(worker, step, examples)?,
        };
        Ok(Some(Made { worker: worker.worker_index(), sums }))
    }

    /// Makes a step of a worker without replicas.
    fn step_of_one(&self, worker: &WorkerContext, step: &Step, examples: Examples) -> Result<Vec<f64>> {
        let model = self.model(worker)?;
        check_optimizer(model.optimizer(), step)?;
        let mut sums = trainer::sums(self.measures.metrics());
        let losses = self.losses(&*model, &examples, step, true, &mut sums)?;
        let count = examples.inputs.dim(0)?.max(1);
        model.minimize(&(of_examples(&losses)?.sum_all()? / count as f64)?)?;
        Ok(sums)
    }

    /// Makes a step whose batch the replicas of the worker divide.
    fn step_of_replicas(&self, worker: &WorkerContext, step: &Step, examples: Examples) -> Result<Vec<f64>> {
        let (strategy, model) = self.replicas(worker)?;
        check_optimizer(model.optimizer(), step)?;
        let count = examples.inputs.dim(0)?;
        let of_replicas = strategy.run_with((&model, split(&model, examples)?), |context, (model, examples)| {
            let mut sums = trainer::sums(self.measures.metrics());
            let losses = self.losses(&*model, &examples, step, context.has_examples(), &mut sums)?;
            model.backward(context, &context.average_loss(&of_examples(&losses)?, count)?)?;
            Ok::<_, Error>(sums)
        })?;
        model.push_gradients()?;
        let mut all = trainer::sums(self.measures.metrics());
        of_replicas.into_values().iter().for_each(|sums| add_to(&mut all, sums));
        Ok(all)
    }

    /// Computes the losses to minimise, and adds counted examples to the sums.
    fn losses(&self, model: &M, examples: &Examples, step: &Step, counted: bool, sums: &mut [f64]) -> Result<Tensor> {
        let outputs = model.forward_t(&examples.inputs, true)?;
        let losses = self.measures.losses(&outputs, examples)?;
        if counted {
            self.measures.add(sums, &outputs.detach(), examples, &losses.detach())?;
        }
        match step.class_weights.is_empty() {
            true => Ok(losses),
            false => weighted_by_class(&losses, &step.class_weights, &examples.targets),
        }
    }

    /// Computes the sums over one part of a dataset.
    fn evaluate(&self, worker: &WorkerContext, part: EvaluationShard, name: &str) -> Result<Vec<f64>> {
        let context =
            InputContext { num_input_pipelines: part.of, input_pipeline_id: part.index, num_replicas_in_sync: 1 };
        let dataset = self.find(name)?.open(&context)?;
        if dataset.cardinality() == Cardinality::Infinite {
            let problem = format!("dataset {name:?} repeats forever and cannot be evaluated; give one that ends");
            return Err(Error::Served { problem });
        }
        let mut all = trainer::sums(self.measures.metrics());
        // The result of a worker that was given up is not used.
        let batches = dataset.iter_epoch(0).take_while(|_| !worker.is_cancelled());
        if self.replicas_per_worker > 1 {
            let (strategy, model) = self.replicas(worker)?;
            for examples in batches {
                // Those of a whole evaluation may be larger than memory.
                model.drop_lookups();
                let of_replicas = strategy
                    .run_with((&model, split(&model, examples?)?), |context, (model, examples)| {
                        self.evaluated(&model, &examples, context.has_examples())
                    })?;
                of_replicas.into_values().iter().for_each(|sums| add_to(&mut all, sums));
            }
            return Ok(all);
        }
        let model = self.model(worker)?;
        for examples in batches {
            model.drop_lookups();
            add_to(&mut all, &self.evaluated(&model, &examples?, true)?);
        }
        Ok(all)
    }

    /// Returns the sums over the examples of a batch, if they count.
    fn evaluated(&self, model: &M, examples: &Examples, counted: bool) -> Result<Vec<f64>> {
        let mut sums = trainer::sums(self.measures.metrics());
        let outputs = model.forward_t(&examples.inputs, false)?;
        if counted {
            self.measures.add(&mut sums, &outputs, examples, &self.measures.losses(&outputs, examples)?)?;
        }
        Ok(sums)
    }

    fn replicas<'a>(&self, worker: &'a WorkerContext) -> Result<(Strategy, ReplicatedModel<'a, M>)> {
        let strategy = worker.mirrored((0..self.replicas_per_worker).map(|index| format!("CPU:{index}")))?;
        let model = worker.replicated_model(MODEL, &strategy, |vb| (self.build)(vb))?;
        Ok((strategy, model))
    }

    fn model<'a>(&self, worker: &'a WorkerContext) -> Result<WorkerModel<'a, M>> {
        worker.model(MODEL, |vb| (self.build)(vb))
    }

    /// Returns the worker's next batch, of the next pass at the end of one; `None` if a pass has none.
    fn next(&self, worker: &WorkerContext, step: &Step) -> Result<Option<Examples>> {
        let name = format!("dataset {}", step.dataset);
        // A coordinator that is started again in place continues with the same position.
        let kept = worker.keep_lasting(&name, || Ok::<_, Error>(Mutex::new(None::<Reading>)))?;
        if worker.is_cancelled() {
            let problem = "the worker was given up, and its data are read for the next coordinator";
            return Err(Error::Served { problem: problem.to_owned() });
        }
        // Functions of a worker run one at a time, so no other waits for this lock.
        let mut reading = kept.lock();
        let reading = match &mut *reading {
            Some(reading) if reading.run == step.run => reading,
            other => {
                let dataset = self.find(&step.dataset)?.open(&pipeline_of(worker))?;
                // All begin with the same pass, so that the parts of one shuffled order are all of it.
                let has_begun = step.begun.contains(&worker.worker_index());
                let pass = if has_begun { step.next_pass } else { step.first_pass };
                let batches = dataset.iter_epoch(pass);
                other.insert(Reading { run: step.run, dataset, pass, batches })
            }
        };
        reading.next()
    }
}

impl Step {
    /// Lets workers that begin to read do so with this pass, or with a later one if it may have been read.
    pub(super) fn read_from(&mut self, pass: u64) {
        self.next_pass = self.next_pass.max(pass);
        self.first_pass = self.next_pass;
    }
}

impl Reading {
    fn next(&mut self) -> Result<Option<Examples>> {
        if let Some(examples) = self.batches.next() {
            return Ok(Some(examples?));
        }
        self.pass += 1;
        self.batches = self.dataset.iter_epoch(self.pass);
        Ok(self.batches.next().transpose()?)
    }
}

/// Divides a batch among the replicas of a worker.
fn split<M>(
    model: &ReplicatedModel<'_, M>,
    Examples { inputs, targets, weights }: Examples,
) -> Result<PerReplica<Examples>> {
    Ok(match weights {
        Some(weights) => model.split(&(inputs, targets, weights))?.map(|part| part.clone().into()),
        None => model.split(&(inputs, targets))?.map(|part| part.clone().into()),
    })
}

fn add_to(all: &mut [f64], sums: &[f64]) {
    all.iter_mut().zip(sums).for_each(|(sum, more)| *sum += more);
}

fn check_optimizer(found: u32, step: &Step) -> Result<()> {
    if found == step.optimizer {
        return Ok(());
    }
    let problem = "another training of this strategy has functions of the same names; make a strategy for each";
    Err(Error::Served { problem: problem.to_owned() })
}

fn pipeline_of(worker: &WorkerContext) -> InputContext {
    let (num_input_pipelines, input_pipeline_id) = (worker.num_workers(), worker.worker_index());
    InputContext { num_input_pipelines, input_pipeline_id, num_replicas_in_sync: 1 }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use candle_core::{Device, Module};
    use candle_nn::{Linear, VarBuilder, linear};
    use distribute_cluster::TaskType;
    use distribute_parameter_server::{ParameterServerStrategy, Server};
    use distribute_train::metrics::Metrics;

    use super::super::super::local_cluster::resolver;
    use super::*;
    use crate::{Sgd, ShardedEmbedding, SparseCategoricalCrossentropy, sharded_embedding};

    struct Words(ShardedEmbedding, Linear);

    /// The most lookups that a replica has kept.
    static KEPT: AtomicUsize = AtomicUsize::new(0);

    impl Words {
        fn new(vb: VarBuilder<'_>) -> candle_core::Result<Words> {
            Ok(Words(sharded_embedding(10, 4, vb.pp("table"))?, linear(4, 3, vb.pp("head"))?))
        }
    }

    impl ModuleT for Words {
        fn forward_t(&self, ids: &Tensor, _: bool) -> candle_core::Result<Tensor> {
            let vectors = self.0.forward(ids)?.mean(1)?;
            KEPT.fetch_max(self.0.kept_lookups(), Ordering::Relaxed);
            self.1.forward(&vectors)
        }
    }

    fn examples(_: &InputContext) -> Result<Dataset<(Tensor, Tensor)>> {
        let ids = Tensor::from_vec((0..24u32).map(|at| at % 10).collect(), (12, 2), &Device::Cpu)?;
        let classes = Tensor::from_vec((0..12u32).map(|at| at % 3).collect(), 12, &Device::Cpu)?;
        Ok(Dataset::from_tensor_slices((ids, classes)).batch(2))
    }

    #[test]
    fn an_evaluation_keeps_the_lookups_of_one_batch() {
        for replicas in [1, 2] {
            let task = resolver();
            let (loss, metrics) = (SparseCategoricalCrossentropy, Metrics::new());
            let training = ServedTraining::new(Words::new, Sgd::new(0.1), loss, metrics);
            let training = training.dataset("examples", examples).replicas_per_worker(replicas).unwrap();
            let serve = |kind| Server::start(&task(kind), training.program()).unwrap();
            let _tasks = [TaskType::Ps, TaskType::Worker].map(serve);
            let strategy = ParameterServerStrategy::builder(&task(TaskType::Chief)).build().unwrap();
            training.on_servers(&strategy).unwrap().evaluate("examples").unwrap();
            assert_eq!(KEPT.swap(0, Ordering::Relaxed), 1, "{replicas} replicas");
        }
    }
}
