//! Conversion of failures between processes to errors of this crate.

use std::time::Instant;

use super::connections::{Connections, ExchangeError};
use crate::call::Call;
use crate::engine::context::GroupContext;
use crate::transport::{AbortReason, TransportError};
use crate::{Error, Rank};

/// Names the ranks and the call that a failed exchange concerns.
pub(super) fn explain(
    error: ExchangeError,
    context: &GroupContext,
    connections: &Connections,
    call: Call,
    started: Instant,
) -> Error {
    let name = |process: usize| context.process_name(process);
    let here = context.local_name(0);
    let lost = |peer: usize, how: String| Error::PeerLost {
        name: context.local_name(0),
        peer: name(peer),
        peer_rank: Rank::of(peer * context.local_ranks),
        during: call.to_string(),
        how,
    };
    match error {
        ExchangeError::Mismatch { peer, here: (call, mine), there: (other, theirs) } if call == other => {
            Error::Schedules {
                call: Box::new(call),
                here_name: here,
                here: mine.name(),
                there_name: name(peer),
                there: theirs.name(),
            }
        }
        ExchangeError::Mismatch { peer, here: (call, _), there: (there, _) } => {
            Error::Mismatch { here: Box::new(call), here_name: here, there: Box::new(there), there_name: name(peer) }
        }
        ExchangeError::Garbage { peer } => {
            lost(peer, "it sent bytes that are not a collective call; is another program using this port?".to_owned())
        }
        ExchangeError::Deadline { missing } => {
            let heard = |process: &usize| match connections.last_heard(*process) {
                Some(at) => format!("{} (last heard {:.1?} ago)", name(*process), at.elapsed()),
                None => format!("{} (never heard)", name(*process)),
            };
            Error::Deadline {
                call: Box::new(call),
                name: here,
                group: context.name.clone(),
                waited: started.elapsed(),
                missing: missing.iter().map(heard).collect::<Vec<_>>().join(", "),
            }
        }
        ExchangeError::Transport(TransportError::Lost { peer, how }) => lost(peer, how),
        ExchangeError::Transport(TransportError::Left { peer }) => {
            Error::PeerLeft { name: here, peer: name(peer), group: context.name.clone(), during: call.to_string() }
        }
        ExchangeError::Transport(TransportError::Aborted { peer, reason }) => {
            let AbortReason { origin, cause, kind } = *reason;
            // A user's transport may not report the origin.
            let origin = if origin.is_empty() { name(peer) } else { origin };
            Error::aborted(&context.name, &origin, &cause, kind)
        }
        // The exchange was interrupted, which only an abort does.
        ExchangeError::Transport(_) => context.aborted(Some(call)),
    }
}
