//! Update rules as operations of a compiled program.

use distribute_hlo::{Builder, CompareOp, Reducer, Result, TensorType, Value};

use super::{AdamFactors, UpdateRule, adamax, nadam};
use crate::step::correction;

impl UpdateRule {
    /// Returns the numbers of a parameter's `step`, which counts from 1, that change from step to step: those that
    /// [`add_to_program`](UpdateRule::add_to_program) expects.
    pub fn numbers(&self, step: u64, learning_rate: f64) -> Vec<f64> {
        match *self {
            UpdateRule::Adam { beta1, beta2, epsilon, weight_decay } => {
                let factors = AdamFactors::new(step, learning_rate, [beta1, beta2], epsilon, weight_decay);
                vec![factors.rate, factors.scale, factors.keep]
            }
            UpdateRule::Lamb { beta1, beta2, .. } => {
                vec![learning_rate, 1.0 / correction(beta1, step), 1.0 / correction(beta2, step)]
            }
            UpdateRule::Adamax { beta1, .. } => vec![adamax::rate(step, learning_rate, beta1)],
            UpdateRule::Nadam { beta1, beta2, .. } => {
                let factors = nadam::Factors::new(step, learning_rate, beta1, beta2);
                vec![factors.of_moment, factors.of_gradient, factors.scale]
            }
            UpdateRule::Sgd { .. }
            | UpdateRule::Adagrad { .. }
            | UpdateRule::RmsProp { .. }
            | UpdateRule::Adadelta { .. }
            | UpdateRule::Ftrl { .. } => vec![learning_rate],
        }
    }

