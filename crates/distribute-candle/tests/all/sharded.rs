//! Models whose parameters, gradients and optimizer state are sharded.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Module, Shape, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use distribute_candle::{
    Adam, CandleContext, CandleStrategy, Clip, Ema, Error, LossScale, Model, Optimizer, ScopeOptions, Sharded,
    cross_entropy_per_example,
};
use distribute_cluster::Membership;
use distribute_input::Dataset;
use distribute_strategy::{CommunicationOptions, FullyShardedStrategy, ShardGroups, Strategy};
use distribute_testkit::{Ports, apart};
use distribute_train::checkpoint::CheckpointManager;
use distribute_values::PerReplica;

use crate::common::*;

fn sharded(replicas: usize, over: usize) -> Strategy {
    let devices: Vec<String> = (0..replicas).map(|index| format!("CPU:{index}")).collect();
    let communication = CommunicationOptions::default().timeout(Duration::from_secs(60));
    let builder = FullyShardedStrategy::builder().devices(devices).communication(communication);
    builder.shard_over(over).mirror_below(20).build().unwrap()
}

/// Blocks with a residual; two share a matrix, and one runs twice.
struct Deep {
    first: Linear,
    blocks: Vec<Sharded<(Linear, Linear)>>,
    last: Linear,
    fails: Option<usize>,
}

impl Deep {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Deep> {
        Deep::failing(vb, None)
    }

    /// A model whose backward fails on one replica, between two blocks.
    fn failing(vb: VarBuilder<'_>, fails: Option<usize>) -> candle_core::Result<Deep> {
        Ok(Deep {
            first: linear(8, WIDTH, vb.pp("first"))?,
            blocks: (0..4).map(|index| residual(&vb, index)).collect::<candle_core::Result<_>>()?,
            last: linear(WIDTH, 3, vb.pp("last"))?,
            fails,
        })
    }
}

impl Module for Deep {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut x = self.first.forward(x)?;
        for index in [0, 1, 2, 3, 2] {
            if let (2, Some(replica)) = (index, self.fails) {
                x = x.apply_op1(Fails(replica))?;
            }
            let y = self.blocks[index].run(&x, |(first, second), x| second.forward(&first.forward(x)?.tanh()?))?;
            x = (x + y)?;
        }
        self.last.forward(&x)
    }
}

/// An operation whose backward fails on one replica.
struct Fails(usize);

impl CustomOp1 for Fails {
    fn name(&self) -> &'static str {
        "fails"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        match distribute_strategy::get_replica_context() {
            Some(context) if context.replica_id() == self.0 => candle_core::bail!("the power went out"),
            _ => Ok(Some(gradient.clone())),
        }
    }
}

type Build = fn(&Model<Deep>) -> distribute_candle::Result<Optimizer>;

const ADAM: Build = |model| Adam::new(0.01).build(model);

fn wholes(strategy: &Strategy, model: &Model<Deep>) -> Vec<(String, Vec<f32>)> {
    let whole = |variable: &distribute_candle::Variable| {
        let whole = variable.whole(strategy).unwrap().to_dtype(DType::F32).unwrap();
        (variable.name().to_owned(), whole.flatten_all().unwrap().to_vec1().unwrap())
    };
    model.variables().iter().map(whole).collect()
}

/// One step, with the gradients of another batch if `accumulate` is set.
fn deep_step(strategy: &Strategy, (model, optimizer): (&Model<Deep>, &Optimizer), accumulate: bool) -> f64 {
    let dtype = model.variables()[0].components()[0].dtype();
    let (first, local) = (strategy.topology().first_replica(), strategy.num_local_replicas());
    let batch = parts(strategy.num_replicas_in_sync(), 10);
    let batch = PerReplica::new(batch.values()[first..first + local].to_vec());
    let losses = strategy.run_with((model, optimizer, batch), |context, (model, optimizer, (x, y))| {
        let loss_of = |x: &Tensor, y: &Tensor| {
            let logits = model.forward(&x.to_dtype(dtype)?)?.to_dtype(DType::F32)?;
            context.average_loss(&cross_entropy_per_example(&logits, y)?, 10)
        };
        if accumulate {
            // On every replica, since all of them gather.
            optimizer.accumulate(context, &loss_of(&x.affine(0.5, 0.1)?, &y)?)?;
        }
        let loss = loss_of(&x, &y)?;
        optimizer.minimize(context, &loss)?;
        Ok::<_, Error>(f64::from(loss.to_scalar::<f32>()?))
    });
    losses.unwrap().iter().sum()
}

