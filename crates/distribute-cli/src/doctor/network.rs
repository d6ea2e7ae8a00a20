//! Network interfaces, loopback, and the connection to the leader.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use distribute_cluster::{Error, HostDecision, LocalHost, Membership};

use super::cluster::sentence;
use super::report::Check;
use super::seen::within;

/// An interface with one of its addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) name: String,
    pub(crate) ip: IpAddr,
    /// The length of the network's prefix.
    pub(crate) prefix: u8,
}

impl Interface {
    /// Returns all interfaces of this machine, or of this container.
    pub(crate) fn all() -> Vec<Self> {
        let of = |interface: if_addrs::Interface| {
            let (ip, prefix) = match &interface.addr {
                if_addrs::IfAddr::V4(addr) => (IpAddr::V4(addr.ip), addr.prefixlen),
                if_addrs::IfAddr::V6(addr) => (IpAddr::V6(addr.ip), addr.prefixlen),
            };
            Self { name: interface.name, ip, prefix }
        };
        if_addrs::get_if_addrs().unwrap_or_default().into_iter().map(of).collect()
    }
}

/// Returns a member of a job that does not exist, to find out how others would reach this process.
pub(crate) fn stranger() -> Option<Membership> {
    // A documentation address, which no host has: packets to it take the route to other networks.
    Membership::new(1, 2, "203.0.113.1:1").ok()
}

/// Checks the interfaces, and which of them others use to reach this process.
pub(crate) fn network(interfaces: &[Interface], local: Result<LocalHost, Error>, alone: bool) -> Check {
    let local = match local {
        Ok(local) => local,
        Err(error) => return sentence(TOPIC, error),
    };
    let host = local.host.trim_start_matches('[').trim_end_matches(']');
    let used = host.parse::<IpAddr>().ok();
    let is_used = |interface: &Interface| Some(interface.ip) == used && local.decided_by != HostDecision::NoRoute;
    let mut shown: Vec<&Interface> = interfaces.iter().filter(|interface| is_routable(interface.ip)).collect();
    shown.sort_by_key(|interface| !is_used(interface));
    let named = |interface: &&Interface| {
        let Interface { name, ip, prefix } = interface;
        format!("{name} {ip}/{prefix}{}", if is_used(interface) { " (used)" } else { "" })
    };
    let found = match shown.as_slice() {
        [] => "no interface has an address".to_owned(),
        shown => shown.iter().map(named).collect::<Vec<_>>().join(", "),
    };
    let known = interfaces.iter().any(is_used);
    let check = match (local.decided_by, alone) {
        (HostDecision::NoRoute, true) => {
            Check::ok(TOPIC, found).why("no way leads to other machines: only processes of this one can work together")
        }
        (HostDecision::NoRoute, false) => Check::warn(TOPIC, found)
            .why("no way leads to the leader, or its name is unknown here: others would be told to come to 127.0.0.1")
            .remedy("see the line leader, or name an interface by DISTRIBUTE_INTERFACE"),
        (HostDecision::Interface(variable), _) => Check::ok(TOPIC, found).why(format!("chosen by {variable}")),
        (HostDecision::Route, true) => {
            Check::ok(TOPIC, found).why("the way to other machines; DISTRIBUTE_INTERFACE would choose another")
        }
        (HostDecision::Route, false) => {
            Check::ok(TOPIC, found).why("the way to the leader; DISTRIBUTE_INTERFACE would choose another")
        }
        _ if used.is_some() && !known => Check::warn(TOPIC, found)
            .why(format!("others are told to come to {host}, which is not an address of this machine"))
            .remedy("correct this task's address or index, unless the address is forwarded here"),
        _ => Check::ok(TOPIC, found).why(format!("others come to {host}, as the description of the job says")),
    };
    let others = interfaces.iter().filter(|interface| !is_routable(interface.ip));
    check.details(others.map(|Interface { name, ip, prefix }| format!("{name} {ip}/{prefix}, of no use to others")))
}

