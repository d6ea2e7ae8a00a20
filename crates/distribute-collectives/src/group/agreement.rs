//! Comparison of settings between the processes of a group.

use distribute_types::{FNV64, fnv1a_64};

use super::{ProcessGroup, on_local_ranks};
use crate::{Rank, Result};

/// The first line in which a process's description differs from another's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Index of the first line that differs.
    pub line: usize,
    /// The line on this side; `None` if the other side has more lines.
    pub mine: Option<String>,
    /// The line on the other side; `None` if this side has more lines.
    pub theirs: Option<String>,
    /// The first rank that differs from this process.
    pub rank: Rank,
}

/// Compares a description, such as a configuration or a model's parameters, line by line between all processes of a
/// group. Returns the first difference.
///
/// `ranks` are all ranks of this process, and every process calls this at the same point. If the descriptions are
/// equal, only digests are sent.
///
/// # Cost
/// One all-gather of 16 bytes per rank; if descriptions differ, another one of the longest description, at most 1 MiB.
///
/// # Errors
/// The errors of every operation: see [`ProcessGroup`].
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
    /// Compares descriptions like [`first_difference`]; every rank calls this itself.
    ///
    /// # Errors
    /// The errors of every operation: see [`ProcessGroup`].
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
    // Line breaks inside a line are replaced.
    let lines: Vec<String> = lines.iter().map(|line| line.replace(['\n', '\0'], " ")).collect();
    let text = lines.join("\n");
    let mine = Digest { digest: fnv1a_64(FNV64, text.bytes()), len: text.len() as u64 };
    let digests: Vec<Digest> = gather(mine.to_bytes().to_vec())?.as_chunks().0.iter().map(Digest::from_bytes).collect();
    let Some(other) = digests.iter().position(|theirs| *theirs != mine) else { return Ok(None) };
    // All ranks use the same lengths. A length that a peer claims does not make this one allocate more than the
    // maximum.
    let longest = digests.iter().map(|theirs| theirs.len).max().unwrap_or(0).min(MAX_TEXT) as usize;
    let mut padded = text.into_bytes();
    // Shorter texts are padded with zero bytes, which no line contains.
    padded.resize(longest, 0);
    let all = gather(padded.clone())?;
    let Some(rank) = all.chunks_exact(longest.max(1)).position(|bytes| bytes != padded) else {
        // The compared parts are equal, but the digests differ.
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

/// The digest and the length of a description.
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

/// Maximum length of a description that is compared line by line.
const MAX_TEXT: u64 = 1 << 20;
