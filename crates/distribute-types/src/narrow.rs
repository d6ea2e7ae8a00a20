//! Conversions to 16 bits that round once.

use half::{bf16, f16};

/// Rounds to the nearest f16, and to the even one of two that are equally near.
///
/// [`f16::from_f64`] rounds twice on processors that convert by way of f32, and otherwise leaves out the last 32 bits,
/// so that its result depends on the processor. This one is the same everywhere.
///
/// # Examples
/// ```
/// use distribute_types::{f16, f16_from_f64};
/// // A little more than half way between 2048 and 2050.
/// assert_eq!(f16_from_f64(2049.0 + 1.0 / 16_777_216.0), f16::from_f32(2050.0));
/// assert_eq!(f16_from_f64(2049.0), f16::from_f32(2048.0));
/// assert!(f16_from_f64(f64::NAN).is_nan());
/// ```
pub fn f16_from_f64(value: f64) -> f16 {
    f16::from_f32(rounded_to_odd(value))
}

/// Rounds to the nearest bf16, and to the even one of two that are equally near.
///
/// [`bf16::from_f64`] leaves out the last 32 bits.
///
/// # Examples
/// ```
/// use distribute_types::{bf16, bf16_from_f64};
/// // A little more than half way between 256 and 258.
/// assert_eq!(bf16_from_f64(257.0 + 1.0 / 16_777_216.0), bf16::from_f32(258.0));
/// ```
pub fn bf16_from_f64(value: f64) -> bf16 {
    bf16::from_f32(rounded_to_odd(value))
}

/// Returns the value if f32 has it, else the neighbour in f32 whose last bit is 1. Its last bit stands for all that
/// were dropped, so that a second rounding, to at least two bits less, gives the result of a single one (Boldo and
/// Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
fn rounded_to_odd(value: f64) -> f32 {
    let near = value as f32;
    let (back, bits) = (f64::from(near), near.to_bits());
    // What exceeds f32 is infinite in 16 bits too.
    if back == value || !back.is_finite() || bits & 1 == 1 {
        return near;
    }
    // The magnitude is in the lower bits.
    f32::from_bits(if back.abs() > value.abs() { bits - 1 } else { bits + 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts that a result is the nearest value, and even if its neighbour is as near. Differences of a double and a
    /// value of 16 bits next to it are exact.
    fn check(value: f64, bits: u16, widen: fn(u16) -> f64) {
        let result = widen(bits);
        let error = (result - value).abs();
        for other in [bits.wrapping_sub(1), bits.wrapping_add(1)] {
            let neighbour = widen(other);
            if neighbour.is_finite() && neighbour.is_sign_negative() == result.is_sign_negative() {
                let other_error = (neighbour - value).abs();
                assert!(error < other_error || (error == other_error && bits & 1 == 0), "{value:e}: {result:e}");
            }
        }
    }

    fn check_both(value: f64) {
        check(value, f16_from_f64(value).to_bits(), |bits| f16::from_bits(bits).to_f64());
        check(value, bf16_from_f64(value).to_bits(), |bits| bf16::from_bits(bits).to_f64());
    }

    #[test]
    fn doubles_next_to_ties_go_to_the_nearest() {
        let middles = |bits: u16| {
            let half = |widen: fn(u16) -> f64| (widen(bits) + widen(bits + 1)) / 2.0;
            [half(|bits| f16::from_bits(bits).to_f64()), half(|bits| bf16::from_bits(bits).to_f64())]
        };
        // Steps of a prime, so that all exponents and both parities occur.
        for bits in (0..0x7f7f).step_by(7) {
            for tie in middles(bits).into_iter().filter(|tie| tie.is_finite() && *tie < 65504.0) {
                for value in [tie, tie.next_up(), tie.next_down(), tie * (1.0 + 1e-9), tie * (1.0 - 1e-9)] {
                    check_both(value);
                    check_both(-value);
                }
            }
        }
    }

    #[test]
    fn any_double_goes_to_the_nearest() {
        let mut state = 1u64;
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Between 2^-30 and 2^15.
            let exponent = 1023 - 30 + (state >> 58) % 45;
            check_both(f64::from_bits((state << 6 >> 12) | (exponent << 52)));
        }
    }

    #[test]
    fn the_ends_of_the_range_are_those_of_the_types() {
        for sign in [1.0, -1.0] {
            for (value, expected) in [
                (0.0, 0.0),
                (f64::MIN_POSITIVE, 0.0),
                (2f64.powi(-25), 0.0),
                (2f64.powi(-25).next_up(), 2f64.powi(-24)),
                (65520f64.next_down(), 65504.0),
                (65520.0, f64::INFINITY),
                (f64::MAX, f64::INFINITY),
                (f64::INFINITY, f64::INFINITY),
            ] {
                assert_eq!(f16_from_f64(sign * value).to_f64().to_bits(), (sign * expected).to_bits(), "{value:e}");
            }
            assert_eq!(bf16_from_f64(sign * f64::MAX).to_f64(), sign * f64::INFINITY);
            assert_eq!(bf16_from_f64(sign * 2f64.powi(-134)).to_f64().to_bits(), (sign * 0.0).to_bits());
            assert_eq!(bf16_from_f64(sign * 2f64.powi(-134).next_up()).to_f64(), sign * 2f64.powi(-133));
        }
        assert!(f16_from_f64(f64::NAN).is_nan() && bf16_from_f64(f64::NAN).is_nan());
    }
}
