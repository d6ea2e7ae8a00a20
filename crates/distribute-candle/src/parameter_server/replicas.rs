//! A worker's model with several replicas: copies of the variables, and gradients that are summed before they are
//! pushed to the servers.

use std::ops::{Deref, Range};
use std::sync::Arc;

use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use distribute_input::Element;
use distribute_optim::backend::{Reduced, overwrite, warn_untrained};
use distribute_parameter_server::{Gradient, ShardedVariable, Versions, WorkerContext};
use distribute_strategy::{Recoverable, ReplicaArgs, ReplicaContext, Strategy, counted};
use distribute_values::PerReplica;
use parking_lot::Mutex;

use super::backends::{self, Copied};
use super::embedding::{RowsGradient, Table, add_rows};
use super::running_statistics::{self, Changes};
use crate::device::candle_device;
use crate::statistics::{self, Statistics};
use crate::{Candle, Clip, Error, Result, Variable};

/// A model on a worker of a parameter-server cluster, with one copy per replica of a strategy of this worker.
///
/// Pass a reference to it to `run`; each replica then gets its own copy.
pub struct ReplicatedModel<'a, M> {
    worker: &'a WorkerContext,
    kept: Arc<KeptReplicas<M>>,
}

/// One replica's copy of a [`ReplicatedModel`]. It dereferences to the model itself.
pub struct ModelReplica<'m, M> {
    replica: &'m Replica<M>,
}

/// The state that a worker keeps of a model with several replicas between steps.
pub(super) struct KeptReplicas<M> {
    replicas: Vec<Replica<M>>,
    optimizer: u32,
    state: Mutex<State>,
    changes: Changes,
    /// The strategy's runs restore them after a failure, as long as this lives.
    _statistics: Option<Arc<Statistics>>,
}

/// One copy of the model; all copies have the same variables in the same order.
struct Replica<M> {
    model: M,
    copies: Vec<Copied>,
    tables: Vec<Arc<Table>>,
    /// Accessed by the replica's thread in a run, and by the worker's between runs.
    computed: Mutex<Computed>,
}

/// The gradients that a replica has computed in this function, by variable.
#[derive(Default)]
struct Computed {
    of_copies: Vec<Option<Tensor>>,
    of_tables: Vec<Option<RowsGradient>>,
    /// Whether it had examples of its own.
    has_examples: bool,
}

#[derive(Default)]
struct State {
    versions: Versions,
    /// The statistics as they were pulled; the changes that layers make are sent.
    statistics: Vec<Tensor>,
    /// Whether a warning has named the variables without gradients.
    warned: bool,
}

