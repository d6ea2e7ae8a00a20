//! Steps and failures on a simulated plugin, which computes nothing.

use std::time::Duration;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{Device, IndexingUpdateOp, Int, Tensor};
use distribute_burn::{
    BinaryCrossentropy, BurnContext, BurnStrategy, Error, Fit, FromProbabilities, Items, Loss, Model, Optimizer, Sgd,
    SparseCategoricalCrossentropy, Trainer,
};
use distribute_input::{Array, Dataset};
use distribute_strategy::{Request, Strategy, TpuStrategy};
use distribute_train::checkpoint::CheckpointManager;
use distribute_train::metrics::Metrics;
use simulated_pjrt::{Fail, Script, install};

/// `UNAVAILABLE` of PJRT.
const UNAVAILABLE: i32 = 14;

/// Returns a strategy of two replicas on a plugin of this script, whose steps may take 2 s.
fn simulated(folder: &tempfile::TempDir, script: Script) -> Strategy {
    let plugin = install(folder.path(), &Script { devices: 2, ..script }).unwrap();
    let timeout = Duration::from_secs(2);
    TpuStrategy::builder().plugin(plugin.path()).replicas(2).timeout(timeout).build().unwrap()
}

fn built(strategy: &Strategy) -> (Model<Linear>, Optimizer) {
    let model = strategy.scope(|device| LinearConfig::new(3, 2).init(device)).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    (model, optimizer)
}

fn step(strategy: &Strategy, (model, optimizer): &(Model<Linear>, Optimizer)) -> distribute_burn::Result<()> {
    let x = Array::new([4, 3], vec![0.5; 12]).unwrap();
    let losses = strategy.run_step((model, optimizer), |context, (model, optimizer)| {
        let loss = context.average_loss(model.forward(context.tensor::<2>(&x)?).square(), 8);
        optimizer.minimize(context, &loss)?;
        Ok::<Tensor<1>, Error>(loss)
    });
    losses.map(drop)
}

#[test]
fn a_device_that_is_lost_in_a_step_leaves_a_model_that_a_checkpoint_repairs() {
    let folder = tempfile::tempdir().unwrap();
    // The second step fails on the second device.
    let lost = Fail::new("execute", 4, UNAVAILABLE, "device 1 was lost");
    let strategy = simulated(&folder, Script { event_errors: vec![lost], ..Script::default() });
    let of = built(&strategy);
    step(&strategy, &of).unwrap();
    let mut checkpoints = CheckpointManager::new(folder.path().join("checkpoints"));
    checkpoints.save(&strategy, 1, &[&of.0, &of.1], &()).unwrap();
    checkpoints.finish().unwrap();
    let error = step(&strategy, &of).unwrap_err().to_string();
    assert!(error.contains("device 1 was lost"), "{error}");
    // Its variables were donated to the step that failed.
    let error = step(&strategy, &of).unwrap_err();
    assert!(matches!(error, Error::Optim(distribute_optim::Error::Torn)), "{error:?}");
    let restored: Option<(u64, ())> = checkpoints.restore(&strategy, &[&of.0, &of.1]).unwrap();
    assert_eq!(restored, Some((1, ())));
    step(&strategy, &of).unwrap();
}

#[test]
fn a_step_that_does_not_end_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let strategy = simulated(&folder, Script { stuck: vec!["execute".to_owned()], ..Script::default() });
    let error = step(&strategy, &built(&strategy)).unwrap_err().to_string();
    assert!(error.contains("did not finish within 2.0s"), "{error}");
}

#[test]
fn a_step_that_does_not_start_leaves_the_model_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let refused = Fail::new("PJRT_LoadedExecutable_Execute", 2, UNAVAILABLE, "not now");
    let strategy = simulated(&folder, Script { fail: vec![refused], ..Script::default() });
    let of = built(&strategy);
    step(&strategy, &of).unwrap();
    let error = step(&strategy, &of).unwrap_err().to_string();
    assert!(error.contains("not now"), "{error}");
    step(&strategy, &of).unwrap();
}

#[test]
fn a_program_that_is_refused_is_an_error_in_the_words_of_the_plugin() {
    let folder = tempfile::tempdir().unwrap();
    let refused = Fail::new("PJRT_Client_Compile", 1, 3, "no such operation");
    let strategy = simulated(&folder, Script { fail: vec![refused], ..Script::default() });
    let of = built(&strategy);
    let error = step(&strategy, &of).unwrap_err().to_string();
    assert!(error.contains("no such operation"), "{error}");
    step(&strategy, &of).unwrap();
}

