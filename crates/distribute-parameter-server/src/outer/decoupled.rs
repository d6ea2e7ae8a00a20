//! Islands that train apart and exchange parameters with servers: the strategy of one of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use distribute_cluster::{SimpleResolver, Task};
use distribute_input::InputOptions;
use distribute_strategy::{
    Error as StrategyError, FragmentSchedule, LocalExtent, LocalOccasion, LocalReplica, LocalSlot, LocalUpdates,
    LocalVariable, Replicas, Strategy, StrategyExtended, Wire,
};
use distribute_values::VariableOptions;
use parking_lot::Mutex;

use super::event::OuterExchange;
use super::island::Island;

/// An island of the decoupled form of DiLoCo: it trains by itself, exchanges parameters with the servers that hold the
/// outer ones now and then, and waits for no other island.
///
/// The islands are the chief and the workers of a cluster, one process each, and the servers its tasks `ps`
/// ([`OuterServer`](crate::OuterServer)). Within an island, the replicas of another strategy of one process, such as
/// `MirroredStrategy`, sum their gradients in every step. After `inner_steps` steps the island sends how far its
/// parameters have moved, with the number of examples behind it, and continues from the newest outer parameters. Model,
/// loop and trainer stay as they are.
///
/// # Outer steps
/// A server makes an outer step of a fragment when changes of [`quorum`] islands have arrived, and then [`grace`] has
/// passed or all islands that attend have sent theirs. The gradient of the [outer
/// optimizer](distribute_strategy::OuterNesterov) is the mean of the islands' changes, weighted by their examples.
/// Changes that an island sends twice before an outer step are added, examples too. If its process was replaced
/// meanwhile, those of the later process count alone, with a warning of the server: it has begun with the outer
/// parameters again.
///
/// Changes that begin at an earlier outer step count in the next one, unless that is more than [`staleness`] outer
/// steps ago: then they are refused, with a warning and a count on both sides, and the island continues from the newest
/// outer parameters.
///
/// # Ordering
/// The answer to an island's changes comes when the outer step that counts them is made. An island waits for it during
/// `grace` if the quorum is not reached by then, else until the grace window closes: at most twice `grace`. If it is
/// not made by then, the island gets the newest outer parameters that it does not have; if there are none, it trains on
/// with its own, and sends next the changes since. Changes that were sent are never sent a second time.
///
/// An island that joins makes one step, gets the outer parameters, and adds its step to them; a process that resumes
/// from a checkpoint adds what had changed and was not sent. If the process before it has sent changes after that
/// checkpoint was saved, it adds nothing, with a warning, and continues from the outer parameters. An island that is
/// lost is no longer waited for: at once if its process has ended, after the server's `silence` if it is frozen. While
/// a server cannot be reached, its islands train on by themselves, with a warning, for [`server_timeout`]. If the
/// connection is lost after changes were sent, they may have counted or not; the island takes them for counted. The
/// outcome of each exchange is passed to [`on_exchange`].
///
/// Islands train at their own speeds, so runs do not repeat bit for bit.
///
/// [`quorum`]: crate::DecoupledDilocoBuilder::quorum
/// [`grace`]: crate::DecoupledDilocoBuilder::grace
/// [`staleness`]: crate::DecoupledDilocoBuilder::staleness
/// [`server_timeout`]: crate::DecoupledDilocoBuilder::server_timeout
/// [`on_exchange`]: crate::DecoupledDilocoBuilder::on_exchange
///
/// # Reading and saving
/// The model of an island is its own: after an exchange the outer parameters, and then those that it trains. Reading or
/// saving it exchanges nothing. The outer parameters, and in eight bits the remainders that were not sent, are state of
/// the optimizer, saved as `w/outer` and `w/residual`; each island has a folder of its own. The outer momentum is saved
/// by the servers ([`OuterServerOptions::checkpoints`](crate::OuterServerOptions::checkpoints)).
///
/// # Cost
/// Per exchange and parameter an island sends 4 bytes, or about 1.02 with [`Wire::Int8`], and receives 4 if there are
/// newer outer parameters. An island has 4 bytes of host memory for each parameter and slot; a server has 4 for each
/// parameter, each momentum, and the changes of each island that count in the next outer step, and as much again while
/// it saves.
///
/// # Limits
/// As those of [`DilocoStrategy`](distribute_strategy::DilocoStrategy); and variables that are not trained, such as
/// running statistics, are each island's own.
///
/// # Examples
/// ```no_run
/// use std::time::Duration;
///
/// use distribute_cluster::TfConfigResolver;
/// use distribute_parameter_server::DecoupledDilocoStrategy;
/// use distribute_strategy::{MirroredStrategy, Wire};
///
/// let cluster = TfConfigResolver::from_env()?;
/// let islands = DecoupledDilocoStrategy::builder(&cluster)?.inner_steps(100).wire(Wire::Int8);
/// let islands = islands.quorum(2).grace(Duration::from_secs(1)).examples_per_step(64);
/// println!("island {} of {}", islands.island_index(), islands.num_islands());
/// let strategy = islands.over(MirroredStrategy::builder().build()?)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Source
/// "Decoupled DiLoCo", arXiv 2604.21428; mixing is that of "Streaming DiLoCo with overlapping communication", arXiv
/// 2501.18512.
pub struct DecoupledDilocoStrategy {
    pub(super) over: Strategy,
    pub(super) place: Place,
    pub(super) schedule: FragmentSchedule,
    pub(super) wire: Wire,
    /// The share of inner parameters in those after an exchange.
    pub(super) mixing: f32,
    pub(super) examples_per_step: u64,
    pub(super) slots: Vec<LocalSlot>,
    pub(super) servers: usize,
    pub(super) island: Island,
    /// Whether fragments were joined, or at least tried to be.
    pub(super) has_begun: AtomicBool,
    /// The number of inner steps before the first of this process.
    pub(super) resumed_after: AtomicU64,
    /// By fragment.
    pub(super) progress: Mutex<Vec<Progress>>,
    pub(super) on_exchange: Option<OnExchange>,
}

