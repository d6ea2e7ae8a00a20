//! A checkpoint in memory.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use distribute_device::{BufferRef, DType, bf16, f16};
use distribute_values::TensorStorage;
use safetensors::Dtype;
use safetensors::tensor::{SafeTensors, View};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::disk::Disk;
use super::read;
use super::run::RunId;
use super::task::{TIMEOUT, Task};
use crate::objects;
use crate::{Error, Result};

/// The contents of a checkpoint: tensors in named files, and values that serde can serialize.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    pub(super) step: u64,
    /// The run that it is saved for, or was read from.
    pub(super) run: Option<RunId>,
    pub(super) files: BTreeMap<String, BTreeMap<String, Stored>>,
    pub(super) state: BTreeMap<String, Value>,
}

/// A tensor's bytes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Stored {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Vec<u8>,
}

impl Snapshot {
    /// Creates an empty snapshot of a step.
    pub fn new(step: u64) -> Snapshot {
        Snapshot { step, ..Snapshot::default() }
    }

    /// Reads a checkpoint's folder, and compares every file with its checksum.
    ///
    /// # Errors
    /// [`Error::Damaged`] if it is not whole, [`Error::Format`] for another version, [`Error::File`] if it cannot be
    /// read for other reasons, such as a missing permission, [`Error::DiskHangs`] if an operation on the disk takes
    /// longer than five minutes.
    pub fn read(folder: impl AsRef<Path>) -> Result<Snapshot> {
        let path = objects::resolved(folder.as_ref().to_owned());
        let what = format!("reading {}", path.display());
        Task::start(&Disk::default(), what, TIMEOUT, move |disk| read::read(disk, &path))?.wait()
    }

    /// Returns the step after which it was taken.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the run that it belongs to; `None` if it was created in memory.
    pub fn run(&self) -> Option<RunId> {
        self.run
    }

    /// Copies a tensor into a file, such as `model`.
    ///
    /// # Errors
    /// [`Error::Values`] if the tensor cannot be read.
    pub fn put<L, T: TensorStorage<L>>(&mut self, file: &str, name: &str, tensor: &T) -> Result<()> {
        let (dtype, shape) = (tensor.dtype()?, tensor.shape());
        let mut bytes = Vec::new();
        tensor.read(&mut |elements| bytes = elements.as_bytes().to_vec())?;
        self.put_bytes(file, name, dtype, &shape, bytes);
        Ok(())
    }

    /// Adds a tensor given as bytes, with elements in row-major order, to a file.
    pub fn put_bytes(&mut self, file: &str, name: &str, dtype: DType, shape: &[usize], bytes: Vec<u8>) {
        let stored = Stored { dtype, shape: shape.to_vec(), bytes };
        self.files.entry(file.to_owned()).or_default().insert(name.to_owned(), stored);
    }

    /// Returns a tensor of a file, created by the library of `like`, whose shape and type it must have.
    ///
    /// # Errors
    /// [`Error::Restore`] if it does not exist, or has another shape or type; [`Error::Values`] if it cannot be
    /// created.
    pub fn get<L, T: TensorStorage<L>>(&self, file: &str, name: &str, like: &T) -> Result<T> {
        self.get_shaped(file, name, like, &like.shape())
    }

    /// Returns a tensor of a file like [`get`](Snapshot::get), with a shape of its own instead of that of `like`: the
    /// whole of a variable of which `like` is a part.
    ///
    /// # Errors
    /// The errors of [`get`](Snapshot::get) occur in the same cases.
    pub fn get_shaped<L, T: TensorStorage<L>>(&self, file: &str, name: &str, like: &T, shape: &[usize]) -> Result<T> {
        let wrong = |problem| Error::Restore { name: name.to_owned(), problem };
        let stored = self.files.get(file).and_then(|tensors| tensors.get(name));
        let stored = stored.ok_or_else(|| wrong(format!("the checkpoint's {file} has none of this name")))?;
        let dtype = like.dtype()?;
        if (stored.dtype, stored.shape.as_slice()) != (dtype, shape) {
            let Stored { dtype: saved, shape: of, .. } = stored;
            return Err(wrong(format!("the checkpoint has {saved} {of:?}, and the program {dtype} {shape:?}")));
        }
        let elements = BufferRef::from_bytes(dtype, &stored.bytes).map_err(distribute_values::Error::from)?;
        Ok(like.beside(shape, elements)?)
    }

    /// Returns the type, the shape and the bytes of a file's tensor.
    pub fn tensor(&self, file: &str, name: &str) -> Option<(DType, &[usize], &[u8])> {
        let stored = self.files.get(file)?.get(name)?;
        Some((stored.dtype, &stored.shape, &stored.bytes))
    }

    /// Returns the names of a file's tensors.
    pub fn names(&self, file: &str) -> Vec<&str> {
        self.files.get(file).map_or_else(Vec::new, |tensors| tensors.keys().map(String::as_str).collect())
    }

