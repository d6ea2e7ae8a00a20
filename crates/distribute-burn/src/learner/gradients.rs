//! The gradients of a step, summed over steps and replicas.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType as BurnType, FloatDType, Tensor};
use burn_backend::Element as BurnElement;
use burn_flex::{Flex, FlexTensor};
use distribute_collectives::ReduceOp;
use distribute_device::{BufferMut, DType, Element};
use distribute_strategy::ReplicaContext;
use distribute_types::with_dtype;

use crate::Result;
use crate::backend::whole;
use crate::tensor::{dtype_of, flex_of};

/// One replica's gradients since the last step of the optimizer, by parameter. Those of 16 bits are summed in 32.
#[derive(Default)]
pub(super) struct Accumulated {
    sums: HashMap<ParamId, FlexTensor>,
}

impl Accumulated {
    /// Adds the gradients of one batch, multiplied by `weight`.
    pub(super) fn add<M: Module>(&mut self, model: &M, gradients: GradientsParams, weight: f64) -> Result<()> {
        let mut adder = Adder { from: gradients, weight, to: &mut self.sums, outcome: Ok(()) };
        model.visit(&mut adder);
        adder.outcome
    }

    /// Returns the sums over all replicas, and forgets this replica's. A parameter without a gradient on any replica
    /// has none, and the optimizer leaves it as it is.
    pub(super) fn reduce<M: Module>(&mut self, context: &ReplicaContext, model: &M) -> Result<GradientsParams> {
        let mut listed = Listed { from: std::mem::take(&mut self.sums), all: Vec::new(), seen: HashSet::new() };
        model.visit(&mut listed);
        let mut all = listed.all;
        let mut present: Vec<f32> = all.iter().map(|one| f32::from(u8::from(one.is_present))).collect();
        if context.num_replicas_in_sync() > 1 {
            all_reduce(context, &mut all, &mut present)?;
        }
        let summed = all.into_iter().zip(present).filter(|(_, present)| *present > 0.0);
        let mut given =
            Given { from: summed.map(|(one, _)| (one.id, one.gradient)).collect(), to: GradientsParams::new() };
        model.visit(&mut given);
        Ok(given.to)
    }
}

/// Sums the gradients of all replicas in place: one operation for each element type.
fn all_reduce(context: &ReplicaContext, all: &mut [One], present: &mut [f32]) -> Result<()> {
    fn buffer<E: BurnElement + Element>(tensor: &mut FlexTensor) -> BufferMut<'_> {
        BufferMut::from(tensor.storage_mut::<E>())
    }
    let mut of_types: Vec<(DType, Vec<BufferMut<'_>>)> = vec![(DType::F32, vec![BufferMut::from(present)])];
    for one in all {
        let dtype = dtype_of(one.gradient.dtype())?;
        let buffer = with_dtype!(dtype, E => buffer::<E>(&mut one.gradient));
        match of_types.iter_mut().find(|(of, _)| *of == dtype) {
            Some((_, buffers)) => buffers.push(buffer),
            None => of_types.push((dtype, vec![buffer])),
        }
    }
    for (_, mut buffers) in of_types {
        context.group().all_reduce_list(&mut buffers, ReduceOp::Sum)?;
    }
    Ok(())
}

/// Returns whether sums of this type are kept in 32 bits.
fn is_short(dtype: BurnType) -> bool {
    matches!(dtype, BurnType::F16 | BurnType::BF16)
}

struct Adder<'a> {
    from: GradientsParams,
    weight: f64,
    to: &'a mut HashMap<ParamId, FlexTensor>,
    outcome: Result<()>,
}

impl ModuleVisitor for Adder<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // Tied parameters are visited several times; the first visit takes the gradient.
        let Some(gradient) = self.from.remove::<D>(param.id) else { return };
        let wide = if is_short(gradient.dtype()) { gradient.cast(FloatDType::F32) } else { gradient };
        // A product with 1 would be a copy.
        let weighed = if self.weight == 1.0 { wide } else { wide.mul_scalar(self.weight) };
        let sum = match self.to.remove(&param.id) {
            Some(sum) => Tensor::from_primitive::<Flex>(sum) + weighed,
            None => weighed,
        };
        match flex_of(sum) {
            Ok(sum) => {
                self.to.insert(param.id, sum);
            }
            Err(error) => self.outcome = Err(error.into()),
        }
    }
}

