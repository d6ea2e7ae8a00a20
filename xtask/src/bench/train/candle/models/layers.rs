//! The layers of the models, candle's or ours.

use candle_core::{Module, ModuleT, Result as CandleResult, Tensor};
use candle_nn::{BatchNormConfig, Conv2dConfig, VarBuilder};
use distribute::candle::{self as ours, AttentionMask};

use super::super::super::data::TOKENS;

/// Elements of a token in the transformer, and the heads that share them.
pub(super) const WIDTH: usize = 128;
pub(super) const HEADS: usize = 4;

/// The layers that a model is made of. Variables and results are the same.
pub(crate) trait Layers {
    type Linear: Module + Send + Sync;
    type Conv2d: Module + Send + Sync;
    type BatchNorm: Send + Sync;
    type Embedding: Module + Send + Sync;

    fn linear(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> CandleResult<Self::Linear>;
    fn embedding(vocabulary: usize, width: usize, vb: VarBuilder<'_>) -> CandleResult<Self::Embedding>;
    /// Creates a convolution of 3 × 3 that keeps height and width.
    fn conv2d(channels: usize, filters: usize, vb: VarBuilder<'_>) -> CandleResult<Self::Conv2d>;
    /// Creates a convolution of 3 × 3 without bias, which divides height and width by the stride.
    fn strided(channels: usize, filters: usize, stride: usize, vb: VarBuilder<'_>) -> CandleResult<Self::Conv2d>;
    /// Computes a convolution, ReLU of it, and the largest elements of windows of 2 × 2.
    fn conv_relu_pool(layer: &Self::Conv2d, x: &Tensor) -> CandleResult<Tensor>;
    fn batch_norm(channels: usize, vb: VarBuilder<'_>) -> CandleResult<Self::BatchNorm>;
    /// Normalises in training, adds a shortcut if there is one, and applies a ReLU.
    fn norm_relu(norm: &Self::BatchNorm, x: &Tensor, shortcut: Option<&Tensor>) -> CandleResult<Tensor>;
    /// Returns every second row and column.
    fn every_second(x: &Tensor) -> CandleResult<Tensor>;
    fn relu(x: &Tensor) -> CandleResult<Tensor>;
    fn add(x: &Tensor, y: &Tensor) -> CandleResult<Tensor>;
    /// Computes a linear layer, and GELU of it.
    fn linear_gelu(layer: &Self::Linear, x: &Tensor) -> CandleResult<Tensor>;
    /// Computes causal attention of (rows, tokens, queries, keys and values).
    fn attention(qkv: &Tensor, mask: &Tensor) -> CandleResult<Tensor>;
}

/// candle's layers.
pub(in super::super) struct Plain;

impl Layers for Plain {
    type Linear = candle_nn::Linear;
    type Conv2d = candle_nn::Conv2d;
    type BatchNorm = candle_nn::BatchNorm;
    type Embedding = candle_nn::Embedding;

    fn linear(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> CandleResult<candle_nn::Linear> {
        candle_nn::linear(inputs, outputs, vb)
    }

    fn embedding(vocabulary: usize, width: usize, vb: VarBuilder<'_>) -> CandleResult<candle_nn::Embedding> {
        candle_nn::embedding(vocabulary, width, vb)
    }

    fn conv2d(channels: usize, filters: usize, vb: VarBuilder<'_>) -> CandleResult<candle_nn::Conv2d> {
        candle_nn::conv2d(channels, filters, 3, PADDED, vb)
    }

    fn strided(channels: usize, filters: usize, stride: usize, vb: VarBuilder<'_>) -> CandleResult<candle_nn::Conv2d> {
        candle_nn::conv2d_no_bias(channels, filters, 3, Conv2dConfig { stride, ..PADDED }, vb)
    }

    fn conv_relu_pool(layer: &candle_nn::Conv2d, x: &Tensor) -> CandleResult<Tensor> {
        layer.forward(x)?.relu()?.max_pool2d(2)
    }

    fn batch_norm(channels: usize, vb: VarBuilder<'_>) -> CandleResult<candle_nn::BatchNorm> {
        candle_nn::batch_norm(channels, BatchNormConfig::default(), vb)
    }

    fn norm_relu(norm: &candle_nn::BatchNorm, x: &Tensor, shortcut: Option<&Tensor>) -> CandleResult<Tensor> {
        let normed = norm.forward_t(x, true)?;
        match shortcut {
            Some(shortcut) => (normed + shortcut)?.relu(),
            None => normed.relu(),
        }
    }

    fn every_second(x: &Tensor) -> CandleResult<Tensor> {
        let (count, channels, rows, columns) = x.dims4()?;
        let pairs = x.reshape((count, channels, rows / 2, 2, columns / 2, 2))?;
        pairs.narrow(3, 0, 1)?.narrow(5, 0, 1)?.squeeze(5)?.squeeze(3)
    }

    fn relu(x: &Tensor) -> CandleResult<Tensor> {
        x.relu()
    }

    fn add(x: &Tensor, y: &Tensor) -> CandleResult<Tensor> {
        x + y
    }

    fn linear_gelu(layer: &candle_nn::Linear, x: &Tensor) -> CandleResult<Tensor> {
        layer.forward(x)?.gelu()
    }

    fn attention(qkv: &Tensor, mask: &Tensor) -> CandleResult<Tensor> {
        let qkv = qkv.reshape(((), TOKENS, 3, HEADS, WIDTH / HEADS))?;
        let part = |at: usize| qkv.narrow(2, at, 1)?.squeeze(2)?.transpose(1, 2)?.contiguous();
        let (q, k, v): (Tensor, Tensor, Tensor) = (part(0)?, part(1)?, part(2)?);
        let scores = (q.matmul(&k.t()?)? / ((WIDTH / HEADS) as f64).sqrt())?;
        let weights = candle_nn::ops::softmax(&scores.broadcast_add(mask)?, 3)?;
        weights.matmul(&v)?.transpose(1, 2)?.flatten_from(2)
    }
}

/// The layers of `distribute::candle`.
pub(crate) struct Ours;

impl Layers for Ours {
    type Linear = ours::Linear;
    type Conv2d = ours::Conv2d;
    type BatchNorm = ours::SyncBatchNorm;
    type Embedding = ours::Embedding;

    fn linear(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> CandleResult<ours::Linear> {
        ours::linear(inputs, outputs, vb)
    }

    fn embedding(vocabulary: usize, width: usize, vb: VarBuilder<'_>) -> CandleResult<ours::Embedding> {
        ours::embedding(vocabulary, width, vb)
    }

    fn conv2d(channels: usize, filters: usize, vb: VarBuilder<'_>) -> CandleResult<ours::Conv2d> {
        ours::conv2d(channels, filters, 3, PADDED, vb)
    }

    fn strided(channels: usize, filters: usize, stride: usize, vb: VarBuilder<'_>) -> CandleResult<ours::Conv2d> {
        ours::conv2d_no_bias(channels, filters, 3, Conv2dConfig { stride, ..PADDED }, vb)
    }

    fn conv_relu_pool(layer: &ours::Conv2d, x: &Tensor) -> CandleResult<Tensor> {
        layer.forward_relu_max_pool(x, 2)
    }

    fn batch_norm(channels: usize, vb: VarBuilder<'_>) -> CandleResult<ours::SyncBatchNorm> {
        ours::sync_batch_norm(channels, BatchNormConfig::default(), vb)
    }

    fn norm_relu(norm: &ours::SyncBatchNorm, x: &Tensor, shortcut: Option<&Tensor>) -> CandleResult<Tensor> {
        norm.forward_relu(x, shortcut, true)
    }

    fn every_second(x: &Tensor) -> CandleResult<Tensor> {
        ours::max_pool2d_with_stride(x, 1, 2)
    }

    fn relu(x: &Tensor) -> CandleResult<Tensor> {
        ours::relu(x)
    }

    fn add(x: &Tensor, y: &Tensor) -> CandleResult<Tensor> {
        ours::add(x, y)
    }

    fn linear_gelu(layer: &ours::Linear, x: &Tensor) -> CandleResult<Tensor> {
        layer.forward_gelu(x)
    }

    fn attention(qkv: &Tensor, _: &Tensor) -> CandleResult<Tensor> {
        ours::self_attention(qkv, HEADS, AttentionMask::Causal)
    }
}

const PADDED: Conv2dConfig = Conv2dConfig { padding: 1, stride: 1, dilation: 1, groups: 1, cudnn_fwd_algo: None };
