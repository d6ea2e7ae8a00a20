//! Errors of distributed burn models.

use distribute_types::{Class, ErrorClass};

/// The errors of this crate.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The optimizer failed.
    #[error(transparent)]
    Optim(#[from] distribute_optim::Error),
    /// The strategy failed.
    #[error(transparent)]
    Strategy(#[from] distribute_strategy::Error),
    /// A distributed value was used incorrectly.
    #[error(transparent)]
    Values(#[from] distribute_values::Error),
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] distribute_collectives::Error),
    /// Training failed: callbacks, checkpoints, metrics or progress.
    #[error(transparent)]
    Train(#[from] distribute_train::Error),
    /// The data could not be read.
    #[error(transparent)]
    Input(#[from] distribute_input::Error),
    /// A PJRT device failed.
    #[cfg(feature = "pjrt")]
    #[error(transparent)]
    Accelerator(distribute_device::Error),
    /// A model has an operation that cannot be compiled.
    #[cfg(feature = "pjrt")]
    #[error(transparent)]
    Lowering(#[from] distribute_burn_hlo::Error),
    /// A program could not be built.
    #[cfg(feature = "pjrt")]
    #[error(transparent)]
    Hlo(#[from] distribute_hlo::Error),
    /// The operations of a model could not be recorded for a program.
    #[cfg(feature = "pjrt")]
    #[error("the model cannot be compiled: {problem}")]
    Trace {
        /// The problem.
        problem: String,
    },
    /// Something does not go with programs that are compiled for PJRT devices.
    #[cfg(feature = "pjrt")]
    #[error("under TpuStrategy {problem}")]
    Program {
        /// The problem, and the remedy.
        problem: String,
    },
    /// A replica is to be on a device that this crate does not use.
    #[error(
        "a replica was to be on {device}; burn models run on CPUs here, on burn's Flex backend: name CPU:0, CPU:1 …"
    )]
    Device {
        /// The device.
        device: String,
    },
    /// The parameters of a model differ between replicas of one process.
    #[error(
        "the models of the replicas differ: parameter {index} is {first} on the first replica and {other} on replica \
         {replica}; build the same model on every call"
    )]
    ReplicasDiffer {
        /// The index of the first parameter that differs, in visiting order.
        index: usize,
        /// Path, shape and type on the first replica.
        first: String,
        /// Path, shape and type on the other replica.
        other: String,
        /// The other replica's index in its process.
        replica: usize,
    },
    /// A model has parameters with a reparameterization already.
    #[error(
        "parameter {path:?} has a reparameterization, such as LoRA's; a parameter can have only one, and scope needs \
         it: call materialize first"
    )]
    Reparameterized {
        /// The path of the first such parameter.
        path: String,
    },
    /// A sharded weight was used outside `run` in a process that does not have all its parts.
    #[error(
        "the weight {name:?} is sharded over several processes, and the model was called outside run; call it inside, \
         or take a module with whole weights by Model::to_module"
    )]
    OutsideRun {
        /// The variable's name.
        name: String,
    },
    /// An optimizer of burn computes with whole parameters, and replicas or tensor ranks have parts of these.
    #[error(
        "{optimizer} computes with whole parameters, such as their norms or rows, and the strategy divides \
         {parameter:?}; use an optimizer that treats every element alike, such as Adam, and clip norms by \
         Optimizer::clip with Clip::GlobalNorm"
    )]
    NotElementwise {
        /// The optimizer.
        optimizer: String,
        /// The path of the first parameter whose parts it would update otherwise than the whole.
        parameter: String,
    },
    /// Parameters were frozen or unfrozen while the model had an optimizer.
    #[error("the model has an optimizer; freeze and unfreeze parameters before one is built, or after it is dropped")]
    FrozenLate,
    /// Values were loaded into variables of 16 bits whose f32 copies an optimizer keeps.
    #[error(
        "variable {name:?} has 16 bits, and an optimizer keeps its value in 32; load values before an optimizer is \
         built, or after it is dropped"
    )]
    LoadedLate {
        /// The path of the first such variable.
        name: String,
    },
    /// A value does not fit into the type of its variable.
    #[error(
        "{name:?} has values that {dtype} cannot hold; build the model in a wider type, such as bf16 in place of f16"
    )]
    Range {
        /// The variable's path.
        name: String,
        /// The variable's type.
        dtype: String,
    },
    /// burn could not serialize or read the state of one of its optimizers, or it is that of another kind of optimizer.
    #[error("the state of burn's optimizer cannot be {action}: {problem}")]
    OptimizerState {
        /// The operation.
        action: &'static str,
        /// The reason.
        problem: String,
    },
    /// burn's learner cannot continue on this worker.
    #[cfg(feature = "learner")]
    #[error("{what}: {problem}")]
    Learner {
        /// The part that failed.
        what: String,
        /// The reason.
        problem: String,
    },
    /// There are no examples to train on, to evaluate or to predict.
    #[error("the dataset to {what} has no elements; give at least one")]
    NoExamples {
        /// The operation.
        what: &'static str,
    },
    /// An array of a dataset has another number of dimensions than the tensor that is to be made of it.
    #[error(
        "an array of shape {shape:?} was to become a tensor of {expected} dimensions; the type of the tensor says how \
         many, and a batch has one more than its elements"
    )]
    Rank {
        /// The shape of the array.
        shape: Vec<usize>,
        /// The tensor's number of dimensions.
        expected: usize,
    },
    /// An array was to become a tensor of integers, and has numbers that are not whole, or that the device's type of
    /// integers does not have.
    #[error(
        "element {at} of an array is {value}, and the array was to become a tensor of {integers}; give whole numbers \
         that this type has, or use a tensor of floating-point numbers"
    )]
    NotWhole {
        /// The position of the first such element, in row-major order.
        at: usize,
        /// The element.
        value: f64,
        /// The device's type of integers.
        integers: &'static str,
    },
    /// An index of a dataset of burn does not exist.
    #[error("item {index} was asked for, but the dataset has {len} items; yield indices from 0 to below that")]
    Index {
        /// The index.
        index: i64,
        /// The number of items.
        len: usize,
    },
    /// The outputs of a model and the targets do not fit together.
    #[error("outputs of shape {outputs:?} do not go with targets of shape {targets:?}; give targets of {expected}")]
    Shapes {
        /// The shape of the outputs.
        outputs: Vec<usize>,
        /// The shape of the targets.
        targets: Vec<usize>,
        /// The remedy.
        expected: &'static str,
    },
    /// A target is not a class.
    #[error(
        "the target of example {at} is {class}, but there are {classes} classes; give indices from 0 to below that"
    )]
    Class {
        /// The example's row on its replica.
        at: usize,
        /// The target.
        class: i64,
        /// The number of classes.
        classes: usize,
    },
    /// A target is not a class that metrics and class weights take.
    #[error(
        "target {at} of a batch is {class}, and metrics and class weights take classes from 0 to {most}; give every \
         position a class, or train without metrics and class weights", most = u32::MAX
    )]
    NotClass {
        /// The position of the target among those of its replica's batch, in row-major order.
        at: usize,
        /// The target.
        class: i64,
    },
    /// An index of an embedding is not in its vocabulary.
    #[error("index {at} is {index}, but the vocabulary has {vocabulary} words; give indices from 0 to below that")]
    Word {
        /// The position of the index among all that were given.
        at: usize,
        /// The index.
        index: i64,
        /// The number of words.
        vocabulary: usize,
    },
    /// An index of `select`, `gather`, `scatter` or `select_assign` is not in the dimension.
    #[error("index {at} is {index}, but dimension {dim} has {len} elements; give indices from 0 to below that")]
    Place {
        /// The position of the index among all that were given.
        at: usize,
        /// The index.
        index: i64,
        /// The dimension.
        dim: usize,
        /// The number of elements in it.
        len: usize,
    },
    /// A tensor cannot be divided among the ranks of a tensor group.
    #[error(
        "scatter_to_tensor_group: the input has shape {shape:?}, whose last axis cannot be divided among {ranks} \
         tensor ranks; give (…, a multiple of {ranks})"
    )]
    Undivided {
        /// The shape of the input.
        shape: Vec<usize>,
        /// The number of ranks.
        ranks: usize,
    },
    /// A model under a strategy with tensor groups has dropout, or another of burn's layers that draw random numbers.
    #[error(
        "layer {path:?} draws random numbers in training, and the ranks of a tensor group ({ranks} here) would draw \
         different ones for the activations that they share; leave the layer out, or freeze it (Module::freeze)"
    )]
    DrawnByRanks {
        /// The path of the first such layer.
        path: String,
        /// The number of ranks of a tensor group.
        ranks: usize,
    },
    /// A loss did not return one value for each example.
    #[error("the loss returned {given} values for {examples} examples; return one for each")]
    Losses {
        /// The number of values.
        given: usize,
        /// The number of examples.
        examples: usize,
    },
    /// The number of weights differs from the number of examples.
    #[error("{given} weights were given for {examples} examples; give one for each")]
    Weights {
        /// The number of weights.
        given: usize,
        /// The number of examples.
        examples: usize,
    },
}

distribute_types::debug_is_display!(Error);

impl ErrorClass for Error {
    fn class(&self) -> Class {
        match self {
            Error::Optim(error) => error.class(),
            Error::Strategy(error) => error.class(),
            Error::Values(error) => error.class(),
            Error::Collective(error) => error.class(),
            Error::Train(error) => error.class(),
            Error::Input(error) => error.class(),
            #[cfg(feature = "pjrt")]
            Error::Accelerator(error) => error.class(),
            _ => Class::PERMANENT,
        }
    }
}

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;
