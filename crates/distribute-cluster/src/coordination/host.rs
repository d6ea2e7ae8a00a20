//! The leader's listen address, and the host at which a process is reached.

use std::io::{Error as IoError, ErrorKind, Result as IoResult};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::time::Duration;

use super::driver::Driver;
use crate::{Membership, look_up};

pub(super) const LOOPBACK: &str = "127.0.0.1";

/// Listens on the leader's address.
pub(super) fn listen(membership: &Membership) -> IoResult<TcpListener> {
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
                    "{address} is no address of this machine, so {task} listens on all interfaces; if this task is not \
                     meant to be {task}, correct its index"
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

/// Timeout of a name lookup.
const LOOKUP: Duration = Duration::from_secs(5);

/// Listens on all interfaces, for IPv4 and IPv6 if the machine has both.
fn everywhere(port: u16) -> IoResult<TcpListener> {
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
        Err(error) if error.kind() != ErrorKind::AddrInUse => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
        bound => bound,
    }
}

/// Returns the address at which this process reaches its own listener.
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

/// The host at which other members reach a process, and how it was determined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalHost {
    /// A name or an address; an IPv6 address may be in brackets.
    pub host: String,
    /// How the host was determined.
    pub decided_by: HostDecision,
}

/// The source of the host at which other members reach a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HostDecision {
    /// The process's own address in the description of the job.
    Description,
    /// The choice of an interface in this variable or option.
    Interface(&'static str),
    /// The route to the leader.
    Route,
    /// None: there is no route to the leader, or its name cannot be resolved. The loopback address is used.
    NoRoute,
}

/// Returns the host if neither the description nor an option determines it: the leader's own address, else that of the
/// interface towards the leader.
pub(super) fn towards_leader(membership: &Membership, driver: &Driver) -> LocalHost {
    let Ok((host, port)) = split(&membership.leader_address) else { return LocalHost::no_route() };
    if membership.is_leader() {
        return LocalHost { host: host.to_owned(), decided_by: HostDecision::Description };
    }
    let target = membership.leader_address.clone();
    let found = async move { tokio::net::lookup_host(target).await.map(|mut addresses| addresses.next()) };
    let Some(Ok(Some(leader))) = driver.call(found, LOOKUP) else { return LocalHost::no_route() };
    match interface_towards(SocketAddr::new(leader.ip(), port)) {
        Ok(ip) => LocalHost { host: ip.to_string(), decided_by: HostDecision::Route },
        Err(_) => LocalHost::no_route(),
    }
}

impl LocalHost {
    fn no_route() -> LocalHost {
        LocalHost { host: LOOPBACK.to_owned(), decided_by: HostDecision::NoRoute }
    }
}

/// Returns the address of the interface that packets to `target` leave by. Connecting a UDP socket sends nothing.
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
    use crate::{CoordinationOptions, InterfaceChoice};

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
    fn the_description_counts_before_a_choice_and_that_before_the_route() {
        let decided = |membership: &Membership, chosen: Option<&str>| {
            let interface = chosen.map(InterfaceChoice::new);
            let options = CoordinationOptions { interface, ..CoordinationOptions::default() };
            options.local_host(membership).map(|local| (local.host, local.decided_by))
        };
        let loopback = || LOOPBACK.to_owned();
        let mut membership = Membership::new(1, 2, "127.0.0.1:9").unwrap();
        assert_eq!(decided(&membership, None).unwrap(), (loopback(), HostDecision::Route));
        let option = HostDecision::Interface("CoordinationOptions::interface");
        assert_eq!(decided(&membership, Some(LOOPBACK)).unwrap(), (loopback(), option));
        assert!(decided(&membership, Some("no-such-interface")).is_err());
        membership.advertised_host = Some("b".to_owned());
        assert_eq!(decided(&membership, Some(LOOPBACK)).unwrap(), ("b".to_owned(), HostDecision::Description));
        membership.advertised_host = None;
        membership.leader_address = "nonsense".to_owned();
        assert_eq!(decided(&membership, None).unwrap(), (loopback(), HostDecision::NoRoute));
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
