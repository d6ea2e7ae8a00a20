//! Tests of the evaluator.

mod every_operation;

use hlo_evaluator::{Tensor, evaluate};

#[test]
fn every_operation_is_evaluated() {
    for replicas in [1, 2] {
        let program = every_operation::every_operation(replicas).unwrap();
        let input = Tensor::new([4, 6], (0..24).map(|n| n as f32 * 0.25 - 2.0).collect::<Vec<_>>());
        let outputs = evaluate(&program, &vec![vec![input]; replicas]).unwrap();
        for outputs in outputs {
            let types: Vec<_> = outputs.iter().map(Tensor::ty).collect();
            assert_eq!(types, program.outputs().iter().collect::<Vec<_>>());
        }
    }
}