fn deep_steps(strategy: &Strategy, trained: (&Model<Deep>, &Optimizer), steps: usize) {
    for _ in 0..steps {
        deep_step(strategy, trained, false);
    }
}

struct Case {
    name: &'static str,
    dtype: DType,
    build: Build,
    frozen: bool,
    accumulate: bool,
}

fn train_deep(strategy: &Strategy, case: &Case) -> (Vec<(String, Vec<f32>)>, Vec<f64>) {
    let mut model = strategy.scope_with(ScopeOptions::default().dtype(case.dtype), Deep::new).unwrap();
    if case.frozen {
        model.freeze(|name| name.starts_with("blocks.0") || name.starts_with("blocks.2.in")).unwrap();
    }
    let optimizer = (case.build)(&model).unwrap();
    let losses = (0..6).map(|_| deep_step(strategy, (&model, &optimizer), case.accumulate)).collect();
    model.audit(strategy).unwrap();
    (wholes(strategy, &model), losses)
}

#[test]
fn blocks_train_as_whole_models_do() {
    let case = |name, build: Build| Case { name, dtype: DType::F32, build, frozen: false, accumulate: false };
    let cases = [
        case("adam", ADAM),
        Case { frozen: true, ..case("frozen half", ADAM) },
        Case { accumulate: true, ..case("accumulated", ADAM) },
        case("clipped", |model| Adam::new(0.01).build(model)?.clip(Clip::GlobalNorm(0.05))),
        Case {
            dtype: DType::F16,
            ..case("16 bits", |model| Adam::new(0.01).build(model)?.scale_losses(LossScale::fixed(64.0)))
        },
    ];
    for case in &cases {
        let (alone, _) = train_deep(&mirrored(1), case);
        for (replicas, over) in [(2, 2), (4, 4), (4, 2)] {
            let (whole, losses) = train_deep(&mirrored(replicas), case);
            let (got, of_parts) = train_deep(&sharded(replicas, over), case);
            let what = format!("{} on {replicas}, {over} parts", case.name);
            assert!(of_parts[5] < of_parts[0], "{what}: {of_parts:?}");
            // The sum of two has no order; a norm is a sum in another one.
            if replicas == 2 && case.name != "clipped" {
                assert_eq!((&got, &of_parts), (&whole, &losses), "{what}");
            }
            let tolerance = if case.dtype == DType::F16 { 5e-2 } else { 1e-4 };
            for other in [&whole, &alone] {
                for ((name, a), (of, b)) in got.iter().zip(other) {
                    assert_eq!((name, a.len()), (of, b.len()));
                    assert!(apart(a, b) < tolerance, "{what}: {name}: {a:?} {b:?}");
                }
            }
        }
    }
}

#[test]
fn a_replica_has_its_part_and_two_blocks_in_memory() {
    for replicas in [2, 4] {
        let strategy = sharded(replicas, replicas);
        let model = strategy.scope(Deep::new).unwrap();
        let optimizer = ADAM(&model).unwrap();
        for _ in 0..3 {
            deep_step(&strategy, (&model, &optimizer), false);
        }
        let matrix = WIDTH * WIDTH * 4;
        assert_eq!(model.peak_gathered_bytes(), 4 * matrix);
        // Seven matrices in blocks, each in parts.
        let in_blocks: usize = model
            .variables()
            .iter()
            .filter(|variable| variable.layout().is_some())
            .map(|variable| variable.components()[0].elem_count() * 4)
            .sum();
        assert_eq!(in_blocks, 7 * matrix / replicas);
        // Two slots of everything; of what is not in blocks, the state is in parts by itself.
        let all = 2 * 4 * model.num_parameters();
        assert!(optimizer.state_bytes() <= all / replicas + 16, "{} of {all}", optimizer.state_bytes());
    }
}

