//! Layers that are split among tensor ranks, under a strategy that shards over replicas: models train as they do where
//! replicas mirror each other.

use std::time::Duration;

use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use distribute_candle::{
    Adam, AdamW, CandleContext, CandleStrategy, Clip, ColumnParallelOptions, Ema, Error, LossScale, Model, Optimizer,
    ScopeOptions, Sharded, column_parallel_linear,
};
use distribute_strategy::{CommunicationOptions, FullyShardedStrategy, Strategy};
use distribute_testkit::{apart, short_or_long};
use distribute_train::checkpoint::CheckpointManager;

use crate::tensor_parallel::*;

fn sharded(replicas: usize, over: usize, ranks: usize) -> Strategy {
    let devices: Vec<String> = (0..replicas * ranks).map(|index| format!("CPU:{index}")).collect();
    let communication = CommunicationOptions::default().timeout(Duration::from_secs(30)).bytes_per_pack(512);
    let builder = FullyShardedStrategy::builder().devices(devices).communication(communication);
    builder.tensor_parallel(ranks).shard_over(over).mirror_below(20).build().unwrap()
}

/// How a model is built and called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// As it is: gradients and state are sharded.
    Plain,
    /// As a block: parameters too.
    Block,
    /// As a block that is computed again in backward.
    Recomputed,
}

enum Whole {
    Plain(Box<Net>),
    Block(Sharded<Net>, bool),
}

impl Whole {
    fn new(vb: VarBuilder<'_>, kind: Kind) -> Result<Whole> {
        match kind {
            Kind::Plain => Ok(Whole::Plain(Box::new(Net::new(vb)?))),
            _ => Ok(Whole::Block(Sharded::new(vb, Net::new)?, kind == Kind::Recomputed)),
        }
    }

    fn losses(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let y = y.clone();
        match self {
            Whole::Plain(net) => net.losses(x, &y),
            Whole::Block(block, false) => block.run(x, |net, x| net.losses(x, &y)),
            Whole::Block(block, true) => block.recompute(x, move |net, x| net.losses(x, &y)),
        }
    }
}

type Build = fn(&Model<Whole>) -> distribute_candle::Result<Optimizer>;

const ADAM: Build = |model| Adam::new(0.01).build(model);

fn built(strategy: &Strategy, kind: Kind, build: Build) -> (Model<Whole>, Optimizer) {
    let model = strategy.scope(|vb| Whole::new(vb, kind)).unwrap();
    let optimizer = build(&model).unwrap();
    (model, optimizer)
}

fn train(strategy: &Strategy, (model, optimizer): (&Model<Whole>, &Optimizer), steps: std::ops::Range<usize>) -> f32 {
    let mut last = 0.0;
    for step in steps {
        let run =
            strategy.run_with((model, optimizer, parts(strategy, step)), |context, (model, optimizer, (x, y))| {
                optimizer.accumulate(context, &context.average_loss(&model.losses(&x, &y)?, 2 * EXAMPLES)?)?;
                let loss = context.average_loss(&model.losses(&x, &y)?, 2 * EXAMPLES)?;
                optimizer.minimize(context, &loss)?;
                Ok::<_, Error>(loss.to_scalar::<f32>()?)
            });
        last = run.unwrap().values().iter().step_by(strategy.tensor_parallel()).sum();
    }
    last
}

fn wholes(strategy: &Strategy, model: &Model<Whole>) -> Vec<(String, Vec<f32>)> {
    let whole = |variable: &distribute_candle::Variable| {
        let whole = variable.whole(strategy).unwrap();
        assert_eq!(whole.dims(), variable.shape());
        let values = whole.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        (variable.name().to_owned(), values)
    };
    model.variables().iter().map(whole).collect()
}

