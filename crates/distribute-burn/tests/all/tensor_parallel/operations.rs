//! The operations on tensor groups, losses of parts, and layers outside tensor groups.

use burn::module::Param;
use burn::tensor::TensorData;
use distribute_burn::{
    BurnContext, BurnStrategy, copy_to_tensor_group, cross_entropy_per_example, gather_from_tensor_group,
    scatter_to_tensor_group, sum_over_tensor_group,
};
use distribute_strategy::{ReplicaContext, get_replica_context};
use distribute_values::TensorStorage;

use super::*;

fn floats<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.without_autodiff().into_data().try_into_vec().unwrap()
}

fn rows(values: impl Fn(f32) -> f32, shape: [usize; 2], device: &Device) -> Tensor<2> {
    let elements: Vec<f32> = (0..shape[0] * shape[1]).map(|at| values(at as f32)).collect();
    Tensor::from_data(TensorData::new(elements, shape), device)
}

#[test]
fn conjugate_operations_have_the_gradients_of_the_whole() {
    conjugate_operations(&Device::flex().autodiff());
}

#[test]
fn no_collective_is_repeated_where_activations_are_computed_again() {
    conjugate_operations(&Device::flex().autodiff().gradient_checkpointing());
}

fn conjugate_operations(device: &Device) {
    let x = || rows(|at| (at * 0.7).sin(), [3, 8], device).require_grad();
    let weights = rows(|at| (at * 1.3).cos(), [3, 8], device);
    for ranks in [2, 4] {
        // (x² scattered, cubed in parts, gathered) · weights, and the sum over ranks of rank + 1 times it.
        let whole = x();
        let cubed = whole.clone().square().powi_scalar(3);
        let factor = (ranks * (ranks + 1) / 2) as f64;
        let loss = (cubed.clone() * weights.clone()).sum() + cubed.sum().mul_scalar(factor);
        let expected_loss = floats(loss.clone())[0];
        let expected = floats(whole.grad(&loss.backward()).unwrap());
        let checked = mesh(1, ranks).run_with((), |context, ()| {
            let group = context.tensor_group().unwrap();
            let x = x();
            let part = scatter_to_tensor_group(&group, x.clone().square())?.powi_scalar(3);
            assert_eq!(part.dims(), [3, 8 / ranks]);
            let cubed = gather_from_tensor_group(&group, part)?;
            let copied = copy_to_tensor_group(&group, cubed.clone())?;
            let term = copied.mul_scalar((context.tensor_rank() + 1) as f64).sum();
            let total = (cubed * weights.clone()).sum() + sum_over_tensor_group(&group, term)?;
            assert_close(&floats(total.clone()), &[expected_loss], 1e-5, "loss");
            let calls = group.flight_record().operations.len();
            assert_close(&floats(x.grad(&total.backward()).unwrap()), &expected, 1e-5, "gradient");
            // The sum of the copy's gradients, and the gathered gradient of the slice.
            assert_eq!(group.flight_record().operations.len() - calls, 2);
            let odd = Tensor::<2>::zeros([2, 7], &Device::flex());
            let told = scatter_to_tensor_group(&group, odd).unwrap_err().to_string();
            assert!(told.contains("[2, 7]") && told.contains(&format!("multiple of {ranks}")), "{told}");
            Ok::<_, Error>(())
        });
        checked.unwrap();
    }
}

#[test]
fn losses_of_parts_are_those_of_whole_logits() {
    let device = Device::flex().autodiff();
    let mut logits: Vec<f32> = (0..5 * 8).map(|at| (at as f32 * 0.9).sin() * 40.0).collect();
    (logits[6], logits[8], logits[2 * 8 + 3]) = (f32::NEG_INFINITY, 3e4, f32::NEG_INFINITY);
    let logits = || Tensor::<2>::from_data(TensorData::new(logits.clone(), [5, 8]), &device);
    let targets = |all: &[i32]| Tensor::<1, Int>::from_ints(all, &Device::flex());
    let whole = logits().require_grad();
    let losses = cross_entropy_per_example(whole.clone(), targets(&[0, 7, 2, 3, 5])).unwrap();
    let expected = floats(losses.clone());
    let gradient = whole.grad(&losses.sum().backward()).unwrap();
    for ranks in [2, 4] {
        let checked = mesh(1, ranks).run_with((), |context, ()| {
            let (width, place) = (8 / ranks, context.tensor_rank());
            let part = logits().narrow(1, place * width, width).detach().require_grad();
            let of = |targets| vocab_parallel_cross_entropy_per_example(part.clone(), targets);
            let got = of(targets(&[0, 7, 2, 3, 5]))?;
            assert_close(&floats(got.clone()), &expected, 1e-5, "losses");
            let own = part.grad(&got.sum().backward()).unwrap();
            let of_whole = gradient.clone().narrow(1, place * width, width);
            assert_close(&floats(own), &floats(of_whole), 1e-5, "gradient");
            let told = of(targets(&[0, 1, 2, 8, 3])).unwrap_err().to_string();
            assert!(told.contains("example 3 is 8") && told.contains("8 classes"), "{told}");
            assert!(matches!(of(targets(&[0])), Err(Error::Shapes { .. })));
            let none = Tensor::<2>::zeros([0, width], &Device::flex());
            assert_eq!(vocab_parallel_cross_entropy_per_example(none, targets(&[]))?.dims(), [0]);
            Ok::<_, Error>(())
        });
        checked.unwrap();
    }
}

