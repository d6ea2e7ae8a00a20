//! Models of burn.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig, Lstm, LstmConfig,
    gru::{Gru, GruConfig},
};
use burn::tensor::{DType as BurnType, Device, FloatDType, Int, Tensor, TensorData};
use distribute::burn::{
    BurnContext, BurnStrategy, Fit, Model, Optimizer, ReplicaOptimizer, SparseCategoricalCrossentropy, Trainer,
    cast_module, cross_entropy_per_example,
};
use distribute::device::DType;
use distribute::input::Array;
use distribute::prelude::{Dataset, PerReplica, ReplicaContext, Strategy};
use distribute::train::history::History;
use distribute::train::metrics::Metrics;

use super::{Batch, Build, CLASSES, INPUTS, Kind, Library, Mean, Run, WORDS};
use crate::check::{Fault, Stop};
use crate::conditions::is_compiled;

pub(crate) enum Burn {}

/// The layers of a kind; the others are missing.
#[derive(Module, Debug)]
pub(crate) struct Net {
    first: Option<Linear>,
    convolution: Option<Conv2d>,
    words: Option<Embedding>,
    gru: Option<Gru>,
    lstm: Option<Lstm>,
    norm: Option<BatchNorm>,
    second: Linear,
    #[module(skip)]
    kind: Kind,
}

impl Net {
    fn new(kind: Kind, device: &Device) -> Net {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let (first, width) = match kind {
            Kind::Dense | Kind::Reshaped | Kind::Normed | Kind::NormedApart => (Some(linear(INPUTS, 12)), 12),
            Kind::Siamese => (Some(linear(INPUTS / 2, 6)), 6),
            Kind::Convolutional => (None, 4 * 2 * 2),
            Kind::Embedded => (None, 6),
            Kind::Vocabulary => (None, WORDS[1]),
            Kind::Recurrent | Kind::LongShort => (None, 5),
        };
        Net {
            first,
            convolution: (kind == Kind::Convolutional).then(|| Conv2dConfig::new([1, 4], [3, 3]).init(device)),
            words: vocabulary(kind).map(|[words, width]| EmbeddingConfig::new(words, width).init(device)),
            gru: (kind == Kind::Recurrent).then(|| GruConfig::new(4, 5, true).init(device)),
            lstm: (kind == Kind::LongShort).then(|| LstmConfig::new(4, 5, true).init(device)),
            norm: (kind == Kind::NormedApart).then(|| BatchNormConfig::new(12).init(device)),
            second: linear(width, CLASSES),
            kind,
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let [rows, columns] = x.dims();
        let last = |states: Tensor<3>| states.narrow(1, 3, 1).reshape([rows, 5]);
        let x = match self.kind {
            Kind::Reshaped => x.reshape([rows as i64, 1, -1]).max_dim(1).reshape([rows, columns]),
            _ => x,
        };
        let hidden = if let Some(convolution) = &self.convolution {
            convolution.forward(x.reshape([rows, 1, 4, 4])).tanh().reshape([rows, 4 * 2 * 2])
        } else if let Some(words) = &self.words {
            // Sixteen numbers from -0.5 to 0.5, as token ids from 0.
            let [count, width] = words.weight.dims();
            words.forward(x.add_scalar(0.5).mul_scalar((count - 1) as f64).int()).mean_dim(1).reshape([rows, width])
        } else if let Some(gru) = &self.gru {
            last(gru.forward(x.reshape([rows, 4, 4]), None))
        } else if let Some(lstm) = &self.lstm {
            last(lstm.forward(x.reshape([rows, 4, 4]), None).0)
        } else {
            self.dense(x)
        };
        self.second.forward(hidden)
    }

    fn dense(&self, x: Tensor<2>) -> Tensor<2> {
        let first = |x| self.first.iter().fold(x, |x, first| first.forward(x));
        if self.kind == Kind::Siamese {
            let side = |start| first(x.clone().narrow(1, start, INPUTS / 2)).tanh();
            return (side(0) - side(INPUTS / 2)).square();
        }
        match &self.norm {
            Some(norm) => norm.forward(first(x)).tanh(),
            None => first(x).tanh(),
        }
    }
}

/// Returns the number of words of a kind that has some, and the number of elements of each.
fn vocabulary(kind: Kind) -> Option<[usize; 2]> {
    match kind {
        Kind::Embedded => Some([20, 6]),
        Kind::Vocabulary => Some(WORDS),
        _ => None,
    }
}

fn float_type(dtype: DType) -> FloatDType {
    match dtype {
        DType::F64 => FloatDType::F64,
        DType::F16 => FloatDType::F16,
        DType::BF16 => FloatDType::BF16,
        _ => FloatDType::F32,
    }
}

fn tensors(batch: &Batch, device: &Device) -> (Tensor<2>, Tensor<1, Int>) {
    let rows = batch.y.len();
    let x = Tensor::from_data(TensorData::new(batch.x.clone(), [rows, INPUTS]), device);
    (x, Tensor::from_data(TensorData::new(batch.y.clone(), [rows]), device))
}

fn arrays(batch: &Batch) -> distribute::Result<(Array<f32>, Array<u32>)> {
    Ok((Array::new([batch.y.len(), INPUTS], batch.x.clone())?, Array::from(batch.y.clone())))
}

/// Computes a replica's share of the mean loss over a number of examples.
fn mean(context: &ReplicaContext, net: &Net, own: &Batch, examples: usize) -> distribute::burn::Result<Tensor<1>> {
    if !is_compiled(context.strategy()) {
        let (x, y) = tensors(own, &Device::flex().autodiff());
        return Ok(context.average_loss(losses(net, x, y)?, examples));
    }
    // Replicas have batches of one size there, so that missing rows are filled up, and count 0.
    let (rows, missing) = (own.y.len(), examples.div_ceil(context.num_replicas_in_sync()) - own.y.len());
    let (mut x, mut y, mut counts) = (own.x.clone(), own.y.clone(), vec![1.0f32; rows]);
    x.extend(vec![0.0; missing * INPUTS]);
    y.extend(vec![0; missing]);
    counts.extend(vec![0.0; missing]);
    let x = context.tensor::<2>(&Array::new([rows + missing, INPUTS], x)?)?;
    let (y, counts) = (context.int_tensor::<1>(&Array::from(y))?, context.tensor::<1>(&Array::from(counts))?);
    let losses = losses(net, x, y)?;
    let counts = counts.cast(losses.dtype());
    Ok(context.average_loss(losses * counts, examples))
}

/// Computes the losses of examples, whose inputs are converted to the type of the parameters.
fn losses(net: &Net, x: Tensor<2>, y: Tensor<1, Int>) -> distribute::burn::Result<Tensor<1>> {
    let x = match net.second.weight.val().dtype() {
        BurnType::F32 => x,
        dtype => x.cast(dtype),
    };
    cross_entropy_per_example(net.forward(x), y)
}

fn vector(tensor: Tensor<1>) -> Result<Vec<f32>, Stop> {
    let elements = tensor.into_data().try_into_vec::<f32>();
    elements.map_err(|error| Stop::Wrong(format!("a tensor of burn cannot be read: {error:?}")))
}

/// Gives the parameters values in the order in which burn visits them.
struct Fill<'a>(std::slice::Iter<'a, Vec<f32>>);

