//! Random numbers by counter.

use crate::{BinaryOp, Builder, ElementType, Literal, Number, OpKind, Result, RngAlgorithm, TensorType, Value};

impl Builder {
    /// Returns the next state, and random bits as unsigned integers of type `ty`. Equal states give equal bits,
    /// for equal sizes.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the state is not that of the algorithm, or `ty` is not of
    /// unsigned integers of 32 or 64 bits.
    pub fn rng_bit_generator(
        &mut self,
        algorithm: RngAlgorithm,
        state: Value,
        ty: TensorType,
    ) -> Result<(Value, Value)> {
        let [given] = self.types("rng_bit_generator", [state])?;
        let lengths: &[usize] = match algorithm {
            RngAlgorithm::ThreeFry => &[2],
            RngAlgorithm::Philox => &[2, 3],
        };
        let fits = given.element == ElementType::U64 && given.ndim() == 1 && lengths.contains(&given.dims[0]);
        let problem = if !fits {
            format!("the state of {algorithm:?} is u64 of one dimension with a size in {lengths:?}")
        } else if !matches!(ty.element, ElementType::U32 | ElementType::U64) {
            format!("bits of type {} were asked for; expected u32 or u64", ty.element.name())
        } else {
            let kind = OpKind::RngBitGenerator { algorithm };
            let results = self.push_all(kind, &[state], vec![given, ty], Vec::new())?;
            return match results[..] {
                [next, bits] => Ok((next, bits)),
                _ => Err(self.refuse("rng_bit_generator", &[("state", state)], "it has two results")),
            };
        };
        Err(self.refuse("rng_bit_generator", &[("state", state)], problem))
    }

    /// Returns the next state of ThreeFry, and numbers from `low` up to, not including, `high`, all equally likely in
    /// steps of the element type's precision.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the state is not `u64[2]`, elements are not floating-point
    /// numbers, or the limits are not finite or not in order after they are rounded to the element type.
    pub fn uniform(&mut self, state: Value, ty: TensorType, low: f64, high: f64) -> Result<(Value, Value)> {
        let scalar = TensorType::scalar(ty.element);
        let last = if ty.element.is_float() { last_below(&scalar, low, high)? } else { None };
        let Some(last) = last else {
            let problem = format!(
                "{} from {low} to {high} were asked for; expected floating-point numbers and finite limits in order",
                ty.element.name()
            );
            return Err(self.refuse("uniform", &[("state", state)], problem));
        };
        let (state, unit) = self.unit_uniform(state, &ty, false)?;
        if low == 0.0 && high == 1.0 {
            return Ok((state, unit));
        }
        let low_value = self.full(ty.clone(), low)?;
        let moved = if is_finite(&Literal::splat(scalar, high - low)?) {
            let range = self.full(ty.clone(), high - low)?;
            let scaled = self.multiply(unit, range)?;
            self.add(scaled, low_value)?
        } else {
            // The type does not have the difference of the limits, which have different signs.
            let high_value = self.full(ty.clone(), high)?;
            let one = self.full(ty.clone(), 1)?;
            let rest = self.subtract(one, unit)?;
            let of_low = self.multiply(rest, low_value)?;
            let of_high = self.multiply(unit, high_value)?;
            self.add(of_low, of_high)?
        };
        // Rounding may have reached the upper limit.
        let last = self.constant(last)?;
        let last = self.broadcast(last, &ty.dims)?;
        Ok((state, self.binary(BinaryOp::Minimum, moved, last)?))
    }

