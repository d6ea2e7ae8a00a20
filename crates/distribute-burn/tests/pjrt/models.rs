//! Models of the kinds that people train: all are plain modules of burn.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AvgPool2d, AvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::activation::{gelu, relu};
use burn::tensor::{Device, Int, Tensor};

#[derive(Module, Debug)]
pub(crate) struct Mlp {
    first: Linear,
    second: Linear,
    third: Linear,
}

impl Mlp {
    pub(crate) fn new(device: &Device) -> Mlp {
        Mlp {
            first: LinearConfig::new(12, 16).init(device),
            second: LinearConfig::new(16, 8).init(device),
            third: LinearConfig::new(8, 4).init(device),
        }
    }

    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = gelu(self.first.forward(x));
        self.third.forward(relu(self.second.forward(x)))
    }
}

#[derive(Module, Debug)]
pub(crate) struct Cnn {
    first: Conv2d,
    norm: BatchNorm,
    pool: MaxPool2d,
    second: Conv2d,
    mean: AvgPool2d,
    last: Linear,
}

impl Cnn {
    pub(crate) fn new(device: &Device) -> Cnn {
        Cnn {
            first: Conv2dConfig::new([1, 4], [3, 3]).init(device),
            norm: BatchNormConfig::new(4).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            second: Conv2dConfig::new([4, 6], [2, 2]).init(device),
            mean: AvgPool2dConfig::new([2, 2]).with_strides([1, 1]).init(),
            last: LinearConfig::new(6, 4).init(device),
        }
    }

    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let [rows, _] = x.dims();
        let x = self.norm.forward(self.first.forward(x.reshape([rows, 1, 8, 8])));
        let x = self.mean.forward(relu(self.second.forward(self.pool.forward(relu(x)))));
        self.last.forward(x.reshape([rows, 6]))
    }
}

#[derive(Module, Debug)]
pub(crate) struct Transformer {
    tokens: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
}

impl Transformer {
    pub(crate) fn new(device: &Device) -> Transformer {
        Transformer {
            tokens: EmbeddingConfig::new(11, 8).init(device),
            encoder: TransformerEncoderConfig::new(8, 16, 2, 2).with_dropout(0.0).init(device),
            head: LinearConfig::new(8, 11).init(device),
        }
    }

    pub(crate) fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [rows, length] = tokens.dims();
        let mask = burn::nn::attention::generate_autoregressive_mask(rows, length, &tokens.device());
        let x = self.tokens.forward(tokens);
        self.head.forward(self.encoder.forward(TransformerEncoderInput::new(x).mask_attn(mask)))
    }
}

#[derive(Module, Debug)]
pub(crate) struct Dropping {
    first: Linear,
    drop: Dropout,
    last: Linear,
}

impl Dropping {
    pub(crate) fn new(device: &Device) -> Dropping {
        Dropping {
            first: LinearConfig::new(12, 32).init(device),
            drop: DropoutConfig::new(0.5).init(),
            last: LinearConfig::new(32, 4).init(device),
        }
    }

    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.last.forward(self.drop.forward(relu(self.first.forward(x))))
    }
}
