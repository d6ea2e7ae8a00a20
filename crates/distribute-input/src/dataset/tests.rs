use std::sync::atomic::AtomicUsize;

use proptest::prelude::*;

use super::*;
use crate::{Array, Element, Result};

type Example = (Array<i64>, Array<f32>);

fn values(data: DatasetIter<Array<i64>>) -> Vec<Vec<i64>> {
    data.map(|item| item.unwrap().as_slice().to_vec()).collect()
}

fn flat(data: &Dataset<Array<i64>>) -> Vec<i64> {
    values(data.iter()).concat()
}

fn examples(count: usize) -> Dataset<Example> {
    let wide = (0..count * 2).map(|value| value as f32).collect();
    Dataset::from_tensor_slices((
        Array::from((0..count as i64).collect::<Vec<_>>()),
        Array::new([count, 2], wide).unwrap(),
    ))
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Take(usize),
    Skip(usize),
    Shard(usize, usize),
    Repeat(usize),
    Shuffle(usize, u64),
    ShuffleOnce(usize, u64),
    Cache,
    Prefetch(usize),
}

impl Step {
    fn any() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0_usize..30).prop_map(Step::Take),
            (0_usize..10).prop_map(Step::Skip),
            (1_usize..4, 0_usize..4).prop_map(|(count, index)| Step::Shard(count, index % count)),
            (0_usize..4).prop_map(Step::Repeat),
            (1_usize..30, 0_u64..3).prop_map(|(buffer, seed)| Step::Shuffle(buffer, seed)),
            (1_usize..30, 0_u64..3).prop_map(|(buffer, seed)| Step::ShuffleOnce(buffer, seed)),
            Just(Step::Cache),
            (0_usize..3).prop_map(Step::Prefetch),
        ]
    }

    fn on(self, data: Dataset<Example>) -> Dataset<Example> {
        match self {
            Step::Take(count) => data.take(count),
            Step::Skip(count) => data.skip(count),
            Step::Shard(count, index) => data.shard(count, index),
            Step::Repeat(times) => data.repeat(times),
            Step::Shuffle(buffer, seed) => data.shuffle(buffer, seed),
            Step::ShuffleOnce(buffer, seed) => data.shuffle_once(buffer, seed),
            Step::Cache => data.cache(),
            Step::Prefetch(depth) => data.prefetch(depth),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn row_numbers_give_what_single_elements_give(
        count in 0_usize..25, before in prop::collection::vec(Step::any(), 0..4), size in 1_usize..8, exact: bool,
        after in prop::collection::vec(Step::any(), 0..3),
    ) {
        let build = |source: Dataset<Example>| {
            let data = before.iter().fold(source, |data, step| step.on(data));
            let data = if exact { data.batch_exact(size) } else { data.batch(size) };
            after.iter().fold(data, |data, step| step.on(data))
        };
        // After a map the rows are unknown, so every element is made and stacked by itself.
        let (fast, slow) = (build(examples(count)), build(examples(count).map(Ok)));
        prop_assert_eq!(fast.cardinality(), slow.cardinality());
        prop_assert_eq!(fast.batch_size(), Some(size));
        for _ in 0..2 {
            let fast: Vec<_> = fast.iter().collect::<Result<_>>().unwrap();
            let slow: Vec<_> = slow.iter().collect::<Result<_>>().unwrap();
            prop_assert_eq!(&fast, &slow);
            prop_assert_eq!(build(examples(count)).cardinality(), Cardinality::Known(fast.len()));
        }
    }

    #[test]
    fn shuffles_are_permutations_within_their_window(count in 0_i64..60, buffer in 1_usize..80, seed: u64, epoch: u64) {
        let data = Dataset::range(0..count).shuffle(buffer, seed);
        let order = values(data.iter_epoch(epoch)).concat();
        for (position, value) in order.iter().enumerate() {
            prop_assert!((*value as usize) < position + buffer, "{} came at {}", value, position);
        }
        prop_assert_eq!(&order, &values(data.iter_epoch(epoch)).concat());
        let mut sorted = order;
        sorted.sort();
        prop_assert_eq!(sorted, (0..count).collect::<Vec<_>>());
    }
}

#[test]
fn each_pass_is_shuffled_anew_and_the_next_run_alike() {
    let run = || {
        let data = Dataset::range(0..50).shuffle(50, 7);
        [flat(&data), flat(&data.clone())]
    };
    let [first, second] = run();
    assert_ne!(first, second);
    assert_eq!(run(), [first.clone(), second]);
    assert_ne!(flat(&Dataset::range(0..50).shuffle(50, 8)), first);
}

#[test]
fn shuffle_once_keeps_its_order() {
    let data = Dataset::range(0..50).shuffle_once(50, 7);
    assert_eq!(flat(&data), flat(&data));
    assert_ne!(flat(&data), (0..50).collect::<Vec<_>>());
}

#[test]
fn a_full_buffer_shuffles_uniformly() {
    let data = Dataset::range(0..4).shuffle(4, 1);
    let mut first = [0; 4];
    for _ in 0..4000 {
        first[flat(&data)[0] as usize] += 1;
    }
    assert!(first.iter().all(|count| (850..1150).contains(count)), "{first:?}");
}

#[test]
fn repetitions_are_the_passes_one_after_the_other() {
    let shuffled = || Dataset::range(0..20).shuffle(20, 3);
    let once = shuffled();
    let passes = [flat(&once), flat(&once), flat(&once), flat(&once)].concat();
    let twice = shuffled().repeat(2);
    assert_eq!([flat(&twice), flat(&twice)].concat(), passes);
    let forever = shuffled().repeat_forever();
    assert_eq!(flat(&forever.take(60)), passes[..60]);
}

#[test]
fn repeating_nothing_ends() {
    let data = Dataset::from_generator(std::iter::empty::<Result<Array<i64>, crate::BoxError>>).repeat_forever();
    assert_eq!(data.iter().count(), 0);
}

/// A tensor that refuses to be stacked: batches of rows in memory must not stack.
#[derive(Clone)]
struct Unstackable(Array<i64>);
struct Local;

impl Element<Local> for Unstackable {
    fn stack(_: &[Self]) -> Result<Self> {
        Err(Error::library("stack", "rows were stacked one by one"))
    }
    fn rows(&self) -> Result<usize> {
        self.0.rows()
    }
    fn row(&self, index: usize) -> Result<Self> {
        self.0.row(index).map(Unstackable)
    }
    fn slice(&self, rows: std::ops::Range<usize>) -> Result<Self> {
        self.0.slice(rows).map(Unstackable)
    }
    fn gather(&self, rows: &[usize]) -> Result<Self> {
        self.0.gather(rows).map(Unstackable)
    }
    fn concat(items: &[Self]) -> Result<Self> {
        Array::concat(&items.iter().map(|item| item.0.clone()).collect::<Vec<_>>()).map(Unstackable)
    }
    fn spec(&self) -> Vec<crate::ElementSpec> {
        self.0.spec()
    }
}

#[test]
fn rows_in_memory_are_gathered_not_stacked() {
    let source = Dataset::from_tensor_slices(Unstackable(Array::from((0..30).collect::<Vec<_>>())));
    let data = source.clone().shuffle(30, 1).repeat(2).batch(8).prefetch(2);
    assert_eq!(data.iter().map(|batch| batch.unwrap().0.as_slice().len()).sum::<usize>(), 60);
    let stacked = source.map(Ok).batch(8).iter().next().unwrap().map(|_| ()).unwrap_err();
    assert_eq!(stacked.to_string(), "stack of dataset elements: rows were stacked one by one");
}

#[test]
fn batches_in_order_are_views() {
    let source = Array::from((0..6_i64).collect::<Vec<_>>());
    let data = Dataset::from_tensor_slices(source.clone()).skip(2).batch(2);
    let first = data.iter().next().unwrap().unwrap();
    assert!(std::ptr::eq(&first.as_slice()[0], &source.as_slice()[2]));
}

#[test]
fn cache_reads_its_source_once() {
    let reads = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&reads);
    let data = Dataset::range(0..10)
        .map(move |item| {
            counted.fetch_add(1, Ordering::SeqCst);
            Ok(item)
        })
        .shuffle(10, 1)
        .cache();
    let early: Vec<_> = data.iter().take(3).map(|item| *item.unwrap().item().unwrap()).collect();
    let overlapping: Vec<_> = data.iter().zip(data.iter()).map(|(one, two)| (one.unwrap(), two.unwrap())).collect();
    let whole = flat(&data);
    assert_eq!(early, whole[..3]);
    assert!(overlapping.iter().all(|(one, two)| one == two));
    assert_eq!(flat(&data.clone()), whole);
    assert_eq!(reads.load(Ordering::SeqCst), 10);
}

