//! A stand-in for the API server of Kubernetes: it lists and watches pods, and fails as it is told.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, Response, StatusCode};
use axum::routing::get;
use axum::serve::Listener;
use axum::{Json, Router};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::{Notify, oneshot};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// A way of failing a request.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// An error's status, with a body and the header Retry-After.
    Status(u16, String, Option<u64>),
    /// A body of which the rest does not come, though the answer ends.
    Truncated,
    /// A body that ends in the middle of its connection.
    Cut,
    /// A body that is not JSON.
    Text(&'static str),
    /// No answer for a while, then the usual one.
    Slow(Duration),
    /// The request has its effect, and the connection ends without an answer.
    #[cfg_attr(not(feature = "coordination"), expect(dead_code, reason = "for Leases"))]
    Lost,
    /// In a watch: the event of an expired version.
    Expired,
    /// In a watch: no events, and its end.
    Ended,
}

/// A request as the server saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) is_watch: bool,
    pub(crate) selector: String,
    /// The version from which a watch begins.
    pub(crate) version: String,
    pub(crate) authorization: Option<String>,
}

#[derive(Default)]
struct Cluster {
    /// By namespace and name.
    pods: BTreeMap<(String, String), Value>,
    /// The events, of which the first one leads to version 1.
    events: Vec<(String, Value)>,
    /// By namespace and name.
    leases: BTreeMap<(String, String), Value>,
    lease_version: u64,
    /// The methods of the requests about Leases.
    lease_requests: Vec<String>,
    lease_faults: VecDeque<Fault>,
    lease_always: Option<Fault>,
    list_faults: VecDeque<Fault>,
    watch_faults: VecDeque<Fault>,
    /// The fault of all lists after those.
    always: Option<Fault>,
    requests: Vec<Request>,
    /// The largest page of a list.
    page: usize,
}

#[derive(Default)]
struct Shared {
    cluster: Mutex<Cluster>,
    changed: Notify,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Cluster> {
        self.cluster.lock().unwrap()
    }
}

