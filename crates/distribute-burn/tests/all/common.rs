//! Models, data and training loops of the tests.

use burn::module::{Module, Param};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::tensor::activation::{log_softmax, relu};
use burn::tensor::{Device, Distribution, Int, Tensor};
use distribute_burn::{BurnContext, BurnStrategy, Error, Model, Optimizer};
use distribute_strategy::{FullyShardedStrategy, MirroredStrategy, OneDeviceStrategy, Strategy};
use distribute_values::{PerReplica, TensorStorage};
use parking_lot::Mutex;

/// burn's generator of random numbers is one for the whole process.
static GENERATOR: Mutex<()> = Mutex::new(());

/// Runs a function that draws random numbers, while no other test builds a model.
pub(crate) fn drawing<R>(draw: impl FnOnce() -> R) -> R {
    let _generator = GENERATOR.lock();
    draw()
}

/// Builds a model with the same initial values in every test.
pub(crate) fn seeded<M>(device: &Device, build: impl FnOnce(&Device) -> M) -> M
where
    M: Module,
{
    let _generator = GENERATOR.lock();
    device.seed(7);
    let model = build(device);
    // Initializes the parameters, which burn does when they are used first.
    let _ = model.clone().into_record();
    model
}

pub(crate) fn one() -> Strategy {
    OneDeviceStrategy::builder("CPU:0").build().unwrap()
}

pub(crate) fn mirrored(replicas: usize) -> Strategy {
    MirroredStrategy::builder().devices((0..replicas).map(|cpu| format!("CPU:{cpu}"))).build().unwrap()
}

/// Shards every parameter, also small ones.
pub(crate) fn sharded(replicas: usize) -> Strategy {
    sharded_with(replicas, true)
}

pub(crate) fn sharded_with(replicas: usize, overlap: bool) -> Strategy {
    let devices = (0..replicas).map(|cpu| format!("CPU:{cpu}"));
    FullyShardedStrategy::builder().devices(devices).mirror_below(1).overlap(overlap).build().unwrap()
}

/// A model of the tests: rows of 16 numbers or of 16 tokens in, logits of 4 classes out.
pub(crate) trait Classifier: Module + Sync + 'static {
    fn new(device: &Device) -> Self;
    fn forward(&self, x: Tensor<2>) -> Tensor<2>;

    /// Returns the cross-entropy of each example.
    fn losses(&self, x: Tensor<2>, y: Tensor<1, Int>) -> Tensor<1> {
        losses(self.forward(x), y)
    }
}

pub(crate) const INPUTS: usize = 16;
pub(crate) const CLASSES: usize = 4;

#[derive(Module, Debug)]
pub(crate) struct Mlp {
    pub(crate) hidden: Vec<Linear>,
    pub(crate) head: Linear,
}

