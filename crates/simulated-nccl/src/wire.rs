//! The protocol between ranks and their hub: a line of lengths, a JSON header, then raw data.

use std::io::{Error, ErrorKind, Read, Result, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Identifies which calls of different ranks belong together within a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Key {
    /// [`Key::DIRECT`], [`Key::SHRINK`], or the number of an operation captured into a graph.
    pub(crate) space: u64,
    /// The number of the call, or of the graph's replay.
    pub(crate) number: u64,
}

impl Key {
    pub(crate) const DIRECT: u64 = 0;
    pub(crate) const SHRINK: u64 = u64::MAX;
}

/// A collective operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    AllReduce,
    Reduce,
    Broadcast,
    ReduceScatter,
    AllGather,
    AllToAll,
    Gather,
    Scatter,
}

/// The parameters of an operation that must be equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    pub(crate) data_type: i32,
    pub(crate) op: i32,
    pub(crate) root: i32,
    pub(crate) count: u64,
}

/// A message from a rank to its hub.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    Hello { token: u128, ranks: u32, rank: u32, device: Option<String>, shared_devices: bool, process: u32 },
    Collective { group: u64, tag: u64, key: Key, call: Call },
    Send { group: u64, tag: u64, key: Key, peer: u32, data_type: i32, count: u64 },
    Recv { group: u64, tag: u64, key: Key, peer: u32, data_type: i32, count: u64 },
    Split { group: u64, tag: u64, key: Key, color: i32, order: i32 },
    Shrink { group: u64, tag: u64, key: Key, excluded: Vec<u32> },
    Leave { group: u64, aborted: bool },
}

/// A message from a hub to a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// All ranks have joined, or why that is impossible.
    Hello(std::result::Result<u64, Failure>),
    /// An operation is done; its result is the data.
    Done { tag: u64 },
    /// A communicator of some ranks was created; `None` for a rank without a colour.
    Member { tag: u64, member: Option<Membership> },
    /// A communicator is broken.
    Broken { group: u64, failure: Failure },
}

/// A rank's place in a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Membership {
    pub(crate) group: u64,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
}

pub(crate) fn write(to: &mut impl Write, header: &impl Serialize, data: &[u8]) -> Result<()> {
    let header = serde_json::to_vec(header)?;
    let mut frame = Vec::with_capacity(16 + header.len());
    frame.extend((header.len() as u64).to_le_bytes());
    frame.extend((data.len() as u64).to_le_bytes());
    frame.extend(header);
    to.write_all(&frame)?;
    to.write_all(data)?;
    to.flush()
}

pub(crate) fn read<T: DeserializeOwned>(from: &mut impl Read) -> Result<(T, Vec<u8>)> {
    let mut lengths = [[0; 8]; 2];
    for length in &mut lengths {
        from.read_exact(length)?;
    }
    let [header, data] = lengths.map(u64::from_le_bytes);
    if header > LONGEST_HEADER {
        return Err(Error::new(ErrorKind::InvalidData, "a header is too long"));
    }
    let header = take(from, header)?;
    Ok((serde_json::from_slice(&header)?, take(from, data)?))
}

/// Memory grows as bytes arrive, not by the announced length.
fn take(from: &mut impl Read, length: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(length).read_to_end(&mut bytes)?;
    match bytes.len() as u64 == length {
        true => Ok(bytes),
        false => Err(ErrorKind::UnexpectedEof.into()),
    }
}

const LONGEST_HEADER: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut bytes = Vec::new();
        write(&mut bytes, &Answer::Done { tag: 7 }, &[1, 2, 3]).unwrap();
        let (answer, data) = read::<Answer>(&mut &bytes[..]).unwrap();
        assert!(matches!(answer, Answer::Done { tag: 7 }));
        assert_eq!(data, [1, 2, 3]);
        for length in 0..bytes.len() {
            assert!(read::<Answer>(&mut &bytes[..length]).is_err(), "{length}");
        }
        assert!(read::<Answer>(&mut &[255; 64][..]).is_err());
    }
}