impl<M> KeptReplicas<M> {
    pub(super) fn new(
        worker: &WorkerContext,
        strategy: &Strategy,
        mut build: impl FnMut(VarBuilder<'static>) -> candle_core::Result<M>,
    ) -> Result<KeptReplicas<M>> {
        let count = strategy.num_local_replicas();
        if count != strategy.num_replicas_in_sync() {
            let problem = format!(
                "the replicas of a worker are those of a strategy of its own process, each on one device, and {} is \
                 not; use worker.mirrored",
                strategy.describe()
            );
            return Err(Error::Served { problem });
        }
        let (mut replicas, mut common, mut optimizer) = (Vec::with_capacity(count), Vec::new(), 0);
        let seed = backends::seed(worker);
        for local in 0..count {
            let device = candle_device(strategy, local)?;
            let (built, of_all) = statistics::building(|| backends::build_on_worker(worker, device, seed, &mut build));
            let (model, registry) = built?;
            common.extend(of_all);
            optimizer = registry.optimizer(worker)?;
            let copies = registry.copies.into_values().collect();
            let tables = registry.tables.into_values().collect();
            replicas.push(Replica { model, copies, tables, computed: Mutex::default() });
        }
        let statistics = Statistics::of(&statistics_of(&replicas), &common, count).map(Arc::new);
        if let Some(statistics) = &statistics {
            let statistics: Arc<dyn Recoverable> = statistics.clone();
            strategy.recover(Arc::downgrade(&statistics));
        }
        let (state, changes) = (Mutex::default(), Changes::default());
        Ok(KeptReplicas { replicas, optimizer, state, changes, _statistics: statistics })
    }

    /// Pulls variables that have changed, and copies all to every replica.
    pub(super) fn refresh(&self, worker: &WorkerContext) -> Result<()> {
        let (first, others) = self.of_first()?;
        let variables: Vec<ShardedVariable> = first.copies.iter().map(|copied| copied.variable.clone()).collect();
        let tensors: Vec<Tensor> = first.copies.iter().map(|copied| copied.copy.as_tensor().clone()).collect();
        let mut state = self.state.lock();
        // A function that failed may have left changes that were not sent.
        for (copied, pulled) in first.statistics().zip(&state.statistics) {
            overwrite::<Candle>(&[copied.copy.as_tensor().clone()], pulled)?;
        }
        worker.pull_into::<Candle, _>(&mut state.versions, &variables, &tensors)?;
        for (index, tensor) in tensors.iter().enumerate() {
            let copies: Vec<Tensor> = others.iter().map(|other| other.copies[index].copy.as_tensor().clone()).collect();
            overwrite::<Candle>(&copies, tensor)?;
        }
        state.statistics = first.statistics().map(|copied| copied.copy.as_tensor().copy()).collect::<Result<_, _>>()?;
        for replica in &self.replicas {
            replica.tables.iter().for_each(|table| table.begin_step());
            *replica.computed.lock() = Computed::default();
        }
        Ok(())
    }

    /// Returns the first replica, and the others.
    fn of_first(&self) -> Result<(&Replica<M>, &[Replica<M>])> {
        self.replicas.split_first().ok_or(distribute_optim::Error::NoGradient.into())
    }
}

impl<M> Replica<M> {
    fn statistics(&self) -> impl Iterator<Item = &Copied> {
        self.copies.iter().filter(|copied| copied.statistic)
    }
}

impl<'a, M> ReplicatedModel<'a, M> {
    pub(super) fn new(worker: &'a WorkerContext, kept: Arc<KeptReplicas<M>>) -> ReplicatedModel<'a, M> {
        ReplicatedModel { worker, kept }
    }

    /// Divides a batch by rows among the replicas. If it has fewer rows than there are replicas, those without any get
    /// its last row, and have no [examples](ReplicaContext::has_examples).
    ///
    /// # Errors
    /// [`Error::Input`] if the batch has no rows that can be taken apart.
    pub fn split<T: Element<L>, L>(&self, batch: &T) -> Result<PerReplica<T>> {
        let rows = batch.rows()?;
        let ranges: Vec<Range<usize>> = ranges(rows, self.kept.replicas.len()).collect();
        let examples: Vec<bool> = ranges.iter().map(|range| !range.is_empty()).collect();
        let part =
            |range: Range<usize>| batch.slice(if range.is_empty() { rows.saturating_sub(1)..rows } else { range });
        let parts: Vec<T> = ranges.into_iter().map(part).collect::<Result<_, _>>()?;
        Ok(PerReplica::new(parts).with_examples(&examples))
    }

    /// Sums the gradients of all replicas, in their order, and pushes one for each variable to the servers, which apply
    /// them. Returns whether they counted, like [`WorkerContext::push`]. The change of each running statistic is the
    /// mean over replicas with examples. Call it once per function, after `run`.
    ///
    /// # Errors
    /// [`Error::Optim`] if no replica has a gradient; [`Error::Candle`] if gradients cannot be summed;
    /// [`Error::ParameterServer`] if a server is lost, which the function must return.
    pub fn push_gradients(&self) -> Result<bool> {
        self.push(None)
    }

    /// Pushes gradients like [`push_gradients`](ReplicatedModel::push_gradients), and clips their sums, except those of
    /// tables.
    ///
    /// # Errors
    /// The errors of [`push_gradients`](ReplicatedModel::push_gradients), and [`Error::Optim`] if the limit is not
    /// above 0.
    pub fn push_clipped_gradients(&self, clip: Clip) -> Result<bool> {
        self.push(Some(clip))
    }

    /// Drops the lookups of tables so far, for which no gradient is computed.
    pub(super) fn drop_lookups(&self) {
        self.kept.replicas.iter().flat_map(|replica| &replica.tables).for_each(|table| table.begin_step());
    }

    /// Returns the number of the optimizer that updates the variables on the servers.
    pub(super) fn optimizer(&self) -> u32 {
        self.kept.optimizer
    }

    fn push(&self, clip: Option<Clip>) -> Result<bool> {
        let (first, _) = self.kept.of_first()?;
        let computed: Vec<Computed> =
            self.kept.replicas.iter().map(|replica| std::mem::take(&mut *replica.computed.lock())).collect();
        let (mut sums, mut without) = (Vec::with_capacity(first.copies.len()), Vec::new());
        for (index, copied) in first.copies.iter().enumerate().filter(|(_, copied)| !copied.statistic) {
            let of_replicas = computed.iter().filter_map(|computed| computed.of_copies.get(index)?.as_ref());
            match sum(of_replicas)? {
                Some(gradient) => sums.push(Reduced::<Candle> { index, gradient, rows: None }),
                None => without.push(copied.variable.name()),
            }
        }
        if let Some(clip) = clip {
            clip.check()?;
            clip.apply(&mut sums)?;
        }
        let mut gradients = Vec::with_capacity(sums.len() + first.tables.len());
        for Reduced { index, gradient, .. } in sums {
            gradients.push(Gradient::new::<Candle, _>(&first.copies[index].variable, &gradient)?);
        }
        for (index, table) in first.tables.iter().enumerate() {
            let of_replicas = computed.iter().filter_map(|computed| computed.of_tables.get(index)?.clone());
            let rows = of_replicas.map(Some).try_fold(None, add_rows)?;
            gradients.extend(rows.map(|rows| table.gradient_of(rows)).transpose()?);
        }
        if gradients.is_empty() {
            return Err(distribute_optim::Error::NoGradient.into());
        }
        if !without.is_empty() && !std::mem::replace(&mut self.kept.state.lock().warned, true) {
            warn_untrained::<Candle>(&without);
        }
        let counted = self.worker.push(self.kept.optimizer, &gradients)?;
        if counted {
            self.add_statistics(&computed)?;
        }
        Ok(counted)
    }

    /// Sends the mean over replicas of the changes that layers have made to their statistics, divided for contributions
    /// and many workers.
    fn add_statistics(&self, computed: &[Computed]) -> Result<()> {
        let with_examples: Vec<&Replica<M>> = self
            .kept
            .replicas
            .iter()
            .zip(computed)
            .filter(|(_, computed)| computed.has_examples)
            .map(|it| it.0)
            .collect();
        let before = self.kept.state.lock().statistics.clone();
        let (first, _) = self.kept.of_first()?;
        let divisor = running_statistics::divisor(self.worker, self.kept.optimizer);
        for (index, (copied, before)) in first.statistics().zip(before).enumerate() {
            let of_replicas: Vec<Tensor> = with_examples
                .iter()
                .filter_map(|replica| replica.statistics().nth(index))
                .map(|copied| copied.copy.as_tensor().to_device(before.device()))
                .collect::<Result<_, _>>()?;
            if let Some(sum) = sum(of_replicas.iter())? {
                let change = (((sum / of_replicas.len() as f64)? - before)? / divisor)?;
                let (change, _) = self.kept.changes.sent(copied.variable.name(), change)?;
                self.worker.assign_add::<Candle, _>(&copied.variable, &change)?;
            }
        }
        Ok(())
    }
}

impl<M> ModelReplica<'_, M> {
    /// Runs backward and keeps this replica's gradients for [`ReplicatedModel::push_gradients`]. Those of several calls
    /// in a function are summed. It does not communicate.
    ///
    /// The loss is this replica's share of that of the worker's batch, as
    /// [`average_loss`](crate::CandleContext::average_loss) computes it.
    ///
    /// # Errors
    /// [`Error::Candle`] if backward fails; [`Error::Strategy`] on a replica without examples whose loss was not
    /// multiplied by its weight.
    pub fn backward(&self, context: &ReplicaContext, loss: &Tensor) -> Result<()> {
        context.check_weighed()?;
        let found = loss.backward()?;
        let replica = self.replica;
        let mut computed = replica.computed.lock();
        computed.has_examples |= context.has_examples();
        computed.of_copies.resize(replica.copies.len(), None);
        computed.of_tables.resize(replica.tables.len(), None);
        let trained = replica.copies.iter().zip(&mut computed.of_copies).filter(|(copied, _)| !copied.statistic);
        for (copied, kept) in trained {
            let more = found.get(copied.copy.as_tensor()).map(Tensor::detach);
            *kept = sum(kept.iter().chain(&more))?;
        }
        for (table, kept) in replica.tables.iter().zip(&mut computed.of_tables) {
            let more = table.rows_gradient(&found)?.map(|(rows, gradient)| (rows, gradient.detach()));
            *kept = add_rows(kept.take(), more)?;
        }
        Ok(())
    }
}

impl<M> Deref for ModelReplica<'_, M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.replica.model
    }
}

