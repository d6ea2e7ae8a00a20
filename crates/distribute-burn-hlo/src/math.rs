//! Functions that StableHLO lacks, made of those that it has.

use distribute_hlo::{Builder, CompareOp, ElementType, Number, Reducer, Result, Value};

/// Adds a constant of the type of another value.
pub(crate) fn like(b: &mut Builder, value: Value, number: impl Into<Number>) -> Result<Value> {
    let ty = b.type_of(value)?.clone();
    b.full(ty, number)
}

/// Returns the element type of a value.
pub(crate) fn element_of(b: &Builder, value: Value) -> Result<ElementType> {
    Ok(b.type_of(value)?.element)
}

/// Computes a function in f32 where operands have 16 bits, so that only its result is rounded to them.
pub(crate) fn in_f32<const N: usize>(
    b: &mut Builder,
    operands: [Value; N],
    function: impl FnOnce(&mut Builder, [Value; N]) -> Result<Value>,
) -> Result<Value> {
    let Some(&first) = operands.first() else { return function(b, operands) };
    let element = element_of(b, first)?;
    if !matches!(element, ElementType::F16 | ElementType::BF16) {
        return function(b, operands);
    }
    let mut wide = operands;
    for operand in &mut wide {
        *operand = b.convert(*operand, ElementType::F32)?;
    }
    let result = function(b, wide)?;
    if element_of(b, result)? == ElementType::F32 { b.convert(result, element) } else { Ok(result) }
}

/// Combines elements along dimensions; sums and products of 16 bits in f32.
pub(crate) fn reduce(b: &mut Builder, operand: Value, reducer: Reducer, dims: &[usize]) -> Result<Value> {
    match reducer {
        Reducer::Sum | Reducer::Prod => in_f32(b, [operand], |b, [x]| b.reduce(x, reducer, dims)),
        _ => b.reduce(operand, reducer, dims),
    }
}

/// Returns whether elements are NaN.
pub(crate) fn is_nan(b: &mut Builder, x: Value) -> Result<Value> {
    b.compare(CompareOp::Ne, x, x)
}

/// Compares each element with a number of its type.
pub(crate) fn compare_with(b: &mut Builder, op: CompareOp, x: Value, number: impl Into<Number>) -> Result<Value> {
    let number = like(b, x, number)?;
    b.compare(op, x, number)
}

/// Takes elements of `on_true` where a relation of `x` to a number is true, and of `on_false` elsewhere.
pub(crate) fn select_if(
    b: &mut Builder,
    (x, op, number): (Value, CompareOp, f64),
    on_true: Value,
    on_false: Value,
) -> Result<Value> {
    let pred = compare_with(b, op, x, number)?;
    b.select(pred, on_true, on_false)
}

/// Multiplies by a number.
pub(crate) fn times(b: &mut Builder, x: Value, number: f64) -> Result<Value> {
    let number = like(b, x, number)?;
    b.multiply(x, number)
}

/// Adds a number.
pub(crate) fn plus(b: &mut Builder, x: Value, number: f64) -> Result<Value> {
    let number = like(b, x, number)?;
    b.add(x, number)
}

/// Returns 1 / x.
pub(crate) fn recip(b: &mut Builder, x: Value) -> Result<Value> {
    let one = like(b, x, 1)?;
    b.divide(one, x)
}

/// Returns the sign: −1, 0 or 1, and 0 for NaN.
pub(crate) fn sign(b: &mut Builder, x: Value) -> Result<Value> {
    let element = element_of(b, x)?;
    let (zero, one) = (like(b, x, 0)?, like(b, x, 1)?);
    let above = b.compare(CompareOp::Gt, x, zero)?;
    let rest = match element.is_unsigned_integer() {
        true => zero,
        false => {
            let (minus, below) = (like(b, x, -1)?, b.compare(CompareOp::Lt, x, zero)?);
            b.select(below, minus, zero)?
        }
    };
    b.select(above, one, rest)
}

