//! Random values of every type, and tolerances of results.

use std::hash::{BuildHasher, Hasher, RandomState};

use distribute_device::{DType, bf16, f16};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::{Error, Result};

/// Random numbers from a seed that a failing check names.
pub(crate) struct Random {
    pub(crate) seed: u64,
    numbers: ChaCha8Rng,
}

impl Random {
    /// Creates a generator with a new seed.
    pub(crate) fn fresh() -> Random {
        Random::with(RandomState::new().build_hasher().finish())
    }

    /// Creates a generator with a given seed.
    pub(crate) fn with(seed: u64) -> Random {
        Random { seed, numbers: ChaCha8Rng::seed_from_u64(seed) }
    }

    /// Returns a number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.numbers.next_u64() % end.max(1) as u64) as usize
    }

    /// Returns random bytes.
    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.numbers.fill_bytes(&mut bytes);
        bytes
    }

    /// Returns elements: floats from -2 to 2, integers of any value.
    pub(crate) fn elements(&mut self, dtype: DType, count: usize) -> Vec<u8> {
        if !dtype.is_float() {
            return self.bytes(count * dtype.size_bytes());
        }
        let unit = |bits: u64| (bits >> 11) as f64 / (1u64 << 53) as f64 * 4.0 - 2.0;
        from_wide(dtype, &(0..count).map(|_| unit(self.numbers.next_u64())).collect::<Vec<f64>>())
    }
}

/// Converts floating-point elements to float64.
pub(crate) fn wide(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let chunks = bytes.chunks_exact(dtype.size_bytes());
    match dtype {
        DType::F64 => chunks.map(|bytes| f64::from_le_bytes(array(bytes))).collect(),
        DType::F16 => chunks.map(|bytes| f16::from_le_bytes(array(bytes)).to_f64()).collect(),
        DType::BF16 => chunks.map(|bytes| bf16::from_le_bytes(array(bytes)).to_f64()).collect(),
        _ => chunks.map(|bytes| f64::from(f32::from_le_bytes(array(bytes)))).collect(),
    }
}

/// Rounds to elements of a floating-point type; to 16 bits, by way of f32.
pub(crate) fn from_wide(dtype: DType, values: &[f64]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(values.len() * dtype.size_bytes());
    match dtype {
        DType::F64 => values.iter().for_each(|value| bytes.extend_from_slice(&value.to_le_bytes())),
        DType::F16 => {
            values.iter().for_each(|value| bytes.extend_from_slice(&f16::from_f32(*value as f32).to_le_bytes()))
        }
        DType::BF16 => {
            values.iter().for_each(|value| bytes.extend_from_slice(&bf16::from_f32(*value as f32).to_le_bytes()))
        }
        _ => values.iter().for_each(|value| bytes.extend_from_slice(&(*value as f32).to_le_bytes())),
    }
    bytes
}

/// Reads integer elements.
pub(crate) fn integers(dtype: DType, bytes: &[u8]) -> Vec<i128> {
    let chunks = bytes.chunks_exact(dtype.size_bytes());
    match dtype {
        DType::I8 => chunks.map(|bytes| i128::from(i8::from_le_bytes(array(bytes)))).collect(),
        DType::U8 => chunks.map(|bytes| i128::from(bytes[0])).collect(),
        DType::I32 => chunks.map(|bytes| i128::from(i32::from_le_bytes(array(bytes)))).collect(),
        DType::U32 => chunks.map(|bytes| i128::from(u32::from_le_bytes(array(bytes)))).collect(),
        DType::I64 => chunks.map(|bytes| i128::from(i64::from_le_bytes(array(bytes)))).collect(),
        _ => chunks.map(|bytes| i128::from(u64::from_le_bytes(array(bytes)))).collect(),
    }
}