    /// Adds a step of one parameter to a program, and returns the new parameter and the new slots. The arithmetic is
    /// that of [`update`](UpdateRule::update), in the parameter's type, up to the rounding of the device.
    ///
    /// # Shapes
    /// Parameter, gradient and slots have one type, of f32 or f64. `numbers` are scalars of its element type, as many
    /// as [`numbers`](UpdateRule::numbers) returns. The slots are those of [`slots`](UpdateRule::slots), in that order.
    ///
    /// # Errors
    /// The builder's, if the types differ from these.
    ///
    /// # Examples
    /// ```
    /// use distribute_hlo::{Builder, ElementType, TensorType};
    /// use distribute_rules::UpdateRule;
    ///
    /// let rule = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
    /// let mut b = Builder::new("step");
    /// let ty = TensorType::new(ElementType::F32, [3]);
    /// let (p, g) = (b.parameter(ty.clone()), b.parameter(ty));
    /// let rate = b.parameter(TensorType::scalar(ElementType::F32));
    /// let (updated, slots) = rule.add_to_program(&mut b, &[rate], p, g, &[])?;
    /// assert!(slots.is_empty() && b.finish(&[updated])?.text().contains("stablehlo.subtract"));
    /// # Ok::<(), distribute_hlo::Error>(())
    /// ```
    pub fn add_to_program(
        &self,
        builder: &mut Builder,
        numbers: &[Value],
        parameter: Value,
        gradient: Value,
        slots: &[Value],
    ) -> Result<(Value, Vec<Value>)> {
        let ty = builder.type_of(parameter)?.clone();
        let mut numbers_of_type = Vec::with_capacity(numbers.len());
        for number in numbers {
            numbers_of_type.push(builder.broadcast(*number, &ty.dims)?);
        }
        let mut ops = Ops { b: builder, ty };
        let (p, g) = (parameter, gradient);
        match (*self, slots, &numbers_of_type[..]) {
            (UpdateRule::Sgd { momentum, nesterov }, [v], [lr]) => {
                let (lr_g, momentum) = (ops.b.multiply(*lr, g)?, ops.full(momentum)?);
                let v = ops.b.multiply(momentum, *v)?;
                let v = ops.b.subtract(v, lr_g)?;
                let v = ops.flushed(v)?;
                let change = match nesterov {
                    true => {
                        let ahead = ops.b.multiply(momentum, v)?;
                        ops.b.subtract(ahead, lr_g)?
                    }
                    false => v,
                };
                Ok((ops.b.add(p, change)?, vec![v]))
            }
            (UpdateRule::Sgd { .. }, _, [lr]) => {
                let change = ops.b.multiply(*lr, g)?;
                Ok((ops.b.subtract(p, change)?, Vec::new()))
            }
            (UpdateRule::Adam { beta1, beta2, epsilon, .. }, [m, v], [rate, scale, keep]) => {
                let m = ops.average(beta1, *m, g)?;
                let v = ops.average_of_squares(beta2, *v, g)?;
                let spread = ops.b.multiply(v, *scale)?;
                let below = ops.root_plus(spread, epsilon)?;
                let above = ops.b.multiply(*rate, m)?;
                let (change, kept) = (ops.b.divide(above, below)?, ops.b.multiply(p, *keep)?);
                Ok((ops.b.subtract(kept, change)?, vec![m, v]))
            }
            (UpdateRule::Adagrad { epsilon, .. }, [a], [lr]) => {
                let squared = ops.b.multiply(g, g)?;
                let a = ops.b.add(*a, squared)?;
                let change = ops.over_root(*lr, g, a, epsilon)?;
                Ok((ops.b.subtract(p, change)?, vec![a]))
            }
            (UpdateRule::RmsProp { rho, momentum, epsilon, centered }, [square, rest @ ..], [lr]) => {
                let square = ops.average_of_squares(rho, *square, g)?;
                let mut updated = vec![square];
                let (mut spread, mut rest) = (square, rest.iter());
                if centered && let Some(mean) = rest.next() {
                    let mean = ops.average(rho, *mean, g)?;
                    updated.push(mean);
                    let of_mean = ops.b.multiply(mean, mean)?;
                    let variance = ops.b.subtract(square, of_mean)?;
                    let zero = ops.full(0.0)?;
                    let is_negative = ops.b.compare(CompareOp::Lt, variance, zero)?;
                    spread = ops.b.select(is_negative, zero, variance)?;
                }
                let mut change = ops.over_root(*lr, g, spread, epsilon)?;
                if let Some(sum) = rest.next() {
                    let momentum = ops.full(momentum)?;
                    let sum = ops.b.multiply(momentum, *sum)?;
                    let sum = ops.b.add(sum, change)?;
                    change = ops.flushed(sum)?;
                    updated.push(change);
                }
                Ok((ops.b.subtract(p, change)?, updated))
            }
            (UpdateRule::Lamb { beta1, beta2, epsilon, weight_decay }, [m, v], [lr, scale1, scale2]) => {
                let m = ops.average(beta1, *m, g)?;
                let v = ops.average_of_squares(beta2, *v, g)?;
                let spread = ops.b.multiply(v, *scale2)?;
                let below = ops.root_plus(spread, epsilon)?;
                let above = ops.b.multiply(m, *scale1)?;
                let (direction, decay) = (ops.b.divide(above, below)?, ops.full(weight_decay)?);
                let decayed = ops.b.multiply(decay, p)?;
                let direction = ops.b.add(direction, decayed)?;
                let ratio = ops.ratio_of_norms(p, direction)?;
                let rate = ops.b.multiply(*lr, ratio)?;
                let change = ops.b.multiply(rate, direction)?;
                Ok((ops.b.subtract(p, change)?, vec![m, v]))
            }
            (UpdateRule::Adadelta { rho, epsilon }, [squares, changes], [lr]) => {
                let squares = ops.average_of_squares(rho, *squares, g)?;
                let (above, below) = (ops.root_of_sum(*changes, epsilon)?, ops.root_of_sum(squares, epsilon)?);
                let ratio = ops.b.divide(above, below)?;
                let change = ops.b.multiply(ratio, g)?;
                let changes = ops.average_of_squares(rho, *changes, change)?;
                let change = ops.b.multiply(*lr, change)?;
                Ok((ops.b.subtract(p, change)?, vec![squares, changes]))
            }
            (UpdateRule::Adamax { beta1, beta2, epsilon }, [m, u], [rate]) => {
                let m = ops.average(beta1, *m, g)?;
                let (beta2, size) = (ops.full(beta2)?, ops.b.abs(g)?);
                let decayed = ops.b.multiply(beta2, *u)?;
                let decayed = ops.flushed(decayed)?;
                let u = ops.b.maximum(decayed, size)?;
                let (above, epsilon) = (ops.b.multiply(*rate, m)?, ops.full(epsilon)?);
                let below = ops.b.add(u, epsilon)?;
                let change = ops.b.divide(above, below)?;
                Ok((ops.b.subtract(p, change)?, vec![m, u]))
            }
            (UpdateRule::Nadam { beta1, beta2, epsilon }, [m, v], [of_moment, of_gradient, scale]) => {
                let m = ops.average(beta1, *m, g)?;
                let v = ops.average_of_squares(beta2, *v, g)?;
                let spread = ops.b.multiply(v, *scale)?;
                let below = ops.root_plus(spread, epsilon)?;
                let (ahead, fresh) = (ops.b.multiply(*of_moment, m)?, ops.b.multiply(*of_gradient, g)?);
                let above = ops.b.add(ahead, fresh)?;
                let change = ops.b.divide(above, below)?;
                Ok((ops.b.subtract(p, change)?, vec![m, v]))
            }
            (UpdateRule::Ftrl { l1, l2, l2_shrinkage, beta, .. }, [n, z], [lr]) => {
                let (of_shrinkage, of_l2) = (ops.full(2.0 * l2_shrinkage)?, ops.full(2.0 * l2)?);
                let (beta, zero, one) = (ops.full(beta)?, ops.full(0.0)?, ops.full(1.0)?);
                let is_still = ops.b.compare(CompareOp::Eq, *lr, zero)?;
                let rate = ops.b.select(is_still, one, *lr)?;
                let before = ops.b.sqrt(*n)?;
                let squared = ops.b.multiply(g, g)?;
                let sum = ops.b.add(*n, squared)?;
                let after = ops.b.sqrt(sum)?;
                let grown = ops.b.subtract(after, before)?;
                let grown = ops.b.divide(grown, rate)?;
                let (pulled, shrunk) = (ops.b.multiply(grown, p)?, ops.b.multiply(of_shrinkage, p)?);
                let towards = ops.b.add(g, shrunk)?;
                let towards = ops.b.subtract(towards, pulled)?;
                let linear = ops.b.add(*z, towards)?;
                let (low, high) = (ops.full(-l1)?, ops.full(l1)?);
                let clipped = ops.b.maximum(linear, low)?;
                let clipped = ops.b.minimum(clipped, high)?;
                let above = ops.b.subtract(clipped, linear)?;
                let steep = ops.b.add(beta, after)?;
                let steep = ops.b.divide(steep, rate)?;
                let below = ops.b.add(steep, of_l2)?;
                let updated = ops.b.divide(above, below)?;
                let kept = [(p, updated), (*n, sum), (*z, linear)];
                let [p, n, z] = kept.map(|(old, new)| ops.b.select(is_still, old, new));
                Ok((p?, vec![n?, z?]))
            }
            _ => Err(distribute_hlo::Error::Program {
                program: "update rule".to_owned(),
                problem: format!(
                    "{} slots and {} numbers were given; expected {} and {}",
                    slots.len(),
                    numbers.len(),
                    self.slots().len(),
                    self.numbers(1, 0.0).len()
                ),
            }),
        }
    }
}

