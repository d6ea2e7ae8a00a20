//! Whether all processes of a group have been given the same.

use crate::digest::fnv1a_64;
use crate::{ProcessGroup, Rank, Result, on_local_ranks};

/// Where a process's description differs from another's.
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

/// Compares a description between all processes of a group, line by line: what a configuration is, or a model.
///
/// `ranks` are all ranks of this process, and every process calls this at the same point. Between equal descriptions only a
/// digest travels.
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
    // A line is one line, whatever it says.
    let lines: Vec<String> = lines.iter().map(|line| line.replace(['\n', '\0'], " ")).collect();
    let text = lines.join("\n");
    let mine = [fnv1a_64(0, text.bytes()), text.len() as u64];
    let gathered = gather(ranks, &mine)?;
    if gathered.chunks_exact(2).all(|theirs| *theirs == mine) {
        return Ok(None);
    }
    // Everybody has seen the same lengths. What a peer says of its own is no reason to allocate as much.
    let longest = gathered.chunks_exact(2).map(|theirs| theirs[1]).max().unwrap_or(0).min(MAX_TEXT);
    let mut padded = text.into_bytes();
    // Shorter texts end in zero bytes, which no line holds.
    padded.resize(longest as usize, 0);
    let all = gather(ranks, &padded)?;
    let Some(rank) = all.chunks_exact(padded.len().max(1)).position(|bytes| bytes != padded) else {
        // All that was compared is equal, and the digests are not.
        let rank = gathered.chunks_exact(2).position(|theirs| *theirs != mine).unwrap_or(0);
        let beyond = Some("something beyond its first MiB".to_owned());
        return Ok(Some(Difference { line: lines.len(), mine: beyond.clone(), theirs: beyond, rank: Rank::of(rank) }));
    };
    let theirs = String::from_utf8_lossy(&all[rank * padded.len()..(rank + 1) * padded.len()]);
    let theirs: Vec<&str> = theirs.trim_end_matches('\0').split('\n').collect();
    let line = (0..lines.len().max(theirs.len()))
        .find(|line| lines.get(*line).map(String::as_str) != theirs.get(*line).copied())
        .unwrap_or(0);
    Ok(Some(Difference {
        line,
        mine: lines.get(line).cloned(),
        theirs: theirs.get(line).map(|text| (*text).to_owned()),
        rank: Rank::of(rank),
    }))
}

/// What every rank of the group has, in their order.
fn gather<T: distribute_device::Element>(ranks: &[ProcessGroup], mine: &[T]) -> Result<Vec<T>> {
    let gathered = on_local_ranks(ranks, |_, group| {
        group.all_gather_async(mine.to_vec(), vec![T::default(); mine.len() * group.world_size()])
    })?;
    let [_, all] = gathered.unwrap_or_default();
    Ok(all)
}

/// Longest description that is compared line by line.
const MAX_TEXT: u64 = 1 << 20;
