//! Whether a job that has failed is started again, and when.

use std::collections::VecDeque;
use std::time::Duration;

use crate::outcome::Exit;

/// How often a job may be started again.
#[derive(Debug, Clone)]
pub(crate) struct Budget {
    most: u32,
    /// Restarts that are longer ago no longer count.
    window: Option<Duration>,
    backoff: Duration,
    restarts: VecDeque<Duration>,
    /// The time since the launcher began at which the clock of those who ask began.
    begun: Duration,
    /// The option that sets how often.
    option: &'static str,
}

/// The consequence of a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Start the job again after a pause, the `count`th time of `of`.
    Restart { pause: Duration, count: u32, of: u32 },
    /// Give up, for this reason; empty where no restart was asked for.
    GiveUp(String),
}

impl Budget {
    pub(crate) fn new(most: u32, window: Option<Duration>, backoff: Duration) -> Budget {
        let (restarts, begun) = (VecDeque::new(), Duration::ZERO);
        Budget { most, window, backoff, restarts, begun, option: "--max-restarts" }
    }

    /// Names the option that sets how often.
    pub(crate) fn of_option(self, option: &'static str) -> Budget {
        Budget { option, ..self }
    }

    /// Lets those who ask count the time from `begun` on, a time since the launcher began.
    pub(crate) fn counted_from(self, begun: Duration) -> Budget {
        Budget { begun, ..self }
    }

    /// Decides after a failure at `now`, the time since the launcher began unless it is
    /// [counted from another one](Budget::counted_from), whose first cause ended so.
    pub(crate) fn after(&mut self, exit: Exit, now: Duration) -> Decision {
        let now = self.begun.saturating_add(now);
        if self.most == 0 {
            return Decision::GiveUp(String::new());
        }
        if exit == Exit::Code(CONFIGURATION) {
            let why = "exit code 2 means wrong flags or configuration, which a restart does not change";
            return Decision::GiveUp(why.to_owned());
        }
        if let Some(window) = self.window {
            self.restarts.retain(|at| now.saturating_sub(*at) < window);
        }
        let used = self.restarts.len() as u32;
        if used >= self.most {
            let within = self.window.map(|window| format!(" within {} s", window.as_secs())).unwrap_or_default();
            let option = self.option;
            return Decision::GiveUp(format!("it was started again {used} times{within}, as often as {option} says"));
        }
        let pause = self.backoff.saturating_mul(1 << used.min(16)).min(LONGEST.max(self.backoff));
        self.restarts.push_back(now + pause);
        Decision::Restart { pause, count: used + 1, of: self.most }
    }
}

const CONFIGURATION: i32 = 2;

/// The longest pause, unless the first one is longer.
const LONGEST: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn pause(budget: &mut Budget, at: u32) -> Option<u64> {
        match budget.after(Exit::Code(138), SECOND * at) {
            Decision::Restart { pause, .. } => Some(pause.as_secs()),
            Decision::GiveUp(_) => None,
        }
    }

    #[test]
    fn pauses_double_until_the_budget_is_spent() {
        let mut budget = Budget::new(8, None, SECOND);
        let pauses: Vec<_> = (0..9).map(|at| pause(&mut budget, at * 100)).collect();
        let expected = [1, 2, 4, 8, 16, 32, 60, 60].map(Some);
        assert_eq!(pauses, [&expected[..], &[None]].concat());
        assert_eq!(
            budget.after(Exit::Signal(9), SECOND),
            Decision::GiveUp("it was started again 8 times, as often as --max-restarts says".into())
        );
    }

    #[test]
    fn restarts_of_long_ago_do_not_count() {
        let mut budget = Budget::new(2, Some(SECOND * 100), SECOND);
        assert_eq!([0, 10, 20].map(|at| pause(&mut budget, at)), [Some(1), Some(2), None]);
        assert_eq!([105, 106, 300].map(|at| pause(&mut budget, at)), [Some(2), None, Some(1)]);
        // Another clock begins.
        let mut budget = budget.counted_from(SECOND * 310);
        assert_eq!([0, 10, 91].map(|at| pause(&mut budget, at)), [Some(2), None, Some(2)]);
    }

    #[test]
    fn what_a_restart_does_not_change_is_not_repeated() {
        assert_eq!(Budget::new(0, None, SECOND).after(Exit::Signal(9), SECOND), Decision::GiveUp(String::new()));
        assert!(matches!(Budget::new(9, None, SECOND).after(Exit::Code(2), SECOND), Decision::GiveUp(_)));
    }
}
