//! Options of distributed datasets.

/// The policy by which the data are divided between workers.
///
/// # Source
/// `tf.data.experimental.AutoShardPolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AutoShardPolicy {
    /// [`File`](AutoShardPolicy::File) if the dataset reads a list of files or of splits. Otherwise every worker
    /// iterates over the whole dataset and keeps its replicas' rows of each global batch; for tensors in memory it
    /// iterates over row numbers only.
    #[default]
    Auto,
    /// Each worker reads files of its own; files that cannot be distributed evenly are divided by records. The same for
    /// [splits](crate::Dataset::from_splits), which are divided by elements.
    File,
    /// Every worker iterates over the whole dataset. Each global batch is cut into pieces of equal length, the last of
    /// which may be shorter or empty.
    Data,
    /// Each worker reads the share that [`shard_hint`](crate::Dataset::shard_hint) gives it.
    Hint,
    /// Every worker reads everything, so each example is seen once by each worker.
    Off,
}

/// The treatment of steps for which some replicas have no data left and others do.
///
/// Workers that read data of their own (files, splits, a [`shard_hint`](crate::Dataset::shard_hint), an input function)
/// end at different steps. Data that all workers walk together, and those of a single worker, end for all at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnequalData {
    /// Replicas without data continue with empty parts, which have weight zero, until all data have been seen.
    #[default]
    Pad,
    /// Steps in which some replica has fewer rows than a full batch gives it are dropped, for data of both kinds.
    Drop,
    /// The pass ends with the first worker that has no data left. Where data end for all workers at once this is all of
    /// them, and replicas without rows in the last step get empty parts, as with [`Pad`](UnequalData::Pad).
    Stop,
}

/// The number of calls of an input function.
///
/// # Source
/// `tf.distribute.InputReplicationMode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InputReplicationMode {
    /// Once for each worker, whose replicas take elements in turn.
    #[default]
    PerWorker,
    /// Once for each replica.
    PerReplica,
}

/// Options of a distributed dataset.
///
/// # Source
/// `tf.distribute.InputOptions`, and the distribution options of `tf.data`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InputOptions {
    /// The policy by which the data are divided between workers.
    pub auto_shard_policy: AutoShardPolicy,
    /// Whether the rows of each step are the same for every number of workers. If so, every worker iterates over the
    /// whole dataset even if it could read files of its own.
    pub deterministic: bool,
    /// The treatment of steps for which some replicas have no data left.
    pub unequal_data: UnequalData,
    /// The number of calls of an input function.
    pub replication_mode: InputReplicationMode,
    /// The number of steps that each pass reads ahead on a thread; 0 reads on demand, [`AUTOTUNE`](crate::AUTOTUNE)
    /// adapts the depth. A deeper prefetch at the end of the dataset takes precedence. Default: 1.
    pub per_replica_buffer_size: usize,
    /// Whether each replica's part is copied to the replica's GPU when it is read ahead, if its library has values on
    /// GPUs; see [`Element::fetch_to_device`](crate::Element::fetch_to_device). Parts of replicas on CPUs are in host
    /// memory anyway. Default: true.
    pub fetch_to_device: bool,
}

impl Default for InputOptions {
    fn default() -> Self {
        InputOptions {
            auto_shard_policy: AutoShardPolicy::Auto,
            deterministic: false,
            unequal_data: UnequalData::Pad,
            replication_mode: InputReplicationMode::PerWorker,
            per_replica_buffer_size: 1,
            fetch_to_device: true,
        }
    }
}

distribute_types::setters! {
    InputOptions {
        auto_shard_policy: AutoShardPolicy,
        deterministic: bool,
        unequal_data: UnequalData,
        replication_mode: InputReplicationMode,
        per_replica_buffer_size: usize,
        fetch_to_device: bool,
    }
}