#[test]
fn a_shuffle_after_a_cache_goes_on_shuffling() {
    for source in [Dataset::range(0..40), Dataset::range(0..40).map(Ok)] {
        let data = source.cache().shuffle(40, 5);
        assert_ne!(flat(&data), flat(&data));
    }
}

#[test]
fn an_error_empties_the_cache() {
    let reads = Arc::new(AtomicUsize::new(0));
    let data = Dataset::range(0..4)
        .map(move |item| match reads.fetch_add(1, Ordering::SeqCst) {
            2 => Err("once".into()),
            _ => Ok(item),
        })
        .cache();
    assert!(data.iter().nth(2).unwrap().is_err());
    assert_eq!(flat(&data), [0, 1, 2, 3]);
}

#[test]
fn the_first_error_ends_a_pass() {
    let failing = || {
        Dataset::range(0..9).map(|item| match item.item() {
            Some(4) => Err("four is refused".into()),
            _ => Ok(item),
        })
    };
    for data in [
        failing(),
        failing().prefetch(2),
        failing().cache(),
        failing().skip(6),
        failing().shard(2, 1),
        failing().shuffle(2, 1),
        failing().batch(3),
        failing().filter(|_| Ok(false)),
        failing().repeat_forever(),
        failing().concatenate(Dataset::range(0..1)),
        failing().zip(Dataset::range(0..4)).map(|pair| Ok(pair.0)),
        failing().enumerate().map(|pair| Ok(pair.1)),
    ] {
        let mut pass = data.iter();
        let error = pass.by_ref().find_map(Result::err).expect("the error reaches the reader");
        assert_eq!(error.to_string(), "the map of a dataset failed: four is refused");
        assert!(pass.next().is_none());
    }
}

