//! Optimizers whose state is in host memory, for variables on an accelerator.

use std::collections::HashMap;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::time::Duration;

use distribute_device::{Element, bf16};
use distribute_strategy::{CommunicationOptions, FullyShardedStrategy, MirroredStrategy, Strategy};
use distribute_values::TensorStorage;

use self::counted::{Accelerator, Counted, CountedLoss, CountedTensor};
use super::scatter_whole;
use crate::backend::{Parameters, Variable};
use crate::{
    Adagrad, Adam, AdamW, Clip, Ema, Ftrl, HostError, LossScale, Nadam, Optimizer, OptimizerState, RmsProp, Sgd,
    ShardLayout, Trainable,
};

mod counted;

/// Names and shapes of the variables: odd sizes, one that is frozen, and one that every replica has whole, on the host.
const SHAPES: [(&str, &[usize]); 5] = [
    ("embed.weight", &[7, 3]),
    ("fc.weight", &[5, 13]),
    ("frozen.weight", &[9]),
    ("head.weight", &[1, 11]),
    ("head.bias", &[2]),
];

const FROZEN: usize = 2;

struct Model {
    parameters: Arc<Parameters<Counted>>,
    accelerator: Arc<Accelerator>,
    is_short: bool,
    is_on_host: bool,
}

impl Trainable for Model {
    type Library = Counted;

    fn parameters(&self) -> &Arc<Parameters<Counted>> {
        &self.parameters
    }
}

fn names(replicas: usize) -> Vec<String> {
    (0..replicas).map(|index| format!("CPU:{index}")).collect()
}

fn sharded(replicas: usize, over: usize) -> Strategy {
    let communication = CommunicationOptions::default().timeout(Duration::from_secs(60));
    let builder = FullyShardedStrategy::builder().devices(names(replicas)).communication(communication);
    builder.shard_over(over).mirror_below(3).build().unwrap()
}

fn ramp(shape: &[usize], scale: f32) -> Vec<f32> {
    let len: usize = shape.iter().product();
    // Few bits, so that sums of a few are exact in 16 bits too.
    (0..len).map(|i| scale * ((i * 37 % 19) as f32 - 9.0) / 16.0).collect()
}

/// Creates the variables on an accelerator, those of which every replica has the whole in host memory.
fn model(strategy: &Strategy, is_short: bool) -> Model {
    model_on(strategy, is_short, false)
}

fn model_on(strategy: &Strategy, is_short: bool, is_on_host: bool) -> Model {
    match is_short {
        true => typed(strategy, bf16::from_f32, (is_short, is_on_host)),
        false => typed(strategy, |x| x, (is_short, is_on_host)),
    }
}

fn typed<T: Element>(strategy: &Strategy, round: fn(f32) -> T, (is_short, is_on_host): (bool, bool)) -> Model {
    let accelerator = Arc::new(Accelerator::default());
    let variable = |(index, (name, shape)): (usize, &(&str, &[usize]))| {
        let whole: Vec<T> = ramp(shape, 0.5).into_iter().map(round).collect();
        let mut variable = match ShardLayout::of(strategy, shape) {
            Some(layout) => {
                let parts = scatter_whole(strategy, name, &layout, whole).unwrap();
                let mut variable = Variable::sharded(*name, layout);
                let place = (!is_on_host).then_some(&accelerator);
                let part = |part: &Vec<T>| CountedTensor::new(place, &[part.len()], part);
                parts.iter().for_each(|own| variable.push(part(own)));
                variable
            }
            None => {
                let mut variable = Variable::new(*name, false);
                (0..strategy.num_local_replicas()).for_each(|_| variable.push(CountedTensor::new(None, shape, &whole)));
                variable
            }
        };
        if index == FROZEN {
            variable.freeze();
        }
        variable
    };
    let variables = SHAPES.iter().enumerate().map(variable).collect();
    let parameters = Arc::new(Parameters::new(strategy, variables, Vec::new(), None));
    Model { parameters, accelerator, is_short, is_on_host }
}

