use distribute_device::DType;
use distribute_rules::{OptimizerDescription, UpdateRule};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::*;
use crate::numbers::rows_to_bytes;
use crate::wire::proto::{AttendServer, RestoreRequest, Wanted};

const SESSION: u64 = 7;

/// Returns a server with a table of four rows of two, in two shards of rows 0..3 and 3..4, and SGD.
fn store(contributions: u32) -> Store {
    let store = Store::new(99);
    begin(&store, SESSION).unwrap();
    for (shard, first_row, rows) in [(0, 0, 3), (1, 3, 1)] {
        let payload = bytemuck::cast_slice(&vec![1.0f32; rows * 2]).to_vec().into();
        create(&store, CreateShard { shard, first_row, rows: rows as u64, payload, ..table() }).unwrap();
    }
    optimizer(&store, UpdateRule::Sgd { momentum: 0.0, nesterov: false }, contributions);
    store
}

fn begin(store: &Store, session: u64) -> Result<(), Status> {
    store.begin_session(&AttendServer { session, ..AttendServer::default() })
}

/// Describes a shard of the table, without its number.
fn table() -> CreateShard {
    CreateShard {
        session: SESSION,
        variable: "table".to_owned(),
        shape: vec![4, 2],
        shards: 2,
        trainable: true,
        ..CreateShard::default()
    }
}

fn create(store: &Store, shard: CreateShard) -> Result<(), Status> {
    store.create(&mut Creating::default(), shard)
}

fn optimizer(store: &Store, rule: UpdateRule, contributions: u32) {
    let description = OptimizerDescription { learning_rate: 1.0, rule };
    store
        .set_optimizer(&OptimizerOfShards {
            session: SESSION,
            description: serde_json::to_string(&description).unwrap(),
            shards: vec![0, 1],
            contributions,
            ..OptimizerOfShards::default()
        })
        .unwrap();
}

fn origin(closure: u64) -> Origin {
    Origin { session: SESSION, worker: 1, epoch: 1, closure, once: true, horizon: closure + 1, ..Origin::default() }
}

fn gradient(shard: u32, rows: Option<&[u64]>, values: &[f32]) -> PushRequest {
    let rows = rows.map(|rows| rows_to_bytes(rows.iter().copied()));
    let payload = bytemuck::cast_slice(values).to_vec().into();
    PushRequest { shard, dtype: DType::F32.code().into(), rows, payload, ..PushRequest::default() }
}

fn push(store: &Store, origin: Origin, gradients: Vec<PushRequest>) -> Result<PushReply, Status> {
    let mut push = store.begin_push(&PushRequest { origin: Some(origin), ..PushRequest::default() })?;
    gradients.into_iter().try_for_each(|gradient| store.push(&mut push, gradient))?;
    store.end_push(push)
}

fn pull(store: &Store, wanted: Wanted) -> Option<(u64, Vec<f32>)> {
    let request = PullRequest { session: SESSION, incarnation: 99, ..PullRequest::default() };
    let elements = one(store.pull(&request, &wanted).unwrap()?);
    Some((elements.version, bytemuck::pod_collect_to_vec(&elements.payload)))
}

/// Returns an answer that is one message.
fn one(answer: Answer) -> Elements {
    let all: Vec<Elements> = answer.collect();
    let [elements] = <[Elements; 1]>::try_from(all).unwrap();
    assert!(!elements.more && elements.first == 0);
    elements
}

fn values(store: &Store, shard: u32) -> Vec<f32> {
    pull(store, Wanted { shard, ..Wanted::default() }).unwrap().1
}

#[test]
fn the_parts_of_an_answer_are_of_one_moment() {
    let store = store(0);
    optimizer(&store, UpdateRule::Sgd { momentum: 0.9, nesterov: false }, 0);
    let values = |slot: &str, closure: u64| {
        let wanted = Wanted { shard: 0, slot: slot.to_owned(), ..Wanted::default() };
        let request = PullRequest { session: SESSION, part_bytes: 8, ..PullRequest::default() };
        let mut parts = store.pull(&request, &wanted).unwrap().unwrap();
        let first = parts.next().unwrap();
        // While the rest is on its way.
        push(&store, origin(closure), vec![gradient(0, None, &[1.0; 6])]).unwrap();
        let payloads = std::iter::once(first).chain(parts).map(|part| part.payload.to_vec());
        bytemuck::pod_collect_to_vec::<u8, f32>(&payloads.flatten().collect::<Vec<u8>>())
    };
    let slot = UpdateRule::Sgd { momentum: 0.9, nesterov: false }.slots()[0];
    assert_eq!(values("", 1), [1.0; 6]);
    assert_eq!(values("", 2), [0.0; 6]);
    // The velocity after two gradients of 1, and not after the third one.
    assert_eq!(values(slot, 3), [-1.9f32; 6]);
}