/// Rounds towards zero.
pub(crate) fn trunc(b: &mut Builder, x: Value) -> Result<Value> {
    let (floor, ceil) = (b.floor(x)?, b.ceil(x)?);
    select_if(b, (x, CompareOp::Lt, 0.0), ceil, floor)
}

/// Returns the remainder with the sign of the divisor.
pub(crate) fn remainder(b: &mut Builder, x: Value, y: Value) -> Result<Value> {
    let rest = b.remainder(x, y)?;
    let zero = like(b, x, 0)?;
    let (low, low_divisor) = (b.compare(CompareOp::Lt, rest, zero)?, b.compare(CompareOp::Lt, y, zero)?);
    let (other, some) = (b.xor(low, low_divisor)?, b.compare(CompareOp::Ne, rest, zero)?);
    let (moved, wrong) = (b.add(rest, y)?, b.and(other, some)?);
    b.select(wrong, moved, rest)
}

/// Returns the hyperbolic cosine. e^x / 2 is computed as one power, since e^x overflows earlier.
pub(crate) fn cosh(b: &mut Builder, x: Value) -> Result<Value> {
    let (up, down) = half_powers(b, x)?;
    b.add(up, down)
}

/// Returns the hyperbolic sine, near 0 by e^x − 1.
pub(crate) fn sinh(b: &mut Builder, x: Value) -> Result<Value> {
    let (up, down) = half_powers(b, x)?;
    let large = b.subtract(up, down)?;
    let less = b.expm1(x)?;
    let power = plus(b, less, 1.0)?;
    let ratio = b.divide(less, power)?;
    let sum = b.add(less, ratio)?;
    let small = times(b, sum, 0.5)?;
    let size = b.abs(x)?;
    select_if(b, (size, CompareOp::Lt, 1.0), small, large)
}

/// Returns e^x / 2 and e^−x / 2.
fn half_powers(b: &mut Builder, x: Value) -> Result<(Value, Value)> {
    let minus = b.negate(x)?;
    let mut half_power = |x| {
        let moved = plus(b, x, -std::f64::consts::LN_2)?;
        b.exp(moved)
    };
    Ok((half_power(x)?, half_power(minus)?))
}

/// Returns the inverse hyperbolic sine.
pub(crate) fn asinh(b: &mut Builder, x: Value) -> Result<Value> {
    let size = b.abs(x)?;
    let square = b.multiply(size, size)?;
    let above = plus(b, square, 1.0)?;
    let root = b.sqrt(above)?;
    let divisor = plus(b, root, 1.0)?;
    let part = b.divide(square, divisor)?;
    let sum = b.add(size, part)?;
    let small = b.log1p(sum)?;
    let log = b.log(size)?;
    let large = plus(b, log, std::f64::consts::LN_2)?;
    let result = select_if(b, (size, CompareOp::Gt, LARGE), large, small)?;
    let minus = b.negate(result)?;
    let signed = select_if(b, (x, CompareOp::Lt, 0.0), minus, result)?;
    // −0 remains.
    select_if(b, (x, CompareOp::Eq, 0.0), x, signed)
}

/// Returns the inverse hyperbolic cosine.
pub(crate) fn acosh(b: &mut Builder, x: Value) -> Result<Value> {
    let (below, above) = (plus(b, x, -1.0)?, plus(b, x, 1.0)?);
    let product = b.multiply(below, above)?;
    let root = b.sqrt(product)?;
    // log(x + √(x² − 1)) = log(1 + (x − 1) + √(x² − 1)), without loss near 1.
    let sum = b.add(below, root)?;
    let small = b.log1p(sum)?;
    let log = b.log(x)?;
    let large = plus(b, log, std::f64::consts::LN_2)?;
    let result = select_if(b, (x, CompareOp::Gt, LARGE), large, small)?;
    let nan = like(b, x, f64::NAN)?;
    select_if(b, (x, CompareOp::Lt, 1.0), nan, result)
}

