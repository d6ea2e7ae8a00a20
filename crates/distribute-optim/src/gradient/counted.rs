//! Gradients of replicas without examples.

use distribute_device::DType;
use distribute_values::IndexedRows;

use super::change;
use crate::library::dtype;
use crate::tape::Gradient;
use crate::{TensorLibrary, is_short};

/// Returns the gradient of a replica as it counts in the sum of all replicas.
///
/// A replica without examples (`counts` is false) computes a loss of weight 0 on a row of another one. Where that row
/// alone has an infinite derivative, 0 times it is NaN, which would reach every replica; it counts as 0. Other terms of
/// its loss, such as its share of a regularization, stay.
pub(crate) fn as_counted<L: TensorLibrary>(
    gradient: Gradient<L::Tensor>,
    counts: bool,
) -> Result<Gradient<L::Tensor>, L::Error> {
    let finite = |tensor: L::Tensor| {
        let kind = dtype::<L>(&tensor)?;
        let wide = if is_short(kind) { L::cast(&tensor, DType::F32)? } else { L::own(tensor)? };
        change::<L>(&wide, |x| if x.is_finite() { x } else { 0.0 })?;
        if is_short(kind) { L::cast(&wide, kind) } else { Ok(wide) }
    };
    Ok(match gradient {
        gradient if counts => gradient,
        Gradient::Whole(gradient) => Gradient::Whole(finite(gradient)?),
        Gradient::Rows(IndexedRows { indices, rows }) => Gradient::Rows(IndexedRows { indices, rows: finite(rows)? }),
    })
}