    /// Returns the next state of ThreeFry, and normally distributed numbers of mean 0 and standard deviation 1.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if the state is not `u64[2]`, or elements are not floating-point
    /// numbers.
    ///
    /// # Source
    /// Box and Muller, "A note on the generation of random normal deviates", 1958.
    pub fn normal(&mut self, state: Value, ty: TensorType) -> Result<(Value, Value)> {
        if !ty.element.is_float() {
            let problem = format!("{} were asked for; expected floating-point numbers", ty.element.name());
            return Err(self.refuse("normal", &[("state", state)], problem));
        }
        // 16-bit numbers have too few steps near 0, so they are rounded at the end.
        let wide = match ty.element {
            ElementType::F64 => ty.clone(),
            _ => ty.with_element(ElementType::F32),
        };
        let (state, radius) = self.unit_uniform(state, &wide, true)?;
        let (state, angle) = self.unit_uniform(state, &wide, false)?;
        let log = self.log(radius)?;
        let minus_two = self.full(wide.clone(), -2)?;
        let square = self.multiply(log, minus_two)?;
        let length = self.sqrt(square)?;
        let turn = self.full(wide, std::f64::consts::TAU)?;
        let angle = self.multiply(angle, turn)?;
        let cosine = self.cosine(angle)?;
        let normal = self.multiply(length, cosine)?;
        Ok((
            state,
            if ty.element == ElementType::F32 || ty.element == ElementType::F64 {
                normal
            } else {
                self.convert(normal, ty.element)?
            },
        ))
    }

    /// Returns the next state, and numbers from 0 up to, not including, 1; the other way round if `above_zero`.
    fn unit_uniform(&mut self, state: Value, ty: &TensorType, above_zero: bool) -> Result<(Value, Value)> {
        // As many bits as a significand has, so that every number is exact.
        let (bits, digits) = match ty.element {
            ElementType::F64 => (ElementType::U64, 53),
            ElementType::F32 => (ElementType::U32, 24),
            ElementType::F16 => (ElementType::U32, 11),
            _ => (ElementType::U32, 8),
        };
        let integers = ty.with_element(bits);
        let (state, random) = self.rng_bit_generator(RngAlgorithm::ThreeFry, state, integers.clone())?;
        let shift = self.full(integers.clone(), Number::Integer(i128::from(bits.bits() - digits)))?;
        let mut high = self.shift_right_logical(random, shift)?;
        if above_zero {
            let one = self.full(integers, 1)?;
            high = self.add(high, one)?;
        }
        let whole = self.convert(high, ty.element)?;
        let scale = self.full(ty.clone(), 0.5f64.powi(digits as i32))?;
        Ok((state, self.multiply(whole, scale)?))
    }
}

/// Returns the largest number below `high` as a scalar, or `None` if there is none from `low` on.
fn last_below(scalar: &TensorType, low: f64, high: f64) -> Result<Option<Literal>> {
    let (from, to) = (Literal::splat(scalar.clone(), low)?, Literal::splat(scalar.clone(), high)?);
    let are_finite = is_finite(&from) && is_finite(&to);
    let width = scalar.element.size_bytes();
    let (from, to) = (read(from.bytes()), read(to.bytes()));
    let sign = 1u64 << (8 * width - 1);
    // In this order bits increase with the number.
    let ordered = |bits: u64| if bits & sign == 0 { i128::from(bits) } else { -i128::from(bits ^ sign) };
    if !are_finite || ordered(from) >= ordered(to) {
        return Ok(None);
    }
    let last = ordered(to) - 1;
    let bits = if last >= 0 { last as u64 } else { sign | last.unsigned_abs() as u64 };
    Literal::from_bytes(scalar.clone(), bits.to_le_bytes()[..width].to_vec()).map(Some)
}

/// Returns whether a scalar of floating-point numbers is finite.
fn is_finite(scalar: &Literal) -> bool {
    let (sign, exponent): (u32, u64) = match scalar.ty().element {
        ElementType::F64 => (63, 0x7FF << 52),
        ElementType::F32 => (31, 0xFF << 23),
        ElementType::F16 => (15, 0x1F << 10),
        _ => (15, 0xFF << 7),
    };
    read(scalar.bytes()) & !(1 << sign) < exponent
}

/// Reads an unsigned integer, least significant byte first.
fn read(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}
