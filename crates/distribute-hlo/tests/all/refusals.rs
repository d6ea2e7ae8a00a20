//! Refusals of the builder, and their words.

use distribute_hlo::{
    Builder, CollectiveGroups, CompareOp, Convolution, DotDimensions, ElementType, GatherDimensions, Literal, Reducer,
    Result, RngAlgorithm, ScatterDimensions, SortOrder, TensorType, Value, Window,
};

/// Values of each kind.
struct Values {
    b: Builder,
    /// `f32[2,3]`.
    x: Value,
    /// `f32[4,5]`.
    y: Value,
    /// `i32[2,3]`.
    n: Value,
    /// `bool[2,3]`.
    p: Value,
    /// `i32[]`.
    i: Value,
    /// `f32[]`.
    s: Value,
}

fn values() -> Values {
    let mut b = Builder::new("refusals").replicas(4);
    let x = b.parameter(TensorType::new(ElementType::F32, [2, 3]));
    let y = b.parameter(TensorType::new(ElementType::F32, [4, 5]));
    let n = b.parameter(TensorType::new(ElementType::I32, [2, 3]));
    let p = b.parameter(TensorType::new(ElementType::Bool, [2, 3]));
    let (i, s) = (b.scalar(1i32).unwrap(), b.scalar(1.0f32).unwrap());
    Values { b, x, y, n, p, i, s }
}

/// Checks the text of an error.
#[track_caller]
fn refused<T: std::fmt::Debug>(build: impl FnOnce(&mut Values) -> Result<T>, text: &str) {
    let error = build(&mut values()).unwrap_err().to_string();
    assert_eq!(error, text);
}

#[test]
fn functions_of_elements() {
    refused(|v| v.b.exp(v.n), "exponential: operand is i32[2,3]: expected floating-point numbers; convert it first");
    refused(|v| v.b.negate(v.p), "negate: operand is bool[2,3]: expected numbers; convert it first");
    refused(|v| v.b.not(v.x), "not: operand is f32[2,3]: expected truth values or integers; convert it first");
    refused(|v| v.b.add(v.x, v.y), "add: lhs is f32[2,3], rhs is f32[4,5]: the sizes differ; broadcast one of them");
    refused(
        |v| v.b.add(v.x, v.n),
        "add: lhs is f32[2,3], rhs is i32[2,3]: the element types differ; convert one of them",
    );
    refused(
        |v| v.b.add(v.p, v.p),
        "add: lhs is bool[2,3], rhs is bool[2,3]: expected numbers; for truth values use and, or and xor",
    );
    refused(|v| v.b.xor(v.x, v.x), "xor: lhs is f32[2,3], rhs is f32[2,3]: expected truth values or integers");
    refused(
        |v| v.b.compare(CompareOp::Lt, v.x, v.s),
        "compare: lhs is f32[2,3], rhs is f32[]: the sizes differ; broadcast one of them",
    );
    refused(
        |v| v.b.compare_total_order(CompareOp::Lt, v.n, v.n),
        "compare: lhs is i32[2,3], rhs is i32[2,3]: a total order is that of floating-point numbers; use compare",
    );
    refused(
        |v| v.b.select(v.n, v.x, v.x),
        "select: pred is i32[2,3], on_true is f32[2,3], on_false is f32[2,3]: pred must have truth values; compare it \
         first",
    );
    refused(
        |v| v.b.select(v.p, v.y, v.y),
        "select: pred is bool[2,3], on_true is f32[4,5], on_false is f32[4,5]: pred must be a scalar or have the sizes \
         of the others",
    );
    refused(
        |v| v.b.clamp(v.i, v.x, v.s),
        "clamp: low is i32[], operand is f32[2,3], high is f32[]: a limit must be a scalar, or have the sizes of the \
         operand, and its element type",
    );
    refused(
        |v| v.b.bitcast_convert(v.n, ElementType::U64),
        "bitcast_convert: operand is i32[2,3]: 2 elements make one of type u64; give a last dimension of size 2",
    );
    refused(
        |v| v.b.bitcast_convert(v.p, ElementType::U8),
        "bitcast_convert: operand is bool[2,3]: truth values have no bits of numbers; use convert",
    );
}