#[test]
fn answers_come_in_parts_of_whole_elements() {
    let store = store(0);
    let wanted = Wanted { shard: 0, ..Wanted::default() };
    for (part_bytes, expected) in [(0, vec![24]), (17, vec![16, 8]), (8, vec![8, 8, 8]), (1, vec![4; 6])] {
        let request = PullRequest { session: SESSION, part_bytes, ..PullRequest::default() };
        let parts: Vec<Elements> = store.pull(&request, &wanted).unwrap().unwrap().collect();
        assert_eq!(parts.iter().map(|part| part.payload.len()).collect::<Vec<_>>(), expected);
        let mut first = 0;
        for (index, part) in parts.iter().enumerate() {
            assert_eq!((part.first, part.more), (first, index + 1 < parts.len()));
            first += part.payload.len() as u64 / 4;
        }
    }
}

#[test]
fn only_what_has_changed_is_sent() {
    let store = store(0);
    let (version, _) = pull(&store, Wanted::default()).unwrap();
    assert!(pull(&store, Wanted { version, ..Wanted::default() }).is_none());
    push(&store, origin(0), vec![gradient(0, None, &[0.5; 6])]).unwrap();
    let (changed, elements) = pull(&store, Wanted { version, ..Wanted::default() }).unwrap();
    assert!(changed > version && elements == [0.5; 6]);
    let (version, _) = pull(&store, Wanted { shard: 1, ..Wanted::default() }).unwrap();
    let other = Wanted { shard: 1, version, ..Wanted::default() };
    assert!(pull(&store, other.clone()).is_none());
    // Versions of another process are ignored.
    let request = PullRequest { session: SESSION, incarnation: 98, ..PullRequest::default() };
    assert!(store.pull(&request, &other).unwrap().is_some());
}

#[test]
fn elements_that_take_the_place_of_others_have_another_version() {
    let store = store(0);
    let load = |session, value: f32| {
        let payload = bytemuck::cast_slice(&[value; 6]).to_vec().into();
        create(&store, CreateShard { session, rows: 3, payload, ..table() }).unwrap();
    };
    let mut seen = BTreeSet::new();
    // Two checkpoints are loaded in turns, and the same coordinator's workers pull.
    for value in [5.0, 6.0, 5.0] {
        let (known, _) = pull(&store, Wanted::default()).unwrap();
        load(SESSION, value);
        let (version, elements) = pull(&store, Wanted { version: known, ..Wanted::default() }).unwrap();
        assert_eq!(elements, [value; 6]);
        assert!(seen.insert(known) && !seen.contains(&version));
    }
    // Another coordinator of the same server.
    begin(&store, 8).unwrap();
    load(8, 7.0);
    let request = PullRequest { session: 8, incarnation: 99, ..PullRequest::default() };
    for version in 0..=*seen.last().unwrap() {
        assert!(store.pull(&request, &Wanted { version, ..Wanted::default() }).unwrap().is_some());
    }
}

#[test]
fn what_is_being_sent_does_not_change() {
    let store = store(0);
    let request = PullRequest { session: SESSION, ..PullRequest::default() };
    let sent = one(store.pull(&request, &Wanted::default()).unwrap().unwrap());
    for closure in 0..3 {
        push(&store, origin(closure), vec![gradient(0, None, &[1.0; 6])]).unwrap();
    }
    assert_eq!(bytemuck::pod_collect_to_vec::<u8, f32>(&sent.payload), [1.0; 6]);
    assert_eq!(values(&store, 0), [-2.0; 6]);
}

