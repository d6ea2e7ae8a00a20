//! Reasons for which a connection is refused.

use std::fmt;

use crate::tls::{TLS_REMEDY, TlsProblem};

/// Why a connection was refused. Its `Display` form is a sentence from this side's point of view, without a remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Problem {
    /// This process has no secret, and the other side has one.
    MissingHere,
    /// This process has a secret, and the other side has none.
    MissingThere,
    /// The two sides do not have the same secret.
    Wrong,
    /// The other side belongs to another job or group.
    Other {
        /// The identity of the other side, which is not proved.
        theirs: String,
        /// The identity of this side.
        ours: String,
    },
    /// The other side sent what does not belong to the exchange, or ended it.
    Garbled,
    /// The certificates or their handshake, which comes before the exchange.
    Tls(TlsProblem),
}

impl Problem {
    /// Returns whether a later attempt may succeed, because what listens may be another program.
    pub fn is_passing(&self) -> bool {
        match self {
            Problem::Garbled => true,
            Problem::Tls(problem) => problem.is_passing(),
            _ => false,
        }
    }

    /// Returns the remedy: of certificates, or the one given for the secret.
    pub fn remedy(&self, of_secret: &'static str) -> &'static str {
        match self {
            Problem::Tls(_) => TLS_REMEDY,
            _ => of_secret,
        }
    }

    /// Returns the same problem as the other side sees it.
    #[must_use]
    pub fn seen_from_there(&self) -> Problem {
        match self.clone() {
            Problem::MissingHere => Problem::MissingThere,
            Problem::MissingThere => Problem::MissingHere,
            Problem::Other { theirs, ours } => Problem::Other { theirs: ours, ours: theirs },
            Problem::Tls(problem) => Problem::Tls(problem.seen_from_there()),
            same @ (Problem::Wrong | Problem::Garbled) => same,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::MissingHere => f.write_str("this process has no secret, and the other side has one"),
            Problem::MissingThere => f.write_str("this process has a secret, and the other side has none"),
            Problem::Wrong => f.write_str("this process and the other side do not have the same secret"),
            Problem::Other { theirs, ours } => {
                // Behind the digest, which is compared, is the name.
                let name = |identity: &str| identity.split_once(' ').map_or(identity, |(_, name)| name).to_owned();
                write!(f, "the other side belongs to {}, and this process to {}", name(theirs), name(ours))
            }
            Problem::Tls(problem) => problem.fmt(f),
            Problem::Garbled => f.write_str(
                "the other side does not prove that it knows the secret; it may be another program, or another version",
            ),
        }
    }
}

impl std::error::Error for Problem {}
