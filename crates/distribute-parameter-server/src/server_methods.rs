//! What a parameter server answers.

use std::sync::Arc;

use tonic::Status;
use tonic::body::Body;

use crate::lifetime::Lifetime;
use crate::store::Store;
use crate::wire::proto::{
    AssignRequest, AttendServer, CreateShard, DescribeRequest, Done, FenceRequest, LeaveRequest, OptimizerOfShards,
    PullRequest, PushRequest, ServerState,
};
use crate::wire::{Inbox, Methods, check_version, reply, reply_all, reply_stream};

/// The service of a parameter server. What is asked of the store is done on the runtime's own threads: handing their other calls
/// over costs more than most of it takes.
pub(crate) struct ServerMethods {
    store: Store,
    lifetime: Arc<Lifetime>,
}

impl ServerMethods {
    pub(crate) fn new(incarnation: u64, lifetime: Arc<Lifetime>) -> ServerMethods {
        ServerMethods { store: Store::new(incarnation), lifetime }
    }

    fn attend(self: Arc<Self>, request: &AttendServer) -> Result<Body, Status> {
        check_version(request.version)?;
        self.store.begin_session(request.session)?;
        let state = ServerState { incarnation: self.store.incarnation() };
        reply_stream(async move |outbox| {
            self.lifetime.attend().hold(&outbox, state).await;
            Ok(())
        })
    }

    async fn create(&self, mut inbox: Inbox) -> Result<Body, Status> {
        while let Some(shard) = inbox.next::<CreateShard>().await? {
            self.store.create(shard)?;
        }
        reply(Done {})
    }

    fn pull(self: Arc<Self>, mut request: PullRequest) -> Result<Body, Status> {
        let wanted = std::mem::take(&mut request.wanted);
        // One after another: a slow reader keeps at most a few shards' elements alive.
        reply_all(wanted.into_iter().filter_map(move |wanted| self.store.pull(&request, &wanted).transpose()))
    }

    async fn push(&self, mut inbox: Inbox) -> Result<Body, Status> {
        let head: PushRequest = inbox.one().await?;
        let mut push = self.store.begin_push(&head)?;
        // The next gradient is read when this one is applied, so a fast worker waits and does not fill memory.
        while let Some(request) = inbox.next::<PushRequest>().await? {
            self.store.push(&mut push, request)?;
        }
        reply(self.store.end_push(push)?)
    }

    async fn assign(&self, mut inbox: Inbox) -> Result<Body, Status> {
        while let Some(request) = inbox.next::<AssignRequest>().await? {
            self.store.assign(&request)?;
        }
        reply(Done {})
    }
}

impl Methods for ServerMethods {
    const NAME: &'static str = "distribute.v1.ParameterServer";

    async fn call(self: Arc<Self>, method: String, mut inbox: Inbox) -> Result<Body, Status> {
        match method.as_str() {
            "Attend" => self.attend(&inbox.one().await?),
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
                // Of whoever coordinates now: one that was given up ends nothing.
                self.store.check_session(request.session)?;
                if request.ended {
                    self.lifetime.end();
                }
                reply(Done {})
            }
            other => Err(Status::unimplemented(format!("a parameter server has no method {other:?}"))),
        }
    }
}
