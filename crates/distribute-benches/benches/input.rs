//! The stages of input pipelines, and TFRecord files with checksums and gzip.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed benchmark")]

use std::fs::File;
use std::path::Path;

use criterion::{Criterion, Throughput};
use distribute_input::read::{Compression, ReadOptions, TfRecordWriter, TfRecords};
use distribute_input::{Array, BoxError, Dataset, Parallel};

/// Elements of a pass.
const ELEMENTS: i64 = 10_000;
const BATCH: usize = 64;

fn stages(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("stage over 10,000 elements");
    group.throughput(Throughput::Elements(ELEMENTS as u64));
    // Not the rows of an array, which stages move as numbers.
    let rows = || Dataset::from_generator(|| (0..ELEMENTS).map(|at| Ok(Array::from(vec![at as f32; 16]))));
    let stages: [(&str, Dataset<Array<f32>>); 8] = [
        ("none", rows()),
        ("map", rows().map(double)),
        ("par_map", rows().par_map(Parallel::cores(), double)),
        ("shuffle", rows().shuffle(1000, 42)),
        ("batch", rows().batch(BATCH)),
        ("batch, prefetch", rows().batch(BATCH).prefetch(2)),
        ("batch, unbatch", rows().batch(BATCH).unbatch()),
        ("rows, shuffle, batch", Dataset::from_tensor_slices(table()).shuffle(1000, 42).batch(BATCH)),
    ];
    for (name, data) in stages {
        let elements = if name.contains("batch") && !name.ends_with("unbatch") {
            (ELEMENTS as usize).div_ceil(BATCH)
        } else {
            ELEMENTS as usize
        };
        group.bench_function(name, |bencher| bencher.iter(|| assert_eq!(count(&data), elements)));
    }
}

fn double(row: Array<f32>) -> Result<Array<f32>, BoxError> {
    Ok(Array::from(row.as_slice().iter().map(|value| value * 2.0).collect::<Vec<f32>>()))
}

fn table() -> Array<f32> {
    Array::new([ELEMENTS as usize, 16], vec![1.0; ELEMENTS as usize * 16]).unwrap()
}

fn files(criterion: &mut Criterion) {
    const RECORDS: usize = 20_000;
    const BYTES: usize = 512;
    let mut group = criterion.benchmark_group("TFRecord of 20,000 × 512 B");
    group.throughput(Throughput::Bytes((RECORDS * BYTES) as u64)).sample_size(20);
    let folder = tempfile::tempdir().unwrap();
    for (name, compression) in [("checksums", Compression::None), ("checksums, gzip", Compression::Gzip)] {
        let path = folder.path().join(name);
        write(&path, RECORDS, BYTES, compression);
        let data = Dataset::from_files([&path]).read(TfRecords, ReadOptions::default());
        group.bench_function(name, |bencher| bencher.iter(|| assert_eq!(count(&data), RECORDS)));
    }
}

/// Writes records of random letters, 16 of them, of which gzip removes about half the bytes.
fn write(path: &Path, records: usize, bytes: usize, compression: Compression) {
    let mut writer = TfRecordWriter::compressed(File::create(path).unwrap(), compression);
    let mut number = 1u32;
    for _ in 0..records {
        let letters = std::iter::repeat_with(|| {
            number = number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            b'a' + (number >> 28) as u8
        });
        writer.write(&letters.take(bytes).collect::<Vec<u8>>()).unwrap();
    }
    writer.finish().unwrap();
}

fn count<T: Send + 'static>(data: &Dataset<T>) -> usize {
    data.iter().try_fold(0, |count, item| item.map(|_| count + 1)).unwrap()
}

distribute_benches::benchmarks!(stages, files);
