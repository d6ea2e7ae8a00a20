//! The cluster of an instance group of Compute Engine.

use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt};
use reqwest::{StatusCode, Url};
use serde::Deserialize;
use serde_json::json;

use crate::http::{self, AccessToken, Ask, Client, Proxies, Remedies, RequestOptions, Settings};
use crate::metadata::{Metadata, segment};
use crate::place::{OwnTask, Place};
use crate::{ClusterResolver, ClusterSpec, Error, JobId, Result, Task, TaskType, environment};

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod maintenance;
#[cfg(test)]
mod tests;

pub use maintenance::{GceEvent, GceMaintenance};

/// The running members of an instance group of Compute Engine, in the order of their internal addresses as text.
///
/// The group is listed whenever the cluster is asked for; members in other states are left out. All of them belong to
/// one job. Requests are authorised by the token in the options, else by that of the machine's service account, which
/// needs the permissions `compute.instanceGroups.list` and `compute.instances.get`, as in `roles/compute.viewer`.
///
/// # Examples
/// ```no_run
/// use distribute_cluster::{GceOptions, GceResolver, Membership, OwnTask};
/// let options = GceOptions::new("trainers", 8470).own_task(OwnTask::ByAddress);
/// let group = GceResolver::from_env(options)?;
/// let membership = Membership::from_resolver(&group)?;
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.cluster_resolver.GCEClusterResolver`; the methods `instanceGroups.listInstances` and `instances.get`
/// of the Compute Engine API, version 1.
#[derive(Debug)]
pub struct GceResolver {
    group: Arc<Group>,
    settings: Settings,
    place: Place,
    rpc_layer: String,
}

/// Settings of a [`GceResolver`].
///
/// # Examples
/// ```
/// use distribute_cluster::{GceOptions, TaskType};
/// let options = GceOptions::new("servers", 8470).zone("us-central1-a".to_owned()).task_type(TaskType::Ps);
/// assert_eq!(options.port, 8470);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GceOptions {
    /// The name of the instance group.
    pub instance_group: String,
    /// The port of every member.
    pub port: u16,
    /// The project of the group. Default: this machine's.
    pub project: Option<String>,
    /// The zone of the group. Default: this machine's.
    pub zone: Option<String>,
    /// The job of the members. Default: worker.
    pub task_type: TaskType,
    /// How this process knows the index of its task. Default: index 0.
    pub own_task: OwnTask,
    /// The protocol of addresses. Default: `grpc`.
    pub rpc_layer: String,
    /// The token that authorises requests. Default: that of the machine's service account.
    pub access_token: Option<AccessToken>,
    /// The root of the Compute Engine API. Default: `https://compute.googleapis.com`.
    pub base_url: String,
    /// The limits of requests.
    pub requests: RequestOptions,
}

impl GceOptions {
    /// Creates settings for a group whose members listen on a port.
    pub fn new(instance_group: impl Into<String>, port: u16) -> GceOptions {
        GceOptions {
            instance_group: instance_group.into(),
            port,
            project: None,
            zone: None,
            task_type: TaskType::Worker,
            own_task: OwnTask::Index(0),
            rpc_layer: "grpc".to_owned(),
            access_token: None,
            base_url: "https://compute.googleapis.com".to_owned(),
            requests: RequestOptions::default(),
        }
    }
}

distribute_types::setters! {
    GceOptions {
        task_type: TaskType,
        own_task: OwnTask,
        requests: RequestOptions,
    } into {
        project: Option<String>,
        zone: Option<String>,
        rpc_layer: String,
        access_token: Option<AccessToken>,
        base_url: String,
    }
}

