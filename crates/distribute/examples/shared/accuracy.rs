//! Accuracy, for the examples that are classifiers.

use candle_core::{ModuleT, Tensor};
use distribute::candle::Model;
use distribute::prelude::*;
use distribute::strategy::DistributedDataset;

/// Computes the share of examples that a model classifies correctly; every replica evaluates its part.
pub(crate) fn accuracy<M: ModuleT + Sync>(
    strategy: &Strategy,
    model: &Model<M>,
    test: &DistributedDataset<(Tensor, Tensor)>,
) -> distribute::Result<f64> {
    let (mut correct, mut all) = (0.0, 0.0);
    for batch in test {
        let counts = strategy.run((model, batch?), |_, (model, (x, y))| {
            let hits = model.forward_t(&x, false)?.argmax(1)?.eq(&y)?.to_vec1::<u8>()?;
            Ok(vec![hits.iter().map(|hit| f64::from(*hit)).sum(), hits.len() as f64])
        })?;
        let counts = strategy.reduce(ReduceOp::Sum, &counts, Axis::None)?;
        (correct, all) = (correct + counts[0], all + counts[1]);
    }
    Ok(correct / f64::max(all, 1.0))
}
