//! Replicas that train apart for many steps, and then make one step together.

use std::ops::Range;

use distribute_cluster::SimpleResolver;
use distribute_input::InputOptions;
use distribute_values::VariableOptions;

use crate::{
    Error, LocalExtent, LocalInitial, LocalOccasion, LocalReplica, LocalSlot, LocalUpdates, LocalVariable, Replicas,
    Result, Strategy, StrategyExtended,
};

mod fragments;
mod in_flight;
mod int8;
mod outer;

pub use fragments::FragmentSchedule;
use fragments::{Schedule, Turn, divide};
use in_flight::{InFlight, Reduced, Reduction};
pub use int8::Int8Blocks;
pub use outer::OuterNesterov;

/// Replicas of another strategy that train apart, for networks that are too slow for a sum of gradients in every step.
///
/// For `inner_steps` steps each replica updates its own copy of the variables with the program's optimizer, by its own
/// examples, without communication. Then all make an outer step: the mean over all replicas of how far their variables
/// have moved is the gradient of the [outer optimizer](OuterNesterov), whose result replaces the variables of all.
///
/// The outer parameters, their momentum, what was lost in eight bits and, with [`overlap`](DilocoBuilder::overlap),
/// changes that are being reduced are state of the optimizer: they are saved in its checkpoints, and take 4 bytes of
/// host memory each per parameter and replica. The inner optimizer's state, such as Adam's, stays each replica's own
/// between outer steps.
///
/// # Before the model is read or saved
/// Between outer steps there are several models. [`LocalOccasion::Read`] sets variables to their mean, and
/// [`LocalOccasion::Save`] the inner optimizer's state and the lost remainders too, in f32; both leave outer parameters
/// and schedule as they are, and the mean of the replicas' changes. Trainers and checkpoints do so themselves, a loop
/// calls `Optimizer::synchronize` before it evaluates. This costs a sum of all variables, so evaluate and save rarely,
/// or after outer steps. Reductions that overlap with inner steps when the model is saved are made a second time.
///
/// # Between outer steps
/// Workers hear of each other when they synchronize. A signal to one of them (`PreemptionHandler`, `stop_on`) is acted
/// on up to `inner_steps / fragments` steps later; a grace period that is shorter than these steps ends before. In one
/// process the next step is enough.
///
/// Workers that read data of their own may have unequal amounts, so they agree before each step whether there is one,
/// by a sum of one number. With a dataset that all workers read, of whose batches each keeps its rows, they do not.
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
/// "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, for fragments and overlap. The paper's four
/// bits do not exist here.
pub struct DilocoStrategy {
    over: Strategy,
    schedule: Schedule,
    outer: OuterNesterov,
    wire: Wire,
    /// The share of inner parameters in those after an outer step; 0 without overlap.
    mixing: f32,
    slots: Vec<LocalSlot>,
    /// The indices of those slots that not all settings need.
    momentum: Option<usize>,
    residual: Option<usize>,
    sent: Option<usize>,
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
    overlap: u64,
    mixing: Option<f64>,
}

