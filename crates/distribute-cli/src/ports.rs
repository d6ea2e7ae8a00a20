//! Ports for the tasks to listen on.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::{IpAddr, TcpListener};
use std::ops::Range;

use crate::job::Ports;

/// Free ports of this host, reserved until the tasks are about to start.
///
/// They lie below the ephemeral ports of the kernel if there is room: an ephemeral port could be assigned to a
/// connection of the first task before the second task binds it.
#[derive(Debug)]
pub(crate) struct Reserved {
    listeners: Vec<TcpListener>,
    ports: Ports,
}

impl Reserved {
    /// Reserves ports of an address for `tasks` tasks, and a MASTER_PORT whose next port is also free.
    pub(crate) fn new(tasks: usize, on: IpAddr) -> io::Result<Self> {
        let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
        let below = below_ephemeral(&range);
        if let Some(ports) = Self::search(tasks, below, on) {
            return Ok(ports);
        }
        Self::from_kernel(tasks, on)
    }

    /// Returns the ports.
    pub(crate) fn ports(&self) -> &Ports {
        &self.ports
    }

    /// Releases the ports, for the tasks to bind them now.
    pub(crate) fn release(self) -> Ports {
        drop(self.listeners);
        self.ports
    }

    /// Searches the range from a random port on, so that launchers that start together do not collide.
    fn search(tasks: usize, range: Range<u16>, on: IpAddr) -> Option<Self> {
        let len = u64::from(range.end.checked_sub(range.start).filter(|len| *len > 0)?);
        let from = RandomState::new().build_hasher().finish() % len;
        let port = |at: u64| range.start + ((from + at) % len) as u16;
        let mut free = (0..len).map(port).filter_map(|port| Some((port, bind(on, port).ok()?)));
        let mut held: Vec<(u16, TcpListener)> = free.by_ref().take(tasks).collect();
        let tasks: Vec<u16> = held.iter().map(|(port, _)| *port).collect();
        let mut before: Option<(u16, TcpListener)> = None;
        for (port, listener) in free {
            if let Some((master, first)) = before.replace((port, listener))
                && master.checked_add(1) == Some(port)
            {
                held.push((master, first));
                held.extend(before);
                let listeners = held.into_iter().map(|(_, listener)| listener).collect();
                return Some(Self { listeners, ports: Ports { tasks, master } });
            }
        }
        None
    }

    fn from_kernel(tasks: usize, on: IpAddr) -> io::Result<Self> {
        let mut listeners = (0..tasks).map(|_| bind(on, 0)).collect::<io::Result<Vec<_>>>()?;
        let numbers = listeners.iter().map(|listener| Ok(listener.local_addr()?.port()));
        let tasks = numbers.collect::<io::Result<Vec<_>>>()?;
        let mut last = io::Error::from(io::ErrorKind::AddrInUse);
        for _ in 0..ATTEMPTS {
            let first = bind(on, 0)?;
            let master = first.local_addr()?.port();
            let Some(next) = master.checked_add(1) else { continue };
            match bind(on, next) {
                Ok(second) => {
                    listeners.extend([first, second]);
                    return Ok(Self { listeners, ports: Ports { tasks, master } });
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

fn bind(on: IpAddr, port: u16) -> io::Result<TcpListener> {
    TcpListener::bind((on, port))
}

/// Returns up to 20,000 ports before the first of the kernel's range `first last`; empty if too few are left.
fn below_ephemeral(range: &str) -> Range<u16> {
    let first = range.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(32_768);
    let start = LOWEST.max(u16::saturating_sub(first, 20_000));
    start..first.max(start)
}

/// Well-known services are mostly below.
const LOWEST: u16 = 10_000;

const ATTEMPTS: usize = 100;

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn check(reserved: Reserved, tasks: usize) {
        let ports = reserved.ports.clone();
        let mut all = ports.tasks.clone();
        all.extend([ports.master, ports.master + 1]);
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), tasks + 2, "{ports:?}");
        assert!(all.iter().all(|port| bind(LOOPBACK, *port).is_err()), "held");
        assert_eq!(reserved.release(), ports);
    }

    #[test]
    fn ports_are_different_and_held() {
        check(Reserved::new(5, LOOPBACK).unwrap(), 5);
        check(Reserved::from_kernel(5, LOOPBACK).unwrap(), 5);
    }

    #[test]
    fn a_range_that_is_too_small_gives_nothing() {
        assert!(Reserved::search(5, 20_000..20_000, LOOPBACK).is_none());
        assert!(Reserved::search(5, 20_000..20_006, LOOPBACK).is_none());
    }

    #[test]
    fn the_range_ends_where_the_kernel_begins() {
        assert_eq!(below_ephemeral("32768\t60999\n"), 12_768..32_768);
        assert_eq!(below_ephemeral(""), 12_768..32_768);
        assert_eq!(below_ephemeral("1024 65535"), 10_000..10_000);
        assert_eq!(below_ephemeral("15000 65535"), 10_000..15_000);
    }
}
