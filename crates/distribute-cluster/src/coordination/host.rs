//! Where the leader listens, and by which host others reach a process.

use std::io::{Error as IoError, ErrorKind, Result as IoResult};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::time::Duration;

use super::driver::Driver;
use crate::Membership;

pub(super) const LOOPBACK: &str = "127.0.0.1";

/// Listens on the leader's address.
pub(super) fn listen(membership: &Membership) -> IoResult<TcpListener> {
    let (host, port) = split(&membership.leader_address)?;
    let literal = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    match (&membership.bind_host, literal) {
        (Some(host), _) => TcpListener::bind((host.trim_start_matches('[').trim_end_matches(']'), port)),
        (None, Ok(address)) => TcpListener::bind((address, port)).or_else(|error| match error.kind() {
            // Behind a forwarded port the address belongs to another machine; so it does where two tasks were given one
            // identity.
            ErrorKind::AddrNotAvailable => {
                let task = membership.task();
                tracing::warn!(
                    %task,
                    "{address} is no address of this machine, so {task} listens on all interfaces; if this task is not meant \
                     to be {task}, correct its index"
                );
                everywhere(port)
            }
            _ => Err(error),
        }),
        (None, Err(_)) if host == "localhost" => TcpListener::bind((host, port)),
        // The name may be that of the loopback interface here, and of another one elsewhere.
        (None, Err(_)) => everywhere(port),
    }
}

/// All interfaces, of both protocols where the machine has both.
fn everywhere(port: u16) -> IoResult<TcpListener> {
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
        Err(error) if error.kind() != ErrorKind::AddrInUse => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
        bound => bound,
    }
}

/// How this process itself reaches a listener of its own.
pub(super) fn own_address(listener: &TcpListener) -> IoResult<String> {
    let mut address = listener.local_addr()?;
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    Ok(address.to_string())
}

/// The host by which the others reach this process: the leader's own address, else that of the interface towards the
/// leader.
pub(super) fn reachable(membership: &Membership, driver: &Driver) -> String {
    let Ok((host, port)) = split(&membership.leader_address) else { return LOOPBACK.to_owned() };
    if membership.is_leader() {
        return host.to_owned();
    }
    let target = membership.leader_address.clone();
    let look_up = async move { tokio::net::lookup_host(target).await.map(|mut addresses| addresses.next()) };
    let leader = match driver.call(look_up, Duration::from_secs(5)) {
        Some(Ok(Some(address))) => address,
        _ => return LOOPBACK.to_owned(),
    };
    interface_towards(SocketAddr::new(leader.ip(), port)).map_or_else(|_| LOOPBACK.to_owned(), |ip| ip.to_string())
}

/// The address of the interface that packets to `target` leave by. Connecting a UDP socket sends nothing.
fn interface_towards(target: SocketAddr) -> IoResult<IpAddr> {
    let any: IpAddr = match target {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(target)?;
    Ok(socket.local_addr()?.ip())
}

fn split(address: &str) -> IoResult<(&str, u16)> {
    let parts = address.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    parts.ok_or_else(|| IoError::new(ErrorKind::InvalidInput, "the address is not of the form host:port"))
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
        // An address of the range for documentation is nobody's.
        assert!(bound("192.0.2.1", None).ip().is_unspecified());
    }

    #[test]
    fn own_listeners_are_reached_by_loopback() {
        let listener = everywhere(0).unwrap();
        let address: SocketAddr = own_address(&listener).unwrap().parse().unwrap();
        assert!(address.ip().is_loopback());
        assert_eq!(interface_towards(SocketAddr::from(([127, 0, 0, 1], 9))).unwrap(), Ipv4Addr::LOCALHOST);
        assert!(split("nonsense").is_err() && split("a:x").is_err());
    }
}
