//! Models of candle.

use std::collections::HashMap;

use candle_core::{DType as CandleType, Device, Module, Result as CandleResult, Tensor, Var};
use candle_nn::rnn::{GRU, GRUConfig, LSTM, LSTMConfig, RNN, gru, lstm};
use candle_nn::{BatchNorm, BatchNormConfig, Init, ModuleT, batch_norm};
use candle_nn::{Conv2d, Embedding, Linear, VarBuilder, conv2d, embedding, linear};
use distribute::candle::{
    CandleContext, CandleStrategy, Fit, Model, Optimizer, ReplicaOptimizer, ScopeOptions,
    SparseCategoricalCrossentropy, SyncBatchNorm, Trainer, cross_entropy_per_example, sync_batch_norm,
};
use distribute::device::DType;
use distribute::prelude::{Dataset, PerReplica, ReplicaContext, Strategy};
use distribute::train::history::History;
use distribute::train::metrics::Metrics;

use super::{Batch, Build, CLASSES, INPUTS, Kind, Library, Mean, Run, WORDS, variables};
use crate::check::Stop;

pub(crate) enum Candle {}

pub(crate) enum Net {
    Dense(Linear, Linear),
    Convolutional(Conv2d, Linear),
    Embedded(Embedding, Linear),
    Recurrent(GRU, Linear),
    LongShort(LSTM, Linear),
    Siamese(Linear, Linear),
    Normed(Linear, SyncBatchNorm, Linear),
    NormedApart(Linear, BatchNorm, Linear),
    Reshaped(Linear, Linear),
}

