//! Variables that are split among tensor ranks, and whose parts are sharded over replicas.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use distribute_strategy::{CommunicationOptions, FullyShardedStrategy, MirroredStrategy, Strategy};
use distribute_values::{Host, HostTensor, TensorStorage};

use super::scatter_wholes;
use crate::backend::{Parameters, TensorSplit, Variable};
use crate::{Adam, AdamW, Clip, Ema, Error, HostError, HostLoss, LossScale, Optimizer, ShardLayout, Trainable, audit};

/// A name, a shape, and the axis and blocks by which it is split.
type Described = (&'static str, &'static [usize], Option<(usize, usize)>);

const VARIABLES: [Described; 5] = [
    ("column.weight", &[12, 5], Some((0, 1))),
    ("qkv.weight", &[12, 3], Some((0, 3))),
    ("row.weight", &[3, 8], Some((1, 1))),
    ("norm.weight", &[13], None),
    ("small", &[2], None),
];

struct SplitModel(Arc<Parameters<Host>>);

impl Trainable for SplitModel {
    type Library = Host;

    fn parameters(&self) -> &Arc<Parameters<Host>> {
        &self.0
    }
}

fn names(ranks: usize) -> Vec<String> {
    (0..ranks).map(|index| format!("CPU:{index}")).collect()
}

fn sharded(replicas: usize, over: usize, ranks: usize) -> Strategy {
    let communication = CommunicationOptions::default().timeout(Duration::from_secs(60));
    let builder = FullyShardedStrategy::builder().devices(names(replicas * ranks)).communication(communication);
    builder.tensor_parallel(ranks).shard_over(over).mirror_below(3).build().unwrap()
}

fn mirrored(replicas: usize, ranks: usize) -> Strategy {
    MirroredStrategy::builder().devices(names(replicas * ranks)).tensor_parallel(ranks).build().unwrap()
}

fn ramp(shape: &[usize], scale: f32) -> Vec<f32> {
    let len: usize = shape.iter().product();
    // Multiples of a power of two, so that sums of a few are exact.
    (0..len).map(|i| scale * ((i * 37 % 19) as f32 - 9.0) / 16.0).collect()
}

fn split(strategy: &Strategy, index: usize) -> Option<TensorSplit> {
    let (name, shape, split) = VARIABLES[index];
    let (axis, blocks) = split.filter(|_| strategy.tensor_parallel() > 1)?;
    Some(TensorSplit::new(name, shape, axis, blocks, strategy.tensor_parallel()).unwrap())
}

/// Builds the variables as an adapter does.
fn model(strategy: &Strategy) -> SplitModel {
    let variable = |index: usize| {
        let (name, shape, _) = VARIABLES[index];
        let (whole, split) = (ramp(shape, 0.5), split(strategy, index));
        let of_rank = split.map_or(shape.to_vec(), |split| split.part_shape(shape));
        let of_place = |place| split.map_or_else(|| whole.clone(), |split| split.cut(&whole, shape, place));
        let wholes: Vec<Vec<f32>> = (0..strategy.tensor_parallel()).map(of_place).collect();
        let mut variable = match split {
            Some(split) => Variable::split_among(name, split),
            None => Variable::new(name, false),
        };
        let components: Vec<HostTensor<f32>> = match ShardLayout::of(strategy, &of_rank) {
            Some(layout) => {
                let parts = scatter_wholes(strategy, name, &layout, wholes).unwrap();
                variable = variable.with_sharded_parts(layout);
                parts.into_iter().map(|part| HostTensor::new(&[part.len()], part).unwrap()).collect()
            }
            None => (0..strategy.num_local_replicas())
                .map(|local| HostTensor::new(&of_rank, wholes[local % wholes.len()].clone()).unwrap())
                .collect(),
        };
        components.into_iter().for_each(|component| variable.push(component));
        variable
    };
    let variables = (0..VARIABLES.len()).map(variable).collect();
    SplitModel(Arc::new(Parameters::new(strategy, variables, Vec::new(), None)))
}

fn train(strategy: &Strategy, optimizer: &Optimizer<Host>, steps: std::ops::Range<usize>) {
    for step in steps {
        let run = strategy.run_with(optimizer, |context, optimizer| {
            let gradient = |index: usize| {
                let (_, shape, _) = VARIABLES[index];
                let whole = ramp(shape, (1 + context.replica_id() + 2 * step) as f32 / 4.0);
                let own = match split(strategy, index) {
                    Some(split) => {
                        HostTensor::new(&split.part_shape(shape), split.cut(&whole, shape, context.tensor_rank()))
                    }
                    None => HostTensor::new(shape, whole),
                };
                Some(own.unwrap())
            };
            optimizer.minimize(context, &HostLoss((0..VARIABLES.len()).map(gradient).collect()))
        });
        run.unwrap();
    }
}

