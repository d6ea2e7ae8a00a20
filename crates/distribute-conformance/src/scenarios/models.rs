//! Training: equal to one replica within a tolerance, and bit for bit to a sequential emulation of the replicas.

use candle_core::{DType, Device, Module, Result as CandleResult, Tensor, Var};
use candle_nn::rnn::{GRU, GRUConfig, LSTM, LSTMConfig, RNN, gru, lstm};
use candle_nn::{BatchNorm, BatchNormConfig, ModuleT, batch_norm};
use candle_nn::{Conv2d, Embedding, Linear, VarBuilder, VarMap, conv2d, embedding, linear};
use distribute::candle::{Model, Optimizer, SyncBatchNorm, sync_batch_norm};
use distribute::collectives::schedule::part;
use distribute::prelude::*;

use crate::check::{Stop, check, check_eq};

/// Tolerance of parameters after 20 steps in f32, as in TensorFlow's own correctness tests.
pub(super) const TOLERANCE: f32 = 4e-5;

const CLASSES: usize = 3;

pub(super) enum Net {
    Dense(Linear, Linear),
    Convolutional(Conv2d, Linear),
    Embedded(Embedding, Linear),
    Recurrent(GRU, Linear),
    LongShort(LSTM, Linear),
    Siamese(Linear, Linear),
    Normed(Linear, SyncBatchNorm, Linear),
    NormedApart(Linear, BatchNorm, Linear),
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Dense,
    Convolutional,
    Embedded,
    Recurrent,
    LongShort,
    /// Two inputs through one layer.
    Siamese,
    /// Batch normalisation over the global batch.
    Normed,
    /// Batch normalisation over each replica's own batch.
    NormedApart,
}

impl Net {
    pub(super) fn new(kind: Kind, vb: &VarBuilder<'_>) -> CandleResult<Net> {
        Ok(match kind {
            Kind::Dense => Net::Dense(linear(16, 12, vb.pp("first"))?, linear(12, CLASSES, vb.pp("second"))?),
            Kind::Convolutional => {
                let convolution = conv2d(1, 4, 3, Default::default(), vb.pp("convolution"))?;
                Net::Convolutional(convolution, linear(4 * 2 * 2, CLASSES, vb.pp("head"))?)
            }
            Kind::Embedded => Net::Embedded(embedding(20, 6, vb.pp("words"))?, linear(6, CLASSES, vb.pp("head"))?),
            Kind::Recurrent => {
                let cell = gru(4, 5, GRUConfig::default(), vb.pp("cell"))?;
                Net::Recurrent(cell, linear(5, CLASSES, vb.pp("head"))?)
            }
            Kind::LongShort => {
                let cell = lstm(4, 5, LSTMConfig::default(), vb.pp("cell"))?;
                Net::LongShort(cell, linear(5, CLASSES, vb.pp("head"))?)
            }
            Kind::Siamese => Net::Siamese(linear(8, 6, vb.pp("tower"))?, linear(6, CLASSES, vb.pp("head"))?),
            Kind::Normed => {
                let norm = sync_batch_norm(12, BatchNormConfig::default(), vb.pp("norm"))?;
                Net::Normed(linear(16, 12, vb.pp("first"))?, norm, linear(12, CLASSES, vb.pp("second"))?)
            }
            Kind::NormedApart => {
                let norm = batch_norm(12, BatchNormConfig::default(), vb.pp("norm"))?;
                Net::NormedApart(linear(16, 12, vb.pp("first"))?, norm, linear(12, CLASSES, vb.pp("second"))?)
            }
        })
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let examples = x.dim(0)?;
        match self {
            Net::Dense(first, second) => second.forward(&first.forward(x)?.tanh()?),
            Net::Convolutional(convolution, head) => {
                let x = convolution.forward(&x.reshape((examples, 1, 4, 4))?)?.tanh()?;
                head.forward(&x.flatten_from(1)?)
            }
            Net::Embedded(words, head) => {
                // Sixteen numbers from -0.5 to 0.5, as token ids from 0 to 19.
                let words = words.forward(&((x + 0.5)? * 19.0)?.to_dtype(DType::U32)?)?;
                head.forward(&words.mean(1)?)
            }
            Net::Normed(first, norm, second) => second.forward(&norm.forward_t(&first.forward(x)?, true)?.tanh()?),
            Net::NormedApart(first, norm, second) => second.forward(&norm.forward_t(&first.forward(x)?, true)?.tanh()?),
            Net::LongShort(cell, head) => {
                let states = cell.seq(&x.reshape((examples, 4, 4))?)?;
                head.forward(states.last().map_or(x, |state| state.h()))
            }
            Net::Siamese(tower, head) => {
                let side = |start| tower.forward(&x.narrow(1, start, 8)?)?.tanh();
                head.forward(&(side(0)? - side(8)?)?.sqr()?)
            }
            Net::Recurrent(cell, head) => {
                let states = cell.seq(&x.reshape((examples, 4, 4))?)?;
                head.forward(states.last().map_or(x, |state| state.h()))
            }
        }
    }
}

