//! The member's side after joining.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::time::Interval;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use super::alarm::Alarm;
use super::limits::{LONGEST, PUT_TIMEOUT};
use super::pulse::Pulse;
use super::wire::coordination_client::CoordinationClient;
use super::wire::{Heartbeat, Join, LeaderMessage, Leave, MemberMessage, Report, leader_message, member_message};
use super::{CoordinationOptions, wire};
use crate::text::{LONGEST as LONGEST_TEXT, clean};
use crate::{Error, FailureKind, Incarnation, Membership, Result};

/// The stream between a member and the leader.
pub(super) struct Attendance {
    outbox: mpsc::Sender<MemberMessage>,
    inbox: Streaming<LeaderMessage>,
    ticks: Interval,
    pulse: Pulse,
    timeout: Duration,
}

/// An event on a member's stream.
pub(super) enum Event {
    Welcome(wire::Welcome),
    State(wire::State),
    Refused(wire::Refusal),
    Silent(Duration),
    Broken,
}

impl Attendance {
    /// Opens a stream and joins.
    pub(super) async fn begin(
        client: &mut CoordinationClient<Channel>,
        join: Join,
        options: &CoordinationOptions,
    ) -> Result<Attendance, Status> {
        let (outbox, messages) = mpsc::channel(OUTBOX);
        let _ = outbox.try_send(message(member_message::Kind::Join(join)));
        let inbox = client.attend(ReceiverStream::new(messages)).await?.into_inner();
        let mut ticks = tokio::time::interval(options.heartbeat_interval.min(options.heartbeat_timeout / 4));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let timeout = options.heartbeat_timeout;
        Ok(Attendance { outbox, inbox, ticks, pulse: Pulse::new(Instant::now(), timeout), timeout })
    }

    /// Returns the next event and sends heartbeats meanwhile. Cancel safe: no event is lost.
    pub(super) async fn next(&mut self) -> Event {
        loop {
            tokio::select! {
                received = self.inbox.message() => {
                    let Ok(Some(LeaderMessage { kind })) = received else { return Event::Broken };
                    self.pulse.heard(Instant::now());
                    match kind {
                        Some(leader_message::Kind::Welcome(welcome)) => return Event::Welcome(welcome),
                        Some(leader_message::Kind::State(state)) => return Event::State(state),
                        Some(leader_message::Kind::Refusal(refusal)) => return Event::Refused(refusal),
                        None => {}
                    }
                }
                _ = self.ticks.tick() => {
                    // Half of the queue is reserved for other messages; a leader that does not read is detected by its
                    // silence.
                    if self.outbox.capacity() > OUTBOX / 2 {
                        self.send(member_message::Kind::Heartbeat(Heartbeat {}));
                    }
                    let silence = self.pulse.silence(Instant::now());
                    if silence > self.timeout {
                        return Event::Silent(silence);
                    }
                }
            }
        }
    }

    fn send(&self, kind: member_message::Kind) {
        let _ = self.outbox.try_send(message(kind));
    }
}

/// The capacity of a member's queue of messages.
const OUTBOX: usize = 16;

fn message(kind: member_message::Kind) -> MemberMessage {
    MemberMessage { kind: Some(kind) }
}

/// The credentials that a member receives when it joins.
pub(super) struct Credentials {
    pub(super) caller: wire::Caller,
    pub(super) incarnation: Incarnation,
}

/// A member that has joined.
pub(super) struct Member {
    client: CoordinationClient<Channel>,
    commands: mpsc::Sender<Command>,
    membership: Arc<Membership>,
    task: String,
    credentials: Credentials,
    alarm: Arc<Alarm>,
}

/// A message that the member's user sends on the stream.
enum Command {
    Report(Report),
    /// Answered when the leader has closed the stream.
    Leave(oneshot::Sender<()>),
}

