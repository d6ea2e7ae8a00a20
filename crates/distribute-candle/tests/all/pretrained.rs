//! Values in plain safetensors files, under strategies that copy variables and one that shares them. For several
//! workers see the scenario `pretrained` of the conformance suite.

use std::collections::HashMap;
use std::fs;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{BatchNormConfig, Linear, ModuleT, VarBuilder, VarMap, linear};
use distribute_candle::{
    Adam, CandleContext, CandleStrategy, Error, Model, ScopeOptions, Sgd, SyncBatchNorm, cross_entropy_per_example,
    sync_batch_norm,
};
use distribute_cluster::Membership;
use distribute_optim::Trainable;
use distribute_strategy::{
    CentralStorageStrategy, CommunicationOptions, MirroredStrategy, MultiWorkerMirroredStrategy, Strategy,
};
use distribute_testkit::Ports;

struct Net {
    body: Linear,
    norm: SyncBatchNorm,
    head: Linear,
}

impl Net {
    fn new(classes: usize) -> impl FnMut(VarBuilder<'static>) -> candle_core::Result<Net> {
        move |vb| {
            Ok(Net {
                body: linear(6, 5, vb.pp("body"))?,
                norm: sync_batch_norm(5, BatchNormConfig::default(), vb.pp("norm"))?,
                head: linear(5, classes, vb.pp(format!("head{classes}")))?,
            })
        }
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.head.forward(&self.norm.forward_t(&self.body.forward(x)?, true)?.tanh()?)
    }
}

fn strategies() -> [Strategy; 3] {
    let two = ["CPU:0", "CPU:1"];
    [
        Strategy::default_strategy().unwrap(),
        MirroredStrategy::builder().devices(two).build().unwrap(),
        CentralStorageStrategy::builder().compute_devices(two).build().unwrap(),
    ]
}

fn seeded(strategy: &Strategy, seed: u64, classes: usize) -> Model<Net> {
    strategy.scope_seeded(seed, Net::new(classes)).unwrap()
}

fn step(strategy: &Strategy, model: &Model<Net>, learning_rate: f64) {
    let optimizer = Sgd::new(learning_rate).build(model).unwrap();
    strategy
        .run_with((model, &optimizer), |context, (model, optimizer)| {
            let x: Vec<f32> = (0..24).map(|at| ((at * 7 + context.replica_id() * 5) % 11) as f32 / 11.0).collect();
            let x = Tensor::from_vec(x, (4, 6), &Device::Cpu)?;
            let y = Tensor::new(&[0u32, 1, 1, 0], &Device::Cpu)?;
            let per_example = cross_entropy_per_example(&model.forward(&x)?, &y)?;
            let global_batch = 4 * context.num_replicas_in_sync();
            optimizer.minimize(context, &context.average_loss(&per_example, global_batch)?)
        })
        .unwrap();
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns every replica's values of a variable.
fn values(model: &Model<impl Sized>, name: &str) -> Vec<Vec<f32>> {
    let variable = model.variables().iter().find(|variable| variable.name() == name).unwrap();
    variable.components().iter().map(flat).collect()
}

#[test]
fn what_one_strategy_saves_every_other_loads() {
    let folder = tempfile::tempdir().unwrap();
    for (at, from) in strategies().iter().enumerate() {
        let path = folder.path().join(format!("{at}.safetensors"));
        let saved = seeded(from, 1, 3);
        step(from, &saved, 0.5);
        saved.save_safetensors(from, &path).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), at + 1, "nothing stays beside it");
        for to in &strategies() {
            let loaded = seeded(to, 2, 3);
            let report = loaded.load_safetensors(to, &path).unwrap();
            assert_eq!(report.loaded.len(), 8);
            assert_eq!((report.missing.len(), report.unused.len()), (0, 0));
            for name in report.loaded {
                let expected = &values(&saved, &name)[0];
                assert!(values(&loaded, &name).iter().all(|of_replica| of_replica == expected), "{name}");
            }
            // Training changes the loaded variables.
            step(to, &loaded, 0.5);
            loaded.audit(to).unwrap();
            assert_ne!(values(&loaded, "body.weight")[0], values(&saved, "body.weight")[0]);
        }
    }
}