impl ModuleMapper for Fill<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let values = self.0.next().cloned().unwrap_or_default();
        // Initial values, which nothing has used yet, are never drawn.
        let values = TensorData::new(values, param.lazy_shape());
        Param::from_tensor(Tensor::from_inner(Tensor::from_data(values, &Device::flex())).require_grad())
    }
}

/// Reads the parameters' gradients.
struct Gradients<'a>(&'a burn::tensor::Gradients, Result<Vec<Vec<f32>>, Stop>);

impl ModuleVisitor for Gradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let elements = param.shape().num_elements();
        let gradient = match param.val().grad(self.0) {
            Some(gradient) => vector(gradient.reshape([elements])),
            None => Ok(vec![0.0; elements]),
        };
        match (&mut self.1, gradient) {
            (Ok(all), Ok(gradient)) => all.push(gradient),
            (Ok(_), Err(error)) => self.1 = Err(error),
            (Err(_), _) => {}
        }
    }
}

/// Variables without layers.
#[derive(Module, Debug)]
pub(crate) struct Bag {
    all: Vec<Param<Tensor<1>>>,
}

impl Library for Burn {
    type Tensors = distribute::burn::Burn;
    type Model = Model<Net>;
    type Trainer = Trainer<Net, Tensor<2>, Tensor<1, Int>, 2>;
    type Data = Dataset<(Array<f32>, Array<u32>)>;
    type Bag = Model<Bag>;

    fn model(strategy: &Strategy, kind: Kind, seed: u64, dtype: DType) -> distribute::Result<Model<Net>> {
        Ok(strategy.scope(|device| {
            device.seed(seed);
            cast_module(Net::new(kind, device), float_type(dtype))
        })?)
    }

    fn freeze(model: &mut Model<Net>, frozen: impl Fn(&str) -> bool) -> distribute::Result<usize> {
        Ok(model.freeze(frozen)?)
    }

    fn run(
        strategy: &Strategy,
        model: &Model<Net>,
        optimizer: &Optimizer,
        body: impl Fn(&ReplicaContext, &ReplicaOptimizer<'_>, &Mean<'_, Burn>) -> Run<Burn> + Sync,
    ) -> distribute::Result<PerReplica<f64>> {
        let losses = strategy.run_step((model, optimizer), |context, (net, optimizer)| {
            body(context, &optimizer, &|own, examples| Ok(mean(context, net, own, examples)?))
        })?;
        let values = losses.into_values().into_iter().map(|loss| f64::from(loss.into_scalar::<f32>()));
        Ok(PerReplica::new(values.collect()))
    }

