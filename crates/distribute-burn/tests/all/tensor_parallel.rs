//! Tensor parallelism: models whose layers are split among ranks train as the unsplit ones on one replica.

mod operations;
mod refusals;
mod sharded;
mod states;

use std::time::Duration;

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::softmax;
use burn::tensor::{Device, Int, Tensor};
use distribute_burn::{
    Adam, Clip, ColumnParallelLinear, ColumnParallelOptions, Error, LossScale, Model, Optimizer, RowParallelLinear,
    RowParallelOptions, Sgd, VocabParallelEmbedding, column_parallel_linear, row_parallel_linear,
    vocab_parallel_cross_entropy_per_example, vocab_parallel_embedding,
};
use distribute_strategy::{CommunicationOptions, MirroredStrategy, Strategy};
use distribute_train::checkpoint::{Checkpointed, Snapshot};

use crate::common::*;

/// Tolerance of parameters after up to 20 steps in f32, as in the conformance suite.
const TOLERANCE: f32 = 4e-5;

const VOCABULARY: usize = 24;
const WIDTH: usize = 16;
/// The width of a head of attention.
const HEAD: usize = 4;

/// A mesh of replicas with this many tensor ranks each.
fn mesh(replicas: usize, ranks: usize) -> Strategy {
    let devices: Vec<String> = (0..replicas * ranks).map(|index| format!("CPU:{index}")).collect();
    // Several buckets, of which the first are reduced while backward goes through the layers that are split.
    let communication = CommunicationOptions::default().timeout(Duration::from_secs(20)).bytes_per_pack(512);
    MirroredStrategy::builder().devices(devices).tensor_parallel(ranks).communication(communication).build().unwrap()
}

/// Trains in the first of each pair of arrangements, restores its checkpoint in the second, and trains on in both.
fn checkpoints_move(pairs: &[(Strategy, Strategy)]) {
    for (from, to) in pairs {
        let model = scope::<Block>(from);
        let optimizer = Adam::new(0.003).build(&model).unwrap();
        train(from, &model, &optimizer, 3);
        let mut snapshot = Snapshot::new(3);
        model.save(from, &mut snapshot).unwrap();
        optimizer.save(from, &mut snapshot).unwrap();
        let parameters = wholes(from, &model);
        let losses = train(from, &model, &optimizer, 3);
        let restored = scope::<Block>(to);
        let optimizer = Adam::new(0.5).build(&restored).unwrap();
        restored.load(to, &snapshot).unwrap();
        optimizer.load(to, &snapshot).unwrap();
        assert_eq!(wholes(to, &restored), parameters);
        // Also the slots are those of the whole variables.
        assert_close(&train(to, &restored, &optimizer, 3), &losses, TOLERANCE, "losses");
    }
}

fn split_columns() -> ColumnParallelOptions {
    ColumnParallelOptions::default().gather_output(false)
}

fn joined_rows() -> RowParallelOptions {
    RowParallelOptions::default().input_is_parallel(true)
}

/// The forward pass of a model of two pairs of linear layers, split or not.
macro_rules! mlp {
    ($model:expr, $x:expr) => {{
        let x = $model.down.forward($model.up.forward($x).tanh());
        $model.scattered.forward($model.gathered.forward(x).tanh())
    }};
}

/// The forward pass of a transformer's block, split or not.
macro_rules! block {
    ($model:expr, $x:expr) => {{
        let x = $model.words.forward(tokens($x));
        let normed = $model.norm.forward(x.clone());
        let [query, key, value] = &$model.qkv;
        let heads = attention(query.forward(normed.clone()), key.forward(normed.clone()), value.forward(normed));
        let x = x + $model.out.forward(heads);
        // Once more, with queries, keys and values in one matrix.
        let [query, key, value] = thirds($model.fused.forward(x.clone()));
        let x = x + $model.joined.forward(attention(query, key, value));
        let x = x.clone() + $model.scattered.forward($model.gathered.forward(x).tanh());
        $model.head.forward(mean(x))
    }};
}

/// Linear layers in both of their forms.
#[derive(Module, Debug)]
struct SplitMlp {
    up: ColumnParallelLinear,
    down: RowParallelLinear,
    gathered: ColumnParallelLinear,
    scattered: RowParallelLinear,
}