impl GceResolver {
    /// Creates a resolver with the proxies, the metadata server and the DISTRIBUTE_JOB_ID of the environment.
    ///
    /// # Errors
    /// [`Error::Config`] if an option or a variable is malformed. With [`OwnTask::ByAddress`], also
    /// [`Error::Service`] if a request fails, [`Error::NotReady`] if no member runs, and [`Error::Config`] if this
    /// machine is not a member.
    pub fn from_env(options: GceOptions) -> Result<GceResolver> {
        environment::read(|variable| GceResolver::from_vars(variable, options))
    }

    /// Creates a resolver like [`from_env`](GceResolver::from_env), with a function that looks up variables.
    ///
    /// # Errors
    /// The errors of [`from_env`](GceResolver::from_env), in the same cases.
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>, options: GceOptions) -> Result<GceResolver> {
        let names = [("the instance group", Some(&options.instance_group))];
        let located = [("the project", options.project.as_ref()), ("the zone", options.zone.as_ref())];
        for (what, name) in names.into_iter().chain(located) {
            name.map(|name| segment(SUBJECT, what, name)).transpose()?;
        }
        if options.port == 0 {
            return Err(Error::config(SUBJECT, "the port is 0", "0", "1 to 65535", "Choose the members' port."));
        }
        let base = Url::parse(&options.base_url).ok().filter(|url| ["http", "https"].contains(&url.scheme()));
        let base = base.ok_or_else(|| {
            let expected = "a URL such as https://compute.googleapis.com";
            Error::config(SUBJECT, "base_url is not a URL", options.base_url.clone(), expected, "Correct the option.")
        })?;
        let metadata = Metadata::from_vars(&variable)?;
        let settings = Settings {
            service: SUBJECT,
            options: options.requests,
            proxies: Proxies::from_vars(&variable)?,
            is_metadata_given: metadata.is_given,
        };
        let GceOptions { instance_group, port, project, zone, task_type, access_token, .. } = options;
        let group = Group { name: instance_group, port, project, zone, task_type, token: access_token, base, metadata };
        let group = Arc::new(group);
        let index = if let OwnTask::Index(index) = options.own_task { index } else { 0 };
        let task = Task::new(task_type, index);
        let mut place = Place::new(SUBJECT, task_type, task, JobId::from_vars(&variable)?);
        if options.own_task == OwnTask::ByAddress {
            let asked = Arc::clone(&group);
            let (own, spec) = http::converse(&settings, move |client| async move {
                Ok((asked.metadata.own_address(&client).await?, asked.spec(&client).await?))
            })?;
            place = place.by_address(own, spec)?;
        }
        Ok(GceResolver { group, settings, place, rpc_layer: options.rpc_layer })
    }
}

impl ClusterResolver for GceResolver {
    /// Lists the group.
    ///
    /// # Errors
    /// [`Error::Service`] if a request fails, [`Error::NotReady`] if no member runs, and [`Error::Config`] if this
    /// machine's index was found by its address and has changed.
    fn cluster_spec(&self) -> Result<ClusterSpec> {
        let group = Arc::clone(&self.group);
        let spec = http::converse(&self.settings, move |client| async move { group.spec(&client).await })?;
        self.place.seen(spec)
    }

    fn task_type(&self) -> Option<TaskType> {
        Some(self.place.task().kind)
    }

    fn task_id(&self) -> Option<u32> {
        Some(self.place.task().index)
    }

    /// Returns DISTRIBUTE_JOB_ID, else an identity derived from the last list of the group.
    fn job_id(&self) -> Result<JobId> {
        self.place.job_id(|| self.cluster_spec())
    }

    fn rpc_layer(&self) -> Option<&str> {
        Some(&self.rpc_layer)
    }

    /// Returns the address of the named task, else of this process's.
    fn master(&self, task_type: Option<TaskType>, task_id: Option<u32>, rpc_layer: Option<&str>) -> Result<String> {
        self.place.address(&self.cluster_spec()?, task_type, task_id, rpc_layer.or(self.rpc_layer()))
    }
}

