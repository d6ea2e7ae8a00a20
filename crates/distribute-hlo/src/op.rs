//! Operations of a program, as data.

use crate::{
    BinaryOp, CollectiveGroups, CompareOp, Convolution, DotDimensions, GatherDimensions, Literal, Precision, Reducer,
    RngAlgorithm, ScatterDimensions, SortOrder, UnaryOp, Window,
};

/// The kind of an operation, with its attributes. Operands are in the order of the StableHLO specification.
///
/// It may get new variants in minor versions; a match without a wildcard tells an evaluator which ones it lacks.
#[derive(Clone, Debug, PartialEq)]
pub enum OpKind {
    /// A tensor of known values.
    Constant(Literal),
    /// The index of each element along a dimension.
    Iota {
        /// The dimension.
        dimension: usize,
    },
    /// A function of each element.
    Unary(UnaryOp),
    /// A function of each pair of elements of two tensors of one type.
    Binary(BinaryOp),
    /// A comparison of each pair of elements.
    Compare {
        /// The relation.
        relation: CompareOp,
        /// Whether floating-point numbers are compared by IEEE 754's total order.
        total_order: bool,
    },
    /// An element of the second operand where the first is true, else of the third. The first may be a scalar.
    Select,
    /// The second operand, limited to at least the first and at most the third, which may be scalars.
    Clamp,
    /// Conversion of each element to the result's type.
    Convert,
    /// The same bits as another element type.
    BitcastConvert,
    /// Repetition along new dimensions, and along those of size 1.
    BroadcastInDim {
        /// The dimension of the result for each dimension of the operand.
        dimensions: Vec<usize>,
    },
    /// The same elements in row-major order with other sizes.
    Reshape,
    /// Dimensions in another order.
    Transpose {
        /// The dimension of the operand for each dimension of the result.
        permutation: Vec<usize>,
    },
    /// Elements in reverse order.
    Reverse {
        /// The dimensions to reverse.
        dimensions: Vec<usize>,
    },
    /// A part at fixed places.
    Slice {
        /// The first index of each dimension.
        start: Vec<usize>,
        /// The first index of each dimension that is left out.
        limit: Vec<usize>,
        /// The step of each dimension.
        strides: Vec<usize>,
    },
    /// A part at places that are operands, one scalar for each dimension, moved into the tensor if they lie outside.
    DynamicSlice {
        /// The sizes of the part.
        sizes: Vec<usize>,
    },
    /// The first operand with a part replaced by the second one, at places as in [`OpKind::DynamicSlice`].
    DynamicUpdateSlice,
    /// The first operand, with copies of the second at its edges and between its elements.
    Pad {
        /// The number of elements before each dimension; negative ones remove elements.
        low: Vec<i64>,
        /// The number of elements after each dimension; negative ones remove elements.
        high: Vec<i64>,
        /// The number of elements between two elements of each dimension.
        interior: Vec<usize>,
    },
    /// The operands, one after another.
    Concatenate {
        /// The dimension along which they follow each other.
        dimension: usize,
    },
    /// Slices of the first operand at the places of the second.
    Gather(GatherDimensions),
    /// The first operand, with slices of the third combined into the places of the second.
    Scatter {
        /// The meaning of the dimensions.
        dimensions: ScatterDimensions,
        /// The way in which an element and its update combine; `None` replaces the element.
        combiner: Option<Reducer>,
        /// Whether the program guarantees that no place is updated twice.
        unique_indices: bool,
    },
    /// Sums of products over dimensions.
    DotGeneral {
        /// The meaning of the dimensions.
        dimensions: DotDimensions,
        /// The precision of multiplication on devices that have a choice.
        precision: Precision,
    },
    /// Convolution of the first operand with the second.
    Convolution {
        /// The meaning of the dimensions, and the windows.
        convolution: Convolution,
        /// The precision of multiplication on devices that have a choice.
        precision: Precision,
    },
    /// Reduction of the first operand over dimensions, from the second, a scalar.
    Reduce {
        /// The function of two elements.
        reducer: Reducer,
        /// The dimensions, which the result lacks.
        dimensions: Vec<usize>,
    },
    /// The extreme of the first operand along a dimension, and its index, from the second operand. The operands are
    /// values, indices, the initial value and the initial index. NaN is more extreme than any number. Of equal values,
    /// the one of the lowest index counts.
    ArgReduce {
        /// Whether the largest is asked for, else the smallest.
        largest: bool,
        /// The dimension, which the results lack.
        dimension: usize,
    },
    /// Reduction of each window of the first operand, from the second, a scalar.
    ReduceWindow {
        /// The function of two elements.
        reducer: Reducer,
        /// The windows.
        window: Window,
    },
    /// The second operand, each of its elements added to the place of the largest element of a window of the first.
    /// The third operand is the initial value.
    SelectAndScatter {
        /// The windows; their dilations are 1.
        window: Window,
    },
    /// The operands, sorted together by the elements of the first.
    Sort {
        /// The dimension along which elements move.
        dimension: usize,
        /// The order.
        order: SortOrder,
        /// Whether elements that compare as equal keep their order.
        stable: bool,
    },
    /// Random bits of the operand, a state, and the next state. The results are the state and the bits.
    RngBitGenerator {
        /// The algorithm.
        algorithm: RngAlgorithm,
    },
    /// Repetition of the second region while the first returns true. Operands are the initial state.
    While,
    /// The first region if the operand is true, else the second.
    If,
    /// The reduction of the operand over the replicas of each group.
    AllReduce {
        /// The function of two elements.
        reducer: Reducer,
        /// The groups of replicas.
        groups: CollectiveGroups,
    },
    /// The operands of the replicas of each group, one after another.
    AllGather {
        /// The dimension along which they follow each other.
        dimension: usize,
        /// The groups of replicas.
        groups: CollectiveGroups,
    },
    /// The reduction over the replicas of each group, of which each replica gets a part.
    ReduceScatter {
        /// The function of two elements.
        reducer: Reducer,
        /// The dimension that is divided.
        dimension: usize,
        /// The groups of replicas.
        groups: CollectiveGroups,
    },
    /// The operand of another replica, or zeros if none sends to this one.
    CollectivePermute {
        /// Pairs of a sender and a receiver.
        pairs: Vec<(usize, usize)>,
    },
    /// Parts of the operands of all replicas of each group, one from each.
    AllToAll {
        /// The dimension that is divided among the replicas.
        split_dimension: usize,
        /// The dimension along which the parts follow each other.
        concat_dimension: usize,
        /// The groups of replicas.
        groups: CollectiveGroups,
    },
    /// The number of this replica.
    ReplicaId,
    /// The operands, computed before anything that uses a result.
    OptimizationBarrier,
}

