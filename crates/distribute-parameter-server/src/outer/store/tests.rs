use distribute_cluster::TaskType;
use distribute_device::DType;

use super::*;
use crate::wire::proto::OuterVariable;

fn store(islands: u32, restored: BTreeMap<u32, Kept>) -> OuterStore {
    let islands = (0..islands).map(|index| Task::new(TaskType::Worker, index)).collect();
    OuterStore::new(99, Instant::now(), islands, restored)
}

fn settings(quorum: u32) -> OuterSettings {
    OuterSettings { learning_rate: 1.0, momentum: 0.0, quorum, grace_us: 1_000_000, staleness: 1, fragments: 2 }
}

fn request(index: u32, settings: OuterSettings, process: u64) -> AttendIsland {
    AttendIsland { island: format!("worker:{index}"), settings: Some(settings), process }
}

fn attend(store: &OuterStore, index: u32) -> Result<Caller, Status> {
    let island = format!("worker:{index}");
    let (_, seat) = store.attend(&request(index, settings(2), index.into()))?;
    Ok(Caller { island, seat })
}

fn fragment(caller: &Caller, variables: &[(&str, u64)]) -> Fragment {
    let variable = |(name, len): &(&str, u64)| OuterVariable { name: (*name).to_owned(), len: *len };
    Fragment { caller: Some(caller.clone()), fragment: 1, variables: variables.iter().map(variable).collect() }
}

const MODEL: [(&str, u64); 2] = [("w", 2), ("b", 1)];

fn payload(values: &[f32]) -> bytes::Bytes {
    bytemuck::cast_slice(values).to_vec().into()
}

fn create(store: &OuterStore, caller: &Caller, values: &[f32]) -> Result<FragmentState, Status> {
    let fragment = Some(fragment(caller, &MODEL));
    let message = CreateFragment { fragment, more: false, payload: payload(values) };
    store.create(&mut Creating::default(), message).map(|state| state.expect("it was whole"))
}

fn send(store: &OuterStore, caller: &Caller, changes: Changes, now: Instant) -> Result<Received, Status> {
    let changes = Changes { caller: Some(caller.clone()), fragment: 1, ..changes };
    store.receive(&mut Receiving::default(), changes, now).map(|received| received.expect("it was whole"))
}

fn in_f32(version: u64, changes: &[f32]) -> Changes {
    Changes { version, examples: 1, payload: payload(changes), ..Changes::default() }
}

#[track_caller]
fn told<T>(outcome: Result<T, Status>, words: &str) {
    let status = outcome.err().expect("it is refused");
    assert!(status.message().contains(words), "{}", status.message());
}

#[test]
fn the_first_island_gives_the_values_and_others_get_them() {
    let store = store(2, BTreeMap::new());
    let (first, second) = (attend(&store, 0).unwrap(), attend(&store, 1).unwrap());
    assert!(!store.join(&fragment(&first, &MODEL)).unwrap().held);
    assert!(!create(&store, &first, &[1.0, 2.0, 3.0]).unwrap().held);
    // Slower, with other values.
    assert!(create(&store, &second, &[9.0; 3]).unwrap().held);
    assert!(store.join(&fragment(&second, &MODEL)).unwrap().held);
    let got = send(&store, &second, Changes::default(), Instant::now()).unwrap();
    assert!(got.taken.is_none());
    assert_eq!(got.held.newest(None), (0, Some(payload(&[1.0, 2.0, 3.0]))));
    assert_eq!(got.held.newest(Some(0)), (0, None));
}

#[test]
fn changes_of_all_islands_make_an_outer_step_in_f32_and_in_eight_bits() {
    let (store, now) = (store(2, BTreeMap::new()), Instant::now());
    let (first, second) = (attend(&store, 0).unwrap(), attend(&store, 1).unwrap());
    create(&store, &first, &[1.0, 2.0, 3.0]).unwrap();
    store.join(&fragment(&second, &MODEL)).unwrap();
    send(&store, &first, in_f32(0, &[1.0, 1.0, 1.0]), now).unwrap();
    let blocks = distribute_strategy::Int8Blocks::new(&[2, 1]);
    let message = blocks.encode(&mut [127.0, 3.0, 0.0]);
    let eight = Changes { examples: 3, int8: true, payload: message.into(), ..Changes::default() };
    let got = send(&store, &second, eight, now).unwrap();
    // (1 + 3 * 127) / 4, (1 + 3 * 3) / 4, 1 / 4
    assert_eq!(got.held.newest(Some(0)), (1, Some(payload(&[1.0 - 95.5, 2.0 - 2.5, 3.0 - 0.25]))));
    assert_eq!(store.outer_steps(), 1);
}

