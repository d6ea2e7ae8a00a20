//! candle's tensors as distributed values.

use std::cell::RefCell;
use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, DType as CandleType, Device, InplaceOp1, Layout, Storage, Tensor};
use distribute_device::{BufferMut, BufferRef, DType, Element as Number};
use distribute_values::TensorStorage;

use crate::gpu::uploaded;

/// The marker type of candle's tensors, for traits that take a tensor library.
#[derive(Clone, Copy, Debug)]
pub enum Candle {}

impl TensorStorage<Candle> for Tensor {
    fn dtype(&self) -> distribute_values::Result<DType> {
        dtype_of(Tensor::dtype(self)).map_err(failed("read the type of a tensor"))
    }

    fn shape(&self) -> Vec<usize> {
        self.dims().to_vec()
    }

    fn read(&self, visit: &mut dyn FnMut(BufferRef<'_>)) -> distribute_values::Result<()> {
        let tensor = self.to_device(&Device::Cpu).and_then(|tensor| tensor.contiguous());
        let tensor = tensor.map_err(failed("bring a tensor's elements together"))?;
        let (storage, layout) = tensor.storage_and_layout();
        match &*storage {
            Storage::Cpu(storage) => see(storage, layout, visit).map_err(failed("read a tensor")),
            _ => Err(failed("read a tensor")(candle_core::Error::Msg("it is not on the CPU".to_owned()))),
        }
    }

    fn write(&self, visit: &mut dyn FnMut(BufferMut<'_>)) -> distribute_values::Result<()> {
        self.inplace_op1(&Change(RefCell::new(visit))).map_err(failed("write a tensor in place"))
    }

    fn overwrite(&self, elements: BufferRef<'_>) -> distribute_values::Result<()> {
        // candle copies along a dimension, so a scalar gets one.
        let given = self.beside(self.dims(), elements)?;
        let write = || match self.dims() {
            [] => self.reshape(1)?.slice_set(&given.reshape(1)?, 0, 0),
            _ => self.slice_set(&given, 0, 0),
        };
        write().map_err(failed("write a tensor"))
    }

    fn beside(&self, shape: &[usize], elements: BufferRef<'_>) -> distribute_values::Result<Tensor> {
        macro_rules! build {
            ($($dtype:ident => $t:ty),*) => {
                match elements.dtype() {
                    $(DType::$dtype => Tensor::from_slice(elements.as_slice::<$t>()?, shape, self.device()),)*
                    other => Err(candle_core::Error::Msg(format!("candle has no type {other}"))),
                }
            };
        }
        let tensor = build!(F32 => f32, F64 => f64, F16 => distribute_device::f16, BF16 => distribute_device::bf16,
            U8 => u8, I32 => i32, U32 => u32, I64 => i64);
        tensor.map_err(failed("make a tensor"))
    }

    fn copied(&self) -> distribute_values::Result<Tensor> {
        self.copy().map_err(failed("copy a tensor"))
    }
}

/// Returns the workspace's element type for a candle type.
pub(crate) fn dtype_of(dtype: CandleType) -> candle_core::Result<DType> {
    Ok(match dtype {
        CandleType::F32 => DType::F32,
        CandleType::F64 => DType::F64,
        CandleType::F16 => DType::F16,
        CandleType::BF16 => DType::BF16,
        CandleType::U8 => DType::U8,
        CandleType::I32 => DType::I32,
        CandleType::U32 => DType::U32,
        CandleType::I64 => DType::I64,
        other => {
            return Err(candle_core::Error::Msg(format!("type {other:?} cannot be distributed; convert it first")));
        }
    })
}

/// Returns whether a tensor on the CPU has all elements of its storage, in order.
pub(crate) fn is_whole(tensor: &Tensor) -> bool {
    let (storage, layout) = tensor.storage_and_layout();
    let len = match &*storage {
        Storage::Cpu(CpuStorage::F32(all)) => all.len(),
        Storage::Cpu(CpuStorage::F64(all)) => all.len(),
        Storage::Cpu(CpuStorage::F16(all)) => all.len(),
        Storage::Cpu(CpuStorage::BF16(all)) => all.len(),
        Storage::Cpu(CpuStorage::U8(all)) => all.len(),
        Storage::Cpu(CpuStorage::U32(all)) => all.len(),
        Storage::Cpu(CpuStorage::I32(all)) => all.len(),
        Storage::Cpu(CpuStorage::I64(all)) => all.len(),
        _ => return false,
    };
    layout.is_contiguous() && layout.start_offset() == 0 && len == layout.shape().elem_count()
}

/// Returns whether a type has 16 bits, for which training keeps an f32 copy.
pub(crate) fn is_short(dtype: CandleType) -> bool {
    matches!(dtype, CandleType::F16 | CandleType::BF16)
}

fn failed(action: &'static str) -> impl FnOnce(candle_core::Error) -> distribute_values::Error {
    move |error| distribute_values::Error::Tensor { action, source: Box::new(error) }
}

fn range(layout: &Layout) -> candle_core::Result<Range<usize>> {
    let offsets = layout.contiguous_offsets();
    let (start, end) = offsets.ok_or_else(|| candle_core::Error::Msg("the tensor is not contiguous".to_owned()))?;
    Ok(start..end)
}

fn see(storage: &CpuStorage, layout: &Layout, visit: &mut dyn FnMut(BufferRef<'_>)) -> candle_core::Result<()> {
    fn show<T: Number>(all: &[T], layout: &Layout, visit: &mut dyn FnMut(BufferRef<'_>)) -> candle_core::Result<()> {
        visit(BufferRef::from(&all[range(layout)?]));
        Ok(())
    }
    match storage {
        CpuStorage::F32(all) => show(all, layout, visit),
        CpuStorage::F64(all) => show(all, layout, visit),
        CpuStorage::F16(all) => show(all, layout, visit),
        CpuStorage::BF16(all) => show(all, layout, visit),
        CpuStorage::U8(all) => show(all, layout, visit),
        CpuStorage::I32(all) => show(all, layout, visit),
        CpuStorage::U32(all) => show(all, layout, visit),
        CpuStorage::I64(all) => show(all, layout, visit),
        other => dtype_of(other.dtype()).map(drop),
    }
}

/// An in-place operation that passes the tensor's elements to a function.
struct Change<'a>(RefCell<&'a mut dyn FnMut(BufferMut<'_>)>);

impl InplaceOp1 for Change<'_> {
    fn name(&self) -> &'static str {
        "distribute-change"
    }

    /// Copies through the host; operations of every step have kernels instead.
    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        let mut on_host = storage.to_cpu_storage()?;
        self.cpu_fwd(&mut on_host, layout)?;
        *storage = uploaded(storage.device(), on_host)?;
        Ok(())
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        fn show<T: Number>(
            all: &mut [T],
            layout: &Layout,
            visit: &mut dyn FnMut(BufferMut<'_>),
        ) -> candle_core::Result<()> {
            visit(BufferMut::from(&mut all[range(layout)?]));
            Ok(())
        }
        let visit = &mut **self.0.borrow_mut();
        match storage {
            CpuStorage::F32(all) => show(all, layout, visit),
            CpuStorage::F64(all) => show(all, layout, visit),
            CpuStorage::F16(all) => show(all, layout, visit),
            CpuStorage::BF16(all) => show(all, layout, visit),
            CpuStorage::U8(all) => show(all, layout, visit),
            CpuStorage::I32(all) => show(all, layout, visit),
            CpuStorage::U32(all) => show(all, layout, visit),
            CpuStorage::I64(all) => show(all, layout, visit),
            other => dtype_of(other.dtype()).map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overwriting_changes_all_handles_and_nothing_around_them() {
        let whole = Tensor::new(&[[1f32, 2.0], [3.0, 4.0], [5.0, 6.0]], &Device::Cpu).unwrap();
        let (handle, row) = (whole.clone(), whole.get(1).unwrap());
        row.overwrite(BufferRef::from(&[7f32, 8.0][..])).unwrap();
        assert_eq!(handle.to_elements::<f32>().unwrap(), [1.0, 2.0, 7.0, 8.0, 5.0, 6.0]);
        let scalar = Tensor::new(1f32, &Device::Cpu).unwrap();
        scalar.overwrite(BufferRef::from(&[2f32][..])).unwrap();
        assert_eq!(scalar.to_elements::<f32>().unwrap(), [2.0]);
        // Columns are not contiguous; others have another number, or another type.
        assert!(whole.narrow(1, 0, 1).unwrap().overwrite(BufferRef::from(&[0f32; 3][..])).is_err());
        assert!(row.overwrite(BufferRef::from(&[0f32; 3][..])).is_err());
        assert!(row.overwrite(BufferRef::from(&[0u32; 2][..])).is_err());
        assert_eq!(handle.to_elements::<f32>().unwrap(), [1.0, 2.0, 7.0, 8.0, 5.0, 6.0]);
    }
}
