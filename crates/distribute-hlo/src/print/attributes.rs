//! Attributes of operations in MLIR.

use std::fmt::Display;

use crate::{
    CollectiveGroups, Convolution, DotDimensions, ElementType, GatherDimensions, Literal, OpKind, Precision,
    ScatterDimensions, TensorType, Window,
};

/// An attribute: its name and its value.
type Attribute = (&'static str, String);

/// Returns the type of a comparison. Without one, compilers compare constants that are signed integers by their bits,
/// as if they were unsigned.
pub(super) fn comparison_type(element: ElementType, total_order: bool) -> String {
    let name = match element {
        _ if total_order => "TOTALORDER",
        element if element.is_float() => "FLOAT",
        element if element.is_signed_integer() => "SIGNED",
        _ => "UNSIGNED",
    };
    format!("#stablehlo<comparison_type {name}>")
}

/// Returns the attributes of an operation of a program with this number of replicas. Its first operand has elements of
/// type `element`.
pub(super) fn of(kind: &OpKind, element: Option<ElementType>, replicas: usize) -> Vec<Attribute> {
    match kind {
        OpKind::Constant(literal) => vec![("value", constant(literal))],
        OpKind::Iota { dimension } => vec![("iota_dimension", int(dimension))],
        OpKind::Compare { relation, total_order } => {
            let direction = format!("#stablehlo<comparison_direction {}>", relation.name());
            let mut attributes = vec![("comparison_direction", direction)];
            attributes.extend(element.map(|element| ("compare_type", comparison_type(element, *total_order))));
            attributes
        }
        OpKind::BroadcastInDim { dimensions } => vec![("broadcast_dimensions", ints(dimensions))],
        OpKind::Transpose { permutation } => vec![("permutation", ints(permutation))],
        OpKind::Reverse { dimensions } | OpKind::Reduce { dimensions, .. } => vec![("dimensions", ints(dimensions))],
        OpKind::ArgReduce { dimension, .. } => vec![("dimensions", ints(&[dimension]))],
        OpKind::Slice { start, limit, strides } => {
            vec![("start_indices", ints(start)), ("limit_indices", ints(limit)), ("strides", ints(strides))]
        }
        OpKind::DynamicSlice { sizes } => vec![("slice_sizes", ints(sizes))],
        OpKind::Pad { low, high, interior } => vec![
            ("edge_padding_low", ints(low)),
            ("edge_padding_high", ints(high)),
            ("interior_padding", ints(interior)),
        ],
        OpKind::Concatenate { dimension } => vec![("dimension", int(dimension))],
        OpKind::Gather(dimensions) => gather(dimensions),
        OpKind::Scatter { dimensions, unique_indices, .. } => scatter(dimensions, *unique_indices),
        OpKind::DotGeneral { dimensions, precision } => {
            vec![("dot_dimension_numbers", dot(dimensions)), ("precision_config", precisions(*precision))]
        }
        OpKind::Convolution { convolution, precision } => convolved(convolution, *precision),
        OpKind::ReduceWindow { window, .. } => vec![
            ("window_dimensions", ints(&window.dims)),
            ("window_strides", ints(&window.strides)),
            ("base_dilations", ints(&window.base_dilations)),
            ("window_dilations", ints(&window.window_dilations)),
            ("padding", padding(&window.padding)),
        ],
        OpKind::SelectAndScatter { window } => selected(window),
        OpKind::Sort { dimension, stable, .. } => {
            vec![("dimension", int(dimension)), ("is_stable", stable.to_string())]
        }
        OpKind::RngBitGenerator { algorithm } => {
            vec![("rng_algorithm", format!("#stablehlo<rng_algorithm {}>", algorithm.name()))]
        }
        OpKind::AllReduce { groups, .. } => vec![("replica_groups", replica_groups(groups, replicas))],
        OpKind::AllGather { dimension, groups } => {
            vec![("all_gather_dim", int(dimension)), ("replica_groups", replica_groups(groups, replicas))]
        }
        OpKind::ReduceScatter { dimension, groups, .. } => {
            vec![("scatter_dimension", int(dimension)), ("replica_groups", replica_groups(groups, replicas))]
        }
        OpKind::CollectivePermute { pairs } => {
            let rows: Vec<Vec<usize>> = pairs.iter().map(|&(sender, receiver)| vec![sender, receiver]).collect();
            vec![("source_target_pairs", matrix(&rows, 2))]
        }
        OpKind::AllToAll { split_dimension, concat_dimension, groups } => vec![
            ("split_dimension", int(split_dimension)),
            ("concat_dimension", int(concat_dimension)),
            ("split_count", int(groups.resolve(replicas).first().map_or(0, Vec::len))),
            ("replica_groups", replica_groups(groups, replicas)),
        ],
        OpKind::Unary(_)
        | OpKind::Binary(_)
        | OpKind::Select
        | OpKind::Clamp
        | OpKind::Convert
        | OpKind::BitcastConvert
        | OpKind::Reshape
        | OpKind::DynamicUpdateSlice
        | OpKind::While
        | OpKind::If
        | OpKind::ReplicaId
        | OpKind::OptimizationBarrier => Vec::new(),
    }
}

/// Prints a constant, so that every bit of a floating-point number is kept.
fn constant(literal: &Literal) -> String {
    let ty = literal.ty();
    if ty.elements() == Some(0) {
        return format!("dense<> : {ty}");
    }
    let size = ty.element.size_bytes();
    let value = if literal.is_splat() {
        splat(ty.element, literal.bytes())
    } else if ty.element == ElementType::Bool {
        // The packing of truth values in a string of bytes has changed between versions.
        let mut bytes = literal.bytes();
        nested_truth(&ty.dims, &mut bytes)
    } else if literal.bytes().len() == size {
        splat(ty.element, literal.bytes())
    } else {
        let mut text = String::with_capacity(4 + 2 * literal.bytes().len());
        text.push_str("\"0x");
        hex(&mut text, literal.bytes().iter());
        text.push('"');
        text
    };
    format!("dense<{value}> : {ty}")
}

/// Prints one element.
fn splat(element: ElementType, bytes: &[u8]) -> String {
    let unsigned = bytes.iter().rev().fold(0u64, |number, &byte| number << 8 | u64::from(byte));
    if element == ElementType::Bool {
        return (unsigned != 0).to_string();
    }
    if element.is_float() {
        let mut text = String::from("0x");
        hex(&mut text, bytes.iter().rev());
        return text;
    }
    if element.is_signed_integer() {
        let unused = 64 - element.bits();
        return (((unsigned << unused) as i64) >> unused).to_string();
    }
    unsigned.to_string()
}

/// The digits of a hexadecimal number.
const DIGITS: &[u8; 16] = b"0123456789ABCDEF";

/// Appends two digits for each byte.
fn hex<'a>(text: &mut String, bytes: impl Iterator<Item = &'a u8>) {
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
}

