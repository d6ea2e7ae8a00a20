//! Arrays of bytes in the IDX format, which MNIST uses.

use std::io::{BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use flate2::read::MultiGzDecoder;

use super::{BadRecord, InputFile};
use crate::{Array, Error, Result};

/// Reads an IDX file of unsigned bytes; a file whose name ends in `.gz` is decompressed.
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
    let file = BufReader::new(InputFile::open(path).map_err(io)?);
    let mut bytes = Vec::new();
    if path.extension().is_some_and(|extension| extension == "gz") {
        MultiGzDecoder::new(file).read_to_end(&mut bytes).map_err(io)?;
    } else {
        let mut file = file;
        file.read_to_end(&mut bytes).map_err(io)?;
    }
    let wrong = |offset, problem: String| Err(BadRecord::new(0, offset, problem).of(path));
    let [0, 0, kind, dims, rest @ ..] = &bytes[..] else {
        return wrong(0, "it does not begin as an IDX file does".to_owned());
    };
    if *kind != UNSIGNED_BYTE {
        return wrong(2, format!("it holds values of kind {kind:#04x}; kind 0x08, unsigned bytes, is read"));
    }
    let (words, _) = rest.as_chunks::<4>();
    let header = 4 + 4 * usize::from(*dims);
    if words.len() < usize::from(*dims) {
        return wrong(
            4,
            format!("it is truncated: a header of {header} bytes was promised, {} are there", bytes.len()),
        );
    }
    let shape: Vec<usize> = words[..usize::from(*dims)].iter().map(|word| u32::from_be_bytes(*word) as usize).collect();
    let elements = bytes.split_off(header);
    let promised = shape.iter().try_fold(1_usize, |product, extent| product.checked_mul(*extent));
    if promised != Some(elements.len()) {
        let problem = format!("its header says {shape:?}, and {} elements are there", elements.len());
        return wrong(header as u64, problem);
    }
    Array::new(shape, elements)
}

const UNSIGNED_BYTE: u8 = 8;
