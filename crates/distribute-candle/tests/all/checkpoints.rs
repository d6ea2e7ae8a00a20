//! Training that resumes from a checkpoint, under the same strategy and under others.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{BatchNorm, BatchNormConfig, Linear, ModuleT, VarBuilder, batch_norm, linear};
use distribute_candle::{
    Adam, CandleContext, CandleStrategy, Ema, LossScale, Model, Optimizer, ScopeOptions, cross_entropy_per_example,
};
use distribute_strategy::{CentralStorageStrategy, MirroredStrategy, Strategy};
use distribute_train::checkpoint::CheckpointManager;
use distribute_values::PerReplica;

struct Net(Linear, BatchNorm, Linear);

impl Net {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Net> {
        let norm = batch_norm(16, BatchNormConfig::default(), vb.pp("norm"))?;
        Ok(Net(linear(8, 16, vb.pp("first"))?, norm, linear(16, 3, vb.pp("second"))?))
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        // The statistics of this layer differ between replicas; they are not used here.
        let hidden = self.0.forward(x)?;
        if hidden.dtype() == DType::F32 {
            self.1.forward_t(&hidden.detach(), true)?;
        }
        self.2.forward(&hidden.tanh()?)
    }
}

fn mirrored(replicas: usize) -> Strategy {
    let devices: Vec<String> = (0..replicas).map(|index| format!("CPU:{index}")).collect();
    MirroredStrategy::builder().devices(devices).build().unwrap()
}

type Build = fn(&Model<Net>) -> distribute_candle::Result<Optimizer>;

fn make(strategy: &Strategy, dtype: DType, build: Build) -> (Model<Net>, Optimizer) {
    let model = strategy.scope_with(ScopeOptions::default().seed(3).dtype(dtype), Net::new).unwrap();
    let optimizer = build(&model).unwrap();
    (model, optimizer)
}

