//! Functions of elements, comparisons and conversions.

use crate::{BinaryOp, Builder, CompareOp, ElementType, OpKind, Result, TensorType, UnaryOp, Value};

impl Builder {
    /// Applies a function to each element. The result has the operand's type; that of [`UnaryOp::IsFinite`] has truth
    /// values.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the function is not defined for the element type.
    pub fn unary(&mut self, op: UnaryOp, operand: Value) -> Result<Value> {
        let [ty] = self.types(op.name(), [operand])?;
        let element = ty.element;
        let (fits, expected) = match op {
            UnaryOp::Abs | UnaryOp::Sign => {
                (element.is_float() || element.is_signed_integer(), "signed integers or floating-point numbers")
            }
            UnaryOp::Negate => (element.is_float() || element.is_integer(), "numbers"),
            UnaryOp::Not => (element.is_integer() || element == ElementType::Bool, "truth values or integers"),
            _ => (element.is_float(), "floating-point numbers"),
        };
        if !fits {
            return Err(self.refuse(
                op.name(),
                &[("operand", operand)],
                format!("expected {expected}; convert it first"),
            ));
        }
        let result = if op == UnaryOp::IsFinite { ty.with_element(ElementType::Bool) } else { ty };
        self.push(OpKind::Unary(op), &[operand], result)
    }

    /// Applies a function to each pair of elements of two tensors of one type.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the types differ, or the function is not defined for them.
    pub fn binary(&mut self, op: BinaryOp, lhs: Value, rhs: Value) -> Result<Value> {
        let [left, right] = self.types(op.name(), [lhs, rhs])?;
        let operands = [("lhs", lhs), ("rhs", rhs)];
        if left != right {
            return Err(self.refuse(op.name(), &operands, difference(&left, &right)));
        }
        let element = left.element;
        let truth = element == ElementType::Bool;
        let (fits, expected) = match op {
            BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => (truth || element.is_integer(), "truth values or integers"),
            BinaryOp::ShiftLeft | BinaryOp::ShiftRightArithmetic | BinaryOp::ShiftRightLogical => {
                (element.is_integer(), "integers")
            }
            BinaryOp::Atan2 => (element.is_float(), "floating-point numbers"),
            BinaryOp::Maximum | BinaryOp::Minimum => (true, ""),
            _ => (!truth, "numbers; for truth values use and, or and xor"),
        };
        if !fits {
            return Err(self.refuse(op.name(), &operands, format!("expected {expected}")));
        }
        self.push(OpKind::Binary(op), &[lhs, rhs], left)
    }

    /// Compares each pair of elements of two tensors of one type. The result has truth values. Every comparison with
    /// NaN is false, except [`CompareOp::Ne`].
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the types differ.
    pub fn compare(&mut self, relation: CompareOp, lhs: Value, rhs: Value) -> Result<Value> {
        self.compared(relation, false, lhs, rhs)
    }

    /// Compares floating-point numbers by IEEE 754's total order: −NaN, −∞, …, −0, 0, …, ∞, NaN.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the types differ or are not floating-point numbers.
    pub fn compare_total_order(&mut self, relation: CompareOp, lhs: Value, rhs: Value) -> Result<Value> {
        if !self.typed("compare", lhs)?.element.is_float() {
            self.check("compare", &[lhs, rhs])?;
            let problem = "a total order is that of floating-point numbers; use compare";
            return Err(self.refuse("compare", &[("lhs", lhs), ("rhs", rhs)], problem));
        }
        self.compared(relation, true, lhs, rhs)
    }

    /// Adds a comparison.
    fn compared(&mut self, relation: CompareOp, total_order: bool, lhs: Value, rhs: Value) -> Result<Value> {
        let [left, right] = self.types("compare", [lhs, rhs])?;
        if left != right {
            return Err(self.refuse("compare", &[("lhs", lhs), ("rhs", rhs)], difference(&left, &right)));
        }
        let result = left.with_element(ElementType::Bool);
        self.push(OpKind::Compare { relation, total_order }, &[lhs, rhs], result)
    }

