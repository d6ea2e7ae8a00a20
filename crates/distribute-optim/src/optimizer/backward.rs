//! The backward of a step, and the exchange of gradients that it starts.

use std::sync::Arc;

use distribute_collectives::{Compression, FusedAllReduce, FusionOptions};
use distribute_strategy::ReplicaContext;
use distribute_values::DistributedVariable;
use parking_lot::Mutex;

use super::Optimizer;
use crate::exchange::{
    Exchange, InProgress, OnDevice, PartsStep, Reducer, ShardedStep, StepGradients, SummedStep, WholeStep,
    is_exchanged, rows_to_exchange,
};
use crate::gradient::{Accumulated, Scaling, as_counted, whole};
use crate::plan::Plan;
use crate::tape::{Gradient, Sink};
use crate::{DeviceExchange, Error, Parameters, SparseGradients, TensorLibrary, Variable};

/// The index of a variable, and its gradient.
type Fired<L> = (usize, Gradient<<L as TensorLibrary>::Tensor>);

impl<L: TensorLibrary> Optimizer<L> {
    /// Runs backward and reduces gradients meanwhile.
    pub(super) fn backward(
        &self,
        context: &ReplicaContext,
        local: usize,
        plan: &Arc<Plan>,
        gradients: StepGradients,
        backward: impl FnOnce(Sink<L::Tensor>) -> Result<(), L::Error>,
        accumulated: Accumulated<L>,
    ) -> Result<Reducer<L>, L::Error> {
        let reducer = self.reducer(context, local, plan, gradients, self.parts_step(context, local)?)?;
        let state = Arc::new(Mutex::new(Some((reducer, accumulated))));
        let counts = context.has_examples() || matches!(gradients, StepGradients::Summed { .. });
        let sink: Sink<L::Tensor> = {
            let (state, parameters) = (state.clone(), self.parameters.clone());
            Box::new(move |index, gradient| {
                if let Some((reducer, accumulated)) = &mut *state.lock() {
                    let variable = &parameters.variables()[index].components()[local];
                    let gradient = as_counted::<L>(gradient, counts);
                    match gradient.and_then(|gradient| accumulated.take_with_reported(index, gradient, variable)) {
                        Ok(gradient) => reducer.push(index, gradient),
                        Err(error) => reducer.fail(error),
                    }
                }
            })
        };
        backward(sink)?;
        // No other function takes the reducer.
        let (mut reducer, accumulated) = state.lock().take().ok_or(Error::NoGradient)?;
        check_cut(context, &self.parameters, reducer.has_any())?;
        for (index, gradient) in accumulated.into_rest()? {
            reducer.push(index, Gradient::Whole(gradient));
        }
        Ok(reducer)
    }

