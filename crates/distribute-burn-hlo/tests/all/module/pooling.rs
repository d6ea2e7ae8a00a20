//! Pooling.

use burn::tensor::TensorData;
use burn::tensor::module::{
    adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d, avg_pool1d, avg_pool2d, max_pool1d,
    max_pool1d_with_indices, max_pool2d, max_pool2d_with_indices,
};
use burn::tensor::ops::{AvgPoolOptions, MaxPoolOptions};
use burn_backend::DType;
use burn_backend::ops::ModuleOps;
use burn_capture::CaptureBackend;
use burn_std::IntDType;
use proptest::prelude::*;

use super::{cases, data, half, special};
use crate::harness::{Outputs, check, check_forward, check_recorded, refused_recorded};

/// The options of one spatial dimension (kernel, stride, padding, dilation), and a size that a window fits into.
fn dimension() -> impl Strategy<Value = (usize, usize, usize, usize, usize)> {
    (1..4usize, 1..4usize, 0..2usize, 1..3usize, 0..4usize).prop_map(|(kernel, stride, padding, dilation, more)| {
        (kernel, stride, padding.min(kernel / 2), dilation, (kernel - 1) * dilation + 1 + more)
    })
}

proptest! {
    #![proptest_config(cases(6))]

    #[test]
    fn largest(rows in dimension(), columns in dimension(), ceil: bool, seed: u64) {
        let line = MaxPoolOptions::new([rows.0])
            .with_stride([rows.1]).with_padding([rows.2]).with_dilation([rows.3]).with_ceil_mode(ceil);
        let plane = MaxPoolOptions::new([rows.0, columns.0])
            .with_stride([rows.1, columns.1])
            .with_padding([rows.2, columns.2])
            .with_dilation([rows.3, columns.3])
            .with_ceil_mode(ceil);
        let sizes = [2, 2, rows.4, columns.4];
        for values in [data(seed, &sizes), special(seed, &sizes)] {
            check("max_pool2d", 0.0, std::slice::from_ref(&values), |t| {
                Outputs::new().float(max_pool2d(t.float(0), plane.clone()))
            });
            check_forward("max_pool2d with indices", 0.0, &[values], |t| {
                let (largest, places) = max_pool2d_with_indices(t.float(0), plane.clone());
                let alone = max_pool2d(t.float(0), plane.clone());
                Outputs::new().float(largest).int(places).float(alone)
            });
        }
        for values in [data(seed, &sizes[..3]), special(seed, &sizes[..3])] {
            check("max_pool1d", 0.0, std::slice::from_ref(&values), |t| {
                Outputs::new().float(max_pool1d(t.float(0), line.clone()))
            });
            check_forward("max_pool1d with indices", 0.0, &[values], |t| {
                let (largest, places) = max_pool1d_with_indices(t.float(0), line.clone());
                Outputs::new().float(largest).int(places).float(max_pool1d(t.float(0), line.clone()))
            });
        }
    }

    #[test]
    fn averages(rows in dimension(), columns in dimension(), ceil: bool, counted: bool, seed: u64) {
        let line = AvgPoolOptions::new([rows.0])
            .with_stride([rows.1]).with_padding([rows.2]).with_ceil_mode(ceil).with_count_include_pad(counted);
        let plane = AvgPoolOptions::new([rows.0, columns.0])
            .with_stride([rows.1, columns.1])
            .with_padding([rows.2, columns.2])
            .with_ceil_mode(ceil)
            .with_count_include_pad(counted);
        let sizes = [2, 2, rows.4, columns.4];
        check("avg_pool2d", 1e-6, &[data(seed, &sizes)], |t| {
            Outputs::new().float(avg_pool2d(t.float(0), plane.clone()))
        });
        check("avg_pool1d", 1e-6, &[data(seed, &sizes[..3])], |t| {
            Outputs::new().float(avg_pool1d(t.float(0), line.clone()))
        });
    }

    #[test]
    fn adaptive(sizes in [1..8usize, 1..8usize, 1..5usize], counts in [1..5usize, 1..5usize, 1..4usize], seed: u64) {
        let [planes, rows, columns] = sizes;
        check("adaptive_avg_pool1d", 1e-6, &[data(seed, &[2, 2, rows])], |t| {
            Outputs::new().float(adaptive_avg_pool1d(t.float(0), counts[1]))
        });
        check("adaptive_avg_pool2d", 1e-6, &[data(seed, &[1, 2, planes, rows])], |t| {
            Outputs::new().float(adaptive_avg_pool2d(t.float(0), [counts[0], counts[1]]))
        });
        check("adaptive_avg_pool3d", 1e-6, &[data(seed, &[1, 1, planes, rows, columns])], |t| {
            Outputs::new().float(adaptive_avg_pool3d(t.float(0), counts))
        });
    }
}

#[test]
fn numbers_of_16_bits() {
    for (dtype, tolerance) in [(DType::F16, 4e-3), (DType::BF16, 4e-2)] {
        check("adaptive", tolerance, &[half(1, &[1, 2, 5, 7], dtype)], |t| {
            Outputs::new().float(adaptive_avg_pool2d(t.float(0), [2, 3]))
        });
        check("max", 0.0, &[half(1, &[1, 2, 5, 7], dtype)], |t| {
            Outputs::new().float(max_pool2d(t.float(0), MaxPoolOptions::new([2, 3])))
        });
    }
}

/// A window in padding has the index −1, which names no element.
#[test]
fn windows_in_padding() {
    let pool = |x, dtype| CaptureBackend::max_pool2d_with_indices(x, [1, 2], [1, 1], [2, 2], [1, 1], false, dtype);
    let given = [special(5, &[1, 2, 3, 3]), data(2, &[1, 2, 7, 6])];
    check_recorded("windows in padding", 0.0, &given, |_, mut t| {
        let grad = t.pop().unwrap();
        let x = t.pop().unwrap();
        let pooled = pool(x.clone(), IntDType::I32);
        let indices = pooled.indices.clone();
        let back =
            CaptureBackend::max_pool2d_with_indices_backward(x, [1, 2], [1, 1], [2, 2], [1, 1], false, grad, indices);
        vec![pooled.output, pooled.indices, back.x_grad]
    });
    let error = refused_recorded(&given[..1], |_, mut t| vec![pool(t.pop().unwrap(), IntDType::U32).indices]);
    assert!(error.to_string().contains("pad by less than a window"), "{error}");
    let image = TensorData::from([[[[1.0f32, 3.0], [3.0, 2.0]]]]);
    check_recorded("unsigned indices", 0.0, &[image], |_, mut t| {
        let x = t.pop().unwrap();
        let pooled = CaptureBackend::max_pool2d_with_indices(x, [2, 2], [1, 1], [1, 1], [1, 1], false, IntDType::U32);
        vec![pooled.output, pooled.indices]
    });
}