#[test]
fn mistakes_in_a_description_are_reported_by_each_pass() {
    let unequal = Dataset::from_tensor_slices((Array::from(vec![1, 2]), Array::from(vec![1])));
    assert!(matches!(unequal.iter().next(), Some(Err(Error::UnequalRows { .. }))));
    assert!(matches!(
        Dataset::from_tensor_slices(Array::scalar(1)).batch(2).iter().next(),
        Some(Err(Error::Scalar { .. }))
    ));
    for (data, word) in [
        (Dataset::range(0..3).batch(0), "batch was given 0 as its size"),
        (Dataset::range(0..3).shuffle(0, 1).take(2).map(Ok), "shuffle was given 0 as its buffer size"),
        (Dataset::range(0..3).shard(2, 2), "shard 2 of 2"),
        (Dataset::range(0..3).shard(0, 0).cache(), "shard 0 of 0"),
        (Dataset::range(0..3).concatenate(Dataset::range(0..3).batch_exact(0)), "batch_exact was given 0"),
    ] {
        for _ in 0..2 {
            let items: Vec<_> = data.iter().collect();
            assert_eq!(items.len(), 1);
            let text = items[0].as_ref().unwrap_err().to_string();
            assert!(text.contains(word), "{text}");
        }
    }
}

#[test]
fn cardinality_and_batch_size_are_known_where_they_can_be() {
    use Cardinality::{Infinite, Known, Unknown};
    let data = || Dataset::range(0..10);
    let batched = || data().batch(4);
    for (dataset, cardinality, batch_size) in [
        (data(), Known(10), None),
        (Dataset::range(5..5), Known(0), None),
        (batched(), Known(3), Some(4)),
        (data().batch_exact(4), Known(2), Some(4)),
        (batched().repeat_forever(), Infinite, Some(4)),
        (batched().repeat_forever().take(7).skip(2), Known(5), Some(4)),
        (batched().map(Ok).cache().prefetch(2).shuffle(3, 1), Known(3), Some(4)),
        (data().filter(|_| Ok(true)), Unknown, None),
        (data().filter(|_| Ok(true)).batch(4), Unknown, Some(4)),
        (data().shard(3, 1), Known(3), None),
        (batched().concatenate(data().batch(5)), Known(5), None),
        (batched().concatenate(batched()), Known(6), Some(4)),
        (data().take(0).repeat_forever(), Known(0), None),
    ] {
        assert_eq!((dataset.cardinality(), dataset.batch_size()), (cardinality, batch_size), "{dataset:?}");
        if let Known(count) = cardinality {
            assert_eq!(dataset.iter().count(), count);
        }
    }
    assert_eq!(batched().zip(batched().repeat_forever()).cardinality(), Known(3));
    assert_eq!(batched().zip(batched()).batch_size(), Some(4));
    assert_eq!(batched().enumerate().batch_size(), None);
}

