//! The models, equal to those of `xtask/peers/torch_cuda.py`.

use candle_core::{D, DType, Module, Result, Tensor};
use candle_nn::{Conv2d, Embedding, Linear, VarBuilder, conv2d, embedding, linear, ops};
use clap::ValueEnum;

/// The kind of model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// 784-1024-1024-10.
    Mlp,
    /// Two convolutions and two linear layers on 28×28.
    Cnn,
    /// Six encoder layers of width 512 with eight heads, sequences of 256.
    Transformer,
}

/// The size of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) batch: usize,
    hidden: usize,
    channels: usize,
    width: usize,
    layers: usize,
    sequence: usize,
}

/// A model.
pub(crate) enum Model {
    Mlp([Linear; 3]),
    Cnn([Conv2d; 2], [Linear; 2]),
    Transformer(Box<Encoder>),
}

pub(crate) struct Encoder {
    tokens: Embedding,
    positions: Tensor,
    blocks: Vec<Block>,
    norm: Norm,
    out: Linear,
}

struct Block {
    norms: [Norm; 2],
    qkv: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
}

/// Layer normalisation with a backward pass, which candle's own lacks in its fast form.
struct Norm {
    scale: Tensor,
    shift: Tensor,
}

const CLASSES: usize = 10;
const VOCABULARY: usize = 1024;
const HEADS: usize = 8;

impl Kind {
    pub(crate) const ALL: [Kind; 3] = [Kind::Mlp, Kind::Cnn, Kind::Transformer];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Mlp => "mlp",
            Kind::Cnn => "cnn",
            Kind::Transformer => "transformer",
        }
    }

    /// Returns the size that is measured, or with `tiny` one that only shows that the program works.
    pub(crate) fn size(self, tiny: bool) -> Size {
        if tiny {
            return Size { batch: 8, hidden: 32, channels: 4, width: 32, layers: 2, sequence: 16 };
        }
        let batch = match self {
            Kind::Mlp => 1024,
            Kind::Cnn => 512,
            Kind::Transformer => 32,
        };
        Size { batch, hidden: 1024, channels: 32, width: 512, layers: 6, sequence: 256 }
    }

    pub(crate) fn build(self, size: Size, vb: &VarBuilder<'_>) -> Result<Model> {
        let Size { hidden, channels, .. } = size;
        Ok(match self {
            Kind::Mlp => Model::Mlp([
                linear(784, hidden, vb.pp("fc1"))?,
                linear(hidden, hidden, vb.pp("fc2"))?,
                linear(hidden, CLASSES, vb.pp("fc3"))?,
            ]),
            Kind::Cnn => Model::Cnn(
                [
                    conv2d(1, channels, 3, Default::default(), vb.pp("conv1"))?,
                    conv2d(channels, 2 * channels, 3, Default::default(), vb.pp("conv2"))?,
                ],
                [linear(2 * channels * 12 * 12, 128, vb.pp("fc1"))?, linear(128, CLASSES, vb.pp("fc2"))?],
            ),
            Kind::Transformer => Model::Transformer(Box::new(Encoder::new(size, vb)?)),
        })
    }

    /// Returns inputs, whose values are arbitrary but not zero, and classes.
    pub(crate) fn data(self, size: Size, dtype: DType, device: &candle_core::Device) -> Result<(Tensor, Tensor)> {
        let Size { batch, sequence, .. } = size;
        let inputs = match self {
            Kind::Transformer => {
                let tokens = (0..batch * sequence).map(|at| ((at * 2_654_435_761) % VOCABULARY) as u32);
                Tensor::from_vec(tokens.collect::<Vec<_>>(), (batch, sequence), device)?
            }
            Kind::Mlp | Kind::Cnn => {
                let pixels = (0..batch * 784).map(|at| ((at * 2_654_435_761) % 1000) as f32 / 1000.0);
                let pixels = Tensor::from_vec(pixels.collect::<Vec<_>>(), (batch, 784), device)?.to_dtype(dtype)?;
                if self == Kind::Cnn { pixels.reshape((batch, 1, 28, 28))? } else { pixels }
            }
        };
        let classes: Vec<u32> = (0..batch).map(|at| (at * 7 % CLASSES) as u32).collect();
        Ok((inputs, Tensor::from_vec(classes, batch, device)?))
    }
}

