//! The service's messages, as they arrive, and the leader's state.

use std::time::{Duration, Instant};

use prost::Message as _;

use super::CoordinationOptions;
use super::alarm::Alarm;
use super::connection::claimed;
use super::member::named;
use super::roster::Answer;
use super::service::Hub;
use super::wire::{
    ExchangeRequest, GetRequest, LeaderMessage, MAX_JOIN_BYTES, MemberMessage, PREAMBLE, call::Request, leader_message,
    max_leader_bytes, member_message::Kind, reply::Outcome,
};
use crate::Membership;
use crate::fuzz::{Input, messages, runtime};
use crate::secret::Terms;

/// The leader's job: three members.
pub(super) fn membership() -> Membership {
    Membership::new(0, 3, "127.0.0.1:2222").expect("rank 0 of 3")
}

/// A member's messages after those of the others, which have joined.
pub(crate) fn member_messages(bytes: &[u8]) -> bool {
    let (received, _) = messages::<MemberMessage>(Input(bytes), PREAMBLE, MAX_JOIN_BYTES);
    let options = CoordinationOptions::default();
    let hub = Hub::new(membership(), &options).expect("the system has random numbers");
    let runtime = runtime();
    let (mut seat, mut now) = (None, Instant::now());
    for message in received {
        now += Duration::from_millis(700);
        let mut inner = hub.inner.lock();
        match (message.kind, seat) {
            (Some(Kind::Join(join)), _) => {
                assert!(claimed(&join).len() <= Terms::MAX_CLAIM_BYTES);
                match inner.roster.admit(&join, "an address".to_owned(), now) {
                    Answer::Seated { visit, .. } => {
                        assert!(join.rank < 3);
                        seat = Some((join.rank, visit));
                    }
                    Answer::Refused { reason, .. } => assert!(!reason.is_empty() && !reason.contains('\n')),
                }
            }
            (Some(Kind::Leave(_)), Some((rank, visit))) => drop(inner.roster.leave(rank, visit)),
            (Some(Kind::Report(report)), Some((rank, visit))) => drop(inner.roster.report(rank, visit, &report)),
            (Some(Kind::Heartbeat(_)), Some((rank, visit))) => inner.roster.heard(rank, visit, now),
            (Some(Kind::Here(_)), Some((rank, visit))) => drop(inner.roster.arrive(rank, visit)),
            (Some(Kind::Call(call)), Some((rank, _))) => {
                drop(inner);
                let Some(request) = call.request.map(at_once) else { continue };
                let answer = runtime.block_on(hub.answer(rank, request));
                let reply = super::wire::Reply { id: call.id, outcome: Some(answer) };
                assert!(reply.encoded_len() <= max_leader_bytes(3));
                continue;
            }
            _ => {}
        }
        inner.roster.look(now);
        let state = inner.roster.state();
        assert!(state.missing_count <= 3 && state.missing.iter().all(|rank| *rank < 3));
        assert!(state.encoded_len() <= max_leader_bytes(3));
    }
    seat.is_some()
}

/// Returns a call that does not wait.
fn at_once(request: Request) -> Request {
    match request {
        Request::Get(request) => Request::Get(GetRequest { timeout_ms: 0, ..request }),
        Request::Exchange(request) => Request::Exchange(ExchangeRequest { timeout_ms: 0, ..request }),
        put => put,
    }
}

/// The leader's messages.
pub(crate) fn leader_messages(bytes: &[u8]) -> bool {
    let (received, _) = messages::<LeaderMessage>(Input(bytes), PREAMBLE, max_leader_bytes(1));
    let alarm = Alarm::new(membership());
    for message in &received {
        let failure = match &message.kind {
            Some(leader_message::Kind::State(state)) => state.failure.as_ref(),
            Some(leader_message::Kind::Reply(reply)) => match &reply.outcome {
                Some(Outcome::Get(reply)) => reply.failure.as_ref(),
                Some(Outcome::Exchange(reply)) => {
                    for absent in &reply.absent {
                        assert!(!named(&membership(), absent).contains('\n'));
                    }
                    reply.failure.as_ref()
                }
                _ => None,
            },
            _ => None,
        };
        // It is logged on one line.
        let failure = failure.and_then(|failure| alarm.failure_of(failure)).map(|failure| failure.to_string());
        assert!(failure.is_none_or(|failure| !failure.contains('\n') && failure.chars().count() < 25_000));
    }
    !received.is_empty()
}

