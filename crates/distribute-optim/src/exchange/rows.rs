//! The reduction of gradients of which few rows differ from zero, as those of embeddings.

use distribute_collectives::{ProcessGroup, ReduceOp, SparseRows};
use distribute_device::{BufferRef, DType, Element};
use distribute_values::{IndexedRows, TensorStorage};

use super::Payload;
use crate::gradient::{Reduced, check_rows, row_len, whole};
use crate::library::{bytes, dtype};
use crate::row_share::MOST;
use crate::tape::Gradient;
use crate::{Error, TensorLibrary};

/// Smaller gradients are reduced together with others.
const MIN_BYTES: usize = 1 << 20;

/// Returns the number of rows that a gradient would have to exchange; `None` if it is reduced as a whole in any case:
/// on a GPU, in 16 bits, smaller than a megabyte, or of one dimension. A whole gradient is read only `if_whole`.
pub(crate) fn rows_to_exchange<L: TensorLibrary>(
    gradient: &Gradient<L::Tensor>,
    variable: &L::Tensor,
    if_whole: bool,
) -> Result<Option<usize>, L::Error> {
    let (shape, dtype) = (variable.shape(), dtype::<L>(variable)?);
    let is_candidate = L::is_on_host(variable)
        && shape.len() >= 2
        && bytes::<L>(variable) >= MIN_BYTES
        && matches!(dtype, DType::F32 | DType::F64);
    match gradient {
        Gradient::Rows(rows) if is_candidate => Ok(Some(rows.indices.len())),
        Gradient::Whole(gradient) if is_candidate && if_whole => {
            let mut count = 0;
            gradient.read(&mut |buffer| count = nonzero(buffer, shape[0]).len())?;
            Ok(Some(count))
        }
        Gradient::Rows(_) | Gradient::Whole(_) => Ok(None),
    }
}

/// Sums the gradient of a variable over all replicas: by its rows, if all replicas together have few of them, else as a
/// whole. Every replica calls this, with its component of one variable; one that has no gradient counts as zeros.
pub(crate) fn sum_rows<L: TensorLibrary>(
    group: &ProcessGroup,
    index: usize,
    gradient: Option<Gradient<L::Tensor>>,
    variable: &L::Tensor,
) -> Result<Reduced<L>, L::Error> {
    match dtype::<L>(variable)? {
        DType::F64 => sum_rows_of::<L, f64>(group, index, gradient, variable),
        _ => sum_rows_of::<L, f32>(group, index, gradient, variable),
    }
}

fn sum_rows_of<L: TensorLibrary, T: Element>(
    group: &ProcessGroup,
    index: usize,
    gradient: Option<Gradient<L::Tensor>>,
    variable: &L::Tensor,
) -> Result<Reduced<L>, L::Error> {
    let mut shape = variable.shape();
    let (rows, row_len) = (shape.first().copied().unwrap_or(0), row_len(&shape));
    let own = match &gradient {
        None => SparseRows::default(),
        Some(Gradient::Rows(IndexedRows { indices, rows })) => {
            SparseRows { indices: indices.clone(), values: rows.to_elements::<T>()? }
        }
        Some(Gradient::Whole(gradient)) => found::<L, T>(gradient, rows, row_len)?,
    };
    let Some(sums) = own.all_reduce_few(group, row_len, ReduceOp::Sum, rows / MOST)? else {
        return sum_one(group, index, gradient, variable);
    };
    check_rows(&sums.indices, &shape)?;
    shape[0] = sums.indices.len();
    Ok(Reduced { index, gradient: variable.of_elements(&shape, sums.values)?, rows: Some(sums.indices) })
}

/// Sums the whole gradient of a variable over all replicas, each of which calls this like [`sum_rows`].
pub(crate) fn sum_one<L: TensorLibrary>(
    group: &ProcessGroup,
    index: usize,
    gradient: Option<Gradient<L::Tensor>>,
    variable: &L::Tensor,
) -> Result<Reduced<L>, L::Error> {
    let gradient = match gradient {
        Some(gradient) => L::own(whole::<L>(gradient, variable)?)?,
        None => L::zeros_like(variable)?,
    };
    let sum = group.start().all_reduce(Payload::<L, u32>::gradient(gradient)?, ReduceOp::Sum)?.wait()?;
    // A payload of a gradient stays one.
    Reduced::new(index, sum.into_gradient().ok_or(Error::NoGradient)?)
}

