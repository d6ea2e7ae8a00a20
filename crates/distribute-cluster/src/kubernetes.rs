//! The cluster of pods of Kubernetes.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use distribute_types::FailureKind;
use kube::Client;
use tokio::runtime::Builder;
use tokio::sync::mpsc::channel;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use crate::error::seconds;
use crate::{ClusterResolver, ClusterSpec, Error, JobId, Result, Task, TaskType, environment};

use self::api::{Api, Change, Pods};
use self::cluster::Cluster;
use self::follow::{Follower, News};
#[cfg(feature = "coordination")]
pub use self::lease::LeaseRegister;
pub use self::options::{KubernetesAccess, KubernetesLocation, KubernetesOptions};
use self::pod::Pod;
use self::trouble::{Refusal, Trouble};

mod access;
mod api;
mod cluster;
mod follow;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(feature = "coordination")]
mod lease;
mod natural;
mod options;
mod own;
mod pod;
mod trouble;

/// The pods of a cluster of Kubernetes, found by their labels.
///
/// Each job has label selectors. Its tasks are the pods of the first selector, then those of the next, each in the
/// natural order of their names: `x-10` comes after `x-2`. A pod is a task if it is in the phase Running, has an IP
/// address, is not being deleted, and none of its containers waits, for example in CrashLoopBackOff. Pods that are not
/// yet tasks are waited for.
///
/// The API server is asked once, when the resolver is created: the cluster does not change afterwards. All processes
/// find the same cluster if [`expected`](KubernetesOptions::expected) has the number of pods of each job, or if all
/// pods run before. Processes that found different ones refuse each other when they join.
///
/// This process is the pod that [`pod`](KubernetesOptions::pod) or POD_NAME names, else the one with the address
/// POD_IP, else the one whose host name is HOSTNAME, which Kubernetes sets. If it is none of the cluster's pods,
/// [`task`](ClusterResolver::task) returns `None`.
///
/// # Examples
/// ```no_run
/// use distribute_cluster::{KubernetesOptions, KubernetesResolver, Membership, TaskType};
/// let options = KubernetesOptions::default()
///     .job(TaskType::Worker, ["job-name=train"])
///     .expected(vec![(TaskType::Worker, 4)]);
/// let resolver = KubernetesResolver::from_env(options)?;
/// let membership = Membership::from_resolver(&resolver)?.expect("the job has workers");
/// assert_eq!(membership.world_size(), 4);
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.cluster_resolver.KubernetesClusterResolver`, which looks into all namespaces, sorts names as text,
/// always uses the addresses of the nodes, and does not wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesResolver {
    spec: ClusterSpec,
    task: Option<Task>,
    job: Option<JobId>,
}

/// The variables that the resolver reads.
#[derive(Clone, Debug, Default)]
struct Variables {
    service_host: Option<String>,
    service_port: Option<String>,
    kubeconfig: Option<String>,
    home: Option<String>,
    pod_name: Option<String>,
    pod_ip: Option<String>,
    hostname: Option<String>,
}

impl Variables {
    fn read(variable: &dyn Fn(&str) -> Option<String>) -> Variables {
        let variable = environment::set(variable);
        Variables {
            service_host: variable("KUBERNETES_SERVICE_HOST"),
            service_port: variable("KUBERNETES_SERVICE_PORT"),
            kubeconfig: variable("KUBECONFIG"),
            home: variable("HOME").or_else(|| variable("USERPROFILE")),
            pod_name: variable("POD_NAME"),
            pod_ip: variable("POD_IP"),
            hostname: variable("HOSTNAME"),
        }
    }
}

impl KubernetesResolver {
    /// Asks the API server for the pods, and waits until all of them run. DISTRIBUTE_JOB_ID sets the job's identity.
    ///
    /// Blocks for at most [`wait`](KubernetesOptions::wait) and [`request_timeout`](KubernetesOptions::request_timeout)
    /// together. It may be called from any thread, including one that runs an event loop. If the process has no
    /// default provider of cryptography for rustls, ring becomes it.
    ///
    /// # Errors
    /// - [`Error::Config`] if an option, a variable or a file is invalid, or if pods run that cannot be a cluster.
    /// - [`Error::Kubernetes`] if the API server refuses a request, fails, or does not answer in time.
    /// - [`Error::Pods`] if pods are missing or not running after [`wait`](KubernetesOptions::wait).
    pub fn from_env(options: KubernetesOptions) -> Result<KubernetesResolver> {
        environment::read(|variable| KubernetesResolver::from_vars(variable, options))
    }

    /// Asks the API server like [`from_env`](KubernetesResolver::from_env), with a function that looks up variables.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Kubernetes`] and [`Error::Pods`] as for
    /// [`from_env`](KubernetesResolver::from_env).
    pub fn from_vars(
        variable: impl Fn(&str) -> Option<String>,
        options: KubernetesOptions,
    ) -> Result<KubernetesResolver> {
        let options = options.checked()?;
        let job = JobId::from_vars(&variable)?;
        let variables = Variables::read(&variable);
        let limit = options.wait + options.request_timeout;
        let (cluster, task) = on_a_thread(limit, async move || find(&options, &variables).await)?;
        Ok(KubernetesResolver { spec: cluster.spec, task, job })
    }
}

impl ClusterResolver for KubernetesResolver {
    fn cluster_spec(&self) -> Result<ClusterSpec> {
        Ok(self.spec.clone())
    }

    fn task_type(&self) -> Option<TaskType> {
        self.task.map(|task| task.kind)
    }

    fn task_id(&self) -> Option<u32> {
        self.task.map(|task| task.index)
    }

