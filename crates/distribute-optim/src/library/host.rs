//! Tensors in host memory, whose gradients the program computes itself.

use distribute_device::{BufferRef, DType};
use distribute_types::{Class, ErrorClass};
use distribute_values::{Host, HostTensor, TensorStorage};

use super::TensorLibrary;
use crate::NoDevices;

/// The gradients that a program has computed for the variables of a model, in their order; `None` for those that the loss does
/// not depend on.
#[derive(Clone, Debug, Default)]
pub struct HostLoss(pub Vec<Option<HostTensor<f32>>>);

/// What can go wrong with host tensors.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// The optimizer failed.
    #[error(transparent)]
    Optim(#[from] crate::Error),
    /// The strategy failed.
    #[error(transparent)]
    Strategy(#[from] distribute_strategy::Error),
    /// A distributed value was used wrongly.
    #[error(transparent)]
    Values(#[from] distribute_values::Error),
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] distribute_collectives::Error),
}

impl ErrorClass for HostError {
    fn class(&self) -> Class {
        match self {
            HostError::Optim(error) => error.class(),
            HostError::Strategy(error) => error.class(),
            HostError::Values(error) => error.class(),
            HostError::Collective(error) => error.class(),
        }
    }
}

impl TensorLibrary for Host {
    type Tensor = HostTensor<f32>;
    type Loss = HostLoss;
    type Gradients = Vec<Option<HostTensor<f32>>>;
    type Error = HostError;
    type Devices = NoDevices;

    const CUT_GRAPH: &'static str = "Give HostLoss a gradient for each variable that the loss depends on.";

    fn backward(loss: &HostLoss) -> Result<Self::Gradients, HostError> {
        Ok(loss.0.clone())
    }

    fn gradient(gradients: &Self::Gradients, index: usize, _: &HostTensor<f32>) -> Option<HostTensor<f32>> {
        gradients.get(index).cloned().flatten()
    }

    fn scale(loss: &HostLoss, factor: f64) -> Result<HostLoss, HostError> {
        let scale = |gradient: &HostTensor<f32>| {
            let elements = gradient.to_elements::<f32>()?.into_iter().map(|x| (f64::from(x) * factor) as f32).collect();
            HostTensor::new(&gradient.shape(), elements)
        };
        Ok(HostLoss(loss.0.iter().map(|gradient| gradient.as_ref().map(scale).transpose()).collect::<Result<_, _>>()?))
    }

    fn detach(tensor: &HostTensor<f32>) -> HostTensor<f32> {
        tensor.clone()
    }

    fn zeros_like(tensor: &HostTensor<f32>) -> Result<HostTensor<f32>, HostError> {
        let shape = tensor.shape();
        Ok(HostTensor::new(&shape, vec![0.0; shape.iter().product()])?)
    }

    fn cast(tensor: &HostTensor<f32>, _: DType) -> Result<HostTensor<f32>, HostError> {
        Ok(tensor.clone())
    }

    fn add(a: &HostTensor<f32>, b: &HostTensor<f32>) -> Result<HostTensor<f32>, HostError> {
        let sum: Vec<f32> = a.to_elements::<f32>()?.iter().zip(b.to_elements::<f32>()?).map(|(a, b)| a + b).collect();
        Ok(a.beside(&a.shape(), BufferRef::from(&sum[..]))?)
    }

    fn own(gradient: HostTensor<f32>) -> Result<HostTensor<f32>, HostError> {
        // The program may keep what it has given.
        Ok(gradient.copied()?)
    }

    fn is_on_host(_: &HostTensor<f32>) -> bool {
        true
    }
}
