//! Connections between the processes of an elastic job. They are opened when there is something to send, serve both
//! directions, and are closed when nothing was received for a while. Messages that are lost with them are sent again by
//! the state machine.

use std::collections::HashMap;
use std::io::{ErrorKind, Result as IoResult};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, split};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::core::Message;
use super::wire::{
    Common, Difference, Greeting, MAX_HELLO_BYTES, MAX_MESSAGE_BYTES, PREAMBLE, greeted, hello, read, refusal,
};
use crate::frames::{Receiver, send};
use crate::host::split_bare;
use crate::messages::ElasticMessage;
use crate::net::TcpStream;
use crate::secret::{self, JOB_REMEDY, Terms, warn_if_exposed};
use crate::tls::socket::Socket;
use crate::{Connection, Door, Incoming, JobId, JobSecret, JobTls};

/// A report of a connection to the event loop.
pub(super) enum Report {
    Message {
        from: String,
        message: Message,
    },
    /// Another process has opened a connection, by which it can be answered.
    Opened {
        address: String,
        route: Route,
    },
    /// A connection has ended; the problem is a sentence if it never served.
    Closed {
        address: String,
        id: u64,
        problem: Option<String>,
        /// Whether no process listens at the address, as the system there says.
        is_gone: bool,
    },
    /// A process of the job has other options.
    Differs {
        address: String,
        options: String,
    },
}

/// The way to another process.
pub(super) struct Route {
    id: u64,
    outbox: mpsc::Sender<ElasticMessage>,
    used: Instant,
}

/// This process, as its connections know it.
#[derive(Clone)]
pub(super) struct Own {
    pub(super) job: JobId,
    pub(super) secret: Option<JobSecret>,
    pub(super) tls: Option<JobTls>,
    pub(super) control: String,
    pub(super) common: Common,
    /// The number of the newest generation that is known.
    pub(super) newest: watch::Receiver<u64>,
    pub(super) reports: mpsc::Sender<Report>,
    /// When the refusal of a process was last logged.
    pub(super) warned: Arc<Mutex<Option<Instant>>>,
}

impl Own {
    /// Returns what both sides agree on before they prove the job's secret.
    fn terms(&self) -> Terms {
        Terms::new("elastic 1", self.job.header_text())
    }

    /// Returns the options that others must have too, as they are now.
    fn common(&self) -> Common {
        self.common.now(*self.newest.borrow() > 0)
    }

    fn hello(&self) -> ElasticMessage {
        hello(&self.job, &self.control, &self.common())
    }

    /// Returns the address of a process whose options are this one's, and reports one whose options are not.
    ///
    /// # Errors
    /// A sentence with the difference.
    async fn compared(&self, greeting: Greeting) -> Result<String, String> {
        let Some(difference) = self.common().difference(&greeting.common) else { return Ok(greeting.control) };
        let reason = difference.reason();
        if let Difference::Options(options) = difference {
            // The process is gone if this fails.
            let _ = self.reports.send(Report::Differs { address: greeting.control, options }).await;
        }
        Err(reason)
    }

    /// Shows the certificate and proves the job's secret on a connection that this process has opened, as far as there
    /// are both, and verifies those of the other side.
    ///
    /// # Errors
    /// A sentence, if it has none, or others.
    async fn identify(&self, stream: TcpStream) -> Result<Socket, String> {
        let terms = self.terms();
        let proof = self.secret.as_ref().map(|secret| (secret, &terms, claim(&self.control)));
        let identifying = secret::identify(stream, self.tls.as_ref(), proof);
        match tokio::time::timeout(GREETING, identifying).await {
            Ok(Ok(Ok(socket))) => Ok(socket),
            Ok(Ok(Err(problem))) => Err(format!("{problem}; {}", problem.remedy(JOB_REMEDY))),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("it did not show its certificate or prove the job's secret in time".to_owned()),
        }
    }

    /// Logs that a process was refused, which asks again and again, at most once a minute.
    fn warn(&self, peer: Option<SocketAddr>, reason: &str) {
        let mut warned = self.warned.lock();
        if warned.is_none_or(|last| last.elapsed() >= SILENCE) {
            *warned = Some(Instant::now());
            let peer = peer.map_or_else(|| "an unknown address".to_owned(), |peer| peer.to_string());
            tracing::warn!(control = self.control, "a process at {peer} was refused: {reason}");
        }
    }
}

/// The open connections.
pub(super) struct Connections {
    own: Own,
    routes: HashMap<String, Route>,
    opening: JoinSet<()>,
    next: u64,
    swept: Instant,
}

impl Connections {
    pub(super) fn new(own: Own) -> Connections {
        Connections { own, routes: HashMap::new(), opening: JoinSet::new(), next: 0, swept: Instant::now() }
    }