/// Returns the examples of one step.
pub(super) fn batch(step: usize, examples: usize) -> CandleResult<(Tensor, Tensor)> {
    let number = |at: usize, modulus: usize| (at * 7919 + step * 104_729 + 13) % modulus;
    let x: Vec<f32> = (0..examples * 16).map(|at| number(at, 1009) as f32 / 1009.0 - 0.5).collect();
    let y: Vec<u32> = (0..examples).map(|at| (number(at * 31, 1013) % CLASSES) as u32).collect();
    Ok((Tensor::from_vec(x, (examples, 16), &Device::Cpu)?, Tensor::from_vec(y, examples, &Device::Cpu)?))
}

pub(super) fn share((x, y): &(Tensor, Tensor), replicas: usize, replica: usize) -> CandleResult<(Tensor, Tensor)> {
    let rows = part(x.dim(0)?, replicas, replica);
    Ok((x.narrow(0, rows.start, rows.len())?, y.narrow(0, rows.start, rows.len())?))
}

/// The number of examples of each step.
pub(super) type Sizes = fn(usize) -> usize;

fn train(strategy: &Strategy, kind: Kind, steps: usize, sizes: Sizes) -> distribute::Result<Model<Net>> {
    train_by(strategy, kind, steps, sizes, |model| Sgd::new(0.2).momentum(0.9).build(model)).map(|(model, _)| model)
}

pub(super) fn train_by(
    strategy: &Strategy,
    kind: Kind,
    steps: usize,
    sizes: Sizes,
    build: impl FnOnce(&Model<Net>) -> distribute::candle::Result<Optimizer>,
) -> distribute::Result<(Model<Net>, Optimizer)> {
    let model = strategy.scope_seeded(5, |vb| Net::new(kind, &vb))?;
    let optimizer = build(&model)?;
    for step in 0..steps {
        let examples = sizes(step);
        let whole = batch(step, examples)?;
        let parts = strategy.distribute_values_from_function(|context| {
            share(&whole, context.num_replicas, context.replica_id).map_err(distribute::Error::from)
        })?;
        strategy.run((&model, &optimizer, parts), |context, (model, optimizer, (x, y))| {
            let per_example = cross_entropy_per_example(&model.forward(&x)?, &y)?;
            optimizer.minimize(context, &context.average_loss(&per_example, examples)?)?;
            Ok(())
        })?;
    }
    Ok((model, optimizer))
}

pub(super) fn parameters<M>(model: &Model<M>, replica: usize) -> CandleResult<Vec<f32>> {
    let flat = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
    model
        .variables()
        .iter()
        .map(|variable| flat(&variable.components()[replica]))
        .collect::<CandleResult<Vec<_>>>()
        .map(|all| all.concat())
}

fn as_on_one(strategy: &Strategy, kind: Kind, sizes: Sizes) -> Result<(), Stop> {
    let got = parameters(&train(strategy, kind, 20, sizes)?, 0)?;
    let expected = parameters(&train(&Strategy::default_strategy()?, kind, 20, sizes)?, 0)?;
    let apart = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
    let close = apart < TOLERANCE;
    check!(close, "parameters are {apart:e} apart after 20 steps");
    let began = parameters(&train(&Strategy::default_strategy()?, kind, 0, sizes)?, 0)?;
    check!(began != expected, "nothing was trained");
    Ok(())
}

