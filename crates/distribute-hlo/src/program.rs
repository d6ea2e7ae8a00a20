//! A finished program.

use std::collections::BTreeMap;

use distribute_types::{FNV128, fnv1a_128};

use crate::{OpKind, TensorType, print};

/// The number of a value in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub(crate) u32);

impl ValueId {
    /// Returns the number, from 0 without gaps.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// An operation: a kind, operands and results.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// The kind, with the attributes.
    pub kind: OpKind,
    /// The operands.
    pub operands: Vec<ValueId>,
    /// The results, in the order of their numbers.
    pub results: Vec<ValueId>,
    /// The regions: condition and body of a `while`, the two branches of an `if`; empty for all others.
    pub regions: Vec<Region>,
}

/// A list of operations with parameters and results. It may use values of the regions around it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Region {
    /// The parameters: those of the program, or the state of a `while`.
    pub parameters: Vec<ValueId>,
    /// The operations, each after those whose results it uses.
    pub operations: Vec<Operation>,
    /// The values that it returns.
    pub results: Vec<ValueId>,
}

/// A parameter of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// The type.
    pub ty: TensorType,
    /// Whether the caller gives up the buffer, so that results may be written into it.
    pub donated: bool,
    /// The output that is written into the buffer, if one is fixed.
    pub alias: Option<usize>,
}

/// A finished program: operations as data, and their text.
///
/// # Examples
/// ```
/// use distribute_hlo::{Builder, CollectiveGroups, ElementType, Reducer, TensorType};
/// let mut b = Builder::new("sum").replicas(2);
/// let x = b.parameter(TensorType::new(ElementType::F32, [4]));
/// let sum = b.all_reduce(x, Reducer::Sum, &CollectiveGroups::All)?;
/// let program = b.finish(&[sum])?;
/// assert_eq!(program.count("all_reduce"), 1);
/// assert!(program.text().contains("mhlo.num_replicas = 2 : i32"));
/// # Ok::<(), distribute_hlo::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Program {
    name: String,
    replicas: usize,
    parameters: Vec<Parameter>,
    outputs: Vec<TensorType>,
    types: Vec<TensorType>,
    body: Region,
    text: String,
}

impl Program {
    /// Creates a program and prints it.
    pub(crate) fn new(
        name: String,
        replicas: usize,
        parameters: Vec<Parameter>,
        types: Vec<TensorType>,
        body: Region,
    ) -> Program {
        let outputs = body.results.iter().filter_map(|id| types.get(id.index()).cloned()).collect();
        let mut program = Program { name, replicas, parameters, outputs, types, body, text: String::new() };
        program.text = print::module(&program);
        program
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of replicas.
    pub fn replicas(&self) -> usize {
        self.replicas
    }

    /// Returns the parameters.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Returns the types of the outputs.
    pub fn outputs(&self) -> &[TensorType] {
        &self.outputs
    }

    /// Returns the operations of the main function.
    pub fn body(&self) -> &Region {
        &self.body
    }

    /// Returns the types of all values by their numbers.
    pub fn types(&self) -> &[TensorType] {
        &self.types
    }

    /// Returns the program as textual MLIR in the StableHLO dialect, the format "mlir" of PJRT. Two programs that were
    /// built by the same calls have the same text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns a hash of the text, the key of a cache of compiled programs. It is not collision resistant: compare the
    /// text too where a program may be an attacker's.
    pub fn fingerprint(&self) -> u128 {
        fnv1a_128(FNV128, self.text.bytes())
    }

    /// Returns all operations, those of regions after the operation that has them.
    pub fn operations(&self) -> impl Iterator<Item = &Operation> {
        let mut found = Vec::new();
        collect(&self.body, &mut found);
        found.into_iter()
    }

    /// Returns the number of operations of a name in StableHLO, such as `all_reduce`.
    pub fn count(&self, name: &str) -> usize {
        self.operations().filter(|operation| operation.kind.name() == name).count()
    }

    /// Returns the number of operations of each name that occurs.
    pub fn counts(&self) -> BTreeMap<&'static str, usize> {
        let mut counts = BTreeMap::new();
        for operation in self.operations() {
            *counts.entry(operation.kind.name()).or_insert(0) += 1;
        }
        counts
    }
}

/// Appends the operations of a region and of the regions inside it.
fn collect<'a>(region: &'a Region, found: &mut Vec<&'a Operation>) {
    for operation in &region.operations {
        found.push(operation);
        for inner in &operation.regions {
            collect(inner, found);
        }
    }
}
