//! Trains small models on parts of a GPU, and compares them with the same training on one CPU.

use std::time::Instant;

use candle_core::{DType, Device, Module, ModuleT, Result as CandleResult, Tensor};
use candle_nn::{BatchNormConfig, Conv2dConfig, LayerNormConfig, VarBuilder};
use distribute::candle::{
    self, AttentionMask, Clip, Conv2d, Embedding, LayerNorm, LossScale, Model, RmsNorm, ScopeOptions, SyncBatchNorm,
    cross_entropy_per_example,
};
use distribute::cluster::Membership;
use distribute::device::{DeviceKind, Devices};
use distribute::prelude::*;
use distribute::strategy::Implementation;

use crate::models::{self, Kind};

/// Examples of a step of all replicas.
const BATCH: usize = 8;
const STEPS: usize = 8;
const SEED: u64 = 7;
const CLASSES: usize = 10;

/// Largest difference of a variable, relative to its largest element: f32 sums in another order.
const TOLERANCE: f64 = 2e-4;

/// Largest difference of the last loss in 16 bits, relative to that in f32.
const SHORT_TOLERANCE: f64 = 0.05;

/// A model of the checks.
enum Any {
    /// candle's own layers.
    Plain(models::Model),
    /// Convolution, batch normalisation over all replicas, pooling.
    Pictures(Conv2d, SyncBatchNorm, candle::Linear),
    /// Embedding, normalisations, attention, GELU.
    Words(Box<Words>),
}

struct Words {
    tokens: Embedding,
    norm: LayerNorm,
    qkv: candle::Linear,
    up: candle::Linear,
    last: RmsNorm,
    out: candle::Linear,
}

#[derive(Clone, Copy)]
enum Which {
    Plain(Kind),
    Pictures,
    Words,
}

/// The outcome of a training.
struct Trained {
    losses: Vec<f64>,
    /// The variables and their elements.
    variables: Vec<(String, Vec<f32>)>,
}

/// Compares all models and places, prints a line for each, and returns whether all agree.
pub(crate) fn check(kind: DeviceKind, implementation: Implementation) -> distribute::Result<bool> {
    let mut all_agree = true;
    let mut told = |name: String, began: Instant, outcome: distribute::Result<String>| {
        let seconds = began.elapsed().as_secs_f64();
        match outcome {
            Ok(detail) => println!("passed   {name} ({detail}; {seconds:.1} s)"),
            Err(error) => {
                all_agree = false;
                // candle's errors end with a backtrace.
                let error = error.to_string();
                println!("FAILED   {name} ({}; {seconds:.1} s)", error.lines().next().unwrap_or_default());
            }
        }
    };
    let places = places(kind, implementation)?;
    let limited = Some(0.5);
    for which in Which::ALL {
        let cpu = OneDeviceStrategy::builder("CPU:0").build()?;
        let expected = train(&cpu, which, DType::F32, None)?;
        let expected_limited = train(&cpu, which, DType::F32, limited)?;
        for (place, strategy) in &places {
            // candle's convolutions on CPUs do not take bf16.
            let has_cpu = strategy.devices().iter().any(|device| device.kind() == Some(DeviceKind::Cpu));
            for (dtype, clip, expected) in [
                (DType::F32, None, &expected),
                (DType::F32, limited, &expected_limited),
                (DType::BF16, None, &expected),
                (DType::F16, None, &expected),
            ] {
                if has_cpu && dtype == DType::BF16 {
                    continue;
                }
                let began = Instant::now();
                let by = clip.map_or(String::new(), |norm| format!(", norm limited to {norm}"));
                let name = format!("{place}: {} in {}{by}", which.name(), dtype.as_str());
                told(
                    name,
                    began,
                    train(strategy, which, dtype, clip).and_then(|found| compare(expected, &found, dtype)),
                );
            }
        }
    }
    Ok(all_agree)
}

