//! Replicas that train apart for many steps, and then make one step together.

use std::ops::Range;

use distribute_cluster::SimpleResolver;
use distribute_collectives::ReduceOp;
use distribute_device::DType;
use distribute_input::InputOptions;
use distribute_values::VariableOptions;

use crate::{
    Error, LocalExtent, LocalInitial, LocalOccasion, LocalReplica, LocalSlot, LocalUpdates, LocalVariable, Replicas,
    Result, Strategy, StrategyExtended,
};

mod fragments;
mod int8;
mod outer;

use fragments::{Schedule, divide};
pub use outer::OuterNesterov;

/// Replicas of another strategy that train apart, for networks that are too slow for a sum of gradients in every step.
///
/// For `inner_steps` steps each replica updates its own copy of the variables with the program's optimizer, by its own
/// examples, without communication. Then all make an outer step: the mean over all replicas of how far their variables
/// have moved is the gradient of the [outer optimizer](OuterNesterov), whose result replaces the variables of all.
///
/// The outer parameters, their momentum and what was lost in eight bits are state of the optimizer: they are saved in
/// its checkpoints, and take 4 bytes of host memory each per parameter and replica. The inner optimizer's state, such
/// as Adam's, stays each replica's own between outer steps.
///
/// # Before the model is read or saved
/// Between outer steps there are several models. [`LocalOccasion::Read`] sets variables to their mean, and
/// [`LocalOccasion::Save`] the inner optimizer's state and the lost remainders too, in f32; both leave outer parameters
/// and schedule as they are, and the mean of the replicas' changes. Trainers and checkpoints do so themselves, a loop
/// calls `Optimizer::synchronize` before it evaluates. This costs a sum of all variables, so evaluate and save rarely,
/// or after outer steps.
///
/// # Cost
/// Per outer step and parameter, each of n replicas sends 8 (n - 1) / n bytes with [`Wire::F32`] (an all-reduce), and
/// 2.03 (n - 1) / n bytes with [`Wire::Int8`] (an all-to-all and an all-gather, of a byte per value and four per block
/// of at most 256); [`Strategy::describe`] tells the number. Other strategies send 8 (n - 1) / n bytes in every step,
/// so 100 inner steps send 100 times fewer bytes in f32, and 394 times fewer in eight bits.
///
/// # Limits
/// Variables must be trained in f32, also as copies of those of 16 bits. Strategies that shard or share variables,
/// split layers or compile steps are refused, and so are settings of the optimizer that change the exchange of
/// gradients (`zero1`, `compress`, `SparseGradients::Rows`, `scale_losses`, `apply_aggregated_gradients`). The state of
/// a tensor library's own optimizer stays each replica's own: a checkpoint has that of the first replica.
///
/// # Examples
/// ```
/// use distribute_strategy::{DilocoStrategy, Error, MirroredStrategy, OuterNesterov, Wire};
///
/// let replicas = MirroredStrategy::builder().num_replicas(4).build()?;
/// let outer = OuterNesterov { learning_rate: 0.7, momentum: 0.9 };
/// let builder = DilocoStrategy::builder().inner_steps(100).fragments(4).outer(outer).wire(Wire::Int8);
/// let strategy = builder.over(replicas)?;
/// assert_eq!((strategy.name(), strategy.num_replicas_in_sync()), ("Diloco", 4));
/// assert!(strategy.describe().starts_with("Diloco every 100 steps in 4 fragments"));
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// Douillard and others, "DiLoCo: distributed low-communication training of language models", arXiv 2311.08105, and
/// "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, for fragments. The paper's four bits, and the
/// overlap of communication and inner steps, do not exist here.
pub struct DilocoStrategy {
    over: Strategy,
    schedule: Schedule,
    outer: OuterNesterov,
    wire: Wire,
    slots: Vec<LocalSlot>,
}

/// How the changes of variables are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wire {
    /// In f32, by an all-reduce.
    #[default]
    F32,
    /// In eight bits, with a scale in f32 for each block of at most 256 values of a variable. Each replica adds a part
    /// of all replicas' changes, in rank order in f32, and sends their mean to all, in eight bits too. What eight bits
    /// lose is added to the next change of the replica that has lost it (error feedback).
    Int8,
}

/// Builds a [`DilocoStrategy`].
#[derive(Clone, Debug)]
#[must_use]
pub struct DilocoBuilder {
    inner_steps: u64,
    fragments: usize,
    outer: OuterNesterov,
    wire: Wire,
}

impl DilocoStrategy {
    /// Returns a builder: 100 inner steps, one fragment, the outer optimizer of the paper, changes in f32.
    pub fn builder() -> DilocoBuilder {
        DilocoBuilder { inner_steps: 100, fragments: 1, outer: OuterNesterov::default(), wire: Wire::F32 }
    }
}

