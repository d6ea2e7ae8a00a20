//! Linear layers.

use distribute_kernels::linear::Linear;

use super::*;

proptest! {
    #![proptest_config(settings())]

    #[test]
    fn linear_layers_are_those_of_f64(rows in 0usize..150, inputs in 1usize..40, outputs in 1usize..40, biased: bool) {
        let layer = Linear { inputs, outputs };
        let (x, weight) = (numbers(rows * inputs, 1), numbers(outputs * inputs, 2));
        let (bias, gradient) = (numbers(outputs, 3), numbers(rows * outputs, 4));
        let mut y: Vec<f64> = (0..rows * outputs).map(|at| if biased { bias[at % outputs] } else { 0.0 }).collect();
        let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; weight.len()], vec![0.0; outputs]);
        for (row, output) in (0..rows).flat_map(|row| (0..outputs).map(move |output| (row, output))) {
            let at = row * outputs + output;
            db[output] += gradient[at];
            for input in 0..inputs {
                let (of_x, of_weight) = (row * inputs + input, output * inputs + input);
                y[at] += x[of_x] * weight[of_weight];
                dx[of_x] += gradient[at] * weight[of_weight];
                dw[of_weight] += gradient[at] * x[of_x];
            }
        }
        let of = |x: &[f32], weight: &[f32], bias: &[f32], gradient: &[f32]| {
            let y = layer.forward(x, weight, biased.then_some(bias));
            let (dx, dw) = (layer.backward_input(weight, gradient), layer.backward_weight(x, gradient));
            [y, dx, dw, layer.backward_bias(gradient)]
        };
        let got = of(&narrow(&x), &narrow(&weight), &narrow(&bias), &narrow(&gradient));
        for (got, (what, expected)) in got.iter().zip([("y", y), ("dx", dx), ("dw", dw), ("db", db)]) {
            assert_close(what, got, &expected, 1e-5);
        }
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let (layer, rows) = (Linear { inputs: 100, outputs: 70 }, 700);
    let (x, weight, gradient) = (numbers(rows * 100, 1), numbers(7000, 2), numbers(rows * 70, 3));
    let (x, weight, gradient) = (narrow(&x), narrow(&weight), narrow(&gradient));
    assert_threads_do_not_matter(|| {
        let y = layer.forward(&x, &weight, Some(&weight[..70]));
        let (dx, dw) = (layer.backward_input(&weight, &gradient), layer.backward_weight(&x, &gradient));
        [y, dx, dw, layer.backward_bias(&gradient)]
    });
}

#[test]
#[should_panic(expected = "the weight has 5 elements; give 6")]
fn lengths_are_checked() {
    Linear { inputs: 3, outputs: 2 }.forward(&[0f32; 3], &[0.0; 5], None);
}