impl Classifier for Mlp {
    fn new(device: &Device) -> Mlp {
        seeded(device, |device| Mlp {
            hidden: (0..3).map(|_| LinearConfig::new(INPUTS, INPUTS).init(device)).collect(),
            head: LinearConfig::new(INPUTS, CLASSES).init(device),
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.head.forward(self.hidden.iter().fold(x, |x, layer| relu(layer.forward(x))))
    }
}

/// The same weight is used twice.
#[derive(Module, Debug)]
pub(crate) struct Tied {
    pub(crate) first: Linear,
    pub(crate) second: Linear,
    pub(crate) head: Linear,
}

impl Classifier for Tied {
    fn new(device: &Device) -> Tied {
        seeded(device, |device| {
            let first = LinearConfig::new(INPUTS, INPUTS).init(device);
            let mut second = LinearConfig::new(INPUTS, INPUTS).init(device);
            second.weight = first.weight.clone();
            Tied { first, second, head: LinearConfig::new(INPUTS, CLASSES).init(device) }
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.head.forward(relu(self.second.forward(relu(self.first.forward(x)))))
    }
}

#[derive(Module, Debug)]
pub(crate) struct Convolution {
    conv: Conv2d,
    head: Linear,
}

impl Classifier for Convolution {
    fn new(device: &Device) -> Convolution {
        seeded(device, |device| Convolution {
            conv: Conv2dConfig::new([1, 3], [3, 3]).init(device),
            head: LinearConfig::new(12, CLASSES).init(device),
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let rows = x.dims()[0];
        self.head.forward(relu(self.conv.forward(x.reshape([rows, 1, 4, 4]))).reshape([rows, 12]))
    }
}

/// Embedding, attention, layer norm.
#[derive(Module, Debug)]
pub(crate) struct Attention {
    embedding: Embedding,
    attention: MultiHeadAttention,
    norm: LayerNorm,
    scale: Param<Tensor<1>>,
    head: Linear,
}

impl Classifier for Attention {
    fn new(device: &Device) -> Attention {
        seeded(device, |device| Attention {
            embedding: EmbeddingConfig::new(10, 8).init(device),
            attention: MultiHeadAttentionConfig::new(8, 2).with_dropout(0.0).init(device),
            norm: LayerNormConfig::new(8).init(device),
            scale: Param::from_tensor(Tensor::ones([1], device)),
            head: LinearConfig::new(8, CLASSES).init(device),
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let tokens: Tensor<2, Int> = x.abs().mul_scalar(3.0).clamp(0.0, 9.0).int();
        let x = self.embedding.forward(tokens);
        let x = self.norm.forward(x.clone() + self.attention.forward(MhaInput::self_attn(x)).context);
        let [rows, _, width] = x.dims();
        let x = x.mean_dim(1).reshape([rows, width]) * self.scale.val().unsqueeze::<2>();
        self.head.forward(x)
    }
}

#[derive(Module, Debug)]
pub(crate) struct Normalised {
    first: Linear,
    norm: BatchNorm,
    head: Linear,
}

impl Classifier for Normalised {
    fn new(device: &Device) -> Normalised {
        seeded(device, |device| Normalised {
            first: LinearConfig::new(INPUTS, INPUTS).init(device),
            norm: BatchNormConfig::new(INPUTS).init(device),
            head: LinearConfig::new(INPUTS, CLASSES).init(device),
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.head.forward(relu(self.norm.forward(self.first.forward(x))))
    }
}

/// Returns the rows of one global batch, and their classes.
pub(crate) fn batch(step: usize, rows: usize) -> (Vec<f32>, Vec<i32>) {
    let value = |at: usize| (((step * 7919 + at * 104_729) % 1009) as f32 / 504.5 - 1.0) * 1.5;
    let x: Vec<f32> = (0..rows * INPUTS).map(value).collect();
    let class =
        |row: usize| (x[row * INPUTS..][..CLASSES].iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1))).unwrap().0;
    let y = (0..rows).map(|row| class(row) as i32).collect();
    (x, y)
}

/// Cuts a batch for the replicas as evenly as possible, the larger parts first.
pub(crate) fn cut(batch: &(Vec<f32>, Vec<i32>), parts: usize, device: &Device) -> Vec<(Tensor<2>, Tensor<1, Int>)> {
    let rows = batch.1.len();
    let mut start = 0;
    (0..parts)
        .map(|part| {
            let len = rows / parts + usize::from(part < rows % parts);
            let range = start..start + len;
            start += len;
            let x = Tensor::<1>::from_floats(&batch.0[range.start * INPUTS..range.end * INPUTS], device);
            (x.reshape([len, INPUTS]), Tensor::from_ints(&batch.1[range], device))
        })
        .collect()
}

/// Returns the cross-entropy of each example.
pub(crate) fn losses(logits: Tensor<2>, classes: Tensor<1, Int>) -> Tensor<1> {
    let rows = logits.dims()[0];
    log_softmax(logits, 1).gather(1, classes.reshape([rows, 1])).neg().reshape([rows])
}

/// Makes steps on batches, the last of which has fewer rows, and returns the losses.
pub(crate) fn train<M: Classifier>(
    strategy: &Strategy,
    model: &Model<M>,
    optimizer: &Optimizer,
    steps: usize,
) -> Vec<f32> {
    let (device, ranks) = (Device::flex().autodiff(), strategy.tensor_parallel());
    (0..steps)
        .map(|step| {
            let rows = if step + 1 == steps { 9 } else { 24 };
            // The ranks of a tensor group have the same examples.
            let parts = cut(&batch(step, rows), strategy.num_replicas_in_sync(), &device);
            let parts = PerReplica::new(parts.into_iter().flat_map(|part| vec![part; ranks]).collect());
            let losses = strategy.run_with((model, optimizer, parts), |context, (model, optimizer, (x, y))| {
                let loss = context.average_loss(model.losses(x, y), rows);
                optimizer.minimize(context, &loss)?;
                Ok::<_, Error>(loss.into_scalar::<f32>())
            });
            let losses = losses.unwrap();
            assert!(
                losses.values().chunks(ranks).all(|of_replica| of_replica.iter().all(|loss| *loss == of_replica[0]))
            );
            losses.values().iter().step_by(ranks).sum()
        })
        .collect()
}

pub(crate) fn scope<M: Classifier>(strategy: &Strategy) -> Model<M> {
    strategy.scope(M::new).unwrap()
}

/// Returns the elements of every whole variable.
pub(crate) fn wholes<M: Classifier>(strategy: &Strategy, model: &Model<M>) -> Vec<(String, Vec<f32>)> {
    let elements =
        |variable: &distribute_burn::Variable| variable.whole(strategy).unwrap().to_elements::<f32>().unwrap();
    model.variables().iter().map(|variable| (variable.name().to_owned(), elements(variable))).collect()
}

/// Returns the elements of every variable on one replica.
pub(crate) fn values<M: Classifier>(model: &Model<M>, local: usize) -> Vec<(String, Vec<f32>)> {
    let elements = |variable: &distribute_burn::Variable| variable.components()[local].to_elements::<f32>().unwrap();
    model.variables().iter().map(|variable| (variable.name().to_owned(), elements(variable))).collect()
}

/// Returns random numbers for an input that no test compares.
pub(crate) fn noise(device: &Device) -> Tensor<2> {
    drawing(|| Tensor::random([8, INPUTS], Distribution::Default, device))
}

pub(crate) fn assert_close(a: &[f32], b: &[f32], tolerance: f32, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (at, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= tolerance * (1.0 + a.abs()), "{what} at {at}: {a} and {b}");
    }
}