#[test]
fn unchanged_models_shard_gradients_and_state_by_themselves() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let options = ScopeOptions::default().dtype(dtype);
        let run = |strategy: &Strategy| {
            let model = strategy.scope_with(options, Mlp::new).unwrap();
            let optimizer = Adam::new(0.01).build(&model).unwrap();
            for _ in 0..4 {
                let batch = parts(2, 12);
                let run = strategy.run_with((&model, &optimizer, batch), |context, (model, optimizer, (x, y))| {
                    let logits = model.forward(&x.to_dtype(dtype)?)?.to_dtype(DType::F32)?;
                    optimizer.minimize(context, &context.average_loss(&cross_entropy_per_example(&logits, &y)?, 12)?)
                });
                run.unwrap();
            }
            let values: Vec<Vec<f32>> = model
                .variables()
                .iter()
                .map(|v| v.components()[1].to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap())
                .collect();
            (values, optimizer.state_bytes())
        };
        let ((whole, all), (parts, state)) = (run(&mirrored(2)), run(&sharded(2, 2)));
        assert_eq!(whole, parts, "{dtype:?}");
        assert!(state <= all / 2 + 24, "{state} of {all}");
    }
}

#[test]
fn state_that_is_in_host_memory_is_not_offloaded() {
    let strategy = sharded(2, 2);
    let blocks = strategy.scope(Deep::new).unwrap();
    let told = Adam::new(0.1).build_offloaded(&blocks).err().unwrap().to_string();
    assert!(told.contains("parameters in host memory") && told.contains("use build"), "{told}");
    // Without blocks, parameters are whole, and zero1 has the state in host memory.
    let whole = strategy.scope(|vb| linear(8, 8, vb)).unwrap();
    let told = Adam::new(0.1).build_offloaded(&whole).err().unwrap().to_string();
    assert!(told.contains("without sharded variables") && told.contains("Sharded blocks"), "{told}");
}

#[test]
fn checkpoints_go_to_any_number_of_replicas_and_other_strategies() {
    let folder = tempfile::tempdir().unwrap();
    let two = sharded(2, 2);
    let saved = two.scope(Deep::new).unwrap();
    let optimizer = ADAM(&saved).unwrap();
    deep_steps(&two, (&saved, &optimizer), 3);
    let mut checkpoints = CheckpointManager::new(folder.path());
    checkpoints.save(&two, 3, &[&saved, &optimizer], &()).unwrap();
    checkpoints.finish().unwrap();
    let expected = wholes(&two, &saved);
    deep_steps(&two, (&saved, &optimizer), 3);
    let later = wholes(&two, &saved);
    for strategy in [sharded(2, 2), sharded(4, 4), sharded(4, 2), sharded(1, 1), mirrored(2), mirrored(1)] {
        let model = strategy.scope_seeded(9, Deep::new).unwrap();
        let optimizer = ADAM(&model).unwrap();
        CheckpointManager::new(folder.path()).restore::<()>(&strategy, &[&model, &optimizer]).unwrap();
        assert_eq!(wholes(&strategy, &model), expected, "{}", strategy.describe());
        deep_steps(&strategy, (&model, &optimizer), 3);
        for ((name, a), (_, b)) in wholes(&strategy, &model).iter().zip(&later) {
            assert!(apart(a, b) < 1e-4, "{}: {name}", strategy.describe());
        }
    }
}

