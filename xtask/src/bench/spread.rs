//! Times of repetitions.

/// The middle, least and greatest of some times in seconds.
pub(crate) fn spread(mut seconds: Vec<f64>) -> (f64, f64, f64) {
    seconds.sort_by(f64::total_cmp);
    let at = |index: usize| seconds.get(index).copied().unwrap_or(f64::NAN);
    (at(seconds.len() / 2), at(0), at(seconds.len().saturating_sub(1)))
}
