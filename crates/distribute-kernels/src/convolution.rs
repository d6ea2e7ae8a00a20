//! Convolution of images.

use std::ops::Range;

use distribute_rows::{Blocks, Float, compiled, relu, simd, sum};

use self::direct::Direct;
use self::filters::{Direction, Filters};
use self::padded::Frame;
use self::planes::planes;
pub use self::pooled::{End, OfPooled, Pooled};
use self::vectors::lanes;
use self::weight::{OfWeight, WeightGradient};
use self::winograd::Winograd;
use self::winograd::gradient::WinogradGradient;
use crate::parallel::{check, sum_of_parts};
use crate::product::{Matrix, Target, parallel_product, product};

mod direct;
mod filters;
mod padded;
mod planes;
mod pooled;
mod vectors;
mod weight;
mod winograd;

/// A convolution of images in two dimensions, a cross-correlation as in all libraries of machine learning.
///
/// There are three ways. Directly, tiles of the result are summed up in registers from a copy of the image between
/// zeros. That is faster where the tiles are filled, on processors that multiply and add in one instruction. With a
/// kernel of 3 × 3, a stride of 1, and 16 channels and filters or more whose transformed weight a cache holds, columns
/// of 4 places are transformed so that there are half as many multiplications (Winograd's algorithm). Rounding errors
/// are about twice those of the direct way, up to three times in the gradient of the weight, and places next to one
/// that depends on an infinite number may be NaN. By columns, the elements that each place of the result needs are
/// gathered into columns of a matrix, for as many rows of the result as a cache holds, which is then multiplied by the
/// weight. A kernel of 1 × 1 needs no columns.
///
/// # Shapes
/// Input: images × channels × height × width. Weight: filters × channels / groups × kernel height × kernel width.
/// Bias: filters. Result: images × filters × height × width of the result.
///
/// # Source
/// Chellapilla, Puri and Simard, "High performance convolutional neural networks for document processing", 2006; Lavin
/// and Gray, "Fast algorithms for convolutional neural networks", 2016.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Convolution {
    /// Channels of the input.
    pub channels: usize,
    /// Channels of the result.
    pub filters: usize,
    /// Height and width of the input.
    pub size: [usize; 2],
    /// Height and width of the kernel.
    pub kernel: [usize; 2],
    /// Distance between places of the kernel.
    pub stride: usize,
    /// Rows and columns of zeros on each side.
    pub padding: usize,
    /// Distance between elements under the kernel.
    pub dilation: usize,
    /// Groups of channels, each with filters of its own.
    pub groups: usize,
}

impl Convolution {
    /// Returns height and width of the result.
    ///
    /// # Panics
    /// If the kernel is larger than the padded image, stride or dilation are 0, or channels do not make groups.
    pub fn output_size(&self) -> [usize; 2] {
        let groups = self.groups > 0 && self.channels.is_multiple_of(self.groups);
        assert!(groups && self.filters.is_multiple_of(self.groups), "channels do not make groups: {self:?}");
        [0, 1].map(|axis| {
            let (padded, kernel) = (self.size[axis] + 2 * self.padding, self.kernel[axis]);
            let reach = self.dilation * kernel.saturating_sub(1) + 1;
            let fits = kernel > 0 && self.filters > 0 && self.stride > 0 && self.dilation > 0 && reach <= padded;
            assert!(fits, "the kernel does not fit the image: {self:?}");
            (padded - reach) / self.stride + 1
        })
    }

