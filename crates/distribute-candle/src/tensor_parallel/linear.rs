//! Linear layers whose weights are split along their outputs or inputs.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use distribute_optim::{ColumnParallelOptions, RowParallelOptions};

use super::operations::gather_blocks;
use super::request::{Request, part};
use super::{copy_to_tensor_group, group_of, scatter_to_tensor_group, sum_over_tensor_group};
use crate::Linear;
use crate::short::add_bias;

/// A linear layer of which each rank of a tensor group computes a part of the outputs: the weight A of x Aᵀ + b is
/// split along its rows, as is b.
///
/// Forward communicates only if the output is gathered; backward sums the gradient of the input over the ranks.
///
/// # Shapes
/// Input: (…, `in_dim`), equal on all ranks. Output: (…, `out_dim`), or, without `gather_output`, (…, `out_dim` /
/// ranks). On each rank the weight is (`out_dim` / ranks, `in_dim`) and the bias (`out_dim` / ranks).
///
/// # Ordering
/// Every rank of the tensor group must call forward, in the same order with other layers.
///
/// # Examples
/// The two layers of a transformer's feed-forward network, with one sum in forward and one in backward:
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use distribute_candle::{
///     Adam, CandleContext, CandleStrategy, ColumnParallelOptions, Error, RowParallelOptions, column_parallel_linear,
///     row_parallel_linear,
/// };
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).tensor_parallel(2).build()?;
/// let model = strategy.scope(|vb| {
///     let split = ColumnParallelOptions::default().gather_output(false);
///     let joined = RowParallelOptions::default().input_is_parallel(true);
///     Ok((column_parallel_linear(8, 32, split, vb.pp("up"))?, row_parallel_linear(32, 8, joined, vb.pp("down"))?))
/// })?;
/// assert_eq!(model.variables()[0].components()[0].dims(), [16, 8]);
/// let optimizer = Adam::new(0.01).build(&model)?;
/// strategy.run_with((&model, &optimizer), |context, ((up, down), optimizer)| {
///     let y = down.forward(&up.forward(&Tensor::ones((4, 8), DType::F32, &Device::Cpu)?)?.relu()?)?;
///     optimizer.minimize(context, &context.average_loss(&y.sqr()?.sum(1)?, 4)?)
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// Shoeybi and others, "Megatron-LM", 2019, section 3; `ColumnParallelLinear` of Megatron-LM.
#[derive(Clone, Debug)]
pub struct ColumnParallelLinear {
    part: Linear,
    parts: usize,
    options: ColumnParallelOptions,
}

/// A linear layer of which each rank of a tensor group computes one term of the outputs, from a part of the inputs: the
/// weight A of x Aᵀ + b is split along its columns.
///
/// Forward sums the ranks' terms. Backward communicates only if the input was whole.
///
/// # Shapes
/// Input: (…, `in_dim`), equal on all ranks, or, with `input_is_parallel`, (…, `in_dim` / ranks). Output: (…,
/// `out_dim`), equal on all ranks. On each rank the weight is (`out_dim`, `in_dim` / ranks) and the bias (`out_dim`).
///
/// # Ordering
/// Every rank of the tensor group must call forward, in the same order with other layers.
///
/// # Examples
/// See [`ColumnParallelLinear`].
///
/// # Source
/// Shoeybi and others, "Megatron-LM", 2019, section 3; `RowParallelLinear` of Megatron-LM.
#[derive(Clone, Debug)]
pub struct RowParallelLinear {
    part: Linear,
    bias: Option<Tensor>,
    parts: usize,
    input_is_parallel: bool,
}

/// Creates a [`ColumnParallelLinear`] whose variables have the names and, as a whole, the initial values that
/// [`candle_nn::linear()`] gives them.
///
/// # Errors
/// [`candle_core::Error`] if a variable cannot be created; it wraps
/// [`Indivisible`](distribute_optim::Error::Indivisible) if `out_dim` is not a multiple of the number of ranks times
/// the number of blocks.
///
/// # Cost
/// Each rank of a process draws the whole weight once and keeps its part.
pub fn column_parallel_linear(
    in_dim: usize,
    out_dim: usize,
    options: ColumnParallelOptions,
    vb: VarBuilder<'_>,
) -> Result<ColumnParallelLinear> {
    let request = Request { axis: 0, blocks: options.blocks };
    let (weight, parts) = part(&vb, (out_dim, in_dim), "weight", candle_nn::init::DEFAULT_KAIMING_NORMAL, request)?;
    let bias = options.bias.then(|| part(&vb, out_dim, "bias", bias_of(in_dim), request)).transpose()?;
    Ok(ColumnParallelLinear { part: Linear::new(weight, bias.map(|(bias, _)| bias)), parts, options })
}

/// Creates a [`RowParallelLinear`] whose variables have the names and, as a whole, the initial values that
/// [`candle_nn::linear()`] gives them.
///
/// # Errors
/// [`candle_core::Error`] if a variable cannot be created; it wraps
/// [`Indivisible`](distribute_optim::Error::Indivisible) if `in_dim` is not a multiple of the number of ranks.
///
/// # Cost
/// Each rank of a process draws the whole weight once and keeps its part.
pub fn row_parallel_linear(
    in_dim: usize,
    out_dim: usize,
    options: RowParallelOptions,
    vb: VarBuilder<'_>,
) -> Result<RowParallelLinear> {
    let request = Request { axis: 1, blocks: 1 };
    let (weight, parts) = part(&vb, (out_dim, in_dim), "weight", candle_nn::init::DEFAULT_KAIMING_NORMAL, request)?;
    let bias = options.bias.then(|| vb.get_with_hints(out_dim, "bias", bias_of(in_dim))).transpose()?;
    let input_is_parallel = options.input_is_parallel;
    Ok(RowParallelLinear { part: Linear::new(weight, None), bias, parts, input_is_parallel })
}

/// The distribution of [`candle_nn::linear()`]'s biases.
fn bias_of(in_dim: usize) -> Init {
    let bound = 1.0 / (in_dim as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

impl ColumnParallelLinear {
    /// Returns this rank's part of the weight.
    pub fn weight(&self) -> &Tensor {
        self.part.weight()
    }

    /// Returns this rank's part of the bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.part.bias()
    }

    /// Returns the number of parts of the weight: of ranks in a tensor group, or 1.
    pub fn parts(&self) -> usize {
        self.parts
    }
}

impl RowParallelLinear {
    /// Returns this rank's part of the weight.
    pub fn weight(&self) -> &Tensor {
        self.part.weight()
    }

    /// Returns the bias, which is not split.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Returns the number of parts of the weight: of ranks in a tensor group, or 1.
    pub fn parts(&self) -> usize {
        self.parts
    }
}

impl Module for ColumnParallelLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Some(group) = group_of("column_parallel_linear", self.parts)? else { return self.part.forward(x) };
        let part = self.part.forward(&copy_to_tensor_group(&group, x)?)?;
        if self.options.gather_output { gather_blocks(&group, &part, self.options.blocks) } else { Ok(part) }
    }
}

impl Module for RowParallelLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let sum = match group_of("row_parallel_linear", self.parts)? {
            None => self.part.forward(x)?,
            Some(group) if self.input_is_parallel => sum_over_tensor_group(&group, &self.part.forward(x)?)?,
            Some(group) => {
                let x = scatter_to_tensor_group(&group, x)?;
                sum_over_tensor_group(&group, &self.part.forward(&x)?)?
            }
        };
        self.bias.as_ref().map_or(Ok(sum.clone()), |bias| add_bias(&sum, bias))
    }
}
