//! TPUs by name: the node interface of Cloud TPU.

use std::time::{Duration, SystemTime};

use distribute_types::FailureKind;
use reqwest::Url;
use serde::Deserialize;

use super::accelerator::AcceleratorType;
use crate::http::{AccessToken, Ask, Client, Remedies};
use crate::metadata::{Metadata, segment};
use crate::{Error, Result};

/// The version of the node interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum TpuApi {
    /// Version 1, of TPU nodes.
    V1,
    /// Version 2, of TPU VMs.
    #[default]
    V2,
}

impl TpuApi {
    pub(super) fn name(self) -> &'static str {
        match self {
            TpuApi::V1 => "v1",
            TpuApi::V2 => "v2",
        }
    }
}

/// Where a TPU is looked up.
#[derive(Clone, Debug)]
pub(super) struct Lookup {
    pub(super) name: String,
    pub(super) project: Option<String>,
    pub(super) zone: Option<String>,
    pub(super) token: Option<AccessToken>,
    pub(super) api: TpuApi,
    /// The template of the discovery document's URL; without it, the service is at its usual address.
    pub(super) discovery_url: Option<String>,
    pub(super) metadata: Metadata,
}

/// A TPU as the service describes it, in either version.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Node {
    accelerator_type: String,
    accelerator_config: Option<Config>,
    pub(super) state: String,
    pub(super) health: String,
    pub(super) health_description: String,
    network_endpoints: Vec<Endpoint>,
    ip_address: String,
    port: Option<Port>,
    symptoms: Vec<Symptom>,
    tensorflow_version: String,
    runtime_version: String,
}

#[derive(Clone, Debug, Deserialize)]
struct Config {
    #[serde(rename = "type")]
    kind: String,
    topology: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Endpoint {
    ip_address: String,
    port: Option<Port>,
}

/// A number in version 2, a text in version 1.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Port {
    Number(u16),
    Text(String),
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Symptom {
    create_time: String,
    symptom_type: String,
}

impl Lookup {
    /// Asks the service.
    pub(super) async fn node(&self, client: &Client) -> Result<Node> {
        let project = self.metadata.project(client, self.project.as_deref()).await?;
        let zone = self.metadata.zone(client, self.zone.as_deref()).await?;
        for (what, name) in [("the TPU's name", &self.name), ("the project", &project), ("the zone", &zone)] {
            segment(SUBJECT, what, name)?;
        }
        let token = self.metadata.token(client, self.token.as_ref()).await?;
        let mut url = self.root(client).await?;
        let path = [self.api.name(), "projects", &project, "locations", &zone, "nodes", &self.name];
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        let ask = Ask {
            what: format!("the TPU {:?}", self.name),
            url,
            body: None,
            token: Some(token),
            is_metadata: false,
            limit_bytes: MAX_BYTES,
            remedies: Remedies {
                unauthorized: "The access token is not valid, or no longer: pass a new one, or none on a machine of \
                    Google Cloud"
                    .to_owned(),
                forbidden: format!(
                    "Grant the account the permission tpu.nodes.get in project {project} (roles/tpu.viewer has it), \
                     and its machine the scope cloud-platform"
                ),
                not_found: format!(
                    "Check the TPU's name, the project {project} and the zone {zone}; `gcloud compute tpus tpu-vm \
                     list` shows those of a zone"
                ),
            },
        };
        client.json(&ask).await.map_err(|refusal| client.error(&ask, refusal))
    }

