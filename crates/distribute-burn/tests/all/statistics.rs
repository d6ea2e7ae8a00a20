//! Running statistics, checkpoints and modules outside a strategy.

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use distribute_burn::{Adam, BurnContext, Error};
use distribute_train::checkpoint::{Checkpointed, Snapshot};

use crate::common::*;

/// Returns the mean over replicas of a running mean, as it is saved.
fn running(model: &distribute_burn::Model<Normalised>) -> Vec<f32> {
    let mut snapshot = Snapshot::new(0);
    model.save(&mirrored(2), &mut snapshot).unwrap();
    snapshot.numbers("model", "norm.running_mean").unwrap().into_iter().map(|x| x as f32).collect()
}

#[test]
fn statistics_are_each_replicas_own_and_saved_as_their_mean() {
    let strategy = mirrored(2);
    let model = scope::<Normalised>(&strategy);
    let optimizer = Adam::new(0.01).build(&model).unwrap();
    let names: Vec<(&str, bool)> =
        model.variables().iter().map(|variable| (variable.name(), variable.is_statistic())).collect();
    assert!(names.contains(&("norm.running_mean", true)) && names.contains(&("norm.gamma", false)), "{names:?}");
    train(&strategy, &model, &optimizer, 5);
    let mut snapshot = Snapshot::new(5);
    model.save(&strategy, &mut snapshot).unwrap();
    let components = values(&model, 0).into_iter().zip(values(&model, 1));
    let (first, second) = components.into_iter().find(|(first, _)| first.0 == "norm.running_mean").unwrap();
    assert_ne!(first, second);
    let mean: Vec<f32> = first.1.iter().zip(&second.1).map(|(a, b)| (a + b) / 2.0).collect();
    let saved = running(&model);
    assert_close(&saved, &mean, 1e-6, "the saved mean");
    assert!(saved.iter().any(|x| *x != 0.0));

    // A model that is restored from it has the mean on all replicas, also in the layers.
    let other = scope::<Normalised>(&strategy);
    other.load(&strategy, &snapshot).unwrap();
    assert_close(&running(&other), &mean, 1e-6, "the restored mean");
    let device = Device::flex();
    let x = noise(&device);
    let of_replicas: Vec<Vec<f32>> = (0..2)
        .map(|local| {
            let module = other.replica(local).unwrap().valid();
            module.forward(x.clone()).into_data().try_to_vec::<f32>().unwrap()
        })
        .collect();
    assert_eq!(of_replicas[0], of_replicas[1]);
}

/// A model in which a layer and its clone share parameters and running statistics.
#[derive(Module, Debug)]
struct Cloned {
    first: Linear,
    norm: BatchNorm,
    again: BatchNorm,
    head: Linear,
}

impl Classifier for Cloned {
    fn new(device: &Device) -> Cloned {
        seeded(device, |device| {
            let norm = BatchNormConfig::new(INPUTS).init(device);
            Cloned {
                first: LinearConfig::new(INPUTS, INPUTS).init(device),
                again: norm.clone(),
                norm,
                head: LinearConfig::new(INPUTS, CLASSES).init(device),
            }
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.norm.forward(self.first.forward(x)).tanh();
        self.head.forward(self.again.forward(x))
    }
}

#[test]
fn clones_of_a_layer_have_the_same_statistics() {
    for strategy in [one(), mirrored(2), sharded(2)] {
        let model = scope::<Cloned>(&strategy);
        let statistics: Vec<&str> = model
            .variables()
            .iter()
            .filter(|variable| variable.is_statistic())
            .map(|variable| variable.name())
            .collect();
        assert_eq!(statistics, ["norm.running_mean", "norm.running_var"]);
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        train(&strategy, &model, &optimizer, 3);
        let mut snapshot = Snapshot::new(3);
        model.save(&strategy, &mut snapshot).unwrap();
        assert!(snapshot.numbers("model", "norm.running_mean").unwrap().iter().any(|mean| *mean != 0.0));
        let module = model.to_module(&strategy).unwrap();
        let [mean, of_clone] = [&module.norm, &module.again]
            .map(|norm| norm.running_mean.value().into_data().try_to_vec::<f32>().unwrap());
        assert_eq!(mean, of_clone);
    }
}

#[test]
fn a_failed_run_leaves_parameters_and_statistics_unchanged() {
    let strategy = mirrored(2);
    let model = scope::<Normalised>(&strategy);
    let optimizer = Adam::new(0.01).build(&model).unwrap();
    train(&strategy, &model, &optimizer, 2);
    let state = |model: &distribute_burn::Model<Normalised>| {
        let mut snapshot = Snapshot::new(0);
        model.save(&strategy, &mut snapshot).unwrap();
        snapshot
    };
    let before = state(&model);
    let failed = strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
        let loss = model.forward(noise(&context.burn_device()?)).sum();
        if context.replica_id() == 1 {
            return Err(Error::NoExamples { what: "test a failure" });
        }
        optimizer.minimize(context, &loss)
    });
    assert!(failed.is_err());
    assert_eq!(state(&model), before);
}

#[test]
fn a_module_outside_the_strategy_has_the_trained_values() {
    let strategy = mirrored(2);
    let model = scope::<Normalised>(&strategy);
    let optimizer = Adam::new(0.01).build(&model).unwrap();
    train(&strategy, &model, &optimizer, 4);
    let module = model.to_module(&strategy).unwrap();
    let x = noise(&Device::flex());
    let inside = model.first().valid().forward(x.clone()).into_data().try_to_vec::<f32>().unwrap();
    let outside = module.valid().forward(x).into_data().try_to_vec::<f32>().unwrap();
    assert_eq!(inside, outside);
    assert!(outside.iter().all(|x| x.is_finite()));
    let folder = tempfile::tempdir().unwrap();
    module.clone().save_file(folder.path().join("model.bpk")).unwrap();
    let loaded = Normalised::new(&Device::flex().autodiff()).load_file(folder.path().join("model.bpk"));
    let other = scope::<Normalised>(&mirrored(3));
    other.load_module(&loaded).unwrap();
    for ((name, trained), (_, loaded)) in values(&model, 0).iter().zip(&values(&other, 2)) {
        if !name.contains("running") {
            assert_eq!(trained, loaded, "{name}");
        }
    }
}
