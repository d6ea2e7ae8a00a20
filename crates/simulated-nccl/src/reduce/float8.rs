//! 8-bit floats of the OCP specification "8-bit floating point"; values that are too large saturate.

use bytemuck::{Pod, Zeroable};

/// 4 bits of exponent, 3 of mantissa; no infinity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub(super) struct E4m3(pub(super) u8);

/// 5 bits of exponent, 2 of mantissa.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub(super) struct E5m2(pub(super) u8);

impl E4m3 {
    const LARGEST: u8 = 0x7e;
    const NAN: u8 = 0x7f;

    pub(super) fn to_f32(self) -> f32 {
        match self.0 & 0x7f {
            Self::NAN => f32::NAN,
            magnitude => signed(self.0, decode(magnitude, 3, 7)),
        }
    }

    pub(super) fn from_f32(value: f32) -> Self {
        Self(encode(value, Self::LARGEST, Self::NAN, 3, 7))
    }
}

impl E5m2 {
    const LARGEST: u8 = 0x7b;
    const INFINITY: u8 = 0x7c;
    const NAN: u8 = 0x7f;

    pub(super) fn to_f32(self) -> f32 {
        match self.0 & 0x7f {
            Self::INFINITY => signed(self.0, f32::INFINITY),
            magnitude if magnitude > Self::INFINITY => f32::NAN,
            magnitude => signed(self.0, decode(magnitude, 2, 15)),
        }
    }

    pub(super) fn from_f32(value: f32) -> Self {
        Self(encode(value, Self::LARGEST, Self::NAN, 2, 15))
    }
}

fn signed(bits: u8, magnitude: f32) -> f32 {
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

fn decode(magnitude: u8, mantissa_bits: u32, bias: i32) -> f32 {
    let mantissa = f32::from(magnitude & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits) as f32;
    match magnitude >> mantissa_bits {
        0 => mantissa * 2f32.powi(1 - bias),
        exponent => (1.0 + mantissa) * 2f32.powi(i32::from(exponent) - bias),
    }
}

/// Returns the nearest magnitude by binary search, since magnitudes grow with their bits; ties go to even.
fn encode(value: f32, largest: u8, nan: u8, mantissa_bits: u32, bias: i32) -> u8 {
    if value.is_nan() {
        return nan;
    }
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let distance = |magnitude: &u8| (decode(*magnitude, mantissa_bits, bias) - value.abs()).abs();
    let key = |magnitude: &u8| (distance(magnitude), magnitude & 1);
    let nearest = (0..=largest).min_by(|a, b| key(a).partial_cmp(&key(b)).unwrap_or(std::cmp::Ordering::Equal));
    let magnitude = if value.is_infinite() { largest } else { nearest.unwrap_or(largest) };
    sign | magnitude
}
