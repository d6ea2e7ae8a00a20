use std::io::Write as _;
use std::sync::Arc;

use ::parquet::arrow::ArrowWriter;
use ::parquet::basic::Compression as ColumnCompression;
use ::parquet::file::properties::WriterProperties;
use arrow_array::{ArrayRef, Float32Array, Int64Array, RecordBatch, StringArray};
use distribute_testkit::replay;
use flate2::write::{GzEncoder, ZlibEncoder};

use super::*;
use crate::read::{Example, Feature, TfRecordWriter};

fn example() -> Vec<u8> {
    let features = [
        ("a", Feature::Float(vec![0.5, f32::NAN])),
        ("label", Feature::Int64(vec![3, -1])),
        ("", Feature::Bytes(vec![b"x".to_vec(), Vec::new()])),
    ];
    Example::from(features).encode()
}

#[test]
fn replay_tfrecord() {
    let mut writer = TfRecordWriter::new(Vec::new());
    [&example()[..], b"", b"other"].iter().for_each(|record| writer.write(record).unwrap());
    let plain = writer.finish().unwrap();
    let mut gzip = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&plain).unwrap();
    let mut zlib = ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    zlib.write_all(&plain).unwrap();
    let zstd = zstd::encode_all(&plain[..], 1).unwrap();
    let messages = [plain, gzip.finish().unwrap(), zlib.finish().unwrap(), zstd, example()];
    replay("tfrecord", tfrecord, &messages, 500);
}

#[test]
fn replay_idx() {
    let array = [&[0, 0, 8, 2][..], &[0, 0, 0, 2], &[0, 0, 0, 3], &[1, 2, 3, 4, 5, 6]].concat();
    let empty = [&[0, 0, 8, 1][..], &[0; 4]].concat();
    replay("idx", idx, &[array, empty], 2000);
}

#[test]
fn replay_webdataset() {
    let mut tar = tar::Builder::new(Vec::new());
    let files = [("t/0001.JPG", "picture"), ("t/0001.cls", "7"), ("t/0002.cls", "8"), ("x", "")];
    for (path, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_cksum();
        tar.append_data(&mut header, path, content.as_bytes()).unwrap();
    }
    replay("webdataset", webdataset, &[tar.into_inner().unwrap()], 150);
}

#[test]
fn replay_csv() {
    let messages = [&b"x,y,kind\n0.2,14,setosa\n\"1e3\",-1,\"a\n\"\"b\"\"\"\n"[..], b"a;b\nc;\"d;e\"\n"];
    replay("csv", csv, &messages.map(<[u8]>::to_vec), 1500);
}

#[test]
fn replay_safetensors_file() {
    let bytes = [1u8; 8];
    let view = |dtype, shape, data| safetensors::tensor::TensorView::new(dtype, shape, data).unwrap();
    let tensors = [
        ("a", view(safetensors::Dtype::F32, vec![2], &bytes[..])),
        ("b", view(safetensors::Dtype::BOOL, vec![1, 1], &bytes[..1])),
        ("c", view(safetensors::Dtype::BF16, vec![0, 9], &[])),
    ];
    replay("safetensors_file", safetensors_file, &[safetensors::serialize(tensors, None).unwrap()], 2000);
}

#[test]
fn replay_parquet() {
    let columns: [(&str, ArrayRef, bool); 3] = [
        ("a", Arc::new(Float32Array::from(vec![Some(1.0), None, Some(2.5)])), true),
        ("b", Arc::new(Int64Array::from(vec![1, -1, 1 << 40])), true),
        ("c", Arc::new(StringArray::from(vec![Some("x"), Some("ü"), None])), true),
    ];
    let batch = RecordBatch::try_from_iter_with_nullable(columns).unwrap();
    let parquet = |compression| {
        let properties = WriterProperties::builder().set_compression(compression).build();
        let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
        writer.write(&batch).unwrap();
        writer.into_inner().unwrap()
    };
    let mut arrow = arrow_ipc::writer::FileWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    arrow.write(&batch).unwrap();
    let arrow = arrow.into_inner().unwrap();
    let messages = [parquet(ColumnCompression::UNCOMPRESSED), parquet(ColumnCompression::SNAPPY), arrow];
    replay("parquet", super::parquet, &messages, 300);
}