pub(crate) fn dense(strategy: &Strategy) -> Result<(), Stop> {
    as_on_one(strategy, Kind::Dense, |_| 16)
}

pub(crate) fn convolutional(strategy: &Strategy) -> Result<(), Stop> {
    as_on_one(strategy, Kind::Convolutional, |_| 16)
}

pub(crate) fn embedded(strategy: &Strategy) -> Result<(), Stop> {
    as_on_one(strategy, Kind::Embedded, |_| 16)
}

pub(crate) fn recurrent(strategy: &Strategy) -> Result<(), Stop> {
    as_on_one(strategy, Kind::Recurrent, |_| 16)
}

pub(crate) fn long_short(strategy: &Strategy) -> Result<(), Stop> {
    as_on_one(strategy, Kind::LongShort, |_| 16)
}

pub(crate) fn siamese(strategy: &Strategy) -> Result<(), Stop> {
    as_on_one(strategy, Kind::Siamese, |_| 16)
}

pub(crate) fn normed(strategy: &Strategy) -> Result<(), Stop> {
    as_on_one(strategy, Kind::Normed, |_| 16)?;
    // Also if replicas have different numbers of examples, or none.
    as_on_one(strategy, Kind::Normed, |step| if step % 5 == 4 { 3 } else { 13 })
}

pub(crate) fn normed_apart(strategy: &Strategy) -> Result<(), Stop> {
    let model = train(strategy, Kind::NormedApart, 10, |_| 16)?;
    let trained = |replica: usize| -> CandleResult<Vec<Vec<f32>>> {
        let trainable = model.variables().iter().filter(|variable| variable.is_trainable());
        trainable.map(|variable| variable.components()[replica].flatten_all()?.to_vec1::<f32>()).collect()
    };
    for replica in 1..strategy.num_local_replicas() {
        check_eq!(trained(replica)?, trained(0)?, format!("copy {replica}"));
    }
    Ok(())
}

pub(crate) fn uneven(strategy: &Strategy) -> Result<(), Stop> {
    // Five examples for up to four replicas; in some steps fewer examples than replicas.
    as_on_one(strategy, Kind::Dense, |step| if step % 5 == 4 { 3 } else { 13 })
}

pub(crate) fn sharded(strategy: &Strategy) -> Result<(), Stop> {
    if strategy.shares_variables() {
        return Err(Stop::NotApplicable("replicas that share variables keep one copy of the state already"));
    }
    if strategy.sharding().is_some() {
        return Err(Stop::NotApplicable("the strategy shards the state without being asked"));
    }
    let sizes: Sizes = |step| if step % 5 == 4 { 3 } else { 13 };
    let (whole, optimizer) = train_by(strategy, Kind::Dense, 20, sizes, |model| Adam::new(0.01).build(model))?;
    let (parts, sharded) = train_by(strategy, Kind::Dense, 20, sizes, |model| Adam::new(0.01).build(model)?.zero1())?;
    for replica in 0..strategy.num_local_replicas() {
        check_eq!(parameters(&parts, replica)?, parameters(&whole, 0)?, format!("parameters of copy {replica}"));
    }
    let (whole, ours, n) = (optimizer.state_bytes(), sharded.state_bytes(), strategy.num_replicas_in_sync());
    // A part holds at most one element of each of Adam's two slots more than the others.
    check!(ours <= whole / n + 8, "the state takes {ours} bytes of {whole} on each of {n} replicas");
    Ok(())
}