impl OpKind {
    /// Returns the name in StableHLO, without the dialect: `all_reduce`.
    pub const fn name(&self) -> &'static str {
        match self {
            OpKind::Constant(_) => "constant",
            OpKind::Iota { .. } => "iota",
            OpKind::Unary(op) => op.name(),
            OpKind::Binary(op) => op.name(),
            OpKind::Compare { .. } => "compare",
            OpKind::Select => "select",
            OpKind::Clamp => "clamp",
            OpKind::Convert => "convert",
            OpKind::BitcastConvert => "bitcast_convert",
            OpKind::BroadcastInDim { .. } => "broadcast_in_dim",
            OpKind::Reshape => "reshape",
            OpKind::Transpose { .. } => "transpose",
            OpKind::Reverse { .. } => "reverse",
            OpKind::Slice { .. } => "slice",
            OpKind::DynamicSlice { .. } => "dynamic_slice",
            OpKind::DynamicUpdateSlice => "dynamic_update_slice",
            OpKind::Pad { .. } => "pad",
            OpKind::Concatenate { .. } => "concatenate",
            OpKind::Gather(_) => "gather",
            OpKind::Scatter { .. } => "scatter",
            OpKind::DotGeneral { .. } => "dot_general",
            OpKind::Convolution { .. } => "convolution",
            OpKind::Reduce { .. } | OpKind::ArgReduce { .. } => "reduce",
            OpKind::ReduceWindow { .. } => "reduce_window",
            OpKind::SelectAndScatter { .. } => "select_and_scatter",
            OpKind::Sort { .. } => "sort",
            OpKind::RngBitGenerator { .. } => "rng_bit_generator",
            OpKind::While => "while",
            OpKind::If => "if",
            OpKind::AllReduce { .. } => "all_reduce",
            OpKind::AllGather { .. } => "all_gather",
            OpKind::ReduceScatter { .. } => "reduce_scatter",
            OpKind::CollectivePermute { .. } => "collective_permute",
            OpKind::AllToAll { .. } => "all_to_all",
            OpKind::ReplicaId => "replica_id",
            OpKind::OptimizationBarrier => "optimization_barrier",
        }
    }

    /// Returns whether replicas exchange data in it, so that all of them must reach it, in the same order.
    pub const fn is_collective(&self) -> bool {
        matches!(
            self,
            OpKind::AllReduce { .. }
                | OpKind::AllGather { .. }
                | OpKind::ReduceScatter { .. }
                | OpKind::CollectivePermute { .. }
                | OpKind::AllToAll { .. }
        )
    }
}