#[test]
fn what_does_not_fit_is_refused_in_words() {
    let store = store(2, BTreeMap::new());
    told(attend(&store, 2), "worker:2 is not an island of the cluster, which has worker:0, worker:1");
    let first = attend(&store, 0).unwrap();
    let other = request(1, settings(1), 1);
    told(store.attend(&other), "worker:1 has (OuterNesterov");
    told(store.attend(&other), "give every island the same");
    for wrong in [settings(0), settings(3), OuterSettings { learning_rate: f64::NAN, ..settings(2) }] {
        let request = request(1, wrong, 1);
        assert!(store.attend(&request).is_err());
    }
    told(store.join(&Fragment { fragment: 2, ..fragment(&first, &MODEL) }), "fragment 2 of 2");
    told(store.join(&fragment(&first, &[])), "with 0 variables");
    told(store.join(&fragment(&first, &[("w", u64::MAX), ("b", 2)])), "more elements than memory");
    told(store.join(&fragment(&first, &[("w", u64::MAX / 4)])), "more elements than memory");
    told(create(&store, &first, &[1.0; 2]), "8 bytes of values were given, and 12 are expected");
    told(create(&store, &first, &[1.0; 4]), "16 bytes arrived, and at most 12");
    told(create(&store, &first, &[1.0, f32::NAN, 1.0]), "first those of variable \"w\"");
    create(&store, &first, &[1.0; 3]).unwrap();
    let second = attend(&store, 1).unwrap();
    told(
        store.join(&fragment(&second, &[("w", 2), ("c", 1)])),
        "is b of 1 elements here, and c of 1 elements on worker:1",
    );
    told(store.join(&fragment(&second, &[("w", 2)])), "is b of 1 elements here, and nothing on worker:1");
    let now = Instant::now();
    told(
        send(&store, &second, in_f32(0, &[1.0, 2.0, f32::INFINITY]), now),
        "changes of worker:1 are not finite, first those of variable \"b\"",
    );
    told(send(&store, &second, in_f32(1, &[1.0; 3]), now), "an outer step that was not made; 0 were");
    told(send(&store, &second, in_f32(0, &[1.0; 2]), now), "8 bytes");
    told(
        send(&store, &second, Changes { int8: true, ..in_f32(0, &[1.0; 2]) }, now),
        "8 bytes of changes were given, and 11",
    );
    told(
        store.receive(&mut Receiving::default(), Changes { caller: Some(second), ..Changes::default() }, now).map(drop),
        "fragment 0 has not been joined",
    );
    assert_eq!(store.outer_steps(), 0);
}

#[test]
fn an_island_that_attends_again_ends_its_earlier_attendance() {
    let (store, now) = (store(2, BTreeMap::new()), Instant::now());
    let earlier = attend(&store, 0).unwrap();
    let island = Task::new(TaskType::Worker, 0);
    let later = attend(&store, 0).unwrap();
    assert!(!store.attends(island, earlier.seat) && store.attends(island, later.seat));
    told(create(&store, &earlier, &[1.0; 3]), "another process attends as worker:0 by now");
    // The end of the earlier one's connection does not end the later one.
    store.lose(island, earlier.seat, now);
    create(&store, &later, &[1.0; 3]).unwrap();
    store.lose(island, later.seat, now);
    let status = send(&store, &later, in_f32(0, &[1.0; 3]), now).err().unwrap();
    assert_eq!(
        (status.code(), store.end(now, Duration::from_secs(1))),
        (tonic::Code::NotFound, Err(Some(Duration::ZERO)))
    );
}

#[test]
fn settings_can_be_corrected_until_a_fragment_is_made() {
    let (store, now) = (store(2, BTreeMap::new()), Instant::now());
    let attend_with = |index: u32, quorum| {
        let attended = store.attend(&request(index, settings(quorum), index.into()));
        attended.map(|(island, seat)| Caller { island: island.to_string(), seat })
    };
    let leave = |caller| store.leave(&LeaveIsland { caller: Some(caller), done: false }, now).unwrap();
    let (first, second) = (attend_with(0, 1).unwrap(), attend_with(1, 1).unwrap());
    leave(first);
    // The second one still attends with the earlier settings.
    told(attend_with(0, 2), "give every island the same");
    leave(second);
    let first = attend_with(0, 2).unwrap();
    told(attend_with(1, 1), "give every island the same");
    create(&store, &first, &[1.0; 3]).unwrap();
    leave(first);
    // The fragment is updated by the settings with which it was made.
    told(attend_with(0, 1), "give every island the same");
    attend_with(1, 2).unwrap();
}

#[test]
fn a_process_that_another_one_has_replaced_does_not_come_back() {
    let store = store(2, BTreeMap::new());
    for process in [7, 7, 8, 8] {
        store.attend(&request(0, settings(2), process)).unwrap();
    }
    told(store.attend(&request(0, settings(2), 7)), "another process attends as worker:0 by now");
    store.attend(&request(0, settings(2), 8)).unwrap();
}