impl Model {
    /// One replica's gradients of a step, where the variables are; the sum over all replicas does not depend on their
    /// number. `spoilt` is an element of the second variable that is not finite.
    fn loss(&self, replica: usize, step: usize, spoilt: Option<usize>) -> CountedLoss {
        let share = if replica == 0 { (1 + 2 * step) as f32 / 4.0 } else { 0.0 };
        let gradient = |(index, (_, shape)): (usize, &(&str, &[usize]))| {
            let mut whole = ramp(shape, share);
            if let (Some(at), 1) = (spoilt, index) {
                whole[at] = f32::INFINITY;
            }
            let place = self.parameters.variables()[index].layout().map(|_| &self.accelerator);
            let place = place.filter(|_| !self.is_on_host);
            let gradient = match self.is_short {
                true => CountedTensor::new(place, shape, &whole.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>()),
                false => CountedTensor::new(place, shape, &whole),
            };
            (index != FROZEN).then_some(gradient)
        };
        CountedLoss(SHAPES.iter().enumerate().map(gradient).collect())
    }

    /// Returns the size of an element of a variable.
    fn unit(&self) -> usize {
        if self.is_short { 2 } else { 4 }
    }
}

/// Makes steps; the third also has gradients that were accumulated before.
fn train(strategy: &Strategy, model: &Model, optimizer: &Optimizer<Counted>, steps: Range<usize>) {
    for step in steps {
        let run = strategy.run_with(optimizer, |context, optimizer| {
            let replica = context.replica_id();
            if step == 2 {
                optimizer.accumulate(context, &model.loss(replica, step + 1, None))?;
            }
            optimizer.minimize(context, &model.loss(replica, step, None))
        });
        run.unwrap();
    }
}

/// Returns the bits of all variables, whole, and of all slots, by name.
fn values(strategy: &Strategy, model: &Model, optimizer: &Optimizer<Counted>) -> HashMap<String, Vec<u8>> {
    let bits = |tensor: &CountedTensor| {
        let mut bits = Vec::new();
        tensor.read(&mut |buffer| bits = buffer.as_bytes().to_vec()).unwrap();
        bits
    };
    let whole = |variable: &Variable<Counted>| (variable.name().to_owned(), bits(&variable.whole(strategy).unwrap()));
    let mut all: HashMap<String, Vec<u8>> = model.parameters.variables().iter().map(whole).collect();
    let visited = optimizer.visit_whole_slots(strategy, |name, slot| {
        all.insert(name.to_owned(), bits(&slot.unwrap()));
        ControlFlow::<()>::Continue(())
    });
    assert!(visited.unwrap().is_continue());
    all
}

type Build = fn(&Model, bool) -> Result<Optimizer<Counted>, HostError>;

macro_rules! build {
    ($description:expr, $model:expr, $offloaded:expr) => {
        if $offloaded { $description.build_offloaded($model) } else { $description.build($model) }
    };
}

/// A name, whether there is state for f32 too, and the optimizer.
const BUILDS: [(&str, bool, Build); 12] = [
    ("sgd", false, |model, off| build!(Sgd::new(0.25), model, off)),
    ("momentum", true, |model, off| build!(Sgd::new(0.25).momentum(0.5), model, off)),
    ("adam", true, |model, off| build!(Adam::new(0.1), model, off)),
    ("adamw", true, |model, off| build!(AdamW::new(0.1, 0.01), model, off)),
    ("adagrad", true, |model, off| build!(Adagrad::new(0.1), model, off)),
    ("rmsprop", true, |model, off| build!(RmsProp::new(0.1).centered().momentum(0.5), model, off)),
    ("nadam", true, |model, off| build!(Nadam::new(0.1), model, off)),
    ("ftrl", true, |model, off| build!(Ftrl::new(0.1).regularization(0.1, 0.1), model, off)),
    ("values clipped", true, |model, off| build!(Adam::new(0.1), model, off)?.clip(Clip::Value(0.5))),
    ("norm clipped", true, |model, off| build!(Adam::new(0.1), model, off)?.clip(Clip::GlobalNorm(2.0))),
    ("scaled", true, |model, off| build!(Adam::new(0.1), model, off)?.scale_losses(LossScale::fixed(64.0))),
    ("zero1", true, |model, off| build!(AdamW::new(0.1, 0.01), model, off)?.zero1()?.clip(Clip::GlobalNorm(2.0))),
];