#[test]
fn candle_and_this_crate_read_each_others_files() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (folder.path().join("ours.safetensors"), folder.path().join("theirs.safetensors"));
    let [_, mirrored, _] = strategies();
    let model = seeded(&mirrored, 1, 3);
    model.save_safetensors(&mirrored, &ours).unwrap();
    let mut plain = VarMap::new();
    let net = Net::new(3)(VarBuilder::from_varmap(&plain, DType::F32, &Device::Cpu)).unwrap();
    plain.load(&ours).unwrap();
    let x = Tensor::ones((2, 6), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(flat(&net.forward(&x).unwrap()), flat(&model.first().forward(&x).unwrap()));
    plain.save(&theirs).unwrap();
    assert_eq!(seeded(&mirrored, 2, 3).load_safetensors(&mirrored, &theirs).unwrap().loaded.len(), 8);
}

#[test]
fn another_head_is_missing_and_the_old_one_unused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    for strategy in &strategies() {
        seeded(strategy, 1, 3).save_safetensors(strategy, &path).unwrap();
        let model = seeded(strategy, 2, 2);
        let head = values(&model, "head2.weight");
        let report = model.load_safetensors(strategy, &path).unwrap();
        assert_eq!(report.missing, ["head2.weight", "head2.bias"]);
        assert_eq!(report.unused, ["head3.bias", "head3.weight"]);
        assert_eq!(values(&model, "head2.weight"), head);
    }
}

#[test]
fn names_are_mapped_and_floats_converted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let weight = Tensor::new(&[[0.5f64, -1.25, 3.0], [1e-3, 2.0, 60000.0]], &Device::Cpu).unwrap();
    candle_core::safetensors::save(&HashMap::from([("encoder.w", weight.clone())]), &path).unwrap();
    for strategy in &strategies() {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let options = ScopeOptions::default().dtype(dtype);
            let model = strategy.scope_with(options, |vb| linear(3, 2, vb.pp("fc"))).unwrap();
            let name = |name: &str| (name != "fc.bias").then(|| "encoder.w".to_owned());
            let report = model.load_safetensors_as(strategy, &path, name).unwrap();
            assert_eq!((report.loaded, report.missing), (vec!["fc.weight".to_owned()], vec![]));
            let expected = flat(&weight.to_dtype(dtype).unwrap());
            assert!(values(&model, "fc.weight").iter().all(|of_replica| *of_replica == expected), "{dtype:?}");
        }
    }
}

#[test]
fn files_that_do_not_fit_get_a_sentence_and_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let ones = |shape: (usize, usize), dtype| Tensor::ones(shape, dtype, &Device::Cpu).unwrap();
    let bias = Tensor::ones(2, DType::F32, &Device::Cpu).unwrap();
    let [_, strategy, _] = strategies();
    let half = ScopeOptions::default().dtype(DType::F16);
    for (name, weight, options, words) in [
        (
            "fc.weight",
            ones((2, 4), DType::F32),
            ScopeOptions::default(),
            "has shape [2, 4], and the model's \"fc.weight\" [2, 3]",
        ),
        ("fc.weight", ones((2, 3), DType::U32), ScopeOptions::default(), "is of type U32"),
        (
            "fc.weight",
            (ones((2, 3), DType::F32) * 1e6).unwrap(),
            half,
            "values that F16 cannot hold; build the model in a wider type",
        ),
        (
            "fc.weight",
            (ones((2, 3), DType::F64) * 1e39).unwrap(),
            ScopeOptions::default(),
            "values that F32 cannot hold",
        ),
    ] {
        candle_core::safetensors::save(&HashMap::from([(name, weight), ("fc.bias", bias.clone())]), &path).unwrap();
        let model = strategy.scope_with(options, |vb| linear(3, 2, vb.pp("fc"))).unwrap();
        let before = values(&model, "fc.bias");
        let error = model.load_safetensors(&strategy, &path).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("model.safetensors"), "{error}");
        assert_eq!(values(&model, "fc.bias"), before);
    }
    let model = strategy.scope(|vb| linear(3, 2, vb.pp("other"))).unwrap();
    let error = model.load_safetensors(&strategy, &path).unwrap_err().to_string();
    assert!(error.contains("\"other.weight\" is not in it") && error.contains("it has \"fc.bias\""), "{error}");
    fs::write(&path, "no tensors").unwrap();
    let error = model.load_safetensors(&strategy, &path).unwrap_err().to_string();
    assert!(error.contains("it is not a safetensors file"), "{error}");
    let nowhere = folder.path().join("nowhere/model.safetensors");
    let error = model.load_safetensors(&strategy, &nowhere).unwrap_err().to_string();
    assert!(error.contains("No such file"), "{error}");
    let error = model.save_safetensors(&strategy, &nowhere).unwrap_err().to_string();
    assert!(error.contains("No such file"), "{error}");
}

