//! The member's side after joining.

use std::io::{ErrorKind, Result as IoResult};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{ReadHalf, split};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Interval;

use super::alarm::Alarm;
use super::calls::Calls;
use super::limits::{LONGEST, PUT_TIMEOUT};
use super::pulse::{Pulse, now};
use super::wire::{
    CallError, Heartbeat, Here, Join, LeaderMessage, Leave, MemberMessage, PREAMBLE, Receiver, Report, call,
    leader_message, max_leader_bytes, member_message, reply, send,
};
use super::{CoordinationOptions, wire};
use crate::text::{LONGEST as LONGEST_TEXT, clean};
use crate::tls::socket::Socket;
use crate::{Error, FailureKind, Incarnation, Membership, Result};

/// A member's side of the connection to the leader.
pub(super) struct Attendance {
    outbox: mpsc::Sender<MemberMessage>,
    inbox: Receiver<ReadHalf<Socket>>,
    sending: JoinHandle<IoResult<()>>,
    ticks: Interval,
    pulse: Pulse,
    timeout: Duration,
}

/// An event on a member's connection.
pub(super) enum Event {
    Welcome(wire::Welcome),
    State(wire::State),
    Refused(wire::Refusal),
    Reply(wire::Reply),
    Silent(Duration),
    /// The connection broke, or what listens there sends what no leader does.
    Broken(Option<String>),
}

impl Attendance {
    /// Joins by a connection.
    pub(super) fn begin(stream: Socket, join: Join, world_size: usize, options: &CoordinationOptions) -> Attendance {
        let (reader, writer) = split(stream);
        let timeout = options.heartbeat_timeout;
        let (outbox, queue) = mpsc::channel(OUTBOX);
        // There is room for the first message of an empty queue.
        let _ = outbox.try_send(message(member_message::Kind::Join(join)));
        let sending = tokio::spawn(send(writer, PREAMBLE, queue, timeout));
        let inbox = Receiver::new(reader, PREAMBLE, max_leader_bytes(world_size));
        let mut ticks = tokio::time::interval(options.heartbeat_interval.min(timeout / 4));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        Attendance { outbox, inbox, sending, ticks, pulse: Pulse::new(now(), timeout), timeout }
    }

    /// Tells the leader that the member has its welcome, and stays on this connection.
    pub(super) fn arrive(&self) {
        self.send(member_message::Kind::Here(Here {}));
    }

    /// Returns the next event and sends heartbeats meanwhile. Cancel safe: no event is lost.
    pub(super) async fn next(&mut self) -> Event {
        loop {
            // Heartbeats come first, since the leader may send much.
            let received = tokio::select! {
                biased;
                _ = self.ticks.tick() => {
                    // Half of the queue is reserved for other messages; a leader that does not read is detected by its
                    // silence.
                    if self.outbox.capacity() > OUTBOX / 2 {
                        self.send(member_message::Kind::Heartbeat(Heartbeat {}));
                    }
                    let silence = self.pulse.silence(now());
                    if silence <= self.timeout {
                        continue;
                    }
                    // A message that has arrived meanwhile ends the silence.
                    match tokio::time::timeout(Duration::ZERO, self.inbox.next()).await {
                        Ok(received) => received,
                        Err(_) => return Event::Silent(silence),
                    }
                }
                received = self.inbox.next::<LeaderMessage>() => received,
            };
            if let Some(event) = self.event(received) {
                return event;
            }
        }
    }

    /// Returns the event of what was received; `None` if a part of a message was.
    fn event(&mut self, received: IoResult<Option<LeaderMessage>>) -> Option<Event> {
        let received = match received {
            Ok(received) => received,
            Err(error) if error.kind() == ErrorKind::InvalidData => {
                return Some(Event::Broken(Some(error.to_string())));
            }
            Err(_) => return Some(Event::Broken(None)),
        };
        // A part of a message is a sign of life, too.
        self.pulse.heard(now());
        Some(match received.and_then(|message| message.kind)? {
            leader_message::Kind::Welcome(welcome) => Event::Welcome(welcome),
            leader_message::Kind::State(state) => Event::State(state),
            leader_message::Kind::Refusal(refusal) => Event::Refused(refusal),
            leader_message::Kind::Reply(reply) => Event::Reply(reply),
        })
    }

    fn send(&self, kind: member_message::Kind) {
        let _ = self.outbox.try_send(message(kind));
    }
}

impl Drop for Attendance {
    fn drop(&mut self) {
        // Closes the member's side, although calls still hold the queue.
        self.sending.abort();
    }
}

/// The capacity of a member's queue of messages.
const OUTBOX: usize = 16;

fn message(kind: member_message::Kind) -> MemberMessage {
    MemberMessage { kind: Some(kind) }
}

