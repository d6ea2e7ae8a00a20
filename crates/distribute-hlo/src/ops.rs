//! The operations, as methods of the builder.

mod collectives;
mod constants;
mod contraction;
mod control;
mod elementwise;
mod indexing;
mod movement;
mod random;
mod reduction;
mod scatter;
mod sorting;
mod windows;
