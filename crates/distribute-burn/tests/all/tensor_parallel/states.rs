//! Checkpoints, modules outside strategies, burn's optimizers and the trainer on a mesh.

use burn::module::{ModuleMapper, Param};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, ModuleOptimizer, SgdConfig};
use distribute_burn::{BurnContext, BurnStrategy, Ema, Fit, SparseCategoricalCrossentropy, Trainer};
use distribute_cluster::Membership;
use distribute_input::{Array, Dataset};
use distribute_strategy::MultiWorkerMirroredStrategy;
use distribute_testkit::Ports;
use distribute_train::metrics::{Accuracy, Metrics};
use distribute_values::PerReplica;

use super::*;

#[test]
fn a_checkpoint_moves_between_meshes_and_one_replica() {
    checkpoints_move(&[(mesh(2, 2), one()), (one(), mesh(1, 2)), (mesh(1, 4), mesh(2, 2))]);
}

#[test]
fn modules_outside_the_strategy_have_whole_weights() {
    let strategy = mesh(1, 2);
    let model = scope::<Block>(&strategy);
    train(&strategy, &model, &Adam::new(0.003).build(&model).unwrap(), 3);
    let module = model.to_module(&strategy).unwrap();
    assert_eq!(module.num_params(), model.num_parameters());
    // The layers of this module are whole, and work outside run.
    assert_eq!(module.forward(noise(&Device::flex().autodiff())).dims(), [8, CLASSES]);
    for to in [mesh(1, 4), mirrored(2), one()] {
        let other = scope::<Block>(&to);
        assert_ne!(wholes(&to, &other), wholes(&strategy, &model));
        other.load_module(&module).unwrap();
        assert_eq!(wholes(&to, &other), wholes(&strategy, &model));
    }
}

#[test]
fn averages_are_those_of_one_replica() {
    let run = |strategy: &Strategy| {
        let model = scope::<SplitMlp>(strategy);
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        let mut ema = Ema::new(&model, 0.9).unwrap();
        for _ in 0..4 {
            train(strategy, &model, &optimizer, 1);
            ema.update(&model).unwrap();
        }
        ema.swap(&model).unwrap();
        model.audit(strategy).unwrap();
        wholes(strategy, &model)
    };
    close(&run(&mesh(2, 2)), &run(&one()), TOLERANCE, "averages");
}

#[test]
fn burns_own_optimizers_update_parts() {
    let run = |strategy: &Strategy, optimizer: ModuleOptimizer| {
        let model = scope::<Block>(strategy);
        let optimizer = model.optimizer(optimizer, 0.003, "burn's").unwrap();
        (train(strategy, &model, &optimizer, 8), wholes(strategy, &model))
    };
    for optimizer in [AdamConfig::new().init(), SgdConfig::new().init()] {
        let (losses, expected) = run(&one(), optimizer.clone());
        let (got, parameters) = run(&mesh(2, 2), optimizer);
        assert_close(&got, &losses, TOLERANCE, "losses");
        close(&parameters, &expected, TOLERANCE, "parameters");
    }
}

#[test]
fn the_state_of_burns_optimizers_moves_between_meshes_and_one_replica() {
    let built = |strategy: &Strategy, optimizer: &ModuleOptimizer| {
        let model = scope::<Block>(strategy);
        let optimizer = model.optimizer(optimizer.clone(), 0.003, "burn's").unwrap();
        (model, optimizer)
    };
    let momentum = MomentumConfig { momentum: 0.9, dampening: 0.1, nesterov: false };
    for config in [AdamConfig::new().init(), SgdConfig::new().with_momentum(Some(momentum)).init()] {
        for (from, to) in [(mesh(2, 2), one()), (one(), mesh(1, 2)), (mesh(1, 4), mesh(2, 2)), (mesh(1, 2), sharded(2))]
        {
            let (model, optimizer) = built(&from, &config);
            train(&from, &model, &optimizer, 3);
            let mut snapshot = Snapshot::new(3);
            model.save(&from, &mut snapshot).unwrap();
            optimizer.save(&from, &mut snapshot).unwrap();
            let losses = train(&from, &model, &optimizer, 3);
            let (restored, optimizer) = built(&to, &config);
            restored.load(&to, &snapshot).unwrap();
            let fresh = train(&to, &restored, &optimizer, 3);
            restored.load(&to, &snapshot).unwrap();
            optimizer.load(&to, &snapshot).unwrap();
            assert_close(&train(&to, &restored, &optimizer, 3), &losses, TOLERANCE, "losses");
            // Without the state the losses are others.
            assert!(fresh.iter().zip(&losses).any(|(a, b)| (a - b).abs() > 10.0 * TOLERANCE), "{fresh:?} {losses:?}");
        }
    }
}