/// A member that has joined.
pub(super) struct Member {
    calls: Arc<Calls>,
    commands: mpsc::Sender<Command>,
    membership: Arc<Membership>,
    task: String,
    incarnation: Incarnation,
    alarm: Arc<Alarm>,
}

/// A message that the member's user sends.
enum Command {
    Report(Report),
    /// Answered when the leader has closed the connection.
    Leave(oneshot::Sender<()>),
}

impl Member {
    /// Takes over a connection once all members have joined.
    pub(super) fn begin(
        attendance: Attendance,
        state: &wire::State,
        membership: &Membership,
        incarnation: Incarnation,
        alarm: Arc<Alarm>,
    ) -> Member {
        let (commands, orders) = mpsc::channel(8);
        if let Some(failure) = state.failure.as_ref().and_then(|told| alarm.failure_of(told)) {
            alarm.fail(failure);
        }
        let calls = Arc::new(Calls::new(attendance.outbox.clone()));
        let attended = attend(attendance, orders, calls.clone(), alarm.clone());
        let ended = calls.clone();
        tokio::spawn(async move {
            attended.await;
            ended.end();
        });
        let (membership, task) = (Arc::new(membership.clone()), membership.task().to_string());
        Member { calls, commands, membership, task, incarnation, alarm }
    }

    pub(super) fn task(&self) -> &str {
        &self.task
    }

    pub(super) fn incarnation(&self) -> Incarnation {
        self.incarnation
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
        let request = wire::PutRequest { key: key.to_owned(), value: value.to_vec().into() };
        let put = |outcome| matches!(outcome, reply::Outcome::Put(_)).then_some(());
        self.ask(format!("put {key:?}"), call::Request::Put(request), put, PUT_TIMEOUT)
    }

