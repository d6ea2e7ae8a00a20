//! Regions of reductions, scatters and sorts, which follow from their attributes.
//!
//! Names in them may be those of other such regions, but not of values around them, which are numbers.

use std::fmt::{self, Write as _};

use super::attributes::comparison_type;
use crate::{ElementType, OpKind, Reducer, SortOrder, TensorType};

/// Prints the regions of an operation with operands of these element types, if it has any.
pub(super) fn print(out: &mut String, kind: &OpKind, operands: &[ElementType]) -> fmt::Result {
    let Some(&element) = operands.first() else { return Ok(()) };
    match kind {
        OpKind::Reduce { reducer, .. }
        | OpKind::ReduceWindow { reducer, .. }
        | OpKind::AllReduce { reducer, .. }
        | OpKind::ReduceScatter { reducer, .. } => combine(out, Some(*reducer), element),
        OpKind::Scatter { combiner, .. } => combine(out, *combiner, element),
        OpKind::ArgReduce { largest, .. } => {
            let index = operands.get(1).copied().unwrap_or(ElementType::I64);
            extreme(out, *largest, element, index)
        }
        OpKind::SelectAndScatter { .. } => {
            let ty = TensorType::scalar(element);
            write!(out, " ({{^bb0(%lhs: {ty}, %rhs: {ty}): %picked = ")?;
            compared(out, "GE", element, "%lhs", "%rhs", false)?;
            write!(out, " \"stablehlo.return\"(%picked) : (tensor<i1>) -> ()}}, {{^bb0(%lhs: {ty}, %rhs: {ty}): ")?;
            combined(out, Some(Reducer::Sum), element)?;
            out.push_str("})");
            Ok(())
        }
        OpKind::Sort { order, .. } => sorted(out, *order, operands),
        _ => Ok(()),
    }
}

/// Prints a region that combines two elements.
fn combine(out: &mut String, reducer: Option<Reducer>, element: ElementType) -> fmt::Result {
    let ty = TensorType::scalar(element);
    write!(out, " ({{^bb0(%lhs: {ty}, %rhs: {ty}): ")?;
    combined(out, reducer, element)?;
    out.push_str("})");
    Ok(())
}

/// Prints the operations that combine two elements; without a reducer the second replaces the first.
fn combined(out: &mut String, reducer: Option<Reducer>, element: ElementType) -> fmt::Result {
    let ty = TensorType::scalar(element);
    match reducer {
        Some(reducer) => write!(
            out,
            "%both = \"stablehlo.{}\"(%lhs, %rhs) : ({ty}, {ty}) -> ({ty}) \"stablehlo.return\"(%both) : ({ty}) -> ()",
            reducer.binary().name()
        ),
        None => write!(out, "\"stablehlo.return\"(%rhs) : ({ty}) -> ()"),
    }
}

/// Prints a comparison of two scalars.
fn compared(
    out: &mut String,
    relation: &str,
    element: ElementType,
    lhs: &str,
    rhs: &str,
    total_order: bool,
) -> fmt::Result {
    let (kind, ty) = (comparison_type(element, total_order), TensorType::scalar(element));
    write!(
        out,
        "\"stablehlo.compare\"({lhs}, {rhs}) {{comparison_direction = #stablehlo<comparison_direction \
         {relation}>, compare_type = {kind}}} : ({ty}, {ty}) -> (tensor<i1>)"
    )
}

/// Prints a region that keeps the more extreme of two values, with its index. It is associative and commutative: NaN
/// comes before any number, and of equal values the one of the lower index.
fn extreme(out: &mut String, largest: bool, value: ElementType, index: ElementType) -> fmt::Result {
    let (v, i) = (TensorType::scalar(value), TensorType::scalar(index));
    write!(out, " ({{^bb0(%lv: {v}, %li: {i}, %rv: {v}, %ri: {i}): ")?;
    let mut compare = |name: &str, relation: &str, element, lhs: &str, rhs: &str| {
        write!(out, "%{name} = ")?;
        compared(out, relation, element, lhs, rhs, false)?;
        out.push(' ');
        Ok::<(), fmt::Error>(())
    };
    compare("more", if largest { "GT" } else { "LT" }, value, "%lv", "%rv")?;
    compare("equal", "EQ", value, "%lv", "%rv")?;
    compare("lnan", "NE", value, "%lv", "%lv")?;
    compare("rnan", "NE", value, "%rv", "%rv")?;
    compare("earlier", "LT", index, "%li", "%ri")?;
    let steps = [
        ("rnumber", "not", "%rnan"),
        ("only", "and", "%lnan, %rnumber"),
        ("better", "or", "%more, %only"),
        ("nans", "and", "%lnan, %rnan"),
        ("same", "or", "%equal, %nans"),
        ("tied", "and", "%same, %earlier"),
        ("left", "or", "%better, %tied"),
    ];
    for (name, op, operands) in steps {
        let types = if op == "not" { "tensor<i1>" } else { "tensor<i1>, tensor<i1>" };
        write!(out, "%{name} = \"stablehlo.{op}\"({operands}) : ({types}) -> (tensor<i1>) ")?;
    }
    write!(
        out,
        "%v = \"stablehlo.select\"(%left, %lv, %rv) : (tensor<i1>, {v}, {v}) -> ({v}) \
         %i = \"stablehlo.select\"(%left, %li, %ri) : (tensor<i1>, {i}, {i}) -> ({i}) \
         \"stablehlo.return\"(%v, %i) : ({v}, {i}) -> ()}})"
    )
}

/// Prints the comparator of a sort: two scalars of each operand, of which the first two are compared.
fn sorted(out: &mut String, order: SortOrder, operands: &[ElementType]) -> fmt::Result {
    out.push_str(" ({^bb0(");
    for (place, element) in operands.iter().enumerate() {
        let (separator, ty) = (if place == 0 { "" } else { ", " }, TensorType::scalar(*element));
        write!(out, "{separator}%l{place}: {ty}, %r{place}: {ty}")?;
    }
    out.push_str("): %before = ");
    let relation = match order {
        SortOrder::Ascending => "LT",
        SortOrder::Descending => "GT",
    };
    compared(out, relation, operands[0], "%l0", "%r0", operands[0].is_float())?;
    out.push_str(" \"stablehlo.return\"(%before) : (tensor<i1>) -> ()})");
    Ok(())
}
