//! The arithmetic of reductions, on bytes.

mod element;
mod float8;

use bytemuck::Pod;
use half::{bf16, f16};
use nccl_sys::{DataType, RedOp};

use element::Element;
use float8::{E4m3, E5m2};

macro_rules! for_type {
    ($data_type:expr, $function:ident($($argument:expr),*)) => {
        match $data_type {
            DataType::INT8 => Some($function::<i8>($($argument),*)),
            DataType::UINT8 => Some($function::<u8>($($argument),*)),
            DataType::INT32 => Some($function::<i32>($($argument),*)),
            DataType::UINT32 => Some($function::<u32>($($argument),*)),
            DataType::INT64 => Some($function::<i64>($($argument),*)),
            DataType::UINT64 => Some($function::<u64>($($argument),*)),
            DataType::FLOAT16 => Some($function::<f16>($($argument),*)),
            DataType::FLOAT32 => Some($function::<f32>($($argument),*)),
            DataType::FLOAT64 => Some($function::<f64>($($argument),*)),
            DataType::BFLOAT16 => Some($function::<bf16>($($argument),*)),
            DataType::FLOAT8_E4M3 => Some($function::<E4m3>($($argument),*)),
            DataType::FLOAT8_E5M2 => Some($function::<E5m2>($($argument),*)),
            _ => None,
        }
    };
}

/// Combines the parts in their order; all have the length of the first. `None` for an unknown type.
pub(crate) fn reduce(data_type: DataType, op: RedOp, parts: &[Vec<u8>]) -> Option<Vec<u8>> {
    for_type!(data_type, combine(op, parts))
}

/// Multiplies each element by a factor of the same type. `None` for an unknown type.
pub(crate) fn scale(data_type: DataType, bytes: &[u8], factor: &[u8]) -> Option<Vec<u8>> {
    for_type!(data_type, multiply(bytes, factor))
}

fn combine<T: Element>(op: RedOp, parts: &[Vec<u8>]) -> Vec<u8> {
    let Some((first, others)) = parts.split_first() else { return Vec::new() };
    let step: fn(T::Sum, T::Sum) -> T::Sum = match op {
        RedOp::PROD => T::multiply,
        RedOp::MAX => T::max,
        RedOp::MIN => T::min,
        _ => T::add,
    };
    let mut sums: Vec<_> = elements::<T>(first).map(T::widen).collect();
    for part in others {
        sums.iter_mut().zip(elements::<T>(part)).for_each(|(sum, element)| *sum = step(*sum, element.widen()));
    }
    let finish = |sum| if op == RedOp::AVG { T::divide(sum, parts.len()) } else { sum };
    bytes(sums.into_iter().map(|sum| T::narrow(finish(sum))))
}

fn multiply<T: Element>(bytes_of: &[u8], factor: &[u8]) -> Vec<u8> {
    let Some(factor) = elements::<T>(factor).next() else { return bytes_of.to_vec() };
    bytes(elements::<T>(bytes_of).map(|element| T::narrow(T::multiply(element.widen(), factor.widen()))))
}

/// Returns the elements of memory of any alignment.
fn elements<T: Pod>(bytes: &[u8]) -> impl Iterator<Item = T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned)
}

fn bytes<T: Pod>(elements: impl Iterator<Item = T>) -> Vec<u8> {
    bytemuck::cast_slice(&elements.collect::<Vec<T>>()).to_vec()
}

#[cfg(test)]
mod tests;