#[test]
fn rows_are_pulled_and_updated_alone() {
    let store = store(0);
    push(&store, origin(0), vec![gradient(0, Some(&[0, 2]), &[1.0, 2.0, 3.0, 4.0])]).unwrap();
    assert_eq!(values(&store, 0), [0.0, -1.0, 1.0, 1.0, -2.0, -3.0]);
    let rows = rows_to_bytes([2, 0, 2]);
    let (_, picked) = pull(&store, Wanted { rows, ..Wanted::default() }).unwrap();
    assert_eq!(picked, [-2.0, -3.0, 0.0, -1.0, -2.0, -3.0]);
}

#[test]
fn rows_and_the_whole_give_the_same_with_slots() {
    let rules = [
        UpdateRule::Adam { beta1: 0.9, beta2: 0.99, epsilon: 1e-8, weight_decay: 0.1 },
        UpdateRule::RmsProp { rho: 0.9, momentum: 0.5, epsilon: 1e-7, centered: true },
        UpdateRule::Adagrad { initial_accumulator: 0.1, epsilon: 1e-7 },
        UpdateRule::Ftrl { initial_accumulator: 0.1, l1: 0.1, l2: 0.1, l2_shrinkage: 0.1, beta: 1.0 },
        UpdateRule::Adadelta { rho: 0.9, epsilon: 1e-7 },
        UpdateRule::Sgd { momentum: 0.9, nesterov: true },
    ];
    for rule in rules {
        let [whole, by_rows] = [store(0), store(0)];
        optimizer(&whole, rule, 0);
        optimizer(&by_rows, rule, 0);
        for step in 0..3 {
            let values: Vec<f32> = (0..6).map(|at| at as f32 - 2.5 + step as f32).collect();
            push(&whole, origin(step), vec![gradient(0, None, &values)]).unwrap();
            push(&by_rows, origin(step), vec![gradient(0, Some(&[0, 1, 2]), &values)]).unwrap();
        }
        assert_eq!(values(&whole, 0), values(&by_rows, 0), "{rule:?}");
    }
}

#[test]
fn a_closure_that_runs_again_changes_only_what_it_had_not() {
    let store = store(0);
    // The worker was lost after the first shard.
    let mut first = store.begin_push(&PushRequest { origin: Some(origin(5)), ..PushRequest::default() }).unwrap();
    store.push(&mut first, gradient(0, None, &[1.0; 6])).unwrap();
    let again = Origin { worker: 2, ..origin(5) };
    let reply = push(&store, again, vec![gradient(0, None, &[1.0; 6]), gradient(1, None, &[1.0; 2])]).unwrap();
    assert_eq!((values(&store, 0), values(&store, 1)), (vec![0.0; 6], vec![0.0; 2]));
    assert_eq!((reply.counted, reply.steps), (true, 1));
    // With at-least-once delivery the change is made again.
    for _ in 0..2 {
        push(&store, Origin { once: false, ..origin(6) }, vec![gradient(1, None, &[1.0; 2])]).unwrap();
    }
    assert_eq!(values(&store, 1), [-2.0; 2]);
}

#[test]
fn a_worker_that_was_given_up_changes_nothing_any_more() {
    let store = store(0);
    let mut begun = store.begin_push(&PushRequest { origin: Some(origin(5)), ..PushRequest::default() }).unwrap();
    store.fence(&FenceRequest { session: SESSION, worker: 1, epoch: 1 }).unwrap();
    let refused = store.push(&mut begun, gradient(0, None, &[1.0; 6])).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Aborted);
    assert!(push(&store, origin(6), Vec::new()).is_err());
    // Its next attendance is admitted.
    push(&store, Origin { epoch: 2, ..origin(6) }, vec![gradient(0, None, &[1.0; 6])]).unwrap();
    assert_eq!(values(&store, 0), [0.0; 6]);
}

#[test]
fn a_round_is_the_mean_of_its_contributions_in_the_order_of_closures() {
    let store = store(2);
    let of = |closure, round| Origin { round, ..origin(closure) };
    push(&store, of(1, 0), vec![gradient(0, None, &[3.0; 6])]).unwrap();
    assert_eq!(values(&store, 0), [1.0; 6]);
    // A repetition of the same closure is not a second contribution.
    assert!(push(&store, of(1, 0), vec![gradient(0, None, &[3.0; 6])]).unwrap().counted);
    assert_eq!(values(&store, 0), [1.0; 6]);
    // Other rows count as zero, and so does a missing gradient.
    push(&store, of(0, 0), vec![gradient(0, Some(&[1]), &[1.0, 1.0])]).unwrap();
    assert_eq!(values(&store, 0), [-0.5, -0.5, -1.0, -1.0, -0.5, -0.5]);
    // A backup that is too late.
    assert!(!push(&store, of(2, 0), vec![gradient(0, None, &[3.0; 6])]).unwrap().counted);
    push(&store, of(3, 1), vec![gradient(1, Some(&[0]), &[2.0, 2.0])]).unwrap();
    let reply = push(&store, of(4, 1), Vec::new()).unwrap();
    assert_eq!((values(&store, 1), reply.steps), (vec![0.0; 2], 2));
}

