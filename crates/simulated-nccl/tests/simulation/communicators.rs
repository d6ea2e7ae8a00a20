//! Creation, division, failure and destruction of communicators.
use std::ffi::c_void;
use std::ptr;
use std::thread;
use std::time::Duration;

use crate::support::{
    LIMIT, NONE, Rank, abort, code, destroy, each, join, join_without_waiting, nccl, on_ranks, state, state_after, sum,
};
use distribute_testkit::within;
use nccl_sys::{Code, Comm, Config, DataType, Library, Progress, RedOp, UniqueId};

#[test]
fn one_thread_drives_several_ranks() {
    within(LIMIT, || {
        let nccl = nccl();
        let id = nccl.unique_id().unwrap();
        let mut comms = [ptr::null_mut(); 3];
        nccl.group_start().unwrap();
        for (rank, comm) in (0..).zip(&mut comms) {
            // SAFETY: the array lives until the group has ended.
            let _ = unsafe { nccl.comm_init_rank(comm, 3, id, rank) }.unwrap();
        }
        assert_eq!(nccl.group_end().unwrap(), Progress::Done);
        drive(&nccl, &comms);
    });
}

#[test]
fn all_devices_of_a_process_are_joined_by_one_call() {
    within(LIMIT, || {
        let nccl = nccl();
        let mut comms = [ptr::null_mut(); 2];
        // SAFETY: there is room for two, and there are two devices.
        let made = unsafe { nccl.comm_init_all(comms.as_mut_ptr(), 2, [3, 1].as_ptr()) };
        let _ = made.unwrap();
        // SAFETY: the communicators were made above.
        let devices = comms.map(|comm| unsafe { nccl.comm_device(comm) }.unwrap());
        assert_eq!(devices, [3, 1]);
        drive(&nccl, &comms);
    });
}

fn drive(nccl: &Library, comms: &[Comm]) {
    let mut values: Vec<i32> = (1..).take(comms.len()).collect();
    let expected = vec![values.iter().sum::<i32>(); comms.len()];
    nccl.group_start().unwrap();
    nccl.group_start().unwrap();
    for (comm, value) in comms.iter().zip(&mut values) {
        let memory: *mut c_void = ptr::from_mut(value).cast();
        // SAFETY: the values live until the group has ended.
        let _ = unsafe { nccl.all_reduce(memory, memory, 1, DataType::INT32, RedOp::SUM, *comm, NONE) }.unwrap();
    }
    let _ = nccl.group_end().unwrap();
    assert_ne!(values, expected);
    let _ = nccl.group_end().unwrap();
    assert_eq!(values, expected);
    comms.iter().for_each(|comm| destroy(nccl, *comm));
}

#[test]
fn a_group_with_a_wrong_call_launches_nothing() {
    on_ranks(1, |own| {
        own.nccl.group_start().unwrap();
        // SAFETY: it is rejected.
        let wrong = unsafe { own.nccl.send(NONE, 1, DataType::INT8, 7, own.comm, NONE) };
        assert_eq!(code(wrong), Code::INVALID_ARGUMENT);
        assert_eq!(code(own.nccl.group_end()), Code::INVALID_ARGUMENT);
        assert_eq!(code(own.nccl.group_end()), Code::INVALID_USAGE);
        own.nccl.group_start().unwrap();
        assert_eq!(own.nccl.group_simulate_end().unwrap().estimated_time, 0.0);
        assert_eq!(sum(&own.nccl, own.comm, 4).unwrap(), (Progress::Done, 4));
    });
}

#[test]
fn colours_divide_and_keys_order() {
    on_ranks(4, |own| {
        let mut half = ptr::null_mut();
        let color = if own.rank == 3 { Library::NO_COLOR } else { own.rank as i32 % 2 };
        // SAFETY: `half` stays during the blocking call.
        let done = unsafe { own.nccl.comm_split(own.comm, color, -(own.rank as i32), &mut half, None) };
        let _ = done.unwrap();
        if own.rank == 3 {
            assert!(half.is_null());
        } else {
            // SAFETY: the communicator was made above.
            let place = unsafe { own.nccl.comm_rank(half) }.unwrap();
            // SAFETY: as above.
            let count = unsafe { own.nccl.comm_count(half) }.unwrap();
            assert_eq!((place, count), [(1, 2), (0, 1), (0, 2)][own.rank]);
            assert_eq!(sum(&own.nccl, half, own.rank as i32).unwrap().1, [2, 1, 2][own.rank]);
            destroy(&own.nccl, half);
        }
        assert_eq!(sum(&own.nccl, own.comm, 1).unwrap().1, 4);
    });
}

#[test]
fn what_is_not_blocking_is_in_progress_until_asked() {
    each(2, |nccl, id, rank| {
        let comm = join_without_waiting(&nccl, 2, id, rank);
        assert_eq!(state_after(&nccl, comm, Code::IN_PROGRESS), Code::SUCCESS);
        assert_eq!(sum(&nccl, comm, 2).unwrap(), (Progress::InProgress, 4));
        let early = sum(&nccl, comm, 2);
        assert!(early.as_ref().unwrap_err().to_string().contains("before its last call"), "{early:?}");
        assert_eq!(code(early), Code::INVALID_ARGUMENT);
        assert_eq!([state(&nccl, comm), state(&nccl, comm)], [Code::IN_PROGRESS, Code::SUCCESS]);
        // SAFETY: nothing is issued afterwards.
        let _ = unsafe { nccl.comm_finalize(comm) }.unwrap();
        assert_eq!(state_after(&nccl, comm, Code::IN_PROGRESS), Code::SUCCESS);
        destroy(&nccl, comm);
    });
}

