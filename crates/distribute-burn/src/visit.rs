//! Reading and describing the parameters of a module.

use burn::module::{Flag, Module, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer};
use burn::tensor::Tensor;

use crate::tensor::flex_of;
use crate::tensor_parallel::{Request, announced};
use crate::{BurnTensor, Error, Result, integers};

/// A floating-point parameter, or a running statistic, of a module.
#[derive(Clone, Debug)]
pub(crate) struct Described {
    /// The names of the fields that lead to it, joined by dots.
    pub(crate) path: String,
    /// Equal for several paths if weights are tied.
    pub(crate) id: ParamId,
    pub(crate) shape: Vec<usize>,
    pub(crate) is_statistic: bool,
    /// How a tensor-parallel layer asks for it to be split.
    pub(crate) split: Option<Request>,
}

impl std::fmt::Display for Described {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.is_statistic { ", a running statistic" } else { "" };
        let split = self.split.map_or_else(String::new, |split| format!(", {split}"));
        write!(f, "{} {:?}{kind}{split}", self.path, self.shape)
    }
}

/// Describes the parameters of a module in the order in which burn visits them, without initializing them.
pub(crate) fn describe<M: Module>(module: &M) -> Result<Vec<Described>> {
    // Running statistics are visited as parameters are, but take no reparameterization.
    let mut seen = Seen::default();
    let is_hooked = {
        let mut own = Seen::default();
        module.visit(&mut own);
        if let Some(path) = own.foreign {
            return Err(Error::Reparameterized { path });
        }
        own.hooked > 0
    };
    if is_hooked {
        module.visit(&mut seen);
    } else {
        module.clone().apply_reparameterization(Probe).visit(&mut seen);
    }
    Ok(seen.all)
}

/// Returns the path of the first layer that draws random numbers in training, and is not frozen.
pub(crate) fn drawing_layer<M: Module>(module: &M) -> Option<String> {
    let mut draws = Draws::default();
    module.visit(&mut draws);
    draws.found
}

/// Calls `see` for each floating-point parameter, in the order in which burn visits them, with its path, its id and a
/// function that returns whether it is trained, which initializes it.
#[cfg(feature = "learner")]
pub(crate) fn each_float<M: Module>(module: &M, see: impl FnMut(&str, ParamId, &dyn Fn() -> bool)) {
    module.visit(&mut EachFloat { path: Vec::new(), see });
}

/// Reads the values of the parameters that [`describe`] lists, in the same order. Initializes them.
pub(crate) fn read<M: Module>(module: &M) -> Result<Vec<BurnTensor>> {
    let mut reader = Reader { values: Ok(Vec::new()) };
    module.visit(&mut reader);
    reader.values
}

/// Describes all parameters of a module, one per line.
pub(crate) fn described_lines<M: Module>(described: &[Described], module: &M) -> Vec<String> {
    described.iter().map(ToString::to_string).chain(integers::describe(module)).collect()
}

/// Returns an error unless two modules have the same parameters.
pub(crate) fn check_alike(first: &[String], other: &[String], replica: usize) -> Result<()> {
    let name = |of: Option<&String>| of.cloned().unwrap_or_else(|| "missing".to_owned());
    let len = first.len().max(other.len());
    match (0..len).find(|index| name(first.get(*index)) != name(other.get(*index))) {
        None => Ok(()),
        Some(index) => {
            let (first, other) = (name(first.get(index)), name(other.get(index)));
            Err(Error::ReplicasDiffer { index, first, other, replica })
        }
    }
}

/// The parameters seen so far.
#[derive(Default)]
struct Seen {
    path: Vec<String>,
    all: Vec<Described>,
    /// The path of the first parameter with a reparameterization of another crate.
    foreign: Option<String>,
    /// The number of parameters with one of this crate.
    hooked: usize,
}

impl ModuleVisitor for Seen {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == "Reparameterization" {
            if name == crate::hook::NAME || name == Probe::NAME {
                self.hooked += 1;
                if let Some(last) = self.all.last_mut() {
                    last.is_statistic = false;
                }
            } else {
                self.foreign.get_or_insert(self.path.join("."));
            }
        }
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.all.push(Described {
            path: self.path.join("."),
            id: param.id,
            shape: param.lazy_shape().as_slice().to_vec(),
            is_statistic: true,
            split: announced(),
        });
    }
}

#[cfg(feature = "learner")]
struct EachFloat<F> {
    path: Vec<String>,
    see: F,
}

#[cfg(feature = "learner")]
impl<F: FnMut(&str, ParamId, &dyn Fn() -> bool)> ModuleVisitor for EachFloat<F> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        (self.see)(&self.path.join("."), param.id, &|| param.base().is_require_grad());
    }
}

/// Looks for burn's layers that draw random numbers, by their flags that say whether they do.
#[derive(Default)]
struct Draws {
    path: Vec<String>,
    /// The type whose field is visited.
    container: String,
    found: Option<String>,
}

impl ModuleVisitor for Draws {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push(name.to_owned());
        container.clone_into(&mut self.container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        let draws = ["Struct:Dropout", "Struct:GaussianNoise", "Struct:RRelu"].contains(&self.container.as_str());
        if draws && flag.is_enabled() && self.found.is_none() {
            self.found = Some(self.path[..self.path.len().saturating_sub(1)].join("."));
        }
    }
}

struct Reader {
    values: Result<Vec<BurnTensor>>,
}

impl ModuleVisitor for Reader {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Ok(values) = &mut self.values {
            match flex_of(param.base()) {
                Ok(flex) => values.push(BurnTensor::new(flex)),
                Err(error) => self.values = Err(error.into()),
            }
        }
    }
}

/// Marks parameters, so that they can be told from running statistics.
struct Probe;

impl Probe {
    const NAME: &'static str = "distribute-probe";
}

#[derive(Module, Debug)]
struct Mark {
    #[module(skip)]
    _unit: (),
}

impl Reparameterization for Mark {
    const NAME: &'static str = Probe::NAME;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base
    }
}

impl Reparameterizer for Probe {
    type Reparam = Mark;

    fn reparameterize<const D: usize>(&mut self, _: &str, param: Param<Tensor<D>>) -> (Param<Tensor<D>>, Option<Mark>) {
        (param, Some(Mark { _unit: () }))
    }
}
