//! Fully sharded parameters, with the models unchanged.

use std::time::{Duration, Instant};

use burn::module::{Module, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor};
use distribute_burn::{Adam, BurnContext, BurnStrategy, Clip, Error, Lamb, Model, Optimizer, Sgd};
use distribute_strategy::Strategy;
use distribute_train::checkpoint::{CheckpointManager, Checkpointed, Snapshot};
use distribute_values::PerReplica;

use crate::common::*;

fn equal_mirrored_and_sharded<M: Classifier>(build: impl Fn(&Model<M>) -> Result<Optimizer, Error>) {
    let strategy = mirrored(2);
    let model = scope::<M>(&strategy);
    let losses = train(&strategy, &model, &build(&model).unwrap(), 12);
    let parameters = values(&model, 0);
    for replicas in [2, 3, 4] {
        let strategy = sharded(replicas);
        let model = scope::<M>(&strategy);
        let of_sharded = train(&strategy, &model, &build(&model).unwrap(), 12);
        let wholes = wholes(&strategy, &model);
        if replicas == 2 {
            // A sum of two is the same in any order.
            assert_eq!(of_sharded, losses);
            assert_eq!(wholes, parameters);
        } else {
            assert_close(&losses, &of_sharded, 2e-4, "losses");
            for ((name, mirrored), (_, sharded)) in parameters.iter().zip(&wholes) {
                assert_close(mirrored, sharded, 2e-3, name);
            }
        }
    }
}

#[test]
fn an_mlp_trains_alike_mirrored_and_sharded() {
    equal_mirrored_and_sharded::<Mlp>(|model| Adam::new(0.01).build(model));
}

#[test]
fn tied_weights_train_alike_mirrored_and_sharded() {
    equal_mirrored_and_sharded::<Tied>(|model| Adam::new(0.01).build(model));
}

#[test]
fn a_convolution_trains_alike_mirrored_and_sharded() {
    equal_mirrored_and_sharded::<Convolution>(|model| Adam::new(0.01).build(model));
}

#[test]
fn attention_trains_alike_mirrored_and_sharded() {
    equal_mirrored_and_sharded::<Attention>(|model| Sgd::new(0.1).momentum(0.9).build(model));
}

/// Gathers and reductions that overlap with nothing give the same bits, in another order.
#[test]
fn overlap_changes_no_values() {
    let run = |strategy| {
        let model = scope::<Attention>(&strategy);
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        (train(&strategy, &model, &optimizer, 4), wholes(&strategy, &model))
    };
    for replicas in [2, 3] {
        assert_eq!(run(sharded_with(replicas, false)), run(sharded_with(replicas, true)));
    }
}

/// A linear layer on inputs of three dimensions. burn makes one product of them for 2 rows, as for this model's 16
/// positions and 24 outputs, and several for 5: these keep the weight until backward, and that does not.
#[derive(Module, Debug)]
struct Positions {
    first: Linear,
    up: Linear,
    head: Linear,
}