impl DilocoStrategy {
    /// Returns a builder: 100 inner steps, one fragment, the outer optimizer of the paper, changes in f32, no overlap.
    pub fn builder() -> DilocoBuilder {
        let (outer, wire) = (OuterNesterov::default(), Wire::F32);
        DilocoBuilder { inner_steps: 100, fragments: 1, outer, wire, overlap: 0, mixing: None }
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

    /// Lets replicas make this many inner steps while the changes of a fragment are reduced, instead of waiting. The
    /// outer step is made by the changes from before these steps; its result is then
    /// [mixed](DilocoBuilder::mixing) with the parameters that each replica has by then. Below the number of inner
    /// steps. Default: 0, without overlap.
    ///
    /// A run that fails meanwhile drops the reduction; it is made without overlap when it is due.
    pub fn overlap(self, inner_steps: u64) -> DilocoBuilder {
        DilocoBuilder { overlap: inner_steps, ..self }
    }

    /// Sets the share of a replica's own parameters in its parameters after an outer step with
    /// [overlap](DilocoBuilder::overlap), from 0, which discards the steps that it has made meanwhile, to below 1. The
    /// rest are the outer parameters. Default: 0.5, as in the paper.
    pub fn mixing(self, share_of_own: f64) -> DilocoBuilder {
        DilocoBuilder { mixing: Some(share_of_own), ..self }
    }

    /// Builds the strategy over the replicas of another one, which programs then use through this one alone. Processes
    /// with different settings get an error that names them in the first step.
    ///
    /// # Errors
    /// [`Error::LocalUpdates`] if a setting is out of range, or the other strategy's replicas do not have whole
    /// variables of their own that they update themselves.
    pub fn over(self, over: Strategy) -> Result<Strategy> {
        let DilocoBuilder { inner_steps, fragments, outer, wire, overlap, mixing } = self;
        let refuse = |problem: String| Err(Error::LocalUpdates { problem });
        FragmentSchedule { inner_steps, fragments }.check()?;
        if overlap >= inner_steps {
            return refuse(format!(
                "reductions overlap with {overlap} of {inner_steps} inner steps; give fewer, since a fragment has one \
                 reduction at a time"
            ));
        }
        match mixing {
            Some(_) if overlap == 0 => {
                return refuse("mixing acts with overlap alone; set overlap, or leave mixing out".to_owned());
            }
            Some(share) if !(0.0..1.0).contains(&share) => {
                return refuse(format!("the share of own parameters is {share}; give one from 0 to below 1"));
            }
            _ => {}
        }
        outer.check()?;
        if let Some(why) = over.refuses_local_updates() {
            return refuse(format!("DilocoStrategy cannot be used over {}: {why}", over.describe()));
        }
        let schedule = Schedule { inner_steps, fragments, overlap };
        let mixing = if overlap == 0 { 0.0 } else { mixing.unwrap_or(DEFAULT_MIXING) as f32 };
        over.declare("DiLoCo", format!("{schedule:?}, {outer:?}, changes in {wire:?}, own share {mixing}"));
        let mut slots = vec![LocalSlot { name: "outer", initial: LocalInitial::Variable, is_own: false }];
        let mut add = |wanted: bool, name, is_own| {
            wanted.then(|| {
                slots.push(LocalSlot { name, initial: LocalInitial::Zeros, is_own });
                slots.len() - 1
            })
        };
        let momentum = add(outer.momentum > 0.0, "outer_momentum", false);
        let residual = add(wire == Wire::Int8, "residual", true);
        let sent = add(overlap > 0, "sent", true);
        Ok(Strategy::new(DilocoStrategy { over, schedule, outer, wire, mixing, slots, momentum, residual, sent }))
    }
}

impl Strategy {
    /// Returns why a strategy of [`LocalUpdates`] with [slots](LocalUpdates::slots) cannot be built over this one;
    /// `None` if it can, because each replica has whole variables of its own that it updates itself. For authors of
    /// strategies.
    pub fn refuses_local_updates(&self) -> Option<&'static str> {
        #[cfg(feature = "pjrt")]
        if self.pjrt().is_some() {
            return Some("its compiled programs sum gradients in every step; use TpuStrategy by itself");
        }
        if self.extended().local_updates().is_some() {
            return Some("its replicas train apart already; give the strategy that it was built over");
        }
        if self.sharding().is_some() {
            return Some("its replicas have parts of variables; use MirroredStrategy or MultiWorkerMirroredStrategy");
        }
        if self.shares_variables() {
            return Some("its replicas share one copy of the variables; use MirroredStrategy");
        }
        if self.tensor_parallel() > 1 {
            return Some("its replicas consist of several tensor ranks; leave tensor_parallel out");
        }
        None
    }
}

impl DilocoStrategy {
    /// Takes what fragments have in progress, and does what they are due to do after a number of steps.
    fn take_turns(&self, replica: &dyn LocalReplica, fragments: &[Range<usize>], steps: u64) -> Result<()> {
        let (group, mut in_flight) = (replica.group(), InFlight::of(replica));
        for turn in self.schedule.turns(steps) {
            match turn {
                Turn::Synchronize(fragment) => {
                    let (lens, changes) = self.changes(replica, fragments[fragment].clone())?;
                    let reduced = Reduction::start(group, self.wire, &lens, changes)?.finish(group)?;
                    self.outer_step(replica, fragments[fragment].clone(), &reduced)?;
                }
                Turn::Begin(fragment) => {
                    let (lens, changes) = self.note_changes(replica, fragments[fragment].clone())?;
                    in_flight.put(fragment, Reduction::start(group, self.wire, &lens, changes)?);
                }
                Turn::Combine(fragment) => {
                    if let Some(reduction) = in_flight.take(fragment) {
                        in_flight.put(fragment, reduction.combine(group)?);
                    }
                }
                Turn::Finish(fragment) => {
                    let (reduction, has_begun) = match in_flight.take(fragment) {
                        Some(reduction) => (reduction, true),
                        // It was dropped, on all replicas.
                        None => {
                            let (lens, changes) = self.noted_changes(replica, fragments[fragment].clone())?;
                            (Reduction::start(group, self.wire, &lens, changes)?, false)
                        }
                    };
                    let reduced = reduction.finish(group)?;
                    // Without a reduction in progress, zeros tell that nothing was noted, for instance before a
                    // checkpoint of other settings was restored.
                    if has_begun || reduced.means.iter().any(|mean| *mean != 0.0) {
                        self.outer_step(replica, fragments[fragment].clone(), &reduced)?;
                    }
                }
            }
        }
        in_flight.keep(replica);
        Ok(())
    }

    /// Returns how far a range of variables has moved since the last outer step, with what was lost then, and their
    /// numbers of elements.
    fn changes(&self, replica: &dyn LocalReplica, variables: Range<usize>) -> Result<(Vec<usize>, Vec<f32>)> {
        let (mut lens, mut changes) = (Vec::with_capacity(variables.len()), Vec::new());
        replica.read_slots(variables, &mut |_, inner, slots| {
            lens.push(inner.len());
            self.append_changes(inner, slots, &mut changes);
            Ok(())
        })?;
        Ok((lens, changes))
    }

