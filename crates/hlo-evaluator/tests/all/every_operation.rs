//! One program with every operation.

use distribute_hlo::{
    BinaryOp, Builder, CollectiveGroups, CompareOp, Convolution, DotDimensions, ElementType, GatherDimensions, Program,
    Reducer, Result, RngAlgorithm, ScatterDimensions, SortOrder, TensorType, UnaryOp, Value, Window,
};
use hlo_evaluator::Tensor;

/// Builds the program. Its parameters are `f32[4,6]`, whose memory the first output takes, and `i32[2]`, whose memory
/// any output may take.
pub(crate) fn every_operation(replicas: usize) -> Result<Program> {
    let mut b = Builder::new("every_operation").replicas(replicas);
    let b = &mut b;
    let x = b.donated_parameter(TensorType::new(ElementType::F32, [4, 6]));
    let free = b.donated_parameter(TensorType::new(ElementType::I32, [2]));
    let mut outputs = vec![b.negate(free)?];
    elementwise(b, x, &mut outputs)?;
    movement(b, x, &mut outputs)?;
    contraction(b, x, &mut outputs)?;
    reduction(b, x, &mut outputs)?;
    random(b, &mut outputs)?;
    control(b, x, &mut outputs)?;
    collectives(b, x, replicas, &mut outputs)?;
    let first = b.add(x, x)?;
    outputs.insert(0, first);
    b.alias(x, 0)?;
    // The builder is behind a reference, which the helpers share.
    std::mem::replace(b, Builder::new("empty")).finish(&outputs)
}

/// Returns inputs for each replica.
pub(crate) fn inputs(replicas: usize) -> Vec<Vec<Tensor>> {
    let x = |replica: usize| (0..24).map(|n| (n + replica) as f32 * 0.25).collect::<Vec<_>>();
    (0..replicas).map(|replica| vec![Tensor::new([4, 6], x(replica)), Tensor::new([2], vec![1, -5])]).collect()
}

fn elementwise(b: &mut Builder, x: Value, outputs: &mut Vec<Value>) -> Result<()> {
    let n = b.convert(x, ElementType::I32)?;
    let p = b.compare(CompareOp::Gt, x, x)?;
    for op in UnaryOp::ALL {
        outputs.push(b.unary(op, if op == UnaryOp::Not { n } else { x })?);
    }
    outputs.push(b.not(p)?);
    for op in BinaryOp::ALL {
        use BinaryOp::{And, Or, ShiftLeft, ShiftRightArithmetic, ShiftRightLogical, Xor};
        let bits = matches!(op, And | Or | Xor | ShiftLeft | ShiftRightArithmetic | ShiftRightLogical);
        let operand = if bits { n } else { x };
        outputs.push(b.binary(op, operand, operand)?);
    }
    for relation in [CompareOp::Eq, CompareOp::Ne, CompareOp::Lt, CompareOp::Le, CompareOp::Gt, CompareOp::Ge] {
        outputs.push(b.compare(relation, n, n)?);
        outputs.push(b.compare_total_order(relation, x, x)?);
    }
    outputs.push(b.select(p, x, x)?);
    let (low, high) = (b.scalar(-1.0f32)?, b.scalar(1.0f32)?);
    outputs.push(b.clamp(low, x, high)?);
    for element in ElementType::ALL {
        outputs.push(b.convert(x, element)?);
        let zero = if element == ElementType::Bool { distribute_hlo::Number::Bool(false) } else { 0.into() };
        outputs.push(b.full(TensorType::new(element, [2, 0]), zero)?);
    }
    outputs.push(b.bitcast_convert(x, ElementType::U16)?);
    Ok(())
}