#[test]
fn a_step_whose_round_was_given_up_contributes_to_the_next_one() {
    let store = store(2);
    // Each time it is scheduled, it is another closure.
    let of = |step: u64, closure, round| Origin { step: Some(step), round, ..origin(closure) };
    assert!(push(&store, of(0, 0, 0), vec![gradient(0, None, &[9.0; 6])]).unwrap().counted);
    // Both have begun before one of them arrives.
    let again = [of(0, 1, 1), of(1, 2, 1)];
    let begin = |origin: &Origin| PushRequest { origin: Some(origin.clone()), ..PushRequest::default() };
    let mut pushes = again.each_ref().map(|origin| store.begin_push(&begin(origin)).unwrap());
    pushes.iter_mut().for_each(|push| store.push(push, gradient(0, None, &[1.0; 6])).unwrap());
    assert!(pushes.into_iter().all(|push| store.end_push(push).unwrap().counted));
    assert_eq!(values(&store, 0), [0.0; 6]);
    // They have counted now.
    let reply = |origin| push(&store, origin, vec![gradient(0, None, &[1.0; 6])]).unwrap();
    assert_eq!(reply(of(0, 3, 2)), PushReply { counted: true, steps: 1, earlier: true });
    // One that runs again in its round is a part of that, as it was.
    for _ in 0..2 {
        assert_eq!(reply(of(2, 4, 2)), PushReply { counted: true, steps: 1, earlier: false });
    }
    assert_eq!(values(&store, 0), [0.0; 6]);
}

#[test]
fn other_sessions_and_what_does_not_fit_are_refused() {
    let store = store(0);
    let other = PullRequest { session: 8, ..PullRequest::default() };
    assert_eq!(store.pull(&other, &Wanted::default()).err().unwrap().code(), tonic::Code::Aborted);
    for wrong in [
        gradient(0, None, &[1.0; 5]),
        gradient(0, Some(&[3]), &[1.0; 2]),
        gradient(0, Some(&[1, 1]), &[1.0; 4]),
        PushRequest { dtype: 77, ..gradient(0, None, &[1.0; 6]) },
        PushRequest { dtype: DType::I32.code().into(), ..gradient(0, None, &[1.0; 6]) },
    ] {
        let error = push(&store, origin(0), vec![wrong]).unwrap_err();
        assert_eq!(error.code(), tonic::Code::InvalidArgument, "{error}");
    }
    assert_eq!(push(&store, origin(1), vec![gradient(9, None, &[])]).unwrap_err().code(), tonic::Code::Unavailable);
    for contributions in [0, 1, 2] {
        optimizer(
            &store,
            UpdateRule::Lamb { beta1: 0.9, beta2: 0.99, epsilon: 1e-6, weight_decay: 0.0 },
            contributions,
        );
        refused(push(&store, origin(2), vec![gradient(0, Some(&[1]), &[1.0; 2])]), "AdamW");
    }
    // Another coordinator starts with an empty store.
    begin(&store, 8).unwrap();
    assert!(store.describe(8).unwrap().shards.is_empty());
    assert_eq!(push(&store, origin(3), Vec::new()).unwrap_err().code(), tonic::Code::Aborted);
    // The first one, if still alive, cannot take its place back.
    assert!(begin(&store, SESSION).is_err() && store.describe(8).is_ok());
}