impl Net {
    fn new(kind: Kind, vb: &VarBuilder<'_>) -> CandleResult<Net> {
        let dense = || {
            Ok::<_, candle_core::Error>((linear(INPUTS, 12, vb.pp("first"))?, linear(12, CLASSES, vb.pp("second"))?))
        };
        let head = |width| linear(width, CLASSES, vb.pp("head"));
        Ok(match kind {
            Kind::Dense => dense().map(|(first, second)| Net::Dense(first, second))?,
            Kind::Reshaped => dense().map(|(first, second)| Net::Reshaped(first, second))?,
            Kind::Convolutional => {
                Net::Convolutional(conv2d(1, 4, 3, Default::default(), vb.pp("convolution"))?, head(4 * 2 * 2)?)
            }
            Kind::Embedded => Net::Embedded(embedding(20, 6, vb.pp("words"))?, head(6)?),
            Kind::Vocabulary => {
                let [words, width] = WORDS;
                Net::Embedded(embedding(words, width, vb.pp("words"))?, head(width)?)
            }
            Kind::Recurrent => Net::Recurrent(gru(4, 5, GRUConfig::default(), vb.pp("cell"))?, head(5)?),
            Kind::LongShort => Net::LongShort(lstm(4, 5, LSTMConfig::default(), vb.pp("cell"))?, head(5)?),
            Kind::Siamese => Net::Siamese(linear(8, 6, vb.pp("tower"))?, head(6)?),
            Kind::Normed => {
                let norm = sync_batch_norm(12, BatchNormConfig::default(), vb.pp("norm"))?;
                dense().map(|(first, second)| Net::Normed(first, norm, second))?
            }
            Kind::NormedApart => {
                let norm = batch_norm(12, BatchNormConfig::default(), vb.pp("norm"))?;
                dense().map(|(first, second)| Net::NormedApart(first, norm, second))?
            }
        })
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let examples = x.dim(0)?;
        match self {
            Net::Dense(first, second) => second.forward(&first.forward(x)?.tanh()?),
            Net::Reshaped(first, second) => {
                second.forward(&first.forward(&x.reshape((examples, 1, ()))?.max(1)?)?.tanh()?)
            }
            Net::Convolutional(convolution, head) => {
                let x = convolution.forward(&x.reshape((examples, 1, 4, 4))?)?.tanh()?;
                head.forward(&x.flatten_from(1)?)
            }
            Net::Embedded(words, head) => {
                // Sixteen numbers from -0.5 to 0.5, as token ids from 0.
                let last = words.embeddings().dim(0)? - 1;
                let words = words.forward(&((x + 0.5)? * last as f64)?.to_dtype(CandleType::U32)?)?;
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

fn tensors(batch: &Batch) -> CandleResult<(Tensor, Tensor)> {
    let rows = batch.y.len();
    let x = Tensor::from_slice(&batch.x, (rows, INPUTS), &Device::Cpu)?;
    Ok((x, Tensor::from_slice(&batch.y, rows, &Device::Cpu)?))
}

/// Computes the losses of examples, whose inputs are converted to the type of the parameters.
fn losses(net: &Net, dtype: CandleType, examples: &Batch) -> CandleResult<Tensor> {
    let (x, y) = tensors(examples)?;
    cross_entropy_per_example(&net.forward(&x.to_dtype(dtype)?)?, &y).map_err(candle_core::Error::wrap)
}

fn candle_type(dtype: DType) -> CandleType {
    match dtype {
        DType::F64 => CandleType::F64,
        DType::F16 => CandleType::F16,
        DType::BF16 => CandleType::BF16,
        _ => CandleType::F32,
    }
}

impl Library for Candle {
    type Tensors = distribute::candle::Candle;
    type Model = Model<Net>;
    type Trainer = Trainer<Net>;
    type Data = Dataset<(Tensor, Tensor)>;
    type Bag = Model<Vec<Tensor>>;

    fn model(strategy: &Strategy, kind: Kind, seed: u64, dtype: DType) -> distribute::Result<Model<Net>> {
        let options = ScopeOptions::default().seed(seed).dtype(candle_type(dtype));
        Ok(strategy.scope_with(options, |vb| Net::new(kind, &vb))?)
    }

    fn freeze(model: &mut Model<Net>, frozen: impl Fn(&str) -> bool) -> distribute::Result<usize> {
        Ok(model.freeze(frozen)?)
    }

    fn run(
        strategy: &Strategy,
        model: &Model<Net>,
        optimizer: &Optimizer,
        body: impl Fn(&ReplicaContext, &ReplicaOptimizer<'_>, &Mean<'_, Candle>) -> Run<Candle> + Sync,
    ) -> distribute::Result<PerReplica<f64>> {
        let dtype = model.variables()[0].components()[0].dtype();
        strategy.run((model, optimizer), |context, (net, optimizer)| {
            let mean = |own: &Batch, examples| Ok(context.average_loss(&losses(net, dtype, own)?, examples)?);
            Ok(f64::from(body(context, &optimizer, &mean)?.to_scalar::<f32>()?))
        })
    }

    fn gradients(
        kind: Kind,
        like: &Model<Net>,
        values: &[Vec<f32>],
        own: &Batch,
        examples: usize,
    ) -> Result<Vec<Vec<f32>>, Stop> {
        let mut vars = Vec::new();
        for (variable, values) in like.variables().iter().zip(values) {
            vars.push(Var::from_vec(values.clone(), variable.shape(), &Device::Cpu)?);
        }
        let names = like.variables().iter().map(|variable| variable.name().to_owned());
        let named: HashMap<String, Tensor> = names.zip(vars.iter().map(|var| var.as_tensor().clone())).collect();
        let net = Net::new(kind, &VarBuilder::from_tensors(named, CandleType::F32, &Device::Cpu))?;
        let loss = (losses(&net, CandleType::F32, own)?.sum_all()? / examples as f64)?;
        let gradients = loss.backward()?;
        let of = |var: &Var| match gradients.get(var) {
            Some(gradient) => gradient.flatten_all()?.to_vec1::<f32>(),
            None => Ok(vec![0.0; var.elem_count()]),
        };
        Ok(vars.iter().map(of).collect::<CandleResult<_>>()?)
    }

    fn penalty(strategy: &Strategy, penalty: f32) -> distribute::Result<PerReplica<f32>> {
        strategy.run((), |context, ()| {
            let share = context.scale_regularization_loss(&Tensor::new(penalty, &Device::Cpu)?)?;
            Ok(share.to_scalar::<f32>()?)
        })
    }

    fn bag(
        strategy: &Strategy,
        of: &[(&'static str, f64)],
        len: usize,
        dtype: DType,
    ) -> distribute::Result<Model<Vec<Tensor>>> {
        let options = ScopeOptions::default().dtype(candle_type(dtype));
        Ok(strategy.scope_with(options, |vb| {
            of.iter().map(|(name, value)| vb.get_with_hints(len, name, Init::Const(*value))).collect()
        })?)
    }

    fn step(
        strategy: &Strategy,
        bag: &Model<Vec<Tensor>>,
        optimizer: &Optimizer,
        slopes: impl Fn(&ReplicaContext, usize) -> Option<Vec<f64>> + Sync,
    ) -> distribute::Result<()> {
        let dtype = variables(bag)[0].components()[0].dtype();
        let step = |context: &ReplicaContext, (bag, optimizer): (&Vec<Tensor>, ReplicaOptimizer<'_>)| {
            let mut loss = Tensor::zeros((), dtype, &Device::Cpu)?;
            for (index, variable) in bag.iter().enumerate() {
                if let Some(slopes) = slopes(context, index) {
                    let slopes = Tensor::new(slopes, &Device::Cpu)?.to_dtype(dtype)?;
                    loss = ((variable * slopes)?.sum_all()? + loss)?;
                }
            }
            Ok(optimizer.minimize(context, &loss)?)
        };
        strategy.run((bag, optimizer), step).map(drop)
    }

    fn trainer(
        strategy: &Strategy,
        model: Model<Net>,
        build: Build<Candle>,
        metrics: Metrics,
    ) -> distribute::Result<Trainer<Net>> {
        Ok(Trainer::of_model(strategy, model, build, SparseCategoricalCrossentropy, metrics)?)
    }

    fn trained(trainer: &Trainer<Net>) -> &Model<Net> {
        trainer.model()
    }

    fn data(examples: &Batch, batch: usize, shuffled: bool) -> distribute::Result<Dataset<(Tensor, Tensor)>> {
        let data = Dataset::from_tensor_slices(tensors(examples)?);
        Ok(if shuffled { data.shuffle(examples.y.len(), 3) } else { data }.batch(batch))
    }

    fn fit(trainer: &mut Trainer<Net>, data: &Dataset<(Tensor, Tensor)>, fit: Fit) -> distribute::Result<History> {
        Ok(trainer.fit(data, fit)?)
    }

    fn fit_weighted(
        trainer: &mut Trainer<Net>,
        examples: &Batch,
        weights: &[f32],
        fit: Fit,
    ) -> distribute::Result<History> {
        let (x, y) = tensors(examples)?;
        Ok(trainer.fit(&(x, y, Tensor::new(weights, &Device::Cpu)?), fit)?)
    }

    fn evaluate(trainer: &Trainer<Net>, data: &Dataset<(Tensor, Tensor)>) -> distribute::Result<Vec<(String, f64)>> {
        Ok(trainer.evaluate(data)?)
    }

    fn predict(trainer: &Trainer<Net>, examples: &Batch, batch: usize) -> distribute::Result<Vec<f32>> {
        let outputs = trainer.predict(&Dataset::from_tensor_slices(tensors(examples)?.0).batch(batch))?;
        Ok(outputs.flatten_all()?.to_vec1()?)
    }
}
