//! Training: equal to one replica within a tolerance, and bit for bit to a sequential emulation of the replicas.

use std::any::type_name;

use distribute::device::DType;
use distribute::optim::{Adam, Sgd};
use distribute::prelude::{Axis, PerReplica, ReduceOp, Strategy};
use distribute::values::{HostTensor, TensorStorage};
use distribute_testkit::apart;

use crate::check::{Stop, check, check_eq};
use crate::conditions::is_compiled;
use crate::library::{Batch, Candle, ErrorOf, Kind, Library, OptimizerOf, elements, variables};
use crate::one_replica::on_one;

/// Tolerance of parameters after 20 steps or fewer in f32, as in TensorFlow's own correctness tests.
pub(super) const TOLERANCE: f64 = 4e-5;

/// The number of examples of each step.
pub(super) type Sizes = fn(usize) -> usize;

/// Thirteen examples, or fewer than there may be replicas.
pub(super) const UNEVEN: Sizes = |step| if step % 5 == 4 { 3 } else { 13 };

pub(super) fn built<L: Library>(strategy: &Strategy, kind: Kind) -> Result<L::Model, Stop> {
    Ok(L::model(strategy, kind, 5, DType::F32)?)
}

fn train<L: Library>(strategy: &Strategy, kind: Kind, steps: usize, sizes: Sizes) -> Result<L::Model, Stop> {
    train_by::<L>(strategy, kind, steps, sizes, |model| Sgd::new(0.2).momentum(0.9).build(model))
        .map(|(model, _)| model)
}

pub(super) fn train_by<L: Library>(
    strategy: &Strategy,
    kind: Kind,
    steps: usize,
    sizes: Sizes,
    build: impl FnOnce(&L::Model) -> Result<OptimizerOf<L>, ErrorOf<L>>,
) -> Result<(L::Model, OptimizerOf<L>), Stop> {
    let model = built::<L>(strategy, kind)?;
    let optimizer = build(&model)?;
    for step in 0..steps {
        minimize::<L>(strategy, &model, &optimizer, &Batch::new(step, sizes(step)))?;
    }
    Ok((model, optimizer))
}

/// Makes a step on a global batch.
pub(super) fn minimize<L: Library>(
    strategy: &Strategy,
    model: &L::Model,
    optimizer: &OptimizerOf<L>,
    whole: &Batch,
) -> distribute::Result<()> {
    let examples = whole.y.len();
    let stepped = L::run(strategy, model, optimizer, |context, optimizer, mean| {
        let loss = mean(&whole.share(context), examples)?;
        optimizer.minimize(context, &loss).map_err(Into::into)?;
        Ok(loss)
    });
    stepped.map(drop)
}

/// Returns the parameters of one replica of this process. Every process calls this.
pub(super) fn parameters<L: Library>(strategy: &Strategy, model: &L::Model, replica: usize) -> Result<Vec<f32>, Stop> {
    parameters_with::<L>(strategy, model, replica, |_| true)
}

/// Returns the parameters whose names `chosen` accepts.
pub(super) fn parameters_with<L: Library>(
    strategy: &Strategy,
    model: &L::Model,
    replica: usize,
    chosen: impl Fn(&str) -> bool,
) -> Result<Vec<f32>, Stop> {
    let mut all = Vec::new();
    for variable in variables(model).iter().filter(|variable| chosen(variable.name())) {
        all.extend(elements(strategy, variable, replica)?.into_iter().map(|element| element as f32));
    }
    Ok(all)
}

/// Compares the copies of all replicas of all processes.
pub(super) fn audit<L: Library>(strategy: &Strategy, model: &L::Model) -> Result<(), ErrorOf<L>> {
    use distribute::optim::Trainable;
    distribute::optim::audit(strategy, model.parameters())
}

