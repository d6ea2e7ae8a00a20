//! Restoring a model that no process holds whole: the chief reads one tensor at a time, and sends it to all workers.
//!
//! Workers ask for tensors in the order of their parts' `load`. Before each one they compare what they ask for, so that
//! a difference is an error on all of them and never the value of another tensor.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use distribute_collectives::{Rank, on_local_ranks};
use distribute_device::DType;
use distribute_strategy::Strategy;
use distribute_types::{FNV64, fnv1a_64};
use parking_lot::Mutex;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::disk::Disk;
use super::origin::Origin;
use super::run::RunId;
use super::stored::{Stored, zeros};
use super::survey::{Place, Survey};
use super::task::{Awaited, Task, everywhere};
use super::tensor_file::{dtype_from, dtype_of};
use crate::chief::bytes_from_chief;
use crate::{Error, Result};

/// The tensors of a checkpoint that is being restored.
pub(super) struct Source {
    tensors: BTreeMap<String, BTreeMap<String, Listed>>,
    /// `None` when the parts are restored.
    open: Mutex<Option<Arc<Open>>>,
    /// The error of a call that cannot return one.
    failure: Mutex<Option<Error>>,
}

/// A tensor, and its bytes if they were borrowed.
struct Listed {
    dtype: DType,
    shape: Vec<usize>,
    kept: OnceLock<Stored>,
}

struct Open {
    /// `None` for a process that reads alone.
    strategy: Option<Strategy>,
    disk: Disk,
    patience: Duration,
    /// The files, on the chief.
    survey: Option<Arc<Survey>>,
}

/// The contents of a checkpoint, as the chief sends them to the other workers.
#[derive(Serialize, Deserialize)]
struct Contents {
    step: u64,
    run: RunId,
    origin: Origin,
    state: BTreeMap<String, Value>,
    tensors: HashMap<String, Vec<(String, Dtype, Vec<usize>)>>,
}

/// A checkpoint that is being restored.
#[derive(Debug)]
pub(super) struct Inflow {
    pub(super) step: u64,
    pub(super) run: RunId,
    pub(super) origin: Origin,
    pub(super) state: BTreeMap<String, Value>,
    pub(super) source: Source,
}

/// Returns the checkpoint that the chief has found on every worker; `None` if there is none. Every worker calls this.
pub(super) fn begin(
    strategy: &Strategy,
    survey: Option<Survey>,
    disk: &Disk,
    patience: Duration,
) -> Result<Option<Inflow>> {
    let contents = survey.as_ref().map(contents);
    let contents = match strategy.topology().workers() {
        1 => contents,
        _ => {
            let json = |source| Error::State { key: "the contents of a checkpoint".to_owned(), source };
            let bytes = contents.map_or_else(|| Ok(Vec::new()), |contents| serde_json::to_vec(&contents).map_err(json));
            let bytes = bytes_from_chief(strategy, bytes)?;
            if bytes.is_empty() { None } else { Some(serde_json::from_slice(&bytes).map_err(json)?) }
        }
    };
    let Some(Contents { step, run, origin, state, tensors: named }) = contents else { return Ok(None) };
    let mut tensors: BTreeMap<String, BTreeMap<String, Listed>> = BTreeMap::new();
    for (group, all) in named {
        let group = tensors.entry(group).or_default();
        for (name, dtype, shape) in all {
            let problem = || format!("it has type {dtype:?}");
            let dtype = dtype_from(dtype).ok_or_else(|| Error::Restore { name: name.clone(), problem: problem() })?;
            group.insert(name, Listed { dtype, shape, kept: OnceLock::new() });
        }
    }
    let open = Open { strategy: Some(strategy.clone()), disk: disk.clone(), patience, survey: survey.map(Arc::new) };
    Ok(Some(Inflow { step, run, origin, state, source: Source::new(tensors, open) }))
}

