//! Arrays of bytes in the IDX format, which MNIST uses.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use super::BadRecord;
use crate::{Array, Error, FileShard, Result};

/// Reads an IDX file of unsigned bytes; a file compressed with gzip or zstd is decompressed.
///
/// # Shapes
/// The shape in the file's header.
///
/// # Errors
/// [`Error::File`] if the file cannot be read, [`Error::Record`] if it is not an IDX file of unsigned bytes or its
/// length does not match its header.
///
/// # Source
/// The page on MNIST by LeCun, Cortes and Burges.
pub fn read_idx(path: impl AsRef<Path>) -> Result<Array<u8>> {
    let path = path.as_ref();
    let io = |source| Error::File { path: path.to_owned(), source: Arc::new(source) };
    let mut file = FileShard::whole(path).open_stream().map_err(io)?;
    let failure = file.failure();
    let mut read = |bytes: u64| -> Result<Vec<u8>> {
        let mut got = Vec::new();
        file.by_ref().take(bytes).read_to_end(&mut got).map_err(|error| io(failure.cause(error)))?;
        Ok(got)
    };
    let wrong = |offset, problem: String| Err(BadRecord::new(0, offset, problem).of(path));
    let [0, 0, kind, dims] = read(4)?[..] else {
        return wrong(0, "it does not begin as an IDX file does".to_owned());
    };
    if kind != UNSIGNED_BYTE {
        return wrong(2, format!("it holds values of kind {kind:#04x}; kind 0x08, unsigned bytes, is read"));
    }
    let header = 4 + 4 * u64::from(dims);
    let extents = read(header - 4)?;
    let (words, _) = extents.as_chunks::<4>();
    if words.len() < usize::from(dims) {
        let got = 4 + extents.len();
        return wrong(4, format!("it is truncated: a header of {header} bytes was promised, {got} are there"));
    }
    let shape: Vec<usize> = words.iter().map(|word| u32::from_be_bytes(*word) as usize).collect();
    let promised = shape.iter().try_fold(1_usize, |product, extent| product.checked_mul(*extent));
    // One byte more than promised shows that there are more, without the rest of what a small compressed file may hold.
    let elements = read(promised.map_or(0, |promised| (promised as u64).saturating_add(1)))?;
    if promised != Some(elements.len()) {
        let got = match promised {
            None => "fewer".to_owned(),
            Some(promised) if promised < elements.len() => "more".to_owned(),
            Some(_) => elements.len().to_string(),
        };
        return wrong(header, format!("its header says {shape:?}, and {got} elements are there"));
    }
    Array::new(shape, elements)
}

const UNSIGNED_BYTE: u8 = 8;
