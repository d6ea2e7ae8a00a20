//! Stands for `zstd.rs` in a build without the feature `zstd`: a compressed file is an error that names the feature.

use std::io::{self, BufRead, Read};

pub(super) fn zstd(_: impl BufRead) -> io::Result<Box<dyn Read + Send>> {
    super::not_built("zstd", "zstd")
}
