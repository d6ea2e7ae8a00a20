//! Variables on servers in checkpoints. They are stored whole, under their names, so that they can be restored on any
//! number of servers and under any other strategy.

use std::collections::BTreeMap;
use std::path::Path;

use bytes::Bytes;
use distribute_optim::OptimizerDescription;
use distribute_strategy::Strategy;
use distribute_train::BoxError;
use distribute_train::checkpoint::{CheckpointManager, Checkpointed, Snapshot};
use serde::{Deserialize, Serialize};

use super::{Inner, ParameterServerStrategy};
use crate::parameters::VariableInfo;
use crate::wire::proto::CreateShard;
use crate::{Error, Result};

/// The files of a checkpoint.
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";

/// The state of optimizers besides their slots.
#[derive(Debug, Default, Serialize, Deserialize)]
struct OptimizerStates {
    /// By number: the steps made, and the learning rate. Empty in a checkpoint of another strategy.
    #[serde(default)]
    parameter_server: BTreeMap<u32, (u64, f64)>,
    /// The state of an optimizer that is the only one, in the form that other strategies save and restore.
    #[serde(flatten)]
    alone: Option<Alone>,
}

/// The state of an optimizer under other strategies.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Alone {
    steps: u64,
    learning_rate: f64,
    #[serde(default)]
    loss_scale: Option<f64>,
    #[serde(default)]
    good_steps: u32,
}

impl OptimizerStates {
    /// Adds the form of other strategies, if there is one optimizer.
    fn shared(self) -> OptimizerStates {
        let mut states = self.parameter_server.values();
        let alone = match (states.next(), states.next()) {
            (Some(&(steps, learning_rate)), None) => {
                Some(Alone { steps, learning_rate, loss_scale: None, good_steps: 0 })
            }
            _ => None,
        };
        OptimizerStates { alone, ..self }
    }

    /// Returns the steps made and the learning rate, by number.
    fn by_number(self) -> BTreeMap<u32, (u64, f64)> {
        match self.alone {
            Some(alone) if self.parameter_server.is_empty() => {
                BTreeMap::from([(0, (alone.steps, alone.learning_rate))])
            }
            _ => self.parameter_server,
        }
    }
}

/// Saves all variables and slots. Workers may continue meanwhile: each shard is consistent in itself, but the shards of
/// a checkpoint may be some steps apart, as they are in training. Call it after `join` for the values of one moment.
impl Checkpointed for ParameterServerStrategy {
    fn save(&self, _: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        let inner = &self.inner;
        inner.note_run(snapshot);
        for variable in inner.parameters.table().variables.values() {
            let bytes = inner.fetch(variable, "")?;
            snapshot.put_bytes(MODEL, &variable.name, variable.dtype, &variable.shape, bytes);
        }
        let optimizers = inner.made.lock().optimizers.clone();
        let mut states = OptimizerStates::default();
        let steps = inner.parameters.block_on(inner.steps())?;
        for (number, (description, names)) in (0..).zip(optimizers) {
            states
                .parameter_server
                .insert(number, (steps.get(&number).copied().unwrap_or(0), description.learning_rate));
            for name in names {
                let Some(variable) = inner.parameters.table().variables.get(&name).cloned() else { continue };
                for slot in description.rule.slots() {
                    let bytes = inner.fetch(&variable, slot)?;
                    let name = format!("{name}/{slot}");
                    snapshot.put_bytes(OPTIMIZER, &name, variable.dtype, &variable.shape, bytes);
                }
            }
        }
        snapshot.put_state(OPTIMIZER, &states.shared())?;
        Ok(())
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        let inner = &self.inner;
        for server in 0..inner.parameters.servers() {
            let restored = inner.parameters.block_on(inner.restore(server, snapshot));
            // For example, the checkpoint is of another model.
            restored.map_err(|error| inner.failed(error))?;
        }
        inner.note_run(snapshot);
        Ok(())
    }
}

impl Inner {
    /// A snapshot without a run is not in a file from which a server could be restored.
    fn note_run(&self, snapshot: &Snapshot) {
        if let Some(run) = snapshot.run() {
            self.made.lock().run = Some(run);
        }
    }

    fn fetch(&self, variable: &VariableInfo, slot: &str) -> Result<Vec<u8>> {
        self.parameters.block_on(self.parameters.whole(variable, slot))
    }

