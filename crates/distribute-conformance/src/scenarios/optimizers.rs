//! Promises of optimizers besides their arithmetic.

use std::any::type_name;

use candle_core::{Device, Tensor, Var};
use distribute::backend::TensorLibrary;
use distribute::candle::{gather_over_replicas, mean_over_replicas, sum_over_replicas};
use distribute::collectives::{CrossDeviceOps, HierarchicalCopyAllReduce, NcclAllReduce, ReductionToOneDevice};
use distribute::device::DType;
use distribute::optim::{Adagrad, Adam, AdamW, Clip, Ema, Ftrl, Lamb, LossScale, Nadam, RmsProp, Sgd};
use distribute::prelude::{Axis, CheckpointManager, CommunicationOptions, MirroredStrategy, ReduceOp, Strategy};
use distribute::values::TensorStorage;
use distribute_testkit::apart;

use super::models::{TOLERANCE, UNEVEN, audit, built, minimize, parameters, parameters_with, train_by};
use crate::check::{Fault, Stop, check, check_eq};
use crate::conditions::{in_one_process, is_compiled, unless_whole};
use crate::library::{Batch, Build, Kind, Library, elements, variables};
use crate::one_replica::on_one;

/// Tolerance of averages, which are rounded in each update.
const AVERAGING: f64 = 1e-6;

fn every_build<L: Library>() -> [(&'static str, Build<L>); 9] {
    [
        ("SGD", |model| Sgd::new(0.1).build(model)),
        ("Nesterov", |model| Sgd::new(0.1).momentum(0.9).nesterov().build(model)),
        ("Adam", |model| Adam::new(0.01).build(model)),
        ("AdamW", |model| AdamW::new(0.01, 0.01).build(model)),
        ("Adagrad", |model| Adagrad::new(0.1).build(model)),
        ("RMSprop", |model| RmsProp::new(0.01).build(model)),
        ("LAMB", |model| Lamb::new(0.01).build(model)),
        ("Nadam", |model| Nadam::new(0.01).build(model)),
        ("FTRL", |model| Ftrl::new(0.1).regularization(0.01, 0.01).build(model)),
    ]
}

/// Returns the kinds that the strategy does not refuse.
fn kinds<L: Library>(strategy: &Strategy) -> Result<Vec<(&'static str, Build<L>)>, Stop> {
    let (all, mut kinds) = (every_build::<L>(), Vec::new());
    for (name, build) in all {
        let model = built::<L>(strategy, Kind::Dense)?;
        if unless_whole(strategy, build(&model))?.is_some() {
            kinds.push((name, build));
        }
    }
    check!(kinds.len() + 1 >= all.len(), "only {} kinds of optimizers can be built", kinds.len());
    Ok(kinds)
}

pub(crate) fn every_kind<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    for (name, build) in kinds::<L>(strategy)? {
        let of = |strategy: &Strategy| {
            let (model, _) = train_by::<L>(strategy, Kind::Dense, 20, |_| 16, build)?;
            parameters::<L>(strategy, &model, 0)
        };
        let alone = on_one(&format!("{} by {name}", type_name::<L>()), of)?;
        let apart = apart(&of(strategy)?, &alone);
        // Where a gradient is nearly 0, adaptive steps amplify its rounding error.
        check!(apart < 10.0 * TOLERANCE, "{name}: parameters are {apart:e} apart after 20 steps");
    }
    Ok(())
}

pub(crate) fn taken_back<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    in_one_process(strategy)?;
    let last = strategy.num_replicas_in_sync() - 1;
    // Returns all replicas' parameters after four steps, with or without a failed one before the third.
    let train = |build: Build<L>, fails: bool| -> Result<Vec<Vec<f32>>, Stop> {
        let model = built::<L>(strategy, Kind::Dense)?;
        let optimizer = build(&model)?;
        for (step, failing) in [(0, false), (1, false), (2, true), (2, false), (3, false)] {
            if failing && !fails {
                continue;
            }
            let whole = Batch::new(step, 12);
            let outcome = L::run(strategy, &model, &optimizer, |context, optimizer, mean| {
                let own = whole.share(context);
                // Compiled steps accumulate nothing.
                if !is_compiled(strategy) {
                    optimizer.accumulate(context, &mean(&own, 12)?).map_err(Into::into)?;
                }
                if failing && context.replica_id() == last {
                    return Err(distribute::Error::program(Fault("as planned".to_owned())));
                }
                let loss = mean(&own, 12)?;
                optimizer.minimize(context, &loss).map_err(Into::into)?;
                Ok(loss)
            });
            check_eq!(outcome.is_err(), failing, "whether the step failed");
        }
        (0..strategy.num_local_replicas()).map(|replica| parameters::<L>(strategy, &model, replica)).collect()
    };
    for (name, build) in kinds::<L>(strategy)? {
        let (got, expected) = (train(build, true)?, train(build, false)?);
        let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        for (got, expected) in got.iter().zip(&expected) {
            check!(bits(got) == bits(expected), "{name}: a step that failed has left something behind");
        }
        check!(got.iter().all(|replica| *replica == got[0]), "{name}: replicas differ after a step that failed");
    }
    Ok(())
}