/// Returns all variables, whole, followed by all slots.
fn values(strategy: &Strategy, model: &SplitModel, optimizer: &Optimizer<Host>) -> Vec<(String, Vec<f32>)> {
    let mut all = Vec::new();
    for (variable, (_, shape, _)) in model.0.variables().iter().zip(VARIABLES) {
        assert_eq!(variable.shape(), shape);
        let whole = variable.whole(strategy).unwrap();
        assert_eq!(whole.shape(), shape);
        let on_chief = variable.whole_on_chief(strategy).unwrap().unwrap();
        assert_eq!(on_chief.to_elements::<f32>().unwrap(), whole.to_elements::<f32>().unwrap());
        all.push((variable.name().to_owned(), whole.to_elements().unwrap()));
    }
    let visited = optimizer.visit_whole_slots(strategy, |name, slot| {
        all.push((name.to_owned(), slot.unwrap().to_elements().unwrap()));
        ControlFlow::<()>::Continue(())
    });
    assert!(visited.unwrap().is_continue());
    all
}

type Build = fn(&SplitModel) -> Result<Optimizer<Host>, HostError>;

const BUILDS: [(&str, Build); 4] = [
    ("adam", |model| Adam::new(0.1).build(model)),
    ("adamw, values clipped", |model| AdamW::new(0.1, 0.01).build(model)?.clip(Clip::Value(0.5))),
    ("global norm", |model| Adam::new(0.1).build(model)?.clip(Clip::GlobalNorm(2.0))),
    ("both", |model| Adam::new(0.1).build(model)?.clip(Clip::GlobalNorm(2.0))?.scale_losses(LossScale::fixed(64.0))),
];

fn close(got: &[(String, Vec<f32>)], expected: &[(String, Vec<f32>)], tolerance: f32, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for ((name, a), (other, b)) in got.iter().zip(expected) {
        assert_eq!((name, a.len()), (other, b.len()), "{what}");
        for (at, (a, b)) in a.iter().zip(b).enumerate() {
            assert!((a - b).abs() <= tolerance * (1.0 + a.abs()), "{what}: {name}[{at}] is {a}, not {b}");
        }
    }
}

#[test]
#[should_panic(expected = "x[1] is NaN, not 2")]
fn a_value_that_is_not_a_number_is_close_to_none() {
    let of = |value| [("x".to_owned(), vec![1.0, value])];
    close(&of(f32::NAN), &of(2.0), 1.0, "a test");
}

#[test]
fn sharded_parts_of_split_variables_train_as_whole_ones() {
    for (what, build) in BUILDS {
        for (replicas, over, ranks) in [(2, 2, 2), (4, 2, 2), (1, 1, 2), (2, 2, 4), (3, 3, 1)] {
            let (strategy, reference) = (sharded(replicas, over, ranks), mirrored(replicas, 1));
            let (model, whole) = (model(&strategy), model(&reference));
            let (optimizer, other) = (build(&model).unwrap(), build(&whole).unwrap());
            let mut ema = Ema::new(&model, 0.5).unwrap();
            train(&strategy, &optimizer, 0..4);
            train(&reference, &other, 0..4);
            let what = format!("{what}, {replicas} replicas, {over} parts, {ranks} ranks");
            let (got, expected) = (values(&strategy, &model, &optimizer), values(&reference, &whole, &other));
            // Sums of gradients are exact here; norms are sums in another order.
            let tolerance = if what.starts_with("adam") { 0.0 } else { 1e-6 };
            close(&got, &expected, tolerance, &what);
            if let (Some(norm), Some(expected)) = (optimizer.gradient_norm(), other.gradient_norm()) {
                assert!((norm - expected).abs() < 1e-6 * expected, "{what}: {norm} for {expected}");
            }
            audit(&strategy, model.parameters()).unwrap();
            ema.update(&model).unwrap();
            ema.swap(&model).unwrap();
            audit(&strategy, model.parameters()).unwrap();
            ema.swap(&model).unwrap();
            assert_eq!(values(&strategy, &model, &optimizer), got, "{what}");
            // What was saved under one mesh is written under another.
            for (variable, (name, saved)) in model.0.variables().iter().zip(&expected) {
                let saved: Vec<f32> = saved.iter().map(|x| x + 1.0).collect();
                variable.overwrite(&HostTensor::new(&variable.shape(), saved.clone()).unwrap()).unwrap();
                assert_eq!(variable.whole(&strategy).unwrap().to_elements::<f32>().unwrap(), saved, "{name}");
            }
            audit(&strategy, model.parameters()).unwrap();
        }
    }
}

#[test]
fn parts_that_tensor_ranks_should_share_are_compared() {
    let strategy = sharded(2, 2, 2);
    let model = model(&strategy);
    audit(&strategy, model.parameters()).unwrap();
    let norm = &model.0.variables()[3];
    assert!(norm.layout().is_some() && norm.tensor_split().is_none());
    norm.components()[3].write(&mut |mut buffer| buffer.as_mut_slice::<f32>().unwrap()[0] += 1.0).unwrap();
    let told = audit(&strategy, model.parameters()).unwrap_err();
    let HostError::Optim(Error::RanksDiverged { name, replica, place }) = told else { panic!("{told}") };
    assert_eq!((name.as_str(), replica, place), ("norm.weight", 1, 1));
}
