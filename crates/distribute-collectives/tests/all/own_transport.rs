//! A custom transport: queues between threads that stand for processes.

use std::thread;

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Instant;

use distribute_collectives::transport::{AbortReason, Incoming, Outgoing, Timeout, Transport, TransportError};
use distribute_collectives::{Error, Options, ProcessGroup, Rank, ReduceOp, Result};
use distribute_device::Element;
use half::f16;

use crate::harness::each;

/// A queue to and from each other member.
struct Queues {
    to: Vec<Sender<Vec<u8>>>,
    from: Vec<Receiver<Vec<u8>>>,
    /// Bytes that were taken out of a queue and not used yet.
    rest: Vec<Vec<u8>>,
}

impl Transport for Queues {
    fn name(&self) -> &'static str {
        "queues"
    }

    fn exchange(
        &mut self,
        outgoing: &mut [Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        timeout: &Timeout<'_>,
    ) -> Result<(), TransportError> {
        for Outgoing { to, parts } in outgoing {
            // The queues are unbounded: sending never waits, so two members that send to each other cannot block.
            let bytes = parts.drain(..).flat_map(|part| part.to_vec()).collect();
            self.to[*to].send(bytes).map_err(|_| TransportError::Left { peer: *to })?;
        }
        for Incoming { from, sink } in incoming {
            let (peer, rest) = (*from, &mut self.rest[*from]);
            while !sink.space().is_empty() {
                if rest.is_empty() {
                    match self.from[peer].recv_timeout(timeout.next_sleep()?) {
                        Ok(bytes) => *rest = bytes,
                        Err(RecvTimeoutError::Timeout) => continue,
                        Err(RecvTimeoutError::Disconnected) => return Err(TransportError::Left { peer }),
                    }
                }
                let space = sink.space();
                let len = space.len().min(rest.len());
                space[..len].copy_from_slice(&rest[..len]);
                rest.drain(..len);
                sink.advance(len).map_err(|_| TransportError::Refused { peer })?;
            }
        }
        Ok(())
    }

    fn abort(&mut self, _reason: &AbortReason) {
        // The peers' queues end.
        self.to.clear();
    }

    fn last_heard(&self, _peer: usize) -> Option<Instant> {
        None
    }
}

/// Creates queues between all of `members`, also from each to itself, which are not used.
fn connect(members: usize) -> Vec<Queues> {
    let mut all: Vec<Queues> =
        (0..members).map(|_| Queues { to: Vec::new(), from: Vec::new(), rest: vec![Vec::new(); members] }).collect();
    for from in 0..members {
        for to in 0..members {
            let (sender, receiver) = channel();
            all[from].to.push(sender);
            all[to].from.push(receiver);
        }
    }
    all
}

fn groups(members: usize, local: usize) -> Vec<ProcessGroup> {
    let names: Vec<String> = (0..members * local).map(|rank| format!("rank {rank}")).collect();
    let groups = connect(members).into_iter().enumerate().flat_map(|(process, queues)| {
        ProcessGroup::with_transport(Box::new(queues), process, local, names.clone(), &Options::default()).unwrap()
    });
    groups.collect()
}

fn on_members<R: Send>(members: usize, local: usize, body: impl Fn(&ProcessGroup) -> R + Sync) -> Vec<R> {
    let groups = groups(members, local);
    thread::scope(|scope| {
        let body = &body;
        let handles: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || body(&group))).collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

#[test]
fn operations_run_over_it() {
    for (members, local) in [(1, 3), (2, 1), (3, 1), (3, 2), (5, 1)] {
        let world = members * local;
        on_members(members, local, |group| {
            assert_eq!(group.transport_name(), if members == 1 { "local" } else { "queues" });
            let me = group.rank().0;
            for len in [0, 1, 1000, 300_000] {
                let mut values = vec![me; len];
                group.all_reduce(&mut values, ReduceOp::Max).unwrap();
                assert_eq!(values, vec![world as u32 - 1; len]);
                let mut all = vec![0; len * world];
                group.all_gather(&vec![me; len], &mut all).unwrap();
                assert!(all.iter().enumerate().all(|(index, value)| *value as usize == index / len));
                let mut exchanged = vec![0; len * world];
                group.all_to_all(&all, &mut exchanged).unwrap();
                assert!(exchanged.iter().all(|value| *value == me));
                let mut sent = vec![me; len];
                group.broadcast(&mut sent, Rank(1)).unwrap();
                assert_eq!(sent, vec![1; len]);
            }
            group.barrier().unwrap();
        });
    }
}

/// Returns the bits of one rank's result of every form of a mean.
fn means<T: Element>(group: &ProcessGroup, make: impl Fn(usize) -> T) -> Vec<Vec<u8>> {
    let (me, world, len) = (group.rank().index(), group.world_size(), 1000);
    let values: Vec<T> = (0..world * len).map(|index| make(me * 31 + index % 97)).collect();
    let bits = |values: &[T]| bytemuck::cast_slice(values).to_vec();
    let mut results = Vec::new();
    let mut all = values.clone();
    group.all_reduce(&mut all, ReduceOp::Mean).unwrap();
    results.push(bits(&all));
    for root in [0, world - 1] {
        let mut at_root = values.clone();
        group.reduce(&mut at_root, ReduceOp::Mean, Rank(root as u32)).unwrap();
        results.extend((me == root).then(|| bits(&at_root)));
    }
    let mut part = vec![T::default(); len];
    group.reduce_scatter(&values, &mut part, ReduceOp::Mean).unwrap();
    results.push(bits(&part));
    let counts = vec![len; world];
    let work = group.parts(&counts).start().reduce_scatter_in_place(values.clone(), ReduceOp::Mean).unwrap();
    results.push(bits(&work.wait().unwrap()[me * len..(me + 1) * len]));
    results.push(bits(&group.start().all_reduce(values, ReduceOp::Mean).unwrap().wait().unwrap()));
    results
}

#[test]
fn means_of_one_process_are_those_of_a_local_group() {
    let all = |group: &ProcessGroup| {
        [
            means::<f32>(group, |value| value as f32 / 7.0),
            means::<f16>(group, |value| f16::from_f32(value as f32 / 7.0)),
            means::<i64>(group, |value| value as i64 - 50),
        ]
    };
    for ranks in [1, 2, 3] {
        let expected = each(&ProcessGroup::local(ranks).unwrap(), all);
        assert!(each(&groups(1, ranks), all) == expected, "{ranks} ranks");
    }
}

#[test]
fn failures_over_it_are_named() {
    let outcomes: Vec<Result<()>> = on_members(2, 1, |group| match group.rank().0 {
        0 => group.all_reduce(&mut [0.0f32; 4], ReduceOp::Sum),
        _ => group.all_reduce(&mut [0.0f32; 5], ReduceOp::Sum),
    });
    assert!(outcomes.iter().any(|outcome| matches!(outcome, Err(Error::Mismatch { .. }))), "{outcomes:?}");
    assert!(outcomes.iter().all(Result::is_err), "{outcomes:?}");
    let outcomes = on_members(3, 1, |group| if group.rank().0 == 1 { Ok(()) } else { group.barrier() });
    assert!(outcomes[0].is_err() && outcomes[2].is_err(), "{outcomes:?}");
}