pub(crate) fn copies(strategy: &Strategy) -> Result<(), Stop> {
    let model = train(strategy, Kind::Dense, 10, |_| 13)?;
    model.audit(strategy)?;
    let first = parameters(&model, 0)?;
    for replica in 1..strategy.num_local_replicas() {
        check_eq!(parameters(&model, replica)?, first, format!("copy {replica}"));
    }
    // And those of other processes.
    let mine: Vec<f64> = first.iter().map(|x| f64::from(*x)).collect();
    let mine = distribute::values::HostTensor::new(&[mine.len()], mine)?;
    let all = PerReplica::new(vec![mine; strategy.num_local_replicas()]);
    let [most, least]: [distribute::values::HostTensor; 2] =
        [strategy.reduce(ReduceOp::Max, &all, Axis::None)?, strategy.reduce(ReduceOp::Min, &all, Axis::None)?];
    let elements = distribute::values::TensorStorage::to_elements::<f64>;
    check_eq!(elements(&most)?, elements(&least)?, "copies of all processes");
    Ok(())
}

pub(crate) fn emulated(strategy: &Strategy) -> Result<(), Stop> {
    for kind in [Kind::Dense, Kind::Convolutional] {
        for sizes in [(|_| 16) as Sizes, |_| 13] {
            let got = parameters(&train(strategy, kind, 200, sizes)?, 0)?;
            let expected = emulate(strategy, kind, 200, sizes)?;
            let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            check!(bits(&got) == bits(&expected), "200 steps differ from the emulation");
        }
    }
    Ok(())
}

/// Trains the same model with plain candle: the replicas' gradients are computed one after another and summed, first
/// the replicas of each process and then the processes, and a momentum step is made by hand.
fn emulate(strategy: &Strategy, kind: Kind, steps: usize, sizes: Sizes) -> Result<Vec<f32>, Stop> {
    let topology = strategy.topology();
    let names: Vec<String>;
    let map = VarMap::new();
    let net = Net::new(kind, &VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu))?;
    let variables: Vec<Var> = {
        let like = strategy.scope_seeded(5, |vb| Net::new(kind, &vb))?;
        names = like.variables().iter().map(|variable| variable.name().to_owned()).collect();
        let held = map.data().lock().map_err(|_| Stop::Wrong("a lock is poisoned".to_owned()))?;
        let mut variables = Vec::new();
        for (name, variable) in names.iter().zip(like.variables()) {
            let var = held.get(name).ok_or_else(|| Stop::Wrong(format!("plain candle has no {name}")))?;
            var.set(&variable.components()[0].detach().copy()?)?;
            variables.push(var.clone());
        }
        variables
    };
    let mut velocities: Vec<Vec<f32>> = variables.iter().map(|variable| vec![0.0; variable.elem_count()]).collect();
    for step in 0..steps {
        let examples = sizes(step);
        let whole = batch(step, examples)?;
        let mut sums: Vec<Vec<f32>> = Vec::new();
        for worker in 0..topology.workers() {
            let mut of_worker: Vec<Vec<f32>> = Vec::new();
            for local in 0..topology.replicas_per_worker() {
                let replica = worker * topology.replicas_per_worker() + local;
                let (x, y) = share(&whole, topology.num_replicas(), replica)?;
                let per_example = cross_entropy_per_example(&net.forward(&x)?, &y)?;
                let loss = (per_example.sum_all()? / examples as f64)?;
                let gradients = loss.backward()?;
                let mut own = Vec::new();
                for variable in &variables {
                    let gradient = gradients.get(variable).map(|gradient| gradient.flatten_all()?.to_vec1::<f32>());
                    own.push(gradient.unwrap_or_else(|| Ok(vec![0.0; variable.elem_count()]))?);
                }
                add(&mut of_worker, own);
            }
            add(&mut sums, of_worker);
        }
        for ((variable, gradient), velocity) in variables.iter().zip(&sums).zip(&mut velocities) {
            let mut values = variable.flatten_all()?.to_vec1::<f32>()?;
            for ((p, g), v) in values.iter_mut().zip(gradient).zip(velocity) {
                *v = 0.9 * *v - 0.2 * g;
                *p += *v;
            }
            variable.set(&Tensor::from_vec(values, variable.shape(), &Device::Cpu)?)?;
        }
    }
    let flat = variables.iter().map(|variable| variable.flatten_all()?.to_vec1::<f32>());
    Ok(flat.collect::<CandleResult<Vec<_>>>()?.concat())
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
