//! The meaning of the dimensions of contractions, gathers, scatters and windows.

use crate::ElementType;

/// The dimensions of a product of two tensors.
///
/// The result has the batching dimensions, then the other dimensions of the first operand, then those of the second.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct DotDimensions {
    /// Dimensions of the first operand that both have in common and the result keeps.
    pub lhs_batching: Vec<usize>,
    /// Their counterparts in the second operand.
    pub rhs_batching: Vec<usize>,
    /// Dimensions of the first operand over which products are added.
    pub lhs_contracting: Vec<usize>,
    /// Their counterparts in the second operand.
    pub rhs_contracting: Vec<usize>,
    /// The element type of the sums and the result; `None` for that of the operands. A type with at least as many bits
    /// keeps what narrow operands would lose.
    pub element: Option<ElementType>,
}

impl DotDimensions {
    /// Creates the dimensions of a matrix product: the last of the first operand with the last but one of the second,
    /// after `batching` leading dimensions of both.
    pub fn matmul(batching: usize) -> DotDimensions {
        DotDimensions {
            lhs_batching: (0..batching).collect(),
            rhs_batching: (0..batching).collect(),
            lhs_contracting: vec![batching + 1],
            rhs_contracting: vec![batching],
            element: None,
        }
    }
}

/// The dimensions of a gather, as in the StableHLO specification.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct GatherDimensions {
    /// Dimensions of the result along which a slice lies.
    pub offset_dims: Vec<usize>,
    /// Dimensions of the operand in which slices have size 1 and that the result lacks.
    pub collapsed_slice_dims: Vec<usize>,
    /// Dimensions of the operand that go along with dimensions of the indices.
    pub operand_batching_dims: Vec<usize>,
    /// Their counterparts in the indices.
    pub start_indices_batching_dims: Vec<usize>,
    /// The dimension of the operand of each component of an index.
    pub start_index_map: Vec<usize>,
    /// The dimension of the indices along which the components of an index lie; the number of dimensions if an index
    /// is one number.
    pub index_vector_dim: usize,
    /// The sizes of a slice, for each dimension of the operand.
    pub slice_sizes: Vec<usize>,
}

/// The dimensions of a scatter, as in the StableHLO specification.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ScatterDimensions {
    /// Dimensions of the updates along which a slice lies.
    pub update_window_dims: Vec<usize>,
    /// Dimensions of the operand in which slices have size 1 and that the updates lack.
    pub inserted_window_dims: Vec<usize>,
    /// Dimensions of the operand that go along with dimensions of the indices.
    pub input_batching_dims: Vec<usize>,
    /// Their counterparts in the indices.
    pub scatter_indices_batching_dims: Vec<usize>,
    /// The dimension of the operand of each component of an index.
    pub scatter_dims_to_operand_dims: Vec<usize>,
    /// The dimension of the indices along which the components of an index lie; the number of dimensions if an index
    /// is one number.
    pub index_vector_dim: usize,
}

/// Windows over a tensor, with one entry for each of its dimensions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// The number of elements of a window.
    pub dims: Vec<usize>,
    /// The distance between two windows.
    pub strides: Vec<usize>,
    /// The elements added before and after; negative ones remove elements.
    pub padding: Vec<(i64, i64)>,
    /// The distance of two elements of the operand, with padding between them.
    pub base_dilations: Vec<usize>,
    /// The distance of two elements of a window.
    pub window_dilations: Vec<usize>,
}

impl Window {
    /// Creates windows of these sizes, with strides and dilations of 1 and without padding.
    pub fn new(dims: impl Into<Vec<usize>>) -> Window {
        let dims = dims.into();
        let ndim = dims.len();
        Window {
            dims,
            strides: vec![1; ndim],
            padding: vec![(0, 0); ndim],
            base_dilations: vec![1; ndim],
            window_dilations: vec![1; ndim],
        }
    }

