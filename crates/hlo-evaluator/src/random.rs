//! Random bits, as XLA's expansion of the operation makes them.

use distribute_hlo::{ElementType, RngAlgorithm, TensorType};

use crate::Tensor;
use crate::number::Num;
use crate::tensor::indices;

/// Returns the next state and the bits.
pub(crate) fn rng_bit_generator(algorithm: RngAlgorithm, state: &Tensor, ty: &TensorType) -> [Tensor; 2] {
    let state_words: Vec<u64> = (0..state.dims()[0]).map(|place| state.number(place).int() as u64).collect();
    let (next, bits) = match algorithm {
        RngAlgorithm::ThreeFry => three_fry(&state_words, ty),
        RngAlgorithm::Philox => philox(&state_words, ty),
    };
    let next = next.into_iter().map(|part| Num::Int(part.into())).collect();
    let bits = bits.into_iter().map(|number| Num::Int(number.into())).collect();
    [Tensor::from_numbers(state.ty().clone(), next), Tensor::from_numbers(ty.clone(), bits)]
}

fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

fn whole(halves: [u32; 2]) -> u64 {
    u64::from(halves[0]) | u64::from(halves[1]) << 32
}

fn three_fry(state: &[u64], ty: &TensorType) -> (Vec<u64>, Vec<u64>) {
    let key = halves(state[0]);
    let at = |place: usize| three_fry_block(key, halves(state[1].wrapping_add(place as u64)));
    if ty.element == ElementType::U64 {
        let count = ty.elements().unwrap_or(0);
        let bits = (0..count).map(|place| whole(at(place))).collect();
        return (vec![state[0], state[1].wrapping_add(count as u64)], bits);
    }
    // A block has two numbers, which lie next to each other along the first even dimension, else the longest.
    let dims = &ty.dims;
    let even = dims.iter().position(|size| size % 2 == 0);
    let longest = dims.iter().max().and_then(|most| dims.iter().position(|size| size == most));
    let Some(split) = even.or(longest) else {
        return (vec![state[0], state[1].wrapping_add(1)], vec![at(0)[0].into()]);
    };
    let mut blocks = dims.clone();
    blocks[split] = blocks[split].div_ceil(2);
    let bits = indices(dims)
        .map(|mut index| {
            let half = index[split] % 2;
            index[split] /= 2;
            let block = index.iter().zip(&blocks).fold(0, |flat, (&i, &size)| flat * size + i);
            at(block)[half].into()
        })
        .collect();
    let used: usize = blocks.iter().product();
    (vec![state[0], state[1].wrapping_add(used as u64)], bits)
}

/// ThreeFry-2x32 with 20 rounds: Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", 2011.
fn three_fry_block(key: [u32; 2], counter: [u32; 2]) -> [u32; 2] {
    let keys = [key[0], key[1], 0x1BD1_1BDA ^ key[0] ^ key[1]];
    let rotations = [[13, 15, 26, 6], [17, 29, 16, 24]];
    let mut x = [counter[0].wrapping_add(keys[0]), counter[1].wrapping_add(keys[1])];
    for group in 0..5usize {
        for rotation in rotations[group % 2] {
            x[0] = x[0].wrapping_add(x[1]);
            x[1] = x[1].rotate_left(rotation) ^ x[0];
        }
        x[0] = x[0].wrapping_add(keys[(group + 1) % 3]);
        x[1] = x[1].wrapping_add(keys[(group + 2) % 3]).wrapping_add(group as u32 + 1);
    }
    x
}

fn philox(state: &[u64], ty: &TensorType) -> (Vec<u64>, Vec<u64>) {
    // A state of two has its key as the upper half of the counter too.
    let counter = u128::from(state[1]) | u128::from(state.get(2).copied().unwrap_or(state[0])) << 64;
    let count = ty.elements().unwrap_or(0);
    let long = ty.element == ElementType::U64;
    let blocks = (if long { 2 * count } else { count }).div_ceil(4);
    let mut bits: Vec<u64> = Vec::new();
    for block in 0..blocks {
        let place = counter.wrapping_add(block as u128);
        let [low, high] = [halves(place as u64), halves((place >> 64) as u64)];
        let [a, b, c, d] = philox_block(halves(state[0]), [low[0], low[1], high[0], high[1]]);
        if long {
            bits.extend([whole([a, b]), whole([c, d])]);
        } else {
            bits.extend([a, b, c, d].map(u64::from));
        }
    }
    bits.truncate(count);
    let next = counter.wrapping_add(blocks as u128);
    let mut new_state = vec![state[0], next as u64];
    if state.len() == 3 {
        new_state.push((next >> 64) as u64);
    }
    (new_state, bits)
}

/// Philox-4x32 with 10 rounds, of the same paper.
fn philox_block(mut key: [u32; 2], mut x: [u32; 4]) -> [u32; 4] {
    for _ in 0..10 {
        let first = halves(u64::from(x[0]) * 0xD251_1F53);
        let second = halves(u64::from(x[2]) * 0xCD9E_8D57);
        x = [second[1] ^ x[1] ^ key[0], second[0], first[1] ^ x[3] ^ key[1], first[0]];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    x
}
