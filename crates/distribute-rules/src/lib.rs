//! The arithmetic of optimizers on slices of parameters.
//!
//! - [`UpdateRule`] is how one step changes one parameter and the slots that the rule keeps for it.
//! - [`OptimizerDescription`] is a rule and its learning rate, and checks their settings.
//! - [`AdamFactors`] are the factors of one step of Adam, for kernels.
//!
//! Slices may be a whole parameter, or, where the rule is elementwise, any part of one. Results do not depend on the
//! number of threads.
//!
//! # Examples
//! ```
//! use distribute_rules::UpdateRule;
//!
//! let rule = UpdateRule::Adagrad { initial_accumulator: 0.0, epsilon: 1e-7 };
//! let (mut parameter, mut accumulator) = ([1.0f32, 1.0], [0.0; 2]);
//! rule.update(1, 0.5, &mut parameter, &[4.0, 0.0], &mut [&mut accumulator]);
//! assert_eq!((parameter, accumulator), ([0.5, 1.0], [16.0, 0.0]));
//! ```

mod description;
mod error;
mod rule;
mod step;

pub use description::OptimizerDescription;
pub use error::{Error, Result, check_setting};
#[cfg(feature = "hlo")]
pub use rule::norm;
pub use rule::{AdamFactors, Real, UpdateRule};
pub use step::Float;

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