impl Member {
    /// Takes over a stream on which all members have joined.
    pub(super) fn begin(
        client: CoordinationClient<Channel>,
        attendance: Attendance,
        state: &wire::State,
        membership: &Membership,
        credentials: Credentials,
        alarm: Arc<Alarm>,
    ) -> Member {
        let (commands, orders) = mpsc::channel(8);
        if let Some(failure) = state.failure.as_ref().and_then(|told| alarm.failure_of(told)) {
            alarm.fail(failure);
        }
        tokio::spawn(attend(attendance, orders, alarm.clone()));
        let (membership, task) = (Arc::new(membership.clone()), membership.task().to_string());
        Member { client, commands, membership, task, credentials, alarm }
    }

    pub(super) fn task(&self) -> &str {
        &self.task
    }

    pub(super) fn incarnation(&self) -> Incarnation {
        self.credentials.incarnation
    }

    pub(super) fn alarm(&self) -> &Alarm {
        &self.alarm
    }

    pub(super) fn report(&self, message: &str, kind: FailureKind) {
        let report = Report { message: clean(message, LONGEST_TEXT), kind: kind.code() };
        let _ = self.commands.try_send(Command::Report(report));
    }

    pub(super) fn leave(&self) -> impl Future<Output = ()> + Send + use<> {
        let (left, done) = oneshot::channel();
        let commands = self.commands.clone();
        async move {
            if commands.send(Command::Leave(left)).await.is_ok() {
                let _ = tokio::time::timeout(LEAVE, done).await;
            }
        }
    }

    pub(super) fn put(&self, key: &str, value: &[u8]) -> impl Future<Output = Result<()>> + Send + use<> {
        let mut client = self.client.clone();
        let request = wire::PutRequest { key: key.to_owned(), value: value.to_vec().into(), caller: self.caller() };
        let rpc = async move { client.put(request).await.map(drop) };
        self.ask(format!("put {key:?}"), rpc, PUT_TIMEOUT)
    }

    /// Returns the value of a key; `None` if no member has put it in time.
    pub(super) fn get(
        &self,
        key: &str,
        timeout: Duration,
    ) -> impl Future<Output = Result<Option<Vec<u8>>>> + Send + use<> {
        let mut client = self.client.clone();
        let what = format!("get {key:?}");
        let request = wire::GetRequest { key: key.to_owned(), timeout_ms: millis(timeout), caller: self.caller() };
        let rpc = async move { client.get(request).await.map(tonic::Response::into_inner) };
        let reply = self.ask(what.clone(), rpc, timeout);
        let (alarm, task, waits) = (self.alarm.clone(), self.task.clone(), !timeout.is_zero());
        async move {
            let reply = reply.await?;
            match (reply.value, reply.failure.and_then(|told| alarm.failure_of(&told))) {
                (Some(value), _) => Ok(Some(value.to_vec())),
                (None, Some(failure)) if waits => Err(Error::Failed { task, what, failure }),
                (None, None) if reply.closing => Err(leader_left(task, what)),
                (None, _) => Ok(None),
            }
        }
    }

    /// Returns the values of all members. `what` is both the key at the leader and the name in messages.
    pub(super) fn exchange(
        &self,
        what: String,
        value: &[u8],
        timeout: Duration,
    ) -> impl Future<Output = Result<Vec<Vec<u8>>>> + Send + use<> {
        let mut client = self.client.clone();
        let request = wire::ExchangeRequest {
            key: what.clone(),
            value: value.to_vec().into(),
            timeout_ms: millis(timeout),
            caller: self.caller(),
        };
        let rpc = async move { client.exchange(request).await.map(tonic::Response::into_inner) };
        let reply = self.ask(what.clone(), rpc, timeout);
        let (alarm, task, membership) = (self.alarm.clone(), self.task.clone(), self.membership.clone());
        async move {
            let started = Instant::now();
            let reply = reply.await?;
            if reply.values.len() == membership.tasks.len() {
                return Ok(reply.values.into_iter().map(|value| value.to_vec()).collect());
            }
            if let Some(failure) = reply.failure.and_then(|told| alarm.failure_of(&told)) {
                return Err(Error::Failed { task, what, failure });
            }
            if reply.closing {
                return Err(leader_left(task, what));
            }
            let absent: Vec<String> = reply.absent.iter().map(|absent| named(&membership, absent)).collect();
            Err(Error::Incomplete { task, what, waited: started.elapsed(), missing: absent.join(", ") })
        }
    }