/// The gradient of one parameter on this replica.
struct One {
    id: ParamId,
    gradient: FlexTensor,
    is_present: bool,
}

/// Lists a gradient for each trained parameter, in the order of visits, which is equal on all replicas.
struct Listed {
    from: HashMap<ParamId, FlexTensor>,
    all: Vec<One>,
    seen: HashSet<ParamId>,
}

impl ModuleVisitor for Listed {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        if !value.is_require_grad() || !self.seen.insert(param.id) {
            return;
        }
        let gradient = self.from.remove(&param.id);
        let is_present = gradient.is_some();
        let zeros = || {
            let dtype = if is_short(value.dtype()) { BurnType::F32 } else { value.dtype() };
            FlexTensor::zeros(value.shape(), dtype)
        };
        self.all.push(One { id: param.id, gradient: gradient.map_or_else(zeros, whole), is_present });
    }
}

/// Registers gradients for their parameters.
struct Given {
    from: HashMap<ParamId, FlexTensor>,
    to: GradientsParams,
}

impl ModuleVisitor for Given {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.from.remove(&param.id) {
            let gradient = Tensor::<D>::from_primitive::<Flex>(gradient);
            let dtype = param.base().dtype();
            let gradient = if gradient.dtype() == dtype { gradient } else { gradient.cast(dtype) };
            self.to.register(param.id, gradient);
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;
    use distribute_strategy::MirroredStrategy;

    use super::*;

    #[derive(Module, Debug)]
    struct Pair {
        short: Linear,
        wide: Linear,
    }

    fn elements<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.cast(FloatDType::F32).into_data().try_to_vec().unwrap()
    }

    /// Sums in 16 bits would lose the small batches. Some gradients exist on one replica only, or on none.
    #[test]
    fn gradients_of_any_type_are_summed_over_batches_and_replicas() {
        let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build().unwrap();
        let device = Device::flex().autodiff();
        let half = |linear: Linear| linear.map(&mut Cast(FloatDType::F16));
        let model = Pair {
            short: half(LinearConfig::new(2, 1).init(&device)),
            wide: LinearConfig::new(2, 1).init(&device).map(&mut Cast(FloatDType::F64)),
        };
        let (short, wide, bias) = (model.short.weight.id, model.wide.weight.id, model.wide.bias.as_ref().unwrap().id);
        let full = |value: f32, dtype: FloatDType| Tensor::<2>::full([2, 1], value, &Device::flex()).cast(dtype);
        let reduced = strategy.run_with((), |context, ()| {
            let mut accumulated = Accumulated::default();
            for weight in std::iter::once(1.0).chain([1.0 / 4096.0; 8]) {
                let mut gradients = GradientsParams::new();
                gradients.register(short, full(2048.0, FloatDType::F16));
                if context.replica_id() == 1 {
                    gradients.register(wide, full(2.0, FloatDType::F64));
                }
                accumulated.add(&model, gradients, weight)?;
            }
            accumulated.reduce(context, &model)
        });
        for mut gradients in reduced.unwrap().into_values() {
            let of_short = gradients.remove::<2>(short).unwrap();
            assert_eq!(of_short.dtype(), BurnType::F16);
            assert_eq!(elements(of_short), [2.0 * 2052.0; 2]);
            let of_wide = gradients.remove::<2>(wide).unwrap();
            assert_eq!(of_wide.dtype(), BurnType::F64);
            assert_eq!(elements(of_wide), [2.0 + 8.0 / 2048.0; 2]);
            assert!(gradients.remove::<1>(bias).is_none());
            assert!(gradients.is_empty());
        }
    }

    struct Cast(FloatDType);

    impl burn::module::ModuleMapper for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| value.cast(self.0).detach().require_grad())
        }
    }
}
