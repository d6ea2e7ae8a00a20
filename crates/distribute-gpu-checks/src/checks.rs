//! The list of all checks.

mod collectives;
mod kernels;
mod nccl;
mod optimizers;
mod packing;
mod streams;
mod updates;

use crate::Check;
use crate::check::Entry;

/// Returns all checks, simple ones first.
pub fn checks() -> Vec<Check> {
    let all: [&[Entry]; 7] = [
        &streams::CHECKS,
        &kernels::CHECKS,
        &packing::CHECKS,
        &optimizers::CHECKS,
        &updates::CHECKS,
        &collectives::CHECKS,
        &nccl::CHECKS,
    ];
    all.into_iter().flatten().copied().map(Check::new).collect()
}
