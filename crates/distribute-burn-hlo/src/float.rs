//! Lowering of `FloatOperationIr`.

use burn_ir::FloatOperationIr;

use crate::{Lowering, Result};

pub(crate) fn lower(l: &mut Lowering<'_>, operation: &FloatOperationIr) -> Result<()> {
    let _ = operation;
    Err(l.unsupported("it has no lowering"))
}
