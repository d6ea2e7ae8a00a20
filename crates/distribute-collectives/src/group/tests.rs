use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use super::ProcessGroup;
use crate::transport::{self, TransportKind};
use crate::{Error, Options};

/// Returns one rank of each of two processes, whose sockets are on loopback.
fn pair(kind: TransportKind) -> Vec<ProcessGroup> {
    let listeners: Vec<TcpListener> = (0..2).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
    let address = |listener: &TcpListener| listener.local_addr().expect("it is bound").to_string();
    let addresses: Vec<String> = listeners.iter().map(address).collect();
    let connect = |(rank, listener)| {
        let deadline = Instant::now() + Duration::from_secs(20);
        let transport = transport::connect(kind, rank, &addresses, listener, deadline).expect("it connects");
        let names = vec!["rank 0".to_owned(), "rank 1".to_owned()];
        let options = Options { timeout: Duration::from_secs(5), ..Options::default() };
        ProcessGroup::with_transport(transport, rank, 1, names, &options).expect("two ranks").remove(0)
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
        let held = last.engine.engine();
        drop(last);
        let outcome = first.barrier();
        assert!(matches!(outcome, Err(Error::PeerLeft { .. })), "{kind:?}: {outcome:?}");
        drop(held);
    }
}