    /// Takes elements of `on_true` where `pred` is true, and of `on_false` elsewhere. `pred` has their sizes or is a
    /// scalar.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if types or sizes differ.
    pub fn select(&mut self, pred: Value, on_true: Value, on_false: Value) -> Result<Value> {
        let [condition, left, right] = self.types("select", [pred, on_true, on_false])?;
        let problem = if left != right {
            difference(&left, &right)
        } else if condition.element != ElementType::Bool {
            "pred must have truth values; compare it first".to_owned()
        } else if condition.ndim() != 0 && condition.dims != left.dims {
            "pred must be a scalar or have the sizes of the others".to_owned()
        } else {
            return self.push(OpKind::Select, &[pred, on_true, on_false], left);
        };
        Err(self.refuse("select", &[("pred", pred), ("on_true", on_true), ("on_false", on_false)], problem))
    }

    /// Limits each element to at least `low` and at most `high`, which have its type or are scalars of it. NaN remains.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if types or sizes differ.
    pub fn clamp(&mut self, low: Value, operand: Value, high: Value) -> Result<Value> {
        let [min, ty, max] = self.types("clamp", [low, operand, high])?;
        for bound in [&min, &max] {
            if *bound != ty && *bound != TensorType::scalar(ty.element) {
                let problem = "a limit must be a scalar, or have the sizes of the operand, and its element type";
                return Err(self.refuse("clamp", &[("low", low), ("operand", operand), ("high", high)], problem));
            }
        }
        self.push(OpKind::Clamp, &[low, operand, high], ty)
    }

    /// Converts each element to another type. Floating-point numbers are rounded to the nearest value, to integers
    /// towards zero; a number out of the range of an integer type gives a value that depends on the device. Integers
    /// wrap around. A number is true if it is not 0.
    ///
    /// # Errors
    /// [`Error::ForeignValue`](crate::Error::ForeignValue) and [`Error::OutOfScope`](crate::Error::OutOfScope).
    pub fn convert(&mut self, operand: Value, element: ElementType) -> Result<Value> {
        let [ty] = self.types("convert", [operand])?;
        self.push(OpKind::Convert, &[operand], ty.with_element(element))
    }

    /// Reads the same bits as another element type. If that is smaller, the result has a last dimension for the parts
    /// of an element, the least significant first; if it is larger, the operand's last dimension is joined.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) for truth values, or a last dimension of another size than needed.
    pub fn bitcast_convert(&mut self, operand: Value, element: ElementType) -> Result<Value> {
        let [ty] = self.types("bitcast_convert", [operand])?;
        let given = [("operand", operand)];
        if (ty.element == ElementType::Bool) != (element == ElementType::Bool) {
            let problem = "truth values have no bits of numbers; use convert";
            return Err(self.refuse("bitcast_convert", &given, problem));
        }
        let (from, to) = (ty.element.size_bytes(), element.size_bytes());
        let mut result = ty.with_element(element);
        if from > to {
            result.dims.push(from / to);
        } else if from < to && result.dims.pop() != Some(to / from) {
            let problem = format!(
                "{} elements make one of type {}; give a last dimension of size {}",
                to / from,
                element.name(),
                to / from
            );
            return Err(self.refuse("bitcast_convert", &given, problem));
        }
        self.push(OpKind::BitcastConvert, &[operand], result)
    }
}

/// Tells in which way two types differ.
fn difference(left: &TensorType, right: &TensorType) -> String {
    match (left.element == right.element, left.dims == right.dims) {
        (false, true) => "the element types differ; convert one of them",
        (true, false) => "the sizes differ; broadcast one of them",
        _ => "element types and sizes differ; convert and broadcast one of them",
    }
    .to_owned()
}

