//! Reasons for which a handshake fails.

use std::fmt;

/// The side of a connection whose certificate is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// This process, of whose certificate the other side has complained.
    Ours,
    /// The other side.
    Theirs,
}

/// Why a TLS handshake failed. Its `Display` form is a sentence from this side's point of view, without a remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TlsProblem {
    /// This process has no TLS, and the other side has it.
    MissingHere,
    /// This process has TLS, and the other side does not use it.
    MissingThere,
    /// A side showed no certificate.
    NoCertificate(Side),
    /// A certificate was not issued by the authority that the verifying side trusts.
    UnknownAuthority(Side),
    /// A certificate has expired. If the other side complains, it may also be not yet valid.
    Expired(Side),
    /// A certificate is not yet valid.
    NotYetValid(Side),
    /// A certificate is for another name than the job's. If the other side complains, it may also be damaged.
    WrongName(Side),
    /// A certificate may not be used for the purpose.
    Purpose(Side),
    /// This process's own files cannot be used any more.
    Own(String),
    /// Another problem of the handshake, such as that of an attacker or of another program.
    Handshake(String),
}

impl TlsProblem {
    /// Returns whether a later attempt may succeed, because what listens may be another program.
    pub fn is_passing(&self) -> bool {
        matches!(self, TlsProblem::Handshake(_))
    }

    /// Returns the same problem as the other side sees it.
    #[must_use]
    pub fn seen_from_there(&self) -> TlsProblem {
        let turn = |side: Side| if side == Side::Ours { Side::Theirs } else { Side::Ours };
        match self.clone() {
            TlsProblem::MissingHere => TlsProblem::MissingThere,
            TlsProblem::MissingThere => TlsProblem::MissingHere,
            TlsProblem::NoCertificate(side) => TlsProblem::NoCertificate(turn(side)),
            TlsProblem::UnknownAuthority(side) => TlsProblem::UnknownAuthority(turn(side)),
            TlsProblem::Expired(side) => TlsProblem::Expired(turn(side)),
            TlsProblem::NotYetValid(side) => TlsProblem::NotYetValid(turn(side)),
            TlsProblem::WrongName(side) => TlsProblem::WrongName(turn(side)),
            TlsProblem::Purpose(side) => TlsProblem::Purpose(turn(side)),
            same @ (TlsProblem::Own(_) | TlsProblem::Handshake(_)) => same,
        }
    }
}

impl fmt::Display for TlsProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TlsProblem::MissingHere => f.write_str("this process does not use TLS, and the other side does"),
            TlsProblem::MissingThere => f.write_str("this process uses TLS, and the other side does not"),
            TlsProblem::NoCertificate(Side::Ours) => f.write_str("this process showed no certificate"),
            TlsProblem::NoCertificate(Side::Theirs) => f.write_str("the other side showed no certificate"),
            TlsProblem::UnknownAuthority(Side::Ours) => {
                f.write_str("the other side does not trust the authority of this process's certificate")
            }
            TlsProblem::UnknownAuthority(Side::Theirs) => {
                f.write_str("the certificate of the other side is not of the authority that this process trusts")
            }
            TlsProblem::Expired(Side::Ours) => {
                f.write_str("the other side says that this process's certificate has expired, or is not yet valid")
            }
            TlsProblem::Expired(Side::Theirs) => f.write_str("the certificate of the other side has expired"),
            TlsProblem::NotYetValid(Side::Ours) => f.write_str("the certificate of this process is not yet valid"),
            TlsProblem::NotYetValid(Side::Theirs) => {
                f.write_str("the certificate of the other side is not yet valid; compare the clocks of both machines")
            }
            TlsProblem::WrongName(Side::Ours) => f.write_str(
                "the other side says that this process's certificate is for another name than the job's \
                 (DISTRIBUTE_TLS_NAME), or damaged",
            ),
            TlsProblem::WrongName(Side::Theirs) => f.write_str(
                "the certificate of the other side is for another name than the job's (DISTRIBUTE_TLS_NAME)",
            ),
            TlsProblem::Purpose(Side::Ours) => {
                f.write_str("the other side says that this process's certificate is not for clients and servers")
            }
            TlsProblem::Purpose(Side::Theirs) => {
                f.write_str("the certificate of the other side is not for both clients and servers")
            }
            TlsProblem::Own(problem) => write!(f, "this process's certificate cannot be used: {problem}"),
            TlsProblem::Handshake(problem) => write!(f, "the TLS handshake with the other side failed: {problem}"),
        }
    }
}

impl std::error::Error for TlsProblem {}

/// Returns whether a connection's first bytes are those of a TLS handshake.
pub fn is_client_hello(first: &[u8]) -> bool {
    first.first() == Some(&HANDSHAKE)
}

/// The first byte of a record of a handshake; no protocol of this crate begins with it.
const HANDSHAKE: u8 = 0x16;

/// The description of the alert by which a listener without TLS answers a caller that has it: one of those for private
/// use.
#[cfg(feature = "tls")]
pub(super) const WITHOUT_TLS: u8 = ALERT_WITHOUT_TLS[6];

/// The whole record of that alert.
pub(crate) const ALERT_WITHOUT_TLS: [u8; 7] = [0x15, 3, 3, 0, 2, 2, 224];
