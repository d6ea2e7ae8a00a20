//! Placement of shards on servers.

/// How shards are distributed over servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Placement {
    /// Round robin, in the order in which variables are created, as in TensorFlow.
    RoundRobin,
    /// Each shard on the server with the fewest bytes so far, which balances their load.
    #[default]
    ByteBalanced,
}

/// Assigns shards to servers.
#[derive(Clone, Debug)]
pub(crate) struct Placer {
    placement: Placement,
    /// Bytes on each server so far.
    bytes: Vec<u64>,
    next: usize,
}

impl Placer {
    /// Creates a placer for this number of servers, at least one.
    pub(crate) fn new(placement: Placement, servers: usize) -> Placer {
        Placer { placement, bytes: vec![0; servers.max(1)], next: 0 }
    }

    /// Returns the server of the next shard.
    pub(crate) fn place(&mut self, bytes: u64) -> usize {
        let server = match self.placement {
            Placement::RoundRobin => self.next % self.bytes.len(),
            // The first of the emptiest servers.
            Placement::ByteBalanced => (0..self.bytes.len()).min_by_key(|server| self.bytes[*server]).unwrap_or(0),
        };
        self.next += 1;
        self.bytes[server] += bytes;
        server
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(placement: Placement, bytes: &[u64]) -> Vec<usize> {
        let mut placer = Placer::new(placement, 2);
        bytes.iter().map(|bytes| placer.place(*bytes)).collect()
    }

    #[test]
    fn in_turns_or_by_bytes() {
        assert_eq!(places(Placement::RoundRobin, &[100, 1, 100, 1]), [0, 1, 0, 1]);
        assert_eq!(places(Placement::ByteBalanced, &[100, 1, 100, 1, 1]), [0, 1, 1, 0, 0]);
    }
}