#[test]
fn assignments_are_done_once() {
    let store = store(0);
    let add = |origin: Origin, rows: Option<&[u64]>, values: &[f32]| {
        let request = AssignRequest {
            origin: Some(origin),
            dtype: DType::F32.code().into(),
            operation: operation_of(distribute_values::Scatter::Add),
            rows: rows.map(|rows| rows_to_bytes(rows.iter().copied())),
            payload: bytemuck::cast_slice(values).to_vec().into(),
            ..AssignRequest::default()
        };
        store.assign(&mut Assigning::default(), request)
    };
    add(origin(0), None, &[1.0; 6]).unwrap();
    add(origin(0), None, &[1.0; 6]).unwrap();
    // A row may be named twice.
    add(Origin { change: 1, ..origin(0) }, Some(&[1, 1]), &[1.0; 4]).unwrap();
    assert_eq!(values(&store, 0), [2.0, 2.0, 4.0, 4.0, 2.0, 2.0]);
    assert!(add(origin(1), None, &[1.0; 4]).is_err());
    assert!(add(origin(1), Some(&[3]), &[1.0; 2]).is_err());
}

#[test]
fn whole_numbers_are_not_divided_by_zero() {
    let store = store(0);
    let whole = |numbers: &[i64]| Bytes::from(bytemuck::cast_slice(numbers).to_vec());
    let dtype = DType::I64.code().into();
    let counts = CreateShard { shard: 7, variable: "counts".to_owned(), dtype, shape: vec![2], rows: 2, ..table() };
    create(&store, CreateShard { trainable: false, payload: whole(&[7, 8]), ..counts }).unwrap();
    let divide = |by: &[i64], rows: Option<&[u64]>| {
        let operation = operation_of(distribute_values::Scatter::Div);
        let rows = rows.map(|rows| rows_to_bytes(rows.iter().copied()));
        let request = AssignRequest { origin: Some(origin(0)), shard: 7, dtype, operation, ..AssignRequest::default() };
        store.assign(&mut Assigning::default(), AssignRequest { rows, payload: whole(by), ..request })
    };
    refused(divide(&[2, 0], None), "has a zero");
    refused(divide(&[0], Some(&[1])), "has a zero");
    divide(&[2, 4], None).unwrap();
    let request = PullRequest { session: SESSION, ..PullRequest::default() };
    let elements = one(store.pull(&request, &Wanted { shard: 7, ..Wanted::default() }).unwrap().unwrap());
    assert_eq!(bytemuck::pod_collect_to_vec::<u8, i64>(&elements.payload), [3, 2]);
}

fn refused<T>(outcome: Result<T, Status>, words: &str) {
    let Err(status) = outcome else { panic!("expected: {words}") };
    assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
    assert!(status.message().contains(words), "{words}: {status}");
}

#[test]
fn sizes_are_verified_before_anything_is_made() {
    let store = store(0);
    for (wrong, words) in [
        // 256 GB announced, nothing sent.
        (CreateShard { shape: vec![1 << 32, 16], rows: 1 << 32, ..table() }, "0 bytes arrived, where"),
        (CreateShard { shape: vec![1 << 32, 1 << 31, 8], rows: 1 << 32, ..table() }, "larger than any memory"),
        (CreateShard { shape: vec![1, u64::MAX, u64::MAX], rows: 1, ..table() }, "larger than any memory"),
        (CreateShard { first_row: u64::MAX, rows: 2, ..table() }, "where it has 4"),
        (CreateShard { first_row: 2, rows: 3, ..table() }, "where it has 4"),
        (CreateShard { dtype: 200, rows: 1, ..table() }, "unknown data type"),
        (CreateShard { rows: 1, payload: vec![0; 9].into(), ..table() }, "9 bytes arrived"),
    ] {
        refused(create(&store, CreateShard { shard: 0, ..wrong }), words);
    }
    // The contents are unchanged.
    assert_eq!(values(&store, 0), [1.0; 6]);
    let fresh = Store::new(1);
    assert!(begin(&fresh, 0).is_err() && fresh.check_session(0).is_err());
}