/// A server on a free port; dropping it ends it.
pub(crate) struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(crate) fn start() -> Server {
        Server::start_with(None)
    }

    /// Starts a server with this TLS configuration.
    pub(crate) fn start_with(tls: Option<Arc<tokio_rustls::rustls::ServerConfig>>) -> Server {
        let shared = Arc::new(Shared::default());
        shared.lock().page = usize::MAX;
        let leases = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases";
        let router = Router::new()
            .route("/api/v1/namespaces/{namespace}/pods", get(pods))
            .route("/api/v1/namespaces/{namespace}/pods/{name}", get(one_pod))
            .route(leases, axum::routing::post(leases::create))
            .route(&format!("{leases}/{{name}}"), get(leases::read).put(leases::replace))
            .with_state(Arc::clone(&shared));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        listener.set_nonblocking(true).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                match tls {
                    None => tokio::select! { _ = stopped => {}, _ = axum::serve(listener, router) => {} },
                    Some(tls) => {
                        let listener = Tls { listener, acceptor: TlsAcceptor::from(tls) };
                        tokio::select! { _ = stopped => {}, _ = axum::serve(listener, router) => {} }
                    }
                }
            });
            runtime.shutdown_background();
        });
        Server { shared, address, stop: Some(stop), thread: Some(thread) }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    /// Adds or replaces a pod in the namespace `default`.
    pub(crate) fn put(&self, pod: Value) {
        self.put_in("default", pod);
    }

    pub(crate) fn put_in(&self, namespace: &str, mut pod: Value) {
        let mut cluster = self.shared.lock();
        let version = cluster.events.len() + 1;
        pod["metadata"]["resourceVersion"] = json!(version.to_string());
        let key = (namespace.to_owned(), pod["metadata"]["name"].as_str().unwrap().to_owned());
        let kind = if cluster.pods.contains_key(&key) { "MODIFIED" } else { "ADDED" };
        cluster.events.push((namespace.to_owned(), json!({"type": kind, "object": pod})));
        cluster.pods.insert(key, pod);
        self.shared.changed.notify_waiters();
    }

    pub(crate) fn remove(&self, name: &str) {
        let mut cluster = self.shared.lock();
        let version = cluster.events.len() + 1;
        let mut pod = cluster.pods.remove(&("default".to_owned(), name.to_owned())).unwrap();
        pod["metadata"]["resourceVersion"] = json!(version.to_string());
        cluster.events.push(("default".to_owned(), json!({"type": "DELETED", "object": pod})));
        self.shared.changed.notify_waiters();
    }

    /// Returns a Lease of the namespace `default`.
    pub(crate) fn lease(&self, name: &str) -> Option<Value> {
        self.lease_in("default", name)
    }

    pub(crate) fn lease_in(&self, namespace: &str, name: &str) -> Option<Value> {
        self.shared.lock().leases.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    /// Adds or replaces a Lease in the namespace `default`, as another program would.
    pub(crate) fn put_lease(&self, mut lease: Value) {
        let mut cluster = self.shared.lock();
        cluster.lease_version += 1;
        lease["metadata"]["resourceVersion"] = json!(cluster.lease_version.to_string());
        let name = lease["metadata"]["name"].as_str().unwrap().to_owned();
        cluster.leases.insert(("default".to_owned(), name), lease);
    }

    /// Fails the next requests about Leases, one after another.
    pub(crate) fn fail_leases(&self, faults: impl IntoIterator<Item = Fault>) {
        self.shared.lock().lease_faults.extend(faults);
    }

    /// Fails all requests about Leases.
    pub(crate) fn fail_leases_always(&self, fault: Fault) {
        self.shared.lock().lease_always = Some(fault);
    }

    /// Returns the methods of the requests about Leases.
    pub(crate) fn lease_requests(&self) -> Vec<String> {
        self.shared.lock().lease_requests.clone()
    }

    /// Fails the next lists, one after another.
    pub(crate) fn fail_lists(&self, faults: impl IntoIterator<Item = Fault>) {
        self.shared.lock().list_faults.extend(faults);
    }

    /// Fails the next watches, one after another.
    pub(crate) fn fail_watches(&self, faults: impl IntoIterator<Item = Fault>) {
        self.shared.lock().watch_faults.extend(faults);
    }

    /// Fails all lists.
    pub(crate) fn fail_always(&self, fault: Fault) {
        self.shared.lock().always = Some(fault);
    }

    pub(crate) fn page(&self, pods: usize) {
        self.shared.lock().page = pods;
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.shared.lock().requests.clone()
    }

    /// Waits until a number of watches have been asked for.
    pub(crate) fn await_watches(&self, count: usize) {
        let begin = std::time::Instant::now();
        while self.requests().iter().filter(|request| request.is_watch).count() < count {
            assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", self.requests());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

type Parameters = HashMap<String, String>;

/// A pod by its name.
async fn one_pod(State(shared): State<Arc<Shared>>, Path(key): Path<(String, String)>) -> Response<Body> {
    match shared.lock().pods.get(&key) {
        Some(pod) => Response::new(Body::from(pod.to_string())),
        None => leases::refusal(404, "NotFound", "pods not found"),
    }
}

/// The Leases, which are compared by their versions.
mod leases {
    use super::*;

    pub(super) async fn read(
        State(shared): State<Arc<Shared>>,
        Path((namespace, name)): Path<(String, String)>,
    ) -> Response<Body> {
        answer(&shared, "GET", |cluster| match cluster.leases.get(&(namespace, name)) {
            Some(lease) => Ok(lease.clone()),
            None => Err(refusal(404, "NotFound", "leases.coordination.k8s.io not found")),
        })
        .await
    }

    pub(super) async fn create(
        State(shared): State<Arc<Shared>>,
        Path(namespace): Path<String>,
        Json(mut lease): Json<Value>,
    ) -> Response<Body> {
        answer(&shared, "POST", |cluster| {
            let key = (namespace, lease["metadata"]["name"].as_str().unwrap().to_owned());
            if cluster.leases.contains_key(&key) {
                return Err(refusal(409, "AlreadyExists", "leases already exists"));
            }
            cluster.lease_version += 1;
            lease["metadata"]["resourceVersion"] = json!(cluster.lease_version.to_string());
            cluster.leases.insert(key, lease.clone());
            Ok(lease)
        })
        .await
    }

    pub(super) async fn replace(
        State(shared): State<Arc<Shared>>,
        Path(key): Path<(String, String)>,
        Json(mut lease): Json<Value>,
    ) -> Response<Body> {
        answer(&shared, "PUT", |cluster| {
            let version = cluster.lease_version + 1;
            let Some(held) = cluster.leases.get_mut(&key) else { return Err(refusal(404, "NotFound", "not found")) };
            if held["metadata"]["resourceVersion"] != lease["metadata"]["resourceVersion"] {
                return Err(refusal(409, "Conflict", "the object has been modified"));
            }
            lease["metadata"]["resourceVersion"] = json!(version.to_string());
            *held = lease.clone();
            cluster.lease_version = version;
            Ok(lease)
        })
        .await
    }

    async fn answer(
        shared: &Shared,
        method: &str,
        act: impl FnOnce(&mut Cluster) -> Result<Value, Response<Body>>,
    ) -> Response<Body> {
        let fault = {
            let mut cluster = shared.lock();
            cluster.lease_requests.push(method.to_owned());
            cluster.lease_faults.pop_front().or_else(|| cluster.lease_always.clone())
        };
        match fault {
            Some(Fault::Status(code, body, _)) => {
                return Response::builder().status(code).body(Body::from(body)).unwrap();
            }
            Some(Fault::Text(text)) => return Response::new(Body::from(text)),
            Some(Fault::Slow(pause)) => tokio::time::sleep(pause).await,
            _ => {}
        }
        let done = act(&mut shared.lock());
        match (fault, done) {
            (Some(Fault::Lost), _) => cut(),
            (_, Ok(object)) => Response::new(Body::from(object.to_string())),
            (_, Err(refusal)) => refusal,
        }
    }

    /// Returns an answer that breaks off.
    pub(super) fn cut() -> Response<Body> {
        Response::new(Body::from_stream(stream::iter([Ok(Bytes::from("{")), Err(std::io::Error::other("cut"))])))
    }

    pub(super) fn refusal(code: u16, reason: &str, message: &str) -> Response<Body> {
        let status = json!({"kind": "Status", "code": code, "reason": reason, "message": message});
        Response::builder().status(code).body(Body::from(status.to_string())).unwrap()
    }
}

async fn pods(
    State(shared): State<Arc<Shared>>,
    Path(namespace): Path<String>,
    Query(parameters): Query<Parameters>,
    headers: HeaderMap,
) -> Response<Body> {
    let text = |name: &str| parameters.get(name).cloned().unwrap_or_default();
    let is_watch = text("watch") == "true";
    let request = Request {
        is_watch,
        selector: text("labelSelector"),
        version: text("resourceVersion"),
        authorization: headers.get("authorization").map(|value| value.to_str().unwrap().to_owned()),
    };
    let fault = {
        let mut cluster = shared.lock();
        cluster.requests.push(request.clone());
        match is_watch {
            true => cluster.watch_faults.pop_front(),
            false => cluster.list_faults.pop_front().or_else(|| cluster.always.clone()),
        }
    };
    match fault {
        Some(Fault::Status(code, body, retry_after)) => {
            let mut answer = Response::builder().status(StatusCode::from_u16(code).unwrap());
            if let Some(seconds) = retry_after {
                answer = answer.header("retry-after", seconds);
            }
            return answer.body(Body::from(body)).unwrap();
        }
        Some(Fault::Truncated) => {
            let text = list(&shared, &namespace, &request.selector, &parameters).to_string();
            return Response::new(Body::from(text[..text.len() / 2].to_owned()));
        }
        Some(Fault::Cut) => {
            let parts = [Ok(Bytes::from("{\"items\": [")), Err(std::io::Error::other("cut"))];
            return Response::new(Body::from_stream(stream::iter(parts)));
        }
        Some(Fault::Text(text)) => return Response::new(Body::from(text)),
        Some(Fault::Slow(pause)) => tokio::time::sleep(pause).await,
        Some(Fault::Lost) => return leases::cut(),
        Some(Fault::Expired) => {
            let status = json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"});
            return Response::new(Body::from(json!({"type": "ERROR", "object": status}).to_string() + "\n"));
        }
        Some(Fault::Ended) => return Response::new(Body::empty()),
        None => {}
    }
    if is_watch {
        return watch(shared, namespace, request);
    }
    let list = Json(list(&shared, &namespace, &request.selector, &parameters));
    axum::response::IntoResponse::into_response(list)
}

fn list(shared: &Shared, namespace: &str, selector: &str, parameters: &Parameters) -> Value {
    let cluster = shared.lock();
    let pods = cluster.pods.iter().filter(|((place, _), pod)| place == namespace && selects(selector, pod));
    // The API server has an order of its own.
    let pods: Vec<&Value> = pods.map(|(_, pod)| pod).rev().collect();
    let number = |name: &str| parameters.get(name).and_then(|text| text.parse::<usize>().ok());
    let begin = number("continue").unwrap_or(0);
    let end = begin + number("limit").unwrap_or(usize::MAX).min(cluster.page).min(pods.len() - begin);
    let token = if end < pods.len() { end.to_string() } else { String::new() };
    let version = cluster.events.len().to_string();
    json!({"kind": "PodList", "metadata": {"resourceVersion": version, "continue": token}, "items": pods[begin..end]})
}

/// Sends the events after the version of a request, as they come.
fn watch(shared: Arc<Shared>, namespace: String, request: Request) -> Response<Body> {
    let after = request.version.parse::<usize>().unwrap();
    let events = stream::unfold(after, move |mut seen| {
        let (shared, namespace, selector) = (Arc::clone(&shared), namespace.clone(), request.selector.clone());
        async move {
            loop {
                // Registered before the look, so that no change is missed.
                let changed = shared.changed.notified();
                let next = shared.lock().events.get(seen).cloned();
                let Some((place, event)) = next else {
                    changed.await;
                    continue;
                };
                seen += 1;
                if place == namespace && selects(&selector, &event["object"]) {
                    return Some((Ok::<_, Infallible>(Bytes::from(event.to_string() + "\n")), seen));
                }
            }
        }
    });
    Response::new(Body::from_stream(events))
}

/// Returns whether a selector of the form `key=value,…` selects a pod.
fn selects(selector: &str, pod: &Value) -> bool {
    selector.split(',').all(|part| {
        let (key, value) = part.split_once('=').unwrap();
        pod["metadata"]["labels"][key] == value
    })
}

/// Connections over TLS.
struct Tls {
    listener: tokio::net::TcpListener,
    acceptor: TlsAcceptor,
}

impl Listener for Tls {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let Ok((stream, address)) = self.listener.accept().await else { continue };
            // A client that does not trust the certificate ends the handshake.
            if let Ok(stream) = self.acceptor.accept(stream).await {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}
