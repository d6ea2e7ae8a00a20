//! The division of a global batch into the rows of each replica.

use std::ops::Range;

use crate::{Error, Result, Topology};

/// The rule that divides a global batch of `G` rows between `N` replicas.
///
/// There are `N` parts; the first `G mod N` have `ceil(G / N)` rows, the others `floor(G / N)`. In step `t`, replica
/// `g` gets the size of part `(g + t * R) mod N`, where `R` is the number of replicas of each worker, so that over the
/// steps every worker gets its share of the larger parts. The rows themselves are assigned in replica order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rebatch {
    pub(crate) global_batch: usize,
    pub(crate) topology: Topology,
    /// Replaces the rule by parts of `ceil(rows / N)`, where `rows` is the actual size of the batch; the last parts may
    /// be shorter or empty.
    pub(crate) equal_pieces: bool,
}

impl Rebatch {
    /// Returns the number of steps after which the sizes repeat.
    pub(crate) fn period(&self) -> usize {
        match self.global_batch % self.topology.num_replicas() {
            0 => 1,
            _ if self.equal_pieces => 1,
            _ => self.topology.workers(),
        }
    }

    /// Returns the rows of each replica, over all workers, in a step whose batch has `rows` rows.
    ///
    /// A short batch fills the replicas in order; the remaining replicas get empty ranges.
    pub(crate) fn ranges(&self, step: usize, rows: usize) -> Result<impl Iterator<Item = Range<usize>> + use<>> {
        let Rebatch { global_batch, topology, equal_pieces } = *self;
        if rows > global_batch {
            return Err(Error::OversizedBatch { step, rows, global_batch });
        }
        let replicas = topology.num_replicas();
        let (small, larger) = (global_batch / replicas, global_batch % replicas);
        // W * R = N, so the rotation repeats after W steps.
        let shift = (step % topology.workers()) * topology.replicas_per_worker();
        let piece = rows.div_ceil(replicas);
        let mut start = 0;
        Ok((0..replicas).map(move |replica| {
            let part = (replica + shift) % replicas;
            let size = if equal_pieces { piece } else { small + usize::from(part < larger) };
            let end = rows.min(start + size);
            let range = start..end;
            start = end;
            range
        }))
    }

    /// Returns this worker's parts of a full batch as consecutive ranges from 0.
    pub(crate) fn own_ranges(&self, step: usize) -> Result<Vec<Range<usize>>> {
        let mut start = 0;
        let own = |range: Range<usize>| {
            start += range.len();
            start - range.len()..start
        };
        Ok(self.local_ranges(step, self.global_batch)?.map(own).collect())
    }

    /// Returns the rows of this worker's replicas.
    pub(crate) fn local_ranges(&self, step: usize, rows: usize) -> Result<impl Iterator<Item = Range<usize>> + use<>> {
        let replicas = self.topology.replicas_per_worker();
        Ok(self.ranges(step, rows)?.skip(self.topology.worker() * replicas).take(replicas))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sizes(worker: usize, step: usize) -> Vec<usize> {
        let rebatch = Rebatch { global_batch: 7, topology: Topology::new(2, worker, 2).unwrap(), equal_pieces: false };
        rebatch.local_ranges(step, 7).unwrap().map(|range| range.len()).collect()
    }

    #[test]
    fn seven_rows_rotate_over_two_workers_of_two_replicas() {
        assert_eq!([sizes(0, 0), sizes(0, 1)].concat(), [2, 2, 2, 1]);
        assert_eq!([sizes(1, 0), sizes(1, 1)].concat(), [2, 1, 2, 2]);
        assert_eq!(sizes(0, 2), sizes(0, 0));
    }

    proptest! {
        #[test]
        fn every_row_goes_to_one_replica(
            workers in 1_usize..6,
            replicas in 1_usize..5,
            global_batch in 1_usize..40,
            step in 0_usize..20,
            short in 0_usize..40,
        ) {
            let topology = Topology::new(workers, 0, replicas).unwrap();
            let rebatch = Rebatch { global_batch, topology, equal_pieces: false };
            let full: Vec<_> = rebatch.ranges(step, global_batch).unwrap().collect();
            prop_assert_eq!(full.iter().cloned().flatten().collect::<Vec<_>>(), (0..global_batch).collect::<Vec<_>>());
            let lengths = || full.iter().map(Range::len);
            prop_assert!(lengths().max().unwrap() - lengths().min().unwrap() <= 1);
            let rows = short.min(global_batch);
            let part: Vec<_> = rebatch.ranges(step, rows).unwrap().collect();
            prop_assert_eq!(part.iter().cloned().flatten().collect::<Vec<_>>(), (0..rows).collect::<Vec<_>>());
            prop_assert_eq!(part.len(), workers * replicas);
            let repeated: Vec<_> = rebatch.ranges(step + rebatch.period(), global_batch).unwrap().collect();
            prop_assert_eq!(full, repeated);
        }

        #[test]
        fn over_a_period_every_worker_gets_its_share(
            workers in 1_usize..6,
            replicas in 1_usize..5,
            global_batch in 1_usize..40,
        ) {
            let totals = (0..workers).map(|worker| {
                let topology = Topology::new(workers, worker, replicas).unwrap();
                let rebatch = Rebatch { global_batch, topology, equal_pieces: false };
                let steps = (0..workers).flat_map(|step| rebatch.local_ranges(step, global_batch).unwrap());
                steps.map(|range| range.len()).sum::<usize>()
            });
            for total in totals {
                prop_assert_eq!(total, global_batch);
            }
        }
    }
}
