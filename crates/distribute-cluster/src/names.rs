//! Host name lookup with a deadline.

use std::io::{Error, ErrorKind, Result};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use crate::host::split_bare;

/// Resolves `host:port` to socket addresses; a literal address needs no lookup.
///
/// The system's resolver has no deadline and can take minutes if a name server does not answer. The lookup therefore
/// runs on a thread, which is detached if it takes longer than `timeout`.
///
/// # Errors
/// [`ErrorKind::TimedOut`] if the lookup takes longer than `timeout`, [`ErrorKind::NotFound`] if the name has no
/// address, and the errors of the system's resolver. Each message contains the name.
///
/// # Examples
/// ```
/// let addresses = distribute_cluster::look_up("127.0.0.1:2222", std::time::Duration::from_secs(5))?;
/// assert_eq!(addresses[0].port(), 2222);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn look_up(address: &str, timeout: Duration) -> Result<Vec<SocketAddr>> {
    match address.parse() {
        Ok(literal) => Ok(vec![literal]),
        Err(_) => look_up_by(|name| Ok(split_bare(name)?.to_socket_addrs()?.collect()), address, timeout),
    }
}

fn look_up_by(
    system: impl FnOnce(&str) -> Result<Vec<SocketAddr>> + Send + 'static,
    address: &str,
    timeout: Duration,
) -> Result<Vec<SocketAddr>> {
    let (tell, told) = mpsc::sync_channel(1);
    let name = address.to_owned();
    let body = move || {
        // The receiver is gone if the lookup took too long.
        let _ = tell.send(system(&name));
    };
    std::thread::Builder::new().name("lookup".to_owned()).spawn(body)?;
    let failed = |kind, problem: String| Err(Error::new(kind, format!("the address of {address}: {problem}")));
    match told.recv_timeout(timeout) {
        Ok(Ok(addresses)) if addresses.is_empty() => failed(ErrorKind::NotFound, "the name has none".to_owned()),
        Ok(Ok(addresses)) => Ok(addresses),
        Ok(Err(error)) => failed(error.kind(), error.to_string()),
        Err(RecvTimeoutError::Timeout) => failed(
            ErrorKind::TimedOut,
            format!(
                "the name was not found within {} s; check the name servers (/etc/resolv.conf), or use an address",
                timeout.as_secs_f64()
            ),
        ),
        Err(RecvTimeoutError::Disconnected) => failed(ErrorKind::Other, "the lookup panicked".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    #[test]
    fn a_lookup_that_hangs_ends_with_a_sentence() {
        let (release, held) = mpsc::channel::<()>();
        let hangs = move |_: &str| {
            let _ = held.recv_timeout(SOON);
            Ok(Vec::new())
        };
        let error = look_up_by(hangs, "far.example:1", Duration::from_millis(50)).unwrap_err();
        let words = "the address of far.example:1: the name was not found within 0.05 s";
        assert!(error.kind() == ErrorKind::TimedOut && error.to_string().starts_with(words), "{error}");
        drop(release);
    }

    #[test]
    fn names_and_literals() {
        assert_eq!(look_up("127.0.0.1:7", SOON).unwrap(), [SocketAddr::from(([127, 0, 0, 1], 7))]);
        assert_eq!(look_up("[::1]:7", SOON).unwrap()[0].port(), 7);
        assert!(look_up("localhost:7", SOON).unwrap().iter().all(|address| address.ip().is_loopback()));
        // The zone of a link-local address is an interface, here the loopback one of Linux.
        if cfg!(target_os = "linux") {
            let found = look_up("[fe80::1%lo]:80", SOON).unwrap();
            assert!(found.iter().all(|found| matches!(found, SocketAddr::V6(v6) if v6.scope_id() > 0)), "{found:?}");
        }
        for (answer, kind) in [
            (Ok(Vec::new()), ErrorKind::NotFound),
            (Err(ErrorKind::PermissionDenied.into()), ErrorKind::PermissionDenied),
        ] {
            let error = look_up_by(move |_| answer, "x:1", SOON).unwrap_err();
            assert!(error.kind() == kind && error.to_string().starts_with("the address of x:1: "), "{error}");
        }
        assert!(look_up_by(|_| std::panic::resume_unwind(Box::new(())), "x:1", SOON).is_err());
    }
}
