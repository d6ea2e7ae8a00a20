//! Vectors of a convolution's numbers.

use distribute_rows::Float;
use distribute_rows::relu::rectified;
use pulp::{Arch, NullaryFnOnce};

use super::filters::WIDEST;

/// Returns how many elements a vector has for rows of this width: those of the widest registers that rows fill as well
/// as shorter ones.
pub(super) fn lanes<T>(width: usize) -> usize {
    match size_of::<T>() {
        4 if is_wide() && width.next_multiple_of(16) == width.next_multiple_of(8) => 16,
        4 => 8,
        _ => 4,
    }
}

/// Returns whether registers have 512 bits. There are 32 of them then.
#[cfg(target_arch = "x86_64")]
pub(super) fn is_wide() -> bool {
    matches!(Arch::new(), Arch::V4(_))
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn is_wide() -> bool {
    false
}

/// Runs a function whose vectors have `LANES` elements with the processor's widest instructions. For vectors of 512
/// bits, which [`lanes`] gives for no other processors, it is not compiled for others.
#[inline(always)]
pub(super) fn dispatch<T, const LANES: usize>(f: impl NullaryFnOnce<Output = ()>) {
    #[cfg(target_arch = "x86_64")]
    if const { LANES * size_of::<T>() == 64 } {
        let Arch::V4(simd) = Arch::new() else { unreachable!("rows were given vectors of 512 bits") };
        return pulp::Simd::vectorize(simd, f);
    }
    Arch::new().dispatch(f);
}

/// Writes as many elements as there is room for.
#[inline(always)]
pub(super) fn write<T: Float, const LANES: usize>(vector: [T; LANES], out: &mut [T]) {
    match out.first_chunk_mut() {
        Some(out) => *out = vector,
        None => write_beginning(vector, out),
    }
}

/// Takes the vector by value, so that callers need not keep it in memory for this case.
#[cold]
#[inline(never)]
fn write_beginning<T: Float, const LANES: usize>(vector: [T; LANES], out: &mut [T]) {
    out.iter_mut().zip(vector).for_each(|(out, x)| *out = x);
}

/// Returns results with their bias, and rectified if that is wanted.
#[inline(always)]
pub(super) fn finished<T: Float, const LANES: usize>(mut x: [T; LANES], bias: T, is_rectified: bool) -> [T; LANES] {
    for x in &mut x {
        *x += bias;
        *x = if is_rectified { rectified(*x) } else { *x };
    }
    x
}

/// A block of filters whose results are computed in tiles: some vectors of places for all filters at once.
pub(super) trait Tiles<T, const LANES: usize> {
    /// A vector of places.
    type Vector: Copy;

    /// Computes a tile.
    fn tile<const FILTERS: usize, const VECTORS: usize>(&mut self, vectors: &[Self::Vector; VECTORS], out: &mut [T]);

    /// Computes all vectors for a block of `filters`, in tiles whose sums fill the registers: 32 with 16 elements, and
    /// 16 else.
    #[inline(always)]
    fn run(&mut self, filters: usize, vectors: &[Self::Vector], out: &mut [T]) {
        match (LANES, filters) {
            (16, 2) => self.run_by::<2, 8>(vectors, out),
            (16, 4) => self.run_by::<4, 4>(vectors, out),
            (16, _) => self.run_by::<WIDEST, 4>(vectors, out),
            (_, 2) => self.run_by::<2, 4>(vectors, out),
            (_, 4) => self.run_by::<4, 2>(vectors, out),
            _ => self.run_by::<WIDEST, 2>(vectors, out),
        }
    }

    #[inline(always)]
    fn run_by<const FILTERS: usize, const VECTORS: usize>(&mut self, mut vectors: &[Self::Vector], out: &mut [T]) {
        while let Some((tile, rest)) = vectors.split_first_chunk::<VECTORS>() {
            self.tile::<FILTERS, VECTORS>(tile, out);
            vectors = rest;
        }
        while let Some((tile, rest)) = vectors.split_first_chunk::<2>() {
            self.tile::<FILTERS, 2>(tile, out);
            vectors = rest;
        }
        for vector in vectors {
            self.tile::<FILTERS, 1>(&[*vector], out);
        }
    }
}

/// The most sums of a tile.
pub(super) const MOST_SUMS: usize = 24;