#[test]
fn late_changes_are_counted_for_their_island() {
    let (store, now) = (store(2, BTreeMap::new()), Instant::now());
    let (first, second) = (attend(&store, 0).unwrap(), attend(&store, 1).unwrap());
    create(&store, &first, &[1.0; 3]).unwrap();
    store.join(&fragment(&second, &MODEL)).unwrap();
    for step in 0..2 {
        send(&store, &first, in_f32(step, &[0.0; 3]), now).unwrap();
        send(&store, &second, in_f32(step, &[0.0; 3]), now).unwrap();
    }
    let island = Task::new(TaskType::Worker, 1);
    assert_eq!(store.refusals(island), 0);
    let received = send(&store, &second, in_f32(0, &[1.0; 3]), now).unwrap();
    assert_eq!((received.taken, store.refusals(island)), (Some(Taken::TooLate { late: 2 }), 1));
}

#[test]
fn a_server_ends_when_all_have_come_and_gone() {
    let (store, now, timeout) = (store(2, BTreeMap::new()), Instant::now(), Duration::from_secs(5));
    let later = now + timeout;
    assert_eq!(store.end(later, timeout), Ok(OuterEnd::Alone));
    let first = attend(&store, 0).unwrap();
    assert_eq!(store.end(later, timeout), Err(None));
    store.leave(&LeaveIsland { caller: Some(first), done: true }, now).unwrap();
    // The second may be about to come.
    assert_eq!(store.end(now, timeout), Err(Some(Duration::ZERO)));
    assert_eq!(store.end(later, timeout), Ok(OuterEnd::Done));
    let second = attend(&store, 1).unwrap();
    store.lose(Task::new(TaskType::Worker, 1), second.seat, now);
    assert_eq!(store.end(now, timeout), Ok(OuterEnd::Done));
    // The first attends again, and is lost.
    let first = attend(&store, 0).unwrap();
    store.lose(Task::new(TaskType::Worker, 0), first.seat, now);
    assert_eq!(store.end(now, timeout), Err(Some(Duration::ZERO)));
    assert_eq!(store.end(later, timeout), Ok(OuterEnd::Alone));
}

#[test]
fn a_fragment_of_a_checkpoint_continues() {
    let variables = vec![("w".to_owned(), 2), ("b".to_owned(), 1)];
    let sent_after = BTreeMap::from([(Task::new(TaskType::Worker, 0), 40)]);
    let kept = Kept { variables, values: vec![1.0, 2.0, 3.0], momentum: vec![0.5; 3], version: 7, sent_after };
    let store = store(2, BTreeMap::from([(1, kept.clone())]));
    assert_eq!((store.kept()[&1].clone(), store.outer_steps()), (kept, 7));
    let first = attend(&store, 0).unwrap();
    told(store.join(&fragment(&first, &[("w", 3)])), "build the same model");
    let joined = store.join(&fragment(&first, &MODEL)).unwrap();
    assert_eq!(joined, FragmentState { held: true, version: 7, sent_after: 40 });
    assert!(create(&store, &first, &[9.0; 3]).unwrap().held);
    // The optimizer of these islands has no momentum.
    assert_eq!(store.kept()[&1].momentum, Vec::<f32>::new());
    assert_eq!(store.kept()[&1].values.len() * DType::F32.size_bytes(), 12);
}

#[test]
fn an_island_is_told_what_it_has_sent_and_a_checkpoint_says_what_has_counted() {
    let (store, now) = (store(2, BTreeMap::new()), Instant::now());
    let (first, second) = (attend(&store, 0).unwrap(), attend(&store, 1).unwrap());
    create(&store, &first, &[1.0; 3]).unwrap();
    let sent_after = |caller| store.join(&fragment(caller, &MODEL)).unwrap().sent_after;
    assert_eq!([sent_after(&first), sent_after(&second)], [0, 0]);
    send(&store, &first, Changes { steps: 30, ..in_f32(0, &[1.0; 3]) }, now).unwrap();
    send(&store, &first, Changes { steps: 40, ..in_f32(0, &[1.0; 3]) }, now).unwrap();
    assert_eq!([sent_after(&first), sent_after(&second)], [40, 0]);
    // A server that continues from this checkpoint does not have these changes.
    assert!(store.kept()[&1].sent_after.is_empty());
    send(&store, &second, Changes { steps: 7, ..in_f32(0, &[1.0; 3]) }, now).unwrap();
    let islands = [0, 1].map(|index| Task::new(TaskType::Worker, index));
    assert_eq!(store.kept()[&1].sent_after, BTreeMap::from([(islands[0], 40), (islands[1], 7)]));
    // Refused changes are not sent again either.
    for _ in 0..2 {
        let version = store.outer_steps();
        send(&store, &first, Changes { steps: 50, ..in_f32(version, &[1.0; 3]) }, now).unwrap();
        send(&store, &second, Changes { steps: 17, ..in_f32(version, &[1.0; 3]) }, now).unwrap();
    }
    let late = send(&store, &second, Changes { steps: 27, ..in_f32(0, &[1.0; 3]) }, now).unwrap();
    assert_eq!((late.taken, sent_after(&second)), (Some(Taken::TooLate { late: 3 }), 27));
}
