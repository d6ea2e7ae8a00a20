//! The port of a server that only the chief of a job runs.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::server::bind;
use crate::{Error, Result};

/// An address of which it is not known yet whether this process serves at it. Several processes of a host may be given
/// the same one, of which the chief gets it.
#[derive(Debug)]
pub(crate) struct Port {
    address: SocketAddr,
    /// `None` if another process has the port, or it was released.
    listener: Option<TcpListener>,
}

impl Port {
    /// Takes a port, or remembers it if another process has it.
    ///
    /// # Errors
    /// [`Error::Listen`] if the address cannot be listened on for another reason.
    pub(crate) fn reserve(address: &str) -> Result<Port> {
        let failed = |source| Error::Listen { address: address.to_owned(), source };
        match bind(address) {
            Ok(listener) => {
                let address = listener.local_addr().map_err(failed)?;
                Ok(Port { address, listener: Some(listener) })
            }
            Err(error) if is_taken(&error) => {
                let resolved = address.to_socket_addrs().map_err(failed)?.next();
                let address = resolved.ok_or_else(|| failed(ErrorKind::AddrInUse.into()))?;
                Ok(Port { address, listener: None })
            }
            Err(error) => Err(error),
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Leaves the port to the chief.
    pub(crate) fn release(&mut self) {
        self.listener = None;
    }

    /// Returns the listener of the chief. If another process has the port, waits for the limit that it releases it.
    ///
    /// # Errors
    /// [`Error::Listen`] if the address cannot be listened on by then.
    pub(crate) fn listen(&mut self, limit: Duration) -> Result<TcpListener> {
        if let Some(listener) = self.listener.take() {
            return Ok(listener);
        }
        let (address, began) = (self.address.to_string(), Instant::now());
        loop {
            match bind(&address) {
                Err(error) if is_taken(&error) && began.elapsed() < limit => std::thread::sleep(BETWEEN_TRIES),
                bound => return bound,
            }
        }
    }
}

fn is_taken(error: &Error) -> bool {
    matches!(error, Error::Listen { source, .. } if source.kind() == ErrorKind::AddrInUse)
}

/// The other processes of a host release the port as soon as they know that they are not the chief.
pub(crate) const RELEASE: Duration = Duration::from_secs(5);

const BETWEEN_TRIES: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_another_process_has_is_taken_when_it_is_released() {
        let mut first = Port::reserve("127.0.0.1:0").unwrap();
        let address = first.address().to_string();
        let mut second = Port::reserve(&address).unwrap();
        assert_eq!(second.address(), first.address());
        let error = second.listen(Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains(&address) && error.contains("free port"), "{error}");
        let listener = std::thread::scope(|scope| {
            let waits = scope.spawn(|| second.listen(Duration::from_secs(60)));
            first.release();
            waits.join().unwrap().unwrap()
        });
        assert_eq!(listener.local_addr().unwrap().to_string(), address);
        assert!(matches!(Port::reserve("203.0.113.1:80"), Err(Error::Listen { .. })));
    }
}
