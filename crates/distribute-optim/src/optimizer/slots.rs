//! The slots of an optimizer, and the memory in which they are.

use distribute_values::{Aggregation, DistributedVariable, VariableOptions};

use crate::exchange::is_exchanged;
use crate::library::{dtype, wide};
use crate::{Error, Parameters, TensorLibrary, UpdateRule, Variable, is_short};

/// The memory in which the state of sharded variables is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StateMemory {
    /// That of the variables.
    OfVariables,
    /// The host's.
    Host,
}

/// The slots of one variable.
type Slots<L> = Vec<DistributedVariable<<L as TensorLibrary>::Tensor>>;

/// Makes a component of a slot.
type MakeSlot<'a, L> =
    dyn Fn(&<L as TensorLibrary>::Tensor) -> Result<<L as TensorLibrary>::Tensor, <L as TensorLibrary>::Error> + 'a;

impl StateMemory {
    /// Creates each variable's slots, followed by its f32 copy if it has 16 bits; none for variables that are not
    /// trained. Each slot has one component per replica, made from the variable's, or one that all replicas share.
    ///
    /// # Errors
    /// [`Error::Combination`] if no sharded variable has state that could be in another memory than the variable.
    pub(super) fn slots<L: TensorLibrary>(
        self,
        parameters: &Parameters<L>,
        rule: UpdateRule,
    ) -> Result<Vec<Slots<L>>, L::Error> {
        if self == StateMemory::Host {
            check_offload(parameters, rule)?;
        }
        let of_variable = |variable: &Variable<L>| {
            let mut slots = Vec::new();
            if variable.is_trainable() {
                let components = self.likes(variable)?;
                for name in rule.slots() {
                    let filled = |like: &L::Tensor| filled_like::<L>(like, rule.initial(name));
                    slots.push(slot(parameters, variable, name, &components, &filled)?);
                }
                if is_short(dtype::<L>(&variable.components()[0])?) {
                    slots.push(slot(parameters, variable, "master", &components, &wide::<L>)?);
                }
            }
            Ok(slots)
        };
        parameters.variables().iter().map(of_variable).collect()
    }

    /// Returns the tensors of which the components of a variable's slots are made, in the memory of these.
    fn likes<L: TensorLibrary>(self, variable: &Variable<L>) -> Result<Vec<L::Tensor>, L::Error> {
        match self {
            StateMemory::Host if is_exchanged(variable) => variable.components().iter().map(L::on_host).collect(),
            _ => Ok(variable.components().to_vec()),
        }
    }
}

/// Refuses state in host memory if it is there anyway, or if there is none.
fn check_offload<L: TensorLibrary>(parameters: &Parameters<L>, rule: UpdateRule) -> Result<(), L::Error> {
    let refuse = |other, why| Err(Error::Combination { what: "build_offloaded", other, why }.into());
    let sharded = || parameters.variables().iter().filter(|variable| is_exchanged(variable));
    if sharded().next().is_none() {
        let why = "the gradients of others are reduced where their state is; train the model under \
            FullyShardedStrategy on several replicas, with Sharded blocks in candle, or use build";
        return refuse("a model without sharded variables that are trained", why);
    }
    let on_device = |variable: &&Variable<L>| !variable.components().iter().all(L::is_on_host);
    if !sharded().any(|variable| on_device(&variable)) {
        return refuse("parameters in host memory", "their state is in host memory already; use build");
    }
    for variable in sharded().filter(on_device) {
        if !rule.slots().is_empty() || is_short(dtype::<L>(&variable.components()[0])?) {
            return Ok(());
        }
    }
    refuse("gradient descent without momentum", "it keeps no state for these parameters; use build")
}

/// Creates a slot of a variable.
fn slot<L: TensorLibrary>(
    parameters: &Parameters<L>,
    variable: &Variable<L>,
    name: &str,
    likes: &[L::Tensor],
    make: &MakeSlot<'_, L>,
) -> Result<DistributedVariable<L::Tensor>, L::Error> {
    let (name, options) = (format!("{}/{name}", variable.name()), VariableOptions::on_write(Aggregation::Mean));
    if parameters.shared {
        return Ok(DistributedVariable::shared(&name, make(&likes[0])?, likes.len(), options)?);
    }
    let components: Result<_, L::Error> = likes.iter().map(make).collect();
    Ok(DistributedVariable::new(&name, components?, options)?)
}

/// Returns a tensor of the same shape, in f32 or f64, filled with a value.
pub(super) fn filled_like<L: TensorLibrary>(tensor: &L::Tensor, value: f64) -> Result<L::Tensor, L::Error> {
    let filled = wide::<L>(&L::zeros_like(tensor)?)?;
    if value != 0.0 {
        crate::gradient::change::<L>(&filled, |_| value)?;
    }
    Ok(filled)
}
