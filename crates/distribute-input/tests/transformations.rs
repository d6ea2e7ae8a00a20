//! Transformations that flatten, pad, map on threads and cache on disk.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use distribute_input::{Array, BoxError, Dataset, Error, Parallel, Result};
use proptest::prelude::*;

fn values(data: &Dataset<Array<i64>>) -> Vec<i64> {
    data.iter().flat_map(|item| item.unwrap().as_slice().to_vec()).collect()
}

fn to(n: &Array<i64>) -> Result<Dataset<Array<i64>>, BoxError> {
    Ok(Dataset::range(0..*n.item().ok_or("no scalar")?))
}

#[test]
fn a_dataset_for_each_element_in_turn_or_interleaved() {
    assert_eq!(values(&Dataset::range(1..4).flat_map(|n| to(&n))), [0, 0, 1, 0, 1, 2]);
    let tens = |n: Array<i64>| Ok(Dataset::range(n.as_slice()[0] * 10..n.as_slice()[0] * 10 + 4));
    let interleaved = |cycle, block| values(&Dataset::range(0..3).interleave(cycle, block, tens));
    assert_eq!(interleaved(2, 1), [0, 10, 1, 11, 2, 12, 3, 13, 20, 21, 22, 23]);
    assert_eq!(interleaved(3, 2), [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]);
    // A sequence that ends makes room for the next.
    let short = values(&Dataset::range(0..4).interleave(2, 1, |n| to(&n)));
    assert_eq!(short.len(), 6);
    assert!(Dataset::range(0..3).interleave(0, 1, tens).iter().next().unwrap().is_err());
}

#[test]
fn errors_inside_a_flattened_dataset_end_the_pass() {
    let failing = Dataset::range(0..3).flat_map(|n| {
        Ok(Dataset::range(0..2).map(move |x| if n.as_slice()[0] == 1 { Err("as planned".into()) } else { Ok(x) }))
    });
    let mut items = failing.iter();
    assert!(items.by_ref().take(2).all(|item| item.is_ok()));
    assert!(items.next().unwrap().unwrap_err().to_string().contains("as planned"));
    assert!(items.next().is_none());
    let faulty = Dataset::range(0..1).flat_map(|_| Ok(Dataset::range(0..2).batch(0)));
    assert!(matches!(faulty.iter().next(), Some(Err(Error::Zero { .. }))));
}

#[test]
fn a_shuffle_inside_goes_on_shuffling_each_pass() {
    let data = Dataset::range(0..1).flat_map(|_| Ok(Dataset::range(0..20).shuffle(20, 3)));
    assert_ne!(values(&data), values(&data));
}

