//! Comparison of what the processes of a group were given.

use distribute_types::{FNV64, fnv1a_64};

use super::{ProcessGroup, on_local_ranks};
use crate::{Rank, Result};

/// The first line in which a process's description differs from another's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Index of the first line that differs.
    pub line: usize,
    /// That line here; `None` where the other one has more lines.
    pub mine: Option<String>,
    /// That line there; `None` where this one has more lines.
    pub theirs: Option<String>,
    /// The first rank that differs from this process.
    pub rank: Rank,
}

/// Compares a description between all processes of a group, line by line, such as a configuration or a model's
/// parameters.
///
/// `ranks` are all ranks of this process, and every process calls this at the same point. Between equal descriptions
/// only a digest travels.
///
/// # Cost
/// One all-gather of 16 bytes for each rank; where descriptions differ, one more of the longest, of at most 1 MiB.
///
/// # Errors
/// See [`ProcessGroup`].
///
/// # Examples
/// ```
/// use distribute_collectives::{ProcessGroup, first_difference};
/// let ranks = ProcessGroup::local(2)?;
/// assert_eq!(first_difference(&ranks, &["learning rate: 0.1".to_owned()])?, None);
/// # Ok::<(), distribute_collectives::Error>(())
/// ```
pub fn first_difference(ranks: &[ProcessGroup], lines: &[String]) -> Result<Option<Difference>> {
    if ranks.first().is_none_or(|first| first.world_size() == ranks.len()) {
        return Ok(None);
    }
    compare(lines, &mut |mine| {
        let gathered = on_local_ranks(ranks, |_, group| {
            group.start().all_gather(mine.clone(), vec![0; mine.len() * group.world_size()])
        })?;
        let [_, all] = gathered.unwrap_or_default();
        Ok(all)
    })
}

impl ProcessGroup {
    /// As [`first_difference`](crate::first_difference), called by each rank for itself.
    ///
    /// # Errors
    /// See [`ProcessGroup`].
    pub fn first_difference(&self, lines: &[String]) -> Result<Option<Difference>> {
        compare(lines, &mut |mine| {
            let mut all = vec![0; mine.len() * self.world_size()];
            self.all_gather(&mine, &mut all)?;
            Ok(all)
        })
    }
}

/// Compares `lines` with those of all ranks, whose bytes `gather` collects in rank order.
fn compare(lines: &[String], gather: &mut dyn FnMut(Vec<u8>) -> Result<Vec<u8>>) -> Result<Option<Difference>> {
    // A line is one line, whatever it says.
    let lines: Vec<String> = lines.iter().map(|line| line.replace(['\n', '\0'], " ")).collect();
    let text = lines.join("\n");
    let mine = Digest { digest: fnv1a_64(FNV64, text.bytes()), len: text.len() as u64 };
    let digests: Vec<Digest> = gather(mine.to_bytes().to_vec())?.as_chunks().0.iter().map(Digest::from_bytes).collect();
    let Some(other) = digests.iter().position(|theirs| *theirs != mine) else { return Ok(None) };
    // Everybody has seen the same lengths. What a peer says of its own is no reason to allocate as much.
    let longest = digests.iter().map(|theirs| theirs.len).max().unwrap_or(0).min(MAX_TEXT) as usize;
    let mut padded = text.into_bytes();
    // Shorter texts end in zero bytes, which no line holds.
    padded.resize(longest, 0);
    let all = gather(padded.clone())?;
    let Some(rank) = all.chunks_exact(longest.max(1)).position(|bytes| bytes != padded) else {
        // All that was compared is equal, and the digests are not.
        let beyond = Some("something beyond its first MiB".to_owned());
        return Ok(Some(Difference { line: lines.len(), mine: beyond.clone(), theirs: beyond, rank: Rank::of(other) }));
    };
    let theirs = String::from_utf8_lossy(&all[rank * longest..(rank + 1) * longest]);
    let theirs: Vec<&str> = theirs.trim_end_matches('\0').split('\n').collect();
    let differs = |line: &usize| lines.get(*line).map(String::as_str) != theirs.get(*line).copied();
    let line = (0..lines.len().max(theirs.len())).find(differs).unwrap_or(0);
    Ok(Some(Difference {
        line,
        mine: lines.get(line).cloned(),
        theirs: theirs.get(line).map(|text| (*text).to_owned()),
        rank: Rank::of(rank),
    }))
}

/// Digest and length of a description.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Digest {
    digest: u64,
    len: u64,
}

impl Digest {
    fn to_bytes(self) -> [u8; 16] {
        (u128::from(self.digest) | u128::from(self.len) << 64).to_le_bytes()
    }

    fn from_bytes(bytes: &[u8; 16]) -> Digest {
        let number = u128::from_le_bytes(*bytes);
        Digest { digest: number as u64, len: (number >> 64) as u64 }
    }
}

/// Longest description that is compared line by line.
const MAX_TEXT: u64 = 1 << 20;