/// Returns connections of members, and of the leader, for the corpus.
#[cfg(test)]
pub(crate) fn samples() -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    use super::roster::{VERSION, digest, micros};
    use super::wire::{
        Absent, Call, CallError, ExchangeReply, Failure, GetReply, Heartbeat, Here, Job, Join, Leave, Lost, PutReply,
        PutRequest, Refusal, Reply, Report, State, Welcome, failure::Cause,
    };
    use crate::fuzz::connection;
    let (membership, options) = (membership(), CoordinationOptions::default());
    let id = Vec::from(membership.job_id().to_bytes()).into();
    let job = Some(Job { id, name: "job".to_owned(), derived: membership.job_id().is_derived(), ..Job::default() });
    let join = |rank| {
        let tasks_digest = Vec::from(digest(&membership.tasks)).into();
        Kind::Join(Join {
            version: VERSION,
            rank,
            process: 5,
            job: job.clone(),
            world_size: 3,
            tasks_digest,
            tasks: vec![],
            heartbeat_interval_us: micros(options.heartbeat_interval),
            heartbeat_timeout_us: micros(options.heartbeat_timeout),
        })
    };
    let call = |id, request| Kind::Call(Call { id, request: Some(request) });
    let (key, value) = ("key".to_owned(), bytes::Bytes::from_static(b"value"));
    let talk = [
        join(0),
        Kind::Here(Here {}),
        join(1),
        Kind::Here(Here {}),
        join(2),
        Kind::Here(Here {}),
        Kind::Heartbeat(Heartbeat {}),
        call(1, Request::Put(PutRequest { key: key.clone(), value: value.clone() })),
        call(2, Request::Get(GetRequest { key: key.clone(), timeout_ms: 9 })),
        call(3, Request::Exchange(ExchangeRequest { key, value: value.clone(), timeout_ms: 9 })),
        Kind::Cancel(3),
        Kind::Report(Report { message: "loss is NaN".to_owned(), kind: 2 }),
        Kind::Leave(Leave {}),
    ];
    let member = |kind: Kind| MemberMessage { kind: Some(kind) };
    let members = vec![
        connection(9, PREAMBLE, &talk.clone().map(member)),
        connection(255, PREAMBLE, &[join(2), Kind::Leave(Leave {}), join(2), Kind::Here(Here {})].map(member)),
    ];
    let lost =
        Failure { rank: 1, cause: Some(Cause::Lost(Lost { how: "gone".to_owned(), last_heard_ms: 7 })), kind: 1 };
    let reply = |outcome| leader_message::Kind::Reply(Reply { id: 1, outcome: Some(outcome) });
    let absent = vec![Absent { rank: 2, left: false, elsewhere: "barrier 2".to_owned() }];
    let told = [
        leader_message::Kind::Welcome(Welcome { incarnation: vec![7; 16].into() }),
        leader_message::Kind::State(State { missing: vec![1, 2], missing_count: 2, ..State::default() }),
        reply(Outcome::Put(PutReply {})),
        reply(Outcome::Get(GetReply { value: Some(value.clone()), ..GetReply::default() })),
        reply(Outcome::Exchange(ExchangeReply {
            values: vec![value],
            absent,
            failure: Some(lost.clone()),
            closing: true,
        })),
        reply(Outcome::Error(CallError { reason: "too large".to_owned(), limit: true })),
        leader_message::Kind::State(State { failure: Some(lost), closing: true, ..State::default() }),
        leader_message::Kind::Refusal(Refusal { reason: "full".to_owned(), passing: true, generation: 3 }),
    ];
    let leader = told.map(|kind| LeaderMessage { kind: Some(kind) });
    (members, vec![connection(5, PREAMBLE, &leader), connection(255, PREAMBLE, &leader[..2])])
}
