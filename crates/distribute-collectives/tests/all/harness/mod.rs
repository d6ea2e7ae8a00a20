//! Groups of ranks within one test process, and a function that runs all of them at the same time.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::net::TcpListener;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use distribute_cluster::FailureKind;
use distribute_collectives::{Options, ProcessGroup, transport};

/// `processes * local_ranks` ranks; processes communicate over loopback within this test process.
pub(crate) fn groups(processes: usize, local_ranks: usize, options: &Options) -> Vec<ProcessGroup> {
    let listeners: Vec<TcpListener> = (0..processes).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses: Vec<String> = listeners.iter().map(|l| l.local_addr().unwrap().to_string()).collect();
    let names: Vec<String> = (0..processes * local_ranks).map(|rank| format!("worker:{rank}")).collect();
    std::thread::scope(|scope| {
        let handles: Vec<_> = listeners
            .into_iter()
            .enumerate()
            .map(|(process, listener)| {
                let (addresses, names) = (&addresses, names.clone());
                scope.spawn(move || {
                    let deadline = Instant::now() + Duration::from_secs(20);
                    let transport =
                        transport::connect(options.transport, process, addresses, listener, deadline).unwrap();
                    ProcessGroup::with_transport(transport, process, local_ranks, names, options).unwrap()
                })
            })
            .collect();
        handles.into_iter().flat_map(|handle| handle.join().unwrap()).collect()
    })
}

/// Runs `body` on every rank at the same time and returns the results in rank order; fails instead of hanging.
pub(crate) fn each<R: Send>(groups: &[ProcessGroup], body: impl Fn(&ProcessGroup) -> R + Sync) -> Vec<R> {
    let (done, finished) = mpsc::channel();
    std::thread::scope(|scope| {
        let handles: Vec<_> = groups
            .iter()
            .map(|group| {
                let (body, done) = (&body, done.clone());
                scope.spawn(move || {
                    let result = body(group);
                    let _ = done.send(());
                    result
                })
            })
            .collect();
        for _ in groups {
            if finished.recv_timeout(Duration::from_secs(60)).is_err() {
                groups[0].abort("the test took longer than a minute", FailureKind::Permanent);
            }
        }
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

pub(crate) fn quick() -> Options {
    Options::default().timeout(Duration::from_secs(30))
}
