//! A register of generations in a Lease.

use std::fmt;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use distribute_types::FailureKind;
use k8s_openapi::ByteString;
use kube::Client;
use serde_json::{Map, Value, json};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::api::{self, Answered, Objects};
use super::options::is_label;
use super::trouble::{self, LeaseRefusal, Trouble};
use super::{KubernetesOptions, Variables, access, on_a_thread, provide_cryptography};
use crate::job::hex;
use crate::{Error, Generation, JobId, Register, Result, environment};

/// A register in an object of Kubernetes that all processes of a job reach: a Lease, of which an annotation holds the
/// newest generation. The API server compares the version of the object with each write, so that one process decides.
///
/// The Lease belongs to one job, whose identity it names. It is created with the first generation; if this process's
/// pod is known (POD_NAME, else HOSTNAME), is in the Lease's namespace and may be read, the Lease belongs to the pod's
/// controller, such as its Job, and is deleted with it. Otherwise it stays after the job: delete it before a job with
/// the same identity is started again as a whole.
///
/// A generation of more than about 180 KB, which is one of some 2000 members, does not fit.
///
/// # Examples
/// ```no_run
/// use distribute_cluster::{JobId, KubernetesOptions, LeaseRegister, Register};
///
/// let register = LeaseRegister::from_env("mnist", None, &JobId::new("mnist")?, KubernetesOptions::default())?;
/// if let Some(generation) = register.read()? {
///     println!("{generation}");
/// }
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
///
/// # Source
/// Optimistic concurrency of the API server: `metadata.resourceVersion` in "Kubernetes API Conventions".
#[derive(Clone)]
pub struct LeaseRegister {
    name: String,
    /// The job's identity, in hexadecimal digits.
    job: String,
    options: KubernetesOptions,
    variables: Variables,
}

impl LeaseRegister {
    /// Length limit of a generation, in bytes: in base64 it fits into the annotations of an object, which together hold
    /// 256 KiB.
    pub const MAX_GENERATION_BYTES: usize = 180 * 1024;

    /// Creates the register of a job in the Lease with a name, in a namespace; `None` is that of the pod. Nothing is
    /// asked yet. Of the options, only [`access`](KubernetesOptions::access),
    /// [`location`](KubernetesOptions::location) and [`request_timeout`](KubernetesOptions::request_timeout), here at
    /// most 5 s, have an effect. A call ends within three times that.
    ///
    /// # Errors
    /// [`Error::Config`] if a name is none.
    pub fn from_env(
        name: &str,
        namespace: Option<&str>,
        job: &JobId,
        options: KubernetesOptions,
    ) -> Result<LeaseRegister> {
        environment::read(|variable| LeaseRegister::from_vars(name, namespace, job, options, variable))
    }

    /// Creates the register like [`from_env`](LeaseRegister::from_env), with a function that looks up variables.
    ///
    /// # Errors
    /// [`Error::Config`] if a name is none.
    pub fn from_vars(
        name: &str,
        namespace: Option<&str>,
        job: &JobId,
        options: KubernetesOptions,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<LeaseRegister> {
        let wrong = |problem: &str, given: &str| {
            let expected = "lower-case letters, digits and -, such as mnist or mnist@research";
            Error::config(
                "Kubernetes",
                problem,
                given,
                expected,
                "Correct DISTRIBUTE_GENERATIONS=lease:NAME@NAMESPACE.",
            )
        };
        if name.len() > 253 || !name.split('.').all(is_label) {
            return Err(wrong("this is not the name of a Lease", name));
        }
        if let Some(namespace) = namespace.filter(|namespace| !is_label(namespace)) {
            return Err(wrong("this is not the name of a namespace", namespace));
        }
        let variables = Variables::read(&variable);
        let request_timeout = options.request_timeout.min(REQUEST);
        let options = KubernetesOptions { namespace: namespace.map(str::to_owned), request_timeout, ..options };
        Ok(LeaseRegister { name: name.to_owned(), job: hex(&job.to_bytes()), options, variables })
    }

    /// Returns the time limit of a call with all its requests and pauses.
    fn deadline(&self) -> Duration {
        3 * self.options.request_timeout
    }

    /// Runs what asks the API server on a thread of its own.
    fn on_a_thread<T: Send + 'static, F: Future<Output = Result<T>>>(
        &self,
        ask: impl FnOnce(Session) -> F + Send + 'static,
    ) -> Result<T> {
        let register = self.clone();
        on_a_thread(self.deadline(), async move || ask(Session::open(register).await?).await)
    }
}

