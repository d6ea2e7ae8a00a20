//! Tensor parallelism: models whose layers are split among ranks train as the unsplit ones on one replica.

mod layers;

use std::time::Duration;

use candle_core::{D, DType, Device, Module, Tensor, Var};
use candle_nn::{Embedding, Init, Linear, VarBuilder, VarMap, embedding, linear, linear_no_bias};
use distribute_candle::{
    Adam, CandleContext, CandleStrategy, Clip, ColumnParallelLinear, ColumnParallelOptions, Ema, Error, Lamb,
    LayerNorm, LossScale, Model, Optimizer, RowParallelLinear, RowParallelOptions, ScopeOptions, Sgd,
    VocabParallelEmbedding, column_parallel_linear, copy_to_tensor_group, cross_entropy_per_example,
    gather_from_tensor_group, layer_norm, row_parallel_linear, scatter_to_tensor_group, sum_over_tensor_group,
    vocab_parallel_cross_entropy_per_example, vocab_parallel_embedding,
};
use distribute_cluster::Membership;
use distribute_collectives::Compression;
use distribute_input::Dataset;
use distribute_strategy::{
    CommunicationOptions, MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy, ReplicaContext, Strategy,
};
use distribute_testkit::{Ports, apart};
use distribute_train::checkpoint::CheckpointManager;
use distribute_values::PerReplica;
use parking_lot::Mutex;

/// Tolerance of parameters after 20 steps in f32, as in the conformance suite.
pub(crate) const TOLERANCE: f64 = 4e-5;

pub(crate) const VOCABULARY: usize = 24;
const WIDTH: usize = 8;
pub(crate) const EXAMPLES: usize = 12;

/// A mesh of replicas with this many tensor ranks each.
pub(crate) fn mesh(replicas: usize, ranks: usize) -> Strategy {
    let devices: Vec<String> = (0..replicas * ranks).map(|index| format!("CPU:{index}")).collect();
    // Several buckets, of which the first are reduced while backward goes through the layers that are split.
    let communication = CommunicationOptions::default().timeout(Duration::from_secs(20)).bytes_per_pack(512);
    MirroredStrategy::builder().devices(devices).tensor_parallel(ranks).communication(communication).build().unwrap()
}

pub(crate) fn alone() -> Strategy {
    OneDeviceStrategy::builder("CPU:0").build().unwrap()
}

/// Every layer in both of its forms, with layers between that are not split.
pub(crate) struct Net {
    words: VocabParallelEmbedding,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
    norm: LayerNorm,
    qkv: ColumnParallelLinear,
    gathered: ColumnParallelLinear,
    scattered: RowParallelLinear,
    pub(crate) head: ColumnParallelLinear,
}

impl Net {
    pub(crate) fn new(vb: VarBuilder<'_>) -> candle_core::Result<Net> {
        let column = ColumnParallelOptions::default();
        let split = column.gather_output(false);
        Ok(Net {
            words: vocab_parallel_embedding(VOCABULARY, WIDTH, vb.pp("words"))?,
            up: column_parallel_linear(WIDTH, 16, split, vb.pp("up"))?,
            down: row_parallel_linear(16, WIDTH, RowParallelOptions::default().input_is_parallel(true), vb.pp("down"))?,
            norm: layer_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            qkv: column_parallel_linear(
                WIDTH,
                3 * WIDTH,
                column.bias(false).gather_output(false).blocks(3),
                vb.pp("qkv"),
            )?,
            gathered: column_parallel_linear(WIDTH, 3 * WIDTH, column.blocks(3), vb.pp("gathered"))?,
            scattered: row_parallel_linear(3 * WIDTH, WIDTH, RowParallelOptions::default(), vb.pp("scattered"))?,
            head: column_parallel_linear(WIDTH, VOCABULARY, split, vb.pp("head"))?,
        })
    }

    pub(crate) fn losses(&self, x: &Tensor, y: &Tensor) -> candle_core::Result<Tensor> {
        self.losses_with(x, y, Ok)
    }

