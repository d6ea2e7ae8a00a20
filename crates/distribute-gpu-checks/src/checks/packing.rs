//! Packing many tensors into one bucket, and unpacking them.

use distribute_device::{Device, DeviceBuffer};

use crate::Result;
use crate::check::{Entry, Outcome, ensure, passed};
use crate::gpu::{Gpus, get, put};
use crate::values::{Random, same};

pub(super) const CHECKS: [Entry; 2] = [
    ("packing: tensors of all sizes go into a bucket and come out again", pack),
    ("packing: places that do not fit are refused", refuse),
];

fn pack(gpus: &Gpus) -> Result<Outcome> {
    let (device, stream) = gpus.first()?;
    let mut random = Random::fresh();
    let mut tensors_in_all = 0;
    for count in [1, 5, 167, 168, 169, 1500, 3000] {
        let largest = if count < 10 { 200_000 } else { 700 };
        let aligned = random.below(2) == 0;
        let mut offset = if aligned { 0 } else { random.below(100) };
        let mut tensors: Vec<(Vec<u8>, DeviceBuffer, usize)> = Vec::with_capacity(count);
        for _ in 0..count {
            let bytes = {
                let len = random.below(largest);
                random.bytes(len)
            };
            // Some start unaligned to 16 bytes, as views of larger tensors do.
            let shift = if aligned { 0 } else { random.below(9) };
            let whole = put(&device, &stream, &[&vec![0; shift], bytes.as_slice()].concat())?;
            let (buffer, len) = (whole.slice(shift..shift + bytes.len())?, bytes.len());
            tensors.push((bytes, buffer, offset));
            offset += if aligned { len.next_multiple_of(16) } else { len + random.below(5) };
        }
        let what = format!("{count} tensors, aligned {aligned}, seed {}", random.seed);
        let before = random.bytes(offset + 64);
        let bucket = put(&device, &stream, &before)?;
        let places: Vec<(&DeviceBuffer, usize)> = tensors.iter().map(|(_, buffer, offset)| (buffer, *offset)).collect();
        stream.pack(&places, &bucket)?;
        let mut expected = before.clone();
        for (bytes, _, offset) in &tensors {
            expected[*offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        same(&format!("packing {what}"), &get(&device, &stream, &bucket)?, &expected)?;

        let fresh = random.bytes(before.len());
        let bucket = put(&device, &stream, &fresh)?;
        stream.unpack(&bucket, &places)?;
        for (bytes, buffer, offset) in &tensors {
            let expected = &fresh[*offset..offset + bytes.len()];
            same(&format!("unpacking {what}"), &get(&device, &stream, buffer)?, expected)?;
        }
        same(&format!("the bucket of {what}"), &get(&device, &stream, &bucket)?, &fresh)?;
        tensors_in_all += count;
    }
    passed(format!("{tensors_in_all} tensors"))
}

fn refuse(gpus: &Gpus) -> Result<Outcome> {
    let (device, stream) = gpus.first()?;
    let (tensor, bucket) = (device.allocate(64)?, device.allocate(100)?);
    for places in [[0, 32], [40, 0], [0, 64]] {
        let [first, second] = places;
        let outcome = stream.pack(&[(&tensor, first), (&tensor, second)], &bucket);
        let problem = outcome.err().map_or(String::new(), |error| error.to_string());
        ensure(problem.contains("is to lie at byte"), || format!("places {places:?} were accepted: {problem:?}"))?;
    }
    passed("overlaps, disorder and ends outside")
}
