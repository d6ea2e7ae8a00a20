use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use distribute_strategy::{CommunicationOptions, FullyShardedStrategy, MirroredStrategy};
use distribute_values::{Host, HostTensor, TensorStorage};

use super::*;
use crate::{
    Adam, AdamW, Clip, Ema, HostError, HostLoss, HostModel, Lamb, LossScale, Optimizer, Sgd, Trainable, audit,
};

/// Names and shapes of a model: odd sizes, one smaller than some numbers of parts, and one that stays mirrored.
const SHAPES: [(&str, &[usize]); 4] =
    [("embed.weight", &[7, 3]), ("fc.weight", &[5, 13]), ("fc.bias", &[2]), ("head.weight", &[1, 11])];

fn names(replicas: usize) -> Vec<String> {
    (0..replicas).map(|index| format!("CPU:{index}")).collect()
}

fn sharded(replicas: usize, over: usize) -> Strategy {
    sharded_with(replicas, over, true)
}

fn sharded_with(replicas: usize, over: usize, overlap: bool) -> Strategy {
    let communication = CommunicationOptions::default().timeout(Duration::from_secs(60));
    let builder = FullyShardedStrategy::builder().devices(names(replicas)).communication(communication);
    builder.shard_over(over).overlap(overlap).mirror_below(3).build().unwrap()
}

fn mirrored(replicas: usize) -> Strategy {
    MirroredStrategy::builder().devices(names(replicas)).build().unwrap()
}

fn ramp(shape: &[usize], scale: f32) -> HostTensor<f32> {
    let len: usize = shape.iter().product();
    // Multiples of a power of two, so that sums of a few are exact.
    HostTensor::new(shape, (0..len).map(|i| scale * ((i * 37 % 19) as f32 - 9.0) / 16.0).collect()).unwrap()
}

fn model(strategy: &Strategy) -> HostModel {
    HostModel::new(strategy, SHAPES.map(|(name, shape)| (name, ramp(shape, 0.5)))).unwrap()
}

/// One replica's gradients of a step; without those of the variables in `missing`.
fn loss(replica: usize, step: usize, missing: &[usize]) -> HostLoss {
    let gradient = |(index, (_, shape)): (usize, &(&str, &[usize]))| {
        (!missing.contains(&index)).then(|| ramp(shape, (1 + replica + 2 * step) as f32 / 4.0))
    };
    HostLoss(SHAPES.iter().enumerate().map(gradient).collect())
}

fn train(strategy: &Strategy, optimizer: &Optimizer<Host>, steps: std::ops::Range<usize>) {
    for step in steps {
        let run = strategy.run_with(optimizer, |context, optimizer| {
            optimizer.minimize(context, &loss(context.replica_id(), step, &[]))
        });
        run.unwrap();
    }
}

/// Returns all variables, whole, followed by all slots.
fn values(strategy: &Strategy, model: &HostModel, optimizer: &Optimizer<Host>) -> Vec<(String, Vec<f32>)> {
    let variables = model.parameters().variables().iter();
    let mut all: Vec<(String, Vec<f32>)> = variables
        .map(|variable| {
            let whole = variable.whole(strategy).unwrap();
            assert_eq!(whole.shape(), variable.shape());
            (variable.name().to_owned(), whole.to_elements().unwrap())
        })
        .collect();
    let visited = optimizer.visit_whole_slots(strategy, |name, slot| {
        all.push((name.to_owned(), slot.unwrap().to_elements().unwrap()));
        ControlFlow::<()>::Continue(())
    });
    assert!(visited.unwrap().is_continue());
    all
}

type Build = fn(&HostModel) -> Result<Optimizer<Host>, HostError>;

const BUILDS: [(&str, Build); 6] = [
    ("sgd", |model| Sgd::new(0.25).momentum(0.5).build(model)),
    ("adam", |model| Adam::new(0.1).build(model)),
    ("adamw, values clipped", |model| AdamW::new(0.1, 0.01).build(model)?.clip(Clip::Value(0.5))),
    ("loss scale", |model| Adam::new(0.1).build(model)?.scale_losses(LossScale::fixed(64.0))),
    ("global norm", |model| Adam::new(0.1).build(model)?.clip(Clip::GlobalNorm(2.0))),
    ("both", |model| Adam::new(0.1).build(model)?.clip(Clip::GlobalNorm(2.0))?.scale_losses(LossScale::fixed(64.0))),
];

