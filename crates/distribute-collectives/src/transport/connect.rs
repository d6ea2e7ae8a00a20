//! Connects the members of a group by the transport that was chosen.

use std::net::TcpListener;
use std::time::Instant;

use distribute_cluster::{JobSecret, JobTls};

#[cfg(feature = "grpc")]
use super::grpc::GrpcTransport;
use super::tcp::TcpTransport;
use super::{ConnectError, Nonce, Proofs, Sharing, Transport, TransportKind};

/// Connects member `process` with the listeners at `addresses`, for groups that find each other by their own means.
///
/// Every member calls this at about the same time with the same addresses, in rank order, and its own listener. Callers
/// with another list of addresses are turned away; two groups at equal addresses cannot be told apart. Members prove
/// the secret that DISTRIBUTE_JOB_SECRET_FILE or DISTRIBUTE_JOB_SECRET gives, if one is set, and use TLS if
/// DISTRIBUTE_TLS_CA, DISTRIBUTE_TLS_CERT and DISTRIBUTE_TLS_KEY give a certificate.
///
/// # Errors
/// [`Error::Secret`](crate::Error::Secret) where members do not have the same secret or do not accept each other's
/// certificates, [`Error::Cluster`](crate::Error::Cluster) where either cannot be read,
/// [`Error::Connect`](crate::Error::Connect) where not every member was connected before the deadline,
/// [`Error::NotBuilt`](crate::Error::NotBuilt) for gRPC without its cargo feature.
pub fn connect(
    kind: TransportKind,
    process: usize,
    addresses: &[String],
    listener: TcpListener,
    deadline: Instant,
) -> crate::Result<Box<dyn Transport>> {
    let (name, nonce) = ("of explicit addresses", Nonce::of_addresses(addresses));
    let proofs = Proofs { secret: JobSecret::from_env()?, tls: JobTls::from_env()? };
    let group = GroupIdentity { name, nonce, proofs };
    open(kind, process, addresses, listener, group, &format!("rank {process}"), deadline)
}

/// By what members of a group know each other.
pub(crate) struct GroupIdentity<'a> {
    pub(crate) name: &'a str,
    pub(crate) nonce: Nonce,
    pub(crate) proofs: Proofs,
}

/// As [`connect`], for a named group.
pub(crate) fn open(
    kind: TransportKind,
    process: usize,
    addresses: &[String],
    listener: TcpListener,
    group: GroupIdentity<'_>,
    name: &str,
    deadline: Instant,
) -> crate::Result<Box<dyn Transport>> {
    let failed = |error: ConnectError| error.into_error(name, group.name);
    let id = (group.nonce, group.proofs);
    match kind {
        #[cfg(feature = "grpc")]
        TransportKind::Grpc => {
            Ok(Box::new(GrpcTransport::connect(process, addresses, listener, id, deadline).map_err(failed)?))
        }
        #[cfg(not(feature = "grpc"))]
        TransportKind::Grpc => Err(crate::Error::NotBuilt { needed: "transport grpc", feature: "grpc" }),
        TransportKind::Auto | TransportKind::Shm | TransportKind::Tcp => {
            let sharing = match kind {
                TransportKind::Shm => Sharing::Everywhere,
                TransportKind::Tcp => Sharing::Never,
                _ => Sharing::WherePossible,
            };
            let transport = TcpTransport::connect(process, addresses, &listener, id, sharing, deadline);
            Ok(Box::new(transport.map_err(failed)?))
        }
    }
}
