//! Listening sockets for peers, and the names of hosts.

use std::io;
use std::net::TcpListener;
use std::time::Duration;

use distribute_cluster::look_up;

use super::{ConnectError, Nonce};

/// The length of the queue of connections that wait to be accepted; the system may limit it further.
const QUEUE: i32 = 4096;

/// Limit for one lookup of a host name.
pub(crate) const LOOK_UP: Duration = Duration::from_secs(10);

/// Binds a listener that peers can reach: on the address of this host's name, else on all interfaces.
pub(crate) fn listen(host: &str) -> Result<TcpListener, ConnectError> {
    // The standard library's queue holds 128 connections. In a larger group all peers may connect at once; the system
    // drops what comes on top, and each drop costs a peer seconds.
    let lengthened = |listener: TcpListener| {
        rustix::net::listen(&listener, QUEUE)?;
        Ok(listener)
    };
    look_up(&join_host(host, 0), LOOK_UP)
        .and_then(|addresses| TcpListener::bind(&addresses[..]))
        .or_else(|_| TcpListener::bind("[::]:0"))
        .or_else(|_| TcpListener::bind("0.0.0.0:0"))
        .and_then(lengthened)
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

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn hundreds_of_peers_may_connect_at_once() {
        let listener = listen("127.0.0.1").unwrap();
        let address = listener.local_addr().unwrap();
        let limit: usize =
            std::fs::read_to_string("/proc/sys/net/core/somaxconn").map_or(128, |text| text.trim().parse().unwrap());
        // None of them is accepted: what does not fit into the queue waits for the system's next attempt after 1 s.
        let peers = (0..limit.min(300)).map(|_| TcpStream::connect_timeout(&address, Duration::from_millis(500)));
        assert_eq!(peers.collect::<io::Result<Vec<_>>>().map(|peers| peers.len()).unwrap(), limit.min(300));
    }
}
