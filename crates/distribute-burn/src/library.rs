//! burn as a tensor library for optimizers.

#[cfg(feature = "pjrt")]
use std::any::Any;

use burn::tensor::{Gradients, Tensor};
use burn_backend::ops::FloatTensorOps;
use burn_flex::{Flex, FlexTensor};
use distribute_device::DType;
use distribute_optim::backend::{NoDevices, TensorLibrary};
use distribute_values::TensorStorage;

use crate::backend::is_whole;
use crate::hook;
use crate::tensor::{burn_type, node_of, refused};
use crate::{Burn, BurnTensor, Error, Result};

impl TensorLibrary for Burn {
    type Tensor = BurnTensor;
    type Loss = Tensor<1>;
    type Gradients = Gradients;
    type Error = Error;
    type Devices = NoDevices;

    const CUT_GRAPH: &'static str = "The loss does not depend on them: detach, inner and the arithmetic of integers \
        cut the graph. Parameters that are not to be trained are frozen by Model::freeze";

    fn backward(loss: &Tensor<1>) -> Result<Gradients> {
        #[cfg(feature = "pjrt")]
        if crate::pjrt::is_tracing() {
            let problem = "gradients are accumulated over several backward passes; call minimize once";
            return Err(Error::Trace { problem: problem.to_owned() });
        }
        // burn would panic.
        if !node_of(loss.clone()).is_ok_and(|loss| loss.is_tracked()) {
            return Err(distribute_optim::Error::NoGradient.into());
        }
        Ok(hook::around_backward(|| loss.backward()))
    }

    #[cfg(feature = "pjrt")]
    fn is_recording() -> bool {
        crate::pjrt::is_tracing()
    }

    #[cfg(feature = "pjrt")]
    fn record(loss: &Tensor<1>, optimizer: &dyn Fn() -> distribute_optim::Result<Box<dyn Any>>) -> Option<Result<()>> {
        crate::pjrt::record_step(optimizer, loss)
    }

    /// Every parameter reports its gradient while backward runs, or at its end.
    fn gradient(_: &Gradients, _: usize, _: &BurnTensor) -> Option<BurnTensor> {
        None
    }

    fn scale(loss: &Tensor<1>, factor: f64) -> Result<Tensor<1>> {
        Ok(loss.clone().mul_scalar(factor))
    }

    fn detach(tensor: &BurnTensor) -> BurnTensor {
        tensor.clone()
    }

    fn zeros_like(tensor: &BurnTensor) -> Result<BurnTensor> {
        let tensor = tensor.flex();
        Ok(BurnTensor::new(FlexTensor::zeros(tensor.layout().shape().clone(), tensor.dtype())))
    }

    fn cast(tensor: &BurnTensor, dtype: DType) -> Result<BurnTensor> {
        if !dtype.is_float() {
            let problem = format!("{dtype} is not a type of floating-point numbers");
            return Err(refused("convert a tensor", problem).into());
        }
        if tensor.dtype()? == dtype {
            return Ok(tensor.clone());
        }
        Ok(BurnTensor::new(Flex::float_cast(tensor.flex(), burn_type(dtype).into())))
    }

    fn add(a: &BurnTensor, b: &BurnTensor) -> Result<BurnTensor> {
        Ok(BurnTensor::new(Flex::float_add(a.flex(), b.flex())))
    }

    fn own(gradient: BurnTensor) -> Result<BurnTensor> {
        let is_own = gradient.is_alone() && is_whole(&gradient.flex());
        Ok(if is_own { gradient } else { gradient.copied()? })
    }

    fn is_on_host(_: &BurnTensor) -> bool {
        true
    }

    fn on_host(tensor: &BurnTensor) -> Result<BurnTensor> {
        Ok(tensor.clone())
    }
}
