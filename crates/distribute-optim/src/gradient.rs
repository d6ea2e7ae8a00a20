//! Gradients that were summed over all replicas.

use distribute_device::DType;
use distribute_values::{IndexedRows, TensorStorage};

use crate::library::dtype;
use crate::tape::Gradient;
use crate::{Error, TensorLibrary, is_short};

mod accumulate;
mod clip;
mod counted;
mod loss_scale;
mod parts;

pub(crate) use accumulate::Accumulated;
pub(crate) use clip::{change, is_finite, square_sum};
pub(crate) use counted::as_counted;
pub use loss_scale::LossScale;
pub(crate) use loss_scale::Scaling;
pub(crate) use parts::SquaresOfParts;

/// The summed gradient of a variable, in f32 or f64.
#[derive(Debug)]
pub struct Reduced<L: TensorLibrary> {
    /// The variable's index in [`Parameters::variables`](crate::Parameters::variables).
    pub index: usize,
    /// The gradient, in its own storage: all of it, or the rows of it that differ from zero.
    pub gradient: L::Tensor,
    /// The indices of the gradient's rows, each once, in ascending order; `None` if it is whole.
    pub rows: Option<Vec<i64>>,
}

impl<L: TensorLibrary> Reduced<L> {
    /// Creates the gradient of a variable, widening 16 bits to f32: all later computation is in f32 or f64.
    ///
    /// # Errors
    /// The library's error if the tensor cannot be converted.
    pub fn new(index: usize, gradient: L::Tensor) -> Result<Reduced<L>, L::Error> {
        let is_short = is_short(dtype::<L>(&gradient)?);
        let gradient = if is_short { L::cast(&gradient, DType::F32)? } else { gradient };
        Ok(Reduced { index, gradient, rows: None })
    }

    /// Returns the whole gradient of `variable`, this replica's component.
    ///
    /// # Errors
    /// The library's error if the tensor cannot be created or written.
    pub fn into_whole(self, variable: &L::Tensor) -> Result<Reduced<L>, L::Error> {
        let Reduced { index, gradient, rows } = self;
        let Some(indices) = rows else { return Ok(Reduced { index, gradient, rows }) };
        let gradient = whole::<L>(Gradient::Rows(IndexedRows { indices, rows: gradient }), variable)?;
        Ok(Reduced { index, gradient, rows: None })
    }
}

/// Returns all elements of the gradient of `variable`, this replica's component.
pub(crate) fn whole<L: TensorLibrary>(
    gradient: Gradient<L::Tensor>,
    variable: &L::Tensor,
) -> Result<L::Tensor, L::Error> {
    let IndexedRows { indices, rows } = match gradient {
        Gradient::Whole(gradient) => return Ok(gradient),
        Gradient::Rows(rows) => rows,
    };
    let shape = variable.shape();
    check_rows(&indices, &shape)?;
    let whole = L::zeros_like(variable)?;
    let row_bytes = row_len(&shape) * variable.dtype()?.size_bytes();
    let mut written = Ok(());
    rows.read(&mut |rows| {
        written = whole.write(&mut |mut buffer| {
            let elements = buffer.as_bytes_mut();
            for (index, row) in indices.iter().zip(rows.as_bytes().chunks_exact(row_bytes.max(1))) {
                elements[*index as usize * row_bytes..][..row_bytes].copy_from_slice(row);
            }
        });
    })?;
    written?;
    Ok(whole)
}

/// Refuses rows that a variable of this shape does not have.
pub(crate) fn check_rows(indices: &[i64], shape: &[usize]) -> Result<(), Error> {
    let rows = shape.first().copied().unwrap_or(0);
    let is_outside = |row: &&i64| usize::try_from(**row).map_or(true, |row| row >= rows);
    indices.iter().find(is_outside).map_or(Ok(()), |row| Err(Error::NoSuchRow { row: *row, rows }))
}

/// Returns the number of elements of a row: of all axes but the first.
pub(crate) fn row_len(shape: &[usize]) -> usize {
    shape.iter().skip(1).product()
}
