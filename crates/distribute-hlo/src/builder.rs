//! The builder of programs.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::program::{Operation, Parameter, Program, Region, ValueId};
use crate::{Error, OpKind, Precision, Result, TensorType};

/// A handle on a value of the builder that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Value {
    /// The number of the builder.
    builder: u64,
    /// The number of the value.
    id: ValueId,
}

impl Value {
    /// Returns the number of the value in its program.
    pub const fn id(self) -> ValueId {
        self.id
    }
}

/// Builds a program, one operation at a time. Each method checks types and sizes, and returns the result's handle.
///
/// Nothing is folded, simplified or removed: compilers do so.
///
/// # Examples
/// ```
/// use distribute_hlo::{Builder, ElementType, TensorType};
/// let mut b = Builder::new("line");
/// let ty = TensorType::new(ElementType::F32, [4]);
/// let (x, y) = (b.parameter(ty.clone()), b.parameter(ty));
/// let two = b.splat(&[4], 2.0f32)?;
/// let doubled = b.multiply(x, two)?;
/// let sum = b.add(doubled, y)?;
/// let program = b.finish(&[sum])?;
/// assert!(program.text().contains("stablehlo.add"));
/// # Ok::<(), distribute_hlo::Error>(())
/// ```
#[derive(Debug)]
pub struct Builder {
    id: u64,
    name: String,
    replicas: usize,
    precision: Precision,
    parameters: Vec<Parameter>,
    /// The type of each value, and the number of the region that made it.
    values: Vec<(TensorType, u32)>,
    /// The regions that are being built, from the main function to the innermost.
    open: Vec<Open>,
    /// The number of regions made so far.
    regions: u32,
    /// The number of replicas for which the first collective was added.
    exchanged: Option<usize>,
}

/// A region that is being built.
#[derive(Debug)]
struct Open {
    number: u32,
    region: Region,
}

