//! Low-rank approximation of matrices.

use super::{Compressor, Payload};
use crate::fusion::FusedTensor;

/// Sends P = M Q, then Q = Mᵀ P with orthonormal columns of P. This is one step of power iteration, which starts from
/// the last step's Q.
pub(super) struct PowerSgd {
    blocks: Vec<Block>,
    /// Whether the next sum to arrive is P's and not Q's.
    first_round: bool,
    /// The tensors that are not approximated, summed.
    exact: Vec<f32>,
}

enum Block {
    /// A tensor that is sent unchanged.
    Exact(usize),
    Matrix(Factors),
}

/// A matrix of `rows` × `columns` and its factors, all in row-major order.
struct Factors {
    rows: usize,
    columns: usize,
    rank: usize,
    p: Vec<f32>,
    q: Vec<f32>,
    /// The right factor before the current step.
    before: Vec<f32>,
}

impl PowerSgd {
    pub(super) fn new(rank: usize, tensors: &[FusedTensor]) -> PowerSgd {
        let block = |(index, tensor): (usize, &FusedTensor)| {
            let (rows, columns) = match tensor.dims[..] {
                [] | [_] => (tensor.len(), 1),
                [rows, ref rest @ ..] => (rows, rest.iter().product()),
            };
            let rank = rank.min(rows).min(columns);
            if rank == 0 || (rows + columns) * rank >= rows * columns {
                return Block::Exact(tensor.len());
            }
            // The seed is equal on all ranks and different for each matrix.
            let mut random = fastrand::Rng::with_seed(index as u64);
            let q = (0..columns * rank).map(|_| random.f32() - 0.5).collect();
            Block::Matrix(Factors { rows, columns, rank, p: Vec::new(), q, before: Vec::new() })
        };
        PowerSgd { blocks: tensors.iter().enumerate().map(block).collect(), first_round: true, exact: Vec::new() }
    }
}

impl Compressor for PowerSgd {
    fn begin(&mut self, values: &mut [f32]) -> Payload {
        self.first_round = true;
        let mut message = Vec::new();
        let mut rest = values;
        for block in &mut self.blocks {
            match block {
                Block::Exact(len) => {
                    let (mine, later) = rest.split_at_mut(*len);
                    rest = later;
                    message.extend_from_slice(mine);
                    mine.fill(0.0);
                }
                Block::Matrix(factors) => {
                    let (matrix, later) = rest.split_at_mut(factors.rows * factors.columns);
                    rest = later;
                    factors.before.clone_from(&factors.q);
                    message.extend(factors.times_q(matrix));
                }
            }
        }
        Payload::SumF32(message)
    }

    fn go_on(&mut self, received: Payload, left: &mut [f32], sum: &mut [f32]) -> Option<Payload> {
        let Payload::SumF32(received) = received else { return None };
        if std::mem::take(&mut self.first_round) {
            return Some(Payload::SumF32(self.second_message(&received, left)));
        }
        let (mut exact, mut received, mut rest) = (&self.exact[..], &received[..], sum);
        for block in &mut self.blocks {
            match block {
                Block::Exact(len) => {
                    let (target, later) = rest.split_at_mut(*len);
                    rest = later;
                    let (values, others) = exact.split_at(*len);
                    exact = others;
                    target.copy_from_slice(values);
                }
                Block::Matrix(factors) => {
                    let (target, later) = rest.split_at_mut(factors.rows * factors.columns);
                    rest = later;
                    let (q, others) = received.split_at(factors.q.len());
                    received = others;
                    factors.q.copy_from_slice(q);
                    factors.add_product(&factors.q, target, 1.0);
                }
            }
        }
        None
    }

    fn take_back(&mut self) {
        for block in &mut self.blocks {
            if let Block::Matrix(factors) = block {
                factors.q.copy_from_slice(&factors.before);
            }
        }
    }
}

impl PowerSgd {
    /// Receives the sums of P, and subtracts this rank's contribution through Q from the remaining error.
    fn second_message(&mut self, received: &[f32], left: &mut [f32]) -> Vec<f32> {
        self.exact.clear();
        let mut message = Vec::new();
        let (mut received, mut rest) = (received, left);
        for block in &mut self.blocks {
            match block {
                Block::Exact(len) => {
                    let (values, others) = received.split_at(*len);
                    received = others;
                    self.exact.extend_from_slice(values);
                    rest = rest.split_at_mut(*len).1;
                }
                Block::Matrix(factors) => {
                    let (p, others) = received.split_at(factors.rows * factors.rank);
                    received = others;
                    let (matrix, later) = rest.split_at_mut(factors.rows * factors.columns);
                    rest = later;
                    factors.p = p.to_vec();
                    factors.orthogonalise();
                    let q = factors.transposed_times_p(matrix);
                    factors.add_product(&q, matrix, -1.0);
                    message.extend(q);
                }
            }
        }
        message
    }
}

impl Factors {
    fn times_q(&self, matrix: &[f32]) -> Vec<f32> {
        let mut p = vec![0.0; self.rows * self.rank];
        for (row, p) in matrix.chunks_exact(self.columns).zip(p.chunks_exact_mut(self.rank)) {
            for (value, q) in row.iter().zip(self.q.chunks_exact(self.rank)) {
                p.iter_mut().zip(q).for_each(|(p, q)| *p += value * q);
            }
        }
        p
    }

    fn transposed_times_p(&self, matrix: &[f32]) -> Vec<f32> {
        let mut product = vec![0.0; self.columns * self.rank];
        for (row, p) in matrix.chunks_exact(self.columns).zip(self.p.chunks_exact(self.rank)) {
            for (value, product) in row.iter().zip(product.chunks_exact_mut(self.rank)) {
                product.iter_mut().zip(p).for_each(|(product, p)| *product += value * p);
            }
        }
        product
    }

    /// Computes `matrix += scale P Qᵀ`.
    fn add_product(&self, q: &[f32], matrix: &mut [f32], scale: f32) {
        for (row, p) in matrix.chunks_exact_mut(self.columns).zip(self.p.chunks_exact(self.rank)) {
            for (value, q) in row.iter_mut().zip(q.chunks_exact(self.rank)) {
                *value += scale * p.iter().zip(q).map(|(p, q)| p * q).sum::<f32>();
            }
        }
    }

    /// Makes the columns of P orthonormal (modified Gram-Schmidt). A column that depends on earlier ones becomes zero.
    fn orthogonalise(&mut self) {
        let rank = self.rank;
        for column in 0..rank {
            let length = |p: &[f32]| p.chunks_exact(rank).map(|row| row[column] * row[column]).sum::<f32>().sqrt();
            let before = length(&self.p);
            // Repeated, because rounding leaves a part of the earlier columns the first time.
            for earlier in (0..column).chain(0..column) {
                let dot: f32 = self.p.chunks_exact(rank).map(|row| row[column] * row[earlier]).sum();
                self.p.chunks_exact_mut(rank).for_each(|row| row[column] -= dot * row[earlier]);
            }
            let norm = length(&self.p);
            // The rounding residue of a dependent column is not a direction.
            let scale = if norm > 1e-5 * before { 1.0 / norm } else { 0.0 };
            self.p.chunks_exact_mut(rank).for_each(|row| row[column] *= scale);
        }
    }
}
