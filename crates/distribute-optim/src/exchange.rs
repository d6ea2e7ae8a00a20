//! The exchange of one replica's gradients: into buckets, reduced over the replicas, and out again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use distribute_collectives::ProcessGroup;
use distribute_strategy::ReplicaContext;

use crate::gradient::{Reduced, whole};
use crate::plan::Plan;
use crate::settings::Settings;
use crate::tape::Gradient;
use crate::{DeviceExchange, Error, Parameters, TensorLibrary};

mod device;
mod flags;
mod parts;
mod payload;
mod rows;
mod sharded;
mod summed;
mod whole;

pub(crate) use device::{OnDevice, SumOnDevice};
pub(crate) use flags::StepFlags;
pub(crate) use parts::{PartsOrder, PartsStep, is_exchanged};
pub(crate) use payload::Payload;
pub(crate) use rows::rows_to_exchange;
pub(crate) use sharded::{GradientShard, ShardedStep, SlotShard, Update, complete};
pub(crate) use summed::SummedStep;
pub(crate) use whole::WholeStep;

/// Which gradients a step is made with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StepGradients {
    /// Each replica's own, which are summed.
    Own,
    /// Sums over all replicas, with their digest.
    Summed {
        /// The digest of all names and elements.
        digest: u64,
    },
}

/// The way in which one step's gradients are summed over all replicas, bucket by bucket while backward runs.
pub(crate) trait Exchange<L: TensorLibrary>: Send {
    /// Returns whether a variable's gradient was pushed.
    fn has(&self, index: usize) -> bool;

    /// Adds a gradient. Starts to reduce its bucket when the bucket is complete, and the buckets that waited for it.
    fn push(&mut self, group: &ProcessGroup, index: usize, gradient: L::Tensor) -> Result<(), L::Error>;

    /// Sums `flags` over all replicas and waits for all buckets. Every gradient must have been pushed. Returns both
    /// sums.
    fn finish(self: Box<Self>, group: &ProcessGroup, flags: StepFlags) -> Result<(Summed<L>, StepFlags), L::Error>;
}

/// The summed gradients of a step.
pub(crate) enum Summed<L: TensorLibrary> {
    /// The variables' gradients, in the same order on every replica.
    Whole(Vec<Reduced<L>>),
    /// This replica's parts of all buckets, and for each variable the number of replicas on which it got a gradient.
    Sharded(Vec<GradientShard>, StepFlags),
    /// The variables' gradients in an accelerator's memory.
    OnDevice(SumOnDevice<L>),
}

impl<L: TensorLibrary> Summed<L> {
    /// Returns the indices, below `count`, of the variables that got a gradient on some replica.
    pub(crate) fn variables(&self, count: usize) -> Vec<usize> {
        match self {
            Summed::Whole(gradients) => gradients.iter().map(|reduced| reduced.index).collect(),
            Summed::Sharded(_, flags) => (0..count).filter(|index| flags.came(*index)).collect(),
            Summed::OnDevice(sum) => L::Devices::variables(sum),
        }
    }
}

impl<L: TensorLibrary> InProgress<PartsStep<L>> {
    /// Adds the whole gradient of a sharded variable.
    pub(crate) fn push(&mut self, index: usize, gradient: L::Tensor) -> Result<(), L::Error> {
        self.part.as_mut().map_or(Ok(()), |parts| parts.push(index, gradient))
    }
}

/// A part of a step whose operations are in progress. If it is not taken, because the step fails, it is dropped after
/// the replica's run has ended: dropping operations waits for them, and peers must learn of the failure first.
pub(crate) struct InProgress<T: Send + 'static> {
    context: ReplicaContext,
    part: Option<T>,
}

impl<T: Send + 'static> InProgress<T> {
    pub(crate) fn new(context: &ReplicaContext, part: Option<T>) -> InProgress<T> {
        InProgress { context: context.clone(), part }
    }
}

impl<T: Send + 'static> Drop for InProgress<T> {
    fn drop(&mut self) {
        if let Some(part) = self.part.take() {
            self.context.drop_after_run(part);
        }
    }
}

/// The summed gradients of a step, by how they are exchanged.
pub(crate) struct Sums<L: TensorLibrary> {
    pub(crate) summed: Summed<L>,
    /// This replica's parts of the gradients of sharded variables.
    pub(crate) parts: Vec<Reduced<L>>,
    /// The order in which these were reduced; `None` without sharded variables.
    pub(crate) order: Option<PartsOrder>,
}

