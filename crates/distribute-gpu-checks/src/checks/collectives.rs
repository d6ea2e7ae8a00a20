//! Collectives of devices: on parts of one GPU and on several, by kernels and through the host.

use std::sync::Arc;
use std::time::Duration;

use distribute_collectives::{
    BucketPlan, Compression, DeviceGroup, DeviceImplementation, FusedDeviceAllReduce, FusedTensor, Options,
    ProcessGroup, Rank, ReduceOp,
};
use distribute_device::cuda::{CudaDevice, CudaStream};
use distribute_device::{DType, Device, DeviceBuffer, Stream};

use crate::check::{Entry, Outcome, ensure, passed};
use crate::gpu::{Gpus, deadline, get, put};
use crate::values::{Random, compare, compare_terms, from_wide, integers, same, wide, wrapped};
use crate::{Error, Result};

pub(super) const CHECKS: [Entry; 7] = [
    ("collectives: parts of one GPU reduce by kernels", by_kernels),
    ("collectives: parts of one GPU reduce through the host", by_host),
    ("collectives: several GPUs reduce by kernels", several),
    ("collectives: values are broadcast, gathered and scattered", others),
    ("collectives: tensors are reduced in buckets as they come", buckets),
    ("collectives: buckets are sent in 16 bits, and nothing is lost over many steps", compressed),
    ("collectives: calls that differ are an error on all ranks", differing),
];

/// Runs `rank` on every device, as a rank of a group of its own.
pub(super) fn on_ranks<R: Send>(
    devices: &[Arc<CudaDevice>],
    asked: DeviceImplementation,
    rank: impl Fn(&DeviceGroup, &CudaDevice, &CudaStream) -> Result<R> + Sync,
) -> Result<Vec<Result<R>>> {
    let options = Options::default().timeout(Duration::from_secs(60));
    let groups = ProcessGroup::local_with(devices.len(), &options)?;
    Ok(std::thread::scope(|scope| {
        let run = |group: &ProcessGroup, device: &Arc<CudaDevice>| {
            let group = DeviceGroup::new(group, device.clone() as Arc<dyn Device>, asked)?;
            let stream = device.stream()?;
            let outcome = rank(&group, device, &stream);
            // Enqueued work must end before the group does.
            outcome.and_then(|outcome| Ok(stream.synchronize(deadline()).map(|()| outcome)?))
        };
        let ranks: Vec<_> =
            groups.iter().zip(devices).map(|(group, device)| scope.spawn(move || run(group, device))).collect();
        let lost = || Err(Error::Wrong("a rank panicked".to_owned()));
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| lost())).collect()
    }))
}

/// All-reduces random values of every type and operation.
pub(super) fn reduce(gpus: &Gpus, devices: &[Arc<CudaDevice>], asked: DeviceImplementation, way: &str) -> Result<()> {
    let large = match asked {
        // Several chunks of each rank.
        DeviceImplementation::Host => LARGE,
        // A simulated GPU works on elements one after another.
        _ if gpus.are_simulated() => LARGE / 20 / devices.len(),
        _ => LARGE / devices.len(),
    };
    for (dtype, op, count) in [
        (DType::F32, ReduceOp::Sum, 1),
        (DType::F32, ReduceOp::Mean, 4099),
        (DType::F32, ReduceOp::Sum, large),
        (DType::F64, ReduceOp::Product, 1000),
        (DType::F16, ReduceOp::Sum, 777),
        (DType::BF16, ReduceOp::Mean, 30_000),
        (DType::BF16, ReduceOp::Max, 1),
        (DType::I8, ReduceOp::Sum, 1001),
        (DType::U8, ReduceOp::Min, 63),
        (DType::I32, ReduceOp::Max, 5000),
        (DType::U32, ReduceOp::Sum, 4),
        (DType::I64, ReduceOp::Sum, 3000),
        (DType::U64, ReduceOp::Product, 17),
        (DType::F32, ReduceOp::Sum, 0),
    ] {
        let mut random = Random::fresh();
        let inputs: Vec<Vec<u8>> = devices.iter().map(|_| random.elements(dtype, count)).collect();
        let what = format!("{op} of {} × {count} {dtype} by {way}, seed {}", devices.len(), random.seed);
        let results = on_ranks(devices, asked, |group, device, stream| {
            ensure(group.chosen().contains(way), || format!("{} was chosen", group.chosen()))?;
            let values = put(device, stream, &inputs[group.rank().index()])?;
            // Twice, since state left by one call must not disturb the next.
            let again = put(device, stream, &inputs[group.rank().index()])?;
            group.all_reduce(&values, dtype, op, stream)?;
            group.all_reduce(&again, dtype, op, stream)?;
            let (first, second) = (get(device, stream, &values)?, get(device, stream, &again)?);
            same(&format!("{what}, repeated"), &second, &first)?;
            Ok(first)
        })?;
        let results = results.into_iter().collect::<Result<Vec<Vec<u8>>>>()?;
        for result in &results {
            same(&format!("{what}, on two ranks"), result, &results[0])?;
        }
        check(&what, dtype, op, &inputs, &results[0])?;
    }
    Ok(())
}