    /// Computes losses with an operation after the first layer, the last one that backward comes through.
    fn losses_with(
        &self,
        x: &Tensor,
        y: &Tensor,
        after: impl Fn(Tensor) -> candle_core::Result<Tensor>,
    ) -> candle_core::Result<Tensor> {
        let words = after(self.words.forward(x)?)?;
        let x = (&words + self.down.forward(&self.up.forward(&words)?.tanh()?)?)?;
        let x = self.norm.forward(&x)?;
        let parts = self.qkv.forward(&x)?;
        let width = parts.dim(D::Minus1)? / 3;
        let part = |at: usize| parts.narrow(D::Minus1, at * width, width);
        // An operation of each part by itself, as attention is, whose result is used again whole.
        let mixed = (part(0)? * part(1)?)?.tanh()?.add(&part(2)?)?;
        let mixed = match distribute_strategy::get_replica_context().and_then(|context| context.tensor_group()) {
            Some(group) => gather_from_tensor_group(&group, &mixed)?,
            None => mixed,
        };
        let x = (x + mixed)?;
        let x = (&x + self.scattered.forward(&self.gathered.forward(&x)?.tanh()?)?)?;
        vocab_parallel_cross_entropy_per_example(&self.head.forward(&x)?, y)
    }
}

/// The same model of candle's own layers.
struct Plain {
    words: Embedding,
    linears: [Linear; 6],
    norm: LayerNorm,
}

impl Plain {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Plain> {
        Ok(Plain {
            words: embedding(VOCABULARY, WIDTH, vb.pp("words"))?,
            linears: [
                linear(WIDTH, 16, vb.pp("up"))?,
                linear(16, WIDTH, vb.pp("down"))?,
                linear_no_bias(WIDTH, 3 * WIDTH, vb.pp("qkv"))?,
                linear(WIDTH, 3 * WIDTH, vb.pp("gathered"))?,
                linear(3 * WIDTH, WIDTH, vb.pp("scattered"))?,
                linear(WIDTH, VOCABULARY, vb.pp("head"))?,
            ],
            norm: layer_norm(WIDTH, 1e-5, vb.pp("norm"))?,
        })
    }

    fn losses(&self, x: &Tensor, y: &Tensor) -> candle_core::Result<Tensor> {
        let [up, down, qkv, gathered, scattered, head] = &self.linears;
        let words = self.words.forward(x)?;
        let x = (&words + down.forward(&up.forward(&words)?.tanh()?)?)?;
        let x = self.norm.forward(&x)?;
        let parts = qkv.forward(&x)?;
        let part = |at: usize| parts.narrow(D::Minus1, at * WIDTH, WIDTH);
        let x = (x + (part(0)? * part(1)?)?.tanh()?.add(&part(2)?)?)?;
        let x = (&x + scattered.forward(&gathered.forward(&x)?.tanh()?)?)?;
        cross_entropy_per_example(&head.forward(&x)?, y)
    }
}

pub(crate) fn examples(step: usize) -> (Tensor, Tensor) {
    let number = |at: usize, by: usize| ((at * by + step * 13) % VOCABULARY) as u32;
    let x: Vec<u32> = (0..EXAMPLES).map(|at| number(at, 7)).collect();
    let y: Vec<u32> = (0..EXAMPLES).map(|at| number(at, 5)).collect();
    (Tensor::new(x, &Device::Cpu).unwrap(), Tensor::new(y, &Device::Cpu).unwrap())
}

/// One step's examples for each rank: those of its replica.
pub(crate) fn parts(strategy: &Strategy, step: usize) -> PerReplica<(Tensor, Tensor)> {
    let ((x, y), each) = (examples(step), EXAMPLES / strategy.num_replicas_in_sync());
    let part = |of: distribute_strategy::ValueContext| {
        let start = of.replica_id * each;
        Ok::<_, Error>((x.narrow(0, start, each)?, y.narrow(0, start, each)?))
    };
    strategy.distribute_values_from_function(part).unwrap()
}

