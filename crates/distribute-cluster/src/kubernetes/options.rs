//! Settings of the resolver of pods.

use std::path::PathBuf;
use std::time::Duration;

use crate::{Error, Result, Task, TaskType};

/// Settings of a [`KubernetesResolver`](crate::KubernetesResolver).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KubernetesOptions {
    /// The jobs of the cluster, each with the label selectors of its pods, in the order in which their pods are
    /// numbered. Default: pods with the label `job-name=distribute` are workers.
    pub jobs: Vec<(TaskType, Vec<String>)>,
    /// The number of pods of each job. The pods of a job without a number are those that exist when the API server is
    /// asked, which may be fewer than there will be; ended pods are ignored only in a job with a number. Default: none.
    pub expected: Vec<(TaskType, u32)>,
    /// The port of every task. Default: 8470, as in TensorFlow.
    pub port: u16,
    /// Where this process runs, which decides the addresses of the pods and how the API server is found. Default: in
    /// the cluster.
    pub location: KubernetesLocation,
    /// How the API server is reached. Default: by the pod's service account in the cluster, by the kubeconfig off it.
    pub access: Option<KubernetesAccess>,
    /// The namespace of the pods. Default: that of the service account, or of the kubeconfig's context.
    pub namespace: Option<String>,
    /// This process's task. Default: that of its own pod.
    pub task: Option<Task>,
    /// The name of this process's own pod. Default: the pod that POD_NAME, POD_IP or HOSTNAME identifies.
    pub pod: Option<String>,
    /// How long pods that are missing or not running are waited for; zero looks once. Default: 5 min.
    pub wait: Duration,
    /// How long the API server may fail, or be silent, before that is an error, retries included. Default: 30 s, from
    /// 1 ms.
    pub request_timeout: Duration,
}

/// Where a process runs.
///
/// # Source
/// `tf.distribute.cluster_resolver.KubernetesExecutableLocation`, which decides the credentials only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KubernetesLocation {
    /// In a pod: tasks have the addresses of their pods.
    #[default]
    WithinCluster,
    /// Elsewhere: tasks have the addresses of their nodes, on which the port must be open, for example as `hostPort`.
    OffCluster,
}

/// How the API server is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KubernetesAccess {
    /// The server at KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT, by the `token`, `ca.crt` and `namespace` of a
    /// folder.
    ServiceAccount {
        /// The folder.
        folder: PathBuf,
    },
    /// The server of a kubeconfig.
    Kubeconfig {
        /// The file. Default: the files of KUBECONFIG, else `.kube/config` in the home directory.
        file: Option<PathBuf>,
        /// The name of the context. Default: the current context of the file.
        context: Option<String>,
    },
    /// A server that needs no credentials, such as `kubectl proxy`, by its URL.
    Url(String),
}

impl KubernetesAccess {
    /// Returns the access by the service account that Kubernetes mounts into a pod.
    pub fn service_account() -> KubernetesAccess {
        KubernetesAccess::ServiceAccount { folder: PathBuf::from("/var/run/secrets/kubernetes.io/serviceaccount") }
    }

    /// Returns the access by the current context of the user's kubeconfig.
    pub fn kubeconfig() -> KubernetesAccess {
        KubernetesAccess::Kubeconfig { file: None, context: None }
    }
}

impl Default for KubernetesOptions {
    fn default() -> KubernetesOptions {
        KubernetesOptions {
            jobs: Vec::new(),
            expected: Vec::new(),
            port: 8470,
            location: KubernetesLocation::WithinCluster,
            access: None,
            namespace: None,
            task: None,
            pod: None,
            wait: Duration::from_secs(300),
            request_timeout: Duration::from_secs(30),
        }
    }
}

distribute_types::setters! {
    KubernetesOptions {
        jobs: Vec<(TaskType, Vec<String>)>,
        expected: Vec<(TaskType, u32)>,
        port: u16,
        location: KubernetesLocation,
        access: Option<KubernetesAccess>,
        namespace: Option<String>,
        task: Option<Task>,
        pod: Option<String>,
        wait: Duration,
        request_timeout: Duration,
    }
}

impl KubernetesOptions {
    /// Adds a job with the label selectors of its pods; the first one replaces the default.
    #[must_use]
    pub fn job<S: Into<String>>(mut self, kind: TaskType, selectors: impl IntoIterator<Item = S>) -> KubernetesOptions {
        self.jobs.push((kind, selectors.into_iter().map(Into::into).collect()));
        self
    }

    pub(super) fn chosen_access(&self) -> KubernetesAccess {
        self.access.clone().unwrap_or_else(|| match self.location {
            KubernetesLocation::WithinCluster => KubernetesAccess::service_account(),
            KubernetesLocation::OffCluster => KubernetesAccess::kubeconfig(),
        })
    }

