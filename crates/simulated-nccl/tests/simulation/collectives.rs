//! Every operation between ranks that are threads, on their own threads.
use std::ffi::c_void;

use crate::support::{NONE, Rank, code, on_ranks};
use bytemuck::Pod;
use half::{bf16, f16};
use nccl_sys::{Code, DataType, Progress, RedOp, ScalarResidence};

/// Returns the data of rank `rank`: small numbers that every type holds and whose sums and products are exact.
fn numbers(rank: usize, count: usize) -> Vec<i32> {
    (0..count).map(|place| ((place + rank) % 3 + 1) as i32).collect()
}

fn reference(op: RedOp, ranks: usize, count: usize) -> Vec<i32> {
    let of_place = |place: usize| {
        let column = (0..ranks).map(|rank| numbers(rank, count)[place]);
        match op {
            RedOp::PROD => column.product(),
            RedOp::MAX => column.max().unwrap(),
            RedOp::MIN => column.min().unwrap(),
            RedOp::AVG => column.sum::<i32>() / ranks as i32,
            _ => column.sum(),
        }
    };
    (0..count).map(of_place).collect()
}

fn all_reduce<T: Pod>(own: &Rank, send: &[T], receive: &mut [T], data_type: DataType, op: RedOp) {
    let (from, to) = (send.as_ptr().cast(), receive.as_mut_ptr().cast());
    // SAFETY: both slices have the length of the first.
    let done = unsafe { own.nccl.all_reduce(from, to, send.len(), data_type, op, own.comm, NONE) };
    assert_eq!(done.unwrap(), Progress::Done);
}

fn reduces_as_the_reference<T: Pod + PartialEq + std::fmt::Debug>(
    own: &Rank,
    data_type: DataType,
    ops: &[RedOp],
    of: fn(i32) -> T,
) {
    for (op, count) in ops.iter().flat_map(|op| [(*op, 1), (*op, 1003)]) {
        let send: Vec<T> = numbers(own.rank, count).into_iter().map(of).collect();
        let expected: Vec<T> = reference(op, own.ranks, count).into_iter().map(of).collect();
        let mut receive = vec![T::zeroed(); count];
        all_reduce(own, &send, &mut receive, data_type, op);
        assert_eq!(receive, expected, "{data_type:?} {op:?}");
        let mut in_place = send.clone();
        let memory: *mut c_void = in_place.as_mut_ptr().cast();
        // SAFETY: the slice has `count` elements.
        let done = unsafe { own.nccl.all_reduce(memory, memory, count, data_type, op, own.comm, NONE) };
        assert_eq!((done.unwrap(), &in_place), (Progress::Done, &expected), "{data_type:?} {op:?} in place");
    }
}

#[test]
fn every_type_is_reduced_by_every_operation() {
    for ranks in 1..=3 {
        on_ranks(ranks, |own| {
            let all = [RedOp::SUM, RedOp::PROD, RedOp::MAX, RedOp::MIN, RedOp::AVG];
            // Averages of floats differ from those of integers.
            let floats = &all[..4];
            reduces_as_the_reference(own, DataType::INT8, &all, |value| value as i8);
            reduces_as_the_reference(own, DataType::UINT8, &all, |value| value as u8);
            reduces_as_the_reference(own, DataType::INT32, &all, |value| value);
            reduces_as_the_reference(own, DataType::UINT32, &all, |value| value as u32);
            reduces_as_the_reference(own, DataType::INT64, &all, i64::from);
            reduces_as_the_reference(own, DataType::UINT64, &all, |value| value as u64);
            reduces_as_the_reference(own, DataType::FLOAT16, floats, |value| f16::from_f32(value as f32));
            reduces_as_the_reference(own, DataType::BFLOAT16, floats, |value| bf16::from_f32(value as f32));
            reduces_as_the_reference(own, DataType::FLOAT32, floats, |value| value as f32);
            reduces_as_the_reference(own, DataType::FLOAT64, floats, f64::from);
            // The value 1 in 8-bit floats.
            reduces_as_the_reference(own, DataType::FLOAT8_E4M3, &[RedOp::MAX], |_| 0x38u8);
            reduces_as_the_reference(own, DataType::FLOAT8_E5M2, &[RedOp::PROD], |_| 0x3cu8);
        });
    }
}

