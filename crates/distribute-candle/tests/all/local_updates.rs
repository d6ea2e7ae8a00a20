//! Replicas that train apart: 16 bits, the trainer, and checkpoints.

use std::path::Path;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, linear};
use distribute_candle::{Adam, CandleStrategy, Error, Fit, MeanSquaredError, Model, ScopeOptions, Sgd, Trainer};
use distribute_input::Dataset;
use distribute_optim::Trainable;
use distribute_strategy::{DilocoStrategy, LocalUpdates, MirroredStrategy, Replicas, Strategy, StrategyExtended};
use distribute_train::callbacks::{BackupAndRestore, Callback, Training};
use distribute_train::checkpoint::CheckpointManager;
use distribute_train::metrics::Metrics;

struct LocalSgd {
    over: Strategy,
    every: u64,
}

impl LocalUpdates for LocalSgd {
    fn is_due(&self, steps: u64) -> bool {
        steps.is_multiple_of(self.every)
    }
}

impl StrategyExtended for LocalSgd {
    fn name(&self) -> &'static str {
        "LocalSgd"
    }
    fn replicas(&self) -> &Replicas {
        self.over.extended().replicas()
    }
    fn describe(&self) -> String {
        format!("LocalSgd every {} steps over {}", self.every, self.over.describe())
    }
    fn local_updates(&self) -> Option<&dyn LocalUpdates> {
        Some(self)
    }
}

fn local(replicas: usize, every: u64) -> Strategy {
    let over = MirroredStrategy::builder().num_replicas(replicas).build().unwrap();
    Strategy::new(LocalSgd { over, every })
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
    let adam = |model: &Model<_>| Adam::new(0.2).build(model);
    Trainer::new(strategy, layer, adam, MeanSquaredError, Metrics::new()).unwrap()
}

