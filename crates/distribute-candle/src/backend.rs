//! Functions for crates that train candle models in their own way, such as `distribute-estimator`. They are not part of
//! the stable interface and may change with any release.

pub use crate::sums::show;
