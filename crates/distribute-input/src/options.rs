//! How datasets are distributed.

/// How the data are divided between workers.
///
/// # Source
/// `tf.data.experimental.AutoShardPolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AutoShardPolicy {
    /// [`File`](AutoShardPolicy::File) where the dataset reads a list of files. Else every worker walks the whole data and keeps
    /// its replicas' rows of each global batch; for tensors in memory it walks row numbers only.
    #[default]
    Auto,
    /// Each worker reads files of its own; those that cannot be dealt evenly are divided by records.
    File,
    /// Every worker walks the whole data. Each global batch is cut into pieces of equal length, the last ones shorter or empty.
    Data,
    /// Each worker reads what [`shard_hint`](crate::Dataset::shard_hint) leaves it.
    Hint,
    /// Every worker reads everything, so each example is seen once by each worker.
    Off,
}

/// What happens when some replicas have no data left and others do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnequalData {
    /// They go on without examples, which weighs nothing, until all data have been seen.
    #[default]
    Pad,
    /// Steps in which not every replica has all its rows are left out.
    Drop,
    /// The pass ends with the first worker that has no data left.
    Stop,
}

/// For whom an input function is called.
///
/// # Source
/// `tf.distribute.InputReplicationMode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InputReplicationMode {
    /// Once for each worker; its replicas take elements in turn.
    #[default]
    PerWorker,
    /// Once for each replica.
    PerReplica,
}

/// How a distributed dataset is read.
///
/// # Source
/// `tf.distribute.InputOptions`, and the distribution options of `tf.data`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputOptions {
    /// How the data are divided between workers.
    pub auto_shard_policy: AutoShardPolicy,
    /// Whether the rows of each step are the same for every number of workers: every worker then walks the whole data, also
    /// where it could read files of its own.
    pub deterministic: bool,
    /// What happens when some replicas have no data left.
    pub unequal_data: UnequalData,
    /// For whom an input function is called.
    pub replication_mode: InputReplicationMode,
    /// Elements read ahead for each replica, on a thread of each pass; 0 reads when asked, [`AUTOTUNE`](crate::AUTOTUNE)
    /// finds a depth. A deeper prefetch at the end of the dataset counts instead. Default: 1.
    pub per_replica_buffer_size: usize,
}

impl Default for InputOptions {
    fn default() -> Self {
        InputOptions {
            auto_shard_policy: AutoShardPolicy::Auto,
            deterministic: false,
            unequal_data: UnequalData::Pad,
            replication_mode: InputReplicationMode::PerWorker,
            per_replica_buffer_size: 1,
        }
    }
}