/// Prints truth values as nested lists, and removes them from `bytes`.
fn nested_truth(dims: &[usize], bytes: &mut &[u8]) -> String {
    let Some((&size, inner)) = dims.split_first() else {
        let Some((first, rest)) = bytes.split_first() else { return String::new() };
        *bytes = rest;
        return (*first != 0).to_string();
    };
    let items: Vec<String> = (0..size).map(|_| nested_truth(inner, bytes)).collect();
    format!("[{}]", items.join(", "))
}

/// Prints a 64-bit integer.
fn int(value: impl Display) -> String {
    format!("{value} : i64")
}

/// Prints numbers, separated by commas.
fn join<T: Display>(values: &[T]) -> String {
    values.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

/// Prints an array of integers.
fn ints<T: Display>(values: &[T]) -> String {
    array("i64", values)
}

/// Prints an array.
fn array<T: Display>(element: &str, values: &[T]) -> String {
    if values.is_empty() { format!("array<{element}>") } else { format!("array<{element}: {}>", join(values)) }
}

/// Prints rows of integers as a tensor.
fn matrix<T: Display>(rows: &[Vec<T>], columns: usize) -> String {
    let ty = TensorType::new(ElementType::I64, [rows.len(), columns]);
    if rows.is_empty() || columns == 0 {
        return format!("dense<> : {ty}");
    }
    let rows: Vec<String> = rows.iter().map(|row| format!("[{}]", join(row))).collect();
    format!("dense<[{}]> : {ty}", rows.join(", "))
}

/// Prints padding as a tensor.
fn padding(padding: &[(i64, i64)]) -> String {
    let rows: Vec<Vec<i64>> = padding.iter().map(|&(low, high)| vec![low, high]).collect();
    matrix(&rows, 2)
}

/// Prints groups of replicas as a tensor.
fn replica_groups(groups: &CollectiveGroups, replicas: usize) -> String {
    let groups = groups.resolve(replicas);
    let columns = groups.first().map_or(0, Vec::len);
    matrix(&groups, columns)
}

/// Prints the precision of both operands.
fn precisions(precision: Precision) -> String {
    let one = format!("#stablehlo<precision {}>", precision.name());
    format!("[{one}, {one}]")
}

fn dot(dims: &DotDimensions) -> String {
    format!(
        "#stablehlo.dot<lhs_batching_dimensions = [{}], rhs_batching_dimensions = [{}], lhs_contracting_dimensions = \
         [{}], rhs_contracting_dimensions = [{}]>",
        join(&dims.lhs_batching),
        join(&dims.rhs_batching),
        join(&dims.lhs_contracting),
        join(&dims.rhs_contracting)
    )
}

/// Prints fields of dimension numbers. Empty ones are left out, since older versions do not know all of them.
fn numbers(name: &str, fields: &[(&str, &[usize])], index_vector_dim: usize) -> String {
    let mut parts: Vec<String> = fields
        .iter()
        .filter(|(_, dims)| !dims.is_empty())
        .map(|(field, dims)| format!("{field} = [{}]", join(dims)))
        .collect();
    parts.push(format!("index_vector_dim = {index_vector_dim}"));
    format!("#stablehlo.{name}<{}>", parts.join(", "))
}

fn gather(dims: &GatherDimensions) -> Vec<Attribute> {
    let fields: [(&str, &[usize]); 5] = [
        ("offset_dims", &dims.offset_dims),
        ("collapsed_slice_dims", &dims.collapsed_slice_dims),
        ("operand_batching_dims", &dims.operand_batching_dims),
        ("start_indices_batching_dims", &dims.start_indices_batching_dims),
        ("start_index_map", &dims.start_index_map),
    ];
    vec![
        ("dimension_numbers", numbers("gather", &fields, dims.index_vector_dim)),
        ("slice_sizes", ints(&dims.slice_sizes)),
        ("indices_are_sorted", "false".to_owned()),
    ]
}

fn scatter(dims: &ScatterDimensions, unique_indices: bool) -> Vec<Attribute> {
    let fields: [(&str, &[usize]); 5] = [
        ("update_window_dims", &dims.update_window_dims),
        ("inserted_window_dims", &dims.inserted_window_dims),
        ("input_batching_dims", &dims.input_batching_dims),
        ("scatter_indices_batching_dims", &dims.scatter_indices_batching_dims),
        ("scatter_dims_to_operand_dims", &dims.scatter_dims_to_operand_dims),
    ];
    vec![
        ("scatter_dimension_numbers", numbers("scatter", &fields, dims.index_vector_dim)),
        ("indices_are_sorted", "false".to_owned()),
        ("unique_indices", unique_indices.to_string()),
    ]
}

fn convolved(conv: &Convolution, precision: Precision) -> Vec<Attribute> {
    let input =
        order(["b", "f"], [conv.input_batch_dimension, conv.input_feature_dimension], &conv.input_spatial_dimensions);
    let kernel = order(
        ["i", "o"],
        [conv.kernel_input_feature_dimension, conv.kernel_output_feature_dimension],
        &conv.kernel_spatial_dimensions,
    );
    let output = order(
        ["b", "f"],
        [conv.output_batch_dimension, conv.output_feature_dimension],
        &conv.output_spatial_dimensions,
    );
    vec![
        ("window_strides", ints(&conv.strides)),
        ("padding", padding(&conv.padding)),
        ("lhs_dilation", ints(&conv.lhs_dilation)),
        ("rhs_dilation", ints(&conv.rhs_dilation)),
        ("window_reversal", array("i1", &conv.reversal)),
        ("dimension_numbers", format!("#stablehlo.conv<[{input}]x[{kernel}]->[{output}]>")),
        ("feature_group_count", int(conv.feature_group_count)),
        ("batch_group_count", int(conv.batch_group_count)),
        ("precision_config", precisions(precision)),
    ]
}

/// Prints the meaning of each dimension, in order.
fn order(names: [&str; 2], places: [usize; 2], spatial: &[usize]) -> String {
    let mut dims = vec![String::new(); spatial.len() + 2];
    for (name, place) in names.into_iter().zip(places) {
        dims[place] = name.to_owned();
    }
    for (number, &place) in spatial.iter().enumerate() {
        dims[place] = number.to_string();
    }
    dims.join(", ")
}

fn selected(window: &Window) -> Vec<Attribute> {
    vec![
        ("window_dimensions", ints(&window.dims)),
        ("window_strides", ints(&window.strides)),
        ("padding", padding(&window.padding)),
    ]
}