/// Returns the strategies whose trainings must agree: one device, its parts, and a CPU as well.
fn places(kind: DeviceKind, implementation: Implementation) -> distribute::Result<Vec<(String, Strategy)>> {
    let options = CommunicationOptions::default().implementation(implementation);
    let device = |place: usize| format!("{kind}:{place}");
    if Membership::from_env()?.is_some() {
        let builder = MultiWorkerMirroredStrategy::builder().devices([device(0)]);
        let strategy = builder.communication(options).build()?;
        return Ok(vec![(strategy.describe(), strategy)]);
    }
    let mut places = vec![OneDeviceStrategy::builder(device(0)).build()?];
    for parts in [1, 2, 4] {
        let builder = MirroredStrategy::builder().devices((0..parts).map(device)).communication(options.clone());
        let builder = match kind {
            DeviceKind::Gpu => builder.logical_devices(Devices::local().split(kind, 0, &vec![None; parts])?),
            _ => builder,
        };
        places.push(builder.build()?);
    }
    if kind == DeviceKind::Gpu {
        places.push(MirroredStrategy::builder().devices(["GPU:0", "CPU:0"]).build()?);
    }
    Ok(places.into_iter().map(|strategy| (strategy.describe(), strategy)).collect())
}

fn train(strategy: &Strategy, which: Which, dtype: DType, clip: Option<f64>) -> distribute::Result<Trained> {
    let model = strategy.scope_with(ScopeOptions::default().seed(SEED).dtype(dtype), |vb| which.build(&vb))?;
    let optimizer = Sgd::new(0.05).momentum(0.9).build(&model)?;
    let optimizer = match clip {
        Some(norm) => optimizer.clip(Clip::GlobalNorm(norm))?,
        None => optimizer,
    };
    let optimizer = if dtype == DType::F16 { optimizer.scale_losses(LossScale::dynamic())? } else { optimizer };
    let (x, y) = which.data()?;
    let mut losses = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        let parts = strategy.run((&model, &optimizer), |ctx, (model, optimizer)| {
            let each = BATCH / ctx.num_replicas_in_sync();
            let own = |all: &Tensor| ctx.to_device(&all.narrow(0, ctx.replica_id() * each, each)?);
            let logits = model.forward_t(&own(&x)?, true)?.to_dtype(DType::F32)?;
            let loss = ctx.average_loss(&cross_entropy_per_example(&logits, &own(&y)?)?, BATCH)?;
            optimizer.minimize(ctx, &loss)?;
            Ok(loss.detach())
        })?;
        let loss = strategy.reduce(ReduceOp::Sum, &parts, Axis::None)?;
        losses.push(f64::from(loss.to_device(&Device::Cpu)?.to_scalar::<f32>()?));
    }
    model.audit(strategy)?;
    Ok(Trained { losses, variables: elements(&model)? })
}

fn elements(model: &Model<Any>) -> distribute::Result<Vec<(String, Vec<f32>)>> {
    let of = |variable: &distribute::candle::Variable| {
        let tensor = variable.components()[0].to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        Ok((variable.name().to_owned(), tensor.flatten_all()?.to_vec1()?))
    };
    model.variables().iter().map(of).collect()
}

/// Compares the variables in f32, and the losses in 16 bits.
fn compare(expected: &Trained, found: &Trained, dtype: DType) -> distribute::Result<String> {
    let [first, last] = [found.losses[0], found.losses[STEPS - 1]];
    let should = expected.losses[STEPS - 1];
    if dtype != DType::F32 {
        let off = (last - should).abs() / should.abs();
        if off.is_finite() && off < SHORT_TOLERANCE.max(0.02 / should.abs()) && last < first {
            return Ok(format!("loss {first:.4} to {last:.4}, {should:.4} in f32"));
        }
        return Err(distribute::Error::program(format!("loss {first} to {last}, but {should} in f32")));
    }
    let mut worst = (0.0, "");
    for ((name, expected), (_, found)) in expected.variables.iter().zip(&found.variables) {
        let largest = expected.iter().fold(1e-6, |most: f64, x| most.max(f64::from(x.abs())));
        for (expected, found) in expected.iter().zip(found) {
            let off = f64::from((expected - found).abs()) / largest;
            if off.is_nan() || off > worst.0 {
                worst = (off, name.as_str());
            }
        }
    }
    let (off, name) = worst;
    match off < TOLERANCE {
        true => Ok(format!("differs by {off:.1e} at most, loss {first:.4} to {last:.4}")),
        false => Err(distribute::Error::program(format!("{name} differs by {off:.1e} of its largest element"))),
    }
}

