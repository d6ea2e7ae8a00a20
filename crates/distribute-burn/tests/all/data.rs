//! Arrays, tensors in memory, and burn's own datasets as data.

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset as _, InMemDataset};
use burn::tensor::{Device, Int, Tensor};
use distribute_burn::{BurnContext, Error, FromElement, Items, ToArray};
use distribute_input::{Array, Dataset};
use distribute_strategy::Strategy;

use crate::common::*;

/// Makes a column of each item's number.
pub(crate) struct Column;

impl Batcher<i32, Tensor<1, Int>> for Column {
    fn batch(&self, items: Vec<i32>, device: &Device) -> Tensor<1, Int> {
        assert!(device.is_autodiff(), "the replica's device");
        Tensor::from_ints(items.as_slice(), device)
    }
}

/// Returns the numbers that all replicas get in each step of a pass.
fn steps(strategy: &Strategy, items: &Items<i32, Tensor<1, Int>>, from: usize) -> Vec<Vec<i64>> {
    let data = items.distribute(strategy).unwrap();
    let mut pass = data.iter_epoch(1);
    for _ in 0..from {
        pass.next().unwrap().unwrap();
    }
    let position = pass.position().unwrap();
    let resumed = items.distribute(strategy).unwrap();
    let pass = resumed.iter_from(&position).unwrap();
    pass.map(|batch| {
        let parts = strategy.run_with(batch.unwrap(), |context, x| {
            Ok::<_, Error>(if context.has_examples() { x.to_array()?.as_slice().to_vec() } else { Vec::new() })
        });
        parts.unwrap().into_values().concat()
    })
    .collect()
}

#[test]
fn items_reach_one_replica_each_and_a_pass_resumes() {
    let items = |len: i32| {
        let dataset = InMemDataset::new((0..len).collect());
        assert_eq!(dataset.len(), len as usize);
        Items::new(dataset, Column, |indices| indices.shuffle(len as usize, 5).batch(6))
    };
    let one = steps(&one(), &items(22), 0);
    assert_eq!(one.iter().map(Vec::len).collect::<Vec<_>>(), [6, 6, 6, 4]);
    let mut all = one.concat();
    assert_ne!(all, (0..22).collect::<Vec<_>>());
    all.sort_unstable();
    assert_eq!(all, (0..22).collect::<Vec<_>>());
    for replicas in [2, 3, 5] {
        assert_eq!(steps(&mirrored(replicas), &items(22), 0), one);
        assert_eq!(steps(&mirrored(replicas), &items(22), 2), one[2..]);
    }
}

#[test]
fn an_index_that_does_not_exist_is_an_error() {
    let items = Items::new(InMemDataset::new(vec![1, 2, 3]), Column, |_| Dataset::range(0..5).batch(5));
    let error = items.distribute(&mirrored(2)).unwrap().iter().next().unwrap().unwrap_err().to_string();
    assert!(error.contains("item 3 was asked for, but the dataset has 3 items"), "{error}");
}

#[test]
fn a_batcher_that_panics_ends_the_pass_with_an_error() {
    struct Bad;
    impl Batcher<i32, Tensor<1, Int>> for Bad {
        fn batch(&self, _: Vec<i32>, _: &Device) -> Tensor<1, Int> {
            panic!("this batcher never works")
        }
    }
    let items = Items::new(InMemDataset::new(vec![1, 2, 3]), Bad, |indices| indices.batch(3));
    let outcome = items.distribute(&one()).unwrap().iter().next();
    let error = outcome.unwrap().unwrap_err().to_string();
    assert!(error.contains("the pipeline panicked on one of its threads"), "{error}");
}

#[test]
fn arrays_of_any_type_become_tensors_of_the_devices_types() {
    let strategy = mirrored(2);
    let bytes = Array::new([4, 2], vec![0u8, 50, 100, 150, 200, 250, 255, 1]).unwrap();
    let labels = Array::from(vec![3u32, 2, 1, 0]);
    let data = Dataset::from_tensor_slices((bytes, labels)).batch(4);
    let batch = strategy.distribute_dataset(&data).unwrap().iter().next().unwrap().unwrap();
    let sums = strategy.run_with(batch, |context, (x, y)| {
        let (x, y) = (context.tensor::<2>(&x)?, context.int_tensor::<1>(&y)?);
        let same: (Tensor<2>, Tensor<1, Int>) = (context.tensor(&x.to_array()?)?, context.int_tensor(&y.to_array()?)?);
        assert_eq!(same.0.dims(), [2, 2]);
        Ok::<_, Error>((same.0.sum().into_scalar::<f32>(), same.1.sum().into_scalar::<i64>()))
    });
    assert_eq!(sums.unwrap().values(), [(300.0, 5), (706.0, 1)]);
}

#[test]
fn numbers_that_are_not_whole_are_no_integers() {
    let device = Device::flex();
    let whole = Array::from(vec![3.0f32, -2.0, 0.0]);
    let read = Tensor::<1, Int>::from_element(&whole, &device).unwrap().to_array().unwrap();
    assert_eq!(read.as_slice(), [3, -2, 0]);
    for value in [0.9f32, -0.5, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30] {
        let error = Tensor::<1, Int>::from_element(&Array::from(vec![1.0, value]), &device).unwrap_err();
        assert!(matches!(error, Error::NotWhole { at: 1, .. }), "{error}");
        assert!(Tensor::<1>::from_element(&Array::from(vec![1.0, value]), &device).is_ok());
    }
    // The integers of this device are i32.
    let end = f64::from(i32::MAX) + 1.0;
    for value in [end, -end - 1.0, 1e300] {
        let error = Tensor::<1, Int>::from_element(&Array::from(vec![value]), &device).unwrap_err();
        assert!(matches!(error, Error::NotWhole { at: 0, integers: "i32", .. }), "{error}");
    }
    let beyond = Tensor::<1, Int>::from_element(&Array::from(vec![7, 1u64 << 63]), &device).unwrap_err();
    assert!(matches!(beyond, Error::NotWhole { at: 1, .. }), "{beyond}");
    let below = Tensor::<1, Int>::from_element(&Array::from(vec![7, i64::from(i32::MIN) - 1]), &device).unwrap_err();
    assert!(matches!(below, Error::NotWhole { at: 1, .. }), "{below}");
    // The first and the last.
    let first = Tensor::<1, Int>::from_element(&Array::from(vec![-end]), &device).unwrap().to_array().unwrap();
    let last = Tensor::<1, Int>::from_element(&Array::from(vec![(1u32 << 31) - 1]), &device).unwrap();
    let last = last.to_array().unwrap();
    assert_eq!([first.as_slice(), last.as_slice()].concat(), [i64::from(i32::MIN), i64::from(i32::MAX)]);
    let of_context = one().run_with((), |context, ()| context.int_tensor::<1>(&Array::from(vec![0.9f64])));
    let told = of_context.unwrap_err().to_string();
    assert!(told.contains("element 0 of an array is 0.9") && told.contains("give whole numbers"), "{told}");
}

#[test]
fn a_wrong_rank_is_refused_in_words() {
    let array = Array::new([2, 3], vec![0.0f32; 6]).unwrap();
    let error = Tensor::<1>::from_element(&array, &Device::flex()).unwrap_err();
    assert!(error.to_string().contains("an array of shape [2, 3] was to become a tensor of 1 dimensions"), "{error}");
}
