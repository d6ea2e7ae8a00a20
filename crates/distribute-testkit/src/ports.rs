//! Reserved loopback ports.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{Ipv4Addr, TcpListener};

use crate::Error;

/// Free ports of 127.0.0.1, held by listeners until they are released.
///
/// They lie below the kernel's ephemeral ports if there is room: an ephemeral port could be assigned to a connection
/// while its task starts, or starts again. Between [`release`](Self::release) and the moment a task binds its port,
/// another process may still take it; prefer to bind port 0 if the program supports that.
///
/// # Examples
///
/// ```
/// let ports = distribute_testkit::Ports::reserve(2)?.release();
/// assert!(ports[0] != ports[1]);
/// # Ok::<(), distribute_testkit::Error>(())
/// ```
#[derive(Debug)]
pub struct Ports {
    listeners: Vec<TcpListener>,
    numbers: Vec<u16>,
}

impl Ports {
    /// Reserves `count` different ports.
    ///
    /// # Errors
    /// [`Error::Port`] if the system has no free port.
    pub fn reserve(count: usize) -> Result<Self, Error> {
        let bind = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
        let (first, end) = (LOWEST, first_ephemeral());
        let len = u64::from(end.saturating_sub(first));
        // From a random port on, so that tests that run together do not collide.
        let from = RandomState::new().build_hasher().finish();
        let port = |at: u64| first + (from.wrapping_add(at) % len) as u16;
        let mut listeners: Vec<TcpListener> = (0..len).filter_map(|at| bind(port(at)).ok()).take(count).collect();
        while listeners.len() < count {
            listeners.push(bind(0).map_err(Error::Port)?);
        }
        let number = |listener: &TcpListener| Ok(listener.local_addr()?.port());
        let numbers = listeners.iter().map(number).collect::<Result<_, _>>().map_err(Error::Port)?;
        Ok(Self { listeners, numbers })
    }

    /// Returns the port numbers.
    #[must_use]
    pub fn numbers(&self) -> &[u16] {
        &self.numbers
    }

    /// Returns the ports as `127.0.0.1:port`.
    #[must_use]
    pub fn addresses(&self) -> Vec<String> {
        self.numbers.iter().map(|port| format!("127.0.0.1:{port}")).collect()
    }

    /// Releases the ports, so that tasks can bind them.
    #[must_use]
    pub fn release(self) -> Vec<u16> {
        drop(self.listeners);
        self.numbers
    }
}

/// Well-known services are mostly below.
const LOWEST: u16 = 10_000;

/// Returns the first of the ports that the kernel gives to connections; Linux's default, where it does not tell.
fn first_ephemeral() -> u16 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    range.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(32_768)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserved_port_is_taken_until_it_is_released() {
        let ports = Ports::reserve(3).unwrap();
        let port = ports.numbers()[1];
        assert!(port < first_ephemeral() || first_ephemeral() < LOWEST + 3, "{port}");
        assert_eq!(ports.addresses()[1], format!("127.0.0.1:{port}"));
        assert!(TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_err());
        let numbers = ports.release();
        assert_eq!(numbers.len(), 3);
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    }
}