#[test]
fn answers_are_bounded() {
    let store = store(0);
    // Rows of 8 MiB: 32 KiB of numbers request 32 GiB.
    let row = 2u64 << 20;
    let payload = vec![0u8; row as usize * 4].into();
    let wide = CreateShard { shard: 5, shape: vec![1, row], rows: 1, shards: 1, payload, ..table() };
    create(&store, CreateShard { variable: "wide".to_owned(), ..wide }).unwrap();
    let ask =
        |wanted: Vec<Wanted>| store.check_pull(&PullRequest { session: SESSION, wanted, ..PullRequest::default() });
    let rows = |count: usize| Wanted { shard: 5, rows: rows_to_bytes(vec![0; count]), ..Wanted::default() };
    refused(ask(vec![rows(4096)]), "ask for at most");
    refused(ask(vec![rows(20), rows(20)]), "ask for at most");
    refused(ask(vec![Wanted::default(), Wanted::default()]), "twice in one call");
    ask(vec![rows(1), rows(31), Wanted::default(), Wanted { shard: 5, ..Wanted::default() }]).unwrap();
    // No message is longer than a part.
    let request = PullRequest { session: SESSION, ..PullRequest::default() };
    let all: Vec<Elements> = store.pull(&request, &rows(5)).unwrap().unwrap().collect();
    assert_eq!(
        all.iter().map(|part| (part.first, part.payload.len(), part.more)).collect::<Vec<_>>(),
        [(0, 32 << 20, true), (4 * row, 8 << 20, false)]
    );
    let outside = store.pull(&request, &Wanted { rows: rows_to_bytes([3]), ..Wanted::default() });
    refused(outside, "there is no row 3, for the shard has 3");
    refused(store.pull(&request, &Wanted { rows: vec![1, 2, 3].into(), ..Wanted::default() }), "rows are not numbers");
}

#[test]
fn payloads_come_in_parts() {
    let store = store(0);
    let bytes = |values: &[f32]| Bytes::from(bytemuck::cast_slice::<f32, u8>(values).to_vec());
    // A shard, created again.
    let mut creating = Creating::default();
    let about = CreateShard { rows: 3, ..table() };
    store.create(&mut creating, CreateShard { payload: bytes(&[5.0; 2]), more: true, ..about.clone() }).unwrap();
    assert!(!creating.is_done());
    assert_eq!(values(&store, 0), [1.0; 6]);
    store.create(&mut creating, CreateShard { payload: bytes(&[6.0; 4]), ..CreateShard::default() }).unwrap();
    assert!(creating.is_done());
    assert_eq!(values(&store, 0), [5.0, 5.0, 6.0, 6.0, 6.0, 6.0]);
    // More than announced, and a part of another shard.
    let mut creating = Creating::default();
    store.create(&mut creating, CreateShard { payload: bytes(&[5.0; 2]), more: true, ..about.clone() }).unwrap();
    refused(
        store.create(&mut creating, CreateShard { payload: bytes(&[5.0; 5]), ..CreateShard::default() }),
        "at most 24",
    );
    let mut creating = Creating::default();
    store.create(&mut creating, CreateShard { more: true, ..about }).unwrap();
    refused(
        store.create(&mut creating, CreateShard { shard: 1, ..CreateShard::default() }),
        "before all parts of shard 0",
    );
    // A gradient of rows.
    optimizer(&store, UpdateRule::Sgd { momentum: 0.0, nesterov: false }, 0);
    let mut begun = store.begin_push(&PushRequest { origin: Some(origin(0)), ..PushRequest::default() }).unwrap();
    store.push(&mut begun, PushRequest { more: true, ..gradient(0, Some(&[0]), &[1.0]) }).unwrap();
    store.push(&mut begun, gradient(0, Some(&[2]), &[2.0, 3.0, 4.0])).unwrap();
    assert_eq!(store.end_push(begun).unwrap().steps, 1);
    assert_eq!(values(&store, 0), [4.0, 3.0, 6.0, 6.0, 3.0, 2.0]);
    let mut begun = store.begin_push(&PushRequest { origin: Some(origin(1)), ..PushRequest::default() }).unwrap();
    store.push(&mut begun, PushRequest { more: true, ..gradient(0, Some(&[0]), &[1.0]) }).unwrap();
    refused(store.end_push(begun), "the gradient of shard 0 has no end");
    // An assignment, and one whose parts are separate changes.
    let about = AssignRequest { origin: Some(origin(2)), dtype: DType::F32.code().into(), ..AssignRequest::default() };
    let mut assigning = Assigning::default();
    store.assign(&mut assigning, AssignRequest { payload: bytes(&[7.0; 4]), more: true, ..about.clone() }).unwrap();
    store.assign(&mut assigning, AssignRequest { payload: bytes(&[8.0; 2]), ..about.clone() }).unwrap();
    assert_eq!(values(&store, 0), [7.0, 7.0, 7.0, 7.0, 8.0, 8.0]);
    for (part, value) in [(1, 1.0), (2, 2.0), (1, 9.0)] {
        let (rows, payload) = (Some(rows_to_bytes([part - 1])), bytes(&[value; 2]));
        let part = part as u32;
        store.assign(&mut Assigning::default(), AssignRequest { rows, payload, part, ..about.clone() }).unwrap();
    }
    assert_eq!(values(&store, 0), [1.0, 1.0, 2.0, 2.0, 8.0, 8.0]);
}