/// Makes steps, and returns the sum of the replicas' losses of each.
fn train(strategy: &Strategy, model: &Model<Net>, optimizer: &Optimizer, steps: std::ops::Range<usize>) -> Vec<f32> {
    let step = |step| {
        let losses = strategy
            .run_with((model, optimizer, parts(strategy, step)), |context, (model, optimizer, (x, y))| {
                let loss = context.average_loss(&model.losses(&x, &y)?, EXAMPLES)?;
                optimizer.minimize(context, &loss)?;
                Ok::<_, Error>(loss.to_scalar::<f32>()?)
            })
            .unwrap();
        let ranks = strategy.tensor_parallel();
        for of_replica in losses.values().chunks(ranks) {
            assert!(of_replica.iter().all(|loss| loss.to_bits() == of_replica[0].to_bits()), "{of_replica:?}");
        }
        losses.values().iter().step_by(ranks).sum()
    };
    steps.map(step).collect()
}

fn whole<M>(model: &Model<M>) -> Vec<(String, Vec<f32>)> {
    let values = |tensor: Tensor| tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    // Parts of tensor ranks are joined in their process, without the strategy that the model was built under.
    let strategy = alone();
    model.variables().iter().map(|of| (of.name().to_owned(), values(of.whole(&strategy).unwrap()))).collect()
}

/// Checks that two models have the same variables with values that are close.
pub(crate) fn close(got: &[(String, Vec<f32>)], expected: &[(String, Vec<f32>)], tolerance: f64, what: &str) {
    let mut expected: Vec<_> = expected.iter().collect();
    let mut got: Vec<_> = got.iter().collect();
    expected.sort_by(|a, b| a.0.cmp(&b.0));
    got.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(got.len(), expected.len());
    for ((name, got), (same, expected)) in got.into_iter().zip(expected) {
        assert_eq!((name, got.len()), (same, expected.len()));
        let apart = apart(got, expected);
        assert!(apart <= tolerance, "{what}: {name} is {apart:e} apart");
    }
}

#[test]
fn a_split_model_starts_as_the_unsplit_one_and_makes_the_same_step() {
    let strategy = alone();
    let plain = strategy.scope_seeded(5, Plain::new).unwrap();
    let start = whole(&plain);
    let optimizer = Sgd::new(1.0).build(&plain).unwrap();
    let expected = strategy
        .run_with((&plain, &optimizer, PerReplica::new(vec![examples(0)])), |context, (model, optimizer, (x, y))| {
            let losses = model.losses(&x, &y)?;
            optimizer.minimize(context, &context.average_loss(&losses, EXAMPLES)?)?;
            Ok::<_, Error>(losses.to_vec1::<f32>()?)
        })
        .unwrap();
    let after = whole(&plain);
    for ranks in [1, 2, 4] {
        let strategy = mesh(1, ranks);
        let model = strategy.scope_seeded(5, Net::new).unwrap();
        close(&whole(&model), &start, 0.0, "at the start");
        let num_parameters: usize = start.iter().map(|(_, values)| values.len()).sum();
        assert_eq!(model.num_parameters(), num_parameters);
        let optimizer = Sgd::new(1.0).build(&model).unwrap();
        let losses = strategy
            .run_with((&model, &optimizer, parts(&strategy, 0)), |context, (model, optimizer, (x, y))| {
                let losses = model.losses(&x, &y)?;
                optimizer.minimize(context, &context.average_loss(&losses, EXAMPLES)?)?;
                Ok::<_, Error>(losses.to_vec1::<f32>()?)
            })
            .unwrap();
        for losses in losses.values() {
            assert!(apart(losses, &expected.values()[0]) < 2e-6, "{losses:?}");
        }
        // With a learning rate of 1, the difference between the steps is that of the gradients.
        close(&whole(&model), &after, 2e-6, &format!("after a step on {ranks} tensor ranks"));
        assert!(after.iter().zip(&start).all(|((_, after), (_, start))| after != start));
        let split = model.variables().iter().filter(|variable| variable.tensor_split().is_some()).count();
        assert_eq!(split, if ranks == 1 { 0 } else { 10 });
    }
}

