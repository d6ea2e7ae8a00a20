//! Replicas that update their variables by their own gradients, and synchronize from time to time.

use std::any::Any;
use std::ops::Range;

use distribute_collectives::ProcessGroup;
use distribute_device::{BufferMut, DType};

use crate::Result;

/// How replicas train that do not sum their gradients: each updates its own copies of the variables by its own
/// gradients, without communication, and after some steps the copies become equal again. For authors of strategies, who
/// return it from [`StrategyExtended::local_updates`](crate::StrategyExtended::local_updates).
///
/// # Examples
/// Local SGD over the replicas of any other strategy: they train apart, and every `every` steps their variables become
/// the mean of all.
/// ```
/// use distribute_strategy::{Error, LocalUpdates, MirroredStrategy, Replicas, Strategy, StrategyExtended};
///
/// struct LocalSgd {
///     over: Strategy,
///     every: u64,
/// }
///
/// impl LocalUpdates for LocalSgd {
///     fn is_due(&self, steps: u64) -> bool {
///         steps.is_multiple_of(self.every)
///     }
/// }
///
/// impl StrategyExtended for LocalSgd {
///     fn name(&self) -> &'static str {
///         "LocalSgd"
///     }
///     fn replicas(&self) -> &Replicas {
///         self.over.extended().replicas()
///     }
///     fn describe(&self) -> String {
///         format!("LocalSgd every {} steps over {}", self.every, self.over.describe())
///     }
///     fn local_updates(&self) -> Option<&dyn LocalUpdates> {
///         Some(self)
///     }
/// }
///
/// let over = MirroredStrategy::builder().num_replicas(2).build()?;
/// let strategy = Strategy::new(LocalSgd { over, every: 8 });
/// assert_eq!(strategy.num_replicas_in_sync(), 2);
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// Stich, "Local SGD converges fast and communicates little", 2019. With another
/// [`synchronize`](LocalUpdates::synchronize) and [`slots`](LocalUpdates::slots):
/// [`DilocoStrategy`](crate::DilocoStrategy).
pub trait LocalUpdates: Send + Sync {
    /// Returns whether replicas synchronize after this number of steps of an optimizer, counted from 1. The number is
    /// the same on all replicas, and the answer must depend on it alone.
    fn is_due(&self, steps: u64) -> bool;

    /// Makes the variables of all replicas equal. Every replica calls this, after the same step. Default: variables and
    /// the optimizer's state become the means over all replicas.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective) if a replica is missing or fails, and
    /// [`Error::Values`](crate::Error::Values) if a variable cannot be read or written.
    fn synchronize(&self, replica: &dyn LocalReplica) -> Result<()> {
        replica.average_variables()?;
        replica.average_state()
    }

    /// Synchronizes on an occasion, and returns what is equal on all replicas afterwards. Every replica calls this,
    /// after the same step. Default: calls [`synchronize`](LocalUpdates::synchronize), after which everything is.
    ///
    /// Before a model is read, variables must become equal; before it is saved, the optimizer's state and the slots
    /// too. An optimizer returns an error if they do not.
    ///
    /// # Errors
    /// The errors of [`synchronize`](LocalUpdates::synchronize) occur in the same cases.
    fn synchronize_for(&self, occasion: LocalOccasion, replica: &dyn LocalReplica) -> Result<LocalExtent> {
        let _ = occasion;
        self.synchronize(replica)?;
        Ok(LocalExtent::All)
    }

    /// Returns the state that an optimizer keeps for each trained variable in addition to its own: an array in f32, in
    /// host memory, of as many elements as the variable. It is created before the first step, saved in checkpoints as
    /// `w/outer` and so on, and restored from them. Default: none.
    ///
    /// Values that are loaded into the model without the optimizer's state begin a new training: the slots are created
    /// again.
    fn slots(&self) -> &[LocalSlot] {
        &[]
    }

    /// Checks, before an optimizer's first step, the trained variables for which it creates the
    /// [`slots`](LocalUpdates::slots). Not called if there are no slots. Default: accepts all.
    ///
    /// # Errors
    /// [`Error::LocalUpdates`](crate::Error::LocalUpdates) for variables that cannot be synchronized.
    fn check_variables(&self, variables: &[LocalVariable]) -> Result<()> {
        let _ = variables;
        Ok(())
    }

    /// Returns whether every step is followed by the mean of all replicas' variables, and by nothing else. An optimizer
    /// whose update is a multiple of the gradient (SGD without momentum and without clipping) then sums the gradients
    /// of all replicas before its update, as under other strategies. The mean of such updates is the update by the mean
    /// of the gradients; the sum of gradients rounds once where updates round on each replica. Slots have their initial
    /// values in each checkpoint then, such as those that the variables have. Default: `false`.
    fn averages_every_step(&self) -> bool {
        false
    }

    /// Returns whether gradients are summed over all replicas in every step, as under other strategies, so that copies
    /// stay equal. The [synchronizations](LocalUpdates::synchronize_for) that are due then exchange something with
    /// others than these replicas, and must leave the copies equal. Default: `false`.
    fn sums_gradients(&self) -> bool {
        false
    }
}

/// The occasion of a synchronization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalOccasion {
    /// It [is due](LocalUpdates::is_due).
    Due {
        /// The number of steps of the optimizer, counted from 1.
        steps: u64,
    },
    /// The model is about to be read: evaluated, or averaged.
    Read,
    /// The model and its optimizer are about to be saved.
    Save,
}

