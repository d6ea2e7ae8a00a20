//! The fingerprint of a collective call, which ranks compare.

use std::fmt;

use distribute_device::DType;
use distribute_types::{FNV32, fnv1a_32};

use crate::{Rank, ReduceOp};

/// The kind of a collective operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Kind {
    /// Every rank ends with the reduction of all ranks' values.
    AllReduce = 0,
    /// Every rank ends with the root's values.
    Broadcast = 1,
    /// Every rank ends with all ranks' values, in rank order.
    AllGather = 2,
    /// Rank r ends with the r-th part of the reduction.
    ReduceScatter = 3,
    /// The root ends with the reduction of all ranks' values.
    Reduce = 4,
    /// No rank passes before every rank has arrived.
    Barrier = 5,
    /// Rank s ends with the s-th part of every rank's values.
    AllToAll = 6,
    /// The root ends with all ranks' values.
    Gather = 7,
    /// Rank r ends with the r-th part of the root's values.
    Scatter = 8,
    /// [`AllGather`](Kind::AllGather) with parts of different lengths.
    AllGatherV = 9,
    /// [`ReduceScatter`](Kind::ReduceScatter) with parts of different lengths.
    ReduceScatterV = 10,
    /// [`AllToAll`](Kind::AllToAll) with parts of different lengths.
    AllToAllV = 11,
    /// [`Gather`](Kind::Gather) with parts of different lengths.
    GatherV = 12,
    /// [`Scatter`](Kind::Scatter) with parts of different lengths.
    ScatterV = 13,
    /// One rank sends to another.
    Send = 14,
}

impl Kind {
    /// Every kind, in the order of codes.
    const ALL: [Kind; 15] = [
        Kind::AllReduce,
        Kind::Broadcast,
        Kind::AllGather,
        Kind::ReduceScatter,
        Kind::Reduce,
        Kind::Barrier,
        Kind::AllToAll,
        Kind::Gather,
        Kind::Scatter,
        Kind::AllGatherV,
        Kind::ReduceScatterV,
        Kind::AllToAllV,
        Kind::GatherV,
        Kind::ScatterV,
        Kind::Send,
    ];

    /// Returns the name in snake case, which is the method's name.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "all_reduce",
            Kind::Broadcast => "broadcast",
            Kind::AllGather => "all_gather",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::Reduce => "reduce",
            Kind::Barrier => "barrier",
            Kind::AllToAll => "all_to_all",
            Kind::Gather => "gather",
            Kind::Scatter => "scatter",
            Kind::AllGatherV => "all_gather_v",
            Kind::ReduceScatterV => "reduce_scatter_v",
            Kind::AllToAllV => "all_to_all_v",
            Kind::GatherV => "gather_v",
            Kind::ScatterV => "scatter_v",
            Kind::Send => "send",
        }
    }

    fn from_code(code: u8) -> Option<Kind> {
        Kind::ALL.get(usize::from(code)).copied()
    }
}

/// The reduction of a call, as ranks compare it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reducing {
    /// A built-in operator.
    BuiltIn(ReduceOp),
    /// A custom [`Reduction`](crate::Reduction).
    User,
}

impl Reducing {
    const fn code(self) -> u8 {
        match self {
            Reducing::BuiltIn(op) => op.code(),
            Reducing::User => USER_CODE,
        }
    }

    fn from_code(code: u8) -> Option<Reducing> {
        if code == USER_CODE { Some(Reducing::User) } else { ReduceOp::from_code(code).map(Reducing::BuiltIn) }
    }
}

impl From<ReduceOp> for Reducing {
    fn from(op: ReduceOp) -> Reducing {
        Reducing::BuiltIn(op)
    }
}

impl fmt::Display for Reducing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reducing::BuiltIn(op) => op.fmt(f),
            Reducing::User => f.write_str("user"),
        }
    }
}

/// The code of custom reductions, which follows those of [`ReduceOp`].
const USER_CODE: u8 = 8;