impl Register for LeaseRegister {
    fn read(&self) -> Result<Option<Generation>> {
        self.on_a_thread(async |session| Ok(session.held("read").await?.generation))
    }

    fn decide(&self, next: &Generation) -> Result<Generation> {
        let next = next.clone();
        self.on_a_thread(async move |session| session.decide(&next).await)
    }

    fn end(&self) -> Result<()> {
        self.on_a_thread(async |session| session.end().await)
    }

    fn has_ended(&self) -> Result<bool> {
        self.on_a_thread(async |session| Ok(session.held("read").await?.ended))
    }
}

impl fmt::Debug for LeaseRegister {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let namespace = &self.options.namespace;
        f.debug_struct("LeaseRegister").field("name", &self.name).field("namespace", namespace).finish_non_exhaustive()
    }
}

/// The contents of a Lease.
#[derive(Debug, Default)]
struct Held {
    /// The object, for the next write; `None` if there is none.
    lease: Option<Value>,
    generation: Option<Generation>,
    ended: bool,
}

/// Calls of one operation, within its deadline.
struct Session {
    register: LeaseRegister,
    leases: Objects,
    server: String,
    namespace: String,
    /// That of this process's pod.
    own_namespace: String,
    give_up: Instant,
}

impl Session {
    async fn open(register: LeaseRegister) -> Result<Session> {
        provide_cryptography();
        let (config, own_namespace) = access::config(&register.options, &register.variables).await?;
        let (server, namespace) = (config.cluster_url.to_string(), config.default_namespace.clone());
        let client = Client::try_from(config).map_err(|error| Error::Kubernetes {
            server: server.clone(),
            problem: format!("there are no credentials for it: {}", api::chain(&error)),
            remedy: "give the pod a service account".to_owned(),
            kind: FailureKind::Configuration,
        })?;
        let path = format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases");
        let give_up = Instant::now() + register.deadline();
        Ok(Session { register, leases: Objects { client, path }, server, namespace, own_namespace, give_up })
    }

    /// Reads the Lease, again where that may help.
    async fn held(&self, what: &str) -> Result<Held> {
        let mut pauses = pauses();
        loop {
            match self.once(self.leases.get(&self.register.name)).await {
                Ok(Answered::Object(lease)) => return self.parse(lease),
                Ok(Answered::Absent) => return Ok(Held::default()),
                // A read cannot conflict.
                Ok(Answered::Conflict) => self.pause(&mut pauses, Trouble::Silent, what).await?,
                Err(trouble) => self.pause(&mut pauses, trouble, what).await?,
            }
        }
    }

    async fn decide(&self, next: &Generation) -> Result<Generation> {
        let bytes = next.to_bytes();
        if bytes.len() > LeaseRegister::MAX_GENERATION_BYTES {
            return Err(self.wrong(
                &format!(
                    "generation {} of {} members has {} bytes, and a Lease holds {}",
                    next.number,
                    next.members.len(),
                    bytes.len(),
                    LeaseRegister::MAX_GENERATION_BYTES
                ),
                "use a folder that all pods mount, DISTRIBUTE_GENERATIONS=file:/folder, or fewer processes with \
                 several replicas each",
            ));
        }
        // A text in base64.
        let text = serde_json::to_value(ByteString(bytes)).unwrap_or_default();
        let mut pauses = pauses();
        loop {
            // Read again after each failure: the write may have been done although its answer was lost.
            let held = self.held("decide a generation in").await?;
            let number = held.generation.as_ref().map_or(0, |generation| generation.number);
            match held.generation {
                Some(generation) if number >= next.number => return Ok(generation),
                _ if number + 1 < next.number => {
                    return Err(self.wrong(
                        &format!("it holds generation {number}, although the one before {} was decided", next.number),
                        "somebody has replaced or deleted it: start the job again as a whole",
                    ));
                }
                _ => {}
            }
            let change = [(GENERATION, text.clone()), (JOB, json!(self.register.job))];
            match self.write(held.lease, &change, next.number).await {
                Ok(true) => return Ok(next.clone()),
                Ok(false) => self.pause(&mut pauses, conflict(), "decide a generation in").await?,
                Err(trouble) => self.pause(&mut pauses, trouble, "decide a generation in").await?,
            }
        }
    }

