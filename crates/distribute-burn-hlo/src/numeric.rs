//! Lowering of `NumericOperationIr`.

use burn_ir::NumericOperationIr;

use crate::{Lowering, Result};

pub(crate) fn lower(l: &mut Lowering<'_>, operation: &NumericOperationIr) -> Result<()> {
    let _ = operation;
    Err(l.unsupported("it has no lowering"))
}
