//! The program that is compiled if none is given.

use distribute_hlo::{
    Builder, CollectiveGroups, CompareOp, DotDimensions, ElementType, Program, Reducer, Result, TensorType, Value,
};

/// Sizes of the network: inputs, hidden units, outputs.
const SIZES: [usize; 3] = [784, 128, 10];

/// Examples of a replica.
const BATCH: usize = 32;

/// The learning rate.
const RATE: f64 = 0.1;

/// One step of data-parallel gradient descent: two dense layers with a ReLU between them, and half the squared error
/// summed over outputs, averaged over the examples of all replicas.
///
/// Parameters are the two layers' weights and biases, which are donated, and then inputs and targets of the replica;
/// outputs are the new weights and biases, and the loss.
pub(super) fn step(replicas: usize) -> Result<Program> {
    step_of(replicas, SIZES, BATCH)
}

fn step_of(replicas: usize, [inputs, hidden, outputs]: [usize; 3], batch: usize) -> Result<Program> {
    let mut b = Builder::new("data_parallel_step").replicas(replicas);
    let shapes: [&[usize]; 4] = [&[inputs, hidden], &[hidden], &[hidden, outputs], &[outputs]];
    let variables = shapes.map(|dims| b.donated_parameter(f32s(dims)));
    let [w1, b1, w2, b2] = variables;
    let x = b.parameter(f32s(&[batch, inputs]));
    let target = b.parameter(f32s(&[batch, outputs]));

    let before = dense(&mut b, x, w1, b1, &[batch, hidden])?;
    let zero = b.splat(&[batch, hidden], 0.0f32)?;
    let h = b.maximum(before, zero)?;
    let y = dense(&mut b, h, w2, b2, &[batch, outputs])?;

    // The error is divided once, so that sums over replicas are averages over all examples.
    let error = b.subtract(y, target)?;
    let share = b.splat(&[batch, outputs], 1.0 / (batch * replicas) as f32)?;
    let dy = b.multiply(error, share)?;
    let losses = b.multiply(error, dy)?;
    let sum = b.reduce(losses, Reducer::Sum, &[0, 1])?;
    let half = b.scalar(0.5f32)?;
    let loss = b.multiply(sum, half)?;

    let dw2 = product(&mut b, h, dy, [0, 0])?;
    let db2 = b.reduce(dy, Reducer::Sum, &[0])?;
    let dh = product(&mut b, dy, w2, [1, 1])?;
    let is_active = b.compare(CompareOp::Gt, before, zero)?;
    let dh = b.select(is_active, dh, zero)?;
    let dw1 = product(&mut b, x, dh, [0, 0])?;
    let db1 = b.reduce(dh, Reducer::Sum, &[0])?;

    let mut results = Vec::new();
    for (output, (gradient, dims)) in [dw1, db1, dw2, db2].into_iter().zip(shapes).enumerate() {
        let sum = b.all_reduce(gradient, Reducer::Sum, &CollectiveGroups::All)?;
        let rate = b.full(f32s(dims), RATE)?;
        let change = b.multiply(rate, sum)?;
        results.push(b.subtract(variables[output], change)?);
        b.alias(variables[output], output)?;
    }
    results.push(b.all_reduce(loss, Reducer::Sum, &CollectiveGroups::All)?);
    b.finish(&results)
}

/// `x · w + b` for each row.
fn dense(b: &mut Builder, x: Value, w: Value, bias: Value, dims: &[usize]) -> Result<Value> {
    let product = product(b, x, w, [1, 0])?;
    let bias = b.broadcast_in_dim(bias, dims, &[1])?;
    b.add(product, bias)
}

/// The product of two matrices over one dimension of each.
fn product(b: &mut Builder, lhs: Value, rhs: Value, [of_lhs, of_rhs]: [usize; 2]) -> Result<Value> {
    let dimensions =
        DotDimensions { lhs_contracting: vec![of_lhs], rhs_contracting: vec![of_rhs], ..DotDimensions::matmul(0) };
    b.dot_general(lhs, rhs, &dimensions)
}

fn f32s(dims: &[usize]) -> TensorType {
    TensorType::new(ElementType::F32, dims)
}

#[cfg(test)]
mod tests {
    use hlo_evaluator::{Data, Tensor, evaluate};

    use super::*;

    const SMALL: [usize; 3] = [3, 5, 2];

