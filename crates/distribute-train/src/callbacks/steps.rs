//! Steps after which something is due.

/// A number of steps after each of which something is due, also if several are run at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Steps {
    count: u64,
    /// The step after which it was last due.
    last: u64,
}

impl Steps {
    pub(super) fn new(count: u64) -> Steps {
        Steps { count: count.max(1), last: 0 }
    }

    /// Returns the number of steps between two times.
    pub(super) fn count(self) -> u64 {
        self.count
    }

    /// Continues after a step: the same on processes that have joined others, or were restarted, as on those that have
    /// counted so far.
    pub(super) fn continue_after(&mut self, step: u64) {
        self.last = self.last.max(step);
    }

    /// Returns whether a multiple of the count has been passed, by one step or by several that were run at once.
    pub(super) fn is_due(&mut self, step: u64) -> bool {
        let due = step / self.count > self.last / self.count;
        if due {
            self.last = step;
        }
        due
    }
}
