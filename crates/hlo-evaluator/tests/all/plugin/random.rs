//! Random numbers.

use distribute_hlo::{ElementType, RngAlgorithm, TensorType};
use hlo_evaluator::Tensor;

use super::agree;

#[test]
fn random_bits_and_numbers() {
    agree(1, 2, |case| {
        let state: Vec<u64> = (0..3).map(|_| case.rng.u64(u64::MAX - 2..)).collect();
        let short = case.given(Tensor::new([2], state[..2].to_vec()));
        let long = case.given(Tensor::new([3], state.clone()));
        for ndim in 0..=3 {
            let dims = case.dims(ndim, ndim);
            for element in [ElementType::U32, ElementType::U64] {
                for (algorithm, state) in
                    [(RngAlgorithm::ThreeFry, short), (RngAlgorithm::Philox, short), (RngAlgorithm::Philox, long)]
                {
                    let ty = TensorType::new(element, dims.clone());
                    let (next, bits) = case.b.rng_bit_generator(algorithm, state, ty).unwrap();
                    case.exact(format!("next state of {algorithm:?} {element} {dims:?}"), Ok(next));
                    case.exact(format!("bits of {algorithm:?}"), Ok(bits));
                }
            }
            for element in [ElementType::F32, ElementType::F64, ElementType::F16, ElementType::BF16] {
                let (next, numbers) = case.b.uniform(short, TensorType::new(element, dims.clone()), -2.0, 0.5).unwrap();
                case.close("uniform", Ok(numbers));
                let (_, numbers) = case.b.normal(next, TensorType::new(element, dims.clone())).unwrap();
                case.close("normal", Ok(numbers));
            }
        }
    });
}