#[test]
fn steps_have_the_bits_of_those_with_all_in_one_memory() {
    for (what, has_wide_state, build) in BUILDS {
        for is_short in [false, true] {
            if !(has_wide_state || is_short) {
                continue;
            }
            for (replicas, over) in [(2, 2), (3, 3), (4, 2)] {
                let strategy = sharded(replicas, over);
                let trained = |offloaded, is_on_host| {
                    let model = model_on(&strategy, is_short, is_on_host);
                    let optimizer = build(&model, offloaded).unwrap();
                    let mut ema = Ema::new(&model, 0.9).unwrap();
                    let mut all = Vec::new();
                    for step in 0..4 {
                        train(&strategy, &model, &optimizer, step..step + 1);
                        ema.update(&model).unwrap();
                        all.push(values(&strategy, &model, &optimizer));
                    }
                    ema.swap(&model).unwrap();
                    all.push(values(&strategy, &model, &optimizer));
                    (all, optimizer.gradient_norm(), optimizer.state_bytes())
                };
                let got = trained(true, false);
                for is_on_host in [false, true] {
                    let what = format!("{what}, 16 bits: {is_short}, {replicas} replicas, {over} parts");
                    assert!(got == trained(false, is_on_host), "{what}, all on the host: {is_on_host}");
                }
                // Training and averaging have changed something.
                assert!(got.0.windows(2).all(|pair| pair[0] != pair[1]), "{what}");
            }
        }
    }
}

#[test]
fn state_is_never_on_the_accelerator_and_only_what_must_cross_does() {
    // The elements of the sharded variables: of the trained ones whole, and of the two replicas' parts with padding.
    let (whole, parts, frozen) = (21 + 65 + 11, 22 + 66 + 12, 10);
    for is_short in [false, true] {
        let strategy = sharded(2, 2);
        let (model, other) = (model(&strategy, is_short), model(&strategy, is_short));
        let (unit, masters) = (model.unit(), usize::from(is_short));
        let parameters = (parts + frozen) * unit;
        assert_eq!(model.accelerator.peak(), parameters);
        let offloaded = Adam::new(0.1).build_offloaded(&model).unwrap().audit_every(0);
        assert_eq!([model.accelerator.held(), model.accelerator.peak()], [parameters; 2]);
        let here = Adam::new(0.1).build(&other).unwrap().audit_every(0);
        assert_eq!(other.accelerator.held(), parameters + (2 + masters) * 4 * parts);
        assert_eq!(offloaded.state_bytes(), here.state_bytes());
        // In the first step replicas also learn the order of the gradients.
        for step in 0..3 {
            model.accelerator.crossed();
            other.accelerator.crossed();
            let gradients = [&model, &other].map(|model| (0..2).map(|replica| model.loss(replica, step, None)));
            // Computing the gradients crosses nothing.
            gradients.into_iter().for_each(|losses| assert_eq!(losses.count(), 2));
            assert_eq!([model.accelerator.crossed(), other.accelerator.crossed()], [[0; 2]; 2]);
            for (model, optimizer) in [(&model, &offloaded), (&other, &here)] {
                let run = strategy.run_with(optimizer, |context, optimizer| {
                    optimizer.minimize(context, &model.loss(context.replica_id(), step, None))
                });
                run.unwrap();
            }
            // Whole gradients of both replicas are reduced on the host.
            let gradients = 2 * whole * unit;
            let (down, up) = if is_short { (gradients, 2 * parts) } else { (gradients + 4 * parts, 4 * parts) };
            assert_eq!(model.accelerator.crossed(), [down, up], "16 bits: {is_short}, step {step}");
            // With the state on the accelerator, gradient, slots and the updated copy cross in addition.
            let [more_down, more_up] = other.accelerator.crossed();
            assert!(more_down >= down + 12 * parts && more_up >= up + 12 * parts, "{more_down}, {more_up}");
            // No gradient of a part was there either.
            let peak = parameters + gradients;
            assert!(model.accelerator.peak() <= peak && model.accelerator.held() == parameters);
        }
    }
}

#[test]
fn a_step_that_is_not_finite_is_skipped() {
    let strategy = sharded(3, 3);
    for is_short in [false, true] {
        let model = model(&strategy, is_short);
        let optimizer = Adam::new(0.1).build_offloaded(&model).unwrap();
        let optimizer = optimizer.scale_losses(LossScale::dynamic().initial(8.0)).unwrap();
        train(&strategy, &model, &optimizer, 0..1);
        let before = values(&strategy, &model, &optimizer);
        let run = strategy.run_with(&optimizer, |context, optimizer| {
            // In the part of the last replica.
            let spoilt = (context.replica_id() == 0).then_some(60);
            optimizer.minimize(context, &model.loss(context.replica_id(), 1, spoilt))
        });
        run.unwrap();
        assert_eq!(values(&strategy, &model, &optimizer), before);
        assert_eq!(optimizer.loss_scale(), 4.0);
        train(&strategy, &model, &optimizer, 1..2);
        assert_ne!(values(&strategy, &model, &optimizer), before);
    }
}

