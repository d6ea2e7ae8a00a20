//! Models that cannot process a batch without rows, with fewer examples than replicas in the last batch: training,
//! evaluation and prediction give the results of one device.

use candle_core::{D, DType, Device, Module, Tensor};
use candle_nn::{BatchNorm, BatchNormConfig, Embedding, Linear, ModuleT, VarBuilder, batch_norm, embedding, linear};
use distribute_candle::{
    CandleContext, CandleStrategy, Error, Fit, Model, Sgd, SparseCategoricalCrossentropy, SyncBatchNorm, Trainer,
    cross_entropy_per_example, sync_batch_norm,
};
use distribute_collectives::ReduceOp;
use distribute_input::Dataset;
use distribute_strategy::{CentralStorageStrategy, MirroredStrategy, Strategy};
use distribute_train::metrics::{Accuracy, Metrics};
use distribute_values::{Aggregation, Assignment, Axis, HostTensor, PerReplica, TensorStorage, VariableOptions};

const WORDS: usize = 6;
const WIDTH: usize = 8;

/// One layer of attention over short texts. Reshapes, maxima and means refuse a batch without rows.
struct Transformer {
    words: Embedding,
    query: Linear,
    key: Linear,
    value: Linear,
    head: Linear,
}

impl Transformer {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Transformer> {
        let square = |name: &str| linear(WIDTH, WIDTH, vb.pp(name));
        Ok(Transformer {
            words: embedding(WORDS, WIDTH, vb.pp("words"))?,
            query: square("query")?,
            key: square("key")?,
            value: square("value")?,
            head: linear(WIDTH, 3, vb.pp("head"))?,
        })
    }

    fn heads(x: &Tensor) -> candle_core::Result<Tensor> {
        let (rows, length, _) = x.dims3()?;
        // The size of this dimension cannot be inferred for a tensor without elements.
        x.reshape((rows, length, 2, ()))?.transpose(1, 2)?.contiguous()
    }
}

impl Module for Transformer {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.words.forward(x)?;
        let [query, key, value] = [&self.query, &self.key, &self.value].map(|layer| layer.forward(&x));
        let [query, key, value] = [Self::heads(&query?)?, Self::heads(&key?)?, Self::heads(&value?)?];
        let scores = (query.matmul(&key.t()?.contiguous()?)? / 2.0)?;
        let mixed = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&value)?;
        let (rows, _, length, _) = mixed.dims4()?;
        let mixed = mixed.transpose(1, 2)?.reshape((rows, length, ()))?;
        self.head.forward(&(x + mixed)?.mean(1)?)
    }
}

/// Texts of four words, and their classes.
fn texts(count: usize) -> (Tensor, Tensor) {
    let words: Vec<u32> = (0..count * 4).map(|i| (i * 7 % 11 % WORDS) as u32).collect();
    let classes: Vec<u32> = (0..count).map(|i| (i % 3) as u32).collect();
    (
        Tensor::from_vec(words, (count, 4), &Device::Cpu).unwrap(),
        Tensor::from_vec(classes, count, &Device::Cpu).unwrap(),
    )
}

fn devices(count: usize) -> Vec<String> {
    (0..count).map(|index| format!("CPU:{index}")).collect()
}

fn mirrored(replicas: usize) -> Strategy {
    MirroredStrategy::builder().devices(devices(replicas)).build().unwrap()
}

