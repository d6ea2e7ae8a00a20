//! The control messages of a connection, and callers of a member that is being connected.

use super::{AbortReason, ControlMessage, MAX_CONTROL_BYTES, parse_control};

pub(crate) use super::reception::fuzz::reception;

/// The first byte chooses the length of the pieces. The messages are the same whatever it is.
pub(crate) fn control_messages(bytes: &[u8]) -> bool {
    let (size, bytes) = bytes.split_first().unwrap_or((&0, &[]));
    let several = parsed(bytes, usize::from(*size).max(1));
    assert_eq!(several, parsed(bytes, usize::MAX));
    match &several.0 {
        Some(ControlMessage::Abort(reason)) => {
            let AbortReason { origin, cause, .. } = &**reason;
            assert!(!origin.contains('\n') && !cause.contains('\n'));
        }
        Some(ControlMessage::Broken(problem)) => assert!(!problem.contains('\n')),
        Some(ControlMessage::Left) | None => {}
    }
    several.1.is_some() || matches!(several.0, Some(ControlMessage::Abort(_) | ControlMessage::Left))
}

/// Returns the message that ends the connection, and the last notice of waiting.
fn parsed(bytes: &[u8], size: usize) -> (Option<ControlMessage>, Option<u64>) {
    let (mut inbox, mut waiting) = (Vec::new(), None);
    for piece in bytes.chunks(size) {
        inbox.extend_from_slice(piece);
        if let Some(message) = parse_control(&mut inbox, &mut waiting) {
            return (Some(message), waiting);
        }
        // What is kept is less than a message.
        assert!(inbox.len() < MAX_CONTROL_BYTES + 5);
    }
    (None, waiting)
}

/// Returns connections of callers, and control messages, for the corpus.
#[cfg(test)]
pub(crate) fn samples() -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    use super::{CONTROL_ABORT, CONTROL_LEFT, CONTROL_WAITING};
    use crate::transport::Nonce;
    use distribute_cluster::FailureKind;
    let message = |kind: u8, content: &[u8]| [&[kind][..], &(content.len() as u32).to_le_bytes(), content].concat();
    let (origin, cause) = ("worker:1".to_owned(), "loss is NaN".to_owned());
    let abort = AbortReason { origin, cause, kind: FailureKind::Permanent }.encode();
    let waiting = message(CONTROL_WAITING, &7u64.to_le_bytes());
    let control = vec![
        [vec![3], waiting.clone(), message(CONTROL_ABORT, &abort)].concat(),
        [vec![255], waiting.clone(), waiting.clone(), message(CONTROL_LEFT, &[])].concat(),
        [vec![1], waiting].concat(),
    ];
    let hello = super::hello::Hello { group: Nonce::from_bytes([7; 16]), rank: 1, channel: 0 };
    let plain = |size: u8| [&[0, size][..], &hello.encode()].concat();
    (vec![plain(200), plain(3)], control)
}
