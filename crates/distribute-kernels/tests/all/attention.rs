//! Attention.

use distribute_kernels::Float;
use distribute_kernels::attention::{Arguments, Attention, Results, Vectors};

use super::*;

/// Queries, keys and values of shape batch × tokens × heads × width, and a mask of queries × keys.
struct Given {
    of: Attention,
    tensors: [Vec<f64>; 3],
    mask: Option<Vec<f64>>,
}

impl Given {
    fn new(of: Attention, masked: bool) -> Given {
        let lens = [of.queries * of.heads, of.keys * of.key_heads, of.keys * of.key_heads];
        let mut tensors = [0, 1, 2].map(|part| numbers(of.batch * lens[part] * of.width, part));
        // Scores that differ much.
        tensors[0].iter_mut().for_each(|q| *q *= 4.0);
        let mask = numbers(of.queries * of.keys, 5).into_iter().enumerate().map(|(at, number)| match number {
            // Each query sees a key, also if it sees no later one.
            number if number > 0.5 && at % of.keys != 0 => f64::NEG_INFINITY,
            number => number,
        });
        Given { of, tensors, mask: masked.then(|| mask.collect()) }
    }

    fn naive(&self) -> Vec<f64> {
        let Attention { batch, heads, key_heads, queries, keys, width, .. } = self.of;
        let [q, k, v] = &self.tensors;
        let mut out = vec![0.0; q.len()];
        for at in 0..batch * queries * heads {
            let (example, query, head) = (at / heads / queries, at / heads % queries, at % heads);
            let place = |key: usize| ((example * keys + key) * key_heads + head / (heads / key_heads)) * width;
            let score = |key: usize| {
                if self.of.causal && key + queries > query + keys {
                    return f64::NEG_INFINITY;
                }
                let products = q[at * width..][..width].iter().zip(&k[place(key)..]).map(|(q, k)| q * k);
                products.sum::<f64>() * self.of.scale + self.mask.as_ref().map_or(0.0, |mask| mask[query * keys + key])
            };
            let scores: Vec<f64> = (0..keys).map(score).collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - top).exp()).sum();
            for (key, score) in scores.iter().enumerate() {
                let weight = (score - top).exp() / sum;
                for element in 0..width {
                    out[at * width + element] += weight * v[place(key) + element];
                }
            }
        }
        out
    }

    /// Returns result and gradients, of which the first is that of queries.
    fn run<T: Float>(&self, gradient: &[f64], packed: bool) -> [Vec<T>; 4] {
        let of = &self.of;
        let to = |x: &[f64]| x.iter().map(|x| T::from_f64(*x)).collect::<Vec<T>>();
        let tensors = self.tensors.each_ref().map(|tensor| to(tensor));
        let heads = [of.heads, of.key_heads, of.key_heads];
        let tokens = [of.queries, of.keys, of.keys];
        let row = heads.iter().sum::<usize>() * of.width;
        let starts = [0, of.heads * of.width, (of.heads + of.key_heads) * of.width];
        // The three tensors side by side for each token.
        let mut all = vec![T::default(); if packed { of.batch * of.keys * row } else { 0 }];
        for (part, tensor) in tensors.iter().enumerate().filter(|_| packed) {
            let size = heads[part] * of.width;
            for (token, elements) in tensor.chunks(size).enumerate() {
                all[token * row + starts[part]..][..size].copy_from_slice(elements);
            }
        }
        let vectors = [0, 1, 2].map(|part| match packed {
            true => Vectors { data: &all[starts[part]..], batch: of.keys * row, head: of.width, token: row },
            false => Vectors::contiguous(&tensors[part], [tokens[part], heads[part], of.width]),
        });
        let mask = self.mask.as_ref().map(|mask| to(mask));
        let mask = mask.as_ref().map(|mask| Vectors { data: mask, batch: 0, head: 0, token: of.keys });
        let arguments = Arguments { q: vectors[0], k: vectors[1], v: vectors[2], mask };
        let Results { means, sums } = of.forward(&arguments);
        let gradient = to(gradient);
        let [q, k, v] = if packed {
            let change = of.backward_packed(&arguments, &means, &sums, &gradient);
            [0, 1, 2].map(|part| {
                let size = heads[part] * of.width;
                change.chunks(row).flat_map(|token| &token[starts[part]..][..size]).copied().collect()
            })
        } else {
            of.backward(&arguments, &means, &sums, &gradient)
        };
        [means, q, k, v]
    }

    /// Returns the gradient of a tensor by differences, for some of its elements.
    fn slope(&mut self, part: usize, at: usize, gradient: &[f64]) -> f64 {
        let step = 1e-5;
        let mut moved = |by: f64| {
            self.tensors[part][at] += by;
            let out = self.naive();
            self.tensors[part][at] -= by;
            out
        };
        let (above, below) = (moved(step), moved(-step));
        let slopes =
            above.iter().zip(&below).zip(gradient).map(|((above, below), gradient)| (above - below) * gradient);
        slopes.sum::<f64>() / (2.0 * step)
    }
}

