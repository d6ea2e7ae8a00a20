//! What a member that gives up tells its peers.

use serde::{Deserialize, Serialize};

/// Why a member gives up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AbortReason {
    /// Who failed first.
    pub origin: String,
    /// What happened there.
    pub cause: String,
    /// Whether the same job may succeed when it is started again: a lost machine, but not a wrong model.
    pub retryable: bool,
}

impl AbortReason {
    /// Longest text of either field; what is longer is cut.
    const MAX_TEXT: usize = 4096;

    /// Bytes for transports that have no encoding of their own.
    pub fn encode(&self) -> Vec<u8> {
        // Two texts and a truth value always have a form.
        serde_json::to_vec(&self.tidied()).unwrap_or_default()
    }

    /// Reads what [`encode`](AbortReason::encode) wrote; other bytes are a cause of unknown origin.
    pub fn decode(bytes: &[u8]) -> AbortReason {
        let reason = serde_json::from_slice(bytes).unwrap_or_else(|_| AbortReason {
            origin: "a peer".to_owned(),
            cause: String::from_utf8_lossy(bytes).into_owned(),
            retryable: true,
        });
        reason.tidied()
    }

    /// With texts of bounded length on one line, as they end in others' logs.
    pub(crate) fn tidied(&self) -> AbortReason {
        let tidy = |text: &str| -> String {
            let end = text.floor_char_boundary(Self::MAX_TEXT);
            text[..end].chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
        };
        AbortReason { origin: tidy(&self.origin), cause: tidy(&self.cause), retryable: self.retryable }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_read_back_on_one_line_and_cut() {
        let reason = AbortReason { origin: "worker:1".to_owned(), cause: "loss is NaN".to_owned(), retryable: false };
        assert_eq!(AbortReason::decode(&reason.encode()), reason);
        let forged = AbortReason { cause: format!("a\nERROR b{}", "ü".repeat(5000)), ..reason };
        let read = AbortReason::decode(&forged.encode());
        assert!(read.cause.starts_with("a ERROR b") && read.cause.len() <= AbortReason::MAX_TEXT);
    }

    #[test]
    fn other_bytes_are_a_cause() {
        let read = AbortReason::decode(b"out of \xff memory");
        assert!(read.cause.starts_with("out of") && read.retryable, "{read:?}");
    }
}
