//! Steps that a compiled program makes: backward, reduction and update in one, on all replicas at once.

use std::sync::Arc;

use distribute_collectives::Compression;
use distribute_hlo::{
    Builder, CollectiveGroups, CompareOp, ElementType, Reducer, Result as HloResult, TensorType, Value,
};
use distribute_rules::{UpdateRule, norm};
use distribute_types::DType;
use distribute_values::{DistributedVariable, TensorStorage};

use super::Optimizer;
use super::states::States;
use super::step::is_audit_due;
use crate::{Clip, Error, Parameters, TensorLibrary, Variable};

/// The part of a step that an optimizer adds to a program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProgramStep {
    rule: UpdateRule,
    clip: Option<Clip>,
}

/// A trained variable in a program.
#[derive(Clone, Debug)]
pub struct ProgramVariable {
    /// Its value before the step.
    pub parameter: Value,
    /// The gradient of this replica's share of the loss.
    pub gradient: Value,
    /// The slots of [`ProgramOptimizer::slots`], in their order.
    pub slots: Vec<Value>,
}

/// A step in a program.
#[derive(Clone, Debug)]
pub struct ProgramUpdate {
    /// Each variable's new value and new slots.
    pub updated: Vec<(Value, Vec<Value>)>,
    /// The global norm of the gradients before they were clipped, if the optimizer clips by it.
    pub gradient_norm: Option<Value>,
}

/// An optimizer as compiled programs need it: a handle on the state of an [`Optimizer`].
pub struct ProgramOptimizer<L: TensorLibrary> {
    step: ProgramStep,
    pub(super) parameters: Arc<Parameters<L>>,
    pub(super) slots: Arc<[Vec<DistributedVariable<L::Tensor>>]>,
    pub(super) states: Arc<States<L>>,
    learning_rate: f64,
    audit_every: u64,
}

impl<L: TensorLibrary> Optimizer<L> {
    /// Returns the optimizer for a step, with the present learning rate, that a compiled program makes.
    ///
    /// # Errors
    /// [`Error::Combination`] if the optimizer has a setting that programs do not have: another library's optimizer, a
    /// loss scale, compression, sharded state, or variables that are shared, sharded, split or of f64.
    /// [`Error::Torn`] if an earlier failure has left no complete parameters.
    pub fn for_program(&self) -> Result<ProgramOptimizer<L>, Error> {
        let refuse = |what, why| Err(Error::Combination { what, other: "a step in one compiled program", why });
        let is_divided = |variable: &Variable<L>| variable.layout().is_some() || variable.tensor_split().is_some();
        self.states.check()?;
        self.check_learning_rate()?;
        if self.library.is_some() {
            return refuse("the tensor library's own optimizer", "it runs on the host; use one of this crate");
        }
        if self.states.first(|state| state.standing.scaling.is_some()).unwrap_or(false) {
            return refuse("a loss scale", "bf16 needs none on a TPU; leave scale_losses out");
        }
        if !matches!(self.compression, Compression::None) {
            return refuse("compress", "the program's own collectives reduce gradients; leave it out");
        }
        if self.sharded {
            return refuse("zero1", "every device of the program has the whole state; leave it out");
        }
        if self.parameters.local_updates {
            return refuse("a strategy of local updates", "the program sums gradients in every step; use TpuStrategy");
        }
        if self.parameters.shared || self.parameters.variables().iter().any(is_divided) {
            return refuse("shared, sharded or split variables", "each device needs its own whole copy");
        }
        let has_64_bits = |variable: &Variable<L>| variable.components()[0].dtype().is_ok_and(|ty| ty == DType::F64);
        if self.parameters.variables().iter().any(|variable| variable.is_trainable() && has_64_bits(variable)) {
            return refuse("a variable of f64", "programs update in f32; make them f32 or bf16");
        }
        Ok(ProgramOptimizer {
            step: ProgramStep { rule: self.rule, clip: self.clip },
            parameters: self.parameters.clone(),
            slots: self.slots.clone(),
            states: self.states.clone(),
            learning_rate: self.learning_rate(),
            audit_every: self.audit_every,
        })
    }
}

impl<L: TensorLibrary> ProgramOptimizer<L> {
    /// Returns the part of the step that is added to a program.
    pub fn step(&self) -> ProgramStep {
        self.step
    }

    /// Returns the variables.
    pub fn parameters(&self) -> &Arc<Parameters<L>> {
        &self.parameters
    }

    /// Returns the slots of a variable; the last one is its copy in f32 if it has 16 bits.
    pub fn slots(&self, index: usize) -> &[DistributedVariable<L::Tensor>] {
        &self.slots[index]
    }

    /// Returns the numbers of the next step of these variables, one after another, as [`ProgramStep::add`] expects
    /// them.
    pub fn numbers(&self, trained: &[usize]) -> Vec<f64> {
        let counts = self.states.first(|state| state.standing.counts.clone()).unwrap_or_default();
        let of = |index: &usize| self.step.rule.numbers(counts.of(*index) + 1, self.learning_rate);
        trained.iter().flat_map(of).collect()
    }

