//! Changes of variables in eight bits, with a scale for each block.

use std::ops::Range;

use distribute_collectives::schedule::part;
use distribute_collectives::{ProcessGroup, Work};

use crate::{Error, Result};

/// The greatest number of values that share a scale.
pub(super) const BLOCK: usize = 256;

/// The greatest magnitude of a value in eight bits. -128 is not used, so that the range is symmetric.
const LIMIT: f32 = 127.0;

/// Starts the mean of all replicas' changes of variables with these numbers of elements. Every replica calls this.
///
/// Each replica sends its changes in eight bits, of which every other gets a part of the blocks. It adds those of all
/// replicas in rank order in f32, and sends the mean, in eight bits again, to all. What that loses is added to what
/// this replica has not sent, times the number of replicas, so that the mean of what replicas have not sent is what the
/// mean lacks.
pub(super) fn start(group: &ProcessGroup, lens: &[usize], mut changes: Vec<f32>) -> Result<Parts> {
    let replicas = group.world_size();
    let layout = Layout::new(lens, replicas);
    let mut message = Vec::with_capacity(replicas * layout.message_bytes);
    for rank in 0..replicas {
        let blocks = layout.blocks_of(rank);
        encode(&mut changes[layout.values_of(rank)], blocks, &mut message);
        message.resize((rank + 1) * layout.message_bytes, 0);
    }
    let received = vec![0; message.len()];
    let work = group.start().all_to_all(message, received)?;
    Ok(Parts { layout, changes, work })
}

/// Exchanges of parts of the changes, in progress.
pub(super) struct Parts {
    layout: Layout,
    /// This replica's changes, without what was sent of them.
    changes: Vec<f32>,
    work: Work<[Vec<u8>; 2]>,
}

impl Parts {
    /// Waits for the parts of all replicas, adds them, and starts to send their mean to all. Every replica calls this.
    pub(super) fn combine(self, group: &ProcessGroup) -> Result<Means> {
        let Parts { layout, mut changes, work } = self;
        let (replicas, me) = (group.world_size(), group.rank().index());
        let [_, received] = work.wait()?;
        let (own, values) = (layout.blocks_of(me), layout.values_of(me));
        let mut mean = vec![0.0f32; values.len()];
        for message in received.chunks_exact(layout.message_bytes.max(1)) {
            add_decoded(message, own, &mut mean)?;
        }
        mean.iter_mut().for_each(|sum| *sum /= replicas as f32);
        let mut message = Vec::with_capacity(layout.message_bytes);
        encode(&mut mean, own, &mut message);
        message.resize(layout.message_bytes, 0);
        changes[values].iter_mut().zip(&mean).for_each(|(left, lost)| *left += lost * replicas as f32);
        let all = vec![0; replicas * layout.message_bytes];
        let work = group.start().all_gather(message, all)?;
        Ok(Means { layout, changes, work })
    }
}

/// Means of parts of the changes, on their way to all replicas.
pub(super) struct Means {
    layout: Layout,
    changes: Vec<f32>,
    work: Work<[Vec<u8>; 2]>,
}

impl Means {
    /// Waits for the means of all changes, the same bits on every replica. Also returns what of this replica's changes
    /// has not been sent.
    pub(super) fn finish(self) -> Result<(Vec<f32>, Vec<f32>)> {
        let Means { layout, changes, work } = self;
        let [_, all] = work.wait()?;
        let mut means = vec![0.0f32; changes.len()];
        for (rank, message) in all.chunks_exact(layout.message_bytes.max(1)).enumerate() {
            add_decoded(message, layout.blocks_of(rank), &mut means[layout.values_of(rank)])?;
        }
        Ok((means, changes))
    }
}

/// The blocks of all changes, and how they are divided among replicas.
struct Layout {
    /// The numbers of values of the blocks.
    blocks: Vec<usize>,
    /// For each replica the blocks that it adds.
    parts: Vec<Range<usize>>,
    /// For each replica the values of these blocks.
    values: Vec<Range<usize>>,
    /// The bytes of a message with the blocks of one replica. Shorter ones are filled up with zeros, since all parts of
    /// an exchange have one length.
    message_bytes: usize,
}

impl Layout {
    fn new(lens: &[usize], replicas: usize) -> Layout {
        let blocks = blocks(lens);
        let parts: Vec<Range<usize>> = (0..replicas).map(|rank| part(blocks.len(), replicas, rank)).collect();
        let message_bytes = parts.iter().map(|part| message_len(&blocks[part.clone()])).max().unwrap_or(0);
        let begin = |part: usize| blocks[..part].iter().sum::<usize>();
        let values = parts.iter().map(|part| begin(part.start)..begin(part.end)).collect();
        Layout { blocks, parts, values, message_bytes }
    }

    fn blocks_of(&self, rank: usize) -> &[usize] {
        &self.blocks[self.parts[rank].clone()]
    }