/// The number of elements of the largest values.
const LARGE: usize = 2_500_000;

fn check(what: &str, dtype: DType, op: ReduceOp, inputs: &[Vec<u8>], result: &[u8]) -> Result<()> {
    if dtype.is_float() {
        let inputs: Vec<Vec<f64>> = inputs.iter().map(|bytes| wide(dtype, bytes)).collect();
        let reduced = |of: fn(f64) -> f64| -> Vec<f64> {
            let columns = (0..inputs[0].len()).map(|at| inputs.iter().map(move |input| of(input[at])));
            let reduced = columns.map(|column| match op {
                ReduceOp::Product => column.product(),
                ReduceOp::Max => column.fold(f64::NEG_INFINITY, f64::max),
                ReduceOp::Mean => column.sum::<f64>() / inputs.len() as f64,
                _ => column.sum(),
            });
            reduced.collect()
        };
        let expected = reduced(|value| value);
        let terms = if matches!(op, ReduceOp::Sum | ReduceOp::Mean) { reduced(f64::abs) } else { expected.clone() };
        return compare_terms(what, dtype, result, &expected, &terms);
    }
    let inputs: Vec<Vec<i128>> = inputs.iter().map(|bytes| integers(dtype, bytes)).collect();
    for (at, found) in integers(dtype, result).into_iter().enumerate() {
        let column = inputs.iter().map(|input| input[at]);
        let expected = match op {
            ReduceOp::Product => column.fold(1i128, |a, b| wrapped(dtype, a.wrapping_mul(b))),
            ReduceOp::Max => column.max().unwrap_or(0),
            ReduceOp::Min => column.min().unwrap_or(0),
            _ => column.fold(0, |a, b| wrapped(dtype, a + b)),
        };
        ensure(found == expected, || format!("{what}: element {at} is {found}, not {expected}"))?;
    }
    Ok(())
}

fn by_kernels(gpus: &Gpus) -> Result<Outcome> {
    for count in [1, 2, 4, 18] {
        reduce(gpus, &gpus.on_first(count, None)?, DeviceImplementation::Auto, "kernels")?;
    }
    passed("1, 2, 4 and 18 ranks")
}

fn by_host(gpus: &Gpus) -> Result<Outcome> {
    for count in [1, 3] {
        reduce(gpus, &gpus.on_first(count, None)?, DeviceImplementation::Host, "the host's memory")?;
    }
    passed("1 and 3 ranks")
}

fn several(gpus: &Gpus) -> Result<Outcome> {
    let Some(devices) = gpus.on_each(2)? else {
        return Ok(Outcome::Skipped("there is one GPU; two are needed".to_owned()));
    };
    let all = gpus.on_each(gpus.infos().len())?.unwrap_or(devices);
    reduce(gpus, &all, DeviceImplementation::Kernels, "kernels")?;
    passed(format!("{} GPUs", all.len()))
}

fn others(gpus: &Gpus) -> Result<Outcome> {
    let mut groups = vec![(gpus.on_first(3, None)?, DeviceImplementation::Kernels)];
    groups.push((gpus.on_first(3, None)?, DeviceImplementation::Host));
    groups.extend(gpus.on_each(2)?.map(|devices| (devices, DeviceImplementation::Kernels)));
    for (devices, asked) in &groups {
        moves(devices, *asked)?;
    }
    passed(format!("{} arrangements", groups.len()))
}