fn as_on_one<L: Library>(strategy: &Strategy, kind: Kind, sizes: Sizes) -> Result<(), Stop> {
    // A step of a sequence takes as long as several of another model.
    let steps = if matches!(kind, Kind::Recurrent | Kind::LongShort) { 8 } else { 20 };
    let of = |strategy: &Strategy, steps| parameters::<L>(strategy, &train::<L>(strategy, kind, steps, sizes)?, 0);
    let got = of(strategy, steps)?;
    let key = format!("{} {kind:?} {:?}", type_name::<L>(), (0..steps).map(sizes).collect::<Vec<_>>());
    let expected = on_one(&key, |one| {
        let expected = of(one, steps)?;
        check!(of(one, 0)? != expected, "nothing was trained");
        Ok(expected)
    })?;
    let apart = apart(&got, &expected);
    check!(apart < TOLERANCE, "parameters are {apart:e} apart after {steps} steps");
    Ok(())
}

pub(crate) fn dense<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    as_on_one::<L>(strategy, Kind::Dense, |_| 16)
}

pub(crate) fn convolutional<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    as_on_one::<L>(strategy, Kind::Convolutional, |_| 16)
}

pub(crate) fn embedded<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    as_on_one::<L>(strategy, Kind::Embedded, |_| 16)
}

pub(crate) fn vocabulary<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    as_on_one::<L>(strategy, Kind::Vocabulary, |_| 16)?;
    let (model, optimizer) =
        train_by::<L>(strategy, Kind::Vocabulary, 1, |_| 16, |model| Sgd::new(0.2).momentum(0.9).build(model))?;
    let by_rows = (0..variables(&model).len()).filter(|index| optimizer.reduces_rows(*index)).count();
    // A compiled program reduces whole gradients; those of sharded variables are reduced to parts.
    let is_whole = is_compiled(strategy) || strategy.sharding().is_some();
    let expected = usize::from(!is_whole && strategy.topology().workers() > 1);
    check_eq!(by_rows, expected, "variables whose gradients are reduced by rows");
    Ok(())
}

pub(crate) fn recurrent<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    as_on_one::<L>(strategy, Kind::Recurrent, |_| 16)
}

pub(crate) fn long_short<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    as_on_one::<L>(strategy, Kind::LongShort, |_| 16)
}

pub(crate) fn siamese<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    as_on_one::<L>(strategy, Kind::Siamese, |_| 16)
}

pub(crate) fn normed(strategy: &Strategy) -> Result<(), Stop> {
    as_on_one::<Candle>(strategy, Kind::Normed, |_| 16)?;
    // Also if replicas have different numbers of examples, or none.
    as_on_one::<Candle>(strategy, Kind::Normed, UNEVEN)
}

pub(crate) fn normed_apart<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    if strategy.num_replicas_in_sync() == 1 {
        return Err(Stop::NotApplicable("there is one replica"));
    }
    if strategy.shares_variables() {
        return Err(Stop::NotApplicable("replicas that share variables have no copies of their own"));
    }
    let trained = |model: &L::Model, replica: usize| -> Result<Vec<f64>, Stop> {
        let mut all = Vec::new();
        for variable in variables(model).iter().filter(|variable| variable.is_trainable()) {
            all.extend(elements(strategy, variable, replica)?);
        }
        Ok(all)
    };
    let model = train::<L>(strategy, Kind::NormedApart, 10, |_| 16)?;
    let first = trained(&model, 0)?;
    for replica in 1..strategy.num_local_replicas() {
        check_eq!(trained(&model, replica)?, first, format!("copy {replica}"));
    }
    equal_everywhere(strategy, first.clone())?;
    check!(trained(&built::<L>(strategy, Kind::NormedApart)?, 0)? != first, "nothing was trained");
    Ok(())
}

pub(crate) fn uneven<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    as_on_one::<L>(strategy, Kind::Dense, UNEVEN)
}

pub(crate) fn sharded<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    if strategy.shares_variables() {
        return Err(Stop::NotApplicable("replicas that share variables keep one copy of the state already"));
    }
    if strategy.sharding().is_some() {
        return Err(Stop::NotApplicable("the strategy shards the state without being asked"));
    }
    let train = |build: fn(&L::Model) -> _| train_by::<L>(strategy, Kind::Dense, 20, UNEVEN, build);
    let (whole, optimizer) = train(|model| Adam::new(0.01).build(model))?;
    let (parts, sharded) = train(|model| Adam::new(0.01).build(model)?.zero1())?;
    let expected = parameters::<L>(strategy, &whole, 0)?;
    for replica in 0..strategy.num_local_replicas() {
        let got = parameters::<L>(strategy, &parts, replica)?;
        check_eq!(got, expected, format!("parameters of copy {replica}"));
    }
    let (whole, ours, n) = (optimizer.state_bytes(), sharded.state_bytes(), strategy.num_replicas_in_sync());
    // A part holds at most one element of each of Adam's two slots more than the others.
    check!(ours <= whole / n + 8, "the state takes {ours} bytes of {whole} on each of {n} replicas");
    Ok(())
}