fn strategies() -> Vec<Strategy> {
    let central = CentralStorageStrategy::builder().compute_devices(devices(3)).build().unwrap();
    vec![mirrored(2), mirrored(4), central]
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn close(ours: &[f32], theirs: &[f32], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (a, b) in ours.iter().zip(theirs) {
        assert!((a - b).abs() < 4e-5 * b.abs().max(1.0), "{what}: {a} and {b}");
    }
}

fn same_variables<M>(ours: &Model<M>, theirs: &Model<M>, what: &str) {
    for (ours, theirs) in ours.variables().iter().zip(theirs.variables()) {
        for component in ours.components() {
            close(&flat(component), &flat(&theirs.components()[0]), &format!("{what}: {}", ours.name()));
        }
    }
}

/// Trains; returns the model, each epoch's loss and accuracy, the scores and the predictions.
fn fitted(strategy: &Strategy, at_once: usize) -> (Trainer<Plain>, Vec<f64>, Vec<f64>, Vec<Vec<f32>>) {
    // Batches of eight, eight and one.
    let (x, y) = texts(17);
    let data = Dataset::from_tensor_slices((x.clone(), y)).batch(8);
    let metrics = Metrics::new().with(Accuracy);
    let build = |vb: VarBuilder<'static>| Ok(Plain(Transformer::new(vb)?));
    let mut trainer = Trainer::new(
        strategy,
        build,
        |model| Sgd::new(0.1).momentum(0.9).build(model),
        SparseCategoricalCrossentropy,
        metrics,
    )
    .unwrap();
    let history = trainer.fit(&data, Fit::epochs(3).steps_per_execution(at_once)).unwrap();
    let history = [history.of("loss"), history.of("accuracy")].concat();
    let scores = trainer.evaluate(&data).unwrap().into_iter().map(|(_, score)| score).collect();
    let predictions = trainer.predict(&Dataset::from_tensor_slices(x).batch(8)).unwrap().to_vec2().unwrap();
    (trainer, history, scores, predictions)
}

struct Plain(Transformer);

impl ModuleT for Plain {
    fn forward_t(&self, x: &Tensor, _: bool) -> candle_core::Result<Tensor> {
        self.0.forward(x)
    }
}

#[test]
fn a_transformer_is_fitted_evaluated_and_predicts_as_on_one_device() {
    let (one, history, scores, predictions) = fitted(&mirrored(1), 1);
    for strategy in strategies() {
        for at_once in [1, 3] {
            let (trainer, own_history, own_scores, own_predictions) = fitted(&strategy, at_once);
            let what = strategy.describe();
            let narrow = |all: &[f64]| all.iter().map(|x| *x as f32).collect::<Vec<f32>>();
            close(&narrow(&own_history), &narrow(&history), &what);
            close(&narrow(&own_scores), &narrow(&scores), &what);
            assert_eq!(own_predictions.len(), 17, "{what}");
            close(&own_predictions.concat(), &predictions.concat(), &what);
            same_variables(trainer.model(), one.model(), &what);
        }
    }
}

/// Trains in a custom loop; returns the model and the losses of its steps.
fn looped<M: Sync>(
    strategy: &Strategy,
    build: impl Fn(VarBuilder<'static>) -> candle_core::Result<M>,
    forward: impl Fn(&M, &Tensor) -> candle_core::Result<Tensor> + Sync,
) -> (Model<M>, Vec<f32>) {
    let model = strategy.scope(build).unwrap();
    let optimizer = Sgd::new(0.1).momentum(0.9).build(&model).unwrap();
    let data = strategy.distribute_dataset(&Dataset::from_tensor_slices(texts(17)).batch(8)).unwrap();
    let mut losses = Vec::new();
    for _ in 0..2 {
        for batch in &data {
            let of_step = strategy
                .run_with((&model, &optimizer, batch.unwrap()), |context, (model, optimizer, (x, y))| {
                    assert!(x.dim(0)? > 0, "a replica got an empty batch");
                    let loss = context.average_loss(&cross_entropy_per_example(&forward(model, &x)?, &y)?, 8)?;
                    optimizer.minimize(context, &loss)?;
                    Ok::<_, Error>(loss.detach())
                })
                .unwrap();
            losses.push(strategy.reduce(ReduceOp::Sum, &of_step, Axis::None).unwrap().to_scalar().unwrap());
        }
    }
    (model, losses)
}

#[test]
fn a_loop_of_ones_own_trains_a_transformer_as_on_one_device() {
    let build = |vb: VarBuilder<'static>| Transformer::new(vb);
    let forward = |model: &Transformer, x: &Tensor| model.forward(x);
    let (one, expected) = looped(&mirrored(1), build, forward);
    for strategy in strategies() {
        let (model, losses) = looped(&strategy, build, forward);
        close(&losses, &expected, &strategy.describe());
        same_variables(&model, &one, &strategy.describe());
    }
}

/// Normalisation over all replicas, whose statistics are those of the global batch.
struct Synchronised(Embedding, SyncBatchNorm, Linear);

impl Synchronised {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Synchronised> {
        let norm = sync_batch_norm(WIDTH, BatchNormConfig::default(), vb.pp("norm"))?;
        Ok(Synchronised(embedding(WORDS, WIDTH, vb.pp("words"))?, norm, linear(WIDTH, 3, vb.pp("head"))?))
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        // The normalisation is on the right of the sum.
        let x = self.0.forward(x)?.sum(1)?;
        self.2.forward(&(&x + self.1.forward_t(&x, true)?)?)
    }
}

#[test]
fn synchronised_normalisation_leaves_replicas_without_examples_out() {
    let forward = |model: &Synchronised, x: &Tensor| model.forward(x);
    let (one, expected) = looped(&mirrored(1), Synchronised::new, forward);
    for strategy in strategies() {
        let (model, losses) = looped(&strategy, Synchronised::new, forward);
        close(&losses, &expected, &strategy.describe());
        same_variables(&model, &one, &strategy.describe());
    }
}

/// candle's normalisation over each replica's own batch, on tensors of more than two dimensions: a batch of one row has
/// no variance.
struct Own(Embedding, BatchNorm, Linear);

impl Own {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Own> {
        let norm = batch_norm(WIDTH, BatchNormConfig::default(), vb.pp("norm"))?;
        Ok(Own(embedding(WORDS, WIDTH, vb.pp("words"))?, norm, linear(WIDTH, 3, vb.pp("head"))?))
    }
}

impl ModuleT for Own {
    fn forward_t(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        self.2.forward(&self.1.forward_t(&self.0.forward(x)?.sum(1)?, train)?)
    }
}

#[test]
fn candles_normalisation_never_keeps_what_is_no_number() {
    // Batches of twelve on two replicas: the last one has four rows and none. One row, or one row and none, have no
    // variance.
    for (examples, batch, replicas) in [(16, 12, 2), (13, 12, 2), (7, 6, 2), (9, 8, 4)] {
        let strategy = mirrored(replicas);
        let metrics = Metrics::new().with(Accuracy);
        let build = |vb: VarBuilder<'static>| Own::new(vb);
        let optimizer = |model: &Model<Own>| Sgd::new(0.1).build(model);
        let mut trainer = Trainer::new(&strategy, build, optimizer, SparseCategoricalCrossentropy, metrics).unwrap();
        let data = Dataset::from_tensor_slices(texts(examples)).batch(batch);
        trainer.fit(&data, Fit::epochs(2)).unwrap();
        for variable in trainer.model().variables() {
            let all: Vec<f32> = variable.components().iter().flat_map(flat).collect();
            assert!(all.iter().all(|x| x.is_finite()), "{}: {all:?}", variable.name());
        }
        assert!(trainer.evaluate(&data).unwrap().iter().all(|(_, score)| score.is_finite()));
    }
}

#[test]
fn a_replica_without_examples_keeps_its_statistics_and_its_on_read_variables() {
    let strategy = mirrored(2);
    let model = strategy.scope(Own::new).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let options = VariableOptions::on_read(Aggregation::Sum);
    let seen = strategy.variable("seen", &HostTensor::scalar(0.0), options).unwrap();
    let statistics = |replica: usize| -> Vec<Vec<f32>> {
        let statistics = model.variables().iter().filter(|variable| !variable.is_trainable());
        statistics.map(|variable| flat(&variable.components()[replica])).collect()
    };
    let (x, y) = texts(4);
    let batch = || PerReplica::new(vec![(x.clone(), y.clone()); 2]);
    let step = |batch: PerReplica<(Tensor, Tensor)>| {
        strategy.run_with((&model, &optimizer, batch), |context, (model, optimizer, (x, y))| {
            seen.assign(context.call_context(), Assignment::Add, &HostTensor::scalar(x.dim(0)? as f64))?;
            let per_example = cross_entropy_per_example(&model.forward_t(&x, true)?, &y)?;
            optimizer.minimize(context, &context.average_loss(&per_example, 8)?)
        })
    };
    step(batch()).unwrap();
    let before = [statistics(0), statistics(1)];
    step(batch().with_examples(&[true, false])).unwrap();
    assert_ne!(statistics(0), before[0]);
    assert_eq!(statistics(1), before[1]);
    let all = strategy.with_call_context(|place| seen.read_value(place)).unwrap().to_elements::<f64>().unwrap();
    assert_eq!(all, [12.0]);
}

/// The deviation of a batch's outputs, whose derivative is infinite for a single row, and that of a sample, which a
/// single row does not have.
fn deviation(y: &Tensor, of_sample: bool) -> candle_core::Result<Tensor> {
    let squares = y.broadcast_sub(&y.mean_keepdim(0)?)?.sqr()?.sum(0)?;
    // 0 / 0 for a single row of a sample.
    let count = Tensor::new(y.dim(0)? as f32 - if of_sample { 1.0 } else { 0.0 }, y.device())?;
    squares.broadcast_div(&count)?.sqrt()?.sum_all()
}

#[test]
fn a_replica_without_examples_adds_nothing_where_its_row_has_an_infinite_derivative() {
    let (x, _) = texts(4);
    for (of_sample, accumulates) in [(false, false), (true, false), (false, true)] {
        let trained = |strategy: &Strategy, batch: PerReplica<Tensor>| -> Vec<Vec<f32>> {
            let model = strategy.scope(Transformer::new).unwrap();
            let optimizer = Sgd::new(0.1).build(&model).unwrap();
            for _ in 0..2 {
                let step = strategy.run_with((&model, &optimizer, batch.clone()), |context, (model, optimizer, x)| {
                    let loss = context.weigh(&deviation(&model.forward(&x)?, of_sample)?)?;
                    assert!(loss.to_scalar::<f32>()?.is_finite());
                    if accumulates {
                        optimizer.accumulate(context, &loss)?;
                    }
                    optimizer.minimize(context, &loss)
                });
                step.unwrap();
            }
            model.variables().iter().map(|variable| flat(&variable.components()[0])).collect()
        };
        let both = PerReplica::new(vec![x.clone(), x.narrow(0, 0, 1).unwrap()]).with_examples(&[true, false]);
        let expected = trained(&mirrored(1), PerReplica::new(vec![x.clone()]));
        for (got, expected) in trained(&mirrored(2), both).iter().zip(&expected) {
            close(got, expected, &format!("of a sample: {of_sample}, accumulated: {accumulates}"));
        }
    }
}

#[test]
fn a_loss_that_nobody_has_weighed_is_refused() {
    let strategy = mirrored(2);
    let model = strategy.scope(Transformer::new).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let (x, y) = texts(2);
    let batch = || PerReplica::new(vec![(x.clone(), y.clone()); 2]).with_examples(&[true, false]);
    let step = |weigh: bool| {
        strategy.run_with((&model, &optimizer, batch()), |context, (model, optimizer, (x, y))| {
            // A loss as a program may compute it itself.
            let mut loss = (cross_entropy_per_example(&model.forward(&x)?, &y)?.sum_all()? / 2.0)?;
            if weigh {
                loss = context.weigh(&loss)?;
            }
            optimizer.minimize(context, &loss)
        })
    };
    let error = step(false).unwrap_err().to_string();
    assert!(error.contains("replica 1 has no examples") && error.contains("ReplicaContext::weight"), "{error}");
    step(true).unwrap();
    // Two batches of which a replica has examples in only one have no common weight.
    let mixed = (batch(), PerReplica::new(vec![0; 2]).with_examples(&[true, true]));
    let error = strategy.run_with(mixed, |_, _| Ok::<(), Error>(())).unwrap_err().to_string();
    assert!(error.contains("replica 1 has examples in one batch"), "{error}");
}

#[test]
fn a_loss_that_is_cut_off_from_layers_that_reduce_is_named_at_once() {
    let strategy = mirrored(2);
    let model = strategy.scope(Synchronised::new).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let (x, y) = texts(2);
    let began = std::time::Instant::now();
    let batch = PerReplica::new(vec![(x, y); 2]).with_examples(&[true, false]);
    let outcome = strategy.run_with((&model, &optimizer, batch), |context, (model, optimizer, (x, y))| {
        let loss = cross_entropy_per_example(&model.forward(&x)?, &y)?.sum_all()?;
        optimizer.minimize(context, &(loss * context.weight())?)
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("CandleContext::weigh"), "{error}");
    assert!(began.elapsed() < std::time::Duration::from_secs(30));
}

#[test]
fn who_asks_for_empty_batches_gets_them() {
    let strategy = mirrored(4);
    let data = strategy.distribute_dataset(&Dataset::from_tensor_slices(texts(5)).batch(4)).unwrap();
    let rows = |data: &distribute_strategy::DistributedDataset<(Tensor, Tensor)>| -> Vec<usize> {
        let last = data.iter().last().unwrap().unwrap();
        last.iter().map(|(x, _)| x.dim(0).unwrap()).collect()
    };
    assert_eq!(rows(&data), [1, 1, 1, 1]);
    let joined = strategy.gather(&data.iter().last().unwrap().unwrap(), 0).unwrap();
    assert_eq!((joined.0.dims(), joined.0.dtype()), (&[1, 4][..], DType::U32));
    let data = data.with_empty_batches();
    assert_eq!(rows(&data), [1, 0, 0, 0]);
    // The models above cannot process such a batch.
    let model = strategy.scope(Transformer::new).unwrap();
    let last = data.iter().last().unwrap().unwrap();
    assert!(model.first().forward(&last.values()[3].0).is_err());
}