    /// Returns whether both are of one optimizer, with equal settings.
    pub fn is_same(&self, other: &ProgramOptimizer<L>) -> bool {
        Arc::ptr_eq(&self.states, &other.states)
            && self.step == other.step
            && self.learning_rate.to_bits() == other.learning_rate.to_bits()
    }

    /// Counts a step that a program makes on all replicas. Returns whether [`audit`](crate::audit) is due after it.
    pub fn commit(&self, trained: &[usize]) -> bool {
        for state in &self.states.each {
            let standing = &mut state.lock().standing;
            standing.steps += 1;
            standing.counts.advance(trained.iter().copied());
        }
        self.states.first(|state| is_audit_due(state.standing.steps, self.audit_every)).unwrap_or(false)
    }

    /// Sets the global norm of the gradients of a program's step.
    pub fn set_norm(&self, norm: Option<f64>) {
        for state in &self.states.each {
            state.lock().standing.gradient_norm = norm;
        }
    }
}

impl ProgramStep {
    /// Returns how many numbers each variable has.
    pub fn numbers_per_variable(&self) -> usize {
        self.rule.numbers(1, 0.0).len()
    }

    /// Adds the step to a program: sums gradients over all replicas, limits them, and updates variables and slots.
    ///
    /// # Shapes
    /// `numbers`: those of [`ProgramOptimizer::numbers`], one dimension of f32.
    ///
    /// # Errors
    /// The builder's, if types differ from these, or a variable is neither of f32 nor of 16 bits.
    pub fn add(&self, b: &mut Builder, numbers: Value, variables: &[ProgramVariable]) -> HloResult<ProgramUpdate> {
        let per_variable = self.numbers_per_variable();
        let mut gradients = Vec::with_capacity(variables.len());
        for variable in variables {
            let sum = b.all_reduce(variable.gradient, Reducer::Sum, &CollectiveGroups::All)?;
            gradients.push(b.convert(sum, ElementType::F32)?);
        }
        let gradient_norm = self.limit(b, &mut gradients)?;
        let mut updated = Vec::with_capacity(variables.len());
        for (at, (variable, gradient)) in variables.iter().zip(gradients).enumerate() {
            let mut own = Vec::with_capacity(per_variable);
            for number in at * per_variable..(at + 1) * per_variable {
                let one = b.slice_in_dim(numbers, 0, number, number + 1)?;
                own.push(b.reshape(one, &[])?);
            }
            let element = b.type_of(variable.parameter)?.element;
            let result = match (element, variable.slots.split_last()) {
                (ElementType::F16 | ElementType::BF16, Some((master, slots))) => {
                    let (master, mut slots) = self.rule.add_to_program(b, &own, *master, gradient, slots)?;
                    slots.push(master);
                    (b.convert(master, element)?, slots)
                }
                _ => self.rule.add_to_program(b, &own, variable.parameter, gradient, &variable.slots)?,
            };
            updated.push(result);
        }
        Ok(ProgramUpdate { updated, gradient_norm })
    }

    /// Limits gradients. Returns their global norm if it was computed.
    fn limit(&self, b: &mut Builder, gradients: &mut [Value]) -> HloResult<Option<Value>> {
        match self.clip {
            None => Ok(None),
            Some(Clip::Value(limit)) => {
                for gradient in gradients {
                    let ty = b.type_of(*gradient)?.clone();
                    let (low, high) = (b.full(ty.clone(), -limit)?, b.full(ty, limit)?);
                    *gradient = b.clamp(low, *gradient, high)?;
                }
                Ok(None)
            }
            Some(Clip::Norm(limit)) => {
                for gradient in gradients {
                    let norm = norm(b, &[*gradient])?;
                    *gradient = scaled_down(b, *gradient, norm, limit)?;
                }
                Ok(None)
            }
            Some(Clip::GlobalNorm(limit)) => {
                let norm = norm(b, gradients)?;
                for gradient in gradients {
                    *gradient = scaled_down(b, *gradient, norm, limit)?;
                }
                Ok(Some(norm))
            }
        }
    }
}

/// Multiplies a gradient by limit / norm if the norm is greater than the limit.
fn scaled_down(b: &mut Builder, gradient: Value, norm: Value, limit: f64) -> HloResult<Value> {
    let scalar = TensorType::scalar(ElementType::F32);
    let (limit, one) = (b.full(scalar.clone(), limit)?, b.full(scalar, 1.0)?);
    let is_greater = b.compare(CompareOp::Gt, norm, limit)?;
    let factor = b.divide(limit, norm)?;
    let factor = b.select(is_greater, factor, one)?;
    let dims = b.type_of(gradient)?.dims.clone();
    let factor = b.broadcast(factor, &dims)?;
    b.multiply(gradient, factor)
}
