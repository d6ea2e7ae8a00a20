//! The header of every step's reduction, by which processes agree without an operation of its own whether there is more
//! data and which requests are pending.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{ReplicaContext, Strategy};

/// A request of one process to all. All learn of it after the same step, the next one that an optimizer takes part in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Save a checkpoint.
    Save,
    /// Save a checkpoint and leave, because the machine is about to be preempted.
    Leave,
    /// End the training.
    End,
}

/// Number of request flags in each header.
const REQUESTS: usize = 3;

/// Length of the step header: the iterators' flag, a flag for each request, and two numbers that identify the settings.
pub const STEP_WORDS: usize = 1 + REQUESTS + 2;

/// This process's header, and the results of the last step's reduction.
#[derive(Default)]
pub(crate) struct StepHeader {
    state: Mutex<State>,
    asked: [Arc<AtomicBool>; REQUESTS],
    agreed: [AtomicBool; REQUESTS],
    /// Whether all agreed in the last step to leave.
    leaving: AtomicBool,
}

#[derive(Default)]
struct State {
    tokens: u64,
    /// Computes an iterator's flag when the step begins: by then it is more often known whether there is more data.
    flag: Option<(u64, Arc<dyn Fn() -> u32 + Send + Sync>)>,
    agreed: Option<(u64, u32)>,
}

impl StepHeader {
    /// Registers an iterator's flag for the next step and returns the token under which [`agreed`](StepHeader::agreed)
    /// returns the sum.
    pub(crate) fn announce(&self, flag: Arc<dyn Fn() -> u32 + Send + Sync>) -> u64 {
        let mut state = self.lock();
        state.tokens += 1;
        state.flag = Some((state.tokens, flag));
        state.tokens
    }

    /// Returns the sum of all processes' flags under a token, if a step has carried them.
    pub(crate) fn agreed(&self, token: u64) -> Option<u32> {
        self.lock().agreed.filter(|(of, _)| *of == token).map(|(_, sum)| sum)
    }

    /// Returns whether all processes leave after this step, each on its own.
    pub(crate) fn all_leave(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    fn numbers(&self, settings: [u32; 2]) -> [u32; STEP_WORDS] {
        let flag = self.lock().flag.as_ref().map(|(_, flag)| Arc::clone(flag));
        let mut header = [0; STEP_WORDS];
        header[0] = flag.map_or(0, |flag| flag());
        for (flag, asked) in header[1..].iter_mut().zip(&self.asked) {
            *flag = u32::from(asked.load(Ordering::Relaxed));
        }
        header[1 + REQUESTS..].copy_from_slice(&settings);
        header
    }

    fn agree(&self, sums: [u32; STEP_WORDS]) {
        let mut state = self.lock();
        self.leaving.store(sums[1 + Request::Leave as usize] > 0, Ordering::Relaxed);
        state.agreed = state.flag.as_ref().map(|(token, _)| (*token, sums[0]));
        for ((sum, asked), agreed) in sums[1..].iter().zip(&self.asked).zip(&self.agreed) {
            if *sum > 0 {
                asked.store(false, Ordering::Relaxed);
                agreed.store(true, Ordering::Relaxed);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Strategy {
    /// Requests this of all processes.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::{Request, Strategy};
    /// let strategy = Strategy::default_strategy()?;
    /// strategy.ask(Request::End);
    /// // After the next step of an optimizer, on every process: strategy.take_agreed(Request::End)
    /// # Ok::<(), distribute_strategy::Error>(())
    /// ```
    pub fn ask(&self, request: Request) {
        self.request_flag(request).store(true, Ordering::Relaxed);
    }

    /// Cancels this process's request, if no step has carried it yet.
    pub fn withdraw(&self, request: Request) {
        self.request_flag(request).store(false, Ordering::Relaxed);
    }

    /// Returns the flag that makes the same request as [`ask`](Strategy::ask) when set, from any thread or a signal
    /// handler.
    pub fn request_flag(&self, request: Request) -> Arc<AtomicBool> {
        Arc::clone(&self.replicas().step_header.asked[request as usize])
    }

    /// Returns whether a process has made this request: true once on each process, after the same step.
    pub fn take_agreed(&self, request: Request) -> bool {
        self.replicas().step_header.agreed[request as usize].swap(false, Ordering::Relaxed)
    }
}

impl ReplicaContext {
    /// Returns the header that this replica adds to a step's reductions. For authors of optimizers: the sums over all
    /// replicas go to [`check_settings`](ReplicaContext::check_settings) and
    /// [`agree_on_step`](ReplicaContext::agree_on_step).
    ///
    /// `settings` is a digest of the optimizer's settings, equal on all replicas of a process.
    pub fn step_words(&self, settings: u64) -> [u32; STEP_WORDS] {
        match self.local_replica_id() {
            0 => self.strategy().replicas().step_header.numbers(self.settings_words(settings)),
            _ => [0; STEP_WORDS],
        }
    }

    /// Records the sums of every replica's [`step_words`](ReplicaContext::step_words).
    pub fn agree_on_step(&self, sums: [u32; STEP_WORDS]) {
        if self.local_replica_id() == 0 {
            self.strategy().replicas().step_header.agree(sums);
        }
    }
}
