//! A model on a worker: copies of its variables, and its gradients' way to the servers.

use std::ops::Deref;
use std::sync::Arc;

use candle_core::{Tensor, Var};
use distribute_optim::{Reduced, warn_untrained};
use distribute_parameter_server::{Gradient, ShardedVariable, Versions, WorkerContext};
use parking_lot::Mutex;

use super::backends::{Copied, Registry};
use super::embedding::Table;
use crate::{Candle, Clip, Error, Result};

/// A model on a worker of a cluster with parameter servers; it can be used as the model itself.
pub struct WorkerModel<'a, M> {
    worker: &'a WorkerContext,
    kept: Arc<Kept<M>>,
}

/// What a worker keeps of a model from one step to the next.
pub(super) struct Kept<M> {
    model: M,
    copies: Vec<Copied>,
    tables: Vec<Arc<Table>>,
    optimizer: u32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    versions: Versions,
    /// Statistics as they were pulled: what the layers add to them is sent.
    statistics: Vec<Tensor>,
    /// Whether variables without gradients were named.
    warned: bool,
}

impl<M> Kept<M> {
    pub(super) fn new(worker: &WorkerContext, model: M, registry: Registry) -> Result<Kept<M>> {
        let copies: Vec<Copied> = registry.copies.into_values().collect();
        let tables: Vec<Arc<Table>> = registry.tables.into_values().collect();
        let trained = copies.iter().filter(|copied| !copied.statistic).map(|copied| &copied.variable);
        let mut variables = trained.chain(tables.iter().map(|table| &table.variable));
        let first = variables.next().ok_or(distribute_optim::Error::NoGradient)?;
        let optimizer =
            worker.optimizer_of(first)?.ok_or_else(|| Error::UnknownVariable { name: first.name().to_owned() })?;
        Ok(Kept { model, copies, tables, optimizer, state: Mutex::default() })
    }

    /// Pulls what has changed.
    pub(super) fn refresh(&self, worker: &WorkerContext) -> Result<()> {
        let variables: Vec<ShardedVariable> = self.copies.iter().map(|copied| copied.variable.clone()).collect();
        let tensors: Vec<Tensor> = self.copies.iter().map(|copied| copied.copy.as_tensor().clone()).collect();
        let mut state = self.state.lock();
        worker.pull_into::<Candle, _>(&mut state.versions, &variables, &tensors)?;
        state.statistics = self.statistics().map(|copied| copied.copy.as_tensor().copy()).collect::<Result<_, _>>()?;
        self.tables.iter().for_each(|table| table.begin_step());
        Ok(())
    }

    fn statistics(&self) -> impl Iterator<Item = &Copied> {
        self.copies.iter().filter(|copied| copied.statistic)
    }
}

impl<'a, M> WorkerModel<'a, M> {
    pub(super) fn new(worker: &'a WorkerContext, kept: Arc<Kept<M>>) -> WorkerModel<'a, M> {
        WorkerModel { worker, kept }
    }

    /// Runs backward and sends the gradients to the servers, which apply them; whether they counted, as
    /// [`WorkerContext::push`] says it. The loss is a mean over this worker's examples; once in a function.
    ///
    /// # Errors
    /// candle's; [`Error::ParameterServer`], which functions pass on.
    pub fn minimize(&self, loss: &Tensor) -> Result<bool> {
        self.step(loss, None)
    }

    /// As [`minimize`](WorkerModel::minimize), with a limit on this worker's gradients; those of tables are not limited.
    ///
    /// # Errors
    /// As [`minimize`](WorkerModel::minimize).
    pub fn minimize_clipped(&self, loss: &Tensor, clip: Clip) -> Result<bool> {
        self.step(loss, Some(clip))
    }

    /// Copies of the variables, by name; tables are not among them.
    pub fn variables(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.kept.copies.iter().map(|copied| (copied.variable.name(), &copied.copy))
    }

    fn step(&self, loss: &Tensor, clip: Option<Clip>) -> Result<bool> {
        let kept = &self.kept;
        let found = loss.backward()?;
        let mut gradients = Vec::with_capacity(kept.copies.len());
        let mut without = Vec::new();
        for (index, copied) in kept.copies.iter().enumerate().filter(|(_, copied)| !copied.statistic) {
            match found.get(copied.copy.as_tensor()) {
                Some(gradient) => gradients.push(Reduced { index, gradient: gradient.contiguous()? }),
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
        self.add_statistics()?;
        Ok(counted)
    }

    /// Sends what the layers have added to their statistics.
    fn add_statistics(&self) -> Result<()> {
        let before = std::mem::take(&mut self.kept.state.lock().statistics);
        for (copied, before) in self.kept.statistics().zip(before) {
            let change = (copied.copy.as_tensor() - before)?;
            self.worker.assign_add::<Candle, _>(&copied.variable, &change)?;
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