macro_rules! unary_methods {
    ($($(#[$doc:meta])* $name:ident => $op:ident;)*) => {
        /// Functions of each element. Errors are those of [`Builder::unary`].
        impl Builder {$(
            $(#[$doc])*
            ///
            /// # Errors
            /// [`Error::Operation`](crate::Error::Operation) if the function is not defined for the element type.
            pub fn $name(&mut self, operand: Value) -> Result<Value> {
                self.unary(UnaryOp::$op, operand)
            }
        )*}
    };
}

unary_methods! {
    /// Returns absolute values.
    abs => Abs;
    /// Returns the negatives.
    negate => Negate;
    /// Returns e to the power of each element.
    exp => Exp;
    /// Returns e to the power of each element, minus 1, without loss near 0.
    expm1 => ExpMinusOne;
    /// Returns natural logarithms.
    log => Log;
    /// Returns natural logarithms of 1 plus each element, without loss near 0.
    log1p => LogPlusOne;
    /// Returns square roots.
    sqrt => Sqrt;
    /// Returns reciprocals of square roots.
    rsqrt => Rsqrt;
    /// Returns cube roots.
    cbrt => Cbrt;
    /// Returns sines of angles in radians.
    sine => Sine;
    /// Returns cosines of angles in radians.
    cosine => Cosine;
    /// Returns tangents of angles in radians.
    tan => Tan;
    /// Returns hyperbolic tangents.
    tanh => Tanh;
    /// Returns 1 / (1 + exp(−x)).
    logistic => Logistic;
    /// Rounds down.
    floor => Floor;
    /// Rounds up.
    ceil => Ceil;
    /// Rounds to the nearest whole number, to the even one of two.
    round_nearest_even => RoundNearestEven;
    /// Rounds to the nearest whole number, of two to the one further from zero.
    round_nearest_afz => RoundNearestAwayFromZero;
    /// Returns signs: −1, 0 or 1; zeros and NaN stay as they are.
    sign => Sign;
    /// Negates truth values, or each bit of integers.
    not => Not;
    /// Returns whether elements are neither infinite nor NaN.
    is_finite => IsFinite;
}

macro_rules! binary_methods {
    ($($(#[$doc:meta])* $name:ident => $op:ident;)*) => {
        /// Functions of each pair of elements. Errors are those of [`Builder::binary`].
        impl Builder {$(
            $(#[$doc])*
            ///
            /// # Errors
            /// [`Error::Operation`](crate::Error::Operation) if types differ, or the function is not defined for them.
            pub fn $name(&mut self, lhs: Value, rhs: Value) -> Result<Value> {
                self.binary(BinaryOp::$op, lhs, rhs)
            }
        )*}
    };
}

binary_methods! {
    /// Returns sums; integers wrap around.
    add => Add;
    /// Returns differences; integers wrap around.
    subtract => Subtract;
    /// Returns products; integers wrap around.
    multiply => Multiply;
    /// Returns quotients; those of integers are rounded towards zero, and not defined for a divisor of 0.
    divide => Divide;
    /// Returns remainders, with the sign of the dividend; those of integers are not defined for a divisor of 0.
    remainder => Remainder;
    /// Returns powers.
    power => Power;
    /// Returns the larger elements; NaN if either is NaN.
    maximum => Maximum;
    /// Returns the smaller elements; NaN if either is NaN.
    minimum => Minimum;
    /// Returns angles in radians of points with ordinates `lhs` and abscissas `rhs`.
    atan2 => Atan2;
    /// Returns logical or bitwise conjunctions.
    and => And;
    /// Returns logical or bitwise disjunctions.
    or => Or;
    /// Returns logical or bitwise exclusive disjunctions.
    xor => Xor;
    /// Moves bits to higher places.
    shift_left => ShiftLeft;
    /// Moves bits to lower places and fills with the sign.
    shift_right_arithmetic => ShiftRightArithmetic;
    /// Moves bits to lower places and fills with zeros.
    shift_right_logical => ShiftRightLogical;
}
