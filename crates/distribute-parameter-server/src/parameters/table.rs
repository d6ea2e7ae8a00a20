//! The existing variables, and the places of their shards.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use distribute_device::DType;

use crate::wire::proto::{CreateShard, Description};
use crate::{Error, Result, numbers};

/// A variable, as the servers describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VariableInfo {
    /// The variable's name.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// The length of each dimension.
    pub shape: Vec<usize>,
    /// Whether optimizers may update it.
    pub trainable: bool,
    /// Its shards, in the order of their rows.
    pub shards: Vec<ShardInfo>,
}

/// The rows of a variable on one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardInfo {
    /// The index of the parameter server that holds them.
    pub server: usize,
    /// The rows; those of a scalar are 0..1.
    pub rows: Range<usize>,
    pub(crate) number: u32,
}

/// All variables and optimizers of a session.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    pub(crate) variables: BTreeMap<String, Arc<VariableInfo>>,
    /// By optimizer number: the servers on which it updates something.
    pub(crate) optimizers: BTreeMap<u32, Vec<usize>>,
    /// By optimizer number: how many closures push for one step of it, if each waits for others.
    pub(crate) contributions: BTreeMap<u32, u32>,
    /// By variable: the optimizer that updates it.
    pub(crate) updated_by: BTreeMap<String, u32>,
}

impl VariableInfo {
    /// Returns the number of elements of a row; 1 for a scalar.
    pub fn row_len(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// Returns the number of rows; 1 for a scalar.
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Checks that its size does not overflow and its shards cover each row exactly once.
    fn check(&self) -> Result<()> {
        let wrong = |problem: &str| Err(Error::Variable { name: self.name.clone(), problem: problem.to_owned() });
        let sizes = self.shape.iter().copied().chain([self.dtype.size_bytes()]);
        if sizes.clone().try_fold(1usize, usize::checked_mul).is_none_or(|size| isize::try_from(size).is_err())
            || sizes.skip(1).try_fold(1usize, usize::checked_mul).is_none()
        {
            return wrong("its servers describe it as larger than any memory");
        }
        let mut end = 0;
        let follows = |shard: &ShardInfo| std::mem::replace(&mut end, shard.rows.end) == shard.rows.start;
        if !self.shards.iter().all(follows) || end != self.rows() {
            return wrong("the shards that its servers describe are not each of its rows once");
        }
        Ok(())
    }

    /// Returns the shard that contains a row.
    pub(super) fn shard_of(&self, row: usize) -> Option<&ShardInfo> {
        self.shards.iter().find(|shard| shard.rows.contains(&row))
    }
}

impl Table {
    /// Builds the table from the servers' descriptions.
    ///
    /// # Errors
    /// [`Error::Variable`] if the described shards do not form a variable.
    pub(super) fn of(servers: &[Description]) -> Result<Table> {
        let mut table = Table::default();
        let mut shards: BTreeMap<&str, (&CreateShard, Vec<ShardInfo>)> = BTreeMap::new();
        for (server, description) in servers.iter().enumerate() {
            for about in &description.shards {
                let rows = about.first_row as usize..about.first_row.saturating_add(about.rows) as usize;
                let shard = ShardInfo { server, rows, number: about.shard };
                shards.entry(&about.variable).or_insert_with(|| (about, Vec::new())).1.push(shard);
            }
            for optimizer in &description.optimizers {
                table.optimizers.entry(optimizer.optimizer).or_default().push(server);
                if optimizer.contributions > 0 {
                    table.contributions.insert(optimizer.optimizer, optimizer.contributions);
                }
                for shard in description.shards.iter().filter(|shard| optimizer.shards.contains(&shard.shard)) {
                    table.updated_by.insert(shard.variable.clone(), optimizer.optimizer);
                }
            }
        }
        for (name, (about, mut shards)) in shards {
            let Some(dtype) = numbers::dtype(about.dtype) else { continue };
            // A variable that is still being created has fewer shards.
            if shards.len() != about.shards as usize {
                continue;
            }
            shards.sort_by_key(|shard| shard.rows.start);
            let shape: Vec<usize> = about.shape.iter().map(|extent| *extent as usize).collect();
            let (name, trainable) = (name.to_owned(), about.trainable);
            let variable = VariableInfo { name: name.clone(), dtype, shape, trainable, shards };
            variable.check()?;
            table.variables.insert(name, Arc::new(variable));
        }
        Ok(table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(first_row: u64, rows: u64, shape: &[u64]) -> CreateShard {
        CreateShard {
            variable: "w".to_owned(),
            shape: shape.to_vec(),
            first_row,
            rows,
            shards: 2,
            ..CreateShard::default()
        }
    }

    #[test]
    fn what_servers_describe_is_verified() {
        let of = |shards: Vec<CreateShard>| Table::of(&[Description { shards, ..Description::default() }]);
        let table = of(vec![shard(3, 1, &[4, 2]), shard(0, 3, &[4, 2])]).unwrap();
        assert_eq!(table.variables["w"].shards[1].rows, 3..4);
        for wrong in [
            vec![shard(0, 3, &[4, 2]), shard(2, 2, &[4, 2])],
            vec![shard(0, 3, &[4, 2]), shard(3, u64::MAX, &[4, 2])],
            vec![shard(0, 1, &[4, 2]), shard(1, 1, &[4, 2])],
            vec![shard(0, 3, &[4, 1 << 62, 8]), shard(3, 1, &[4, 1 << 62, 8])],
            vec![shard(0, 1 << 61, &[1 << 62]), shard(1 << 61, 1 << 61, &[1 << 62])],
        ] {
            let error = of(wrong).unwrap_err();
            assert!(matches!(error, Error::Variable { .. }), "{error}");
        }
    }
}
