use distribute_cluster::CoordinationOptions;

use super::*;
use crate::doctor::report::Status;

fn interfaces() -> Vec<Interface> {
    let all = [("lo", "127.0.0.1", 8), ("eth0", "fe80::1", 64), ("eth0", "10.0.3.7", 24), ("ib0", "10.9.0.7", 16)];
    all.map(|(name, ip, prefix)| Interface { name: name.to_owned(), ip: ip.parse().unwrap(), prefix }).to_vec()
}

fn decided(host: &str, decided_by: HostDecision, alone: bool) -> Check {
    network(&interfaces(), Ok(LocalHost { host: host.to_owned(), decided_by }), alone)
}

#[test]
fn the_interface_that_is_used_comes_first_with_the_reason() {
    let check = decided("10.9.0.7", HostDecision::Interface("NCCL_SOCKET_IFNAME"), true);
    assert_eq!(check.found, "ib0 10.9.0.7/16 (used), lo 127.0.0.1/8, eth0 10.0.3.7/24");
    assert_eq!(check.why.as_deref(), Some("chosen by NCCL_SOCKET_IFNAME"));
    assert_eq!(check.details, ["eth0 fe80::1/64, of no use to others"]);
    assert!(decided("10.0.3.7", HostDecision::Route, false).why.unwrap().contains("the way to the leader"));
    let described = decided("worker-1.svc", HostDecision::Description, false);
    assert!(described.why.unwrap().contains("others come to worker-1.svc"));
}

#[test]
fn an_address_that_nobody_reaches_is_warned_about() {
    assert_eq!(decided("127.0.0.1", HostDecision::NoRoute, true).status, Status::Ok);
    assert_eq!(decided("127.0.0.1", HostDecision::NoRoute, false).status, Status::Warn);
    let foreign = decided("10.7.7.7", HostDecision::Description, false);
    assert_eq!(foreign.status, Status::Warn);
    assert!(foreign.why.unwrap().contains("10.7.7.7, which is not an address of this machine"));
}

#[test]
fn a_choice_that_chooses_nothing_fails_with_its_own_sentence() {
    let interface = Some(distribute_cluster::InterfaceChoice::new("no-such-interface"));
    let options = CoordinationOptions::default().interface(interface);
    let check = network(&interfaces(), options.local_host(&stranger().unwrap()), true);
    assert_eq!(check.status, Status::Fail);
    assert!(check.why.unwrap().contains("given: no-such-interface"));
}

#[test]
fn loopback_works_here_and_says_what_to_do_where_it_does_not() {
    assert_eq!(loopback(try_loopback()).status, Status::Ok);
    let down = loopback(Err(ErrorKind::AddrNotAvailable.into()));
    assert_eq!((down.status, down.remedy.as_deref()), (Status::Fail, Some("ip link set lo up")));
}

#[test]
fn the_leaders_own_port_is_tried() {
    let taken = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    let mut membership = Membership::new(0, 2, format!("here:{}", taken.local_addr().unwrap().port())).unwrap();
    let check = leader(&membership, look_for_leader(&membership));
    assert_eq!(check.status, Status::Warn, "{check:?}");
    membership.leader_address = "here:0".to_owned();
    let check = leader(&membership, look_for_leader(&membership));
    assert_eq!(check.found, "this is worker:0 at here:0, whose port is free");
}

#[test]
fn another_leader_is_called() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let membership = Membership::new(1, 2, listener.local_addr().unwrap().to_string()).unwrap();
    let look = || leader(&membership, look_for_leader(&membership));
    let listens = look();
    assert!(listens.status == Status::Ok && listens.found.contains(" listens ("), "{listens:?}");
    drop(listener);
    let later = look();
    assert!(later.status == Status::Ok && later.found.contains("does not listen yet"), "{later:?}");
    let blocked = LeaderState::Called(([10, 0, 0, 1], 1).into(), Err(ErrorKind::TimedOut.into()));
    assert_eq!(leader(&membership, blocked).status, Status::Warn);
    assert!(leader(&membership, LeaderState::Silent).remedy.unwrap().contains("headless"));
    assert_eq!(leader(&membership, LeaderState::Unknown(io::Error::other("no such name"))).status, Status::Warn);
}
