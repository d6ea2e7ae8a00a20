//! Calls to a server, one after another.

use distribute_device::DType;
use prost::Message;

use super::{Assigning, Creating, Extent, Push, Store};
use crate::numbers;
use crate::wire::MAX_PAYLOAD_BYTES;
use crate::wire::proto::{
    AssignRequest, AttendServer, CompleteRequest, CreateShard, FenceRequest, OptimizerOfShards, Origin, PullRequest,
    PushRequest, RestoreRequest,
};

/// The first session.
const SESSION: u64 = 7;

/// Each call is a kind, a length, and as many bytes of its message. Calls are those of the current session.
pub(crate) fn calls(mut bytes: &[u8]) -> bool {
    let store = Store::new(99);
    let mut session = SESSION;
    store.begin_session(&AttendServer { session, ..AttendServer::default() }).expect("the first session");
    let (mut creating, mut assigning, mut push) = (Creating::default(), Assigning::default(), None::<Push>);
    let mut accepted = 0;
    while let [kind, len, rest @ ..] = bytes {
        let (message, rest) = rest.split_at(usize::from(*len).min(rest.len()));
        bytes = rest;
        let is_accepted = match kind % 12 {
            0 => read::<CreateShard>(message).is_some_and(|message| {
                let message = CreateShard { session, ..message };
                let created = store.create(&mut creating, message);
                created.inspect_err(|_| creating = Creating::default()).is_ok()
            }),
            1 => read::<OptimizerOfShards>(message)
                .is_some_and(|message| store.set_optimizer(&OptimizerOfShards { session, ..message }).is_ok()),
            2 => read::<PullRequest>(message).is_some_and(|request| pull(&store, session, request)),
            3 => read::<PushRequest>(message).is_some_and(|head| {
                let begun = store.begin_push(&PushRequest { origin: origin(session, head.origin), ..head });
                push = begun.ok();
                push.is_some()
            }),
            4 => push.as_mut().is_some_and(|push| {
                read::<PushRequest>(message).is_some_and(|request| store.push(push, request).is_ok())
            }),
            5 => push.take().is_some_and(|push| store.end_push(push).is_ok()),
            6 => read::<AssignRequest>(message).is_some_and(|request| {
                let request = AssignRequest { origin: origin(session, request.origin), ..request };
                let assigned = store.assign(&mut assigning, request);
                assigned.inspect_err(|_| assigning = Assigning::default()).is_ok()
            }),
            7 => read::<FenceRequest>(message)
                .is_some_and(|request| store.fence(&FenceRequest { session, ..request }).is_ok()),
            9 => read::<AttendServer>(message).is_some_and(|request| {
                let found = store.find();
                let begun = store.begin_session(&AttendServer { session: session + 1, ..request.clone() });
                session += u64::from(begun.is_ok());
                assert!(begun.is_err() || request.lineage != found.lineage || store.find().complete == found.complete);
                begun.is_ok()
            }),
            10 => read::<CompleteRequest>(message)
                .is_some_and(|request| store.complete(&CompleteRequest { session, ..request }).is_ok()),
            11 => read::<RestoreRequest>(message)
                .is_some_and(|request| store.restore(&RestoreRequest { session, ..request }).is_ok()),
            _ => store.describe(session).is_ok_and(|description| {
                assert!(description.shards.iter().all(|shard| Extent::of(shard).is_ok()));
                !description.shards.is_empty()
            }),
        };
        accepted += u32::from(is_accepted);
    }
    accepted > 1
}

/// Messages are encoded to what is decoded again.
fn read<M: Message + Default + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Option<M> {
    let message = M::decode(bytes).ok()?;
    assert_eq!(M::decode(&*message.encode_to_vec()).as_ref(), Ok(&message));
    Some(message)
}

fn origin(session: u64, origin: Option<Origin>) -> Option<Origin> {
    origin.map(|origin| Origin { session, ..origin })
}

/// The parts of an answer are one after another, none is too long, and together they are what was asked for.
fn pull(store: &Store, session: u64, request: PullRequest) -> bool {
    let request = PullRequest { session, ..request };
    if store.check_pull(&request).is_err() {
        return false;
    }
    let mut is_answered = false;
    for wanted in &request.wanted {
        let Ok(Some(answer)) = store.pull(&request, wanted) else { continue };
        let (mut elements, mut ended) = (0, false);
        for part in answer {
            assert!(!ended && part.first == elements && part.payload.len() <= MAX_PAYLOAD_BYTES);
            let dtype = numbers::dtype(part.dtype).expect("the type of a shard");
            assert!(part.payload.len().is_multiple_of(dtype.size_bytes()));
            assert!(part.more || wanted.shard == part.shard);
            elements += (part.payload.len() / dtype.size_bytes()) as u64;
            ended = !part.more;
        }
        assert!(ended);
        is_answered = true;
    }
    is_answered
}

