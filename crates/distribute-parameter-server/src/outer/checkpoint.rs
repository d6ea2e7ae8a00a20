//! Checkpoints of a server: its fragments of the outer parameters, and their momentum.

use std::collections::BTreeMap;
use std::path::Path;

use distribute_cluster::Task;
use distribute_device::DType;
use distribute_strategy::{OneDeviceStrategy, Strategy};
use distribute_train::BoxError;
use distribute_train::checkpoint::{CheckpointManager, Checkpointed, Snapshot};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::held::Kept;
use crate::{Error, Result, numbers};

/// The files of a checkpoint.
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";

/// The key of the fragments in a checkpoint, by number.
const FRAGMENTS: &str = "outer_fragments";

/// The name of a variable's momentum begins with the variable's name.
const MOMENTUM: &str = "/outer_momentum";

/// A fragment without its values.
#[derive(Debug, Serialize, Deserialize)]
struct About {
    version: u64,
    variables: Vec<(String, u64)>,
    /// By island. Checkpoints of earlier versions do not have it.
    #[serde(default)]
    sent_after: BTreeMap<String, u64>,
}

/// The checkpoints of one server.
pub(crate) struct Checkpoints {
    manager: CheckpointManager,
    /// A server trains nothing, but checkpoints belong to a strategy.
    strategy: Strategy,
}

impl Checkpoints {
    /// Opens a server's checkpoints in the folder of all servers', and returns the fragments of the newest one.
    ///
    /// # Errors
    /// [`Error::Train`] if there are checkpoints that cannot be read.
    pub(crate) fn open(folder: &Path, server: Task) -> Result<(Checkpoints, BTreeMap<u32, Kept>)> {
        let strategy = OneDeviceStrategy::builder("CPU:0").build()?;
        let mut manager = CheckpointManager::new(folder.join(format!("{}-{}", server.kind, server.index))).keep(2);
        let part = Part(Mutex::default());
        manager.restore::<()>(&strategy, &[&part])?;
        Ok((Checkpoints { manager, strategy }, part.0.into_inner()))
    }

    /// Starts to save fragments; they are written on a thread of their own.
    ///
    /// # Errors
    /// [`Error::Train`], also if the checkpoint before could not be written.
    pub(crate) fn save(&mut self, step: u64, fragments: BTreeMap<u32, Kept>) -> Result<()> {
        Ok(self.manager.save(&self.strategy, step, &[&Part(Mutex::new(fragments))], &())?)
    }

    /// Waits until the last checkpoint is written.
    ///
    /// # Errors
    /// [`Error::Train`] if it could not be written.
    pub(crate) fn finish(&mut self) -> Result<()> {
        Ok(self.manager.finish()?)
    }
}

/// The fragments of a checkpoint.
struct Part(Mutex<BTreeMap<u32, Kept>>);

impl Checkpointed for Part {
    fn save(&self, _: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        let mut all = BTreeMap::new();
        for (number, kept) in &*self.0.lock() {
            let mut begin = 0;
            for (name, len) in &kept.variables {
                let range = begin..begin + *len as usize;
                let mut put = |file: &str, name: &str, values: &[f32]| {
                    let bytes = bytemuck::cast_slice(values).to_vec();
                    snapshot.put_bytes(file, name, DType::F32, &[values.len()], bytes);
                };
                put(MODEL, name, &kept.values[range.clone()]);
                if let Some(momentum) = kept.momentum.get(range.clone()) {
                    put(OPTIMIZER, &format!("{name}{MOMENTUM}"), momentum);
                }
                begin = range.end;
            }
            let sent_after = kept.sent_after.iter().map(|(island, steps)| (island.to_string(), *steps)).collect();
            all.insert(*number, About { version: kept.version, variables: kept.variables.clone(), sent_after });
        }
        snapshot.put_state(FRAGMENTS, &all)?;
        Ok(())
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        let all: BTreeMap<u32, About> = snapshot.get_state(FRAGMENTS)?.unwrap_or_default();
        for (number, About { version, variables, sent_after }) in all {
            // Islands of another cluster do not come back.
            let islands = sent_after.iter().filter_map(|(island, steps)| Some((island.parse().ok()?, *steps)));
            let mut kept = Kept { version, sent_after: islands.collect(), ..Kept::default() };
            for (name, len) in &variables {
                let values = read(snapshot, MODEL, name, *len)?;
                kept.values.extend(values.ok_or_else(|| missing(name))?);
                kept.momentum
                    .extend(read(snapshot, OPTIMIZER, &format!("{name}{MOMENTUM}"), *len)?.unwrap_or_default());
            }
            if !kept.momentum.is_empty() && kept.momentum.len() != kept.values.len() {
                return Err(missing(MOMENTUM).into());
            }
            kept.variables = variables;
            self.0.lock().insert(number, kept);
        }
        Ok(())
    }
}

/// Reads a tensor, if there is one of this name, of `len` elements.
fn read(snapshot: &Snapshot, file: &str, name: &str, len: u64) -> Result<Option<Vec<f32>>> {
    let Some((dtype, _, bytes)) = snapshot.tensor(file, name) else { return Ok(None) };
    let values = numbers::read::<f32>(bytes, dtype).filter(|values| dtype == DType::F32 && values.len() as u64 == len);
    let problem = || format!("the checkpoint does not have it as {len} elements of f32; take another folder");
    let values = values.ok_or_else(|| Error::Variable { name: name.to_owned(), problem: problem() })?;
    Ok(Some(values.into_owned()))
}

fn missing(name: &str) -> Error {
    let problem = "the checkpoint of outer parameters lacks it; take another folder".to_owned();
    Error::Variable { name: name.to_owned(), problem }
}
