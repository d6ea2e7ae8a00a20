//! Lowering of `BoolOperationIr`.

use burn_ir::BoolOperationIr;

use crate::{Lowering, Result};

pub(crate) fn lower(l: &mut Lowering<'_>, operation: &BoolOperationIr) -> Result<()> {
    let _ = operation;
    Err(l.unsupported("it has no lowering"))
}
