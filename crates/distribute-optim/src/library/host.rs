//! Tensors in host memory whose gradients the program computes itself.

use std::sync::Arc;

use distribute_device::{BufferRef, DType};
use distribute_strategy::Strategy;
use distribute_types::{Class, ErrorClass};
use distribute_values::{Host, HostTensor, TensorStorage};

use super::{NoDevices, TensorLibrary};
use crate::sharding::scatter_whole;
use crate::{Parameters, ShardLayout, Trainable, Variable};

/// The gradients that a program has computed, in the order of the model's variables; `None` for variables that the loss
/// does not depend on.
#[derive(Clone, Debug, Default)]
pub struct HostLoss(pub Vec<Option<HostTensor<f32>>>);

/// A model of host tensors whose gradients the program computes itself.
///
/// # Examples
/// ```
/// use distribute_optim::{HostLoss, HostModel, Sgd};
/// use distribute_strategy::MirroredStrategy;
/// use distribute_values::{HostTensor, TensorStorage};
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let model = HostModel::new(&strategy, [("slope", HostTensor::new(&[1], vec![0.0])?)])?;
/// let optimizer = Sgd::new(0.5).build(&model)?;
/// strategy.run_with(&optimizer, |context, optimizer| {
///     let gradient = HostTensor::new(&[1], vec![-1.0 - context.replica_id() as f32])?;
///     optimizer.minimize(context, &HostLoss(vec![Some(gradient)]))
/// })?;
/// assert_eq!(model.values()?, [[1.5]]);      // -0.5 * (-1 - 2)
/// # Ok::<(), distribute_optim::HostError>(())
/// ```
#[derive(Clone, Debug)]
pub struct HostModel(Arc<Parameters<Host>>);

impl HostModel {
    /// Creates trainable variables with these names and values, with one component per replica of this process. Under a
    /// strategy that shards parameters, the components of large variables are the replicas' parts; every process then
    /// calls this.
    ///
    /// # Errors
    /// [`HostError::Values`] if a value cannot be copied, [`HostError::Collective`] if a process is missing or fails.
    pub fn new<'a>(
        strategy: &Strategy,
        variables: impl IntoIterator<Item = (&'a str, HostTensor<f32>)>,
    ) -> Result<HostModel, HostError> {
        let variable = |(name, value): (&str, HostTensor<f32>)| {
            if let Some(layout) = ShardLayout::of(strategy, &value.shape()) {
                let parts = scatter_whole(strategy, name, &layout, value.to_elements::<f32>()?)?;
                let mut variable = Variable::sharded(name, layout);
                for part in parts {
                    variable.push(HostTensor::new(&[part.len()], part)?);
                }
                return Ok(variable);
            }
            let mut variable = Variable::new(name, false);
            for _ in 0..strategy.num_local_replicas() {
                variable.push(if strategy.shares_variables() { value.clone() } else { value.copied()? });
            }
            Ok(variable)
        };
        let variables = variables.into_iter().map(variable).collect::<Result<_, HostError>>()?;
        Ok(HostModel(Arc::new(Parameters::new(strategy, variables, Vec::new(), None))))
    }

    /// Returns the elements of each variable on the first replica, of sharded variables those of its part;
    /// [`Variable::whole`] has all.
    ///
    /// # Errors
    /// [`HostError::Values`] if a value cannot be read.
    pub fn values(&self) -> Result<Vec<Vec<f32>>, HostError> {
        let value = |variable: &Variable<Host>| Ok(variable.components()[0].to_elements()?);
        self.0.variables().iter().map(value).collect()
    }
}

impl Trainable for HostModel {
    type Library = Host;

    fn parameters(&self) -> &Arc<Parameters<Host>> {
        &self.0
    }
}

/// The errors of optimizers over host tensors.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// The optimizer failed.
    #[error(transparent)]
    Optim(#[from] crate::Error),
    /// The strategy failed.
    #[error(transparent)]
    Strategy(#[from] distribute_strategy::Error),
    /// A distributed value was used incorrectly.
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
        // The program may keep a handle on the gradient that it passed.
        Ok(gradient.copied()?)
    }

    fn is_on_host(_: &HostTensor<f32>) -> bool {
        true
    }

    fn on_host(tensor: &HostTensor<f32>) -> Result<HostTensor<f32>, HostError> {
        Ok(tensor.clone())
    }
}
