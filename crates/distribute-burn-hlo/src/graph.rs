//! Lowering of whole graphs.

use std::collections::HashSet;

use burn_ir::{OperationIr, ScalarIr, TensorId};

use crate::lowering::name_of;
use crate::{Lowering, Result, activation, base, boolean, float, int, module, numeric};

impl Lowering<'_> {
    /// Lowers the operations on which `outputs` depend, in order.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for an operation without a lowering;
    /// [`Error::Unbound`](crate::Error::Unbound) if one reads a tensor that has no value;
    /// [`Error::TypeDiffers`](crate::Error::TypeDiffers) if a bound value has another type than the graph says;
    /// [`Error::Hlo`](crate::Error::Hlo) if the builder refuses an operation.
    pub fn lower(&mut self, operations: &[OperationIr], outputs: &[TensorId]) -> Result<()> {
        let mut needed: HashSet<TensorId> = outputs.iter().copied().collect();
        let mut live: Vec<&OperationIr> = Vec::new();
        for operation in operations.iter().rev() {
            if operation.outputs().any(|out| needed.contains(&out.id) && !self.has_value(out.id)) {
                needed.extend(operation.inputs().map(|input| input.id));
                live.push(operation);
            }
        }
        for operation in live.into_iter().rev() {
            self.begin(name_of(operation));
            self.one(operation)?;
        }
        self.begin("output".to_owned());
        Ok(())
    }

    fn one(&mut self, operation: &OperationIr) -> Result<()> {
        if operation.outputs().all(|out| out.shape.as_slice().contains(&0)) {
            // Without elements there is nothing to compute, and many operations have no program for it.
            return operation.outputs().try_for_each(|out| {
                let value = self.full(ScalarIr::Bool(false), self.type_of(out)?)?;
                self.set(out, value)
            });
        }
        match operation {
            OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => base::lower(self, op),
            OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op) => numeric::lower(self, op),
            OperationIr::Bool(op) => boolean::lower(self, op),
            OperationIr::Int(op) => int::lower(self, op),
            OperationIr::Float(_, op) => float::lower(self, op),
            OperationIr::Module(op) => module::lower(self, op),
            OperationIr::Activation(op) => activation::lower(self, op),
            // The value of an initialized tensor is bound.
            OperationIr::Init(op) => self.value(op.out.id).map(drop),
            OperationIr::Drop(_) => Ok(()),
            OperationIr::Custom(op) => Err(self.unsupported(&format!(
                "{:?} is an operation of another crate; compute it by operations of burn",
                op.id
            ))),
            OperationIr::Distributed(_) => {
                Err(self.unsupported("replicas of a program exchange by its own collectives; leave burn's out"))
            }
        }
    }
}
