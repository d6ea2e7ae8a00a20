//! Requests to a cloud, for callers that block.
//!
//! A call runs on a thread of its own with a runtime of its own, so that it works inside a runtime of the caller too.
//! Each has a deadline; TLS is rustls with ring, and a library does not choose the provider of the whole process.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant, SystemTime};

use backon::{ExponentialBuilder, Retryable};
use distribute_types::FailureKind;
use reqwest::header::{AUTHORIZATION, HeaderValue};
use reqwest::{Method, Response, Url};
use rustls_platform_verifier::BuilderVerifierExt;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::seconds;
use crate::text::clean;
use crate::{Error, Result};

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod options;
mod proxies;
mod refusal;
#[cfg(test)]
pub(crate) mod stand_in;
#[cfg(test)]
mod tests;

pub use options::{AccessToken, RequestOptions};
pub(crate) use proxies::Proxies;
pub(crate) use refusal::{Refusal, Remedies};

/// Where requests are sent to, and their limits.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// The name of the service, for messages.
    pub(crate) service: &'static str,
    pub(crate) options: RequestOptions,
    pub(crate) proxies: Proxies,
    /// Whether the metadata server is at an address that was given, so that it is known to exist.
    pub(crate) is_metadata_given: bool,
}

/// One request.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    /// The name of the request in messages, such as `the TPU "pod"`.
    pub(crate) what: String,
    pub(crate) url: Url,
    /// Sent with POST; without it the request is a GET.
    pub(crate) body: Option<Value>,
    pub(crate) token: Option<AccessToken>,
    /// Whether the metadata server is asked: without proxy, and with its header in both directions.
    pub(crate) is_metadata: bool,
    /// The largest answer.
    pub(crate) limit_bytes: usize,
    pub(crate) remedies: Remedies,
}

/// Sends requests within one call.
pub(crate) struct Client {
    service: &'static str,
    options: RequestOptions,
    is_metadata_given: bool,
    direct: reqwest::Client,
    /// Created by the first request that needs certificates of the system.
    through_proxies: Mutex<Option<reqwest::Client>>,
    proxies: Proxies,
    deadline: Instant,
    last: Last,
}

/// The request in progress, and the last failure of one of its attempts.
type Last = Arc<Mutex<(String, Option<String>)>>;

/// Runs `talk` on a thread of its own until the deadline.
///
/// # Errors
/// [`Error::Service`] if the deadline passes, or if the system gives no thread; and the errors of `talk`.
pub(crate) fn converse<T, F>(settings: &Settings, talk: impl FnOnce(Arc<Client>) -> F + Send + 'static) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T>>,
{
    let settings = settings.clone();
    let (service, timeout) = (settings.service, settings.options.timeout);
    let last = Last::default();
    let late = {
        let last = Arc::clone(&last);
        move || too_late(service, &timeout, &last)
    };
    let (tell, told) = mpsc::sync_channel(1);
    let is_late = late.clone();
    let body = move || {
        // The receiver is gone if its time was over first.
        let _ = tell.send(run(&settings, last, talk).unwrap_or_else(|| Err(is_late())));
    };
    let started = std::thread::Builder::new().name("distribute-http".to_owned()).spawn(body);
    started.map_err(|error| failed(service, "the system gives no thread", &error))?;
    match told.recv_timeout(timeout.saturating_add(GRACE)) {
        Ok(outcome) => outcome,
        Err(mpsc::RecvTimeoutError::Timeout) => Err(late()),
        Err(mpsc::RecvTimeoutError::Disconnected) => Err(failed(service, "its thread", &"panicked")),
    }
}

/// Returns `None` if the deadline passed.
fn run<T, F>(settings: &Settings, last: Last, talk: impl FnOnce(Arc<Client>) -> F) -> Option<Result<T>>
where
    F: Future<Output = Result<T>>,
{
    let service = settings.service;
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Some(Err(failed(service, "no runtime can be created", &error))),
    };
    let talk = async {
        let client = Client::new(settings, last)?;
        talk(Arc::new(client)).await
    };
    let outcome = runtime.block_on(async { tokio::time::timeout(settings.options.timeout, talk).await });
    // The system's lookup of a name has no deadline: its thread is abandoned.
    runtime.shutdown_background();
    outcome.ok()
}

