//! Checkpoints of 64 MiB: written to a temporary folder and synced, and restored with their checksums compared.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed benchmark")]

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use distribute_strategy::{MirroredStrategy, Strategy};
use distribute_train::BoxError;
use distribute_train::checkpoint::{CheckpointManager, Checkpointed, Snapshot};
use distribute_values::{DistributedVariable, Host, HostTensor, VariableOptions};

const BYTES: usize = 64 << 20;

struct Layers(Vec<DistributedVariable<HostTensor<f32>>>);

impl Layers {
    fn new(strategy: &Strategy, tensors: usize) -> Layers {
        let len = BYTES / 4 / tensors;
        let value = HostTensor::new(&[len], (0..len).map(|at| at as f32).collect::<Vec<_>>()).unwrap();
        let layer = |index| strategy.variable(&format!("layer.{index}"), &value, VariableOptions::default()).unwrap();
        Layers((0..tensors).map(layer).collect())
    }
}

impl Checkpointed for Layers {
    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        for variable in &self.0 {
            snapshot.put::<Host, _>("model", variable.name(), &variable.save(&strategy.groups())?)?;
        }
        Ok(())
    }

    fn load(&self, strategy: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        for variable in &self.0 {
            let saved = snapshot.get::<Host, _>("model", variable.name(), &variable.components()[0])?;
            variable.restore(&strategy.groups(), &saved)?;
        }
        Ok(())
    }
}

fn checkpoints(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("checkpoint of 64 MiB");
    group.throughput(Throughput::Bytes(BYTES as u64)).sample_size(10);
    let strategy = MirroredStrategy::builder().devices(["CPU:0"]).build().unwrap();
    for tensors in [1, 256] {
        let folder = tempfile::tempdir().unwrap();
        let layers = Layers::new(&strategy, tensors);
        let mut manager = CheckpointManager::new(folder.path()).keep(1);
        let mut step = 0;
        group.bench_function(BenchmarkId::new("write", tensors), |bencher| {
            bencher.iter(|| {
                step += 1;
                manager.save(&strategy, step, &[&layers], &()).unwrap();
                manager.finish().unwrap();
            });
        });
        if step == 0 {
            // A filter has left out the writing.
            manager.save(&strategy, 1, &[&layers], &()).unwrap();
            manager.finish().unwrap();
        }
        group.bench_function(BenchmarkId::new("restore", tensors), |bencher| {
            bencher.iter(|| manager.restore::<()>(&strategy, &[&layers]).unwrap().unwrap());
        });
    }
}

criterion_group! {
    name = all;
    config = Criterion::default().warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(3));
    targets = checkpoints
}
criterion_main!(all);