    /// Runs the first backward, which shows which gradients there are and in which order, before anything is reduced
    /// but sharded variables' gradients, which a replica may not have the memory to keep.
    pub(super) fn first_backward(
        &self,
        context: &ReplicaContext,
        local: usize,
        gradients: StepGradients,
        backward: impl FnOnce(Sink<L::Tensor>) -> Result<(), L::Error>,
        accumulated: Accumulated<L>,
    ) -> Result<Reducer<L>, L::Error> {
        // Settings are compared first, because the operations themselves differ if, for example, one worker compresses.
        let scaling = self.states.each[local].lock().standing.scaling;
        context.compare_settings(self.settings(scaling).lines())?;
        let parts = self.parts_step(context, local)?;
        let counts = context.has_examples() || matches!(gradients, StepGradients::Summed { .. });
        let first = First { local, counts, parts, accumulated, fired: Vec::new(), order: Vec::new(), failure: None };
        let state = Arc::new(Mutex::new(Some(first)));
        let sink: Sink<L::Tensor> = {
            let (state, parameters) = (state.clone(), self.parameters.clone());
            Box::new(move |index, gradient| {
                if let Some(first) = &mut *state.lock() {
                    first.push(&parameters, index, gradient);
                }
            })
        };
        backward(sink)?;
        // No other function takes it.
        let mut first = state.lock().take().ok_or(Error::NoGradient)?;
        check_cut(context, &self.parameters, !first.order.is_empty())?;
        for (index, gradient) in std::mem::take(&mut first.accumulated).into_rest()? {
            first.push(&self.parameters, index, Gradient::Whole(gradient));
        }
        let First { parts, fired, order, failure, .. } = first;
        if let Some(failure) = failure {
            return Err(failure);
        }
        // Sharded state and compressed gradients are those of whole buckets.
        let are_whole = self.sparse_gradients == SparseGradients::Whole;
        let by_rows = !are_whole && !self.sharded && matches!(self.compression, Compression::None);
        let if_whole = self.sparse_gradients == SparseGradients::Rows || context.strategy().topology().workers() > 1;
        let rows = |(index, gradient): &Fired<L>| {
            let variable = &self.parameters.variables()[*index].components()[local];
            let rows = if by_rows { rows_to_exchange::<L>(gradient, variable, if_whole)? } else { None };
            Ok((*index, rows))
        };
        let rows = fired.iter().map(rows).collect::<Result<Vec<_>, L::Error>>()?;
        let agreed = Plan::agree(context, &self.parameters, &order, &rows)?;
        let plan = self.states.set_plan(context.strategy().changes(), agreed);
        let mut reducer = self.reducer(context, local, &plan, gradients, parts)?;
        for (index, gradient) in fired {
            reducer.push(index, gradient);
        }
        Ok(reducer)
    }

    /// Begins the exchange of sharded variables' gradients.
    fn parts_step(&self, context: &ReplicaContext, local: usize) -> Result<InProgress<PartsStep<L>>, L::Error> {
        // The update is computed where the state is.
        let target = |(variable, slots): (&Variable<L>, &Vec<DistributedVariable<L::Tensor>>)| {
            let components = slots.first().map_or(variable.components(), DistributedVariable::components);
            components[local].clone()
        };
        let targets = || self.parameters.variables().iter().zip(&*self.slots).map(target).collect();
        let step = PartsStep::begin(context, &self.parameters, self.states.parts_order(), targets)?;
        Ok(InProgress::new(context, step))
    }

    fn reducer(
        &self,
        context: &ReplicaContext,
        local: usize,
        plan: &Arc<Plan>,
        gradients: StepGradients,
        parts: InProgress<PartsStep<L>>,
    ) -> Result<Reducer<L>, L::Error> {
        let scaling = self.states.each[local].lock().standing.scaling;
        let exchange: Box<dyn Exchange<L>> = match gradients {
            StepGradients::Own => self.exchange(context, local, plan)?,
            StepGradients::Summed { digest } => Box::new(SummedStep::new(self.parameters.variables().len(), digest)),
        };
        Ok(Reducer::new(context, &self.parameters, plan, self.settings(scaling), exchange, parts, gradients))
    }

    /// Starts the exchange of one step's gradients.
    fn exchange(
        &self,
        context: &ReplicaContext,
        local: usize,
        plan: &Arc<Plan>,
    ) -> Result<Box<dyn Exchange<L>>, L::Error> {
        if self.sharded {
            return Ok(Box::new(ShardedStep::new(plan)));
        }
        let mut state = self.states.each[local].lock();
        state.follow(context.strategy().changes());
        if state.on_device.is_none() && !self.parameters.shared {
            state.on_device = Some(L::Devices::new(context, &self.parameters, plan, &self.compression)?);
        }
        if let Some(Some(devices)) = &state.on_device {
            return Ok(Box::new(OnDevice::<L>(devices.begin(context)?)));
        }
        let fused = match &mut state.fused {
            Some(fused) => fused,
            none => {
                let options = FusionOptions::default().compression(self.compression.clone());
                none.insert(FusedAllReduce::with_plan(plan.buckets.clone(), &options)?)
            }
        };
        Ok(Box::new(WholeStep::new(plan, fused)))
    }

