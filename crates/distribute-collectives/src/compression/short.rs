//! 16-bit floats.

use bytemuck::{cast_slice, cast_slice_mut};
use distribute_arithmetic::{ShortFloat, round_off, widen};
use half::{bf16, f16};

use super::{Compressor, Payload};

/// Sends values rounded to 16 bits and keeps the rounding error.
pub(super) struct Short(pub(super) ShortFloat);

impl Compressor for Short {
    fn begin(&mut self, values: &mut [f32]) -> Payload {
        match self.0 {
            ShortFloat::F16 => {
                let mut short = vec![f16::ZERO; values.len()];
                round_off(self.0, values, cast_slice_mut(&mut short));
                Payload::SumF16(short)
            }
            ShortFloat::Bf16 => {
                let mut short = vec![bf16::ZERO; values.len()];
                round_off(self.0, values, cast_slice_mut(&mut short));
                Payload::SumBf16(short)
            }
        }
    }

    fn go_on(&mut self, received: Payload, _: &mut [f32], sum: &mut [f32]) -> Option<Payload> {
        match &received {
            Payload::SumF16(short) => widen(ShortFloat::F16, cast_slice(short), sum),
            Payload::SumBf16(short) => widen(ShortFloat::Bf16, cast_slice(short), sum),
            _ => {}
        }
        None
    }
}