pub(crate) fn unequal<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let model = L::bag(strategy, &[("v", 2.0)], 1, DType::F32)?;
    let optimizer = Adam::new(0.01).betas(0.2, 0.2).build(&model)?;
    let n = strategy.num_replicas_in_sync() as f64;
    L::step(strategy, &model, &optimizer, |context, _| Some(vec![(context.replica_id() as f64 + 1.0) / n]))?;
    // For two replicas: 1.99, 1.2 and 1.8.
    let gradient = (n + 1.0) / 2.0;
    let expected = [1.99, 0.8 * gradient, 0.8 * gradient * gradient];
    let variable = &variables(&model)[0];
    let slots: Vec<_> = optimizer.slots().collect();
    let is_zero = strategy.sharding().is_some() && variable.layout().is_none();
    check_eq!(slots.len(), if is_zero { 0 } else { 2 }, "slots that are variables");
    for replica in 0..strategy.num_local_replicas() {
        let mut all = vec![elements(strategy, variable, replica)?[0]];
        // The first replica has the element of a sharded variable.
        let replica = if variable.layout().is_some() { 0 } else { replica };
        if variable.layout().is_none() || strategy.is_chief() {
            for slot in &slots {
                all.push(f64::from(slot.components()[replica].to_elements::<f32>()?[0]));
            }
        }
        for ((got, expected), what) in all.iter().zip(expected).zip(["the variable", "m", "v"]) {
            check!((got - expected).abs() < 1e-5 * expected, "{what}: got {got}, expected {expected}");
        }
    }
    Ok(())
}

pub(crate) fn clipped<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let limits: [Build<L>; 3] = [
        |model| Sgd::new(0.2).build(model)?.clip(Clip::GlobalNorm(0.05)),
        |model| Sgd::new(0.2).build(model)?.clip(Clip::Norm(0.02)),
        |model| Sgd::new(0.2).build(model)?.clip(Clip::Value(0.003)),
    ];
    let of = |strategy: &Strategy, build: Build<L>| {
        let (model, _) = train_by::<L>(strategy, Kind::Dense, 20, UNEVEN, build)?;
        parameters::<L>(strategy, &model, 0)
    };
    let free = of(strategy, |model| Sgd::new(0.2).build(model))?;
    let mut refused = 0;
    for (limit, build) in limits.into_iter().enumerate() {
        let model = built::<L>(strategy, Kind::Dense)?;
        if unless_whole(strategy, build(&model))?.is_none() {
            refused += 1;
            continue;
        }
        let model = of(strategy, build)?;
        let alone = on_one(&format!("{} within limit {limit}", type_name::<L>()), |one| of(one, build))?;
        let apart = apart(&model, &alone);
        check!(apart < TOLERANCE, "parameters are {apart:e} apart after 20 steps");
        check!(model != free, "the limit limits nothing");
    }
    check!(refused <= 1, "{refused} of {} limits are refused", limits.len());
    Ok(())
}

pub(crate) fn accumulated<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let run = |parts: usize| -> Result<Vec<f32>, Stop> {
        let model = built::<L>(strategy, Kind::Dense)?;
        let optimizer = Adam::new(0.01).build(&model)?;
        for step in 0..10 {
            let whole = Batch::new(step, 24);
            L::run(strategy, &model, &optimizer, |context, optimizer, mean| {
                let own = whole.share(context);
                for part in 0..parts - 1 {
                    optimizer.accumulate(context, &mean(&own.part(parts, part), 24)?).map_err(Into::into)?;
                }
                let loss = mean(&own.part(parts, parts - 1), 24)?;
                optimizer.minimize(context, &loss).map_err(Into::into)?;
                Ok(loss)
            })?;
        }
        parameters::<L>(strategy, &model, 0)
    };
    let apart = apart(&run(1)?, &run(3)?);
    check!(apart < TOLERANCE, "parameters are {apart:e} apart after 10 steps");
    Ok(())
}