#[test]
fn requests_are_heard_after_the_next_step() {
    let folder = tempfile::tempdir().unwrap();
    let strategy = simulated(&folder, Script::default());
    let of = built(&strategy);
    strategy.request(Request::Leave);
    assert!(!strategy.take_request(Request::Leave));
    step(&strategy, &of).unwrap();
    assert!(strategy.take_request(Request::Leave) && !strategy.take_request(Request::Leave));
}

#[test]
fn a_step_that_fails_is_noticed_though_a_later_one_does_not_start() {
    let folder = tempfile::tempdir().unwrap();
    let lost = Fail::new("execute", 3, UNAVAILABLE, "device 0 was lost");
    let strategy = simulated(&folder, Script { event_errors: vec![lost], ..Script::default() });
    let new = |device: &Device| LinearConfig::new(3, 3).init(device);
    let sgd = |model: &Model<Linear>| Sgd::new(0.1).build(model);
    let forward: fn(&Linear, Tensor<2>) -> Tensor<2> = |model, x| model.forward(x);
    let loss = SparseCategoricalCrossentropy;
    let mut trainer =
        Trainer::<_, Tensor<2>, Tensor<1, Int>, 2>::new(&strategy, new, forward, sgd, loss, Metrics::new()).unwrap();
    let batches = |classes: Vec<u32>| {
        let x = Array::new([classes.len(), 3], vec![0.5; 3 * classes.len()]).unwrap();
        Dataset::from_tensor_slices((x, Array::from(classes))).batch(4)
    };
    // The second step fails on a device, and the third has a wrong class.
    let data = batches(vec![0, 1, 2, 0, 0, 1, 2, 0, 0, 1, 9, 0]);
    let error = trainer.fit(&data, Fit::epochs(1).steps_per_execution(3)).unwrap_err();
    assert!(matches!(error, Error::Class { class: 9, .. }), "{error}");
    let error = trainer.fit(&batches(vec![0; 4]), Fit::epochs(1)).unwrap_err();
    assert!(matches!(error, Error::Optim(distribute_optim::Error::Torn)), "{error}");
}

#[test]
fn losses_of_probabilities_are_lowered_with_their_gradients() {
    let folder = tempfile::tempdir().unwrap();
    let strategy = simulated(&folder, Script::default());
    let of = built(&strategy);
    let (x, y) = (Array::new([4, 3], vec![0.5; 12]).unwrap(), Array::from(vec![0u32, 1, 1, 0]));
    let losses = strategy.run_step((&of.0, &of.1), |context, (model, optimizer)| {
        let outputs = model.forward(context.tensor::<2>(&x)?);
        let classes = FromProbabilities(SparseCategoricalCrossentropy)
            .per_example(softmax(outputs.clone(), 1), context.int_tensor::<1>(&y)?)?;
        let targets = outputs.clone().zeros_like();
        let binary = FromProbabilities(BinaryCrossentropy).per_example(sigmoid(outputs), targets)?;
        let loss = context.average_loss(classes + binary, 8);
        optimizer.minimize(context, &loss)?;
        Ok::<Tensor<1>, Error>(loss)
    });
    losses.unwrap();
}

/// A mean of embeddings, of as many numbers as there are classes.
#[derive(Module, Debug)]
struct Bag {
    embedding: Embedding,
}

impl Bag {
    fn forward(&self, words: Tensor<2, Int>) -> Tensor<2> {
        let rows = words.dims()[0];
        self.embedding.forward(words).mean_dim(1).reshape([rows, 3])
    }
}

#[test]
fn a_word_that_is_not_in_the_vocabulary_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let strategy = simulated(&folder, Script::default());
    let model = strategy.scope(|device| Bag { embedding: EmbeddingConfig::new(5, 3).init(device) }).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let step = |words: Vec<i64>| {
        let words = Array::new([2, 4], words).unwrap();
        let losses = strategy.run_step((&model, &optimizer), |context, (model, optimizer)| {
            // Of each row the words after the first.
            let words = context.int_tensor::<2>(&words)?.slice([0..2, 1..4]);
            let loss = context.average_loss(model.forward(words).square(), 4);
            optimizer.minimize(context, &loss)?;
            Ok::<Tensor<1>, Error>(loss)
        });
        losses.map(drop)
    };
    step(vec![9, 0, 1, 4, 9, 2, 4, 0]).unwrap();
    for (words, outside) in [(vec![0, 0, 1, 4, 0, 2, 5, 0], 5), (vec![0, 0, 1, 4, 0, 2, -1, 0], -1)] {
        let error = step(words).unwrap_err();
        assert!(matches!(error, Error::Word { at: 4, index, vocabulary: 5 } if index == outside), "{error}");
    }
}

