//! Stands for `gzip.rs` in a build without the feature `gzip`: a compressed file is an error that names the feature.

use std::io::{self, BufRead, Read};

pub(super) fn gzip(_: impl BufRead) -> io::Result<Box<dyn Read + Send>> {
    super::not_built("gzip", "gzip")
}

pub(super) fn zlib(_: impl BufRead) -> io::Result<Box<dyn Read + Send>> {
    super::not_built("zlib", "gzip")
}