impl Classifier for Positions {
    fn new(device: &Device) -> Positions {
        seeded(device, |device| Positions {
            first: LinearConfig::new(INPUTS, INPUTS).init(device),
            up: LinearConfig::new(1, 24).init(device),
            head: LinearConfig::new(24, CLASSES).init(device),
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let rows = x.dims()[0];
        let x = self.up.forward(self.first.forward(x).reshape([rows, INPUTS, 1])).tanh();
        self.head.forward(x.mean_dim(1).reshape([rows, 24]))
    }
}

#[test]
fn replicas_of_which_some_keep_a_weight_train_as_mirrored_ones() {
    let run = |strategy: Strategy| {
        let model = scope::<Positions>(&strategy);
        let optimizer = Sgd::new(0.1).build(&model).unwrap();
        let device = Device::flex().autodiff();
        let mut norms = Vec::new();
        for (step, rows) in [[5, 5], [2, 5], [5, 2], [2, 2]].into_iter().enumerate() {
            let first = cut(&batch(step, 2 * rows[0]), 2, &device).swap_remove(0);
            let second = cut(&batch(step + 9, 2 * rows[1]), 2, &device).swap_remove(0);
            let parts = PerReplica::new(vec![first, second]);
            let stepped = strategy.run_with((&model, &optimizer, parts), |context, (model, optimizer, (x, y))| {
                optimizer.minimize(context, &context.average_loss(model.losses(x, y), rows[0] + rows[1]))
            });
            stepped.unwrap();
            norms.push(wholes(&strategy, &model));
        }
        norms
    };
    assert_eq!(run(mirrored(2)), run(sharded(2)));
}

/// The same of two graphs that are in memory at once.
#[test]
fn replicas_of_which_some_keep_a_weight_of_a_second_graph_train_as_mirrored_ones() {
    let run = |strategy: Strategy| {
        let model = scope::<Positions>(&strategy);
        let optimizer = Sgd::new(0.1).build(&model).unwrap();
        let device = Device::flex().autodiff();
        for rows in [[[5, 5], [2, 5]], [[2, 5], [5, 2]]] {
            let part = |step: usize, rows: usize| cut(&batch(step, 2 * rows), 2, &device).swap_remove(0);
            let parts = PerReplica::new([0, 1].map(|replica| rows.map(|rows| part(replica, rows[replica]))).into());
            let stepped = strategy.run_with((&model, &optimizer, parts), |context, (model, optimizer, parts)| {
                let [first, second] = parts.map(|(x, y)| context.average_loss(model.losses(x, y), 20));
                optimizer.accumulate(context, &first)?;
                optimizer.minimize(context, &second)
            });
            stepped.unwrap();
        }
        wholes(&strategy, &model)
    };
    assert_eq!(run(mirrored(2)), run(sharded(2)));
}

#[test]
fn normalisation_trains_alike_mirrored_and_sharded() {
    // Each replica normalises its own rows, so the number of replicas matters.
    let run = |strategy| {
        let model = scope::<Normalised>(&strategy);
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        (train(&strategy, &model, &optimizer, 8), wholes(&strategy, &model))
    };
    assert_eq!(run(mirrored(2)), run(sharded(2)));
}

#[test]
fn burns_own_optimizers_update_parts() {
    equal_mirrored_and_sharded::<Tied>(|model| model.optimizer(AdamConfig::new().init(), 0.01, "Adam"));
    equal_mirrored_and_sharded::<Convolution>(|model| model.optimizer(SgdConfig::new().init(), 0.05, "SGD"));
}

#[test]
fn optimizers_that_need_whole_parameters_are_refused() {
    let model = scope::<Mlp>(&sharded(2));
    let lamb: ModuleOptimizer = burn::optim::LambConfig::new().init();
    let Err(error) = model.optimizer(lamb, 0.01, "LAMB") else { panic!("LAMB was accepted") };
    assert!(error.to_string().starts_with("LAMB computes with whole parameters"), "{error}");
    let muon: ModuleOptimizer = burn::optim::MuonConfig::new().init();
    assert!(model.optimizer(muon, 0.01, "Muon").is_err());
    let clipping = burn::grad_clipping::GradientClippingConfig::Norm(0.1);
    let clipped: ModuleOptimizer = SgdConfig::new().with_gradient_clipping(clipping.into()).init();
    assert!(model.optimizer(clipped, 0.01, "SGD with clipping of each norm").is_err());
    assert!(Lamb::new(0.01).build(&model).is_err());
    assert!(model.optimizer(SgdConfig::new().init(), 0.01, "SGD").is_ok());
}

/// Constant factors of a gradient cancel out in Adam, and high norms are reached by large gradients only.
#[test]
fn clipping_by_norm_is_refused_for_parts() {
    let model = scope::<Mlp>(&sharded(2));
    let config = |norm: f32| burn::grad_clipping::GradientClippingConfig::Norm(norm);
    let adam = AdamConfig::new().with_epsilon(1e-8);
    let clipped: ModuleOptimizer = adam.clone().with_grad_clipping(Some(config(1.0))).init();
    assert!(model.optimizer(clipped, 0.01, "Adam").is_err());
    let clipped: ModuleOptimizer = SgdConfig::new().with_gradient_clipping(Some(config(100.0))).init();
    assert!(model.optimizer(clipped, 0.01, "SGD").is_err());
    for norm in [1e-3, 1.0, 100.0, 1e5] {
        let optimizer: ModuleOptimizer = adam.init();
        let head = ParamGroup::from_predicate("head");
        let optimizer = optimizer.with_group(head, adam.build(), Some(config(norm).init()));
        assert!(model.optimizer(optimizer, 0.01, "Adam").is_err(), "a norm of {norm}");
    }
    let by_value = burn::grad_clipping::GradientClippingConfig::Value(0.5);
    let clipped: ModuleOptimizer = adam.with_grad_clipping(Some(by_value)).init();
    assert!(model.optimizer(clipped, 0.01, "Adam").is_ok());
}

/// The group of a parameter is chosen by its path or its id.
#[test]
fn groups_that_need_whole_parameters_are_refused() {
    let model = scope::<Mlp>(&sharded(2));
    let id = model.first().hidden[1].weight.id;
    let muon = || burn::optim::MuonConfig::new().build();
    for (group, first) in [
        (ParamGroup::from_path("hidden.1.weight"), "hidden.1.weight"),
        (ParamGroup::from_predicate("hidden"), "hidden.0.weight"),
        (ParamGroup::from_ids(vec![id]), "hidden.1.weight"),
    ] {
        let optimizer: ModuleOptimizer = AdamConfig::new().init();
        let Err(error) = model.optimizer(optimizer.with_group(group, muon(), None), 0.01, "Muon in a group") else {
            panic!("Muon was accepted for {first}")
        };
        assert!(error.to_string().contains(&format!("the strategy divides {first:?};")), "{error}");
    }
    // No parameter of the model is in this group.
    let optimizer: ModuleOptimizer = AdamConfig::new().init();
    let optimizer = optimizer.with_group(ParamGroup::from_predicate("embedding"), muon(), None);
    assert!(model.optimizer(optimizer, 0.01, "Muon for nothing").is_ok());
    // The group has frozen parameters only.
    let mut model = scope::<Mlp>(&sharded(2));
    model.freeze(|name| name.starts_with("hidden.")).unwrap();
    let optimizer: ModuleOptimizer = AdamConfig::new().init();
    let optimizer = optimizer.with_group(ParamGroup::from_predicate("hidden"), muon(), None);
    assert!(model.optimizer(optimizer, 0.01, "Muon for what is frozen").is_ok());
}

#[test]
fn half_of_the_model_is_frozen() {
    let run = |strategy| {
        let mut model = scope::<Mlp>(&strategy);
        model.freeze(|name| name.starts_with("hidden.0") || name.starts_with("hidden.2")).unwrap();
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        (train(&strategy, &model, &optimizer, 6), wholes(&strategy, &model))
    };
    assert_eq!(run(mirrored(2)), run(sharded(2)));
}

#[test]
fn clipping_by_the_global_norm_and_accumulation() {
    let run = |strategy: distribute_strategy::Strategy| {
        let model = scope::<Mlp>(&strategy);
        let optimizer = Sgd::new(0.1).build(&model).unwrap().clip(Clip::GlobalNorm(0.05)).unwrap();
        let device = Device::flex().autodiff();
        for step in 0..4 {
            let pieces = cut(&batch(step, 24), 4, &device);
            let stepped = strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
                for part in 0..2 {
                    let (x, y) = pieces[context.replica_id() * 2 + part].clone();
                    let loss = context.average_loss(losses(model.forward(x), y), 24);
                    if part == 0 {
                        optimizer.accumulate(context, &loss)?
                    } else {
                        optimizer.minimize(context, &loss)?
                    }
                }
                Ok::<_, Error>(())
            });
            stepped.unwrap();
        }
        (optimizer.gradient_norm().unwrap() as f32, wholes(&strategy, &model))
    };
    let (norm, parameters) = run(mirrored(2));
    let (norm_of_parts, of_parts) = run(sharded(2));
    assert_close(&[norm], &[norm_of_parts], 1e-6, "norm");
    for ((name, mirrored), (_, sharded)) in parameters.iter().zip(&of_parts) {
        assert_close(mirrored, sharded, 1e-5, name);
    }
}

