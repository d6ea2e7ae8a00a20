//! Where the hosts of a TPU are known from.

use std::sync::Arc;

use super::node::{Lookup, SUBJECT};
use super::slice::{self, Slice};
use super::target::{self, Named};
use super::{Coordinator, PORT, TpuOptions, TpuTarget};
use crate::http::{self, Settings};
use crate::metadata::{Metadata, segment};
use crate::{Error, OwnTask, Result, environment};

/// Where the hosts of a TPU are known from.
#[derive(Debug)]
pub(super) enum Source {
    /// This machine's TPU.
    Local,
    /// Their addresses.
    Endpoints(Vec<String>),
    /// Its look-up, and the port of the worker servers if it is not that of the endpoints.
    Node(Arc<Lookup>, Option<u16>),
    /// This machine's slice.
    Slice(Slice),
}

impl Source {
    /// Reads the target in the options, else the one that the environment names.
    pub(super) fn read(
        variable: &dyn Fn(&str) -> Option<String>,
        options: &TpuOptions,
        settings: &Settings,
        metadata: &Metadata,
    ) -> Result<Source> {
        let named = match &options.tpu {
            TpuTarget::Environment => TpuTarget::from_vars(variable)?,
            target => Some(Named { target: target.clone(), project: None, zone: None }),
        };
        let Some(Named { target, project, zone }) = named else {
            return Source::slice(variable, options, settings, metadata);
        };
        let set = environment::set(variable);
        match target {
            TpuTarget::Environment => Source::slice(variable, options, settings, metadata),
            TpuTarget::Local => Ok(Source::Local),
            TpuTarget::Endpoints(list) => target::addresses(&list, options.port.unwrap_or(PORT)).map(Source::Endpoints),
            TpuTarget::Name(name) => {
                let lookup = Lookup {
                    name,
                    project: options.project.clone().or(project),
                    zone: options.zone.clone().or(zone),
                    token: options.access_token.clone(),
                    api: options.api,
                    discovery_url: set("TPU_API_DISCOVERY_URL").or_else(|| options.discovery_url.clone()),
                    metadata: metadata.clone(),
                };
                for (what, name) in [
                    ("the TPU's name", Some(&lookup.name)),
                    ("the project", lookup.project.as_ref()),
                    ("the zone", lookup.zone.as_ref()),
                ] {
                    name.map(|name| segment(SUBJECT, what, name)).transpose()?;
                }
                Ok(Source::Node(Arc::new(lookup), options.port))
            }
        }
    }

    /// Reads this machine's slice.
    fn slice(
        variable: &dyn Fn(&str) -> Option<String>,
        options: &TpuOptions,
        settings: &Settings,
        metadata: &Metadata,
    ) -> Result<Source> {
        let set = environment::set(variable);
        let port = match (options.port, set("DISTRIBUTE_PORT")) {
            (Some(port), _) => port,
            (None, None) => PORT,
            (None, Some(given)) => given.trim().parse().ok().filter(|port| *port > 0).ok_or_else(|| {
                let expected = "a number from 1 to 65535";
                Error::config("DISTRIBUTE_PORT", "it is not a port", given, expected, "Correct it, or unset it.")
            })?,
        };
        let may_ask = set("TPU_SKIP_MDS_QUERY").is_none_or(|skip| ["0", "false"].contains(&skip.trim()));
        let (attributes, problem) = match may_ask && !slice::is_described(variable) {
            false => (slice::Attributes::new(), None),
            true => {
                let metadata = metadata.clone();
                let asked =
                    http::converse(settings, move |client| async move { slice::attributes(&client, &metadata).await });
                match asked {
                    Ok(attributes) => (attributes, None),
                    Err(error) => (slice::Attributes::new(), Some(error)),
                }
            }
        };
        if let Some(slice) = Slice::read(variable, &attributes, port)? {
            return Ok(Source::Slice(slice));
        }
        let given = problem.map_or_else(|| "no name".to_owned(), |problem| format!("no name; {problem}"));
        let expected = "a name, `local`, grpc://host:port, TPU_NAME, TPU_CONFIG, KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, or \
            TPU_WORKER_HOSTNAMES and TPU_WORKER_ID";
        let remedy = "Name the TPU in the options or the environment, or run on a TPU VM.";
        Err(Error::config(SUBJECT, "nothing names a TPU", given, expected, remedy))
    }

    /// Returns the addresses that are known without a request.
    pub(super) fn addresses(&self) -> &[String] {
        match self {
            Source::Local | Source::Node(..) => &[],
            Source::Endpoints(addresses) => addresses,
            Source::Slice(slice) => &slice.addresses,
        }
    }
}

/// Returns this machine's address if it is needed, and the address of the coordinator.
pub(super) fn own_address(
    options: &TpuOptions,
    settings: &Settings,
    metadata: &Metadata,
) -> Result<(Option<String>, Option<String>)> {
    let is_needed =
        options.own_task == Some(OwnTask::ByAddress) || matches!(options.coordinator, Some(Coordinator::Here { .. }));
    let metadata = metadata.clone();
    let own = is_needed
        .then(|| http::converse(settings, move |client| async move { metadata.own_address(&client).await }))
        .transpose()?;
    let coordinator = options.coordinator.as_ref().map(|coordinator| match (coordinator, &own) {
        (Coordinator::Here { port }, Some(own)) => match own.contains(':') {
            true => format!("[{own}]:{port}"),
            false => format!("{own}:{port}"),
        },
        (Coordinator::Here { port }, None) => format!(":{port}"),
        (Coordinator::At(address), _) => address.clone(),
    });
    Ok((own, coordinator))
}
