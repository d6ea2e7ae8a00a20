//! candle as a tensor library for optimizers.

use candle_core::backprop::GradStore;
use candle_core::{DType as CandleType, Device, Tensor};
use distribute_device::DType;
use distribute_optim::backend::TensorLibrary;

use crate::gpu::Gpus;
use crate::sharded::{drop_recomputed, reset_current};
use crate::tensor::is_whole;
use crate::{Candle, Error, Result};

impl TensorLibrary for Candle {
    type Tensor = Tensor;
    type Loss = Tensor;
    type Gradients = GradStore;
    type Error = Error;
    type Devices = Gpus;

    const CUT_GRAPH: &'static str = "Operations of candle without a backward cut the graph in silence: in place of \
        candle_nn's layer_norm and rms_norm use those of distribute_candle (distribute::candle), in place of \
        softmax_last_dim candle_nn::ops::softmax, in place of rope rope_slow, in place of sdpa matmul and softmax. \
        Variables that are not to be trained are frozen by Model::freeze";

    fn backward(loss: &Tensor) -> Result<GradStore> {
        let gradients = loss.backward();
        // Blocks that this backward has brought into memory and has not passed, or that come next.
        reset_current()?;
        drop_recomputed()?;
        Ok(gradients?)
    }

    fn gradient(gradients: &GradStore, _: usize, variable: &Tensor) -> Option<Tensor> {
        gradients.get(variable).cloned()
    }

    fn scale(loss: &Tensor, factor: f64) -> Result<Tensor> {
        Ok((loss * factor)?)
    }

    fn detach(tensor: &Tensor) -> Tensor {
        tensor.detach()
    }

    fn zeros_like(tensor: &Tensor) -> Result<Tensor> {
        Ok(Tensor::zeros(tensor.shape(), tensor.dtype(), tensor.device())?)
    }

    fn cast(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
        Ok(tensor.detach().to_dtype(candle_type(dtype)?)?)
    }

    fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
        Ok((a.detach() + b.detach())?)
    }

    fn own(gradient: Tensor) -> Result<Tensor> {
        // candle sums every gradient in its own storage and keeps no handle on it; only gradients that are views are
        // copied.
        let is_whole = is_whole(&gradient);
        let gradient = gradient.detach();
        Ok(if is_whole { gradient } else { gradient.force_contiguous()? })
    }

    fn is_on_host(tensor: &Tensor) -> bool {
        tensor.device().is_cpu()
    }

    fn on_host(tensor: &Tensor) -> Result<Tensor> {
        Ok(tensor.detach().to_device(&Device::Cpu)?)
    }
}

/// Returns candle's type for an element type.
fn candle_type(dtype: DType) -> Result<CandleType> {
    Ok(match dtype {
        DType::F32 => CandleType::F32,
        DType::F64 => CandleType::F64,
        DType::F16 => CandleType::F16,
        DType::BF16 => CandleType::BF16,
        DType::U8 => CandleType::U8,
        DType::I32 => CandleType::I32,
        DType::U32 => CandleType::U32,
        DType::I64 => CandleType::I64,
        other => return Err(candle_core::Error::Msg(format!("candle has no type {other}")).into()),
    })
}
