//! Optimizers over all replicas of a model.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use candle_core::Tensor;
use distribute_device::{BufferMut, DType};
use distribute_strategy::{ReplicaArgs, ReplicaContext, counted};
use distribute_values::{Aggregation, DistributedVariable, Synchronization, VariableOptions, with_storage};

use crate::model::Parts;
use crate::plan::Plan;
use crate::reducer::{Reduced, Reducer};
use crate::{Candle, Error, Model, Result};

mod adam;
mod sgd;

pub use adam::{Adam, AdamW};
pub use sgd::Sgd;

/// The arithmetic of an optimizer: what one step does to one parameter.
pub(crate) trait Rule: Send + Sync {
    /// Names of the slots that it keeps for each parameter.
    fn slots(&self) -> &'static [&'static str];

    /// Updates a parameter and its slots in place. `step` counts from 1.
    fn update_f32(
        &self,
        step: u64,
        learning_rate: f64,
        parameter: &mut [f32],
        gradient: &[f32],
        slots: &mut [&mut [f32]],
    );

    /// As [`update_f32`](Rule::update_f32), in double precision.
    fn update_f64(
        &self,
        step: u64,
        learning_rate: f64,
        parameter: &mut [f64],
        gradient: &[f64],
        slots: &mut [&mut [f64]],
    );
}

/// An optimizer that was built for a model. Its slots are distributed variables with one component per replica.
///
/// Pass a reference to it to `run`: each replica then gets its [`ReplicaOptimizer`].
pub struct Optimizer {
    rule: Box<dyn Rule>,
    parts: Arc<Parts>,
    /// For each variable its slots; empty for those that are not trained.
    slots: Vec<Vec<DistributedVariable<Tensor>>>,
    learning_rate: AtomicU64,
    plan: OnceLock<Arc<Plan>>,
    /// One per local replica.
    replicas: Vec<Mutex<ReplicaState>>,
}

#[derive(Debug, Default)]
struct ReplicaState {
    steps: u64,
    times: StepTimes,
}

/// Where one replica's time went, summed over its steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// In `minimize` altogether.
    pub total: Duration,
    /// Of that, in collectives: starting them, working on them, waiting for other replicas.
    pub communication: Duration,
}

impl Optimizer {
    pub(crate) fn build<M>(rule: Box<dyn Rule>, learning_rate: f64, model: &Model<M>) -> Result<Optimizer> {
        let parts = model.parts.clone();
        let options = VariableOptions { synchronization: Synchronization::OnWrite, aggregation: Aggregation::Mean };
        let mut slots = Vec::with_capacity(parts.variables.len());
        for variable in &parts.variables {
            let mut of_variable = Vec::new();
            if variable.trainable {
                for slot in rule.slots() {
                    let zeros: candle_core::Result<Vec<Tensor>> =
                        variable.components.iter().map(|component| component.zeros_like()?.copy()).collect();
                    let name = format!("{}/{slot}", variable.name);
                    of_variable.push(DistributedVariable::new(&name, zeros?, options)?);
                }
            }
            slots.push(of_variable);
        }
        let replicas = parts.tapes.iter().map(|_| Mutex::default()).collect();
        Ok(Optimizer {
            rule,
            parts,
            slots,
            learning_rate: AtomicU64::new(learning_rate.to_bits()),
            plan: OnceLock::new(),
            replicas,
        })
    }

    /// The learning rate of the next step.
    pub fn learning_rate(&self) -> f64 {
        f64::from_bits(self.learning_rate.load(Ordering::Acquire))
    }

    /// Sets the learning rate; between steps, and alike on every worker.
    pub fn set_learning_rate(&self, learning_rate: f64) {
        self.learning_rate.store(learning_rate.to_bits(), Ordering::Release);
    }

    /// The optimizer's own variables: `fc1.weight/m` and so on.
    pub fn slots(&self) -> impl Iterator<Item = &DistributedVariable<Tensor>> {
        self.slots.iter().flatten()
    }

    /// Where the time of this process's first replica went.
    pub fn times(&self) -> StepTimes {
        self.replicas.first().map(|state| lock(state).times).unwrap_or_default()
    }

    fn step(&self, context: &ReplicaContext, local: usize, loss: &Tensor) -> Result<()> {
        let started = Instant::now();
        let reducer = match self.plan.get() {
            Some(plan) => self.backward(context, local, plan, loss)?,
            None => self.first_backward(context, local, loss)?,
        };
        let step = {
            let mut state = lock(&self.replicas[local]);
            state.steps += 1;
            state.steps
        };
        let learning_rate = self.learning_rate();
        let communication = reducer.finish(|reduced| self.apply(local, step, learning_rate, reduced))?;
        let times = &mut lock(&self.replicas[local]).times;
        times.total += started.elapsed();
        times.communication += communication;
        Ok(())
    }

