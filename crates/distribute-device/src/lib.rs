//! Devices to compute and store on: device strings, data types, discovery, buffers, streams and copies.

mod dtype;
mod error;
mod view;

pub use dtype::{DType, Element};
pub use half::{bf16, f16};
pub use error::{Error, Result};
pub use view::{BufferMut, BufferRef};