pub(crate) fn mixed_precision<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let run = |dtype: DType| -> Result<(L::Model, f64, f64), Stop> {
        let model = L::model(strategy, Kind::Dense, 5, dtype)?;
        let optimizer = Adam::new(0.01).build(&model)?.scale_losses(LossScale::dynamic())?;
        let (mut first, mut last) = (0.0, 0.0);
        let whole = Batch::new(0, 16);
        for step in 0..40 {
            let losses = L::run(strategy, &model, &optimizer, |context, optimizer, mean| {
                let loss = mean(&whole.share(context), 16)?;
                optimizer.minimize(context, &loss).map_err(Into::into)?;
                Ok(loss)
            })?;
            last = strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?;
            if step == 0 {
                first = last;
            }
        }
        Ok((model, first, last))
    };
    let (_, _, full) = run(DType::F32)?;
    for dtype in [DType::F16, DType::BF16] {
        let (model, first, half) = run(dtype)?;
        check_eq!(variables(&model)[0].components()[0].dtype()?, dtype, "the type of parameters");
        check!((full - half).abs() < 1e-2, "the loss is {half} in {dtype}, {full} in f32");
        check!(half < 0.9 * first, "nothing was learnt in {dtype}: {first}, then {half}");
        audit::<L>(strategy, &model)?;
    }
    Ok(())
}

pub(crate) fn overflow<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let model = built::<L>(strategy, Kind::Dense)?;
    let optimizer = Sgd::new(0.1).build(&model)?.scale_losses(LossScale::dynamic().initial(8.0))?;
    let before = parameters::<L>(strategy, &model, 0)?;
    let whole = Batch::new(0, 16);
    let step = |bad: bool| {
        L::run(strategy, &model, &optimizer, |context, optimizer, mean| {
            // On the last replica only.
            let bad = bad && context.replica_id() + 1 == context.num_replicas_in_sync();
            let factor = if bad { f64::INFINITY } else { 1.0 };
            let loss = L::Tensors::scale(&mean(&whole.share(context), 16)?, factor).map_err(Into::into)?;
            optimizer.minimize(context, &loss).map_err(Into::into)?;
            Ok(loss)
        })
    };
    step(true)?;
    check!(parameters::<L>(strategy, &model, 0)? == before, "a step that is not finite changed parameters");
    check_eq!(optimizer.loss_scale(), 4.0, "the loss scale");
    step(false)?;
    check!(parameters::<L>(strategy, &model, 0)? != before, "the next step changed nothing");
    audit::<L>(strategy, &model)?;
    Ok(())
}

pub(crate) fn frozen<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let mut model = built::<L>(strategy, Kind::Dense)?;
    check_eq!(L::freeze(&mut model, |name| name.starts_with("first."))?, 2, "frozen variables");
    let optimizer = Sgd::new(0.1).build(&model)?;
    let values = |prefix: &str| parameters_with::<L>(strategy, &model, 0, |name| name.starts_with(prefix));
    let (body, head) = (values("first.")?, values("second.")?);
    minimize::<L>(strategy, &model, &optimizer, &Batch::new(0, 16))?;
    check_eq!(values("first.")?, body, "frozen values");
    check!(values("second.")? != head, "nothing was trained");
    Ok(())
}

pub(crate) fn averages<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let (model, optimizer) = train_by::<L>(strategy, Kind::Dense, 5, |_| 16, |model| Sgd::new(0.2).build(model))?;
    let mut averages = Ema::new(&model, 0.5)?;
    let mut expected = parameters::<L>(strategy, &model, 0)?;
    // The decay of the first updates is (1 + n) / (10 + n).
    for (step, decay) in [(5, 0.1), (6, 2.0 / 11.0)] {
        minimize::<L>(strategy, &model, &optimizer, &Batch::new(step, 16))?;
        averages.update(&model)?;
        let values = parameters::<L>(strategy, &model, 0)?;
        expected
            .iter_mut()
            .zip(values)
            .for_each(|(average, value)| *average = decay * *average + (1.0 - decay) * value);
    }
    let trained = parameters::<L>(strategy, &model, 0)?;
    check!(apart(&expected, &trained) > 100.0 * AVERAGING, "the averages are the values");
    averages.swap(&model)?;
    audit::<L>(strategy, &model)?;
    for replica in 0..strategy.num_local_replicas() {
        let apart = apart(&parameters::<L>(strategy, &model, replica)?, &expected);
        check!(apart < AVERAGING, "averages of copy {replica} are {apart:e} from those of its values");
    }
    averages.swap(&model)?;
    check_eq!(parameters::<L>(strategy, &model, 0)?, trained, "values after averages were swapped in and out");
    Ok(())
}

