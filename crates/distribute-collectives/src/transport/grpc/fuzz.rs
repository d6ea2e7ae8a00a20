//! The frames of a stream.

use distribute_cluster::FailureKind;
use distribute_cluster::grpc::encode;
use prost::Message as _;

use super::frames::{Frame, MAX_FRAME_BYTES};
use super::wire::{Abort, frame::Kind};
use super::{AbortReason, Nonce};

/// One frame.
pub(crate) fn frames(bytes: &[u8]) -> bool {
    let Ok(frame) = Frame::decode(bytes) else { return false };
    let again = encode(frame.clone()).concat();
    assert!(again.len() <= MAX_FRAME_BYTES.max(bytes.len() * 3) + 5);
    // A frame of no data, which no member sends, is written as one of nothing.
    let is_empty = matches!(&frame.kind, Some(Kind::Data(bytes)) if bytes.is_empty());
    let expected = if is_empty { Frame::default() } else { frame.clone() };
    assert_eq!(Frame::decode(&again[5..]), Ok(expected));
    match &frame.kind {
        Some(Kind::Abort(Abort { origin, cause, kind })) => {
            let (origin, cause) = (origin.clone(), cause.clone());
            let reason = AbortReason { origin, cause, kind: FailureKind::from_code(*kind) }.tidied();
            assert!(!reason.origin.contains('\n') && !reason.cause.contains('\n'));
        }
        Some(Kind::Hello(hello)) => {
            let nonce = <[u8; Nonce::LEN]>::try_from(&hello.nonce[..]).map(Nonce::from_bytes);
            assert!(nonce.is_err() || nonce.is_ok_and(|nonce| hello.nonce == nonce.to_bytes()[..]));
        }
        _ => {}
    }
    frame.kind.is_some()
}

/// Returns frames of every kind, for the corpus.
#[cfg(test)]
pub(crate) fn samples() -> Vec<Vec<u8>> {
    use super::wire::{Hello, Here, Left};
    let abort = Abort { origin: "worker:1".to_owned(), cause: "loss is NaN".to_owned(), kind: 2 };
    let kinds = [
        Kind::Hello(Hello { nonce: vec![7; 16].into(), rank: 3, version: 2 }),
        Kind::Here(Here {}),
        Kind::Data(vec![1, 2, 3].into()),
        Kind::Left(Left {}),
        Kind::Waiting(1 << 40),
        Kind::Abort(abort),
    ];
    kinds.into_iter().map(|kind| Frame { kind: Some(kind) }.encode_to_vec()).collect()
}
