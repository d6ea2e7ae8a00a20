//! Listening sockets for peers, and the names of hosts.

use std::io;
use std::net::TcpListener;
use std::time::Duration;

use distribute_cluster::look_up;

use super::{ConnectError, Nonce};

/// Limit for one lookup of a host name.
pub(crate) const LOOK_UP: Duration = Duration::from_secs(10);

/// Binds a listener that peers can reach: on the address of this host's name, else on all interfaces.
pub(crate) fn listen(host: &str) -> Result<TcpListener, ConnectError> {
    look_up(&join_host(host, 0), LOOK_UP)
        .and_then(|addresses| TcpListener::bind(&addresses[..]))
        .or_else(|_| TcpListener::bind("[::]:0"))
        .or_else(|_| TcpListener::bind("0.0.0.0:0"))
        .map_err(|source| ConnectError { action: "listen on a port of", address: host.to_owned(), source })
}

/// Formats `host:port`, with brackets around an IPv6 address.
pub(crate) fn join_host(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Draws the nonce of a group that this process may become the first member of.
pub(crate) fn new_nonce() -> Result<Nonce, ConnectError> {
    let failed = |source: io::Error| ConnectError {
        action: "draw a random number from",
        address: "the system".to_owned(),
        source,
    };
    Nonce::new().map_err(failed)
}