    /// Returns how many steps each optimizer has made: the maximum over the servers.
    async fn steps(&self) -> Result<BTreeMap<u32, u64>> {
        let mut steps: BTreeMap<u32, u64> = BTreeMap::new();
        for optimizer in self.parameters.describe().await?.into_iter().flat_map(|server| server.optimizers) {
            let known = steps.entry(optimizer.optimizer).or_default();
            *known = (*known).max(optimizer.steps);
        }
        Ok(steps)
    }

    /// Restores a restarted server's part from the newest checkpoint in a folder; returns its step.
    pub(crate) async fn restore_from(&self, server: usize, folder: &Path) -> Result<u64> {
        let lost = |why: String| Error::ServerLost {
            server: server as u32,
            address: self.parameters.address(server).to_owned(),
            why: format!("it was started again and holds nothing, and {why}"),
        };
        // Damaged checkpoints are skipped with a warning.
        let newest = CheckpointManager::new(folder).read_newest()?;
        let snapshot = newest.ok_or_else(|| lost(format!("there is no checkpoint in {}", folder.display())))?;
        // Parameters of different runs must not be mixed.
        if snapshot.run() != self.made.lock().run {
            let of = snapshot.run().map_or_else(|| "another run".to_owned(), |run| format!("run {run}"));
            let (step, folder) = (snapshot.step(), folder.display());
            return Err(lost(format!(
                "the newest checkpoint in {folder}, of step {step}, is one of {of}, which this training has neither \
                saved nor \
                 restored"
            )));
        }
        self.restore(server, &snapshot).await?;
        Ok(snapshot.step())
    }

    /// Creates a server's shards and optimizers from a checkpoint.
    async fn restore(&self, server: usize, snapshot: &Snapshot) -> Result<()> {
        let (mine, optimizers) = {
            let made = self.made.lock();
            let mine: Vec<CreateShard> =
                made.shards.iter().filter(|(of, _)| *of == server).map(|(_, shard)| shard.clone()).collect();
            (mine, made.optimizers.clone())
        };
        let mut shards = Vec::new();
        for shard in &mine {
            shards.push(CreateShard { payload: part(snapshot, MODEL, &shard.variable, shard)?, ..shard.clone() });
        }
        self.create(server, shards).await?;
        let states = snapshot.get_state::<OptimizerStates>(OPTIMIZER)?.unwrap_or_default().by_number();
        let steps = states.iter().map(|(number, (steps, _))| (*number, *steps)).collect();
        for (number, (description, names)) in (0..).zip(&optimizers) {
            let requests = {
                let mut made = self.made.lock();
                if let (Some((_, rate)), Some((known, _))) =
                    (states.get(&number), made.optimizers.get_mut(number as usize))
                {
                    *known = OptimizerDescription { learning_rate: *rate, ..*known };
                }
                self.optimizer_requests(&made, number, &steps)
            };
            self.set_optimizers(requests.into_iter().filter(|(of, _)| *of == server).collect()).await?;
            let mut slots = Vec::new();
            for shard in mine.iter().filter(|shard| names.contains(&shard.variable)) {
                for slot in description.rule.slots() {
                    let payload = part(snapshot, OPTIMIZER, &format!("{}/{slot}", shard.variable), shard)?;
                    slots.push(CreateShard { slot: (*slot).to_owned(), payload, ..shard.clone() });
                }
            }
            self.create(server, slots).await?;
        }
        Ok(())
    }
}

/// Returns a shard's rows of a whole tensor.
fn part(snapshot: &Snapshot, file: &str, name: &str, shard: &CreateShard) -> Result<Bytes> {
    let wrong = |problem| distribute_train::Error::Restore { name: name.to_owned(), problem };
    let found = snapshot.tensor(file, name);
    let (dtype, shape, bytes) = found.ok_or_else(|| wrong(format!("the checkpoint's {file} has none of this name")))?;
    let expected: Vec<usize> = shard.shape.iter().map(|extent| *extent as usize).collect();
    if u32::from(dtype.code()) != shard.dtype || shape != expected {
        let problem = format!("the checkpoint has {dtype} {shape:?}, and the program {expected:?}");
        return Err(wrong(problem).into());
    }
    let row_bytes = expected.iter().skip(1).product::<usize>() * dtype.size_bytes();
    let start = shard.first_row as usize * row_bytes;
    Ok(Bytes::copy_from_slice(&bytes[start..start + shard.rows as usize * row_bytes]))
}
