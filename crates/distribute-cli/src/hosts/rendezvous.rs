//! Which launcher leads, and the door at which the others join it.

use std::io::{self, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use distribute_cluster::look_up;

use super::link::{SILENCE, read_one, write_one};
use super::protocol::{Hello, ToLeader, ToMember, VERSION};

/// The part that a launcher plays.
#[derive(Debug)]
pub(crate) enum Role {
    /// It listens at the rendezvous address.
    Leader(TcpListener),
    /// Another launcher does.
    Member,
}

/// Finds out whether the rendezvous address belongs to this host and is free, and then listens there.
///
/// # Errors
/// Errors of looking the name up, and of listening, unless the port is in use: then another launcher of this host
/// leads.
pub(crate) fn find_role(address: &str) -> io::Result<Role> {
    let found = look_up(address, LOOKUP)?;
    let own: Vec<IpAddr> = if_addrs::get_if_addrs()?.iter().map(|interface| interface.ip()).collect();
    let is_own = |address: &&SocketAddr| address.ip().is_loopback() || own.contains(&address.ip());
    let Some(here) = found.iter().find(is_own) else { return Ok(Role::Member) };
    // A name of this host may mean a loopback address here and another one elsewhere.
    let is_literal = address.parse::<SocketAddr>().is_ok();
    let on = match here.ip() {
        ip if is_literal || !ip.is_loopback() => ip,
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    match TcpListener::bind((on, here.port())) {
        Ok(listener) => Ok(Role::Leader(listener)),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(Role::Member),
        Err(error) => Err(error),
    }
}

/// A launcher that has introduced itself.
#[derive(Debug)]
pub(crate) struct Guest {
    pub(super) stream: TcpStream,
    pub(super) reader: BufReader<TcpStream>,
    pub(super) peer: IpAddr,
    pub(super) hello: Hello,
}

/// Where launchers are let in, on threads that live as long as the process.
#[derive(Debug)]
pub(crate) struct Door {
    guests: Receiver<Guest>,
}

impl Door {
    /// Listens for launchers.
    pub(crate) fn open(listener: TcpListener) -> io::Result<Door> {
        // The standard library's queue of 128 is too short for hundreds of hosts that start at once.
        rustix::net::listen(&listener, QUEUE)?;
        let (sender, guests) = unbounded();
        let accept = move || {
            let busy = Arc::new(AtomicUsize::new(0));
            for stream in listener.incoming() {
                // Too many open files, for example, is a state that passes.
                let Ok(stream) = stream else {
                    thread::sleep(AGAIN);
                    continue;
                };
                // A connection that is dropped here may be tried again.
                if busy.load(Ordering::Relaxed) >= STRANGERS {
                    continue;
                }
                busy.fetch_add(1, Ordering::Relaxed);
                let (sender, leaving) = (sender.clone(), Arc::clone(&busy));
                let receive = move || {
                    receive(stream, &sender);
                    leaving.fetch_sub(1, Ordering::Relaxed);
                };
                if thread::Builder::new().name("guest".into()).spawn(receive).is_err() {
                    busy.fetch_sub(1, Ordering::Relaxed);
                }
            }
        };
        thread::Builder::new().name("door".into()).spawn(accept)?;
        Ok(Door { guests })
    }

    /// Returns the launchers that have introduced themselves.
    pub(crate) fn guests(&self) -> &Receiver<Guest> {
        &self.guests
    }
}

/// Lets a launcher introduce itself; refuses one of another version. Others than launchers get no answer.
fn receive(stream: TcpStream, guests: &Sender<Guest>) {
    let Ok((peer, reader)) = introduced(&stream) else { return };
    let mut reader = BufReader::new(reader);
    match read_one(&mut reader, LONGEST_HELLO) {
        Ok(ToLeader::Hello(hello)) if hello.version == VERSION => {
            // Fails only while the launcher is ending.
            let _ = guests.send(Guest { stream, reader, peer, hello });
        }
        Ok(ToLeader::Hello(hello)) => {
            let reason = format!(
                "it speaks version {} of the launchers' protocol, the others {VERSION}; install the same version of \
                 distribute on all hosts",
                hello.version
            );
            // It learns of the refusal by the end of the connection, too.
            let _ = write_one(&stream, &ToMember::Refused { reason, for_now: false });
        }
        Ok(_) | Err(_) => {}
    }
}

fn introduced(stream: &TcpStream) -> io::Result<(IpAddr, TcpStream)> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE))?;
    Ok((stream.peer_addr()?.ip().to_canonical(), stream.try_clone()?))
}

const LOOKUP: Duration = Duration::from_secs(10);

/// The wait after a failed accept.
const AGAIN: Duration = Duration::from_millis(100);

/// The length of the queue of connections that wait to be accepted; the system may limit it further.
const QUEUE: i32 = 4096;

/// How many connections may be about to introduce themselves.
const STRANGERS: usize = 256;

/// The longest introduction, in bytes; it contains the command line.
const LONGEST_HELLO: u64 = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_launcher_of_a_host_leads() {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().to_string();
        let Role::Leader(listener) = find_role(&free).unwrap() else { panic!("the address is free") };
        assert!(matches!(find_role(&free).unwrap(), Role::Member));
        drop(listener);
        // An address for documentation, of no host.
        assert!(matches!(find_role("192.0.2.1:29400").unwrap(), Role::Member));
        assert!(find_role("no such host:1").is_err());
    }
}
