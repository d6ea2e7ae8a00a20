//! Calls of islands to a server, one after another.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use distribute_cluster::{Task, TaskType};
use prost::Message;

use super::store::{Creating, OuterStore, Receiving};
use crate::wire::MAX_PAYLOAD_BYTES;
use crate::wire::proto::{AttendIsland, Caller, Changes, CreateFragment, Fragment, LeaveIsland, OuterValues};

/// Each call is a kind, a length, and as many bytes of its message. Calls are those of islands that attend.
pub(crate) fn calls(mut bytes: &[u8]) -> bool {
    let mut now = Instant::now();
    let islands = (0..3).map(|index| Task::new(TaskType::Worker, index)).collect();
    let store = OuterStore::new(99, now, islands, BTreeMap::new());
    let (mut creating, mut receiving) = (Creating::default(), Receiving::default());
    let (mut seats, mut accepted) = (BTreeMap::new(), 0);
    while let [kind, len, rest @ ..] = bytes {
        let (message, rest) = rest.split_at(usize::from(*len).min(rest.len()));
        bytes = rest;
        let seated = |caller: Option<Caller>| {
            caller.map(|caller| Caller { seat: seats.get(&caller.island).copied().unwrap_or(caller.seat), ..caller })
        };
        let is_accepted = match kind % 7 {
            0 => read::<AttendIsland>(message).is_some_and(|request| {
                let attended = store.attend(&request);
                let seat = attended.as_ref().ok().map(|(island, seat)| (island.to_string(), *seat));
                seats.extend(seat);
                attended.is_ok()
            }),
            1 => read::<Fragment>(message).is_some_and(|fragment| {
                let caller = seated(fragment.caller.clone());
                store.join(&Fragment { caller, ..fragment }).is_ok()
            }),
            2 => read::<CreateFragment>(message).is_some_and(|message| {
                let fragment = message.fragment.clone().map(|of| Fragment { caller: seated(of.caller.clone()), ..of });
                let created = store.create(&mut creating, CreateFragment { fragment, ..message });
                created.inspect_err(|_| creating = Creating::default()).is_ok()
            }),
            3 => read::<Changes>(message).is_some_and(|changes| {
                let caller = seated(changes.caller.clone());
                let received = store.receive(&mut receiving, Changes { caller, ..changes }, now);
                let received = received.inspect_err(|_| receiving = Receiving::default());
                received.is_ok_and(|received| {
                    let Some(received) = received else { return true };
                    let (version, values) = received.held.newest(None);
                    assert!(received.taken.is_none() || version >= received.version);
                    let values = values.expect("a caller without values gets them");
                    assert!(values.len() <= MAX_PAYLOAD_BYTES && values.len().is_multiple_of(size_of::<f32>()));
                    true
                })
            }),
            4 => read::<LeaveIsland>(message).is_some_and(|request| {
                let caller = seated(request.caller.clone());
                store.leave(&LeaveIsland { caller, ..request }, now).is_ok()
            }),
            5 => read::<OuterValues>(message).is_some(),
            _ => {
                now += Duration::from_millis((*len).into());
                let (kept, end) = (store.kept(), store.end(now, Duration::from_secs(1)));
                assert!(kept.values().all(|kept| {
                    let len: u64 = kept.variables.iter().map(|(_, len)| len).sum();
                    len == kept.values.len() as u64 && (kept.momentum.is_empty() || len == kept.momentum.len() as u64)
                }));
                end.is_ok()
            }
        };
        accepted += u32::from(is_accepted);
    }
    accepted > 1
}

/// Messages are encoded to what is decoded again. NaN is compared by its bits.
fn read<M: Message + Default>(bytes: &[u8]) -> Option<M> {
    let message = M::decode(bytes).ok()?;
    let again = M::decode(&*message.encode_to_vec()).expect("what was encoded");
    assert_eq!(again.encode_to_vec(), message.encode_to_vec());
    Some(message)
}

/// Returns calls of a training, for the corpus.
#[cfg(test)]
pub(crate) fn samples() -> Vec<Vec<u8>> {
    use crate::wire::proto::{OuterSettings, OuterVariable};
    let call = |kind: u8, message: Vec<u8>| {
        [&[kind, u8::try_from(message.len()).expect("a short message")][..], &message].concat()
    };
    let caller = |index: u32| Some(Caller { island: format!("worker:{index}"), seat: 0 });
    let attend = |index: u32, quorum| {
        let settings =
            OuterSettings { learning_rate: 0.5, momentum: 0.5, quorum, grace_us: 1000, staleness: 1, fragments: 2 };
        call(
            0,
            AttendIsland { island: format!("worker:{index}"), settings: Some(settings), process: index.into() }
                .encode_to_vec(),
        )
    };
    let values = |value: f32, count: usize| bytemuck::cast_slice::<f32, u8>(&vec![value; count]).to_vec();
    let fragment = |index| {
        let variables = [("w", 3), ("b", 1)].map(|(name, len)| OuterVariable { name: name.to_owned(), len }).to_vec();
        Fragment { caller: caller(index), fragment: 1, variables }
    };
    let join = |index| call(1, fragment(index).encode_to_vec());
    let part = |index: Option<u32>, more, payload: Vec<u8>| {
        let message = CreateFragment { fragment: index.map(fragment), more, payload: payload.into() };
        call(2, message.encode_to_vec())
    };
    let changes = |index, version, int8, payload: Vec<u8>| {
        let message = Changes {
            caller: caller(index),
            fragment: 1,
            version,
            examples: 7,
            int8,
            payload: payload.into(),
            ..Changes::default()
        };
        call(3, message.encode_to_vec())
    };
    let pull = |index| call(3, Changes { caller: caller(index), fragment: 1, ..Changes::default() }.encode_to_vec());
    let leave = |index, done| call(4, LeaveIsland { caller: caller(index), done }.encode_to_vec());
    let answer = OuterValues { version: 3, newer: true, payload: values(1.0, 4).into(), ..OuterValues::default() };
    let look = [6, 200].to_vec();
    let eight = |scale: f32| [&scale.to_le_bytes()[..], &[1, 2, 255], &scale.to_le_bytes(), &[9]].concat();
    let begin = |quorum| {
        [
            attend(0, quorum),
            join(0),
            part(Some(0), true, values(1.0, 1)),
            part(None, false, values(2.0, 3)),
            attend(1, quorum),
            join(1),
            pull(1),
        ]
        .concat()
    };
    vec![
        [begin(1), changes(0, 0, false, values(0.5, 4)), look.clone(), pull(0)].concat(),
        [begin(2), changes(0, 0, true, eight(0.5)), changes(1, 0, false, values(1.0, 4)), look.clone()].concat(),
        [begin(2), changes(0, 0, false, values(f32::MAX, 4)), changes(0, 0, false, values(f32::MAX, 4))].concat(),
        [begin(1), changes(0, 0, true, eight(f32::NAN)), changes(1, u64::MAX, false, values(1.0, 4))].concat(),
        [begin(2), leave(0, true), leave(1, false), look, attend(0, 1)].concat(),
        [begin(1), call(5, answer.encode_to_vec())].concat(),
    ]
}
