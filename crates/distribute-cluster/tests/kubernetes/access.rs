//! How the API server is found: a service account, a kubeconfig, a URL.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use distribute_cluster::{
    KubernetesAccess, KubernetesLocation, KubernetesOptions, KubernetesResolver, Result, TaskType,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

use super::server::Server;
use super::{addresses, pod, resolve_with, text};

const WORKER: TaskType = TaskType::Worker;

fn looking_once() -> KubernetesOptions {
    KubernetesOptions::default().wait(Duration::ZERO).request_timeout(Duration::from_secs(5))
}

/// A server for 127.0.0.1 by TLS, and the certificate of its authority.
fn tls_server() -> (Server, String) {
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap().signed_by(&key, &authority).unwrap();
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .unwrap();
    (Server::start_with(Some(Arc::new(config))), authority.pem())
}

fn mount(folder: &Path, authority: &str) {
    for (name, text) in [("token", "secret"), ("ca.crt", authority), ("namespace", "team\n")] {
        fs::write(folder.join(name), text).unwrap();
    }
}

fn in_cluster(folder: &Path, port: u16) -> Result<KubernetesResolver> {
    let port = port.to_string();
    let variables = [("KUBERNETES_SERVICE_HOST", "127.0.0.1"), ("KUBERNETES_SERVICE_PORT", port.as_str())];
    let access = KubernetesAccess::ServiceAccount { folder: folder.to_owned() };
    resolve_with(&variables, looking_once().access(Some(access)))
}

#[test]
fn a_service_account_is_used_over_tls() {
    let (server, authority) = tls_server();
    let folder = tempfile::tempdir().unwrap();
    mount(folder.path(), &authority);
    server.put_in("team", pod("distribute-0", "distribute", 1));
    let resolver = in_cluster(folder.path(), server.port()).unwrap();
    assert_eq!(addresses(&resolver, WORKER), ["10.1.0.1:8470"]);
    assert_eq!(server.requests()[0].authorization.as_deref(), Some("Bearer secret"));
}

#[test]
fn a_certificate_of_another_authority_is_refused_at_once() {
    let (server, _) = tls_server();
    let (_other, authority) = tls_server();
    let folder = tempfile::tempdir().unwrap();
    mount(folder.path(), &authority);
    let begin = Instant::now();
    let text = text(in_cluster(folder.path(), server.port()));
    assert!(text.contains("it cannot be reached: ") && text.contains("certificate"), "{text}");
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    assert_eq!(server.requests(), []);
}

#[test]
fn a_service_account_that_is_incomplete_is_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let missing = text(in_cluster(folder.path(), 1));
    assert!(missing.contains("token of the service account cannot be read"), "{missing}");
    mount(folder.path(), "no certificate");
    fs::write(folder.path().join("namespace"), "../x").unwrap();
    let namespace = text(in_cluster(folder.path(), 1));
    assert!(namespace.contains("the namespace is not a name. Given: ../x"), "{namespace}");
    let outside = text(resolve_with(&[], looking_once()));
    assert!(outside.contains("KUBERNETES_SERVICE_HOST is not set"), "{outside}");
    let url = Some(KubernetesAccess::Url("localhost:8001".to_owned()));
    assert!(text(resolve_with(&[], looking_once().access(url))).contains("access is not a URL"));
}

/// A kubeconfig with two contexts: `here` with the namespace `team` and a token, and `nowhere`.
fn kubeconfig(server: &str, current: &str) -> String {
    format!(
        "apiVersion: v1
kind: Config
current-context: {current}
clusters:
- name: c
  cluster: {{server: \"{server}\"}}
- name: none
  cluster: {{server: \"http://127.0.0.1:1\"}}
users:
- name: u
  user: {{token: renewed}}
contexts:
- name: here
  context: {{cluster: c, user: u, namespace: team}}
- name: nowhere
  context: {{cluster: none, user: u}}
"
    )
}

#[test]
fn a_kubeconfig_has_contexts() {
    let server = Server::start();
    server.put_in("team", pod("distribute-0", "distribute", 1));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config");
    fs::write(&file, kubeconfig(&server.url(), "nowhere")).unwrap();
    let by = |file: Option<&Path>, context: Option<&str>| KubernetesAccess::Kubeconfig {
        file: file.map(Path::to_owned),
        context: context.map(str::to_owned),
    };
    let off = || looking_once().location(KubernetesLocation::OffCluster);
    let resolver = resolve_with(&[], off().access(Some(by(Some(&file), Some("here"))))).unwrap();
    assert_eq!(addresses(&resolver, WORKER), ["10.9.0.1:8470"]);
    assert_eq!(server.requests()[0].authorization.as_deref(), Some("Bearer renewed"));
    let unknown = text(resolve_with(&[], off().access(Some(by(Some(&file), Some("x"))))));
    assert!(unknown.contains("the kubeconfig cannot be used") && unknown.contains("context"), "{unknown}");

    // KUBECONFIG is a list of files, of which the first decides.
    let first = folder.path().join("first");
    fs::write(&first, "current-context: here\n").unwrap();
    let list = std::env::join_paths([&first, &file]).unwrap().into_string().unwrap();
    assert!(resolve_with(&[("KUBECONFIG", &list)], off()).is_ok());
    fs::create_dir(folder.path().join(".kube")).unwrap();
    fs::write(folder.path().join(".kube").join("config"), kubeconfig(&server.url(), "here")).unwrap();
    let home = folder.path().to_str().unwrap();
    assert!(resolve_with(&[("HOME", home)], off()).is_ok());
    // The option overrides the context's namespace.
    assert!(
        text(resolve_with(&[("HOME", home)], off().namespace(Some("other".to_owned())))).contains("namespace other")
    );
}

#[test]
fn a_kubeconfig_that_is_wrong_is_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let off = || looking_once().location(KubernetesLocation::OffCluster);
    assert!(text(resolve_with(&[], off())).contains("neither KUBECONFIG nor the home directory is set"));
    let file = folder.path().join("config");
    let path = file.to_str().unwrap();
    let missing = text(resolve_with(&[("KUBECONFIG", path)], off()));
    assert!(missing.contains("the kubeconfig cannot be used") && missing.contains(path), "{missing}");
    fs::write(&file, "{").unwrap();
    assert!(text(resolve_with(&[("KUBECONFIG", path)], off())).contains("the kubeconfig cannot be used"));
}

/// A kubeconfig whose credentials a command prints.
#[cfg(unix)]
fn by_command(command: &str) -> (tempfile::TempDir, KubernetesOptions) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config");
    let user = format!(
        "user: {{exec: {{apiVersion: client.authentication.k8s.io/v1, command: sh, args: [-c, \"{command}\"], \
         interactiveMode: Never}}}}"
    );
    fs::write(&file, kubeconfig("http://127.0.0.1:1", "here").replace("user: {token: renewed}", &user)).unwrap();
    let access = KubernetesAccess::Kubeconfig { file: Some(file), context: None };
    (folder, looking_once().access(Some(access)))
}

#[cfg(unix)]
#[test]
fn a_credential_plugin_may_fail_or_hang() {
    let (_folder, options) = by_command("exit 3");
    let failed = text(resolve_with(&[], options));
    assert!(failed.contains("there are no credentials for it") && failed.contains("renew the credentials"), "{failed}");
    let (_folder, options) = by_command("sleep 5");
    let begin = Instant::now();
    let hanging = text(resolve_with(&[], options.request_timeout(Duration::from_millis(100))));
    assert!(
        hanging.contains("the API server of Kubernetes: it is not asked within 0.1 s; look at credential plugins"),
        "{hanging}"
    );
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
}