    /// Sends a message, or drops it where that would wait: it is sent again if it matters.
    pub(super) fn send(&mut self, to: String, message: Message) {
        self.sweep();
        let now = Instant::now();
        if let Some(route) = self.routes.get_mut(&to) {
            route.used = now;
            if !matches!(route.outbox.try_send(message.clone().into()), Err(mpsc::error::TrySendError::Closed(_))) {
                return;
            }
            self.routes.remove(&to);
        }
        if self.routes.len() >= MAX_ROUTES {
            return;
        }
        self.next += 2;
        let (outbox, queue) = mpsc::channel(OUTBOX);
        // There is room for the first messages of an empty queue.
        let _ = outbox.try_send(self.own.hello());
        let _ = outbox.try_send(message.into());
        let id = self.next;
        self.routes.insert(to.clone(), Route { id, outbox, used: now });
        let own = self.own.clone();
        self.opening.spawn(async move {
            let (problem, is_gone) = match connect(&to).await {
                Ok(stream) => match own.identify(stream).await {
                    Ok(socket) => (converse(socket, &own, queue).await.err(), false),
                    Err(problem) => (Some(problem), false),
                },
                Err(error) => (Some(error.to_string()), error.kind() == ErrorKind::ConnectionRefused),
            };
            let _ = own.reports.send(Report::Closed { address: to, id, problem, is_gone }).await;
        });
    }

    /// Keeps a connection that another process has opened, unless there is one already.
    pub(super) fn opened(&mut self, address: String, route: Route) {
        let kept = self.routes.get(&address).is_some_and(|kept| !kept.outbox.is_closed());
        if !kept && self.routes.len() < MAX_ROUTES {
            self.routes.insert(address, route);
        }
    }

    pub(super) fn closed(&mut self, address: &str, id: u64) {
        if self.routes.get(address).is_some_and(|route| route.id == id) {
            self.routes.remove(address);
        }
        // Reaps what has ended.
        while self.opening.try_join_next().is_some() {}
    }

    /// Closes connections that were not used for a while.
    fn sweep(&mut self) {
        if self.swept.elapsed() >= IDLE / 4 {
            self.swept = Instant::now();
            self.routes.retain(|_, route| route.used.elapsed() < IDLE);
        }
    }
}

/// The largest number of ways to other processes: all members, and as many that join.
const MAX_ROUTES: usize = 2 * crate::Generation::MAX_MEMBERS + 128;

/// The largest number of connections that others have opened.
const MAX_INCOMING: usize = MAX_ROUTES;

/// The number of connections that strangers may open in addition.
const STRANGERS: usize = 128;

/// The capacity of the queue of messages to another process.
const OUTBOX: usize = 64;

/// Time after which an unused connection is closed.
const IDLE: Duration = Duration::from_secs(30);

/// How long a greeting may take.
const GREETING: Duration = Duration::from_secs(5);

/// How long the lookup of a name, and a connection, may take.
const CONNECT: Duration = Duration::from_secs(2);

/// Shortest interval between two warnings about refused processes.
const SILENCE: Duration = Duration::from_secs(60);

/// How long a peer may read nothing of what is sent to it.
const SENDING: Duration = Duration::from_secs(10);

/// Returns what a process proves of its address: the end of one that is very long.
fn claim(control: &str) -> &[u8] {
    let bytes = control.as_bytes();
    &bytes[bytes.len().saturating_sub(Terms::MAX_CLAIM_BYTES)..]
}

async fn connect(address: &str) -> IoResult<TcpStream> {
    let looked_up = tokio::time::timeout(CONNECT, tokio::net::lookup_host(split_bare(address)?)).await??;
    let addresses: Vec<SocketAddr> = looked_up.collect();
    let stream = tokio::time::timeout(CONNECT, TcpStream::connect(&*addresses)).await??;
    // Disables Nagle's algorithm for small messages; the connection works without this, so an error is ignored.
    let _ = stream.set_nodelay(true);
    Ok(stream)
}

/// Serves a connection that this process has opened until it ends.
///
/// # Errors
/// A sentence, if the other side is not a process of this job.
async fn converse<S>(stream: S, own: &Own, queue: mpsc::Receiver<ElasticMessage>) -> Result<(), String>
where
    S: AsyncRead + AsyncWrite,
{
    let (reader, writer) = split(stream);
    let mut inbox = Receiver::new(reader, PREAMBLE, MAX_HELLO_BYTES);
    let receiving = async {
        let first = tokio::time::timeout(GREETING, inbox.whole()).await;
        let first = first.map_err(|_| "it did not greet in time".to_owned())?.map_err(|error| error.to_string())?;
        let from = own.compared(greeted(first, &own.job)?).await?;
        inbox.limit(MAX_MESSAGE_BYTES);
        receive(&mut inbox, from, own).await;
        Ok(())
    };
    tokio::select! {
        received = receiving => received,
        sent = send(writer, PREAMBLE, queue, SENDING) => sent.map_err(|error| error.to_string()),
    }
}

