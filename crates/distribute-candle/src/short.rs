//! Operations whose gradients are sums over many elements of 16 bits. candle rounds to 16 bits after each addition, so
//! that a sum stops growing once its terms are below half of its last bit; here such sums are f32 until they are whole.

use candle_core::backend::BackendStorage;
use candle_core::op::Add;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, CustomOp2, DType, Layout, Result, Shape, Storage, Tensor};

use crate::tensor::is_short;

/// Adds a bias like [`Tensor::broadcast_add`].
pub(crate) fn add_bias(x: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let alike = bias.dtype() == x.dtype() && bias.device().same_device(x.device());
    let fits = x.elem_count() > 0 && bias.broadcast_as(x.shape()).is_ok();
    if is_short(x.dtype()) && alike && fits && bias.track_op() {
        return x.apply_op2(bias, AddBias);
    }
    x.broadcast_add(bias)
}

/// Returns rows of a table like [`Tensor::index_select`], for indices of one axis, side by side.
pub(crate) fn rows_of(table: &Tensor, indices: &Tensor) -> Result<Tensor> {
    if is_short(table.dtype()) && table.track_op() && indices.elem_count() > 0 {
        return table.apply_op1(LookUp { indices: indices.clone() });
    }
    table.index_select(indices, 0)
}

struct AddBias;

impl CustomOp2 for AddBias {
    fn name(&self) -> &'static str {
        "add-bias"
    }

    fn cpu_fwd(&self, x: &CpuStorage, of_x: &Layout, bias: &CpuStorage, of_bias: &Layout) -> Result<Computed> {
        sum((x, of_x), (bias, of_bias))
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        of_x: &Layout,
        bias: &CudaStorage,
        of_bias: &Layout,
    ) -> Result<Computed<CudaStorage>> {
        sum((x, of_x), (bias, of_bias))
    }

    fn bwd(
        &self,
        x: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let before = gradient.rank() - bias.rank();
        let is_spread = |axis: &usize| *axis < before || bias.dims()[*axis - before] != gradient.dims()[*axis];
        let axes: Vec<usize> = (0..gradient.rank()).filter(is_spread).collect();
        let of_bias = gradient.to_dtype(DType::F32)?.sum_keepdim(axes)?.reshape(bias.shape())?;
        Ok((x.track_op().then(|| gradient.clone()), Some(of_bias.to_dtype(bias.dtype())?)))
    }
}

/// The elements and the shape of a result.
type Computed<S = CpuStorage> = (S, Shape);

fn sum<S: BackendStorage>((x, of_x): (&S, &Layout), (bias, of_bias): (&S, &Layout)) -> Result<Computed<S>> {
    let spread = of_bias.broadcast_as(of_x.shape())?;
    Ok((x.binary_impl::<Add>(bias, of_x, &spread)?, of_x.shape().clone()))
}

struct LookUp {
    indices: Tensor,
}

impl LookUp {
    fn shape(&self, table: &Layout) -> Shape {
        Shape::from([self.indices.dims(), &table.dims()[1..]].concat())
    }
}

impl CustomOp1 for LookUp {
    fn name(&self) -> &'static str {
        "look-up"
    }

    fn cpu_fwd(&self, table: &CpuStorage, layout: &Layout) -> Result<Computed> {
        let (indices, of_indices) = self.indices.storage_and_layout();
        let Storage::Cpu(indices) = &*indices else { candle_core::bail!("indices are not in host memory") };
        Ok((table.index_select(indices, layout, of_indices, 0)?, self.shape(layout)))
    }

    fn cuda_fwd(&self, table: &CudaStorage, layout: &Layout) -> Result<Computed<CudaStorage>> {
        let (indices, of_indices) = self.indices.storage_and_layout();
        let Storage::Cuda(indices) = &*indices else { candle_core::bail!("indices are not on the GPU of their table") };
        Ok((table.index_select(indices, layout, of_indices, 0)?, self.shape(layout)))
    }

    fn bwd(&self, table: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let zeros = Tensor::zeros(table.shape(), DType::F32, table.device())?;
        let sum = zeros.index_add(&self.indices, &gradient.to_dtype(DType::F32)?.contiguous()?, 0)?;
        sum.to_dtype(table.dtype()).map(Some)
    }
}