impl<'m, M: Send + Sync> ReplicaArgs for &'m ReplicatedModel<'_, M> {
    type Local = ModelReplica<'m, M>;

    fn split(self, replicas: usize) -> distribute_strategy::Result<Vec<ModelReplica<'m, M>>> {
        counted(self.kept.replicas.iter().map(|replica| ModelReplica { replica }).collect(), replicas)
    }
}

/// Returns the statistics of all replicas.
fn statistics_of<M>(replicas: &[Replica<M>]) -> Vec<Variable> {
    let Some(first) = replicas.first() else { return Vec::new() };
    let mut variables: Vec<Variable> =
        first.statistics().map(|copied| Variable::new(copied.variable.name(), true)).collect();
    for replica in replicas {
        let components = replica.statistics().map(|copied| copied.copy.as_tensor().clone());
        variables.iter_mut().zip(components).for_each(|(variable, component)| variable.push(component));
    }
    variables
}

/// Sums tensors in their order, on the CPU; `None` of none.
fn sum<'t>(tensors: impl Iterator<Item = &'t Tensor>) -> Result<Option<Tensor>> {
    let mut sum: Option<Tensor> = None;
    for tensor in tensors {
        let tensor = tensor.to_device(&Device::Cpu)?;
        sum = Some(match sum {
            Some(sum) => (sum + tensor)?,
            None => tensor.contiguous()?,
        });
    }
    Ok(sum)
}

/// Divides rows into parts as equal as possible, the larger first.
fn ranges(rows: usize, parts: usize) -> impl Iterator<Item = Range<usize>> {
    let (each, more) = (rows / parts, rows % parts);
    (0..parts).map(move |part| part * each + part.min(more)..(part + 1) * each + (part + 1).min(more))
}
