//! A model, its data and its training.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::activation::tanh;
use burn::tensor::{Device, Tensor};
use burn::train::logger::{InMemoryMetricLogger, MetricLogger};
use burn::train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{LossMetric, MetricDefinition, NumericEntry};
use burn::train::{
    InferenceStep, Learner, LearningResult, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use distribute_cluster::Membership;
use distribute_strategy::{
    FullyShardedStrategy, MirroredStrategy, MultiWorkerMirroredStrategy, Strategy, get_replica_context,
};
use distribute_testkit::Ports;
use parking_lot::Mutex;

pub(crate) const INPUTS: usize = 6;

/// An input that the model does not accept.
pub(crate) const POISON: f32 = 666.0;

/// One example: inputs, and the target.
pub(crate) type Row = ([f32; INPUTS], f32);

#[derive(Module, Debug)]
pub(crate) struct Net {
    hidden: Linear,
    norm: Option<BatchNorm>,
    head: Linear,
    /// No loss depends on it.
    spare: Linear,
    #[module(skip)]
    pub(crate) states: States,
}

/// The number of tensors in the state of each replica's optimizer, after its last step.
pub(crate) type States = Arc<Mutex<BTreeMap<usize, usize>>>;

impl Net {
    pub(crate) fn new(has_norm: bool) -> Net {
        Net::seeded(has_norm, 11)
    }

    pub(crate) fn seeded(has_norm: bool, seed: u64) -> Net {
        // burn's generator of random numbers is one for the whole process.
        static GENERATOR: Mutex<()> = Mutex::new(());
        let _generator = GENERATOR.lock();
        let device = Device::flex().autodiff();
        device.seed(seed);
        let net = Net {
            hidden: LinearConfig::new(INPUTS, 8).init(&device),
            norm: has_norm.then(|| BatchNormConfig::new(8).init(&device)),
            head: LinearConfig::new(8, 1).init(&device),
            spare: LinearConfig::new(2, 2).init(&device),
            states: States::default(),
        };
        // Initializes the parameters, which burn does when they are used first.
        let _ = net.clone().into_record();
        net
    }

    pub(crate) fn with_frozen_hidden_layer(self) -> Net {
        Net { hidden: self.hidden.no_grad(), ..self }
    }

    /// Returns the group of the hidden layer's parameters, by their ids.
    pub(crate) fn hidden_ids(&self) -> ParamGroup {
        ParamGroup::ids_from_module(self.hidden.clone())
    }

    pub(crate) fn running_mean(&self) -> Vec<f32> {
        self.norm.as_ref().unwrap().running_mean.value_sync().into_data().try_to_vec().unwrap()
    }

    pub(crate) fn hidden_layer(&self) -> Vec<f32> {
        self.hidden.weight.val().into_data().try_to_vec().unwrap()
    }

    pub(crate) fn spare_layer(&self) -> Vec<f32> {
        self.spare.weight.val().into_data().try_to_vec().unwrap()
    }

    fn forward(&self, (x, targets): (Tensor<2>, Tensor<2>)) -> RegressionOutput {
        assert!(x.clone().max().into_scalar::<f32>() < POISON, "a poisoned row");
        let x = self.hidden.forward(x);
        let x = self.norm.as_ref().map_or(x.clone(), |norm| norm.forward(x));
        let output = self.head.forward(tanh(x));
        let loss = MseLoss::new().forward(output.clone(), targets.clone(), Reduction::Mean);
        RegressionOutput::new(loss, output, targets)
    }
}

impl TrainStep for Net {
    type Input = (Tensor<2>, Tensor<2>);
    type Output = RegressionOutput;

    fn step(&self, batch: Self::Input) -> TrainOutput<RegressionOutput> {
        let output = self.forward(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }

    fn optimize(self, optimizer: &mut ModuleOptimizer, rate: ModuleLearningRate, gradients: GradientsParams) -> Net {
        let net = optimizer.step(rate, self, gradients);
        if let Some(context) = get_replica_context() {
            net.states.lock().insert(context.replica_id(), optimizer.to_record().len());
        }
        net
    }
}

impl InferenceStep for Net {
    type Input = (Tensor<2>, Tensor<2>);
    type Output = RegressionOutput;

    fn step(&self, batch: Self::Input) -> RegressionOutput {
        self.forward(batch)
    }
}

pub(crate) struct Rows;

impl Batcher<Row, (Tensor<2>, Tensor<2>)> for Rows {
    fn batch(&self, rows: Vec<Row>, device: &Device) -> (Tensor<2>, Tensor<2>) {
        let x: Vec<f32> = rows.iter().flat_map(|row| row.0).collect();
        let y: Vec<f32> = rows.iter().map(|row| row.1).collect();
        let tensor = |values: &[f32]| Tensor::<1>::from_floats(values, device);
        (tensor(&x).reshape([rows.len(), INPUTS]), tensor(&y).reshape([rows.len(), 1]))
    }
}

/// Returns examples of a function that the model can learn.
pub(crate) fn rows(count: usize) -> Vec<Row> {
    let value = |at: usize| ((at * 104_729 + 7919) % 1009) as f32 / 504.5 - 1.0;
    let row = |row: usize| {
        let x: [f32; INPUTS] = std::array::from_fn(|column| value(row * INPUTS + column));
        (x, (x[0] - x[1]).sin() + 0.5 * x[2])
    };
    (0..count).map(row).collect()
}

pub(crate) type Loader = Arc<dyn DataLoader<(Tensor<2>, Tensor<2>)>>;

pub(crate) fn loader(rows: Vec<Row>, batch: usize) -> Loader {
    DataLoaderBuilder::new(Rows).batch_size(batch).build(InMemDataset::new(rows))
}

/// Returns rows in the order in which one replica with large batches makes the same steps as `parts` replicas, each
/// with its part of the rows and batches of `batch`.
pub(crate) fn in_order_of_steps(rows: &[Row], parts: usize, batch: usize) -> Vec<Row> {
    let start = |part: usize| rows.len() * part / parts;
    let parts: Vec<&[Row]> = (0..parts).map(|part| &rows[start(part)..start(part + 1)]).collect();
    let steps = parts.iter().map(|part| part.len().div_ceil(batch)).max().unwrap();
    let step = |step: usize| parts.iter().flat_map(move |part| part.iter().skip(step * batch).take(batch));
    (0..steps).flat_map(step).copied().collect()
}

/// The log of a training: the values of every metric, by split, in order.
#[derive(Clone, Default)]
pub(crate) struct Log {
    values: Arc<Mutex<Vec<(String, f64)>>>,
    store: Arc<Mutex<InMemoryMetricLogger>>,
}

impl Log {
    pub(crate) fn of(&self, split: &str) -> Vec<f64> {
        self.values.lock().iter().filter(|(of, _)| of == split).map(|(_, value)| *value).collect()
    }
}

impl MetricLogger for Log {
    fn log(&mut self, update: MetricsUpdate, epoch: usize, split: &Split) {
        let entries = update.entries_numeric.iter().filter_map(|update| update.numeric_entry.as_ref());
        let is_step = |entry: &&NumericEntry| !matches!(entry, NumericEntry::Final(_));
        let mut values = self.values.lock();
        values.extend(entries.filter(is_step).map(|entry| (split.to_string(), entry.current())));
        self.store.lock().log(update, epoch, split);
    }

    fn read_numeric(&mut self, name: &str, epoch: usize, split: &Split) -> Result<Vec<NumericEntry>, String> {
        self.store.lock().read_numeric(name, epoch, split)
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        self.store.lock().log_metric_definition(definition);
    }

    fn log_epoch_summary(&mut self, summary: EpochSummary) {
        self.store.lock().log_epoch_summary(summary);
    }
}

/// Returns a training of three epochs that writes no files, and where it logs.
pub(crate) fn training(folder: &Path, train: Loader, valid: Loader) -> (SupervisedTraining<Net>, Log) {
    let log = Log::default();
    let training = SupervisedTraining::new(folder, train, valid)
        .with_application_logger(None)
        .with_metric_logger(log.clone())
        .metrics((LossMetric::new(),))
        .num_epochs(3);
    (training, log)
}

/// Returns a learner that does not learn, so that only running statistics change.
pub(crate) fn lazy(net: Net) -> Learner<Net> {
    Learner::new(net, AdamWConfig::new().init(), 0.0)
}

/// Returns a learner with an optimizer that has a state and makes weights smaller, and a learning rate that changes
/// with every step.
pub(crate) fn learner(net: Net) -> Learner<Net> {
    let scheduler = CosineAnnealingLrSchedulerConfig::new(0.03, 100).init().unwrap();
    Learner::new(net, AdamWConfig::new().with_weight_decay(0.1).init(), scheduler)
}

/// Returns a learner whose optimizer has a state already, of a step on some rows.
pub(crate) fn experienced(net: Net) -> Learner<Net> {
    let mut optimizer: ModuleOptimizer = AdamWConfig::new().with_weight_decay(0.1).init();
    let batch = Rows.batch(rows(8), &Device::flex().autodiff());
    let gradients = TrainStep::step(&net, batch).grads;
    let net = optimizer.step(0.03, net, gradients);
    Learner::new(net, optimizer, CosineAnnealingLrSchedulerConfig::new(0.03, 100).init().unwrap())
}

pub(crate) fn mirrored(replicas: usize) -> Strategy {
    MirroredStrategy::builder().devices((0..replicas).map(|cpu| format!("CPU:{cpu}"))).build().unwrap()
}

/// Shards parameters of at least five elements: all but the bias of the head, and the spare layer.
pub(crate) fn sharded(replicas: usize, over: usize) -> Strategy {
    let builder = FullyShardedStrategy::builder().devices((0..replicas).map(|cpu| format!("CPU:{cpu}")));
    builder.shard_over(over).mirror_below(5).build().unwrap()
}

/// Runs a job of several workers with one thread for each, and returns their results.
pub(crate) fn on_workers<R: Send>(workers: u32, replicas: usize, body: impl Fn(Strategy, u32) -> R + Sync) -> Vec<R> {
    let devices = || (0..replicas).map(|cpu| format!("CPU:{cpu}"));
    on_members(workers, |membership, rank| {
        let strategy = MultiWorkerMirroredStrategy::builder().devices(devices()).membership(membership);
        body(strategy.build().unwrap(), rank)
    })
}

/// Runs a job of several workers that shard.
pub(crate) fn on_sharded_workers<R: Send>(workers: u32, body: impl Fn(Strategy, u32) -> R + Sync) -> Vec<R> {
    on_members(workers, |membership, rank| {
        let strategy = FullyShardedStrategy::builder().mirror_below(5).membership(membership);
        body(strategy.build().unwrap(), rank)
    })
}

fn on_members<R: Send>(workers: u32, body: impl Fn(Membership, u32) -> R + Sync) -> Vec<R> {
    let address = Ports::reserve(1).unwrap().addresses().remove(0);
    let worker = |rank: u32| body(Membership::new(rank, workers, address.clone()).unwrap(), rank);
    std::thread::scope(|threads| {
        let (worker, threads) = (&worker, &threads);
        let all: Vec<_> = (0..workers).map(|rank| threads.spawn(move || worker(rank))).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Returns the values of all parameters and running statistics.
pub(crate) fn values(net: &impl Module) -> Vec<f32> {
    struct Values(Vec<f32>);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.val().into_data().try_to_vec::<f32>().unwrap());
        }
    }
    let mut values = Values(Vec::new());
    net.visit(&mut values);
    values.0
}

pub(crate) fn error_of(result: &LearningResult<Net>) -> String {
    result.error.as_ref().map_or_else(|| "no error".to_owned(), ToString::to_string)
}

pub(crate) fn assert_close(a: &[f32], b: &[f32], tolerance: f32) {
    assert_eq!(a.len(), b.len());
    for (at, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= tolerance * (1.0 + a.abs()), "at {at}: {a} and {b}");
    }
}

pub(crate) fn assert_all_close(a: &[f64], b: &[f64], tolerance: f64) {
    assert_eq!(a.len(), b.len());
    for (at, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= tolerance * (1.0 + a.abs()), "at {at}: {a} and {b}");
    }
}
