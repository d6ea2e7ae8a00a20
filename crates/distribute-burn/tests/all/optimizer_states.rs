//! The state of burn's own optimizers under strategies that shard parameters.

use std::time::Duration;

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdaGradConfig, AdamConfig, ModuleOptimizer, RmsPropConfig, SgdConfig};
use burn::tensor::{Device, Tensor};
use distribute_burn::{Adam, BurnContext, Model, Optimizer};
use distribute_cluster::Membership;
use distribute_strategy::{CommunicationOptions, FullyShardedStrategy, Strategy};
use distribute_testkit::Ports;
use distribute_train::checkpoint::{Checkpointed, Snapshot};

use crate::common::*;

fn built<M: Classifier>(strategy: &Strategy, optimizer: &ModuleOptimizer) -> (Model<M>, Optimizer) {
    let model = scope::<M>(strategy);
    let optimizer = model.optimizer(optimizer.clone(), 0.01, "burn's").unwrap();
    (model, optimizer)
}

fn saved<M: Classifier>(strategy: &Strategy, model: &Model<M>, optimizer: &Optimizer) -> Snapshot {
    let mut snapshot = Snapshot::new(3);
    model.save(strategy, &mut snapshot).unwrap();
    optimizer.save(strategy, &mut snapshot).unwrap();
    snapshot
}

#[test]
fn it_is_saved_whole_and_restored_under_every_strategy() {
    let momentum = MomentumConfig { momentum: 0.9, dampening: 0.1, nesterov: false };
    let configs: [(&str, ModuleOptimizer); 4] = [
        ("Adam", AdamConfig::new().init()),
        ("SGD", SgdConfig::new().with_momentum(Some(momentum)).init()),
        ("Adagrad", AdaGradConfig::new().init()),
        ("RMSprop", RmsPropConfig::new().init()),
    ];
    for (name, config) in configs {
        for (from, to, exact) in [
            (sharded(2), sharded(2), true),
            (sharded(2), mirrored(2), true),
            (mirrored(2), sharded(2), true),
            (sharded(3), sharded(2), false),
            (sharded(2), one(), false),
            (one(), sharded(4), false),
        ] {
            let (model, optimizer) = built::<Convolution>(&from, &config);
            train(&from, &model, &optimizer, 3);
            let snapshot = saved(&from, &model, &optimizer);
            let losses = train(&from, &model, &optimizer, 3);
            let (restored, optimizer) = built::<Convolution>(&to, &config);
            restored.load(&to, &snapshot).unwrap();
            optimizer.load(&to, &snapshot).unwrap();
            let continued = train(&to, &restored, &optimizer, 3);
            if exact {
                assert_eq!(continued, losses, "{name}");
                assert_eq!(wholes(&to, &restored), wholes(&from, &model), "{name}");
            } else {
                assert_close(&losses, &continued, 2e-4, name);
            }
            // Without the state the losses are others.
            let (fresh, optimizer) = built::<Convolution>(&to, &config);
            fresh.load(&to, &snapshot).unwrap();
            let fresh = train(&to, &fresh, &optimizer, 3);
            assert!(fresh.iter().zip(&losses).any(|(a, b)| (a - b).abs() > 1e-3), "{name}: {fresh:?} {losses:?}");
        }
    }
}

#[test]
fn of_several_processes_the_chief_gets_the_whole() {
    let config: ModuleOptimizer = AdamConfig::new().init();
    let strategy = mirrored(2);
    let (mirror, optimizer) = built::<Tied>(&strategy, &config);
    train(&strategy, &mirror, &optimizer, 4);
    let undisturbed = wholes(&strategy, &mirror);
    let address = Ports::reserve(1).unwrap().addresses().remove(0);
    let (config, address) = (&config, &address);
    let worker = |rank: u32| {
        let strategy = FullyShardedStrategy::builder()
            .devices(["CPU:0"])
            .mirror_below(1)
            .membership(Membership::new(rank, 2, address).unwrap())
            .communication(CommunicationOptions::default().timeout(Duration::from_secs(30)))
            .build()
            .unwrap();
        let (model, optimizer) = built::<Tied>(&strategy, config);
        let device = Device::flex().autodiff();
        let step = |model: &Model<Tied>, optimizer: &Optimizer, step: usize| {
            let (x, y) = cut(&batch(step, if step == 3 { 9 } else { 24 }), 2, &device).swap_remove(rank as usize);
            let rows = if step == 3 { 9 } else { 24 };
            let stepped = strategy.run_with((model, optimizer), |context, (model, optimizer)| {
                optimizer.minimize(context, &context.average_loss(model.losses(x.clone(), y.clone()), rows))
            });
            stepped.unwrap();
        };
        (0..2).for_each(|at| step(&model, &optimizer, at));
        let state = optimizer.library_state(&strategy).unwrap();
        assert_eq!(state.is_some(), rank == 0);
        // The chief sends its checkpoint to all.
        let state = distribute_train::from_chief(&strategy, Ok::<_, distribute_train::Error>(state)).unwrap().unwrap();
        let parameters = model.to_module(&strategy).unwrap();
        let (restored, optimizer) = built::<Tied>(&strategy, config);
        restored.load_module(&parameters).unwrap();
        optimizer.set_library_state(&state).unwrap();
        (2..4).for_each(|at| step(&restored, &optimizer, at));
        wholes(&strategy, &restored)
    };
    let values = std::thread::scope(|scope| {
        let workers = [0, 1].map(|rank| scope.spawn(move || worker(rank)));
        workers.map(|worker| worker.join().unwrap())
    });
    assert_eq!(values, [undisturbed.clone(), undisturbed]);
}