impl DilocoBuilder {
    /// Sets the number of steps that replicas make apart, at least 1.
    pub fn inner_steps(self, inner_steps: u64) -> DilocoBuilder {
        DilocoBuilder { inner_steps, ..self }
    }

    /// Divides the variables, in order, into this many parts of nearly equal bytes, which synchronize one after another
    /// at equal distances: part `p` when `step + p * inner_steps / fragments` is a multiple of `inner_steps`. The
    /// traffic of one synchronization is divided by their number. At least 1, a divisor of the inner steps, and at most
    /// the number of trained variables.
    pub fn fragments(self, fragments: usize) -> DilocoBuilder {
        DilocoBuilder { fragments, ..self }
    }

    /// Sets the outer optimizer.
    pub fn outer(self, outer: OuterNesterov) -> DilocoBuilder {
        DilocoBuilder { outer, ..self }
    }

    /// Sets how changes are sent.
    pub fn wire(self, wire: Wire) -> DilocoBuilder {
        DilocoBuilder { wire, ..self }
    }

    /// Builds the strategy over the replicas of another one, which programs then use through this one alone. Processes
    /// with different settings get an error that names them in the first step.
    ///
    /// # Errors
    /// [`Error::LocalUpdates`] if a setting is out of range, or the other strategy's replicas do not have whole
    /// variables of their own that they update themselves.
    pub fn over(self, over: Strategy) -> Result<Strategy> {
        let DilocoBuilder { inner_steps, fragments, outer, wire } = self;
        let refuse = |problem: String| Err(Error::LocalUpdates { problem });
        if inner_steps == 0 || fragments == 0 {
            return refuse(format!("{inner_steps} inner steps and {fragments} fragments were given; give at least 1"));
        }
        if !inner_steps.is_multiple_of(fragments as u64) {
            return refuse(format!(
                "{inner_steps} inner steps cannot be divided among {fragments} fragments; give a multiple of their \
                 number, such as {}",
                inner_steps.next_multiple_of(fragments as u64)
            ));
        }
        outer.check()?;
        if let Some(why) = unsupported(&over) {
            return refuse(format!("DilocoStrategy cannot be used over {}: {why}", over.describe()));
        }
        let schedule = Schedule { inner_steps, fragments };
        over.declare("DiLoCo", format!("{schedule:?}, {outer:?}, changes in {wire:?}"));
        let slot = |name, initial, is_own| LocalSlot { name, initial, is_own };
        let mut slots = vec![slot("outer", LocalInitial::Variable, false)];
        if outer.momentum > 0.0 {
            slots.push(slot("outer_momentum", LocalInitial::Zeros, false));
        }
        if wire == Wire::Int8 {
            slots.push(slot("residual", LocalInitial::Zeros, true));
        }
        Ok(Strategy::new(DilocoStrategy { over, schedule, outer, wire, slots }))
    }
}

/// Returns why replicas of a strategy cannot train apart, if they cannot.
fn unsupported(over: &Strategy) -> Option<&'static str> {
    #[cfg(feature = "pjrt")]
    if over.pjrt().is_some() {
        return Some("its compiled programs sum gradients in every step; use TpuStrategy by itself");
    }
    if over.extended().local_updates().is_some() {
        return Some("its replicas train apart already; give the strategy that it was built over");
    }
    if over.sharding().is_some() {
        return Some("its replicas have parts of variables; use MirroredStrategy or MultiWorkerMirroredStrategy");
    }
    if over.shares_variables() {
        return Some("its replicas share one copy of the variables; use MirroredStrategy");
    }
    if over.tensor_parallel() > 1 {
        return Some("its replicas consist of several tensor ranks; leave tensor_parallel out");
    }
    None
}

impl DilocoStrategy {
    /// Makes an outer step of a range of variables.
    fn outer_step(&self, replica: &dyn LocalReplica, variables: Range<usize>) -> Result<()> {
        let mut lens = Vec::with_capacity(variables.len());
        let mut changes: Vec<f32> = Vec::new();
        replica.read_slots(variables.clone(), &mut |_, inner, slots| {
            lens.push(inner.len());
            let of_variable = changes.len();
            changes.extend(slots[OUTER].iter().zip(inner).map(|(outer, inner)| outer - inner));
            if let Some(residual) = self.residual(slots.len()) {
                changes[of_variable..].iter_mut().zip(&slots[residual]).for_each(|(change, left)| *change += left);
            }
            Ok(())
        })?;
        let (means, left) = match self.wire {
            Wire::F32 => {
                replica.group().all_reduce(&mut changes, ReduceOp::Mean)?;
                (changes, Vec::new())
            }
            Wire::Int8 => int8::mean(replica.group(), &lens, changes)?,
        };
        let mut begin = 0;
        replica.change_slots(variables, &mut |_, inner, slots| {
            let range = begin..begin + inner.len();
            begin = range.end;
            if let Some(residual) = self.residual(slots.len()) {
                slots[residual].copy_from_slice(&left[range.clone()]);
            }
            let (outer, others) = slots.split_at_mut(OUTER + 1);
            let momentum = others.first_mut().filter(|_| self.outer.momentum > 0.0);
            self.outer.step(&mut outer[OUTER], momentum.map(Vec::as_mut_slice), &means[range]);
            inner.copy_from_slice(&outer[OUTER]);
            Ok(())
        })
    }

