//! The reduction of gradients of which few rows differ from zero, as those of embeddings.

use distribute_collectives::{ProcessGroup, ReduceOp, SparseRows};
use distribute_device::{BufferMut, BufferRef, DType, Element};
use distribute_values::TensorStorage;

use super::sum_whole;
use crate::TensorLibrary;
use crate::library::{bytes, dtype};
use crate::row_share::MOST;

/// Smaller gradients are reduced together with others.
const MIN_BYTES: usize = 1 << 20;

/// Returns the number of rows that a gradient would have to exchange; `None` if it is reduced as a whole in any case:
/// on a GPU, in 16 bits, or smaller than a megabyte.
pub(crate) fn rows_to_exchange<L: TensorLibrary>(gradient: &L::Tensor) -> Result<Option<usize>, L::Error> {
    let (shape, dtype) = (gradient.shape(), dtype::<L>(gradient)?);
    let is_candidate = L::is_on_host(gradient)
        && shape.len() >= 2
        && bytes::<L>(gradient) >= MIN_BYTES
        && matches!(dtype, DType::F32 | DType::F64);
    if !is_candidate {
        return Ok(None);
    }
    let mut count = 0;
    gradient.read(&mut |buffer| count = nonzero(buffer, shape[0]).len())?;
    Ok(Some(count))
}

/// Sums a gradient over all replicas in place: by its rows, if all replicas together have few of them, else as a whole.
/// Every replica calls this, with gradients of one shape.
pub(crate) fn sum_rows<L: TensorLibrary>(group: &ProcessGroup, gradient: L::Tensor) -> Result<L::Tensor, L::Error> {
    let by_rows = match dtype::<L>(&gradient)? {
        DType::F64 => sum_few::<L, f64>(group, &gradient)?,
        _ => sum_few::<L, f32>(group, &gradient)?,
    };
    if by_rows { Ok(gradient) } else { sum_whole::<L>(group, gradient) }
}

/// Returns false, with the gradient unchanged, if there are too many rows.
fn sum_few<L: TensorLibrary, T: Element>(group: &ProcessGroup, gradient: &L::Tensor) -> Result<bool, L::Error> {
    let rows = gradient.shape().first().copied().unwrap_or(0);
    let (mut own, mut row_len) = (SparseRows::<T>::default(), 0);
    gradient.read(&mut |buffer| {
        let Ok(elements) = buffer.as_slice::<T>() else { return };
        row_len = elements.len() / rows.max(1);
        own.indices = nonzero(buffer, rows);
        own.values.reserve(own.indices.len() * row_len);
        let row = |index: &i64| &elements[*index as usize * row_len..][..row_len];
        own.indices.iter().for_each(|index| own.values.extend_from_slice(row(index)));
    })?;
    let Some(sums) = own.all_reduce_few(group, row_len, ReduceOp::Sum, rows / MOST)? else { return Ok(false) };
    let mut write = |mut buffer: BufferMut<'_>| {
        let Ok(elements) = buffer.as_mut_slice::<T>() else { return };
        for (index, sum) in sums.indices.iter().zip(sums.values.chunks_exact(row_len.max(1))) {
            let start = usize::try_from(*index).ok().and_then(|index| index.checked_mul(row_len));
            if let Some(row) = start.and_then(|start| elements.get_mut(start..start + row_len)) {
                row.copy_from_slice(sum);
            }
        }
    };
    gradient.write(&mut write)?;
    Ok(true)
}

/// Returns the indices of the rows of which some bit is set, in ascending order.
fn nonzero(buffer: BufferRef<'_>, rows: usize) -> Vec<i64> {
    // Elements of 4 or 8 bytes; without an early end, the loop over a row uses vector instructions.
    let words: &[u32] = bytemuck::try_cast_slice(buffer.as_bytes()).unwrap_or_default();
    let row_words = words.len() / rows.max(1);
    let is_set = |row: &[u32]| row.iter().fold(0, |bits, word| bits | word) != 0;
    let all = words.chunks_exact(row_words.max(1)).enumerate().filter(|(_, row)| is_set(row));
    all.map(|(index, _)| index as i64).collect()
}

#[cfg(test)]
mod tests {
    use distribute_strategy::{MirroredStrategy, Strategy};
    use distribute_values::{Host, HostTensor};

    use super::*;
    use crate::row_share::is_worth_it;
    use crate::{Adam, HostLoss, HostModel, Optimizer, SparseGradients};

