//! Groups of logical CPUs, which go through the host.

use std::time::Duration;

use distribute_device::{Devices, HostBuffer};

use super::*;
use crate::Options;

/// Runs `rank` on each of `count` ranks, each with a device and a stream.
fn on_ranks(count: usize, rank: impl Fn(&DeviceGroup, &dyn Stream) -> Result<()> + Sync) -> Vec<Result<()>> {
    let devices = Devices::with_cpus(count).unwrap();
    let options = Options { timeout: Duration::from_secs(20), ..Options::default() };
    let groups = ProcessGroup::local_with(count, &options).unwrap();
    std::thread::scope(|scope| {
        let run = |group: &ProcessGroup, name: String| {
            let device = devices.open(&name.parse().unwrap()).unwrap();
            let group = DeviceGroup::new(group, device, DeviceImplementation::Auto).unwrap();
            let stream = group.device().create_stream().unwrap();
            let outcome = rank(&group, &*stream);
            stream.synchronize(deadline()).unwrap();
            outcome
        };
        let named = groups.iter().enumerate();
        let handles: Vec<_> = named.map(|(at, group)| scope.spawn(move || run(group, format!("CPU:{at}")))).collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

fn deadline() -> std::time::Instant {
    std::time::Instant::now() + Duration::from_secs(20)
}

fn put(group: &DeviceGroup, stream: &dyn Stream, values: &[f32]) -> DeviceBuffer {
    let buffer = group.device().allocate(size_of_val(values)).unwrap();
    stream.copy_from_host(HostBuffer::from_slice(values).unwrap(), 0, &buffer).unwrap();
    buffer
}

fn get(group: &DeviceGroup, stream: &dyn Stream, buffer: &DeviceBuffer) -> Vec<f32> {
    let memory = group.device().allocate_host(buffer.len_bytes()).unwrap();
    let mut transfer = stream.copy_to_host(buffer, memory, 0).unwrap();
    transfer.wait(deadline()).unwrap().as_slice::<f32>().unwrap().to_vec()
}

fn values(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| ((at * 7 + rank * 3) % 101) as f32 - 50.0).collect()
}

#[test]
fn values_of_all_devices_are_reduced_in_chunks() {
    // Several chunks with a remainder, a few elements, and none.
    for count in [0, 1, 1000, 3 * (1 << 20) + 5] {
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max] {
            let outcome = on_ranks(3, |group, stream| {
                let buffer = put(group, stream, &values(group.rank().index(), count));
                group.all_reduce(&buffer, DType::F32, op, stream)?;
                let expected: Vec<f32> = (0..count)
                    .map(|at| {
                        let all = [0, 1, 2].map(|rank| ((at * 7 + rank * 3) % 101) as f32 - 50.0);
                        match op {
                            ReduceOp::Max => all.into_iter().fold(f32::MIN, f32::max),
                            ReduceOp::Mean => all.into_iter().sum::<f32>() / 3.0,
                            _ => all.into_iter().sum(),
                        }
                    })
                    .collect();
                assert!(get(group, stream, &buffer) == expected, "{op} of {count}");
                Ok(())
            });
            assert!(outcome.iter().all(Result::is_ok), "{outcome:?}");
        }
    }
}

#[test]
fn values_are_broadcast_gathered_and_scattered() {
    let outcome = on_ranks(3, |group, stream| {
        let rank = group.rank().index();
        let buffer = put(group, stream, &values(rank, 10));
        group.broadcast(&buffer, DType::F32, Rank(1), stream)?;
        assert_eq!(get(group, stream, &buffer), values(1, 10));

        let (mine, all) = (put(group, stream, &[rank as f32, 0.5]), put(group, stream, &[0.0; 6]));
        group.all_gather(&mine, &all, DType::F32, stream)?;
        assert_eq!(get(group, stream, &all), [0.0, 0.5, 1.0, 0.5, 2.0, 0.5]);

        group.reduce_scatter(&all, &mine, DType::F32, ReduceOp::Sum, stream)?;
        assert_eq!(get(group, stream, &mine), [3.0 * rank as f32, 1.5]);
        Ok(())
    });
    assert!(outcome.iter().all(Result::is_ok), "{outcome:?}");
}

#[test]
fn calls_that_differ_are_an_error_on_all_ranks() {
    let outcome = on_ranks(2, |group, stream| {
        let buffer = put(group, stream, &[1.0; 4]);
        let part = if group.rank() == Rank(0) { buffer.clone() } else { buffer.slice(0..8).unwrap() };
        group.all_reduce(&part, DType::F32, ReduceOp::Sum, stream)
    });
    for outcome in outcome {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("rank 0 called all_reduce #0 of 4 f32") && error.contains("of 2 f32"), "{error}");
    }
}

