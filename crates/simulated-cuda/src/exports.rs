//! The exported functions, by the chapters of CUDA's manual.

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