/// Has the names of another model's parameters in other sizes.
#[derive(Module, Debug)]
struct Wider {
    inner: Mlp,
}

impl Classifier for Wider {
    fn new(device: &Device) -> Wider {
        let wider = |device: &Device| LinearConfig::new(INPUTS, INPUTS + 3).init(device);
        let inner = seeded(device, |device| Mlp { hidden: vec![wider(device)], head: wider(device) });
        Wider { inner }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.inner.hidden[0].forward(x.clone()) + self.inner.head.forward(x)
    }
}

/// The same paths in other sizes.
#[derive(Module, Debug)]
struct Narrower {
    inner: Mlp,
}

impl Classifier for Narrower {
    fn new(device: &Device) -> Narrower {
        let layer = |device: &Device| LinearConfig::new(INPUTS, CLASSES).init(device);
        Narrower { inner: seeded(device, |device| Mlp { hidden: vec![layer(device)], head: layer(device) }) }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.inner.hidden[0].forward(x.clone()) + self.inner.head.forward(x)
    }
}

#[test]
fn the_state_of_another_model_and_what_is_none_are_refused_in_words() {
    let (strategy, config) = (sharded(2), AdamConfig::new().init());
    let (wider, optimizer) = built::<Wider>(&strategy, &config);
    train(&strategy, &wider, &optimizer, 1);
    let state = optimizer.library_state(&strategy).unwrap().unwrap();
    let (narrower, optimizer) = built::<Narrower>(&strategy, &config);
    let told = optimizer.set_library_state(&state).unwrap_err().to_string();
    assert!(told.contains("is neither one number nor as large as the parameter inner."), "{told}");
    let told = optimizer.set_library_state(b"nothing").unwrap_err().to_string();
    assert!(told.contains("cannot be read"), "{told}");
    // Neither has changed anything.
    let (other, undisturbed) = built::<Narrower>(&strategy, &config);
    assert_eq!(train(&strategy, &narrower, &optimizer, 2), train(&strategy, &other, &undisturbed, 2));
}

#[test]
fn the_state_of_another_kind_of_optimizer_is_refused() {
    let momentum = MomentumConfig { momentum: 0.9, dampening: 0.1, nesterov: false };
    let with_momentum = || SgdConfig::new().with_momentum(Some(momentum.clone())).init();
    let (adam, plain) = (|| AdamConfig::new().init(), || SgdConfig::new().init());
    for strategy in [mirrored(2), sharded(2)] {
        for (from, to) in [
            (adam(), with_momentum()),
            (with_momentum(), adam()),
            (adam(), plain()),
            (RmsPropConfig::new().init(), adam()),
        ] {
            let (model, optimizer) = built::<Mlp>(&strategy, &from);
            train(&strategy, &model, &optimizer, 1);
            let snapshot = saved(&strategy, &model, &optimizer);
            let (model, optimizer) = built::<Mlp>(&strategy, &to);
            let told = optimizer.load(&strategy, &snapshot).unwrap_err().to_string();
            assert!(told.contains("cannot be restored") && told.contains("another kind of optimizer"), "{told}");
            // Nothing has changed.
            let (other, undisturbed) = built::<Mlp>(&strategy, &to);
            assert_eq!(train(&strategy, &model, &optimizer, 1), train(&strategy, &other, &undisturbed, 1));
        }
        // An optimizer without a state restores what it has saved.
        let (model, optimizer) = built::<Mlp>(&strategy, &plain());
        train(&strategy, &model, &optimizer, 1);
        optimizer.load(&strategy, &saved(&strategy, &model, &optimizer)).unwrap();
    }
}

#[test]
fn a_checkpoint_without_a_state_of_burns_is_refused() {
    let strategy = mirrored(2);
    let own = scope::<Mlp>(&strategy);
    let of_crate = Adam::new(0.01).build(&own).unwrap();
    let snapshot = saved(&strategy, &own, &of_crate);
    let (_, optimizer) = built::<Mlp>(&strategy, &AdamConfig::new().init());
    let told = optimizer.load(&strategy, &snapshot).unwrap_err().to_string();
    assert!(told.contains("library") && told.contains("has none of this name"), "{told}");
}