fn compare(of: Attention, masked: bool, packed: bool) {
    let mut given = Given::new(of, masked);
    let expected = given.naive();
    let gradient = numbers(expected.len(), 9);
    let wide = given.run::<f64>(&gradient, packed);
    let [out, q, k, v] = given.run::<f32>(&gradient, packed);
    assert_close("the result", &wide[0], &expected, 1e-12);
    assert_close("the result", &out, &expected, 2e-5);
    for (part, narrow) in [q, k, v].iter().enumerate() {
        let change = &wide[part + 1];
        assert_close("a gradient", narrow, change, 1e-4);
        let count = change.len();
        for at in (0..count).step_by(count / 5 + 1) {
            let slope = given.slope(part, at, &gradient);
            let error = (change[at] - slope).abs() / slope.abs().max(1.0);
            assert!(error < 1e-5, "tensor {part}, element {at}: {}, not {slope}", change[at]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..settings() })]

    #[test]
    fn attention_is_that_of_f64(
        batch in 1usize..3,
        key_heads in 1usize..3,
        group in 1usize..3,
        tokens in [1usize..20, 1usize..20],
        width in 1usize..9,
        causal: bool,
        masked: bool,
        packed: bool,
    ) {
        // Causal queries see a key each only if there are as many keys.
        let [queries, more] = tokens;
        let keys = if packed { queries } else { queries + more };
        let heads = key_heads * group;
        let of = Attention { batch, heads, key_heads, queries, keys, width, scale: 0.3, causal };
        compare(of, masked, packed);
    }
}

#[test]
fn long_sequences_are_divided_into_blocks() {
    let of =
        Attention { batch: 1, heads: 1, key_heads: 1, queries: 150, keys: 300, width: 4, scale: 0.5, causal: true };
    compare(of, false, false);
    compare(Attention { causal: false, ..of }, true, false);
    // Fewer keys than queries, of which the first see none if causal.
    compare(Attention { keys: 40, causal: false, ..of }, true, false);
}

#[test]
fn queries_without_keys_get_nan_and_others_do_not() {
    let of = Attention { batch: 1, heads: 1, key_heads: 1, queries: 2, keys: 200, width: 1, scale: 1.0, causal: false };
    let x = vec![1f32; 200];
    let vectors = |count: usize| Vectors::contiguous(&x[..count], [count, 1, 1]);
    // The second query sees only keys of the second block.
    let mask: Vec<f32> = (0..400).map(|at| if at < 390 { f32::NEG_INFINITY } else { 0.0 }).collect();
    let mask = Some(Vectors { data: &mask, batch: 0, head: 0, token: 200 });
    let arguments = Arguments { q: vectors(2), k: vectors(200), v: vectors(200), mask };
    let means = of.forward(&arguments).means;
    assert!(means[0].is_nan());
    assert_eq!(means[1..], [1.0]);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let of = Attention { batch: 3, heads: 4, key_heads: 2, queries: 70, keys: 140, width: 8, scale: 0.3, causal: true };
    let given = Given::new(of, false);
    let gradient = numbers(3 * 4 * 70 * 8, 9);
    assert_threads_do_not_matter(|| given.run::<f32>(&gradient, false));
}

#[test]
#[should_panic(expected = "the mask of a query has 2 elements; give 3")]
fn a_mask_has_an_element_for_each_key() {
    let of = Attention { batch: 1, heads: 1, key_heads: 1, queries: 1, keys: 3, width: 1, scale: 1.0, causal: false };
    let [q, k, v] = [vec![1f32], vec![1.0; 3], vec![1.0; 3]];
    let mask = Some(Vectors { data: &[0.0, f32::NEG_INFINITY][..], batch: 0, head: 0, token: 0 });
    let [q, k, v] = [(&q, 1), (&k, 3), (&v, 3)].map(|(x, tokens)| Vectors::contiguous(x, [tokens, 1, 1]));
    of.forward(&Arguments { q, k, v, mask });
}
