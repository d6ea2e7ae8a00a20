//! Products of matrices, by the gemm crate.
#![expect(unsafe_code, reason = "gemm takes pointers")]

use distribute_rows::Float;

/// A matrix in a slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a, T> {
    data: &'a [T],
    /// The distance between rows, in elements.
    row: usize,
    /// The distance between columns, in elements.
    column: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// A matrix whose rows are `row` elements apart.
    pub(crate) fn new(data: &'a [T], row: usize) -> Matrix<'a, T> {
        Matrix { data, row, column: 1 }
    }

    pub(crate) fn transposed(self) -> Matrix<'a, T> {
        Matrix { data: self.data, row: self.column, column: self.row }
    }

    /// Returns whether a matrix of this size is inside the slice.
    fn holds(&self, rows: usize, columns: usize) -> bool {
        let last = |count: usize, distance: usize| count.checked_sub(1)?.checked_mul(distance);
        let (Some(row), Some(column)) = (last(rows, self.row), last(columns, self.column)) else { return true };
        row.checked_add(column).is_some_and(|last| last < self.data.len())
    }
}

/// A matrix in a slice that a product is written to.
#[derive(Debug)]
pub(crate) struct Target<'a, T> {
    pub(crate) data: &'a mut [T],
    /// The distance between rows, in elements.
    pub(crate) row: usize,
    /// Whether the product is added to the elements; else it replaces them.
    pub(crate) add: bool,
}

/// Computes `scale · a · b`, in one thread.
///
/// # Shapes
/// `size` is [m, k, n]: `a` is m × k, `b` is k × n, `out` is m × n.
pub(crate) fn product<T: Float>(out: Target<'_, T>, size: [usize; 3], a: Matrix<'_, T>, b: Matrix<'_, T>, scale: T) {
    run_to(out, size, a, b, scale, gemm::Parallelism::None);
}

/// Computes the same as [`product`] on the threads of the rayon pool.
pub(crate) fn parallel_product<T: Float>(
    out: Target<'_, T>,
    size: [usize; 3],
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    scale: T,
) {
    run_to(out, size, a, b, scale, on_all_threads());
}

/// Returns `a · b`, computed on the threads of the rayon pool.
///
/// # Shapes
/// `size` is [m, k, n]: `a` is m × k, `b` is k × n, the result is m × n.
pub(crate) fn parallel_product_of<T: Float>(size: [usize; 3], a: Matrix<'_, T>, b: Matrix<'_, T>) -> Vec<T> {
    let [m, k, n] = size;
    let count = m.checked_mul(n).unwrap_or_else(|| panic!("a product of {m} × {n} is longer than memory"));
    if count == 0 || k == 0 {
        return vec![T::default(); count];
    }
    check_factors(size, a, b);
    let mut out = Vec::with_capacity(count);
    if cfg!(debug_assertions) {
        // An element that were read or not written would be NaN.
        out.resize(count, T::from_f64(f64::NAN));
        out.clear();
    }
    // SAFETY: `out` has room for m rows of n elements, which nothing else refers to; its elements are not read, and the
    // factors have been checked.
    unsafe { run(out.as_mut_ptr(), n, false, size, a, b, T::ONE, on_all_threads()) };
    // SAFETY: the product has replaced each element of the rows.
    unsafe { out.set_len(count) };
    out
}

fn on_all_threads() -> gemm::Parallelism {
    let threads = rayon::current_num_threads();
    if threads > 1 { gemm::Parallelism::Rayon(threads) } else { gemm::Parallelism::None }
}

fn run_to<T: Float>(
    out: Target<'_, T>,
    size: [usize; 3],
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    scale: T,
    parallelism: gemm::Parallelism,
) {
    let [m, k, n] = size;
    if m == 0 || n == 0 {
        return;
    }
    let inside = Matrix::new(&*out.data, out.row).holds(m, n) && (m == 1 || out.row >= n);
    assert!(inside, "a product of {m} × {n} does not fit {} elements in rows of {}", out.data.len(), out.row);
    check_factors(size, a, b);
    if k == 0 {
        if !out.add {
            out.data.chunks_mut(out.row.max(1)).take(m).for_each(|row| row[..n].fill(T::default()));
        }
        return;
    }
    // SAFETY: each element of the product is inside of `out`, which is borrowed exclusively, and rows do not
    // overlap, as was checked; so were the factors.
    unsafe { run(out.data.as_mut_ptr(), out.row, out.add, size, a, b, scale, parallelism) };
}

fn check_factors<T>([m, k, n]: [usize; 3], a: Matrix<'_, T>, b: Matrix<'_, T>) {
    assert!(a.holds(m, k), "a factor of {m} × {k} is not in {} elements", a.data.len());
    assert!(b.holds(k, n), "a factor of {k} × {n} is not in {} elements", b.data.len());
}

/// Computes a product to rows that are `row` elements apart.
///
/// # Safety
/// `out` is valid for writing m rows of n elements, which do not overlap, and for reading them if `add`. The factors
/// hold as many elements as `size` says, and `k` is not 0.
#[expect(clippy::too_many_arguments, reason = "gemm has more")]
unsafe fn run<T: Float>(
    out: *mut T,
    row: usize,
    add: bool,
    [m, k, n]: [usize; 3],
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    scale: T,
    parallelism: gemm::Parallelism,
) {
    // SAFETY: the caller vouches for `out`, and each element of the factors is inside its slice.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out,
            1,
            row as isize,
            add,
            a.data.as_ptr(),
            a.column as isize,
            a.row as isize,
            b.data.as_ptr(),
            b.column as isize,
            b.row as isize,
            T::ONE,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}