#[test]
fn sixteen_bits_are_loaded_before_an_optimizer_is_built() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let [strategy, ..] = strategies();
    let half = ScopeOptions::default().dtype(DType::F16);
    let model = strategy.scope_with(half, |vb| linear(3, 2, vb.pp("fc"))).unwrap();
    model.save_safetensors(&strategy, &path).unwrap();
    let optimizer = Adam::new(0.1).build(&model).unwrap();
    let error = model.load_safetensors(&strategy, &path).unwrap_err();
    assert!(matches!(&error, Error::LoadedLate { name } if name == "fc.weight"), "{error}");
    drop(optimizer);
    assert_eq!(model.load_safetensors(&strategy, &path).unwrap().loaded.len(), 2);
}

#[test]
fn a_body_is_frozen_for_one_optimizer_and_trained_by_the_next() {
    for strategy in &strategies() {
        let mut model = seeded(strategy, 1, 2);
        let of_body = |name: &str| name.starts_with("body.");
        assert_eq!(model.freeze(of_body).unwrap(), 2);
        let start = values(&model, "body.weight");
        step(strategy, &model, 0.5);
        assert_eq!(values(&model, "body.weight"), start);
        assert_eq!(model.unfreeze(|_| true).unwrap(), 2, "statistics are not among them");
        assert_eq!(model.num_parameters(), 6 * 5 + 5 + 2 * 5 + 5 * 2 + 2);
        step(strategy, &model, 0.5);
        assert_ne!(values(&model, "body.weight"), start);
        model.audit(strategy).unwrap();
        let optimizer = Sgd::new(0.1).build(&model).unwrap();
        let error = model.unfreeze(|_| true).unwrap_err().to_string();
        assert!(error.contains("after it is dropped"), "{error}");
        drop(optimizer);
    }
}

#[test]
fn a_worker_that_has_no_whole_variables_lets_none_write_a_file() {
    let (folder, began) = (tempfile::tempdir().unwrap(), Instant::now());
    let path = folder.path().join("model.safetensors");
    let address = format!("127.0.0.1:{}", Ports::reserve(1).unwrap().release()[0]);
    let worker = &|rank: u32| {
        let strategy = MultiWorkerMirroredStrategy::builder()
            .devices(["CPU:0"])
            .membership(Membership::new(rank, 2, &address).unwrap())
            .communication(CommunicationOptions::default().timeout(Duration::from_secs(60)))
            .build()
            .unwrap();
        let model = seeded(&strategy, 1, 3);
        let mut told = Vec::new();
        for torn in [1, 0] {
            model.parameters().set_torn(rank == torn);
            told.push(model.save_safetensors(&strategy, &path).unwrap_err().to_string());
        }
        model.parameters().set_torn(false);
        assert!(!path.exists());
        // They continue together, also when the chief's disk is the reason.
        told.push(model.save_safetensors(&strategy, path.join("nowhere")).unwrap_err().to_string());
        model.save_safetensors(&strategy, &path).unwrap();
        told
    };
    let [chief, other] = std::thread::scope(|scope| {
        let workers = [0, 1].map(|rank| scope.spawn(move || worker(rank)));
        workers.map(|worker| worker.join().unwrap())
    });
    assert_eq!((&chief[0], &other[1]), (&format!("on worker:1: {}", other[0]), &format!("on the chief: {}", chief[1])));
    assert!(other[2].starts_with("on the chief: ") && other[2].contains("No such file"), "{}", other[2]);
    assert!(began.elapsed() < Duration::from_secs(40), "{:?}", began.elapsed());
}
