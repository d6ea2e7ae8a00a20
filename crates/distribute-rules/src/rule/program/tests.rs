use distribute_hlo::{Builder, ElementType, TensorType};
use hlo_evaluator::{Data, Tensor, evaluate};
use proptest::prelude::*;

use super::{UpdateRule, norm};

fn rules() -> impl Strategy<Value = UpdateRule> {
    let moments = || (0.0..0.99f64, 0.5..0.999f64, 1e-8..1e-3f64, prop_oneof![Just(0.0), 0.0..0.1f64]);
    prop_oneof![
        (prop_oneof![Just(0.0), 0.0..0.99f64], any::<bool>())
            .prop_map(|(momentum, nesterov)| UpdateRule::Sgd { momentum, nesterov }),
        moments().prop_map(|(beta1, beta2, epsilon, weight_decay)| UpdateRule::Adam {
            beta1,
            beta2,
            epsilon,
            weight_decay
        }),
        (0.0..1.0f64, 1e-7..1e-3f64)
            .prop_map(|(initial_accumulator, epsilon)| UpdateRule::Adagrad { initial_accumulator, epsilon }),
        (0.5..0.99f64, prop_oneof![Just(0.0), 0.0..0.99f64], 1e-5..1e-3f64, any::<bool>())
            .prop_map(|(rho, momentum, epsilon, centered)| UpdateRule::RmsProp { rho, momentum, epsilon, centered }),
        moments().prop_map(|(beta1, beta2, epsilon, weight_decay)| UpdateRule::Lamb {
            beta1,
            beta2,
            epsilon,
            weight_decay
        }),
        (0.5..0.99f64, 1e-5..1e-3f64).prop_map(|(rho, epsilon)| UpdateRule::Adadelta { rho, epsilon }),
        moments().prop_map(|(beta1, beta2, epsilon, _)| UpdateRule::Adamax { beta1, beta2, epsilon }),
        moments().prop_map(|(beta1, beta2, epsilon, _)| UpdateRule::Nadam { beta1, beta2, epsilon }),
        (0.01..1.0f64, 0.0..0.5f64, 0.0..0.5f64, 0.0..0.5f64, 0.0..1.0f64).prop_map(
            |(initial_accumulator, l1, l2, l2_shrinkage, beta)| UpdateRule::Ftrl {
                initial_accumulator,
                l1,
                l2,
                l2_shrinkage,
                beta
            }
        ),
    ]
}

fn tensor(values: &[f32]) -> Tensor {
    Tensor::new([values.len()], values.to_vec())
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    match tensor.data() {
        Data::F32(values) => values.clone(),
        other => panic!("{:?}", other.element()),
    }
}

/// Makes steps by a program: each takes the result of the one before it.
fn by_program(rule: UpdateRule, parameter: &[f32], gradients: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let ty = TensorType::new(ElementType::F32, [parameter.len()]);
    let mut b = Builder::new("step");
    let numbers: Vec<_> =
        rule.numbers(1, 0.1).iter().map(|_| b.parameter(TensorType::scalar(ElementType::F32))).collect();
    let (p, g) = (b.parameter(ty.clone()), b.parameter(ty.clone()));
    let slots: Vec<_> = rule.slots().iter().map(|_| b.parameter(ty.clone())).collect();
    let (updated, updated_slots) = rule.add_to_program(&mut b, &numbers, p, g, &slots).unwrap();
    let outputs: Vec<_> = [updated].into_iter().chain(updated_slots).collect();
    let program = b.finish(&outputs).unwrap();
    let initial = |slot: &&str| vec![rule.initial(slot) as f32; parameter.len()];
    let mut state: Vec<Vec<f32>> = [parameter.to_vec()].into_iter().chain(rule.slots().iter().map(initial)).collect();
    for (step, gradient) in gradients.iter().enumerate() {
        let numbers = rule.numbers(step as u64 + 1, 0.1);
        let mut inputs: Vec<Tensor> =
            numbers.iter().map(|number| Tensor::new(Vec::new(), vec![*number as f32])).collect();
        inputs.extend([tensor(&state[0]), tensor(gradient)]);
        inputs.extend(state[1..].iter().map(|slot| tensor(slot)));
        state = evaluate(&program, &[inputs]).unwrap()[0].iter().map(floats).collect();
    }
    state
}

fn on_host(rule: UpdateRule, parameter: &[f32], gradients: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let mut p = parameter.to_vec();
    let mut memory: Vec<Vec<f32>> =
        rule.slots().iter().map(|slot| vec![rule.initial(slot) as f32; parameter.len()]).collect();
    for (step, gradient) in gradients.iter().enumerate() {
        let mut slots: Vec<&mut [f32]> = memory.iter_mut().map(|slot| &mut slot[..]).collect();
        rule.update(step as u64 + 1, 0.1, &mut p, gradient, &mut slots);
    }
    [p].into_iter().chain(memory).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_program_steps_as_the_host_does(
        rule in rules(),
        parameter in prop::collection::vec(-2.0..2.0f32, 4),
        gradients in prop::collection::vec(prop::collection::vec(-2.0..2.0f32, 4), 1..5),
    ) {
        let (given, expected) = (by_program(rule, &parameter, &gradients), on_host(rule, &parameter, &gradients));
        for (given, expected) in given.iter().flatten().zip(expected.iter().flatten()) {
            prop_assert!((given - expected).abs() <= 2e-5 * expected.abs().max(1.0), "{rule:?}: {given} {expected}");
        }
    }
}

#[test]
fn norms_of_large_small_and_zero_elements() {
    for (a, b, expected) in [(3e30f32, 4e30f32, 5e30f32), (3e-30, 4e-30, 5e-30), (0.0, 0.0, 0.0), (3.0, -4.0, 5.0)] {
        let mut builder = Builder::new("norm");
        let ty = TensorType::new(ElementType::F32, [1]);
        let values = [builder.parameter(ty.clone()), builder.parameter(ty)];
        let result = norm(&mut builder, &values).unwrap();
        let program = builder.finish(&[result]).unwrap();
        let given = floats(&evaluate(&program, &[vec![tensor(&[a]), tensor(&[b])]]).unwrap()[0][0])[0];
        assert!((given - expected).abs() <= 1e-6 * expected, "{a} {b}: {given}");
    }
}
