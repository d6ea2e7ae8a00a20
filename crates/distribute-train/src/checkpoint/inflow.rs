//! Restoring a model that no process holds whole: the chief reads one tensor at a time, and sends it to all workers.
//!
//! Workers ask for tensors in the order of their parts' `load`. Before each one they compare what they ask for, so that
//! a difference is an error on all of them and never the value of another tensor.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
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
use super::run::RunId;
use super::stored::{Stored, zeros};
use super::survey::{Place, Survey};
use super::task::{Task, everywhere};
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
    strategy: Strategy,
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
    state: BTreeMap<String, Value>,
    tensors: HashMap<String, Vec<(String, Dtype, Vec<usize>)>>,
}

/// A checkpoint that is being restored.
#[derive(Debug)]
pub(super) struct Inflow {
    pub(super) step: u64,
    pub(super) run: RunId,
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
    let Some(Contents { step, run, state, tensors: named }) = contents else { return Ok(None) };
    let mut tensors: BTreeMap<String, BTreeMap<String, Listed>> = BTreeMap::new();
    for (group, all) in named {
        let group = tensors.entry(group).or_default();
        for (name, dtype, shape) in all {
            let problem = || format!("it has type {dtype:?}");
            let dtype = dtype_from(dtype).ok_or_else(|| Error::Restore { name: name.clone(), problem: problem() })?;
            group.insert(name, Listed { dtype, shape, kept: OnceLock::new() });
        }
    }
    let (strategy, disk, survey) = (strategy.clone(), disk.clone(), survey.map(Arc::new));
    let open = Mutex::new(Some(Arc::new(Open { strategy, disk, patience, survey })));
    let source = Source { tensors, open, failure: Mutex::new(None) };
    Ok(Some(Inflow { step, run, state, source }))
}

fn contents(survey: &Survey) -> Contents {
    let found = &survey.found;
    let of_group = |tensors: &BTreeMap<String, Place>| {
        let listed = |(name, place): (&String, &Place)| (name.clone(), dtype_of(place.dtype), place.shape.clone());
        tensors.iter().map(listed).collect()
    };
    let tensors = found.tensors.iter().map(|(group, tensors)| (group.clone(), of_group(tensors))).collect();
    Contents { step: found.step, run: found.run, state: found.state.clone(), tensors }
}

impl Source {
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
        // Also if it is refused here, so that the others do not wait.
        let asked = fnv1a_64(FNV64, group.bytes().chain([b'\n']).chain(name.bytes())).max(REFUSED + 1);
        let agreed = open.agree(name, if checked.is_ok() { asked } else { REFUSED });
        checked?;
        agreed?;
        let listed = listed.ok_or_else(|| Error::Restore {
            name: name.to_owned(),
            problem: format!("the checkpoint's {group} has none of this name"),
        })?;
        open.read(group, name, listed)
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
        if self.strategy.topology().workers() == 1 {
            return Ok(());
        }
        let groups = self.strategy.groups();
        let gathered = on_local_ranks::<_, Error>(&groups, |_, group| {
            Ok(group.start().all_gather(vec![asked], vec![0; group.world_size()])?)
        })?;
        let all = gathered.map_or_else(Vec::new, |[_, all]| all);
        let (Some(other), Some(group)) = (all.iter().position(|other| *other != asked), groups.first()) else {
            return Ok(());
        };
        Err(Error::LoadOrder { name: name.to_owned(), other: group.rank_name(Rank::of(other)).to_owned() })
    }

    fn read(&self, group: &str, name: &str, listed: &Listed) -> Result<Stored> {
        let task = self.survey.clone().map(|survey| {
            let what = format!("reading {name} of the checkpoint in {}", survey.path().display());
            let (group, name) = (group.to_owned(), name.to_owned());
            Task::start(&self.disk, what, self.patience, move |disk| survey.read(disk, &group, &name))
        });
        let read = everywhere(&self.strategy, task.transpose())?;
        let Listed { dtype, shape, .. } = listed;
        let bytes = match read {
            Some(stored) => stored.bytes,
            None => {
                let bytes = shape.iter().product::<usize>() * dtype.size_bytes();
                zeros(bytes).map_err(|_| {
                    Error::Part(format!("{name:?} has {bytes} bytes, for which there is no memory here").into())
                })?
            }
        };
        Ok(Stored { dtype: *dtype, shape: shape.clone(), bytes: self.broadcast(bytes)? })
    }

    /// Returns the chief's bytes on every worker.
    fn broadcast(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        if self.strategy.topology().workers() == 1 {
            return Ok(bytes);
        }
        let groups = self.strategy.groups();
        let (mut bytes, last) = (Some(bytes), groups.len().saturating_sub(1));
        let all = on_local_ranks::<_, Error>(&groups, |local, group| {
            let own = if local == last { bytes.take() } else { bytes.clone() };
            Ok(group.start().broadcast(own.unwrap_or_default(), Rank(0))?)
        })?;
        Ok(all.unwrap_or_default())
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count: usize = self.tensors.values().map(BTreeMap::len).sum();
        write!(f, "Source({count} tensors)")
    }
}

/// Stands for a tensor that a worker refuses to load.
const REFUSED: u64 = 0;
