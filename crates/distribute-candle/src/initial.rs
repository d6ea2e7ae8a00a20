//! Initial values that depend only on a seed and the variable's name, so that every worker draws the same values.

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::Init;
use candle_nn::init::NormalOrUniform;
use distribute_types::{FNV64, fnv1a_64};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Draws the initial value of a variable. candle's own generator cannot be seeded on the CPU.
pub(crate) fn initial(
    seed: u64,
    name: &str,
    init: Init,
    shape: &Shape,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let mut draw = Draw(ChaCha8Rng::seed_from_u64(seed ^ hash(name)));
    let count = shape.elem_count();
    let values: Vec<f32> = match init {
        Init::Const(value) => return Tensor::full(value, shape, device)?.to_dtype(dtype),
        Init::Uniform { lo, up } => (0..count).map(|_| draw.uniform(lo, up)).collect(),
        Init::Randn { mean, stdev } => draw.normals(count, mean, stdev),
        Init::Kaiming { dist, fan, non_linearity } => {
            let stdev = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            match dist {
                NormalOrUniform::Uniform => {
                    let bound = 3f64.sqrt() * stdev;
                    (0..count).map(|_| draw.uniform(-bound, bound)).collect()
                }
                NormalOrUniform::Normal => draw.normals(count, 0.0, stdev),
            }
        }
    };
    Tensor::from_vec(values, shape, device)?.to_dtype(dtype)
}

struct Draw(ChaCha8Rng);

impl Draw {
    /// Returns a number in [0, 1) with 53 random bits.
    fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn uniform(&mut self, low: f64, high: f64) -> f32 {
        (low + self.unit() * (high - low)) as f32
    }

    /// Draws normally distributed numbers in pairs (Box and Muller, 1958).
    fn normals(&mut self, count: usize, mean: f64, stdev: f64) -> Vec<f32> {
        let mut values = Vec::with_capacity(count + 1);
        while values.len() < count {
            let (radius, angle) = ((-2.0 * (1.0 - self.unit()).ln()).sqrt(), std::f64::consts::TAU * self.unit());
            values.push((mean + stdev * radius * angle.cos()) as f32);
            values.push((mean + stdev * radius * angle.sin()) as f32);
        }
        values.truncate(count);
        values
    }
}

/// Computes the 64-bit FNV-1a hash, so that variables with one seed draw from different streams.
pub(crate) fn hash(name: &str) -> u64 {
    fnv1a_64(FNV64, name.bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(seed: u64, name: &str, init: Init) -> Vec<f32> {
        let shape = Shape::from((40, 50));
        initial(seed, name, init, &shape, DType::F32, &Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn values_depend_on_seed_and_name() {
        let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
        assert_eq!(values(1, "a", init), values(1, "a", init));
        assert_ne!(values(1, "a", init), values(2, "a", init));
        assert_ne!(values(1, "a", init), values(1, "b", init));
    }

    #[test]
    fn distributions_have_their_moments() {
        let moments = |values: Vec<f32>| {
            let mean = values.iter().sum::<f32>() / values.len() as f32;
            (mean, (values.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / values.len() as f32).sqrt())
        };
        let (mean, deviation) = moments(values(3, "n", Init::Randn { mean: 1.0, stdev: 2.0 }));
        assert!((mean - 1.0).abs() < 0.2 && (deviation - 2.0).abs() < 0.2, "{mean} {deviation}");
        let (mean, deviation) = moments(values(3, "u", Init::Uniform { lo: -1.0, up: 1.0 }));
        assert!(mean.abs() < 0.1 && (deviation - 0.577).abs() < 0.05, "{mean} {deviation}");
        assert!(values(3, "c", Init::Const(0.5)).iter().all(|x| *x == 0.5));
    }
}