/// Adds the norm of several tensors together to a program: the root of the sum of the squares of all elements. Squares
/// of large and small elements neither overflow nor vanish.
///
/// # Shapes
/// The tensors may have any shapes, and have one element type, which is the norm's too. The norm of none is an f32.
///
/// # Errors
/// The builder's, if the element types differ.
///
/// # Examples
/// ```
/// use distribute_hlo::{Builder, ElementType, TensorType};
///
/// let mut b = Builder::new("length");
/// let gradients = [2, 3].map(|len| b.parameter(TensorType::new(ElementType::F32, [len])));
/// let norm = distribute_rules::norm(&mut b, &gradients)?;
/// assert_eq!(b.type_of(norm)?, &TensorType::scalar(ElementType::F32));
/// # Ok::<(), distribute_hlo::Error>(())
/// ```
pub fn norm(b: &mut Builder, tensors: &[Value]) -> Result<Value> {
    let mut largest: Option<Value> = None;
    for tensor in tensors {
        let all: Vec<usize> = (0..b.type_of(*tensor)?.ndim()).collect();
        let size = b.abs(*tensor)?;
        let of_tensor = b.reduce(size, Reducer::Max, &all)?;
        largest = Some(match largest {
            Some(largest) => b.maximum(largest, of_tensor)?,
            None => of_tensor,
        });
    }
    let Some(largest) = largest else { return b.scalar(0.0f32) };
    let scalar = b.type_of(largest)?.clone();
    let (zero, one) = (b.full(scalar.clone(), 0.0)?, b.full(scalar.clone(), 1.0)?);
    let positive = b.compare(CompareOp::Gt, largest, zero)?;
    let unit = b.select(positive, largest, one)?;
    let mut sum = zero;
    for tensor in tensors {
        let ty = b.type_of(*tensor)?.clone();
        let units = b.broadcast(unit, &ty.dims)?;
        let scaled = b.divide(*tensor, units)?;
        let squared = b.multiply(scaled, scaled)?;
        let of_tensor = b.reduce(squared, Reducer::Sum, &(0..ty.ndim()).collect::<Vec<_>>())?;
        sum = b.add(sum, of_tensor)?;
    }
    let root = b.sqrt(sum)?;
    b.multiply(root, unit)
}

