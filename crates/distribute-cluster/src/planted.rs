//! Defects that tests plant, to show that a simulation finds them.

#[cfg(not(test))]
pub(crate) use absent::planted;
#[cfg(all(test, feature = "coordination"))]
pub(crate) use present::plant;
#[cfg(test)]
pub(crate) use present::planted;

/// A defect that can be planted.
#[cfg_attr(not(feature = "coordination"), expect(dead_code, reason = "most are of the coordination"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Defect {
    /// A leader admits members of other jobs.
    AnyJob,
    /// A leader admits a second process of a rank.
    TwoOfARank,
    /// A leader does not notice that a member is silent.
    SilenceIgnored,
    /// Time in which a process was stopped counts as silence of the others.
    StallsCount,
    /// The values of those that wait no more stay in an exchange.
    ValuesStay,
    /// Every proof of a secret is accepted.
    AnyProof,
    /// A member may say other things than it has proved.
    AnyClaim,
}

#[cfg(not(test))]
mod absent {
    /// Returns false: outside of tests there are none.
    pub(crate) fn planted(_: super::Defect) -> bool {
        false
    }
}

#[cfg(test)]
mod present {
    use std::cell::Cell;

    thread_local! {
        static PLANTED: Cell<Option<super::Defect>> = const { Cell::new(None) };
    }

    /// Plants a defect for what this thread runs, or removes it.
    #[cfg(feature = "coordination")]
    pub(crate) fn plant(defect: Option<super::Defect>) {
        PLANTED.set(defect);
    }

    pub(crate) fn planted(defect: super::Defect) -> bool {
        PLANTED.get() == Some(defect)
    }
}