    const ROWS: usize = 4096;
    const WIDTH: usize = 128;

    fn model(strategy: &Strategy) -> HostModel {
        let table = HostTensor::new(&[ROWS, WIDTH], vec![0.5; ROWS * WIDTH]).unwrap();
        HostModel::new(strategy, [("table", table), ("w", HostTensor::new(&[2], vec![1.0, 2.0]).unwrap())]).unwrap()
    }

    /// Returns a gradient with the rows of a step and a replica: few, some of them those of other replicas, in most
    /// steps; all in the fourth, and none on the second replica in the third.
    fn gradient(step: usize, replica: usize) -> Option<HostTensor<f32>> {
        let mut elements = vec![0.0; ROWS * WIDTH];
        let rows: Vec<usize> = match step {
            2 if replica == 1 => return None,
            3 => (0..ROWS).collect(),
            _ => (0..20).map(|at| (at * 37 + step * 11 + replica * (at % 2) * 500) % ROWS).collect(),
        };
        for row in rows {
            for (at, element) in elements[row * WIDTH..][..WIDTH].iter_mut().enumerate() {
                *element = ((row + at * 3 + replica * 7 + step) % 11) as f32 - 5.0;
            }
        }
        Some(HostTensor::new(&[ROWS, WIDTH], elements).unwrap())
    }

    fn train(strategy: &Strategy, model: &HostModel, optimizer: &Optimizer<Host>) {
        for step in 0..6 {
            let run = strategy.run_with(optimizer, |context, optimizer| {
                let w = HostTensor::new(&[2], vec![step as f32, context.replica_id() as f32]).unwrap();
                optimizer.minimize(context, &HostLoss(vec![gradient(step, context.replica_id()), Some(w)]))
            });
            run.unwrap();
            crate::audit(strategy, crate::Trainable::parameters(model)).unwrap();
        }
    }

    #[test]
    fn sums_by_rows_are_those_of_whole_gradients() {
        for replicas in 1..4 {
            let strategy = MirroredStrategy::builder().num_replicas(replicas).build().unwrap();
            let (by_rows, whole) = (model(&strategy), model(&strategy));
            let first = Adam::new(0.1).build(&by_rows).unwrap().sparse_gradients(SparseGradients::Rows);
            let second = Adam::new(0.1).build(&whole).unwrap().sparse_gradients(SparseGradients::Whole);
            train(&strategy, &by_rows, &first);
            train(&strategy, &whole, &second);
            assert_eq!([&first, &second].map(|optimizer| optimizer.reduces_rows(0)), [true, false]);
            assert!(!first.reduces_rows(1));
            // The whole gradient is in memory either way.
            assert_eq!(first.memory().gradient_bytes, second.memory().gradient_bytes);
            let [got, expected] = [by_rows.values().unwrap(), whole.values().unwrap()];
            // Whole numbers are summed without rounding, in any order.
            assert_eq!(got, expected, "{replicas} replicas");
        }
    }

    #[test]
    fn gradients_with_many_rows_or_few_bytes_are_reduced_as_a_whole() {
        let strategy = MirroredStrategy::builder().num_replicas(2).build().unwrap();
        let model = model(&strategy);
        let optimizer = Adam::new(0.1).build(&model).unwrap().sparse_gradients(SparseGradients::Rows);
        let run = strategy.run_with(&optimizer, |context, optimizer| {
            optimizer.minimize(context, &HostLoss(vec![gradient(3, context.replica_id()), None]))
        });
        run.unwrap();
        assert!(!optimizer.reduces_rows(0));
        let small = HostTensor::new(&[100, 100], vec![0.0; 10_000]).unwrap();
        assert_eq!(rows_to_exchange::<Host>(&small).unwrap(), None);
        assert!(is_worth_it(1024, 8192, 2) && !is_worth_it(1025, 8192, 2));
    }

    #[test]
    fn rows_that_are_not_zero_are_found() {
        let found = |elements: &[f32], rows: usize| nonzero(BufferRef::from(elements), rows);
        assert_eq!(found(&[0.0, 0.0, 0.0, -0.0, 0.0, 1e-45, f32::NAN, 0.0], 4), [1, 2, 3]);
        assert_eq!(found(&[0.0; 6], 3), [0i64; 0]);
        assert_eq!(found(&[], 0), [0i64; 0]);
        assert_eq!(nonzero(BufferRef::from(&[0.0, 0.0, 0.0, 2.0f64][..]), 2), [1]);
    }
}