#[test]
fn gradients_come_once_and_for_what_the_optimizer_updates() {
    let store = store(0);
    refused(push(&store, origin(0), vec![gradient(0, None, &[1.0; 6]), gradient(0, None, &[1.0; 6])]), "two gradients");
    let payload = bytemuck::cast_slice(&[1.0f32; 2]).to_vec().into();
    let other = CreateShard { shard: 7, variable: "other".to_owned(), shape: vec![2], rows: 2, payload, ..table() };
    create(&store, other).unwrap();
    refused(push(&store, origin(1), vec![gradient(7, None, &[1.0; 2])]), "does not update shard 7");
    assert_eq!(values(&store, 7), [1.0; 2]);
    let nothing = OptimizerOfShards { session: SESSION, ..OptimizerOfShards::default() };
    for description in [r#"{"learning_rate":1e999,"rule":"x"}"#, "", "[[[[", r#"{"learning_rate":-1.0}"#] {
        assert!(
            store.set_optimizer(&OptimizerOfShards { description: description.to_owned(), ..nothing.clone() }).is_err()
        );
    }
    let rule = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
    let negative = serde_json::to_string(&OptimizerDescription { learning_rate: -1.0, rule }).unwrap();
    refused(store.set_optimizer(&OptimizerOfShards { description: negative, ..nothing }), "learning rate");
}

/// Numbers at the limits, and others.
fn numbers() -> impl Strategy<Value = u64> {
    prop_oneof![0u64..5, Just(u64::MAX), Just(1 << 62), Just(1 << 32), any::<u64>()]
}

fn bytes() -> impl Strategy<Value = Bytes> {
    let rows = prop::collection::vec(numbers(), 0..4).prop_map(rows_to_bytes);
    prop_oneof![prop::collection::vec(any::<u8>(), 0..30).prop_map(Bytes::from), rows, Just(Bytes::from(vec![0; 24]))]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

    #[test]
    fn requests_of_any_numbers_do_no_harm(
        shard in 0u32..4, dtype in 0u32..20, shape in prop::collection::vec(numbers(), 0..4), first_row in numbers(),
        of_rows in numbers(), rows in prop::option::of(bytes()), payload in bytes(), more: bool, operation in 0u32..9,
        contributions in 0u32..3, number in numbers(), slot in prop_oneof![Just(""), Just("momentum"), Just("x")],
    ) {
        let store = store(contributions);
        let slot = slot.to_owned();
        // Valid requests are executed, and others are errors; nothing panics, and no allocation depends on numbers
        // alone.
        let about = CreateShard { shard, dtype, shape, first_row, rows: of_rows, more, ..table() };
        let about = CreateShard { slot: slot.clone(), payload: payload.clone(), ..about };
        let mut creating = Creating::default();
        if store.create(&mut creating, about.clone()).is_ok() && !creating.is_done() {
            let _ = store.create(&mut creating, CreateShard { more: false, ..about });
        }
        let picked = rows.clone().unwrap_or_default();
        let wanted = Wanted { shard, version: number, rows: picked, slot };
        let request = PullRequest { session: SESSION, wire: Some(dtype), ..PullRequest::default() };
        let request = PullRequest { wanted: vec![wanted.clone()], ..request };
        if store.check_pull(&request).is_ok() && let Ok(Some(answer)) = store.pull(&request, &wanted) {
            prop_assert!(answer.map(|part| part.payload.len()).sum::<usize>() <= 4096);
        }
        let origin = Origin { closure: number, round: number, horizon: number, ..origin(0) };
        let gradient = PushRequest { shard, dtype, more, ..PushRequest::default() };
        let gradient = PushRequest { rows: rows.clone(), payload: payload.clone(), ..gradient };
        let _ = push(&store, origin.clone(), vec![gradient.clone(), gradient]);
        let request = AssignRequest { origin: Some(origin), shard, dtype, operation, rows, more, payload, part: shard };
        let mut assigning = Assigning::default();
        let _ = store.assign(&mut assigning, request.clone());
        let _ = store.assign(&mut assigning, request);
    }
}

