//! The models, of candle's layers or of ours.

use candle_core::{Device, Module, Result as CandleResult, Tensor};
use candle_nn::VarBuilder;
use distribute::candle::{LayerNorm, layer_norm};
pub(super) use layers::Plain;
use layers::WIDTH;
pub(crate) use layers::{Layers, Ours};
use resnet::ResNet;

use super::super::Model;
use super::super::data::{self, TOKENS, VOCABULARY};

mod layers;
mod resnet;

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
            x = L::conv_relu_pool(convolution, &x)?;
        }
        self.head.forward(&x.flatten_from(1)?)
    }
}

struct Block<L: Layers> {
    norms: [LayerNorm; 2],
    qkv: L::Linear,
    out: L::Linear,
    up: L::Linear,
    down: L::Linear,
}

pub(super) struct Transformer<L: Layers> {
    tokens: L::Embedding,
    positions: L::Embedding,
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
            tokens: L::embedding(VOCABULARY, WIDTH, vb.pp("tokens"))?,
            positions: L::embedding(TOKENS, WIDTH, vb.pp("positions"))?,
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
            x = L::add(&x, &block.out.forward(&L::attention(&qkv, &self.mask)?)?)?;
            let hidden = L::linear_gelu(&block.up, &block.norms[1].forward(&x)?)?;
            x = L::add(&x, &block.down.forward(&hidden)?)?;
        }
        // One row for each token.
        self.head.forward(&self.norm.forward(&x)?)?.flatten(0, 1)
    }
}

/// The mean of words, of which few occur in a step.
pub(super) struct Words<L: Layers>(L::Embedding, L::Linear);

impl<L: Layers> Words<L> {
    fn new(vb: &VarBuilder<'_>) -> CandleResult<Words<L>> {
        let [words, width] = data::WORDS;
        Ok(Words(L::embedding(words, width, vb.pp("words"))?, L::linear(width, 10, vb.pp("head"))?))
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
