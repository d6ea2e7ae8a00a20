//! The models, of candle's layers or of ours.

use candle_core::{Device, Module, ModuleT, Result as CandleResult, Tensor};
use candle_nn::{BatchNormConfig, Conv2dConfig, Embedding, VarBuilder, embedding};
use distribute::candle::{self as ours, AttentionMask, LayerNorm, layer_norm};
use resnet::ResNet;

use super::super::Model;
use super::super::data::{self, TOKENS, VOCABULARY};

mod resnet;

/// The layers that a model is made of. Variables and results are the same.
pub(crate) trait Layers {
    type Linear: Module + Send + Sync;
    type Conv2d: Module + Send + Sync;
    type BatchNorm: ModuleT + Send + Sync;

    fn linear(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> CandleResult<Self::Linear>;
    /// Creates a convolution of 3 × 3 that keeps height and width.
    fn conv2d(channels: usize, filters: usize, vb: VarBuilder<'_>) -> CandleResult<Self::Conv2d>;
    /// Creates a convolution of 3 × 3 without bias, which divides height and width by the stride.
    fn strided(channels: usize, filters: usize, stride: usize, vb: VarBuilder<'_>) -> CandleResult<Self::Conv2d>;
    fn batch_norm(channels: usize, vb: VarBuilder<'_>) -> CandleResult<Self::BatchNorm>;
    fn max_pool(x: &Tensor) -> CandleResult<Tensor>;
    fn relu(x: &Tensor) -> CandleResult<Tensor>;
    fn gelu(x: &Tensor) -> CandleResult<Tensor>;
    /// Computes causal attention of (rows, tokens, queries, keys and values).
    fn attention(qkv: &Tensor, mask: &Tensor) -> CandleResult<Tensor>;
}

/// candle's layers.
pub(super) struct Plain;

impl Layers for Plain {
    type Linear = candle_nn::Linear;
    type Conv2d = candle_nn::Conv2d;
    type BatchNorm = candle_nn::BatchNorm;

    fn linear(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> CandleResult<candle_nn::Linear> {
        candle_nn::linear(inputs, outputs, vb)
    }

    fn conv2d(channels: usize, filters: usize, vb: VarBuilder<'_>) -> CandleResult<candle_nn::Conv2d> {
        candle_nn::conv2d(channels, filters, 3, PADDED, vb)
    }

    fn strided(channels: usize, filters: usize, stride: usize, vb: VarBuilder<'_>) -> CandleResult<candle_nn::Conv2d> {
        candle_nn::conv2d_no_bias(channels, filters, 3, Conv2dConfig { stride, ..PADDED }, vb)
    }

    fn batch_norm(channels: usize, vb: VarBuilder<'_>) -> CandleResult<candle_nn::BatchNorm> {
        candle_nn::batch_norm(channels, BatchNormConfig::default(), vb)
    }

    fn max_pool(x: &Tensor) -> CandleResult<Tensor> {
        x.max_pool2d(2)
    }

    fn relu(x: &Tensor) -> CandleResult<Tensor> {
        x.relu()
    }

    fn gelu(x: &Tensor) -> CandleResult<Tensor> {
        x.gelu()
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

    fn linear(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> CandleResult<ours::Linear> {
        ours::linear(inputs, outputs, vb)
    }

    fn conv2d(channels: usize, filters: usize, vb: VarBuilder<'_>) -> CandleResult<ours::Conv2d> {
        ours::conv2d(channels, filters, 3, PADDED, vb)
    }

    fn strided(channels: usize, filters: usize, stride: usize, vb: VarBuilder<'_>) -> CandleResult<ours::Conv2d> {
        ours::conv2d_no_bias(channels, filters, 3, Conv2dConfig { stride, ..PADDED }, vb)
    }

    fn batch_norm(channels: usize, vb: VarBuilder<'_>) -> CandleResult<ours::SyncBatchNorm> {
        ours::sync_batch_norm(channels, BatchNormConfig::default(), vb)
    }

    fn max_pool(x: &Tensor) -> CandleResult<Tensor> {
        ours::max_pool2d(x, 2)
    }

    fn relu(x: &Tensor) -> CandleResult<Tensor> {
        ours::relu(x)
    }

    fn gelu(x: &Tensor) -> CandleResult<Tensor> {
        ours::gelu(x)
    }

    fn attention(qkv: &Tensor, _: &Tensor) -> CandleResult<Tensor> {
        ours::self_attention(qkv, HEADS, AttentionMask::Causal)
    }
}

const PADDED: Conv2dConfig = Conv2dConfig { padding: 1, stride: 1, dilation: 1, groups: 1, cudnn_fwd_algo: None };

pub(crate) struct Mlp<L: Layers>([L::Linear; 3]);

impl<L: Layers> Mlp<L> {
    pub(crate) fn new(vb: &VarBuilder<'_>) -> CandleResult<Mlp<L>> {
        let layer = |inputs, outputs, name| L::linear(inputs, outputs, vb.pp(name));
        Ok(Mlp([layer(784, 256, "fc1")?, layer(256, 128, "fc2")?, layer(128, 10, "fc3")?]))
    }
}

impl<L: Layers> Module for Mlp<L> {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let [fc1, fc2, fc3] = &self.0;
        fc3.forward(&L::relu(&fc2.forward(&L::relu(&fc1.forward(x)?)?)?)?)
    }
}

pub(super) struct Cnn<L: Layers> {
    convolutions: [L::Conv2d; 2],
    head: L::Linear,
}

impl<L: Layers> Cnn<L> {
    fn new(vb: &VarBuilder<'_>) -> CandleResult<Cnn<L>> {
        let convolutions = [L::conv2d(1, 16, vb.pp("conv1"))?, L::conv2d(16, 32, vb.pp("conv2"))?];
        Ok(Cnn { convolutions, head: L::linear(32 * 49, 10, vb.pp("head"))? })
    }
}

impl<L: Layers> Module for Cnn<L> {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let mut x = x.reshape(((), 1, 28, 28))?;
        for convolution in &self.convolutions {
            x = L::max_pool(&L::relu(&convolution.forward(&x)?)?)?;
        }
        self.head.forward(&x.flatten_from(1)?)
    }
}

const WIDTH: usize = 128;
const HEADS: usize = 4;

struct Block<L: Layers> {
    norms: [LayerNorm; 2],
    qkv: L::Linear,
    out: L::Linear,
    up: L::Linear,
    down: L::Linear,
}

pub(super) struct Transformer<L: Layers> {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block<L>>,
    norm: LayerNorm,
    head: L::Linear,
    mask: Tensor,
}

impl<L: Layers> Transformer<L> {
    fn new(vb: &VarBuilder<'_>) -> CandleResult<Transformer<L>> {
        let block = |vb: VarBuilder<'_>| {
            Ok(Block {
                norms: [layer_norm(WIDTH, 1e-5, vb.pp("norm1"))?, layer_norm(WIDTH, 1e-5, vb.pp("norm2"))?],
                qkv: L::linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?,
                out: L::linear(WIDTH, WIDTH, vb.pp("out"))?,
                up: L::linear(WIDTH, 4 * WIDTH, vb.pp("up"))?,
                down: L::linear(4 * WIDTH, WIDTH, vb.pp("down"))?,
            })
        };
        let mask: Vec<f32> =
            (0..TOKENS * TOKENS).map(|at| if at % TOKENS > at / TOKENS { f32::NEG_INFINITY } else { 0.0 }).collect();
        Ok(Transformer {
            tokens: embedding(VOCABULARY, WIDTH, vb.pp("tokens"))?,
            positions: embedding(TOKENS, WIDTH, vb.pp("positions"))?,
            blocks: (0..2).map(|at| block(vb.pp(format!("block{at}")))).collect::<CandleResult<_>>()?,
            norm: layer_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            head: L::linear(WIDTH, VOCABULARY, vb.pp("head"))?,
            mask: Tensor::from_vec(mask, (TOKENS, TOKENS), &Device::Cpu)?,
        })
    }
}

impl<L: Layers> Module for Transformer<L> {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let positions = self.positions.forward(&Tensor::arange(0u32, TOKENS as u32, &Device::Cpu)?)?;
        let mut x = self.tokens.forward(x)?.broadcast_add(&positions)?;
        for block in &self.blocks {
            let qkv = block.qkv.forward(&block.norms[0].forward(&x)?)?;
            x = (&x + block.out.forward(&L::attention(&qkv, &self.mask)?)?)?;
            let hidden = L::gelu(&block.up.forward(&block.norms[1].forward(&x)?)?)?;
            x = (&x + block.down.forward(&hidden)?)?;
        }
        // One row for each token.
        self.head.forward(&self.norm.forward(&x)?)?.flatten(0, 1)
    }
}

/// The mean of words, of which few occur in a step.
pub(super) struct Words<L: Layers>(Embedding, L::Linear);

impl<L: Layers> Words<L> {
    fn new(vb: &VarBuilder<'_>) -> CandleResult<Words<L>> {
        let [words, width] = data::WORDS;
        Ok(Words(embedding(words, width, vb.pp("words"))?, L::linear(width, 10, vb.pp("head"))?))
    }
}

impl<L: Layers> Module for Words<L> {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        self.1.forward(&self.0.forward(x)?.mean(1)?)
    }
}

pub(super) enum Net<L: Layers> {
    Words(Words<L>),
    Mlp(Mlp<L>),
    Cnn(Cnn<L>),
    ResNet(ResNet<L>),
    Transformer(Transformer<L>),
}

impl<L: Layers> Net<L> {
    pub(super) fn new(model: Model, vb: &VarBuilder<'_>) -> CandleResult<Net<L>> {
        Ok(match model {
            Model::Embedding => Net::Words(Words::new(vb)?),
            Model::Cnn => Net::Cnn(Cnn::new(vb)?),
            Model::Resnet => Net::ResNet(ResNet::new(vb)?),
            Model::Transformer => Net::Transformer(Transformer::new(vb)?),
            Model::Mlp | Model::Wide => Net::Mlp(Mlp::new(vb)?),
        })
    }

    pub(super) fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        match self {
            Net::Words(model) => model.forward(x),
            Net::Mlp(model) => model.forward(x),
            Net::Cnn(model) => model.forward(x),
            Net::ResNet(model) => model.forward(x),
            Net::Transformer(model) => model.forward(x),
        }
    }
}