fn trained(strategy: &Strategy, build: Build) -> (HostModel, Optimizer<Host>) {
    let model = model(strategy);
    let optimizer = build(&model).unwrap();
    train(strategy, &optimizer, 0..4);
    (model, optimizer)
}

fn close(one: &[(String, Vec<f32>)], other: &[(String, Vec<f32>)], tolerance: f32, what: &str) {
    assert_eq!(one.len(), other.len(), "{what}");
    for ((name, a), (other, b)) in one.iter().zip(other) {
        assert_eq!((name, a.len()), (other, b.len()), "{what}");
        for (a, b) in a.iter().zip(b) {
            assert!((a - b).abs() <= tolerance * (1.0 + a.abs()), "{what}: {name}: {a} and {b}");
        }
    }
}

#[test]
fn training_equals_that_with_whole_parameters() {
    for (what, build) in BUILDS {
        for (replicas, over, overlap) in [
            (1, 1, true),
            (2, 2, true),
            (3, 3, true),
            (4, 4, true),
            (4, 2, true),
            (4, 1, true),
            (2, 2, false),
            (3, 3, false),
            (4, 2, false),
        ] {
            let (strategy, reference) = (sharded_with(replicas, over, overlap), mirrored(replicas));
            let (model, optimizer) = trained(&strategy, build);
            let (whole, other) = trained(&reference, build);
            let what = format!("{what}, {replicas} replicas, {over} parts, overlap {overlap}");
            let (got, expected) = (values(&strategy, &model, &optimizer), values(&reference, &whole, &other));
            // Sums of gradients are exact here; norms are sums in another order.
            let is_exact = !what.starts_with("global") && !what.starts_with("both");
            close(&got, &expected, if is_exact { 0.0 } else { 1e-6 }, &what);
            if let (Some(norm), Some(expected)) = (optimizer.gradient_norm(), other.gradient_norm()) {
                assert!((norm - expected).abs() < 1e-6 * expected, "{what}: {norm} for {expected}");
            }
            assert_eq!(optimizer.gradient_norm().is_some(), !is_exact, "{what}");
            audit(&strategy, model.parameters()).unwrap();
        }
    }
}

#[test]
fn a_replica_keeps_a_part_of_parameters_and_state() {
    let strategy = sharded(4, 4);
    let model = model(&strategy);
    let variables = model.parameters().variables();
    let elements: Vec<usize> =
        variables.iter().map(|v| v.components()[0].to_elements::<f32>().unwrap().len()).collect();
    assert_eq!(elements, [6, 17, 2, 3]);
    let optimizer = Adam::new(0.1).build(&model).unwrap();
    assert_eq!(optimizer.state_bytes(), (6 + 17 + 2 + 3) * 2 * 4);
    // The last part of the eleven elements of the head is padded.
    let last: Vec<f32> = variables[3].components()[3].to_elements().unwrap();
    assert_eq!(last[2], 0.0);
    assert_eq!((optimizer.memory().parameter_bytes, optimizer.memory().gradient_bytes), (28 * 4, None));
    train(&strategy, &optimizer, 0..3);
    let last: Vec<f32> = variables[3].components()[3].to_elements().unwrap();
    assert_eq!(last[2], 0.0);
    // Gradients of sharded variables are parts, and in no bucket; the one of two elements is not sharded.
    let (memory, state) = (optimizer.memory(), Some(28 * 2 * 4));
    assert_eq!((memory.gradient_bytes, memory.state_bytes), (Some(28 * 4), state));
    assert_eq!(memory.bucket_bytes, [2 * 4]);
}

#[test]
fn variables_without_gradients_keep_their_values_and_may_get_one_later() {
    // By step and replica, the variables that get no gradient; none gets the last one before step 2.
    let missing = |step: usize, replica: usize| -> &'static [usize] {
        match (step, replica) {
            (0, 0) => &[0, 3],
            (0, _) => &[1, 3],
            (1, 1) => &[0, 1, 2, 3],
            (1, _) => &[3, 1],
            (2, 2) => &[0],
            (3, _) => &[1],
            _ => &[],
        }
    };
    // Without overlap, a replica waits for a gradient that another one does not have, but not for long.
    for (replicas, over, overlap) in [(2, 2, true), (3, 3, true), (4, 2, true), (2, 2, false)] {
        let run = |strategy: &Strategy| {
            let model = model(strategy);
            let optimizer = Adam::new(0.1).build(&model).unwrap();
            for step in 0..5 {
                let ran = strategy.run_with(&optimizer, |context, optimizer| {
                    let replica = context.replica_id();
                    optimizer.minimize(context, &loss(replica, step, missing(step, replica)))
                });
                ran.unwrap();
            }
            values(strategy, &model, &optimizer)
        };
        let strategy = sharded_with(replicas, over, overlap);
        close(&run(&strategy), &run(&mirrored(replicas)), 0.0, &format!("{replicas}, {over}, overlap {overlap}"));
    }
}

