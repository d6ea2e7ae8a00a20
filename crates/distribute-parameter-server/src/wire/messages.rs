//! The messages of the services as calls carry them: which have a payload.

use bytes::Bytes;
use distribute_cluster::grpc::GrpcMessage;

use super::proto;

macro_rules! messages {
    ($($plain:ident),*; $($with_payload:ident),*) => {
        $(impl GrpcMessage for proto::$plain {})*
        $(impl GrpcMessage for proto::$with_payload {
            fn take_payload(&mut self) -> Bytes {
                std::mem::take(&mut self.payload)
            }
        })*
    };
}

messages!(
    Done, FindRequest, Found, CompleteRequest, RestoreRequest, ReleaseRequest, Released, AttendServer, ServerState,
    OptimizerOfShards, DescribeRequest, Description, PullRequest, PushReply, FenceRequest, LeaveRequest, AttendWorker,
    WorkerState, Resource, AttendIsland, IslandState, Fragment, FragmentState, LeaveIsland;
    CreateShard, Elements, PushRequest, AssignRequest, Closure, Outcome, CreateFragment, Changes, OuterValues
);
