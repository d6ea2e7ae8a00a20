//! Virtual time: when each message leaves, arrives and is combined.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use distribute::collectives::schedule::{Action, Link, Schedule, Step};

/// A cluster of equal hosts.
pub(super) struct Topology {
    pub(super) ranks: usize,
    pub(super) per_host: usize,
    pub(super) across: Link,
    pub(super) inside: Link,
    /// A rank, and how many times slower it is.
    pub(super) straggler: Option<(usize, f64)>,
}

/// Links and when each is free again.
pub(super) struct Network<'a> {
    topology: &'a Topology,
    /// Each rank's own way out, inside its host.
    ranks_free: Vec<f64>,
    /// Each host's card, out and in.
    cards_free: Vec<[f64; 2]>,
}

/// A rank at the beginning of a step, or waiting in it.
#[derive(Default)]
struct Progress {
    /// When its present step began.
    clock: f64,
    step: usize,
    /// When the sends of the present step have left; `None` before they were made.
    left: Option<f64>,
    /// When messages that have not been received arrive, by sender.
    inbox: Vec<(usize, VecDeque<f64>)>,
}

impl Progress {
    fn from(&mut self, peer: usize) -> Option<&mut VecDeque<f64>> {
        self.inbox.iter_mut().find(|(from, _)| *from == peer).map(|(_, messages)| messages)
    }

    fn push(&mut self, peer: usize, arrives: f64) {
        match self.from(peer) {
            Some(messages) => messages.push_back(arrives),
            None => self.inbox.push((peer, VecDeque::from([arrives]))),
        }
    }
}

impl<'a> Network<'a> {
    pub(super) fn new(topology: &'a Topology) -> Network<'a> {
        let hosts = topology.ranks.div_ceil(topology.per_host);
        Network { topology, ranks_free: vec![0.0; topology.ranks], cards_free: vec![[0.0; 2]; hosts] }
    }

    /// The seconds until the last rank is done. Elements are bytes.
    ///
    /// Steps begin in the order of virtual time, so that shared links go to the rank that needs them first.
    pub(super) fn run(mut self, schedule: impl Fn(usize) -> Schedule) -> f64 {
        let schedules: Vec<Schedule> = (0..self.topology.ranks).map(schedule).collect();
        let mut ranks: Vec<Progress> = schedules.iter().map(|_| Progress::default()).collect();
        // Seconds in nanos: whole numbers are ordered.
        let nanos = |seconds: f64| Reverse((seconds * 1e9) as u64);
        let mut begins: BinaryHeap<(Reverse<u64>, Reverse<usize>)> =
            (0..ranks.len()).map(|rank| (nanos(0.0), Reverse(rank))).collect();
        while let Some((_, Reverse(rank))) = begins.pop() {
            let Some(step) = schedules[rank].get(ranks[rank].step) else { continue };
            let now = ranks[rank].clock;
            let mut left = now;
            let mut touched = vec![rank];
            for send in &step.sends {
                let (leaves, arrives) = self.send(rank, send.peer, send.range.len(), now);
                left = left.max(leaves);
                ranks[send.peer].push(rank, arrives);
                touched.push(send.peer);
            }
            ranks[rank].left = Some(left);
            for rank in touched {
                if let Some(step) = schedules[rank].get(ranks[rank].step)
                    && let Some(end) = self.finish(rank, step, &mut ranks[rank])
                {
                    let progress = &mut ranks[rank];
                    (progress.clock, progress.step, progress.left) = (end, progress.step + 1, None);
                    begins.push((nanos(end), Reverse(rank)));
                }
            }
        }
        ranks.into_iter().map(|progress| progress.clock).fold(0.0, f64::max)
    }

    /// When a step ends whose sends were made and whose messages are all known; `None` where they are not.
    fn finish(&self, rank: usize, step: &Step, progress: &mut Progress) -> Option<f64> {
        let mut end = progress.left?;
        for receive in &step.receives {
            progress.from(receive.peer).filter(|messages| !messages.is_empty())?;
        }
        for receive in &step.receives {
            let arrived = progress.from(receive.peer).and_then(VecDeque::pop_front).unwrap_or(end);
            let combine = match receive.action {
                Action::Combine => receive.range.len() as f64 * self.topology.inside.per_combined_byte_s,
                Action::Copy => 0.0,
            };
            end = end.max(arrived.max(progress.clock) + combine * self.slowness(rank));
        }
        Some(end)
    }

    /// When a message that is ready at `now` has left its sender, and when it is all there.
    fn send(&mut self, from: usize, to: usize, bytes: usize, now: f64) -> (f64, f64) {
        let host = |rank: usize| rank / self.topology.per_host;
        let slow = self.slowness(from).max(self.slowness(to));
        if host(from) == host(to) {
            let link = &self.topology.inside;
            let leaves = now.max(self.ranks_free[from]) + bytes as f64 * link.per_byte_s * slow;
            self.ranks_free[from] = leaves;
            return (leaves, leaves + link.latency_s * slow);
        }
        let link = &self.topology.across;
        let begins = now.max(self.cards_free[host(from)][0]).max(self.cards_free[host(to)][1]);
        let leaves = begins + bytes as f64 * link.per_byte_s * slow;
        self.cards_free[host(from)][0] = leaves;
        self.cards_free[host(to)][1] = leaves;
        (leaves, leaves + link.latency_s * slow)
    }

    fn slowness(&self, rank: usize) -> f64 {
        self.topology.straggler.filter(|(slow, _)| *slow == rank).map_or(1.0, |(_, factor)| factor)
    }
}

#[cfg(test)]
mod tests {
    use distribute::collectives::Algorithm;

    use super::*;

    fn flat(ranks: usize) -> Topology {
        Topology { ranks, per_host: 1, across: Link::TCP, inside: Link::SHARED_MEMORY, straggler: None }
    }

    #[test]
    fn equal_ranks_take_what_the_formula_says() {
        for ranks in [2, 4, 8, 16] {
            let topology = Topology { inside: Link::TCP, ..flat(ranks) };
            for algorithm in [Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::HalvingDoubling] {
                for bytes in [64, 1 << 20, 16 << 20] {
                    let simulated = Network::new(&topology).run(|rank| algorithm.schedule(rank, ranks, bytes));
                    let predicted = algorithm.predict(bytes, ranks, &Link::TCP).unwrap();
                    let ratio = simulated / predicted;
                    assert!((0.98..1.02).contains(&ratio), "{} of {ranks}, {bytes}: {ratio}", algorithm.name());
                }
            }
        }
    }

    #[test]
    fn a_slow_rank_slows_all_and_a_shared_card_is_shared() {
        let ring = |topology: &Topology| {
            Network::new(topology).run(|rank| Algorithm::Ring.schedule(rank, topology.ranks, 1 << 20))
        };
        let even = ring(&flat(8));
        assert!(ring(&Topology { straggler: Some((3, 4.0)), ..flat(8) }) > 2.0 * even);
        let tree = |per_host| {
            let topology = Topology { per_host, inside: Link::TCP, ..flat(8) };
            Network::new(&topology).run(|rank| Algorithm::RecursiveDoubling.schedule(rank, 8, 1 << 20))
        };
        assert!(tree(4) > 1.5 * tree(1));
    }
}