pub(crate) fn diverged<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let replicas = strategy.num_replicas_in_sync();
    let model = built::<L>(strategy, Kind::Dense)?;
    let first = &variables(&model)[0];
    if replicas == 1 || strategy.shares_variables() || first.layout().is_some() {
        return Err(Stop::NotApplicable("there is one copy of the parameters"));
    }
    let optimizer = Sgd::new(0.1).build(&model)?.audit_every(2);
    let whole = Batch::new(0, 16);
    minimize::<L>(strategy, &model, &optimizer, &whole)?;
    let topology = strategy.topology();
    if let (true, Some(last)) = (topology.worker() + 1 == topology.workers(), first.components().last()) {
        last.write(&mut |mut buffer| buffer.as_bytes_mut().fill(0))?;
    }
    let name = first.name();
    let expected = match strategy.tensor_parallel() {
        1 => format!("variable {name} of replica {} differs", replicas - 1),
        // The gradients of the rank that was spoilt went to those of its place, too.
        ranks => format!("variable {name} of tensor rank {} of replica", ranks - 1),
    };
    // A failed step would end the group of several processes, and after a step of a strategy that shards, all have the
    // values of each part's owner.
    let outcome = match topology.workers() == 1 && strategy.sharding().is_none() {
        true => minimize::<L>(strategy, &model, &optimizer, &whole),
        false => audit::<L>(strategy, &model).map_err(Into::into),
    };
    let text = outcome.err().map(|error| error.to_string()).unwrap_or_default();
    check!(text.starts_with(&expected), "a copy that was spoilt came to {text:?}");
    Ok(())
}

pub(crate) fn penalty<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let n = strategy.num_replicas_in_sync();
    let shares = L::penalty(strategy, 3.0)?;
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

pub(crate) fn through_a_mean(strategy: &Strategy) -> Result<(), Stop> {
    let n = strategy.num_replicas_in_sync() as f32;
    let gradients = strategy.run((), |context, ()| {
        let weight = context.replica_id() as f32 + 1.0;
        let x = Var::new(&[weight, -weight], &Device::Cpu)?;
        let y = mean_over_replicas(context, &x)?;
        // A loss of each replica's own: the sum of its weight times y.
        let gradients = (y * f64::from(weight))?.sum_all()?.backward()?;
        Ok(gradients.get(&x).map(|gradient| gradient.to_vec1::<f32>()).transpose()?)
    })?;
    // The mean of the weights.
    let expected = Some(vec![(n + 1.0) / 2.0; 2]);
    check!(gradients.iter().all(|g| *g == expected), "got {gradients:?}, expected {expected:?}");
    Ok(())
}

pub(crate) fn through_a_gather(strategy: &Strategy) -> Result<(), Stop> {
    let n = strategy.num_replicas_in_sync();
    // Replica r has r + 1 columns, which it fills with its number.
    let all: Vec<f32> = (0..n).flat_map(|replica| vec![replica as f32; replica + 1]).collect();
    let gradients = strategy.run((), |context, ()| {
        let own = context.replica_id();
        let x = Var::from_vec(vec![own as f32; 2 * (own + 1)], (2, own + 1), &Device::Cpu)?;
        let y = gather_over_replicas(context, &x, 1)?;
        let rows = y.to_vec2::<f32>()?;
        // The loss of replica r is the sum of y² times r + 1.
        let gradients = (y.sqr()? * (own + 1) as f64)?.sum_all()?.backward()?;
        let gradient = gradients.get(&x).map(|gradient| gradient.to_vec2::<f32>()).transpose()?;
        Ok((own, rows, gradient))
    })?;
    for (own, rows, gradient) in gradients.iter() {
        check!(rows.iter().all(|row| *row == all), "gathered {rows:?}, expected rows of {all:?}");
        let expected = vec![vec![(n * (n + 1)) as f32 * *own as f32; own + 1]; 2];
        check!(gradient.as_ref() == Some(&expected), "got {gradient:?}, expected {expected:?}");
    }
    // A failed run ends the group of several processes.
    if strategy.topology().workers() > 1 {
        return Ok(());
    }
    let wrong = strategy.run((), |context, ()| {
        let x = Tensor::zeros((1, 2), candle_core::DType::F32, &Device::Cpu)?;
        Ok(gather_over_replicas(context, &x, 2)?)
    });
    let told = wrong.err().map_or_else(String::new, |error| error.to_string());
    check!(told.contains("an axis 2"), "an axis that does not exist: {told:?}");
    Ok(())
}

