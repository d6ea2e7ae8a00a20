//! The leader's listening socket.

use std::io::{ErrorKind, Result as IoResult};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

use crate::host::{LOOKUP, split};
use crate::{Membership, look_up};

/// Listens on the leader's address.
pub(crate) fn listen(membership: &Membership) -> IoResult<TcpListener> {
    let (host, port) = split(&membership.leader_address)?;
    let literal = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    match (&membership.bind_host, literal) {
        (Some(host), _) => named(host, port),
        (None, Ok(address)) => TcpListener::bind((address, port)).or_else(|error| match error.kind() {
            // The address belongs to another machine, either because a port is forwarded or because two tasks were
            // given the same identity.
            ErrorKind::AddrNotAvailable => {
                let task = membership.task();
                tracing::warn!(
                    %task,
                    "{address} is not an address of this machine, so {task} listens on all interfaces; if this task is \
                     not meant to be {task}, correct its index"
                );
                everywhere(port)
            }
            _ => Err(error),
        }),
        (None, Err(_)) if host == "localhost" => named(host, port),
        // The name may resolve to the loopback interface here and to another one elsewhere.
        (None, Err(_)) => everywhere(port),
    }
}

/// Listens on the interface of a name or address; an IPv6 address may be with or without brackets.
fn named(host: &str, port: u16) -> IoResult<TcpListener> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    match bare.parse::<IpAddr>() {
        Ok(literal) => TcpListener::bind((literal, port)),
        Err(_) => TcpListener::bind(&*look_up(&format!("{host}:{port}"), LOOKUP)?),
    }
}

/// Listens on all interfaces, for IPv4 and IPv6 if the machine has both.
fn everywhere(port: u16) -> IoResult<TcpListener> {
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
        Err(error) if error.kind() != ErrorKind::AddrInUse => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
        bound => bound,
    }
}

/// Returns the address at which this process reaches its own listener.
pub(crate) fn own_address(listener: &TcpListener) -> IoResult<String> {
    let mut address = listener.local_addr()?;
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    Ok(address.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(host: &str, bind_host: Option<&str>) -> SocketAddr {
        let mut membership = Membership::new(0, 2, "h:1").unwrap();
        membership.leader_address = format!("{host}:0");
        membership.bind_host = bind_host.map(str::to_owned);
        listen(&membership).unwrap().local_addr().unwrap()
    }

    #[test]
    fn literals_are_bound_as_they_are_and_names_everywhere() {
        assert_eq!(bound("127.0.0.1", None).ip(), Ipv4Addr::LOCALHOST);
        assert!(bound("localhost", None).ip().is_loopback());
        assert!(bound("worker-0.example", None).ip().is_unspecified());
        assert_eq!(bound("worker-0.example", Some("127.0.0.1")).ip(), Ipv4Addr::LOCALHOST);
        // An address of the range for documentation belongs to no machine.
        assert!(bound("192.0.2.1", None).ip().is_unspecified());
    }

    #[test]
    fn own_listeners_are_reached_by_loopback() {
        let listener = everywhere(0).unwrap();
        let address: SocketAddr = own_address(&listener).unwrap().parse().unwrap();
        assert!(address.ip().is_loopback());
    }
}