    /// Adds the gradients that `backward` passes to a sink to those that this replica accumulates for its next step.
    pub(super) fn accumulate(
        &self,
        context: &ReplicaContext,
        local: usize,
        backward: impl FnOnce(Option<Scaling>, Sink<L::Tensor>) -> Result<(), L::Error>,
    ) -> Result<(), L::Error> {
        self.watch(context)?;
        let scaling = {
            let mut state = self.states.each[local].lock();
            state.follow(context.strategy().changes());
            state.standing.scaling
        };
        let fired = self.record(context, local, |sink| backward(scaling, sink))?;
        let mut accumulated = self.states.each[local].lock().standing.accumulated.clone();
        for (index, gradient) in fired {
            accumulated.add(index, gradient)?;
        }
        self.states.each[local].lock().standing.accumulated = accumulated;
        Ok(())
    }

    /// Runs backward and returns the whole gradients in the order in which they were reported.
    pub(super) fn record(
        &self,
        context: &ReplicaContext,
        local: usize,
        backward: impl FnOnce(Sink<L::Tensor>) -> Result<(), L::Error>,
    ) -> Result<Vec<(usize, L::Tensor)>, L::Error> {
        let fired: Arc<Mutex<Vec<Fired<L>>>> = Arc::default();
        let sink: Sink<L::Tensor> = {
            let fired = fired.clone();
            Box::new(move |index, gradient| fired.lock().push((index, gradient)))
        };
        backward(sink)?;
        let fired = std::mem::take(&mut *fired.lock());
        check_cut(context, &self.parameters, !fired.is_empty())?;
        let variables = self.parameters.variables();
        let counts = context.has_examples();
        let whole = |(index, gradient): Fired<L>| {
            let gradient = as_counted::<L>(gradient, counts)?;
            Ok((index, whole::<L>(gradient, &variables[index].components()[local])?))
        };
        fired.into_iter().map(whole).collect()
    }
}

/// Refuses the loss of a replica without examples if it was disconnected from the model: other replicas wait during
/// backward for collectives that this replica would skip.
fn check_cut<L: TensorLibrary>(
    context: &ReplicaContext,
    parameters: &Parameters<L>,
    has_gradients: bool,
) -> Result<(), Error> {
    let waits = || context.has_graph_group() || parameters.variables().iter().any(|v| v.layout().is_some());
    let is_cut = !has_gradients && !context.has_examples() && waits();
    if is_cut { Err(Error::CutLoss) } else { Ok(()) }
}

/// The gradients of the first backward.
struct First<L: TensorLibrary> {
    /// The replica's index in this process.
    local: usize,
    /// Whether the replica has examples, or the gradients are sums already.
    counts: bool,
    parts: InProgress<PartsStep<L>>,
    accumulated: Accumulated<L>,
    /// The gradients of variables that are not sharded.
    fired: Vec<Fired<L>>,
    /// The order in which all gradients became complete.
    order: Vec<usize>,
    failure: Option<L::Error>,
}

impl<L: TensorLibrary> First<L> {
    fn push(&mut self, parameters: &Parameters<L>, index: usize, gradient: Gradient<L::Tensor>) {
        if self.failure.is_none()
            && let Err(error) = self.try_push(parameters, index, gradient)
        {
            self.failure = Some(error);
        }
    }

    fn try_push(
        &mut self,
        parameters: &Parameters<L>,
        index: usize,
        gradient: Gradient<L::Tensor>,
    ) -> Result<(), L::Error> {
        let variable = &parameters.variables()[index];
        let component = &variable.components()[self.local];
        let gradient = as_counted::<L>(gradient, self.counts)?;
        let gradient = self.accumulated.take_with_reported(index, gradient, component)?;
        self.order.push(index);
        match is_exchanged(variable) {
            true => self.parts.push(index, whole::<L>(gradient, component)?)?,
            false => self.fired.push((index, gradient)),
        }
        Ok(())
    }
}
