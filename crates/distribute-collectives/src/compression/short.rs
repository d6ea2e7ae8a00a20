//! 16-bit floats.

use bytemuck::{cast_slice, cast_slice_mut};
use distribute_device::DType;
use half::{bf16, f16};

use super::{Compressor, Payload};
use crate::kernel;

/// Sends values rounded to 16 bits and keeps the rounding error.
pub(super) struct Short {
    pub(super) dtype: DType,
}

impl Compressor for Short {
    fn begin(&mut self, values: &mut [f32]) -> Payload {
        if self.dtype == DType::F16 {
            let mut short = vec![f16::ZERO; values.len()];
            kernel::round_off(self.dtype, values, cast_slice_mut(&mut short));
            Payload::SumF16(short)
        } else {
            let mut short = vec![bf16::ZERO; values.len()];
            kernel::round_off(self.dtype, values, cast_slice_mut(&mut short));
            Payload::SumBf16(short)
        }
    }

    fn go_on(&mut self, received: Payload, _: &mut [f32], sum: &mut [f32]) -> Option<Payload> {
        match &received {
            Payload::SumF16(short) => kernel::widen(self.dtype, cast_slice(short), sum),
            Payload::SumBf16(short) => kernel::widen(self.dtype, cast_slice(short), sum),
            _ => {}
        }
        None
    }
}
