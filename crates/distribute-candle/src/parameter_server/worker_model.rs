//! A worker's model: copies of the variables, and gradients that are pushed to the servers.

use std::ops::Deref;
use std::sync::Arc;

use candle_core::{Tensor, Var};
use distribute_optim::backend::{Reduced, overwrite, warn_untrained};
use distribute_parameter_server::{Gradient, ShardedVariable, Versions, WorkerContext};
use parking_lot::Mutex;

use super::backends::{Copied, Registry};
use super::embedding::Table;
use super::running_statistics::{self, Changes};
use crate::{Candle, Clip, Result};

/// A model on a worker of a parameter-server cluster. It dereferences to the model itself.
pub struct WorkerModel<'a, M> {
    worker: &'a WorkerContext,
    kept: Arc<Kept<M>>,
}

/// The state that a worker keeps of a model between steps.
pub(super) struct Kept<M> {
    model: M,
    copies: Vec<Copied>,
    tables: Vec<Arc<Table>>,
    optimizer: u32,
    state: Mutex<State>,
    changes: Changes,
}

#[derive(Default)]
struct State {
    versions: Versions,
    /// The statistics as they were pulled, or sent since; the changes that layers make are sent.
    statistics: Vec<Tensor>,
    /// Whether a warning has named the variables without gradients.
    warned: bool,
}

impl<M> Kept<M> {
    pub(super) fn new(worker: &WorkerContext, model: M, registry: Registry) -> Result<Kept<M>> {
        let optimizer = registry.optimizer(worker)?;
        let copies: Vec<Copied> = registry.copies.into_values().collect();
        let tables: Vec<Arc<Table>> = registry.tables.into_values().collect();
        Ok(Kept { model, copies, tables, optimizer, state: Mutex::default(), changes: Changes::default() })
    }

    /// Pulls variables that have changed.
    pub(super) fn refresh(&self, worker: &WorkerContext) -> Result<()> {
        let variables: Vec<ShardedVariable> = self.copies.iter().map(|copied| copied.variable.clone()).collect();
        let tensors: Vec<Tensor> = self.copies.iter().map(|copied| copied.copy.as_tensor().clone()).collect();
        let mut state = self.state.lock();
        // A function that failed may have left changes that were not sent.
        for (copied, pulled) in self.statistics().zip(&state.statistics) {
            overwrite::<Candle>(&[copied.copy.as_tensor().clone()], pulled)?;
        }
        worker.pull_into::<Candle, _>(&mut state.versions, &variables, &tensors)?;
        state.statistics = self.copied_statistics()?;
        self.tables.iter().for_each(|table| table.begin_step());
        Ok(())
    }

    fn copied_statistics(&self) -> Result<Vec<Tensor>> {
        Ok(self.statistics().map(|copied| copied.copy.as_tensor().copy()).collect::<Result<_, _>>()?)
    }

    fn statistics(&self) -> impl Iterator<Item = &Copied> {
        self.copies.iter().filter(|copied| copied.statistic)
    }
}

impl<'a, M> WorkerModel<'a, M> {
    pub(super) fn new(worker: &'a WorkerContext, kept: Arc<Kept<M>>) -> WorkerModel<'a, M> {
        WorkerModel { worker, kept }
    }

    /// Runs backward and pushes the gradients to the servers, which apply them. Returns whether they counted, like
    /// [`WorkerContext::push`]. The loss is the mean over this worker's examples. Call it once per function.
    ///
    /// # Errors
    /// [`Error::Candle`](crate::Error::Candle) if backward fails, and
    /// [`Error::ParameterServer`](crate::Error::ParameterServer) if a server is lost, which the function must return.
    pub fn minimize(&self, loss: &Tensor) -> Result<bool> {
        self.step(loss, None)
    }

    /// Runs a step like [`minimize`](WorkerModel::minimize) and clips this worker's gradients, except those of tables.
    ///
    /// # Errors
    /// The errors of [`minimize`](WorkerModel::minimize), and [`Error::Optim`](crate::Error::Optim) if the limit is not
    /// above 0.
    pub fn minimize_clipped(&self, loss: &Tensor, clip: Clip) -> Result<bool> {
        self.step(loss, Some(clip))
    }

    /// Returns the copies of the variables, by name. Tables are not included.
    pub fn variables(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.kept.copies.iter().map(|copied| (copied.variable.name(), &copied.copy))
    }

    /// Drops the lookups of tables so far, for which no gradient is computed.
    pub(super) fn drop_lookups(&self) {
        self.kept.tables.iter().for_each(|table| table.begin_step());
    }

    /// Returns the number of the optimizer that updates the variables on the servers.
    pub(super) fn optimizer(&self) -> u32 {
        self.kept.optimizer
    }

    fn step(&self, loss: &Tensor, clip: Option<Clip>) -> Result<bool> {
        let kept = &self.kept;
        let found = loss.backward()?;
        let mut gradients = Vec::with_capacity(kept.copies.len());
        let mut without = Vec::new();
        for (index, copied) in kept.copies.iter().enumerate().filter(|(_, copied)| !copied.statistic) {
            match found.get(copied.copy.as_tensor()) {
                Some(gradient) => gradients.push(Reduced { index, gradient: gradient.contiguous()?, rows: None }),
                None => without.push(copied.variable.name()),
            }
        }
        if let Some(clip) = clip {
            clip.check()?;
            clip.apply(&mut gradients)?;
        }
        let push = |reduced: Reduced<Candle>| {
            Gradient::new::<Candle, _>(&kept.copies[reduced.index].variable, &reduced.gradient)
        };
        let mut gradients: Vec<Gradient> = gradients.into_iter().map(push).collect::<Result<_, _>>()?;
        for table in &kept.tables {
            gradients.extend(table.gradient(&found)?);
        }
        if gradients.is_empty() {
            return Err(distribute_optim::Error::NoGradient.into());
        }
        if !without.is_empty() && !std::mem::replace(&mut kept.state.lock().warned, true) {
            warn_untrained::<Candle>(&without);
        }
        let counted = self.worker.push(kept.optimizer, &gradients)?;
        if counted {
            self.add_statistics()?;
        }
        Ok(counted)
    }

    /// Sends the changes that layers have made to their statistics, divided for contributions and many workers. A
    /// statistic whose change is not finite gets its value before.
    fn add_statistics(&self) -> Result<()> {
        let mut statistics = self.kept.copied_statistics()?;
        let before = self.kept.state.lock().statistics.clone();
        let divisor = running_statistics::divisor(self.worker, self.kept.optimizer);
        let mut changes = Vec::with_capacity(statistics.len());
        for ((copied, now), before) in self.kept.statistics().zip(&mut statistics).zip(before) {
            let change = ((&*now - &before)? / divisor)?;
            let (change, is_whole) = self.kept.changes.sent(copied.variable.name(), change)?;
            if !is_whole {
                overwrite::<Candle>(&[copied.copy.as_tensor().clone()], &before)?;
                *now = before;
            }
            changes.push((&copied.variable, change));
        }
        self.kept.state.lock().statistics = statistics;
        for (variable, change) in changes {
            self.worker.assign_add::<Candle, _>(variable, &change)?;
        }
        Ok(())
    }
}

impl<M> Deref for WorkerModel<'_, M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.kept.model
    }
}