/// Runs broadcast, all-gather and reduce-scatter.
pub(super) fn moves(devices: &[Arc<CudaDevice>], asked: DeviceImplementation) -> Result<()> {
    const COUNT: usize = 5001;
    let mut random = Random::fresh();
    let inputs: Vec<Vec<u8>> = devices.iter().map(|_| random.elements(DType::F32, COUNT)).collect();
    let ranks = devices.len();
    let wholes: Vec<Vec<u8>> = devices.iter().map(|_| random.elements(DType::F32, COUNT * ranks)).collect();
    let outcome = on_ranks(devices, asked, |group, device, stream| {
        let rank = group.rank().index();
        let root = Rank(1);
        let values = put(device, stream, &inputs[rank])?;
        group.broadcast(&values, DType::F32, root, stream)?;
        same("a broadcast", &get(device, stream, &values)?, &inputs[1])?;

        let (mine, all) = (put(device, stream, &inputs[rank])?, device.allocate(4 * COUNT * ranks)?);
        group.all_gather(&mine, &all, DType::F32, stream)?;
        same("an all-gather", &get(device, stream, &all)?, &inputs.concat())?;

        let (whole, part) = (put(device, stream, &wholes[rank])?, device.allocate(4 * COUNT)?);
        group.reduce_scatter(&whole, &part, DType::F32, ReduceOp::Sum, stream)?;
        let own = |bytes: &Vec<u8>| wide(DType::F32, &bytes[rank * 4 * COUNT..(rank + 1) * 4 * COUNT]);
        let parts: Vec<Vec<f64>> = wholes.iter().map(own).collect();
        let expected: Vec<f64> = (0..COUNT).map(|at| parts.iter().map(|part| part[at]).sum()).collect();
        compare("a reduce-scatter", DType::F32, &get(device, stream, &part)?, &expected)?;
        same("its input", &get(device, stream, &whole)?, &wholes[rank])
    })?;
    outcome.into_iter().collect()
}

fn buckets(gpus: &Gpus) -> Result<Outcome> {
    const LENGTHS: [usize; 5] = [5, 1000, 0, 3, 70_000];
    let devices = gpus.on_first(3, None)?;
    for asked in [DeviceImplementation::Kernels, DeviceImplementation::Host] {
        let outcomes = on_ranks(&devices, asked, |group, device, stream| {
            let rank = group.rank().index();
            let layers: Vec<FusedTensor> = LENGTHS.iter().map(|len| FusedTensor::new(DType::F32, [*len])).collect();
            let plan = BucketPlan::new(&layers, &[4, 3, 2, 1, 0], 4000);
            let fused = Arc::new(FusedDeviceAllReduce::new(group, plan, ReduceOp::Sum)?);
            for round in 0..5 {
                let mut step = fused.begin();
                for index in if rank == 0 { [4, 3, 2, 1, 0] } else { [2, 4, 0, 3, 1] } {
                    let values = from_wide(DType::F32, &vec![(rank + index + round) as f64; LENGTHS[index]]);
                    let tensor = put(device, stream, &values)?;
                    step.push(group, index, tensor, stream)?;
                }
                for (index, reduced) in step.finish(stream)? {
                    let expected = vec![(3 * (index + round) + 3) as f64; LENGTHS[index]];
                    let what = format!("tensor {index} in round {round} on rank {rank}");
                    same(&what, &get(device, stream, &reduced)?, &from_wide(DType::F32, &expected))?;
                }
            }
            Ok(())
        })?;
        outcomes.into_iter().collect::<Result<()>>()?;
    }
    passed("five rounds, by kernels and through the host")
}

