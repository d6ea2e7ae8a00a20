//! One post to Kubeflow's status server: its token, its TLS and its answer.

use std::error::Error as _;
use std::fs::File;
use std::io::Read;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use reqwest::{Response, StatusCode, Url};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use serde::Deserialize;

use crate::progress::one_line;
use crate::{Error, Result};

/// Where the status is posted to.
#[derive(Clone, Debug)]
pub(super) struct Target {
    url: Url,
    /// The file with the certificates of the server's authority.
    authority: PathBuf,
    /// The file with the token.
    token: PathBuf,
}

/// A post that is not accepted.
#[derive(Debug)]
pub(super) struct Refusal {
    /// The reason and its remedy.
    pub(super) problem: String,
    /// Whether the same post may be accepted later.
    pub(super) is_passing: bool,
}

/// Posts to a target.
pub(super) struct Client {
    target: Target,
    timeout: Duration,
    /// The client, and the certificates that it trusts.
    http: Option<(Vec<u8>, reqwest::Client)>,
}

impl Target {
    /// # Errors
    /// [`Error::KubeflowUrl`] if it is not a URL, or if the token would not be encrypted.
    pub(super) fn new(url: &str, authority: PathBuf, token: PathBuf) -> Result<Target> {
        let failed = |problem: String| Error::KubeflowUrl { given: url.to_owned(), problem };
        let parsed = Url::parse(url.trim()).map_err(|error| failed(error.to_string()))?;
        match parsed.scheme() {
            "https" => {}
            "http" if is_here(&parsed) => {}
            "http" => return Err(failed("the token would be sent without TLS".to_owned())),
            scheme => return Err(failed(format!("nothing is posted by {scheme}"))),
        }
        Ok(Target { url: parsed, authority, token })
    }

    /// Returns the server for messages.
    fn server(&self) -> String {
        let host = self.url.host_str().unwrap_or_default();
        self.url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"))
    }
}

impl Client {
    /// Creates a client with a limit for each post.
    pub(super) fn new(target: Target, timeout: Duration) -> Client {
        Client { target, timeout, http: None }
    }

    /// Posts JSON, with the token and the certificates that the files have now.
    ///
    /// # Errors
    /// [`Refusal`] if the server does not accept it, or cannot be asked.
    pub(super) async fn post(&mut self, body: &[u8]) -> Result<(), Refusal> {
        let token = authorization(&self.target.token)?;
        let authority = read(&self.target.authority, MOST_AUTHORITY_BYTES)?;
        let known = self.http.take().filter(|(known, _)| *known == authority);
        let known = match known {
            Some(known) => known,
            None => {
                let http = connector(&authority, &self.target.authority, self.timeout)?;
                (authority, http)
            }
        };
        let (_, http) = self.http.insert(known);
        let request = http.post(self.target.url.clone()).header(AUTHORIZATION, token);
        let request = request.header(CONTENT_TYPE, "application/json").body(body.to_vec());
        let response = request.send().await.map_err(|error| self.broken(error))?;
        let status = response.status();
        // The whole answer is read, so that its connection can be used again.
        let answer = answer(response).await.map_err(|error| self.broken(error))?;
        if status.is_success() { Ok(()) } else { Err(self.refused(status, &answer)) }
    }

    /// Returns the refusal of a request that has no answer.
    fn broken(&self, error: reqwest::Error) -> Refusal {
        let server = self.target.server();
        if error.is_timeout() {
            let seconds = self.timeout.as_secs_f64();
            return Refusal { problem: format!("{server} does not answer within {seconds:.1} s"), is_passing: true };
        }
        let error = error.without_url();
        let mut problem = format!("{server} cannot be reached: {error}");
        let mut cause = error.source();
        while let Some(error) = cause {
            problem.push_str(&format!(": {error}"));
            cause = error.source();
        }
        Refusal { problem: one_line(&problem), is_passing: true }
    }

