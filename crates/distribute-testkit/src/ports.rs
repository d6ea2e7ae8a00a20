//! Reserved loopback ports.

use std::net::{Ipv4Addr, TcpListener};

use crate::Error;

/// Free ports of 127.0.0.1, held by listeners until they are released.
///
/// The kernel chooses them. Between [`release`](Self::release) and the moment a task binds its port, another process
/// may take it; prefer to bind port 0 if the program supports that.
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
        let listener = |_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let listeners = (0..count).map(listener).collect::<Result<Vec<_>, _>>().map_err(Error::Port)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserved_port_is_taken_until_it_is_released() {
        let ports = Ports::reserve(3).unwrap();
        let port = ports.numbers()[1];
        assert_eq!(ports.addresses()[1], format!("127.0.0.1:{port}"));
        assert!(TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_err());
        let numbers = ports.release();
        assert_eq!(numbers.len(), 3);
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    }
}
