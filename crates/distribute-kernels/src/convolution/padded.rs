//! Copies of images between zeros, from which a kernel's elements are read without a look at edges.

use distribute_rows::Float;

use std::ops::Range;

/// A convolution in the plane, whatever the channels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    /// Height and width of the input.
    pub(super) size: [usize; 2],
    /// Rows of zeros above, and columns on the left.
    pub(super) padding: [usize; 2],
    pub(super) kernel: [usize; 2],
    pub(super) stride: usize,
    pub(super) dilation: usize,
    /// Height and width of the result.
    pub(super) output: [usize; 2],
}

impl Frame {
    /// Returns the frame of the gradients, which has a reversed kernel: that of the result is the input, and that of
    /// the input the result. It is a convolution if the stride is 1 and the padding less than the kernel.
    pub(crate) fn reversed(self) -> Option<Frame> {
        let reach = |axis: usize| (self.dilation * (self.kernel[axis] - 1)).checked_sub(self.padding[axis]);
        let padding = [reach(0)?, reach(1)?];
        (self.stride == 1).then_some(Frame { size: self.output, output: self.size, padding, ..self })
    }

    /// Returns the number of elements of a padded row for one place within a stride, with whole vectors of the result.
    fn phase(&self, lanes: usize) -> usize {
        self.output[1].next_multiple_of(lanes) + self.dilation * (self.kernel[1] - 1) / self.stride
    }

    /// Returns the number of rows under a kernel.
    fn reach(&self) -> usize {
        self.dilation * (self.kernel[0] - 1) + 1
    }

    /// Returns whether tiles of the result are faster than products of matrices: rows fill three quarters of their
    /// vectors, and each weight is used often enough to pay for its place in tiles.
    pub(super) fn suits_tiles(&self, images: usize, lanes: usize) -> bool {
        let [height, width] = self.output;
        4 * width >= 3 * width.next_multiple_of(lanes) && images * height * width >= 256
    }
}

/// The layout of padded copies of some rows of images.
///
/// A row is divided into one phase for each place within a stride, so that neighbours in the result read neighbours in
/// a phase. A phase has room for whole vectors of the result.
#[derive(Clone, Debug)]
pub(super) struct Padded {
    frame: Frame,
    /// The number of elements of a phase.
    pub(super) phase: usize,
    /// The number of elements of a row.
    pub(super) row: usize,
    /// Rows of the result in a copy, as many as a cache holds.
    rows: usize,
    /// The number of elements of a channel.
    pub(super) plane: usize,
    /// How far each element of the kernel is from its first one.
    pub(super) taps: Vec<usize>,
    /// The number of elements from the first under the kernel to the last of a vector.
    pub(super) reach: usize,
}

impl Padded {
    /// Lays out copies of `channels` channels for vectors of `lanes` elements.
    pub(super) fn new(frame: Frame, channels: usize, lanes: usize) -> Padded {
        let (row, reach) = (frame.phase(lanes) * frame.stride, frame.reach());
        let fit = (COPY / (channels * row)).saturating_sub(reach) / frame.stride + 1;
        Padded::of_rows(frame, fit.min(frame.output[0]), lanes)
    }

    /// Lays out copies for some rows of the result.
    pub(super) fn of_rows(frame: Frame, rows: usize, lanes: usize) -> Padded {
        let Frame { kernel, stride, dilation, .. } = frame;
        let (phase, reach) = (frame.phase(lanes), frame.reach());
        let row = phase * stride;
        let plane = ((rows - 1) * stride + reach) * row;
        let tap = |at: usize| {
            let [down, right] = [at / kernel[1] * dilation, at % kernel[1] * dilation];
            down * row + right % stride * phase + right / stride
        };
        let taps: Vec<usize> = (0..kernel[0] * kernel[1]).map(tap).collect();
        let reach = taps.iter().max().map_or(0, |tap| tap + lanes);
        Padded { frame, phase, row, rows, plane, taps, reach }
    }

    /// Divides the rows of the result into those of one copy each.
    pub(super) fn bands(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (height, rows) = (self.frame.output[0], self.rows);
        (0..height).step_by(rows).map(move |from| from..height.min(from + rows))
    }

    /// Returns where the first element under the kernel is in a channel, for a row of the band.
    pub(super) fn start(&self, row: usize) -> usize {
        row * self.frame.stride * self.row
    }

    /// Copies what some rows of the result need from all channels of `x`. What `copy` holds is from former calls, or 0.
    #[inline(always)]
    pub(super) fn fill<T: Float>(&self, x: &[T], rows: &Range<usize>, copy: &mut [T]) {
        let Frame { size: [height, width], padding, stride, .. } = self.frame;
        for (x, copy) in x.chunks_exact(height * width).zip(copy.chunks_exact_mut(self.plane)) {
            for (at, copy) in copy.chunks_exact_mut(self.row).enumerate() {
                match (rows.start * stride + at).checked_sub(padding[0]) {
                    Some(y) if y < height => self.fill_row(&x[y * width..][..width], copy),
                    _ => copy.fill(T::default()),
                }
            }
        }
    }

    /// Copies a row of an image. Its edges are 0 already.
    #[inline(always)]
    fn fill_row<T: Float>(&self, x: &[T], copy: &mut [T]) {
        let (left, stride) = (self.frame.padding[1], self.frame.stride);
        match stride {
            1 => copy[left..].iter_mut().zip(x).for_each(|(copy, x)| *copy = *x),
            2 => {
                let (even, odd) = copy.split_at_mut(self.phase);
                let half = left / 2;
                let (first, second) = match left & 1 {
                    0 => (&mut even[half..], &mut odd[half..]),
                    _ => (&mut odd[half..], &mut even[half + 1..]),
                };
                let (pairs, rest) = x.as_chunks::<2>();
                for ((first, second), [x, y]) in first.iter_mut().zip(&mut *second).zip(pairs) {
                    (*first, *second) = (*x, *y);
                }
                first.iter_mut().skip(pairs.len()).zip(rest).for_each(|(first, x)| *first = *x);
            }
            _ => {
                for (place, phase) in copy.chunks_exact_mut(self.phase).enumerate() {
                    let first = (place + stride - left % stride) % stride;
                    let x = x.get(first..).unwrap_or_default().iter().step_by(stride);
                    phase[(first + left) / stride..].iter_mut().zip(x).for_each(|(copy, x)| *copy = *x);
                }
            }
        }
    }
}

/// The number of elements of a copy, where the image is larger: 96 KB of f32. With 256 KB, half of a second-level
/// cache, 128 channels of 28 × 28 took a third longer.
pub(super) const COPY: usize = 24 * 1024;
