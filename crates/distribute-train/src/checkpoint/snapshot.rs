//! A checkpoint in memory.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use distribute_device::{BufferRef, DType, bf16, f16};
use distribute_strategy::Strategy;
use distribute_values::TensorStorage;
use parking_lot::Mutex;
use safetensors::tensor::SafeTensors;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::disk::Disk;
use super::inflow::Source;
use super::names::STATE;
use super::origin::Origin;
use super::outflow::Sink;
use super::run::RunId;
use super::stored::{Stored, tensors_of};
use super::task::{Awaited, TIMEOUT, Task};
use super::{read, restore};
use crate::objects;
use crate::{Error, Result};

/// The contents of a checkpoint: tensors in named files, and values that serde can serialize.
///
/// # Strategies that shard
/// Under [`FullyShardedStrategy`](distribute_strategy::FullyShardedStrategy) no process holds all tensors of a
/// checkpoint. While one is saved, tensors leave the snapshot as they come: [`put_whole`](Snapshot::put_whole) passes
/// them on. While one is restored, each is read when it is asked for, and sent to all workers: every worker must ask
/// for the same tensors in the same order, and gets [`Error::LoadOrder`] otherwise. Afterwards they can no longer be
/// read ([`Error::ReadLate`]), except those that [`tensor`](Snapshot::tensor) has returned. The same holds for parts
/// that [`stream`](super::Checkpointed::streams), whose tensors may be put and read in pieces.
///
/// # Names
/// Each tensor of a file, and each key of a value, is put once: a second one of the same name is
/// [`Error::PutTwice`], since one of the two would be lost.
#[derive(Debug, Default)]
pub struct Snapshot {
    pub(super) step: u64,
    /// The run that it is saved for, or was read from.
    pub(super) run: Option<RunId>,
    /// The checkpoint that it was read from.
    pub(super) origin: Option<Origin>,
    pub(super) files: BTreeMap<String, BTreeMap<String, Stored>>,
    pub(super) state: BTreeMap<String, Value>,
    /// The names of what was put, by file; values are put into the file of the state.
    pub(super) put: BTreeSet<(String, String)>,
    /// The first name that [`put_bytes`](Snapshot::put_bytes), which returns no error, was given twice.
    pub(super) put_twice: Option<(String, String)>,
    /// Where tensors go, if they do not stay in memory. Only `&mut self` reaches it: the lock is never taken.
    pub(super) sink: Option<Box<Mutex<Sink>>>,
    /// Where tensors are read, if they are not in memory.
    pub(super) source: Option<Arc<Source>>,
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
        Task::start(&Disk::default(), what, TIMEOUT, move |disk| read::read(disk, &path)).wait()
    }

    /// Returns the chief's snapshot on every worker, under a strategy that shards: the others have only those variables
    /// of which each replica has the whole. Every worker calls this.
    pub(crate) fn of_chief(self, strategy: &Strategy) -> Result<Snapshot> {
        if !restore::streams(strategy, &[]) || strategy.topology().workers() == 1 {
            return Ok(self);
        }
        let (chief, step) = (strategy.is_chief(), self.step);
        let shared = restore::shared(strategy, chief.then_some(self))?;
        Ok(shared.unwrap_or_else(|| Snapshot::new(step)))
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
    /// [`Error::PutTwice`] for a name that was put into the file already; [`Error::Values`] if the tensor cannot be
    /// read.
    pub fn put<L, T: TensorStorage<L>>(&mut self, file: &str, name: &str, tensor: &T) -> Result<()> {
        let (dtype, shape) = (tensor.dtype()?, tensor.shape());
        let mut bytes = Vec::new();
        tensor.read(&mut |elements| bytes = elements.as_bytes().to_vec())?;
        self.note_put(file, name)?;
        self.store(file, name, Stored { dtype, shape, bytes });
        Ok(())
    }

    /// Copies a variable's whole value into a file, which the chief has gathered: other workers may pass `None`. Every
    /// worker calls this, for the same variables in the same order, with the strategy that the model belongs to.
    ///
    /// Under a strategy that shards, the tensor is passed on to the thread that writes. If the chief cannot read or
    /// write it, all workers get an error at once, and none of them waits for the chief in the next gather.
    ///
    /// # Errors
    /// [`Error::PutTwice`] on every worker for a name that was put into the file already; [`Error::Values`] if the
    /// tensor cannot be read. Under a strategy that shards: the chief's error of writing the checkpoint so far, such as
    /// [`Error::File`] if the disk is full; [`Error::Chief`] or [`Error::ChiefsDisk`] on the other workers;
    /// [`Error::Collective`] if a worker is missing or fails.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::Strategy;
    /// use distribute_train::checkpoint::{MODEL, Snapshot};
    /// use distribute_values::{Host, HostTensor};
    /// let strategy = Strategy::default_strategy()?;
    /// let mut snapshot = Snapshot::new(1);
    /// let gathered = strategy.is_chief().then(|| HostTensor::scalar(7.0f32));
    /// snapshot.put_whole::<Host, _>(&strategy, MODEL, "w", gathered)?;
    /// assert_eq!(snapshot.names(MODEL), ["w"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn put_whole<L, T: TensorStorage<L>>(
        &mut self,
        strategy: &Strategy,
        file: &str,
        name: &str,
        tensor: Option<T>,
    ) -> Result<()> {
        let outcome = match tensor {
            Some(tensor) => self.put(file, name, &tensor),
            None => self.note_put(file, name),
        };
        let Some(sink) = self.sink.as_mut().map(|sink| sink.get_mut()) else { return outcome };
        let outcome = match outcome {
            Err(error) if strategy.is_chief() => {
                sink.fail(error);
                Ok(())
            }
            outcome => outcome,
        };
        // Also with an error of its own: the others wait for this.
        let settled = sink.settle(strategy);
        outcome.and(settled)
    }

    /// Adds a tensor given as bytes, with elements in row-major order, to a file. For a name that was put into the file
    /// already, saving the checkpoint ends with [`Error::PutTwice`].
    pub fn put_bytes(&mut self, file: &str, name: &str, dtype: DType, shape: &[usize], bytes: Vec<u8>) {
        match self.note_put(file, name) {
            Ok(()) => self.store(file, name, Stored { dtype, shape: shape.to_vec(), bytes }),
            Err(_) => {
                self.put_twice.get_or_insert_with(|| (file.to_owned(), name.to_owned()));
            }
        }
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
        let dtype = like.dtype()?;
        let check = |found: Option<(DType, &[usize])>| {
            let wrong = |problem| Error::Restore { name: name.to_owned(), problem };
            match found {
                None => Err(wrong(format!("the checkpoint's {file} has none of this name"))),
                Some(found) if found == (dtype, shape) => Ok(()),
                Some((saved, of)) => {
                    Err(wrong(format!("the checkpoint has {saved} {of:?}, and the program {dtype} {shape:?}")))
                }
            }
        };
        let stored = self.stored(file, name, check)?;
        let elements = BufferRef::from_bytes(dtype, &stored.bytes).map_err(distribute_values::Error::from)?;
        Ok(like.beside(shape, elements)?)
    }

    /// Returns the type, the shape and the bytes of a file's tensor. While a checkpoint is restored under a strategy
    /// that shards, a tensor that is borrowed stays in memory as long as the snapshot; [`bytes`](Snapshot::bytes) does
    /// not keep it.
    pub fn tensor(&self, file: &str, name: &str) -> Option<(DType, &[usize], &[u8])> {
        let stored = match &self.source {
            Some(source) => source.borrow(file, name)?,
            None => self.files.get(file)?.get(name)?,
        };
        Some((stored.dtype, &stored.shape, &stored.bytes))
    }

    /// Returns a copy of the bytes of a file's tensor; `None` if there is none of this name.
    ///
    /// # Errors
    /// Under a strategy that shards, the errors of reading the checkpoint.
    pub fn bytes(&self, file: &str, name: &str) -> Result<Option<Vec<u8>>> {
        if !self.names(file).contains(&name) {
            return Ok(None);
        }
        Ok(Some(self.stored(file, name, |_| Ok(()))?.into_owned().bytes))
    }

    /// Returns the names of a file's tensors.
    pub fn names(&self, file: &str) -> Vec<&str> {
        if let Some(source) = &self.source {
            return source.names(file);
        }
        self.files.get(file).map_or_else(Vec::new, |tensors| tensors.keys().map(String::as_str).collect())
    }

    /// Returns the elements of a file's tensor as f64; `None` for u64, whose type this does not convert.
    pub fn numbers(&self, file: &str, name: &str) -> Option<Vec<f64>> {
        let (dtype, _, bytes) = self.tensor(file, name)?;
        let elements = BufferRef::from_bytes(dtype, bytes).ok()?;
        macro_rules! wide {
            ($($dtype:ident => $t:ty, $wide:expr);*) => {
                match dtype {
                    $(DType::$dtype => elements.as_slice::<$t>().ok()?.iter().copied().map($wide).collect(),)*
                    _ => return None,
                }
            };
        }
        Some(wide!(F32 => f32, f64::from; F64 => f64, f64::from; F16 => f16, f64::from; BF16 => bf16, f64::from;
            I8 => i8, f64::from; U8 => u8, f64::from; I32 => i32, f64::from; U32 => u32, f64::from;
            I64 => i64, |x| x as f64))
    }

    /// Returns a file's tensor if `check` accepts its type and shape.
    fn stored(
        &self,
        file: &str,
        name: &str,
        check: impl FnOnce(Option<(DType, &[usize])>) -> Result<()>,
    ) -> Result<Cow<'_, Stored>> {
        if let Some(source) = &self.source {
            return source.read(file, name, check).map(Cow::Owned);
        }
        let stored = self.files.get(file).and_then(|tensors| tensors.get(name));
        check(stored.map(|stored| (stored.dtype, &stored.shape[..])))?;
        let missing = || Error::Restore {
            name: name.to_owned(),
            problem: format!("the checkpoint's {file} has none of this name"),
        };
        stored.map(Cow::Borrowed).ok_or_else(missing)
    }

    /// Adds a value under a key.
    ///
    /// # Errors
    /// [`Error::PutTwice`] for a key that has a value already; [`Error::State`] if the value cannot be written as JSON.
    pub fn put_state(&mut self, key: &str, value: &impl Serialize) -> Result<()> {
        let wrong = |source| Error::State { key: key.to_owned(), source };
        let value = serde_json::to_value(value).map_err(wrong)?;
        self.note_put(STATE, key)?;
        self.state.insert(key.to_owned(), value);
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

    /// Returns the error of a name that [`put_bytes`](Snapshot::put_bytes) was given twice, if there is one.
    pub(crate) fn check_put_once(&self) -> Result<()> {
        self.put_twice.as_ref().map_or(Ok(()), |(file, name)| Err(twice(file, name)))
    }

    /// Notes that a tensor, or a value, of this name is put.
    pub(super) fn note_put(&mut self, file: &str, name: &str) -> Result<()> {
        match self.put.insert((file.to_owned(), name.to_owned())) {
            true => Ok(()),
            false => Err(twice(file, name)),
        }
    }

    /// Adds a tensor whose name was noted.
    pub(super) fn store(&mut self, file: &str, name: &str, stored: Stored) {
        if let Some(sink) = &mut self.sink {
            return sink.get_mut().push(file, name, stored);
        }
        self.files.entry(file.to_owned()).or_default().insert(name.to_owned(), stored);
    }

    /// Serializes everything to one safetensors document, for other processes.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>> {
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
        if let Some(origin) = &self.origin {
            let wrong = |source| Error::State { key: "origin".to_owned(), source };
            metadata.insert("origin".to_owned(), serde_json::to_string(origin).map_err(wrong)?);
        }
        safetensors::serialize(tensors, Some(metadata))
            .map_err(|error| Error::Damaged { path: "a snapshot".into(), problem: error.to_string() })
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Snapshot> {
        let damaged = |problem: String| Error::Damaged { path: "the chief's snapshot".into(), problem };
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| damaged(error.to_string()))?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let step = metadata.get("step").and_then(|step| step.parse().ok());
        let step = step.ok_or_else(|| damaged("it has no step".to_owned()))?;
        let state = metadata.get("state").map_or("{}", String::as_str);
        let state = serde_json::from_str(state).map_err(|error| damaged(error.to_string()))?;
        let run = metadata.get("run").map(|run| run.parse().map_err(damaged)).transpose()?;
        let origin = metadata.get("origin").map(|text| serde_json::from_str(text)).transpose();
        let origin = origin.map_err(|error| damaged(error.to_string()))?;
        let mut snapshot = Snapshot { run, origin, state, ..Snapshot::new(step) };
        for (name, stored) in tensors_of(bytes).map_err(damaged)? {
            let (file, name) = name.split_once('\n').unwrap_or(("model", &name));
            snapshot.files.entry(file.to_owned()).or_default().insert(name.to_owned(), stored);
        }
        Ok(snapshot)
    }
}

/// The contents; a copy of a snapshot that is being saved collects in memory what it is given from then on.
impl Clone for Snapshot {
    fn clone(&self) -> Snapshot {
        let Snapshot { step, run, origin, files, state, put, put_twice, source, .. } = self;
        let (files, state, source) = (files.clone(), state.clone(), source.clone());
        let (origin, put, put_twice) = (origin.clone(), put.clone(), put_twice.clone());
        Snapshot { step: *step, run: *run, origin, files, state, put, put_twice, sink: None, source }
    }
}

fn twice(file: &str, name: &str) -> Error {
    Error::PutTwice { file: file.to_owned(), name: name.to_owned() }
}

/// Compares contents in memory, and whether tensors are read from the same files.
impl PartialEq for Snapshot {
    fn eq(&self, other: &Snapshot) -> bool {
        let sources = match (&self.source, &other.source) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (one, other) => one.is_none() && other.is_none(),
        };
        let parts = |snapshot: &Snapshot| (snapshot.step, snapshot.run);
        sources && parts(self) == parts(other) && self.files == other.files && self.state == other.state
    }
}