/// The contents of a checkpoint of a model and its optimizer: whole values by name, and the rest.
struct Saved {
    values: HashMap<String, CountedTensor>,
    state: OptimizerState,
}

fn save(strategy: &Strategy, model: &Model, optimizer: &Optimizer<Counted>) -> Saved {
    let whole = |variable: &Variable<Counted>| {
        let whole = variable.whole_on_chief(strategy).unwrap().unwrap();
        (variable.name().to_owned(), whole.copied().unwrap())
    };
    let mut values: HashMap<_, _> = model.parameters.variables().iter().map(whole).collect();
    let visited = optimizer.visit_whole_slots(strategy, |name, slot| {
        values.insert(name.to_owned(), slot.unwrap().copied().unwrap());
        ControlFlow::<()>::Continue(())
    });
    assert!(visited.unwrap().is_continue());
    Saved { values, state: optimizer.state() }
}

fn restore(saved: &Saved, model: &Model, optimizer: &Optimizer<Counted>) {
    for variable in model.parameters.variables() {
        variable.overwrite(&saved.values[variable.name()]).unwrap();
    }
    let restored = optimizer.restore_slots(|name, like, shape| {
        // As a value is made from a file's bytes, where the slot is.
        let mut value = None;
        saved.values[name].read(&mut |elements| value = Some(like.beside(shape, elements)))?;
        value.unwrap()
    });
    restored.unwrap();
    optimizer.set_state(&saved.state);
}

#[test]
fn checkpoints_are_restored_on_other_replicas_with_and_without_offloading() {
    let build = |model: &Model, offloaded: bool| build!(AdamW::new(0.1, 0.01), model, offloaded).unwrap();
    for is_short in [false, true] {
        for (from, to) in [((3, true), (2, false)), ((2, false), (3, true)), ((4, true), (1, false))] {
            let (strategy, other) = (sharded(from.0, from.0), sharded(to.0, to.0));
            let (first, second) = (model(&strategy, is_short), model(&other, is_short));
            let (optimizer, resumed) = (build(&first, from.1), build(&second, to.1));
            train(&strategy, &first, &optimizer, 0..2);
            let saved = save(&strategy, &first, &optimizer);
            restore(&saved, &second, &resumed);
            // Restoring leaves no state on the accelerator.
            if to.1 {
                let of_parameters = |variable: &Variable<Counted>| {
                    variable.layout().map_or(0, |layout| layout.part_len() * to.0 * second.unit())
                };
                let parameters: usize = second.parameters.variables().iter().map(of_parameters).sum();
                assert_eq!(second.accelerator.held(), parameters);
            }
            train(&strategy, &first, &optimizer, 2..4);
            train(&other, &second, &resumed, 2..4);
            let (got, expected) = (values(&other, &second, &resumed), values(&strategy, &first, &optimizer));
            assert_eq!(got, expected, "{from:?} to {to:?}, 16 bits: {is_short}");
        }
    }
}

#[test]
fn state_that_cannot_be_elsewhere_is_refused_in_words() {
    let told = |built: Result<Optimizer<Counted>, HostError>| built.err().unwrap().to_string();
    let strategy = sharded(2, 2);
    let wide = model(&strategy, false);
    let text = told(Sgd::new(0.1).build_offloaded(&wide));
    assert!(text.contains("without momentum") && text.contains("use build"), "{text}");
    let mirrored = MirroredStrategy::builder().devices(names(2)).build().unwrap();
    let text = told(Adam::new(0.1).build_offloaded(&model(&mirrored, false)));
    assert!(text.contains("without sharded variables") && text.contains("FullyShardedStrategy"), "{text}");
    // One replica has everything whole.
    assert!(told(Adam::new(0.1).build_offloaded(&model(&sharded(1, 1), false))).contains("several replicas"));
    let on_host = model_on(&strategy, false, true);
    let text = told(Adam::new(0.1).build_offloaded(&on_host));
    assert!(text.contains("parameters in host memory") && text.contains("use build"), "{text}");
}