#[test]
fn files_of_values_are_those_of_whole_models() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let (two, one) = (sharded(2, 2), mirrored(1));
    let model = two.scope_seeded(5, Deep::new).unwrap();
    model.save_safetensors(&two, &path).unwrap();
    let plain = one.scope(Deep::new).unwrap();
    assert!(plain.load_safetensors(&one, &path).unwrap().missing.is_empty());
    assert_eq!(wholes(&one, &plain), wholes(&two, &model));
    let again = two.scope(Deep::new).unwrap();
    again.load_safetensors(&two, &path).unwrap();
    assert_eq!(wholes(&two, &again), wholes(&two, &model));
}

#[test]
fn averages_of_parts_are_swapped_in_and_out() {
    let strategy = sharded(2, 2);
    let model = strategy.scope(Deep::new).unwrap();
    let optimizer = ADAM(&model).unwrap();
    let mut ema = Ema::new(&model, 0.5).unwrap();
    deep_step(&strategy, (&model, &optimizer), false);
    ema.update(&model).unwrap();
    let before = wholes(&strategy, &model);
    ema.swap(&model).unwrap();
    assert_ne!(wholes(&strategy, &model), before);
    ema.swap(&model).unwrap();
    assert_eq!(wholes(&strategy, &model), before);
}

#[test]
fn replicas_without_examples_take_part_in_every_gather() {
    let run = |strategy: &Strategy| {
        let model = strategy.scope(Deep::new).unwrap();
        let optimizer = ADAM(&model).unwrap();
        // The last of three batches has two rows.
        let dataset = Dataset::from_tensor_slices(data(18)).batch(8);
        for batch in &strategy.distribute_dataset(&dataset).unwrap() {
            let run = strategy.run_with((&model, &optimizer, batch.unwrap()), |context, (model, optimizer, (x, y))| {
                let per_example = cross_entropy_per_example(&model.forward(&x)?, &y)?;
                optimizer.minimize(context, &context.average_loss(&per_example, 8)?)
            });
            run.unwrap();
        }
        wholes(strategy, &model)
    };
    let (parts, whole) = (run(&sharded(4, 4)), run(&mirrored(4)));
    for ((name, a), (_, b)) in parts.iter().zip(&whole) {
        assert!(apart(a, b) < 1e-5, "{name}");
    }
}

/// Notes with which error the first replica's gathers ended, however it leaves its step.
struct Seen<'a> {
    told: &'a Mutex<String>,
    groups: Arc<ShardGroups>,
    replica: usize,
}

impl Drop for Seen<'_> {
    fn drop(&mut self) {
        if let (0, Some(failure)) = (self.replica, self.groups.gathers().failure()) {
            *self.told.lock().unwrap() = failure.to_string();
        }
    }
}

#[test]
fn a_replica_that_fails_amid_backward_is_named_by_those_that_gather() {
    let strategy = sharded(2, 2);
    let undisturbed = {
        let model = strategy.scope(Deep::new).unwrap();
        let optimizer = ADAM(&model).unwrap();
        deep_steps(&strategy, (&model, &optimizer), 2);
        wholes(&strategy, &model)
    };
    let model = strategy.scope(|vb| Deep::failing(vb, Some(1))).unwrap();
    let optimizer = ADAM(&model).unwrap();
    let told = Mutex::new(String::new());
    let began = Instant::now();
    let failed = strategy.run_with((&model, &optimizer, parts(2, 10)), |context, (model, optimizer, (x, y))| {
        let loss = context.average_loss(&cross_entropy_per_example(&model.forward(&x)?, &y)?, 10)?;
        let _seen = Seen { told: &told, groups: context.shard_groups().unwrap(), replica: context.replica_id() };
        optimizer.minimize(context, &loss)
    });
    let failed = failed.unwrap_err().to_string();
    assert!(failed.contains("the power went out"), "{failed}");
    let told = told.into_inner().unwrap();
    assert!(told.contains("replica 1 failed") && told.contains("the power went out"), "{told}");
    assert!(began.elapsed() < Duration::from_secs(20));
    // Parameters are at rest again, and the strategy is as good as new.
    let good = strategy.scope(Deep::new).unwrap();
    let optimizer = ADAM(&good).unwrap();
    deep_steps(&strategy, (&good, &optimizer), 2);
    assert_eq!(wholes(&strategy, &good), undisturbed);
}