#[test]
fn averages_of_floats_are_exact_halves() {
    on_ranks(2, |own| {
        let mut receive = [0f32; 2];
        all_reduce(own, &[own.rank as f32, 1.0], &mut receive, DataType::FLOAT32, RedOp::AVG);
        assert_eq!(receive, [0.5, 1.0]);
    });
}

#[test]
fn blocks_go_where_they_belong() {
    on_ranks(3, |own| {
        let Rank { nccl, comm, rank, ranks } = own;
        let block = |of: usize| [of as i64 * 10, of as i64 * 10 + 1];
        let mine: Vec<i64> = (0..*ranks).flat_map(|to| [(rank * 100 + to) as i64; 2]).collect();
        let whole = |receive: &mut [i64]| receive.as_mut_ptr().cast::<c_void>();

        let mut gathered = [0i64; 6];
        // SAFETY: two elements are sent, six received.
        let done =
            unsafe { nccl.all_gather(block(*rank).as_ptr().cast(), whole(&mut gathered), 2, INT64, *comm, NONE) };
        let _ = done.unwrap();
        assert_eq!(gathered, [0, 1, 10, 11, 20, 21]);

        let mut own_sum = [0i64; 2];
        // SAFETY: six elements are sent, two received.
        let done = unsafe {
            nccl.reduce_scatter(mine.as_ptr().cast(), whole(&mut own_sum), 2, INT64, RedOp::SUM, *comm, NONE)
        };
        let _ = done.unwrap();
        assert_eq!(own_sum, [300 + 3 * *rank as i64; 2]);

        let mut exchanged = [0i64; 6];
        // SAFETY: six elements are sent and received.
        let done = unsafe { nccl.all_to_all(mine.as_ptr().cast(), whole(&mut exchanged), 2, INT64, *comm, NONE) };
        let _ = done.unwrap();
        assert_eq!(exchanged, [0, 0, 100, 100, 200, 200].map(|from| from + *rank as i64));

        let mut at_root = [-1i64; 6];
        // SAFETY: two elements are sent, six received by rank 1.
        let done = unsafe { nccl.gather(block(*rank).as_ptr().cast(), whole(&mut at_root), 2, INT64, 1, *comm, NONE) };
        let _ = done.unwrap();
        assert_eq!(at_root, if *rank == 1 { [0, 1, 10, 11, 20, 21] } else { [-1; 6] });

        let mut part = [0i64; 2];
        // SAFETY: six elements are sent by rank 2, two received.
        let done = unsafe { nccl.scatter(mine.as_ptr().cast(), whole(&mut part), 2, INT64, 2, *comm, NONE) };
        let _ = done.unwrap();
        assert_eq!(part, [200 + *rank as i64; 2]);
    });
}

#[test]
fn roots_give_and_take() {
    on_ranks(3, |own| {
        let mut shared = [own.rank as i32 + 5];
        let memory: *mut c_void = shared.as_mut_ptr().cast();
        // SAFETY: one element is sent and received.
        let done = unsafe { own.nccl.broadcast(memory, memory, 1, DataType::INT32, 2, own.comm, NONE) };
        let _ = done.unwrap();
        assert_eq!(shared, [7]);
        let (value, mut sum) = (own.rank as i32 + 1, 0i32);
        let (from, to) = ((&raw const value).cast(), (&raw mut sum).cast());
        // SAFETY: one element is sent, and received by rank 0.
        let done = unsafe { own.nccl.reduce(from, to, 1, DataType::INT32, RedOp::SUM, 0, own.comm, NONE) };
        let _ = done.unwrap();
        assert_eq!(sum, if own.rank == 0 { 6 } else { 0 });
    });
}