/// Operations on tensors of one type.
struct Ops<'b> {
    b: &'b mut Builder,
    ty: TensorType,
}

impl Ops<'_> {
    fn full(&mut self, value: f64) -> Result<Value> {
        self.b.full(self.ty.clone(), value)
    }

    /// Returns beta·average + (1 − beta)·value, or zero where that is subnormal.
    fn average(&mut self, beta: f64, average: Value, value: Value) -> Result<Value> {
        let (kept, rest) = (self.full(beta)?, self.full(1.0 - beta)?);
        let (kept, added) = (self.b.multiply(kept, average)?, self.b.multiply(rest, value)?);
        let sum = self.b.add(kept, added)?;
        self.flushed(sum)
    }

    fn average_of_squares(&mut self, beta: f64, average: Value, value: Value) -> Result<Value> {
        let squared = self.b.multiply(value, value)?;
        self.average(beta, average, squared)
    }

    /// Returns √x + epsilon.
    fn root_plus(&mut self, x: Value, epsilon: f64) -> Result<Value> {
        let (root, epsilon) = (self.b.sqrt(x)?, self.full(epsilon)?);
        self.b.add(root, epsilon)
    }

    /// Returns lr·g / √(spread + epsilon).
    fn over_root(&mut self, lr: Value, g: Value, spread: Value, epsilon: f64) -> Result<Value> {
        let (above, below) = (self.b.multiply(lr, g)?, self.root_of_sum(spread, epsilon)?);
        self.b.divide(above, below)
    }

    /// Returns √(x + epsilon).
    fn root_of_sum(&mut self, x: Value, epsilon: f64) -> Result<Value> {
        let epsilon = self.full(epsilon)?;
        let sum = self.b.add(x, epsilon)?;
        self.b.sqrt(sum)
    }

    /// Returns ‖p‖ / ‖direction‖, or 1 where either is 0, for every element.
    fn ratio_of_norms(&mut self, p: Value, direction: Value) -> Result<Value> {
        let (of_p, of_direction) = (norm(self.b, &[p])?, norm(self.b, &[direction])?);
        let scalar = self.b.type_of(of_p)?.clone();
        let (zero, one) = (self.b.full(scalar.clone(), 0.0)?, self.b.full(scalar, 1.0)?);
        let (p_counts, d_counts) =
            (self.b.compare(CompareOp::Gt, of_p, zero)?, self.b.compare(CompareOp::Gt, of_direction, zero)?);
        let both = self.b.and(p_counts, d_counts)?;
        let ratio = self.b.divide(of_p, of_direction)?;
        let ratio = self.b.select(both, ratio, one)?;
        self.b.broadcast(ratio, &self.ty.dims.clone())
    }

    /// Returns zero where an element is subnormal; see [`Float::flushed`](crate::Float::flushed).
    fn flushed(&mut self, x: Value) -> Result<Value> {
        let smallest = match self.ty.element {
            distribute_hlo::ElementType::F64 => f64::MIN_POSITIVE,
            _ => f64::from(f32::MIN_POSITIVE),
        };
        let (size, smallest, zero) = (self.b.abs(x)?, self.full(smallest)?, self.full(0.0)?);
        let is_subnormal = self.b.compare(CompareOp::Lt, size, smallest)?;
        self.b.select(is_subnormal, zero, x)
    }
}

#[cfg(test)]
mod tests;
