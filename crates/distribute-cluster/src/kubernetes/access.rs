//! Finds the API server and the credentials for it.

use std::fs;
use std::path::PathBuf;

use kube::Config;
use kube::config::{KubeConfigOptions, Kubeconfig};

use super::api::chain;
use super::options::is_label;
use super::{KubernetesAccess, KubernetesOptions, Variables};
use crate::{Error, Result};

/// Returns how to reach the API server, and this process's own namespace. The default namespace is that of the pods.
///
/// # Errors
/// [`Error::Config`] if a variable or a file is missing or malformed.
pub(super) async fn config(options: &KubernetesOptions, variables: &Variables) -> Result<(Config, String)> {
    let mut config = match options.chosen_access() {
        KubernetesAccess::ServiceAccount { folder } => service_account(&folder, variables)?,
        KubernetesAccess::Kubeconfig { file, context } => kubeconfig(file, context, variables).await?,
        KubernetesAccess::Url(url) => at(&url, "access")?,
    };
    let own = config.default_namespace.clone();
    if let Some(namespace) = &options.namespace {
        config.default_namespace.clone_from(namespace);
    }
    if !is_label(&config.default_namespace) {
        let expected = "lower-case letters, digits and -, at most 63 characters";
        return Err(wrong("the namespace is not a name", &config.default_namespace, expected, "Set namespace."));
    }
    // Failures are retried here, with what the server says of them.
    config.default_retry = false;
    config.connect_timeout = Some(options.request_timeout);
    config.write_timeout = Some(options.request_timeout);
    Ok((config, own))
}

fn service_account(folder: &std::path::Path, variables: &Variables) -> Result<Config> {
    let remedy = "Run the program in a pod with a service account, or set access to a kubeconfig.";
    let variable = |name: &'static str, value: &Option<String>| {
        let missing = || wrong(&format!("{name} is not set"), &format!("no {name}"), "a pod's environment", remedy);
        value.clone().ok_or_else(missing)
    };
    let host = variable("KUBERNETES_SERVICE_HOST", &variables.service_host)?;
    let port = variable("KUBERNETES_SERVICE_PORT", &variables.service_port)?;
    let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host };
    let mut config = at(&format!("https://{host}:{port}"), "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT")?;
    let read = |name: &str| {
        let path = folder.join(name);
        let text = fs::read_to_string(&path).map_err(|error| {
            let problem = format!("{} of the service account cannot be read", path.display());
            wrong(&problem, &error.to_string(), "the mounted files token, ca.crt and namespace", remedy)
        })?;
        Ok::<_, Error>((path, text))
    };
    // The files are read again as they are renewed; here they are only tried.
    let (token, _) = read("token")?;
    let (authority, _) = read("ca.crt")?;
    let path = token.into_os_string().into_string();
    let not_text = |path: std::ffi::OsString| {
        wrong("the folder's name is not UTF-8", &path.to_string_lossy(), "a path in UTF-8", remedy)
    };
    config.auth_info.token_file = Some(path.map_err(not_text)?);
    config.root_cert_file = Some(authority);
    // Replaced by the file above; without any, the system's certificates would be read.
    config.root_cert = Some(Vec::new());
    config.default_namespace = read("namespace")?.1.trim().to_owned();
    Ok(config)
}

async fn kubeconfig(file: Option<PathBuf>, context: Option<String>, variables: &Variables) -> Result<Config> {
    let files: Vec<PathBuf> = match (file, &variables.kubeconfig, &variables.home) {
        (Some(file), _, _) => vec![file],
        (None, Some(list), _) => std::env::split_paths(list).filter(|path| !path.as_os_str().is_empty()).collect(),
        (None, None, Some(home)) => vec![PathBuf::from(home).join(".kube").join("config")],
        (None, None, None) => Vec::new(),
    };
    let shown: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    let shown = if shown.is_empty() { "no file".to_owned() } else { shown.join(", ") };
    let wrong = |problem: String| {
        let remedy = "Set KUBECONFIG or access, and try it by `kubectl config view`.";
        wrong(&format!("the kubeconfig cannot be used: {problem}"), &shown, "a file with the context", remedy)
    };
    if files.is_empty() {
        return Err(wrong("neither KUBECONFIG nor the home directory is set".to_owned()));
    }
    let mut merged = Kubeconfig::default();
    for file in &files {
        let next = Kubeconfig::read_from(file).map_err(|error| wrong(chain(&error)))?;
        merged = merged.merge(next).map_err(|error| wrong(chain(&error)))?;
    }
    let options = KubeConfigOptions { context, ..KubeConfigOptions::default() };
    Config::from_custom_kubeconfig(merged, &options).await.map_err(|error| wrong(chain(&error)))
}

fn at(url: &str, source: &str) -> Result<Config> {
    let expected = "a URL such as https://10.96.0.1:443";
    let wrong = || wrong(&format!("{source} is not a URL"), url, expected, "Correct it.");
    let is_http = url.starts_with("https://") || url.starts_with("http://");
    let uri = url.parse().ok().filter(|_| is_http).ok_or_else(wrong)?;
    Ok(Config::new(uri))
}

fn wrong(problem: &str, given: &str, expected: &str, remedy: &str) -> Error {
    Error::config("Kubernetes", problem, given, expected, remedy)
}
