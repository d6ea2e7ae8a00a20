//! Reductions, windows and sorting.

use distribute_hlo::{BinaryOp, CompareOp, Reducer, SortOrder, TensorType, Window};

use crate::Tensor;
use crate::elementwise::{combine, compared};
use crate::number::Num;
use crate::tensor::indices;

/// Puts entries at dimensions that a result lacks into its index.
fn joined(index: &[usize], dimensions: &[usize], inner: &[usize]) -> Vec<usize> {
    let (mut rest, mut inner) = (index.iter(), inner.iter());
    (0..index.len() + dimensions.len())
        .filter_map(|dim| if dimensions.contains(&dim) { inner.next() } else { rest.next() })
        .copied()
        .collect()
}

/// Combines two elements, and keeps digits of floating-point numbers that the end rounds. Integers wrap around.
fn accumulate(reducer: Reducer, x: &Tensor, sum: Num, value: Num) -> Num {
    let element = x.ty().element;
    let combined = combine(reducer.binary(), element, sum, value);
    if element.is_float() { combined } else { combined.rounded(element) }
}

pub(crate) fn reduce(x: &Tensor, initial: &Tensor, reducer: Reducer, dimensions: &[usize], ty: &TensorType) -> Tensor {
    let sizes: Vec<usize> = dimensions.iter().map(|&dim| x.dims()[dim]).collect();
    Tensor::generate(ty.clone(), |index| {
        indices(&sizes)
            .fold(initial.number(0), |sum, inner| accumulate(reducer, x, sum, x.at(&joined(index, dimensions, &inner))))
    })
}

/// Returns the extremes and their indices: the first NaN, else the first of the most extreme numbers.
pub(crate) fn arg_reduce(x: &Tensor, places: &Tensor, largest: bool, dimension: usize) -> [Tensor; 2] {
    let mut dims = x.dims().to_vec();
    let size = dims.remove(dimension);
    let nan = |number: Num| matches!(number, Num::Float(value) if value.is_nan());
    let relation = if largest { CompareOp::Gt } else { CompareOp::Lt };
    let best = |index: &[usize]| {
        let mut best = joined(index, &[dimension], &[0]);
        for place in 1..size {
            let other = joined(index, &[dimension], &[place]);
            let (new, old) = (x.at(&other), x.at(&best));
            if !nan(old) && (nan(new) || compared(relation, false, new, old)) {
                best = other;
            }
        }
        best
    };
    let values = Tensor::generate(x.ty().with_dims(dims.clone()), |index| x.at(&best(index)));
    let found = Tensor::generate(places.ty().with_dims(dims), |index| places.at(&best(index)));
    [values, found]
}

/// Returns the places of the elements of a window that are not padding.
fn inside(x: &Tensor, window: &Window, index: &[usize]) -> Vec<Vec<usize>> {
    indices(&window.dims)
        .filter_map(|inner| {
            (0..index.len())
                .map(|dim| {
                    let place = (index[dim] * window.strides[dim] + inner[dim] * window.window_dilations[dim]) as i64
                        - window.padding[dim].0;
                    let gap = window.base_dilations[dim] as i64;
                    let exists = place >= 0 && place % gap == 0 && place / gap < x.dims()[dim] as i64;
                    exists.then_some((place / gap) as usize)
                })
                .collect()
        })
        .collect()
}

pub(crate) fn reduce_window(
    x: &Tensor,
    initial: &Tensor,
    reducer: Reducer,
    window: &Window,
    ty: &TensorType,
) -> Tensor {
    Tensor::generate(ty.clone(), |index| {
        inside(x, window, index).iter().fold(initial.number(0), |sum, place| accumulate(reducer, x, sum, x.at(place)))
    })
}

pub(crate) fn select_and_scatter(x: &Tensor, source: &Tensor, initial: &Tensor, window: &Window) -> Tensor {
    let mut sums = vec![initial.number(0); x.ty().elements().unwrap_or(0)];
    for index in indices(source.dims()) {
        let selected = inside(x, window, &index)
            .into_iter()
            .reduce(|kept, other| if compared(CompareOp::Ge, false, x.at(&kept), x.at(&other)) { kept } else { other });
        let Some(selected) = selected else { continue };
        let flat = selected.iter().zip(x.dims()).fold(0, |flat, (&i, &size)| flat * size + i);
        sums[flat] = combine(BinaryOp::Add, x.ty().element, sums[flat], source.at(&index));
    }
    let numbers = sums.into_iter().map(|sum| sum.rounded(x.ty().element)).collect();
    Tensor::from_numbers(x.ty().clone(), numbers)
}

pub(crate) fn sort(operands: &[&Tensor], dimension: usize, order: SortOrder) -> Vec<Tensor> {
    let keys = operands[0];
    let mut dims = keys.dims().to_vec();
    let size = std::mem::replace(&mut dims[dimension], 1);
    let total = |place: usize, other: usize, index: &[usize]| {
        let at = |place: usize| {
            let mut index = index.to_vec();
            index[dimension] = place;
            keys.at(&index)
        };
        let ascending = match (at(place), at(other)) {
            (Num::Float(x), Num::Float(y)) => x.total_cmp(&y),
            (x, y) => x.int().cmp(&y.int()),
        };
        match order {
            SortOrder::Ascending => ascending,
            SortOrder::Descending => ascending.reverse(),
        }
    };
    let mut results: Vec<Vec<Num>> =
        operands.iter().map(|x| (0..x.ty().elements().unwrap_or(0)).map(|place| x.number(place)).collect()).collect();
    for index in indices(&dims) {
        let mut places: Vec<usize> = (0..size).collect();
        places.sort_by(|&x, &y| total(x, y, &index));
        for (x, result) in operands.iter().zip(&mut results) {
            for (to, &from) in places.iter().enumerate() {
                let (mut target, mut source) = (index.clone(), index.clone());
                (target[dimension], source[dimension]) = (to, from);
                let flat = target.iter().zip(x.dims()).fold(0, |flat, (&i, &size)| flat * size + i);
                result[flat] = x.at(&source);
            }
        }
    }
    operands.iter().zip(results).map(|(x, result)| Tensor::from_numbers(x.ty().clone(), result)).collect()
}