fn movement(b: &mut Builder, x: Value, outputs: &mut Vec<Value>) -> Result<()> {
    outputs.push(b.iota(TensorType::new(ElementType::U8, [4, 6]), 1)?);
    outputs.push(b.dense(&[f32::NAN, f32::INFINITY, -0.0], &[3])?);
    outputs.push(b.dense(&[true, false], &[1, 2])?);
    outputs.push(b.broadcast(x, &[2, 4, 6])?);
    outputs.push(b.reshape(x, &[24])?);
    outputs.push(b.transpose(x, &[1, 0])?);
    outputs.push(b.reverse(x, &[0, 1])?);
    outputs.push(b.slice(x, &[1, 0], &[4, 5], &[2, 1])?);
    let (row, column, zero) = (b.scalar(3i32)?, b.scalar(-1i32)?, b.scalar(0.0f32)?);
    let part = b.dynamic_slice(x, &[row, column], &[2, 2])?;
    outputs.push(part);
    outputs.push(b.dynamic_update_slice(x, part, &[column, row])?);
    outputs.push(b.pad(x, zero, &[1, -1], &[0, 2], &[1, 0])?);
    outputs.push(b.concatenate(&[x, x], 1)?);
    let indices = b.dense(&[3i32, 0, 9], &[3])?;
    let rows = b.take(x, indices, 0)?;
    outputs.push(rows);
    let dimensions = GatherDimensions {
        offset_dims: vec![1],
        operand_batching_dims: vec![0],
        start_indices_batching_dims: vec![0],
        start_index_map: vec![1],
        index_vector_dim: 1,
        slice_sizes: vec![1, 2],
        ..GatherDimensions::default()
    };
    let places = b.dense(&[3i64, 0, 9, 1], &[4])?;
    outputs.push(b.gather(x, places, &dimensions)?);
    let dimensions = ScatterDimensions {
        update_window_dims: vec![1],
        inserted_window_dims: vec![0],
        scatter_dims_to_operand_dims: vec![0],
        index_vector_dim: 1,
        ..ScatterDimensions::default()
    };
    for combiner in [None, Some(Reducer::Sum), Some(Reducer::Prod), Some(Reducer::Max), Some(Reducer::Min)] {
        outputs.push(b.scatter(x, indices, rows, &dimensions, combiner)?);
    }
    outputs.push(b.scatter_unique(x, indices, rows, &dimensions, None)?);
    Ok(())
}

fn contraction(b: &mut Builder, x: Value, outputs: &mut Vec<Value>) -> Result<()> {
    let y = b.transpose(x, &[1, 0])?;
    outputs.push(b.dot_general(x, y, &DotDimensions::matmul(0))?);
    let half = b.convert(x, ElementType::BF16)?;
    let dimensions = DotDimensions {
        lhs_batching: vec![0],
        rhs_batching: vec![0],
        lhs_contracting: vec![1],
        rhs_contracting: vec![1],
        element: Some(ElementType::F32),
    };
    outputs.push(b.dot_general(half, half, &dimensions)?);
    let image = b.reshape(x, &[1, 2, 4, 3])?;
    let kernel = b.full(TensorType::new(ElementType::F32, [4, 1, 2, 2]), 0.5)?;
    let mut convolution = Convolution::channels_first(2);
    convolution.padding = vec![(1, 0), (0, 1)];
    convolution.lhs_dilation = vec![2, 1];
    convolution.rhs_dilation = vec![1, 2];
    convolution.strides = vec![2, 1];
    convolution.reversal = vec![true, false];
    convolution.feature_group_count = 2;
    outputs.push(b.convolution(image, kernel, &convolution)?);
    Ok(())
}