#[test]
fn an_index_that_is_not_in_the_dimension_is_named() {
    type Picks = fn(Tensor<2>, Tensor<2, Int>) -> Tensor<2>;
    let folder = tempfile::tempdir().unwrap();
    let strategy = simulated(&folder, Script::default());
    let picks: [(Picks, usize, usize); 4] = [
        (|table, words| table.gather(1, words), 1, 3),
        (|table, words| table.clone().scatter(0, words, table, IndexingUpdateOp::Add), 0, 5),
        (|table, words| table.select(1, words.flatten(0, 1)), 1, 3),
        (
            |table, words| {
                table.clone().select_assign(0, words.flatten(0, 1), table.repeat(&[3, 1]), IndexingUpdateOp::Add)
            },
            0,
            5,
        ),
    ];
    for (pick, dim, len) in picks {
        let model = strategy.scope(|device| Bag { embedding: EmbeddingConfig::new(5, 3).init(device) }).unwrap();
        let optimizer = Sgd::new(0.1).build(&model).unwrap();
        let step = |words: Vec<i64>| {
            let words = Array::new([5, 3], words).unwrap();
            let losses = strategy.run_step((&model, &optimizer), |context, (model, optimizer)| {
                let words = context.int_tensor::<2>(&words)?;
                let loss = context.average_loss(pick(model.embedding.weight.val(), words).square(), 4);
                optimizer.minimize(context, &loss)?;
                Ok::<Tensor<1>, Error>(loss)
            });
            losses.map(drop)
        };
        let inside = [2, 0, 1, 2, 0].repeat(3);
        step(inside.clone()).unwrap();
        for outside in [len as i64, -1] {
            let error = step([&inside[..2], &[outside], &inside[3..]].concat()).unwrap_err();
            let Error::Place { at, index, dim: of, len: most } = error else { panic!("{error}") };
            assert_eq!((at, index, of, most), (2, outside, dim, len));
        }
    }
}

/// Makes rows as long as the longest of the replica's own.
struct Ragged;

impl Batcher<Vec<i64>, (Tensor<2, Int>, Tensor<1, Int>)> for Ragged {
    fn batch(&self, items: Vec<Vec<i64>>, device: &Device) -> (Tensor<2, Int>, Tensor<1, Int>) {
        let longest = items.iter().map(Vec::len).max().unwrap_or(0);
        let words: Vec<i64> =
            items.iter().flat_map(|item| (0..longest).map(|at| *item.get(at).unwrap_or(&0))).collect();
        let words = Tensor::<1, Int>::from_ints(&words[..], device).reshape([items.len(), longest]);
        (words, Tensor::zeros([items.len()], device))
    }
}

#[test]
fn rows_of_other_shapes_on_another_replica_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let strategy = simulated(&folder, Script::default());
    // Two rows and one, and two each; a replica without rows has no shape to differ in.
    for (lengths, told) in [
        (&[12, 12, 10][..], Some("rows of shape [12] and I32 on replica 0, but of [10] and I32 on replica 1")),
        (&[12, 11, 10, 10], Some("rows of shape [12] and I32 on replica 0, but of [10] and I32 on replica 1")),
        (&[12, 12, 12], None),
        (&[12], None),
    ] {
        let dataset = InMemDataset::new(lengths.iter().map(|length| vec![1i64; *length]).collect());
        let data = Items::new(dataset, Ragged, |indices| indices.batch(4));
        let mut trainer = Trainer::new(
            &strategy,
            |device| Bag { embedding: EmbeddingConfig::new(5, 3).init(device) },
            Bag::forward,
            |model| Sgd::new(0.1).build(model),
            SparseCategoricalCrossentropy,
            Metrics::new(),
        )
        .unwrap();
        let outcome = trainer.fit(&data, Fit::epochs(1));
        match told {
            // The plugin computes nothing, so the outputs are refused later.
            None => assert!(!outcome.unwrap_err().to_string().contains("rows of shape")),
            Some(told) => {
                let error = outcome.unwrap_err();
                assert!(matches!(error, Error::Program { .. }) && error.to_string().contains(told), "{error}");
                let error = trainer.evaluate(&data).unwrap_err().to_string();
                assert!(error.contains(told), "{error}");
            }
        }
    }
}
