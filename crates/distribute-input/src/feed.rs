//! Reads rows of lanes in pieces of requested length.

use std::collections::VecDeque;

use crate::Result;
use crate::dataset::{Items, Opener, Pass};
use crate::element::Operations;
use crate::position::{Cut, Lane};

/// Reads lanes one after another.
pub(crate) struct Feed<B> {
    open: Opener<B>,
    operations: Operations<B>,
    pass: Pass,
    /// All lanes, with the number of rows handed out of each.
    lanes: Vec<Lane>,
    /// The index of the lane being read, and its batches.
    reading: usize,
    batches: Option<Batches<B>>,
    /// Rows that were read and not handed out yet, with the index of their lane.
    waiting: VecDeque<(usize, B)>,
}

/// The batches of an open lane, and the number of rows that each of its cuts has seen.
struct Batches<B> {
    items: Items<B>,
    came: Vec<u64>,
}

impl<B> Feed<B> {
    /// Begins to read the lanes of a worker with `replicas` replicas.
    pub(crate) fn new(
        open: &Opener<B>,
        operations: Operations<B>,
        epoch: u64,
        replicas: usize,
        lanes: Vec<Lane>,
    ) -> Feed<B> {
        Feed {
            open: open.clone(),
            operations,
            // Rows are divided among workers, and skipped in a resumed pass, by their places.
            pass: Pass::epoch(epoch).in_order().cut_again(replicas),
            lanes,
            reading: 0,
            batches: None,
            waiting: VecDeque::new(),
        }
    }

    /// Returns the lanes with the rows handed out so far.
    pub(crate) fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// Returns the next batch of the pipeline, after the cuts, with its number of rows.
    pub(crate) fn batch(&mut self) -> Result<Option<(usize, B)>> {
        let Some((lane, batch)) = self.read()? else { return Ok(None) };
        let rows = self.hand_out(lane, &batch)?;
        Ok(Some((rows, batch)))
    }

    /// Returns the next `wanted` rows, or fewer at the end of the lanes. If `wanted` is 0, the piece is one row that is
    /// not consumed and shows the shape and type.
    pub(crate) fn rows(&mut self, wanted: usize) -> Result<Option<(usize, B)>> {
        let (mut pieces, mut have) = (Vec::new(), 0);
        if wanted == 0 {
            // It is not this worker's turn, but whether it still has data determines whether the pass continues.
            if self.waiting.is_empty() {
                let next = self.read()?;
                self.waiting.extend(next);
            }
            let slice = self.operations.slice;
            return self.waiting.front().map(|(_, batch)| Ok((0, slice(batch, 0..1)?))).transpose();
        }
        while have < wanted {
            let next = match self.waiting.pop_front() {
                Some(waiting) => Some(waiting),
                None => self.read()?,
            };
            let Some((lane, batch)) = next else { break };
            let rows = (self.operations.rows)(&batch)?;
            let taken = rows.min(wanted - have);
            let piece = if taken == rows {
                batch
            } else {
                self.waiting.push_front((lane, (self.operations.slice)(&batch, taken..rows)?));
                (self.operations.slice)(&batch, 0..taken)?
            };
            have += self.hand_out(lane, &piece)?;
            pieces.push(piece);
        }
        match pieces.len() {
            0 => Ok(None),
            1 => Ok(pieces.pop().map(|piece| (have, piece))),
            _ => Ok(Some((have, (self.operations.concat)(&pieces)?))),
        }
    }

    fn hand_out(&mut self, lane: usize, piece: &B) -> Result<usize> {
        let rows = (self.operations.rows)(piece)?;
        let seen = &mut self.lanes[lane].seen;
        *seen = seen.saturating_add(rows as u64);
        Ok(rows)
    }

    /// Returns the next batch that has rows after the cuts.
    fn read(&mut self) -> Result<Option<(usize, B)>> {
        while let Some(lane) = self.lanes.get_mut(self.reading) {
            if lane.ended {
                self.reading += 1;
                continue;
            }
            let batches = self.batches.get_or_insert_with(|| {
                let pass = self.pass.clone().of_share(lane.share);
                // The rest of a lane ends where the whole would have ended.
                let pass = match lane.replicas {
                    Some(replicas) => pass.cut_again(replicas),
                    None => pass,
                };
                Batches { items: (self.open)(pass), came: vec![0; lane.cuts.len()] }
            });
            match batches.items.next() {
                Some(batch) => {
                    if let Some(batch) = cut(batch?, &self.operations, &lane.cuts, &mut batches.came)? {
                        return Ok(Some((self.reading, batch)));
                    }
                }
                None => {
                    lane.ended = true;
                    self.batches = None;
                }
            }
        }
        Ok(None)
    }
}

/// Applies cuts to a batch.
fn cut<B>(batch: B, operations: &Operations<B>, cuts: &[Cut], came: &mut [u64]) -> Result<Option<B>> {
    let rows = (operations.rows)(&batch)?;
    let kept: Vec<usize> = (0..rows)
        .filter(|_| {
            cuts.iter().zip(came.iter_mut()).all(|(cut, came)| {
                let at = *came;
                *came += 1;
                at >= cut.skip && (at - cut.skip).checked_rem(cut.count) == Some(cut.index)
            })
        })
        .collect();
    match (kept.first(), kept.last()) {
        _ if kept.len() == rows => Ok((rows > 0).then_some(batch)),
        (Some(first), Some(last)) if last - first + 1 == kept.len() => {
            (operations.slice)(&batch, *first..last + 1).map(Some)
        }
        (Some(_), _) => (operations.gather)(&batch, &kept).map(Some),
        _ => Ok(None),
    }
}
