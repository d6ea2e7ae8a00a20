//! The methods of a parameter server.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tonic::Status;
use tonic::body::Body;

use crate::lifetime::Lifetime;
use crate::store::{Assigning, Creating, Store};
use crate::wire::proto::{
    AssignRequest, AttendServer, CompleteRequest, CreateShard, DescribeRequest, Done, FenceRequest, FindRequest,
    LeaveRequest, OptimizerOfShards, PullRequest, PushRequest, RestoreRequest, ServerState,
};
use crate::wire::{
    Inbox, MAX_HEAD_BYTES, MAX_MESSAGE_BYTES, Methods, SHORT_MESSAGE_BYTES, reply, reply_all, reply_stream,
};

/// The service of a parameter server. Operations on the store run on the runtime's own threads, since most take less
/// time than handing them over to others would.
pub(crate) struct ServerMethods {
    store: Store,
    lifetime: Arc<Lifetime>,
    /// The silence after which a coordinator counts as lost.
    silence: Duration,
    turn: Mutex<()>,
}

impl ServerMethods {
    pub(crate) fn new(incarnation: u64, lifetime: Arc<Lifetime>, silence: Duration) -> ServerMethods {
        ServerMethods { store: Store::new(incarnation), lifetime, silence, turn: Mutex::default() }
    }

    async fn attend(self: Arc<Self>, mut inbox: Inbox) -> Result<Body, Status> {
        let request: AttendServer = inbox.one().await?;
        let attended = {
            // One at a time, so that the hold is that of the session that began last.
            let _turn = self.turn.lock();
            self.store.begin_session(&request)?;
            self.lifetime.attend()
        };
        let state = ServerState { incarnation: self.store.incarnation() };
        reply_stream(async move |outbox| {
            attended.hold::<AttendServer>(inbox, &outbox, state, self.silence).await;
            Ok(())
        })
    }

    async fn create(&self, mut inbox: Inbox) -> Result<Body, Status> {
        let mut creating = Creating::default();
        while let Some(shard) = inbox.next::<CreateShard>().await? {
            self.store.create(&mut creating, shard)?;
        }
        whole(creating.is_done())?;
        reply(Done {})
    }

    fn pull(self: Arc<Self>, mut request: PullRequest) -> Result<Body, Status> {
        self.store.check_pull(&request)?;
        let wanted = std::mem::take(&mut request.wanted);
        // Lazily, so that a slow reader keeps at most a few messages' elements alive.
        let answers = wanted.into_iter().flat_map(move |wanted| {
            let store = self.clone();
            let (answer, refused) = match self.store.pull(&request, &wanted) {
                Ok(answer) => (answer, None),
                Err(status) => (None, Some(Err(status))),
            };
            refused.into_iter().chain(answer.into_iter().flatten().map(move |part| Ok(store.store.signed(part))))
        });
        reply_all(answers)
    }

    async fn push(&self, mut inbox: Inbox) -> Result<Body, Status> {
        let head: PushRequest = inbox.one().await?;
        let mut push = self.store.begin_push(&head)?;
        // The next gradient is read after this one is applied, so a fast worker waits and does not fill memory.
        while let Some(request) = inbox.next::<PushRequest>().await? {
            self.store.push(&mut push, request)?;
        }
        reply(self.store.end_push(push)?)
    }

    async fn assign(&self, mut inbox: Inbox) -> Result<Body, Status> {
        let mut assigning = Assigning::default();
        while let Some(request) = inbox.next::<AssignRequest>().await? {
            self.store.assign(&mut assigning, request)?;
        }
        whole(assigning.is_done())?;
        reply(Done {})
    }
}

impl Methods for ServerMethods {
    const NAME: &'static str = "distribute.v1.ParameterServer";

    fn admit(&self, method: &str, session: u64) -> Result<usize, Status> {
        match method {
            "Find" => return Ok(SHORT_MESSAGE_BYTES),
            // This call begins a session.
            "Attend" => return Ok(MAX_HEAD_BYTES),
            _ => self.store.check_session(session)?,
        }
        match method {
            "Complete" | "Restore" | "Describe" | "Fence" | "Leave" => Ok(SHORT_MESSAGE_BYTES),
            "SetOptimizer" | "Pull" => Ok(MAX_HEAD_BYTES),
            "Create" | "Push" | "Assign" => Ok(MAX_MESSAGE_BYTES),
            other => Err(no_method(other)),
        }
    }

    async fn call(self: Arc<Self>, method: String, mut inbox: Inbox) -> Result<Body, Status> {
        match method.as_str() {
            "Find" => {
                inbox.one::<FindRequest>().await?;
                reply(self.store.find())
            }
            "Attend" => self.attend(inbox).await,
            "Complete" => {
                self.store.complete(&inbox.one::<CompleteRequest>().await?)?;
                reply(Done {})
            }
            "Restore" => {
                self.store.restore(&inbox.one::<RestoreRequest>().await?)?;
                reply(Done {})
            }
            "Create" => self.create(inbox).await,
            "SetOptimizer" => {
                self.store.set_optimizer(&inbox.one::<OptimizerOfShards>().await?)?;
                reply(Done {})
            }
            "Describe" => reply(self.store.describe(inbox.one::<DescribeRequest>().await?.session)?),
            "Pull" => self.pull(inbox.one().await?),
            "Push" => self.push(inbox).await,
            "Assign" => self.assign(inbox).await,
            "Fence" => {
                self.store.fence(&inbox.one::<FenceRequest>().await?)?;
                reply(Done {})
            }
            "Leave" => {
                let request = inbox.one::<LeaveRequest>().await?;
                // Only the current coordinator's call counts; one that was given up ends nothing.
                self.store.check_session(request.session)?;
                if request.ended {
                    self.lifetime.end(request.failure);
                }
                reply(Done {})
            }
            other => Err(no_method(other)),
        }
    }
}

fn no_method(name: &str) -> Status {
    Status::unimplemented(format!("a parameter server has no method {name:?}"))
}

/// Checks that all parts of the last payload have arrived.
fn whole(is_done: bool) -> Result<(), Status> {
    if is_done {
        Ok(())
    } else {
        Err(Status::invalid_argument("the call has ended before all parts of its last payload"))
    }
}
