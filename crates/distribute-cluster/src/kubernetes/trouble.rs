//! Failures of requests to the API server, and their sentences.

use std::time::Duration;

use distribute_types::FailureKind;

use super::KubernetesAccess;
use super::options::is_label;
use crate::Error;
use crate::error::seconds;
use crate::text::clean;

/// A request that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// The server answered with an error's status.
    Status {
        code: u16,
        message: String,
        /// The pause that the server asks for.
        retry_after: Option<Duration>,
    },
    /// The server's answer is incomplete or malformed.
    Unreadable(String),
    /// The server is not reached, or a connection broke.
    Connection(String),
    /// Nothing can be asked, for example because a credential plugin fails.
    Credentials(String),
    /// There was no answer in time.
    Silent,
}

impl Trouble {
    /// Returns whether the same request may succeed later.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Trouble::Status { code, .. } => matches!(code, 408 | 409 | 410 | 429 | 500..=599),
            // A certificate that is refused once is refused again.
            Trouble::Connection(reason) => !reason.contains("certificate"),
            Trouble::Unreadable(_) | Trouble::Silent => true,
            Trouble::Credentials(_) => false,
        }
    }

    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Trouble::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Returns whether the version that a watch starts at is too old, so that the pods must be listed again.
    pub(super) fn is_expired(&self) -> bool {
        matches!(self, Trouble::Status { code: 410, .. })
    }
}

/// A request that failed for good, with what a sentence about it needs.
#[derive(Debug)]
pub(super) struct Refusal<'a> {
    pub(super) trouble: &'a Trouble,
    /// The server's URL.
    pub(super) server: &'a str,
    pub(super) access: &'a KubernetesAccess,
    pub(super) namespace: &'a str,
    pub(super) selector: &'a str,
    /// How long the request was tried.
    pub(super) limit: Duration,
}

impl Refusal<'_> {
    pub(super) fn error(&self) -> Error {
        let (namespace, tried) = (self.namespace, format!("for {} s", seconds(&self.limit)));
        let (problem, remedy) = match self.trouble {
            Trouble::Status { code: 400, message, .. } => (
                format!("it does not accept the label selector {} (400: {})", self.selector, short(message)),
                "write selectors as key=value, separated by commas".to_owned(),
            ),
            Trouble::Status { code: 401, message, .. } => {
                (format!("it does not accept the credentials (401: {})", short(message)), self.renewal())
            }
            Trouble::Status { code: 403, message, .. } => (
                format!("pods of namespace {namespace} may not be listed or watched (403: {})", short(message)),
                format!(
                    "have this applied by `kubectl apply -f`:\n{}",
                    role(namespace, user(message), "distribute-pods", PODS)
                ),
            ),
            Trouble::Status { code: 404, message, .. } => (
                format!("it knows no pods of namespace {namespace} (404: {})", short(message)),
                "check the namespace, and that the URL is that of an API server of Kubernetes".to_owned(),
            ),
            Trouble::Status { code: 429, retry_after, .. } => {
                let asked = retry_after.map(|pause| format!(", and asks for a pause of {} s", seconds(&pause)));
                (
                    format!("it has refused requests as too many {tried} (429){}", asked.unwrap_or_default()),
                    "raise request_timeout, or start fewer programs at once".to_owned(),
                )
            }
            Trouble::Status { code, message, .. } => (
                format!("it has failed {tried} ({code}: {})", short(message)),
                "look at the cluster's control plane, or raise request_timeout".to_owned(),
            ),
            Trouble::Unreadable(reason) => (
                format!("its answers have not been lists of pods {tried}: {}", short(reason)),
                "check that the URL is that of an API server, and the proxies on the way".to_owned(),
            ),
            Trouble::Connection(reason) => (
                format!("it cannot be reached: {}", short(reason)),
                "check the URL, the certificate authority and the network policies".to_owned(),
            ),
            Trouble::Credentials(reason) => {
                (format!("there are no credentials for it: {}", short(reason)), self.renewal())
            }
            Trouble::Silent => (
                format!("it has not answered {tried}"),
                "check the URL and the network policies, or raise request_timeout".to_owned(),
            ),
        };
        let kind = match self.trouble.is_transient() {
            true => FailureKind::Retryable,
            false => FailureKind::Configuration,
        };
        Error::Kubernetes { server: clean(self.server, LONGEST), problem, remedy, kind }
    }

    /// Returns how other credentials are obtained.
    fn renewal(&self) -> String {
        match self.access {
            KubernetesAccess::ServiceAccount { folder } => format!(
                "check that the token in {} is mounted and valid: the pod needs automountServiceAccountToken",
                clean(&folder.display().to_string(), LONGEST)
            ),
            KubernetesAccess::Kubeconfig { .. } => format!(
                "renew the credentials of the kubeconfig's user until `kubectl get pods -n {}` works",
                self.namespace
            ),
            KubernetesAccess::Url(_) => "set access to a service account or a kubeconfig".to_owned(),
        }
    }
}

