//! The network.

use candle_core::{Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Init, VarBuilder};
use distribute::candle::{Linear, ShardedEmbedding, linear, sharded_embedding_with};

/// Neural matrix factorization: the product of a user's and an item's vector, and a network of three layers over two
/// other vectors of theirs. It does not depend on distribution.
///
/// # Source
/// He et al., "Neural collaborative filtering", 2017, section 3.4.
pub(crate) struct NeuMf {
    /// Vectors of users and of items, for the product.
    factors: [ShardedEmbedding; 2],
    /// The same for the network.
    features: [ShardedEmbedding; 2],
    layers: Vec<Linear>,
    head: Linear,
}

impl NeuMf {
    /// Creates the network for `width` predictive factors.
    pub(crate) fn new((users, items): (usize, usize), width: usize, vb: &VarBuilder<'_>) -> CandleResult<NeuMf> {
        let table = |rows, width, name| {
            sharded_embedding_with(rows, width, Init::Randn { mean: 0.0, stdev: 0.01 }, vb.pp(name))
        };
        let layer = |at: usize| linear((8 * width) >> at, (4 * width) >> at, vb.pp(format!("layers.{at}")));
        Ok(NeuMf {
            factors: [table(users, width, "factors.users")?, table(items, width, "factors.items")?],
            features: [table(users, 4 * width, "features.users")?, table(items, 4 * width, "features.items")?],
            layers: (0..3).map(layer).collect::<CandleResult<_>>()?,
            head: linear(2 * width, 1, vb.pp("head"))?,
        })
    }

    /// Computes the logits that users meet items.
    ///
    /// # Shapes
    /// Users: (examples); items and the result: (examples, items of each).
    pub(crate) fn forward(&self, users: &Tensor, items: &Tensor) -> CandleResult<Tensor> {
        let (users, items, shape) = (users.unsqueeze(1)?, items, items.dims2()?);
        let product = self.factors[1].forward(items)?.broadcast_mul(&self.factors[0].forward(&users)?)?;
        let features = self.features[1].forward(items)?;
        let of_users = self.features[0].forward(&users)?.broadcast_as(features.shape())?;
        let mut x = Tensor::cat(&[of_users, features], 2)?.flatten_to(1)?;
        for layer in &self.layers {
            x = layer.forward(&x)?.relu()?;
        }
        self.head.forward(&Tensor::cat(&[product.flatten_to(1)?, x], 1)?)?.reshape(shape)
    }
}

/// Returns the targets of a batch: 1 for the first item of each row, and 0 for the others.
pub(crate) fn targets(items: &Tensor) -> CandleResult<Tensor> {
    let (rows, columns) = items.dims2()?;
    let of_row = (0..columns).map(|column| if column == 0 { 1f32 } else { 0.0 });
    Tensor::from_iter(of_row, &Device::Cpu)?.broadcast_as((rows, columns))
}
