//! Movement of elements to fixed places.

use distribute_hlo::TensorType;

use crate::Tensor;
use crate::number::Num;

pub(crate) fn iota(ty: &TensorType, dimension: usize) -> Tensor {
    Tensor::generate(ty.clone(), |index| Num::Int(index[dimension] as i128).converted(ty.element))
}

pub(crate) fn broadcast(x: &Tensor, ty: &TensorType, dimensions: &[usize]) -> Tensor {
    Tensor::generate(ty.clone(), |index| {
        let place: Vec<usize> =
            dimensions.iter().zip(x.dims()).map(|(&dim, &size)| if size == 1 { 0 } else { index[dim] }).collect();
        x.at(&place)
    })
}

pub(crate) fn reshape(x: &Tensor, dims: &[usize]) -> Tensor {
    let ty = x.ty().with_dims(dims);
    let count = ty.elements().unwrap_or(0);
    Tensor::from_numbers(ty, (0..count).map(|place| x.number(place)).collect())
}

pub(crate) fn transpose(x: &Tensor, permutation: &[usize]) -> Tensor {
    let dims: Vec<usize> = permutation.iter().map(|&dim| x.dims()[dim]).collect();
    Tensor::generate(x.ty().with_dims(dims), |index| {
        let mut place = vec![0; index.len()];
        for (&dim, &i) in permutation.iter().zip(index) {
            place[dim] = i;
        }
        x.at(&place)
    })
}

pub(crate) fn reverse(x: &Tensor, dimensions: &[usize]) -> Tensor {
    Tensor::generate(x.ty().clone(), |index| {
        let mut place = index.to_vec();
        for &dim in dimensions {
            place[dim] = x.dims()[dim] - 1 - index[dim];
        }
        x.at(&place)
    })
}

pub(crate) fn slice(x: &Tensor, start: &[usize], limit: &[usize], strides: &[usize]) -> Tensor {
    let dims: Vec<usize> = (0..start.len()).map(|dim| (start[dim]..limit[dim]).step_by(strides[dim]).count()).collect();
    Tensor::generate(x.ty().with_dims(dims), |index| {
        let place: Vec<usize> = index.iter().enumerate().map(|(dim, &i)| start[dim] + i * strides[dim]).collect();
        x.at(&place)
    })
}

/// Returns the place of a part that lies inside.
fn moved_inside(x: &Tensor, starts: &[&Tensor], sizes: &[usize]) -> Vec<usize> {
    let places = starts.iter().zip(x.dims()).zip(sizes);
    places.map(|((start, &dim), &size)| start.number(0).int().clamp(0, (dim - size) as i128) as usize).collect()
}

pub(crate) fn dynamic_slice(x: &Tensor, starts: &[&Tensor], sizes: &[usize]) -> Tensor {
    let start = moved_inside(x, starts, sizes);
    let limit: Vec<usize> = start.iter().zip(sizes).map(|(from, size)| from + size).collect();
    slice(x, &start, &limit, &vec![1; start.len()])
}

pub(crate) fn dynamic_update_slice(x: &Tensor, update: &Tensor, starts: &[&Tensor]) -> Tensor {
    let start = moved_inside(x, starts, update.dims());
    Tensor::generate(x.ty().clone(), |index| {
        let inside: Option<Vec<usize>> = index
            .iter()
            .zip(&start)
            .zip(update.dims())
            .map(|((&i, &from), &size)| i.checked_sub(from).filter(|&i| i < size))
            .collect();
        inside.map_or_else(|| x.at(index), |place| update.at(&place))
    })
}

pub(crate) fn pad(x: &Tensor, value: &Tensor, ty: &TensorType, low: &[i64], interior: &[usize]) -> Tensor {
    Tensor::generate(ty.clone(), |index| {
        let place: Option<Vec<usize>> = (0..index.len())
            .map(|dim| {
                let from_first = usize::try_from(index[dim] as i64 - low[dim]).ok()?;
                let gap = interior[dim] + 1;
                (from_first.is_multiple_of(gap) && from_first / gap < x.dims()[dim]).then_some(from_first / gap)
            })
            .collect();
        place.map_or_else(|| value.number(0), |place| x.at(&place))
    })
}

pub(crate) fn concatenate(parts: &[&Tensor], dimension: usize) -> Tensor {
    let mut ty = parts[0].ty().clone();
    ty.dims[dimension] = parts.iter().map(|part| part.dims()[dimension]).sum();
    Tensor::generate(ty, |index| {
        let mut place = index.to_vec();
        let mut part = 0;
        while place[dimension] >= parts[part].dims()[dimension] {
            place[dimension] -= parts[part].dims()[dimension];
            part += 1;
        }
        parts[part].at(&place)
    })
}