    /// Returns the elements of a file's tensor as f64; `None` for u64, whose type this does not convert.
    pub fn numbers(&self, file: &str, name: &str) -> Option<Vec<f64>> {
        let stored = self.files.get(file)?.get(name)?;
        let elements = BufferRef::from_bytes(stored.dtype, &stored.bytes).ok()?;
        macro_rules! wide {
            ($($dtype:ident => $t:ty, $wide:expr);*) => {
                match stored.dtype {
                    $(DType::$dtype => elements.as_slice::<$t>().ok()?.iter().copied().map($wide).collect(),)*
                    _ => return None,
                }
            };
        }
        Some(wide!(F32 => f32, f64::from; F64 => f64, f64::from; F16 => f16, f64::from; BF16 => bf16, f64::from;
            I8 => i8, f64::from; U8 => u8, f64::from; I32 => i32, f64::from; U32 => u32, f64::from;
            I64 => i64, |x| x as f64))
    }

    /// Adds a value under a key.
    ///
    /// # Errors
    /// [`Error::State`] if it cannot be written as JSON.
    pub fn put_state(&mut self, key: &str, value: &impl Serialize) -> Result<()> {
        let wrong = |source| Error::State { key: key.to_owned(), source };
        self.state.insert(key.to_owned(), serde_json::to_value(value).map_err(wrong)?);
        Ok(())
    }

    /// Returns the value of a key, if there is one.
    ///
    /// # Errors
    /// [`Error::State`] if it is not an `S`.
    pub fn get_state<S: DeserializeOwned>(&self, key: &str) -> Result<Option<S>> {
        let wrong = |source| Error::State { key: key.to_owned(), source };
        self.state.get(key).map(|value| serde_json::from_value(value.clone()).map_err(wrong)).transpose()
    }

    /// Serializes everything to one safetensors document, for other processes.
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        let tensors = self
            .files
            .iter()
            .flat_map(|(file, tensors)| tensors.iter().map(move |(name, stored)| (format!("{file}\n{name}"), stored)));
        let encode = |value: &BTreeMap<String, Value>| {
            serde_json::to_string(value).map_err(|source| Error::State { key: "state".to_owned(), source })
        };
        let mut metadata =
            HashMap::from([("step".to_owned(), self.step.to_string()), ("state".to_owned(), encode(&self.state)?)]);
        metadata.extend(self.run.map(|run| ("run".to_owned(), run.to_string())));
        safetensors::serialize(tensors, Some(metadata))
            .map_err(|error| Error::Damaged { path: "a snapshot".into(), problem: error.to_string() })
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Snapshot> {
        let damaged = |problem: String| Error::Damaged { path: "the chief's snapshot".into(), problem };
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| damaged(error.to_string()))?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let step = metadata.get("step").and_then(|step| step.parse().ok());
        let step = step.ok_or_else(|| damaged("it has no step".to_owned()))?;
        let state = metadata.get("state").map_or("{}", String::as_str);
        let state = serde_json::from_str(state).map_err(|error| damaged(error.to_string()))?;
        let run = metadata.get("run").map(|run| run.parse().map_err(damaged)).transpose()?;
        let mut snapshot = Snapshot { step, run, files: BTreeMap::new(), state };
        for (name, stored) in tensors_of(bytes).map_err(damaged)? {
            let (file, name) = name.split_once('\n').unwrap_or(("model", &name));
            snapshot.files.entry(file.to_owned()).or_default().insert(name.to_owned(), stored);
        }
        Ok(snapshot)
    }
}

/// Returns the tensors of a safetensors document.
pub(super) fn tensors_of(bytes: &[u8]) -> Result<Vec<(String, Stored)>, String> {
    let tensors = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
    let stored = |(name, tensor): (String, safetensors::tensor::TensorView<'_>)| {
        let dtype = dtype_from(tensor.dtype()).ok_or_else(|| format!("{name} has type {:?}", tensor.dtype()))?;
        Ok((name, Stored { dtype, shape: tensor.shape().to_vec(), bytes: tensor.data().to_vec() }))
    };
    tensors.tensors().into_iter().map(stored).collect()
}

impl View for &Stored {
    fn dtype(&self) -> Dtype {
        match self.dtype {
            DType::F32 => Dtype::F32,
            DType::F64 => Dtype::F64,
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            DType::I8 => Dtype::I8,
            DType::U8 => Dtype::U8,
            DType::I32 => Dtype::I32,
            DType::U32 => Dtype::U32,
            DType::I64 => Dtype::I64,
            DType::U64 => Dtype::U64,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

fn dtype_from(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I8 => DType::I8,
        Dtype::U8 => DType::U8,
        Dtype::I32 => DType::I32,
        Dtype::U32 => DType::U32,
        Dtype::I64 => DType::I64,
        Dtype::U64 => DType::U64,
        _ => return None,
    })
}
