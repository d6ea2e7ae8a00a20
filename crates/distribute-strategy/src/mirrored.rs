//! Several replicas in one process.

use distribute_collectives::SharedCrossDeviceOps;
use distribute_device::{DeviceSpec, Devices};

use crate::alone::refuse_lonely;
use crate::devices::{DeviceChoice, OwnDevices};
use crate::mesh::Mesh;
use crate::workers::tensor_ranks;
use crate::{CommunicationOptions, Error, Replicas, Result, Strategy, StrategyExtended, intra_op};

/// Synchronous training on several devices of one process, each with its own copy of every variable.
///
/// # Examples
/// ```
/// use distribute_strategy::MirroredStrategy;
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// assert_eq!(strategy.num_replicas_in_sync(), 2);
/// # Ok::<(), distribute_strategy::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.MirroredStrategy`.
pub struct MirroredStrategy {
    replicas: Replicas,
}

impl MirroredStrategy {
    /// Returns a builder to choose devices and options.
    pub fn builder() -> MirroredBuilder {
        MirroredBuilder::default()
    }
}

/// Builds a [`MirroredStrategy`].
#[derive(Clone, Debug, Default)]
pub struct MirroredBuilder {
    devices: DeviceChoice,
    table: Option<Devices>,
    communication: CommunicationOptions,
    cross_device_ops: Option<SharedCrossDeviceOps>,
    tensor_parallel: Option<usize>,
}

impl MirroredBuilder {
    /// Sets the devices of the replicas, such as `["CPU:0", "CPU:1"]`. Any number of logical CPUs may be named.
    /// Default: all GPUs that this process sees, if a library that computes on GPUs is part of the build (feature
    /// `cuda`, which `candle-cuda` of `distribute` includes), else `CPU:0`.
    pub fn devices<D: Into<String>>(mut self, devices: impl IntoIterator<Item = D>) -> Self {
        self.devices = DeviceChoice::named(devices);
        self
    }

    /// Runs replicas on the first `count` GPUs, instead of on named devices.
    ///
    /// # Source
    /// The argument `num_gpus` of `tf.contrib.distribute.MirroredStrategy`.
    pub fn num_gpus(mut self, count: usize) -> Self {
        self.devices = DeviceChoice::Gpus(count);
        self
    }

    /// Runs this number of replicas, on the first GPUs that would be used by default, or on logical CPUs if there is no
    /// GPU to use.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::MirroredStrategy;
    /// let strategy = MirroredStrategy::builder().num_replicas(2).build()?;
    /// assert_eq!(strategy.num_replicas_in_sync(), 2);
    /// # Ok::<(), distribute_strategy::Error>(())
    /// ```
    pub fn num_replicas(mut self, count: usize) -> Self {
        self.devices = DeviceChoice::Replicas(count);
        self
    }

    /// Replaces this machine's table of GPUs, for a GPU that is split into logical ones.
    ///
    /// # Examples
    /// ```
    /// use distribute_device::{DeviceKind, Devices};
    /// use distribute_strategy::MirroredStrategy;
    ///
    /// let builder = MirroredStrategy::builder().devices(["GPU:0", "GPU:1"]);
    /// match Devices::local().split(DeviceKind::Gpu, 0, &[None, None]) {
    ///     Ok(halves) => drop(builder.logical_devices(halves).build()?),
    ///     Err(no_gpu) => println!("{no_gpu}"),
    /// }
    /// # Ok::<(), distribute_strategy::Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.config.set_logical_device_configuration`.
    pub fn logical_devices(mut self, devices: Devices) -> Self {
        self.table = Some(devices);
        self
    }

    /// Sets how replicas communicate. Default: the environment's settings.
    pub fn communication(mut self, options: CommunicationOptions) -> Self {
        self.communication = options;
        self
    }