#[test]
fn movements() {
    refused(
        |v| v.b.broadcast_in_dim(v.x, &[2, 4], &[0, 1]),
        "broadcast_in_dim: operand is f32[2,3]: dimension 1 of size 3 cannot become dimension 1 of size 4 of [2, 4]; \
         give the same size, or 1 in the operand",
    );
    refused(
        |v| v.b.broadcast(v.x, &[3]),
        "broadcast: operand is f32[2,3]: it has more dimensions than [3]; reshape it first",
    );
    refused(
        |v| v.b.reshape(v.x, &[7]),
        "reshape: operand is f32[2,3]: sizes [7] do not have as many elements; give sizes with the same product",
    );
    refused(
        |v| v.b.transpose(v.x, &[0, 0]),
        "transpose: operand is f32[2,3]: permutation names dimension 0 twice; name each once",
    );
    refused(
        |v| v.b.transpose(v.x, &[0]),
        "transpose: operand is f32[2,3]: permutation has 1 entries; expected 2, one for each dimension",
    );
    refused(
        |v| v.b.reverse(v.x, &[2]),
        "reverse: operand is f32[2,3]: dimensions: 2 is not a dimension; expected 0 to 1",
    );
    refused(
        |v| v.b.slice(v.x, &[0, 2], &[2, 4], &[1, 1]),
        "slice: operand is f32[2,3]: 2..4 does not lie in dimension 1 of size 3",
    );
    refused(
        |v| v.b.slice(v.x, &[0, 0], &[2, 3], &[1, 0]),
        "slice: operand is f32[2,3]: the stride of dimension 1 is 0; give 1 or more",
    );
    refused(
        |v| v.b.pad(v.x, v.s, &[-3, 0], &[0, 0], &[0, 0]),
        "pad: operand is f32[2,3], value is f32[]: padding (-3, 0) of dimension 0 removes too much or overflows",
    );
    refused(
        |v| v.b.pad(v.x, v.i, &[0, 0], &[0, 0], &[0, 0]),
        "pad: operand is f32[2,3], value is i32[]: value must be a scalar of the operand's element type",
    );
    refused(
        |v| v.b.concatenate(&[v.x, v.y], 0),
        "concatenate: first is f32[2,3], other is f32[4,5]: element types and all sizes but that of dimension 0 must \
         be the same",
    );
    refused(|v| v.b.concatenate(&[], 0), "concatenate: no operands: give at least one tensor");
    refused(
        |v| v.b.iota(TensorType::new(ElementType::I32, [2]), 1),
        "iota: the result is i32[2]: the counted dimension: 1 is not a dimension; expected 0 to 0",
    );
}

#[test]
fn indexing() {
    refused(
        |v| v.b.dynamic_slice(v.x, &[v.i, v.i], &[2, 4]),
        "dynamic_slice: operand is f32[2,3]: sizes has 4 in dimension 1, and the operand 3",
    );
    refused(
        |v| v.b.dynamic_slice(v.x, &[v.i, v.s], &[1, 1]),
        "dynamic_slice: the first start is i32[], another is f32[]: starts must be integer scalars of one type",
    );
    refused(
        |v| v.b.dynamic_update_slice(v.x, v.y, &[v.i, v.i]),
        "dynamic_update_slice: operand is f32[2,3], update is f32[4,5]: update has 4 in dimension 0, and the operand 2",
    );
    refused(|v| v.b.take(v.x, v.s, 0), "gather: operand is f32[2,3], indices is f32[]: indices must be integers");
    refused(
        |v| v.b.take(v.x, v.i, 2),
        "take: operand is f32[2,3], indices is i32[]: the dimension: 2 is not a dimension; expected 0 to 1",
    );
    let dimensions = GatherDimensions {
        offset_dims: vec![2],
        collapsed_slice_dims: vec![0],
        start_index_map: vec![0],
        index_vector_dim: 2,
        slice_sizes: vec![2, 3],
        ..GatherDimensions::default()
    };
    refused(
        |v| v.b.gather(v.x, v.n, &dimensions),
        "gather: operand is f32[2,3], indices is i32[2,3]: the result lacks dimension 0, so slice_sizes must have 1 \
         there",
    );
    let dimensions = GatherDimensions { index_vector_dim: 1, ..dimensions };
    refused(
        |v| v.b.gather(v.x, v.n, &dimensions),
        "gather: operand is f32[2,3], indices is i32[2,3]: an index has 3 components, and 1 dimensions of the operand \
         are named for them",
    );
    let dimensions = ScatterDimensions {
        update_window_dims: vec![1],
        inserted_window_dims: vec![0],
        scatter_dims_to_operand_dims: vec![0],
        index_vector_dim: 0,
        ..ScatterDimensions::default()
    };
    refused(
        |v| v.b.scatter(v.x, v.i, v.x, &dimensions, Some(Reducer::Sum)),
        "scatter: operand is f32[2,3], indices is i32[], updates is f32[2,3]: the dimensions of a slice: 1 is not a \
         dimension; \
         expected 0 to 0",
    );
}

