//! Linear layers whose weights are split along their outputs or inputs.

use burn::module::{Module, Param};
use burn::nn::LinearConfig;
use burn::tensor::module::linear;
use burn::tensor::{Device, Tensor};
use distribute_optim::backend::tensor_group_of;
use distribute_optim::{ColumnParallelOptions, RowParallelOptions};

use super::operations::gather_blocks;
use super::split_param::{Request, SplitParam};
use super::{copy_to_tensor_group, or_end, scatter_to_tensor_group, sum_over_tensor_group};
use crate::Result;

/// A linear layer of which each rank of a tensor group computes a part of the outputs: the weight W of x W + b is split
/// along its columns, as is b.
///
/// Forward communicates only if the output is gathered; backward sums the gradient of the input over the ranks.
///
/// # Shapes
/// Input: (…, `in_dim`), equal on all ranks. Output: (…, `out_dim`), or, without `gather_output`, (…, `out_dim` /
/// ranks). On each rank the weight is (`in_dim`, `out_dim` / ranks) and the bias (`out_dim` / ranks).
///
/// # Ordering
/// Every rank of the tensor group must call forward, in the same order with other layers.
///
/// # Examples
/// The two layers of a transformer's feed-forward network, with one sum in forward and one in backward:
/// ```
/// use burn::module::Module;
/// use burn::tensor::{Device, Tensor, activation::relu};
/// use distribute_burn::{
///     Adam, BurnContext, BurnStrategy, ColumnParallelLinear, ColumnParallelOptions, Error, RowParallelLinear,
///     RowParallelOptions, column_parallel_linear, row_parallel_linear,
/// };
/// use distribute_strategy::MirroredStrategy;
/// use distribute_values::TensorStorage;
///
/// #[derive(Module, Debug)]
/// struct FeedForward { up: ColumnParallelLinear, down: RowParallelLinear }
///
/// impl FeedForward {
///     fn new(device: &Device) -> FeedForward {
///         let split = ColumnParallelOptions::default().gather_output(false);
///         let joined = RowParallelOptions::default().input_is_parallel(true);
///         FeedForward {
///             up: column_parallel_linear(8, 32, split, device),
///             down: row_parallel_linear(32, 8, joined, device),
///         }
///     }
/// }
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).tensor_parallel(2).build()?;
/// let model = strategy.scope(FeedForward::new)?;
/// assert_eq!(model.variables()[0].components()[0].shape(), [8, 16]);
/// let optimizer = Adam::new(0.01).build(&model)?;
/// strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
///     let x = Tensor::<2>::ones([4, 8], &context.burn_device()?);
///     let y = model.down.forward(relu(model.up.forward(x)));
///     optimizer.minimize(context, &context.average_loss(y.square().sum_dim(1), 4))
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// Shoeybi and others, "Megatron-LM", 2019, section 3; `ColumnParallelLinear` of Megatron-LM.
#[derive(Module, Debug)]
pub struct ColumnParallelLinear {
    weight: SplitParam<2>,
    bias: Option<SplitParam<1>>,
    #[module(skip)]
    options: ColumnParallelOptions,
}

/// A linear layer of which each rank of a tensor group computes one term of the outputs, from a part of the inputs: the
/// weight W of x W + b is split along its rows.
///
/// Forward sums the ranks' terms. Backward communicates only if the input was whole.
///
/// # Shapes
/// Input: (…, `in_dim`), equal on all ranks, or, with `input_is_parallel`, (…, `in_dim` / ranks). Output: (…,
/// `out_dim`), equal on all ranks. On each rank the weight is (`in_dim` / ranks, `out_dim`) and the bias (`out_dim`).
///
/// # Ordering
/// Every rank of the tensor group must call forward, in the same order with other layers.
///
/// # Examples
/// See [`ColumnParallelLinear`].
///
/// # Source
/// Shoeybi and others, "Megatron-LM", 2019, section 3; `RowParallelLinear` of Megatron-LM.
#[derive(Module, Debug)]
pub struct RowParallelLinear {
    weight: SplitParam<2>,
    bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    options: RowParallelOptions,
}