#[test]
fn a_mesh_trains_as_one_replica() {
    type Build = fn(&Model<Net>) -> distribute_candle::Result<Optimizer>;
    let builds: [(&str, Build); 8] = [
        ("adam", |model| Adam::new(0.01).build(model)),
        ("clipped", |model| Adam::new(0.01).build(model)?.clip(Clip::GlobalNorm(0.05))),
        ("sharded state", |model| Adam::new(0.01).build(model)?.zero1()),
        ("each clipped", |model| Sgd::new(0.1).build(model)?.clip(Clip::Norm(0.02))),
        ("values clipped", |model| Sgd::new(0.1).momentum(0.9).build(model)?.clip(Clip::Value(0.002))),
        ("in 16 bits", |model| Adam::new(0.01).build(model)?.compress(Compression::Bf16)),
        ("in low rank", |model| Sgd::new(0.05).build(model)?.compress(Compression::PowerSgd(2))),
        ("scaled", |model| {
            Adam::new(0.01).build(model)?.scale_losses(LossScale::dynamic().interval(3))?.clip(Clip::GlobalNorm(0.05))
        }),
    ];
    for (what, build) in builds {
        // What is not exchanged loses nothing.
        let tolerance = match what {
            "in 16 bits" => 2e-2,
            "in low rank" => 0.3,
            _ => TOLERANCE,
        };
        let one = alone();
        let expected = one.scope(Net::new).unwrap();
        let optimizer = build(&expected).unwrap();
        let losses = train(&one, &expected, &optimizer, 0..20);
        let norm = optimizer.gradient_norm();
        for (replicas, ranks) in [(2, 2), (1, 4), (3, 2)] {
            let strategy = mesh(replicas, ranks);
            let model = strategy.scope(Net::new).unwrap();
            let optimizer = build(&model).unwrap().audit_every(7);
            let got = train(&strategy, &model, &optimizer, 0..20);
            let what = format!("{what}, {replicas} × {ranks}");
            assert!(apart(&got, &losses) < tolerance, "{what}: {got:?} {losses:?}");
            close(&whole(&model), &whole(&expected), tolerance, &what);
            model.audit(&strategy).unwrap();
            match (optimizer.gradient_norm(), norm) {
                (Some(got), Some(norm)) => assert!((got - norm).abs() < 1e-4 * norm, "{what}: {got} {norm}"),
                (got, norm) => assert_eq!(got, norm),
            }
        }
    }
}

#[test]
fn uneven_batches_accumulation_and_averages_are_those_of_one_replica() {
    let run = |strategy: &Strategy| {
        let model = strategy.scope(Net::new).unwrap();
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        let mut ema = Ema::new(&model, 0.9).unwrap();
        let (x, y) = examples(3);
        // In the last step of a pass the second of two replicas has no examples.
        let data = strategy.distribute_dataset(&Dataset::from_tensor_slices((x, y)).batch(11)).unwrap();
        for _ in 0..3 {
            for batch in &data {
                strategy
                    .run_with((&model, &optimizer, batch.unwrap()), |context, (model, optimizer, (x, y))| {
                        let loss = context.average_loss(&model.losses(&x, &y)?, 22)?;
                        optimizer.accumulate(context, &loss)?;
                        let loss = context.average_loss(&model.losses(&x, &y)?, 22)?;
                        optimizer.minimize(context, &loss)
                    })
                    .unwrap();
                ema.update(&model).unwrap();
            }
        }
        let values = whole(&model);
        ema.swap(&model).unwrap();
        model.audit(strategy).unwrap();
        let averages = whole(&model);
        ema.swap(&model).unwrap();
        assert_eq!(whole(&model), values);
        (values, averages)
    };
    let (values, averages) = run(&alone());
    for strategy in [mesh(2, 2), mesh(1, 2)] {
        let got = run(&strategy);
        close(&got.0, &values, TOLERANCE, "values");
        close(&got.1, &averages, TOLERANCE, "averages");
    }
    assert_ne!(values, averages);
}