#[test]
fn sizes_that_do_not_fit_are_an_error() {
    let outcome = on_ranks(1, |group, stream| {
        let buffer = put(group, stream, &[1.0; 4]);
        let odd = buffer.slice(0..6).unwrap();
        let error = group.all_reduce(&odd, DType::F32, ReduceOp::Sum, stream).unwrap_err().to_string();
        assert!(error.contains("6 bytes"), "{error}");
        let error = group.all_reduce(&buffer, DType::F32, ReduceOp::BitOr, stream).unwrap_err().to_string();
        assert!(error.contains("integers"), "{error}");
        let error = group.broadcast(&buffer, DType::F32, Rank(1), stream).unwrap_err();
        assert!(matches!(error, Error::RankOutside { given: 1, .. }));
        let part = buffer.slice(0..8).unwrap();
        assert!(matches!(group.all_gather(&part, &buffer, DType::F32, stream), Err(Error::Length { .. })));
        Ok(())
    });
    assert!(outcome.iter().all(Result::is_ok), "{outcome:?}");
}

#[test]
fn what_was_chosen_is_said() {
    let outcome = on_ranks(2, |group, _| {
        assert_eq!(group.chosen(), "collectives of devices by the host's memory: CPU:0 is not a GPU");
        Ok(())
    });
    assert!(outcome.iter().all(Result::is_ok), "{outcome:?}");
}

#[test]
fn tensors_are_reduced_in_buckets_as_they_come() {
    use crate::{BucketPlan, FusedTensor};
    let lengths = [5usize, 1000, 0, 3, 70_000];
    let outcome = on_ranks(2, |group, stream| {
        let rank = group.rank().index();
        let layers: Vec<FusedTensor> = lengths.iter().map(|len| FusedTensor::new(DType::F32, [*len])).collect();
        let plan = BucketPlan::new(&layers, &[4, 3, 2, 1, 0], 4000);
        assert_eq!(plan.buckets().len(), 3);
        let fused = Arc::new(FusedDeviceAllReduce::new(group, plan, ReduceOp::Mean)?);
        for round in 0..3 {
            let mut step = fused.begin();
            // Ranks push their tensors in different orders.
            let order = if rank == 0 { [4, 3, 2, 1, 0] } else { [2, 4, 0, 3, 1] };
            for index in order {
                let tensor = put(group, stream, &vec![(rank + index + round) as f32; lengths[index]]);
                assert!(!step.has(index));
                step.push(group, index, tensor, stream)?;
                assert!(step.has(index));
            }
            for (index, reduced) in step.finish(stream)? {
                let expected = (index + round) as f32 + 0.5;
                assert_eq!(get(group, stream, &reduced), vec![expected; lengths[index]], "{index} in {round}");
            }
        }
        Ok(())
    });
    assert!(outcome.iter().all(Result::is_ok), "{outcome:?}");
}

#[test]
fn tensors_that_do_not_fit_a_plan_are_sentences() {
    use crate::{BucketPlan, FusedTensor};
    let outcome = on_ranks(1, |group, stream| {
        let layers = [FusedTensor::new(DType::F32, [2]), FusedTensor::new(DType::F32, [2])];
        let fused = Arc::new(FusedDeviceAllReduce::new(group, BucketPlan::new(&layers, &[1, 0], 1), ReduceOp::Sum)?);
        let mut step = fused.begin();
        let two = put(group, stream, &[1.0, 2.0]);
        let refused = |outcome: Result<()>| outcome.unwrap_err().to_string();
        assert!(refused(step.push(group, 2, two.clone(), stream)).contains("no bucket"));
        let short = two.slice(0..4).unwrap();
        assert!(refused(step.push(group, 1, short, stream)).contains("4 bytes, planned were 8"));
        step.push(group, 1, two.clone(), stream)?;
        assert!(refused(step.push(group, 1, two, stream)).contains("given before"));
        assert!(step.finish(stream).unwrap_err().to_string().contains("has not come"));
        Ok(())
    });
    assert!(outcome.iter().all(Result::is_ok), "{outcome:?}");
}