impl Client {
    fn new(settings: &Settings, last: Last) -> Result<Client> {
        let Settings { service, options, proxies, is_metadata_given } = settings.clone();
        // Metadata come over plain HTTP, so the system's certificates are not needed for them.
        let none = tls(service, |builder| Ok(builder.with_root_certificates(rustls::RootCertStore::empty())))?;
        let connect = match is_metadata_given {
            true => options.connect_timeout,
            false => options.connect_timeout.min(METADATA_CONNECT),
        };
        let direct = basic(connect).no_proxy().tls_backend_preconfigured(none).build();
        let direct = direct.map_err(|error| failed(service, "no client can be created", &error))?;
        let deadline = deadline(options.timeout);
        let through_proxies = Mutex::new(None);
        Ok(Client { service, options, is_metadata_given, direct, through_proxies, proxies, deadline, last })
    }

    /// Sends a request and parses its answer.
    ///
    /// # Errors
    /// [`Refusal`] if no attempt has a usable answer.
    pub(crate) async fn json<T: DeserializeOwned>(&self, ask: &Ask) -> Result<T, Refusal> {
        let body = self.bytes(ask).await?;
        serde_json::from_slice(&body).map_err(|error| {
            let given = clean(&String::from_utf8_lossy(&body[..body.len().min(120)]), 80);
            let problem = match error.classify() {
                serde_json::error::Category::Eof => {
                    format!("the answer ends in the middle of its JSON, after {} bytes", body.len())
                }
                _ => format!("the answer is not the expected JSON: {error}; it begins with {given:?}"),
            };
            Refusal::unusable(problem, "Check that the host is the service's own, and not a portal in between")
        })
    }

    /// Sends a request, again if that may help.
    ///
    /// # Errors
    /// [`Refusal`] of the last attempt.
    pub(crate) async fn bytes(&self, ask: &Ask) -> Result<Vec<u8>, Refusal> {
        *locked(&self.last) = (ask.what.clone(), None);
        let most = match ask.is_metadata && !self.is_metadata_given {
            true => self.options.attempts.min(METADATA_ATTEMPTS),
            false => self.options.attempts,
        };
        let backoff = ExponentialBuilder::new()
            .with_min_delay(self.options.first_delay)
            .with_max_delay(LONGEST_DELAY)
            .with_max_times(most.saturating_sub(1) as usize)
            .with_jitter();
        (|| self.attempt(ask))
            .retry(backoff)
            .sleep(tokio::time::sleep)
            .when(|refusal| refusal.is_passing)
            .adjust(|refusal: &Refusal, delay| {
                let asked = refusal.after.map_or(Duration::ZERO, |after| after.min(LONGEST_DELAY));
                let delay = delay?.max(asked);
                // A pause beyond the deadline would end in it, with less to say.
                (delay < self.deadline.saturating_duration_since(Instant::now())).then_some(delay)
            })
            .notify(|refusal: &Refusal, delay| {
                tracing::debug!("{}: {}: {}; again in {delay:?}", self.service, ask.what, refusal.problem);
                locked(&self.last).1 = Some(refusal.problem.clone());
            })
            .await
    }

    /// Returns the error of a request.
    pub(crate) fn error(&self, ask: &Ask, refusal: Refusal) -> Error {
        refusal.into_error(self.service, &ask.what)
    }

    async fn attempt(&self, ask: &Ask) -> Result<Vec<u8>, Refusal> {
        let client = match ask.is_metadata {
            true => self.direct.clone(),
            false => self.through_proxies()?,
        };
        let method = if ask.body.is_some() { Method::POST } else { Method::GET };
        let mut request = client.request(method, ask.url.clone());
        if ask.is_metadata {
            request = request.header(FLAVOR, GOOGLE);
        }
        if let Some(body) = &ask.body {
            request = request.json(body);
        }
        if let Some(token) = &ask.token {
            request = request.header(AUTHORIZATION, authorization(&ask.url, token)?);
        }
        let response = request.send().await.map_err(Refusal::broken)?;
        if ask.is_metadata && response.headers().get(FLAVOR).is_none_or(|flavor| flavor != GOOGLE) {
            let problem = format!(
                "the server at {} answers without the header {FLAVOR}: {GOOGLE}, so it is not the metadata server",
                ask.url.authority()
            );
            let remedy = "Run on a machine of Google Cloud, or set GCE_METADATA_HOST to the metadata server";
            return Err(Refusal { kind: FailureKind::Configuration, ..Refusal::unusable(problem, remedy) });
        }
        let (status, headers) = (response.status(), response.headers().clone());
        if status.is_success() {
            return read(response, ask.limit_bytes).await;
        }
        // The status says enough if the message of the error cannot be read.
        let body = read(response, MAX_ERROR_BYTES).await.unwrap_or_default();
        Err(Refusal::of_status(status, &headers, &body, &ask.remedies, SystemTime::now()))
    }

