//! Comparison of the tasks that train in step.

use super::{Job, Task};
use crate::progress::Activity;

/// The times of a task that trains in step with others, in seconds.
#[derive(Debug, Clone, Copy)]
struct Peer {
    place: usize,
    own_s: f64,
    collective_s: f64,
}

/// The result of the comparison for one task.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Comparison {
    /// Its own time relative to the median of the others'.
    pub(super) relative: Option<f64>,
    pub(super) is_straggler: bool,
    /// Seconds per step that values take to be exchanged, and seconds of waiting for slower tasks.
    pub(super) communication_s: Option<f64>,
    pub(super) peer_wait_s: Option<f64>,
}

impl Job {
    /// Compares the tasks; the result has one entry for each.
    ///
    /// Tasks that train in step take equally long for a step. One that arrives early waits in the collective for those
    /// that compute longer, and the last one waits for none: its time in collectives is that of the exchange itself.
    pub(super) fn compared(&self) -> Vec<Comparison> {
        let peers: Vec<Peer> = self.tasks.iter().enumerate().filter_map(|(place, task)| task.as_peer(place)).collect();
        let exchange_s = peers.iter().map(|peer| peer.collective_s).min_by(f64::total_cmp).unwrap_or(0.0);
        let mut all = vec![Comparison::default(); self.tasks.len()];
        let mut sorted: Vec<f64> = peers.iter().map(|peer| peer.own_s).collect();
        sorted.sort_unstable_by(f64::total_cmp);
        for peer in &peers {
            let relative = median_without(&sorted, peer.own_s).filter(|median| *median > 0.0);
            let relative = relative.map(|median| peer.own_s / median);
            all[peer.place] = Comparison {
                relative,
                is_straggler: relative.is_some_and(|relative| relative > STRAGGLER),
                communication_s: Some(exchange_s),
                peer_wait_s: Some(peer.collective_s - exchange_s),
            };
        }
        all
    }
}

impl Task {
    /// Returns the task's times if it trains in step with others.
    fn as_peer(&self, place: usize) -> Option<Peer> {
        let (vitals, _) = self.vitals.as_ref().filter(|_| self.ended.is_none() && self.lost.is_none())?;
        let trains = !matches!(vitals.activity, Activity::Starting | Activity::Finished);
        let own_s = finite(vitals.own_s).filter(|_| trains && ["chief", "worker"].contains(&self.role()))?;
        Some(Peer { place, own_s, collective_s: finite(vitals.collective_s)? })
    }
}

/// Returns the value if it is a number from 0 on.
pub(super) fn finite(value: Option<f64>) -> Option<f64> {
    value.filter(|value| value.is_finite() && *value >= 0.0)
}

/// Returns the median of sorted values without one of them.
fn median_without(sorted: &[f64], value: f64) -> Option<f64> {
    let own = sorted.partition_point(|other| *other < value);
    let others = sorted.len().checked_sub(1).filter(|others| *others > 0)?;
    let at = |place: usize| sorted[if place < own { place } else { place + 1 }];
    Some((at((others - 1) / 2) + at(others / 2)) / 2.0)
}

/// A task is a straggler if its own time is longer than this many times the median of the others'.
const STRAGGLER: f64 = 1.2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_that_of_the_others() {
        assert_eq!(median_without(&[], 1.0), None);
        assert_eq!(median_without(&[1.0], 1.0), None);
        assert_eq!(median_without(&[1.0, 5.0], 5.0), Some(1.0));
        assert_eq!(median_without(&[1.0, 2.0, 5.0], 1.0), Some(3.5));
        assert_eq!(median_without(&[1.0, 2.0, 5.0, 7.0], 2.0), Some(5.0));
        assert_eq!(median_without(&[2.0, 2.0, 2.0], 2.0), Some(2.0));
    }
}