    /// Returns the [`changes`](DilocoStrategy::changes), and keeps them in a slot.
    fn note_changes(&self, replica: &dyn LocalReplica, variables: Range<usize>) -> Result<(Vec<usize>, Vec<f32>)> {
        let (mut lens, mut changes) = (Vec::with_capacity(variables.len()), Vec::new());
        replica.change_slots(variables, &mut |_, inner, slots| {
            lens.push(inner.len());
            let begin = changes.len();
            self.append_changes(inner, slots, &mut changes);
            if let Some(sent) = self.sent {
                slots[sent].copy_from_slice(&changes[begin..]);
            }
            Ok(())
        })?;
        Ok((lens, changes))
    }

    /// Returns the changes that were kept.
    fn noted_changes(&self, replica: &dyn LocalReplica, variables: Range<usize>) -> Result<(Vec<usize>, Vec<f32>)> {
        let (mut lens, mut changes) = (Vec::with_capacity(variables.len()), Vec::new());
        replica.read_slots(variables, &mut |_, inner, slots| {
            lens.push(inner.len());
            changes.extend(self.sent.iter().flat_map(|sent| &slots[*sent]));
            Ok(())
        })?;
        Ok((lens, changes))
    }

    fn append_changes(&self, inner: &[f32], slots: &[Vec<f32>], changes: &mut Vec<f32>) {
        let begin = changes.len();
        changes.extend(slots[OUTER].iter().zip(inner).map(|(outer, inner)| outer - inner));
        if let Some(residual) = self.residual {
            changes[begin..].iter_mut().zip(&slots[residual]).for_each(|(change, left)| *change += left);
        }
    }

    /// Makes an outer step of a range of variables.
    fn outer_step(&self, replica: &dyn LocalReplica, variables: Range<usize>, reduced: &Reduced) -> Result<()> {
        let mut begin = 0;
        replica.change_slots(variables, &mut |_, inner, slots| {
            let range = begin..begin + inner.len();
            begin = range.end;
            if let (Some(residual), Some(left)) = (self.residual, &reduced.left) {
                slots[residual].copy_from_slice(&left[range.clone()]);
            }
            if let Some(sent) = self.sent {
                slots[sent].fill(0.0);
            }
            let (outer, others) = slots.split_at_mut(OUTER + 1);
            let momentum = self.momentum.map(|momentum| others[momentum - (OUTER + 1)].as_mut_slice());
            self.outer.step(&mut outer[OUTER], momentum, &reduced.means[range]);
            if self.mixing == 0.0 {
                inner.copy_from_slice(&outer[OUTER]);
            } else {
                let mix = |(inner, outer): (&mut f32, &f32)| *inner = outer + self.mixing * (*inner - outer);
                inner.iter_mut().zip(&outer[OUTER]).for_each(mix);
            }
            Ok(())
        })
    }

    /// Divides the model's variables into fragments.
    fn fragments(&self, variables: &[LocalVariable]) -> Vec<Range<usize>> {
        let bytes: Vec<usize> = variables.iter().map(|variable| variable.len * variable.dtype.size_bytes()).collect();
        divide(&bytes, self.schedule.fragments)
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

/// The share of a replica's own parameters after an outer step with overlap: that of the paper's experiments.
const DEFAULT_MIXING: f64 = 0.5;

impl LocalUpdates for DilocoStrategy {
    fn is_due(&self, steps: u64) -> bool {
        let acts = |turn: Turn| !matches!((turn, self.wire), (Turn::Combine(_), Wire::F32));
        self.schedule.turns(steps).any(acts)
    }

    fn synchronize_for(&self, occasion: LocalOccasion, replica: &dyn LocalReplica) -> Result<LocalExtent> {
        match occasion {
            LocalOccasion::Due { steps } => {
                let variables = replica.variables()?;
                let fragments = self.fragments(&variables);
                self.take_turns(replica, &fragments, steps)?;
                let are_equal = fragments.len() == 1 && self.schedule.overlap == 0;
                Ok(if are_equal { LocalExtent::Variables } else { LocalExtent::Some })
            }
            LocalOccasion::Read => {
                replica.average_variables()?;
                Ok(LocalExtent::Variables)
            }
            LocalOccasion::Save => {
                // What is in progress is of single replicas' changes, and a resumed run has their means alone.
                InFlight::of(replica).abandon(replica.group())?;
                self.synchronize(replica)?;
                Ok(LocalExtent::All)
            }
        }
    }

    fn slots(&self) -> &[LocalSlot] {
        &self.slots
    }

    fn check_variables(&self, variables: &[LocalVariable]) -> Result<()> {
        let Schedule { inner_steps, fragments, .. } = self.schedule;
        FragmentSchedule { inner_steps, fragments }.check_variables(variables)
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
        let overlap = match self.schedule.overlap {
            0 => String::new(),
            overlap => format!(", reduced during {overlap} steps"),
        };
        format!(
            "Diloco every {} steps{fragments}{overlap}, {:.2} bytes sent per parameter in {wire}, over {}",
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
