//! A status server that answers by a script, in place of Kubeflow Trainer's.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::Value;

/// A server on a free port of this machine, until it is dropped. Its answers are given one after another, and then 200.
pub(crate) struct StandIn {
    address: SocketAddr,
    authority: String,
    is_tls: bool,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    tls: Option<Arc<ServerConfig>>,
}

#[derive(Default)]
struct State {
    script: VecDeque<Answer>,
    seen: Vec<Seen>,
    connections: Vec<TcpStream>,
    has_ended: bool,
}

/// A request as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) at: Instant,
    /// The method and the path.
    pub(crate) request: String,
    headers: Vec<String>,
    pub(crate) body: Value,
    /// The number of its connection.
    pub(crate) connection: usize,
}

#[derive(Clone, Debug)]
pub(crate) enum Answer {
    /// A status code, with the message of `metav1.Status`.
    Status(u16, &'static str),
    /// None: the connection is closed.
    Close,
    /// None within this time, or before the server ends.
    Silence(Duration),
}

impl Seen {
    /// Returns the value of a header.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut fields = self.headers.iter().filter_map(|line| line.split_once(": "));
        fields.find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    pub(crate) fn percent(&self) -> u64 {
        self.body["trainerStatus"]["progressPercentage"].as_u64().unwrap()
    }

    /// Returns the value of a metric.
    pub(crate) fn metric(&self, name: &str) -> Option<&str> {
        let metrics = self.body["trainerStatus"]["metrics"].as_array().unwrap();
        metrics.iter().find(|metric| metric["name"] == name).and_then(|metric| metric["value"].as_str())
    }
}

impl StandIn {
    /// Serves without TLS.
    pub(crate) fn start() -> StandIn {
        StandIn::serve(None, String::new())
    }

    /// Serves with a certificate of an authority of its own.
    pub(crate) fn with_tls() -> StandIn {
        let mut authority = CertificateParams::new(Vec::new()).unwrap();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let own = CertificateParams::new(["localhost".to_owned()]).unwrap().signed_by(&key, &authority).unwrap();
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![own.der().clone()], key)
            .unwrap();
        StandIn::serve(Some(Arc::new(config)), authority.pem())
    }

    fn serve(tls: Option<Arc<ServerConfig>>, authority: String) -> StandIn {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let is_tls = tls.is_some();
        let shared = Arc::new(Shared { state: Mutex::default(), tls });
        let server = Arc::clone(&shared);
        let thread = std::thread::spawn(move || server.accept(&listener));
        StandIn { address, authority, is_tls, shared, thread: Some(thread) }
    }

    /// Returns the URL of a TrainJob's status.
    pub(crate) fn url(&self) -> String {
        let scheme = if self.is_tls { "https" } else { "http" };
        format!("{scheme}://localhost:{}{PATH}", self.address.port())
    }

    /// Returns the certificate of the authority in PEM.
    pub(crate) fn authority(&self) -> &str {
        &self.authority
    }

    /// Sets the next answers.
    pub(crate) fn answer(&self, answers: impl IntoIterator<Item = Answer>) {
        self.shared.state.lock().unwrap().script.extend(answers);
    }

    /// Returns the requests so far.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.shared.state.lock().unwrap().seen.clone()
    }

    /// Waits until a number of requests have arrived, and returns them.
    pub(crate) fn wait_for(&self, count: usize) -> Vec<Seen> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let seen = self.seen();
            if seen.len() >= count {
                return seen;
            }
            assert!(Instant::now() < deadline, "{count} requests do not arrive: {seen:#?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock().unwrap();
        state.has_ended = true;
        // A peer may have closed its connection already.
        state.connections.iter().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
        drop(state);
        // Wakes the thread, which then sees the end.
        drop(TcpStream::connect(self.address));
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.unwrap();
        }
    }
}

impl Shared {
    fn accept(self: &Arc<Shared>, listener: &TcpListener) {
        let mut threads = Vec::new();
        for (number, stream) in listener.incoming().enumerate() {
            let stream = stream.unwrap();
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            stream.set_write_timeout(Some(DEADLINE)).unwrap();
            let mut state = self.state.lock().unwrap();
            if state.has_ended {
                break;
            }
            state.connections.push(stream.try_clone().unwrap());
            drop(state);
            let shared = Arc::clone(self);
            threads.push(std::thread::spawn(move || {
                // Clients close connections when they like, also in the middle of a handshake.
                let _ = match &shared.tls {
                    None => shared.serve(stream, number),
                    Some(config) => {
                        let tls = ServerConnection::new(Arc::clone(config)).unwrap();
                        shared.serve(StreamOwned::new(tls, stream), number)
                    }
                };
            }));
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    fn serve(&self, stream: impl Read + Write, connection: usize) -> io::Result<()> {
        let mut stream = BufReader::new(stream);
        loop {
            let mut head = Vec::new();
            loop {
                let mut line = String::new();
                if stream.read_line(&mut line)? == 0 {
                    return Ok(());
                }
                match line.trim_end() {
                    "" => break,
                    line => head.push(line.to_owned()),
                }
            }
            let at = Instant::now();
            let request = head.remove(0).trim_end_matches(" HTTP/1.1").to_owned();
            let mut seen = Seen { at, request, headers: head, body: Value::Null, connection };
            let length = seen.header("content-length").map_or(0, |length| length.parse().unwrap());
            assert!(length < 1 << 16, "the server reads 64 KiB");
            let mut body = vec![0; length];
            stream.read_exact(&mut body)?;
            seen.body = serde_json::from_slice(&body).unwrap();
            let echo = seen.body.to_string();
            let mut state = self.state.lock().unwrap();
            state.seen.push(seen);
            let answer = state.script.pop_front();
            drop(state);
            let (status, body) = match answer {
                None => (200, echo),
                Some(Answer::Status(status, message)) => {
                    (status, serde_json::json!({"kind": "Status", "message": message, "code": status}).to_string())
                }
                Some(Answer::Close) => return self.close(connection),
                Some(Answer::Silence(time)) => return self.pause(time),
            };
            let length = body.len();
            let stream = stream.get_mut();
            write!(stream, "HTTP/1.1 {status} -\r\ncontent-length: {length}\r\n\r\n{body}")?;
            stream.flush()?;
        }
    }

    fn close(&self, connection: usize) -> io::Result<()> {
        self.state.lock().unwrap().connections[connection].shutdown(Shutdown::Both)
    }

    fn pause(&self, time: Duration) -> io::Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end && !self.state.lock().unwrap().has_ended {
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

/// The path of the status of the TrainJob `mnist`.
pub(crate) const PATH: &str = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/mnist/status";

const DEADLINE: Duration = Duration::from_secs(30);