/// The fingerprint of a call: the properties that all ranks must agree on before a collective moves a byte.
///
/// Two ranks whose calls differ get [`Error::Mismatch`](crate::Error::Mismatch), never a wrong sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The kind of operation.
    pub kind: Kind,
    /// Position in the group's order of calls, from 0.
    pub sequence: u64,
    /// Element type.
    pub dtype: DType,
    /// Number of elements: of the input for `reduce_scatter`, of the sum over ranks for calls with a count per rank, of
    /// one message for `all_to_all`, `gather` and `scatter` between processes, else of this rank's values.
    pub count: u64,
    /// Digest of how the elements are split into slices or parts, combined with the call's tag; zero if there is
    /// neither.
    pub layout: u32,
    /// The reduction, if the kind has one.
    pub op: Option<Reducing>,
    /// The root, if the kind has one.
    pub root: Option<Rank>,
}

impl Call {
    /// Returns the built-in operator; `None` if the call has no reduction or a custom one.
    pub(crate) fn built_in(&self) -> Option<ReduceOp> {
        match self.op {
            Some(Reducing::BuiltIn(op)) => Some(op),
            Some(Reducing::User) | None => None,
        }
    }

    /// Bytes of an encoded call.
    pub(crate) const ENCODED_LEN: usize = 40;

    /// Fixed little-endian layout: magic, kind, dtype, op, schedule's code, then root, layout, sequence, count,
    /// schedule's digest, zero.
    pub(crate) fn encode(&self, schedule: ScheduleId) -> [u8; Self::ENCODED_LEN] {
        let mut bytes = [0u8; Self::ENCODED_LEN];
        bytes[0..4].copy_from_slice(MAGIC);
        bytes[4] = self.kind as u8;
        bytes[5] = self.dtype.code();
        bytes[6] = self.op.map_or(u8::MAX, Reducing::code);
        bytes[7] = schedule.code;
        bytes[8..12].copy_from_slice(&self.root.map_or(u32::MAX, |rank| rank.0).to_le_bytes());
        bytes[12..16].copy_from_slice(&self.layout.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.count.to_le_bytes());
        bytes[32..36].copy_from_slice(&schedule.digest.to_le_bytes());
        bytes
    }

    /// Decodes a call and its schedule's identity; `None` if the bytes are not a call.
    pub(crate) fn decode(bytes: &[u8; Self::ENCODED_LEN]) -> Option<(Call, ScheduleId)> {
        if &bytes[0..4] != MAGIC || bytes[36..40] != [0; 4] {
            return None;
        }
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | (u64::from(word(at + 4)) << 32);
        let schedule = ScheduleId { code: bytes[7], digest: word(32) };
        let call = Call {
            kind: Kind::from_code(bytes[4])?,
            dtype: DType::from_code(bytes[5])?,
            op: match bytes[6] {
                u8::MAX => None,
                code => Some(Reducing::from_code(code)?),
            },
            root: match word(8) {
                u32::MAX => None,
                rank => Some(Rank(rank)),
            },
            layout: word(12),
            sequence: long(16),
            count: long(24),
        };
        Some((call, schedule))
    }

    /// Returns the digest of the lengths of several slices; zero for one.
    pub(crate) fn layout_of(lengths: impl ExactSizeIterator<Item = usize>) -> u32 {
        if lengths.len() <= 1 {
            return 0;
        }
        fnv1a_32(FNV32, lengths.flat_map(|length| (length as u64).to_le_bytes()))
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.kind.name(), self.sequence)?;
        if self.kind == Kind::Barrier {
            return Ok(());
        }
        write!(f, " of {} {}", self.count, self.dtype)?;
        if self.layout != 0 {
            write!(f, " (layout and tag {:08x})", self.layout)?;
        }
        if let Some(op) = self.op {
            write!(f, ", {op}")?;
        }
        if let Some(root) = self.root {
            write!(f, ", root {}", root.0)?;
        }
        Ok(())
    }
}

/// The identity of the schedule of a call between processes. It is part of every message's header, since messages of
/// one schedule are meaningless in another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScheduleId {
    code: u8,
    digest: u32,
}

impl ScheduleId {
    /// The identity for calls that have only one schedule.
    pub(crate) const ONLY: ScheduleId = ScheduleId { code: 0, digest: 0 };