    /// Computes the result.
    pub fn forward<T: Compiled>(&self, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T> {
        T::forward(self, None, x, weight, bias, End::Plain).0
    }

    /// Computes the rectified linear unit of the result: 0 in place of elements below; NaN stays.
    pub fn forward_relu<T: Compiled>(&self, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T> {
        T::forward(self, None, x, weight, bias, End::Rectified).0
    }

    fn forward_generic<T: Float>(
        &self,
        way: Option<Way>,
        x: &[T],
        weight: &[T],
        bias: Option<&[T]>,
        end: End,
    ) -> (Vec<T>, Vec<u8>) {
        let sizes = self.sizes();
        check("the weight", weight.len(), self.filters * sizes.depth);
        if let Some(bias) = bias {
            check("the bias", bias.len(), self.filters);
        }
        let images = self.images("the input", x.len(), sizes.image);
        let frame = self.geometry();
        let filters = || {
            let mut filters = self.own_filters(images, weight, bias);
            (filters.rectified, filters.pairs) = (end != End::Plain, end.pairs(self));
            filters
        };
        match way.unwrap_or_else(|| self.way::<T>(&frame, images)) {
            Way::Winograd => Winograd::new(frame, filters()).run(x),
            Way::Direct => Direct::new(frame, filters()).run(x),
            Way::Columns => self.forward_by_columns(images, x, weight, bias, end),
        }
    }

    fn forward_by_columns<T: Float>(
        &self,
        images: usize,
        x: &[T],
        weight: &[T],
        bias: Option<&[T]>,
        end: End,
    ) -> (Vec<T>, Vec<u8>) {
        let sizes = self.sizes();
        let Sizes { image, result, plane, depth, .. } = sizes;
        let of_group = self.filters / self.groups;
        let product = product_for(images);
        let blocks = Blocks { count: images * result, size: result, cost: result * depth };
        let write = |columns: &mut Vec<T>, at: usize, out: &mut [T]| {
            if let Some(bias) = bias {
                out.chunks_exact_mut(plane).zip(bias).for_each(|(plane, bias)| plane.fill(*bias));
            }
            let x = &x[at * image..][..image];
            let groups = out.chunks_exact_mut(of_group * plane).zip(x.chunks_exact(image / self.groups));
            for ((out, x), weight) in groups.zip(weight.chunks_exact(of_group * depth)) {
                for rows in sizes.tiles() {
                    let places = rows.start * sizes.width..rows.end * sizes.width;
                    let x = self.columns(&sizes, x, rows, columns);
                    let out = Target { data: &mut out[places.start..], row: plane, add: bias.is_some() };
                    product(out, [of_group, depth, places.len()], Matrix::new(weight, depth), x, T::ONE);
                }
            }
            if end != End::Plain {
                simd(
                    #[inline(always)]
                    || out.iter_mut().for_each(|x| *x = relu::rectified(*x)),
                );
            }
        };
        planes(blocks, end.pairs(self), Vec::new, write)
    }

    /// Computes the gradient of the input.
    ///
    /// # Shapes
    /// `gradient` has the shape of the result.
    pub fn backward_input<T: Compiled>(&self, weight: &[T], gradient: &[T]) -> Vec<T> {
        T::backward_input(self, None, weight, gradient)
    }

    fn backward_input_generic<T: Float>(&self, way: Option<Way>, weight: &[T], gradient: &[T]) -> Vec<T> {
        let sizes = self.sizes();
        check("the weight", weight.len(), self.filters * sizes.depth);
        let images = self.images("the gradient", gradient.len(), sizes.result);
        // A tile has several channels.
        let frame = self.geometry().reversed().filter(|_| way.is_some() || self.channels > 1);
        let filters = || self.reversed_filters(images, weight);
        match frame.map(|frame| (way.unwrap_or_else(|| self.way::<T>(&frame, images)), frame)) {
            Some((Way::Winograd, frame)) => Winograd::new(frame, filters()).run(gradient).0,
            Some((Way::Direct, frame)) => Direct::new(frame, filters()).run(gradient).0,
            Some((Way::Columns, _)) | None => self.backward_input_by_columns(images, weight, gradient),
        }
    }

    fn backward_input_by_columns<T: Float>(&self, images: usize, weight: &[T], gradient: &[T]) -> Vec<T> {
        let sizes = self.sizes();
        let Sizes { image, result, plane, depth, .. } = sizes;
        let of_group = self.filters / self.groups;
        let product = product_for(images);
        let blocks = Blocks { count: images * image, size: image, cost: result * depth };
        let write = |columns: &mut Vec<T>, at: usize, out: &mut [T]| {
            let gradient = &gradient[at * result..][..result];
            let groups = out.chunks_exact_mut(image / self.groups).zip(gradient.chunks_exact(of_group * plane));
            for ((out, gradient), weight) in groups.zip(weight.chunks_exact(of_group * depth)) {
                let weight = Matrix::new(weight, depth).transposed();
                if self.is_pointwise() {
                    let out = Target { data: out, row: plane, add: false };
                    product(out, [depth, of_group, plane], weight, Matrix::new(gradient, plane), T::ONE);
                    continue;
                }
                out.fill(T::default());
                for rows in sizes.tiles() {
                    let places = rows.start * sizes.width..rows.end * sizes.width;
                    let gradient = Matrix::new(&gradient[places.start..], plane);
                    columns.resize(depth * places.len(), T::default());
                    let target = Target { data: &mut *columns, row: places.len(), add: false };
                    product(target, [depth, of_group, places.len()], weight, gradient, T::ONE);
                    match self.keeps_width(&sizes) {
                        true => simd(
                            #[inline(always)]
                            || self.scatter_blocks(&sizes, columns, &rows, out),
                        ),
                        false => simd(
                            #[inline(always)]
                            || self.scatter(&sizes, columns, rows, out),
                        ),
                    }
                }
            }
        };
        blocks.computed(Vec::new, write).0
    }

    /// Computes the gradient of the weight.
    ///
    /// # Shapes
    /// `gradient` has the shape of the result.
    pub fn backward_weight<T: Compiled>(&self, x: &[T], gradient: &[T]) -> Vec<T> {
        T::backward_weight(self, None, x, gradient)
    }

    fn backward_weight_generic<T: Float>(&self, way: Option<Way>, x: &[T], gradient: &[T]) -> Vec<T> {
        let sizes = self.sizes();
        let images = self.images("the input", x.len(), sizes.image);
        check("the gradient", gradient.len(), images * sizes.result);
        let chosen = || match self.way::<T>(&self.geometry(), images) {
            Way::Winograd => Way::Winograd,
            // A tile has vectors of filters, and elements of several channels.
            _ if self.is_direct() && self.channels > 1 && self.filters / self.groups >= 8 => Way::Direct,
            _ => Way::Columns,
        };
        match way.unwrap_or_else(chosen) {
            Way::Winograd => WinogradGradient::new(self, x, gradient).run(),
            Way::Direct => WeightGradient::new(self, x, gradient).run(),
            Way::Columns => self.backward_weight_by_columns(images, x, gradient),
        }
    }

    fn backward_weight_by_columns<T: Float>(&self, images: usize, x: &[T], gradient: &[T]) -> Vec<T> {
        let sizes = self.sizes();
        let Sizes { image, result, plane, depth, .. } = sizes;
        let of_group = self.filters / self.groups;
        let product = product_for(images);
        sum_of_parts(self.filters * depth, images, 1, |images, sum| {
            let mut columns = Vec::new();
            for at in images {
                let (x, gradient) = (&x[at * image..][..image], &gradient[at * result..][..result]);
                let groups = x.chunks_exact(image / self.groups).zip(gradient.chunks_exact(of_group * plane));
                for ((x, gradient), sum) in groups.zip(sum.chunks_exact_mut(of_group * depth)) {
                    for rows in sizes.tiles() {
                        let places = rows.start * sizes.width..rows.end * sizes.width;
                        let gradient = Matrix::new(&gradient[places.start..], plane);
                        let x = self.columns(&sizes, x, rows, &mut columns).transposed();
                        let sum = Target { data: &mut *sum, row: depth, add: true };
                        product(sum, [of_group, places.len(), depth], gradient, x, T::ONE);
                    }
                }
            }
        })
    }

    /// Computes the gradient of the bias.
    ///
    /// # Shapes
    /// `gradient` has the shape of the result.
    pub fn backward_bias<T: Compiled>(&self, gradient: &[T]) -> Vec<T> {
        T::backward_bias(self, gradient)
    }

    fn backward_bias_generic<T: Float>(&self, gradient: &[T]) -> Vec<T> {
        let (Sizes { result, plane, .. }, filters) = (self.sizes(), self.filters);
        let images = self.images("the gradient", gradient.len(), result);
        sum_of_parts(filters, images, 1, |images, sums| {
            simd(
                #[inline(always)]
                || {
                    for image in images {
                        let planes = gradient[image * filters * plane..].chunks_exact(plane);
                        for (total, plane) in sums.iter_mut().zip(planes) {
                            *total += sum(plane, |x| x);
                        }
                    }
                },
            );
        })
    }

    /// Returns the filters of this convolution.
    pub(crate) fn own_filters<'a, T: Float>(
        &self,
        images: usize,
        weight: &'a [T],
        bias: Option<&[T]>,
    ) -> Filters<'a, T> {
        let bias = bias.map_or_else(|| vec![T::default(); self.filters], |bias| bias.to_vec());
        let sizes = [self.channels, self.filters].map(|count| count / self.groups);
        Filters::new(weight, Direction::Forward, images * self.groups, sizes, bias)
    }