    fn gradients(
        kind: Kind,
        _: &Model<Net>,
        values: &[Vec<f32>],
        own: &Batch,
        examples: usize,
    ) -> Result<Vec<Vec<f32>>, Stop> {
        let net = Net::new(kind, &Device::flex().autodiff()).map(&mut Fill(values.iter()));
        let (x, y) = tensors(own, &Device::flex().autodiff());
        let gradients = losses(&net, x, y)?.sum().div_scalar(examples as f64).backward();
        let mut of = Gradients(&gradients, Ok(Vec::new()));
        net.visit(&mut of);
        of.1
    }

    fn penalty(strategy: &Strategy, penalty: f32) -> distribute::Result<PerReplica<f32>> {
        strategy.run((), |context, ()| {
            let penalty = Tensor::<1>::from_floats([penalty], &context.burn_device()?);
            Ok(context.scale_regularization_loss(penalty).into_scalar::<f32>())
        })
    }

    fn bag(
        strategy: &Strategy,
        of: &[(&'static str, f64)],
        len: usize,
        dtype: DType,
    ) -> distribute::Result<Model<Bag>> {
        let variable = |device: &Device, value: f64| {
            let (values, dtype) = (TensorData::from(&vec![value; len][..]), BurnType::from(float_type(dtype)));
            let values = Tensor::<1>::from_data(values, (&device.clone().inner(), dtype));
            Param::from_tensor(Tensor::from_inner(values).require_grad())
        };
        Ok(strategy.scope(|device| Bag { all: of.iter().map(|(_, value)| variable(device, *value)).collect() })?)
    }

    fn step(
        strategy: &Strategy,
        bag: &Model<Bag>,
        optimizer: &Optimizer,
        slopes: impl Fn(&ReplicaContext, usize) -> Option<Vec<f64>> + Sync,
    ) -> distribute::Result<()> {
        let step = |context: &ReplicaContext,
                    (bag, optimizer): (&Bag, ReplicaOptimizer<'_>)|
         -> distribute::Result<()> {
            let (device, compiled) = (context.burn_device()?, is_compiled(strategy));
            let mut loss: Option<Tensor<1>> = None;
            for (index, variable) in bag.all.iter().enumerate() {
                if let Some(slopes) = slopes(context, index) {
                    let variable = variable.val();
                    let slopes = match compiled {
                        true => context.tensor::<1>(&Array::from(slopes))?.cast(variable.dtype()),
                        false => Tensor::from_data(TensorData::from(&slopes[..]), (&device, variable.dtype())),
                    };
                    let term = (variable * slopes).sum();
                    loss = Some(loss.map_or(term.clone(), |loss| loss + term));
                }
            }
            let loss = loss.ok_or_else(|| distribute::Error::program(Fault("no variable has slopes".to_owned())))?;
            Ok(optimizer.minimize(context, &loss)?)
        };
        strategy.run_step((bag, optimizer), step).map(drop)
    }

    fn trainer(
        strategy: &Strategy,
        model: Model<Net>,
        build: Build<Burn>,
        metrics: Metrics,
    ) -> distribute::Result<Self::Trainer> {
        Ok(Trainer::of_model(strategy, model, Net::forward, build, SparseCategoricalCrossentropy, metrics)?)
    }

    fn trained(trainer: &Self::Trainer) -> &Model<Net> {
        trainer.model()
    }

    fn data(examples: &Batch, batch: usize, shuffled: bool) -> distribute::Result<Self::Data> {
        let data = Dataset::from_tensor_slices(arrays(examples)?);
        Ok(if shuffled { data.shuffle(examples.y.len(), 3) } else { data }.batch(batch))
    }

    fn fit(
        trainer: &mut Self::Trainer,
        data: &Self::Data,
        fit: Fit<Tensor<2>, Tensor<1, Int>>,
    ) -> distribute::Result<History> {
        Ok(trainer.fit(data, fit)?)
    }

    fn fit_weighted(
        trainer: &mut Self::Trainer,
        examples: &Batch,
        weights: &[f32],
        fit: Fit<Tensor<2>, Tensor<1, Int>>,
    ) -> distribute::Result<History> {
        let (x, y) = tensors(examples, &Device::flex());
        Ok(trainer.fit(&(x, y, Tensor::<1>::from_floats(weights, &Device::flex())), fit)?)
    }

    fn evaluate(trainer: &Self::Trainer, data: &Self::Data) -> distribute::Result<Vec<(String, f64)>> {
        Ok(trainer.evaluate(data)?)
    }

    fn predict(trainer: &Self::Trainer, examples: &Batch, batch: usize) -> distribute::Result<Vec<f32>> {
        let outputs = trainer.predict(&Dataset::from_tensor_slices(arrays(examples)?.0).batch(batch))?;
        vector(outputs.without_autodiff().flatten::<1>(0, 1))
            .map_err(|stop| distribute::Error::program(Fault::from(stop)))
    }
}
