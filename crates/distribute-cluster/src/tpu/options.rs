//! Settings of the resolver.

use super::{TpuApi, TpuTarget};
use crate::http::{AccessToken, RequestOptions};
use crate::{OwnTask, TaskType};

/// Settings of a [`TpuResolver`](super::TpuResolver).
///
/// # Examples
/// ```
/// use distribute_cluster::tpu::{TpuOptions, TpuTarget};
/// let options = TpuOptions::default().tpu("pod").zone("us-central2-b".to_owned()).port(9000);
/// assert_eq!(options.tpu, TpuTarget::Name("pod".to_owned()));
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TpuOptions {
    /// The TPU. Default: the one that the environment names.
    pub tpu: TpuTarget,
    /// The project of a TPU that is named. Default: that of TPU_CONFIG, else this machine's.
    pub project: Option<String>,
    /// The zone of a TPU that is named. Default: that of TPU_CONFIG, else this machine's.
    pub zone: Option<String>,
    /// The job of the TPU's hosts. Default: worker.
    pub job: TaskType,
    /// The type of this process's task. Default: the job of the TPU's hosts.
    pub task_type: Option<TaskType>,
    /// How this process knows the index of its task. Default: by the slice's description if the environment names the
    /// slice, else index 0.
    pub own_task: Option<OwnTask>,
    /// The port of the worker servers. Default: that of the endpoint; for hosts of this machine's slice
    /// DISTRIBUTE_PORT, else [`PORT`](super::PORT).
    pub port: Option<u16>,
    /// A process outside of the TPU that coordinates: job `chief`. Default: none.
    pub coordinator: Option<Coordinator>,
    /// The token that authorises requests. Default: that of the machine's service account.
    pub access_token: Option<AccessToken>,
    /// The version of the node interface. Default: version 2.
    pub api: TpuApi,
    /// A template of the discovery document's URL, with `{api}` and `{apiVersion}`. TPU_API_DISCOVERY_URL overrides it.
    /// Default: none; the service is at `https://tpu.googleapis.com`.
    pub discovery_url: Option<String>,
    /// The limits of requests.
    pub requests: RequestOptions,
}

impl Default for TpuOptions {
    fn default() -> TpuOptions {
        TpuOptions {
            tpu: TpuTarget::Environment,
            project: None,
            zone: None,
            job: TaskType::Worker,
            task_type: None,
            own_task: None,
            port: None,
            coordinator: None,
            access_token: None,
            api: TpuApi::default(),
            discovery_url: None,
            requests: RequestOptions::default(),
        }
    }
}

distribute_types::setters! {
    TpuOptions {
        job: TaskType,
        api: TpuApi,
        requests: RequestOptions,
    } into {
        tpu: TpuTarget,
        project: Option<String>,
        zone: Option<String>,
        task_type: Option<TaskType>,
        own_task: Option<OwnTask>,
        port: Option<u16>,
        coordinator: Option<Coordinator>,
        access_token: Option<AccessToken>,
        discovery_url: Option<String>,
    }
}

/// The address of a coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Coordinator {
    /// At a `host:port`.
    At(String),
    /// On this machine, at its internal address, which the metadata server gives.
    Here {
        /// The port.
        port: u16,
    },
}
