//! The leader's side of a member's connection.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, split};
use tokio::sync::{Notify, mpsc};
use tokio::task::{AbortHandle, JoinSet};

use super::pulse::now;
use super::roster::Answer;
use super::service::Hub;
use super::wire::{
    Call, CallError, Join, LeaderMessage, MAX_JOIN_BYTES, MAX_MEMBER_BYTES, MemberMessage, PREAMBLE, Receiver, Refusal,
    Reply, Welcome, leader_message, member_message, reply, send,
};
use crate::planted::{Defect, planted};
use crate::{Connection, Door};

/// How long a connection may take to send its first message and to be identified as a member's.
pub(super) const FIRST_MESSAGE: Duration = Duration::from_secs(10);

/// The capacity of the queue of messages to a member.
const OUTBOX: usize = 16;

/// The largest number of calls of a member that wait for their replies.
const MAX_CALLS: usize = 4096;

/// Answers a connection until its member has left or is lost. A member that takes nothing for `timeout` is not sent to
/// any more.
pub(super) async fn serve(hub: Arc<Hub>, door: Arc<Door>, connection: Connection, timeout: Duration) {
    let acquaintance = connection.acquaintance();
    let address = acquaintance.peer().map_or_else(|| "an unknown address".to_owned(), |peer| peer.to_string());
    let (reader, writer) = split(connection);
    let mut inbox = Receiver::new(reader, PREAMBLE, MAX_JOIN_BYTES);
    let first = tokio::select! {
        biased;
        first = tokio::time::timeout(FIRST_MESSAGE, inbox.whole()) => first,
        () = hub.closed() => return,
    };
    // Only members are answered.
    let Ok(Ok(MemberMessage { kind: Some(member_message::Kind::Join(join)) })) = first else { return };
    let mut answer = None;
    let unproved = match acquaintance.claim() {
        // What the member says of itself is what it has proved.
        Some(claim) if claim == claimed(&join) || planted(Defect::AnyClaim) => None,
        Some(_) => return,
        None => door.refusal_of(&acquaintance),
    };
    match unproved {
        Some(reason) => {
            // Versions and jobs that differ are told from a missing secret.
            let reason = hub.inner.lock().roster.other_job_or_version(&join).unwrap_or(reason);
            answer = Some(Answer::Refused { reason, passing: false, generation: 0 });
        }
        None => hub.change(|inner| {
            let given = answer.insert(inner.roster.admit(&join, address, now()));
            matches!(given, Answer::Seated { tell: true, .. })
        }),
    }
    let (outbox, queue) = mpsc::channel(OUTBOX);
    let sending = send(writer, PREAMBLE, queue, timeout);
    match answer {
        Some(Answer::Seated { visit, .. }) => {
            acquaintance.known();
            inbox.limit(MAX_MEMBER_BYTES);
            let incarnation = Vec::from(hub.incarnation.to_bytes()).into();
            // There is room for the first message of an empty queue.
            let _ = outbox.try_send(message(leader_message::Kind::Welcome(Welcome { incarnation })));
            let (here, seat) = (Notify::new(), (join.rank, visit));
            let writing = write(&hub, seat, &here, outbox.clone());
            let reading = read(&hub, seat, &here, &mut inbox, outbox);
            let _ = tokio::join!(writing, reading, sending);
        }
        Some(Answer::Refused { reason, passing, generation }) => {
            if !passing {
                tracing::warn!("a task was refused: {reason}");
            }
            let _ = outbox.try_send(message(leader_message::Kind::Refusal(Refusal { reason, passing, generation })));
            drop(outbox);
            let _ = sending.await;
        }
        None => {}
    }
    // A socket that is closed with bytes unread takes back what it has sent.
    tokio::select! {
        biased;
        () = inbox.drain() => {}
        () = tokio::time::sleep(LINGER) => {}
    }
}

/// Returns what a member that proves the job's secret says of itself: the numbers of its [`Join`].
pub(super) fn claimed(join: &Join) -> Vec<u8> {
    let Join { version, rank, process, world_size, tasks_digest, job, .. } = join;
    let numbers = [&version.to_be_bytes()[..], &rank.to_be_bytes(), &process.to_be_bytes(), &world_size.to_be_bytes()];
    // Of digests of another length the beginning is compared by the roster.
    let digests = [Some(tasks_digest), job.as_ref().map(|job| &job.id)].map(|digest| {
        let mut start = [0; 16];
        digest.into_iter().flatten().zip(&mut start).for_each(|(byte, place)| *place = *byte);
        start
    });
    [numbers.concat(), digests.concat()].concat()
}