    fn values_of(&self, rank: usize) -> Range<usize> {
        self.values[rank].clone()
    }
}

/// The changes of variables in eight bits, with a scale in f32 for each block of at most 256 values of a variable, for
/// authors of strategies. A message holds blocks one after another: the scale, little-endian, and a byte per value.
///
/// # Examples
/// ```
/// let blocks = distribute_strategy::Int8Blocks::new(&[3]);
/// let mut changes = [127.0, -1.0, 0.25];
/// let message = blocks.encode(&mut changes);
/// assert_eq!((message.len(), changes), (blocks.message_bytes(), [0.0, 0.0, 0.25]));
/// let mut sum = [1.0; 3];
/// blocks.add_decoded(&message, &mut sum)?;
/// assert_eq!(sum, [128.0, 0.0, 1.0]);
/// # Ok::<(), distribute_strategy::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Int8Blocks {
    /// The numbers of values of the blocks.
    blocks: Vec<usize>,
}

impl Int8Blocks {
    /// Divides variables with these numbers of elements into blocks.
    pub fn new(lens: &[usize]) -> Int8Blocks {
        Int8Blocks { blocks: blocks(lens) }
    }

    /// Returns the length of a message.
    pub fn message_bytes(&self) -> usize {
        message_len(&self.blocks)
    }

    /// Returns the message of the variables' changes, and leaves in `changes` what it has lost of them (error
    /// feedback). A block with an infinite value or NaN is decoded to NaN.
    pub fn encode(&self, changes: &mut [f32]) -> Vec<u8> {
        let mut message = Vec::with_capacity(self.message_bytes());
        encode(changes, &self.blocks, &mut message);
        message
    }

    /// Adds the changes of a message to `sum`.
    ///
    /// # Errors
    /// [`Error::LocalUpdates`] if the message or `sum` has another length than these variables.
    pub fn add_decoded(&self, message: &[u8], sum: &mut [f32]) -> Result<()> {
        let expected = self.message_bytes();
        if message.len() != expected {
            let problem = format!("{} bytes of changes were given, and {expected} are expected", message.len());
            return Err(Error::LocalUpdates { problem });
        }
        add_decoded(message, &self.blocks, sum)
    }
}

/// Returns the numbers of values of all blocks. None spans two variables, whose values may differ much in magnitude.
fn blocks(lens: &[usize]) -> Vec<usize> {
    let of_variable = |len: &usize| {
        let len = *len;
        (0..len.div_ceil(BLOCK)).map(move |block| BLOCK.min(len - block * BLOCK))
    };
    lens.iter().flat_map(of_variable).collect()
}

/// Returns the bytes of a message of blocks.
fn message_len(blocks: &[usize]) -> usize {
    blocks.iter().map(|values| size_of::<f32>() + values).sum()
}

/// Appends the values of blocks to a message, each block as its scale and one byte per value, and leaves in `values`
/// what the message has lost of them.
///
/// A block with an infinite value or NaN is decoded to NaN, as a sum of such values would be.
fn encode(values: &mut [f32], blocks: &[usize], message: &mut Vec<u8>) {
    let mut rest = values;
    for len in blocks {
        let (block, after) = rest.split_at_mut(*len);
        rest = after;
        let is_finite = block.iter().all(|value| value.is_finite());
        let scale = match is_finite {
            true => block.iter().fold(0.0f32, |most, value| most.max(value.abs())) / LIMIT,
            false => f32::NAN,
        };
        message.extend(scale.to_le_bytes());
        for value in block {
            // A scale of 0, also of values that are too small for one, sends zeros.
            let sent = if scale > 0.0 { (*value / scale).round().clamp(-LIMIT, LIMIT) as i8 } else { 0 };
            message.push(sent.cast_unsigned());
            *value -= f32::from(sent) * scale;
        }
    }
}