#[test]
fn accumulated_gradients_are_reduced_once() {
    let run = |strategy: &Strategy| {
        let model = model(strategy);
        let optimizer = Adam::new(0.1).build(&model).unwrap();
        for step in 0..3 {
            let ran = strategy.run_with(&optimizer, |context, optimizer| {
                let replica = context.replica_id();
                // A different number of times on each replica.
                for part in 0..=replica {
                    optimizer.accumulate(context, &loss(replica, step + part, &[part]))?;
                }
                optimizer.minimize(context, &loss(replica, step, &[2]))
            });
            ran.unwrap();
        }
        values(strategy, &model, &optimizer)
    };
    close(&run(&sharded(2, 2)), &run(&mirrored(2)), 0.0, "two");
    close(&run(&sharded(4, 2)), &run(&mirrored(4)), 0.0, "four");
}

#[test]
fn steps_with_gradients_that_are_not_finite_are_skipped_on_all_replicas() {
    for (replicas, over) in [(2, 2), (4, 2)] {
        let strategy = sharded(replicas, over);
        let model = model(&strategy);
        let optimizer = Adam::new(0.1).build(&model).unwrap().scale_losses(LossScale::dynamic().initial(8.0)).unwrap();
        train(&strategy, &optimizer, 0..1);
        let before = values(&strategy, &model, &optimizer);
        let run = strategy.run_with(&optimizer, |context, optimizer| {
            let HostLoss(mut gradients) = loss(context.replica_id(), 1, &[]);
            // In the part of one replica of each shard group.
            if context.replica_id() == replicas - 1 {
                let mut spoilt = ramp(SHAPES[1].1, 1.0).to_elements::<f32>().unwrap();
                spoilt[40] = f32::INFINITY;
                gradients[1] = Some(HostTensor::new(SHAPES[1].1, spoilt).unwrap());
            }
            optimizer.minimize(context, &HostLoss(gradients))
        });
        run.unwrap();
        close(&values(&strategy, &model, &optimizer), &before, 0.0, "skipped");
        assert_eq!(optimizer.loss_scale(), 4.0);
        train(&strategy, &optimizer, 2..3);
        assert!(values(&strategy, &model, &optimizer) != before);
    }
}

#[test]
fn a_failed_run_changes_nothing_and_the_next_one_goes_on() {
    for fails in 0..2 {
        let strategy = sharded(2, 2);
        let model = model(&strategy);
        let optimizer = Adam::new(0.1).build(&model).unwrap();
        let undisturbed = trained(&strategy, BUILDS[1].1);
        let expected = values(&strategy, &undisturbed.0, &undisturbed.1);
        for step in 0..4 {
            let before = values(&strategy, &model, &optimizer);
            let began = Instant::now();
            let failed = strategy.run_with(&optimizer, |context, optimizer| {
                if context.replica_id() == fails {
                    return Err(HostError::Optim(Error::NoGradient));
                }
                optimizer.minimize(context, &loss(context.replica_id(), step, &[]))
            });
            assert!(matches!(failed, Err(HostError::Optim(Error::NoGradient))), "{failed:?}");
            assert!(began.elapsed() < Duration::from_secs(30));
            close(&values(&strategy, &model, &optimizer), &before, 0.0, "after a failure");
            train(&strategy, &optimizer, step..step + 1);
        }
        close(&values(&strategy, &model, &optimizer), &expected, 0.0, "after all");
    }
}

