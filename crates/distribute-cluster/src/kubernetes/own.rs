//! Finds a process's own pod.

use super::cluster::Cluster;
use super::{KubernetesOptions, Variables};
use crate::{Error, Result, Task};

/// Returns this process's task: that of the options, else that of its own pod, if it is one of the cluster's.
///
/// # Errors
/// [`Error::Config`] if a pod is named, by the option or by POD_NAME, that the cluster does not have.
pub(super) fn task(options: &KubernetesOptions, variables: &Variables, cluster: &Cluster) -> Result<Option<Task>> {
    if options.task.is_some() {
        return Ok(options.task);
    }
    let find = |is_own: &dyn Fn(&(Task, super::pod::Pod)) -> bool| {
        let mut found = cluster.pods.iter().filter(|pod| is_own(pod));
        // Of several pods that could be this one, none is taken.
        found.next().filter(|_| found.next().is_none()).map(|(task, _)| *task)
    };
    let named = [("pod", options.pod.as_ref()), ("POD_NAME", variables.pod_name.as_ref())];
    if let Some((source, name)) = named.into_iter().find_map(|(source, name)| Some((source, name?))) {
        return match find(&|(_, pod)| pod.metadata.name == *name) {
            Some(task) => Ok(Some(task)),
            None => {
                let names: Vec<&str> = cluster.pods.iter().map(|(_, pod)| pod.metadata.name.as_str()).collect();
                let problem = format!("{source} names a pod that the label selectors do not select");
                let remedy = "Correct the selectors, or set the task.";
                Err(Error::config("Kubernetes", problem, name, names.join(", "), remedy))
            }
        };
    }
    if let Some(ip) = &variables.pod_ip {
        let has_address = |ips: &k8s_openapi::api::core::v1::PodStatus| ips.pod_ip.as_ref() == Some(ip);
        if let Some(task) = find(&|(_, pod)| has_address(&pod.status)) {
            return Ok(Some(task));
        }
    }
    let Some(hostname) = &variables.hostname else { return Ok(None) };
    let task =
        find(&|(_, pod)| pod.spec.hostname.as_deref().unwrap_or_else(|| host_of(&pod.metadata.name)) == hostname);
    if task.is_none() {
        tracing::warn!(
            "HOSTNAME={} is not the host name of one of the cluster's pods, so this process's task is not known; set \
             the task, or POD_NAME by the downward API",
            crate::text::clean(hostname, 253)
        );
    }
    Ok(task)
}

/// Returns the host name that Kubernetes gives to a pod without one of its own: its name, cut to 63 characters.
fn host_of(name: &str) -> &str {
    name.get(..63).map_or(name, |name| name.trim_end_matches(['-', '.']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_cut() {
        assert_eq!(host_of("train-0"), "train-0");
        let long = format!("{}-{}", "a".repeat(62), "b".repeat(20));
        assert_eq!(host_of(&long), "a".repeat(62));
        assert_eq!(host_of(&"c".repeat(63)), "c".repeat(63));
    }
}