    /// Returns the refusal that an answer expresses.
    fn refused(&self, status: StatusCode, answer: &[u8]) -> Refusal {
        let server = self.target.server();
        let message = serde_json::from_slice(answer).map_or(String::new(), |Status { message }| message);
        let message: String = one_line(&message).chars().take(LONGEST_MESSAGE).collect();
        let message = if message.is_empty() { message } else { format!(" ({message})") };
        let remedy = match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                "see whether the token is the one that Kubeflow Trainer mounts for this TrainJob"
            }
            StatusCode::NOT_FOUND => "see whether the TrainJob exists, and whether the URL is that of its status",
            StatusCode::UNPROCESSABLE_ENTITY => "see whether this version of Kubeflow Trainer takes other fields",
            status if status.is_server_error() => "see the log of Kubeflow Trainer's controller",
            _ => "see whether the URL is that of Kubeflow Trainer's status server",
        };
        let is_passing = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
        Refusal { problem: format!("{server} answers {status}{message}; {remedy}"), is_passing }
    }
}

/// The message of `metav1.Status`, with which Kubernetes' servers answer a request that fails.
#[derive(Deserialize)]
struct Status {
    message: String,
}

/// Returns a client for a server whose certificate is signed by an authority.
fn connector(pem: &[u8], path: &Path, timeout: Duration) -> Result<reqwest::Client, Refusal> {
    let unusable = |error: String| refusal(path, &format!("no certificate can be read from it: {error}"));
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(certificates.map_err(|error| unusable(error.to_string()))?);
    if added == 0 {
        return Err(unusable("it has none in PEM".to_owned()));
    }
    // A library does not choose the provider of the whole process.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(|error| unusable(error.to_string()))?;
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let agent = concat!("distribute-train/", env!("CARGO_PKG_VERSION"));
    // The server is in the same cluster, and does not redirect: a redirect would carry the token elsewhere.
    let builder = reqwest::Client::builder().user_agent(agent).no_proxy().redirect(reqwest::redirect::Policy::none());
    let client = builder.http1_only().timeout(timeout).tls_backend_preconfigured(config).build();
    client.map_err(|error| unusable(error.to_string()))
}

/// Returns the header of the token.
fn authorization(path: &Path) -> Result<HeaderValue, Refusal> {
    let token = read(path, MOST_TOKEN_BYTES)?;
    let token = token.trim_ascii();
    if token.is_empty() {
        return Err(refusal(path, "it has no token"));
    }
    let header = HeaderValue::from_bytes(&[b"Bearer ", token].concat());
    let mut header = header.map_err(|_| refusal(path, "its token has characters that no header can carry"))?;
    header.set_sensitive(true);
    Ok(header)
}

/// Reads a file that Kubernetes mounts, up to a limit.
fn read(path: &Path, limit_bytes: u64) -> Result<Vec<u8>, Refusal> {
    let mut bytes = Vec::new();
    let outcome = File::open(path).and_then(|file| file.take(limit_bytes + 1).read_to_end(&mut bytes));
    match outcome {
        Ok(length) if length as u64 > limit_bytes => Err(refusal(path, &format!("it has over {limit_bytes} bytes"))),
        Ok(_) => Ok(bytes),
        Err(error) => Err(refusal(path, &error.to_string())),
    }
}

fn refusal(path: &Path, problem: &str) -> Refusal {
    let path = path.display();
    let problem = format!("{path}: {problem}; see whether Kubeflow Trainer's volume is mounted there");
    Refusal { problem: one_line(&problem), is_passing: false }
}

/// Reads an answer, of which all that exceeds a limit is left.
async fn answer(mut response: Response) -> reqwest::Result<Vec<u8>> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if body.len() + chunk.len() > MOST_ANSWER_BYTES {
            break;
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// Returns whether a URL's host is this machine.
fn is_here(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    host == "localhost" || host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Larger than any token of Kubernetes.
const MOST_TOKEN_BYTES: u64 = 64 * 1024;

/// `ConfigMap`s have at most 1 MiB.
const MOST_AUTHORITY_BYTES: u64 = 1024 * 1024;

/// The server answers with the status that it was sent, which has at most 64 KiB, in another form.
const MOST_ANSWER_BYTES: usize = 128 * 1024;

/// Length limit of a server's message in a warning, in characters.
const LONGEST_MESSAGE: usize = 200;
