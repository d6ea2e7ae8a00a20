//! An HTTP server that answers by a script, in place of Google Cloud.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::Response;
use tokio::sync::oneshot;

use super::FLAVOR;

/// A server on a free port of this machine. The answers for each path are given one after another, and the last one is
/// repeated; a path without answers has the status 404. Ends when it is dropped.
pub(crate) struct StandIn {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    script: HashMap<String, VecDeque<Answer>>,
    seen: Vec<Seen>,
}

/// A request as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) method: Method,
    /// With the query.
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Seen {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    delay: Duration,
    ending: Ending,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Ending {
    /// The whole body, with its length.
    Whole,
    /// The body in parts, without a length.
    Streamed,
    /// The body, and then a connection that breaks.
    Broken,
}

impl Answer {
    pub(crate) fn json(value: &serde_json::Value) -> Answer {
        Answer::text(value.to_string())
    }

    pub(crate) fn text(body: impl Into<Vec<u8>>) -> Answer {
        Answer { status: 200, headers: Vec::new(), body: body.into(), delay: Duration::ZERO, ending: Ending::Whole }
    }

    /// A value of the metadata server.
    pub(crate) fn metadata(body: impl Into<Vec<u8>>) -> Answer {
        Answer::text(body).header(FLAVOR, "Google")
    }

    pub(crate) fn status(status: u16) -> Answer {
        Answer { status, ..Answer::text("") }
    }

    /// An error of Google's interfaces.
    pub(crate) fn error(status: u16, message: &str) -> Answer {
        Answer { status, ..Answer::json(&serde_json::json!({"error": {"code": status, "message": message}})) }
    }

    pub(crate) fn header(mut self, name: &str, value: &str) -> Answer {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn after(self, delay: Duration) -> Answer {
        Answer { delay, ..self }
    }

    pub(crate) fn streamed(self) -> Answer {
        Answer { ending: Ending::Streamed, ..self }
    }

    pub(crate) fn broken(self) -> Answer {
        Answer { ending: Ending::Broken, ..self }
    }

    async fn response(self) -> Response {
        tokio::time::sleep(self.delay).await;
        let mut response = Response::builder().status(StatusCode::from_u16(self.status).unwrap());
        for (name, value) in &self.headers {
            response = response.header(name, value);
        }
        let mut parts: Vec<std::io::Result<Bytes>> =
            self.body.chunks(16 << 10).map(|part| Ok(Bytes::copy_from_slice(part))).collect();
        let body = match self.ending {
            Ending::Whole => Body::from(self.body),
            Ending::Streamed => Body::from_stream(futures_util::stream::iter(parts)),
            Ending::Broken => {
                parts.push(Err(std::io::ErrorKind::BrokenPipe.into()));
                // The pause lets the part before it leave.
                Body::from_stream(futures_util::StreamExt::then(futures_util::stream::iter(parts), |part| async {
                    if part.is_err() {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    part
                }))
            }
        };
        response.body(body).unwrap()
    }
}

impl StandIn {
    pub(crate) fn start() -> StandIn {
        let state = Arc::new(Mutex::new(State::default()));
        let (end, ended) = oneshot::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        let shared = Arc::clone(&state);
        let body = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                tell.send(listener.local_addr().unwrap()).unwrap();
                let answer = move |method: Method, uri: Uri, headers: HeaderMap, body: Bytes| {
                    answer(Arc::clone(&shared), method, uri, headers, body)
                };
                let app = axum::Router::new().fallback(answer);
                tokio::select! {
                    outcome = axum::serve(listener, app).into_future() => outcome.unwrap(),
                    _ = ended => {}
                }
            });
        };
        let thread = std::thread::Builder::new().name("stand-in".to_owned()).spawn(body).unwrap();
        let address = told.recv_timeout(Duration::from_secs(10)).unwrap();
        StandIn { address, state, end: Some(end), thread: Some(thread) }
    }

    /// Adds answers to a path, without its query.
    pub(crate) fn on(self, path: &str, answers: impl IntoIterator<Item = Answer>) -> StandIn {
        self.state.lock().unwrap().script.entry(path.to_owned()).or_default().extend(answers);
        self
    }

    /// Replaces the answers of a path.
    pub(crate) fn change(&self, path: &str, answer: Answer) {
        self.state.lock().unwrap().script.insert(path.to_owned(), VecDeque::from([answer]));
    }

    /// `host:port`.
    pub(crate) fn host(&self) -> String {
        self.address.to_string()
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All requests so far.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.state.lock().unwrap().seen.clone()
    }

    /// The number of requests of a path, without its query.
    pub(crate) fn count(&self, path: &str) -> usize {
        self.seen().iter().filter(|seen| seen.path.split('?').next() == Some(path)).count()
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        drop(self.end.take());
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || ended.is_some_and(|ended| ended.is_ok()), "the stand-in panicked");
    }
}

async fn answer(state: Arc<Mutex<State>>, method: Method, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    let path = uri.path().to_owned();
    let seen = Seen { method, path: uri.to_string(), headers, body: String::from_utf8(body.to_vec()).unwrap() };
    let answer = {
        let mut state = state.lock().unwrap();
        state.seen.push(seen);
        let answers = state.script.get_mut(&path);
        answers.and_then(|answers| if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() })
    };
    let missing = || Answer::error(404, "not found").header(FLAVOR, "Google");
    answer.unwrap_or_else(missing).response().await
}
