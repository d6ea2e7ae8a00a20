//! The transports between processes, which are tried out, since nothing else is conclusive in containers and under
//! security rules.

use std::io::IoSlice;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use distribute_collectives::transport::{Incoming, Outgoing, Sink, Timeout, UnexpectedBytes, connect};
use distribute_collectives::{Error, TransportKind};

use super::report::Check;
use super::seen::within;

/// The transports that can be selected for a group.
pub(crate) const ALL: [TransportKind; 3] = [TransportKind::Shm, TransportKind::Tcp, TransportKind::Grpc];

/// The result of trying a transport.
#[derive(Debug)]
pub(crate) enum Attempt {
    Works(Duration),
    /// It is not in this build, which lacks this cargo feature.
    NotBuilt(&'static str),
    Failed(String),
    /// It was not tried, because loopback does not work.
    Untried,
}

/// Connects two threads and lets each send bytes to the other.
pub(crate) fn attempt(kind: TransportKind) -> Attempt {
    let begun = Instant::now();
    match within(PATIENCE + PATIENCE / 2, move || meet(kind)) {
        Some(Ok(())) => Attempt::Works(begun.elapsed()),
        Some(Err(Problem::NotBuilt(feature))) => Attempt::NotBuilt(feature),
        Some(Err(Problem::Failed(problem))) => Attempt::Failed(problem),
        None => Attempt::Failed(format!("no answer within {} s", PATIENCE.as_secs())),
    }
}

/// Judges the result, given that groups of this process would use `wanted`.
pub(crate) fn transport(kind: TransportKind, attempt: Attempt, wanted: TransportKind) -> Check {
    let topic = &format!("transport {}", kind.name());
    let role = match kind {
        _ if kind == wanted => "used between all processes, as DISTRIBUTE_TRANSPORT says",
        TransportKind::Shm if wanted == TransportKind::Auto => "used between processes of one machine",
        TransportKind::Tcp if wanted == TransportKind::Auto => "used between machines",
        _ => "can be chosen by DISTRIBUTE_TRANSPORT",
    };
    match attempt {
        Attempt::Works(took) => {
            Check::ok(topic, role).details([format!("tried in {:.0} ms", took.as_secs_f64() * 1e3)])
        }
        Attempt::NotBuilt(feature) => {
            let check = if kind == wanted { Check::fail } else { Check::skipped };
            check(topic, "not in this build").remedy(format!("build with the cargo feature {feature}"))
        }
        Attempt::Untried => Check::skipped(topic, "not tried, as loopback does not work"),
        Attempt::Failed(problem) => {
            let needed = kind == wanted || (kind == TransportKind::Tcp && wanted == TransportKind::Auto);
            let check = if needed { Check::fail } else { Check::warn };
            match kind {
                TransportKind::Shm => check(topic, problem)
                    .why("processes of this machine would use TCP")
                    .remedy("mount /proc, and let memfd_create and mmap pass"),
                _ => check(topic, problem).why(role).remedy("see the line open files"),
            }
        }
    }
}

enum Problem {
    NotBuilt(&'static str),
    Failed(String),
}

fn meet(kind: TransportKind) -> Result<(), Problem> {
    let failed = |problem: String| Problem::Failed(problem);
    let listen =
        || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|error| failed(format!("cannot listen: {error}")));
    let listeners = [listen()?, listen()?];
    let mut addresses = Vec::new();
    for listener in &listeners {
        addresses.push(listener.local_addr().map_err(|error| failed(error.to_string()))?.to_string());
    }
    let deadline = Instant::now() + PATIENCE;
    thread::scope(|scope| {
        let addresses = &addresses;
        let threads = [0, 1].into_iter().zip(listeners).map(|(rank, listener)| {
            scope.spawn(move || {
                let transport = connect(kind, rank, addresses, listener, deadline).map_err(|error| match error {
                    Error::NotBuilt { feature, .. } => Problem::NotBuilt(feature),
                    error => failed(error.to_string()),
                });
                swap(transport?, rank, deadline)
            })
        });
        let threads: Vec<_> = threads.collect();
        let panicked = |_| Err(failed("it panicked, which is an error in distribute".to_owned()));
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(panicked))
    })
}

/// Sends bytes to the other thread, and compares those received with the expected ones.
fn swap(
    mut transport: Box<dyn distribute_collectives::transport::Transport>,
    rank: usize,
    deadline: Instant,
) -> Result<(), Problem> {
    let (mine, theirs) = (sample(rank), sample(1 - rank));
    let mut inbox = Inbox { bytes: vec![0; theirs.len()], filled: 0 };
    let interrupted = AtomicBool::new(false);
    let timeout = Timeout { deadline, spin: Duration::ZERO, interrupted: &interrupted };
    let mut outgoing = [Outgoing { to: 1 - rank, parts: vec![IoSlice::new(&mine)] }];
    let mut incoming = [Incoming { from: 1 - rank, sink: &mut inbox }];
    let swapped = transport.exchange(&mut outgoing, &mut incoming, &timeout);
    swapped.map_err(|error| Problem::Failed(error.to_string()))?;
    match inbox.bytes == theirs {
        true => Ok(()),
        false => Err(Problem::Failed("other bytes arrived than were sent, which is an error in distribute".to_owned())),
    }
}

/// Longer than a ring or a socket's buffer.
fn sample(rank: usize) -> Vec<u8> {
    (0..1_000_003_usize).map(|at| (at * 31 + rank * 7) as u8).collect()
}

struct Inbox {
    bytes: Vec<u8>,
    filled: usize,
}

impl Sink for Inbox {
    fn space(&mut self) -> &mut [u8] {
        &mut self.bytes[self.filled..]
    }

    fn advance(&mut self, len: usize) -> Result<(), UnexpectedBytes> {
        self.filled += len;
        Ok(())
    }
}

const PATIENCE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::Status;

    #[test]
    fn every_transport_of_this_build_works_here() {
        for kind in ALL {
            let attempt = attempt(kind);
            assert!(matches!(attempt, Attempt::Works(_)), "{kind:?}: {attempt:?}");
            assert_eq!(transport(kind, attempt, TransportKind::Auto).status, Status::Ok);
        }
    }

    #[test]
    fn what_nobody_needs_is_no_failure() {
        let failed = |kind, wanted| transport(kind, Attempt::Failed("no".to_owned()), wanted).status;
        assert_eq!(failed(TransportKind::Tcp, TransportKind::Auto), Status::Fail);
        assert_eq!(failed(TransportKind::Shm, TransportKind::Auto), Status::Warn);
        assert_eq!(failed(TransportKind::Shm, TransportKind::Shm), Status::Fail);
        assert_eq!(failed(TransportKind::Tcp, TransportKind::Grpc), Status::Warn);
        let missing = |wanted| transport(TransportKind::Grpc, Attempt::NotBuilt("grpc"), wanted);
        assert_eq!(missing(TransportKind::Auto).status, Status::Skipped);
        assert_eq!(missing(TransportKind::Grpc).status, Status::Fail);
        assert!(missing(TransportKind::Auto).remedy.unwrap().contains("feature grpc"));
    }
}
