//! Reads the IDX files of MNIST.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use super::{Error, PIXELS, SIDE, Split};

/// Reads `<prefix>-images-idx3-ubyte` and `<prefix>-labels-idx1-ubyte`.
pub(super) fn split(dir: &Path, prefix: &str) -> Result<Split, Error> {
    let images = Source::find(dir, &format!("{prefix}-images"), IMAGES)?;
    let labels = Source::find(dir, &format!("{prefix}-labels"), LABELS)?;
    let (images_path, labels_path) = (images.path.clone(), labels.path.clone());
    let ([_, rows, columns], pixels) = images.read()?;
    if (rows, columns) != (SIDE as u32, SIDE as u32) {
        return Err(Error::ImageSize { path: images_path, rows, columns });
    }
    let ([count], labels) = labels.read()?;
    let images = pixels.len() / PIXELS;
    if images != count as usize {
        return Err(Error::Counts { images_path, labels_path, images, labels: labels.len() });
    }
    if let Some((index, label)) = labels.iter().enumerate().find(|(_, label)| **label > 9) {
        return Err(Error::Label { path: labels_path, index, label: *label });
    }
    Ok(Split {
        images: pixels.into_iter().map(|pixel| f32::from(pixel) / 255.0).collect(),
        labels: labels.into_iter().map(u32::from).collect(),
    })
}

/// What the header of a file says about its `N` dimensions.
#[derive(Clone, Copy)]
struct Kind<const N: usize> {
    what: &'static str,
    magic: u32,
}

const IMAGES: Kind<3> = Kind { what: "images", magic: 0x0803 };
const LABELS: Kind<1> = Kind { what: "labels", magic: 0x0801 };

struct Source<const N: usize> {
    path: PathBuf,
    kind: Kind<N>,
    reader: Box<dyn Read>,
}

impl<const N: usize> Source<N> {
    fn find(dir: &Path, stem: &str, kind: Kind<N>) -> Result<Self, Error> {
        let mut tried = Vec::new();
        for separator in ['-', '.'] {
            for gz in ["", ".gz"] {
                let name = format!("{stem}{separator}idx{N}-ubyte{gz}");
                let path = dir.join(&name);
                tried.push(name);
                match File::open(&path) {
                    Ok(file) if gz.is_empty() => {
                        return Ok(Self { path, kind, reader: Box::new(BufReader::new(file)) });
                    }
                    Ok(file) => {
                        let reader = Box::new(MultiGzDecoder::new(BufReader::new(file)));
                        return Ok(Self { path, kind, reader });
                    }
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(source) => return Err(Error::Read { path, source }),
                }
            }
        }
        Err(Error::Missing { dir: dir.to_owned(), tried })
    }

    /// The dimensions, and as many bytes as they ask for.
    fn read(mut self) -> Result<([u32; N], Vec<u8>), Error> {
        let header_len = 4 + 4 * N;
        let header = self.up_to(header_len as u64)?;
        let Some((magic, dimensions)) = header.split_first_chunk() else {
            return Err(self.length(header_len as u64, header.len()));
        };
        let got = u32::from_be_bytes(*magic);
        if got != self.kind.magic {
            let (path, Kind { what, magic: expected }) = (self.path, self.kind);
            return Err(Error::Magic { path, what, expected, got });
        }
        if header.len() < header_len {
            return Err(self.length(header_len as u64, header.len()));
        }
        let (words, _) = dimensions.as_chunks();
        let dimensions: [u32; N] = std::array::from_fn(|axis| u32::from_be_bytes(words[axis]));
        let promised = dimensions.iter().fold(1_u64, |product, n| product.saturating_mul(u64::from(*n)));
        // One more, to notice a file that goes on.
        let body = self.up_to(promised.saturating_add(1))?;
        if body.len() as u64 != promised {
            let expected = promised.saturating_add(header_len as u64);
            return Err(self.length(expected, header_len + body.len()));
        }
        Ok((dimensions, body))
    }

    /// The next bytes, fewer at the end of the file; a header's promise allocates nothing.
    fn up_to(&mut self, len: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        match self.reader.by_ref().take(len).read_to_end(&mut bytes) {
            Ok(_) => Ok(bytes),
            // What a decompressor says at the end of half a file.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(bytes),
            Err(source) => Err(Error::Read { path: self.path.clone(), source }),
        }
    }

    fn length(self, expected: u64, got: usize) -> Error {
        Error::Length { path: self.path, expected, got: got as u64 }
    }
}

#[cfg(test)]
mod tests;