    async fn end(&self) -> Result<()> {
        let mut pauses = pauses();
        loop {
            let held = self.held("record the job's end in").await?;
            if held.ended {
                return Ok(());
            }
            let number = held.generation.map_or(0, |generation| generation.number);
            let change = [(ENDED, json!("true")), (JOB, json!(self.register.job))];
            match self.write(held.lease, &change, number).await {
                Ok(true) => return Ok(()),
                Ok(false) => self.pause(&mut pauses, conflict(), "record the job's end in").await?,
                Err(trouble) => self.pause(&mut pauses, trouble, "record the job's end in").await?,
            }
        }
    }

    /// Writes annotations into the Lease that was read, or into a new one. Returns false if it has changed meanwhile.
    async fn write(&self, lease: Option<Value>, change: &[(&str, Value)], number: u64) -> Result<bool, Trouble> {
        let is_new = lease.is_none();
        let mut lease = match lease {
            Some(lease) => lease,
            None => self.new_lease().await,
        };
        // What others have written there, such as labels, stays.
        let metadata = object(&mut lease["metadata"]);
        let annotations = object(metadata.entry("annotations").or_insert_with(|| json!({})));
        for (key, value) in change {
            annotations.insert((*key).to_owned(), value.clone());
        }
        let spec = object(&mut lease["spec"]);
        // For `kubectl get lease`.
        spec.insert("holderIdentity".to_owned(), json!(format!("distribute-{}", self.register.job)));
        spec.insert("leaseTransitions".to_owned(), json!(i32::try_from(number).unwrap_or(i32::MAX)));
        let written = match is_new {
            true => self.once(self.leases.create(&lease)).await?,
            false => self.once(self.leases.replace(&self.register.name, &lease)).await?,
        };
        Ok(matches!(written, Answered::Object(_)))
    }

