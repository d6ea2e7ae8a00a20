//! The functions and datasets that all tasks of a cluster share by name.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use distribute_input::{Dataset, DatasetIter, InputContext};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::BoxError;
use crate::{Error, Result, WorkerContext, message};

/// The functions that a coordinator schedules and workers run, and the datasets that they read.
///
/// A closure cannot be sent from one process to another, so functions have names, and every task runs the same binary.
///
/// # Examples
/// ```
/// use distribute_parameter_server::{Error, Program, WorkerContext};
///
/// fn double(_: &WorkerContext, x: f64) -> Result<f64, Error> {
///     Ok(2.0 * x)
/// }
///
/// let program = Program::new().function("double", double);
/// assert_eq!(program.functions().collect::<Vec<_>>(), ["double"]);
/// ```
///
/// # Source
/// The `tf.function`s that `ClusterCoordinator.schedule` takes.
#[derive(Clone, Default)]
pub struct Program {
    functions: BTreeMap<String, Function>,
    datasets: BTreeMap<String, DatasetFunction>,
}

/// A function with its types erased.
#[derive(Clone)]
pub(crate) struct Function {
    run: Arc<Run>,
    check: fn(&[u8]) -> Result<(), BoxError>,
}

type Run = dyn Fn(&WorkerContext, &[u8]) -> Result<Vec<u8>, Failed> + Send + Sync;

type DatasetFunction = Arc<dyn Fn(&InputContext) -> Result<Box<dyn Any + Send>, BoxError> + Send + Sync>;

/// Why a function has no result.
pub(crate) enum Failed {
    /// An error of the framework: the function was not called, or a server is lost.
    Ours(Error),
    Theirs(BoxError),
}

impl Program {
    /// Creates a program without functions.
    pub fn new() -> Program {
        Program::default()
    }

    /// Adds a function, or replaces one. Arguments and results are serialized by serde; the arguments may be a
    /// [`PerWorkerIterator`](crate::PerWorkerIterator), or a tuple of several values.
    pub fn function<A, R, E>(
        mut self,
        name: &str,
        function: impl Fn(&WorkerContext, A) -> Result<R, E> + Send + Sync + 'static,
    ) -> Program
    where
        A: DeserializeOwned,
        R: Serialize,
        E: Into<BoxError>,
    {
        let run = move |context: &WorkerContext, bytes: &[u8]| {
            let wrong = |what: &str| {
                let what = what.to_owned();
                move |source| Failed::Ours(Error::Value { what, source })
            };
            let arguments = message::decode(bytes).map_err(wrong("its arguments"))?;
            let result = function(context, arguments).map_err(|error| Failed::Theirs(error.into()))?;
            message::encode(&result).map_err(wrong("its result"))
        };
        let check = |bytes: &[u8]| message::decode::<A>(bytes).map(drop);
        self.functions.insert(name.to_owned(), Function { run: Arc::new(run), check });
        self
    }

    /// Adds a dataset, which each worker creates for its own index. It should repeat: when a worker's elements are
    /// exhausted, [`WorkerContext::next`] returns an error.
    pub fn dataset<T, E>(
        mut self,
        name: &str,
        make: impl Fn(&InputContext) -> Result<Dataset<T>, E> + Send + Sync + 'static,
    ) -> Program
    where
        T: Send + 'static,
        E: Into<BoxError>,
    {
        let make = move |context: &InputContext| {
            let dataset = make(context).map_err(Into::into)?;
            let iterator: DatasetIter<T> = dataset.iter();
            Ok(Box::new(iterator) as Box<dyn Any + Send>)
        };
        self.datasets.insert(name.to_owned(), Arc::new(make));
        self
    }

    /// Returns the names of the functions.
    pub fn functions(&self) -> impl Iterator<Item = &str> {
        self.functions.keys().map(String::as_str)
    }

    /// Returns the names of the datasets.
    pub fn datasets(&self) -> impl Iterator<Item = &str> {
        self.datasets.keys().map(String::as_str)
    }

    pub(crate) fn find(&self, name: &str) -> Result<&Function> {
        self.functions.get(name).ok_or_else(|| unknown("function", name, self.functions()))
    }

    pub(crate) fn check_dataset(&self, name: &str) -> Result<()> {
        self.datasets.get(name).map(drop).ok_or_else(|| unknown("dataset", name, self.datasets()))
    }

    /// Creates a worker's iterator.
    pub(crate) fn make_dataset(&self, name: &str, context: &InputContext) -> Result<Box<dyn Any + Send>, BoxError> {
        let make = self.datasets.get(name).ok_or_else(|| unknown("dataset", name, self.datasets()))?;
        make(context)
    }

    /// Returns the first of these names that this program does not have.
    pub(crate) fn missing<'a>(&self, functions: &'a [String], datasets: &'a [String]) -> Option<&'a str> {
        let missing = functions.iter().find(|name| !self.functions.contains_key(*name));
        missing.or_else(|| datasets.iter().find(|name| !self.datasets.contains_key(*name))).map(String::as_str)
    }
}

impl Function {
    /// Checks that the arguments fit the function.
    pub(crate) fn check(&self, arguments: &[u8]) -> Result<(), BoxError> {
        (self.check)(arguments)
    }

    pub(crate) fn run(&self, context: &WorkerContext, arguments: &[u8]) -> Result<Vec<u8>, Failed> {
        (self.run)(context, arguments)
    }
}

impl From<String> for Failed {
    /// Converts the message of a panic.
    fn from(panic: String) -> Failed {
        Failed::Theirs(panic.into())
    }
}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let functions: Vec<_> = self.functions().collect();
        let datasets: Vec<_> = self.datasets().collect();
        f.debug_struct("Program").field("functions", &functions).field("datasets", &datasets).finish()
    }
}

fn unknown<'a>(kind: &'static str, name: &str, known: impl Iterator<Item = &'a str>) -> Error {
    let known: Vec<&str> = known.collect();
    let near = known.iter().map(|known| (strsim::jaro_winkler(known, name), *known)).max_by(|a, b| a.0.total_cmp(&b.0));
    let suggestion = match near {
        Some((likeness, near)) if likeness > 0.8 => format!("; did you mean {near:?}?"),
        _ => String::new(),
    };
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    Error::UnknownName { kind, name: name.to_owned(), known, suggestion }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_is_answered_with_the_nearest() {
        let program = Program::new().function("train_step", |_: &WorkerContext, x: u32| Ok::<_, Error>(x));
        let error = program.find("train_stpe").err().unwrap().to_string();
        assert!(error.contains("did you mean \"train_step\"?"), "{error}");
        let error = program.check_dataset("x").unwrap_err().to_string();
        assert!(error.contains("no dataset \"x\"; it has none"), "{error}");
        assert_eq!(program.missing(&["train_step".to_owned(), "b".to_owned()], &[]), Some("b"));
    }

    #[test]
    fn arguments_of_other_types_are_noticed() {
        let program = Program::new().function("f", |_: &WorkerContext, x: (String, u32)| Ok::<_, Error>(x.1));
        let function = program.find("f").unwrap();
        function.check(&message::encode(&("a", 7u32)).unwrap()).unwrap();
        assert!(function.check(&message::encode(&1.5f64).unwrap()).is_err());
    }
}
