//! Runs the state machine of a process: its clock, its connections, and its register.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use super::connections::{Connections, Own, Problems, Report, accept};
use super::core::{Action, Core, Event, Settings};
use super::generation::{Candidate, Generation};
use super::register::Register;
use super::state::{Ending, Shared};
use super::wire::Common;

/// The event loop of a process.
pub(super) struct Engine {
    core: Core,
    shared: Arc<Shared>,
    connections: Connections,
    problems: Problems,
    register: Option<Arc<dyn Register>>,
    /// Whether the register is being asked, and what it is asked to decide after that.
    asking: bool,
    queued: Option<Generation>,
    requests: mpsc::Sender<Request>,
    origin: Instant,
    timer: Option<Instant>,
    answer_window: Duration,
    /// A process with other options that this one has met before it knew a generation, and until when a member of one
    /// may answer: then the other is wrong, and otherwise this one.
    differs: Option<(Instant, Ending)>,
}

/// A request of other threads to the event loop.
pub(super) enum Request {
    Event(Event),
    /// See [`Core::begin_training`].
    BeginTraining {
        generation: u64,
        answer: oneshot::Sender<bool>,
    },
}

/// The capacity of the queues of messages and of requests.
const QUEUE: usize = 1024;

/// Starts a process on the thread of the event loop; returns the way to make requests.
pub(super) async fn start(
    settings: Settings,
    own: Candidate,
    (job, secret, tls): (crate::JobId, Option<crate::JobSecret>, Option<crate::JobTls>),
    listener: tokio::net::TcpListener,
    register: Option<Arc<dyn Register>>,
    shared: Arc<Shared>,
) -> mpsc::Sender<Request> {
    let (reports, reported) = mpsc::channel(QUEUE);
    let (requests, requested) = mpsc::channel(QUEUE);
    let origin = Instant::now();
    let control = own.control.clone();
    let (common, newest) = (Common::new(&settings), shared.newest());
    let own_side = Own { job, secret, tls, control, common, newest, reports, warned: Arc::default() };
    let engine = Engine {
        answer_window: settings.answer_window,
        differs: None,
        core: Core::new(settings, own, origin.elapsed()),
        shared,
        connections: Connections::new(own_side.clone()),
        problems: Problems::default(),
        register,
        asking: false,
        queued: None,
        requests: requests.clone(),
        origin,
        timer: None,
    };
    tokio::spawn(accept(listener, own_side));
    tokio::spawn(engine.run(reported, requested));
    requests
}

impl Engine {
    async fn run(mut self, mut reported: mpsc::Receiver<Report>, mut requested: mpsc::Receiver<Request>) {
        let actions = self.core.start(self.origin.elapsed());
        self.perform(actions);
        loop {
            let later = Instant::now() + crate::coordination::LONGEST;
            let timer = self.timer.unwrap_or(later);
            let answered_by = self.differs.as_ref().map_or(later, |(until, _)| *until);
            let event = tokio::select! {
                report = reported.recv() => match report {
                    Some(Report::Message { from, message }) => {
                        self.problems.note(&from, None);
                        Event::Message { from, message }
                    }
                    Some(Report::Opened { address, route }) => {
                        self.connections.opened(address, route);
                        continue;
                    }
                    Some(Report::Closed { address, id, problem, is_gone }) => {
                        self.connections.closed(&address, id);
                        let has_served = problem.is_none();
                        if !has_served {
                            self.problems.note(&address, problem);
                        }
                        match is_gone {
                            true => Event::Gone { address },
                            false if has_served => Event::Closed { address },
                            false => Event::Unanswered { address },
                        }
                    }
                    Some(Report::Differs { address, options }) => {
                        let until = Instant::now() + self.answer_window;
                        self.differs.get_or_insert((until, Ending::Differs { address, options }));
                        continue;
                    }
                    None => return,
                },
                request = requested.recv() => match request {
                    Some(Request::Event(event)) => event,
                    Some(Request::BeginTraining { generation, answer }) => {
                        // If this fails, the thread that has asked waits no longer.
                        let _ = answer.send(self.core.begin_training(generation));
                        continue;
                    }
                    None => return,
                },
                () = tokio::time::sleep_until(answered_by.into()) => {
                    // Once there is a generation, only the one that comes with other options gives up.
                    if let Some((_, ending)) = self.differs.take()
                        && self.core.give_up()
                    {
                        self.shared.end(ending);
                    }
                    continue;
                }
                () = tokio::time::sleep_until(timer.into()) => Event::Timer,
            };
            if matches!(event, Event::Timer) {
                self.timer = None;
            }
            if matches!(event, Event::Read(_) | Event::Registered(_) | Event::Ended) {
                self.asking = false;
                if let Some(next) = self.queued.take() {
                    self.decide(next);
                }
            }
            let actions = self.core.handle(self.origin.elapsed(), event);
            self.perform(actions);
        }
    }

    fn perform(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Send { to, message } => self.connections.send(to, message),
                Action::Timer(at) => self.timer = Some(self.origin + at),
                Action::ReadRegister => {
                    self.ask(|register| match register.has_ended() {
                        Ok(true) => Event::Ended,
                        _ => Event::Read(register.read().map_err(|error| error.to_string())),
                    });
                }
                Action::Decide(next) if self.asking => self.queued = Some(next),
                Action::Decide(next) => self.decide(next),
                Action::Decided { generation, is_member } => {
                    tracing::debug!(control = self.core.own().control, is_member, "{generation} was decided");
                    self.shared.decided(generation, is_member.then_some(self.core.own().identity));
                }
                Action::Left => self.shared.left(),
                Action::End(reason) => self.shared.end(Ending::of(format!("{reason}{}", self.problems.clause()))),
                Action::JobEnded => self.shared.end(Ending::OfTheJob),
            }
        }
    }

    fn decide(&mut self, next: Generation) {
        self.ask(move |register| Event::Registered(register.decide(&next).map_err(|error| error.to_string())));
    }

    /// Asks the register on a thread of its own, one question at a time.
    fn ask(&mut self, question: impl FnOnce(&dyn Register) -> Event + Send + 'static) {
        let Some(register) = self.register.clone().filter(|_| !self.asking) else { return };
        self.asking = true;
        let requests = self.requests.clone();
        tokio::task::spawn_blocking(move || {
            let answer = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| question(&*register)));
            let answer = answer.unwrap_or_else(|_| Event::Registered(Err("its function panicked".to_owned())));
            // The process is gone if this fails.
            let _ = requests.blocking_send(Request::Event(answer));
        });
    }
}