#[test]
fn split_layers_train_as_under_mirrored_replicas() {
    let builds: [(&str, Build); 4] = [
        ("adam", ADAM),
        ("values clipped", |model| AdamW::new(0.01, 0.01).build(model)?.clip(Clip::Value(0.002))),
        ("clipped", |model| Adam::new(0.01).build(model)?.clip(Clip::GlobalNorm(0.05))),
        ("both", |model| {
            Adam::new(0.01).build(model)?.clip(Clip::GlobalNorm(0.05))?.scale_losses(LossScale::fixed(64.0))
        }),
    ];
    for (index, (what, build)) in builds.into_iter().enumerate() {
        let meshes = [(2, 2, 2), (3, 3, 2), (4, 2, 2), (2, 2, 4), (1, 1, 2)];
        let tried = if index == 0 { meshes.len() } else { short_or_long(2, meshes.len()) };
        for (replicas, over, ranks) in meshes.into_iter().take(tried) {
            let mirrored = mesh(replicas, ranks);
            let (model, optimizer) = built(&mirrored, Kind::Plain, build);
            let loss = train(&mirrored, (&model, &optimizer), 0..4);
            let expected = wholes(&mirrored, &model);
            for kind in [Kind::Plain, Kind::Block, Kind::Recomputed] {
                let strategy = sharded(replicas, over, ranks);
                let (model, its_optimizer) = built(&strategy, kind, build);
                let got = train(&strategy, (&model, &its_optimizer), 0..4);
                let what = format!("{what}, {kind:?}, {replicas} in {over} parts × {ranks} ranks");
                // The sum of two has no order; a norm is a sum in another one.
                let is_exact = replicas <= 2 && ["adam", "values clipped"].iter().any(|name| what.starts_with(name));
                close(&wholes(&strategy, &model), &expected, if is_exact { 0.0 } else { TOLERANCE }, &what);
                assert!(apart(&[got], &[loss]) <= if is_exact { 0.0 } else { TOLERANCE }, "{what}: {got} {loss}");
                model.audit(&strategy).unwrap();
                match (its_optimizer.gradient_norm(), optimizer.gradient_norm()) {
                    (Some(got), Some(norm)) => assert!((got - norm).abs() < 1e-5 * norm, "{what}: {got} {norm}"),
                    (got, norm) => assert_eq!(got, norm, "{what}"),
                }
                if over > 1 {
                    // Each replica has the whole state of biases that are not sharded.
                    let (ours, all) = (its_optimizer.state_bytes(), optimizer.state_bytes());
                    assert!(ours <= all / over + 64 * 8, "{what}: {ours} bytes of {all}");
                    assert_eq!(model.peak_gathered_bytes() > 0, kind != Kind::Plain, "{what}");
                }
            }
        }
    }
}

#[test]
fn a_rank_has_its_part_of_a_part() {
    let strategy = sharded(2, 2, 2);
    let column = ColumnParallelOptions::default();
    let build = |vb: VarBuilder<'static>| Sharded::new(vb.pp("fc"), |vb| column_parallel_linear(7, 10, column, vb));
    let model = strategy.scope(build).unwrap();
    let weight = &model.variables()[0];
    assert_eq!((weight.shape(), weight.components()[3].elem_count()), (vec![10, 7], 18));
    let whole: Vec<f32> = weight.whole(&strategy).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    // The last part of the second half, with a zero to fill it up.
    let part: Vec<f32> = weight.components()[3].to_vec1().unwrap();
    assert_eq!((&part[..17], part[17]), (&whole[53..], 0.0));
    let twice = strategy.scope(|vb| {
        let split = build(vb.clone())?;
        let whole = Sharded::new(vb.pp("fc"), |vb| candle_nn::linear(7, 10, vb))?;
        Ok((split, whole))
    });
    let Err(told) = twice else { panic!("a variable was split and whole") };
    assert!(told.to_string().contains("split among tensor ranks in one layer and not"), "{told}");
}

#[test]
fn checkpoints_and_files_go_to_other_arrangements() {
    for (from, kind) in [
        (sharded(2, 2, 2), Kind::Plain),
        (sharded(2, 2, 2), Kind::Block),
        (sharded(4, 2, 1), Kind::Block),
        (mesh(2, 2), Kind::Plain),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (model, optimizer) = built(&from, kind, ADAM);
        train(&from, (&model, &optimizer), 0..3);
        let mut checkpoints = CheckpointManager::new(folder.path().join("checkpoints"));
        checkpoints.save(&from, 3, &[&model, &optimizer], &()).unwrap();
        checkpoints.finish().unwrap();
        let file = folder.path().join("model.safetensors");
        model.save_safetensors(&from, &file).unwrap();
        let at_three = wholes(&from, &model);
        train(&from, (&model, &optimizer), 3..6);
        let later = wholes(&from, &model);
        for (to, kind) in [
            (sharded(2, 2, 2), Kind::Plain),
            (sharded(2, 2, 2), Kind::Block),
            (sharded(4, 2, 2), Kind::Recomputed),
            (sharded(3, 3, 1), Kind::Plain),
            (mesh(1, 4), Kind::Plain),
            (alone(), Kind::Block),
        ] {
            let what = format!("{} to {}, {kind:?}", from.describe(), to.describe());
            let restored = to.scope_seeded(9, |vb| Whole::new(vb, kind)).unwrap();
            let state = ADAM(&restored).unwrap();
            let mut checkpoints = CheckpointManager::new(folder.path().join("checkpoints"));
            checkpoints.restore::<()>(&to, &[&restored, &state]).unwrap();
            close(&wholes(&to, &restored), &at_three, 0.0, &what);
            train(&to, (&restored, &state), 3..6);
            close(&wholes(&to, &restored), &later, TOLERANCE, &what);
            drop(state);
            let report = restored.load_safetensors(&to, &file).unwrap();
            assert!(report.missing.is_empty() && report.unused.is_empty(), "{what}: {report:?}");
            close(&wholes(&to, &restored), &at_three, 0.0, &what);
            restored.audit(&to).unwrap();
        }
    }
}