#[test]
fn a_checkpoint_is_restored_on_other_numbers_of_replicas_and_other_strategies() {
    let from = sharded(2);
    let model = scope::<Attention>(&from);
    let optimizer = Adam::new(0.01).build(&model).unwrap();
    train(&from, &model, &optimizer, 3);
    let folder = tempfile::tempdir().unwrap();
    // Files of some variables each.
    let manager = || CheckpointManager::new(folder.path()).max_shard_bytes(300);
    let mut saving = manager();
    saving.save(&from, 3, &[&model, &optimizer], &()).unwrap();
    saving.finish().unwrap();
    assert!(folder.path().join("step-00000003/model.safetensors.index.json").exists());
    // What is written is what a snapshot in memory has.
    let mut expected = Snapshot::new(3);
    model.save(&from, &mut expected).unwrap();
    optimizer.save(&from, &mut expected).unwrap();
    let read = Snapshot::read(folder.path().join("step-00000003")).unwrap();
    for file in ["model", "optimizer"] {
        assert_eq!(read.names(file), expected.names(file));
        assert!(expected.names(file).iter().all(|name| read.tensor(file, name) == expected.tensor(file, name)));
    }
    let parameters = wholes(&from, &model);
    let losses = train(&from, &model, &optimizer, 3);
    for (to, exact) in [(sharded(2), true), (mirrored(2), true), (sharded(3), false), (one(), false)] {
        let restored = scope::<Attention>(&to);
        let optimizer = Adam::new(0.5).build(&restored).unwrap();
        manager().restore::<()>(&to, &[&restored, &optimizer]).unwrap().unwrap();
        assert_eq!(wholes(&to, &restored), parameters);
        let continued = train(&to, &restored, &optimizer, 3);
        if exact {
            assert_eq!(continued, losses);
        } else {
            assert_close(&losses, &continued, 2e-3, "losses");
        }
    }
}

