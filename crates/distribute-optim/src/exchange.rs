//! The exchange of one replica's gradients: into buckets, reduced over the replicas, and out again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use distribute_collectives::{ProcessGroup, ReduceOp};
use distribute_strategy::ReplicaContext;

use crate::gradient::Reduced;
use crate::plan::Plan;
use crate::settings::Settings;
use crate::{DeviceExchange, Error, Parameters, TensorLibrary};

mod device;
mod flags;
mod payload;
mod sharded;
mod whole;

pub(crate) use device::{OnDevice, SumOnDevice};
pub(crate) use flags::StepFlags;
pub(crate) use payload::Payload;
pub(crate) use sharded::{GradientShard, ShardedStep, SlotShard, Update, complete};
pub(crate) use whole::WholeStep;

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

/// The gradients of one replica in one step.
pub(crate) struct Reducer<L: TensorLibrary> {
    settings: Settings,
    context: ReplicaContext,
    parameters: Arc<Parameters<L>>,
    plan: Arc<Plan>,
    exchange: Box<dyn Exchange<L>>,
    /// Gradients of variables that are not in the plan.
    unplanned: Vec<Option<L::Tensor>>,
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
    ) -> Reducer<L> {
        Reducer {
            settings,
            context: context.clone(),
            parameters: parameters.clone(),
            plan: plan.clone(),
            exchange,
            unplanned: vec![None; parameters.variables().len()],
            failure: None,
            communication: Duration::ZERO,
        }
    }

    /// Adds a gradient. Starts to reduce its bucket when the bucket is complete, and the buckets that waited for it.
    pub(crate) fn push(&mut self, index: usize, gradient: L::Tensor) {
        if !self.parameters.variables()[index].is_trainable() {
            // Frozen.
        } else if !self.plan.buckets.contains(index) {
            self.unplanned[index] = Some(gradient);
        } else if self.failure.is_none()
            && let Err(error) = self.launch(index, gradient)
        {
            self.failure = Some(error);
        }
    }

    /// Records a failure, which [`finish`](Reducer::finish) returns.
    pub(crate) fn fail(&mut self, error: L::Error) {
        self.failure.get_or_insert(error);
    }

    /// Pushes zeros for missing gradients and waits for all buckets. Returns the summed gradients and the time spent in
    /// collectives.
    pub(crate) fn finish(mut self) -> Result<(Summed<L>, Duration), L::Error> {
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        let variables = self.parameters.variables().len();
        let came = |index: usize| self.exchange.has(index) || self.unplanned[index].is_some();
        let came: Vec<bool> = (0..variables).map(came).collect();
        for (index, came) in came.iter().enumerate() {
            if !came && self.plan.buckets.contains(index) {
                self.launch(index, self.zeros(index)?)?;
            }
        }
        let flags = StepFlags::new(came.into_iter(), self.context.step_header(self.settings.digest()));
        let Reducer { context, parameters, plan, exchange, settings, mut unplanned, mut communication, .. } = self;
        let group = context.group();
        let started = Instant::now();
        let (mut summed, flags) = exchange.finish(group, flags)?;
        communication += started.elapsed();
        // All workers step with the same settings, and learn what the others have requested.
        context.check_settings(flags.header(), settings.digest(), || settings.lines())?;
        context.agree_on_step(flags.header());
        let mut late = (0..variables).filter(|index| flags.came(*index) && !plan.buckets.contains(*index));
        match &mut summed {
            Summed::Whole(all) => {
                // All replicas reduce these one by one.
                for index in late {
                    let gradient = match unplanned[index].take() {
                        Some(gradient) => L::own(gradient)?,
                        None => zeros(&parameters, context.local_replica_id(), index)?,
                    };
                    let payload = Payload::<L>::gradient(gradient)?;
                    let reduced = group.start().all_reduce(payload, ReduceOp::Sum)?.wait()?;
                    if let Some(gradient) = reduced.into_gradient() {
                        all.push(Reduced::new(index, gradient)?);
                    }
                }
            }
            Summed::Sharded(..) | Summed::OnDevice(_) => {
                // These exchanges cannot take a variable outside the plan.
                if let Some(index) = late.next() {
                    return Err(Error::LateGradient { name: parameters.variables()[index].name().to_owned() }.into());
                }
            }
        }
        Ok((summed, communication))
    }

    /// Returns whether any gradient was pushed.
    pub(crate) fn has_any(&self) -> bool {
        let variables = self.parameters.variables().len();
        self.unplanned.iter().any(Option::is_some) || (0..variables).any(|index| self.exchange.has(index))
    }

    fn launch(&mut self, index: usize, gradient: L::Tensor) -> Result<(), L::Error> {
        let started = Instant::now();
        self.exchange.push(self.context.group(), index, gradient)?;
        self.communication += started.elapsed();
        Ok(())
    }

    fn zeros(&self, index: usize) -> Result<L::Tensor, L::Error> {
        zeros(&self.parameters, self.context.local_replica_id(), index)
    }
}

fn zeros<L: TensorLibrary>(parameters: &Parameters<L>, local: usize, index: usize) -> Result<L::Tensor, L::Error> {
    L::zeros_like(&parameters.variables()[index].components()[local])
}