#[test]
fn a_step_that_overflows_is_left_out_on_all_ranks_alike() {
    for kind in [Kind::Plain, Kind::Block] {
        let strategy = sharded(2, 2, 2);
        let half = ScopeOptions::default().dtype(DType::F16);
        let model = strategy.scope_with(half, |vb| Whole::new(vb, kind)).unwrap();
        let scale = LossScale::dynamic().initial(256.0);
        let optimizer = Adam::new(0.01).build(&model).unwrap().scale_losses(scale).unwrap().audit_every(1);
        let mut ema = Ema::new(&model, 0.5).unwrap();
        train(&strategy, (&model, &optimizer), 0..2);
        assert_eq!(optimizer.loss_scale(), 256.0, "{kind:?}");
        let before = wholes(&strategy, &model);
        // The gradient of one rank's part overflows, and no other.
        let run =
            strategy.run_with((&model, &optimizer, parts(&strategy, 3)), |context, (model, optimizer, (x, y))| {
                let first = f64::from(u8::from(context.tensor_rank() == 1));
                let far = |net: &Net| net.head.weight().to_dtype(DType::F32)?.sum_all()? * (1e30 * first);
                let losses = match model {
                    Whole::Plain(net) => net.losses(&x, &y)?.broadcast_add(&far(net)?)?,
                    Whole::Block(block, _) => block.run(&x, |net, x| net.losses(x, &y)?.broadcast_add(&far(net)?))?,
                };
                optimizer.minimize(context, &context.average_loss(&losses, EXAMPLES)?)
            });
        run.unwrap();
        assert_eq!(optimizer.loss_scale(), 128.0, "{kind:?}");
        assert_eq!(wholes(&strategy, &model), before, "{kind:?}");
        train(&strategy, (&model, &optimizer), 3..5);
        assert_ne!(wholes(&strategy, &model), before, "{kind:?}");
        model.audit(&strategy).unwrap();
        let values = wholes(&strategy, &model);
        ema.update(&model).unwrap();
        ema.swap(&model).unwrap();
        assert_ne!(wholes(&strategy, &model), values, "{kind:?}");
        ema.swap(&model).unwrap();
        assert_eq!(wholes(&strategy, &model), values, "{kind:?}");
    }
}

#[test]
fn a_rank_that_fails_leaves_the_others_as_they_were() {
    for kind in [Kind::Plain, Kind::Recomputed] {
        let strategy = sharded(2, 2, 2);
        let (model, optimizer) = built(&strategy, kind, ADAM);
        train(&strategy, (&model, &optimizer), 0..2);
        let before = wholes(&strategy, &model);
        for failing in 0..4 {
            let run =
                strategy.run_with((&model, &optimizer, parts(&strategy, 2)), |context, (model, optimizer, (x, y))| {
                    let losses = model.losses(&x, &y)?;
                    if context.local_replica_id() == failing {
                        return Err(candle_core::Error::Msg("the power went out".to_owned()).into());
                    }
                    optimizer.minimize(context, &context.average_loss(&losses, EXAMPLES)?)
                });
            let told = run.unwrap_err().to_string();
            assert!(told.contains("the power went out"), "{told}");
            assert_eq!(wholes(&strategy, &model), before, "{kind:?}");
        }
        train(&strategy, (&model, &optimizer), 2..4);
        let (other, its_optimizer) = built(&strategy, kind, ADAM);
        train(&strategy, (&other, &its_optimizer), 0..4);
        assert_eq!(wholes(&strategy, &model), wholes(&strategy, &other), "{kind:?}");
    }
}