    fn job_id(&self) -> Result<JobId> {
        Ok(self.job.clone().unwrap_or_else(|| JobId::of_cluster(&self.spec)))
    }
}

/// Asks the API server on a thread with an event loop of its own, as the caller's may run one already. `ask` ends
/// within the limit by itself.
fn on_a_thread<T: Send + 'static, F: Future<Output = Result<T>>>(
    limit: Duration,
    ask: impl FnOnce() -> F + Send + 'static,
) -> Result<T> {
    let failed = |problem: String| Error::Kubernetes {
        server: "of Kubernetes".to_owned(),
        problem,
        remedy: "look at credential plugins of the kubeconfig, and at the machine's limits".to_owned(),
        kind: FailureKind::Retryable,
    };
    let (done, result) = mpsc::sync_channel(1);
    let body = move || {
        let outcome = match Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => {
                let outcome = runtime.block_on(ask());
                // A name lookup that hangs is detached.
                runtime.shutdown_background();
                outcome
            }
            Err(error) => Err(failed(format!("no event loop can be started: {error}"))),
        };
        let _ = done.send(outcome);
    };
    let thread = thread::Builder::new().name("distribute-k8s".to_owned()).spawn(body);
    let thread = thread.map_err(|error| failed(format!("no thread can be started: {error}")))?;
    // A credential plugin blocks the thread, which is abandoned then.
    match result.recv_timeout(limit + MARGIN) {
        Ok(outcome) => {
            let _ = thread.join();
            outcome
        }
        Err(RecvTimeoutError::Timeout) => Err(failed(format!("it is not asked within {} s", seconds(&limit)))),
        Err(RecvTimeoutError::Disconnected) => Err(failed("the thread that asks has panicked".to_owned())),
    }
}

/// Lets rustls use ring, unless the program has chosen another provider.
fn provide_cryptography() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Another thread may have installed one in between.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}

/// Finds the cluster and this process's task.
async fn find(options: &KubernetesOptions, variables: &Variables) -> Result<(Cluster, Option<Task>)> {
    provide_cryptography();
    let access = options.chosen_access();
    let (config, _) = access::config(options, variables).await?;
    let (server, namespace) = (config.cluster_url.to_string(), config.default_namespace.clone());
    let refused = |trouble: &Trouble, selector: &str| {
        let (server, namespace, limit) = (server.as_str(), namespace.as_str(), options.request_timeout);
        Refusal { trouble, server, access: &access, namespace, selector, limit }.error()
    };
    let client = Client::try_from(config);
    let client = client.map_err(|error| refused(&Trouble::Credentials(api::chain(&error)), ""))?;
    let api = Api { client, namespace: namespace.clone() };

    let begin = Instant::now();
    let give_up = begin + options.wait;
    let selectors: Vec<&str> = cluster::selectors(options).map(|(_, selector)| selector.as_str()).collect();
    let (sender, mut news) = channel(64);
    // Nothing is watched before the lists are found to lack pods.
    let (watches, watching) = watch::channel(false);
    let mut followers = JoinSet::new();
    for (number, selector) in selectors.iter().enumerate() {
        let follower = Follower {
            api: api.clone(),
            selector: (*selector).to_owned(),
            number,
            limit: options.request_timeout,
            watching: watching.clone(),
            news: sender.clone(),
        };
        followers.spawn(follower.run());
    }
    let mut known: Vec<Option<Pods>> = vec![None; selectors.len()];
    let (mut next_report, mut failed) = (begin, None);
    loop {
        let mut until = begin + options.request_timeout + MARGIN;
        let pods = known.iter().map(Option::as_ref).collect::<Option<Vec<&Pods>>>();
        let gaps = match pods.as_ref().map(|pods| cluster::cluster(options, pods)).transpose()? {
            Some(Ok(cluster)) => {
                let task = own::task(options, variables, &cluster)?;
                return Ok((cluster, task));
            }
            Some(Err(gaps)) => Some(gaps),
            None => None,
        };
        if let Some((trouble, number)) = failed {
            return Err(refused(&trouble, selectors[number]));
        }
        if let Some(gaps) = gaps {
            let now = Instant::now();
            if now >= give_up {
                return Err(Error::Pods { waited: options.wait, namespace, pods: gaps });
            }
            if now >= next_report {
                tracing::info!("waiting for pods of namespace {namespace}: {gaps}");
                next_report = now + REPORT;
            }
            until = give_up.min(next_report);
            watches.send_replace(true);
        }
        let mut next = match timeout_at(until, news.recv()).await {
            Ok(next) => next,
            // Followers fail by themselves before.
            Err(_) if known.iter().any(Option::is_none) => return Err(refused(&Trouble::Silent, "")),
            Err(_) => continue,
        };
        while let Some((number, what)) = next {
            match what {
                News::All(pods) => known[number] = Some(pods),
                News::Change(change) => known[number].iter_mut().for_each(|pods| apply(pods, &change)),
                News::Failed(trouble) => failed = Some((trouble, number)),
            }
            next = news.try_recv().ok();
        }
    }
}

fn apply(pods: &mut Pods, change: &Change) {
    match change {
        Change::Put(pod) => drop(pods.insert(pod.metadata.name.clone(), Pod::clone(pod))),
        Change::Removed(pod) => drop(pods.remove(&pod.metadata.name)),
        Change::Nothing(_) => {}
    }
}

/// Time beyond a limit that this module itself may take.
const MARGIN: Duration = Duration::from_secs(1);

/// Time between two reports of the missing pods.
const REPORT: Duration = Duration::from_secs(10);