    /// Returns the filters of the convolution of the gradient of the result whose result is the gradient of the input.
    pub(crate) fn reversed_filters<'a, T: Float>(&self, images: usize, weight: &'a [T]) -> Filters<'a, T> {
        let bias = vec![T::default(); self.channels];
        let sizes = [self.filters, self.channels].map(|count| count / self.groups);
        Filters::new(weight, Direction::Backward, images * self.groups, sizes, bias)
    }

    /// Returns the plane of this convolution.
    pub(crate) fn geometry(&self) -> Frame {
        let &Convolution { size, kernel, stride, dilation, .. } = self;
        Frame { size, padding: [self.padding; 2], kernel, stride, dilation, output: self.output_size() }
    }

    /// Returns the fastest way for a frame.
    fn way<T: Float>(&self, frame: &Frame, images: usize) -> Way {
        if !self.is_direct() || !frame.suits_tiles(images, lanes::<T>(frame.output[1])) {
            return Way::Columns;
        }
        if self.is_winograd() { Way::Winograd } else { Way::Direct }
    }

    /// Returns whether fewer multiplications pay for transforms, and a cache holds the transformed weight.
    fn is_winograd(&self) -> bool {
        let [channels, filters] = [self.channels, self.filters].map(|count| count / self.groups);
        let pays = channels.min(filters) >= 16 && channels * filters <= 128 * 128;
        pays && self.kernel == [3, 3] && self.stride == 1 && self.dilation == 1
    }

    /// Returns whether the direct way is faster if tiles are filled: the processor has an instruction for it, and
    /// columns would hold elements of the image several times.
    fn is_direct(&self) -> bool {
        let vectors = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));
        let fuses = vectors && !matches!(pulp::Arch::new(), pulp::Arch::Scalar);
        fuses && self.kernel != [1, 1] && self.stride <= 2
    }

    /// Returns whether each place of the result depends on one place of the input.
    fn is_pointwise(&self) -> bool {
        self.kernel == [1, 1] && self.stride == 1 && self.padding == 0
    }

    /// Returns the matrix of which each column holds what a place of some rows of the result needs.
    fn columns<'a, T: Float>(
        &self,
        sizes: &Sizes,
        x: &'a [T],
        rows: Range<usize>,
        columns: &'a mut Vec<T>,
    ) -> Matrix<'a, T> {
        if self.is_pointwise() {
            return Matrix::new(&x[rows.start * sizes.width..], sizes.plane);
        }
        let places = rows.len() * sizes.width;
        columns.resize(sizes.depth * places, T::default());
        if self.keeps_width(sizes) {
            simd(
                #[inline(always)]
                || self.gather_blocks(sizes, x, &rows, columns),
            );
            return Matrix::new(columns, places);
        }
        self.each_line(
            sizes,
            rows,
            #[inline(always)]
            |channel, line, step, input| {
                let line = &mut columns[line..][..sizes.width];
                let Some((inside, from)) = input else { return line.fill(T::default()) };
                let x = &x[channel * self.size[0] * self.size[1] + from..];
                line[..inside.start].fill(T::default());
                line[inside.end..].fill(T::default());
                let line = &mut line[inside];
                match step {
                    1 => line.copy_from_slice(&x[..line.len()]),
                    step => line.iter_mut().zip(x.iter().step_by(step)).for_each(|(out, x)| *out = *x),
                }
            },
        );
        Matrix::new(columns, places)
    }

    /// Adds each column's elements to the places of the input that they belong to.
    #[inline(always)]
    fn scatter<T: Float>(&self, sizes: &Sizes, columns: &[T], rows: Range<usize>, out: &mut [T]) {
        self.each_line(
            sizes,
            rows,
            #[inline(always)]
            |channel, line, step, input| {
                let Some((inside, from)) = input else { return };
                let line = &columns[line..][..sizes.width][inside];
                let out = &mut out[channel * self.size[0] * self.size[1] + from..];
                match step {
                    1 => out.iter_mut().zip(line).for_each(|(out, x)| *out += *x),
                    step => out.iter_mut().step_by(step).zip(line).for_each(|(out, x)| *out += *x),
                }
            },
        );
    }

    /// Returns whether rows of the result are as far apart as those of the input, so that for an element of the kernel
    /// they are one block of the input.
    fn keeps_width(&self, sizes: &Sizes) -> bool {
        self.stride == 1 && sizes.width == self.size[1]
    }

    /// Copies what some rows of the result need, a block for each channel and element of the kernel.
    #[inline(always)]
    fn gather_blocks<T: Float>(&self, sizes: &Sizes, x: &[T], rows: &Range<usize>, columns: &mut [T]) {
        let (width, plane) = (sizes.width, self.size[0] * self.size[1]);
        let kernel = self.kernel[0] * self.kernel[1];
        for (at, block) in columns.chunks_exact_mut(rows.len() * width).enumerate() {
            let Some(inside) = self.inside(rows, at % kernel) else {
                block.fill(T::default());
                continue;
            };
            let Inside { block: Range { start, end }, from, .. } = inside;
            block[..start].fill(T::default());
            block[start..end].copy_from_slice(&x[at / kernel * plane + from..][..end - start]);
            block[end..].fill(T::default());
            inside.clear_edges(width, block);
        }
    }

    /// Adds blocks to the places of the input that they belong to.
    #[inline(always)]
    fn scatter_blocks<T: Float>(&self, sizes: &Sizes, columns: &mut [T], rows: &Range<usize>, out: &mut [T]) {
        let (width, plane) = (sizes.width, self.size[0] * self.size[1]);
        let kernel = self.kernel[0] * self.kernel[1];
        for (at, block) in columns.chunks_exact_mut(rows.len() * width).enumerate() {
            let Some(inside) = self.inside(rows, at % kernel) else { continue };
            inside.clear_edges(width, block);
            let out = &mut out[at / kernel * plane + inside.from..];
            out.iter_mut().zip(&block[inside.block]).for_each(|(out, x)| *out += *x);
        }
    }

    /// Returns which part of a block of some rows is inside the image, for an element of the kernel.
    fn inside(&self, rows: &Range<usize>, element: usize) -> Option<Inside> {
        let ([height, width], padding) = (self.size, self.padding);
        let down = element / self.kernel[1] * self.dilation;
        let right = element % self.kernel[1] * self.dilation;
        let first = padding.saturating_sub(down).max(rows.start);
        let last = (height + padding).saturating_sub(down).min(rows.end);
        let columns = padding.saturating_sub(right)..(width + padding).saturating_sub(right).min(width);
        if first >= last || columns.is_empty() {
            return None;
        }
        let start = (first - rows.start) * width + columns.start;
        let end = (last - 1 - rows.start) * width + columns.end;
        let from = (first + down - padding) * width + columns.start + right - padding;
        Some(Inside { block: start..end, from, columns })
    }

    /// Calls `f` for each element of a kernel and row of the result, with the channel, the place of the line in the
    /// matrix of columns, the distance between elements in the image, and, where it is in the image, which elements of
    /// the line are inside of it and where the first of them is in the channel.
    #[inline(always)]
    fn each_line(
        &self,
        sizes: &Sizes,
        rows: Range<usize>,
        mut f: impl FnMut(usize, usize, usize, Option<(Range<usize>, usize)>),
    ) {
        let [height, width] = self.size;
        let mut line = 0;
        for channel in 0..self.channels / self.groups {
            for [i, j] in (0..self.kernel[0]).flat_map(|i| (0..self.kernel[1]).map(move |j| [i, j])) {
                // Columns of the result whose element is inside the image.
                let shift = j * self.dilation;
                let start = self.padding.saturating_sub(shift).div_ceil(self.stride).min(sizes.width);
                let end = (width + self.padding).saturating_sub(shift).div_ceil(self.stride).min(sizes.width);
                for row in rows.clone() {
                    let y = row * self.stride + i * self.dilation;
                    let inside = (self.padding..height + self.padding).contains(&y) && start < end;
                    let from = || (y - self.padding) * width + start * self.stride + shift - self.padding;
                    f(channel, line, self.stride, inside.then(|| (start..end, from())));
                    line += sizes.width;
                }
            }
        }
    }

    /// Returns the numbers of parts' elements.
    fn sizes(&self) -> Sizes {
        let [height, width] = self.output_size();
        let depth = self.channels / self.groups * self.kernel[0] * self.kernel[1];
        let image = self.channels * self.size[0] * self.size[1];
        assert!(image > 0, "an image has no elements: {self:?}");
        Sizes { image, result: self.filters * height * width, plane: height * width, depth, height, width }
    }

    /// Returns the number of images of `size` elements.
    fn images(&self, what: &str, len: usize, size: usize) -> usize {
        assert!(len.is_multiple_of(size), "{what}: {len} elements do not make images of {self:?}");
        len / size
    }
}

