//! The host at which a process is reached.

use std::io::{Error as IoError, ErrorKind, Result as IoResult};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use crate::{InterfaceChoice, Membership, Result, look_up};

pub(crate) const LOOPBACK: &str = "127.0.0.1";

/// Timeout of a name lookup.
pub(crate) const LOOKUP: Duration = Duration::from_secs(5);

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

/// Returns the host at which other members reach this process: the chosen interface, else its own address in the
/// description of the job, else the leader's own address or that of the interface towards the leader.
///
/// # Errors
/// [`Error::Config`](crate::Error::Config) if the choice matches no interface of this machine.
#[cfg(any(test, feature = "coordination"))]
pub(crate) fn decide(membership: &Membership, interface: Option<&InterfaceChoice>) -> Result<LocalHost> {
    Ok(decided(membership, interface)?.unwrap_or_else(|| towards_leader(membership)))
}

/// Returns the host if the leader's address is not needed for it. A choice was made on purpose, so that it comes before
/// the description, whose addresses are for joining the job.
///
/// # Errors
/// [`Error::Config`](crate::Error::Config) if the choice matches no interface of this machine.
pub(crate) fn decided(membership: &Membership, interface: Option<&InterfaceChoice>) -> Result<Option<LocalHost>> {
    if let Some(choice) = interface {
        let like = membership.leader_address.parse::<SocketAddr>().ok().map(|address| address.ip());
        let host = choice.address(like)?.to_string();
        return Ok(Some(LocalHost { host, decided_by: HostDecision::Interface(choice.variable()) }));
    }
    let described = membership.advertised_host.clone();
    Ok(described.map(|host| LocalHost { host, decided_by: HostDecision::Description }))
}

/// Returns the host if neither the description nor an option determines it. The leader's name must exist by then.
#[cfg(any(test, feature = "coordination"))]
pub(crate) fn towards_leader(membership: &Membership) -> LocalHost {
    towards_leader_by(interface_towards, membership)
}

fn towards_leader_by(route: impl Fn(SocketAddr) -> IoResult<IpAddr>, membership: &Membership) -> LocalHost {
    let Ok((host, port)) = split(&membership.leader_address) else { return LocalHost::no_route() };
    if membership.is_leader() {
        return LocalHost { host: host.to_owned(), decided_by: HostDecision::Description };
    }
    let found = look_up(&membership.leader_address, LOOKUP).ok().and_then(|addresses| addresses.into_iter().next());
    let Some(leader) = found else { return LocalHost::no_route() };
    match route(SocketAddr::new(leader.ip(), port)) {
        Ok(ip) => LocalHost { host: ip.to_string(), decided_by: HostDecision::Route },
        Err(_) => LocalHost::no_route(),
    }
}

/// Returns the host for members that meet without a leader's address: the one of the interface towards the leader if
/// there is such an address, else that of the default route, else the leader's own address on the leader itself, else
/// an address of any interface. The loopback address, which no other machine reaches, is the last.
pub(crate) fn by_route(membership: &Membership) -> String {
    // No name of an interface is excluded.
    by_route_of(interface_towards, || InterfaceChoice::new("^").address(None).ok(), membership)
}

/// Returns the host, given the interface by which packets leave and an address of any interface.
fn by_route_of(
    route: impl Fn(SocketAddr) -> IoResult<IpAddr>,
    any: impl FnOnce() -> Option<IpAddr>,
    membership: &Membership,
) -> String {
    let towards = |target| route(target).ok().map(|ip| ip.to_string());
    let by_leader = || {
        let local = towards_leader_by(&route, membership);
        (local.decided_by != HostDecision::NoRoute && !membership.leader_address.is_empty()).then_some(local.host)
    };
    let found = match membership.is_leader() {
        // The leader's own name may mean the loopback interface here, so the route comes first.
        true => towards(ELSEWHERE).or_else(by_leader),
        false => by_leader().or_else(|| towards(ELSEWHERE)),
    };
    let found = found.or_else(|| towards(ELSEWHERE_V6));
    found.or_else(|| any().filter(|ip| !ip.is_loopback()).map(|ip| ip.to_string())).unwrap_or_else(|| {
        tracing::warn!(
            "this machine has no address but {LOOPBACK}, at which no other machine reaches this process; bring a \
             network interface up, or set DISTRIBUTE_INTERFACE"
        );
        LOOPBACK.to_owned()
    })
}