#[test]
fn contractions() {
    let matmul = DotDimensions::matmul(0);
    refused(
        |v| v.b.dot_general(v.x, v.y, &matmul),
        "dot_general: lhs is f32[2,3], rhs is f32[4,5]: contracting dimensions 1 (3) and 0 (4) differ in size",
    );
    refused(
        |v| v.b.dot_general(v.x, v.n, &matmul),
        "dot_general: lhs is f32[2,3], rhs is i32[2,3]: the element types differ; convert one of them",
    );
    let narrow = DotDimensions { element: Some(ElementType::BF16), ..DotDimensions::default() };
    refused(
        |v| v.b.dot_general(v.x, v.y, &narrow),
        "dot_general: lhs is f32[2,3], rhs is f32[4,5]: sums of f32 cannot be of type bf16; ask for one of the same \
         kind with at least as many bits",
    );
    refused(
        |v| v.b.convolution(v.x, v.y, &Convolution::channels_first(1)),
        "convolution: input is f32[2,3], kernel is f32[4,5]: the input has 2 dimensions; expected 3 for 1 strides",
    );
    refused(
        |v| v.b.convolution(v.x, v.y, &Convolution::channels_first(0)),
        "convolution: input is f32[2,3], kernel is f32[4,5]: the input has 3 channels; expected 5, those of the \
         kernel, times 1 groups",
    );
    let groups = Convolution { feature_group_count: 0, ..Convolution::channels_first(0) };
    refused(
        |v| v.b.convolution(v.x, v.y, &groups),
        "convolution: input is f32[2,3], kernel is f32[4,5]: feature_group_count is 0 and batch_group_count 1; give 1 \
         or more, and 1 for one of them",
    );
}

#[test]
fn reductions() {
    refused(
        |v| v.b.reduce(v.p, Reducer::Sum, &[0]),
        "reduce: operand is bool[2,3]: Sum expects numbers; for truth values use And and Or",
    );
    refused(
        |v| v.b.reduce(v.x, Reducer::And, &[0]),
        "reduce: operand is f32[2,3]: And expects truth values or integers",
    );
    refused(
        |v| v.b.argmax(v.x, 2, ElementType::I32),
        "argmax: operand is f32[2,3]: the dimension: 2 is not a dimension; expected 0 to 1",
    );
    refused(
        |v| v.b.argmin(v.x, 0, ElementType::F32),
        "argmin: operand is f32[2,3]: indices of dimension 0 do not fit into f32; use i32 or i64",
    );
    refused(
        |v| v.b.reduce_window(v.x, Reducer::Max, &Window::new([2])),
        "reduce_window: operand is f32[2,3]: the window's dims has 1 entries; expected 2, one for each dimension",
    );
    refused(
        |v| v.b.reduce_window(v.x, Reducer::Max, &Window::new([2, 2]).strides([1, 0])),
        "reduce_window: operand is f32[2,3]: the window's strides are [1, 0]; give 1 or more",
    );
    refused(
        |v| v.b.select_and_scatter(v.x, v.y, &Window::new([2, 2])),
        "select_and_scatter: operand is f32[2,3], source is f32[4,5]: source must be f32[1,2], one element for each \
         window",
    );
    refused(
        |v| v.b.cumsum(v.x, 5),
        "cumulative: operand is f32[2,3]: the dimension: 5 is not a dimension; expected 0 to 1",
    );
    refused(
        |v| v.b.sort(&[v.x, v.y], 0, SortOrder::Ascending),
        "sort: first is f32[2,3], other is f32[4,5]: tensors that are sorted together must have the same sizes",
    );
}

#[test]
fn random_numbers() {
    let ty = TensorType::new(ElementType::F32, [2]);
    refused(
        |v| v.b.rng_bit_generator(RngAlgorithm::ThreeFry, v.x, ty.clone()),
        "rng_bit_generator: state is f32[2,3]: the state of ThreeFry is u64 of one dimension with a size in [2]",
    );
    refused(
        |v| {
            let state = v.b.dense(&[1u64, 2], &[2])?;
            v.b.rng_bit_generator(RngAlgorithm::Philox, state, ty.clone())
        },
        "rng_bit_generator: state is u64[2]: bits of type f32 were asked for; expected u32 or u64",
    );
    // The last two are not finite, or not in order, in f32.
    for (low, high) in [(1.0, 1.0), (0.0, f64::INFINITY), (f64::NAN, 1.0), (0.0, 1e39), (1.0, 1.0 + 1e-12)] {
        let text = format!(
            "uniform: state is f32[2,3]: f32 from {low} to {high} were asked for; expected floating-point numbers and \
             finite limits in order"
        );
        refused(|v| v.b.uniform(v.x, ty.clone(), low, high), &text);
    }
}

