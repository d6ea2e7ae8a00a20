//! Optimizers over all replicas of a model.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use candle_core::Tensor;
use distribute_collectives::{Compression, FusedAllReduce, FusionOptions, ReduceOp};
use distribute_device::{BufferMut, DType};
use distribute_strategy::ReplicaContext;
use distribute_values::{Aggregation, DistributedVariable, Synchronization, VariableOptions, with_storage};

use self::accumulated::Sum;
use self::loss_scale::Scaling;
use crate::model::Parts;
use crate::plan::Plan;
use crate::reducer::{Reduced, Reducer, Summed};
use crate::shards::{GradientShard, SlotShard, Update};
use crate::{Candle, Error, Model, Result};

mod accumulated;
mod adagrad;
mod adam;
mod clip;
mod lamb;
mod loss_scale;
mod replica;
mod rms_prop;
mod sgd;

pub use adagrad::Adagrad;
pub use adam::{Adam, AdamW};
pub use clip::Clip;
pub use lamb::Lamb;
pub use loss_scale::LossScale;
pub use replica::ReplicaOptimizer;
pub use rms_prop::RmsProp;
pub use sgd::Sgd;

/// The arithmetic of an optimizer: what one step does to one parameter.
pub(crate) trait Rule: Send + Sync {
    /// Names of the slots that it keeps for each parameter.
    fn slots(&self) -> &'static [&'static str];

    /// Whether an element's update depends on no other element of its variable.
    fn is_elementwise(&self) -> bool {
        true
    }

    /// What a slot's elements begin with.
    fn initial(&self, slot: &str) -> f64 {
        let _ = slot;
        0.0
    }

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
    clip: Option<Clip>,
    compression: Compression,
    /// Whether each replica keeps only its part of the slots.
    sharded: bool,
    plan: OnceLock<Arc<Plan>>,
    /// One per local replica.
    replicas: Vec<Mutex<ReplicaState>>,
}

