//! Events that end a machine of Compute Engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::SUBJECT;
use crate::http::{self, Client, Proxies, RequestOptions, Settings};
use crate::metadata::Metadata;
use crate::{Result, environment};

/// Asks the metadata server of a machine of Compute Engine whether the machine is about to be stopped.
///
/// GCE_METADATA_HOST, else GCE_METADATA_IP, says where the metadata server is; no token is needed. A machine that is
/// migrated while it runs (`MIGRATE_ON_HOST_MAINTENANCE`) is not stopped.
///
/// # Examples
/// ```no_run
/// use distribute_cluster::{GceMaintenance, RequestOptions};
/// let machine = GceMaintenance::from_env(RequestOptions::default())?;
/// // In a training: TerminationConfig::default().watch(move || machine.is_announced())
/// if let Some(event) = machine.event()? {
///     println!("this machine will be stopped: {event:?}");
/// }
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
///
/// # Source
/// `termination_watcher_function_gce` of `tensorflow/python/distribute/failure_handling/failure_handling_util.py`;
/// `instance/maintenance-event` and `instance/preempted` of Compute Engine's metadata.
#[derive(Debug)]
pub struct GceMaintenance {
    metadata: Arc<Metadata>,
    settings: Settings,
    /// Whether the last call of [`is_announced`](GceMaintenance::is_announced) failed, which has been reported.
    is_failing: AtomicBool,
}

/// An event that ends a machine of Compute Engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GceEvent {
    /// A spot or preemptible machine is taken away, after 30 s.
    Preemption,
    /// The machine is stopped for maintenance of its host, after 60 s; after up to an hour with GPUs.
    HostMaintenance,
}

impl GceMaintenance {
    /// Finds the metadata server by the environment, and asks it once.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) if a variable is malformed, [`Error::Service`](crate::Error::Service) if
    /// there is no metadata server, as on machines of others.
    pub fn from_env(requests: RequestOptions) -> Result<GceMaintenance> {
        environment::read(|variable| GceMaintenance::from_vars(variable, requests))
    }

    /// Finds the metadata server like [`from_env`](GceMaintenance::from_env), with a function that looks up variables.
    ///
    /// # Errors
    /// The errors of [`from_env`](GceMaintenance::from_env), in the same cases.
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>, requests: RequestOptions) -> Result<GceMaintenance> {
        let metadata = Arc::new(Metadata::from_vars(&variable)?);
        let settings = Settings {
            service: SUBJECT,
            options: requests,
            proxies: Proxies::from_vars(&variable)?,
            is_metadata_given: metadata.is_given,
        };
        let machine = GceMaintenance { metadata, settings, is_failing: AtomicBool::new(false) };
        machine.event()?;
        Ok(machine)
    }

    /// Returns the event that has been announced, if any.
    ///
    /// # Errors
    /// [`Error::Service`](crate::Error::Service) if the metadata server does not answer within the limits, or refuses.
    pub fn event(&self) -> Result<Option<GceEvent>> {
        let metadata = Arc::clone(&self.metadata);
        http::converse(&self.settings, move |client| async move { event(&metadata, &client).await })
    }

    /// Returns whether an event has been announced, for functions that are called regularly. An error counts as no; the
    /// first one, and the first after a success, is a warning.
    pub fn is_announced(&self) -> bool {
        match self.event() {
            Ok(event) => {
                self.is_failing.store(false, Ordering::Relaxed);
                event.is_some()
            }
            Err(error) => {
                if !self.is_failing.swap(true, Ordering::Relaxed) {
                    tracing::warn!("whether this machine will be stopped is not known: {error}");
                }
                false
            }
        }
    }
}

async fn event(metadata: &Metadata, client: &Client) -> Result<Option<GceEvent>> {
    if metadata.value(client, "instance/maintenance-event").await? == TERMINATE {
        return Ok(Some(GceEvent::HostMaintenance));
    }
    let preempted = metadata.find(client, "instance/preempted").await?;
    Ok((preempted.as_deref() == Some(TRUE)).then_some(GceEvent::Preemption))
}

/// The value of `maintenance-event` of a machine that is stopped; others are `NONE` and
/// `MIGRATE_ON_HOST_MAINTENANCE`.
const TERMINATE: &str = "TERMINATE_ON_HOST_MAINTENANCE";
const TRUE: &str = "TRUE";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::http::stand_in::{Answer, StandIn};

    const EVENT: &str = "/computeMetadata/v1/instance/maintenance-event";
    const PREEMPTED: &str = "/computeMetadata/v1/instance/preempted";

    fn server() -> StandIn {
        StandIn::start().on(EVENT, [Answer::metadata("NONE\n")]).on(PREEMPTED, [Answer::metadata("FALSE")])
    }

    fn machine(server: &StandIn) -> Result<GceMaintenance> {
        let host = server.host();
        let requests = RequestOptions::default().attempts(1).timeout(Duration::from_secs(20));
        GceMaintenance::from_vars(|name| (name == "GCE_METADATA_HOST").then(|| host.clone()), requests)
    }

    #[test]
    fn events_that_stop_the_machine_are_announced() {
        let server = server();
        let machine = machine(&server).unwrap();
        assert_eq!((machine.event().unwrap(), machine.is_announced()), (None, false));
        assert!(server.seen().iter().all(|seen| seen.header(http::FLAVOR) == "Google"));
        server.change(EVENT, Answer::metadata("MIGRATE_ON_HOST_MAINTENANCE"));
        assert_eq!(machine.event().unwrap(), None);
        server.change(EVENT, Answer::metadata("TERMINATE_ON_HOST_MAINTENANCE"));
        assert_eq!((machine.event().unwrap(), machine.is_announced()), (Some(GceEvent::HostMaintenance), true));
        server.change(EVENT, Answer::metadata("NONE"));
        server.change(PREEMPTED, Answer::metadata("TRUE\n"));
        assert_eq!((machine.event().unwrap(), machine.is_announced()), (Some(GceEvent::Preemption), true));
    }

    #[test]
    fn a_machine_of_others_is_an_error_when_it_is_first_asked() {
        let server = server();
        // Another server than the metadata server answers without its header.
        server.change(EVENT, Answer::text("<html>"));
        let error = machine(&server).unwrap_err().to_string();
        assert!(error.contains("instance/maintenance-event") && error.contains("not the metadata server"), "{error}");
        let error = GceMaintenance::from_vars(
            |name| (name == "GCE_METADATA_HOST").then(|| "a/b".to_owned()),
            RequestOptions::default(),
        );
        assert!(matches!(error, Err(crate::Error::Config { .. })));
    }

    #[test]
    fn a_server_that_fails_later_announces_nothing() {
        let server = server();
        let machine = machine(&server).unwrap();
        server.change(EVENT, Answer::status(503).header(http::FLAVOR, "Google"));
        assert!(machine.event().unwrap_err().to_string().contains("503"));
        assert!(!machine.is_announced() && machine.is_failing.load(Ordering::Relaxed));
        server.change(EVENT, Answer::metadata("TERMINATE_ON_HOST_MAINTENANCE"));
        assert!(machine.is_announced() && !machine.is_failing.load(Ordering::Relaxed));
        drop(server);
        assert!(!machine.is_announced());
    }
}