#[test]
fn unbatched_rows_are_the_elements_again() {
    assert_eq!(values(&Dataset::range(0..7).batch(3).unbatch()), (0..7).collect::<Vec<_>>());
    assert!(Dataset::range(0..2).unbatch().iter().next().unwrap().is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn threads_change_neither_elements_nor_their_order(count in 0_i64..60, threads in 1_usize..5, size in 1_usize..9) {
        let double = |x: Array<i64>| Ok(Array::scalar(x.as_slice()[0] * 2));
        let expected: Vec<i64> = (0..count).map(|x| 2 * x).collect();
        let mapped = Dataset::range(0..count).par_map(Parallel::threads(threads), double);
        prop_assert_eq!(&values(&mapped), &expected);
        let mut unordered = values(&Dataset::range(0..count).par_map(Parallel::threads(threads).unordered(), double));
        unordered.sort_unstable();
        prop_assert_eq!(&unordered, &expected);
        let batched = Dataset::range(0..count).map_and_batch(size, Parallel::threads(threads), double);
        prop_assert_eq!(batched.batch_size(), Some(size));
        prop_assert_eq!(&values(&batched), &expected);
    }
}

#[test]
fn an_error_on_a_thread_arrives_in_its_turn() {
    let data = Dataset::range(0..20).par_map(Parallel::threads(3), |x| {
        // Later elements are ready first.
        std::thread::sleep(Duration::from_millis(if x.as_slice()[0] < 3 { 5 } else { 0 }));
        if x.as_slice()[0] == 4 { Err("as planned".into()) } else { Ok(x) }
    });
    let items: Vec<_> = data.iter().collect();
    assert_eq!(items.len(), 5);
    assert!(items[..4].iter().all(Result::is_ok) && items[4].is_err());
    let panicking = Dataset::range(0..3).par_map(Parallel::threads(2), |x| {
        assert!(x.as_slice()[0] != 1, "as planned");
        Ok(x)
    });
    assert!(matches!(panicking.iter().last(), Some(Err(Error::Panicked))));
    let failing = Dataset::range(0..9).map(|x| if x.as_slice()[0] == 2 { Err("as planned".into()) } else { Ok(x) });
    assert_eq!(failing.par_map(Parallel::threads(2), Ok).iter().filter(Result::is_ok).count(), 2);
}

#[test]
fn what_is_under_way_is_bounded() {
    let begun = Arc::new(AtomicUsize::new(0));
    let counted = begun.clone();
    let data = Dataset::range(0..1000)
        .map(move |x| {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(x)
        })
        .par_map(Parallel::threads(2), Ok);
    let mut items = data.iter();
    items.next();
    std::thread::sleep(Duration::from_millis(50));
    assert!(begun.load(Ordering::Relaxed) <= 5, "{begun:?} elements were read for one");
}

#[test]
fn a_snapshot_is_written_by_a_whole_pass_and_read_by_later_ones() {
    let folder = tempfile::tempdir().unwrap();
    let computed = Arc::new(AtomicUsize::new(0));
    let make = || {
        let computed = computed.clone();
        let squares = Dataset::range(0..4).map(move |x| {
            computed.fetch_add(1, Ordering::Relaxed);
            Ok(Array::scalar(x.as_slice()[0].pow(2)))
        });
        let encode = |x: &Array<i64>| x.as_slice()[0].to_le_bytes().to_vec();
        squares.snapshot(folder.path(), encode, |bytes| Ok(Array::scalar(i64::from_le_bytes(bytes.try_into()?))))
    };
    let data = make();
    assert!(data.iter().next().is_some());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "a pass that was left early is no snapshot");
    assert_eq!(values(&data), [0, 1, 4, 9]);
    assert_eq!(computed.load(Ordering::Relaxed), 5);
    assert_eq!((values(&data), values(&make())), (vec![0, 1, 4, 9], vec![0, 1, 4, 9]));
    assert_eq!(computed.load(Ordering::Relaxed), 5, "it was read from disk");
    let path = folder.path().join("whole.tfrecord");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[13] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let error = data.iter().next().unwrap().unwrap_err().to_string();
    assert!(error.contains("whole.tfrecord, record 0") && error.contains("checksum"), "{error}");
    let nowhere = Dataset::range(0..1).snapshot("/proc/nothing", |_| Vec::new(), |_| Ok(Array::scalar(0)));
    assert!(nowhere.iter().next().unwrap().unwrap_err().to_string().contains("/proc/nothing"));
    // A store is refused before anything is written to a folder of its name.
    for url in ["s3://bucket/snapshot", "file:///tmp/snapshot"] {
        let remote = Dataset::range(0..1).snapshot(url, |_| Vec::new(), |_| Ok(Array::scalar(0)));
        let text = remote.iter().next().unwrap().unwrap_err().to_string();
        assert!(text.contains(url) && text.contains("snapshots are written to local folders"), "{text}");
    }
    assert!(!std::path::Path::new("s3:").exists());
}

#[test]
fn a_snapshot_does_not_touch_the_part_of_a_process_of_the_same_number() {
    let folder = tempfile::tempdir().unwrap();
    let part = |count| folder.path().join(format!("whole.part-{}-{count}", std::process::id()));
    (0..1000).for_each(|count| std::fs::write(part(count), "begun").unwrap());
    let encode = |x: &Array<i64>| x.as_slice()[0].to_le_bytes().to_vec();
    let decode = |bytes: &[u8]| Ok(Array::scalar(i64::from_le_bytes(bytes.try_into()?)));
    let data = Dataset::range(0..4).snapshot(folder.path(), encode, decode);
    assert_eq!((values(&data), values(&data)), (vec![0, 1, 2, 3], vec![0, 1, 2, 3]));
    assert!((0..1000).all(|count| std::fs::read(part(count)).is_ok_and(|bytes| bytes == b"begun")));
}

#[test]
fn a_generator_that_continues_after_its_end_has_ended() {
    let data = Dataset::from_generator(|| {
        let mut items = [Some(1), Some(2), Some(3), None, Some(5), Some(6)].into_iter();
        std::iter::from_fn(move || items.next().flatten().map(|item| Ok(Array::scalar(item))))
    });
    let batches: Vec<i64> = data.batch(2).iter().flat_map(|batch| batch.unwrap().as_slice().to_vec()).collect();
    assert_eq!(batches, [1, 2, 3]);
}

#[test]
fn specs_name_shapes_and_types() {
    let images = Array::new([4, 2, 3], vec![0.0f32; 24]).unwrap();
    let data = Dataset::from_tensor_slices((images, Array::from(vec![0_i64; 4])));
    let text = |spec: Vec<distribute_input::ElementSpec>| spec.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(text(data.element_spec().unwrap()), ["[2, 3] f32", "[] i64"]);
    assert_eq!(text(data.batch(2).element_spec().unwrap()), ["[?, 2, 3] f32", "[?] i64"]);
}
