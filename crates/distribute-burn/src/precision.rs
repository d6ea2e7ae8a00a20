//! Types of parameters.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{FloatDType, Tensor};
use distribute_optim::backend::{TensorLibrary, Variable};
use distribute_values::TensorStorage;

use crate::tensor::{burn_type, flex_of, tensor_on};
use crate::{Burn, BurnTensor, Error, Result};

/// Converts the floating-point parameters of a module, and its running statistics, to another type.
///
/// In `scope` it makes a model of 16 bits, which the optimizers of this crate train in mixed precision: they keep each
/// parameter in f32 too, and compute there. The model's inputs are to have the same type, and losses are to be computed
/// in f32, as those of this crate are. f16 has a range of 6e-8 to 65504, so that gradients need
/// [`LossScale`](crate::LossScale).
///
/// # Examples
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{FloatDType, Tensor};
/// use distribute_burn::{Adam, BurnContext, BurnStrategy, Error, LossScale, cast_module};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let model = strategy.scope(|device| cast_module(LinearConfig::new(3, 1).init(device), FloatDType::F16))?;
/// let optimizer = Adam::new(0.1).build(&model)?.scale_losses(LossScale::dynamic())?;
/// strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
///     let x = Tensor::<2>::ones([2, 3], &context.burn_device()?).cast(FloatDType::F16);
///     // In f32, where a sum does not overflow.
///     let y = model.forward(x).cast(FloatDType::F32);
///     optimizer.minimize(context, &context.average_loss(y.square(), 4))
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub fn cast_module<M: Module>(module: M, dtype: FloatDType) -> M {
    module.map(&mut Cast(dtype))
}

struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let device = param.lazy_device();
        param.map(|value| {
            let is_trained = value.is_require_grad();
            match flex_of(value.clone().without_autodiff().cast(self.0)) {
                Ok(cast) => tensor_on(cast, &device).set_require_grad(is_trained),
                // Of another backend, which `scope` refuses in words.
                Err(_) => value,
            }
        })
    }
}

/// Converts a value to the type of a variable.
///
/// # Errors
/// [`Error::Range`] if a finite element becomes infinite.
pub(crate) fn as_type_of(variable: &Variable<Burn>, value: &BurnTensor) -> Result<BurnTensor> {
    let wanted = variable.components()[0].dtype()?;
    if value.dtype()? == wanted {
        return Ok(value.clone());
    }
    let converted = Burn::cast(value, wanted)?;
    let wide = |tensor: &BurnTensor| Ok::<_, Error>(Burn::cast(tensor, distribute_device::DType::F64)?.to_elements()?);
    let (before, after): (Vec<f64>, Vec<f64>) = (wide(value)?, wide(&converted)?);
    if before.iter().zip(&after).any(|(before, after)| before.is_finite() && !after.is_finite()) {
        let (name, dtype) = (variable.name().to_owned(), format!("{:?}", burn_type(wanted)));
        return Err(Error::Range { name, dtype });
    }
    Ok(converted)
}
