//! Decoders of bytes from outside, for fuzzers and for the replay of their corpora. Not part of the public interface.
//!
//! Each function decodes its input, checks what it decoded, and returns whether the input was accepted. The crate has
//! them in its tests, and in builds by cargo-fuzz, which sets `cfg(fuzzing)`.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use distribute_device::DType;
use prost::Message as _;

use crate::wire::proto::{AttendWorker, Closure, Outcome, Released, Resource};
use crate::{message, numbers};

/// Calls of a coordinator and of workers to a server, one after another.
pub fn parameter_server(bytes: &[u8]) -> bool {
    crate::store::fuzz::calls(bytes)
}

/// Calls of islands to a server of outer parameters, one after another.
pub fn outer_parameters(bytes: &[u8]) -> bool {
    crate::outer::fuzz::calls(bytes)
}

/// The arguments and results of functions, in MessagePack.
pub fn function_values(bytes: &[u8]) -> bool {
    type Nested = BTreeMap<String, Vec<Option<(f64, String)>>>;
    let again = |encoded: Result<Vec<u8>, _>| encoded.is_ok_and(|encoded: Vec<u8>| !encoded.is_empty());
    let _ = message::decode::<()>(bytes);
    let number = message::decode::<u64>(bytes).is_ok_and(|number| {
        let encoded = message::encode(&number).expect("numbers can be encoded");
        message::decode::<u64>(&encoded).is_ok_and(|again| again == number)
    });
    let text = message::decode::<String>(bytes).is_ok_and(|text| text.len() <= bytes.len());
    let list = message::decode::<Vec<u32>>(bytes).is_ok_and(|list| list.len() <= bytes.len());
    let pair =
        message::decode::<(Vec<f64>, Option<String>, u64)>(bytes).is_ok_and(|pair| again(message::encode(&pair)));
    let nested = message::decode::<Nested>(bytes).is_ok_and(|nested| again(message::encode(&nested)));
    // Values of any form, which may be nested as deeply as the bytes say.
    let any = message::decode::<serde_json::Value>(bytes).is_ok();
    number || text || list || pair || nested || any
}

/// Elements as bytes: the types by the first two bytes.
pub fn elements(bytes: &[u8]) -> bool {
    let [from, to, bytes @ ..] = bytes else { return false };
    let (Some(from), Some(to)) = (numbers::dtype((*from).into()), numbers::dtype((*to).into())) else { return false };
    if let Some(rows) = numbers::rows(bytes) {
        assert_eq!(numbers::rows_to_bytes(rows), bytes);
    }
    let read = [
        numbers::read::<f32>(bytes, from).map(|read| read.len()),
        numbers::read::<f64>(bytes, from).map(|read| read.len()),
    ];
    for len in read.into_iter().flatten() {
        assert_eq!(len * from.size_bytes(), bytes.len());
    }
    let mut target = vec![0; bytes.len() / from.size_bytes() * to.size_bytes()];
    let fits = numbers::copy_into(bytes, from, &mut target, to);
    assert!(!fits || from == to || (from.is_float() && matches!(to, DType::F32 | DType::F64)));
    fits
}

/// The messages to and from workers.
pub fn worker_messages(bytes: &[u8]) -> bool {
    fn same<M: prost::Message + Default + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> bool {
        let Ok(message) = M::decode(bytes) else { return false };
        assert_eq!(M::decode(&*message.encode_to_vec()), Ok(message));
        true
    }
    [
        same::<AttendWorker>(bytes),
        same::<Resource>(bytes),
        same::<Closure>(bytes),
        same::<Outcome>(bytes),
        same::<Released>(bytes),
    ]
    .contains(&true)
}