/// A request about the Lease of a register that failed for good.
#[cfg(feature = "coordination")]
#[derive(Debug)]
pub(super) struct LeaseRefusal<'a> {
    pub(super) trouble: &'a Trouble,
    /// The server's URL.
    pub(super) server: &'a str,
    pub(super) namespace: &'a str,
    /// The Lease's name.
    pub(super) name: &'a str,
    /// The attempted operation.
    pub(super) what: &'a str,
    /// How long the request was tried.
    pub(super) limit: Duration,
}

#[cfg(feature = "coordination")]
impl LeaseRefusal<'_> {
    pub(super) fn error(&self) -> Error {
        let LeaseRefusal { namespace, name, what, .. } = self;
        let tried = format!("for {} s", seconds(&self.limit));
        let (problem, remedy) = match self.trouble {
            Trouble::Status { code: 401, message, .. } => (
                format!("it does not accept the credentials (401: {})", short(message)),
                "check that the pod's token is mounted and valid: the pod needs automountServiceAccountToken"
                    .to_owned(),
            ),
            Trouble::Status { code: 403, message, .. } => (
                format!(
                    "this process may not {what} the Lease {name} of namespace {namespace} (403: {})",
                    short(message)
                ),
                format!(
                    "have this applied by `kubectl apply -f`:\n{}",
                    role(namespace, user(message), "distribute-generations", LEASES)
                ),
            ),
            Trouble::Status { code: 404, message, .. } => (
                format!("it knows no Leases of namespace {namespace} (404: {})", short(message)),
                "check the namespace, and that the URL is that of an API server of Kubernetes".to_owned(),
            ),
            Trouble::Status { code, message, .. } => (
                format!("it could not {what} the Lease {name} {tried} ({code}: {})", short(message)),
                "look at the cluster's control plane".to_owned(),
            ),
            Trouble::Unreadable(reason) => (
                format!("its answers have not been Leases {tried}: {}", short(reason)),
                "check that the URL is that of an API server, and the proxies on the way".to_owned(),
            ),
            Trouble::Connection(reason) | Trouble::Credentials(reason) => (
                format!("it cannot be asked to {what} the Lease {name}: {}", short(reason)),
                "check the service account, the certificate authority and the network policies".to_owned(),
            ),
            Trouble::Silent => (
                format!("it has not answered {tried}, asked to {what} the Lease {name}"),
                "look at the cluster's control plane and the network policies".to_owned(),
            ),
        };
        let kind = match self.trouble.is_transient() {
            true => FailureKind::Retryable,
            false => FailureKind::Configuration,
        };
        Error::Kubernetes { server: clean(self.server, LONGEST), problem, remedy, kind }
    }
}

/// A user of the API server.
#[derive(Debug, PartialEq, Eq)]
enum User<'a> {
    ServiceAccount { namespace: &'a str, name: &'a str },
    Other(&'a str),
    Unknown,
}

