//! Promises of optimizers besides their arithmetic.

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::linear;
use distribute::candle::{
    Adagrad, Clip, Ema, Lamb, LossScale, Model, Optimizer, RmsProp, ScopeOptions, sum_over_replicas,
};
use distribute::collectives::{CrossDeviceOps, HierarchicalCopyAllReduce, NcclAllReduce, ReductionToOneDevice};
use distribute::prelude::*;

use super::models::{Kind, Net, Sizes, TOLERANCE, batch, parameters, share, train_by};
use crate::check::{Stop, check, check_eq};
use crate::conditions::{in_one_process, unless_whole};

const UNEVEN: Sizes = |step| if step % 5 == 4 { 3 } else { 13 };

type Build = fn(&Model<Net>) -> distribute::candle::Result<Optimizer>;

pub(super) fn apart(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

const KINDS: [(&str, Build); 7] = [
    ("SGD", |model| Sgd::new(0.1).build(model)),
    ("Nesterov", |model| Sgd::new(0.1).momentum(0.9).nesterov().build(model)),
    ("Adam", |model| Adam::new(0.01).build(model)),
    ("AdamW", |model| AdamW::new(0.01, 0.01).build(model)),
    ("Adagrad", |model| Adagrad::new(0.1).build(model)),
    ("RMSprop", |model| RmsProp::new(0.01).build(model)),
    ("LAMB", |model| Lamb::new(0.01).build(model)),
];

/// Returns the kinds that the strategy does not refuse.
fn kinds(strategy: &Strategy) -> Result<Vec<(&'static str, Build)>, Stop> {
    let mut kinds = Vec::new();
    for (name, build) in KINDS {
        let model = strategy.scope_seeded(5, |vb| Net::new(Kind::Dense, &vb))?;
        if unless_whole(strategy, build(&model))?.is_some() {
            kinds.push((name, build));
        }
    }
    check!(kinds.len() + 1 >= KINDS.len(), "only {} kinds of optimizers can be built", kinds.len());
    Ok(kinds)
}

pub(crate) fn every_kind(strategy: &Strategy) -> Result<(), Stop> {
    for (name, build) in kinds(strategy)? {
        let (model, _) = train_by(strategy, Kind::Dense, 20, |_| 16, build)?;
        let (alone, _) = train_by(&Strategy::default_strategy()?, Kind::Dense, 20, |_| 16, build)?;
        let apart = apart(&parameters(&model, 0)?, &parameters(&alone, 0)?);
        // Where a gradient is nearly 0, adaptive steps amplify its rounding error.
        check!(apart < 10.0 * TOLERANCE, "{name}: parameters are {apart:e} apart after 20 steps");
    }
    Ok(())
}

pub(crate) fn taken_back(strategy: &Strategy) -> Result<(), Stop> {
    in_one_process(strategy)?;
    let last = strategy.num_replicas_in_sync() - 1;
    // Returns all replicas' parameters after four steps, with or without a failed one before the third.
    let train = |build: Build, fails: bool| -> Result<Vec<Vec<f32>>, Stop> {
        let model = strategy.scope_seeded(5, |vb| Net::new(Kind::Dense, &vb))?;
        let optimizer = build(&model)?;
        for (step, failing) in [(0, false), (1, false), (2, true), (2, false), (3, false)] {
            if failing && !fails {
                continue;
            }
            let whole = batch(step, 12)?;
            let own = strategy.distribute_values_from_function(|context| {
                share(&whole, context.num_replicas, context.replica_id).map_err(distribute::Error::from)
            })?;
            let outcome = strategy.run((&model, &optimizer, own), |context, (model, optimizer, (x, y))| {
                let loss = context.average_loss(&cross_entropy_per_example(&model.forward(&x)?, &y)?, 12)?;
                optimizer.accumulate(context, &loss)?;
                if failing && context.replica_id() == last {
                    return Err(candle_core::Error::Msg("as planned".to_owned()).into());
                }
                optimizer.minimize(context, &loss)?;
                Ok(())
            });
            check_eq!(outcome.is_err(), failing, "whether the step failed");
        }
        (0..strategy.num_local_replicas()).map(|replica| Ok(parameters(&model, replica)?)).collect()
    };
    for (name, build) in kinds(strategy)? {
        let (got, expected) = (train(build, true)?, train(build, false)?);
        let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        for (got, expected) in got.iter().zip(&expected) {
            check!(bits(got) == bits(expected), "{name}: a step that failed has left something behind");
        }
        check!(got.iter().all(|replica| *replica == got[0]), "{name}: replicas differ after a step that failed");
    }
    Ok(())
}

pub(crate) fn unequal(strategy: &Strategy) -> Result<(), Stop> {
    let model = strategy.scope(|vb| vb.get_with_hints(1, "v", candle_nn::Init::Const(2.0)))?;
    let optimizer = Adam::new(0.01).betas(0.2, 0.2).build(&model)?;
    let n = strategy.num_replicas_in_sync() as f64;
    strategy.run((&model, &optimizer), |context, (v, optimizer)| {
        let loss = (v.sum_all()? * (context.replica_id() as f64 + 1.0))?;
        optimizer.minimize(context, &(loss / n)?)?;
        Ok(())
    })?;
    // For two replicas: 1.99, 1.2 and 1.8.
    let gradient = (n + 1.0) / 2.0;
    let expected = [1.99, 0.8 * gradient, 0.8 * gradient * gradient];
    let slots: Vec<_> = optimizer.slots().collect();
    check_eq!(slots.len(), if strategy.sharding().is_some() { 0 } else { 2 }, "slots that are variables");
    for replica in 0..strategy.num_local_replicas() {
        let all = [&model.variables()[0].components()[replica]];
        let slots = slots.iter().map(|slot| &slot.components()[replica]);
        for ((tensor, expected), what) in all.into_iter().chain(slots).zip(expected).zip(["the variable", "m", "v"]) {
            let got = f64::from(tensor.to_vec1::<f32>()?[0]);
            check!((got - expected).abs() < 1e-5 * expected, "{what}: got {got}, expected {expected}");
        }
    }
    Ok(())
}

pub(crate) fn clipped(strategy: &Strategy) -> Result<(), Stop> {
    let limits: [Build; 3] = [
        |model| Sgd::new(0.2).build(model)?.clip(Clip::GlobalNorm(0.05)),
        |model| Sgd::new(0.2).build(model)?.clip(Clip::Norm(0.02)),
        |model| Sgd::new(0.2).build(model)?.clip(Clip::Value(0.003)),
    ];
    let (free, _) = train_by(strategy, Kind::Dense, 20, UNEVEN, |model| Sgd::new(0.2).build(model))?;
    for build in limits {
        let model = strategy.scope_seeded(5, |vb| Net::new(Kind::Dense, &vb))?;
        if unless_whole(strategy, build(&model))?.is_none() {
            continue;
        }
        let (model, _) = train_by(strategy, Kind::Dense, 20, UNEVEN, build)?;
        let (alone, _) = train_by(&Strategy::default_strategy()?, Kind::Dense, 20, UNEVEN, build)?;
        let model = parameters(&model, 0)?;
        let apart = apart(&model, &parameters(&alone, 0)?);
        check!(apart < TOLERANCE, "parameters are {apart:e} apart after 20 steps");
        check!(model != parameters(&free, 0)?, "the limit limits nothing");
    }
    Ok(())
}

pub(crate) fn accumulated(strategy: &Strategy) -> Result<(), Stop> {
    let run = |parts: usize| -> Result<Vec<f32>, Stop> {
        let model = strategy.scope_seeded(5, |vb| Net::new(Kind::Dense, &vb))?;
        let optimizer = Adam::new(0.01).build(&model)?;
        for step in 0..10 {
            let whole = batch(step, 24)?;
            let own = strategy.distribute_values_from_function(|context| {
                share(&whole, context.num_replicas, context.replica_id).map_err(distribute::Error::from)
            })?;
            strategy.run((&model, &optimizer, own), |context, (model, optimizer, batch)| {
                for part in 0..parts {
                    let (x, y) = share(&batch, parts, part)?;
                    let per_example = cross_entropy_per_example(&model.forward(&x)?, &y)?;
                    let loss = context.average_loss(&per_example, 24)?;
                    if part + 1 < parts {
                        optimizer.accumulate(context, &loss)?;
                    } else {
                        optimizer.minimize(context, &loss)?;
                    }
                }
                Ok(())
            })?;
        }
        Ok(parameters(&model, 0)?)
    };
    let apart = apart(&run(1)?, &run(3)?);
    check!(apart < TOLERANCE, "parameters are {apart:e} apart after 10 steps");
    Ok(())
}

pub(crate) fn mixed_precision(strategy: &Strategy) -> Result<(), Stop> {
    let run = |dtype: DType| -> Result<(Model<Net>, f64, f64), Stop> {
        let options = ScopeOptions::default().seed(5).dtype(dtype);
        let model = strategy.scope_with(options, |vb| Net::new(Kind::Dense, &vb))?;
        let optimizer = Adam::new(0.01).build(&model)?.scale_losses(LossScale::dynamic())?;
        let (mut first, mut last) = (0.0, 0.0);
        for step in 0..40 {
            let whole = batch(0, 16)?;
            let own = strategy.distribute_values_from_function(|context| {
                share(&whole, context.num_replicas, context.replica_id).map_err(distribute::Error::from)
            })?;
            let losses = strategy.run((&model, &optimizer, own), |context, (model, optimizer, (x, y))| {
                let logits = model.forward(&x.to_dtype(dtype)?)?.to_dtype(DType::F32)?;
                let loss = context.average_loss(&cross_entropy_per_example(&logits, &y)?, 16)?;
                optimizer.minimize(context, &loss)?;
                Ok(f64::from(loss.to_scalar::<f32>()?))
            })?;
            last = strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?;
            if step == 0 {
                first = last;
            }
        }
        Ok((model, first, last))
    };
    let (_, _, full) = run(DType::F32)?;
    let (model, first, half) = run(DType::F16)?;
    check!((full - half).abs() < 1e-2, "the loss is {half} in 16 bits, {full} in 32");
    check!(half < 0.9 * first, "nothing was learnt: {first}, then {half}");
    model.audit(strategy)?;
    Ok(())
}

pub(crate) fn overflow(strategy: &Strategy) -> Result<(), Stop> {
    let model = strategy.scope_seeded(5, |vb| Net::new(Kind::Dense, &vb))?;
    let optimizer = Sgd::new(0.1).build(&model)?.scale_losses(LossScale::dynamic().initial(8.0))?;
    let before = parameters(&model, 0)?;
    let whole = batch(0, 16)?;
    let step = |bad: bool| {
        strategy.run((&model, &optimizer), |context, (model, optimizer)| {
            let (x, y) = share(&whole, context.num_replicas_in_sync(), context.replica_id())?;
            let loss = context.average_loss(&cross_entropy_per_example(&model.forward(&x)?, &y)?, 16)?;
            // On the last replica only.
            let bad = bad && context.replica_id() + 1 == context.num_replicas_in_sync();
            optimizer.minimize(context, &if bad { (loss * f64::INFINITY)? } else { loss })?;
            Ok(())
        })
    };
    step(true)?;
    check!(parameters(&model, 0)? == before, "a step that is not finite changed parameters");
    check_eq!(optimizer.loss_scale(), 4.0, "the loss scale");
    step(false)?;
    check!(parameters(&model, 0)? != before, "the next step changed nothing");
    model.audit(strategy)?;
    Ok(())
}

pub(crate) fn frozen(strategy: &Strategy) -> Result<(), Stop> {
    let mut model = strategy.scope_seeded(5, |vb| Net::new(Kind::Dense, &vb))?;
    check_eq!(model.freeze(|name| name.starts_with("first."))?, 2, "frozen variables");
    let optimizer = Sgd::new(0.1).build(&model)?;
    let values = |model: &Model<Net>, prefix: &str| -> candle_core::Result<Vec<Vec<f32>>> {
        let chosen = model.variables().iter().filter(|variable| variable.name().starts_with(prefix));
        chosen.map(|variable| variable.components()[0].flatten_all()?.to_vec1::<f32>()).collect()
    };
    let (body, head) = (values(&model, "first.")?, values(&model, "second.")?);
    let whole = batch(0, 16)?;
    strategy.run((&model, &optimizer), |context, (model, optimizer)| {
        let (x, y) = share(&whole, context.num_replicas_in_sync(), context.replica_id())?;
        let loss = context.average_loss(&cross_entropy_per_example(&model.forward(&x)?, &y)?, 16)?;
        optimizer.minimize(context, &loss)?;
        Ok(())
    })?;
    check_eq!(values(&model, "first.")?, body, "frozen values");
    check!(values(&model, "second.")? != head, "nothing was trained");
    Ok(())
}

pub(crate) fn averages(strategy: &Strategy) -> Result<(), Stop> {
    let (model, _) = train_by(strategy, Kind::Dense, 5, |_| 16, |model| Sgd::new(0.2).build(model))?;
    let mut averages = Ema::new(&model, 0.5)?;
    averages.update(&model)?;
    let trained = parameters(&model, 0)?;
    averages.swap(&model)?;
    model.audit(strategy)?;
    averages.swap(&model)?;
    check_eq!(parameters(&model, 0)?, trained, "values after averages were swapped in and out");
    Ok(())
}

pub(crate) fn diverged(strategy: &Strategy) -> Result<(), Stop> {
    let replicas = strategy.num_replicas_in_sync();
    let model = strategy.scope_seeded(5, |vb| Net::new(Kind::Dense, &vb))?;
    let [first, last] = [0, strategy.num_local_replicas() - 1].map(|local| &model.variables()[0].components()[local]);
    if replicas == 1 || (first.id() == last.id() && strategy.num_local_replicas() > 1) {
        return Err(Stop::NotApplicable("there is one copy of the parameters"));
    }
    let optimizer = Sgd::new(0.1).build(&model)?.audit_every(2);
    let whole = batch(0, 16)?;
    let step = || {
        strategy.run((&model, &optimizer), |context, (model, optimizer)| {
            let (x, y) = share(&whole, context.num_replicas_in_sync(), context.replica_id())?;
            let loss = context.average_loss(&cross_entropy_per_example(&model.forward(&x)?, &y)?, 16)?;
            Ok(optimizer.minimize(context, &loss)?)
        })
    };
    step()?;
    let topology = strategy.topology();
    if topology.worker() + 1 == topology.workers() {
        last.zero_set()?;
    }
    let name = model.variables()[0].name();
    let expected = match strategy.tensor_parallel() {
        1 => format!("variable {name} of replica {} differs", replicas - 1),
        // The gradients of the rank that was spoilt went to those of its place, too.
        ranks => format!("variable {name} of tensor rank {} of replica", ranks - 1),
    };
    // A failed step would end the group of several processes, and after a step of a strategy that shards, all have the
    // values of each part's owner.
    let outcome = match topology.workers() == 1 && strategy.sharding().is_none() {
        true => step().map(drop),
        false => model.audit(strategy).map_err(distribute::Error::from),
    };
    let text = outcome.err().map(|error| error.to_string()).unwrap_or_default();
    check!(text.starts_with(&expected), "a copy that was spoilt came to {text:?}");
    Ok(())
}

pub(crate) fn penalty(strategy: &Strategy) -> Result<(), Stop> {
    let n = strategy.num_replicas_in_sync();
    let shares = strategy.run((), |context, ()| {
        let loss = context.scale_regularization_loss(&Tensor::new(3f32, &Device::Cpu)?)?;
        Ok(loss.to_scalar::<f32>()?)
    })?;
    check!(shares.iter().all(|share| *share == 3.0 / n as f32), "shares are {shares:?}");
    Ok(())
}

pub(crate) fn through_a_sum(strategy: &Strategy) -> Result<(), Stop> {
    let n = strategy.num_replicas_in_sync() as f32;
    let gradients = strategy.run((), |context, ()| {
        let x = Var::new(context.replica_id() as f32 + 1.0, &Device::Cpu)?;
        let y = sum_over_replicas(context, &x)?;
        let gradients = y.sqr()?.backward()?;
        Ok(gradients.get(&x).map(|gradient| gradient.to_scalar::<f32>()).transpose()?)
    })?;
    // Every replica's loss is y², whose derivative is 2 y, and y is n (n + 1) / 2.
    let expected = n * n * (n + 1.0);
    check!(gradients.iter().all(|g| *g == Some(expected)), "got {gradients:?}, expected {expected}");
    Ok(())
}

pub(crate) fn across_devices(strategy: &Strategy) -> Result<(), Stop> {
    if strategy.name() != "Mirrored" {
        return Err(Stop::NotApplicable("ways to combine devices' values are chosen for MirroredStrategy"));
    }
    fn with(strategy: &Strategy, ops: impl CrossDeviceOps + 'static) -> Result<Vec<f32>, Stop> {
        let devices: Vec<String> = strategy.devices().iter().map(|device| device.short()).collect();
        let strategy = MirroredStrategy::builder().devices(devices).cross_device_ops(ops).build()?;
        let (model, _) = train_by(&strategy, Kind::Dense, 20, UNEVEN, |model| Sgd::new(0.2).build(model))?;
        model.audit(&strategy)?;
        Ok(parameters(&model, 0)?)
    }
    let (model, _) = train_by(strategy, Kind::Dense, 20, UNEVEN, |model| Sgd::new(0.2).build(model))?;
    let expected = parameters(&model, 0)?;
    for got in [
        with(strategy, ReductionToOneDevice)?,
        with(strategy, HierarchicalCopyAllReduce::new(2))?,
        with(strategy, HierarchicalCopyAllReduce::new(0))?,
        with(strategy, NcclAllReduce::new(1))?,
    ] {
        let apart = apart(&got, &expected);
        check!(apart < TOLERANCE, "parameters are {apart:e} apart after 20 steps");
    }
    Ok(())
}

pub(crate) fn packs(strategy: &Strategy) -> Result<(), Stop> {
    if strategy.name() != "Mirrored" {
        return Err(Stop::NotApplicable("tried with a second strategy of one process"));
    }
    let run = |bytes_per_pack: usize| -> Result<Vec<f32>, Stop> {
        let devices: Vec<String> = strategy.devices().iter().map(|device| device.short()).collect();
        let options = CommunicationOptions::default().bytes_per_pack(bytes_per_pack);
        let strategy = MirroredStrategy::builder().devices(devices).communication(options).build()?;
        let (model, _) = train_by(&strategy, Kind::Dense, 20, UNEVEN, |model| Sgd::new(0.2).build(model))?;
        Ok(parameters(&model, 0)?)
    };
    let whole = run(0)?;
    for bytes in [1, 100, 1 << 20] {
        check!(run(bytes)? == whole, "packs of {bytes} bytes give other parameters than one pack");
    }
    Ok(())
}

pub(crate) fn model_of_another(strategy: &Strategy) -> Result<(), Stop> {
    let devices: Vec<String> = (0..=strategy.num_local_replicas()).map(|index| format!("CPU:{index}")).collect();
    let other = MirroredStrategy::builder().devices(devices).build()?;
    let model = other.scope(|vb| linear(2, 1, vb.pp("fc")))?;
    let refused = strategy.run(&model, |_, _| Ok(()));
    check!(refused.is_err_and(|error| error.to_string().contains("components")), "a model of another strategy was run");
    Ok(())
}

pub(crate) fn restored(strategy: &Strategy) -> Result<(), Stop> {
    let folder = tempfile::tempdir()?;
    let build: Build = |model| Adam::new(0.01).build(model);
    let (model, optimizer) = train_by(strategy, Kind::Dense, 10, |_| 16, build)?;
    let mut checkpoints = CheckpointManager::new(folder.path());
    checkpoints.save(strategy, 10, &[&model, &optimizer], &"state")?;
    checkpoints.finish()?;
    // The folder is the chief's; no other process has the files.
    check_eq!(checkpoints.root().read_dir()?.next().is_some() || !strategy.is_chief(), true, "the chief's files");
    let again = strategy.scope_seeded(6, |vb| Net::new(Kind::Dense, &vb))?;
    check!(parameters(&again, 0)? != parameters(&model, 0)?, "another seed gives the same model");
    let restored_optimizer = build(&again)?;
    let state: Option<(u64, String)> = checkpoints.restore(strategy, &[&again, &restored_optimizer])?;
    check_eq!(state, Some((10, "state".to_owned())), "the step and the program's state");
    // The chief's run, on every worker.
    let run = checkpoints.run();
    check!(run.is_some(), "a checkpoint without a run");
    check_eq!(distribute::train::from_chief(strategy, Ok::<_, distribute::train::Error>(run))?, run, "the run");
    for replica in 0..strategy.num_local_replicas() {
        check_eq!(parameters(&again, replica)?, parameters(&model, 0)?, format!("copy {replica}"));
    }
    again.audit(strategy)?;
    // Both continue equally, bit for bit: the optimizer's slots and step count were restored.
    for (model, optimizer) in [(&model, &optimizer), (&again, &restored_optimizer)] {
        for step in 10..15 {
            let whole = batch(step, 16)?;
            strategy.run((model, optimizer), |context, (model, optimizer)| {
                let (x, y) = share(&whole, context.num_replicas_in_sync(), context.replica_id())?;
                let loss = context.average_loss(&cross_entropy_per_example(&model.forward(&x)?, &y)?, 16)?;
                optimizer.minimize(context, &loss)?;
                Ok(())
            })?;
        }
    }
    check_eq!(parameters(&again, 0)?, parameters(&model, 0)?, "parameters five steps later");
    // A write error on the chief is an error on every worker.
    let file = folder.path().join("file");
    std::fs::write(&file, "")?;
    let refused = CheckpointManager::new(file.join("checkpoints")).save(strategy, 1, &[&model], &());
    let told = refused.is_err_and(|error| error.to_string().contains("file/checkpoints"));
    check!(told, "a folder that the chief cannot make is not told");
    Ok(())
}
