//! Scaled dot-product attention.

use distribute_rows::{Blocks, Float, compiled, simd};

use crate::parallel::{check, mapped};
use crate::product::{Matrix, Target, product};

mod block;

use block::Block;

/// Attention of queries to keys, and the mean of values by its weights, for each head.
///
/// Scores are computed in blocks of queries and keys and never stored as a whole: forward keeps one number for each
/// query, and backward computes the blocks again. Memory grows with the number of tokens, not with its square.
///
/// # Source
/// Dao, Fu, Ermon, Rudra and Ré, "FlashAttention", 2022; Milakov and Gimelshein, "Online normalizer calculation for
/// softmax", 2018.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Examples.
    pub batch: usize,
    /// Heads of the queries.
    pub heads: usize,
    /// Heads of keys and values, each for as many heads of queries, one after another.
    pub key_heads: usize,
    /// Queries of an example.
    pub queries: usize,
    /// Keys of an example.
    pub keys: usize,
    /// Elements of a query, a key or a value of one head.
    pub width: usize,
    /// The factor of products of queries and keys.
    pub scale: f64,
    /// Whether the last query sees all keys, and each one before it sees one key less than the next.
    pub causal: bool,
}

/// Vectors of each example, head and token, somewhere in a slice. Their elements are side by side.
#[derive(Clone, Copy, Debug)]
pub struct Vectors<'a, T> {
    /// The elements, from the first vector's on.
    pub data: &'a [T],
    /// The distance between examples, in elements.
    pub batch: usize,
    /// The distance between heads.
    pub head: usize,
    /// The distance between tokens.
    pub token: usize,
}

impl<'a, T> Vectors<'a, T> {
    /// Vectors of shape batch × tokens × heads × width, without gaps.
    pub fn contiguous(data: &'a [T], [tokens, heads, width]: [usize; 3]) -> Vectors<'a, T> {
        Vectors { data, batch: tokens * heads * width, head: width, token: heads * width }
    }

    /// Returns the vectors of a head from a token on.
    fn at(&self, batch: usize, head: usize, token: usize) -> &'a [T] {
        &self.data[batch * self.batch + head * self.head + token * self.token..]
    }
}

/// The arguments of an attention.
#[derive(Clone, Copy, Debug)]
pub struct Arguments<'a, T> {
    /// Queries.
    pub q: Vectors<'a, T>,
    /// Keys.
    pub k: Vectors<'a, T>,
    /// Values.
    pub v: Vectors<'a, T>,
    /// Numbers that are added to scores. Each token is a query, and its vector has as many elements as there are keys.
    pub mask: Option<Vectors<'a, T>>,
}

/// The results of an attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Results<T> {
    /// The mean values: batch × queries × heads × width.
    pub means: Vec<T>,
    /// The logarithm of the sum of exponentials of each query's scores, for backward: batch × heads × queries.
    pub sums: Vec<T>,
}

/// The gradients of one head's keys and values, and of the queries that use them: tokens × heads × width.
type OfHead<T> = [Vec<T>; 3];

impl Attention {
    /// Computes the mean values.
    ///
    /// A query that a mask of -∞ keeps from all keys gets NaN.
    pub fn forward<T: Compiled>(&self, arguments: &Arguments<'_, T>) -> Results<T> {
        T::forward(self, arguments)
    }

    fn forward_generic<T: Float>(&self, arguments: &Arguments<'_, T>) -> Results<T> {
        self.check();
        let [example, ..] = self.lengths();
        if self.batch * example == 0 {
            return Results { means: Vec::new(), sums: vec![T::default(); self.batch * self.heads * self.queries] };
        }
        let heads = mapped(self.batch * self.heads, |at| {
            let (mut means, mut sums) =
                (vec![T::default(); self.queries * self.width], vec![T::default(); self.queries]);
            self.forward_head(arguments, [at / self.heads, at % self.heads], &mut means, &mut sums);
            (means, sums)
        });
        let means = Blocks { count: self.batch * example, size: example, cost: example }.results(|batch, out| {
            for (head, (means, _)) in heads[batch * self.heads..][..self.heads].iter().enumerate() {
                put(out, means, self.width, self.heads * self.width, head * self.width);
            }
        });
        Results { means, sums: heads.into_iter().flat_map(|(_, sums)| sums).collect() }
    }

    fn forward_head<T: Float>(
        &self,
        arguments: &Arguments<'_, T>,
        [batch, head]: [usize; 2],
        out: &mut [T],
        sums: &mut [T],
    ) {
        let mut block = Block::new(self.queries, self.keys);
        for from in (0..self.queries).step_by(block.queries) {
            let queries = block.queries.min(self.queries - from);
            let out = &mut out[from * self.width..][..queries * self.width];
            block.start();
            for key in (0..self.keys).step_by(block.keys) {
                let keys = block.keys.min(self.keys - key);
                if !self.sees(from + queries - 1, key) {
                    break;
                }
                self.scores(arguments, [batch, head], [from, queries], [key, keys], &mut block.scores);
                block.weigh(queries, keys, self.width, out);
                let values = arguments.v.at(batch, self.key_head(head), key);
                let out = Target { data: &mut *out, row: self.width, add: true };
                let weights = Matrix::new(&block.scores, keys);
                product(out, [queries, keys, self.width], weights, Matrix::new(values, arguments.v.token), T::ONE);
            }
            block.finish(self.width, out, &mut sums[from..][..queries]);
        }
    }