    /// Identifies a schedule by its algorithm and by the placement that it was built from.
    pub(crate) fn new(name: &str, placement: &[usize]) -> ScheduleId {
        let code = NAMES.iter().position(|known| *known == name).map_or(u8::MAX, |index| index as u8 + 1);
        let placement = placement.iter().flat_map(|place| (*place as u64).to_le_bytes());
        ScheduleId { code, digest: fnv1a_32(FNV32, name.bytes().chain(placement)) }
    }

    pub(crate) fn name(self) -> &'static str {
        match self.code {
            0 => "its only algorithm",
            u8::MAX => "an algorithm of the caller's",
            code => NAMES.get(usize::from(code) - 1).unwrap_or(&"an unknown algorithm"),
        }
    }
}

/// Names of algorithms, in the order of their codes.
const NAMES: [&str; 8] = [
    "ring",
    "recursive-doubling",
    "halving-doubling",
    "tree",
    "double-tree",
    "hierarchical",
    "dissemination",
    "ordered-tree",
];

const MAGIC: &[u8; 4] = b"dst2";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;

    use super::*;

    fn call() -> Call {
        Call {
            kind: Kind::Reduce,
            sequence: 7,
            dtype: DType::BF16,
            count: 1 << 40,
            layout: 9,
            op: Some(Reducing::BuiltIn(ReduceOp::Max)),
            root: Some(Rank(3)),
        }
    }

    #[test]
    fn an_encoded_call_reads_back() {
        let ring = ScheduleId::new("ring", &[]);
        assert_eq!(Call::decode(&call().encode(ring)), Some((call(), ring)));
        let barrier = Call { kind: Kind::Barrier, op: None, root: None, ..call() };
        assert_eq!(Call::decode(&barrier.encode(ScheduleId::ONLY)), Some((barrier, ScheduleId::ONLY)));
    }

    #[test]
    fn schedules_of_other_names_or_hosts_are_others() {
        let ring = ScheduleId::new("ring", &[]);
        assert_eq!((ring.name(), ScheduleId::new("mine", &[]).name()), ("ring", "an algorithm of the caller's"));
        assert_ne!(ring, ScheduleId::new("tree", &[]));
        assert_ne!(ScheduleId::new("mine", &[]), ScheduleId::new("yours", &[]));
        assert_ne!(ScheduleId::new("hierarchical", &[0, 0, 2]), ScheduleId::new("hierarchical", &[0, 1, 1]));
    }

    #[test]
    fn codes_are_places_in_the_table() {
        for (code, kind) in (0..).zip(Kind::ALL) {
            assert_eq!(kind as u8, code);
            assert_eq!(Kind::from_code(code), Some(kind));
        }
    }

    #[test]
    fn foreign_bytes_are_refused() {
        let mut bytes = call().encode(ScheduleId::ONLY);
        bytes[0] = b'X';
        assert_eq!(Call::decode(&bytes), None);
        let mut bytes = call().encode(ScheduleId::ONLY);
        bytes[5] = 200;
        assert_eq!(Call::decode(&bytes), None);
    }

    #[test]
    fn layouts_differ_where_slices_do() {
        assert_eq!(Call::layout_of([12usize].into_iter()), 0);
        assert_ne!(Call::layout_of([5usize, 7].into_iter()), Call::layout_of([7usize, 5].into_iter()));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

        #[test]
        fn any_bytes_are_a_call_or_none(
            bytes: [u8; Call::ENCODED_LEN], kind in 0u8..16, dtype in 0u8..11, op in 0u8..12,
        ) {
            prop_assert_eq!(Call::decode(&bytes), None);
            let mut bytes = bytes;
            bytes[..4].copy_from_slice(MAGIC);
            bytes[4] = kind;
            bytes[5] = dtype;
            bytes[6] = if op == 11 { u8::MAX } else { op };
            bytes[36..].fill(0);
            if let Some((call, schedule)) = Call::decode(&bytes) {
                prop_assert_eq!(call.encode(schedule), bytes);
            }
        }
    }
}
