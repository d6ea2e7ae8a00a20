//! Options of the layers that are split among the ranks of tensor groups, for the adapters of all tensor libraries.

/// Options of a column-parallel linear layer, `ColumnParallelLinear` of the tensor library's adapter.
///
/// # Source
/// The arguments of Megatron-LM's `ColumnParallelLinear`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ColumnParallelOptions {
    /// Whether the layer has a bias, which is split like the outputs. Default: true.
    pub bias: bool,
    /// Whether the whole output is gathered on all ranks. Default: true. Without it each rank has its part, for a
    /// row-parallel layer with `input_is_parallel`.
    pub gather_output: bool,
    /// The number of equal blocks of outputs, each of which is divided among the ranks: 3 if one matrix computes
    /// queries, keys and values, so that each rank has all three of its heads. Default: 1.
    pub blocks: usize,
}

impl Default for ColumnParallelOptions {
    fn default() -> ColumnParallelOptions {
        ColumnParallelOptions { bias: true, gather_output: true, blocks: 1 }
    }
}

distribute_types::setters! {
    ColumnParallelOptions {
        bias: bool,
        gather_output: bool,
        blocks: usize,
    }
}

/// Options of a row-parallel linear layer, `RowParallelLinear` of the tensor library's adapter.
///
/// # Source
/// The arguments of Megatron-LM's `RowParallelLinear`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RowParallelOptions {
    /// Whether the layer has a bias, which every rank has whole and adds after the sum. Default: true.
    pub bias: bool,
    /// Whether the input is this rank's part already. Default: false, by which the layer takes its part of a whole
    /// input.
    pub input_is_parallel: bool,
}

impl Default for RowParallelOptions {
    fn default() -> RowParallelOptions {
        RowParallelOptions { bias: true, input_is_parallel: false }
    }
}

distribute_types::setters! {
    RowParallelOptions {
        bias: bool,
        input_is_parallel: bool,
    }
}
