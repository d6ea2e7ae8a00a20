//! Convolutions with batch normalisation, for the examples that are residual networks.

use candle_core::{Module, Result, Tensor};
use candle_nn::{BatchNormConfig, Conv2dConfig, VarBuilder};
use distribute::candle::{Conv2d, SyncBatchNorm, conv2d_no_bias, sync_batch_norm};

/// A convolution of 3 × 3 with batch normalisation over the global batch and a ReLU.
pub(crate) struct Conv(pub(crate) Conv2d, SyncBatchNorm);

impl Conv {
    pub(crate) fn new(from: usize, to: usize, stride: usize, vb: VarBuilder<'_>) -> Result<Conv> {
        let config = Conv2dConfig { padding: 1, stride, ..Conv2dConfig::default() };
        let norm = sync_batch_norm(to, BatchNormConfig::default(), vb.pp("norm"))?;
        Ok(Conv(conv2d_no_bias(from, to, 3, config, vb.pp("conv"))?, norm))
    }

    /// Computes the result, adds a shortcut if there is one, and applies a ReLU.
    pub(crate) fn forward_relu(&self, x: &Tensor, shortcut: Option<&Tensor>, train: bool) -> Result<Tensor> {
        self.1.forward_relu(&self.0.forward(x)?, shortcut, train)
    }
}