/// An embedding whose table computes the logits, too.
#[derive(Module, Debug)]
struct TiedWords {
    words: VocabParallelEmbedding,
}

impl Classifier for TiedWords {
    fn new(device: &Device) -> TiedWords {
        seeded(device, |device| TiedWords { words: vocab_parallel_embedding(VOCABULARY, WIDTH, device) })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.words.logits(mean(self.words.forward(tokens(x))).tanh())
    }

    fn losses(&self, x: Tensor<2>, y: Tensor<1, Int>) -> Tensor<1> {
        vocab_parallel_cross_entropy_per_example(self.forward(x), y).unwrap()
    }
}

#[test]
fn tied_logits_are_those_of_the_whole_table() {
    let run = |strategy: &Strategy| {
        let model = scope::<TiedWords>(strategy);
        let losses = train(strategy, &model, &Adam::new(0.01).build(&model).unwrap(), 8);
        (losses, wholes(strategy, &model))
    };
    let (losses, parameters) = run(&one());
    let (got, of_mesh) = run(&mesh(2, 2));
    assert_close(&got, &losses, TOLERANCE, "losses");
    close(&of_mesh, &parameters, TOLERANCE, "tied");
}

/// A scale that is not split, of a column-parallel layer's output.
#[derive(Module, Debug)]
struct Scaled {
    up: ColumnParallelLinear,
    scale: Param<Tensor<1>>,
    down: RowParallelLinear,
}

impl Scaled {
    fn new(device: &Device) -> Scaled {
        seeded(device, |device| Scaled {
            up: column_parallel_linear(4, 8, split_columns(), device),
            scale: Param::from_tensor(Tensor::from_floats([0.5], device)),
            down: row_parallel_linear(8, 4, joined_rows(), device),
        })
    }

    fn forward(&self, x: Tensor<2>, context: &ReplicaContext, is_copied: bool) -> Tensor<2> {
        let scale = self.scale.val();
        let scale = match context.tensor_group().filter(|_| is_copied) {
            Some(group) => copy_to_tensor_group(&group, scale).unwrap(),
            None => scale,
        };
        self.down.forward(self.up.forward(x) * scale.unsqueeze::<2>())
    }
}

#[test]
fn a_whole_variable_inside_a_split_layer_needs_the_sum_of_its_gradient() {
    let step = |strategy: &Strategy, is_copied: bool| {
        let model = strategy.scope(Scaled::new)?;
        let optimizer = Sgd::new(0.5).build(&model)?;
        strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
            let x = rows(|at| at, [3, 4], &context.burn_device()?);
            let y = model.forward(x, context, is_copied);
            optimizer.minimize(context, &context.average_loss(y.square().sum_dim(1), 300))
        })?;
        let named = |of: &distribute_burn::Variable| {
            Ok::<_, Error>((of.name().to_owned(), of.whole(strategy)?.to_elements::<f32>()?))
        };
        model.variables().iter().map(named).collect::<Result<Vec<_>, Error>>()
    };
    let expected = step(&one(), true).unwrap();
    close(&step(&mesh(1, 2), true).unwrap(), &expected, 1e-5, "copied");
    // The audit after the first step names the copies that diverged.
    let told = step(&mesh(1, 2), false).unwrap_err().to_string();
    assert!(told.contains("variable scale of tensor rank 1 of replica 0"), "{told}");
}

#[test]
fn layers_are_whole_where_there_are_no_tensor_groups() {
    let device = Device::flex();
    let (model, plain) = (Block::new(&device), PlainBlock::new(&device));
    assert_eq!((model.fused.parts(), model.out.parts(), model.words.parts()), (1, 1, 1));
    let x = noise(&device);
    assert_eq!(floats(model.forward(x.clone())), floats(plain.forward(x.clone())));
    // burn's own records have the same names and shapes.
    let restored = Block::new(&device).map(&mut Zeroed).load_record(plain.into_record());
    assert_eq!(floats(restored.forward(x.clone())), floats(model.forward(x.clone())));
    assert_eq!(floats(model.valid().forward(x.clone())), floats(model.forward(x)));
    assert!(get_replica_context().is_none());
}

struct Zeroed;

impl burn::module::ModuleMapper for Zeroed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| value.zeros_like())
    }
}
