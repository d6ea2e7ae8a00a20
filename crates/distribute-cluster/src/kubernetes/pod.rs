//! The part of a pod that the resolver reads.

use k8s_openapi::api::core::v1::PodStatus;
use serde::Deserialize;

use super::KubernetesLocation;
use crate::text::clean;

/// A pod, as the API server describes it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Pod {
    pub(super) metadata: Metadata,
    #[serde(default)]
    pub(super) spec: Spec,
    #[serde(default)]
    pub(super) status: PodStatus,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Metadata {
    pub(super) name: String,
    pub(super) resource_version: Option<String>,
    deletion_timestamp: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Spec {
    pub(super) hostname: Option<String>,
}

/// Whether a pod can be a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    Runs,
    /// It may run later.
    Waits,
    /// It will not run again; a controller may replace it.
    Ended,
}

impl Pod {
    pub(super) fn standing(&self, location: KubernetesLocation) -> Standing {
        match self.phase() {
            "Succeeded" | "Failed" => Standing::Ended,
            _ if self.metadata.deletion_timestamp.is_some() => Standing::Ended,
            "Running" if self.waiting_container().is_none() && self.host(location).is_some() => Standing::Runs,
            _ => Standing::Waits,
        }
    }

    fn phase(&self) -> &str {
        self.status.phase.as_deref().unwrap_or("Unknown")
    }

    /// Returns the IP address at which the pod's tasks are reached; an IPv6 address is in brackets.
    pub(super) fn host(&self, location: KubernetesLocation) -> Option<String> {
        let address = match location {
            KubernetesLocation::WithinCluster => self.status.pod_ip.as_ref(),
            KubernetesLocation::OffCluster => self.status.host_ip.as_ref(),
        };
        let address = address.filter(|address| !address.is_empty())?;
        Some(if address.contains(':') { format!("[{address}]") } else { address.clone() })
    }

    /// Returns the pod's state in words: `train-1 is Pending, container main waits: ImagePullBackOff (…)`.
    pub(super) fn described(&self, location: KubernetesLocation) -> String {
        let name = clean(&self.metadata.name, LONGEST);
        let phase = clean(self.phase(), LONGEST);
        let deleted = if self.metadata.deletion_timestamp.is_some() { ", being deleted" } else { "" };
        let details = self.waiting_container().or_else(|| self.unscheduled()).or_else(|| self.reason());
        match details {
            Some(details) => format!("{name} is {phase}{deleted}, {details}"),
            None if self.phase() == "Running" && self.host(location).is_none() => {
                format!("{name} is {phase}{deleted}, without an IP address")
            }
            None => format!("{name} is {phase}{deleted}"),
        }
    }

    /// Describes the first container that waits, preferably one that waits for more than the others.
    fn waiting_container(&self) -> Option<String> {
        let statuses = [&self.status.init_container_statuses, &self.status.container_statuses];
        let statuses = statuses.into_iter().flatten().flatten();
        let waiting = statuses.filter_map(|container| {
            let waiting = container.state.as_ref()?.waiting.as_ref()?;
            Some((&container.name, waiting.reason.as_deref().unwrap_or("no reason"), waiting.message.as_deref()))
        });
        let is_usual = |reason: &str| matches!(reason, "ContainerCreating" | "PodInitializing" | "no reason");
        let (name, reason, message) = waiting.min_by_key(|(_, reason, _)| is_usual(reason))?;
        let (name, reason) = (clean(name, LONGEST), clean(reason, LONGEST));
        Some(match message {
            Some(message) => format!("container {name} waits: {reason} ({})", clean(message, LONGEST)),
            None => format!("container {name} waits: {reason}"),
        })
    }

    /// Describes why no node has room for the pod.
    fn unscheduled(&self) -> Option<String> {
        let conditions = self.status.conditions.as_ref()?;
        let unscheduled = |kind: &str, status: &str| kind == "PodScheduled" && status == "False";
        let condition = conditions.iter().find(|condition| unscheduled(&condition.type_, &condition.status))?;
        let reason = clean(condition.reason.as_deref().unwrap_or("not scheduled"), LONGEST);
        let message = condition.message.as_deref().map(|message| format!(" ({})", clean(message, LONGEST)));
        Some(format!("{reason}{}", message.unwrap_or_default()))
    }

    fn reason(&self) -> Option<String> {
        let parts = [self.status.reason.as_deref(), self.status.message.as_deref()];
        let parts: Vec<String> = parts.into_iter().flatten().map(|part| clean(part, LONGEST)).collect();
        (!parts.is_empty()).then(|| parts.join(": "))
    }
}

/// Length limit of one part of a description, in characters.
const LONGEST: usize = 200;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const WITHIN: KubernetesLocation = KubernetesLocation::WithinCluster;

    fn pod(value: serde_json::Value) -> Pod {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn states_are_described() {
        let waiting = |reason: &str| {
            json!({"name": "main", "image": "i", "imageID": "", "ready": false,
            "restartCount": 0, "state": {"waiting": {"reason": reason, "message": "later"}}})
        };
        let named = |status: serde_json::Value| pod(json!({"metadata": {"name": "p"}, "status": status}));
        let running = json!({"phase": "Running", "podIP": "10.0.0.1", "hostIP": "fd00::1"});
        for (pod, standing, words) in [
            (named(running.clone()), Standing::Runs, "p is Running"),
            (named(json!({"phase": "Running"})), Standing::Waits, "p is Running, without an IP address"),
            (named(json!({})), Standing::Waits, "p is Unknown"),
            (pod(json!({"metadata": {"name": "p"}})), Standing::Waits, "p is Unknown"),
            (
                named(json!({"phase": "Running", "podIP": "10.0.0.1",
                    "containerStatuses": [waiting("CrashLoopBackOff")]})),
                Standing::Waits,
                "p is Running, container main waits: CrashLoopBackOff (later)",
            ),
            (
                named(json!({"phase": "Pending", "containerStatuses": [waiting("PodInitializing")],
                    "initContainerStatuses": [waiting("ImagePullBackOff")]})),
                Standing::Waits,
                "p is Pending, container main waits: ImagePullBackOff (later)",
            ),
            (
                named(json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False",
                    "reason": "Unschedulable", "message": "0/3 nodes"}]})),
                Standing::Waits,
                "p is Pending, Unschedulable (0/3 nodes)",
            ),
            (named(json!({"phase": "Failed", "reason": "Evicted"})), Standing::Ended, "p is Failed, Evicted"),
            (named(json!({"phase": "Succeeded"})), Standing::Ended, "p is Succeeded"),
            (
                pod(json!({"metadata": {"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"}, "status": running})),
                Standing::Ended,
                "p is Running, being deleted",
            ),
        ] {
            assert_eq!((pod.standing(WITHIN), pod.described(WITHIN).as_str()), (standing, words));
        }
        let both = named(running);
        assert_eq!(both.host(WITHIN).unwrap(), "10.0.0.1");
        assert_eq!(both.host(KubernetesLocation::OffCluster).unwrap(), "[fd00::1]");
    }
}