impl Builder {
    /// Creates a builder of a program of one replica. Characters of the name other than ASCII letters, digits and
    /// underscores are replaced.
    pub fn new(name: &str) -> Builder {
        let mut name: String =
            name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '_' }).collect();
        if !name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
            name.insert(0, '_');
        }
        Builder {
            id: NEXT_BUILDER.fetch_add(1, Ordering::Relaxed),
            name,
            replicas: 1,
            precision: Precision::default(),
            parameters: Vec::new(),
            values: Vec::new(),
            open: vec![Open { number: 0, region: Region::default() }],
            regions: 1,
            exchanged: None,
        }
    }

    /// Sets the number of replicas that run the program together, before collectives are added: their sizes depend on
    /// it. [`Builder::finish`] refuses a number that was changed after them.
    #[must_use]
    pub fn replicas(mut self, replicas: usize) -> Builder {
        self.replicas = replicas;
        self
    }

    /// Sets the precision of the products and convolutions that follow.
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> Builder {
        self.precision = precision;
        self
    }

    /// Sets the precision of the products and convolutions that follow.
    pub fn set_precision(&mut self, precision: Precision) {
        self.precision = precision;
    }

    /// Returns the number of replicas.
    pub fn num_replicas(&self) -> usize {
        self.replicas
    }

    /// Adds a parameter of the program, also inside a body of a `while_loop` or `if_else`.
    pub fn parameter(&mut self, ty: TensorType) -> Value {
        self.add_parameter(ty, false)
    }

    /// Adds a parameter whose buffer the caller gives up. [`Builder::alias`] fixes the output that is written into it;
    /// without one the compiler chooses.
    pub fn donated_parameter(&mut self, ty: TensorType) -> Value {
        self.add_parameter(ty, true)
    }

    /// Lets an output be written into the buffer of a donated parameter.
    ///
    /// # Errors
    /// [`Error::Operation`] if the value is not a donated parameter, or has an alias. [`Builder::finish`] compares the
    /// types.
    pub fn alias(&mut self, parameter: Value, output: usize) -> Result<()> {
        self.check("alias", &[parameter])?;
        let place = self.open.first().and_then(|main| main.region.parameters.iter().position(|&p| p == parameter.id));
        let problem = match place.and_then(|place| self.parameters.get_mut(place)) {
            Some(found) if !found.donated => "it keeps its buffer; add it by donated_parameter".to_owned(),
            Some(Parameter { alias: Some(other), .. }) => format!("output {other} is written into it already"),
            Some(found) => {
                found.alias = Some(output);
                return Ok(());
            }
            None => "it is the result of an operation; pass a donated parameter".to_owned(),
        };
        Err(self.refuse("alias", &[("value", parameter)], problem))
    }

    /// Returns the type of a value.
    ///
    /// # Errors
    /// [`Error::ForeignValue`] and [`Error::OutOfScope`].
    pub fn type_of(&self, value: Value) -> Result<&TensorType> {
        self.typed("type_of", value)
    }

    /// Ends the program, which returns these values.
    ///
    /// # Errors
    /// [`Error::Program`] if it has 0 replicas, or another number than that of its collectives, or an alias names an
    /// output that does not exist, has another type or is named twice; [`Error::TooLarge`] for a parameter;
    /// [`Error::ForeignValue`] and [`Error::OutOfScope`].
    pub fn finish(mut self, outputs: &[Value]) -> Result<Program> {
        self.check("finish", outputs)?;
        if self.replicas == 0 || i32::try_from(self.replicas).is_err() {
            let problem = format!("it has {} replicas; expected 1 to {}", self.replicas, i32::MAX);
            return Err(self.program_error(problem));
        }
        if let Some(others) = self.exchanged.filter(|&others| others != self.replicas) {
            let problem = format!(
                "it has {} replicas, and collectives were added for {others}; set replicas before collectives",
                self.replicas
            );
            return Err(self.program_error(problem));
        }
        for parameter in &self.parameters {
            fits("parameter", &parameter.ty)?;
        }
        self.check_aliases(outputs)?;
        let mut body = self.open.pop().map(|open| open.region).unwrap_or_default();
        body.results = outputs.iter().map(|value| value.id).collect();
        let types = self.values.into_iter().map(|(ty, _)| ty).collect();
        Ok(Program::new(self.name, self.replicas, self.parameters, types, body))
    }

    /// Compares aliases with outputs.
    fn check_aliases(&self, outputs: &[Value]) -> Result<()> {
        let mut used = Vec::new();
        for (place, parameter) in self.parameters.iter().enumerate() {
            let Some(output) = parameter.alias else { continue };
            let Some(&value) = outputs.get(output) else {
                return Err(self.program_error(format!(
                    "output {output} is to be written into parameter {place}, and there are {} outputs",
                    outputs.len()
                )));
            };
            let ty = self.typed("finish", value)?;
            if *ty != parameter.ty {
                return Err(self.program_error(format!(
                    "output {output} is {} and is to be written into parameter {place}, which is {}; alias values of \
                     one type",
                    ty.short(),
                    parameter.ty.short()
                )));
            }
            if used.contains(&output) {
                return Err(self.program_error(format!("output {output} is to be written into two parameters")));
            }
            used.push(output);
        }
        Ok(())
    }

    /// Adds a parameter to the main function.
    fn add_parameter(&mut self, ty: TensorType, donated: bool) -> Value {
        self.parameters.push(Parameter { ty: ty.clone(), donated, alias: None });
        let value = self.new_value(ty, 0);
        if let Some(main) = self.open.first_mut() {
            main.region.parameters.push(value.id);
        }
        value
    }

    /// Makes a handle.
    fn new_value(&mut self, ty: TensorType, region: u32) -> Value {
        let id = ValueId(u32::try_from(self.values.len()).unwrap_or(u32::MAX));
        self.values.push((ty, region));
        Value { builder: self.id, id }
    }

    /// Checks that values are this builder's and visible here.
    pub(crate) fn check(&self, operation: &'static str, values: &[Value]) -> Result<()> {
        for (operand, value) in values.iter().enumerate() {
            if value.builder != self.id {
                return Err(Error::ForeignValue { operation, operand });
            }
            let region = self.values.get(value.id.index()).map(|(_, region)| *region);
            if !self.open.iter().any(|open| Some(open.number) == region) {
                return Err(Error::OutOfScope { operation, operand });
            }
        }
        Ok(())
    }

    /// Returns the type of an operand.
    pub(crate) fn typed(&self, operation: &'static str, value: Value) -> Result<&TensorType> {
        self.check(operation, &[value])?;
        let found = self.values.get(value.id.index()).map(|(ty, _)| ty);
        found.ok_or(Error::OutOfScope { operation, operand: 0 })
    }

    /// Returns the types of operands, after a check of all.
    pub(crate) fn types<const N: usize>(&self, operation: &'static str, values: [Value; N]) -> Result<[TensorType; N]> {
        self.check(operation, &values)?;
        Ok(values.map(|value| self.values[value.id.index()].0.clone()))
    }

    /// Makes the error of an operation.
    pub(crate) fn refuse(
        &self,
        operation: &'static str,
        operands: &[(&str, Value)],
        problem: impl Into<String>,
    ) -> Error {
        let mut given = String::new();
        for (place, (name, value)) in operands.iter().enumerate() {
            let separator = if place == 0 { "" } else { ", " };
            // Writing to a string does not fail.
            let _ = match self.values.get(value.id.index()) {
                Some((ty, _)) => write!(given, "{separator}{name} is {}", ty.short()),
                None => write!(given, "{separator}{name} is unknown"),
            };
        }
        if given.is_empty() {
            given.push_str("no operands");
        }
        Error::Operation { operation, given, problem: problem.into() }
    }

    /// Makes an error of the whole program.
    fn program_error(&self, problem: String) -> Error {
        Error::Program { program: self.name.clone(), problem }
    }

    /// Returns the precision of products.
    pub(crate) fn current_precision(&self) -> Precision {
        self.precision
    }

    /// Adds an operation with one result.
    pub(crate) fn push(&mut self, kind: OpKind, operands: &[Value], result: TensorType) -> Result<Value> {
        let name = kind.name();
        let results = self.push_all(kind, operands, vec![result], Vec::new())?;
        results.first().copied().ok_or(Error::OutOfScope { operation: name, operand: 0 })
    }

    /// Adds an operation.
    pub(crate) fn push_all(
        &mut self,
        kind: OpKind,
        operands: &[Value],
        results: Vec<TensorType>,
        regions: Vec<Region>,
    ) -> Result<Vec<Value>> {
        self.check(kind.name(), operands)?;
        for ty in &results {
            fits(kind.name(), ty)?;
        }
        if kind.is_collective() && *self.exchanged.get_or_insert(self.replicas) != self.replicas {
            return Err(self.program_error("the number of replicas was changed after a collective".to_owned()));
        }
        let number = self.open.last().map_or(0, |open| open.number);
        let results: Vec<Value> = results.into_iter().map(|ty| self.new_value(ty, number)).collect();
        let operation = Operation {
            kind,
            operands: operands.iter().map(|value| value.id).collect(),
            results: results.iter().map(|value| value.id).collect(),
            regions,
        };
        if let Some(open) = self.open.last_mut() {
            open.region.operations.push(operation);
        }
        Ok(results)
    }

    /// Builds a region with a closure, which gets the region's parameters and returns its results. Returns the region
    /// and the types of the results.
    pub(crate) fn region(
        &mut self,
        operation: &'static str,
        parameters: &[TensorType],
        build: impl FnOnce(&mut Builder, &[Value]) -> Result<Vec<Value>>,
    ) -> Result<(Region, Vec<TensorType>)> {
        let number = self.regions;
        self.regions += 1;
        self.open.push(Open { number, region: Region::default() });
        let values: Vec<Value> = parameters.iter().map(|ty| self.new_value(ty.clone(), number)).collect();
        let built = build(self, &values).and_then(|results| {
            self.check(operation, &results)?;
            let types = results.iter().map(|&value| self.typed(operation, value).cloned()).collect::<Result<_>>()?;
            Ok((results, types))
        });
        // It is closed after an error too, so that the builder remains usable.
        let mut region = self.open.pop().map(|open| open.region).unwrap_or_default();
        let (results, types): (Vec<Value>, Vec<TensorType>) = built?;
        region.parameters = values.iter().map(|value| value.id).collect();
        region.results = results.iter().map(|value| value.id).collect();
        Ok((region, types))
    }
}

/// Checks that the bytes of a tensor can be counted, as those of MLIR's signed sizes.
fn fits(operation: &'static str, ty: &TensorType) -> Result<()> {
    let sizes = ty.dims.iter().all(|&dim| i64::try_from(dim).is_ok());
    match ty.size_bytes() {
        Some(bytes) if sizes && i64::try_from(bytes).is_ok() => Ok(()),
        _ => Err(Error::TooLarge { operation, ty: ty.clone() }),
    }
}

/// The number of the next builder.
static NEXT_BUILDER: AtomicU64 = AtomicU64::new(0);