#[test]
fn a_server_that_is_being_restored_neither_changes_nor_answers() {
    let store = Store::new(99);
    // It was started again within the session.
    let again = AttendServer { session: SESSION, again: true, ..AttendServer::default() };
    store.begin_session(&again).unwrap();
    let assign = || {
        let request = AssignRequest { origin: Some(origin(8)), dtype: DType::F32.code().into(), ..Default::default() };
        store.assign(&mut Assigning::default(), request)
    };
    let refuses = |when: &str| {
        let wanted = Wanted { slot: "m".to_owned(), ..Wanted::default() };
        let request = PullRequest { session: SESSION, wanted: vec![wanted.clone()], ..PullRequest::default() };
        let refusals = [
            store.describe(SESSION).err(),
            push(&store, origin(0), vec![gradient(0, None, &[0.0; 6])]).err(),
            assign().err(),
            store.check_pull(&request).err(),
            store.pull(&request, &wanted).err(),
        ];
        for (call, refusal) in refusals.into_iter().enumerate() {
            let refusal = refusal.unwrap_or_else(|| panic!("call {call} is answered {when}"));
            assert_eq!(
                (refusal.code(), refusal.message()),
                (tonic::Code::Unavailable, "this server is being restored")
            );
        }
        assert!(!store.find().complete);
    };
    let payload = |value: f32| bytemuck::cast_slice(&[value; 6]).to_vec().into();
    let shard = |slot: &str, value| {
        let shard = CreateShard { slot: slot.to_owned(), rows: 3, payload: payload(value), ..table() };
        create(&store, shard).unwrap();
    };
    refuses("before anything is here");
    shard("", 1.0);
    refuses("without optimizers");
    let rule = UpdateRule::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 };
    let description = serde_json::to_string(&OptimizerDescription { learning_rate: 1e-3, rule }).unwrap();
    let about = OptimizerOfShards { session: SESSION, description, steps: 1000, shards: vec![0], ..Default::default() };
    store.set_optimizer(&about).unwrap();
    shard("m", 1e-3);
    refuses("with a slot that is zero");
    // Its connection had broken meanwhile.
    store.begin_session(&again).unwrap();
    refuses("after the same coordinator has attended again");
    shard("v", 1e-6);
    store.restore(&RestoreRequest { session: SESSION, ended: true }).unwrap();
    assert_eq!(values(&store, 0), [1.0; 6]);
    let reply = push(&store, origin(0), vec![gradient(0, None, &[0.0; 6])]).unwrap();
    assert_eq!(reply.steps, 1001);
    // By less than the learning rate, and not by 90.
    assert!(values(&store, 0).iter().all(|value| (value - 1.0).abs() < 1e-3), "{:?}", values(&store, 0));
    // A checkpoint is loaded.
    store.restore(&RestoreRequest { session: SESSION, ended: false }).unwrap();
    refuses("while a checkpoint is loaded");
    assert!(store.restore(&RestoreRequest { session: 8, ended: true }).is_err());
}

#[test]
fn slots_are_those_of_their_names_whichever_optimizer_made_them_first() {
    let centered = |centered| UpdateRule::RmsProp { rho: 0.9, momentum: 0.5, epsilon: 1e-7, centered };
    let [both, one] = [store(0), store(0)];
    // The order on the shard is velocity, momentum, average_gradient.
    optimizer(&both, centered(false), 0);
    optimizer(&both, centered(true), 0);
    optimizer(&one, centered(true), 0);
    for step in 0..3 {
        let gradients: Vec<f32> = (0..6).map(|at| at as f32 - 2.5 + step as f32).collect();
        for store in [&both, &one] {
            push(store, origin(step), vec![gradient(0, None, &gradients)]).unwrap();
        }
        for slot in ["", "velocity", "average_gradient", "momentum"] {
            let of = |store| pull(store, Wanted { slot: slot.to_owned(), ..Wanted::default() }).unwrap().1;
            assert_eq!(of(&both), of(&one), "{slot:?} after step {step}");
        }
    }
}
