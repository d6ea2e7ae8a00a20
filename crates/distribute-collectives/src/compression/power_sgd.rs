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
    /// Its place in the bucket, from which the first right factor is made.
    index: usize,
    rows: usize,
    columns: usize,
    rank: usize,
    p: Vec<f32>,
    /// The right factor from which the next step starts.
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
            let q = random_factor(index, columns * rank);
            Block::Matrix(Factors { index, rows, columns, rank, p: Vec::new(), q, before: Vec::new() })
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
                    factors.add_product(q, target, 1.0);
                    factors.start_from(q);
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

/// Returns the elements of a right factor: equal on all ranks and different for each matrix.
fn random_factor(index: usize, elements: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(index as u64);
    (0..elements).map(|_| random.f32() - 0.5).collect()
}

/// Returns the length of a column of a matrix with `rank` columns, in which neither tiny nor huge elements vanish.
fn length(matrix: &[f32], rank: usize, column: usize) -> f64 {
    matrix.chunks_exact(rank).map(|row| f64::from(row[column]).powi(2)).sum::<f64>().sqrt()
}

impl Factors {
    /// Makes the next step start from the right factor that all ranks have received.
    ///
    /// Columns get the length 1, since only their directions count, and large gradients would let them grow. A column
    /// without a direction, as of a matrix of zeros or of low rank, is made anew: it would stay as it is for ever, and
    /// what it could not send would pile up in the error.
    fn start_from(&mut self, q: &[f32]) {
        let mut anew = None;
        for column in 0..self.rank {
            let length = length(q, self.rank, column);
            let (source, scale) = match length.is_normal() {
                true => (q, length.recip()),
                false => (&**anew.get_or_insert_with(|| random_factor(self.index, q.len())), 1.0),
            };
            for (to, from) in self.q.chunks_exact_mut(self.rank).zip(source.chunks_exact(self.rank)) {
                to[column] = (f64::from(from[column]) * scale) as f32;
            }
        }
    }

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
            let before = length(&self.p, rank, column);
            // Repeated, because rounding leaves a part of the earlier columns the first time.
            for earlier in (0..column).chain(0..column) {
                let dot: f64 =
                    self.p.chunks_exact(rank).map(|row| f64::from(row[column]) * f64::from(row[earlier])).sum();
                self.p.chunks_exact_mut(rank).for_each(|row| row[column] -= (dot * f64::from(row[earlier])) as f32);
            }
            let norm = length(&self.p, rank, column);
            // The rounding residue of a dependent column is not a direction.
            let scale = if norm > 1e-5 * before { norm.recip() } else { 0.0 };
            self.p.chunks_exact_mut(rank).for_each(|row| row[column] = (f64::from(row[column]) * scale) as f32);
        }
    }
}
