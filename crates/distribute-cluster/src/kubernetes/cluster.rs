//! The tasks that a cluster's pods are.

use std::collections::BTreeMap;

use super::api::Pods;
use super::pod::{Pod, Standing};
use super::{KubernetesOptions, natural};
use crate::{ClusterSpec, Error, Result, Task, TaskType};

/// A cluster whose pods all run.
#[derive(Debug)]
pub(super) struct Cluster {
    pub(super) spec: ClusterSpec,
    /// The pods by their tasks.
    pub(super) pods: Vec<(Task, Pod)>,
}

/// Returns the jobs with their label selectors, in order.
pub(super) fn selectors(options: &KubernetesOptions) -> impl Iterator<Item = (TaskType, &String)> {
    options.jobs.iter().flat_map(|(kind, selectors)| selectors.iter().map(|selector| (*kind, selector)))
}

/// Returns the cluster of the pods of each selector, in the order of [`selectors`]; else what it lacks, in words.
///
/// # Errors
/// [`Error::Config`] if pods run that cannot be a cluster.
pub(super) fn cluster(options: &KubernetesOptions, pods: &[&Pods]) -> Result<std::result::Result<Cluster, String>> {
    let mut gaps = Vec::new();
    let mut selected = pods.iter();
    let mut jobs: Vec<(TaskType, Vec<&Pod>)> = Vec::new();
    for (kind, selectors) in &options.jobs {
        let expected = options.expected_of(*kind);
        let (mut runs, mut others) = (Vec::new(), Vec::new());
        for (selector, pods) in selectors.iter().zip(selected.by_ref()) {
            if pods.is_empty() && expected.is_none() {
                gaps.push(format!("{kind}: no pod has the labels {selector}"));
            }
            let mut pods: Vec<&Pod> = pods.values().collect();
            pods.sort_by(|a, b| natural::compare(&a.metadata.name, &b.metadata.name));
            for pod in pods {
                match pod.standing(options.location) {
                    Standing::Runs => runs.push(pod),
                    standing => others.push((pod, standing)),
                }
            }
        }
        // A controller replaces what has ended: it is not missed if there are as many pods as there are to be.
        let live = runs.len() + others.iter().filter(|(_, standing)| *standing == Standing::Waits).count();
        let is_complete = match expected {
            Some(expected) => runs.len() == expected && live == expected,
            None => others.is_empty(),
        };
        if !is_complete {
            gaps.push(gap(options, *kind, runs.len(), live, &others));
        }
        jobs.push((*kind, runs));
    }
    if !gaps.is_empty() {
        return Ok(Err(gaps.join("; ")));
    }
    built(options, jobs).map(Ok)
}

/// Describes the pods that a job lacks.
fn gap(
    options: &KubernetesOptions,
    kind: TaskType,
    running: usize,
    live: usize,
    others: &[(&Pod, Standing)],
) -> String {
    let mut parts = Vec::new();
    let expected = options.expected_of(kind);
    parts.push(match expected {
        Some(expected) if live > expected => format!("{kind}: {live} pods, but {expected} are expected"),
        Some(expected) => format!("{kind}: {running} of {expected} pods run"),
        None => format!("{kind}: {running} of {} pods run", running + others.len()),
    });
    parts.extend(others.iter().take(SHOWN).map(|(pod, _)| pod.described(options.location)));
    if others.len() > SHOWN {
        parts.push(format!("and {} more", others.len() - SHOWN));
    }
    match expected.map_or(0, |expected| expected.saturating_sub(live)) {
        0 => {}
        missing => {
            let selectors =
                options.jobs.iter().find(|(job, _)| *job == kind).map(|(_, selectors)| selectors.join(" or "));
            parts.push(format!("{missing} missing with the labels {}", selectors.unwrap_or_default()));
        }
    }
    parts.join(", ")
}

fn built(options: &KubernetesOptions, jobs: Vec<(TaskType, Vec<&Pod>)>) -> Result<Cluster> {
    let wrong = |problem: String, given: &str, expected: &str, remedy: &str| {
        Error::config("Kubernetes", problem, given, expected, remedy)
    };
    let (mut names, mut hosts) = (BTreeMap::new(), BTreeMap::new());
    let (mut spec, mut pods) = (ClusterSpec::new(), Vec::new());
    for (kind, members) in jobs {
        let mut addresses = Vec::new();
        for (index, pod) in (0u32..).zip(members) {
            let (task, name) = (Task::new(kind, index), pod.metadata.name.clone());
            if let Some(other) = names.insert(name.clone(), task) {
                let problem = format!("several selectors select the pod {name}, for {other} and for {task}");
                let selectors: Vec<&str> = selectors(options).map(|(_, selector)| selector.as_str()).collect();
                let expected = "selectors of which no two select one pod";
                return Err(wrong(problem, &selectors.join("; "), expected, "Correct jobs."));
            }
            let host = pod.host(options.location).unwrap_or_default();
            if let Some(other) = hosts.insert(host.clone(), name.clone()) {
                let problem = format!("the pods {other} and {name} have one address");
                let remedy = "Run the program in the cluster, or keep the pods on different nodes by anti-affinity.";
                return Err(wrong(problem, &host, "an address for each pod", remedy));
            }
            addresses.push(format!("{host}:{}", options.port));
            pods.push((task, pod.clone()));
        }
        spec = spec.with_job(kind, addresses).map_err(|error| error.about("Kubernetes"))?;
    }
    Ok(Cluster { spec, pods })
}

/// The most pods of a job that a message describes.
const SHOWN: usize = 16;
