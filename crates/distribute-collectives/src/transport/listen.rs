//! Listening sockets for peers, and the names of hosts.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

use distribute_cluster::look_up;

use super::{ConnectError, Nonce};

/// The length of the queue of connections that wait to be accepted; the system may limit it further.
const QUEUE: i32 = 4096;

/// Limit for one lookup of a host name.
pub(crate) const LOOK_UP: Duration = Duration::from_secs(10);

/// Binds a listener that peers can reach: at an address or at `localhost` as it is given, at other names on all
/// interfaces, since a name may resolve to the loopback interface here (Debian writes `127.0.1.1` and the host's own
/// name into `/etc/hosts`) and to another one elsewhere.
pub(crate) fn listen(host: &str) -> Result<TcpListener, ConnectError> {
    listen_by(|name| look_up(name, LOOK_UP), host)
}

fn listen_by(
    look_up: impl FnOnce(&str) -> io::Result<Vec<SocketAddr>>,
    host: &str,
) -> Result<TcpListener, ConnectError> {
    // The standard library's queue holds 128 connections. In a larger group all peers may connect at once; the system
    // drops what comes on top, and each drop costs a peer seconds.
    let lengthened = |listener: TcpListener| {
        rustix::net::listen(&listener, QUEUE)?;
        Ok(listener)
    };
    let literal = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    let bound = match literal {
        Ok(address) => TcpListener::bind((address, 0)),
        Err(_) if host == "localhost" => look_up(&join_host(host, 0)).and_then(|found| TcpListener::bind(&found[..])),
        Err(_) => everywhere(),
    };
    bound
        // The address may be one that a router or a proxy forwards from.
        .or_else(|_| everywhere())
        .and_then(lengthened)
        .map_err(|source| ConnectError { action: "listen on a port of", address: host.to_owned(), source })
}

/// Listens on all interfaces, for IPv4 and IPv6 if the machine has both.
fn everywhere() -> io::Result<TcpListener> {
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))
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
    fn a_name_that_means_loopback_here_is_listened_for_on_all_interfaces() {
        let bound = |host: &str, found: [u8; 4]| {
            let listener = listen_by(|_| Ok(vec![SocketAddr::from((found, 0))]), host).unwrap();
            listener.local_addr().unwrap().ip()
        };
        assert!(bound("node0", [127, 0, 1, 1]).is_unspecified());
        assert!(bound("node0.example", [127, 0, 0, 1]).is_unspecified());
        assert!(bound("localhost", [127, 0, 0, 1]).is_loopback());
        assert!(bound("127.0.0.1", [192, 0, 2, 1]).is_loopback());
        // An address of the range for documentation belongs to no machine.
        assert!(bound("192.0.2.1", [127, 0, 0, 1]).is_unspecified());
    }

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