    fn through_proxies(&self) -> Result<reqwest::Client, Refusal> {
        let mut client = locked(&self.through_proxies);
        if let Some(client) = &*client {
            return Ok(client.clone());
        }
        let config = tls(self.service, rustls::ConfigBuilder::with_platform_verifier).map_err(|error| {
            Refusal::unusable(error.to_string(), "Install the certificates of the system (ca-certificates)")
        })?;
        let builder = self.proxies.apply(basic(self.options.connect_timeout));
        let new = builder.tls_backend_preconfigured(config).build().map_err(Refusal::broken)?;
        *client = Some(new.clone());
        Ok(new)
    }
}

/// Returns the header of a token, which is sent over TLS or within this machine alone.
fn authorization(url: &Url, token: &AccessToken) -> Result<HeaderValue, Refusal> {
    let refused = |problem: String, remedy: &str| {
        Err(Refusal { kind: FailureKind::Configuration, ..Refusal::unusable(problem, remedy) })
    };
    let host = url.host_str().unwrap_or_default();
    let is_here = host == "localhost"
        || host.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    if url.scheme() != "https" && !is_here {
        let problem = format!("an access token would be sent to {host} without TLS");
        return refused(problem, "Use a URL that begins with https");
    }
    let header = HeaderValue::from_str(&format!("Bearer {}", token.text()));
    let Ok(mut header) = header else {
        return refused(
            "the access token has characters that no header can carry".to_owned(),
            "Check where it is from",
        );
    };
    header.set_sensitive(true);
    Ok(header)
}

/// Reads the body of an answer, up to a limit.
async fn read(mut response: Response, limit_bytes: usize) -> Result<Vec<u8>, Refusal> {
    let too_large = |given: u64| {
        let problem = format!("the answer has {given} bytes or more, and at most {limit_bytes} are read");
        Refusal::unusable(problem, "Check that the host is the service's own")
    };
    let announced = response.content_length().unwrap_or(0);
    if announced > limit_bytes as u64 {
        return Err(too_large(announced));
    }
    let mut body = Vec::with_capacity(announced as usize);
    while let Some(chunk) = response.chunk().await.map_err(Refusal::broken)? {
        if body.len() + chunk.len() > limit_bytes {
            return Err(too_large((body.len() + chunk.len()) as u64));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// Returns a builder of clients with what all of them have in common.
fn basic(connect_timeout: Duration) -> reqwest::ClientBuilder {
    let agent = concat!("distribute-cluster/", env!("CARGO_PKG_VERSION"));
    // None of the services redirects, and a redirect would carry the request elsewhere.
    let none = reqwest::redirect::Policy::none();
    reqwest::Client::builder().user_agent(agent).redirect(none).connect_timeout(connect_timeout)
}

type Tls<State> = rustls::ConfigBuilder<rustls::ClientConfig, State>;

/// Returns the configuration of TLS with the certificates that `roots` chooses.
fn tls(
    service: &'static str,
    roots: impl FnOnce(Tls<rustls::WantsVerifier>) -> Result<Tls<rustls::client::WantsClientCert>, rustls::Error>,
) -> Result<rustls::ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = builder.and_then(roots).map_err(|error| failed(service, "TLS cannot be used", &error))?;
    Ok(config.with_no_client_auth())
}

fn too_late(service: &'static str, timeout: &Duration, last: &Last) -> Error {
    let (request, problem) = locked(last).clone();
    let before = problem.map_or_else(|| "no answer".to_owned(), |problem| format!("the last attempt: {problem}"));
    Error::Service {
        service,
        request,
        problem: format!("it was not completed within {} s; {before}", seconds(timeout)),
        remedy: "Check the network, or allow a longer timeout".to_owned(),
        kind: FailureKind::Retryable,
    }
}

fn failed(service: &'static str, problem: &str, error: &dyn std::fmt::Display) -> Error {
    Error::Service {
        service,
        request: "a request".to_owned(),
        problem: format!("{problem}: {error}"),
        remedy: "Check the limits and the configuration of this machine".to_owned(),
        kind: FailureKind::Retryable,
    }
}

/// Returns the end of a timeout; one that no clock can express ends in a year.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or_else(|| now + YEAR)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The header by which the metadata server is recognised, and by which it recognises programs.
pub(crate) const FLAVOR: &str = "metadata-flavor";
const GOOGLE: &str = "Google";

/// The time in which the metadata server accepts a connection where it exists.
const METADATA_CONNECT: Duration = Duration::from_secs(1);
/// The number of attempts towards a metadata server that may not exist.
const METADATA_ATTEMPTS: u32 = 2;
/// The longest pause between two attempts.
const LONGEST_DELAY: Duration = Duration::from_secs(60);
/// The time for the thread to report that its deadline has passed.
const GRACE: Duration = Duration::from_secs(1);
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
/// Size limit of an error's answer.
const MAX_ERROR_BYTES: usize = 64 << 10;