#[test]
fn a_parameter_read_outside_its_block_is_a_sentence() {
    let strategy = sharded(2, 2);
    let model = strategy
        .scope(|vb| {
            let mut weight = None;
            let block = Sharded::new(vb.pp("layers.3"), |vb| {
                let layer = linear(WIDTH, WIDTH, vb)?;
                weight = Some(layer.weight().clone());
                Ok(layer)
            })?;
            Ok((block, weight))
        })
        .unwrap();
    let failed = strategy.run_with(&model, |_, (block, weight)| {
        let x = Tensor::ones((2, WIDTH), DType::F32, &Device::Cpu)?;
        let y = block.run(&x, |layer, x| layer.forward(x))?;
        match weight {
            Some(weight) => Ok::<_, Error>(y.matmul(&weight.t()?)?),
            None => Ok(y),
        }
    });
    let told = failed.unwrap_err().to_string();
    assert!(told.contains("layers.3") && told.contains("inside Sharded::run"), "{told}");
    // Outside of every run there is nothing to gather by.
    let (block, _) = model.first();
    let told = block.run(&Tensor::ones((2, WIDTH), DType::F32, &Device::Cpu).unwrap(), |layer, x| layer.forward(x));
    assert!(told.unwrap_err().to_string().contains("inside Strategy::run"));
}

#[test]
fn workers_hold_parts_as_replicas_of_one_process_do() {
    let folder = tempfile::tempdir().unwrap();
    // Over all four replicas; and over those of each worker, mirrored across workers.
    for (name, over) in [("flat", 4), ("hybrid", 2)] {
        let address = Ports::reserve(1).unwrap().addresses().remove(0);
        let path = folder.path().join(name);
        let worker = &|rank: u32| {
            let communication = CommunicationOptions::default().timeout(Duration::from_secs(60));
            let strategy = FullyShardedStrategy::builder()
                .devices(["CPU:0", "CPU:1"])
                .membership(Membership::new(rank, 2, &address).unwrap())
                .communication(communication)
                .shard_over(over)
                .mirror_below(20)
                .build()
                .unwrap();
            let model = strategy.scope(Deep::new).unwrap();
            let optimizer = ADAM(&model).unwrap();
            deep_steps(&strategy, (&model, &optimizer), 3);
            model.audit(&strategy).unwrap();
            let mut checkpoints = CheckpointManager::new(&path);
            checkpoints.save(&strategy, 3, &[&model, &optimizer], &()).unwrap();
            checkpoints.finish().unwrap();
            wholes(&strategy, &model)
        };
        let found = std::thread::scope(|scope| {
            let workers = [0, 1].map(|rank| scope.spawn(move || worker(rank)));
            workers.map(|worker| worker.join().unwrap())
        });
        assert_eq!(found[0], found[1], "{name}");
        let strategy = sharded(4, over);
        let model = strategy.scope(Deep::new).unwrap();
        let optimizer = ADAM(&model).unwrap();
        deep_steps(&strategy, (&model, &optimizer), 3);
        for ((name, a), (_, b)) in wholes(&strategy, &model).iter().zip(&found[0]) {
            assert!(apart(a, b) < 1e-5, "{name}");
        }
        let one = mirrored(1);
        let restored = one.scope_seeded(7, Deep::new).unwrap();
        let optimizer = ADAM(&restored).unwrap();
        CheckpointManager::new(&path).restore::<()>(&one, &[&restored, &optimizer]).unwrap();
        assert_eq!(wholes(&one, &restored), found[0], "{name}");
    }
}
