//! When gradients of which few rows differ from zero, as those of embeddings, are reduced by rows.

/// How gradients of which few rows differ from zero are reduced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SparseGradients {
    /// By rows if replicas are in several processes, or if the tensor library reports rows. In one process, to find the
    /// rows of a whole gradient takes as long as to reduce it there.
    #[default]
    Auto,
    /// By rows.
    Rows,
    /// As a whole.
    Whole,
}

/// Rows are exchanged if all replicas together have at most this part of the gradient's rows. An index adds to each
/// row, and every replica receives the rows of all, where it would receive less than twice the whole gradient.
pub(crate) const MOST: usize = 4;

/// Returns whether rows are worth exchanging if every replica has this number of them.
pub(crate) fn is_worth_it(rows: usize, of: usize, replicas: usize) -> bool {
    rows.saturating_mul(replicas) <= of / MOST
}