#[test]
fn the_trainer_counts_replicas_and_not_ranks() {
    let run = |strategy: &Strategy| {
        // The last batch has one row, so that the second of two replicas has no examples.
        let (x, y) = batch(3, 49);
        let x = Array::new([49, INPUTS], x).unwrap();
        let data = Dataset::from_tensor_slices((x.clone(), Array::from(y))).batch(12);
        let mut trainer = Trainer::new(
            strategy,
            SplitMlp::new,
            |model: &SplitMlp, x: Tensor<2>| model.forward(x),
            |model| Adam::new(0.01).build(model),
            SparseCategoricalCrossentropy,
            Metrics::new().with(Accuracy),
        )
        .unwrap();
        let history = trainer.fit(&data, Fit::epochs(3)).unwrap();
        let scores: Vec<f64> = trainer.evaluate(&data).unwrap().into_iter().map(|(_, value)| value).collect();
        let outputs = trainer.predict(&Dataset::from_tensor_slices(x).batch(12)).unwrap();
        let outputs = outputs.without_autodiff().into_data().try_into_vec::<f32>().unwrap();
        (history.of("loss").to_vec(), scores, outputs)
    };
    let (losses, scores, outputs) = run(&one());
    let (of_mesh, scores_of_mesh, outputs_of_mesh) = run(&mesh(2, 2));
    let near = |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4);
    assert!(near(&losses, &of_mesh), "{losses:?} {of_mesh:?}");
    assert!(near(&scores, &scores_of_mesh), "{scores:?} {scores_of_mesh:?}");
    assert_close(&outputs, &outputs_of_mesh, 1e-4, "outputs");
}

#[test]
fn workers_of_a_mesh_train_as_one_replica() {
    let strategy = one();
    let expected = scope::<Block>(&strategy);
    train(&strategy, &expected, &Adam::new(0.003).build(&expected).unwrap(), 6);
    let address = Ports::reserve(1).unwrap().addresses().remove(0);
    let worker = &|rank: u32| {
        let strategy = MultiWorkerMirroredStrategy::builder()
            .devices(["CPU:0", "CPU:1"])
            .tensor_parallel(2)
            .membership(Membership::new(rank, 2, &address).unwrap())
            .communication(CommunicationOptions::default().timeout(Duration::from_secs(30)))
            .build()
            .unwrap();
        // Other initial values on the second worker: the chief's are sent to it, each place its own parts.
        let model = strategy.scope(|device| match rank {
            0 => Block::new(device),
            _ => Block::new(device).map(&mut Halved),
        });
        let model = model.unwrap();
        let optimizer = Adam::new(0.003).build(&model).unwrap();
        let device = Device::flex().autodiff();
        for step in 0..6 {
            let rows = if step == 5 { 9 } else { 24 };
            let part = cut(&batch(step, rows), 2, &device).swap_remove(rank as usize);
            let parts = PerReplica::new(vec![part; 2]);
            let stepped = strategy.run_with((&model, &optimizer, parts), |context, (model, optimizer, (x, y))| {
                optimizer.minimize(context, &context.average_loss(model.losses(x, y), rows))
            });
            stepped.unwrap();
        }
        model.audit(&strategy).unwrap();
        wholes(&strategy, &model)
    };
    let values = std::thread::scope(|scope| {
        let workers = [0, 1].map(|rank| scope.spawn(move || worker(rank)));
        workers.map(|worker| worker.join().unwrap())
    });
    assert_eq!(values[0], values[1]);
    close(&values[0], &wholes(&strategy, &expected), TOLERANCE, "two workers");
}

/// Halves the initial values.
pub(super) struct Halved;

impl ModuleMapper for Halved {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| Tensor::from_inner(value.without_autodiff().mul_scalar(0.5)).require_grad())
    }
}