/// Creates a [`ColumnParallelLinear`] whose parameters have the names and, as a whole, the initial values of burn's
/// [`Linear`](burn::nn::Linear). In a scope with tensor groups, `out_dim` must be a multiple of the number of ranks
/// times the number of blocks, or [`scope`](crate::BurnStrategy::scope) returns an error.
///
/// # Cost
/// The first rank of a process draws the whole weight once; each keeps its part.
pub fn column_parallel_linear(
    in_dim: usize,
    out_dim: usize,
    options: ColumnParallelOptions,
    device: &Device,
) -> ColumnParallelLinear {
    let whole = LinearConfig::new(in_dim, out_dim).with_bias(options.bias).init(device);
    let request = |axis| Request { axis, blocks: options.blocks };
    let (weight, bias) = (SplitParam::new(whole.weight, request(1)), whole.bias);
    ColumnParallelLinear { weight, bias: bias.map(|bias| SplitParam::new(bias, request(0))), options }
}

/// Creates a [`RowParallelLinear`] whose parameters have the names and, as a whole, the initial values of burn's
/// [`Linear`](burn::nn::Linear). In a scope with tensor groups, `in_dim` must be a multiple of the number of ranks, or
/// [`scope`](crate::BurnStrategy::scope) returns an error.
///
/// # Cost
/// The first rank of a process draws the whole weight once; each keeps its part.
pub fn row_parallel_linear(
    in_dim: usize,
    out_dim: usize,
    options: RowParallelOptions,
    device: &Device,
) -> RowParallelLinear {
    let whole = LinearConfig::new(in_dim, out_dim).with_bias(options.bias).init(device);
    RowParallelLinear {
        weight: SplitParam::new(whole.weight, Request { axis: 0, blocks: 1 }),
        bias: whole.bias,
        options,
    }
}

impl ColumnParallelLinear {
    /// Applies the layer. A failure of another rank ends the replica, as an error that its closure returns.
    ///
    /// # Panics
    /// Panics, as burn's layers do, if the shape of the input does not fit, and if the layer is split and called
    /// outside [`run`](distribute_strategy::Strategy::run_with) or under another strategy than that of its scope.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_end(self.applied(x))
    }

    fn applied<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>> {
        let Some(group) = tensor_group_of("column_parallel_linear", self.parts())? else {
            return Ok(linear(x, self.weight.val(), self.bias()));
        };
        let x = copy_to_tensor_group(&group, x)?;
        let part = linear(x, self.weight.val(), self.bias());
        if self.options.gather_output { gather_blocks(&group, part, self.options.blocks) } else { Ok(part) }
    }

    /// Returns this rank's part of the weight.
    pub fn weight(&self) -> Tensor<2> {
        self.weight.val()
    }

    /// Returns this rank's part of the bias.
    pub fn bias(&self) -> Option<Tensor<1>> {
        self.bias.as_ref().map(SplitParam::val)
    }

    /// Returns the number of parts of the weight: of ranks in a tensor group, or 1.
    pub fn parts(&self) -> usize {
        self.weight.parts()
    }
}

impl RowParallelLinear {
    /// Applies the layer. A failure of another rank ends the replica, as an error that its closure returns.
    ///
    /// # Panics
    /// See [`ColumnParallelLinear::forward`].
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_end(self.applied(x))
    }

    fn applied<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>> {
        let Some(group) = tensor_group_of("row_parallel_linear", self.parts())? else {
            return Ok(linear(x, self.weight.val(), self.bias()));
        };
        let x = if self.options.input_is_parallel { x } else { scatter_to_tensor_group(&group, x)? };
        let sum = sum_over_tensor_group(&group, linear(x, self.weight.val(), None))?;
        Ok(match self.bias() {
            Some(bias) => sum + bias.unsqueeze::<D>(),
            None => sum,
        })
    }

    /// Returns this rank's part of the weight.
    pub fn weight(&self) -> Tensor<2> {
        self.weight.val()
    }

    /// Returns the bias, which is not split.
    pub fn bias(&self) -> Option<Tensor<1>> {
        self.bias.as_ref().map(Param::val)
    }

    /// Returns the number of parts of the weight: of ranks in a tensor group, or 1.
    pub fn parts(&self) -> usize {
        self.weight.parts()
    }
}