/// Reports messages until the connection ends or is silent for a while.
async fn receive<R: AsyncRead + Unpin>(inbox: &mut Receiver<R>, from: String, own: &Own) {
    while let Ok(Ok(message)) = tokio::time::timeout(IDLE, inbox.whole::<ElasticMessage>()).await {
        // What a later version sends is not understood, and does no harm.
        let Some(message) = read(message) else { continue };
        if own.reports.send(Report::Message { from: from.clone(), message }).await.is_err() {
            return;
        }
    }
}

/// Accepts connections until the process ends. In a large job that starts at once, all others may open theirs at a
/// time.
pub(super) async fn accept(listener: tokio::net::TcpListener, own: Own) {
    let service = format!("the elastic job's process at {}", own.control);
    let bound = listener.local_addr().ok().map(|address| address.ip());
    warn_if_exposed(&service, bound, (own.secret.as_ref(), own.tls.as_ref()), "DISTRIBUTE_JOB_SECRET_FILE");
    let door = Door::new(service, own.secret.clone(), own.terms(), JOB_REMEDY).tls(own.tls.clone());
    let door = Arc::new(door);
    let mut incoming = Incoming::new(listener, GREETING, MAX_INCOMING + STRANGERS).behind(door.clone());
    let (mut serving, mut id) = (JoinSet::new(), 1);
    loop {
        tokio::select! {
            connection = incoming.accept() => {
                if serving.len() < MAX_INCOMING + STRANGERS {
                    serving.spawn(serve(connection, door.clone(), own.clone(), id));
                    id += 2;
                }
            }
            Some(_) = serving.join_next() => {}
        }
    }
}

/// Serves a connection that another process has opened.
async fn serve(connection: Connection, door: Arc<Door>, own: Own, id: u64) {
    let acquaintance = connection.acquaintance();
    let (reader, writer) = split(connection);
    let mut inbox = Receiver::new(reader, PREAMBLE, MAX_HELLO_BYTES);
    let Ok(Ok(first)) = tokio::time::timeout(GREETING, inbox.whole()).await else { return };
    let (outbox, queue) = mpsc::channel(OUTBOX);
    let greeted = greeted(first, &own.job).and_then(|greeting| match acquaintance.claim() {
        // The address at which it says it is, is the one that it has proved.
        Some(proved) if proved == claim(&greeting.control) => Ok(greeting),
        Some(_) => Err("it has proved another address than it says".to_owned()),
        None => door.refusal_of(&acquaintance).map_or(Ok(greeting), Err),
    });
    let greeted = match greeted {
        // Each side finds the difference by itself.
        Ok(greeting) => own.compared(greeting).await.map_err(|reason| (reason, own.hello())),
        Err(reason) => {
            let told = refusal(format!("{} refused this process: {reason}", own.control));
            Err((reason, told))
        }
    };
    let from = match greeted {
        Ok(from) => from,
        Err((reason, told)) => {
            own.warn(acquaintance.peer(), &reason);
            let _ = outbox.try_send(told);
            drop(outbox);
            let _ = send(writer, PREAMBLE, queue, SENDING).await;
            return;
        }
    };
    acquaintance.known();
    inbox.limit(MAX_MESSAGE_BYTES);
    let _ = outbox.try_send(own.hello());
    let route = Route { id, outbox, used: Instant::now() };
    if own.reports.send(Report::Opened { address: from.clone(), route }).await.is_err() {
        return;
    }
    let sending = async {
        let _ = send(writer, PREAMBLE, queue, SENDING).await;
        // It may be read from still, where another way to its process is used.
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = receive(&mut inbox, from.clone(), &own) => {}
        () = sending => {}
    }
    let _ = own.reports.send(Report::Closed { address: from, id, problem: None, is_gone: false }).await;
}

/// Keeps the last problem of each address, for the sentence in which a process ends.
#[derive(Default)]
pub(super) struct Problems(HashMap<String, String>);

impl Problems {
    pub(super) fn note(&mut self, address: &str, problem: Option<String>) {
        match problem {
            Some(problem) if self.0.len() < MAX_ROUTES => drop(self.0.insert(address.to_owned(), problem)),
            Some(_) => {}
            None => drop(self.0.remove(address)),
        }
    }

    /// Returns a few of them as a clause.
    pub(super) fn clause(&self) -> String {
        let mut shown: Vec<String> = self.0.iter().map(|(address, problem)| format!("{address}: {problem}")).collect();
        shown.sort();
        shown.truncate(SHOWN);
        match shown.is_empty() {
            true => String::new(),
            false => format!(" ({})", crate::text::clean(&shown.join("; "), crate::text::LONGEST)),
        }
    }
}

/// The number of problems in a clause.
const SHOWN: usize = 3;