/// Compares buckets in 16 bits with sums of rounded values, bit for bit; between them a step is taken back.
fn compressed(gpus: &Gpus) -> Result<Outcome> {
    const LENGTHS: [usize; 3] = [5, 1000, 3001];
    let devices = gpus.on_first(2, None)?;
    let random = Random::fresh();
    let (seed, same_random) = (random.seed, |seed| Random::with(seed));
    for (asked, compression, short) in [
        (DeviceImplementation::Kernels, Compression::F16, DType::F16),
        (DeviceImplementation::Kernels, Compression::Bf16, DType::BF16),
        (DeviceImplementation::Host, Compression::Bf16, DType::BF16),
    ] {
        let outcomes = on_ranks(&devices, asked, |group, device, stream| {
            let of = |index: usize, dtype| FusedTensor::new(dtype, [LENGTHS[index]]);
            // Tensors of f64 are sent as they are.
            let layers = [of(0, DType::F32), of(1, DType::F32), of(2, DType::F32), of(1, DType::F64)];
            let plan = BucketPlan::new(&layers, &[3, 2, 1, 0], 4000);
            let fused = FusedDeviceAllReduce::new(group, plan, ReduceOp::Sum)?.compress(&compression)?;
            let fused = Arc::new(fused);
            // Every rank draws the values of both.
            let mut random = same_random(seed);
            let mut errors = vec![LENGTHS.map(|len| vec![0.0f32; len]); 2];
            for round in 0..6 {
                let all: Vec<Vec<Vec<u8>>> = (0..2)
                    .map(|_| layers.iter().map(|layer| random.elements(layer.dtype, layer.len())).collect())
                    .collect();
                let mut sent = [Vec::new(), Vec::new()];
                let before = errors.clone();
                for (rank, sent) in sent.iter_mut().enumerate() {
                    for (index, errors) in errors[rank].iter_mut().enumerate() {
                        let values = wide(DType::F32, &all[rank][index]);
                        let values: Vec<f32> = values.iter().zip(&*errors).map(|(x, e)| e + *x as f32).collect();
                        let rounded =
                            wide(short, &from_wide(short, &values.iter().copied().map(f64::from).collect::<Vec<_>>()));
                        errors.iter_mut().zip(&values).zip(&rounded).for_each(|((e, x), r)| *e = x - *r as f32);
                        sent.push(rounded);
                    }
                }
                let mut step = fused.begin();
                for index in [3, 2, 1, 0] {
                    step.push(group, index, put(device, stream, &all[group.rank().index()][index])?, stream)?;
                }
                for (index, reduced) in step.finish(stream)? {
                    let what = format!("tensor {index} in {short}, round {round}, seed {seed}");
                    let found = get(device, stream, &reduced)?;
                    let expected: Vec<f64> = match index {
                        3 => [0, 1]
                            .map(|rank: usize| wide(DType::F64, &all[rank][3]))
                            .iter()
                            .fold(vec![0.0; LENGTHS[1]], |sum, own| sum.iter().zip(own).map(|(a, b)| a + b).collect()),
                        _ => sent[0][index].iter().zip(&sent[1][index]).map(|(a, b)| a + b).collect(),
                    };
                    let expected = match index {
                        3 => from_wide(DType::F64, &expected),
                        _ => from_wide(DType::F32, &wide(short, &from_wide(short, &expected))),
                    };
                    same(&what, &found, &expected)?;
                }
                if round % 2 == 1 {
                    fused.take_back();
                    // A second time without a step changes nothing.
                    fused.take_back();
                    errors = before;
                }
            }
            Ok(())
        })?;
        outcomes.into_iter().collect::<Result<()>>()?;
    }
    let refused = on_ranks(&devices, DeviceImplementation::Kernels, |group, _, _| {
        let plan = || BucketPlan::new(&[FusedTensor::new(DType::F32, [1])], &[0], 1);
        let sum = FusedDeviceAllReduce::new(group, plan(), ReduceOp::Sum)?.compress(&Compression::TopK(0.5));
        let mean = FusedDeviceAllReduce::new(group, plan(), ReduceOp::Mean)?.compress(&Compression::Bf16);
        Ok([sum, mean].map(|outcome| outcome.err().map_or(String::new(), |error| error.to_string())))
    })?;
    for told in refused.into_iter().collect::<Result<Vec<_>>>()?.concat() {
        ensure(told.starts_with("compression"), || format!("a compression without kernels: {told:?}"))?;
    }
    passed("f16 and bf16, by kernels and through the host, six steps of which three are taken back")
}

fn differing(gpus: &Gpus) -> Result<Outcome> {
    let devices = gpus.on_first(2, None)?;
    for asked in [DeviceImplementation::Kernels, DeviceImplementation::Host] {
        let outcomes = on_ranks(&devices, asked, |group, device, stream| {
            let values: DeviceBuffer = device.allocate(64)?;
            let dtype = if group.rank() == Rank(0) { DType::F32 } else { DType::I32 };
            Ok(group.all_reduce(&values, dtype, ReduceOp::Sum, stream)?)
        })?;
        for outcome in outcomes {
            let told = outcome.err().map_or(String::new(), |error| error.to_string());
            ensure(told.contains("f32") && told.contains("i32"), || format!("{asked:?}: {told:?}"))?;
        }
    }
    let refused = on_ranks(&devices, DeviceImplementation::Kernels, |group, device, stream| {
        let values: DeviceBuffer = device.allocate(64)?;
        Ok(group.all_reduce(&values, DType::U32, ReduceOp::BitOr, stream)?)
    })?;
    for outcome in refused {
        let told = outcome.err().map_or(String::new(), |error| error.to_string());
        ensure(told.contains("no kernel for"), || format!("a reduction without a kernel: {told:?}"))?;
    }
    passed("types that differ, and a reduction that no kernel does")
}
