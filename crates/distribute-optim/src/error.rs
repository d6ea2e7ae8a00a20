//! Errors of optimizers.

use distribute_types::{Class, ErrorClass};

/// The errors of an optimizer itself. Errors of the tensor library, the collectives and the strategy are variants of
/// the library adapter's error ([`TensorLibrary::Error`](crate::TensorLibrary::Error)), which wraps this one too.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting of an optimizer is out of range.
    #[error(transparent)]
    Setting(#[from] distribute_rules::Error),
    /// Two settings of an optimizer exclude each other.
    #[error("{what} does not go with {other}: {why}")]
    Combination {
        /// One setting.
        what: &'static str,
        /// The other.
        other: &'static str,
        /// The reason and the remedy.
        why: &'static str,
    },
    /// The model differs between workers.
    #[error(
        "the model differs between workers: variable {index} is {here} on {here_name}, but {there} on {there_name}; \
         build the same model with the same shapes on every worker"
    )]
    ModelDiffers {
        /// The index of the first variable that differs, in order of creation.
        index: usize,
        /// Name, shape and type on this worker.
        here: String,
        /// This worker's name.
        here_name: String,
        /// Name, shape and type on the other worker.
        there: String,
        /// The other worker's name.
        there_name: String,
    },
    /// A variable's type cannot be trained.
    #[error("variable {name:?} is of type {dtype}; optimizers train f32, f64, f16 and bf16")]
    UntrainableType {
        /// The variable's name.
        name: String,
        /// Its type.
        dtype: distribute_device::DType,
    },
    /// A slot of local updates does not fit its variable.
    #[error("slot {name:?}: {problem}")]
    LocalSlot {
        /// The slot's name.
        name: String,
        /// The problem.
        problem: String,
    },
    /// A replica of another strategy used the optimizer.
    #[error(
        "the model of the optimizer was built for {built}, and this strategy has {given}; build both under the \
         strategy that trains them"
    )]
    OtherStrategy {
        /// The replicas that the model was built for.
        built: String,
        /// The replicas of the strategy.
        given: String,
    },
    /// A variable got its first gradient after the buckets were planned, which ZeRO-1 and the exchange on devices do
    /// not support.
    #[error(
        "variable {name} got its first gradient after the first step; under ZeRO-1 the first step decides who keeps \
         whose state, and on GPUs which bucket it is in, so let every variable take part in it"
    )]
    LateGradient {
        /// The variable's name.
        name: String,
    },
    /// A sharded variable was used under a strategy that does not shard it.
    #[error("variable {name} is sharded, but not for this strategy; build the model under the strategy that trains it")]
    ShardedElsewhere {
        /// The variable's name.
        name: String,
    },
    /// The copies of the variables differ, because replicas have updated them by their own gradients.
    #[error(
        "the replicas have made steps of their own since their variables were equal; call Optimizer::synchronize \
         before the model is saved or averaged"
    )]
    Apart,
    /// Copies of a variable differ.
    #[error(
        "variable {name} of replica {replica} differs from replica 0's; something writes it inside replicas without an \
         aggregation, or computes it from what differs between them; correct that and resume from a checkpoint"
    )]
    Diverged {
        /// The name of the first variable that differs.
        name: String,
        /// The id of the first replica whose copy differs.
        replica: usize,
    },
    /// Copies of a variable that is not split differ between the ranks of a tensor group.
    #[error(
        "variable {name} of tensor rank {place} of replica {replica} differs from tensor rank 0's; if it is combined \
         with a part of a split layer's output, each rank has a part of its gradient, so use \
         copy_to_tensor_group(variable) there; resume from a checkpoint"
    )]
    RanksDiverged {
        /// The name of the first variable that differs.
        name: String,
        /// The id of the replica.
        replica: usize,
        /// The first place in its tensor group whose copy differs.
        place: usize,
    },
    /// A variable cannot be divided among the ranks of a tensor group.
    #[error(
        "variable {name:?} has shape {shape:?}, whose axis {axis} cannot be divided into {blocks} × {parts} equal \
         pieces for the ranks of a tensor group; make its length a multiple of {}, or use fewer tensor ranks",
        blocks * parts
    )]
    Indivisible {
        /// The variable's name.
        name: String,
        /// Its whole shape.
        shape: Vec<usize>,
        /// The axis.
        axis: usize,
        /// The number of blocks, each of which is divided.
        blocks: usize,
        /// The number of ranks.
        parts: usize,
    },
    /// A variable is split among the ranks of a tensor group in one of its layers, and otherwise in another.
    #[error(
        "variable {name:?} is split among tensor ranks in one layer and not, or otherwise, in another; let both layers \
         be tensor-parallel ones with the same split, or give each a variable of its own"
    )]
    SplitDiffers {
        /// The variable's name.
        name: String,
    },
    /// A layer whose variables are split was called under a strategy with other tensor groups.
    #[error(
        "{layer}: its variables are split among {parts} tensor ranks, and this strategy has groups of {ranks}; build \
         the model in the scope of the strategy that runs it"
    )]
    OtherTensorGroup {
        /// The layer.
        layer: &'static str,
        /// The number of parts of its variables.
        parts: usize,
        /// The number of ranks of the strategy's tensor groups.
        ranks: usize,
    },
    /// A layer whose variables are split was called outside a replica, or under a strategy without tensor groups.
    #[error(
        "{layer}: its variables are split among {parts} tensor ranks, whose parts are combined inside a replica; call \
         the model in run, on every rank"
    )]
    OutsideTensorGroup {
        /// The layer.
        layer: &'static str,
        /// The number of parts of its variables.
        parts: usize,
    },
    /// The loss of a replica without examples was disconnected from the model.
    #[error(
        "the loss of a replica without examples was multiplied by the number 0, where backward ends; others wait there \
         for this replica, so multiply it by the context's weigh, such as CandleContext::weigh"
    )]
    CutLoss,
    /// A replica failed during a step's update and received another replica's values.
    #[error("replica {local} of this process failed while it updated its parameters; it gets another replica's")]
    HalfUpdated {
        /// The index of the replica in its process.
        local: usize,
    },
    /// A failure during a step's update left no replica with complete parameters.
    #[error(
        "a failure has left the model half updated, on every replica that could lend its values; restore the newest \
         checkpoint of model and optimizer, or build them anew"
    )]
    Torn,
    /// Averages were to be updated, saved or restored while they are in the model's variables.
    #[error(
        "the averages are in the model's variables since swap; call it once more before update, and before a \
         checkpoint is saved or restored"
    )]
    Swapped,
    /// No variable of the model got a gradient.
    #[error("no variable of the model got a gradient on any replica; compute the loss from the model's own variables")]
    NoGradient,
    /// A gradient that is given by rows has one that its variable does not have.
    #[error("a gradient has row {row}, but its variable has {rows} rows; all workers must build the same model")]
    NoSuchRow {
        /// The index of the row.
        row: i64,
        /// The number of the variable's rows.
        rows: usize,
    },
    /// Gradients that were said to be sums over all replicas differ between them.
    #[error(
        "the gradients given to apply_aggregated_gradients differ between replicas; sum them by \
         sum_gradients before, or use apply_gradients, which does"
    )]
    UnequalSums,
    /// A variable got a second gradient in one step, which would have replaced the first.
    #[error(
        "variable {name} got two gradients in one step, as from two backward passes or two graphs that were alive at \
         once; add the losses and run one backward, or finish one graph before the next begins"
    )]
    SecondGradient {
        /// The variable's name.
        name: String,
    },
    /// A gradient was given for something that the optimizer does not train.
    #[error("a gradient was given for {name:?}, {problem}")]
    Gradient {
        /// The name that it was given for.
        name: String,
        /// The problem and the remedy.
        problem: String,
    },
    /// A gradient was in an accelerator's memory, but gradients are reduced on the host.
    #[error("tensors on a GPU are reduced there by optimizers of mirrored strategies; use one of those")]
    OnDevice,
}

distribute_types::debug_is_display!(Error);

impl ErrorClass for Error {
    fn class(&self) -> Class {
        Class::PERMANENT
    }
}

/// The result of operations that fail with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
