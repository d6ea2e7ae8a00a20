//! Parameters of integers and of truth values.
//!
//! They are frozen variables, so that replicas and workers share and compare them, and checkpoints have them. Modules
//! of burn have values of them, which cannot be written in place: other values make other modules.

use std::sync::{Arc, OnceLock};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Int, Tensor};
use burn_backend::IntDType;
use burn_backend::ops::IntTensorOps;
use burn_flex::{Flex, FlexTensor};
use distribute_optim::backend::Variable;
use distribute_strategy::Strategy;
use distribute_values::TensorStorage;

use crate::backend::has_same_bits;
use crate::tensor::{burn_type, dtype_of, not_flex, refused};
use crate::{Burn, BurnTensor, Error, Result};

/// Describes a module's parameters of integers and of truth values, one per line, without initializing them.
pub(crate) fn describe<M: Module>(module: &M) -> Vec<String> {
    let mut seen = Seen::default();
    module.visit(&mut seen);
    seen.lines
}

/// Returns the paths of a module's parameters of integers and of truth values, in the order in which burn visits them,
/// and their values: truth values as u8, and integers of types that are not distributed as i32. Initializes them.
pub(crate) fn read<M: Module>(module: &M) -> Result<Vec<(String, BurnTensor)>> {
    let mut read = Read { path: Vec::new(), found: Ok(Vec::new()) };
    module.visit(&mut read);
    Ok(read.found?)
}

/// Creates the variables of a module's parameters of integers and of truth values.
pub(crate) fn variables<M: Module>(strategy: &Strategy, module: &M) -> Result<Vec<Variable<Burn>>> {
    let mut variables = Vec::new();
    for (path, value) in read(module)? {
        let mut variable = Variable::new(path, false);
        for local in 0..strategy.num_local_replicas() {
            variable.push(if local == 0 || strategy.shares_variables() { value.clone() } else { value.copied()? });
        }
        variable.freeze();
        variables.push(variable);
    }
    Ok(variables)
}

/// Converts integers to the type of a variable.
///
/// # Errors
/// [`Error::Range`] if that cannot hold one of them.
pub(crate) fn as_type_of(variable: &Variable<Burn>, value: &BurnTensor) -> Result<BurnTensor> {
    let (given, wanted) = (burn_type(value.dtype()?), burn_type(variable.components()[0].dtype()?));
    if given == wanted {
        return Ok(value.clone());
    }
    let converted = Flex::int_cast(value.flex(), wanted.into());
    if !has_same_bits(&Flex::int_cast(converted.clone(), given.into()), &value.flex()) {
        return Err(Error::Range { name: variable.name().to_owned(), dtype: format!("{wanted:?}") });
    }
    Ok(BurnTensor::new(converted))
}

/// Returns whether a variable has integers or truth values.
pub(crate) fn is_integers(variable: &Variable<Burn>) -> bool {
    variable.components().first().is_some_and(|value| value.dtype().is_ok_and(|dtype| !dtype.is_float()))
}

/// Returns whether a module has the integers of the variables.
pub(crate) fn are_equal<M: Module>(module: &M, variables: &[Variable<Burn>]) -> Result<bool> {
    let mut are_equal = true;
    for ((_, own), variable) in read(module)?.iter().zip(variables.iter().filter(|variable| is_integers(variable))) {
        are_equal &= has_same_bits(&own.flex(), &variable.components()[0].fetched()?);
    }
    Ok(are_equal)
}

/// Returns the modules of the local replicas with the integers of the variables.
pub(crate) fn with_variables<M: Module>(modules: Vec<M>, variables: &[Variable<Burn>]) -> Result<Vec<M>> {
    let of_replica = |(local, module): (usize, M)| {
        let own = variables.iter().filter(|variable| is_integers(variable));
        let values = own.map(|variable| variable.components()[local].fetched()).collect::<Result<Vec<_>, _>>()?;
        Ok(if values.is_empty() { module } else { with_values(module, values) })
    };
    modules.into_iter().enumerate().map(of_replica).collect()
}

