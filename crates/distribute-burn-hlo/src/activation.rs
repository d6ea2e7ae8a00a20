//! Lowering of `ActivationOperationIr`.

use burn_ir::ActivationOperationIr;

use crate::{Lowering, Result};

pub(crate) fn lower(l: &mut Lowering<'_>, operation: &ActivationOperationIr) -> Result<()> {
    let _ = operation;
    Err(l.unsupported("it has no lowering"))
}