#[test]
fn messages_arrive_in_order_and_in_groups_both_ways() {
    on_ranks(2, |own| {
        let Rank { nccl, comm, rank, .. } = own;
        let peer = 1 - *rank as i32;
        let sent: [u8; 2] = [*rank as u8 * 2, *rank as u8 * 2 + 1];
        let mut received = [9u8; 2];
        nccl.group_start().unwrap();
        for place in 0..2 {
            let (from, to) = ((&raw const sent[place]).cast(), (&raw mut received[place]).cast());
            // SAFETY: the arrays live until the group has ended.
            let _ = unsafe { nccl.send(from, 1, DataType::UINT8, peer, *comm, NONE) }.unwrap();
            // SAFETY: as above.
            let _ = unsafe { nccl.recv(to, 1, DataType::UINT8, peer, *comm, NONE) }.unwrap();
        }
        assert_eq!(received, [9; 2]);
        let _ = nccl.group_end().unwrap();
        assert_eq!(received, [peer as u8 * 2, peer as u8 * 2 + 1]);
    });
}

#[test]
fn sums_of_multiples_have_a_factor_for_each_rank() {
    on_ranks(2, |own| {
        let Rank { nccl, comm, rank, .. } = own;
        let factor = [0.5f32, 3.0][*rank];
        let make = |residence| {
            // SAFETY: the factor lives until the operation has ended.
            unsafe { nccl.red_op_create_pre_mul_sum((&raw const factor).cast(), DataType::FLOAT32, residence, *comm) }
        };
        for residence in [ScalarResidence::HOST_IMMEDIATE, ScalarResidence::DEVICE] {
            let op = make(residence).unwrap();
            assert!(!op.is_built_in());
            let mut receive = [0f32];
            all_reduce(own, &[10f32], &mut receive, DataType::FLOAT32, op);
            assert_eq!(receive, [35.0]);
            let memory: *mut c_void = receive.as_mut_ptr().cast();
            // SAFETY: it is rejected before memory is accessed.
            let other = unsafe { nccl.all_reduce(memory, memory, 1, DataType::FLOAT64, op, *comm, NONE) };
            assert_eq!(code(other), Code::INVALID_ARGUMENT);
            // SAFETY: the reduction belongs to this communicator.
            unsafe { nccl.red_op_destroy(op, *comm) }.unwrap();
            // SAFETY: as above.
            assert_eq!(code(unsafe { nccl.red_op_destroy(op, *comm) }), Code::INVALID_ARGUMENT);
        }
    });
}

#[test]
fn wrong_arguments_are_told() {
    on_ranks(1, |own| {
        let mut memory = [0f32];
        let to: *mut c_void = memory.as_mut_ptr().cast();
        let float = DataType::FLOAT32;
        let wrong = [
            // SAFETY: each is rejected before memory is accessed.
            unsafe { own.nccl.broadcast(to, to, 1, float, 1, own.comm, NONE) },
            // SAFETY: as above.
            unsafe { own.nccl.all_reduce(to, to, 1, DataType(99), RedOp::SUM, own.comm, NONE) },
            // SAFETY: as above.
            unsafe { own.nccl.all_reduce(to, to, 1, float, RedOp(77), own.comm, NONE) },
            // SAFETY: as above.
            unsafe { own.nccl.all_reduce(NONE, to, 1, float, RedOp::SUM, own.comm, NONE) },
            // SAFETY: as above.
            unsafe { own.nccl.all_reduce(to, to, usize::MAX, float, RedOp::SUM, own.comm, NONE) },
        ];
        for result in wrong {
            assert_eq!(code(result), Code::INVALID_ARGUMENT);
        }
        // SAFETY: nothing is sent.
        let _ = unsafe { own.nccl.all_reduce(NONE, NONE, 0, float, RedOp::SUM, own.comm, NONE) }.unwrap();
        let registered = own.nccl.mem_alloc(64).unwrap();
        // SAFETY: the memory lives until it is deregistered.
        let handle = unsafe { own.nccl.comm_register(own.comm, registered, 64) }.unwrap();
        // SAFETY: nothing uses it.
        unsafe { own.nccl.comm_deregister(own.comm, handle) }.unwrap();
        // SAFETY: as above.
        unsafe { own.nccl.mem_free(registered) }.unwrap();
    });
}

const INT64: DataType = DataType::INT64;