    /// Replaces the strides.
    #[must_use]
    pub fn strides(mut self, strides: impl Into<Vec<usize>>) -> Window {
        self.strides = strides.into();
        self
    }

    /// Replaces the padding.
    #[must_use]
    pub fn padding(mut self, padding: impl Into<Vec<(i64, i64)>>) -> Window {
        self.padding = padding.into();
        self
    }

    /// Replaces the distances of the operand's elements.
    #[must_use]
    pub fn base_dilations(mut self, dilations: impl Into<Vec<usize>>) -> Window {
        self.base_dilations = dilations.into();
        self
    }

    /// Replaces the distances of the window's elements.
    #[must_use]
    pub fn window_dilations(mut self, dilations: impl Into<Vec<usize>>) -> Window {
        self.window_dilations = dilations.into();
        self
    }
}

/// The dimensions and windows of a convolution. Entries of vectors belong to the spatial dimensions, in their order.
///
/// # Examples
/// ```
/// use distribute_hlo::Convolution;
/// let mut convolution = Convolution::channels_first(2);
/// convolution.strides = vec![2, 2];
/// convolution.padding = vec![(1, 1), (1, 1)];
/// assert_eq!(convolution.kernel_spatial_dimensions, [2, 3]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Convolution {
    /// The dimension of the input that counts examples.
    pub input_batch_dimension: usize,
    /// The dimension of the input that counts channels.
    pub input_feature_dimension: usize,
    /// The spatial dimensions of the input.
    pub input_spatial_dimensions: Vec<usize>,
    /// The dimension of the kernel that counts channels of the input, in one group.
    pub kernel_input_feature_dimension: usize,
    /// The dimension of the kernel that counts channels of the output.
    pub kernel_output_feature_dimension: usize,
    /// The spatial dimensions of the kernel.
    pub kernel_spatial_dimensions: Vec<usize>,
    /// The dimension of the output that counts examples.
    pub output_batch_dimension: usize,
    /// The dimension of the output that counts channels.
    pub output_feature_dimension: usize,
    /// The spatial dimensions of the output.
    pub output_spatial_dimensions: Vec<usize>,
    /// The distance of two windows.
    pub strides: Vec<usize>,
    /// The zeros added before and after the input; negative ones remove elements.
    pub padding: Vec<(i64, i64)>,
    /// The distance of two elements of the input, with zeros between them: more than 1 for transposed convolutions.
    pub lhs_dilation: Vec<usize>,
    /// The distance of two elements of the kernel.
    pub rhs_dilation: Vec<usize>,
    /// Whether the kernel is read from its end.
    pub reversal: Vec<bool>,
    /// The number of groups of channels that are convolved apart.
    pub feature_group_count: usize,
    /// The number of groups of examples that are convolved apart, each with its part of the kernel's output channels.
    pub batch_group_count: usize,
    /// The element type of the sums and the result; `None` for that of the operands.
    pub element: Option<ElementType>,
}

impl Convolution {
    /// Creates a convolution of `[examples, channels, spatial…]` with a kernel of `[output channels, input channels,
    /// spatial…]`, with strides and dilations of 1 and without padding, as PyTorch's.
    pub fn channels_first(spatial: usize) -> Convolution {
        let dims: Vec<usize> = (2..2 + spatial).collect();
        Convolution {
            input_batch_dimension: 0,
            input_feature_dimension: 1,
            input_spatial_dimensions: dims.clone(),
            kernel_input_feature_dimension: 1,
            kernel_output_feature_dimension: 0,
            kernel_spatial_dimensions: dims.clone(),
            output_batch_dimension: 0,
            output_feature_dimension: 1,
            output_spatial_dimensions: dims,
            strides: vec![1; spatial],
            padding: vec![(0, 0); spatial],
            lhs_dilation: vec![1; spatial],
            rhs_dilation: vec![1; spatial],
            reversal: vec![false; spatial],
            feature_group_count: 1,
            batch_group_count: 1,
            element: None,
        }
    }
}