/// Adds the values of a message, which may be filled up with zeros, to `sum`.
///
/// # Errors
/// [`Error::LocalUpdates`] if the message is too short, which that of no replica with the same model is.
fn add_decoded(message: &[u8], blocks: &[usize], sum: &mut [f32]) -> Result<()> {
    let expected = message_len(blocks);
    if message.len() < expected || sum.len() != blocks.iter().sum::<usize>() {
        let problem = format!("a replica sent {} bytes of changes, and {expected} were expected", message.len());
        return Err(Error::LocalUpdates { problem });
    }
    let (mut rest, mut sums) = (message, sum);
    for len in blocks {
        let (block, after) = sums.split_at_mut(*len);
        sums = after;
        let Some((scale, more)) = rest.split_first_chunk::<4>() else { return Ok(()) };
        let (bytes, more) = more.split_at(*len);
        rest = more;
        let scale = f32::from_le_bytes(*scale);
        block.iter_mut().zip(bytes).for_each(|(sum, byte)| *sum += f32::from(byte.cast_signed()) * scale);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ramp(len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|at| ((at * 37 % 101) as f32 - 50.0) * scale).collect()
    }

    fn most(values: &[f32]) -> f32 {
        values.iter().fold(0.0f32, |most, value| most.max(value.abs()))
    }

    #[test]
    fn a_message_and_what_it_lost_are_the_values() {
        let blocks = blocks(&[300, 1, 256]);
        assert_eq!(blocks, [256, 44, 1, 256]);
        let values = [ramp(300, 1e-3), vec![5.0], ramp(256, 40.0)].concat();
        let (mut left, mut message) = (values.clone(), Vec::new());
        encode(&mut left, &blocks, &mut message);
        assert_eq!(message.len(), 557 + 4 * 4);
        let mut decoded = vec![0.0; 557];
        add_decoded(&message, &blocks, &mut decoded).unwrap();
        for ((value, left), decoded) in values.iter().zip(&left).zip(&decoded) {
            assert!((decoded + left - value).abs() <= 1e-6 * value.abs(), "{decoded} + {left} is not {value}");
        }
        // Small values next to large ones of another variable keep their own scale.
        assert!(most(&left[..256]) <= most(&values[..256]) / 254.0 * 1.001);
        // The second message is added.
        add_decoded(&message, &blocks, &mut decoded).unwrap();
        assert!((decoded[300] - 10.0).abs() < 1e-5);
        assert!(add_decoded(&message[1..], &blocks, &mut decoded).is_err());
    }

    #[test]
    fn the_mean_and_the_mean_of_what_was_not_sent_are_the_mean_of_all() {
        // Fewer blocks than replicas, and more.
        for (replicas, lens) in [(1, vec![300, 5]), (2, vec![300, 5]), (5, vec![300, 5]), (3, vec![1000, 7, 0, 513])] {
            let len: usize = lens.iter().sum();
            let changes = |rank: usize| (0..len).map(move |at| ((at * 7 + rank * 31) as f32 * 0.37).sin());
            let groups = ProcessGroup::local(replicas).unwrap();
            let lens = &lens;
            let all: Vec<(Vec<f32>, Vec<f32>)> = std::thread::scope(|scope| {
                let mean = |group: &ProcessGroup| {
                    let parts = start(group, lens, changes(group.rank().index()).collect())?;
                    parts.combine(group)?.finish()
                };
                let on_rank = |group: ProcessGroup| move || mean(&group).unwrap();
                let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(on_rank(group))).collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            let sums: Vec<f32> = (0..len)
                .map(|at| (0..replicas).map(|rank| changes(rank).nth(at).unwrap()).sum::<f32>() / replicas as f32)
                .collect();
            for (at, expected) in sums.iter().enumerate() {
                let left: f32 = all.iter().map(|(_, left)| left[at]).sum::<f32>() / replicas as f32;
                let mean = all[0].0[at];
                assert!((mean + left - expected).abs() < 1e-5, "{mean} + {left} is not {expected}");
                // Half a step of each of the two messages.
                assert!(left.abs() <= 2.0 / 254.0, "{left}");
            }
            let bits = |means: &[f32]| means.iter().map(|mean| mean.to_bits()).collect::<Vec<_>>();
            assert!(all.iter().all(|(means, _)| bits(means) == bits(&all[0].0)));
        }
    }

    #[test]
    fn what_was_lost_is_sent_later() {
        // Changes of which one step alone sends nothing: each is a tenth of a quantization step.
        let mut left = vec![0.0f32; 2];
        let (mut sent, mut given) = (vec![0.0f32; 2], 0.0f32);
        for _ in 0..200 {
            left[0] += 127.0;
            left[1] += 0.1;
            given += 0.1;
            let mut message = Vec::new();
            encode(&mut left, &[2], &mut message);
            add_decoded(&message, &[2], &mut sent).unwrap();
            assert!((sent[1] - given).abs() <= 0.51, "{} was sent of {given}", sent[1]);
        }
        assert!(sent[1] > 19.0, "{}", sent[1]);
    }

    #[test]
    fn values_that_are_not_finite_are_not_hidden() {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![1.0; 300];
            values[7] = wrong;
            let mut message = Vec::new();
            encode(&mut values, &blocks(&[300]), &mut message);
            let mut decoded = vec![0.0; 300];
            add_decoded(&message, &blocks(&[300]), &mut decoded).unwrap();
            assert!(decoded[..256].iter().all(|value| value.is_nan()));
            assert_eq!(decoded[256..], [1.0; 44]);
        }
        let mut zeros = vec![0.0, 1e-45];
        let mut message = Vec::new();
        encode(&mut zeros, &[2], &mut message);
        assert_eq!((message, zeros), (vec![0; 6], vec![0.0, 1e-45]));
    }
}
