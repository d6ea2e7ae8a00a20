//! Optimizers of this project and of burn, and their checkpoints.

use burn::optim::{AdamConfig, ModuleOptimizer, SgdConfig};
use distribute_burn::{Adam, Clip, Error, LossScale};
use distribute_train::checkpoint::{Checkpointed, Snapshot};

use crate::common::*;

#[test]
fn the_state_of_burns_optimizer_is_saved_and_restored() {
    let strategy = mirrored(2);
    let config = AdamConfig::new();
    let built = || -> ModuleOptimizer { config.init() };
    let (model, through) = (scope::<Tied>(&strategy), scope::<Tied>(&strategy));
    let optimizer = model.optimizer(built(), 0.01, "Adam").unwrap();
    let undisturbed = through.optimizer(built(), 0.01, "Adam").unwrap();
    train(&strategy, &model, &optimizer, 3);
    train(&strategy, &through, &undisturbed, 3);
    let mut snapshot = Snapshot::new(3);
    model.save(&strategy, &mut snapshot).unwrap();
    optimizer.save(&strategy, &mut snapshot).unwrap();

    // Another process, whose parameters would have other random ids.
    let strategy = mirrored(2);
    let restored = scope::<Tied>(&strategy);
    let optimizer = restored.optimizer(built(), 0.5, "Adam").unwrap();
    restored.load(&strategy, &snapshot).unwrap();
    optimizer.load(&strategy, &snapshot).unwrap();
    assert_eq!(optimizer.learning_rate(), 0.01);
    let losses = train(&strategy, &restored, &optimizer, 4);
    assert_eq!(losses, train(&strategy, &through, &undisturbed, 4));
    assert_eq!(values(&restored, 1), values(&through, 0));
}

#[test]
fn clipping_and_loss_scaling_come_before_burns_update() {
    let strategy = mirrored(2);
    let (plain, clipped) = (scope::<Mlp>(&strategy), scope::<Mlp>(&strategy));
    let sgd = || -> ModuleOptimizer { SgdConfig::new().init() };
    let by_burn = plain.optimizer(sgd(), 0.1, "SGD").unwrap();
    let by_burn = by_burn.clip(Clip::GlobalNorm(0.05)).unwrap().scale_losses(LossScale::fixed(8.0)).unwrap();
    let own = distribute_burn::Sgd::new(0.1).build(&clipped).unwrap().clip(Clip::GlobalNorm(0.05)).unwrap();
    let own = own.scale_losses(LossScale::fixed(8.0)).unwrap();
    assert_eq!(train(&strategy, &plain, &by_burn, 5), train(&strategy, &clipped, &own, 5));
    assert_eq!(by_burn.gradient_norm(), own.gradient_norm());
    assert!(by_burn.gradient_norm().unwrap() > 0.05);
}

#[test]
fn burns_optimizer_and_zero1_exclude_each_other() {
    let strategy = mirrored(2);
    let model = scope::<Mlp>(&strategy);
    let optimizer = model.optimizer(SgdConfig::new().init(), 0.1, "SGD").unwrap();
    let Err(error) = optimizer.zero1() else { panic!("zero1 was accepted") };
    assert!(error.to_string().contains("tensor library's own optimizer"), "{error}");
}

#[test]
fn sharded_state_gives_the_same_bits() {
    let run = |sharded: bool| {
        let strategy = mirrored(2);
        let model = scope::<Attention>(&strategy);
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        let optimizer = if sharded { optimizer.zero1().unwrap() } else { optimizer };
        (train(&strategy, &model, &optimizer, 6), values(&model, 1))
    };
    assert_eq!(run(false), run(true));
}

#[test]
fn a_loss_that_depends_on_no_parameter_is_an_error() {
    let strategy = mirrored(2);
    let model = scope::<Mlp>(&strategy);
    let optimizer = Adam::new(0.01).build(&model).unwrap();
    let failed = strategy.run_with((&model, &optimizer), |context, (_, optimizer)| {
        let loss = noise(&distribute_burn::BurnContext::burn_device(context)?).sum();
        optimizer.minimize(context, &loss)
    });
    let Err(error) = failed else { panic!("a step was made") };
    assert!(matches!(error, Error::Optim(distribute_optim::Error::NoGradient)), "{error}");
}