/// Returns each replica's weights.
fn weights(model: &Model<candle_nn::Linear>) -> Vec<Vec<f32>> {
    let of = |component: &Tensor| component.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    model.variables().iter().find(|it| it.name() == "layer.weight").unwrap().components().iter().map(of).collect()
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
fn a_trainer_synchronizes_before_it_reads_the_model_and_resumes_as_if_it_had_not_been_ended() {
    let fit = |folder: &Path, dies: Option<u32>| {
        let strategy = local(2, 5);
        let mut trainer = trainer(&strategy);
        // In the middle of an epoch of six steps, and of the five between two synchronizations.
        let fit =
            Fit::epochs(4).validation(&data()).callback(BackupAndRestore::new(folder).every_steps(4).keep_at_end());
        let fit = if let Some(epoch) = dies { fit.callback(Dies(epoch)) } else { fit };
        let history = trainer.fit(&data(), fit).ok()?;
        trainer.model().parameters().check_equal().unwrap();
        let weights = weights(trainer.model());
        assert_eq!(weights[0], weights[1]);
        let evaluated = trainer.evaluate(&data()).unwrap();
        assert_eq!(evaluated[0].1, *history.of("val_loss").last().unwrap());
        Some((weights, evaluated))
    };
    let calm = tempfile::tempdir().unwrap();
    let expected = fit(calm.path(), None).unwrap();
    assert!(expected.1[0].1 < 0.6, "{:?}", expected.1);
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(fit(folder.path(), Some(1)), None);
    assert_eq!(fit(folder.path(), Some(3)), None);
    assert_eq!(fit(folder.path(), None).unwrap(), expected);
}

#[test]
fn a_model_of_replicas_that_are_apart_is_saved_with_its_optimizer_only() {
    let strategy = local(2, 100);
    let trainer = trainer(&strategy);
    let (model, optimizer) = (trainer.model(), trainer.optimizer());
    let step = || {
        let run = strategy.run_with((model, optimizer), |context, (layer, optimizer)| {
            let x = Tensor::full(2.0 * context.replica_id() as f32 - 1.0, (1, 3), &Device::Cpu)?;
            optimizer.minimize(context, &layer.forward(&x)?.mean_all()?)
        });
        run.map(drop).unwrap();
    };
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = CheckpointManager::new(folder.path());
    step();
    let before = weights(model);
    assert_ne!(before[0], before[1]);
    let told = checkpoints.save(&strategy, 1, &[model], &()).unwrap_err().to_string();
    assert!(told.contains("call Optimizer::synchronize"), "{told}");
    checkpoints.save(&strategy, 1, &[model, optimizer], &()).unwrap();
    let mean: Vec<f32> = before[0].iter().zip(&before[1]).map(|(a, b)| (a + b) / 2.0).collect();
    assert_eq!(weights(model), [mean.clone(), mean]);
    checkpoints.finish().unwrap();
    // Restored values are equal.
    step();
    assert!(model.parameters().check_equal().is_err());
    checkpoints.restore::<()>(&strategy, &[model, optimizer]).unwrap().unwrap();
    model.parameters().check_equal().unwrap();
}

#[test]
fn a_model_of_replicas_that_are_apart_is_not_exported() {
    let over = MirroredStrategy::builder().num_replicas(2).build().unwrap();
    let diloco = DilocoStrategy::builder().inner_steps(100).over(over).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    for strategy in [diloco, local(2, 100)] {
        let model = strategy.scope_seeded(3, layer).unwrap();
        let optimizer = Sgd::new(0.1).build(&model).unwrap();
        model.save_safetensors(&strategy, &file).unwrap();
        std::fs::remove_file(&file).unwrap();
        let run = strategy.run_with((&model, &optimizer), |context, (layer, optimizer)| {
            let x = Tensor::full(2.0 * context.replica_id() as f32 - 1.0, (1, 3), &Device::Cpu)?;
            optimizer.minimize(context, &layer.forward(&x)?.mean_all()?)
        });
        run.map(drop).unwrap();
        let told = model.save_safetensors(&strategy, &file).unwrap_err();
        assert!(matches!(told, Error::Optim(distribute_optim::Error::Apart)), "{told}");
        assert!(!file.exists());
        optimizer.synchronize(&strategy).unwrap();
        model.save_safetensors(&strategy, &file).unwrap();
        let saved = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
        let saved = saved["layer.weight"].flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(weights(&model).iter().all(|copy| *copy == saved), "{saved:?}");
    }
}

#[test]
fn variables_of_16_bits_take_the_mean_of_their_copies_in_32() {
    let strategy = local(2, 2);
    let half = ScopeOptions::default().dtype(DType::F16);
    let model = strategy.scope_with(half, |vb| vb.get_with_hints(1, "w", candle_nn::Init::Const(1.0))).unwrap();
    let optimizer = Sgd::new(1.0).build(&model).unwrap();
    // Changes of 3 / 2¹⁴ on the first replica and of -1 / 2¹⁴ on the other, which 1 in f16 would lose.
    for _ in 0..16 {
        let run = strategy.run_with((&model, &optimizer), |context, (w, optimizer)| {
            let slope = if context.replica_id() == 0 { 3.0 } else { -1.0 } * 2f64.powi(-15);
            let loss = (w.to_dtype(DType::F32)? * -slope)?.sum_all()?;
            optimizer.minimize(context, &loss)?;
            Ok::<_, Error>(())
        });
        run.unwrap();
    }
    // Sixteen means of 1 / 2¹⁴.
    let expected = 1.0 + 2f32.powi(-10);
    let masters: Vec<Vec<f32>> =
        optimizer.slots().next().unwrap().components().iter().map(|it| it.to_vec1().unwrap()).collect();
    assert_eq!(masters, [[expected], [expected]]);
    let expected = distribute_device::f16::from_f32(expected);
    let parameters = model.variables()[0].components().iter().map(|it| it.to_vec1::<distribute_device::f16>().unwrap());
    assert_eq!(parameters.collect::<Vec<_>>(), [[expected], [expected]]);
}