pub(crate) fn own_gradients<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    if is_compiled(strategy) {
        return Err(Stop::NotApplicable("gradients are part of a compiled step"));
    }
    if strategy.sharding().is_some() {
        return Err(Stop::NotApplicable("gradients of sharded variables are reduced to parts as they come"));
    }
    let expected = train_by::<L>(strategy, Kind::Dense, 20, UNEVEN, |model| Adam::new(0.01).build(model))?.0;
    let expected = parameters::<L>(strategy, &expected, 0)?;
    for is_summed in [false, true] {
        let model = built::<L>(strategy, Kind::Dense)?;
        let optimizer = Adam::new(0.01).build(&model)?;
        for step in 0..20 {
            let whole = Batch::new(step, UNEVEN(step));
            L::run(strategy, &model, &optimizer, |context, optimizer, mean| {
                let loss = mean(&whole.share(context), whole.y.len())?;
                let gradients = optimizer.gradients(context, &loss).map_err(Into::into)?;
                if is_summed {
                    let sums = optimizer.sum_gradients(context, gradients).map_err(Into::into)?;
                    optimizer.apply_aggregated_gradients(context, sums).map_err(Into::into)?;
                } else {
                    optimizer.apply_gradients(context, gradients).map_err(Into::into)?;
                }
                Ok(loss)
            })?;
        }
        let apart = apart(&parameters::<L>(strategy, &model, 0)?, &expected);
        check!(apart < TOLERANCE, "summed by the program: {is_summed}: {apart:e} apart after 20 steps");
        audit::<L>(strategy, &model)?;
        // A failed run ends the group of several processes.
        if strategy.topology().workers() > 1 {
            continue;
        }
        let wrong = L::run(strategy, &model, &optimizer, |context, optimizer, mean| {
            let loss = mean(&Batch::new(0, 12).share(context), 12)?;
            let gradients = optimizer.gradients(context, &loss).map_err(Into::into)?;
            let renamed = gradients.into_iter().map(|(name, gradient)| (format!("{name}.no"), gradient));
            optimizer.apply_gradients(context, renamed).map_err(Into::into)?;
            Ok(loss)
        });
        let told = wrong.err().map_or_else(String::new, |error| error.to_string());
        check!(told.contains("which the model does not have"), "names that the model does not have: {told:?}");
    }
    Ok(())
}

pub(crate) fn across_devices<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    if strategy.name() != "Mirrored" {
        return Err(Stop::NotApplicable("ways to combine devices' values are chosen for MirroredStrategy"));
    }
    fn with<L: Library>(strategy: &Strategy, ops: impl CrossDeviceOps + 'static) -> Result<Vec<f32>, Stop> {
        let devices: Vec<String> = strategy.devices().iter().map(|device| device.short()).collect();
        let strategy = MirroredStrategy::builder().devices(devices).cross_device_ops(ops).build()?;
        let (model, _) = train_by::<L>(&strategy, Kind::Dense, 20, UNEVEN, |model| Sgd::new(0.2).build(model))?;
        audit::<L>(&strategy, &model)?;
        parameters::<L>(&strategy, &model, 0)
    }
    let (model, _) = train_by::<L>(strategy, Kind::Dense, 20, UNEVEN, |model| Sgd::new(0.2).build(model))?;
    let expected = parameters::<L>(strategy, &model, 0)?;
    for got in [
        with::<L>(strategy, ReductionToOneDevice::new())?,
        with::<L>(strategy, HierarchicalCopyAllReduce::new(2))?,
        with::<L>(strategy, HierarchicalCopyAllReduce::new(0))?,
        with::<L>(strategy, NcclAllReduce::new(1))?,
    ] {
        let apart = apart(&got, &expected);
        check!(apart < TOLERANCE, "parameters are {apart:e} apart after 20 steps");
    }
    Ok(())
}