#[test]
fn a_bucket_is_packed_after_the_streams_of_all_its_tensors() {
    use crate::{BucketPlan, FusedTensor};
    let outcome = on_ranks(1, |group, stream| {
        let layers = [FusedTensor::new(DType::F32, [2]), FusedTensor::new(DType::F32, [2])];
        let plan = BucketPlan::new(&layers, &[0, 1], 1 << 20);
        let fused = Arc::new(FusedDeviceAllReduce::new(group, plan, ReduceOp::Sum)?);
        // The stream of the first tensor is still computing it.
        let busy = group.device().create_stream().unwrap();
        let computes = || {
            std::thread::sleep(Duration::from_millis(200));
            Ok(())
        };
        let late = put(group, stream, &[0.0; 2]);
        stream.synchronize(deadline()).unwrap();
        busy.launch_host(Box::new(computes)).unwrap();
        busy.copy_from_host(HostBuffer::from_slice(&[1.0f32, 2.0]).unwrap(), 0, &late).unwrap();
        let mut step = fused.begin();
        step.push(group, 0, late, &*busy)?;
        step.push(group, 1, put(group, stream, &[3.0, 4.0]), stream)?;
        let sums: Vec<Vec<f32>> = step.finish(stream)?.iter().map(|(_, sum)| get(group, stream, sum)).collect();
        assert_eq!(sums, [[1.0, 2.0], [3.0, 4.0]]);
        Ok(())
    });
    assert!(outcome.iter().all(Result::is_ok), "{outcome:?}");
}

#[test]
fn buckets_of_other_tensors_are_a_mismatch() {
    use crate::{BucketPlan, FusedTensor};
    let plan = |lens: [usize; 2], order: [usize; 2]| {
        BucketPlan::new(&lens.map(|len| FusedTensor::new(DType::F32, [len])), &order, 1 << 20)
    };
    let differing = [[plan([4, 4], [0, 1]), plan([4, 4], [1, 0])], [plan([4, 8], [0, 1]), plan([8, 4], [0, 1])]];
    for plans in differing {
        let outcome = on_ranks(2, |group, stream| {
            let plan = plans[group.rank().index()].clone();
            let lens: Vec<usize> = plan.tensors().iter().map(FusedTensor::len).collect();
            let fused = Arc::new(FusedDeviceAllReduce::new(group, plan, ReduceOp::Sum)?);
            let mut step = fused.begin();
            for (index, len) in lens.into_iter().enumerate() {
                step.push(group, index, put(group, stream, &vec![1.0; len]), stream)?;
            }
            step.finish(stream).map(drop)
        });
        assert!(outcome.iter().all(|outcome| matches!(outcome, Err(Error::Mismatch { .. }))), "{outcome:?}");
    }
}

#[test]
fn calls_with_different_tags_are_a_mismatch() {
    let alike = on_ranks(2, |group, stream| {
        let [part, whole] = [put(group, stream, &[1.0]), put(group, stream, &[0.0; 2])];
        group.all_reduce_tagged(&part, DType::F32, ReduceOp::Sum, 7, stream)?;
        group.all_gather_tagged(&part, &whole, DType::F32, 8, stream)?;
        assert_eq!(get(group, stream, &whole), [2.0; 2]);
        Ok(())
    });
    assert!(alike.iter().all(Result::is_ok), "{alike:?}");
    for gathers in [false, true] {
        let outcome = on_ranks(2, |group, stream| {
            let ([part, whole], tag) = ([1, 2].map(|len| put(group, stream, &vec![1.0; len])), group.rank().0);
            match gathers {
                true => group.all_gather_tagged(&part, &whole, DType::F32, tag, stream),
                false => group.all_reduce_tagged(&part, DType::F32, ReduceOp::Sum, tag, stream),
            }
        });
        assert!(outcome.iter().all(|outcome| matches!(outcome, Err(Error::Mismatch { .. }))), "{outcome:?}");
    }
}

#[test]
fn memory_and_streams_of_another_device_are_an_error_that_names_both() {
    let outcome = on_ranks(1, |group, stream| {
        let devices = Devices::with_cpus(2).unwrap();
        let other = devices.open(&"CPU:1".parse().unwrap()).unwrap();
        let (own, foreign) = (put(group, stream, &[1.0]), other.allocate(4).unwrap());
        let told = |outcome: Result<()>, what: &str| {
            let error = outcome.unwrap_err().to_string();
            let names = [what, "CPU:1", "CPU:0", "give buffers and a stream of the group's device"];
            assert!(names.iter().all(|name| error.contains(name)), "{error}");
        };
        told(group.all_reduce(&foreign, DType::F32, ReduceOp::Sum, stream), "this buffer");
        told(group.all_gather(&own, &foreign, DType::F32, stream), "this buffer");
        told(group.all_reduce(&own, DType::F32, ReduceOp::Sum, &*other.create_stream().unwrap()), "this stream");
        group.all_reduce(&own, DType::F32, ReduceOp::Sum, stream)
    });
    assert!(outcome.iter().all(Result::is_ok), "{outcome:?}");
}
