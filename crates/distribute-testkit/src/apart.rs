//! Distances between results and the values that are expected of them.

/// Returns the largest absolute difference of two lists of numbers, element by element: 0 if they are equal, infinity
/// if their lengths differ or an element of either is not a number. Equal infinities do not differ.
///
/// A fold by `f32::max` over zipped lists leaves out NaN and what one list has more than the other, so that a result
/// that is missing or all NaN is 0 apart from anything.
///
/// # Examples
///
/// ```
/// use distribute_testkit::apart;
/// assert_eq!(apart(&[1.0_f32, 2.5], &[1.0, 2.0]), 0.5);
/// assert_eq!(apart(&[1.0_f32, f32::NAN], &[1.0, 2.0]), f64::INFINITY);
/// assert_eq!(apart(&[1.0_f32], &[1.0, 2.0]), f64::INFINITY);
/// ```
#[must_use]
pub fn apart<T: Copy + Into<f64>>(got: &[T], expected: &[T]) -> f64 {
    if got.len() != expected.len() {
        return f64::INFINITY;
    }
    let mut largest = 0.0;
    for (got, expected) in got.iter().zip(expected) {
        let (got, expected): (f64, f64) = ((*got).into(), (*expected).into());
        let difference = if got == expected { 0.0 } else { (got - expected).abs() };
        if difference.is_nan() {
            return f64::INFINITY;
        }
        largest = f64::max(largest, difference);
    }
    largest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_and_lists_of_other_lengths_are_infinitely_far() {
        let far: [(&[f32], &[f32]); 7] = [
            (&[f32::NAN], &[1.0]),
            (&[1.0], &[f32::NAN]),
            (&[f32::NAN], &[f32::NAN]),
            (&[f32::NAN, 1.0], &[1.0, 1.0]),
            (&[], &[1.0]),
            (&[1.0], &[]),
            (&[f32::INFINITY], &[f32::NEG_INFINITY]),
        ];
        for (got, expected) in far {
            assert_eq!(apart(got, expected), f64::INFINITY, "{got:?} and {expected:?}");
        }
    }

    #[test]
    fn the_largest_difference_counts() {
        assert_eq!(apart(&[1.0, -2.0, 3.0], &[1.0, 2.0, 4.0]), 4.0);
        assert_eq!(apart(&[f64::INFINITY], &[f64::INFINITY]), 0.0);
        assert_eq!(apart::<f32>(&[], &[]), 0.0);
    }
}