    /// Divides the model's variables into fragments.
    fn fragments(&self, variables: &[LocalVariable]) -> Vec<Range<usize>> {
        let bytes: Vec<usize> = variables.iter().map(|variable| variable.len * variable.dtype.size_bytes()).collect();
        divide(&bytes, self.schedule.fragments)
    }

    /// Returns the slot of what was lost in eight bits, which is the last one.
    fn residual(&self, slots: usize) -> Option<usize> {
        (self.wire == Wire::Int8).then(|| slots.saturating_sub(1))
    }

    /// Returns the bytes that each replica sends per parameter and outer step.
    fn bytes_per_parameter(&self) -> f64 {
        let replicas = self.over.num_replicas_in_sync() as f64;
        let bytes_per_value = match self.wire {
            Wire::F32 => size_of::<f32>() as f64,
            Wire::Int8 => 1.0 + size_of::<f32>() as f64 / int8::BLOCK as f64,
        };
        // To the replicas that add the parts, and from them.
        2.0 * bytes_per_value * (replicas - 1.0) / replicas
    }
}

/// The slot of the outer parameters.
const OUTER: usize = 0;

impl LocalUpdates for DilocoStrategy {
    fn is_due(&self, steps: u64) -> bool {
        self.schedule.due(steps).is_some()
    }

    fn synchronize_for(&self, occasion: LocalOccasion, replica: &dyn LocalReplica) -> Result<LocalExtent> {
        match occasion {
            LocalOccasion::Due { steps } => {
                let variables = replica.variables()?;
                let fragments = self.fragments(&variables);
                let due = self.schedule.due(steps).and_then(|fragment| fragments.get(fragment));
                if let Some(fragment) = due {
                    self.outer_step(replica, fragment.clone())?;
                }
                Ok(if fragments.len() == 1 { LocalExtent::Variables } else { LocalExtent::Some })
            }
            LocalOccasion::Read => {
                replica.average_variables()?;
                Ok(LocalExtent::Variables)
            }
            LocalOccasion::Save => {
                self.synchronize(replica)?;
                Ok(LocalExtent::All)
            }
        }
    }

    fn slots(&self) -> &[LocalSlot] {
        &self.slots
    }

    fn check_variables(&self, variables: &[LocalVariable]) -> Result<()> {
        let refuse = |problem: String| Err(Error::LocalUpdates { problem });
        if let Some(variable) = variables.iter().find(|variable| variable.dtype != DType::F32) {
            let LocalVariable { name, dtype, .. } = variable;
            return refuse(format!(
                "DilocoStrategy has outer parameters in f32, but {name} is trained in {dtype}; make it f32, or one of \
                 16 bits with an optimizer of this workspace, which trains a copy in f32"
            ));
        }
        if variables.len() < self.schedule.fragments {
            return refuse(format!(
                "the model trains {} variables, which cannot be divided into {} fragments; ask for fewer",
                variables.len(),
                self.schedule.fragments
            ));
        }
        Ok(())
    }

    fn averages_every_step(&self) -> bool {
        self.schedule.inner_steps == 1 && self.wire == Wire::F32 && self.outer.is_mean()
    }
}

impl StrategyExtended for DilocoStrategy {
    fn name(&self) -> &'static str {
        "Diloco"
    }

    fn replicas(&self) -> &Replicas {
        self.over.extended().replicas()
    }

    fn describe(&self) -> String {
        let fragments = match self.schedule.fragments {
            1 => String::new(),
            fragments => format!(" in {fragments} fragments"),
        };
        let wire = match self.wire {
            Wire::F32 => "f32",
            Wire::Int8 => "8 bits",
        };
        format!(
            "Diloco every {} steps{fragments}, {:.2} bytes sent per parameter in {wire}, over {}",
            self.schedule.inner_steps,
            self.bytes_per_parameter(),
            self.over.describe()
        )
    }

    fn cluster_resolver(&self) -> Option<&SimpleResolver> {
        self.over.extended().cluster_resolver()
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

#[cfg(test)]
mod tests;