    async fn new_lease(&self) -> Value {
        let mut metadata = json!({"name": self.register.name, "namespace": self.namespace});
        if let Some(owner) = self.owner().await {
            metadata["ownerReferences"] = json!([owner]);
        }
        json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}})
    }

    /// Returns a reference to the controller of this process's pod, if it is known and in the Lease's namespace: an
    /// object does not own those of another one, in which another pod may have the same name.
    async fn owner(&self) -> Option<Value> {
        if self.namespace != self.own_namespace {
            return None;
        }
        let variables = &self.register.variables;
        let pod = variables.pod_name.as_ref().or(variables.hostname.as_ref())?;
        let path = format!("/api/v1/namespaces/{}/pods", self.namespace);
        let pods = Objects { client: self.leases.client.clone(), path };
        let pod = match self.once(pods.get(pod)).await {
            Ok(Answered::Object(pod)) => pod,
            Ok(_) => return None,
            Err(trouble) => {
                tracing::debug!(?trouble, "the pod cannot be read, so that the Lease stays after the job");
                return None;
            }
        };
        let owners = pod["metadata"]["ownerReferences"].as_array()?;
        let owner = owners.iter().find(|owner| owner["controller"] == json!(true))?;
        let field = |name: &str| owner[name].as_str().map(str::to_owned);
        // Not as its controller: only this job acts on the Lease.
        Some(json!({
            "apiVersion": field("apiVersion")?,
            "kind": field("kind")?,
            "name": field("name")?,
            "uid": field("uid")?,
        }))
    }

    /// Reads what a Lease says, which may belong to another job or be damaged.
    fn parse(&self, lease: Value) -> Result<Held> {
        let annotation = |key: &str| lease["metadata"]["annotations"][key].as_str();
        let holder = lease["spec"]["holderIdentity"].as_str().filter(|holder| !holder.is_empty());
        match (annotation(JOB), holder) {
            (Some(job), _) if job == self.register.job => {}
            (None, None) => return Ok(Held { lease: Some(lease), ..Held::default() }),
            (job, holder) => {
                let owner = match job {
                    Some(job) => format!("the job with the identity {}", trouble::short(job)),
                    None => trouble::short(holder.unwrap_or_default()),
                };
                return Err(self.wrong(
                    &format!("it belongs to {owner}"),
                    &format!("give each job a Lease of its own, or, if that job is over, {}", self.deletion()),
                ));
            }
        }
        let damaged = |problem: &str| {
            self.wrong(
                &format!("its annotation {GENERATION} is damaged: {problem}"),
                &format!("if the job is over, {}; else start it again as a whole", self.deletion()),
            )
        };
        let generation = match annotation(GENERATION) {
            None => None,
            Some(text) if text.len() > 2 * LeaseRegister::MAX_GENERATION_BYTES => {
                return Err(damaged("it is too long"));
            }
            Some(text) => {
                let bytes: ByteString = serde_json::from_value(json!(text)).map_err(|_| damaged("it is not base64"))?;
                Some(Generation::from_bytes(&bytes.0).map_err(|_| damaged("it holds no generation"))?)
            }
        };
        Ok(Held { ended: annotation(ENDED) == Some("true"), generation, lease: Some(lease) })
    }

    /// Asks once, within the time of a request and of the operation.
    async fn once<T>(&self, request: impl Future<Output = Result<T, Trouble>>) -> Result<T, Trouble> {
        let until = self.give_up.min(Instant::now() + self.register.options.request_timeout);
        timeout_at(until, request).await.unwrap_or(Err(Trouble::Silent))
    }

    /// Pauses after a failure, or returns it if the same request cannot help or time is over.
    async fn pause(&self, pauses: &mut impl Iterator<Item = Duration>, trouble: Trouble, what: &str) -> Result<()> {
        let pause = pauses.next().unwrap_or(LONGEST).max(trouble.retry_after().unwrap_or_default());
        let left = self.give_up.saturating_duration_since(Instant::now());
        if !trouble.is_transient() || pause >= left {
            let (server, namespace) = (self.server.as_str(), self.namespace.as_str());
            let name = self.register.name.as_str();
            return Err(LeaseRefusal {
                trouble: &trouble,
                server,
                namespace,
                name,
                what,
                limit: self.register.deadline(),
            }
            .error());
        }
        let _ = timeout(left, sleep(pause)).await;
        Ok(())
    }

    fn wrong(&self, problem: &str, remedy: &str) -> Error {
        Error::Kubernetes {
            server: self.server.clone(),
            problem: format!("the Lease {} of namespace {}: {problem}", self.register.name, self.namespace),
            remedy: remedy.to_owned(),
            kind: FailureKind::Configuration,
        }
    }

    fn deletion(&self) -> String {
        format!("delete it by `kubectl delete lease {} -n {}`", self.register.name, self.namespace)
    }
}

/// Returns the fields of an object, which becomes one if it is none.
fn object(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = json!({});
    }
    match value {
        Value::Object(fields) => fields,
        // It has just become an object.
        _ => unreachable!(),
    }
}

/// The failure of a write to an object that another process has written meanwhile.
fn conflict() -> Trouble {
    Trouble::Status { code: 409, message: "others write at the same time".to_owned(), retry_after: None }
}

/// Returns the pauses between attempts, which differ between processes.
fn pauses() -> impl Iterator<Item = Duration> {
    ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(20))
        .with_max_delay(LONGEST)
        .with_factor(2.0)
        .with_jitter()
        .without_max_times()
        .build()
}

/// The annotations of the Lease.
const GENERATION: &str = "distribute/generation";
const JOB: &str = "distribute/job";
const ENDED: &str = "distribute/ended";

/// Time limit of one request.
const REQUEST: Duration = Duration::from_secs(5);

/// The longest pause.
const LONGEST: Duration = Duration::from_secs(1);