/// Returns the user that the message of a refusal names, as in `pods is forbidden: User "alice" cannot list …`.
fn user(message: &str) -> User<'_> {
    let is_plain = |c: u8| c.is_ascii_alphanumeric() || b":-._@/".contains(&c);
    let user = message.split_once("User \"").and_then(|(_, rest)| Some(rest.split_once('"')?.0));
    let Some(user) = user.filter(|user| (1..=253).contains(&user.len()) && user.bytes().all(is_plain)) else {
        return User::Unknown;
    };
    match user.strip_prefix("system:serviceaccount:").and_then(|account| account.split_once(':')) {
        Some((namespace, name)) if is_label(namespace) && name.split('.').all(is_label) => {
            User::ServiceAccount { namespace, name }
        }
        _ => User::Other(user),
    }
}

/// Returns a Role with these rules, and its RoleBinding.
fn role(namespace: &str, user: User<'_>, name: &str, rules: &str) -> String {
    let subject = match user {
        User::ServiceAccount { namespace, name } => {
            format!("- kind: ServiceAccount\n  name: {name}\n  namespace: {namespace}")
        }
        User::Other(user) => format!("- kind: User\n  name: \"{user}\"\n  apiGroup: rbac.authorization.k8s.io"),
        User::Unknown => format!(
            "- kind: ServiceAccount\n  name: default # the serviceAccountName of the pods\n  namespace: {namespace}"
        ),
    };
    format!(
        "apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {name}
  namespace: {namespace}
rules:
{rules}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {name}
  namespace: {namespace}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {name}
subjects:
{subject}
"
    )
}

/// The rules for the resolver.
const PODS: &str = "- apiGroups: [\"\"]\n  resources: [pods]\n  verbs: [get, list, watch]";

/// The rules for a register.
#[cfg(feature = "coordination")]
const LEASES: &str = "- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, create, update]
- apiGroups: [\"\"]
  resources: [pods]
  verbs: [get]";

pub(super) fn short(text: &str) -> String {
    clean(text.trim(), LONGEST)
}

/// Length limit of a text of the server in a message, in characters.
const LONGEST: usize = 400;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_read_from_refusals() {
        let named = |user: &str| format!("pods is forbidden: User \"{user}\" cannot list resource \"pods\"");
        let account = named("system:serviceaccount:team-1:train.v2");
        assert_eq!(user(&account), User::ServiceAccount { namespace: "team-1", name: "train.v2" });
        assert_eq!(user(&named("alice@example.org")), User::Other("alice@example.org"));
        // What could not be a name is not put into YAML.
        assert_eq!(user(&named("a\n- kind: Group")), User::Unknown);
        assert_eq!(user(&named("system:serviceaccount:Team:x")), User::Other("system:serviceaccount:Team:x"));
        assert_eq!(user("forbidden"), User::Unknown);
    }

    #[test]
    fn roles_name_their_subject() {
        let text = role("team", User::ServiceAccount { namespace: "other", name: "train" }, "distribute-pods", PODS);
        assert!(text.contains("subjects:\n- kind: ServiceAccount\n  name: train\n  namespace: other\n"), "{text}");
        assert_eq!(text.matches("\n  namespace: team\n").count(), 2, "{text}");
        assert!(role("team", User::Other("a:b"), "distribute-pods", PODS).contains("- kind: User\n  name: \"a:b\"\n"));
        assert!(
            role("team", User::Unknown, "distribute-pods", PODS).contains("name: default # the serviceAccountName")
        );
    }

    #[test]
    fn only_what_may_pass_is_retried() {
        let status = |code| Trouble::Status { code, message: String::new(), retry_after: None };
        for code in [400, 401, 403, 404, 422] {
            assert!(!status(code).is_transient(), "{code}");
        }
        for code in [410, 429, 500, 503, 504] {
            assert!(status(code).is_transient(), "{code}");
        }
        assert!(status(410).is_expired() && !status(500).is_expired());
        assert!(Trouble::Connection("refused".to_owned()).is_transient());
        assert!(!Trouble::Connection("invalid peer certificate: UnknownIssuer".to_owned()).is_transient());
        assert!(!Trouble::Credentials(String::new()).is_transient());
    }
}