/// The values that are equal on all replicas after a synchronization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalExtent {
    /// The variables, the optimizer's state and the slots.
    All,
    /// All variables.
    Variables,
    /// Some of the variables, or none.
    Some,
}

/// State that an optimizer keeps for each trained variable; see [`LocalUpdates::slots`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalSlot {
    /// The name, which follows that of the variable in checkpoints: `w/outer`.
    pub name: &'static str,
    /// The values before the first step, and after a restore from a checkpoint that has none.
    pub initial: LocalInitial,
    /// Whether each replica has values of its own. [`LocalReplica::average_state`] then sets them to their mean.
    pub is_own: bool,
}

/// The initial values of a [`LocalSlot`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalInitial {
    /// The variable's values.
    Variable,
    /// Zeros.
    Zeros,
}

/// A trained variable, as a strategy of local updates sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalVariable {
    /// The variable's path, such as `fc1.weight`.
    pub name: String,
    /// The type in which it is updated: f32 for variables of 16 bits of which the optimizer keeps a copy in f32.
    pub dtype: DType,
    /// The number of elements.
    pub len: usize,
}

/// Reads the values and the slots of the variable with an index.
pub type ReadSlots<'a> = dyn FnMut(usize, &[f32], &[Vec<f32>]) -> Result<()> + 'a;

/// Changes the values and the slots of the variable with an index.
pub type ChangeSlots<'a> = dyn FnMut(usize, &mut [f32], &mut [Vec<f32>]) -> Result<()> + 'a;

/// A replica that synchronizes with all others.
pub trait LocalReplica {
    /// Returns this replica's rank in the group of all replicas.
    fn group(&self) -> &ProcessGroup;

    /// Sets each trained variable to the mean over all replicas. Every replica must call this.
    ///
    /// The means replace the variables after all of them have arrived, so a failure leaves the variables as they were.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective) if a replica is missing or fails, and
    /// [`Error::Values`](crate::Error::Values) if a variable cannot be read or written.
    fn average_variables(&self) -> Result<()>;

    /// Sets the optimizer's state, such as momentum, to the mean over all replicas, and each variable's number of steps
    /// to the largest. Every replica must call this. The state of a tensor library's own optimizer stays as it is.
    ///
    /// # Errors
    /// The errors of [`average_variables`](LocalReplica::average_variables) occur in the same cases.
    fn average_state(&self) -> Result<()>;

    /// Passes each trained variable's name and this replica's copy of it to `body`, in the order of the model, which is
    /// the same on all replicas. For variables of 16 bits this is the optimizer's copy in f32, from which they are
    /// rounded afterwards.
    ///
    /// # Errors
    /// The first error of `body`, after which the replica's variables may be changed in part: the run then fails, and
    /// the replica gets the values of another; and [`Error::Values`](crate::Error::Values) if a variable cannot be read
    /// or written.
    fn change_variables(&self, body: &mut dyn FnMut(&str, &mut BufferMut<'_>) -> Result<()>) -> Result<()>;

    /// Returns the trained variables, in the order of the model, which is the same on all replicas.
    ///
    /// # Errors
    /// [`Error::Values`](crate::Error::Values) if a variable's type is not one of [`DType`].
    fn variables(&self) -> Result<Vec<LocalVariable>>;

    /// Passes the index of each variable of a range of [`variables`](LocalReplica::variables), its values and its
    /// [`slots`](LocalUpdates::slots) to `body`, which must not communicate. For strategies with slots.
    ///
    /// # Errors
    /// [`Error::Values`](crate::Error::Values) if a variable cannot be read, and
    /// [`Error::LocalUpdates`](crate::Error::LocalUpdates) if there are no such variables, or they have no slots.
    fn read_slots(&self, variables: Range<usize>, body: &mut ReadSlots<'_>) -> Result<()>;

    /// Waits for all replicas of this process, then passes the same as [`read_slots`](LocalReplica::read_slots) to
    /// `body`, which changes values and slots, and must not communicate. Every replica calls this, after its last
    /// communication: if one of them has failed by then, none is changed.
    ///
    /// # Errors
    /// [`Error::Merge`](crate::Error::Merge) if another replica has failed; the errors of
    /// [`read_slots`](LocalReplica::read_slots); and the first error of `body`, after which the replica gets the values
    /// and the slots of another one.
    fn change_slots(&self, variables: Range<usize>, body: &mut ChangeSlots<'_>) -> Result<()>;

    /// Keeps what this replica has in progress, such as a started operation of the [`group`](LocalReplica::group),
    /// until a later synchronization [takes](LocalReplica::take_in_progress) it; replaces what was kept before.
    ///
    /// It is not state: it is never saved, and it is dropped on all replicas if a run fails, or if values are loaded
    /// into the model or the optimizer. Slots must have what is needed to do the same without it.
    fn keep_in_progress(&self, work: Box<dyn Any + Send>);

    /// Returns what this replica has [kept](LocalReplica::keep_in_progress), which is then no longer kept; `None` if
    /// there is nothing, or if it was dropped. All replicas get the same answer.
    fn take_in_progress(&self) -> Option<Box<dyn Any + Send>>;
}
