use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::{Array, InputOptions, Parallel, Topology, distribute_dataset};

/// The bytes of the elements that exist, and the most there were at a time.
#[derive(Clone, Default)]
struct Live(Arc<(AtomicUsize, AtomicUsize)>);

struct Tracked {
    number: i64,
    bytes: usize,
    live: Live,
}

impl Live {
    fn element(&self, number: i64, bytes: usize) -> Tracked {
        let now = self.0.0.fetch_add(bytes, Ordering::SeqCst) + bytes;
        self.0.1.fetch_max(now, Ordering::SeqCst);
        Tracked { number, bytes, live: self.clone() }
    }

    fn most(&self) -> usize {
        self.0.1.load(Ordering::SeqCst)
    }

    /// Returns a dataset of elements, of which the size is a function of the number.
    fn elements(&self, count: i64, bytes: fn(i64) -> usize) -> Dataset<Tracked> {
        let live = self.clone();
        Dataset::range(0..count).map(move |number| {
            let number = number.as_slice()[0];
            Ok(live.element(number, bytes(number)))
        })
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.live.0.0.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

fn sizes() -> Sizes {
    Sizes::default().with(|element: &Tracked| element.bytes)
}

fn numbers(data: &Dataset<Tracked>) -> Vec<i64> {
    data.iter_epoch(0).map(|element| element.unwrap().number).collect()
}

fn sorted(mut numbers: Vec<i64>) -> Vec<i64> {
    numbers.sort_unstable();
    numbers
}

#[test]
fn all_stages_together_hold_no_more_than_the_budget() {
    let live = Live::default();
    let data = live.elements(300, |_| 1000).shuffle(1000, 3).par_map(Parallel::threads(16), Ok).prefetch(100);
    let data = data.memory_budget(30_000, sizes());
    let pass = data.iter_epoch(0);
    let mut order = Vec::new();
    for element in pass {
        order.push(element.unwrap().number);
        if order.len() == 50 {
            // The thread fills all that it may.
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
    // One in the hands of the reader, one of the prefetching thread, one read by the shuffle.
    assert!(live.most() <= 30_000 + 3000, "{}", live.most());
    assert!(live.most() >= 20_000, "{}", live.most());
    assert_eq!(sorted(order.clone()), (0..300).collect::<Vec<_>>());
    assert_ne!(order, (0..300).collect::<Vec<_>>());
    // The order does not depend on what threads do.
    assert_eq!(numbers(&data), order);
    let unlimited = Live::default();
    let data = unlimited.elements(300, |_| 1000).shuffle(1000, 3);
    assert_eq!((numbers(&data).len(), unlimited.most()), (300, 300_000));
}

#[test]
fn elements_larger_than_the_budget_pass_one_by_one() {
    let live = Live::default();
    let bytes = |number| if number % 10 == 9 { 1_000_000 } else { 100 };
    let data = live.elements(100, bytes).shuffle(50, 3).par_map(Parallel::threads(2), Ok).prefetch(8);
    let data = data.memory_budget(3000, sizes());
    assert_eq!(sorted(numbers(&data)), (0..100).collect::<Vec<_>>());
    // Each of three stages holds one, and three are being handed over.
    assert!(live.most() <= 6 * 1_000_000 + 3000, "{}", live.most());
    let data = Live::default().elements(20, |_| 1_000_000).shuffle(50, 3).prefetch(8).memory_budget(1, sizes());
    assert_eq!(sorted(numbers(&data)), (0..20).collect::<Vec<_>>());
}

#[test]
fn interleaved_pipelines_share_one_part() {
    let live = Live::default();
    let inner = live.clone();
    let data =
        Dataset::range(0..6).interleave(3, 1, move |_| Ok(inner.elements(100, |_| 1000).shuffle(100, 3).prefetch(9)));
    let data = data.prefetch(100).memory_budget(60_000, sizes());
    assert_eq!(numbers(&data).len(), 600);
    assert!(live.most() <= 60_000 + 3 * 2 * 1000 + 2000, "{}", live.most());
}

#[test]
fn unbounded_and_unknown_are_sentences() {
    let data = Live::default().elements(9, |_| 1).prefetch(2);
    let said = |data: Dataset<Tracked>| data.iter().next().unwrap().err().unwrap().to_string();
    let text = said(data.clone().memory_budget(100, Sizes::default()));
    assert!(text.contains("does not know the size of") && text.contains("Tracked, which prefetch holds"), "{text}");
    assert!(said(data.memory_budget(0, sizes())).contains("memory_budget was given 0"));
    for (stage, data) in [
        ("shuffle", Live::default().elements(9, |_| 1).shuffle(3, 1)),
        ("par_map", Live::default().elements(9, |_| 1).par_map(Parallel::threads(1), Ok)),
    ] {
        let text = said(data.memory_budget(100, Sizes::default()));
        assert!(text.contains(&format!("which {stage} holds")), "{text}");
    }
}

#[test]
fn files_and_row_numbers_need_no_size_and_workers_see_each_element_once() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["a", "b"].map(|name| folder.path().join(name));
    paths.iter().for_each(|path| std::fs::write(path, "1\n2\n3\n").unwrap());
    let lines = Dataset::from_files(paths)
        .shuffle(2, 1)
        .read(crate::read::Lines, crate::read::ReadOptions::default())
        .map_and_batch(2, Parallel::threads(2), |line| Ok(Array::scalar(line.parse::<i64>()?)))
        .prefetch(2);
    assert_eq!(lines.facts.buffers, 2);
    assert_eq!(
        lines.memory_budget(100, Sizes::default()).iter().map(|batch| batch.unwrap().as_slice().len()).sum::<usize>(),
        6
    );
    let rows = Array::from((0..50).collect::<Vec<i64>>());
    let data = Dataset::from_tensor_slices(rows).shuffle(50, 1).map(Ok).shuffle(50, 2).batch(5).prefetch(3);
    let data = data.memory_budget(160, Sizes::default());
    let mut seen = Vec::new();
    for worker in 0..2 {
        let topology = Topology::new(2, worker, 2).unwrap();
        for step in &distribute_dataset(&data, topology, InputOptions::default()).unwrap() {
            seen.extend(step.unwrap().iter().flat_map(|part| part.as_slice().to_vec()));
        }
    }
    assert_eq!(sorted(seen), (0..50).collect::<Vec<_>>());
}
