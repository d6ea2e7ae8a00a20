//! Lowering of `BaseOperationIr`.

use burn_ir::BaseOperationIr;

use crate::{Lowering, Result};

pub(crate) fn lower(l: &mut Lowering<'_>, operation: &BaseOperationIr) -> Result<()> {
    let _ = operation;
    Err(l.unsupported("it has no lowering"))
}
