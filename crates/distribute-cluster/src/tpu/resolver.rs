//! The cluster of a TPU's hosts.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use distribute_types::{ErrorClass, FailureKind};
use serde::Deserialize;

use super::accelerator::AcceleratorType;
use super::node::{Lookup, Node, READY, SUBJECT};
use super::slice::{self, Slice};
use super::source::{Source, own_address};
use super::{TpuOptions, pci};
use crate::error::seconds;
use crate::http::{self, Ask, Client, Proxies, Remedies, Settings};
use crate::metadata::Metadata;
use crate::place::{OwnTask, Place};
use crate::{ClusterResolver, ClusterSpec, Error, JobId, Membership, Result, Task, TaskType, environment};

#[cfg(test)]
mod tests;

/// The hosts of a TPU, as a cluster.
///
/// The TPU is this machine's (`local`), a list of endpoints, one that has a name in Cloud TPU, or the one that the
/// environment names; see [`TpuTarget`](super::TpuTarget). A TPU with a name is looked up whenever the cluster is asked
/// for, and must be READY. Endpoints are worker servers of this library on the TPU's hosts.
///
/// # Examples
/// ```
/// use distribute_cluster::tpu::{TpuOptions, TpuResolver};
/// use distribute_cluster::{ClusterResolver, Membership};
/// // The pods of a TPU slice on GKE.
/// let variable = |name: &str| match name {
///     "TPU_WORKER_HOSTNAMES" => Some("tpu-0.svc,tpu-1.svc".to_owned()),
///     "TPU_WORKER_ID" => Some("1".to_owned()),
///     "TPU_ACCELERATOR_TYPE" => Some("v5litepod-8".to_owned()),
///     _ => None,
/// };
/// let tpu = TpuResolver::from_vars(variable, TpuOptions::default())?;
/// let membership = Membership::from_resolver(&tpu)?.expect("there are two hosts");
/// assert_eq!((membership.rank, membership.leader_address.as_str()), (1, "tpu-0.svc:8470"));
/// assert_eq!(tpu.num_accelerators()["TPU"], 4);
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.cluster_resolver.TPUClusterResolver`, whose endpoints are TensorFlow's workers; the method
/// `projects.locations.nodes.get` of the Cloud TPU API; the environment of TPU VMs.
#[derive(Debug)]
pub struct TpuResolver {
    source: Source,
    job: TaskType,
    settings: Settings,
    place: Place,
    /// The address of the coordinator.
    coordinator: Option<String>,
    /// The type that the environment names, for endpoints.
    accelerator: Option<String>,
    /// The number of chips in TPU_VISIBLE_CHIPS.
    visible_chips: Option<u32>,
    pci: PathBuf,
    version_port: u16,
}

impl TpuResolver {
    /// Creates a resolver from the environment, with its proxies, its metadata server and DISTRIBUTE_JOB_ID.
    ///
    /// # Errors
    /// [`Error::Config`] if an option or a variable is malformed, or if no TPU is named. [`Error::Service`] if the
    /// metadata server is needed and does not answer, or with [`OwnTask::ByAddress`] the service; in that case also
    /// [`Error::NotReady`] if the TPU is not ready.
    pub fn from_env(options: TpuOptions) -> Result<TpuResolver> {
        environment::read(|variable| TpuResolver::from_vars(variable, options))
    }

    /// Creates a resolver like [`from_env`](TpuResolver::from_env), with a function that looks up variables.
    ///
    /// # Errors
    /// The errors of [`from_env`](TpuResolver::from_env), in the same cases.
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>, options: TpuOptions) -> Result<TpuResolver> {
        let variable: &dyn Fn(&str) -> Option<String> = &variable;
        let set = environment::set(variable);
        let metadata = Metadata::from_vars(variable)?;
        let settings = Settings {
            service: SUBJECT,
            options: options.requests.clone(),
            proxies: Proxies::from_vars(variable)?,
            is_metadata_given: metadata.is_given,
        };
        if options.port == Some(0) {
            return Err(Error::config(SUBJECT, "the port is 0", "0", "1 to 65535", "Choose the worker servers' port."));
        }
        let source = Source::read(variable, &options, &settings, &metadata)?;
        let (own_address, coordinator) = own_address(&options, &settings, &metadata)?;
        if matches!(source, Source::Local) && (coordinator.is_some() || own_address.is_some()) {
            let remedy = "Leave them out, or name a TPU with hosts.";
            let problem = "a local TPU has no other tasks";
            let given = "a coordinator, or a task by its address";
            return Err(Error::config(SUBJECT, problem, given, "neither of them", remedy));
        }
        let index = match (options.own_task, &source) {
            (Some(OwnTask::Index(index)), _) => index,
            (None, Source::Slice(slice)) => slice.process,
            _ => 0,
        };
        let task = Task::new(options.task_type.unwrap_or(options.job), index);
        let mut resolver = TpuResolver {
            source,
            job: options.job,
            settings,
            place: Place::new(SUBJECT, options.job, task, JobId::from_vars(variable)?),
            coordinator,
            accelerator: set(slice::TYPE),
            visible_chips: set("TPU_VISIBLE_CHIPS").map(|chips| chips.split(',').count() as u32),
            pci: PathBuf::from(pci::DEVICES),
            version_port: VERSION_PORT,
        };
        if !matches!(resolver.source, Source::Node(..)) {
            resolver.with_coordinator(resolver.source.addresses())?;
        }
        if options.own_task == Some(OwnTask::ByAddress)
            && let Some(own) = own_address
        {
            let spec = resolver.describe()?;
            let place = Place::new(SUBJECT, options.job, task, JobId::from_vars(variable)?);
            resolver.place = place.by_address(own, spec)?;
        }
        Ok(resolver)
    }

    /// Returns whether the TPU is this machine's: a program of one process.
    pub fn is_local(&self) -> bool {
        matches!(self.source, Source::Local)
    }

    /// Returns this process's membership in the job of the TPU's hosts; `None` for a local TPU.
    ///
    /// With several slices, of which this machine knows the hosts of its own alone, the members meet at
    /// MEGASCALE_COORDINATOR_ADDRESS.
    ///
    /// # Errors
    /// [`Error::Config`] if there are several slices and MEGASCALE_COORDINATOR_ADDRESS is not set, or if not all tasks
    /// are workers then; and the errors of [`Membership::from_resolver`].
    pub fn membership(&self) -> Result<Option<Membership>> {
        match &self.source {
            Source::Slice(slice) if !slice.is_whole() && self.has_workers_alone() => {
                let Some(leader) = &slice.leader else { return Err(other_slices(slice)) };
                let world_size = slice.per_slice * slice.slices;
                let mut membership = Membership::new(self.place.task().index, world_size, leader.clone())?;
                let first = slice.process - slice.process % slice.per_slice;
                for (rank, address) in (first..).zip(&slice.addresses) {
                    membership.addresses[rank as usize] = Some(address.clone());
                }
                membership.source = "the environment of the TPU's slices";
                Ok(Some(match self.place.given_id() {
                    Some(id) => membership.with_job_id(id),
                    None => membership,
                }))
            }
            _ => Membership::from_resolver(self),
        }
    }

    /// Returns the number of TensorCores of each task; `None` if the type of the TPU is unknown.
    ///
    /// # Errors
    /// [`Error::Config`] if tasks would have different numbers, if the type is not one of a TPU, or if a local TPU is
    /// not on this machine. [`Error::Service`] and [`Error::NotReady`] as for
    /// [`cluster_spec`](ClusterResolver::cluster_spec).
    pub fn cores_per_task(&self) -> Result<Option<u32>> {
        match &self.source {
            Source::Local => self.local_cores().map(Some),
            Source::Slice(slice) => slice.cores_per_process(),
            Source::Endpoints(addresses) => match &self.accelerator {
                None => Ok(None),
                Some(name) => name.parse::<AcceleratorType>()?.cores_per_task(addresses.len() as u32).map(Some),
            },
            Source::Node(lookup, port) => {
                let node = self.node(lookup)?;
                let tasks = lookup.addresses(&node, *port)?.len() as u32;
                node.accelerator()?.map(|accelerator| accelerator.cores_per_task(tasks)).transpose()
            }
        }
    }

    /// Waits until a TPU with a name is healthy. Returns at once for others. TensorFlow's values are 20 min and 30 s.
    ///
    /// # Errors
    /// [`Error::NotReady`] if it is not healthy after `timeout`, or if it was preempted or terminated, and
    /// [`Error::Service`] if it cannot be looked up and a repetition would not help.
    pub fn wait_for_healthy(&self, timeout: Duration, interval: Duration) -> Result<()> {
        let Source::Node(lookup, _) = &self.source else { return Ok(()) };
        let deadline = http::deadline(timeout);
        loop {
            let problem = match self.node(lookup) {
                Ok(node) if node.health == HEALTHY && ["", READY].contains(&node.state.as_str()) => return Ok(()),
                Ok(node) if node.is_gone() => return Err(lookup.not_ready(&node)),
                Ok(node) => {
                    format!("state {:?}, health {:?} {}", node.state, node.health, node.health_description)
                }
                Err(error) if error.class().kind == FailureKind::Retryable => error.to_string(),
                Err(error) => return Err(error),
            };
            let problem = crate::text::clean(problem.trim_end(), MAX_HEALTH);
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining <= interval {
                return Err(Error::NotReady {
                    resource: format!("the TPU {:?}", lookup.name),
                    problem: format!("is not healthy after {} s: {problem}", seconds(&timeout)),
                    remedy: "Wait longer, or create it again".to_owned(),
                    kind: FailureKind::Retryable,
                });
            }
            tracing::info!("waiting for the TPU {:?}: {problem}", lookup.name);
            std::thread::sleep(interval);
        }
    }

    /// Returns whether a program that lost the TPU may use it again: it is neither preempted nor terminated, and has
    /// not run out of memory within 90 s. Returns true for a TPU without a name.
    ///
    /// # Errors
    /// [`Error::Service`] if it cannot be looked up.
    pub fn recoverable(&self) -> Result<bool> {
        match &self.source {
            Source::Node(lookup, _) => Ok(self.node(lookup)?.is_recoverable(SystemTime::now())),
            _ => Ok(true),
        }
    }

    /// Returns the version of the software of a TPU with a name; for endpoints, the version of TensorFlow's worker at
    /// the first one. Returns `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Service`] if the TPU cannot be looked up, or if the endpoint's answer is malformed.
    pub fn runtime_version(&self) -> Result<Option<String>> {
        match &self.source {
            Source::Node(lookup, _) => Ok(self.node(lookup)?.version().map(str::to_owned)),
            Source::Endpoints(addresses) => self.worker_version(addresses.first().map_or("", String::as_str)),
            Source::Local | Source::Slice(_) => Ok(None),
        }
    }

    /// Checks that endpoints are not TensorFlow's workers, which answer requests for their version.
    ///
    /// # Errors
    /// [`Error::Config`] if they are, and [`Error::Service`] as for [`runtime_version`](TpuResolver::runtime_version).
    pub fn check_workers(&self) -> Result<()> {
        let Source::Endpoints(addresses) = &self.source else { return Ok(()) };
        let Some(version) = self.runtime_version()? else { return Ok(()) };
        let problem = "the endpoint is a worker of TensorFlow, which runs its graphs alone";
        let given = format!("{}, with TensorFlow {version}", addresses.first().map_or("", String::as_str));
        let expected = "the worker servers of this program on the hosts of a TPU VM";
        let remedy = "Create a TPU VM, start the program on each of its hosts, and name their addresses.";
        Err(Error::config(SUBJECT, problem, given, expected, remedy))
    }

    /// Returns whether all tasks are workers on the TPU's hosts.
    fn has_workers_alone(&self) -> bool {
        let kinds = [self.job, self.place.task().kind];
        self.coordinator.is_none() && kinds == [TaskType::Worker; 2]
    }

    fn node(&self, lookup: &Arc<Lookup>) -> Result<Node> {
        let lookup = Arc::clone(lookup);
        http::converse(&self.settings, move |client| async move { lookup.node(&client).await })
    }

    fn describe(&self) -> Result<ClusterSpec> {
        match &self.source {
            Source::Local => Ok(ClusterSpec::new()),
            Source::Slice(slice) if !slice.is_whole() => Err(other_slices(slice)),
            Source::Node(lookup, port) => self.with_coordinator(&lookup.addresses(&self.node(lookup)?, *port)?),
            Source::Endpoints(_) | Source::Slice(_) => self.with_coordinator(self.source.addresses()),
        }
    }

    fn with_coordinator(&self, addresses: &[String]) -> Result<ClusterSpec> {
        let spec = ClusterSpec::new().with_job(self.job, addresses.iter().cloned());
        let spec = spec.and_then(|spec| match &self.coordinator {
            Some(address) => spec.with_job(TaskType::Chief, [address.clone()]),
            None => Ok(spec),
        });
        spec.map_err(|error| error.about(SUBJECT))
    }

    /// Returns the number of TensorCores of this machine that the program sees.
    fn local_cores(&self) -> Result<u32> {
        let Some((chips, cores_per_chip)) = pci::chips(&self.pci) else {
            let given = format!("no TPU in {}", self.pci.display());
            let remedy = "Run on a TPU VM, or name the TPU.";
            return Err(Error::config(SUBJECT, "there is no TPU on this machine", given, "a TPU's chips", remedy));
        };
        Ok(self.visible_chips.unwrap_or(chips).min(chips) * cores_per_chip)
    }

    /// Asks the version service that TensorFlow's workers have; a host without it refuses the connection.
    fn worker_version(&self, address: &str) -> Result<Option<String>> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Answer {
            current_version: Option<String>,
        }
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let url = format!("http://{host}:{}/requestversion", self.version_port);
        let wrong = |_| Error::config(SUBJECT, "the endpoint is not a host", address, "host:port", "Correct it.");
        let remedy = || "Check the endpoint".to_owned();
        let ask = Ask {
            what: format!("the version of the worker at {host}"),
            url: reqwest::Url::parse(&url).map_err(wrong)?,
            body: None,
            token: None,
            is_metadata: false,
            limit_bytes: MAX_VERSION_BYTES,
            remedies: Remedies { unauthorized: remedy(), forbidden: remedy(), not_found: remedy() },
        };
        // Endpoints are in the network of this machine, and most have no such service.
        let proxies = Proxies::default();
        let settings =
            Settings { options: self.settings.options.clone().attempts(1), proxies, ..self.settings.clone() };
        http::converse(&settings, move |client: Arc<Client>| async move {
            match client.json::<Answer>(&ask).await {
                Ok(answer) => Ok(answer.current_version),
                Err(refusal) if refusal.is_absent() => Ok(None),
                Err(refusal) => Err(client.error(&ask, refusal)),
            }
        })
    }
}

impl ClusterResolver for TpuResolver {
    /// Returns the hosts of the TPU, and the coordinator as a job of its own; empty for a local TPU.
    ///
    /// # Errors
    /// [`Error::Service`] if a TPU with a name cannot be looked up, [`Error::NotReady`] if it is not ready, and
    /// [`Error::Config`] if its endpoints are those of TensorFlow's workers, if there are several slices of which this
    /// machine knows only its own, or if this machine's index was found by its address and has changed.
    fn cluster_spec(&self) -> Result<ClusterSpec> {
        self.place.seen(self.describe()?)
    }

    fn task_type(&self) -> Option<TaskType> {
        Some(self.place.task().kind)
    }

    fn task_id(&self) -> Option<u32> {
        Some(self.place.task().index)
    }

    /// Returns DISTRIBUTE_JOB_ID, else an identity derived from the last description of the cluster.
    fn job_id(&self) -> Result<JobId> {
        self.place.job_id(|| self.cluster_spec())
    }

    fn rpc_layer(&self) -> Option<&str> {
        Some("grpc")
    }

    /// Returns the number of TensorCores of each task as `TPU`. Empty, with a warning, if it cannot be found;
    /// [`cores_per_task`](TpuResolver::cores_per_task) returns the error.
    fn num_accelerators(&self) -> BTreeMap<String, usize> {
        let cores = self.cores_per_task().unwrap_or_else(|error| {
            tracing::warn!("the number of the TPU's cores is unknown: {error}");
            None
        });
        cores.map(|cores| ("TPU".to_owned(), cores as usize)).into_iter().collect()
    }

    /// Returns the address of the named task, else of this process's; empty for a local TPU.
    fn master(&self, task_type: Option<TaskType>, task_id: Option<u32>, rpc_layer: Option<&str>) -> Result<String> {
        if self.is_local() {
            return Ok(String::new());
        }
        self.place.address(&self.cluster_spec()?, task_type, task_id, rpc_layer.or(self.rpc_layer()))
    }
}

fn other_slices(slice: &Slice) -> Error {
    let problem = format!("the hosts of {} slices are needed, and those of one are known", slice.slices);
    let given = slice.addresses.join(", ");
    let expected = format!("{} addresses, or MEGASCALE_COORDINATOR_ADDRESS", slice.per_slice * slice.slices);
    let remedy = "Take `TpuResolver::membership`, whose members meet at that address, or name all hosts in \
        TPU_WORKER_HOSTNAMES.";
    Error::config(SUBJECT, problem, given, expected, remedy)
}

const HEALTHY: &str = "HEALTHY";
/// The port at which TensorFlow's workers say their version.
const VERSION_PORT: u16 = 8475;
/// Size limit of a version's answer.
const MAX_VERSION_BYTES: usize = 64 << 10;
/// Length limit of a TPU's health in a message, in characters.
const MAX_HEALTH: usize = 400;
