//! A small model, its data, and functions that train it.
#![allow(dead_code, reason = "each test program uses a part of it")]

use candle_core::{Device, Module, Tensor};
use candle_nn::{Linear, VarBuilder, linear, linear_no_bias};
use distribute_candle::{
    Adam, CandleContext, CandleStrategy, Error, Model, Optimizer, Sharded, cross_entropy_per_example,
};
use distribute_cluster::{ClusterSpec, SimpleResolver, TaskType};
use distribute_parameter_server::{Program, Server};
use distribute_strategy::{MirroredStrategy, Strategy};
use distribute_testkit::Ports;
use distribute_values::PerReplica;

pub(crate) struct Mlp {
    pub(crate) first: Linear,
    pub(crate) second: Linear,
}

impl Mlp {
    pub(crate) fn new(vb: VarBuilder<'_>) -> candle_core::Result<Mlp> {
        Ok(Mlp { first: linear(8, 16, vb.pp("first"))?, second: linear(16, 3, vb.pp("second"))? })
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.second.forward(&self.first.forward(x)?.tanh()?)
    }
}

pub(crate) fn mirrored(replicas: usize) -> Strategy {
    let devices: Vec<String> = (0..replicas).map(|index| format!("CPU:{index}")).collect();
    MirroredStrategy::builder().devices(devices).build().unwrap()
}

pub(crate) fn data(examples: usize) -> (Tensor, Tensor) {
    let x: Vec<f32> = (0..examples * 8).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let y: Vec<u32> = (0..examples).map(|i| (i * 7 % 3) as u32).collect();
    (Tensor::from_vec(x, (examples, 8), &Device::Cpu).unwrap(), Tensor::from_vec(y, examples, &Device::Cpu).unwrap())
}

pub(crate) fn parts(replicas: usize, examples: usize) -> PerReplica<(Tensor, Tensor)> {
    let (x, y) = data(examples);
    let each = examples.div_ceil(replicas);
    PerReplica::new(
        (0..replicas)
            .map(|r| {
                let start = (r * each).min(examples);
                let len = each.min(examples - start);
                (x.narrow(0, start, len).unwrap(), y.narrow(0, start, len).unwrap())
            })
            .collect(),
    )
}

pub(crate) fn values(model: &Model<Mlp>, replica: usize) -> Vec<Vec<f32>> {
    model.variables().iter().map(|v| v.components()[replica].flatten_all().unwrap().to_vec1().unwrap()).collect()
}

pub(crate) fn train(strategy: &Strategy, steps: usize, examples: usize) -> (Model<Mlp>, Vec<f64>) {
    let model = strategy.scope(Mlp::new).unwrap();
    let optimizer = Adam::new(0.01).build(&model).unwrap();
    let batch = parts(strategy.num_replicas_in_sync(), examples);
    let mut losses = Vec::new();
    for _ in 0..steps {
        let loss = strategy
            .run_with((&model, &optimizer, batch.clone()), |context, (model, optimizer, (x, y))| {
                let per_example = cross_entropy_per_example(&model.forward(&x)?, &y)?;
                let loss = context.average_loss(&per_example, examples)?;
                optimizer.minimize(context, &loss)?;
                Ok::<_, Error>(f64::from(loss.to_scalar::<f32>()?))
            })
            .unwrap();
        losses.push(loss.iter().sum());
    }
    (model, losses)
}

pub(crate) fn step(strategy: &Strategy, model: &Model<Mlp>, optimizer: &Optimizer) {
    let batch = parts(strategy.num_replicas_in_sync(), 12);
    strategy
        .run_with((model, optimizer, batch), |context, (model, optimizer, (x, y))| {
            let per_example = cross_entropy_per_example(&model.forward(&x)?, &y)?;
            optimizer.minimize(context, &context.average_loss(&per_example, 12)?)
        })
        .unwrap();
}

/// Trains with any optimizer. Returns the copies of all replicas and the losses.
pub(crate) fn train_with(
    replicas: usize,
    build: impl Fn(&Model<Mlp>) -> distribute_candle::Result<Optimizer>,
) -> (Vec<Vec<f32>>, Vec<f64>) {
    let strategy = mirrored(replicas);
    let model = strategy.scope(Mlp::new).unwrap();
    let optimizer = build(&model).unwrap();
    let batch = parts(replicas, 12);
    let mut losses = Vec::new();
    for _ in 0..10 {
        let loss = strategy
            .run_with((&model, &optimizer, batch.clone()), |context, (model, optimizer, (x, y))| {
                let loss = context.average_loss(&cross_entropy_per_example(&model.forward(&x)?, &y)?, 12)?;
                optimizer.minimize(context, &loss)?;
                Ok::<_, Error>(f64::from(loss.to_scalar::<f32>()?))
            })
            .unwrap();
        losses.push(loss.iter().sum());
    }
    ((0..replicas).map(|replica| values(&model, replica).concat()).collect(), losses)
}

/// Width of the models of blocks; their matrices are sharded and their biases are not.
pub(crate) const WIDTH: usize = 16;

/// Returns a block of two linear layers. The second layers of blocks 0 and 1 are one, of the path `tied`.
pub(crate) fn residual(vb: &VarBuilder<'_>, index: usize) -> candle_core::Result<Sharded<(Linear, Linear)>> {
    Sharded::new(vb.pp(format!("blocks.{index}")), |own| {
        let out = match index {
            0 | 1 => linear_no_bias(WIDTH, WIDTH, vb.pp("tied"))?,
            _ => linear(WIDTH, WIDTH, own.pp("out"))?,
        };
        Ok((linear(WIDTH, WIDTH, own.pp("in"))?, out))
    })
}

/// Starts parameter servers, and then workers, as threads of this process; returns the chief's cluster and the tasks.
pub(crate) fn serve(servers: usize, workers: usize, program: &Program) -> (SimpleResolver, Vec<Server>) {
    let ports = Ports::reserve(servers + workers).unwrap();
    let addresses = ports.addresses();
    drop(ports);
    let spec = ClusterSpec::new()
        .with_job(TaskType::Ps, addresses[..servers].to_vec())
        .and_then(|spec| spec.with_job(TaskType::Worker, addresses[servers..].to_vec()))
        .unwrap();
    let task = |kind, index| SimpleResolver {
        spec: spec.clone(),
        task_type: Some(kind),
        task_id: Some(index),
        ..SimpleResolver::default()
    };
    let tasks =
        (0..servers).map(|index| (TaskType::Ps, index)).chain((0..workers).map(|index| (TaskType::Worker, index)));
    let start = |(kind, index)| Server::start(&task(kind, index as u32), program.clone()).unwrap();
    let tasks = tasks.map(start).collect();
    (task(TaskType::Chief, 0), tasks)
}
