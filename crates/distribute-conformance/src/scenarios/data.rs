//! Which replica gets which examples.

use candle_core::{Device, Tensor};
use distribute::prelude::*;
use distribute::values::{HostTensor, TensorStorage};

use super::contexts::Fault;
use crate::check::{Stop, check, check_eq};

const EXAMPLES: usize = 23;
const BATCH: usize = 8;

/// The numbers of the examples that each replica of this process got, batch by batch.
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
        let parts = batch.map(|part| {
            let part: Vec<f64> = part.iter().map(|number| f64::from(*number)).collect();
            HostTensor::new(&[part.len()], part)
        });
        let parts = parts.into_values().into_iter().collect::<Result<Vec<_>, _>>()?;
        let whole: HostTensor = strategy.gather(&PerReplica::new(parts), 0)?;
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
        check!(batch.values().iter().all(|part| part.len() == BATCH / n), "a full batch was cut into {batch:?}");
    }
    Ok(())
}