    /// Returns the root of the service, by the discovery document if its URL is given.
    async fn root(&self, client: &Client) -> Result<Url> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Document {
            root_url: String,
            #[serde(default)]
            service_path: String,
        }
        let parse = |what: &'static str, text: &str| {
            let url = Url::parse(text).ok().filter(|url| ["http", "https"].contains(&url.scheme()));
            let remedy = "Correct TPU_API_DISCOVERY_URL or the document there.";
            url.ok_or_else(|| Error::config(SUBJECT, format!("{what} is not a URL"), text, ROOT, remedy))
        };
        let Some(template) = &self.discovery_url else { return parse("the root", ROOT) };
        let url = template.replace("{api}", "tpu").replace("{apiVersion}", self.api.name());
        let url = parse("the discovery document's place", &url)?;
        let remedy = || "Correct TPU_API_DISCOVERY_URL, or unset it".to_owned();
        // The document is public: the token is for the service alone.
        let ask = Ask {
            what: "the discovery document".to_owned(),
            url,
            body: None,
            token: None,
            is_metadata: false,
            limit_bytes: MAX_BYTES,
            remedies: Remedies { unauthorized: remedy(), forbidden: remedy(), not_found: remedy() },
        };
        let document: Document = client.json(&ask).await.map_err(|refusal| client.error(&ask, refusal))?;
        let root = format!("{}/{}", document.root_url.trim_end_matches('/'), document.service_path.trim_matches('/'));
        parse("rootUrl of the discovery document", &root)
    }

    /// Returns the addresses of the worker servers of a TPU that is ready.
    ///
    /// # Errors
    /// [`Error::NotReady`] in other states, and [`Error::Config`] if the endpoints are those of TensorFlow's workers.
    pub(super) fn addresses(&self, node: &Node, port: Option<u16>) -> Result<Vec<String>> {
        if !["", READY].contains(&node.state.as_str()) {
            return Err(self.not_ready(node));
        }
        if !node.tensorflow_version.is_empty() && self.api == TpuApi::V1 && port.is_none() {
            let problem =
                format!("the endpoints of {:?} are workers of TensorFlow, which run its graphs alone", self.name);
            let given = format!("TensorFlow {}", node.tensorflow_version);
            let expected = "the worker servers of this program on the hosts of a TPU VM";
            let remedy = "Create a TPU VM, start the program on each of its hosts, and give the port as an option.";
            return Err(Error::config(SUBJECT, problem, given, expected, remedy));
        }
        let alone = || Endpoint { ip_address: node.ip_address.clone(), port: node.port.clone() };
        let endpoints = match node.network_endpoints.as_slice() {
            [] if !node.ip_address.is_empty() => vec![alone()],
            endpoints => endpoints.to_vec(),
        };
        if endpoints.is_empty() {
            return Err(Error::NotReady {
                resource: format!("the TPU {:?}", self.name),
                problem: "has no network endpoints".to_owned(),
                remedy: "Wait until it is READY; `wait_for_healthy` does".to_owned(),
                kind: FailureKind::Retryable,
            });
        }
        let address = |endpoint: &Endpoint| {
            let port = match (port, &endpoint.port) {
                (Some(port), _) => port.to_string(),
                (None, Some(Port::Number(port))) => port.to_string(),
                (None, Some(Port::Text(port))) => port.clone(),
                (None, None) => super::PORT.to_string(),
            };
            match endpoint.ip_address.parse::<std::net::Ipv6Addr>() {
                Ok(address) => format!("[{address}]:{port}"),
                Err(_) => format!("{}:{port}", endpoint.ip_address),
            }
        };
        Ok(endpoints.iter().map(address).collect())
    }

    /// Returns the error of a state in which the TPU cannot be used.
    pub(super) fn not_ready(&self, node: &Node) -> Error {
        let remedy = match node.is_gone() {
            true => "It does not return: create it again",
            false => "Wait until it is READY; `wait_for_healthy` does",
        };
        let kind = if node.is_gone() { FailureKind::Permanent } else { FailureKind::Retryable };
        Error::NotReady {
            resource: format!("the TPU {:?}", self.name),
            problem: format!("is not yet ready; state: {:?}", node.state),
            remedy: remedy.to_owned(),
            kind,
        }
    }
}

impl Node {
    /// Returns whether it is preempted or terminated.
    pub(super) fn is_gone(&self) -> bool {
        ["PREEMPTED", "TERMINATED"].contains(&self.state.as_str())
    }

    /// Returns whether a program that lost the TPU may use it again: it is not gone, and did not run out of memory just
    /// before.
    pub(super) fn is_recoverable(&self, now: SystemTime) -> bool {
        let is_recent = |symptom: &Symptom| {
            let time = humantime::parse_rfc3339(&symptom.create_time);
            // A time in the future is that of a clock that is ahead.
            time.is_ok_and(|time| now.duration_since(time).unwrap_or_default() < OUT_OF_MEMORY)
        };
        let is_memory = |symptom: &Symptom| ["OUT_OF_MEMORY", "HBM_OUT_OF_MEMORY"].contains(&&*symptom.symptom_type);
        !self.is_gone() && !self.symptoms.iter().any(|symptom| is_memory(symptom) && is_recent(symptom))
    }

    pub(super) fn accelerator(&self) -> Result<Option<AcceleratorType>> {
        match (&self.accelerator_config, self.accelerator_type.as_str()) {
            (Some(config), "") => AcceleratorType::from_config(&config.kind, &config.topology).map(Some),
            (None, "") => Ok(None),
            (_, name) => name.parse().map(Some),
        }
    }

    /// Returns the version of the software on the hosts.
    pub(super) fn version(&self) -> Option<&str> {
        [&self.runtime_version, &self.tensorflow_version].into_iter().map(String::as_str).find(|text| !text.is_empty())
    }
}

pub(super) const SUBJECT: &str = "Cloud TPU";
pub(super) const READY: &str = "READY";
const ROOT: &str = "https://tpu.googleapis.com/";
/// How long a TPU that ran out of memory counts as lost.
const OUT_OF_MEMORY: Duration = Duration::from_secs(90);
/// Size limit of an answer: the discovery document has some 200 kB.
const MAX_BYTES: usize = 4 << 20;