/// Returns the rows of a whole gradient that differ from zero.
fn found<L: TensorLibrary, T: Element>(
    gradient: &L::Tensor,
    rows: usize,
    row_len: usize,
) -> Result<SparseRows<T>, L::Error> {
    let mut own = SparseRows::default();
    gradient.read(&mut |buffer| {
        let Ok(elements) = buffer.as_slice::<T>() else { return };
        own.indices = nonzero(buffer, rows);
        own.values.reserve(own.indices.len() * row_len);
        let row = |index: &i64| &elements[*index as usize * row_len..][..row_len];
        own.indices.iter().for_each(|index| own.values.extend_from_slice(row(index)));
    })?;
    Ok(own)
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
    use std::sync::Arc;

    use distribute_strategy::{MirroredStrategy, Strategy};
    use distribute_values::{Host, HostTensor};

    use super::*;
    use crate::row_share::is_worth_it;
    use crate::tape::Tape;
    use crate::{Adam, Clip, HostLoss, HostModel, Lamb, Optimizer, Sgd, SparseGradients};

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

    /// Returns the rows of a whole gradient, as a library reports them that computes no others.
    fn rows_of(gradient: &HostTensor<f32>) -> Gradient<HostTensor<f32>> {
        let own = found::<Host, f32>(gradient, ROWS, WIDTH).unwrap();
        let rows = HostTensor::new(&[own.indices.len(), WIDTH], own.values).unwrap();
        Gradient::Rows(IndexedRows { indices: own.indices, rows })
    }

    /// Trains two models, to whose tapes one reports whole gradients and the other rows, and compares them.
    fn compare(replicas: usize, what: &str, build: &dyn Fn(&HostModel) -> Optimizer<Host>) {
        let strategy = MirroredStrategy::builder().num_replicas(replicas).build().unwrap();
        let (by_rows, whole) = (model(&strategy), model(&strategy));
        let (first, second) = (build(&by_rows), build(&whole));
        let tape = |model: &HostModel, local: usize| crate::Trainable::parameters(model).tapes[local].clone();
        for step in 0..6 {
            let run = strategy.run_with((&first, &second), |context, (first, second)| {
                let (replica, local) = (context.replica_id(), context.local_replica_id());
                let w = || HostTensor::new(&[2], vec![step as f32, replica as f32]).unwrap();
                let report = |are_rows: bool| {
                    move |tape: Arc<Tape<HostTensor<f32>>>| {
                        tape.gradient(1, w());
                        match gradient(step, replica) {
                            Some(gradient) if are_rows => tape.report(0, rows_of(&gradient)),
                            Some(gradient) => tape.gradient(0, gradient),
                            None => {}
                        }
                        Ok(())
                    }
                };
                if step == 1 {
                    first.accumulate_by(context, || report(true)(tape(&by_rows, local)))?;
                    second.accumulate_by(context, || report(false)(tape(&whole, local)))?;
                }
                first.minimize_by(context, || report(true)(tape(&by_rows, local)))?;
                second.minimize_by(context, || report(false)(tape(&whole, local)))
            });
            run.unwrap_or_else(|error| panic!("{what}, {replicas} replicas: {error}"));
            crate::audit(&strategy, crate::Trainable::parameters(&by_rows)).unwrap();
            let [got, expected] = [by_rows.values().unwrap(), whole.values().unwrap()];
            assert!(got == expected, "{what}, {replicas} replicas, step {step}");
        }
        assert_ne!(by_rows.values().unwrap(), model(&strategy).values().unwrap());
    }

    #[test]
    fn steps_by_reported_rows_are_those_by_whole_gradients() {
        for replicas in 1..4 {
            compare(replicas, "Adam", &|model| Adam::new(0.1).build(model).unwrap());
            compare(replicas, "clipped", &|model| {
                Adam::new(0.1).build(model).unwrap().clip(Clip::GlobalNorm(3.0)).unwrap()
            });
            compare(replicas, "LAMB", &|model| Lamb::new(0.1).build(model).unwrap());
            compare(replicas, "SGD", &|model| Sgd::new(0.1).build(model).unwrap());
            compare(replicas, "ZeRO-1", &|model| Adam::new(0.1).build(model).unwrap().zero1().unwrap());
            compare(replicas, "as a whole", &|model| {
                Adam::new(0.1).build(model).unwrap().sparse_gradients(SparseGradients::Whole)
            });
        }
    }

    #[test]
    fn reported_rows_are_exchanged_in_one_process_too() {
        let strategy = MirroredStrategy::builder().num_replicas(2).build().unwrap();
        let model = model(&strategy);
        let optimizer = Sgd::new(1.0).build(&model).unwrap();
        let run = strategy.run_with(&optimizer, |context, optimizer| {
            optimizer.minimize_by(context, || {
                let tape = &crate::Trainable::parameters(&model).tapes[context.local_replica_id()];
                tape.report(0, rows_of(&gradient(0, context.replica_id()).unwrap()));
                Ok(())
            })
        });
        run.unwrap();
        assert!(optimizer.reduces_rows(0));
    }

    #[test]
    fn a_row_that_the_variable_does_not_have_is_refused() {
        let strategy = MirroredStrategy::builder().num_replicas(2).build().unwrap();
        for (sparse, row) in [SparseGradients::Auto, SparseGradients::Whole].into_iter().zip([ROWS as i64, -1]) {
            let model = model(&strategy);
            let optimizer = Sgd::new(1.0).build(&model).unwrap().sparse_gradients(sparse);
            let run = strategy.run_with(&optimizer, |context, optimizer| {
                optimizer.minimize_by(context, || {
                    let tape = &crate::Trainable::parameters(&model).tapes[context.local_replica_id()];
                    let rows = HostTensor::new(&[1, WIDTH], vec![1.0; WIDTH]).unwrap();
                    tape.report(0, Gradient::Rows(IndexedRows { indices: vec![row], rows }));
                    Ok(())
                })
            });
            let told = run.unwrap_err().to_string();
            assert!(told.contains(&format!("row {row}, but its variable has {ROWS} rows")), "{told}");
            assert!(model.values().unwrap()[0].iter().all(|x| *x == 0.5));
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
        assert_eq!(rows_to_exchange::<Host>(&Gradient::Whole(small.clone()), &small, true).unwrap(), None);
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
