//! What variables there are, and where their shards are.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use distribute_device::DType;

use crate::numbers;
use crate::wire::proto::{CreateShard, Description};

/// A variable, as the servers describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VariableInfo {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// The length of each dimension.
    pub shape: Vec<usize>,
    /// Whether it is trained.
    pub trainable: bool,
    /// Its shards, in the order of their rows.
    pub shards: Vec<ShardInfo>,
}

/// Some rows of a variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardInfo {
    /// The index of the parameter server that holds them.
    pub server: usize,
    /// The rows; those of a scalar are 0..1.
    pub rows: Range<usize>,
    pub(crate) number: u32,
}

/// All variables and optimizers of a session.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) variables: BTreeMap<String, Arc<VariableInfo>>,
    /// By number: on which servers it updates something.
    pub(crate) optimizers: BTreeMap<u32, Vec<usize>>,
    /// By variable: which optimizer updates it.
    pub(crate) updated_by: BTreeMap<String, u32>,
}

impl VariableInfo {
    /// Elements of one row; of a scalar, 1.
    pub fn row_len(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// Rows; of a scalar, 1.
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// The shard that a row is in.
    pub(super) fn shard_of(&self, row: usize) -> Option<&ShardInfo> {
        self.shards.iter().find(|shard| shard.rows.contains(&row))
    }
}

impl Table {
    /// From what each server says.
    pub(super) fn of(servers: &[Description]) -> Table {
        let mut table = Table::default();
        let mut shards: BTreeMap<&str, (&CreateShard, Vec<ShardInfo>)> = BTreeMap::new();
        for (server, description) in servers.iter().enumerate() {
            for about in &description.shards {
                let rows = about.first_row as usize..(about.first_row + about.rows) as usize;
                let shard = ShardInfo { server, rows, number: about.shard };
                shards.entry(&about.variable).or_insert_with(|| (about, Vec::new())).1.push(shard);
            }
            for optimizer in &description.optimizers {
                table.optimizers.entry(optimizer.optimizer).or_default().push(server);
                for shard in description.shards.iter().filter(|shard| optimizer.shards.contains(&shard.shard)) {
                    table.updated_by.insert(shard.variable.clone(), optimizer.optimizer);
                }
            }
        }
        for (name, (about, mut shards)) in shards {
            let Some(dtype) = numbers::dtype(about.dtype) else { continue };
            // One that is still being made has fewer.
            if shards.len() != about.shards as usize {
                continue;
            }
            shards.sort_by_key(|shard| shard.rows.start);
            let shape = about.shape.iter().map(|extent| *extent as usize).collect();
            let (name, trainable) = (name.to_owned(), about.trainable);
            table.variables.insert(name.clone(), Arc::new(VariableInfo { name, dtype, shape, trainable, shards }));
        }
        table
    }
}