/// Returns calls of a training, for the corpus.
#[cfg(test)]
pub(crate) fn samples() -> Vec<Vec<u8>> {
    use crate::wire::proto::{StepRecord, Wanted};
    use distribute_rules::{OptimizerDescription, UpdateRule};
    let call = |kind: u8, message: &dyn Fn() -> Vec<u8>| {
        let message = message();
        [&[kind, u8::try_from(message.len()).expect("a short message")][..], &message].concat()
    };
    let shard = |shard, more, payload: Vec<u8>| CreateShard {
        shard,
        variable: "table".to_owned(),
        shape: vec![4, 2],
        rows: 4,
        shards: 1,
        more,
        payload: payload.into(),
        ..CreateShard::default()
    };
    let optimizer = |rule, contributions, steps| {
        let description = OptimizerDescription { learning_rate: 0.5, rule };
        let description = serde_json::to_string(&description).expect("a description");
        OptimizerOfShards { description, shards: vec![0], contributions, steps, ..OptimizerOfShards::default() }
    };
    let origin = |closure, round| {
        Some(Origin { worker: 1, epoch: 1, closure, once: true, horizon: closure + 1, round, ..Origin::default() })
    };
    let dtype = DType::F32.code().into();
    let begin = |closure, round| PushRequest { origin: origin(closure, round), ..PushRequest::default() };
    let values = |count: usize| bytemuck::cast_slice::<f32, u8>(&vec![1.0; count]).to_vec();
    let rows = numbers::rows_to_bytes([1, 3]);
    let whole = PushRequest { dtype, payload: values(8).into(), ..PushRequest::default() };
    let some = PushRequest { dtype, rows: Some(rows.clone()), payload: values(4).into(), ..PushRequest::default() };
    let wanted = Wanted { rows: rows.clone(), ..Wanted::default() };
    let wanted = vec![Wanted::default(), wanted];
    let pull = PullRequest { wanted, part_bytes: 8, wire: Some(DType::BF16.code().into()), ..PullRequest::default() };
    let assign = AssignRequest {
        origin: origin(9, 0),
        dtype,
        operation: 1,
        rows: Some(rows),
        payload: values(4).into(),
        ..AssignRequest::default()
    };
    let create = [
        call(0, &|| shard(0, true, values(3)).encode_to_vec()),
        call(0, &|| shard(0, false, values(5)).encode_to_vec()),
    ]
    .concat();
    let sgd = UpdateRule::Sgd { momentum: 0.9, nesterov: true };
    let train = |contributions, steps, round| {
        [
            create.clone(),
            call(1, &|| optimizer(sgd, contributions, steps).encode_to_vec()),
            call(3, &|| begin(1, round).encode_to_vec()),
            call(4, &|| whole.encode_to_vec()),
            call(5, &Vec::new),
            call(3, &|| begin(2, round).encode_to_vec()),
            call(4, &|| some.encode_to_vec()),
            call(5, &Vec::new),
            call(2, &|| pull.encode_to_vec()),
            call(8, &Vec::new),
        ]
        .concat()
    };
    let adam = |steps| {
        let rule = UpdateRule::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 };
        [
            create.clone(),
            call(1, &|| optimizer(rule, 0, steps).encode_to_vec()),
            call(3, &|| begin(1, 0).encode_to_vec()),
            call(4, &|| whole.encode_to_vec()),
            call(5, &Vec::new),
        ]
        .concat()
    };
    // Steps that another coordinator repeats.
    let of_step = |step: u64| {
        let steps = Some(StepRecord { begun: step + 1, open: vec![step] });
        let origin = origin(0, 0).map(|origin| Origin { step: Some(step), steps, ..origin });
        PushRequest { origin, ..PushRequest::default() }
    };
    let steps = |first: u64| {
        let step = |number| {
            [call(3, &|| of_step(number).encode_to_vec()), call(4, &|| whole.encode_to_vec()), call(5, &Vec::new)]
                .concat()
        };
        [step(first), step(first + 1)].concat()
    };
    let attend = |lineage, begun, open| {
        let steps = Some(StepRecord { begun, open });
        AttendServer { lineage, numbered: true, steps, ..AttendServer::default() }
    };
    let handed_over = [
        call(9, &|| attend(0, 0, Vec::new()).encode_to_vec()),
        create.clone(),
        call(1, &|| optimizer(sgd, 0, 0).encode_to_vec()),
        call(10, &|| CompleteRequest::default().encode_to_vec()),
        steps(0),
        call(9, &|| attend(SESSION + 1, 2, vec![1]).encode_to_vec()),
        steps(1),
        call(2, &|| pull.encode_to_vec()),
    ]
    .concat();
    let kept_again = [
        call(9, &|| attend(0, 0, Vec::new()).encode_to_vec()),
        create.clone(),
        call(1, &|| optimizer(sgd, 0, 0).encode_to_vec()),
        call(10, &|| CompleteRequest::default().encode_to_vec()),
        call(9, &|| AttendServer { again: true, ..attend(SESSION + 1, 0, Vec::new()) }.encode_to_vec()),
    ]
    .concat();
    let restore = |ended| RestoreRequest { ended, ..RestoreRequest::default() };
    let restored = [
        call(9, &|| AttendServer { again: true, ..AttendServer::default() }.encode_to_vec()),
        call(3, &|| begin(1, 0).encode_to_vec()),
        create.clone(),
        call(1, &|| optimizer(sgd, 0, 3).encode_to_vec()),
        call(8, &Vec::new),
        call(11, &|| restore(true).encode_to_vec()),
        steps(0),
        call(11, &|| restore(false).encode_to_vec()),
        steps(1),
    ]
    .concat();
    let fence = FenceRequest { worker: 1, epoch: 1, ..FenceRequest::default() };
    vec![
        train(0, 0, 0),
        train(2, 0, 0),
        // The last steps and rounds that there are.
        train(0, u64::MAX, 0),
        train(1, u64::MAX, u64::MAX),
        adam(3),
        adam(u64::MAX - 1),
        [create.clone(), call(6, &|| assign.encode_to_vec()), call(2, &|| pull.encode_to_vec())].concat(),
        [create, call(7, &|| fence.encode_to_vec()), call(6, &|| assign.encode_to_vec())].concat(),
        handed_over,
        kept_again,
        restored,
    ]
}
