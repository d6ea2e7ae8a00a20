//! The distribution of examples over replicas.

use std::fs;

use candle_core::{Device, Module, Tensor};
use candle_nn::linear;
use distribute::input::read::{Lines, ReadOptions};
use distribute::input::{InputOptions, InputPosition, UnequalData};
use distribute::prelude::*;
use distribute::values::{HostTensor, TensorStorage};

use crate::check::{Fault, Stop, check, check_eq};

const EXAMPLES: usize = 23;
const BATCH: usize = 8;

/// Returns the numbers of the examples that each replica of this process got, batch by batch.
fn deal(strategy: &Strategy) -> Result<Vec<PerReplica<Vec<f32>>>, Stop> {
    let numbers: Vec<f32> = (0..EXAMPLES).map(|number| number as f32).collect();
    let numbers = Tensor::from_vec(numbers, EXAMPLES, &Device::Cpu)?;
    let dataset = strategy.distribute_dataset(&Dataset::from_tensor_slices(numbers).batch(BATCH))?;
    let mut batches = Vec::new();
    for batch in &dataset {
        let got = strategy
            .run_with(batch?, |_, part: Tensor| part.to_vec1::<f32>().map_err(|error| Fault(error.to_string())))?;
        batches.push(got);
    }
    Ok(batches)
}

pub(crate) fn every_example_once(strategy: &Strategy) -> Result<(), Stop> {
    let mut all = Vec::new();
    for batch in deal(strategy)? {
        let examples: Vec<bool> = (0..batch.len()).map(|local| batch.has_examples(local)).collect();
        let parts = batch.map(|part| {
            let part: Vec<f64> = part.iter().map(|number| f64::from(*number)).collect();
            HostTensor::new(&[part.len()], part)
        });
        let parts = parts.into_values().into_iter().collect::<Result<Vec<_>, _>>()?;
        let whole: HostTensor = strategy.gather(&PerReplica::new(parts).with_examples(&examples), 0)?;
        all.extend(whole.to_elements::<f64>()?);
    }
    all.sort_by(f64::total_cmp);
    let expected: Vec<f64> = (0..EXAMPLES).map(|number| number as f64).collect();
    check_eq!(all, expected, "the examples of all replicas");
    Ok(())
}

pub(crate) fn cut_evenly(strategy: &Strategy) -> Result<(), Stop> {
    let batches = deal(strategy)?;
    check_eq!(batches.len(), EXAMPLES.div_ceil(BATCH), "global batches");
    let n = strategy.num_replicas_in_sync();
    for batch in &batches[..EXAMPLES / BATCH] {
        check!(batch.iter().all(|part| part.len() == BATCH / n), "a full batch was cut into {batch:?}");
    }
    Ok(())
}

/// Files of numbers, of very unequal sizes; every process has its own copy of them.
struct Files(tempfile::TempDir);

const NUMBERS: usize = 15;

impl Files {
    fn new() -> Result<Files, Stop> {
        let folder = tempfile::tempdir()?;
        for (name, numbers) in [("0.txt", 0..2), ("1.txt", 2..11), ("2.txt", 11..NUMBERS)] {
            let lines: String = numbers.map(|number| format!("{number}\n")).collect();
            fs::write(folder.path().join(name), lines)?;
        }
        Ok(Files(folder))
    }

    fn dataset(&self, batch: usize) -> Dataset<Tensor> {
        let lines = Dataset::list_files(self.0.path(), ".txt").read(Lines, ReadOptions::default());
        lines.map(|line| Ok(Tensor::new(line.parse::<f32>()?, &Device::Cpu)?)).batch(batch)
    }

    fn distributed(
        &self,
        strategy: &Strategy,
        unequal_data: UnequalData,
    ) -> Result<distribute::strategy::DistributedDataset<Tensor>, Stop> {
        let options = InputOptions::default().unequal_data(unequal_data);
        Ok(strategy.distribute_dataset_with(&self.dataset(4), options)?)
    }
}

/// Gathers the numbers of all replicas of all processes in a step.
fn gathered(strategy: &Strategy, batch: &PerReplica<Tensor>) -> Result<Vec<f32>, Stop> {
    Ok(strategy.gather(batch, 0)?.to_vec1::<f32>()?)
}

pub(crate) fn unequal_padded(strategy: &Strategy) -> Result<(), Stop> {
    let files = Files::new()?;
    let data = files.distributed(strategy, UnequalData::Pad)?;
    for _ in 0..2 {
        let mut seen = Vec::new();
        for batch in &data {
            seen.extend(gathered(strategy, &batch?)?);
        }
        seen.sort_by(f32::total_cmp);
        let expected: Vec<f32> = (0..NUMBERS).map(|number| number as f32).collect();
        check_eq!(seen, expected, "the examples of all workers");
    }
    Ok(())
}