impl Which {
    const ALL: [Which; 5] = [
        Which::Plain(Kind::Mlp),
        Which::Plain(Kind::Cnn),
        Which::Plain(Kind::Transformer),
        Which::Pictures,
        Which::Words,
    ];

    fn name(self) -> &'static str {
        match self {
            Which::Plain(kind) => kind.name(),
            Which::Pictures => "convolution, batch normalisation and pooling",
            Which::Words => "embedding, normalisations and attention",
        }
    }

    fn build(self, vb: &VarBuilder<'_>) -> CandleResult<Any> {
        const WIDTH: usize = 32;
        Ok(match self {
            Which::Plain(kind) => Any::Plain(kind.build(kind.size(true), vb)?),
            Which::Pictures => Any::Pictures(
                candle::conv2d(1, 4, 3, Conv2dConfig::default(), vb.pp("conv"))?,
                candle::sync_batch_norm(4, BatchNormConfig::default(), vb.pp("norm"))?,
                candle::linear(4 * 13 * 13, CLASSES, vb.pp("out"))?,
            ),
            Which::Words => Any::Words(Box::new(Words {
                tokens: candle::embedding(1024, WIDTH, vb.pp("tokens"))?,
                norm: candle::layer_norm(WIDTH, LayerNormConfig::default(), vb.pp("norm"))?,
                qkv: candle::linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?,
                up: candle::linear(WIDTH, WIDTH, vb.pp("up"))?,
                last: candle::rms_norm(WIDTH, 1e-5, vb.pp("last"))?,
                out: candle::linear(WIDTH, CLASSES, vb.pp("out"))?,
            })),
        })
    }

    fn data(self) -> CandleResult<(Tensor, Tensor)> {
        let kind = match self {
            Which::Plain(kind) => kind,
            Which::Pictures => Kind::Cnn,
            Which::Words => Kind::Transformer,
        };
        kind.data(kind.size(true), DType::F32, &Device::Cpu)
    }
}

impl ModuleT for Any {
    fn forward_t(&self, x: &Tensor, train: bool) -> CandleResult<Tensor> {
        let like = |x: &Tensor, weight: &Tensor| x.to_dtype(weight.dtype());
        match self {
            Any::Plain(model) if x.dtype() == DType::U32 => model.forward(x),
            Any::Plain(model) => model.forward(&x.to_dtype(model.dtype())?),
            Any::Pictures(conv, norm, out) => {
                let x = norm.forward_t(&conv.forward(&like(x, conv.weight())?)?, train)?;
                out.forward(&candle::max_pool2d(&candle::relu(&x)?, 2)?.flatten_from(1)?)
            }
            Any::Words(words) => words.forward(x),
        }
    }
}

impl Module for Words {
    fn forward(&self, tokens: &Tensor) -> CandleResult<Tensor> {
        let x = self.tokens.forward(tokens)?;
        let qkv = self.qkv.forward(&self.norm.forward(&x)?)?;
        let x = (x + candle::self_attention(&qkv, 4, AttentionMask::Causal)?)?;
        let x = (&x + candle::gelu(&self.up.forward(&x)?)?)?;
        self.out.forward(&self.last.forward(&x)?.mean(1)?)
    }
}
