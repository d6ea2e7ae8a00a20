//! Arrays in safetensors files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};

use super::packing::Packing;
use super::{BadRecord, InputFile};
use crate::{Array, Error, Result};

/// A safetensors file in memory, with named arrays: of floats (`f32`, `f64`, and `f16` and `bf16` of the crate half),
/// integers of 8 to 64 bits, and `bool`.
///
/// # Examples
/// ```no_run
/// use distribute_input::Dataset;
/// use distribute_input::read::SafetensorsFile;
/// let file = SafetensorsFile::open("digits.safetensors")?;
/// let digits = Dataset::from_tensor_slices((file.array::<f32>("images")?, file.array::<i64>("labels")?));
/// # Ok::<(), distribute_input::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    bytes: Arc<Vec<u8>>,
}

/// A number type of safetensors files.
pub trait Stored: Sized + Clone + Send + Sync + 'static {
    /// The corresponding type of the file format.
    const DTYPE: Dtype;

    /// Converts little-endian bytes to numbers.
    fn read(bytes: &[u8]) -> Vec<Self>;
}

macro_rules! stored {
    ($($number:ty, $dtype:ident;)*) => {$(
        impl Stored for $number {
            const DTYPE: Dtype = Dtype::$dtype;

            fn read(bytes: &[u8]) -> Vec<$number> {
                let (chunks, _) = bytes.as_chunks::<{ size_of::<$number>() }>();
                chunks.iter().map(|chunk| <$number>::from_le_bytes(*chunk)).collect()
            }
        }
    )*};
}

impl Stored for bool {
    const DTYPE: Dtype = Dtype::BOOL;

    fn read(bytes: &[u8]) -> Vec<bool> {
        bytes.iter().map(|byte| *byte != 0).collect()
    }
}

stored! {
    f16, F16;
    bf16, BF16;
    f32, F32;
    f64, F64;
    u8, U8;
    i8, I8;
    i16, I16;
    u16, U16;
    i32, I32;
    u32, U32;
    i64, I64;
    u64, U64;
}

impl SafetensorsFile {
    /// Reads a file and checks its header.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be read, [`Error::Record`] if it is not a safetensors file.
    pub fn open(path: impl AsRef<Path>) -> Result<SafetensorsFile> {
        let path = path.as_ref().to_owned();
        let read = InputFile::open(&path).and_then(InputFile::read_all);
        let bytes = read.map_err(|source| Error::File { path: path.clone(), source: Arc::new(source) })?;
        let file = SafetensorsFile { path, bytes: Arc::new(bytes) };
        file.tensors()?;
        Ok(file)
    }

    /// Returns the names of the arrays in sorted order.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            self.tensors().map(|tensors| tensors.names().into_iter().map(str::to_owned).collect()).unwrap_or_default();
        names.sort();
        names
    }

    /// Returns a copy of an array.
    ///
    /// # Errors
    /// [`Error::Record`] if there is no array of this name and type.
    pub fn array<T: Stored>(&self, name: &str) -> Result<Array<T>> {
        let wrong = |problem: String| BadRecord::new(0, 0, problem).of(&self.path);
        let tensors = self.tensors()?;
        let Ok(tensor) = tensors.tensor(name) else {
            return Err(wrong(format!("it has no array {name:?}, but {}", self.names().join(", "))));
        };
        if tensor.dtype() != T::DTYPE {
            return Err(wrong(format!("{name:?} holds {:?}, and {:?} was asked for", tensor.dtype(), T::DTYPE)));
        }
        Array::new(tensor.shape(), T::read(tensor.data()))
    }

    fn tensors(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.bytes).map_err(|error| {
            // The length that a file begins with may have the first bytes of a compressed one.
            let problem = match Packing::of(&self.bytes) {
                Some(packing) => packing.refusal("since its arrays are read by ranges"),
                None => error.to_string(),
            };
            BadRecord::new(0, 0, problem).of(&self.path)
        })
    }
}