/// Wraps an integer to an element's type.
pub(crate) fn wrapped(dtype: DType, value: i128) -> i128 {
    match dtype {
        DType::I8 => i128::from(value as i8),
        DType::U8 => i128::from(value as u8),
        DType::I32 => i128::from(value as i32),
        DType::U32 => i128::from(value as u32),
        DType::I64 => i128::from(value as i64),
        _ => i128::from(value as u64),
    }
}

/// Compares floating-point elements with a reference by ‖result − reference‖ / ‖reference‖.
pub(crate) fn compare(what: &str, dtype: DType, result: &[u8], reference: &[f64]) -> Result<()> {
    compare_terms(what, dtype, result, reference, reference)
}

/// Compares like [`compare`], by ‖result − reference‖ / ‖terms‖: for sums, whose error is proportional to the sums of
/// their terms' magnitudes, even if the terms cancel.
pub(crate) fn compare_terms(what: &str, dtype: DType, result: &[u8], reference: &[f64], terms: &[f64]) -> Result<()> {
    let result = wide(dtype, result);
    if result.len() != reference.len() {
        return Err(Error::Wrong(format!("{what}: {} elements came, not {}", result.len(), reference.len())));
    }
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let difference = square(&mut result.iter().zip(reference).map(|(a, b)| a - b));
    let size = square(&mut terms.iter().copied());
    let limit = match dtype {
        DType::F64 => 1e-14,
        DType::F16 => 1e-3,
        DType::BF16 => 1e-2,
        _ => 1e-6,
    };
    // Near zero, neighbouring numbers of a type are all as far apart, and each element is rounded to one of them.
    let spacing = match dtype {
        DType::F64 => f64::from_bits(1),
        DType::F16 => f16::from_bits(1).to_f64(),
        DType::BF16 => bf16::from_bits(1).to_f64(),
        _ => f64::from(f32::from_bits(1)),
    };
    let allowed = limit * size.max(f64::MIN_POSITIVE) + spacing * (reference.len() as f64).sqrt();
    // A NaN exceeds every limit.
    if difference <= allowed || (difference == 0.0 && size == 0.0) {
        return Ok(());
    }
    let worst = result.iter().zip(reference).enumerate().max_by(|(_, a), (_, b)| {
        let distance = |(value, wanted): &(&f64, &f64)| {
            let distance = (*value - *wanted).abs();
            if distance.is_nan() { f64::INFINITY } else { distance }
        };
        distance(a).total_cmp(&distance(b))
    });
    let worst = worst.map_or(String::new(), |(at, (value, wanted))| format!("; element {at} is {value}, not {wanted}"));
    Err(Error::Wrong(format!("{what}: relative difference {:.2e}, allowed {limit:.0e}{worst}", difference / size)))
}

/// Compares bytes.
pub(crate) fn same(what: &str, result: &[u8], expected: &[u8]) -> Result<()> {
    if result == expected {
        return Ok(());
    }
    let place = result.iter().zip(expected).position(|(a, b)| a != b);
    Err(Error::Wrong(match place {
        Some(at) => format!("{what}: byte {at} is {:#04x}, not {:#04x}", result[at], expected[at]),
        None => format!("{what}: {} bytes came, not {}", result.len(), expected.len()),
    }))
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(bytes);
    array
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_near_zero_may_be_rounded_to_their_neighbours() {
        // A product of sixteen numbers, between two neighbours of f16.
        let reference = -0.000_012_786_081_046_845_694;
        let check = |value: f16| compare("a product", DType::F16, &value.to_le_bytes(), &[reference]);
        let near = f16::from_f64(reference);
        check(near).unwrap();
        check(f16::from_bits(near.to_bits() + 2)).unwrap_err();
        let one = f16::from_f64(1.0);
        let of_one = |value: f16| compare("one", DType::F16, &value.to_le_bytes(), &[1.0]);
        of_one(one).unwrap();
        of_one(f16::from_bits(one.to_bits() + 2)).unwrap_err();
    }
}
