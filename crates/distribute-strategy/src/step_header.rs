//! The header of every step's reduction, by which processes agree, without a separate operation, whether there is more
//! data and which requests are pending.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytemuck::{Pod, Zeroable};
use parking_lot::{Mutex, MutexGuard};

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

/// The processes that have made a request, as all learn after the same step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Requests {
    /// The number of processes that have made it; 0 if none has.
    pub processes: u32,
    /// Whether this process is one of them.
    pub own: bool,
}

/// The values that a process adds to the reductions of a step, as 32-bit words; after the reduction, the sums over all
/// processes.
///
/// Replicas other than a process's first add the default, which is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct StepHeader {
    /// The iterator's flag.
    more_data: u32,
    /// A flag for each [`Request`].
    requests: [u32; REQUESTS],
    /// Two numbers that identify the settings.
    pub(crate) settings: [u32; 2],
}

impl StepHeader {
    /// The number of words.
    pub const LEN: usize = size_of::<StepHeader>() / size_of::<u32>();

    /// Returns a header without requests.
    pub(crate) fn with_settings(settings: [u32; 2]) -> StepHeader {
        StepHeader { settings, ..StepHeader::default() }
    }

    /// Returns the words to reduce.
    pub fn to_words(self) -> [u32; StepHeader::LEN] {
        bytemuck::cast(self)
    }

    /// Returns the header of reduced words.
    pub fn from_words(words: [u32; StepHeader::LEN]) -> StepHeader {
        bytemuck::cast(words)
    }
}

/// The state that this process puts into its headers, and the results of the last step's reduction.
#[derive(Default)]
pub(crate) struct StepAgreement {
    state: Arc<Mutex<State>>,
    asked: [Arc<AtomicBool>; REQUESTS],
    /// Whether all agreed to leave, in the last step or in one whose requests have not been taken yet.
    leaving: AtomicBool,
}

#[derive(Default)]
struct State {
    tokens: u64,
    /// Computes an iterator's flag when the step begins: by then it is more often known whether there is more data.
    flag: Option<(u64, Arc<dyn Fn() -> u32 + Send + Sync>)>,
    agreed: Option<(u64, u32)>,
    /// The requests that this process's last header has carried.
    carried: [bool; REQUESTS],
    /// The requests that steps have agreed on, until they are taken.
    requests: [Requests; REQUESTS],
    /// Whether a step has carried this process's request to leave, which holds until the process has left.
    leaves: bool,
}

impl StepAgreement {
    /// Registers an iterator's flag for the next step, and for those after it until the result is dropped.
    pub(crate) fn announce(&self, flag: Arc<dyn Fn() -> u32 + Send + Sync>) -> Announced {
        let mut state = self.lock();
        state.tokens += 1;
        let token = state.tokens;
        let earlier = state.flag.replace((token, flag));
        drop(state);
        // It may be the last owner of a pipeline, whose end takes time.
        drop(earlier);
        Announced { token, state: Arc::clone(&self.state) }
    }

