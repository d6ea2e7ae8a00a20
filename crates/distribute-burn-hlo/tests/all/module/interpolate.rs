//! Interpolation, and operations that have no lowering.

use burn::tensor::module::{deform_conv2d, interpolate};
use burn::tensor::ops::{DeformConvOptions, InterpolateMode, InterpolateOptions};
use proptest::prelude::*;

use super::{cases, data};
use crate::harness::{Outputs, check, refused};

proptest! {
    #![proptest_config(cases(5))]

    #[test]
    fn images(sizes in [1..6usize, 1..6usize], results in [1..8usize, 1..8usize], align: bool, seed: u64) {
        for mode in [InterpolateMode::Nearest, InterpolateMode::Bilinear, InterpolateMode::Bicubic] {
            let options = InterpolateOptions::new(mode.clone()).with_align_corners(align).with_output_size(results);
            check(&format!("{mode:?}"), 1e-5, &[data(seed, &[2, 1, sizes[0], sizes[1]])], |t| {
                Outputs::new().float(interpolate(t.float(0), options.clone()))
            });
        }
    }
}

#[test]
fn what_has_no_lowering_is_refused_in_words() {
    for mode in [InterpolateMode::NearestExact, InterpolateMode::Lanczos3] {
        let error = refused(&[data(1, &[1, 1, 2, 2])], |t| {
            let options = InterpolateOptions::new(mode.clone()).with_output_size([3, 3]);
            Outputs::new().float(interpolate(t.float(0), options))
        });
        assert!(error.to_string().contains("use nearest, bilinear or bicubic"), "{error}");
    }
    let given = [data(1, &[1, 1, 3, 3]), data(2, &[1, 2, 3, 3]), data(3, &[1, 1, 1, 1])];
    let error = refused(&given, |t| {
        let options = DeformConvOptions::new([1, 1], [0, 0], [1, 1], 1, 1);
        Outputs::new().float(deform_conv2d(t.float(0), t.float(1), t.float(2), None, None, options))
    });
    assert!(error.to_string().contains("its samples lie between elements"), "{error}");
}
