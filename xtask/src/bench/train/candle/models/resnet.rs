//! ResNet-20 for pictures of 32 × 32.

use candle_core::{Module, Result as CandleResult, Tensor};
use candle_nn::VarBuilder;

use super::layers::Layers;

/// A convolution with batch normalisation and a ReLU.
struct Conv<L: Layers>(L::Conv2d, L::BatchNorm);

impl<L: Layers> Conv<L> {
    fn new(from: usize, to: usize, stride: usize, vb: VarBuilder<'_>) -> CandleResult<Conv<L>> {
        Ok(Conv(L::strided(from, to, stride, vb.pp("conv"))?, L::batch_norm(to, vb.pp("norm"))?))
    }

    /// Computes the result, to which a shortcut is added before the ReLU if there is one.
    fn forward(&self, x: &Tensor, shortcut: Option<&Tensor>) -> CandleResult<Tensor> {
        L::norm_relu(&self.1, &self.0.forward(x)?, shortcut)
    }
}

pub(in super::super) struct ResNet<L: Layers> {
    entry: Conv<L>,
    blocks: Vec<[Conv<L>; 2]>,
    head: L::Linear,
}

impl<L: Layers> ResNet<L> {
    pub(super) fn new(vb: &VarBuilder<'_>) -> CandleResult<ResNet<L>> {
        let widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64];
        let block = |at: usize| {
            let ([from, to], vb) = ([widths[at], widths[at + 1]], vb.pp(format!("block{at}")));
            Ok([Conv::new(from, to, to / from, vb.pp("first"))?, Conv::new(to, to, 1, vb.pp("second"))?])
        };
        let blocks = (0..widths.len() - 1).map(block).collect::<CandleResult<_>>()?;
        Ok(ResNet { entry: Conv::new(3, 16, 1, vb.pp("entry"))?, blocks, head: L::linear(64, 10, vb.pp("head"))? })
    }
}

impl<L: Layers> Module for ResNet<L> {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let mut x = self.entry.forward(&x.reshape(((), 3, 32, 32))?, None)?;
        for [first, second] in &self.blocks {
            let inner = first.forward(&x, None)?;
            let shortcut = if inner.dims() == x.dims() { x } else { narrowed::<L>(&x)? };
            x = second.forward(&inner, Some(&shortcut))?;
        }
        self.head.forward(&x.mean((2, 3))?)
    }
}

/// Returns every second row and column, and as many channels of zeros as there are channels.
fn narrowed<L: Layers>(x: &Tensor) -> CandleResult<Tensor> {
    L::every_second(x)?.pad_with_zeros(1, 0, x.dim(1)?)
}