/// Returns the inverse hyperbolic tangent.
pub(crate) fn atanh(b: &mut Builder, x: Value) -> Result<Value> {
    let minus = b.negate(x)?;
    let (up, down) = (b.log1p(x)?, b.log1p(minus)?);
    let difference = b.subtract(up, down)?;
    times(b, difference, 0.5)
}

/// Returns the angle of which the elements are sines.
pub(crate) fn asin(b: &mut Builder, x: Value) -> Result<Value> {
    let root = other_side(b, x)?;
    b.atan2(x, root)
}

/// Returns the angle of which the elements are cosines.
pub(crate) fn acos(b: &mut Builder, x: Value) -> Result<Value> {
    let root = other_side(b, x)?;
    b.atan2(root, x)
}

/// Returns √(1 − x²) without loss near 1.
fn other_side(b: &mut Builder, x: Value) -> Result<Value> {
    let minus = b.negate(x)?;
    let (below, above) = (plus(b, minus, 1.0)?, plus(b, x, 1.0)?);
    let product = b.multiply(below, above)?;
    b.sqrt(product)
}

/// Returns √(x² + y²) without overflow of the squares.
pub(crate) fn hypot(b: &mut Builder, x: Value, y: Value) -> Result<Value> {
    let (x, y) = (b.abs(x)?, b.abs(y)?);
    let first = b.compare(CompareOp::Ge, x, y)?;
    let (large, small) = (b.select(first, x, y)?, b.select(first, y, x)?);
    let ratio = b.divide(small, large)?;
    let square = b.multiply(ratio, ratio)?;
    let above = plus(b, square, 1.0)?;
    let root = b.sqrt(above)?;
    let length = b.multiply(large, root)?;
    let length = select_if(b, (large, CompareOp::Eq, 0.0), small, length)?;
    let infinity = f64::INFINITY;
    let length = select_if(b, (x, CompareOp::Eq, infinity), x, length)?;
    select_if(b, (y, CompareOp::Eq, infinity), y, length)
}

/// Returns the power with a whole exponent that is known, as burn does: small ones without a logarithm.
pub(crate) fn power_scalar(b: &mut Builder, x: Value, exponent: f64) -> Result<Value> {
    match exponent {
        0.0 => like(b, x, 1),
        1.0 => Ok(x),
        2.0 => b.multiply(x, x),
        -1.0 => recip(b, x),
        -2.0 => {
            let square = b.multiply(x, x)?;
            recip(b, square)
        }
        _ => {
            let exponent = like(b, x, exponent)?;
            b.power(x, exponent)
        }
    }
}

/// Returns the error function.
///
/// # Source
/// Cephes' `erf` for f64; the rational approximation of Eigen and XLA for f32.
pub(crate) fn erf(b: &mut Builder, x: Value) -> Result<Value> {
    match element_of(b, x)? {
        ElementType::F64 => erf_f64(b, x),
        _ => {
            let (low, high) = (like(b, x, -4)?, like(b, x, 4)?);
            let x = b.clamp(low, x, high)?;
            let square = b.multiply(x, x)?;
            let (above, below) = (polynomial(b, square, &ERF_F32)?, polynomial(b, square, &ERF_F32_DIVISOR)?);
            let ratio = b.divide(above, below)?;
            b.multiply(x, ratio)
        }
    }
}

fn erf_f64(b: &mut Builder, x: Value) -> Result<Value> {
    let square = b.multiply(x, x)?;
    let (above, below) = (polynomial(b, square, &ERF)?, polynomial(b, square, &ERF_DIVISOR)?);
    let ratio = b.divide(above, below)?;
    let small = b.multiply(x, ratio)?;
    // The complement is below all steps of 1 from 8 on.
    let (size, eight) = (b.abs(x)?, like(b, x, 8)?);
    let size = b.minimum(size, eight)?;
    let (above, below) = (polynomial(b, size, &ERFC)?, polynomial(b, size, &ERFC_DIVISOR)?);
    let ratio = b.divide(above, below)?;
    let square = b.multiply(size, size)?;
    let minus = b.negate(square)?;
    let power = b.exp(minus)?;
    let complement = b.multiply(power, ratio)?;
    let complement = b.negate(complement)?;
    let large = plus(b, complement, 1.0)?;
    let minus = b.negate(large)?;
    let large = select_if(b, (x, CompareOp::Lt, 0.0), minus, large)?;
    select_if(b, (size, CompareOp::Le, 1.0), small, large)
}

