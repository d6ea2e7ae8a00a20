//! Convolution, rectified linear unit and max-pooling in one.

use distribute_rows::{Float, relu};

use super::{Compiled, Convolution};
use crate::parallel::check;
use crate::pooling::Pooling;
use crate::pooling::pairs::Pairs;

/// A convolution, the rectified linear unit of it, and max-pooling of that by windows of 2 × 2 that do not overlap.
///
/// The convolution stays in a cache; the result is the largest element of each window, with its place.
///
/// # Examples
/// ```
/// use distribute_kernels::convolution::{Convolution, Pooled};
///
/// let convolution = Convolution {
///     channels: 1,
///     filters: 1,
///     size: [2, 2],
///     kernel: [1, 1],
///     stride: 1,
///     padding: 0,
///     dilation: 1,
///     groups: 1,
/// };
/// let pooled = Pooled::new(convolution);
/// let (y, places) = pooled.forward(&[1f32, -4.0, 2.0, 3.0], &[2.0], Some(&[1.0]));
/// assert_eq!((y.as_slice(), places.as_slice()), (&[7.0][..], &[3][..]));
/// let gradient = pooled.backward(&places, &y, &[0.5]);
/// assert_eq!((gradient.convolved, gradient.bias), (vec![0.0, 0.0, 0.0, 0.5], vec![0.5]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pooled(Convolution);

/// The gradients of a convolution that was pooled.
#[derive(Clone, Debug, PartialEq)]
pub struct OfPooled<T> {
    /// The gradient of the convolution before the rectified linear unit: images × filters × height × width of its
    /// result.
    pub convolved: Vec<T>,
    /// The gradient of the bias: filters.
    pub bias: Vec<T>,
}

impl Pooled {
    /// Pools a convolution.
    ///
    /// # Panics
    /// If its result is smaller than a window.
    pub fn new(convolution: Convolution) -> Pooled {
        pooling(&convolution).output_size();
        Pooled(convolution)
    }

    /// Returns the convolution.
    pub fn convolution(&self) -> &Convolution {
        &self.0
    }

    /// Returns height and width of the result.
    pub fn output_size(&self) -> [usize; 2] {
        pooling(&self.0).output_size()
    }

    /// Computes the result, and the place of each window's largest element: 0 and 1 in its upper row, 2 and 3 in its
    /// lower one.
    ///
    /// # Shapes
    /// `x`, `weight` and `bias`: those of [`Convolution`]. The result: images × filters × its height × its width.
    pub fn forward<T: Compiled>(&self, x: &[T], weight: &[T], bias: Option<&[T]>) -> (Vec<T>, Vec<u8>) {
        T::forward(&self.0, None, x, weight, bias, End::Pooled)
    }

    /// Computes the gradients of the convolution and of the bias, from what [`forward`](Self::forward) returned and
    /// from the gradient of the result.
    pub fn backward<T: Compiled + relu::Compiled>(&self, places: &[u8], y: &[T], gradient: &[T]) -> OfPooled<T> {
        check("the places", places.len(), y.len());
        // Where the largest element of a window is 0, so are all, and none has a gradient.
        let gradient = relu::backward(y, gradient);
        // Each place of the result is that of one place of the convolution, and has all of its gradient.
        let of_places = Convolution { size: self.output_size(), kernel: [1, 1], stride: 1, padding: 0, ..self.0 };
        OfPooled { bias: of_places.backward_bias(&gradient), convolved: T::spread(&self.0, places, &gradient) }
    }
}

/// The operations that follow a convolution in one with it: what tests choose.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Plain,
    Rectified,
    /// Rectified, and pooled by windows of 2 × 2.
    Pooled,
}

impl End {
    /// Returns the windows of a convolution's result.
    pub(super) fn pairs(self, of: &Convolution) -> Option<Pairs> {
        if self == End::Pooled { pooling(of).pairs() } else { None }
    }
}

/// Returns the pooling of a convolution.
pub(super) fn pooling(of: &Convolution) -> Pooling {
    Pooling { size: of.output_size(), window: [2, 2], stride: [2, 2] }
}

/// Computes the gradient of a convolution from that of the pooling.
pub(super) fn spread<T: Float>(of: &Convolution, places: &[u8], gradient: &[T]) -> Vec<T> {
    pooling(of).pairs().map_or_else(Vec::new, |pairs| pairs.gradient(places, gradient))
}