/// An instance group, and how it is listed.
#[derive(Debug)]
struct Group {
    name: String,
    port: u16,
    project: Option<String>,
    zone: Option<String>,
    task_type: TaskType,
    token: Option<AccessToken>,
    base: Url,
    metadata: Metadata,
}

/// A page of `instanceGroups.listInstances`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Page {
    #[serde(default)]
    items: Vec<Item>,
    next_page_token: Option<String>,
}

#[derive(Deserialize)]
struct Item {
    /// The URL of the instance.
    instance: String,
    #[serde(default)]
    status: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Instance {
    #[serde(default)]
    status: String,
    #[serde(default)]
    network_interfaces: Vec<Interface>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Interface {
    #[serde(rename = "networkIP")]
    network_ip: Option<String>,
    ipv6_address: Option<String>,
}

impl Instance {
    /// Returns its internal address, or its state if it does not run.
    fn address(self) -> Result<String, String> {
        if self.status != RUNNING {
            return Err(self.status);
        }
        let interface = self.network_interfaces.into_iter().next();
        let address = interface
            .and_then(|interface| interface.network_ip.or_else(|| Some(format!("[{}]", interface.ipv6_address?))));
        address.ok_or_else(|| "without an internal address".to_owned())
    }
}

/// A group at its place, with the token for it.
struct Located<'a> {
    group: &'a Group,
    project: String,
    zone: String,
    token: AccessToken,
}

impl Group {
    /// Lists the running members.
    async fn spec(&self, client: &Client) -> Result<ClusterSpec> {
        let project = self.metadata.project(client, self.project.as_deref()).await?;
        let zone = self.metadata.zone(client, self.zone.as_deref()).await?;
        let token = self.metadata.token(client, self.token.as_ref()).await?;
        let located = Located { group: self, project, zone, token };
        let (running, others) = located.members(client).await?;
        let addresses: Vec<(String, Result<String, String>)> = futures_util::stream::iter(running)
            .map(|name| async {
                let address = located.address(client, &name).await?;
                Ok::<_, Error>((name, address))
            })
            .buffer_unordered(AT_ONCE)
            .try_collect()
            .await?;
        let (mut hosts, mut left_out) = (Vec::new(), others);
        for (name, address) in addresses {
            match address {
                Ok(address) => hosts.push(format!("{address}:{}", self.port)),
                Err(state) => left_out.push((name, state)),
            }
        }
        left_out.sort();
        if hosts.is_empty() {
            return Err(located.none_runs(&left_out));
        }
        if !left_out.is_empty() {
            tracing::info!("instance group {}: left out {}", self.name, states(&left_out));
        }
        hosts.sort();
        ClusterSpec::new().with_job(self.task_type, hosts).map_err(|error| error.about(SUBJECT))
    }
}

impl Located<'_> {
    /// Returns the names of the running members, and the names and states of the others.
    async fn members(&self, client: &Client) -> Result<(Vec<String>, Vec<(String, String)>)> {
        let (mut running, mut others, mut next) = (Vec::new(), Vec::new(), None::<String>);
        for _ in 0..MAX_PAGES {
            let path = ["instanceGroups", &self.group.name, "listInstances"];
            let what = format!("the members of the instance group {:?}", self.group.name);
            let mut ask = self.ask(what, &path, "compute.instanceGroups.list")?;
            // In all states, so that an error can name those that do not run.
            ask.body = Some(json!({"instanceState": "ALL"}));
            ask.url.query_pairs_mut().append_pair("maxResults", PAGE);
            if let Some(token) = &next {
                ask.url.query_pairs_mut().append_pair("pageToken", token);
            }
            let page: Page = client.json(&ask).await.map_err(|refusal| client.error(&ask, refusal))?;
            for Item { instance, status } in page.items {
                let name = instance.rsplit('/').next().unwrap_or_default().to_owned();
                match status.as_str() {
                    RUNNING => running.push(name),
                    _ => others.push((name, status)),
                }
            }
            if running.len() + others.len() > ClusterSpec::MAX_TASKS {
                let problem = format!("the instance group {:?} is too large", self.group.name);
                let expected = format!("at most {} members", ClusterSpec::MAX_TASKS);
                let given = (running.len() + others.len()).to_string();
                return Err(Error::config(SUBJECT, problem, given, expected, "Use a smaller group."));
            }
            match page.next_page_token.filter(|token| !token.is_empty()) {
                None => return Ok((running, others)),
                token => next = token,
            }
        }
        Err(Error::Service {
            service: SUBJECT,
            request: format!("the members of the instance group {:?}", self.group.name),
            problem: format!("the list does not end after {MAX_PAGES} pages"),
            remedy: "Check that base_url is the service's own".to_owned(),
            kind: distribute_types::FailureKind::Permanent,
        })
    }

