//! The exported functions, grouped as in CUDA's manual.

mod context;
mod copy;
mod device;
mod event;
mod graph;
mod memory;
mod module;
mod nvrtc;
mod pool;
mod stream;
