//! Several graphs of one model in memory.

use burn::tensor::{Device, Tensor};
use distribute_burn::{Adam, BurnContext, Error};
use distribute_optim::Trainable;
use distribute_strategy::Strategy;
use distribute_values::PerReplica;

use crate::common::*;

/// When the second of two forward passes runs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Second {
    AfterBackward,
    BeforeBackward,
    /// And a third one, which no backward follows.
    WithAnother,
}

/// Returns the parameters after steps on two batches each, whose gradients are accumulated.
fn accumulated<M: Classifier>(strategy: &Strategy, second: Second, zero1: bool) -> Vec<(String, Vec<f32>)> {
    let model = scope::<M>(strategy);
    let optimizer = Adam::new(0.01).build(&model).unwrap();
    let optimizer = if zero1 { optimizer.zero1().unwrap() } else { optimizer };
    let replicas = strategy.num_replicas_in_sync();
    for step in 0..3 {
        let parts = |step| PerReplica::new(cut(&batch(step, 24), replicas, &Device::flex().autodiff()));
        let batches = (parts(2 * step), parts(2 * step + 1));
        let stepped = strategy.run_with((&model, &optimizer, batches), |context, (model, optimizer, (a, b))| {
            let loss = |(x, y)| context.average_loss(model.losses(x, y), 48);
            let first = loss(a.clone());
            if second == Second::AfterBackward {
                optimizer.accumulate(context, &first)?;
                return optimizer.minimize(context, &loss(b));
            }
            let last = loss(b);
            let other = (second == Second::WithAnother).then(|| loss(a));
            optimizer.accumulate(context, &first)?;
            optimizer.minimize(context, &last)?;
            drop(other);
            Ok::<_, Error>(())
        });
        stepped.unwrap();
    }
    wholes(strategy, &model)
}

#[test]
fn two_forward_passes_before_the_first_backward_train_as_one_after_the_other() {
    for strategy in [|| one(), || mirrored(2), || sharded(2), || sharded_with(2, false)] {
        let expected = accumulated::<Tied>(&strategy(), Second::AfterBackward, false);
        for second in [Second::BeforeBackward, Second::WithAnother] {
            assert_eq!(accumulated::<Tied>(&strategy(), second, false), expected, "{second:?}");
        }
        let of_mlp = |second| accumulated::<Mlp>(&strategy(), second, false);
        assert_eq!(of_mlp(Second::BeforeBackward), of_mlp(Second::AfterBackward));
    }
    let expected = accumulated::<Tied>(&mirrored(2), Second::AfterBackward, true);
    assert_eq!(accumulated::<Tied>(&mirrored(2), Second::BeforeBackward, true), expected);
}

/// The graph of an earlier backward's forward pass, and a new one, in one loss.
#[test]
fn a_loss_of_graphs_from_before_and_after_another_backward_has_the_sum_of_their_gradients() {
    let trained = |strategy: &Strategy, zero1: bool, is_early: bool| {
        let model = scope::<Tied>(strategy);
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        let optimizer = if zero1 { optimizer.zero1().unwrap() } else { optimizer };
        let parts = |step| PerReplica::new(cut(&batch(step, 24), 2, &Device::flex().autodiff()));
        let batches = (parts(0), (parts(1), parts(2)));
        let stepped = strategy.run_with((&model, &optimizer, batches), |context, (model, optimizer, (a, (b, c)))| {
            let loss = |(x, y)| context.average_loss(model.losses(x, y), 72);
            let early: Option<Tensor<1>> = is_early.then(|| loss(b.clone()));
            optimizer.accumulate(context, &loss(a))?;
            let early = early.unwrap_or_else(|| loss(b));
            optimizer.minimize(context, &(early + loss(c)))?;
            Ok::<_, Error>(())
        });
        stepped.unwrap();
        wholes(strategy, &model)
    };
    for (strategy, zero1) in [(mirrored(2), false), (mirrored(2), true), (sharded(2), false)] {
        let (given, expected) = (trained(&strategy, zero1, true), trained(&strategy, zero1, false));
        for ((name, given), (_, expected)) in given.iter().zip(&expected) {
            assert_close(given, expected, 1e-5, name);
        }
    }
}

/// A model is in the memory of a thread no longer than its owner has it.
#[test]
fn a_model_is_freed_after_its_last_backward() {
    let strategy = one();
    let model = scope::<Mlp>(&strategy);
    let optimizer = Adam::new(0.01).build(&model).unwrap();
    train(&strategy, &model, &optimizer, 2);
    let parameters = std::sync::Arc::downgrade(model.parameters());
    drop((model, optimizer));
    assert!(parameters.upgrade().is_none());
}