pub(crate) fn packs<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    if strategy.name() != "Mirrored" {
        return Err(Stop::NotApplicable("tried with a second strategy of one process"));
    }
    let run = |bytes_per_pack: usize| -> Result<Vec<f32>, Stop> {
        let devices: Vec<String> = strategy.devices().iter().map(|device| device.short()).collect();
        let options = CommunicationOptions::default().bytes_per_pack(bytes_per_pack);
        let strategy = MirroredStrategy::builder().devices(devices).communication(options).build()?;
        let (model, _) = train_by::<L>(&strategy, Kind::Dense, 20, UNEVEN, |model| Sgd::new(0.2).build(model))?;
        parameters::<L>(&strategy, &model, 0)
    };
    let whole = run(0)?;
    for bytes in [1, 100, 1 << 20] {
        check!(run(bytes)? == whole, "packs of {bytes} bytes give other parameters than one pack");
    }
    Ok(())
}

pub(crate) fn model_of_another<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let local = strategy.num_local_replicas();
    let mut others = vec![(local + 1, "components")];
    if strategy.topology().workers() > 1 {
        // As many replicas as this process has, without the other processes.
        others.push((local, "and this strategy has"));
    }
    for (replicas, words) in others {
        let devices: Vec<String> = (0..replicas).map(|index| format!("CPU:{index}")).collect();
        let other = MirroredStrategy::builder().devices(devices).build()?;
        let model = built::<L>(&other, Kind::Dense)?;
        let optimizer = Sgd::new(0.1).build(&model)?;
        let refused = L::run(strategy, &model, &optimizer, |context, optimizer, mean| {
            let loss = mean(&Batch::new(0, 4), 4)?;
            optimizer.minimize(context, &loss).map_err(Into::into)?;
            Ok(loss)
        });
        let is_refused = refused.is_err_and(|error| error.to_string().contains(words));
        check!(is_refused, "a model of {replicas} replicas of another strategy was trained");
    }
    Ok(())
}

pub(crate) fn restored<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let folder = tempfile::tempdir()?;
    let build: Build<L> = |model| Adam::new(0.01).build(model);
    let (model, optimizer) = train_by::<L>(strategy, Kind::Dense, 10, |_| 16, build)?;
    let mut checkpoints = CheckpointManager::new(folder.path());
    checkpoints.save(strategy, 10, &[&model, &optimizer], &"state")?;
    checkpoints.finish()?;
    // The folder is the chief's; no other process has the files.
    check_eq!(checkpoints.root().read_dir()?.next().is_some() || !strategy.is_chief(), true, "the chief's files");
    let again = L::model(strategy, Kind::Dense, 6, DType::F32)?;
    let values = |model: &L::Model| parameters::<L>(strategy, model, 0);
    check!(values(&again)? != values(&model)?, "another seed gives the same model");
    let restored_optimizer = build(&again)?;
    let state: Option<(u64, String)> = checkpoints.restore(strategy, &[&again, &restored_optimizer])?;
    check_eq!(state, Some((10, "state".to_owned())), "the step and the program's state");
    // The chief's run, on every worker.
    let run = checkpoints.run();
    check!(run.is_some(), "a checkpoint without a run");
    check_eq!(distribute::train::from_chief(strategy, Ok::<_, distribute::train::Error>(run))?, run, "the run");
    for replica in 0..strategy.num_local_replicas() {
        let restored = parameters::<L>(strategy, &again, replica)?;
        check_eq!(restored, parameters::<L>(strategy, &model, replica)?, format!("copy {replica}"));
    }
    audit::<L>(strategy, &again)?;
    // Both continue equally, bit for bit: the optimizer's slots and step count were restored.
    for (model, optimizer) in [(&model, &optimizer), (&again, &restored_optimizer)] {
        for step in 10..15 {
            minimize::<L>(strategy, model, optimizer, &Batch::new(step, 16))?;
        }
    }
    check_eq!(values(&again)?, values(&model)?, "parameters five steps later");
    // A write error on the chief is an error on every worker.
    let file = folder.path().join("file");
    std::fs::write(&file, "")?;
    let refused = CheckpointManager::new(file.join("checkpoints")).save(strategy, 1, &[&model], &());
    let told = refused.is_err_and(|error| error.to_string().contains("file/checkpoints"));
    check!(told, "a folder that the chief cannot make is not told");
    Ok(())
}
