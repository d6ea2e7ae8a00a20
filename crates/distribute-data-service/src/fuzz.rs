//! Decoders of bytes from outside, for fuzzers and for the replay of their corpora. Not part of the public interface.
//!
//! Each function decodes its input, checks what it decoded, and returns whether the input was accepted. The crate has
//! them in its tests, and in builds by cargo-fuzz, which sets `cfg(fuzzing)`.

#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use bytes::Bytes;
use distribute_input::{Array, Ragged, Sparse};
use distribute_types::{bf16, f16};
use prost::Message;

use crate::registry::Registry;
use crate::transfer::{Components, Transfer, decode, encode};
use crate::wire::proto::{Chunk, LocateRequest, ReadRequest, Registration};

/// A payload of elements.
pub fn data_elements(bytes: &[u8]) -> bool {
    let Ok(elements) = decode(Bytes::copy_from_slice(bytes)) else { return false };
    let mut is_accepted = false;
    for components in &elements {
        is_accepted |= [
            received::<Array<f32>, _>(components),
            received::<Array<f64>, _>(components),
            received::<Array<u8>, _>(components),
            received::<Array<i64>, _>(components),
            received::<Array<bool>, _>(components),
            received::<Array<String>, _>(components),
            received::<String, _>(components),
            received::<Vec<u8>, _>(components),
            received::<Ragged<i64>, _>(components),
            received::<Ragged<String>, _>(components),
            received::<Sparse<f16>, _>(components),
            received::<Sparse<bool>, _>(components),
            received::<(Array<f32>, Array<i64>), _>(components),
            received::<(Array<String>, Ragged<f32>, Sparse<bf16>), _>(components),
        ]
        .contains(&true);
    }
    let again = encode(elements.iter().cloned().map(Components::into_message).collect());
    let again = decode(again).expect("they were decoded before");
    assert!(again.iter().map(Components::describe).eq(elements.iter().map(Components::describe)));
    is_accepted
}

/// Returns whether the components are a value, which is then sent as the same components.
fn received<T: Transfer<L>, L>(components: &Components) -> bool {
    let Ok(value) = components.clone().receive::<T, L>() else { return false };
    let mut again = Components::new();
    value.send(&mut again).expect("it was received");
    let (sent, received) = (again.into_message(), components.clone().into_message());
    assert_eq!(sent, received);
    true
}

/// The messages of data workers and consumers: calls to the dispatcher, each a kind, a length, and as many bytes.
pub fn data_service(mut bytes: &[u8]) -> bool {
    let (mut registry, mut now, mut accepted) = (Registry::new(Duration::from_secs(10)), Instant::now(), 0);
    while let [kind, len, rest @ ..] = bytes {
        let (message, rest) = rest.split_at(usize::from(*len).min(rest.len()));
        bytes = rest;
        now += Duration::from_secs(2);
        let is_accepted = match kind % 4 {
            0 => read::<Registration>(message).is_some_and(|message| registry.register(message, now).is_ok()),
            1 => read::<LocateRequest>(message).is_some_and(|request| {
                let located = registry.locate(&request.dataset, now);
                assert!(located.workers.is_empty() || located.digest.len() == 16);
                !located.workers.is_empty()
            }),
            2 => read::<ReadRequest>(message).is_some(),
            _ => read::<Chunk>(message).is_some(),
        };
        accepted += u32::from(is_accepted);
        assert!(registry.workers(now).len() <= 6, "silent data workers are kept");
    }
    accepted > 1
}

/// Messages are encoded to what is decoded again.
fn read<M: Message + Default + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Option<M> {
    let message = M::decode(bytes).ok()?;
    assert_eq!(M::decode(&*message.encode_to_vec()).as_ref(), Ok(&message));
    Some(message)
}
