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
pub(crate) fn towards_leader(membership: &Membership) -> LocalHost {
    let Ok((host, port)) = split(&membership.leader_address) else { return LocalHost::no_route() };
    if membership.is_leader() {
        return LocalHost { host: host.to_owned(), decided_by: HostDecision::Description };
    }
    let found = look_up(&membership.leader_address, LOOKUP).ok().and_then(|addresses| addresses.into_iter().next());
    let Some(leader) = found else { return LocalHost::no_route() };
    match interface_towards(SocketAddr::new(leader.ip(), port)) {
        Ok(ip) => LocalHost { host: ip.to_string(), decided_by: HostDecision::Route },
        Err(_) => LocalHost::no_route(),
    }
}

/// Returns the host for members that meet without a leader's address: the one of the interface towards the leader if
/// there is such an address, else that of the default route.
pub(crate) fn by_route(membership: &Membership) -> String {
    let leader = match membership.leader_address.is_empty() || membership.is_leader() {
        true => None,
        false => Some(towards_leader(membership)).filter(|local| local.decided_by != HostDecision::NoRoute),
    };
    let by_default = || interface_towards(ELSEWHERE).map_or_else(|_| LOOPBACK.to_owned(), |ip| ip.to_string());
    leader.map_or_else(by_default, |local| local.host)
}

/// An address of another network, reserved for documentation: nothing is sent to it.
const ELSEWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9);

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
    fn routes_and_addresses() {
        assert_eq!(interface_towards(SocketAddr::from(([127, 0, 0, 1], 9))).unwrap(), Ipv4Addr::LOCALHOST);
        assert!(split("nonsense").is_err() && split("a:x").is_err());
    }
}