pub(crate) fn unequal_cut(strategy: &Strategy) -> Result<(), Stop> {
    let files = Files::new()?;
    let n = strategy.num_replicas_in_sync();
    for unequal_data in [UnequalData::Drop, UnequalData::Stop] {
        let mut seen = Vec::new();
        for batch in &files.distributed(strategy, unequal_data)? {
            let step = gathered(strategy, &batch?)?;
            let full = step.len() == 4 || unequal_data == UnequalData::Stop;
            check!(full, "{unequal_data:?} left a step of {step:?}");
            seen.extend(step);
        }
        seen.sort_by(f32::total_cmp);
        let count = seen.len();
        seen.dedup();
        check_eq!(seen.len(), count, "no example twice");
        // The smaller of two workers' shares is 4 of 15, in two steps of two.
        let expected = match (strategy.topology().workers(), unequal_data) {
            (1, UnequalData::Stop) => NUMBERS,
            (1, _) => 12,
            _ => 8,
        };
        check_eq!(count, expected, format!("examples that {unequal_data:?} leaves to {n} replicas"));
    }
    Ok(())
}

pub(crate) fn ended_early(strategy: &Strategy) -> Result<(), Stop> {
    let files = Files::new()?;
    let data = files.distributed(strategy, UnequalData::Pad)?;
    let (mut sum, mut count) = (0.0, 0.0);
    for batch in &data {
        let of_step = strategy.run_with(batch?, |context, part: Tensor| {
            let rows = part.dim(0).map_err(|error| Fault(error.to_string()))?;
            check!(rows > 0, "a replica got no rows");
            let numbers = part.to_vec1::<f32>().map_err(|error| Fault(error.to_string()))?;
            let total: f64 = numbers.iter().map(|number| f64::from(*number)).sum();
            // Counted by a collective inside the run, and by the results of the run.
            let seen = context.all_reduce(ReduceOp::Sum, &(context.weight() * rows as f64))?;
            Ok::<_, Fault>((total, rows as f64, seen))
        })?;
        let seen = of_step.values()[0].2;
        let (total, rows, _) = strategy.reduce(ReduceOp::Sum, &of_step, Axis::None)?;
        check_eq!(rows, seen, "rows that weigh something");
        let mean = strategy.reduce(ReduceOp::Max, &of_step, Axis::None)?.0;
        check!(mean.is_finite(), "the largest sum is {mean}");
        (sum, count) = (sum + total, count + rows);
    }
    check_eq!((sum, count), ((NUMBERS * (NUMBERS - 1) / 2) as f64, NUMBERS as f64), "the sum of all examples");
    Ok(())
}

pub(crate) fn agreed_in_the_step(strategy: &Strategy) -> Result<(), Stop> {
    let files = Files::new()?;
    let model = strategy.scope(|vb| linear(1, 1, vb.pp("fc")))?;
    let optimizer = Sgd::new(1e-3).build(&model)?;
    // Counts the collectives of a pass with one training step for each batch.
    let train = |deterministic: bool| -> Result<(u64, u64), Stop> {
        let options = InputOptions::default().deterministic(deterministic);
        let data = strategy.distribute_dataset_with(&files.dataset(4), options)?;
        let calls = || strategy.groups()[0].flight_record().operations.last().map_or(0, |last| last.sequence + 1);
        let (before, mut steps) = (calls(), 0);
        for batch in &data {
            strategy.run((&model, &optimizer, batch?), |context, (model, optimizer, x)| {
                let loss = model.forward(&x.unsqueeze(1)?)?.sqr()?.sum(1)?;
                optimizer.minimize(context, &context.average_loss(&loss, 4)?)?;
                Ok(())
            })?;
            steps += 1;
        }
        Ok((calls() - before, steps))
    };
    train(true)?; // The first step of all makes the optimizer's plan.
    let (walked, steps) = train(true)?;
    let (agreed, unequal_steps) = train(false)?;
    let each = walked / steps;
    check_eq!(walked, each * steps, "collectives of a pass that needs no agreement");
    let first = u64::from(strategy.topology().workers() > 1);
    check_eq!(
        agreed,
        each * unequal_steps + first,
        "collectives of a pass with unequal data: one more at its beginning"
    );
    Ok(())
}

pub(crate) fn resumed(strategy: &Strategy) -> Result<(), Stop> {
    let files = Files::new()?;
    let data = files.distributed(strategy, UnequalData::Pad)?;
    let mut pass = data.iter();
    let mut seen = gathered(strategy, &pass.next().ok_or(Stop::Wrong("there is no step".to_owned()))??)?;
    let position: InputPosition = pass.position()?;
    drop(pass);
    // The rest on one replica, which sees what all workers had left.
    let one = Strategy::default_strategy()?;
    for batch in files.distributed(&one, UnequalData::Pad)?.iter_from(&position)? {
        seen.extend(gathered(&one, &batch?)?);
    }
    seen.sort_by(f32::total_cmp);
    let expected: Vec<f32> = (0..NUMBERS).map(|number| number as f32).collect();
    check_eq!(seen, expected, "the examples before and after");
    // The rest with the same workers.
    let mut rest = Vec::new();
    for batch in data.iter_from(&position)? {
        rest.extend(gathered(strategy, &batch?)?);
    }
    check_eq!(rest.len(), NUMBERS - 4, "what is left of a pass");
    let mut next = 0;
    for batch in &data {
        next += gathered(strategy, &batch?)?.len();
    }
    check_eq!(next, NUMBERS, "the next pass is whole");
    Ok(())
}
