//! The list of all checks.

mod collectives;
mod kernels;
mod nccl;
mod optimizers;
mod packing;
mod streams;

use crate::Check;
use crate::check::Entry;

/// Returns all checks, simple ones first.
pub fn checks() -> Vec<Check> {
    let all: [&[Entry]; 6] = [
        &streams::CHECKS,
        &kernels::CHECKS,
        &packing::CHECKS,
        &optimizers::CHECKS,
        &collectives::CHECKS,
        &nccl::CHECKS,
    ];
    all.into_iter().flatten().copied().map(Check::new).collect()
}
