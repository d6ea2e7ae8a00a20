//! Exchanges of islands, as programs can see them.

use std::time::Duration;

/// An exchange of a fragment with its server, as
/// [`on_exchange`](crate::DecoupledDilocoBuilder::on_exchange) shows it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct OuterExchange {
    /// The fragment's index.
    pub fragment: usize,
    /// The number of this island's optimizer steps.
    pub steps: u64,
    /// The outcome.
    pub outcome: OuterOutcome,
    /// The number of outer steps behind this island's outer parameters.
    pub outer_steps: u64,
    /// Whether this island has got newer outer parameters.
    pub is_newer: bool,
    /// The number of this island's changes that the server has refused since it was started.
    pub refusals: u64,
    /// The duration of the exchange.
    pub waited: Duration,
    /// Bytes of values that were sent.
    pub sent_bytes: u64,
    /// Bytes of values that were received.
    pub received_bytes: u64,
}

/// The outcome of an exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OuterOutcome {
    /// The island has joined: it has given the server its parameters, or got those of the server.
    Joined,
    /// The changes count.
    Counted {
        /// The number of outer steps that were made since they began.
        late: u64,
    },
    /// The changes were refused, since they are later than `staleness` allows.
    TooLate {
        /// The number of outer steps that were made since they began.
        late: u64,
    },
    /// The server could not be reached, and nothing was sent.
    Away {
        /// The failure.
        why: String,
    },
    /// The server was lost before it answered, so the changes may count.
    Unanswered {
        /// The failure.
        why: String,
    },
}
