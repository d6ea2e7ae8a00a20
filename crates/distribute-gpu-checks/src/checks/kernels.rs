//! Element-wise arithmetic, compared with a reference on random inputs.

use distribute_device::cuda::{Combine, MAX_BUFFERS};
use distribute_device::{DType, Device, Stream};

use crate::Result;
use crate::check::{Entry, Outcome, ensure, passed};
use crate::gpu::{Gpus, get, put, write};
use crate::values::{Random, compare, compare_terms, from_wide, integers, same, wide, wrapped};

pub(super) const CHECKS: [Entry; 4] = [
    ("kernels: buffers are reduced as the reference does", reduce),
    ("kernels: values are scaled as the reference does", scale),
    ("kernels: values are converted as the reference does", cast),
    ("kernels: values that are not finite are found, wherever they are", finite),
];

/// The initial contents of outputs, by which elements that are not written are detected.
const POISON: u8 = 0xa5;

/// Numbers of elements; the last has more bytes than all threads of a GPU's first round read.
fn sizes(gpus: &Gpus, dtype: DType) -> Vec<usize> {
    let large = if gpus.are_simulated() { 40_000 } else { (18 << 20) / dtype.size_bytes() };
    vec![1, 7, 4099, large + 3]
}

fn reduce(gpus: &Gpus) -> Result<Outcome> {
    let (device, stream) = gpus.first()?;
    let mut random = Random::fresh();
    let mut tried = 0;
    for dtype in DType::ALL {
        for combine in [Combine::Sum, Combine::Product, Combine::Min, Combine::Max] {
            for (count, divisor) in sizes(gpus, dtype).into_iter().zip([1, 3, 1, 3]) {
                let sources = [1, 2, 3, 8, MAX_BUFFERS][random.below(5)];
                let destinations = 1 + random.below(3);
                // Every other buffer starts unaligned to 16 bytes.
                let shift = dtype.size_bytes() * random.below(2);
                let inputs: Vec<Vec<u8>> = (0..sources).map(|_| random.elements(dtype, count)).collect();
                let place = |bytes: &[u8]| {
                    let whole = put(&device, &stream, &[&vec![POISON; shift], bytes].concat())?;
                    Ok::<_, crate::Error>(whole.slice(shift..shift + bytes.len())?)
                };
                let from = inputs.iter().map(|bytes| place(bytes)).collect::<Result<Vec<_>>>()?;
                let poison = vec![POISON; count * dtype.size_bytes()];
                let to = (0..destinations).map(|_| place(&poison)).collect::<Result<Vec<_>>>()?;
                let (from, to): (Vec<_>, Vec<_>) = (from.iter().collect(), to.iter().collect());
                stream.reduce(combine, dtype, &from, &to, divisor)?;
                let what =
                    format!("{combine:?} of {sources} × {count} {dtype}, divided by {divisor}, seed {}", random.seed);
                for buffer in &to {
                    check_reduced(&what, dtype, combine, divisor, &inputs, &get(&device, &stream, buffer)?)?;
                }
                // Also in place.
                stream.reduce(combine, dtype, &from, &[from[0]], divisor)?;
                check_reduced(&what, dtype, combine, divisor, &inputs, &get(&device, &stream, from[0])?)?;
                tried += 1;
            }
        }
    }
    let refused = stream.reduce(Combine::Sum, DType::F32, &[], &[], 1);
    ensure(refused.is_err(), || "a reduction of nothing was accepted".to_owned())?;
    passed(format!("{tried} reductions of 10 types"))
}

fn check_reduced(
    what: &str,
    dtype: DType,
    combine: Combine,
    divisor: u32,
    inputs: &[Vec<u8>],
    result: &[u8],
) -> Result<()> {
    if dtype.is_float() {
        let inputs: Vec<Vec<f64>> = inputs.iter().map(|bytes| wide(dtype, bytes)).collect();
        let reduced = |of: fn(f64) -> f64| -> Vec<f64> {
            let columns = (0..inputs[0].len()).map(|at| inputs.iter().map(move |input| of(input[at])));
            let folded = columns.map(|column| match combine {
                Combine::Sum => column.sum::<f64>(),
                Combine::Product => column.product::<f64>(),
                Combine::Min => column.fold(f64::INFINITY, f64::min),
                Combine::Max => column.fold(f64::NEG_INFINITY, f64::max),
            });
            folded.map(|folded| folded / f64::from(divisor)).collect()
        };
        let expected = reduced(|value| value);
        let terms = if combine == Combine::Sum { reduced(f64::abs) } else { expected.clone() };
        return compare_terms(what, dtype, result, &expected, &terms);
    }
    let inputs: Vec<Vec<i128>> = inputs.iter().map(|bytes| integers(dtype, bytes)).collect();
    let result = integers(dtype, result);
    for (at, found) in result.iter().enumerate() {
        let column = inputs.iter().map(|input| input[at]);
        let folded = match combine {
            Combine::Sum => column.fold(0, |a, b| wrapped(dtype, a + b)),
            Combine::Product => column.fold(1i128, |a, b| wrapped(dtype, a.wrapping_mul(b))),
            Combine::Min => column.min().unwrap_or(0),
            Combine::Max => column.max().unwrap_or(0),
        };
        let expected = folded / i128::from(divisor);
        ensure(*found == expected, || format!("{what}: element {at} is {found}, not {expected}"))?;
    }
    Ok(())
}

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