    /// Returns the internal address of a member, or its state if it does not run any more.
    async fn address(&self, client: &Client, name: &str) -> Result<Result<String, String>> {
        segment(SUBJECT, "a member's name", name)?;
        let ask = self.ask(format!("the instance {name:?}"), &["instances", name], "compute.instances.get")?;
        let instance: Instance = match client.json(&ask).await {
            Ok(instance) => instance,
            Err(refusal) if refusal.status == Some(StatusCode::NOT_FOUND) => return Ok(Err("deleted".to_owned())),
            Err(refusal) => return Err(client.error(&ask, refusal)),
        };
        Ok(instance.address())
    }

    fn ask(&self, what: String, path: &[&str], permission: &str) -> Result<Ask> {
        let (project, zone) = (&self.project, &self.zone);
        let mut url = self.group.base.clone();
        let start = ["compute", "v1", "projects", project, "zones", zone];
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(start).extend(path);
        }
        Ok(Ask {
            what,
            url,
            body: None,
            token: Some(self.token.clone()),
            is_metadata: false,
            limit_bytes: MAX_BYTES,
            remedies: Remedies {
                unauthorized: "The access token is not valid, or no longer: pass a new one, or none on a machine of \
                    Google Cloud"
                    .to_owned(),
                forbidden: format!(
                    "Grant the account the permission {permission} in project {project} (roles/compute.viewer has \
                     it), and its machine the scope cloud-platform"
                ),
                not_found: format!("Check the name, the project {project} and the zone {zone}"),
            },
        })
    }

    fn none_runs(&self, left_out: &[(String, String)]) -> Error {
        let problem = match left_out {
            [] => "has no members".to_owned(),
            others => format!("has no running member: {}", states(others)),
        };
        Error::NotReady {
            resource: format!("the instance group {:?} in {}", self.group.name, self.zone),
            problem,
            remedy: "Start its members, or wait until they run".to_owned(),
            kind: distribute_types::FailureKind::Retryable,
        }
    }
}

/// Formats members that do not run: `a (STAGING), b (TERMINATED)`.
fn states(members: &[(String, String)]) -> String {
    let named = |(name, state): &(String, String)| crate::text::clean(&format!("{name} ({state})"), MAX_SHOWN);
    let first: Vec<String> = members.iter().take(MAX_NAMED).map(named).collect();
    match members.len().saturating_sub(MAX_NAMED) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

const SUBJECT: &str = "Compute Engine";
const RUNNING: &str = "RUNNING";
/// The number of members of a page; the service's own limit.
const PAGE: &str = "500";
/// The number of pages; pages may be empty without being the last.
const MAX_PAGES: usize = 1000;
/// The number of members that are asked for at once.
const AT_ONCE: usize = 8;
/// Size limit of an answer. A page of members has 150 kB, an instance some 10 kB, with metadata 512 KiB more.
const MAX_BYTES: usize = 4 << 20;
/// The number of members that a message names.
const MAX_NAMED: usize = 16;
/// Length limit of a member in a message, in characters.
const MAX_SHOWN: usize = 160;