/// Addresses of another network, reserved for documentation: nothing is sent to them.
const ELSEWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9);
const ELSEWHERE_V6: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)), 9);

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

/// Splits `host:port` for a lookup: the system's resolver takes an IPv6 address, with or without a zone, without
/// brackets.
pub(crate) fn split_bare(address: &str) -> IoResult<(&str, u16)> {
    let (host, port) = split(address)?;
    Ok((host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')).unwrap_or(host), port))
}

pub(crate) fn split(address: &str) -> IoResult<(&str, u16)> {
    let parts = address.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    parts.ok_or_else(|| IoError::new(ErrorKind::InvalidInput, "the address is not of the form host:port"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_counts_before_the_description_and_that_before_the_route() {
        let decided = |membership: &Membership, chosen: Option<&str>| {
            let interface = chosen.map(InterfaceChoice::new);
            decide(membership, interface.as_ref()).map(|local| (local.host, local.decided_by))
        };
        let loopback = || LOOPBACK.to_owned();
        let mut membership = Membership::new(1, 2, "127.0.0.1:9").unwrap();
        assert_eq!(decided(&membership, None).unwrap(), (loopback(), HostDecision::Route));
        let option = HostDecision::Interface("the option interface");
        assert_eq!(decided(&membership, Some(LOOPBACK)).unwrap(), (loopback(), option));
        assert!(decided(&membership, Some("no-such-interface")).is_err());
        membership.advertised_host = Some("b".to_owned());
        assert_eq!(decided(&membership, None).unwrap(), ("b".to_owned(), HostDecision::Description));
        assert_eq!(decided(&membership, Some(LOOPBACK)).unwrap(), (loopback(), option));
        membership.advertised_host = None;
        membership.leader_address = "nonsense".to_owned();
        assert_eq!(decided(&membership, None).unwrap(), (loopback(), HostDecision::NoRoute));
    }

    #[test]
    fn the_loopback_address_is_advertised_only_where_there_is_no_other() {
        let (v4, v6, any) = ("10.0.0.5", "2001:db8:7::5", "10.1.0.5");
        let host = |rank: u32, leader: &str, routes: &[&str], any: &str| {
            let mut membership = Membership::new(rank, 2, "h:1").unwrap();
            membership.leader_address = leader.to_owned();
            let route = |target: SocketAddr| {
                let found = routes.iter().map(|ip| ip.parse::<IpAddr>().unwrap());
                let mut found = found.filter(|ip| ip.is_ipv6() == target.is_ipv6());
                found.next().ok_or_else(|| ErrorKind::NetworkUnreachable.into())
            };
            by_route_of(route, || any.parse().ok(), &membership)
        };
        for (rank, leader, routes, expected) in [
            (0, "", &[v4, v6][..], v4),
            (0, "node0:9", &[v4], v4),
            (0, "node0:9", &[v6], "node0"),
            (0, "", &[v6], v6),
            (0, "", &[], any),
            (1, "192.0.2.7:9", &[v4], v4),
            (1, "[2001:db8::7]:9", &[v4, v6], v6),
            (1, "192.0.2.7:9", &[v6], v6),
            (1, "192.0.2.7:9", &[], any),
        ] {
            assert_eq!(host(rank, leader, routes, any), expected, "rank {rank}, {leader:?}, {routes:?}");
        }
        for none in ["127.0.0.1", "::1", ""] {
            assert_eq!(host(0, "", &[], none), LOOPBACK);
        }
    }

    #[test]
    fn routes_and_addresses() {
        assert_eq!(interface_towards(SocketAddr::from(([127, 0, 0, 1], 9))).unwrap(), Ipv4Addr::LOCALHOST);
        assert!(split("nonsense").is_err() && split("a:x").is_err());
        for (given, host) in [("a:1", "a"), ("10.0.0.1:1", "10.0.0.1"), ("[fe80::1%eth0]:1", "fe80::1%eth0")] {
            assert_eq!(split_bare(given).unwrap(), (host, 1));
        }
    }
}
