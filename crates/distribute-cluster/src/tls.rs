//! Mutual TLS between the processes of a job, by certificates of the job's own authority.
//!
//! Every process shows a certificate and verifies that of the other side: its chain against the authority, its period
//! of validity, and one name that all certificates of the job have. TLS 1.3 alone is spoken, without resumption,
//! tickets or early data. Where the job has a [secret](crate::secret) too, the exchange of the secret runs inside and
//! is bound to the connection.
//!
//! [`JobTls`] exists without the cargo feature `tls` too, so that signatures do not depend on it; then there is no
//! value of it, and variables that ask for TLS are an error.
//!
//! After a handshake the listener sends one byte, [`ADMITTED`], to callers that offer the protocol [`PROTOCOL`] (ALPN).
//! In TLS 1.3 a caller completes its handshake before the listener has verified the caller's certificate; by this byte
//! it learns in time whether it was admitted.
//!
//! # Source
//! RFC 8446 (TLS 1.3), RFC 9266 (channel bindings), RFC 5280 (certificates).

mod problem;
mod variables;

#[cfg(not(feature = "tls"))]
mod absent;
#[cfg(feature = "tls")]
mod files;
#[cfg(feature = "tls")]
mod identity;
#[cfg(feature = "tls")]
mod session;
#[cfg(feature = "coordination")]
pub(crate) mod socket;
#[cfg(feature = "tls")]
mod verifier;

#[cfg(not(feature = "tls"))]
pub use absent::{JobTls, Session};
#[cfg(feature = "tls")]
pub use identity::JobTls;
pub use problem::{Side, TlsProblem, is_client_hello};
#[cfg(feature = "tls")]
pub use session::Session;
pub use variables::TlsFiles;

pub(crate) use problem::ALERT_WITHOUT_TLS;

/// The remedy of a missing or wrong certificate.
pub const TLS_REMEDY: &str = "give every process of the job a certificate of one authority by DISTRIBUTE_TLS_CA, \
                              DISTRIBUTE_TLS_CERT and DISTRIBUTE_TLS_KEY, or none of them; `distribute certs` issues \
                              and renews them";

/// The application protocol that callers offer, by ALPN.
pub const PROTOCOL: &[u8] = b"distribute/1";

/// The byte by which a listener tells a caller of [`PROTOCOL`] that its certificate is accepted.
pub const ADMITTED: u8 = 1;