#[test]
fn datasets_are_put_together() {
    let pairs = Dataset::range(0..3).zip(Dataset::from_iter(["a", "b"].map(|text| Array::scalar(text.to_owned()))));
    let pairs: Vec<_> = pairs.batch(2).iter().collect::<Result<_>>().unwrap();
    assert_eq!(pairs.len(), 1);
    assert_eq!((pairs[0].0.as_slice(), pairs[0].1.as_slice()), (&[0, 1][..], &["a".to_owned(), "b".to_owned()][..]));
    let odd = Dataset::range(0..6).filter(|item| Ok(item.item().ok_or("no scalar")? % 2 == 1));
    assert_eq!(flat(&odd.clone().concatenate(Dataset::range(9..11))), [1, 3, 5, 9, 10]);
    let numbered: Vec<_> = odd.enumerate().iter().map(|item| *item.unwrap().0.item().unwrap()).collect();
    assert_eq!(numbered, [0, 1, 2]);
}

#[test]
fn ranges_reach_their_ends() {
    assert_eq!(flat(&Dataset::range(i64::MAX - 2..i64::MAX)), [i64::MAX - 2, i64::MAX - 1]);
    assert_eq!(flat(&Dataset::range(-3..2).batch(2)), [-3, -2, -1, 0, 1]);
    assert_eq!(Dataset::range(i64::MIN..i64::MAX).skip(3).batch(2).iter().next().unwrap().unwrap().as_slice().len(), 2);
}

#[test]
fn the_order_of_a_seed_is_pinned() {
    // Training resumed from a checkpoint relies on this order, so changing it would be a breaking change.
    let data = Dataset::range(0..8).shuffle(8, 42);
    assert_eq!(flat(&data), [0, 2, 7, 1, 4, 3, 6, 5]);
    assert_eq!(flat(&data), [4, 3, 7, 0, 6, 1, 2, 5]);
}

#[test]
fn datasets_and_passes_can_be_sent() {
    fn shared<T: Send + Sync>(_: &T) {}
    fn sent<T: Send>(_: &T) {}
    let data = Dataset::range(0..1).cache().prefetch(1);
    shared(&data);
    sent(&data.iter());
}

#[test]
fn one_element_and_a_value_of_all_elements() {
    let whole = Dataset::from_tensors(Array::from(vec![1_i64, 2, 3]));
    assert_eq!(values(whole.iter()), [[1, 2, 3]]);
    assert_eq!(whole.element_spec().unwrap()[0].to_string(), "[3] i64");
    // Each reduction is a pass of its own.
    let data = Dataset::range(0..4).shuffle(4, 7);
    let list = |mut all: Vec<i64>, x: Array<i64>| {
        all.push(x.as_slice()[0]);
        Ok(all)
    };
    let (one, two) = (data.reduce(Vec::new(), list).unwrap(), data.reduce(Vec::new(), list).unwrap());
    assert_eq!((&one, &two), (&flat_of(data.iter_epoch(0)), &flat_of(data.iter_epoch(1))));
    let text = data.reduce((), |(), _| Err("enough".into())).unwrap_err().to_string();
    assert!(text.contains("the reduce of a dataset failed: enough"), "{text}");
    let broken = Dataset::range(0..4).batch(0);
    assert!(matches!(broken.reduce(0, |sum, _| Ok(sum + 1)), Err(Error::Zero { .. })));
}

fn flat_of(pass: DatasetIter<Array<i64>>) -> Vec<i64> {
    values(pass).concat()
}