#[test]
fn who_waits_for_a_rank_that_does_not_come_can_abort() {
    within(LIMIT, || {
        let nccl = nccl();
        let id = nccl.unique_id().unwrap();
        let comm = join_without_waiting(&nccl, 2, id, 0);
        thread::sleep(Duration::from_millis(50));
        assert_eq!(state(&nccl, comm), Code::IN_PROGRESS);
        abort(&nccl, comm);
        // SAFETY: the simulation detects stale pointers.
        let stale = unsafe { nccl.comm_async_error(comm) };
        assert_eq!(code(stale), Code::INVALID_ARGUMENT);
    });
}

#[test]
fn an_abort_reaches_the_other_ranks() {
    each(3, |nccl, id, rank| {
        let comm = join(&nccl, 3, id, rank);
        assert_eq!(sum(&nccl, comm, 1).unwrap().1, 3);
        if rank > 0 {
            // On the calling thread no other thread could abort, so the wait ends.
            assert_eq!(code(sum(&nccl, comm, 1)), Code::REMOTE_ERROR);
            assert_eq!(state(&nccl, comm), Code::REMOTE_ERROR);
        }
        abort(&nccl, comm);
    });
}

#[test]
fn survivors_go_on_in_a_smaller_communicator() {
    each(3, |nccl, id, rank| {
        let comm = join(&nccl, 3, id, rank);
        if rank == 1 {
            return abort(&nccl, comm);
        }
        assert_eq!(state_after(&nccl, comm, Code::SUCCESS), Code::REMOTE_ERROR);
        let mut smaller = ptr::null_mut();
        // SAFETY: `smaller` stays during the blocking call.
        let done = unsafe { nccl.comm_shrink(comm, &[1], &mut smaller, None, Library::SHRINK_ABORT) };
        let _ = done.unwrap();
        abort(&nccl, comm);
        assert_eq!(sum(&nccl, smaller, rank as i32).unwrap().1, 2);
        destroy(&nccl, smaller);
    });
}

#[test]
fn ranks_that_differ_break_their_communicator() {
    each(2, |nccl, id, rank| {
        let comm = join(&nccl, 2, id, rank);
        let mut values = [0i32; 2];
        let memory: *mut c_void = values.as_mut_ptr().cast();
        // SAFETY: there are two elements.
        let done = unsafe { nccl.all_reduce(memory, memory, rank + 1, DataType::INT32, RedOp::SUM, comm, NONE) };
        let error = done.unwrap_err();
        assert!(error.to_string().contains("AllReduce") && error.to_string().contains("count: 2"), "{error}");
        assert_eq!(code::<()>(Err(error)), Code::INVALID_USAGE);
        assert_eq!(state(&nccl, comm), Code::INVALID_USAGE);
        abort(&nccl, comm);
    });
}

#[test]
fn ids_that_are_none_and_ranks_that_do_not_fit_are_told() {
    within(LIMIT, || {
        let nccl = nccl();
        let attempt = |id, ranks, rank| {
            let mut comm = ptr::null_mut();
            // SAFETY: `comm` stays during the blocking call.
            let joined = unsafe { nccl.comm_init_rank(&mut comm, ranks, id, rank) };
            assert!(comm.is_null());
            code(joined)
        };
        assert_eq!(attempt(UniqueId::from_bytes([7; 128]), 1, 0), Code::INVALID_ARGUMENT);
        assert_eq!(attempt(nccl.unique_id().unwrap(), 2, 2), Code::INVALID_ARGUMENT);
        let id = nccl.unique_id().unwrap();
        let comm = join(&nccl, 1, id, 0);
        // The hub refuses, has just closed the connection, or no longer listens.
        let refusals = [Code::INVALID_ARGUMENT, Code::REMOTE_ERROR, Code::SYSTEM_ERROR];
        assert!(refusals.contains(&attempt(id, 1, 0)));
        destroy(&nccl, comm);
        let mut config = Config::new().blocking(true).ctas(1, 2);
        let mut comm = ptr::null_mut();
        let id = nccl.unique_id().unwrap();
        config = config.channels_per_net_peer(2);
        // SAFETY: `comm` stays during the blocking call.
        let joined = unsafe { nccl.comm_init_rank_config(&mut comm, 1, id, 0, &config) };
        let _ = joined.unwrap();
        destroy(&nccl, comm);
    });
}

#[test]
fn a_hub_ends_with_its_connections() {
    let hub_threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        tasks
            .filter(|task| {
                std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("nccl-"))
            })
            .count()
    };
    let run = || {
        on_ranks(2, |own: &Rank| {
            assert_eq!(sum(&own.nccl, own.comm, 1).unwrap().1, 2);
        });
    };
    // Other tests of this process have hubs of their own, so only a leak in each of many runs is visible.
    (0..100).for_each(|_| run());
    let settled = (0..200).any(|_| {
        thread::sleep(Duration::from_millis(50));
        hub_threads() < 100
    });
    assert!(settled, "{} threads are left", hub_threads());
}