impl Classifier for SplitMlp {
    fn new(device: &Device) -> SplitMlp {
        seeded(device, |device| SplitMlp {
            up: column_parallel_linear(INPUTS, 32, split_columns(), device),
            down: row_parallel_linear(32, WIDTH, joined_rows(), device),
            gathered: column_parallel_linear(WIDTH, 24, ColumnParallelOptions::default(), device),
            scattered: row_parallel_linear(24, CLASSES, RowParallelOptions::default(), device),
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        mlp!(self, x)
    }
}

/// The same model of burn's own layers.
#[derive(Module, Debug)]
struct PlainMlp {
    up: Linear,
    down: Linear,
    gathered: Linear,
    scattered: Linear,
}

impl Classifier for PlainMlp {
    fn new(device: &Device) -> PlainMlp {
        seeded(device, |device| PlainMlp {
            up: LinearConfig::new(INPUTS, 32).init(device),
            down: LinearConfig::new(32, WIDTH).init(device),
            gathered: LinearConfig::new(WIDTH, 24).init(device),
            scattered: LinearConfig::new(24, CLASSES).init(device),
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        mlp!(self, x)
    }
}

/// A transformer's block with an embedding and logits in parts.
#[derive(Module, Debug)]
struct Block {
    words: VocabParallelEmbedding,
    norm: LayerNorm,
    qkv: [ColumnParallelLinear; 3],
    out: RowParallelLinear,
    fused: ColumnParallelLinear,
    joined: RowParallelLinear,
    gathered: ColumnParallelLinear,
    scattered: RowParallelLinear,
    head: ColumnParallelLinear,
}

impl Classifier for Block {
    fn new(device: &Device) -> Block {
        let column = ColumnParallelOptions::default();
        // The gradient of a key's bias is zero but for rounding, which Adam would enlarge.
        let bare = split_columns().bias(false);
        seeded(device, |device| Block {
            words: vocab_parallel_embedding(VOCABULARY, WIDTH, device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            qkv: std::array::from_fn(|_| column_parallel_linear(WIDTH, WIDTH, bare, device)),
            out: row_parallel_linear(WIDTH, WIDTH, joined_rows(), device),
            fused: column_parallel_linear(WIDTH, 3 * WIDTH, bare.blocks(3), device),
            joined: row_parallel_linear(WIDTH, WIDTH, joined_rows().bias(false), device),
            gathered: column_parallel_linear(WIDTH, 3 * WIDTH, column.blocks(3), device),
            scattered: row_parallel_linear(3 * WIDTH, WIDTH, RowParallelOptions::default(), device),
            head: column_parallel_linear(WIDTH, CLASSES, split_columns(), device),
        })
    }

    /// Returns this rank's part of the logits.
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        block!(self, x)
    }

    fn losses(&self, x: Tensor<2>, y: Tensor<1, Int>) -> Tensor<1> {
        vocab_parallel_cross_entropy_per_example(self.forward(x), y).unwrap()
    }
}

/// The same block of burn's own layers.
#[derive(Module, Debug)]
struct PlainBlock {
    words: Embedding,
    norm: LayerNorm,
    qkv: [Linear; 3],
    out: Linear,
    fused: Linear,
    joined: Linear,
    gathered: Linear,
    scattered: Linear,
    head: Linear,
}

impl Classifier for PlainBlock {
    fn new(device: &Device) -> PlainBlock {
        seeded(device, |device| PlainBlock {
            words: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            qkv: std::array::from_fn(|_| LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device)),
            out: LinearConfig::new(WIDTH, WIDTH).init(device),
            fused: LinearConfig::new(WIDTH, 3 * WIDTH).with_bias(false).init(device),
            joined: LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device),
            gathered: LinearConfig::new(WIDTH, 3 * WIDTH).init(device),
            scattered: LinearConfig::new(3 * WIDTH, WIDTH).init(device),
            head: LinearConfig::new(WIDTH, CLASSES).init(device),
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        block!(self, x)
    }
}

fn tokens(x: Tensor<2>) -> Tensor<2, Int> {
    x.abs().mul_scalar(15.0).clamp(0.0, (VOCABULARY - 1) as f64).int()
}

/// Attention of the heads that lie in the last axis.
fn attention(query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> Tensor<3> {
    let [rows, positions, width] = query.dims();
    let heads = |part: Tensor<3>| part.reshape([rows, positions, width / HEAD, HEAD]).swap_dims(1, 2);
    let scores = heads(query).matmul(heads(key).swap_dims(2, 3)).div_scalar((HEAD as f64).sqrt());
    softmax(scores, 3).matmul(heads(value)).swap_dims(1, 2).reshape([rows, positions, width])
}

fn thirds(x: Tensor<3>) -> [Tensor<3>; 3] {
    let width = x.dims()[2] / 3;
    [0, 1, 2].map(|at| x.clone().narrow(2, at * width, width))
}

/// The mean over positions.
fn mean(x: Tensor<3>) -> Tensor<2> {
    let [rows, _, width] = x.dims();
    x.mean_dim(1).reshape([rows, width])
}

/// Checks that two models have the same variables with values that are close.
fn close(got: &[(String, Vec<f32>)], expected: &[(String, Vec<f32>)], tolerance: f32, what: &str) {
    assert_eq!(got.len(), expected.len());
    for ((name, got), (same, expected)) in got.iter().zip(expected) {
        assert_eq!(name, same);
        assert_close(got, expected, tolerance, &format!("{what}: {name}"));
    }
}

fn first_step<P: Classifier, S: Classifier>(parameters: usize, split: usize) {
    let strategy = one();
    let plain = scope::<P>(&strategy);
    let start = wholes(&strategy, &plain);
    let losses = train(&strategy, &plain, &Sgd::new(1.0).build(&plain).unwrap(), 1);
    let after = wholes(&strategy, &plain);
    assert!(after.iter().zip(&start).all(|((_, after), (_, start))| after != start));
    for ranks in [1, 2, 4] {
        let strategy = mesh(1, ranks);
        let model = scope::<S>(&strategy);
        assert_eq!(wholes(&strategy, &model), start, "on {ranks} ranks at the start");
        assert_eq!(model.num_parameters(), parameters);
        assert_eq!(
            model.variables().iter().filter(|variable| variable.tensor_split().is_some()).count(),
            if ranks == 1 { 0 } else { split }
        );
        // With a learning rate of 1, the difference between the steps is that of the gradients.
        let got = train(&strategy, &model, &Sgd::new(1.0).build(&model).unwrap(), 1);
        assert_close(&got, &losses, 2e-6, "losses");
        close(&wholes(&strategy, &model), &after, 2e-6, &format!("after a step on {ranks} ranks"));
    }
}

#[test]
fn a_split_mlp_starts_as_the_unsplit_one_and_makes_the_same_step() {
    first_step::<PlainMlp, SplitMlp>(16 * 32 + 32 + 32 * 16 + 16 + 16 * 24 + 24 + 24 * 4 + 4, 6);
}

#[test]
fn a_split_block_starts_as_the_unsplit_one_and_makes_the_same_step() {
    let of_attention = 3 * 16 * 16 + 16 * 16 + 16 + 16 * 48 + 16 * 16;
    let of_linears = (16 * 48 + 48) + (48 * 16 + 16) + 16 * 4 + 4;
    first_step::<PlainBlock, Block>(24 * 16 + 2 * 16 + of_attention + of_linears, 12);
}

type Build<M> = fn(&Model<M>) -> Result<Optimizer, Error>;

fn trains_as_one_replica<M: Classifier>(meshes: &[(usize, usize)], steps: usize, builds: &[(&str, Build<M>)]) {
    for (what, build) in builds {
        let strategy = one();
        let expected = scope::<M>(&strategy);
        let optimizer = build(&expected).unwrap();
        let losses = train(&strategy, &expected, &optimizer, steps);
        let (expected, norm) = (wholes(&strategy, &expected), optimizer.gradient_norm());
        for (replicas, ranks) in meshes {
            let strategy = mesh(*replicas, *ranks);
            let model = scope::<M>(&strategy);
            let optimizer = build(&model).unwrap().audit_every(7);
            let got = train(&strategy, &model, &optimizer, steps);
            let what = format!("{what}, {replicas} × {ranks}");
            assert_close(&got, &losses, TOLERANCE, &what);
            close(&wholes(&strategy, &model), &expected, TOLERANCE, &what);
            model.audit(&strategy).unwrap();
            match (optimizer.gradient_norm(), norm) {
                (Some(got), Some(norm)) => assert!((got - norm).abs() < 1e-4 * norm, "{what}: {got} {norm}"),
                (got, norm) => assert_eq!(got, norm),
            }
        }
    }
}

#[test]
fn a_split_mlp_trains_as_one_replica() {
    trains_as_one_replica::<SplitMlp>(
        &[(1, 2), (2, 2), (1, 4)],
        20,
        &[
            ("adam", |model| Adam::new(0.01).build(model)),
            ("sharded state", |model| Adam::new(0.01).build(model)?.zero1()),
            ("sgd", |model| Sgd::new(0.1).momentum(0.9).build(model)),
            ("clipped", |model| Sgd::new(0.1).build(model)?.clip(Clip::GlobalNorm(0.05))),
            ("each clipped", |model| Sgd::new(0.1).build(model)?.clip(Clip::Norm(0.02))),
        ],
    );
}

#[test]
fn a_split_block_trains_as_one_replica() {
    trains_as_one_replica::<Block>(
        &[(1, 2), (2, 2)],
        10,
        &[
            ("adam", |model| Adam::new(0.003).build(model)),
            ("sgd", |model| Sgd::new(0.1).build(model)),
            ("clipped and scaled", |model| {
                let optimizer = Adam::new(0.003).build(model)?.scale_losses(LossScale::dynamic().interval(3))?;
                optimizer.clip(Clip::GlobalNorm(0.05))
            }),
        ],
    );
}