    fn caller(&self) -> Option<wire::Caller> {
        Some(self.credentials.caller.clone())
    }

    /// Makes a call and fails it when the leader is gone.
    fn ask<T, F>(&self, what: String, rpc: F, timeout: Duration) -> impl Future<Output = Result<T>> + Send + use<T, F>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Status>> + Send + 'static,
    {
        let (task, alarm, address) = (self.task.clone(), self.alarm.clone(), self.membership.leader_address.clone());
        async move {
            let mut gone = alarm.leader_gone();
            let timeout = timeout.min(LONGEST).saturating_add(Duration::from_secs(1));
            let reason = tokio::select! {
                biased;
                answer = tokio::time::timeout(timeout, rpc) => match answer {
                    Ok(Ok(reply)) => return Ok(reply),
                    Ok(Err(status)) if status.code() == tonic::Code::PermissionDenied => {
                        return Err(Error::Refused { task, address, reason: clean(status.message(), LONGEST_TEXT) });
                    }
                    Ok(Err(status)) if status.code() == tonic::Code::ResourceExhausted => {
                        return Err(Error::TooLarge { task, what, problem: clean(status.message(), LONGEST_TEXT) });
                    }
                    Ok(Err(status)) => clean(status.message(), LONGEST_TEXT),
                    Err(_) => "the leader does not answer".to_owned(),
                },
                _ = gone.wait_for(|gone| *gone) => "the leader is gone".to_owned(),
            };
            Err(Error::Call { task, what, reason })
        }
    }
}

/// How long the leader may take to acknowledge a departure.
const LEAVE: Duration = Duration::from_secs(1);

fn millis(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)
}

fn leader_left(task: String, what: String) -> Error {
    Error::Call { task, what, reason: "the leader has left the job".to_owned() }
}

fn named(membership: &Membership, absent: &wire::Absent) -> String {
    let name = membership.named(absent.rank);
    match (absent.left, absent.elsewhere.as_str()) {
        (true, _) => format!("{name} (has left the job)"),
        (false, "") => name,
        (false, elsewhere) => format!("{name} (waits at {})", clean(elsewhere, LONGEST_TEXT)),
    }
}

/// Holds the stream until this member leaves or the leader is gone.
async fn attend(mut attendance: Attendance, mut orders: mpsc::Receiver<Command>, alarm: Arc<Alarm>) {
    let mut leaving: Option<oneshot::Sender<()>> = None;
    loop {
        let event = tokio::select! {
            event = attendance.next() => event,
            order = orders.recv(), if leaving.is_none() => {
                match order {
                    Some(Command::Report(report)) => attendance.send(member_message::Kind::Report(report)),
                    Some(Command::Leave(left)) => {
                        attendance.send(member_message::Kind::Leave(Leave {}));
                        leaving = Some(left);
                    }
                    None => return,
                }
                continue;
            }
        };
        match event {
            Event::State(state) => {
                if let Some(failure) = state.failure.as_ref().and_then(|told| alarm.failure_of(told)) {
                    alarm.fail(failure);
                }
                if state.closing {
                    return alarm.leader_left();
                }
            }
            Event::Welcome(_) => {}
            Event::Broken | Event::Refused(_) if leaving.is_some() => return,
            Event::Broken | Event::Refused(_) => {
                let silence = attendance.pulse.silence(Instant::now());
                return alarm.leader_lost("its process ended or its connection broke".to_owned(), silence);
            }
            Event::Silent(silence) => {
                let how = "it gives no sign of life; its process is stopped, or the network between is broken";
                return alarm.leader_lost(how.to_owned(), silence);
            }
        }
    }
}
