//! Messages between tasks: encoding and decoding, and the configuration of a cluster.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed benchmark")]

use std::hint::black_box;

use bytes::Bytes;
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput};
use distribute_cluster::TfConfigResolver;
use distribute_cluster::grpc::{GrpcMessage, Inbox, body_of, encode};
use futures_util::FutureExt;

/// Has the fields of a parameter server's `Elements`, which are answered to a worker that pulls a shard.
#[derive(Clone, PartialEq, prost::Message)]
struct Elements {
    #[prost(uint64, tag = "1")]
    incarnation: u64,
    #[prost(uint32, tag = "2")]
    shard: u32,
    #[prost(uint64, tag = "3")]
    version: u64,
    #[prost(uint32, tag = "4")]
    dtype: u32,
    #[prost(bytes = "bytes", tag = "15")]
    payload: Bytes,
}

impl GrpcMessage for Elements {
    fn take_payload(&mut self) -> Bytes {
        std::mem::take(&mut self.payload)
    }
}

/// Has the fields of a request without a payload: the shards that a worker asks for.
#[derive(Clone, PartialEq, prost::Message)]
struct PullRequest {
    #[prost(uint64, tag = "1")]
    session: u64,
    #[prost(uint64, tag = "2")]
    incarnation: u64,
    #[prost(message, repeated, tag = "3")]
    wanted: Vec<Wanted>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Wanted {
    #[prost(uint32, tag = "1")]
    shard: u32,
    #[prost(uint64, tag = "2")]
    version: u64,
}

impl GrpcMessage for PullRequest {}

fn messages(criterion: &mut Criterion) {
    let request = PullRequest {
        session: 1 << 40,
        incarnation: 1 << 50,
        wanted: (0..64).map(|shard| Wanted { shard, version: 1 << 20 }).collect(),
    };
    message(criterion, "pull request of 64 shards", request);
    for (name, len) in [("elements, 1 KiB", 1 << 10), ("elements, 1 MiB", 1 << 20)] {
        let payload = vec![7u8; len].into();
        message(criterion, name, Elements { incarnation: 1 << 50, shard: 3, version: 1 << 20, dtype: 1, payload });
    }
}

/// A payload is not copied, so that its bytes per second would say nothing.
fn message<M: GrpcMessage + Clone>(criterion: &mut Criterion, name: &str, message: M) {
    let mut group = criterion.benchmark_group("grpc message");
    group.bench_function(BenchmarkId::new("encode", name), |bencher| {
        bencher.iter_batched(|| message.clone(), encode, BatchSize::SmallInput);
    });
    group.bench_function(BenchmarkId::new("decode", name), |bencher| {
        let inbox = || Inbox::new(body_of([message.clone()]), 1 << 30);
        bencher.iter_batched_ref(
            inbox,
            |inbox| inbox.one::<M>().now_or_never().unwrap().unwrap(),
            BatchSize::SmallInput,
        );
    });
}

fn cluster(criterion: &mut Criterion) {
    let workers: Vec<String> = (0..64).map(|worker| format!("\"10.0.0.{worker}:2222\"")).collect();
    let workers = workers.join(",");
    let json = format!(r#"{{"cluster":{{"worker":[{workers}]}},"task":{{"type":"worker","index":7}}}}"#);
    let mut group = criterion.benchmark_group("cluster");
    group.throughput(Throughput::Bytes(json.len() as u64));
    group.bench_function("TF_CONFIG of 64 workers", |bencher| {
        bencher.iter(|| TfConfigResolver::from_json(black_box(&json)).unwrap());
    });
}

distribute_benches::benchmarks!(messages, cluster);
