//! A member's calls that wait for their replies.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::wire::{Call, MemberMessage, Reply, call, member_message, reply};

/// The calls on a connection.
pub(super) struct Calls {
    outbox: mpsc::Sender<MemberMessage>,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    last_id: u64,
    replies: HashMap<u64, oneshot::Sender<reply::Outcome>>,
    /// The connection has ended.
    ended: bool,
}

impl Calls {
    pub(super) fn new(outbox: mpsc::Sender<MemberMessage>) -> Calls {
        Calls { outbox, waiting: Mutex::default() }
    }

    /// Makes a call; returns the reply, or `None` if the connection ends first. Dropping the future cancels the call.
    pub(super) async fn call(self: Arc<Self>, request: call::Request) -> Option<reply::Outcome> {
        let (reply, outcome) = oneshot::channel();
        let id = {
            let mut waiting = self.waiting.lock();
            if waiting.ended {
                return None;
            }
            waiting.last_id += 1;
            let id = waiting.last_id;
            waiting.replies.insert(id, reply);
            id
        };
        let _guard = Cancel { calls: &self, id };
        let call = member_message::Kind::Call(Call { id, request: Some(request) });
        self.outbox.send(MemberMessage { kind: Some(call) }).await.ok()?;
        outcome.await.ok()
    }

    /// Hands a reply to the call that waits for it, if it still does.
    pub(super) fn answer(&self, reply: Reply) {
        let waits = self.waiting.lock().replies.remove(&reply.id);
        if let (Some(waits), Some(outcome)) = (waits, reply.outcome) {
            let _ = waits.send(outcome);
        }
    }

    /// Ends all calls without a reply, and those to come.
    pub(super) fn end(&self) {
        let mut waiting = self.waiting.lock();
        waiting.ended = true;
        waiting.replies.clear();
    }
}

/// Tells the leader that its reply is not waited for any more.
struct Cancel<'a> {
    calls: &'a Calls,
    id: u64,
}

impl Drop for Cancel<'_> {
    fn drop(&mut self) {
        let waited = self.calls.waiting.lock().replies.remove(&self.id).is_some();
        if waited {
            // A full queue is that of a leader that does not read; it ends the call at its deadline.
            let _ = self.calls.outbox.try_send(MemberMessage { kind: Some(member_message::Kind::Cancel(self.id)) });
        }
    }
}