    /// Returns the value of a key; `None` if no member has put it in time.
    pub(super) fn get(
        &self,
        key: &str,
        timeout: Duration,
    ) -> impl Future<Output = Result<Option<Vec<u8>>>> + Send + use<> {
        let what = format!("get {key:?}");
        let request = wire::GetRequest { key: key.to_owned(), timeout_ms: millis(timeout) };
        let got = |outcome| match outcome {
            reply::Outcome::Get(reply) => Some(reply),
            _ => None,
        };
        let reply = self.ask(what.clone(), call::Request::Get(request), got, timeout);
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
        let (key, value) = (what.clone(), value.to_vec().into());
        let request = wire::ExchangeRequest { key, value, timeout_ms: millis(timeout) };
        let exchanged = |outcome| match outcome {
            reply::Outcome::Exchange(reply) => Some(reply),
            _ => None,
        };
        let reply = self.ask(what.clone(), call::Request::Exchange(request), exchanged, timeout);
        let (alarm, task, membership) = (self.alarm.clone(), self.task.clone(), self.membership.clone());
        async move {
            let started = tokio::time::Instant::now();
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

    /// Makes a call, of whose outcome `expected` takes the reply, and fails it when the leader is gone.
    fn ask<T, F>(
        &self,
        what: String,
        request: call::Request,
        expected: F,
        timeout: Duration,
    ) -> impl Future<Output = Result<T>> + Send + use<T, F>
    where
        T: Send + 'static,
        F: FnOnce(reply::Outcome) -> Option<T> + Send + 'static,
    {
        let (task, alarm) = (self.task.clone(), self.alarm.clone());
        let outcome = self.calls.clone().call(request);
        async move {
            let mut gone = alarm.leader_gone();
            let timeout = timeout.min(LONGEST).saturating_add(Duration::from_secs(1));
            let reason = tokio::select! {
                biased;
                outcome = tokio::time::timeout(timeout, outcome) => match outcome {
                    Ok(Some(reply::Outcome::Error(CallError { reason, limit: true }))) => {
                        return Err(Error::TooLarge { task, what, problem: clean(&reason, LONGEST_TEXT) });
                    }
                    Ok(Some(reply::Outcome::Error(CallError { reason, .. }))) => clean(&reason, LONGEST_TEXT),
                    Ok(Some(outcome)) => match expected(outcome) {
                        Some(reply) => return Ok(reply),
                        None => "the leader gave the reply to another call".to_owned(),
                    },
                    Ok(None) => "the leader is gone".to_owned(),
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

pub(super) fn named(membership: &Membership, absent: &wire::Absent) -> String {
    let name = membership.named(absent.rank);
    match (absent.left, absent.elsewhere.as_str()) {
        (true, _) => format!("{name} (has left the job)"),
        (false, "") => name,
        (false, elsewhere) => format!("{name} (waits at {})", clean(elsewhere, LONGEST_TEXT)),
    }
}

/// Waits for room in the queue, and puts a message into it. Nothing is left to say where the connection has ended.
async fn deliver(outbox: mpsc::Sender<MemberMessage>, message: Option<MemberMessage>) {
    if let Some(message) = message {
        let _ = outbox.send(message).await;
    }
}

/// Holds the connection until this member leaves or the leader is gone.
async fn attend(mut attendance: Attendance, mut orders: mpsc::Receiver<Command>, calls: Arc<Calls>, alarm: Arc<Alarm>) {
    let (mut leaving, mut closing) = (None, false);
    // A report or a departure is not lost where the queue is full, and keeps its place among the calls that wait too.
    let (mut delivery, mut is_delivering) = (pin!(deliver(attendance.outbox.clone(), None)), false);
    loop {
        let event = tokio::select! {
            biased;
            () = &mut delivery, if is_delivering => {
                is_delivering = false;
                continue;
            }
            order = orders.recv(), if leaving.is_none() && !is_delivering => {
                let kind = match order {
                    Some(Command::Report(report)) => member_message::Kind::Report(report),
                    Some(Command::Leave(left)) => {
                        leaving = Some(left);
                        member_message::Kind::Leave(Leave {})
                    }
                    None => return,
                };
                delivery.set(deliver(attendance.outbox.clone(), Some(message(kind))));
                is_delivering = true;
                continue;
            }
            event = attendance.next() => event,
        };
        match event {
            Event::State(state) => {
                if let Some(failure) = state.failure.as_ref().and_then(|told| alarm.failure_of(told)) {
                    alarm.fail(failure);
                }
                // What it has answered still comes before the end of the connection.
                closing |= state.closing;
            }
            Event::Reply(reply) => calls.answer(reply),
            Event::Welcome(_) => {}
            Event::Broken(_) | Event::Refused(_) | Event::Silent(_) if closing => return alarm.leader_left(),
            Event::Broken(_) | Event::Refused(_) if leaving.is_some() => return,
            Event::Broken(_) | Event::Refused(_) => {
                let silence = attendance.pulse.silence(now());
                return alarm.leader_lost("its process ended or its connection broke".to_owned(), silence);
            }
            Event::Silent(silence) => {
                let how = "it gives no sign of life; its process is stopped, or the network between is broken";
                return alarm.leader_lost(how.to_owned(), silence);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::TcpStream;

    /// Returns whether the leader gets a message of this kind, once it reads again: when the order was given, the queue
    /// of the member was full.
    async fn arrives(order: impl FnOnce(&Member), is_wanted: impl Fn(&member_message::Kind) -> bool) -> bool {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(&[listener.local_addr().unwrap()]).await.unwrap();
        let (leader, _) = listener.accept().await.unwrap();
        let membership = Membership::new(1, 2, "127.0.0.1:1").unwrap();
        let options = CoordinationOptions::default();
        let attendance = Attendance::begin(Socket::from(stream), Join::default(), 2, &options);
        let outbox = attendance.outbox.clone();
        let alarm = Arc::new(Alarm::new(membership.clone()));
        let incarnation = Incarnation::random().unwrap();
        let member = Member::begin(attendance, &wire::State::default(), &membership, incarnation, alarm);
        // The system takes some of them, until its buffers are full too.
        let value = vec![0; super::super::limits::MAX_VALUE_BYTES];
        let put = wire::PutRequest { key: "k".to_owned(), value: value.into() };
        let put = message(member_message::Kind::Call(wire::Call { id: 1, request: Some(call::Request::Put(put)) }));
        while tokio::time::timeout(Duration::from_millis(50), outbox.send(put.clone())).await.is_ok() {}
        order(&member);
        // The order is taken while there is no room.
        tokio::time::sleep(Duration::from_millis(20)).await;
        let mut inbox = Receiver::new(leader, PREAMBLE, wire::MAX_MEMBER_BYTES);
        let reading = async {
            loop {
                let received: MemberMessage = inbox.whole().await.unwrap();
                if received.kind.is_some_and(|kind| is_wanted(&kind)) {
                    return;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(5), reading).await.is_ok()
    }

    #[tokio::test]
    async fn a_departure_that_finds_a_full_queue_arrives() {
        let leave = |member: &Member| drop(tokio::spawn(member.leave()));
        assert!(arrives(leave, |kind| matches!(kind, member_message::Kind::Leave(_))).await);
    }

    #[tokio::test]
    async fn a_report_that_finds_a_full_queue_arrives() {
        let report = |member: &Member| member.report("disk full", FailureKind::Permanent);
        let is_report = |kind: &member_message::Kind| match kind {
            member_message::Kind::Report(report) => report.message == "disk full",
            _ => false,
        };
        assert!(arrives(report, is_report).await);
    }
}