/// Looks at exchanges.
pub(super) type OnExchange = Arc<dyn Fn(&OuterExchange) + Send + Sync>;

/// Which island this process is.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) cluster: SimpleResolver,
    pub(super) task: Task,
    pub(super) index: usize,
    pub(super) islands: usize,
}

/// The state of a fragment on its server, as far as an island knows it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    /// The server's process and the outer step of the outer parameters here.
    pub(super) known: Option<(u64, u64)>,
    /// The number of inner steps after which changes were sent last.
    pub(super) sent_after: u64,
}

/// The slots of the outer parameters, and of what eight bits have lost.
pub(super) const OUTER: usize = 0;
pub(super) const RESIDUAL: usize = 1;

impl LocalUpdates for DecoupledDilocoStrategy {
    fn is_due(&self, steps: u64) -> bool {
        // Fragments are joined after the first step here, whatever its number in a run that was resumed.
        !self.has_begun.load(Ordering::Acquire) || self.schedule.due(steps).is_some()
    }

    fn synchronize_for(
        &self,
        occasion: LocalOccasion,
        replica: &dyn LocalReplica,
    ) -> Result<LocalExtent, StrategyError> {
        if let LocalOccasion::Due { steps } = occasion {
            self.exchange_due(replica, steps)?;
        }
        // The copies of an island's replicas are always equal.
        Ok(LocalExtent::All)
    }

    fn slots(&self) -> &[LocalSlot] {
        &self.slots
    }

    fn check_variables(&self, variables: &[LocalVariable]) -> Result<(), StrategyError> {
        self.schedule.check_variables(variables)
    }

    fn sums_gradients(&self) -> bool {
        true
    }
}

impl StrategyExtended for DecoupledDilocoStrategy {
    fn name(&self) -> &'static str {
        "DecoupledDiloco"
    }

    fn replicas(&self) -> &Replicas {
        self.over.extended().replicas()
    }

    fn describe(&self) -> String {
        let Place { task, index, islands, .. } = &self.place;
        let FragmentSchedule { inner_steps, fragments } = self.schedule;
        let wire = if self.is_int8() { "8 bits" } else { "f32" };
        format!(
            "DecoupledDiloco, island {} of {islands} ({task}), every {inner_steps} steps in {fragments} fragments, \
             changes in {wire}, over {}",
            index + 1,
            self.over.describe()
        )
    }

    fn cluster_resolver(&self) -> Option<&SimpleResolver> {
        Some(&self.place.cluster)
    }

    fn variable_options(&self, name: &str, options: VariableOptions) -> VariableOptions {
        self.over.extended().variable_options(name, options)
    }

    fn local_updates(&self) -> Option<&dyn LocalUpdates> {
        Some(self)
    }

    fn input_options(&self, options: InputOptions) -> InputOptions {
        self.over.extended().input_options(options)
    }
}