pub(crate) fn copies<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let model = train::<L>(strategy, Kind::Dense, 10, |_| 13)?;
    audit::<L>(strategy, &model)?;
    let first = parameters::<L>(strategy, &model, 0)?;
    for replica in 1..strategy.num_local_replicas() {
        check_eq!(parameters::<L>(strategy, &model, replica)?, first, format!("copy {replica}"));
    }
    equal_everywhere(strategy, first.into_iter().map(f64::from).collect())
}

/// Compares values with those of other processes.
fn equal_everywhere(strategy: &Strategy, mine: Vec<f64>) -> Result<(), Stop> {
    let mine = HostTensor::new(&[mine.len()], mine)?;
    let all = PerReplica::new(vec![mine; strategy.num_local_replicas()]);
    let [most, least]: [HostTensor; 2] =
        [strategy.reduce(ReduceOp::Max, &all, Axis::None)?, strategy.reduce(ReduceOp::Min, &all, Axis::None)?];
    check_eq!(most.to_elements::<f64>()?, least.to_elements::<f64>()?, "copies of all processes");
    Ok(())
}

pub(crate) fn emulated<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    if is_compiled(strategy) {
        return Err(Stop::NotApplicable("a compiler orders the operations of a program, and rounds otherwise"));
    }
    let even: Sizes = |_| 16;
    for (kind, steps, sizes) in [(Kind::Dense, 24, even), (Kind::Dense, 12, |_| 13), (Kind::Convolutional, 8, |_| 13)] {
        let got = parameters::<L>(strategy, &train::<L>(strategy, kind, steps, sizes)?, 0)?;
        let expected = emulate::<L>(strategy, kind, steps, sizes)?;
        let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        check!(bits(&got) == bits(&expected), "{steps} steps of a {kind:?} model differ from the emulation");
    }
    Ok(())
}

/// Trains the same model with the library alone: the replicas' gradients are computed one after another and summed,
/// first the replicas of each process and then the processes, and a momentum step is made by hand.
fn emulate<L: Library>(strategy: &Strategy, kind: Kind, steps: usize, sizes: Sizes) -> Result<Vec<f32>, Stop> {
    let topology = strategy.topology();
    let like = built::<L>(strategy, kind)?;
    let mut values: Vec<Vec<f32>> = Vec::new();
    for variable in variables(&like) {
        values.push(elements(strategy, variable, 0)?.into_iter().map(|element| element as f32).collect());
    }
    let mut velocities: Vec<Vec<f32>> = values.iter().map(|values| vec![0.0; values.len()]).collect();
    for step in 0..steps {
        let examples = sizes(step);
        let whole = Batch::new(step, examples);
        let mut sums: Vec<Vec<f32>> = Vec::new();
        for worker in 0..topology.workers() {
            let mut of_worker: Vec<Vec<f32>> = Vec::new();
            for local in 0..topology.replicas_per_worker() {
                let own = whole.part(topology.num_replicas(), worker * topology.replicas_per_worker() + local);
                add(&mut of_worker, L::gradients(kind, &like, &values, &own, examples)?);
            }
            add(&mut sums, of_worker);
        }
        for ((values, gradient), velocity) in values.iter_mut().zip(&sums).zip(&mut velocities) {
            for ((p, g), v) in values.iter_mut().zip(gradient).zip(velocity) {
                *v = 0.9 * *v - 0.2 * g;
                *p += *v;
            }
        }
    }
    Ok(values.concat())
}

fn add(sums: &mut Vec<Vec<f32>>, others: Vec<Vec<f32>>) {
    if sums.is_empty() {
        *sums = others;
        return;
    }
    for (sum, other) in sums.iter_mut().zip(others) {
        sum.iter_mut().zip(other).for_each(|(a, b)| *a += b);
    }
}