/// Returns a checkpoint that this process alone reads.
pub(super) fn alone(survey: Survey, disk: &Disk, patience: Duration) -> Inflow {
    let listed = |(name, Place { dtype, shape, .. }): (&String, &Place)| {
        (name.clone(), Listed { dtype: *dtype, shape: shape.clone(), kept: OnceLock::new() })
    };
    let of_group = |tensors: &BTreeMap<String, Place>| tensors.iter().map(listed).collect();
    let found = &survey.found;
    let tensors = found.tensors.iter().map(|(group, tensors)| (group.clone(), of_group(tensors))).collect();
    let (step, run, origin, state) = (found.step, found.run, found.origin.clone(), found.state.clone());
    let open = Open { strategy: None, disk: disk.clone(), patience, survey: Some(Arc::new(survey)) };
    Inflow { step, run, origin, state, source: Source::new(tensors, open) }
}

fn contents(survey: &Survey) -> Contents {
    let found = &survey.found;
    let of_group = |tensors: &BTreeMap<String, Place>| {
        let listed = |(name, place): (&String, &Place)| (name.clone(), dtype_of(place.dtype), place.shape.clone());
        tensors.iter().map(listed).collect()
    };
    let tensors = found.tensors.iter().map(|(group, tensors)| (group.clone(), of_group(tensors))).collect();
    let (origin, state) = (found.origin.clone(), found.state.clone());
    Contents { step: found.step, run: found.run, origin, state, tensors }
}

impl Source {
    fn new(tensors: BTreeMap<String, BTreeMap<String, Listed>>, open: Open) -> Source {
        Source { tensors, open: Mutex::new(Some(Arc::new(open))), failure: Mutex::new(None) }
    }

    /// Returns the type and the shape of a group's tensor.
    pub(super) fn describe(&self, group: &str, name: &str) -> Option<(DType, &[usize])> {
        let Listed { dtype, shape, .. } = self.tensors.get(group)?.get(name)?;
        Some((*dtype, shape))
    }

    /// Returns the names of a group's tensors.
    pub(super) fn names(&self, group: &str) -> Vec<&str> {
        self.tensors.get(group).map_or_else(Vec::new, |tensors| tensors.keys().map(String::as_str).collect())
    }

    /// Reads a tensor if `check` accepts its type and shape. Every worker calls this, for the same tensors in the same
    /// order.
    pub(super) fn read(
        &self,
        group: &str,
        name: &str,
        check: impl FnOnce(Option<(DType, &[usize])>) -> Result<()>,
    ) -> Result<Stored> {
        let open = self.open.lock().clone().ok_or_else(|| Error::ReadLate { name: name.to_owned() })?;
        let listed = self.tensors.get(group).and_then(|tensors| tensors.get(name));
        let checked = check(listed.map(|listed| (listed.dtype, &listed.shape[..])));
        let whole = 0..listed.map_or(0, Listed::bytes);
        // Also if it is refused here, so that the others do not wait.
        let agreed = open.agree(name, if checked.is_ok() { asked(group, name, &whole) } else { REFUSED });
        checked?;
        agreed?;
        let Listed { dtype, shape, .. } = listed.ok_or_else(|| none_of(group, name))?;
        Ok(Stored { dtype: *dtype, shape: shape.clone(), bytes: open.read(group, name, whole)? })
    }

    /// Reads a range of a tensor's bytes. Every worker calls this, for the same ranges in the same order.
    pub(super) fn read_range(&self, group: &str, name: &str, range: Range<usize>) -> Result<Vec<u8>> {
        let open = self.open.lock().clone().ok_or_else(|| Error::ReadLate { name: name.to_owned() })?;
        open.agree(name, asked(group, name, &range))?;
        open.read(group, name, range)
    }