#[test]
fn mixed_precision_leaves_out_a_step_on_all_ranks_alike() {
    let strategy = mesh(2, 2);
    let half = ScopeOptions::default().dtype(DType::F16);
    let model = strategy.scope_with(half, Net::new).unwrap();
    let optimizer = Adam::new(0.01)
        .build(&model)
        .unwrap()
        .scale_losses(LossScale::dynamic().initial(1024.0))
        .unwrap()
        .audit_every(1);
    train(&strategy, &model, &optimizer, 0..3);
    assert_eq!(optimizer.loss_scale(), 1024.0);
    let before = whole(&model);
    // The gradient of one rank's part overflows, and no other.
    strategy
        .run_with((&model, &optimizer, parts(&strategy, 3)), |context, (model, optimizer, (x, y))| {
            let loss = context.average_loss(&model.losses(&x, &y)?, EXAMPLES)?;
            let first = f64::from(u8::from(context.tensor_rank() == 1));
            let far = (model.head.weight().to_dtype(DType::F32)?.sum_all()? * (1e30 * first))?;
            optimizer.minimize(context, &(loss + far)?)
        })
        .unwrap();
    assert_eq!(optimizer.loss_scale(), 512.0);
    assert_eq!(whole(&model), before);
    train(&strategy, &model, &optimizer, 3..5);
    assert_ne!(whole(&model), before);
    model.audit(&strategy).unwrap();
}

#[test]
fn a_checkpoint_of_a_mesh_is_restored_on_any_other() {
    let build = |strategy: &Strategy| {
        let model = strategy.scope_seeded(9, Net::new).unwrap();
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        (model, optimizer)
    };
    for (from, others) in [(mesh(2, 2), vec![alone(), mesh(1, 4), mesh(2, 1)]), (alone(), vec![mesh(2, 2)])] {
        let folder = tempfile::tempdir().unwrap();
        let (model, optimizer) = build(&from);
        train(&from, &model, &optimizer, 0..5);
        let mut checkpoints = CheckpointManager::new(folder.path().join("checkpoints"));
        checkpoints.save(&from, 5, &[&model, &optimizer], &()).unwrap();
        checkpoints.finish().unwrap();
        let file = folder.path().join("model.safetensors");
        model.save_safetensors(&from, &file).unwrap();
        let at_five = whole(&model);
        train(&from, &model, &optimizer, 5..10);
        for to in others {
            let (restored, state) = build(&to);
            let mut checkpoints = CheckpointManager::new(folder.path().join("checkpoints"));
            checkpoints.restore::<()>(&to, &[&restored, &state]).unwrap();
            close(&whole(&restored), &at_five, 0.0, "restored");
            train(&to, &restored, &state, 5..10);
            close(&whole(&restored), &whole(&model), TOLERANCE, "continued");
            drop(state);
            let report = restored.load_safetensors(&to, &file).unwrap();
            assert!(report.missing.is_empty() && report.unused.is_empty(), "{report:?}");
            close(&whole(&restored), &at_five, 0.0, "loaded");
            restored.audit(&to).unwrap();
        }
    }
}

#[test]
fn a_rank_that_fails_inside_a_layer_is_named_and_nothing_changes() {
    let strategy = mesh(2, 2);
    let build = |strategy: &Strategy| {
        let model = strategy.scope(Net::new).unwrap();
        let optimizer = Adam::new(0.01).build(&model).unwrap().clip(Clip::GlobalNorm(0.05)).unwrap();
        (model, optimizer)
    };
    let (model, optimizer) = build(&strategy);
    train(&strategy, &model, &optimizer, 0..2);
    for failing in 0..4 {
        for place in [Failure::Forward, Failure::BackwardFirst, Failure::BackwardLast] {
            let before = whole(&model);
            let told = Mutex::new(Vec::new());
            let outcome =
                strategy.run_with((&model, &optimizer, parts(&strategy, 2)), |context, (model, optimizer, (x, y))| {
                    let place = Some(place).filter(|_| context.local_replica_id() == failing);
                    let step = || {
                        let losses = model.losses_with(&x, &y, |words| match place {
                            Some(Failure::Forward) => candle_core::bail!("the layer has failed"),
                            Some(Failure::BackwardLast) => words.apply_op1(Broken),
                            _ => Ok(words),
                        })?;
                        let fails_first = place == Some(Failure::BackwardFirst);
                        let losses = if fails_first { losses.apply_op1(Broken)? } else { losses };
                        optimizer.minimize(context, &context.average_loss(&losses, EXAMPLES)?)
                    };
                    let outcome: Result<(), Error> = step();
                    if place.is_none() {
                        told.lock().push(outcome.as_ref().err().map(ToString::to_string));
                    }
                    outcome
                });
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("the layer has failed"), "{error}");
            let name = format!("tensor rank {} of replica {} failed", failing % 2, failing / 2);
            for told in told.into_inner() {
                assert!(told.as_ref().is_some_and(|told| told.contains(&name)), "{name}: {told:?}");
            }
            assert_eq!(whole(&model), before);
        }
    }
    train(&strategy, &model, &optimizer, 2..6);
    let (other, its_optimizer) = build(&strategy);
    train(&strategy, &other, &its_optimizer, 0..6);
    assert_eq!(whole(&model), whole(&other));
}

