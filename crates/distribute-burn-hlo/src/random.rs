//! Lowering of operations that draw random numbers.

use burn_backend::Distribution;
use burn_ir::RandomOpIr;
use distribute_hlo::{Builder, CompareOp, ElementType, RngAlgorithm, TensorType, Value};

use crate::{Lowering, Result, math};

/// Draws from the program's own stream: the numbers are distributed as burn says, but are not those of another device.
pub(crate) fn lower(l: &mut Lowering<'_>, op: &RandomOpIr) -> Result<()> {
    let ty = l.type_of(&op.out)?;
    // Integers are made of numbers whose steps are small enough for 53 bits.
    let float = if ty.element.is_float() { ty.clone() } else { ty.with_element(ElementType::F64) };
    let numbers = match op.distribution {
        Distribution::Default if ty.element.is_integer() => l.draw(|b, state| whole_range(b, state, &ty))?,
        Distribution::Default => l.draw(|b, state| b.uniform(state, float, 0.0, 1.0))?,
        Distribution::Uniform(low, high) if low < high && low.is_finite() && high.is_finite() => {
            let drawn = l.draw(|b, state| b.uniform(state, float, low, high))?;
            if ty.element.is_float() { drawn } else { l.build(|b| b.floor(drawn))? }
        }
        Distribution::Uniform(low, high) => {
            return Err(l.unsupported(&format!("there are no numbers from {low} up to {high}; give limits in order")));
        }
        Distribution::Bernoulli(probability) if (0.0..=1.0).contains(&probability) => {
            let drawn = l.draw(|b, state| b.uniform(state, ty.with_element(ElementType::F32), 0.0, 1.0))?;
            l.build(|b| math::compare_with(b, CompareOp::Lt, drawn, probability))?
        }
        Distribution::Bernoulli(probability) => {
            return Err(l.unsupported(&format!("{probability} is not a probability; give a number from 0 to 1")));
        }
        Distribution::Normal(mean, deviation) if mean.is_finite() && deviation.is_finite() && deviation >= 0.0 => {
            let drawn = l.draw(|b, state| b.normal(state, float))?;
            l.build(|b| {
                math::in_f32(b, [drawn], |b, [x]| {
                    let scaled = math::times(b, x, deviation)?;
                    math::plus(b, scaled, mean)
                })
            })?
        }
        Distribution::Normal(mean, deviation) => {
            let problem = format!("mean {mean} and deviation {deviation} have no distribution; give finite numbers");
            return Err(l.unsupported(&problem));
        }
    };
    let result = l.build(|b| math::convert(b, numbers, ty.element))?;
    l.set(&op.out, result)
}

/// Draws integers of which all values of the type are equally likely.
fn whole_range(b: &mut Builder, state: Value, ty: &TensorType) -> distribute_hlo::Result<(Value, Value)> {
    let (state, bits) = b.rng_bit_generator(RngAlgorithm::ThreeFry, state, ty.with_element(ElementType::U64))?;
    Ok((state, b.convert(bits, ty.element)?))
}
