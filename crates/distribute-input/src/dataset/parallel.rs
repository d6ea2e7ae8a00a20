//! Maps on several threads.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use super::budget::Limit;
use super::prefetch::{JOIN_DEADLINE, READ_DEADLINE};
use super::{Dataset, Items, Opener, Pass, background};
use crate::{BoxError, Element, Error, Result};

/// The number of threads of a parallel map, and the order of its results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parallel {
    /// The number of threads of each pass, at most 4096.
    pub threads: usize,
    /// Whether results are yielded in the order of elements. Otherwise each is yielded as soon as it is ready, and the
    /// order differs between passes.
    pub ordered: bool,
}

impl Parallel {
    /// Uses one thread per available core, with results in order.
    pub fn cores() -> Parallel {
        Parallel { threads: std::thread::available_parallelism().map_or(1, usize::from), ordered: true }
    }

    /// Uses the given number of threads, with results in order.
    pub fn threads(threads: usize) -> Parallel {
        Parallel { threads, ordered: true }
    }

    /// Yields results as soon as they are ready.
    pub fn unordered(self) -> Parallel {
        Parallel { ordered: false, ..self }
    }
}

impl<T: Send + 'static> Dataset<T> {
    /// Applies a function to every element on several threads, for functions that decode or augment. The preceding
    /// pipeline is read by one thread.
    ///
    /// At most twice as many elements as there are threads are in progress. The threads end with the pass: when all
    /// elements are read, or when the iterator is dropped, which waits up to 5 s for the elements in progress. A reader
    /// that receives no element for 30 minutes gets an error.
    ///
    /// # Errors
    /// Each pass reports [`Error::Zero`] if there are no threads, [`Error::TooLarge`] if there are more than 4096,
    /// [`Error::Thread`] if a thread cannot be started, [`Error::User`] if the function fails, and [`Error::Stalled`]
    /// after 30 minutes without an element.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{Array, Dataset, Parallel};
    /// let square = |x: Array<i64>| Ok(Array::scalar(x.as_slice()[0].pow(2)));
    /// let squares = Dataset::range(0..100).par_map(Parallel::threads(4), square);
    /// assert_eq!(squares.iter().last().unwrap()?.item(), Some(&9801));
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.data.Dataset.map` with `num_parallel_calls`.
    pub fn par_map<U, F>(self, parallel: Parallel, function: F) -> Dataset<U>
    where
        U: Send + 'static,
        F: Fn(T) -> Result<U, BoxError> + Send + Sync + 'static,
    {
        self.par_map_within(parallel, function, |pass| pass.limit("par_map"))
    }

    /// Maps with a limit of the elements that are in progress.
    fn par_map_within<U, F>(
        self,
        parallel: Parallel,
        function: F,
        limit: impl Fn(&Pass) -> Result<Limit<T>> + Send + Sync + 'static,
    ) -> Dataset<U>
    where
        U: Send + 'static,
        F: Fn(T) -> Result<U, BoxError> + Send + Sync + 'static,
    {
        let mut facts = self.facts.mapped();
        facts.buffers += 1;
        let (stage, parameter, given, most) = ("par_map", "number of threads", parallel.threads, MAX_THREADS);
        facts.positive(stage, parameter, given);
        facts.note((given > most).then_some(Error::TooLarge { stage, parameter, given, most }));
        let (open, function) = (self.open, Arc::new(function));
        let open: Opener<U> = Arc::new(move |pass| {
            let function = Arc::clone(&function);
            let map = move |item: Result<T>| function(item?).map_err(|error| Error::user("par_map", error));
            let parallel = Parallel { ordered: parallel.ordered || pass.is_in_order(), ..parallel };
            let workers = limit(&pass).and_then(|input| {
                let limits = (input, pass.limit("par_map")?);
                Workers::start(open(pass), parallel, Arc::new(map), limits)
            });
            match workers {
                Ok(workers) => Box::new(workers) as Items<U>,
                Err(error) => Box::new(std::iter::once(Err(error))),
            }
        });
        Dataset::new(open, facts)
    }

    /// Combines [`par_map`](Dataset::par_map) and [`batch`](Dataset::batch), with whole batches on each thread, so that
    /// fewer elements are passed between threads.
    ///
    /// # Errors
    /// The errors of [`par_map`](Dataset::par_map) and [`batch`](Dataset::batch).
    ///
    /// # Source
    /// `tf.data.experimental.map_and_batch`.
    pub fn map_and_batch<U, L, F>(self, size: usize, parallel: Parallel, function: F) -> Dataset<U>
    where
        U: Element<L>,
        F: Fn(T) -> Result<U, BoxError> + Send + Sync + 'static,
    {
        let mut facts = self.facts.clone();
        facts.positive("map_and_batch", "size", size);
        let divisor = size.max(1);
        facts.cardinality = facts.cardinality.map(|n| n.div_ceil(divisor));
        facts.no_rows("batch");
        facts.batched = Some(super::Batched::of(size));
        let chunks = Dataset::new(super::chunked(self.open, divisor, false), facts);
        let map = move |items: Vec<T>| {
            let mapped: Result<Vec<U>, BoxError> = items.into_iter().map(&function).collect();
            Ok(U::stack(&mapped?)?)
        };
        chunks.par_map_within(parallel, map, |pass| Ok(pass.limit::<T>("map_and_batch")?.of_lists()))
    }
}

/// More threads than processors of any machine, and far fewer than fit into memory.
const MAX_THREADS: usize = 4096;

type Map<T, U> = Arc<dyn Fn(Result<T>) -> Result<U> + Send + Sync>;
type Numbered<T> = (u64, Result<T>);

/// The reader's side of a parallel map: it reads the source itself and sends elements to the threads.
struct Workers<T, U> {
    source: Option<Items<T>>,
    tasks: Option<Sender<Numbered<T>>>,
    results: Receiver<Numbered<U>>,
    threads: Vec<JoinHandle<()>>,
    left: Arc<AtomicBool>,
    ordered: bool,
    window: u64,
    begun: u64,
    /// The number of results handed to the reader.
    taken: u64,
    /// Results that arrived before their turn.
    early: BTreeMap<u64, Result<U>>,
    limits: (Limit<T>, Limit<U>),
    /// The bytes of the largest element or result so far, once there is a result.
    largest: usize,
    has_result: bool,
}

impl<T: Send + 'static, U: Send + 'static> Workers<T, U> {
    fn start(
        source: Items<T>,
        parallel: Parallel,
        map: Map<T, U>,
        limits: (Limit<T>, Limit<U>),
    ) -> Result<Workers<T, U>> {
        let window = parallel.threads.saturating_mul(2);
        let (tasks, waiting) = bounded::<Numbered<T>>(window);
        let (done, results) = bounded::<Numbered<U>>(window);
        let left = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::with_capacity(parallel.threads);
        for index in 0..parallel.threads {
            let (waiting, done, map, left) = (waiting.clone(), done.clone(), Arc::clone(&map), Arc::clone(&left));
            let work = move || {
                background::begin();
                for (number, item) in waiting {
                    if left.load(Ordering::Relaxed) {
                        return;
                    }
                    let result = catch_unwind(AssertUnwindSafe(|| map(item))).unwrap_or(Err(Error::Panicked));
                    // The channel has room for every result in progress; the send fails only if the reader is gone.
                    drop(done.send((number, result)));
                }
            };
            let thread = std::thread::Builder::new().name(format!("input-map-{index}"));
            threads.push(thread.spawn(work).map_err(|source| Error::Thread { source: Arc::new(source) })?);
        }
        Ok(Workers {
            source: Some(source),
            tasks: Some(tasks),
            results,
            threads,
            left,
            ordered: parallel.ordered,
            window: window as u64,
            begun: 0,
            taken: 0,
            early: BTreeMap::new(),
            limits,
            largest: 0,
            has_result: false,
        })
    }

    /// Returns whether one more element may be in progress.
    fn has_room(&self) -> bool {
        let under_way = self.begun - self.taken;
        let all = usize::try_from(under_way).unwrap_or(usize::MAX).saturating_mul(self.largest);
        let (elements, results) = &self.limits;
        let is_limited = !(elements.is_none() && results.is_none());
        let room = elements.has_room(all, self.largest) && results.has_room(all, self.largest);
        let fits = !is_limited || under_way == 0 || (self.has_result && room);
        under_way < self.window && fits
    }

    /// Notes the size of a result.
    fn note(&mut self, result: &Result<U>) {
        self.largest = self.largest.max(result.as_ref().map_or(0, |result| self.limits.1.size(result)));
        self.has_result = true;
    }

    /// Sends elements to the threads while the window has room.
    fn hand_out(&mut self) {
        while self.has_room()
            && let (Some(source), Some(tasks)) = (&mut self.source, &self.tasks)
        {
            match source.next() {
                Some(item) => {
                    // Errors keep their position in the order.
                    let last = item.is_err();
                    self.largest = self.largest.max(item.as_ref().map_or(0, |item| self.limits.0.size(item)));
                    let refused = tasks.send((self.begun, item)).is_err();
                    self.begun += 1;
                    if last || refused {
                        self.source = None;
                    }
                }
                None => self.source = None,
            }
        }
        if self.source.is_none() {
            self.tasks = None;
        }
    }
}

impl<T: Send + 'static, U: Send + 'static> Iterator for Workers<T, U> {
    type Item = Result<U>;

    fn next(&mut self) -> Option<Result<U>> {
        self.hand_out();
        if self.taken == self.begun {
            return None;
        }
        loop {
            if let Some(result) = self.early.remove(&self.taken) {
                self.taken += 1;
                return Some(result);
            }
            match self.results.recv_timeout(READ_DEADLINE) {
                Ok((_, result)) if !self.ordered => {
                    self.note(&result);
                    self.taken += 1;
                    return Some(result);
                }
                Ok((number, result)) => {
                    self.note(&result);
                    self.early.insert(number, result);
                }
                Err(RecvTimeoutError::Timeout) => return Some(Err(Error::Stalled { waited: READ_DEADLINE })),
                Err(RecvTimeoutError::Disconnected) => return Some(Err(Error::Panicked)),
            }
        }
    }
}

impl<T, U> Drop for Workers<T, U> {
    fn drop(&mut self) {
        self.left.store(true, Ordering::Relaxed);
        self.tasks = None;
        // Each thread ends after its current element and then drops its sender of results.
        if !ends_by(&self.results, Instant::now() + JOIN_DEADLINE) {
            tracing::warn!(
                waited_s = JOIN_DEADLINE.as_secs(),
                "a thread of a map is still inside its function and was left to end by itself"
            );
            return;
        }
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

/// Returns whether all senders are gone by `deadline`; results received until then are dropped.
fn ends_by<T>(results: &Receiver<T>, deadline: Instant) -> bool {
    loop {
        if let Err(error) = results.recv_deadline(deadline) {
            return error == RecvTimeoutError::Disconnected;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn no_or_too_many_threads_are_an_error_of_the_description() {
        let told = |threads| {
            let data = Dataset::range(0..4).par_map(Parallel::threads(threads), Ok);
            data.iter().next().unwrap().unwrap_err().to_string()
        };
        assert!(told(0).contains("par_map was given 0 as its number of threads"));
        for threads in [MAX_THREADS + 1, usize::MAX] {
            assert_eq!(
                told(threads),
                format!("par_map was given {threads} as its number of threads; give at most 4096")
            );
        }
        // Also in the datasets of an interleave, where nothing else asks.
        let inner = |_| Ok(Dataset::range(0..4).map_and_batch(2, Parallel::threads(usize::MAX), Ok));
        let first = Dataset::range(0..1).flat_map(inner).iter().next().unwrap();
        assert!(matches!(first, Err(Error::TooLarge { .. })));
    }

    #[test]
    fn a_thread_that_does_not_return_is_waited_for_until_the_deadline_alone() {
        let (stuck, results) = bounded(1);
        stuck.send(0).unwrap();
        assert!(!ends_by(&results, Instant::now() + Duration::from_millis(1)));
        stuck.send(1).unwrap();
        drop(stuck);
        assert!(ends_by(&results, Instant::now() + Duration::from_secs(60)));
    }
}