    /// Reads a tensor like [`Source::read`], and keeps it in memory; `None` if there is none of this name, or if it
    /// cannot be read, which [`Source::failure`] returns.
    pub(super) fn borrow(&self, group: &str, name: &str) -> Option<&Stored> {
        let listed = self.tensors.get(group)?.get(name)?;
        if listed.kept.get().is_none() {
            match self.read(group, name, |_| Ok(())) {
                Ok(stored) => drop(listed.kept.set(stored)),
                // It is too late for an error.
                Err(Error::ReadLate { .. }) => {}
                Err(error) => drop(self.failure.lock().get_or_insert(error)),
            }
        }
        listed.kept.get()
    }

    /// Returns the error of a call that could not return it.
    pub(super) fn failure(&self) -> Option<Error> {
        self.failure.lock().take()
    }

    /// Closes the files, and leaves the strategy.
    pub(super) fn close(&self) {
        *self.open.lock() = None;
    }
}

impl Open {
    /// Compares what all workers ask for.
    fn agree(&self, name: &str, asked: u64) -> Result<()> {
        let Some(strategy) = self.of_several() else { return Ok(()) };
        let groups = strategy.groups();
        let gathered = on_local_ranks::<_, Error>(&groups, |_, group| {
            Ok(group.start().all_gather(vec![asked], vec![0; group.world_size()])?)
        })?;
        let all = gathered.map_or_else(Vec::new, |[_, all]| all);
        let (Some(other), Some(group)) = (all.iter().position(|other| *other != asked), groups.first()) else {
            return Ok(());
        };
        Err(Error::LoadOrder { name: name.to_owned(), other: group.rank_name(Rank::of(other)).to_owned() })
    }

    /// Returns the strategy if other workers read the same.
    fn of_several(&self) -> Option<&Strategy> {
        self.strategy.as_ref().filter(|strategy| strategy.topology().workers() > 1)
    }

    fn read(&self, group: &str, name: &str, range: Range<usize>) -> Result<Vec<u8>> {
        let bytes = range.len();
        let task = self.survey.clone().map(|survey| {
            let what = format!("reading {name} of the checkpoint in {}", survey.path().display());
            let (group, name) = (group.to_owned(), name.to_owned());
            Task::start(&self.disk, what, self.patience, move |disk| survey.read(disk, &group, &name, range))
        });
        let read = match &self.strategy {
            Some(strategy) => everywhere(strategy, Ok(task))?,
            None => task.map(Task::wait).transpose()?,
        };
        let bytes = match read {
            Some(bytes) => bytes,
            None => zeros(bytes).map_err(|_| {
                Error::Part(format!("{bytes} bytes of {name:?} are read, for which there is no memory here").into())
            })?,
        };
        self.broadcast(bytes)
    }

    /// Returns the chief's bytes on every worker.
    fn broadcast(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        let Some(strategy) = self.of_several() else { return Ok(bytes) };
        let groups = strategy.groups();
        let (mut bytes, last) = (Some(bytes), groups.len().saturating_sub(1));
        let all = on_local_ranks::<_, Error>(&groups, |local, group| {
            let own = if local == last { bytes.take() } else { bytes.clone() };
            Ok(group.start().broadcast(own.unwrap_or_default(), Rank(0))?)
        })?;
        Ok(all.unwrap_or_default())
    }
}

impl Listed {
    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size_bytes()
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count: usize = self.tensors.values().map(BTreeMap::len).sum();
        write!(f, "Source({count} tensors)")
    }
}

/// Returns the number by which workers compare what they ask for.
fn asked(group: &str, name: &str, range: &Range<usize>) -> u64 {
    let ends = [range.start, range.end].into_iter().flat_map(|end| (end as u64).to_le_bytes());
    let bytes = group.bytes().chain([b'\n']).chain(name.bytes()).chain([b'\n']).chain(ends);
    fnv1a_64(FNV64, bytes).max(REFUSED + 1)
}

fn none_of(group: &str, name: &str) -> Error {
    Error::Restore { name: name.to_owned(), problem: format!("the checkpoint's {group} has none of this name") }
}

/// Stands for a tensor that a worker refuses to load.
const REFUSED: u64 = 0;
