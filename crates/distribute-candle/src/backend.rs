//! For crates that train candle models in ways of their own, such as `distribute-estimator`. Not part of the paved
//! path: it may change with any release.

pub use crate::sums::show;