    /// Returns the gradients of queries, keys and values, each of shape batch × tokens × heads × width.
    ///
    /// # Shapes
    /// `means` and `sums` are the results of [`forward`](Self::forward), and `gradient` is that of the means.
    pub fn backward<T: Compiled>(
        &self,
        arguments: &Arguments<'_, T>,
        means: &[T],
        sums: &[T],
        gradient: &[T],
    ) -> [Vec<T>; 3] {
        T::backward(self, arguments, means, sums, gradient)
    }

    fn backward_generic<T: Float>(
        &self,
        arguments: &Arguments<'_, T>,
        means: &[T],
        sums: &[T],
        gradient: &[T],
    ) -> [Vec<T>; 3] {
        let of_heads = self.backward_heads(arguments, means, sums, gradient);
        let (lengths, heads) = (self.lengths(), self.heads_of_parts());
        [0, 1, 2].map(|part| {
            let length = lengths[part];
            Blocks { count: self.batch * length, size: length, cost: length }
                .results(|batch, out| self.put_part(&of_heads, batch, part, out, heads[part] * self.width, 0))
        })
    }

    /// Returns the gradients that [`backward`](Self::backward) does in one: batch × tokens × (heads of queries, of keys
    /// and of values) × width.
    ///
    /// # Panics
    /// If there are other than as many queries as keys.
    pub fn backward_packed<T: Compiled>(
        &self,
        arguments: &Arguments<'_, T>,
        means: &[T],
        sums: &[T],
        gradient: &[T],
    ) -> Vec<T> {
        T::backward_packed(self, arguments, means, sums, gradient)
    }

    fn backward_packed_generic<T: Float>(
        &self,
        arguments: &Arguments<'_, T>,
        means: &[T],
        sums: &[T],
        gradient: &[T],
    ) -> Vec<T> {
        assert!(self.queries == self.keys, "{} queries and {} keys in one tensor", self.queries, self.keys);
        let of_heads = self.backward_heads(arguments, means, sums, gradient);
        let (length, sizes) = (self.lengths().iter().sum(), self.heads_of_parts().map(|heads| heads * self.width));
        let row = sizes.iter().sum();
        Blocks { count: self.batch * length, size: length, cost: length }.results(|batch, out| {
            let mut first = 0;
            for (part, size) in sizes.iter().enumerate() {
                self.put_part(&of_heads, batch, part, out, row, first);
                first += size;
            }
        })
    }

    /// Returns the gradients by batch and head of keys.
    fn backward_heads<T: Float>(
        &self,
        arguments: &Arguments<'_, T>,
        means: &[T],
        sums: &[T],
        gradient: &[T],
    ) -> Vec<OfHead<T>> {
        self.check();
        check("the result", means.len(), self.batch * self.lengths()[0]);
        check("the sums", sums.len(), self.batch * self.heads * self.queries);
        check("the gradient", gradient.len(), means.len());
        mapped(self.batch * self.key_heads, |at| {
            self.backward_head(arguments, [at / self.key_heads, at % self.key_heads], [means, sums, gradient])
        })
    }

    /// Writes a part of an example's gradients to rows that are `row` elements apart, from `first` on.
    fn put_part<T: Float>(
        &self,
        of_heads: &[OfHead<T>],
        batch: usize,
        part: usize,
        out: &mut [T],
        row: usize,
        first: usize,
    ) {
        let size = self.heads_of_parts()[part] / self.key_heads * self.width;
        for (head, parts) in of_heads[batch * self.key_heads..][..self.key_heads].iter().enumerate() {
            put(out, &parts[part], size, row, first + head * size);
        }
    }