#[test]
fn a_module_outside_the_strategy_has_whole_weights() {
    let strategy = sharded(3);
    let model = scope::<Mlp>(&strategy);
    let optimizer = Adam::new(0.01).build(&model).unwrap();
    train(&strategy, &model, &optimizer, 3);
    let module = model.to_module(&strategy).unwrap();
    let other = scope::<Mlp>(&mirrored(2));
    other.load_module(&module).unwrap();
    assert_eq!(values(&other, 1), wholes(&strategy, &model));
    // In one process the model works outside run too.
    let x = noise(&Device::flex());
    let inside = model.first().valid().forward(x.clone()).into_data().try_into_vec::<f32>().unwrap();
    assert_eq!(inside, module.valid().forward(x).into_data().try_into_vec::<f32>().unwrap());
}

#[test]
fn evaluation_between_steps_uses_the_newest_weights() {
    let strategy = sharded(2);
    let model = scope::<Mlp>(&strategy);
    let optimizer = Adam::new(0.05).build(&model).unwrap();
    for _ in 0..4 {
        train(&strategy, &model, &optimizer, 1);
        let module = model.to_module(&strategy).unwrap().valid();
        let x = noise(&Device::flex());
        let expected = module.forward(x.clone()).into_data().try_into_vec::<f32>().unwrap();
        for _ in 0..3 {
            let outputs = strategy.run_with(&model, |_, model| {
                Ok::<_, Error>(model.valid().forward(x.clone()).into_data().try_into_vec::<f32>().unwrap_or_default())
            });
            for output in outputs.unwrap().values() {
                assert_eq!(*output, expected);
            }
        }
    }
}

/// Fails when backward asks for a weight, as a replica whose machine is lost.
#[test]
fn a_replica_that_fails_before_backward_leaves_the_others_with_an_error_that_names_it() {
    let strategy = sharded(3);
    let model = scope::<Mlp>(&strategy);
    let optimizer = Adam::new(0.01).build(&model).unwrap();
    train(&strategy, &model, &optimizer, 2);
    let before = wholes(&strategy, &model);
    let began = Instant::now();
    let told = parking_lot::Mutex::new(Vec::new());
    let failed = strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
        let x = noise(&context.burn_device()?);
        if context.replica_id() == 1 {
            let _ = model.forward(x).sum();
            return Err(Error::NoExamples { what: "test a failure" });
        }
        let step = || optimizer.minimize(context, &model.forward(x).sum());
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(step));
        told.lock().push(context.group().failure().map_or_else(String::new, |error| error.to_string()));
        outcome.unwrap_or_else(|payload| std::panic::resume_unwind(payload))
    });
    let error = failed.unwrap_err();
    assert!(matches!(error, Error::NoExamples { .. }), "{error}");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let told = told.into_inner();
    assert_eq!(told.len(), 2);
    assert!(told.iter().all(|told| told.contains("replica 1 failed")), "{told:?}");
    // The step was not made, and the next one works.
    assert_eq!(wholes(&strategy, &model), before);
    train(&strategy, &model, &optimizer, 2);
}

/// Returns losses and parameters after some steps of a model and of inputs on a device with `gradient_checkpointing`,
/// or on a plain one.
fn on_device<M: Classifier>(strategy: &Strategy, recomputes: bool) -> (Vec<f32>, Vec<(String, Vec<f32>)>) {
    let chosen = |device: Device| if recomputes { device.gradient_checkpointing() } else { device };
    let model = strategy.scope(|device| M::new(&chosen(device.clone()))).unwrap();
    let optimizer = Adam::new(0.01).build(&model).unwrap();
    let device = chosen(Device::flex().autodiff());
    let losses = (0..4).flat_map(|step| {
        let parts = cut(&batch(step, 24), strategy.num_replicas_in_sync(), &device);
        let of_replicas = strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
            let (x, y) = parts[context.replica_id()].clone();
            let loss = context.average_loss(losses(model.forward(x), y), 24);
            optimizer.minimize(context, &loss)?;
            Ok::<_, Error>(loss.into_scalar::<f32>())
        });
        of_replicas.unwrap().into_values()
    });
    (losses.collect(), wholes(strategy, &model))
}

#[test]
fn activations_that_burn_computes_again_change_nothing() {
    for strategy in [|| mirrored(2), || sharded(2)] {
        assert_eq!(on_device::<Attention>(&strategy(), true), on_device::<Attention>(&strategy(), false));
        assert_eq!(on_device::<Convolution>(&strategy(), true), on_device::<Convolution>(&strategy(), false));
        assert_eq!(on_device::<Tied>(&strategy(), true), on_device::<Tied>(&strategy(), false));
    }
}