/// Returns a polynomial by Horner's rule, the coefficient of the highest power first.
fn polynomial(b: &mut Builder, x: Value, coefficients: &[f64]) -> Result<Value> {
    let mut sum = like(b, x, 0)?;
    for &coefficient in coefficients {
        let product = b.multiply(sum, x)?;
        sum = plus(b, product, coefficient)?;
    }
    Ok(sum)
}

/// Converts to another type. Floating-point numbers become the nearest integer towards zero that the type has, and NaN
/// 0, as in Rust.
pub(crate) fn convert(b: &mut Builder, x: Value, to: ElementType) -> Result<Value> {
    let from = element_of(b, x)?;
    if from == to {
        return Ok(x);
    }
    if !from.is_float() || !to.is_integer() {
        return b.convert(x, to);
    }
    // 16 bits do not reach the limits of all integers, f32 does.
    let x = if from == ElementType::F64 { x } else { b.convert(x, ElementType::F32)? };
    let signed = to.is_signed_integer();
    let limit = 2f64.powi(to.bits() as i32 - i32::from(signed));
    let low = if signed { -limit } else { 0.0 };
    let (high_integer, low_integer) = (limit as i128 - 1, low as i128);
    let zero = like(b, x, 0)?;
    let above = compare_with(b, CompareOp::Ge, x, limit)?;
    let below = compare_with(b, CompareOp::Le, x, low)?;
    let nan = is_nan(b, x)?;
    let outside = b.or(above, below)?;
    let outside = b.or(outside, nan)?;
    let inside = b.select(outside, zero, x)?;
    let result = b.convert(inside, to)?;
    let (high_value, low_value) =
        (like(b, result, Number::Integer(high_integer))?, like(b, result, Number::Integer(low_integer))?);
    let result = b.select(below, low_value, result)?;
    b.select(above, high_value, result)
}

/// The number from which on x² + 1 is x², and far from overflow.
const LARGE: f64 = 1e10;

const ERF_F32: [f64; 7] = [
    -2.72614225801306e-10,
    2.77068142495902e-8,
    -2.10102402082508e-6,
    -5.69250639462346e-5,
    -7.34990630326855e-4,
    -2.95459980854025e-3,
    -1.60960333262415e-2,
];
const ERF_F32_DIVISOR: [f64; 5] =
    [-1.45660718464996e-5, -2.13374055278905e-4, -1.68282697438203e-3, -7.37332916720468e-3, -1.42647390514189e-2];
const ERF: [f64; 5] =
    [9.604973739870516, 9.002601972038427e1, 2.232005345946843e3, 7.003325141128051e3, 5.559230130103949e4];
const ERF_DIVISOR: [f64; 6] =
    [1.0, 3.356171416475031e1, 5.213579497801527e2, 4.594323829709801e3, 2.2629000061389095e4, 4.926739426086359e4];
const ERFC: [f64; 9] = [
    2.461969814735305e-10,
    5.641895648310689e-1,
    7.463210564422699,
    4.863719709856814e1,
    1.965208329560771e2,
    5.264451949954773e2,
    9.345285271719576e2,
    1.0275518868951572e3,
    5.575353353693994e2,
];
const ERFC_DIVISOR: [f64; 9] = [
    1.0,
    1.3228195115474499e1,
    8.670721408859897e1,
    3.549377788878199e2,
    9.757085017432055e2,
    1.8239091668790973e3,
    2.2463376081871097e3,
    1.6566630919416134e3,
    5.575353408177277e2,
];
