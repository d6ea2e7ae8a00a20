//! The filters of a convolution, packed for tiles of its result.

use distribute_rows::{Blocks, Float};

use super::padded::Frame;
use super::planes::planes;
use crate::pooling::pairs::Pairs;

/// The filters of a convolution, or of its gradient, divided into blocks of as many as a tile has.
#[derive(Clone, Debug)]
pub(crate) struct Filters<'a, T> {
    weight: &'a [T],
    direction: Direction,
    /// Channels of a group.
    pub(super) channels: usize,
    /// Filters of a group.
    pub(super) count: usize,
    /// Filters that a thread takes at once, which are of one group.
    pub(super) part: usize,
    /// The blocks of a part.
    pub(super) blocks: Vec<Block>,
    /// The bias by filter.
    pub(super) bias: Vec<T>,
    /// Whether results below 0 are replaced by 0.
    pub(super) rectified: bool,
    /// The windows of which only the largest elements are results.
    pub(super) pairs: Option<Pairs>,
}

/// The convolution that has the filters.
#[derive(Clone, Copy, Debug)]
pub(super) enum Direction {
    Forward,
    /// The one that makes the gradient of the input of the gradient of the result.
    Backward,
}

/// Filters of a tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    /// The first one's number in the part.
    pub(super) first: usize,
    /// Their number, with those that fill the block up: 2, 4 or [`WIDEST`].
    pub(super) width: usize,
}

impl<'a, T: Float> Filters<'a, T> {
    /// Divides filters for `inputs` groups of images, of which each has some channels and filters. The bias has an
    /// element for each filter of all groups.
    pub(super) fn new(
        weight: &'a [T],
        direction: Direction,
        inputs: usize,
        [channels, count]: [usize; 2],
        bias: Vec<T>,
    ) -> Filters<'a, T> {
        let threads = rayon::current_num_threads();
        let enough = |parts: &usize| count.is_multiple_of(*parts) && inputs * parts >= threads;
        let part = count / (1..count).find(enough).unwrap_or(count);
        Filters { weight, direction, channels, count, part, blocks: blocks(part), bias, rectified: false, pairs: None }
    }

    /// Packs the filters by part, block, place and filter of the block. `transform` makes `elements` numbers of a
    /// kernel, and `place` says where those of a channel are in a block.
    pub(super) fn packed(
        &self,
        elements: usize,
        transform: impl Fn(&[T], &mut [T]),
        place: impl Fn(usize, usize) -> usize,
    ) -> Vec<T> {
        let width = |block: &Block| block.width;
        let of_part = self.blocks.iter().map(width).sum::<usize>() * self.channels * elements;
        let mut packed = vec![T::default(); self.bias.len() / self.part * of_part];
        let (mut kernel, mut transformed) = (Vec::new(), vec![T::default(); elements]);
        for (part, packed) in packed.chunks_exact_mut(of_part).enumerate() {
            let mut rest = packed;
            for block in &self.blocks {
                let out = rest.split_off_mut(..block.width * self.channels * elements).unwrap_or_default();
                for at in 0..block.width.min(self.part - block.first) {
                    for channel in 0..self.channels {
                        self.kernel(part * self.part + block.first + at, channel, &mut kernel);
                        transform(&kernel, &mut transformed);
                        for (element, x) in transformed.iter().enumerate() {
                            out[place(channel, element) * block.width + at] = *x;
                        }
                    }
                }
            }
        }
        packed
    }

    /// Returns the results of all parts of the filters for all images of `x`, in a frame, and the places of the largest
    /// elements if they are pooled. `f` gets what `state` returns, the channels of a group, the number of the part's
    /// first filter and room for the part's planes.
    pub(super) fn results<S>(
        &self,
        frame: &Frame,
        x: &[T],
        state: impl Fn() -> S + Sync + Send,
        f: impl Fn(&mut S, &[T], usize, &mut [T]) + Sync + Send,
    ) -> (Vec<T>, Vec<u8>) {
        let [input, plane, taps] = [frame.size, frame.output, frame.kernel].map(|[height, width]| height * width);
        let (group, size) = (self.channels * input, self.part * plane);
        let blocks = Blocks { count: x.len() / group * self.count * plane, size, cost: size * self.channels * taps };
        let write = |state: &mut S, part: usize, out: &mut [T]| {
            let first = part * self.part;
            f(state, &x[first / self.count * group..][..group], first % self.bias.len(), out);
        };
        planes(blocks, self.pairs, state, write)
    }

    /// Copies the kernel of a filter for a channel of its group.
    fn kernel(&self, filter: usize, channel: usize, out: &mut Vec<T>) {
        let elements = self.weight.len() / (self.bias.len() * self.channels);
        let kernel = |at: usize| &self.weight[at * elements..][..elements];
        out.clear();
        match self.direction {
            Direction::Forward => out.extend(kernel(filter * self.channels + channel)),
            Direction::Backward => {
                let (group, in_group) = (filter / self.count, filter % self.count);
                out.extend(kernel((group * self.channels + channel) * self.count + in_group).iter().rev());
            }
        }
    }
}

/// Divides filters into blocks, such that few are filled up.
pub(super) fn blocks(filters: usize) -> Vec<Block> {
    let block = |first: usize| {
        let width = match filters.checked_sub(first)? {
            0 => return None,
            1 | 2 => 2,
            3 | 4 | 7 | 8 => 4,
            _ => WIDEST,
        };
        Some(Block { first, width })
    };
    std::iter::successors(block(0), |last| block(last.first + last.width)).collect()
}

/// The number of filters of the widest block.
pub(super) const WIDEST: usize = 6;