    /// Computes the gradients of one head's keys and values, and of the queries that use them.
    fn backward_head<T: Float>(
        &self,
        arguments: &Arguments<'_, T>,
        [batch, key_head]: [usize; 2],
        [out, sums, gradient]: [&[T]; 3],
    ) -> OfHead<T> {
        let (group, width, scale) = (self.heads / self.key_heads, self.width, T::from_f64(self.scale));
        let zeros = |count: usize| vec![T::default(); count];
        let (mut dq, mut dk, mut dv) =
            (zeros(self.queries * group * width), zeros(self.keys * width), zeros(self.keys * width));
        let shape = [self.queries, self.heads, width];
        let (out, gradient) = (Vectors::contiguous(out, shape), Vectors::contiguous(gradient, shape));
        let mut block = Block::new(self.queries, self.keys);
        let mut change = zeros(block.scores.len());
        for (nth, head) in (key_head * group..(key_head + 1) * group).enumerate() {
            let sums = &sums[(batch * self.heads + head) * self.queries..][..self.queries];
            for from in (0..self.queries).step_by(block.queries) {
                let queries = block.queries.min(self.queries - from);
                let given = gradient.at(batch, head, from);
                block.products(queries, width, [given, out.at(batch, head, from)], self.heads * width);
                let given = Matrix::new(given, gradient.token);
                for key in (0..self.keys).step_by(block.keys) {
                    let keys = block.keys.min(self.keys - key);
                    if !self.sees(from + queries - 1, key) {
                        break;
                    }
                    self.scores(arguments, [batch, head], [from, queries], [key, keys], &mut block.scores);
                    let values = Matrix::new(arguments.v.at(batch, key_head, key), arguments.v.token);
                    let target = Target { data: &mut change, row: keys, add: false };
                    product(target, [queries, width, keys], given, values.transposed(), T::ONE);
                    block.change(queries, keys, &sums[from..], &mut change);
                    let weights = Matrix::new(&block.scores, keys).transposed();
                    let dv = Target { data: &mut dv[key * width..], row: width, add: true };
                    product(dv, [keys, queries, width], weights, given, T::ONE);
                    let change = Matrix::new(&change, keys);
                    let k = Matrix::new(arguments.k.at(batch, key_head, key), arguments.k.token);
                    let dq = Target { data: &mut dq[(from * group + nth) * width..], row: group * width, add: true };
                    product(dq, [queries, keys, width], change, k, scale);
                    let q = Matrix::new(arguments.q.at(batch, head, from), arguments.q.token);
                    let dk = Target { data: &mut dk[key * width..], row: width, add: true };
                    product(dk, [keys, queries, width], change.transposed(), q, scale);
                }
            }
        }
        [dq, dk, dv]
    }

    /// Computes the scores of some queries and keys, with their mask.
    fn scores<T: Float>(
        &self,
        arguments: &Arguments<'_, T>,
        [batch, head]: [usize; 2],
        [from, queries]: [usize; 2],
        [key, keys]: [usize; 2],
        scores: &mut [T],
    ) {
        let q = Matrix::new(arguments.q.at(batch, head, from), arguments.q.token);
        let k = Matrix::new(arguments.k.at(batch, self.key_head(head), key), arguments.k.token).transposed();
        let target = Target { data: &mut *scores, row: keys, add: false };
        product(target, [queries, self.width, keys], q, k, T::from_f64(self.scale));
        for (nth, scores) in scores.chunks_exact_mut(keys).take(queries).enumerate() {
            if let Some(mask) = &arguments.mask {
                let mask = mask.at(batch, head, from + nth);
                assert!(mask.len() >= self.keys, "the mask of a query has {} elements; give {}", mask.len(), self.keys);
                scores.iter_mut().zip(&mask[key..]).for_each(|(score, mask)| *score += *mask);
            }
            if self.causal {
                // The number of keys that the query sees.
                let seen = (from + nth + 1 + self.keys).saturating_sub(self.queries + key).min(keys);
                scores[seen..].fill(T::NEG_INFINITY);
            }
        }
    }

    /// Returns whether a query sees a key.
    fn sees(&self, query: usize, key: usize) -> bool {
        !self.causal || query + self.keys >= key + self.queries
    }

    /// Returns the head of keys that a head of queries uses.
    fn key_head(&self, head: usize) -> usize {
        head / (self.heads / self.key_heads)
    }

    /// Returns the heads of queries, of keys and of values.
    fn heads_of_parts(&self) -> [usize; 3] {
        [self.heads, self.key_heads, self.key_heads]
    }

    /// Returns the elements of an example's queries, keys and values.
    fn lengths(&self) -> [usize; 3] {
        let tokens = [self.queries, self.keys, self.keys];
        [0, 1, 2].map(|part| tokens[part] * self.heads_of_parts()[part] * self.width)
    }

    fn check(&self) {
        let groups = self.key_heads > 0 && self.heads.is_multiple_of(self.key_heads);
        assert!(groups, "{} heads of queries for {} heads of keys", self.heads, self.key_heads);
    }
}

/// Writes rows of `size` elements to rows that are `row` elements apart, from `first` on.
fn put<T: Float>(out: &mut [T], rows: &[T], size: usize, row: usize, first: usize) {
    if size > 0 {
        simd(
            #[inline(always)]
            || {
                out.chunks_exact_mut(row).zip(rows.chunks_exact(size)).for_each(|(out, part)| {
                    out[first..first + size].copy_from_slice(part);
                })
            },
        );
    }
}

compiled! {
    fn forward(of: &Attention, arguments: &Arguments<'_, Self>) -> Results<Self> = Attention::forward_generic;
    fn backward(
        of: &Attention,
        arguments: &Arguments<'_, Self>,
        means: &[Self],
        sums: &[Self],
        gradient: &[Self],
    ) -> [Vec<Self>; 3] = Attention::backward_generic;
    fn backward_packed(
        of: &Attention,
        arguments: &Arguments<'_, Self>,
        means: &[Self],
        sums: &[Self],
        gradient: &[Self],
    ) -> Vec<Self> = Attention::backward_packed_generic;
}
