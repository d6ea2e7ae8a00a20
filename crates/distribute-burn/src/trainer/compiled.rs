//! Training, evaluation and prediction by programs that are compiled for PJRT devices.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::Tensor;
use burn_flex::{Flex, FlexTensor};
use distribute_train::trainer::{self, Part};
use distribute_values::PerReplica;

use super::{Examples, Inputs, Targets, Trainer, WithoutAutodiff};
use crate::pjrt::{Feed, Leaf, Output, StepInputs, StepOutputs, collect};
use crate::tensor::refused;
use crate::{Error, Result};

/// The batch of one replica: its examples, and as many tensors as the program has inputs.
struct Fed<X, Y> {
    examples: Examples<X, Y>,
    /// The number of examples that count.
    rows: usize,
    leaves: Vec<Leaf>,
}

impl<M: Module + Sync + 'static, X: Inputs, Y: Targets, const D: usize> Trainer<M, X, Y, D> {
    /// Makes a step on each of the batches by one program each. Programs are started without waiting for each other.
    pub(super) fn train_compiled(
        &self,
        batches: PerReplica<Vec<Part<Examples<X, Y>>>>,
        batch_size: usize,
        class_weights: &[f32],
    ) -> Result<PerReplica<Vec<f64>>> {
        let mut of_replicas: Vec<_> = batches.into_values().into_iter().map(Vec::into_iter).collect();
        let mut started = Vec::new();
        let mut failed = None;
        while failed.is_none() {
            let parts: Vec<Part<Examples<X, Y>>> = of_replicas.iter_mut().filter_map(Iterator::next).collect();
            if parts.len() < of_replicas.len() {
                break;
            }
            match self.start_training(parts, (batch_size, class_weights)) {
                Ok(step) => started.push(step),
                Err(error) => failed = Some(error),
            }
        }
        let mut sums = vec![trainer::sums(&self.metrics); of_replicas.len()];
        for (fed, outputs) in started {
            // Each step that has begun is waited for: one that fails tears the model.
            let ended = outputs.wait(&self.strategy).and_then(|outputs| self.add_all(&mut sums, fed, outputs));
            failed = failed.or(ended.err());
        }
        failed.map_or(Ok(PerReplica::new(sums)), Err)
    }

    /// Starts a step on the batches of all replicas.
    fn start_training(
        &self,
        parts: Vec<Part<Examples<X, Y>>>,
        (batch_size, class_weights): (usize, &[f32]),
    ) -> Result<(Vec<Fed<X, Y>>, StepOutputs)> {
        let mut fed = self.fed(parts.into_iter().map(|part| (part.examples, part.has_examples)).collect(), true)?;
        for one in &mut fed {
            let factors = self.factors(one, class_weights)?;
            one.leaves.push(Leaf::floats(&factors)?);
        }
        let outputs = self.start(&fed, "train", batch_size)?;
        Ok((fed, outputs))
    }

    pub(super) fn evaluate_compiled(&self, batch: PerReplica<Examples<X, Y>>) -> Result<PerReplica<Vec<f64>>> {
        let has_examples: Vec<bool> = (0..batch.len()).map(|local| batch.has_examples(local)).collect();
        let fed = self.fed(batch.into_values().into_iter().zip(has_examples).collect(), false)?;
        let mut sums = vec![trainer::sums(&self.metrics); fed.len()];
        let outputs = self.start(&fed, "evaluate", 1)?.wait(&self.strategy)?;
        self.add_all(&mut sums, fed, outputs)?;
        Ok(PerReplica::new(sums))
    }

    pub(super) fn predict_compiled(&self, batch: PerReplica<X>) -> Result<PerReplica<Tensor<D>>> {
        let mut leaves = Vec::new();
        for x in batch.values() {
            leaves.push(collect(x.clone())?);
        }
        let has_examples: Vec<bool> = (0..batch.len()).map(|local| batch.has_examples(local)).collect();
        let rows: Vec<usize> = leaves.iter().map(|leaves| leaves.first().map_or(0, Leaf::rows)).collect();
        self.pad(&mut leaves, &rows, false)?;
        let padded = present(&leaves[0]);
        let x = &batch.values()[0];
        let shapes = leaves[0].clone();
        let inputs = self.inputs("predict", leaves, false, String::new())?;
        let outputs = self.model.programs().run(inputs, &|| {
            let mut feed = Feed { autodiff: false, leaves: shapes.clone().into_iter() };
            let x = x.clone().map_tensors(&mut WithoutAutodiff).map_tensors(&mut feed);
            let (outputs, _) = self.model.recorded(false, |model| Ok((self.forward)(model, x)))?;
            Ok((None, vec![Output::of(outputs)?], BTreeMap::new()))
        })?;
        let first = |(mut outputs, rows): (Vec<FlexTensor>, usize)| tensor(outputs.swap_remove(0), rows, padded);
        let outputs = outputs.wait(&self.strategy)?.into_iter().zip(rows).map(first).collect::<Result<Vec<_>>>()?;
        Ok(PerReplica::new(outputs).with_examples(&has_examples))
    }

    /// Reads the batches of all replicas, and makes them of equal shapes.
    fn fed(&self, batches: Vec<(Examples<X, Y>, bool)>, trains: bool) -> Result<Vec<Fed<X, Y>>> {
        let mut rows = Vec::with_capacity(batches.len());
        let mut leaves = Vec::with_capacity(batches.len());
        for (examples, has_examples) in &batches {
            rows.push(if *has_examples { examples.targets.examples() } else { 0 });
            let Examples { inputs, targets, weights } = examples.clone();
            let mut own = collect(inputs)?;
            own.extend(collect(targets)?);
            own.extend(weights.map(collect).transpose()?.into_iter().flatten());
            leaves.push(own);
        }
        self.pad(&mut leaves, &rows, trains)?;
        let all = batches.into_iter().zip(rows).zip(leaves);
        Ok(all.map(|(((examples, _), rows), leaves)| Fed { examples, rows, leaves }).collect())
    }

    /// Makes batches of equal numbers of rows: of as many as the largest one has.
    fn pad(&self, leaves: &mut [Vec<Leaf>], rows: &[usize], trains: bool) -> Result<()> {
        check_rows(leaves)?;
        let largest = leaves.iter().map(|own| present(own)).max().unwrap_or(0);
        let is_even = rows.iter().all(|count| *count == largest);
        if is_even {
            return Ok(());
        }
        if trains && self.model.has_statistics() {
            let problem = format!(
                "replicas have batches of {rows:?} examples, and padding would change the statistics of \
                 normalisation layers; use batches whose size the number of replicas divides, and drop the remainder"
            );
            return Err(Error::Program { problem });
        }
        let model = leaves.iter().find(|own| present(own) > 0).cloned().unwrap_or_default();
        for own in leaves {
            for (leaf, other) in own.iter_mut().zip(&model) {
                *leaf = leaf.padded(largest, other)?;
            }
        }
        Ok(())
    }

    /// Returns the factor of each row's loss: 1 or the weight of its class, and 0 for padding.
    fn factors(&self, fed: &Fed<X, Y>, class_weights: &[f32]) -> Result<Vec<f32>> {
        let total = present(&fed.leaves);
        let mut factors = vec![1.0; fed.rows];
        if !class_weights.is_empty() && fed.rows > 0 {
            // Classes without a weight have weight 1.
            let weight = |class: usize| class_weights.get(class).copied().unwrap_or(1.0);
            factors = fed.examples.targets.to_host()?.classes()?.into_iter().map(weight).collect();
            if factors.len() != fed.rows {
                return Err(Error::Weights { given: factors.len(), examples: fed.rows });
            }
        }
        factors.resize(total, 0.0);
        Ok(factors)
    }

    fn inputs(
        &self,
        name: &'static str,
        leaves: Vec<Vec<Leaf>>,
        trains: bool,
        settings: String,
    ) -> Result<StepInputs<'_>> {
        let components = self.model.variables().iter().map(|variable| variable.components().to_vec()).collect();
        let optimizer = if trains { Some(self.optimizer.for_program()?) } else { None };
        Ok(StepInputs { name, strategy: &self.strategy, components, optimizer, settings, leaves })
    }

    /// Starts a program that computes losses, and trains if it is named so.
    fn start(&self, fed: &[Fed<X, Y>], name: &'static str, batch_size: usize) -> Result<StepOutputs> {
        let trains = name == "train";
        let leaves: Vec<Vec<Leaf>> = fed.iter().map(|one| one.leaves.clone()).collect();
        let (examples, shapes) = (&fed[0].examples, leaves[0].clone());
        let settings = format!("{batch_size} {}", examples.weights.is_some());
        let inputs = self.inputs(name, leaves, trains, settings)?;
        self.model.programs().run(inputs, &|| {
            let mut feed = Feed { autodiff: trains, leaves: shapes.clone().into_iter() };
            let Examples { inputs, targets, weights } = examples.clone();
            let inputs = inputs.map_tensors(&mut feed);
            let targets = targets.map_tensors(&mut feed);
            let weights = weights.map(|weights| weights.map_tensors(&mut feed));
            let mut loss = None;
            let ((outputs, losses), statistics) = self.model.recorded(trains, |model| {
                let outputs = (self.forward)(model, inputs);
                let losses = self.losses(outputs.clone(), targets, weights)?;
                Ok((outputs, losses))
            })?;
            if trains {
                // The last tensor of the batch.
                let factors: Vec<Leaf> = shapes.last().cloned().into_iter().collect();
                let mut feed = Feed { autodiff: true, leaves: factors.into_iter() };
                let factors = Tensor::<1>::zeros([0], &losses.device()).map_tensors(&mut feed);
                let dtype = losses.dtype();
                let factors = if factors.dtype() == dtype { factors } else { factors.cast(dtype) };
                let sum = crate::losses::at_least_32_bits(losses.clone() * factors).sum();
                loss = Some(sum.div_scalar(batch_size.max(1) as f64));
            }
            Ok((loss, vec![Output::of(losses)?, Output::of(outputs)?], statistics))
        })
    }

    /// Adds the losses and metrics of each replica's examples to its sums.
    fn add_all(&self, sums: &mut [Vec<f64>], fed: Vec<Fed<X, Y>>, outputs: Vec<Vec<FlexTensor>>) -> Result<()> {
        for ((sums, fed), mut outputs) in sums.iter_mut().zip(fed).zip(outputs) {
            if fed.rows == 0 {
                continue;
            }
            let (of_model, losses) = (outputs.pop(), outputs.pop());
            let (Some(of_model), Some(losses)) = (of_model, losses) else { continue };
            let padded = present(&fed.leaves);
            let (of_model, losses) = (tensor::<D>(of_model, fed.rows, padded)?, tensor::<1>(losses, fed.rows, padded)?);
            let weights = fed.examples.weights.map(Tensor::without_autodiff);
            self.add(sums, of_model, &fed.examples.targets, weights, losses)?;
        }
        Ok(())
    }
}