/// Returns a module whose parameters of integers and of truth values have other values, in the order of [`read`].
fn with_values<M: Module>(module: M, values: Vec<FlexTensor>) -> M {
    module.map(&mut Set { values: values.into_iter() })
}

/// The modules of a model's replicas, of which the last ones are in use. Those before them live on, as the program may
/// have references to them; their parameters are placeholders.
pub(crate) struct Modules<M> {
    modules: Arc<Vec<M>>,
    next: OnceLock<Box<Modules<M>>>,
}

impl<M> Modules<M> {
    pub(crate) fn new(modules: Arc<Vec<M>>) -> Modules<M> {
        Modules { modules, next: OnceLock::new() }
    }

    pub(crate) fn last(&self) -> &Arc<Vec<M>> {
        let mut last = self;
        while let Some(next) = last.next.get() {
            last = next;
        }
        &last.modules
    }

    pub(crate) fn replace(&self, modules: Vec<M>) {
        let (mut last, mut new) = (self, Box::new(Modules::new(Arc::new(modules))));
        while let Err(refused) = last.next.set(new) {
            new = refused;
            if let Some(next) = last.next.get() {
                last = next;
            }
        }
    }
}

#[derive(Default)]
struct Seen {
    path: Vec<String>,
    lines: Vec<String>,
}

impl Seen {
    fn add(&mut self, shape: &[usize], kind: &str) {
        self.lines.push(format!("{} {shape:?}, {kind}", self.path.join(".")));
    }
}

impl ModuleVisitor for Seen {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(param.lazy_shape().as_slice(), "integers");
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(param.lazy_shape().as_slice(), "truth values");
    }
}

struct Read {
    path: Vec<String>,
    found: distribute_values::Result<Vec<(String, BurnTensor)>>,
}

impl Read {
    fn add(&mut self, value: distribute_values::Result<FlexTensor>) {
        let Ok(found) = &mut self.found else { return };
        match value {
            Ok(value) => found.push((self.path.join("."), BurnTensor::new(value))),
            Err(error) => self.found = Err(error),
        }
    }
}

impl ModuleVisitor for Read {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(integers_of(param.val()));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(truths_of(param.val()));
    }
}

struct Set {
    values: std::vec::IntoIter<FlexTensor>,
}

impl ModuleMapper for Set {
    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let Some(value) = self.values.next() else { return param };
        param.map(|own| match integers_of(own.clone()) {
            Ok(read) if has_same_bits(&read, &value) => own,
            _ => {
                let dtype = IntDType::from(own.dtype());
                let new = Tensor::<D, Int>::from_primitive::<Flex>(value).cast(dtype);
                if own.is_autodiff() { Tensor::from_inner(new) } else { new }
            }
        })
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        let Some(value) = self.values.next() else { return param };
        param.map(|own| match truths_of(own.clone()) {
            Ok(read) if has_same_bits(&read, &value) => own,
            _ => {
                let new = Tensor::<D, Int>::from_primitive::<Flex>(value).bool();
                if own.is_autodiff() { Tensor::from_inner(new) } else { new }
            }
        })
    }
}

fn integers_of<const D: usize>(tensor: Tensor<D, Int>) -> distribute_values::Result<FlexTensor> {
    let tensor = tensor.without_autodiff();
    let is_distributed = dtype_of(tensor.dtype()).is_ok();
    let tensor = if is_distributed { tensor } else { tensor.cast(IntDType::I32) };
    tensor.try_into_primitive::<Flex>().map_err(|error| refused("read a tensor", not_flex(error)))
}

fn truths_of<const D: usize>(tensor: Tensor<D, Bool>) -> distribute_values::Result<FlexTensor> {
    integers_of(tensor.without_autodiff().int().cast(IntDType::U8))
}
