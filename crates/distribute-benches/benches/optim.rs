//! A step of an optimizer over a million parameters in host memory.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed benchmark")]

use criterion::{Criterion, Throughput};
use distribute_optim::{Adam, HostLoss, HostModel, UpdateRule};
use distribute_strategy::MirroredStrategy;
use distribute_values::HostTensor;

const PARAMETERS: usize = 1 << 20;
/// Bytes that Adam reads and writes for one parameter: four values are read, and three written.
const BYTES: u64 = 7 * 4;

fn adam(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("adam of 1 Mi parameters");
    group.throughput(Throughput::Bytes(PARAMETERS as u64 * BYTES));

    // The arithmetic alone: the bound of the steps below.
    let rule = UpdateRule::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-7, weight_decay: 0.0 };
    let gradient = vec![0.01f32; PARAMETERS];
    let [mut parameter, mut m, mut v] = [1.0f32, 0.0, 0.0].map(|value| vec![value; PARAMETERS]);
    let mut step = 0;
    group.bench_function("rule", |bencher| {
        bencher.iter(|| {
            step += 1;
            rule.update(step, 1e-6, &mut parameter, &gradient, &mut [&mut m, &mut v]);
        });
    });

    for tensors in [1, 64] {
        let strategy = MirroredStrategy::builder().devices(["CPU:0"]).build().unwrap();
        let tensor = |value: f32| HostTensor::new(&[PARAMETERS / tensors], vec![value; PARAMETERS / tensors]).unwrap();
        let names: Vec<String> = (0..tensors).map(|index| format!("layer.{index}")).collect();
        let model = HostModel::new(&strategy, names.iter().map(|name| (name.as_str(), tensor(1.0)))).unwrap();
        let optimizer = Adam::new(1e-6).build(&model).unwrap();
        let loss = HostLoss((0..tensors).map(|_| Some(tensor(0.01))).collect());
        group.bench_function(format!("step, {tensors} tensors"), |bencher| {
            bencher.iter(|| {
                strategy.run_with(&optimizer, |context, optimizer| optimizer.minimize(context, &loss)).unwrap();
            });
        });
    }
}

distribute_benches::benchmarks!(adam);