    /// Sets how the replicas' devices reduce values, instead of the default, in which all devices reduce a part each at
    /// once.
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::HierarchicalCopyAllReduce;
    /// use distribute_strategy::MirroredStrategy;
    /// let devices = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"];
    /// let ops = HierarchicalCopyAllReduce::new(2);
    /// let strategy = MirroredStrategy::builder().devices(devices).cross_device_ops(ops).build()?;
    /// # Ok::<(), distribute_strategy::Error>(())
    /// ```
    ///
    /// # Source
    /// The argument `cross_device_ops` of `tf.distribute.MirroredStrategy`.
    pub fn cross_device_ops(mut self, ops: impl Into<SharedCrossDeviceOps>) -> Self {
        self.cross_device_ops = Some(ops.into());
        self
    }

    /// Makes each `ranks` neighbours in the list of devices one tensor group, which is one replica: the variables of
    /// tensor-parallel layers are split among its ranks, and its ranks get the same examples. Default: 1, by which each
    /// device is a replica.
    ///
    /// # Examples
    /// Two replicas of two ranks each:
    /// ```
    /// use distribute_strategy::MirroredStrategy;
    /// let devices = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"];
    /// let strategy = MirroredStrategy::builder().devices(devices).tensor_parallel(2).build()?;
    /// assert_eq!((strategy.num_replicas_in_sync(), strategy.num_local_replicas()), (2, 4));
    /// # Ok::<(), distribute_strategy::Error>(())
    /// ```
    ///
    /// # Source
    /// Shoeybi and others, "Megatron-LM: training multi-billion parameter language models using model parallelism",
    /// 2019, section 3, with the groups of its section 5.1.
    pub fn tensor_parallel(mut self, ranks: usize) -> Self {
        self.tensor_parallel = Some(ranks);
        self
    }

    /// Builds the strategy.
    ///
    /// Replicas share the cores of this machine: an operation of a replica runs on its thread, and on as many others as
    /// its share has, unless RAYON_NUM_THREADS says how many threads it may use. If it is not set, and this is the only
    /// thread of the process, it is set to the share for several replicas, for candle. On the same condition
    /// CANDLE_NUM_THREADS is set to 1: the threads that it counts would take cores from these, and several replicas
    /// would take turns with them. The thread that calls [`run`](Strategy::run_with) becomes that of the first replica,
    /// also for operations of rayon outside of runs.
    ///
    /// # Errors
    /// [`Error::Devices`](crate::Error::Devices) if the list is empty or names a device twice or one that replicas
    /// cannot use, if there are fewer GPUs than asked for, or if the devices cannot be divided into tensor groups, or
    /// combined by the cross-device operations. [`Error::Alone`](crate::Error::Alone) if this process is one of
    /// several, and has joined none of them. The errors of device strings, of environment variables that cannot be
    /// read, and of starting the replicas' group and threads.
    pub fn build(self) -> Result<Strategy> {
        let own = OwnDevices::of_one_process("MirroredStrategy", self.table.as_ref());
        let ranks = self.tensor_parallel.unwrap_or(1);
        let devices = self.devices.devices(&own, ranks)?;
        let mesh = Mesh::new("MirroredStrategy", devices.len(), ranks)?;
        refuse_lonely("MirroredStrategy")?;
        intra_op::share_cores(devices.len());
        let mut options = self.communication.options(&devices)?;
        if let Some(ops) = self.cross_device_ops {
            let wrong = |problem| Error::Devices { strategy: "MirroredStrategy", problem };
            ops.check(&devices).map_err(wrong)?;
            if let Some(caution) = ops.caution(&devices) {
                distribute_notice::warn!("{caution}");
            }
            options.device_implementation = ops.device_implementation().unwrap_or(options.device_implementation);
            options.cross_device_ops = Some(ops);
        }
        Ok(Strategy::new(MirroredStrategy {
            replicas: Replicas::local_in(mesh, devices, options)?.with_table(self.table),
        }))
    }
}

impl StrategyExtended for MirroredStrategy {
    fn name(&self) -> &'static str {
        "Mirrored"
    }

    fn replicas(&self) -> &Replicas {
        &self.replicas
    }

    fn describe(&self) -> String {
        let names: Vec<String> = self.replicas.devices.iter().map(DeviceSpec::short).collect();
        let (replicas, ranks) = (self.replicas.mesh.replicas(), tensor_ranks(&self.replicas));
        format!("Mirrored {replicas} replicas{ranks} ({})", names.join(", "))
    }
}
