//! Replicas that make outer steps: the trainer, checkpoints, several workers, and variables of other types.

use std::path::Path;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, linear};
use distribute_candle::{Adam, CandleStrategy, Error, Fit, MeanSquaredError, Model, ScopeOptions, Sgd, Trainer};
use distribute_cluster::Membership;
use distribute_input::Dataset;
use distribute_optim::Trainable;
use distribute_strategy::{
    CommunicationOptions, DilocoStrategy, MirroredStrategy, MultiWorkerMirroredStrategy, OuterNesterov, Strategy, Wire,
};
use distribute_testkit::Ports;
use distribute_train::callbacks::{BackupAndRestore, Callback, Training};
use distribute_train::checkpoint::{Checkpointed, Snapshot};
use distribute_train::metrics::Metrics;

fn mirrored(replicas: usize) -> Strategy {
    MirroredStrategy::builder().num_replicas(replicas).build().unwrap()
}

/// Twenty-one rows of three numbers, and their targets.
fn data() -> Dataset<(Tensor, Tensor)> {
    let x: Vec<f32> = (0..63).map(|at| ((at * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let y: Vec<f32> = x.chunks_exact(3).map(|row| row[0] - 2.0 * row[1] + 0.5).collect();
    let (x, y) = (Tensor::from_vec(x, (21, 3), &Device::Cpu).unwrap(), Tensor::from_vec(y, (21, 1), &Device::Cpu));
    Dataset::from_tensor_slices((x, y.unwrap())).shuffle(21, 7).batch(4)
}

fn layer(vb: VarBuilder<'_>) -> candle_core::Result<candle_nn::Linear> {
    linear(3, 1, vb.pp("layer"))
}

fn trainer(strategy: &Strategy) -> Trainer<candle_nn::Linear> {
    let adam = |model: &Model<_>| Adam::new(0.1).build(model);
    Trainer::new(strategy, layer, adam, MeanSquaredError, Metrics::new()).unwrap()
}

/// Returns each replica's weights and biases.
fn weights(model: &Model<candle_nn::Linear>) -> Vec<Vec<Vec<f32>>> {
    let of = |component: &Tensor| component.flatten_all().unwrap().to_vec1().unwrap();
    model.variables().iter().map(|variable| variable.components().iter().map(of).collect()).collect()
}

/// Ends the training after an epoch, as if the process had died.
struct Dies(u32);

impl Callback for Dies {
    fn epoch_begin(&mut self, training: &mut Training<'_>) -> distribute_train::Result<()> {
        match training.epoch > self.0 {
            true => Err(distribute_train::Error::Chief("it died".to_owned())),
            false => Ok(()),
        }
    }
}

#[test]
fn a_trainer_resumes_amid_inner_steps_as_if_it_had_not_been_ended() {
    resumes(0, 6);
}

#[test]
fn a_trainer_resumes_amid_reductions_that_overlap_with_inner_steps() {
    // Checkpoints are written after five steps of six, with a reduction in progress since the fourth.
    resumes(3, 8);
}

fn resumes(overlap: u64, expected_slots: usize) {
    let fit = |folder: &Path, dies: Option<u32>| {
        // Three replicas, and fragments that take turns every four steps of epochs of six.
        let outer = OuterNesterov { learning_rate: 0.7, momentum: 0.3 };
        let builder = DilocoStrategy::builder().inner_steps(8).fragments(2).outer(outer).wire(Wire::Int8);
        let strategy = builder.overlap(overlap).over(mirrored(3)).unwrap();
        let mut trainer = trainer(&strategy);
        let fit =
            Fit::epochs(4).validation(&data()).callback(BackupAndRestore::new(folder).every_steps(5).keep_at_end());
        let fit = if let Some(epoch) = dies { fit.callback(Dies(epoch)) } else { fit };
        let history = trainer.fit(&data(), fit).ok()?;
        trainer.model().parameters().check_equal().unwrap();
        let slots = trainer.optimizer().local_slots(&strategy).unwrap();
        let slots: Vec<(String, Vec<f32>)> = slots.into_iter().map(elements).collect();
        let losses = history.of("val_loss");
        assert!(losses[3] < 0.5 * losses[0], "{losses:?}");
        Some((weights(trainer.model()), slots, losses[3]))
    };
    let calm = tempfile::tempdir().unwrap();
    let expected = fit(calm.path(), None).unwrap();
    assert_eq!(expected.1.len(), expected_slots);
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(fit(folder.path(), Some(1)), None);
    assert_eq!(fit(folder.path(), Some(3)), None);
    assert_eq!(fit(folder.path(), None).unwrap(), expected);
}

fn elements((name, slot): (String, distribute_values::HostTensor<f32>)) -> (String, Vec<f32>) {
    (name, distribute_values::TensorStorage::to_elements(&slot).unwrap())
}

#[test]
fn workers_have_equal_copies_after_outer_steps() {
    let address = Ports::reserve(1).unwrap().addresses().remove(0);
    let worker = &|rank: u32, wire: Wire, inner_steps: u64| {
        let over = MultiWorkerMirroredStrategy::builder()
            .devices(["CPU:0", "CPU:1"])
            .membership(Membership::new(rank, 2, &address).unwrap())
            .communication(CommunicationOptions::default().timeout(Duration::from_secs(30)))
            .build()
            .unwrap();
        let strategy = DilocoStrategy::builder().inner_steps(inner_steps).wire(wire).over(over).unwrap();
        let model = strategy.scope_seeded(3, layer).unwrap();
        let optimizer = Sgd::new(0.1).momentum(0.5).build(&model).unwrap();
        let mut steps = Vec::new();
        for step in 0..5 {
            let run = strategy.run_with((&model, &optimizer), |context, (layer, optimizer)| {
                let x = Tensor::full((context.replica_id() + step) as f32 * 0.3 - 1.0, (1, 3), &Device::Cpu)?;
                optimizer.minimize(context, &candle_core::Module::forward(layer, &x)?.sqr()?.mean_all()?)
            });
            if let Err(error) = run {
                return Err(error.to_string());
            }
            steps.push((weights(&model), model.parameters().check_equal().is_ok()));
        }
        Ok(steps)
    };
    for wire in [Wire::F32, Wire::Int8] {
        let [one, other] = in_two(|rank| worker(rank, wire, 2).unwrap());
        for (step, ((one, first), (other, second))) in one.iter().zip(&other).enumerate() {
            let is_due = step % 2 == 1;
            assert_eq!((*first, *second), (is_due, is_due));
            for (one, other) in one.iter().zip(other) {
                let are_equal = [&one[0], &one[1], &other[0], &other[1]].iter().all(|copy| **copy == one[0]);
                assert_eq!(are_equal, is_due, "{wire:?}, step {step}");
            }
        }
    }
    // Reductions overlap with steps of the workers.
    let [one, other] = in_two(|rank| overlapping(rank, &address));
    assert!(one == other && one.iter().any(|weights| weights != &one[0]), "{one:?}");
    // Workers with different settings would wait for each other.
    let [one, other] = in_two(|rank| worker(rank, Wire::F32, 2 + u64::from(rank)).unwrap_err());
    assert!(one.contains("inner_steps: 2") && other.contains("inner_steps: 3"), "{one} / {other}");
}

#[test]
fn loaded_values_begin_new_outer_steps_on_every_worker() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let other = mirrored(1);
    other.scope_seeded(9, layer).unwrap().save_safetensors(&other, &file).unwrap();
    let address = Ports::reserve(1).unwrap().addresses().remove(0);
    let trained = |rank: u32, steps_before: usize| {
        let over = MultiWorkerMirroredStrategy::builder()
            .membership(Membership::new(rank, 2, &address).unwrap())
            .communication(CommunicationOptions::default().timeout(Duration::from_secs(30)))
            .build()
            .unwrap();
        let strategy = DilocoStrategy::builder().inner_steps(4).fragments(2).over(over).unwrap();
        let model = strategy.scope_seeded(3, layer).unwrap();
        let optimizer = Sgd::new(0.1).build(&model).unwrap();
        let train = |steps: usize| {
            for step in 0..steps {
                let run = strategy.run_with((&model, &optimizer), |context, (layer, optimizer)| {
                    let x = Tensor::full((context.replica_id() + step) as f32 * 0.3 - 1.0, (1, 3), &Device::Cpu)?;
                    optimizer.minimize(context, &candle_core::Module::forward(layer, &x)?.sqr()?.mean_all()?)
                });
                run.unwrap();
            }
        };
        train(steps_before);
        model.load_safetensors(&strategy, &file).unwrap();
        train(8);
        weights(&model)
    };
    assert_eq!(in_two(|rank| trained(rank, 8)), in_two(|rank| trained(rank, 0)));
}

/// Trains two replicas of a worker, without outer momentum, and returns the outer parameters after each step.
fn overlapping(rank: u32, address: &str) -> Vec<Vec<Vec<f32>>> {
    let over = MultiWorkerMirroredStrategy::builder()
        .devices(["CPU:0", "CPU:1"])
        .membership(Membership::new(rank, 2, address).unwrap())
        .communication(CommunicationOptions::default().timeout(Duration::from_secs(30)))
        .build()
        .unwrap();
    let outer = OuterNesterov { learning_rate: 0.7, momentum: 0.0 };
    let builder = DilocoStrategy::builder().inner_steps(3).outer(outer).wire(Wire::Int8).overlap(2);
    let strategy = builder.over(over).unwrap();
    let model = strategy.scope_seeded(3, layer).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let mut steps = Vec::new();
    for step in 0..9 {
        strategy
            .run_with((&model, &optimizer), |context, (layer, optimizer)| {
                let x = Tensor::full((context.replica_id() + step) as f32 * 0.3 - 1.0, (1, 3), &Device::Cpu)?;
                optimizer.minimize(context, &candle_core::Module::forward(layer, &x)?.sqr()?.mean_all()?)
            })
            .unwrap();
        let slots = optimizer.local_slots(&strategy).unwrap().into_iter().map(elements);
        steps.push(slots.filter(|(name, _)| name.ends_with("/outer")).map(|(_, values)| values).collect());
    }
    steps
}

fn in_two<T: Send>(worker: impl Fn(u32) -> T + Sync) -> [T; 2] {
    let worker = &worker;
    std::thread::scope(|scope| {
        let workers = [0, 1].map(|rank| scope.spawn(move || worker(rank)));
        workers.map(|worker| worker.join().unwrap())
    })
}

#[test]
fn values_of_16_bits_that_are_loaded_are_those_that_are_saved_next() {
    let strategy = DilocoStrategy::builder().inner_steps(100).over(mirrored(2)).unwrap();
    let build = |value: f64| {
        let options = ScopeOptions::default().dtype(DType::F16);
        strategy.scope_with(options, |vb| vb.get_with_hints(2, "w", candle_nn::Init::Const(value))).unwrap()
    };
    let loaded = {
        let mut snapshot = Snapshot::new(0);
        build(3.0).save(&strategy, &mut snapshot).unwrap();
        snapshot
    };
    let copies = |model: &Model<Tensor>| {
        let of = |it: &Tensor| it.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        model.variables()[0].components().iter().map(of).collect::<Vec<_>>()
    };
    let outer = |optimizer: &distribute_candle::Optimizer| {
        let slots = optimizer.local_slots(&strategy).unwrap().into_iter().map(elements);
        slots.into_iter().find(|(name, _)| name == "w/outer").unwrap().1
    };
    let model = build(1.0);
    let optimizer = Sgd::new(0.5).momentum(0.5).build(&model).unwrap();
    let run = strategy.run_with((&model, &optimizer), |context, (w, optimizer)| {
        optimizer.minimize(context, &(w.to_dtype(DType::F32)? * (1.0 + context.replica_id() as f64))?.sum_all()?)
    });
    run.unwrap();
    let apart = copies(&model);
    assert_ne!(apart[0], apart[1]);
    // The optimizer's state is still apart.
    model.load(&strategy, &loaded).unwrap();
    optimizer.synchronize_to_save(&strategy).unwrap();
    assert_eq!(copies(&model), [[3.0; 2]; 2]);
    assert_eq!(outer(&optimizer), [3.0; 2]);
    // Before the first step.
    let model = build(1.0);
    let optimizer = Sgd::new(0.5).build(&model).unwrap();
    model.load(&strategy, &loaded).unwrap();
    assert_eq!(outer(&optimizer), [3.0; 2]);
}

#[test]
fn variables_of_16_bits_are_synchronized_in_32_and_those_of_64_are_refused() {
    let mean = OuterNesterov { learning_rate: 1.0, momentum: 0.0 };
    let strategy = DilocoStrategy::builder().inner_steps(2).outer(mean).over(mirrored(2)).unwrap();
    let train = |dtype| {
        let options = ScopeOptions::default().dtype(dtype);
        let model = strategy.scope_with(options, |vb| vb.get_with_hints(1, "w", candle_nn::Init::Const(1.0))).unwrap();
        let optimizer = Sgd::new(1.0).momentum(0.5).build(&model).unwrap();
        // Gradients of -3 / 2¹⁴ on the first replica and of 1 / 2¹⁴ on the other, which 1 in f16 would lose.
        for _ in 0..16 {
            let run = strategy.run_with((&model, &optimizer), |context, (w, optimizer)| {
                let slope = if context.replica_id() == 0 { 3.0 } else { -1.0 } * 2f64.powi(-15);
                let loss = (w.to_dtype(DType::F32)? * -slope)?.sum_all()?;
                optimizer.minimize(context, &loss)?;
                Ok::<_, Error>(())
            });
            run?;
        }
        Ok::<_, Error>(model)
    };
    let half = train(DType::F16).unwrap();
    // Changes of 1 / 2¹⁴ with momentum: the sum of 2 - 2 / 2ⁿ over sixteen steps.
    let expected = 1.0 + (30.0 + 0.5f32.powi(15)) * 2f32.powi(-14);
    for component in half.variables()[0].components() {
        let got = component.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()[0];
        assert!((got - expected).abs() <= 2f32.powi(-11), "{got}, not {expected}");
    }
    let told = train(DType::F64).map(drop).unwrap_err().to_string();
    assert!(told.contains("w is trained in f64; make it f32"), "{told}");
}