/// How long a member may take to read the last messages and to close its side.
pub(super) const LINGER: Duration = Duration::from_secs(1);

fn message(kind: leader_message::Kind) -> LeaderMessage {
    LeaderMessage { kind: Some(kind) }
}

/// Sends the state to a member: when it is here, at every change, and as a heartbeat.
async fn write(hub: &Hub, (rank, visit): (u32, u64), here: &Notify, outbox: mpsc::Sender<LeaderMessage>) {
    let mut changes = hub.members.listen();
    loop {
        let news = async {
            tokio::select! {
                biased;
                () = changes.changed() => {}
                () = here.notified() => {}
            }
        };
        let _ = tokio::time::timeout(hub.heartbeat_interval, news).await;
        let (state, over) = {
            let inner = hub.inner.lock();
            (inner.roster.state(), inner.roster.is_over(rank, visit))
        };
        if outbox.send(message(leader_message::Kind::State(state))).await.is_err() || over {
            return;
        }
    }
}

/// Reads a member's messages until it leaves or is lost, and answers its calls.
async fn read<R: AsyncRead + Unpin>(
    hub: &Arc<Hub>,
    (rank, visit): (u32, u64),
    here: &Notify,
    inbox: &mut Receiver<R>,
    outbox: mpsc::Sender<LeaderMessage>,
) {
    use member_message::Kind;
    let mut changes = hub.members.listen();
    let mut calls = Calls::default();
    loop {
        // What a member sends, which may be much, comes last.
        let received = tokio::select! {
            biased;
            () = calls.ended(), if !calls.running.is_empty() => continue,
            () = changes.changed() => {
                if hub.inner.lock().roster.is_over(rank, visit) {
                    break;
                }
                continue;
            }
            received = inbox.next::<MemberMessage>() => received,
        };
        let now = now();
        let Ok(received) = received else { return hub.change(|inner| inner.roster.broke(rank, visit, now)) };
        hub.inner.lock().roster.heard(rank, visit, now);
        match received.and_then(|message| message.kind) {
            Some(Kind::Leave(_)) => return hub.change(|inner| inner.roster.leave(rank, visit)),
            Some(Kind::Report(report)) => hub.change(|inner| inner.roster.report(rank, visit, &report)),
            Some(Kind::Call(call)) => calls.begin(hub, rank, call, &outbox),
            Some(Kind::Cancel(id)) => calls.cancel(id),
            Some(Kind::Here(_)) => {
                hub.change(|inner| inner.roster.arrive(rank, visit));
                here.notify_one();
            }
            Some(Kind::Heartbeat(_) | Kind::Join(_)) | None => {}
        }
    }
    // Where the leader leaves, calls are still answered.
    while !calls.running.is_empty() {
        calls.ended().await;
    }
}

/// The calls of a member that wait for their replies. Dropping it ends them.
#[derive(Default)]
struct Calls {
    running: JoinSet<u64>,
    handles: HashMap<u64, AbortHandle>,
}

impl Calls {
    fn begin(&mut self, hub: &Arc<Hub>, rank: u32, call: Call, outbox: &mpsc::Sender<LeaderMessage>) {
        let (hub, outbox) = (hub.clone(), outbox.clone());
        let Call { id, request } = call;
        let request = match (request, self.handles.len() < MAX_CALLS && !self.handles.contains_key(&id)) {
            (Some(request), true) => Ok(request),
            (None, _) => Err("the leader does not know this call"),
            (_, false) => Err("too many calls of this task wait for their replies"),
        };
        let handle = self.running.spawn(async move {
            let outcome = match request {
                Ok(request) => hub.answer(rank, request).await,
                Err(reason) => reply::Outcome::Error(CallError { reason: reason.to_owned(), limit: false }),
            };
            let reply = Reply { id, outcome: Some(outcome) };
            // Fails only if the member is gone.
            let _ = outbox.send(message(leader_message::Kind::Reply(reply))).await;
            id
        });
        self.handles.entry(id).or_insert(handle);
    }

    fn cancel(&mut self, id: u64) {
        if let Some(handle) = self.handles.remove(&id) {
            handle.abort();
        }
    }

    /// Waits for the end of a call. Cancel safe.
    async fn ended(&mut self) {
        if let Some(Ok(id)) = self.running.join_next().await {
            self.handles.remove(&id);
        }
    }
}