#[test]
fn values_are_loaded_and_averaged_by_parts() {
    for strategy in [sharded(3, 3), sharded(4, 2)] {
        let (model, optimizer) = trained(&strategy, BUILDS[1].1);
        let variables = model.parameters().variables();
        let other = ramp(SHAPES[1].1, -2.0);
        variables[1].overwrite(&other).unwrap();
        assert_eq!(
            variables[1].whole(&strategy).unwrap().to_elements::<f32>().unwrap(),
            other.to_elements::<f32>().unwrap()
        );
        assert!(variables[1].overwrite(&ramp(&[3], 1.0)).is_err());
        let mut ema = Ema::new(&model, 0.9).unwrap();
        train(&strategy, &optimizer, 4..5);
        let trained = values(&strategy, &model, &optimizer);
        ema.update(&model).unwrap();
        ema.swap(&model).unwrap();
        let averaged = variables[1].whole(&strategy).unwrap().to_elements::<f32>().unwrap();
        let (before, after) = (other.to_elements::<f32>().unwrap(), &trained[1].1);
        for ((average, before), after) in averaged.iter().zip(before).zip(after) {
            // The decay of the first update is 1/10.
            assert!((average - (0.1 * before + 0.9 * after)).abs() < 1e-5);
        }
        ema.swap(&model).unwrap();
        close(&values(&strategy, &model, &optimizer), &trained, 0.0, "swapped back");
    }
}

#[test]
fn only_the_chief_gets_the_whole_on_request() {
    let strategy = sharded(4, 2);
    let model = model(&strategy);
    for (variable, (_, shape)) in model.parameters().variables().iter().zip(SHAPES) {
        let whole = variable.whole_on_chief(&strategy).unwrap().unwrap();
        assert_eq!(whole.to_elements::<f32>().unwrap(), ramp(shape, 0.5).to_elements::<f32>().unwrap());
    }
}

#[test]
fn gathering_different_variables_is_an_error_on_both() {
    let strategy = sharded(2, 2);
    let layout = ShardLayout::of(&strategy, &[4]).unwrap();
    let failed = strategy.run_with((), |context, ()| {
        let groups = context.shard_groups().unwrap();
        // Of equal shape, in another order.
        let name = ["a", "b"][context.replica_id()];
        let outcome = start_gather(&groups, name, &layout, &[1.0f32, 2.0], Vec::new())?.wait();
        assert!(outcome.is_err());
        Ok::<_, distribute_strategy::Error>(outcome?)
    });
    assert!(failed.unwrap_err().to_string().contains("all_gather_v"));
    let failed = strategy.run_with((), |context, ()| {
        let groups = context.shard_groups().unwrap();
        start_gather(&groups, "a", &layout, &[1.0f32], Vec::new())?.wait().map_err(distribute_strategy::Error::from)
    });
    let told = failed.unwrap_err().to_string();
    assert!(told.contains("part of a sharded variable"), "{told}");
}

#[test]
fn a_gathering_that_a_failing_replica_drops_holds_up_nobody() {
    let strategy = sharded(2, 2);
    let layout = ShardLayout::of(&strategy, &[4]).unwrap();
    let began = Instant::now();
    let failed = strategy.run_with((), |context, ()| {
        let groups = context.shard_groups().unwrap();
        if context.replica_id() == 1 {
            let _prefetched = start_gather(&groups, "a", &layout, &[1.0f32, 2.0], vec![9.0; 7])?;
            return Err(distribute_strategy::Error::NoData);
        }
        context.barrier()
    });
    assert!(matches!(failed, Err(distribute_strategy::Error::NoData)), "{failed:?}");
    assert!(began.elapsed() < Duration::from_secs(30));
}

#[test]
fn what_needs_whole_variables_is_refused_in_words() {
    let strategy = sharded(2, 2);
    let model = model(&strategy);
    let adam = || Adam::new(0.1).build(&model).unwrap();
    let refused = [
        (Lamb::new(0.1).build(&model), "norms of whole variables"),
        (adam().clip(Clip::Norm(1.0)), "Clip::GlobalNorm"),
        (adam().compress(distribute_collectives::Compression::Bf16), "leave it out"),
    ];
    for (refused, words) in refused {
        let told = refused.err().unwrap().to_string();
        assert!(told.contains(words) && told.contains("shards parameters"), "{told}");
    }
}

#[test]
fn the_state_of_mirrored_variables_may_be_sharded_too() {
    let strategy = sharded(2, 2);
    let run = |build: Build| {
        let (model, optimizer) = trained(&strategy, build);
        let mut all = values(&strategy, &model, &optimizer);
        all.sort_by(|one, other| one.0.cmp(&other.0));
        all
    };
    close(&run(|model| Adam::new(0.1).build(model)?.zero1()), &run(BUILDS[1].1), 0.0, "zero1");
    let both: Build = |model| Adam::new(0.1).build(model)?.zero1()?.clip(Clip::GlobalNorm(2.0));
    close(&run(both), &run(BUILDS[4].1), 1e-6, "zero1 with clipping");
}