impl Model {
    /// Returns the type in which it computes.
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Model::Mlp([first, ..]) => first.weight().dtype(),
            Model::Cnn([first, _], _) => first.weight().dtype(),
            Model::Transformer(encoder) => encoder.positions.dtype(),
        }
    }
}

impl Module for Model {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Model::Mlp([fc1, fc2, fc3]) => fc3.forward(&fc2.forward(&fc1.forward(x)?.relu()?)?.relu()?),
            Model::Cnn([conv1, conv2], [fc1, fc2]) => {
                let x = conv2.forward(&conv1.forward(x)?.relu()?)?.relu()?;
                fc2.forward(&fc1.forward(&x.max_pool2d(2)?.flatten_from(1)?)?.relu()?)
            }
            Model::Transformer(encoder) => encoder.forward(x),
        }
    }
}

impl Encoder {
    fn new(size: Size, vb: &VarBuilder<'_>) -> Result<Encoder> {
        let Size { width, layers, sequence, .. } = size;
        Ok(Encoder {
            tokens: embedding(VOCABULARY, width, vb.pp("tokens"))?,
            positions: vb.get_with_hints((sequence, width), "positions", candle_nn::init::DEFAULT_KAIMING_NORMAL)?,
            blocks: (0..layers)
                .map(|layer| Block::new(width, &vb.pp(format!("block{layer}"))))
                .collect::<Result<_>>()?,
            norm: Norm::new(width, &vb.pp("norm"))?,
            out: linear(width, CLASSES, vb.pp("out"))?,
        })
    }
}

impl Module for Encoder {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let mut x = self.tokens.forward(tokens)?.broadcast_add(&self.positions)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        self.out.forward(&self.norm.forward(&x)?.mean(1)?)
    }
}

impl Block {
    fn new(width: usize, vb: &VarBuilder<'_>) -> Result<Block> {
        Ok(Block {
            norms: [Norm::new(width, &vb.pp("norm1"))?, Norm::new(width, &vb.pp("norm2"))?],
            qkv: linear(width, 3 * width, vb.pp("qkv"))?,
            out: linear(width, width, vb.pp("out"))?,
            up: linear(width, 4 * width, vb.pp("up"))?,
            down: linear(4 * width, width, vb.pp("down"))?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, sequence, width) = x.dims3()?;
        let each = width / HEADS;
        let qkv = self.qkv.forward(&self.norms[0].forward(x)?)?;
        let qkv = qkv.reshape((batch, sequence, 3, HEADS, each))?.permute((2, 0, 3, 1, 4))?;
        let [q, k, v] = [0, 1, 2].map(|which| qkv.get(which).and_then(|part| part.contiguous()));
        let scores = (q?.matmul(&k?.t()?)? / (each as f64).sqrt())?;
        let mixed = ops::softmax(&scores, D::Minus1)?.matmul(&v?)?;
        let mixed = mixed.transpose(1, 2)?.reshape((batch, sequence, width))?;
        let x = (x + self.out.forward(&mixed)?)?;
        let wide = self.up.forward(&self.norms[1].forward(&x)?)?.relu()?;
        &x + self.down.forward(&wide)?
    }
}

impl Norm {
    fn new(width: usize, vb: &VarBuilder<'_>) -> Result<Norm> {
        let get = |name, value| vb.get_with_hints(width, name, candle_nn::Init::Const(value));
        Ok(Norm { scale: get("weight", 1.0)?, shift: get("bias", 0.0)? })
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::layer_norm_slow(x, &self.scale, &self.shift, 1e-5)
    }
}
