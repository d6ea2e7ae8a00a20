//! `distribute manifest` as users and platforms see it: each task finds its place by the printed file, the files are
//! valid by the published schemas, and no text of a user becomes something else.

mod compose;
mod kubernetes;
mod options;
mod places;
mod schema;
mod slurm;
mod texts;

use std::collections::BTreeMap;
use std::process::{Command, Output};

use distribute_cluster::Membership;
use serde_json::Value;

/// The environment of a task.
type Environment = BTreeMap<String, String>;

fn call(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_distribute")).arg("manifest").args(args).output().unwrap()
}

/// Prints a job file of a program.
fn print(kind: &str, flags: &[&str], program: &[&str]) -> String {
    let output = call(&[&[kind], flags, &["--"], program].concat());
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && errors.is_empty(), "{kind} {flags:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the documents of a file. A key that is given twice is an error.
fn documents(text: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Returns the only document of a file.
fn document(text: &str) -> Value {
    let mut all = documents(text);
    assert_eq!(all.len(), 1, "{text}");
    all.remove(0)
}

/// Returns what the program reads from its environment.
fn membership(environment: &Environment) -> Membership {
    let found = Membership::from_vars(|name| environment.get(name).cloned());
    found.unwrap_or_else(|error| panic!("{error}\n{environment:#?}")).unwrap_or_else(|| panic!("{environment:#?}"))
}

/// Returns a text of a document.
fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_else(|| panic!("no text {pointer} in {value:#}"))
}

/// Returns a list of a document.
fn list<'a>(value: &'a Value, pointer: &str) -> &'a [Value] {
    value.pointer(pointer).and_then(Value::as_array).unwrap_or_else(|| panic!("no list {pointer} in {value:#}"))
}
