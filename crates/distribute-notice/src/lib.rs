//! Warnings that reach the user even if no `tracing` subscriber is installed.
//!
//! A library must report whenever it does not do what was requested (a fallback, an option that has no effect, a
//! variable that is not trained). [`warn!`] reports it through `tracing` if the program has a subscriber; otherwise on
//! standard error, each text once in a process. The crate does not depend on training.
//!
//! # Examples
//! ```
//! let device = "CPU:0";
//! distribute_notice::warn!("NCCL was asked for, but {device} is not a GPU; our own collectives are used");
//! ```
//!
//! # Invariants
//! - A text goes to the subscriber or to standard error, never to both.
//! - Nothing is written to standard error once any subscriber has been installed, even one that filters warnings out.

use std::collections::BTreeSet;
use std::fmt;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

#[doc(hidden)]
pub use tracing;

/// Warns as `tracing::warn!` does, and on standard error if no subscriber is installed.
#[macro_export]
macro_rules! warn {
    ($($text:tt)+) => {
        if $crate::tracing::dispatcher::has_been_set() {
            $crate::tracing::warn!($($text)+);
        } else {
            $crate::on_standard_error(&format_args!($($text)+));
        }
    };
}

/// Writes a warning to standard error unless it has been written before. Called by [`warn!`].
#[doc(hidden)]
pub fn on_standard_error(text: &fmt::Arguments<'_>) {
    /// The texts written so far.
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    /// Maximum number of remembered texts; a program with more of them repeats itself.
    const REMEMBERED: usize = 1000;

    let text = text.to_string();
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.contains(&text) {
        return;
    }
    // An error of standard error cannot be reported.
    let _ = writeln!(std::io::stderr(), "warning: {text}");
    if said.len() < REMEMBERED {
        said.insert(text);
    }
}

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
