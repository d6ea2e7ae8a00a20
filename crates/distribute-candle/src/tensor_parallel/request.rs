//! The request of a layer under construction for a part of a variable.

use std::cell::RefCell;

use candle_core::{Result, Shape, Tensor};
use candle_nn::{Init, VarBuilder};

/// A split that a layer asks for. A backend that knows no tensor groups returns the whole variable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// The axis along which the variable is split.
    pub(crate) axis: usize,
    /// The number of blocks along the axis, each of which is divided.
    pub(crate) blocks: usize,
}

thread_local! {
    /// The request for the variable that is being created on this thread; a `VarBuilder` has no way to carry it.
    static REQUEST: RefCell<Option<Request>> = const { RefCell::new(None) };
}

/// Returns the request for the variable that a backend is asked for, and ends it.
pub(crate) fn take_request() -> Option<Request> {
    REQUEST.take()
}

/// Asks for this rank's part of the variable with this whole shape. Returns it with the number of parts.
pub(super) fn part(
    vb: &VarBuilder<'_>,
    shape: impl Into<Shape>,
    name: &str,
    init: Init,
    request: Request,
) -> Result<(Tensor, usize)> {
    let shape: Shape = shape.into();
    REQUEST.set(Some(request));
    let part = vb.get_with_hints(shape.clone(), name, init);
    REQUEST.take();
    let part = part?;
    let parts = shape.dims()[request.axis] / part.dim(request.axis)?.max(1);
    Ok((part, parts))
}
