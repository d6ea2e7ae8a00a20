//! Tests of the table of operations: it has every variant of burn's enums, and documentation has the same text.

use std::fmt;
use std::path::Path;

use burn_ir::{
    ActivationOperationIr, BaseOperationIr, BoolOperationIr, DistributedOperationIr, FloatOperationIr, IntOperationIr,
    ModuleOperationIr, NumericOperationIr, OperationIr,
};
use distribute_burn_hlo::OPERATIONS;
use serde::de::{Deserialize, Deserializer, Visitor};

/// Keeps the names of an enum's variants, which serde passes to the deserializer.
struct Variants<'a>(&'a mut Vec<&'static str>);

/// Ends deserialization when the names are known.
#[derive(Debug)]
struct Known;

impl fmt::Display for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the names are known")
    }
}

impl std::error::Error for Known {}

impl serde::de::Error for Known {
    fn custom<T: fmt::Display>(_: T) -> Known {
        Known
    }
}

impl<'de> Deserializer<'de> for Variants<'_> {
    type Error = Known;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Known> {
        Err(Known)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Known> {
        self.0.extend_from_slice(variants);
        Err(Known)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

/// Returns the names of the variants of an enum.
fn variants<T: for<'de> Deserialize<'de>>() -> Vec<&'static str> {
    let mut names = Vec::new();
    assert!(T::deserialize(Variants(&mut names)).is_err());
    names
}

#[test]
fn the_table_has_every_operation_once() {
    let groups = [
        ("Base", variants::<BaseOperationIr>()),
        ("Numeric", variants::<NumericOperationIr>()),
        ("Float", variants::<FloatOperationIr>()),
        ("Int", variants::<IntOperationIr>()),
        ("Bool", variants::<BoolOperationIr>()),
        ("Activation", variants::<ActivationOperationIr>()),
        ("Module", variants::<ModuleOperationIr>()),
        ("Distributed", variants::<DistributedOperationIr>()),
    ];
    let outer = [
        "BaseFloat",
        "BaseInt",
        "BaseBool",
        "NumericFloat",
        "NumericInt",
        "Bool",
        "Int",
        "Float",
        "Module",
        "Init",
        "Custom",
        "Drop",
        "Distributed",
        "Activation",
    ];
    assert_eq!(variants::<OperationIr>(), outer);
    let mut expected: Vec<String> = ["Init", "Custom", "Drop"].map(str::to_owned).to_vec();
    for (group, names) in groups {
        expected.extend(names.iter().map(|name| format!("{group}({name})")));
    }
    let mut found: Vec<String> = OPERATIONS.iter().map(|(name, _)| (*name).to_owned()).collect();
    expected.sort();
    found.sort();
    assert_eq!(found, expected);
}

#[test]
fn documentation_has_the_table() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/burn_operations.md");
    let mut text = HEAD.to_owned();
    for (name, lowering) in OPERATIONS {
        text.push_str(&format!("| `{name}` | {lowering} |\n"));
    }
    let found = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(found == text, "{} is not the table of OPERATIONS; replace it by:\n{text}", file.display());
}

const HEAD: &str = "# Operations of burn in programs

The operations that burn's capture backend records, and the operations of StableHLO that each becomes. A refused one is
an error before anything is compiled. Indices that are an input of a step, or views of one, are compared with their
dimension before each step of `TpuStrategy`; indices that a program computes are not. The table is
`distribute_burn_hlo::OPERATIONS`; a test compares both.

| operation | in a program |
|---|---|
";