    /// Returns whether all processes leave after this step, each on its own.
    pub(crate) fn all_leave(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    /// Returns this process's header.
    pub(crate) fn header(&self, settings: [u32; 2]) -> StepHeader {
        let carried = self.asked.each_ref().map(|asked| asked.load(Ordering::Relaxed));
        let mut state = self.lock();
        state.carried = carried;
        let flag = state.flag.as_ref().map(|(_, flag)| Arc::clone(flag));
        drop(state);
        StepHeader { more_data: flag.map_or(0, |flag| flag()), requests: carried.map(u32::from), settings }
    }

    /// Records the sums of all processes' headers.
    pub(crate) fn agree(&self, sums: StepHeader) {
        let mut state = self.lock();
        state.agreed = state.flag.as_ref().map(|(token, _)| (*token, sums.more_data));
        let carried = state.carried;
        state.leaves |= carried[Request::Leave as usize];
        for (((sum, asked), carried), agreed) in
            sums.requests.iter().zip(&self.asked).zip(carried).zip(&mut state.requests)
        {
            if *sum > 0 {
                asked.store(false, Ordering::Relaxed);
                agreed.processes = agreed.processes.saturating_add(*sum);
                agreed.own |= carried;
            }
        }
        // Several steps may be made before the requests are taken.
        let leaves = state.requests[Request::Leave as usize].processes > 0;
        self.leaving.store(leaves, Ordering::Relaxed);
    }

    /// Forgets what steps have agreed on and no caller has taken, and makes this process's part of it again: the
    /// processes have changed, and may have learned different things.
    pub(crate) fn ask_again(&self) {
        let mut state = self.lock();
        let requests = std::mem::take(&mut state.requests);
        for (index, (asked, requests)) in self.asked.iter().zip(requests).enumerate() {
            if requests.own || (state.leaves && index == Request::Leave as usize) {
                asked.store(true, Ordering::Relaxed);
            }
        }
        self.leaving.store(false, Ordering::Relaxed);
    }

    /// Returns the flag of this process's request.
    pub(crate) fn asked(&self, request: Request) -> &Arc<AtomicBool> {
        &self.asked[request as usize]
    }

    /// Returns which processes have made this request in the steps since the last call.
    pub(crate) fn take_requests(&self, request: Request) -> Requests {
        std::mem::take(&mut self.lock().requests[request as usize])
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// An iterator's flag, which steps carry until this is dropped or another iterator announces its own.
pub(crate) struct Announced {
    token: u64,
    state: Arc<Mutex<State>>,
}

impl Announced {
    /// Returns the sum of all processes' flags, if a step has carried this one.
    pub(crate) fn agreed(&self) -> Option<u32> {
        self.state.lock().agreed.filter(|(of, _)| *of == self.token).map(|(_, sum)| sum)
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        let own = self.state.lock().flag.take_if(|(token, _)| *token == self.token);
        // Not under the lock: it may be the last owner of a pipeline, whose end takes time.
        drop(own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_and_made_again_when_the_processes_change() {
        let step = StepAgreement::default();
        let make = |own: &[Request], others: [u32; REQUESTS]| {
            own.iter().for_each(|request| step.asked(*request).store(true, Ordering::Relaxed));
            let mut sums = step.header([0; 2]);
            sums.requests.iter_mut().zip(others).for_each(|(sum, others)| *sum += others);
            step.agree(sums);
        };
        let asked = || step.asked.each_ref().map(|asked| asked.load(Ordering::Relaxed));
        make(&[Request::Leave], [0, 2, 0]);
        make(&[], [0, 1, 0]);
        assert_eq!(step.take_requests(Request::Leave), Requests { processes: 4, own: true });
        assert_eq!(step.take_requests(Request::Leave), Requests::default());
        // What only others have asked for, they ask for again themselves. A wish to leave holds though it was taken.
        make(&[Request::End], [1, 0, 1]);
        assert_eq!(asked(), [false; REQUESTS]);
        step.ask_again();
        assert_eq!(asked(), [false, true, true]);
        for request in [Request::Save, Request::Leave, Request::End] {
            assert_eq!(step.take_requests(request), Requests::default());
        }
    }

    #[test]
    fn all_leave_after_any_of_the_steps_that_were_made_before_requests_are_taken() {
        let step = StepAgreement::default();
        step.asked(Request::Leave).store(true, Ordering::Relaxed);
        for _ in 0..2 {
            step.agree(step.header([0; 2]));
            assert!(step.all_leave());
        }
        assert_eq!(step.take_requests(Request::Leave), Requests { processes: 1, own: true });
        assert!(step.all_leave());
        step.agree(step.header([0; 2]));
        assert!(!step.all_leave());
    }

    #[test]
    fn a_flag_is_carried_until_its_iterator_is_dropped() {
        let step = StepAgreement::default();
        let owned = Arc::new(());
        let announce = |value: u32| {
            let owned = Arc::clone(&owned);
            step.announce(Arc::new(move || {
                let _pipeline = &owned;
                value
            }))
        };
        let carried = || step.header([0; 2]).more_data;
        let first = announce(1);
        step.agree(step.header([0; 2]));
        assert_eq!((first.agreed(), carried()), (Some(1), 1));
        drop(first);
        assert_eq!((carried(), Arc::strong_count(&owned)), (0, 1));
        // The end of one iterator leaves the flag of another, such as that of a validation within a pass.
        let (first, second) = (announce(1), announce(2));
        drop(first);
        assert_eq!(carried(), 2);
        step.agree(step.header([0; 2]));
        assert_eq!(second.agreed(), Some(2));
        drop(second);
        assert_eq!((carried(), Arc::strong_count(&owned)), (0, 1));
    }
}