/// A way of computing a convolution: what tests choose.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub enum Way {
    Winograd,
    Direct,
    Columns,
}

/// The part of a block of rows that is inside the image.
struct Inside {
    /// Its elements, with those at the edges of rows that are not inside.
    block: Range<usize>,
    /// Where the first of them is in the image.
    from: usize,
    /// The columns that are inside.
    columns: Range<usize>,
}

impl Inside {
    /// Sets what is beyond the edges of rows to 0.
    #[inline(always)]
    fn clear_edges<T: Float>(&self, width: usize, block: &mut [T]) {
        // Columns are few, and rows many.
        for column in (0..self.columns.start).chain(self.columns.end..width) {
            block[column..].iter_mut().step_by(width).for_each(|x| *x = T::default());
        }
    }
}

/// [`product`] or [`parallel_product`].
type Product<T> = for<'a> fn(Target<'a, T>, [usize; 3], Matrix<'a, T>, Matrix<'a, T>, T);

/// Returns the function for products, which needs threads of its own where there are fewer images than threads.
fn product_for<T: Float>(images: usize) -> Product<T> {
    if images < rayon::current_num_threads() { parallel_product } else { product }
}

/// Numbers of elements.
#[derive(Clone, Copy)]
struct Sizes {
    /// An image of the input.
    image: usize,
    /// An image of the result.
    result: usize,
    /// One channel of the result.
    plane: usize,
    /// A filter: the length of a column.
    depth: usize,
    /// Height and width of the result.
    height: usize,
    width: usize,
}

