use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use super::ProcessGroup;
use crate::transport::{self, AbortReason, Incoming, Outgoing, Timeout, Transport, TransportError, TransportKind};
use crate::{Error, Options};

/// Returns one rank of each of two processes, whose sockets are on loopback.
fn pair(kind: TransportKind) -> Vec<ProcessGroup> {
    wrapped_pair(kind, Duration::from_secs(5), |_, transport| transport)
}

/// Returns such ranks, with transports that `wrap` changes.
fn wrapped_pair(
    kind: TransportKind,
    timeout: Duration,
    wrap: impl Fn(usize, Box<dyn Transport>) -> Box<dyn Transport> + Sync,
) -> Vec<ProcessGroup> {
    let listeners: Vec<TcpListener> = (0..2).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
    let address = |listener: &TcpListener| listener.local_addr().expect("it is bound").to_string();
    let addresses: Vec<String> = listeners.iter().map(address).collect();
    let connect = |(rank, listener)| {
        let deadline = Instant::now() + Duration::from_secs(20);
        let transport = transport::connect(kind, rank, &addresses, listener, deadline).expect("it connects");
        let names = vec!["rank 0".to_owned(), "rank 1".to_owned()];
        let options = Options { timeout, ..Options::default() };
        ProcessGroup::with_transport(wrap(rank, transport), rank, 1, names, &options).expect("two ranks").remove(0)
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = listeners.into_iter().enumerate().map(|member| scope.spawn(|| connect(member))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

#[test]
fn a_group_is_left_although_another_thread_holds_its_engine() {
    let kinds = [TransportKind::Auto, TransportKind::Tcp];
    #[cfg(feature = "grpc")]
    let kinds = [kinds[0], kinds[1], TransportKind::Grpc];
    for kind in kinds {
        let mut ranks = pair(kind);
        let (last, first) = (ranks.remove(1), ranks.remove(0));
        // Like the I/O thread after it has exchanged an operation.
        let held = last.engine.engine().clone();
        drop(last);
        let outcome = first.barrier();
        assert!(matches!(outcome, Err(Error::PeerLeft { .. })), "{kind:?}: {outcome:?}");
        drop(held);
    }
}

/// A transport whose member says that peers reach it at an address of no host (RFC 5737).
struct Unreachable(Box<dyn Transport>);

impl Transport for Unreachable {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn exchange(
        &mut self,
        outgoing: &mut [Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        timeout: &Timeout<'_>,
    ) -> Result<(), TransportError> {
        self.0.exchange(outgoing, incoming, timeout)
    }

    fn abort(&mut self, reason: &AbortReason) {
        self.0.abort(reason);
    }

    fn local_host(&self) -> Option<String> {
        Some("192.0.2.1".to_owned())
    }

    fn kind(&self) -> Option<TransportKind> {
        self.0.kind()
    }

    fn last_heard(&self, peer: usize) -> Option<Instant> {
        self.0.last_heard(peer)
    }
}

#[test]
fn a_split_that_fails_names_the_rank_that_could_not_connect() {
    let ranks = wrapped_pair(TransportKind::Tcp, Duration::from_secs(2), |rank, transport| match rank {
        0 => Box::new(Unreachable(transport)),
        _ => transport,
    });
    let errors = thread::scope(|scope| {
        let split = |group: &ProcessGroup| group.split(Some(0), 0).expect_err("rank 1 cannot connect");
        let threads: Vec<_> = ranks.iter().map(|group| scope.spawn(move || split(group))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic").to_string()).collect::<Vec<_>>()
    });
    assert!(errors[1].starts_with("rank 1: cannot connect to 192.0.2.1"), "{errors:?}");
    assert!(errors[0].starts_with("rank 0: "), "{errors:?}");
}

#[test]
fn a_chosen_number_of_bytes_per_pack_is_told_from_the_default() {
    let packs = |options: &Options| {
        let groups = ProcessGroup::local_with(1, options).unwrap();
        [groups[0].bytes_per_pack(10), groups[0].bytes_per_pack_or(10, 16 << 20)]
    };
    assert_eq!(packs(&Options::default()), [1 << 20, 16 << 20]);
    assert_eq!(packs(&Options::default().bytes_per_pack(1 << 20)), [1 << 20; 2]);
    assert_eq!(packs(&Options::default().bytes_per_pack(0)), [usize::MAX; 2]);
}