impl<L: TensorLibrary> Sums<L> {
    /// Returns the indices, below `count`, of the variables that got a gradient on some replica.
    pub(crate) fn variables(&self, count: usize) -> Vec<usize> {
        let sharded = self.parts.iter().map(|reduced| reduced.index);
        let mut all: Vec<usize> = self.summed.variables(count).into_iter().chain(sharded).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// The gradients of one replica in one step.
pub(crate) struct Reducer<L: TensorLibrary> {
    settings: Settings,
    context: ReplicaContext,
    parameters: Arc<Parameters<L>>,
    plan: Arc<Plan>,
    exchange: InProgress<Box<dyn Exchange<L>>>,
    /// The exchange of sharded variables' gradients, if there are any.
    parts: InProgress<PartsStep<L>>,
    /// Whether the gradients are sums over all replicas already.
    is_summed: bool,
    /// Gradients of variables that are not in the plan.
    unplanned: Vec<Option<Gradient<L::Tensor>>>,
    failure: Option<L::Error>,
    /// Communication time that was not overlapped with computation.
    communication: Duration,
}

impl<L: TensorLibrary> Reducer<L> {
    pub(crate) fn new(
        context: &ReplicaContext,
        parameters: &Arc<Parameters<L>>,
        plan: &Arc<Plan>,
        settings: Settings,
        exchange: Box<dyn Exchange<L>>,
        parts: InProgress<PartsStep<L>>,
        gradients: StepGradients,
    ) -> Reducer<L> {
        Reducer {
            settings,
            context: context.clone(),
            parameters: parameters.clone(),
            plan: plan.clone(),
            exchange: InProgress::new(context, Some(exchange)),
            parts,
            is_summed: matches!(gradients, StepGradients::Summed { .. }),
            unplanned: vec![None; parameters.variables().len()],
            failure: None,
            communication: Duration::ZERO,
        }
    }

    /// Adds a gradient. Starts to reduce its bucket when the bucket is complete, and the buckets that waited for it.
    pub(crate) fn push(&mut self, index: usize, gradient: Gradient<L::Tensor>) {
        let variable = &self.parameters.variables()[index];
        let is_sharded = variable.layout().is_some();
        if !variable.is_trainable() {
            // Frozen.
        } else if self.has(index) {
            self.fail(Error::SecondGradient { name: variable.name().to_owned() }.into());
        } else if !is_sharded && !self.is_summed && !self.plan.buckets.contains(index) {
            self.unplanned[index] = Some(gradient);
        } else if self.failure.is_none() {
            let component = &variable.components()[self.context.local_replica_id()];
            let pushed = whole::<L>(gradient, component).and_then(|gradient| match is_sharded {
                true => self.parts.push(index, gradient),
                false => self.launch(index, gradient),
            });
            self.failure = pushed.err();
        }
    }

    /// Records a failure, which [`finish`](Reducer::finish) returns.
    pub(crate) fn fail(&mut self, error: L::Error) {
        self.failure.get_or_insert(error);
    }

    /// Pushes zeros for missing gradients and waits for all buckets. Returns the summed gradients and the time spent in
    /// collectives.
    pub(crate) fn finish(mut self) -> Result<(Sums<L>, Duration), L::Error> {
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        let variables = self.parameters.variables().len();
        let came = |index: usize| self.has(index);
        let came: Vec<bool> = (0..variables).map(came).collect();
        for (index, came) in came.iter().enumerate() {
            if !came && !self.is_summed && self.plan.buckets.contains(index) {
                self.launch(index, self.zeros(index)?)?;
            }
        }
        let flags = StepFlags::new(came.into_iter(), self.context.step_header(self.settings.digest()));
        let Reducer { context, parameters, plan, settings, is_summed, mut unplanned, mut communication, .. } = self;
        let (mut exchange, mut parts) = (self.exchange, self.parts);
        let group = context.group();
        let started = Instant::now();
        if let Some(parts) = &mut parts.part {
            parts.drain()?;
        }
        // An operation of its group that fails fails all of them, so nothing in it waits when it is dropped.
        let exchange = exchange.part.take().ok_or(Error::NoGradient)?;
        let (mut summed, flags) = exchange.finish(group, flags)?;
        let (sharded, order) = match &mut parts.part {
            Some(parts) => {
                let (sharded, order) = parts.finish(&flags)?;
                (sharded, Some(order))
            }
            None => (Vec::new(), None),
        };
        // All workers step with the same settings, and learn what the others have requested.
        context.check_settings(flags.header(), settings.digest(), || settings.lines())?;
        context.agree_on_step(flags.header());
        let is_late = |index: &usize| {
            let is_planned = is_summed || plan.buckets.contains(*index);
            flags.came(*index) && !is_planned && !is_exchanged(&parameters.variables()[*index])
        };
        let mut late = (0..variables).filter(is_late);
        match &mut summed {
            Summed::Whole(all) => {
                // All replicas reduce these one by one.
                for index in late {
                    let variable = &parameters.variables()[index].components()[context.local_replica_id()];
                    let gradient = unplanned[index].take();
                    all.push(match plan.reduces_rows(index) {
                        true => rows::sum_rows::<L>(group, index, gradient, variable)?,
                        false => rows::sum_one::<L>(group, index, gradient, variable)?,
                    });
                }
            }
            Summed::Sharded(..) | Summed::OnDevice(_) => {
                // These exchanges cannot take a variable outside the plan.
                if let Some(index) = late.next() {
                    return Err(Error::LateGradient { name: parameters.variables()[index].name().to_owned() }.into());
                }
            }
        }
        communication += started.elapsed();
        Ok((Sums { summed, parts: sharded, order }, communication))
    }

    /// Returns whether any gradient was pushed.
    pub(crate) fn has_any(&self) -> bool {
        let parts = self.parts.part.as_ref().is_some_and(PartsStep::has_any);
        parts || (0..self.parameters.variables().len()).any(|index| self.has(index))
    }

    /// Returns whether a variable's gradient was pushed.
    fn has(&self, index: usize) -> bool {
        self.exchange.part.as_ref().is_some_and(|exchange| exchange.has(index))
            || self.unplanned[index].is_some()
            || self.parts.part.as_ref().is_some_and(|parts| parts.has(index))
    }

    fn launch(&mut self, index: usize, gradient: L::Tensor) -> Result<(), L::Error> {
        let started = Instant::now();
        if let Some(exchange) = &mut self.exchange.part {
            exchange.push(self.context.group(), index, gradient)?;
        }
        self.communication += started.elapsed();
        Ok(())
    }

    fn zeros(&self, index: usize) -> Result<L::Tensor, L::Error> {
        L::zeros_like(&self.parameters.variables()[index].components()[self.context.local_replica_id()])
    }
}