/// Checks that a port of the loopback interface can be listened on and reached, which every local job needs.
pub(crate) fn loopback(tried: io::Result<u16>) -> Check {
    match tried {
        Ok(port) => {
            Check::ok("loopback", "ports can be listened on and reached").details([format!("tried 127.0.0.1:{port}")])
        }
        Err(error) => Check::fail("loopback", format!("127.0.0.1 cannot be listened on, or not be reached: {error}"))
            .why("no process of this machine can work with another")
            .remedy("ip link set lo up"),
    }
}

/// Listens on a free port, and connects to it.
pub(crate) fn try_loopback() -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
    Ok(address.port())
}

/// The result of connecting to the leader's address.
#[derive(Debug)]
pub(crate) enum LeaderState {
    /// This process is the leader, and could listen or not.
    Own(io::Result<()>),
    /// The name was not resolved in time.
    Silent,
    Unknown(io::Error),
    Called(SocketAddr, io::Result<()>),
}

/// Connects to the leader of a job, for some seconds at most.
pub(crate) fn look_for_leader(membership: &Membership) -> LeaderState {
    let address = membership.leader_address.clone();
    if membership.is_leader() {
        let port = address.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(0);
        return LeaderState::Own(match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
            Err(error) if error.kind() != ErrorKind::AddrInUse => {
                TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).map(drop)
            }
            bound => bound.map(drop),
        });
    }
    let look = move || match address.to_socket_addrs().map(|mut found| found.next()) {
        Err(error) => LeaderState::Unknown(error),
        Ok(None) => LeaderState::Unknown(io::Error::other("the name has no address")),
        Ok(Some(found)) => LeaderState::Called(found, TcpStream::connect_timeout(&found, CALL).map(drop)),
    };
    within(PATIENCE, look).unwrap_or(LeaderState::Silent)
}

/// Checks whether the leader's address is usable. A leader that does not run yet is not an error.
pub(crate) fn leader(membership: &Membership, state: LeaderState) -> Check {
    let name = format!(
        "{} at {}",
        membership.tasks.first().map(ToString::to_string).unwrap_or_default(),
        membership.leader_address
    );
    let resolve = "look the name up on this machine: getent hosts; in Kubernetes the job needs a headless service with \
                   publishNotReadyAddresses: true";
    match state {
        LeaderState::Own(Ok(())) => Check::ok(LEADER, format!("this is {name}, whose port is free")),
        LeaderState::Own(Err(error)) if error.kind() == ErrorKind::AddrInUse => {
            Check::warn(LEADER, format!("this is {name}, whose port is in use"))
                .why("the job runs already, or another program has the port")
                .remedy(
                    "end it, or choose another port: DISTRIBUTE_PORT, or the leader's address in TF_CONFIG, alike on \
                     every task",
                )
        }
        LeaderState::Own(Err(error)) => {
            let found = format!("this is {name}, whose port cannot be listened on: {error}");
            Check::fail(LEADER, found).remedy("choose a port above 1023")
        }
        LeaderState::Silent => Check::warn(LEADER, format!("{name}: no answer about its name")).remedy(resolve),
        LeaderState::Unknown(error) => Check::warn(LEADER, format!("{name} has no address here: {error}"))
            .why("its machine or pod may not be there yet")
            .remedy(resolve),
        LeaderState::Called(ip, Ok(())) => Check::ok(LEADER, format!("{name} listens ({ip})")),
        LeaderState::Called(ip, Err(error)) if error.kind() == ErrorKind::ConnectionRefused => {
            Check::ok(LEADER, format!("{name} can be reached ({ip}), and does not listen yet"))
        }
        LeaderState::Called(ip, Err(error)) => Check::warn(LEADER, format!("{name} does not answer ({ip}): {error}"))
            .why("a firewall, a wrong address, or a machine that is not there yet")
            .remedy("let TCP pass between the tasks, to all ports"),
    }
}

/// A link-local address is not valid on other machines.
fn is_routable(ip: IpAddr) -> bool {
    !matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

const TOPIC: &str = "network";
const LEADER: &str = "leader";

const CALL: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(4);

#[cfg(test)]
mod tests;
