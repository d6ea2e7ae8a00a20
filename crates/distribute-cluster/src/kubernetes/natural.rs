//! The natural order of names.

use std::cmp::Ordering;

/// Compares names in their natural order: runs of digits by their numbers, so that `x-10` comes after `x-2`, and all
/// else by its bytes. Names that differ only in leading zeros are ordered as text, so that the order is total.
pub(super) fn compare(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a.as_bytes(), b.as_bytes());
    while let (Some(first), Some(second)) = (left.first(), right.first()) {
        let order = if first.is_ascii_digit() && second.is_ascii_digit() {
            let (x, y) = (number(&mut left), number(&mut right));
            // Without leading zeros, the longer number is the greater one.
            x.len().cmp(&y.len()).then_with(|| x.cmp(y))
        } else {
            (left, right) = (&left[1..], &right[1..]);
            first.cmp(second)
        };
        if order.is_ne() {
            return order;
        }
    }
    left.len().cmp(&right.len()).then_with(|| a.cmp(b))
}

/// Takes the digits at the beginning, and returns them without leading zeros.
fn number<'a>(text: &mut &'a [u8]) -> &'a [u8] {
    let digits = text.iter().take_while(|c| c.is_ascii_digit()).count();
    let (number, rest) = text.split_at(digits);
    *text = rest;
    let zeros = number.iter().take_while(|c| **c == b'0').count();
    &number[zeros..]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_are_compared_as_numbers() {
        let mut names = ["x-10", "x-2", "x-1", "w-11", "x-2-b", "x", "x-02", "x-99999999999999999999999", "x-a", "x-0"];
        names.sort_by(|a, b| compare(a, b));
        let expected = ["w-11", "x", "x-0", "x-1", "x-02", "x-2", "x-2-b", "x-10", "x-99999999999999999999999", "x-a"];
        assert_eq!(names, expected);
    }

    proptest! {
        #[test]
        fn the_order_is_total(a in "[ab01-]{0,6}", b in "[ab01-]{0,6}", c in "[ab01-]{0,6}") {
            prop_assert_eq!(compare(&a, &b), compare(&b, &a).reverse());
            prop_assert_eq!(compare(&a, &b).is_eq(), a == b);
            if compare(&a, &b).is_le() && compare(&b, &c).is_le() {
                prop_assert!(compare(&a, &c).is_le());
            }
        }
    }
}