    /// Checks the options, and replaces what stands for a default.
    pub(super) fn checked(mut self) -> Result<KubernetesOptions> {
        if self.jobs.is_empty() {
            self = self.job(TaskType::Worker, [DEFAULT_SELECTOR]);
        }
        let example = "a job with label selectors, such as worker with job-name=train";
        for (place, (kind, selectors)) in self.jobs.iter().enumerate() {
            if self.jobs[..place].iter().any(|(other, _)| other == kind) {
                return Err(wrong(
                    "jobs",
                    "a job is given twice",
                    kind.name(),
                    "each job once, with all its selectors",
                ));
            }
            if selectors.is_empty() || selectors.iter().any(|selector| selector.trim().is_empty()) {
                let problem = "a job has no label selector, or an empty one, which selects every pod";
                return Err(wrong("jobs", problem, kind.name(), example));
            }
        }
        for (place, (kind, count)) in self.expected.iter().enumerate() {
            let given = format!("{count} for {kind}");
            if self.jobs.iter().all(|(job, _)| job != kind) {
                let jobs: Vec<&str> = self.jobs.iter().map(|(kind, _)| kind.name()).collect();
                return Err(wrong("expected", "it names a job without selectors", &given, &jobs.join(", ")));
            }
            if *count == 0 || self.expected[..place].iter().any(|(other, _)| other == kind) {
                return Err(wrong("expected", "it is zero, or given twice", &given, "one number from 1 for each job"));
            }
        }
        if let Some(namespace) = self.namespace.as_ref().filter(|namespace| !is_label(namespace)) {
            let expected = "lower-case letters, digits and -, at most 63 characters";
            return Err(wrong("namespace", "it is not the name of a namespace", namespace, expected));
        }
        if self.port == 0 {
            return Err(wrong("port", "it is not a port", "0", "a number from 1 to 65535"));
        }
        self.wait = self.wait.min(LONGEST);
        self.request_timeout = self.request_timeout.clamp(Duration::from_millis(1), LONGEST);
        Ok(self)
    }

    /// Returns the number of pods that a job is to have.
    pub(super) fn expected_of(&self, kind: TaskType) -> Option<usize> {
        self.expected.iter().find(|(job, _)| *job == kind).map(|(_, count)| *count as usize)
    }
}

/// Returns whether a text is the name of a namespace (a label of RFC 1123).
pub(super) fn is_label(text: &str) -> bool {
    let is_inner = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
    (1..=63).contains(&text.len()) && text.bytes().all(is_inner) && !text.starts_with('-') && !text.ends_with('-')
}

fn wrong(option: &str, problem: &str, given: &str, expected: &str) -> Error {
    Error::config("Kubernetes", format!("{option}: {problem}"), given, expected, "Correct the option.")
}

const DEFAULT_SELECTOR: &str = "job-name=distribute";

/// Limit of a wait: sums of instants and durations stay within their range.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_checked() {
        let options = KubernetesOptions::default;
        let checked = options().checked().unwrap();
        assert_eq!(checked.jobs, [(TaskType::Worker, vec!["job-name=distribute".to_owned()])]);
        assert_eq!(checked.chosen_access(), KubernetesAccess::service_account());
        assert_eq!(options().location(KubernetesLocation::OffCluster).chosen_access(), KubernetesAccess::kubeconfig());
        let worker = || options().job(TaskType::Worker, ["a=b"]);
        assert_eq!(worker().expected(vec![(TaskType::Worker, 3)]).expected_of(TaskType::Worker), Some(3));
        assert_eq!(options().request_timeout(Duration::ZERO).checked().unwrap().request_timeout.as_millis(), 1);
        assert_eq!(options().wait(Duration::MAX).checked().unwrap().wait, LONGEST);
        for (options, words) in [
            (worker().job(TaskType::Worker, ["c"]), "jobs: a job is given twice. Given: worker"),
            (options().job(TaskType::Ps, [" "]), "a job has no label selector, or an empty one"),
            (options().job(TaskType::Ps, Vec::<String>::new()), "a job has no label selector"),
            (worker().expected(vec![(TaskType::Ps, 1)]), "expected: it names a job without selectors"),
            (worker().expected(vec![(TaskType::Worker, 0)]), "it is zero, or given twice"),
            (worker().expected(vec![(TaskType::Worker, 1), (TaskType::Worker, 1)]), "it is zero, or given twice"),
            (options().namespace(Some("../x".to_owned())), "namespace: it is not the name of a namespace"),
            (options().port(0), "port: it is not a port"),
        ] {
            let text = options.checked().unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn names_of_namespaces() {
        for (name, valid) in [("a", true), ("team-1", true), ("", false), ("-a", false), ("a-", false), ("A", false)] {
            assert_eq!(is_label(name), valid, "{name}");
        }
        assert!(is_label(&"a".repeat(63)) && !is_label(&"a".repeat(64)));
    }
}