    /// Numbers between -1 and 1 that look random.
    fn numbers(dims: &[usize], seed: u32) -> Vec<f32> {
        let count = dims.iter().product::<usize>() as u32;
        (0..count).map(|n| ((n + 17 * seed + 1).wrapping_mul(0x9e37_79b9) >> 8) as f32 / 8_388_608.0 - 1.0).collect()
    }

    fn tensor(dims: &[usize], values: Vec<f32>) -> Tensor {
        Tensor::new(dims, values)
    }

    fn variables() -> Vec<Tensor> {
        let [inputs, hidden, outputs] = SMALL;
        let shapes: [&[usize]; 4] = [&[inputs, hidden], &[hidden], &[hidden, outputs], &[outputs]];
        shapes.iter().zip(0..).map(|(dims, seed)| tensor(dims, numbers(dims, seed))).collect()
    }

    /// Runs one step; returns each replica's outputs.
    fn run(replicas: usize, batch: usize, variables: &[Vec<Tensor>], data: &[[Vec<f32>; 2]]) -> Vec<Vec<Tensor>> {
        let program = step_of(replicas, SMALL, batch).unwrap();
        let inputs: Vec<Vec<Tensor>> = variables
            .iter()
            .zip(data)
            .map(|(variables, [x, y])| {
                let data = [tensor(&[batch, SMALL[0]], x.clone()), tensor(&[batch, SMALL[2]], y.clone())];
                variables.iter().cloned().chain(data).collect()
            })
            .collect();
        evaluate(&program, &inputs).unwrap()
    }

    fn floats(tensor: &Tensor) -> Vec<f64> {
        let Data::F32(values) = tensor.data() else { panic!("{:?} is not f32", tensor.ty()) };
        values.iter().map(|value| f64::from(*value)).collect()
    }

    #[test]
    fn replicas_make_the_step_of_one_replica_with_all_examples_and_the_loss_falls() {
        let (x, y) = (numbers(&[4, SMALL[0]], 7), numbers(&[4, SMALL[2]], 8));
        let half = |list: &[f32], which: usize| list[which * list.len() / 2..][..list.len() / 2].to_vec();
        let halves = [0, 1].map(|which| [half(&x, which), half(&y, which)]);
        let (mut whole, mut parts) = (vec![variables()], vec![variables(); 2]);
        let mut losses = Vec::new();
        for _ in 0..20 {
            whole = run(1, 4, &whole, &[[x.clone(), y.clone()]]);
            parts = run(2, 2, &parts, &halves);
            for (one, other) in whole[0].iter().zip(&parts[1]) {
                for (one, other) in floats(one).iter().zip(floats(other)) {
                    assert!((one - other).abs() < 1e-5, "{one} and {other}");
                }
            }
            losses.extend(whole[0].pop().map(|loss| floats(&loss)[0]));
            parts.iter_mut().for_each(|outputs| drop(outputs.pop()));
        }
        assert!(losses.windows(2).all(|pair| pair[1] < pair[0]) && losses[19] < 0.7 * losses[0], "{losses:?}");
    }

    #[test]
    fn the_change_of_a_weight_is_the_slope_of_the_loss() {
        let data = [[numbers(&[2, SMALL[0]], 3), numbers(&[2, SMALL[2]], 4)]];
        let loss = |variables: &[Tensor]| floats(&run(1, 2, &[variables.to_vec()], &data)[0][4])[0];
        let start = variables();
        let after = run(1, 2, std::slice::from_ref(&start), &data).swap_remove(0);
        for variable in 0..4 {
            let (values, dims) = (floats(&start[variable]), start[variable].ty().dims.clone());
            for place in 0..values.len() {
                let moved = |by: f64| {
                    let mut changed: Vec<f32> = values.iter().map(|value| *value as f32).collect();
                    changed[place] += by as f32;
                    let mut all = start.clone();
                    all[variable] = tensor(&dims, changed);
                    loss(&all)
                };
                let slope = (moved(1e-3) - moved(-1e-3)) / 2e-3;
                let change = (values[place] - floats(&after[variable])[place]) / RATE;
                assert!((slope - change).abs() < 2e-3, "variable {variable} at {place}: {slope} and {change}");
            }
        }
    }

    #[test]
    fn every_gradient_and_the_loss_are_reduced_and_weights_are_updated_in_place() {
        let program = step(8).unwrap();
        assert_eq!((program.count("all_reduce"), program.replicas()), (5, 8));
        let aliases: Vec<_> = program.parameters().iter().map(|parameter| parameter.alias).collect();
        assert_eq!(aliases, [Some(0), Some(1), Some(2), Some(3), None, None]);
    }
}
