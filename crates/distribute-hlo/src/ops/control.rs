//! Loops, branches and barriers.

use crate::{Builder, ElementType, OpKind, Result, TensorType, Value};

impl Builder {
    /// Repeats `body` while `condition` returns true. Both get the state; `body` returns the next one, of its types.
    /// They may use values from outside. Returns the last state.
    ///
    /// If collectives are in the loop, every replica must repeat it as often as the others, or all wait forever.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the condition is not a scalar truth value, or the body returns
    /// other types; errors of the closures.
    ///
    /// # Examples
    /// ```
    /// use distribute_hlo::{Builder, CompareOp, ElementType, TensorType};
    /// let mut b = Builder::new("powers");
    /// let x = b.parameter(TensorType::scalar(ElementType::F32));
    /// let limit = b.scalar(1000.0f32)?;
    /// let last = b.while_loop(
    ///     &[x],
    ///     |b, state| b.compare(CompareOp::Lt, state[0], limit),
    ///     |b, state| Ok(vec![b.multiply(state[0], state[0])?]),
    /// )?;
    /// assert!(b.finish(&last)?.text().contains("stablehlo.while"));
    /// # Ok::<(), distribute_hlo::Error>(())
    /// ```
    pub fn while_loop(
        &mut self,
        initial: &[Value],
        condition: impl FnOnce(&mut Builder, &[Value]) -> Result<Value>,
        body: impl FnOnce(&mut Builder, &[Value]) -> Result<Vec<Value>>,
    ) -> Result<Vec<Value>> {
        let types = self.all_types("while", initial)?;
        let (test, tested) = self.region("while", &types, |b, state| Ok(vec![condition(b, state)?]))?;
        if tested != [TensorType::scalar(ElementType::Bool)] {
            let problem = format!("the condition returns {}; expected bool[]", list(&tested));
            return Err(self.refuse("while", &named(initial), problem));
        }
        let (step, stepped) = self.region("while", &types, body)?;
        if stepped != types {
            let problem = format!("the body returns {}; expected the types of the state", list(&stepped));
            return Err(self.refuse("while", &named(initial), problem));
        }
        self.push_all(OpKind::While, initial, types, vec![test, step])
    }

    /// Computes `on_true` if `pred` is true, else `on_false`. Both return values of the same types, and may use values
    /// from outside.
    ///
    /// If collectives are in a branch, every replica must take the same one, or all of them wait forever.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if `pred` is not a scalar truth value, or the branches return
    /// different types; errors of the closures.
    pub fn if_else(
        &mut self,
        pred: Value,
        on_true: impl FnOnce(&mut Builder) -> Result<Vec<Value>>,
        on_false: impl FnOnce(&mut Builder) -> Result<Vec<Value>>,
    ) -> Result<Vec<Value>> {
        let [ty] = self.types("if", [pred])?;
        if ty != TensorType::scalar(ElementType::Bool) {
            return Err(self.refuse("if", &[("pred", pred)], "expected bool[]; compare or reduce it first"));
        }
        let (first, types) = self.region("if", &[], |b, _| on_true(b))?;
        let (second, others) = self.region("if", &[], |b, _| on_false(b))?;
        if types != others {
            let problem =
                format!("on_true returns {} and on_false {}; return the same types", list(&types), list(&others));
            return Err(self.refuse("if", &[("pred", pred)], problem));
        }
        self.push_all(OpKind::If, &[pred], types, vec![first, second])
    }

    /// Returns the values, such that whatever uses one of the results is computed after all of the operands.
    ///
    /// # Errors
    /// [`Error::ForeignValue`](crate::Error::ForeignValue) and [`Error::OutOfScope`](crate::Error::OutOfScope).
    pub fn optimization_barrier(&mut self, operands: &[Value]) -> Result<Vec<Value>> {
        let types = self.all_types("optimization_barrier", operands)?;
        self.push_all(OpKind::OptimizationBarrier, operands, types, Vec::new())
    }

    /// Returns the types of operands.
    fn all_types(&self, operation: &'static str, values: &[Value]) -> Result<Vec<TensorType>> {
        self.check(operation, values)?;
        values.iter().map(|&value| self.typed(operation, value).cloned()).collect()
    }
}

/// Names the state for an error.
fn named(values: &[Value]) -> Vec<(&'static str, Value)> {
    values.iter().map(|&value| ("state", value)).collect()
}

/// Prints types for an error.
fn list(types: &[TensorType]) -> String {
    if types.is_empty() {
        return "nothing".to_owned();
    }
    types.iter().map(|ty| ty.short().to_string()).collect::<Vec<_>>().join(", ")
}