impl Sizes {
    /// Divides the rows of the result into tiles whose columns a second-level cache holds.
    fn tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (height, rows) = (self.height, (TILE / (self.depth * self.width)).max(1));
        (0..height).step_by(rows).map(move |from| from..height.min(from + rows))
    }
}

/// The number of elements of a tile of columns: 256 KB of f32.
const TILE: usize = 64 * 1024;

compiled! {
    fn forward(
        of: &Convolution,
        way: Option<Way>,
        x: &[Self],
        weight: &[Self],
        bias: Option<&[Self]>,
        end: End,
    ) -> (Vec<Self>, Vec<u8>) = Convolution::forward_generic;
    fn backward_input(
        of: &Convolution,
        way: Option<Way>,
        weight: &[Self],
        gradient: &[Self],
    ) -> Vec<Self> = Convolution::backward_input_generic;
    fn backward_weight(
        of: &Convolution,
        way: Option<Way>,
        x: &[Self],
        gradient: &[Self],
    ) -> Vec<Self> = Convolution::backward_weight_generic;
    fn backward_bias(of: &Convolution, gradient: &[Self]) -> Vec<Self> = Convolution::backward_bias_generic;
    fn spread(of: &Convolution, places: &[u8], gradient: &[Self]) -> Vec<Self> = pooled::spread;
}