fn reduction(b: &mut Builder, x: Value, outputs: &mut Vec<Value>) -> Result<()> {
    let n = b.convert(x, ElementType::I32)?;
    for reducer in Reducer::ALL {
        let operand = if matches!(reducer, Reducer::And | Reducer::Or) { n } else { x };
        outputs.push(b.reduce(operand, reducer, &[1])?);
        let window = Window::new([2, 3]).strides([1, 2]).padding([(1, 0), (0, 1)]);
        outputs.push(b.reduce_window(operand, reducer, &window)?);
        outputs.push(b.cumulative(operand, reducer, 1, true)?);
    }
    let (value, index) = b.argmax(x, 1, ElementType::I32)?;
    let (least, place) = b.argmin(x, 0, ElementType::I64)?;
    outputs.extend([value, index, least, place]);
    // TPUs lack windows over the two innermost dimensions of a layout, so there are two more.
    let image = b.reshape(x, &[1, 1, 4, 6])?;
    let source = b.full(TensorType::new(ElementType::F32, [1, 1, 2, 3]), 1)?;
    outputs.push(b.select_and_scatter(image, source, &Window::new([1, 1, 2, 2]).strides([1, 1, 2, 2]))?);
    outputs.extend(b.sort(&[x, n], 1, SortOrder::Ascending)?);
    outputs.extend(b.sort_unstable(&[n], 0, SortOrder::Descending)?);
    Ok(())
}

fn random(b: &mut Builder, outputs: &mut Vec<Value>) -> Result<()> {
    let (short, long) = (b.dense(&[1u64, 2], &[2])?, b.dense(&[1u64, 2, 3], &[3])?);
    let ty = TensorType::new(ElementType::U32, [3, 5]);
    for (algorithm, state) in
        [(RngAlgorithm::ThreeFry, short), (RngAlgorithm::Philox, short), (RngAlgorithm::Philox, long)]
    {
        let (next, bits) = b.rng_bit_generator(algorithm, state, ty.clone())?;
        outputs.extend([next, bits]);
        let (next, bits) = b.rng_bit_generator(algorithm, state, ty.with_element(ElementType::U64))?;
        outputs.extend([next, bits]);
    }
    for element in [ElementType::F32, ElementType::F16, ElementType::BF16] {
        let (next, numbers) = b.uniform(short, ty.with_element(element), -1.0, 2.0)?;
        let (_, normal) = b.normal(next, ty.with_element(element))?;
        outputs.extend([numbers, normal]);
    }
    Ok(())
}

fn control(b: &mut Builder, x: Value, outputs: &mut Vec<Value>) -> Result<()> {
    let (zero, limit) = (b.scalar(0i32)?, b.scalar(3i32)?);
    let state = b.while_loop(
        &[zero, x],
        |b, state| b.compare(CompareOp::Lt, state[0], limit),
        |b, state| {
            let one = b.scalar(1i32)?;
            Ok(vec![b.add(state[0], one)?, b.add(state[1], x)?])
        },
    )?;
    outputs.extend(&state);
    let pred = b.compare(CompareOp::Gt, state[0], limit)?;
    outputs.extend(b.if_else(pred, |b| Ok(vec![b.negate(x)?]), |_| Ok(vec![x]))?);
    outputs.extend(b.optimization_barrier(&[x, zero])?);
    Ok(())
}

fn collectives(b: &mut Builder, x: Value, replicas: usize, outputs: &mut Vec<Value>) -> Result<()> {
    let all = CollectiveGroups::All;
    let alone = CollectiveGroups::Groups((0..replicas).map(|replica| vec![replica]).collect());
    for reducer in [Reducer::Sum, Reducer::Prod, Reducer::Max, Reducer::Min] {
        outputs.push(b.all_reduce(x, reducer, &all)?);
    }
    outputs.push(b.all_reduce(x, Reducer::Sum, &alone)?);
    let gathered = b.all_gather(x, 0, &all)?;
    outputs.push(gathered);
    outputs.push(b.reduce_scatter(gathered, Reducer::Sum, 0, &all)?);
    outputs.push(b.all_to_all(gathered, 0, 1, &all)?);
    let ring: Vec<(usize, usize)> = (0..replicas).map(|replica| (replica, (replica + 1) % replicas)).collect();
    outputs.push(b.collective_permute(x, &ring)?);
    outputs.push(b.replica_id()?);
    Ok(())
}
