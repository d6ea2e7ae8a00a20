//! The reason that a failing member sends its peers.

use distribute_cluster::{FailureKind, printable};
use serde::{Deserialize, Serialize};

/// Why a member aborts the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbortReason {
    /// The rank or task that failed first.
    pub origin: String,
    /// Its error.
    pub cause: String,
    /// Whether the same job may succeed when it is started again: after a lost machine, but not with a wrong model.
    pub kind: FailureKind,
}

/// A reason as bytes.
#[derive(Serialize, Deserialize)]
struct Encoded {
    origin: String,
    cause: String,
    kind: u32,
}

impl AbortReason {
    /// Longest text of either field, in characters; what is longer is cut.
    pub(crate) const MAX_TEXT: usize = 2000;

    /// Encodes the reason, for transports that have no encoding of their own.
    pub fn encode(&self) -> Vec<u8> {
        let AbortReason { origin, cause, kind } = self.tidied();
        // Two texts and a number always have a form.
        serde_json::to_vec(&Encoded { origin, cause, kind: kind.code() }).unwrap_or_default()
    }

    /// Decodes what [`encode`](AbortReason::encode) wrote; other bytes become a cause of unknown origin.
    pub fn decode(bytes: &[u8]) -> AbortReason {
        let reason = match serde_json::from_slice(bytes) {
            Ok(Encoded { origin, cause, kind }) => AbortReason { origin, cause, kind: FailureKind::from_code(kind) },
            Err(_) => AbortReason {
                origin: String::new(),
                cause: String::from_utf8_lossy(bytes).into_owned(),
                kind: FailureKind::Retryable,
            },
        };
        reason.tidied()
    }

    /// With texts of bounded length on one line, as they end in others' logs.
    pub(crate) fn tidied(&self) -> AbortReason {
        let tidy = |text: &str| printable(text, Self::MAX_TEXT);
        AbortReason { origin: tidy(&self.origin), cause: tidy(&self.cause), kind: self.kind }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_read_back_on_one_line_and_cut() {
        let (origin, cause) = ("worker:1".to_owned(), "loss is NaN".to_owned());
        let reason = AbortReason { origin, cause, kind: FailureKind::Configuration };
        assert_eq!(AbortReason::decode(&reason.encode()), reason);
        let forged = AbortReason { cause: format!("a\nERROR b{}", "ü".repeat(5000)), ..reason };
        let read = AbortReason::decode(&forged.encode());
        assert!(!read.cause.contains('\n') && read.cause.chars().count() <= AbortReason::MAX_TEXT + 10, "{read:?}");
    }

    #[test]
    fn other_bytes_are_a_cause() {
        let read = AbortReason::decode(b"out of \xff memory");
        assert!(read.cause.starts_with("out of") && read.kind == FailureKind::Retryable, "{read:?}");
    }
}