fn scale(gpus: &Gpus) -> Result<Outcome> {
    let (device, stream) = gpus.first()?;
    let mut random = Random::fresh();
    for dtype in FLOATS {
        for count in sizes(gpus, dtype) {
            let bytes = random.elements(dtype, count);
            let buffer = put(&device, &stream, &bytes)?;
            stream.scale(dtype, &buffer, 0.37)?;
            // The factor is rounded to the type of the computation.
            let factor = if dtype == DType::F64 { 0.37 } else { f64::from(0.37f32) };
            let expected: Vec<f64> = wide(dtype, &bytes).iter().map(|value| value * factor).collect();
            let what = format!("{count} {dtype}, seed {}", random.seed);
            compare(&what, dtype, &get(&device, &stream, &buffer)?, &expected)?;
        }
    }
    let buffer = device.allocate(4)?;
    ensure(stream.scale(DType::I32, &buffer, 2.0).is_err(), || "integers were scaled".to_owned())?;
    passed("4 types")
}

fn cast(gpus: &Gpus) -> Result<Outcome> {
    let (device, stream) = gpus.first()?;
    let mut random = Random::fresh();
    for from in FLOATS {
        for to in FLOATS {
            for count in sizes(gpus, from) {
                let bytes = random.elements(from, count);
                let source = put(&device, &stream, &bytes)?;
                let target = put(&device, &stream, &vec![POISON; count * to.size_bytes()])?;
                stream.cast(from, &source, to, &target)?;
                // Rounded once from the exact value, as the reference is; f64 is converted to 16 bits by way of f32.
                let by_way: Vec<f64> = match (from, to) {
                    (DType::F64, DType::F16 | DType::BF16) => {
                        wide(from, &bytes).iter().map(|value| f64::from(*value as f32)).collect()
                    }
                    _ => wide(from, &bytes),
                };
                let what = format!("{count} {from} to {to}, seed {}", random.seed);
                same(&what, &get(&device, &stream, &target)?, &from_wide(to, &by_way))?;
            }
        }
    }
    let special = [f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 1e300, 1e-300, 65520.0, 6e-8, f64::NAN];
    for from in [DType::F64, DType::F32] {
        for to in [DType::F16, DType::BF16, DType::F32] {
            let source = put(&device, &stream, &from_wide(from, &special))?;
            let target = device.allocate(special.len() * to.size_bytes())?;
            stream.cast(from, &source, to, &target)?;
            let result = wide(to, &get(&device, &stream, &target)?);
            let by_way: Vec<f64> = special.iter().map(|value| f64::from(*value as f32)).collect();
            for (found, expected) in result.iter().zip(wide(to, &from_wide(to, &by_way))) {
                let equal = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
                ensure(equal, || format!("{from} to {to}: {found} came, not {expected}"))?;
            }
        }
    }
    passed("16 pairs of types, infinities and NaN")
}

fn finite(gpus: &Gpus) -> Result<Outcome> {
    let (device, stream) = gpus.first()?;
    let mut random = Random::fresh();
    let flag = device.allocate(4)?;
    for dtype in FLOATS {
        for count in sizes(gpus, dtype) {
            let mut values = wide(dtype, &random.elements(dtype, count));
            let buffer = put(&device, &stream, &from_wide(dtype, &values))?;
            stream.fill(&flag, 0)?;
            stream.flag_non_finite(dtype, &buffer, &flag)?;
            let found = get(&device, &stream, &flag)?;
            ensure(found == [0; 4], || format!("{dtype}: finite values were flagged, seed {}", random.seed))?;
            for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let place = random.below(count);
                let kept = std::mem::replace(&mut values[place], bad);
                write(&device, &stream, &from_wide(dtype, &values), &buffer)?;
                values[place] = kept;
                stream.fill(&flag, 0)?;
                stream.flag_non_finite(dtype, &buffer, &flag)?;
                let found = get(&device, &stream, &flag)?;
                ensure(found == [1, 0, 0, 0], || format!("{dtype}: {bad} at {place} of {count} was not found"))?;
            }
        }
    }
    passed("4 types, NaN and both infinities")
}