fn train(strategy: &Strategy, (model, optimizer): &(Model<Net>, Optimizer), steps: std::ops::Range<usize>) {
    let dtype = model.variables()[0].components()[0].dtype();
    let replicas = strategy.num_replicas_in_sync();
    for step in steps {
        let part = |replica: usize| {
            let number = |at: usize| ((at * 37 + replica * 101 + step * 13) % 97) as f32 / 97.0;
            let each = 12 / replicas;
            let x: Vec<f32> = (0..each * 8).map(number).collect();
            let y: Vec<u32> = (0..each).map(|at| ((at + replica + step) % 3) as u32).collect();
            let x = Tensor::from_vec(x, (each, 8), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            (x, Tensor::from_vec(y, each, &Device::Cpu).unwrap())
        };
        let parts = PerReplica::new((0..replicas).map(part).collect());
        strategy
            .run_with((model, optimizer, parts), |context, (model, optimizer, (x, y))| {
                let logits = model.forward(&x)?.to_dtype(DType::F32)?;
                optimizer.minimize(context, &context.average_loss(&cross_entropy_per_example(&logits, &y)?, 12)?)
            })
            .unwrap();
    }
}

fn values(model: &Model<Net>, replica: usize) -> Vec<Vec<f32>> {
    let wide = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    let trainable = model.variables().iter().filter(|variable| variable.is_trainable());
    trainable.map(|variable| wide(&variable.components()[replica])).collect()
}

#[test]
fn training_goes_on_as_if_it_had_not_stopped() {
    let central = || CentralStorageStrategy::builder().compute_devices(["CPU:0", "CPU:1"]).build().unwrap();
    let (whole, parts, scaled): (Build, Build, Build) = (
        |model| Adam::new(0.01).build(model),
        |model| Adam::new(0.01).build(model)?.zero1(),
        |model| Adam::new(0.01).build(model)?.scale_losses(LossScale::dynamic().initial(1024.0).interval(3)),
    );
    for (dtype, from, to, save, load) in [
        (DType::F32, mirrored(2), mirrored(2), whole, whole),
        (DType::F32, mirrored(2), central(), whole, whole),
        (DType::F32, mirrored(2), mirrored(2), parts, whole),
        (DType::F32, mirrored(2), mirrored(2), whole, parts),
        (DType::F32, mirrored(2), mirrored(2), parts, parts),
        (DType::F16, mirrored(2), mirrored(2), scaled, scaled),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let saved = make(&from, dtype, save);
        train(&from, &saved, 0..5);
        let mut checkpoints = CheckpointManager::new(folder.path());
        checkpoints.save(&from, 5, &[&saved.0, &saved.1], &"state").unwrap();
        checkpoints.finish().unwrap();
        train(&from, &saved, 5..10);
        let loaded = make(&to, dtype, load);
        let mut checkpoints = CheckpointManager::new(folder.path());
        let restored = checkpoints.restore::<String>(&to, &[&loaded.0, &loaded.1]).unwrap();
        assert_eq!(restored, Some((5, "state".to_owned())));
        assert_eq!(loaded.1.loss_scale(), if dtype == DType::F16 { 2048.0 } else { 1.0 });
        train(&to, &loaded, 5..10);
        for replica in 0..2 {
            assert_eq!(values(&loaded.0, replica), values(&saved.0, 0));
        }
    }
}

#[test]
fn what_is_restored_is_saved_again_before_the_next_step() {
    let builds: [Build; 2] = [|model| Adam::new(0.01).build(model), |model| Adam::new(0.01).build(model)?.zero1()];
    for (build, dtype) in builds.into_iter().flat_map(|build| [DType::F32, DType::BF16].map(|dtype| (build, dtype))) {
        let (folders, strategy) = ([(); 2].map(|()| tempfile::tempdir().unwrap()), mirrored(2));
        let [mut first, mut second] = [0, 1].map(|at: usize| CheckpointManager::new(folders[at].path()));
        let trained = make(&strategy, dtype, build);
        train(&strategy, &trained, 0..5);
        first.save(&strategy, 5, &[&trained.0, &trained.1], &()).unwrap();
        first.finish().unwrap();
        // In another process, and in this one, which has made steps since.
        train(&strategy, &trained, 5..7);
        for resumed in [make(&strategy, dtype, build), trained] {
            first.restore::<()>(&strategy, &[&resumed.0, &resumed.1]).unwrap().unwrap();
            second.save(&strategy, 5, &[&resumed.0, &resumed.1], &()).unwrap();
            second.finish().unwrap();
            let [from_first, from_second] = [&mut first, &mut second].map(|checkpoints| {
                let loaded = make(&strategy, dtype, build);
                checkpoints.restore::<()>(&strategy, &[&loaded.0, &loaded.1]).unwrap().unwrap();
                train(&strategy, &loaded, 5..8);
                values(&loaded.0, 0)
            });
            assert_eq!(from_first, from_second, "{dtype:?}");
        }
    }
}

#[test]
fn a_fixed_loss_scale_is_the_programs() {
    let (folder, strategy) = (tempfile::tempdir().unwrap(), mirrored(2));
    let saved = make(&strategy, DType::F16, |model| Adam::new(0.01).build(model)?.scale_losses(LossScale::dynamic()));
    train(&strategy, &saved, 0..1);
    let mut checkpoints = CheckpointManager::new(folder.path());
    checkpoints.save(&strategy, 1, &[&saved.0, &saved.1], &()).unwrap();
    checkpoints.finish().unwrap();
    let fixed = make(&strategy, DType::F16, |model| Adam::new(0.01).build(model)?.scale_losses(LossScale::fixed(64.0)));
    checkpoints.restore::<()>(&strategy, &[&fixed.0, &fixed.1]).unwrap().unwrap();
    assert_eq!((saved.1.loss_scale(), fixed.1.loss_scale()), (32768.0, 64.0));
}

#[test]
fn another_number_of_replicas_takes_what_was_saved() {
    let folder = tempfile::tempdir().unwrap();
    let saved = make(&mirrored(2), DType::F32, |model| Adam::new(0.01).build(model)?.zero1());
    let two = mirrored(2);
    train(&two, &saved, 0..5);
    let mut checkpoints = CheckpointManager::new(folder.path());
    checkpoints.save(&two, 5, &[&saved.0, &saved.1], &()).unwrap();
    checkpoints.finish().unwrap();
    let three = mirrored(3);
    let loaded = make(&three, DType::F32, |model| Adam::new(0.01).build(model)?.zero1());
    checkpoints.restore::<()>(&three, &[&loaded.0, &loaded.1]).unwrap();
    for replica in 0..3 {
        assert_eq!(values(&loaded.0, replica), values(&saved.0, 0));
    }
    // Statistics that differ between replicas are saved as their mean.
    let statistic = |model: &Model<Net>, replica: usize| -> Vec<f32> {
        let found = model.variables().iter().find(|variable| variable.name() == "norm.running_mean").unwrap();
        found.components()[replica].to_vec1().unwrap()
    };
    let (first, second) = (statistic(&saved.0, 0), statistic(&saved.0, 1));
    assert_ne!(first, second);
    let mean: Vec<f32> = first.iter().zip(&second).map(|(a, b)| (a + b) / 2.0).collect();
    assert_eq!(statistic(&loaded.0, 2), mean);
    train(&three, &loaded, 5..8);
    loaded.0.audit(&three).unwrap();
}

#[test]
fn a_model_of_16_bits_trains_on_from_its_averages() {
    let builds: [Build; 2] = [|model| Adam::new(0.05).build(model), |model| Adam::new(0.05).build(model)?.zero1()];
    for build in builds {
        let strategy = mirrored(2);
        let trained = make(&strategy, DType::BF16, build);
        let mut averages = Ema::new(&trained.0, 0.9).unwrap();
        train(&strategy, &trained, 0..5);
        averages.update(&trained.0).unwrap();
        averages.swap(&trained.0).unwrap();
        assert!(averages.update(&trained.0).unwrap_err().to_string().contains("once more before update"));
        let averaged = values(&trained.0, 0);
        // A step that changes nothing.
        trained.1.set_learning_rate(0.0);
        train(&strategy, &trained, 5..6);
        for replica in 0..2 {
            assert_eq!(values(&trained.0, replica), averaged);
        }
    }
}

#[test]
fn a_model_of_16_bits_that_is_restored_without_its_optimizer_trains_from_there() {
    let builds: [Build; 2] = [|model| Adam::new(0.05).build(model), |model| Adam::new(0.05).build(model)?.zero1()];
    for (build, dtype) in builds.into_iter().flat_map(|build| [DType::BF16, DType::F16].map(|dtype| (build, dtype))) {
        for strategy in [mirrored(1), mirrored(2)] {
            let trained = make(&strategy, dtype, build);
            let folder = tempfile::tempdir().unwrap();
            let mut checkpoints = CheckpointManager::new(folder.path());
            train(&strategy, &trained, 0..2);
            checkpoints.save(&strategy, 2, &[&trained.0], &()).unwrap();
            checkpoints.finish().unwrap();
            let best = values(&trained.0, 0);
            train(&strategy, &trained, 2..12);
            checkpoints.restore::<()>(&strategy, &[&trained.0]).unwrap();
            // A step that changes nothing.
            trained.1.set_learning_rate(0.0);
            train(&strategy, &trained, 12..13);
            for replica in 0..strategy.num_replicas_in_sync() {
                assert_eq!(values(&trained.0, replica), best, "{dtype:?}");
            }
        }
    }
}