    /// Reduces while backward runs.
    fn backward(&self, context: &ReplicaContext, local: usize, plan: &Arc<Plan>, loss: &Tensor) -> Result<Reducer> {
        let reducer = Arc::new(Mutex::new(Some(Reducer::new(context, &self.parts, plan))));
        let sink = {
            let reducer = reducer.clone();
            Box::new(move |index, gradient| {
                if let Some(reducer) = &mut *lock(&reducer) {
                    reducer.push(index, gradient);
                }
            })
        };
        self.parts.tapes[local].record(sink, || loss.backward())?;
        let reducer = lock(&reducer).take();
        // Only this function takes it out.
        reducer.ok_or(Error::NoGradient)
    }

    /// Learns which gradients come, and in which order, before anything is reduced.
    fn first_backward(&self, context: &ReplicaContext, local: usize, loss: &Tensor) -> Result<Reducer> {
        let fired: Arc<Mutex<Vec<(usize, Tensor)>>> = Arc::default();
        let sink = {
            let fired = fired.clone();
            Box::new(move |index, gradient| lock(&fired).push((index, gradient)))
        };
        self.parts.tapes[local].record(sink, || loss.backward())?;
        let fired = std::mem::take(&mut *lock(&fired));
        let order: Vec<usize> = fired.iter().map(|(index, _)| *index).collect();
        let agreed = Plan::agree(context, &self.parts, &order)?;
        let plan = self.plan.get_or_init(|| agreed);
        let mut reducer = Reducer::new(context, &self.parts, plan);
        for (index, gradient) in fired {
            reducer.push(index, gradient);
        }
        Ok(reducer)
    }

    fn apply(&self, local: usize, step: u64, learning_rate: f64, reduced: Reduced) -> Result<()> {
        let variable = &self.parts.variables[reduced.index];
        let mut tensors = vec![variable.components[local].clone(), reduced.gradient];
        tensors.extend(self.slots[reduced.index].iter().map(|slot| slot.components()[local].clone()));
        let mut outcome = Ok(());
        with_storage::<Candle, Tensor>(&tensors, &mut |buffers| {
            outcome = match buffers.first().map(|buffer| buffer.dtype()) {
                Some(DType::F64) => update(buffers, |p, g, s| self.rule.update_f64(step, learning_rate, p, g, s)),
                _ => update(buffers, |p, g, s| self.rule.update_f32(step, learning_rate, p, g, s)),
            };
        })?;
        outcome
    }
}

/// Sorts the storage of parameter, gradient and slots into what a rule takes.
fn update<T: distribute_device::Element>(
    buffers: &mut [BufferMut<'_>],
    rule: impl FnOnce(&mut [T], &[T], &mut [&mut [T]]),
) -> Result<()> {
    if let [parameter, gradient, slots @ ..] = buffers {
        let mut slots = slots
            .iter_mut()
            .map(|slot| slot.as_mut_slice::<T>())
            .collect::<Result<Vec<_>, _>>()
            .map_err(distribute_values::Error::from)?;
        let parameter = parameter.as_mut_slice::<T>().map_err(distribute_values::Error::from)?;
        rule(parameter, gradient.as_slice::<T>().map_err(distribute_values::Error::from)?, &mut slots);
    }
    Ok(())
}

/// One replica's view of an [`Optimizer`].
#[derive(Clone, Copy)]
pub struct ReplicaOptimizer<'a> {
    optimizer: &'a Optimizer,
    local: usize,
}

impl ReplicaOptimizer<'_> {
    /// One step: backward from `loss`, gradients summed over all replicas, and every replica's copy updated in place.
    ///
    /// Every replica must call this. The loss is this replica's share of the global loss, as
    /// [`average_loss`](crate::CandleContext::average_loss) computes it.
    ///
    /// # Errors
    /// candle's, the collectives', [`Error::NoGradient`], [`Error::UntrainableType`].
    pub fn minimize(&self, context: &ReplicaContext, loss: &Tensor) -> Result<()> {
        let (built, given) = (self.optimizer.replicas.len(), context.strategy().num_local_replicas());
        if built != given {
            return Err(Error::OtherStrategy { built, given });
        }
        self.optimizer.step(context, self.local, loss)
    }

    /// The learning rate of the next step.
    pub fn learning_rate(&self) -> f64 {
        self.optimizer.learning_rate()
    }
}

impl<'a> ReplicaArgs for &'a Optimizer {
    type Local = ReplicaOptimizer<'a>;

    fn split(self, replicas: usize) -> distribute_strategy::Result<Vec<ReplicaOptimizer<'a>>> {
        let views = (0..self.replicas.len()).map(|local| ReplicaOptimizer { optimizer: self, local }).collect();
        counted(views, replicas)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn check(what: &'static str, given: f64, fits: bool, expected: &'static str) -> Result<()> {
    if fits && given.is_finite() { Ok(()) } else { Err(Error::Setting { what, given, expected }) }
}