#[test]
fn control_flow() {
    refused(
        |v| v.b.while_loop(&[v.i], |_, state| Ok(state[0]), |_, state| Ok(state.to_vec())),
        "while: state is i32[]: the condition returns i32[]; expected bool[]",
    );
    refused(
        |v| {
            let (yes, x) = (v.b.scalar(true)?, v.x);
            v.b.while_loop(&[v.i], |_, _| Ok(yes), |_, _| Ok(vec![x]))
        },
        "while: state is i32[]: the body returns f32[2,3]; expected the types of the state",
    );
    refused(
        |v| v.b.if_else(v.p, |_| Ok(vec![]), |_| Ok(vec![])),
        "if: pred is bool[2,3]: expected bool[]; compare or reduce it first",
    );
    refused(
        |v| {
            let (yes, x) = (v.b.scalar(true)?, v.x);
            v.b.if_else(yes, |_| Ok(vec![x]), |_| Ok(vec![]))
        },
        "if: pred is bool[]: on_true returns f32[2,3] and on_false nothing; return the same types",
    );
}

#[test]
fn collectives() {
    let groups = |groups: &[&[usize]]| CollectiveGroups::Groups(groups.iter().map(|group| group.to_vec()).collect());
    let sum = |groups: CollectiveGroups| move |v: &mut Values| v.b.all_reduce(v.x, Reducer::Sum, &groups);
    refused(
        sum(groups(&[&[0, 1], &[2]])),
        "all_reduce: operand is f32[2,3]: a group has 2 replicas and another 1; make groups of one size",
    );
    refused(
        sum(groups(&[&[0, 1], &[1, 2]])),
        "all_reduce: operand is f32[2,3]: replica 1 is in two groups; name each replica once",
    );
    refused(
        sum(groups(&[&[0, 1]])),
        "all_reduce: operand is f32[2,3]: replica 2 is in no group; name each replica once",
    );
    refused(
        sum(groups(&[&[0, 4]])),
        "all_reduce: operand is f32[2,3]: replica 4 is in a group, and the program has 4 replicas",
    );
    let all = CollectiveGroups::All;
    refused(
        |v| v.b.all_reduce(v.n, Reducer::And, &all),
        "all_reduce: operand is i32[2,3]: And expects truth values between replicas; devices do not exchange bits of \
         integers",
    );
    refused(
        |v| v.b.all_gather(v.s, 0, &all),
        "all_gather: operand is f32[]: the gathered dimension: 0 is not a dimension, since a scalar has none",
    );
    refused(
        |v| v.b.reduce_scatter(v.x, Reducer::Sum, 1, &all),
        "reduce_scatter: operand is f32[2,3]: the scattered dimension 1 of size 3 cannot be divided among 4 replicas",
    );
    refused(
        |v| v.b.all_to_all(v.x, 0, 1, &all),
        "all_to_all: operand is f32[2,3]: split_dimension 0 of size 2 cannot be divided among 4 replicas",
    );
    refused(
        |v| v.b.collective_permute(v.x, &[(0, 1), (2, 1)]),
        "collective_permute: operand is f32[2,3]: replica 1 receives twice; name each receiver once",
    );
    refused(
        |v| v.b.collective_permute(v.x, &[(0, 4)]),
        "collective_permute: operand is f32[2,3]: 0 sends to 4, and the program has 4 replicas",
    );
}

#[test]
fn constants() {
    let scalar = |element| TensorType::scalar(element);
    refused(
        |v| v.b.full(scalar(ElementType::I8), 200),
        "constant: Integer(200) cannot be an element of type i8; give a whole number from -128 to 127",
    );
    refused(
        |v| v.b.full(scalar(ElementType::U32), 0.5),
        "constant: Float(0.5) cannot be an element of type u32; give a whole number",
    );
    refused(
        |v| v.b.full(scalar(ElementType::Bool), 1),
        "constant: Integer(1) cannot be an element of type bool; give true or false",
    );
    refused(
        |v| v.b.dense(&[1u8, 2], &[3]),
        "constant: 2 values were given for a tensor of type u8[3]; give one for each element",
    );
    refused(
        |v| v.b.constant(Literal::from_bytes(scalar(ElementType::Bool), vec![2])?),
        "constant: a truth value was given as byte 2; expected 0 or 1",
    );
}

#[test]
fn tensors_without_an_address() {
    refused(
        |v| v.b.broadcast(v.x, &[1 << 62, 2, 3]),
        "broadcast_in_dim: a tensor of type f32[4611686018427387904,2,3] has more bytes than memory can address; use \
         smaller sizes",
    );
    let mut b = Builder::new("large");
    let x = b.parameter(TensorType::new(ElementType::F64, [usize::MAX, 2]));
    let error = b.finish(&[x]).unwrap_err().to_string();
    assert!(error.starts_with("parameter: a tensor of type f64[18446744073709551615,2] has more bytes"), "{error}");
}