/// The place where a rank fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Forward,
    BackwardFirst,
    BackwardLast,
}

/// Fails in backward.
struct Broken;

impl candle_core::CustomOp1 for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn cpu_fwd(
        &self,
        storage: &candle_core::CpuStorage,
        layout: &candle_core::Layout,
    ) -> candle_core::Result<(candle_core::CpuStorage, candle_core::Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        candle_core::bail!("the layer has failed in backward")
    }
}

#[test]
fn workers_of_a_mesh_train_as_one_replica() {
    let one = alone();
    let expected = one.scope_seeded(3, Net::new).unwrap();
    let optimizer = Adam::new(0.01).build(&expected).unwrap();
    train(&one, &expected, &optimizer, 0..10);
    let folder = tempfile::tempdir().unwrap();
    let address = Ports::reserve(1).unwrap().addresses().remove(0);
    let worker = &|rank: u32| {
        let communication = CommunicationOptions::default().timeout(Duration::from_secs(30));
        let strategy = MultiWorkerMirroredStrategy::builder()
            .devices(["CPU:0", "CPU:1"])
            .tensor_parallel(2)
            .membership(Membership::new(rank, 2, &address).unwrap())
            .communication(communication)
            .build()
            .unwrap();
        assert_eq!((strategy.num_replicas_in_sync(), strategy.num_local_replicas()), (2, 2));
        // Another seed on the second worker: the chief's values are sent to it, each place its own parts.
        let model = strategy.scope_seeded(3, Net::new).unwrap();
        if rank == 1 {
            for variable in model.variables() {
                let whole = variable.whole(&strategy).unwrap();
                variable.overwrite(&whole.zeros_like().unwrap()).unwrap();
            }
        }
        let file = folder.path().join("start.safetensors");
        model.save_safetensors(&strategy, &file).unwrap();
        model.load_safetensors(&strategy, &file).unwrap();
        model.audit(&strategy).unwrap();
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        let mut losses = Vec::new();
        for step in 0..10 {
            losses.push(strategy.run_with((&model, &optimizer, parts(&strategy, step)), |context, all| {
                let (model, optimizer, (x, y)) = all;
                optimizer.minimize(context, &context.average_loss(&model.losses(&x, &y)?, EXAMPLES)?)
            }));
        }
        losses.into_iter().for_each(|step| drop(step.unwrap()));
        let mut checkpoints = CheckpointManager::new(folder.path().join("checkpoints"));
        checkpoints.save(&strategy, 10, &[&model, &optimizer], &()).unwrap();
        checkpoints.finish().unwrap();
        whole(&model)
    };
    let values = std::thread::scope(|scope| {
        let workers = [0, 1].map(|rank| scope.spawn(move || worker(rank)));
        workers.map(|worker| worker.join().unwrap())
    });
    assert_eq!(values[0], values[1]);
    close(&values[0], &whole(&expected), TOLERANCE, "two workers");
    let restored = one.scope_seeded(4, Net::new).unwrap();
    let state = Adam::new(0.01).build(&restored).unwrap();
    let mut checkpoints = CheckpointManager::new(folder.path().join("checkpoints"));
    checkpoints.restore::<()>(&one, &[&restored, &state]).unwrap();
    close(&whole(&restored), &values[0], 0.0, "restored");
}