#[derive(Debug, Default)]
struct ReplicaState {
    /// From the first step on.
    fused: Option<FusedAllReduce>,
    /// This replica's part of the slots, by bucket, where they are sharded.
    shards: Vec<SlotShard>,
    steps: u64,
    times: StepTimes,
    /// Gradients of this replica alone that wait for the next step, by variable.
    accumulated: Vec<Option<Tensor>>,
    gradient_norm: Option<f64>,
    scaling: Option<Scaling>,
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
                    let initial = rule.initial(slot);
                    let filled = |component: &Tensor| component.zeros_like()?.affine(0.0, initial)?.copy();
                    let name = format!("{}/{slot}", variable.name);
                    of_variable.push(if parts.shared {
                        let component = filled(&variable.components[0])?;
                        DistributedVariable::shared(&name, component, variable.components.len(), options)?
                    } else {
                        let components: candle_core::Result<_> = variable.components.iter().map(filled).collect();
                        DistributedVariable::new(&name, components?, options)?
                    });
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
            clip: None,
            compression: Compression::None,
            sharded: false,
            plan: OnceLock::new(),
            replicas,
        })
    }

    /// Limits the gradients, after they are summed over all replicas and before they are applied.
    ///
    /// # Errors
    /// [`Error::Setting`] for a limit that is not above 0.
    pub fn clip(self, clip: Clip) -> Result<Optimizer> {
        clip.check()?;
        Optimizer { clip: Some(clip), ..self }.combined()
    }

    /// Multiplies losses before backward, and divides gradients before they are clipped and applied.
    ///
    /// # Errors
    /// [`Error::Setting`] for a scale below 1.
    ///
    /// # Examples
    /// ```
    /// use candle_nn::linear;
    /// use distribute_candle::{Adam, CandleStrategy, Error, LossScale};
    /// use distribute_strategy::MirroredStrategy;
    ///
    /// let strategy = MirroredStrategy::builder().build()?;
    /// let model = strategy.scope(|vb| linear(3, 1, vb.pp("fc")))?;
    /// let optimizer = Adam::new(0.1).build(&model)?.scale_losses(LossScale::dynamic())?;
    /// assert_eq!(optimizer.loss_scale(), 32768.0);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn scale_losses(self, scale: LossScale) -> Result<Optimizer> {
        scale.check()?;
        for state in &self.replicas {
            lock(state).scaling = Some(Scaling::new(scale));
        }
        Ok(self)
    }

    /// By what the next loss is multiplied.
    pub fn loss_scale(&self) -> f64 {
        self.replicas.first().and_then(|state| lock(state).scaling).map_or(1.0, |scaling| scaling.scale)
    }

    /// ZeRO, stage 1: each replica keeps the slots of its part of every bucket only, reduces gradients to the parts that
    /// replicas own, updates its own, and gathers the others' parameters. The same bytes are moved, the state of an optimizer
    /// takes one n-th of the memory on each of n replicas, and parameters get the same values.
    ///
    /// Every variable that ever gets a gradient must get one in the first step, on some replica.
    ///
    /// # Errors
    /// [`Error::Combination`] with LAMB and [`Clip::Norm`], which look at whole variables, with compression, and where replicas
    /// share one copy of everything anyway.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use candle_nn::linear;
    /// use distribute_candle::{Adam, CandleContext, CandleStrategy, Error};
    /// use distribute_strategy::MirroredStrategy;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let model = strategy.scope(|vb| linear(3, 2, vb.pp("fc")))?;
    /// let optimizer = Adam::new(0.1).build(&model)?.zero1()?;
    /// strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
    ///     let loss = model.forward(&Tensor::ones((2, 3), DType::F32, &Device::Cpu)?)?.sqr()?.sum(1)?;
    ///     optimizer.minimize(context, &context.average_loss(&loss, 4)?)
    /// })?;
    /// assert_eq!(optimizer.state_bytes(), 2 * 8 * 4 / 2);      // two slots of eight parameters, on two replicas
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Source
    /// Rajbhandari and others, "ZeRO: memory optimizations toward training trillion parameter models", 2020, section 5.1.
    pub fn zero1(self) -> Result<Optimizer> {
        // Nobody needs whole slots any more.
        Optimizer { sharded: true, slots: self.slots.iter().map(|_| Vec::new()).collect(), ..self }.combined()
    }

    /// Bytes of optimizer state that the first replica of this process keeps; sharded state exists from the first step on.
    pub fn state_bytes(&self) -> usize {
        let bytes = |slot: &DistributedVariable<Tensor>| {
            slot.components().first().map_or(0, |tensor| tensor.elem_count() * tensor.dtype().size_in_bytes())
        };
        let whole: usize = self.slots.iter().flatten().map(bytes).sum();
        let shards = self.replicas.first().map_or(0, |state| lock(state).shards.iter().map(SlotShard::bytes).sum());
        whole + shards
    }

    /// The optimizer, if its settings go together.
    fn combined(self) -> Result<Optimizer> {
        let refuse = |other, why| Err(Error::Combination { what: "zero1", other, why });
        match self.clip {
            _ if !self.sharded => Ok(self),
            Some(Clip::Norm(_)) => refuse("Clip::Norm", "a replica sees parts of variables; use Clip::GlobalNorm"),
            _ if !self.rule.is_elementwise() => {
                refuse("this optimizer", "it looks at the norms of whole variables; use AdamW")
            }
            _ if !matches!(self.compression, Compression::None) => {
                refuse("compress", "compressed gradients come whole; leave one of them out")
            }
            _ if self.parts.shared => {
                refuse("a strategy whose replicas share variables", "there is one copy of the state already")
            }
            _ => Ok(self),
        }
    }

    /// Sends gradients in fewer bytes; what that leaves out of one step is added to the next one's.
    ///
    /// Replicas stay equal bit for bit, but no longer equal what they would be without. Gradients of `f64` are sent as they
    /// are.
    ///
    /// # Errors
    /// [`Error::Collective`] for settings that cannot be used.
    ///
    /// # Examples
    /// ```
    /// use candle_nn::linear;
    /// use distribute_candle::{CandleStrategy, Error, Sgd};
    /// use distribute_collectives::Compression;
    /// use distribute_strategy::MirroredStrategy;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let model = strategy.scope(|vb| linear(3, 1, vb.pp("fc")))?;
    /// let optimizer = Sgd::new(0.1).build(&model)?.compress(Compression::Bf16)?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Source
    /// The communication hooks of torch's `DistributedDataParallel`.
    pub fn compress(self, compression: Compression) -> Result<Optimizer> {
        let options = FusionOptions { compression, ..FusionOptions::default() };
        // Says now what is wrong with it, not in the first step.
        FusedAllReduce::new(&[], &options)?;
        Optimizer { compression: options.compression, ..self }.combined()
    }

    /// The norm of all gradients of the last step together, before they were limited; with [`Clip::GlobalNorm`] only.
    pub fn gradient_norm(&self) -> Option<f64> {
        self.replicas.first().and_then(|state| lock(state).gradient_norm)
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
        let (step, accumulated, scaling) = {
            let mut state = lock(&self.replicas[local]);
            state.steps += 1;
            (state.steps, std::mem::take(&mut state.accumulated), state.scaling)
        };
        let loss = &scaled(loss, scaling)?;
        let reducer = match self.plan.get() {
            Some(plan) => self.backward(context, local, plan, loss, accumulated)?,
            None => self.first_backward(context, local, loss, accumulated)?,
        };
        let (mut summed, communication) = reducer.finish()?;
        let finite = match scaling {
            Some(scaling) => unscale(context, &mut summed, scaling.scale)?,
            None => true,
        };
        let gradient_norm = match summed {
            _ if !finite => None,
            Summed::Whole(gradients) => self.apply_whole(context, local, step, gradients)?,
            Summed::Sharded(shards, flags) => self.apply_sharded(context, local, step, shards, flags)?,
        };
        let mut state = lock(&self.replicas[local]);
        if let Some(scaling) = &mut state.scaling {
            scaling.note(finite);
        }
        // A step that was left out does not count.
        state.steps -= u64::from(!finite);
        state.gradient_norm = gradient_norm;
        state.times.total += started.elapsed();
        state.times.communication += communication;
        Ok(())
    }

    fn apply_sharded(
        &self,
        context: &ReplicaContext,
        local: usize,
        step: u64,
        mut gradients: Vec<GradientShard>,
        flags: Vec<u32>,
    ) -> Result<Option<f64>> {
        let plan = self.plan.get().ok_or(Error::NoGradient)?;
        let learning_rate = self.learning_rate();
        let (group, parts, rule) = (context.group(), &*self.parts, &*self.rule);
        let update = Update { group, plan, parts, rule, local, step, learning_rate, flags };
        let norm = self.clip.map_or(Ok(None), |clip| update.clip(clip, &mut gradients))?;
        let mut slots = std::mem::take(&mut lock(&self.replicas[local]).shards);
        let outcome = update.apply(gradients, &mut slots);
        lock(&self.replicas[local]).shards = slots;
        outcome.map(|()| norm)
    }

    fn apply_whole(
        &self,
        context: &ReplicaContext,
        local: usize,
        step: u64,
        mut gradients: Vec<Reduced>,
    ) -> Result<Option<f64>> {
        let learning_rate = self.learning_rate();
        let gradient_norm = self.clip.map_or(Ok(None), |clip| clip.apply(&mut gradients))?;
        // All have brought their gradients, so nobody reads shared variables any more; one replica writes them.
        if !self.parts.shared || local == 0 {
            for reduced in gradients {
                self.apply(local, step, learning_rate, reduced)?;
            }
        }
        if self.parts.shared {
            context.barrier()?;
        }
        Ok(gradient_norm)
    }

    /// Reduces while backward runs.
    fn backward(
        &self,
        context: &ReplicaContext,
        local: usize,
        plan: &Arc<Plan>,
        loss: &Tensor,
        accumulated: Vec<Option<Tensor>>,
    ) -> Result<Reducer> {
        let reducer = self.reducer(context, local, plan)?;
        let state = Arc::new(Mutex::new(Some((reducer, Sum::from(accumulated)))));
        let sink = {
            let state = state.clone();
            Box::new(move |index, gradient| {
                if let Some((reducer, sum)) = &mut *lock(&state) {
                    match sum.take_with(index, gradient) {
                        Ok(gradient) => reducer.push(index, gradient),
                        Err(error) => reducer.fail(error.into()),
                    }
                }
            })
        };
        self.parts.backward(local, sink, loss)?;
        // Only this function takes it out.
        let (mut reducer, sum) = lock(&state).take().ok_or(Error::NoGradient)?;
        for (index, gradient) in sum.into_rest() {
            reducer.push(index, gradient);
        }
        Ok(reducer)
    }

    /// Learns which gradients come, and in which order, before anything is reduced.
    fn first_backward(
        &self,
        context: &ReplicaContext,
        local: usize,
        loss: &Tensor,
        accumulated: Vec<Option<Tensor>>,
    ) -> Result<Reducer> {
        let mut sum = Sum::from(accumulated);
        let mut fired = Vec::new();
        for (index, gradient) in self.record(local, loss)? {
            fired.push((index, sum.take_with(index, gradient)?));
        }
        fired.extend(sum.into_rest());
        let order: Vec<usize> = fired.iter().map(|(index, _)| *index).collect();
        let agreed = Plan::agree(context, &self.parts, &order)?;
        let plan = self.plan.get_or_init(|| agreed);
        let mut reducer = self.reducer(context, local, plan)?;
        for (index, gradient) in fired {
            reducer.push(index, gradient);
        }
        Ok(reducer)
    }

    fn reducer(&self, context: &ReplicaContext, local: usize, plan: &Arc<Plan>) -> Result<Reducer> {
        if self.sharded {
            return Ok(Reducer::new(context, &self.parts, plan, None));
        }
        let mut state = lock(&self.replicas[local]);
        let fused = match &mut state.fused {
            Some(fused) => fused,
            none => {
                let options = FusionOptions { compression: self.compression.clone(), ..FusionOptions::default() };
                none.insert(FusedAllReduce::with_plan(plan.buckets.clone(), &options)?)
            }
        };
        Ok(Reducer::new(context, &self.parts, plan, Some(fused)))
    }

    /// Adds the gradients of `loss` to those of this replica that wait for its next step.
    fn accumulate(&self, local: usize, loss: &Tensor) -> Result<()> {
        let scaling = lock(&self.replicas[local]).scaling;
        let fired = self.record(local, &scaled(loss, scaling)?)?;
        let mut sum = Sum::from(std::mem::take(&mut lock(&self.replicas[local]).accumulated));
        for (index, gradient) in fired {
            sum.add(index, gradient)?;
        }
        lock(&self.replicas[local]).accumulated = sum.0;
        Ok(())
    }

    /// Runs backward; the gradients in the order in which they came.
    fn record(&self, local: usize, loss: &Tensor) -> Result<Vec<(usize, Tensor)>> {
        let fired: Arc<Mutex<Vec<(usize, Tensor)>>> = Arc::default();
        let sink = {
            let fired = fired.clone();
            Box::new(move |index, gradient| lock(&fired).push((index, gradient)))
        };
        self.parts.backward(local, sink, loss)?;
        let fired = std::mem::take(&mut *lock(&fired));
        Ok(fired)
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

fn scaled(loss: &Tensor, scaling: Option<Scaling>) -> Result<Tensor> {
    Ok(scaling.map_or_else(|| Ok(loss.clone()), |scaling| loss * scaling.scale)?)
}

/// Divides gradients by what losses were multiplied by; whether they are finite, on all replicas alike.
fn unscale(context: &ReplicaContext, summed: &mut Summed, scale: f64) -> Result<bool> {
    match summed {
        Summed::Whole(gradients) => {
            for reduced in &*gradients {
                // Sums are the same on every replica.
                if !clip::is_finite(&reduced.gradient)? {
                    return Ok(false);
                }
                clip::change(&reduced.gradient, |x| x / scale)?;
            }
            Ok(true)
        }
        Summed::Sharded(shards, _) => {
            let mut finite = [u8::from(shards.iter().all(|shard| shard.square_sum().is_finite()))];
            context.group().all_reduce(&mut finite, ReduceOp::Min)?;
            shards.iter_mut().for_each(|shard| shard.change(|x| x / scale));
            Ok(finite[0] == 1)
        }
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

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn check(what: &'static str, given: f64, fits: bool, expected: &'static str) -> Result<()> {
    if fits && given.is_finite() { Ok(()) } else { Err(Error::Setting { what, given, expected }) }
}