/// Checks that all replicas have equally many tensors, with rows of the same shapes and types; a tensor without rows
/// may have any.
fn check_rows(leaves: &[Vec<Leaf>]) -> Result<()> {
    for (replica, own) in leaves.iter().enumerate().skip(1) {
        if own.len() != leaves[0].len() {
            let problem = format!(
                "the batch of replica 0 has {} tensors, and that of replica {replica} has {}; give all replicas the \
                 same tensors, with weights for all of them or for none",
                leaves[0].len(),
                own.len()
            );
            return Err(Error::Program { problem });
        }
    }
    for at in 0..leaves.first().map_or(0, Vec::len) {
        let mut with_rows = leaves.iter().map(|own| &own[at]).enumerate().filter(|(_, leaf)| leaf.rows() > 0);
        let Some((first, leaf)) = with_rows.next() else { continue };
        let (shape, dtype) = leaf.row();
        if let Some((replica, other)) = with_rows.find(|(_, other)| other.row() != leaf.row()) {
            let (other_shape, other_dtype) = other.row();
            let problem = format!(
                "tensor {at} of the batch has rows of shape {shape:?} and {dtype:?} on replica {first}, but of \
                 {other_shape:?} and {other_dtype:?} on replica {replica}, and all replicas run one program; make rows \
                 of equal shapes and types, for example by padding them to a fixed length"
            );
            return Err(Error::Program { problem });
        }
    }
    Ok(())
}

/// Returns the number of rows of a batch, with those that pad it.
fn present(leaves: &[Leaf]) -> usize {
    leaves.first().map_or(0, Leaf::rows)
}

/// Returns what a program's output holds of the first `examples` of `padded` ones as a tensor of burn. It has as many
/// rows for one example as for another.
fn tensor<const D: usize>(flex: FlexTensor, examples: usize, padded: usize) -> Result<Tensor<D>> {
    let shape = flex.layout().shape().as_slice().to_vec();
    if shape.len() != D {
        return Err(refused("read a program's output", format!("it is of shape {shape:?}, not of rank {D}")).into());
    }
    let all = Tensor::<D>::from_primitive::<Flex>(flex);
    match shape.first() {
        Some(rows) if examples < padded && rows.is_multiple_of(padded) => {
            Ok(all.narrow(0, 0, rows / padded * examples))
        }
        Some(_) if examples < padded => {
            let problem = format!(
                "an output is of shape {shape:?} for {padded} rows, of which {} pad the batch, and it is not known \
                 which of its values are of these; give it as many rows as the batch has, or a multiple of them",
                padded - examples
            );
            Err(Error::Program { problem })
        }
        _ => Ok(all),
    }
}
