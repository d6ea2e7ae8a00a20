//! Optimizers on simulated GPUs, whose results are those of optimizers in host memory.

use distribute_collectives::Compression;
use distribute_optim::backend::TensorLibrary;
use distribute_optim::{
    Adagrad, Adam, Clip, HostError, HostLoss, HostModel, Lamb, LossScale, Optimizer, RmsProp, Sgd, Trainable,
};
use distribute_strategy::{MirroredStrategy, Strategy};
use distribute_values::HostTensor;

use crate::gpu_library::{GpuLoss, GpuModel};

const STEPS: usize = 5;

/// The state after a step: parameters, the gradients' norm and the loss scale.
type Left = (Vec<Vec<f32>>, Option<f64>, f64);

/// A rule and the settings of an optimizer.
#[derive(Clone, Copy, Debug)]
enum Case {
    Scaled,
    Norm,
    GlobalNorm,
    Value,
    Lamb,
    Compressed,
    Sharded,
}

impl Case {
    fn build<M: Trainable<Library = L>, L: TensorLibrary>(self, model: &M) -> Result<Optimizer<L>, L::Error> {
        let dynamic = LossScale::dynamic().initial(1000.0).interval(2);
        match self {
            Case::Scaled => Adam::new(0.1).build(model)?.scale_losses(dynamic),
            Case::Norm => RmsProp::new(0.1).momentum(0.5).build(model)?.clip(Clip::Norm(2.0)),
            Case::GlobalNorm => {
                Sgd::new(0.1).momentum(0.5).build(model)?.clip(Clip::GlobalNorm(2.0))?.scale_losses(dynamic)
            }
            Case::Value => Adagrad::new(0.1).build(model)?.clip(Clip::Value(0.25)),
            Case::Lamb => Lamb::new(0.1).build(model)?.clip(Clip::GlobalNorm(2.0)),
            Case::Compressed => Sgd::new(0.1).build(model)?.compress(Compression::Bf16),
            // Its gradients are copied to the host.
            Case::Sharded => Adam::new(0.1).build(model)?.zero1()?.scale_losses(dynamic),
        }
    }

    /// Returns whether no norms are needed, so that all bits are those of the host.
    fn is_exact(self) -> bool {
        matches!(self, Case::Scaled | Case::Value | Case::Compressed | Case::Sharded)
    }
}

fn variables() -> Vec<(&'static str, Vec<f32>)> {
    let ramp = |len: usize| (0..len).map(|i| (i * 37 % 19) as f32 / 8.0 - 1.1).collect();
    vec![("a", ramp(3)), ("b", ramp(9000)), ("c", ramp(700))]
}

/// One replica's gradients of a step: of the last variable in some steps only, and infinite in the third.
fn gradients(case: Case, replica: usize, step: usize) -> Vec<Option<Vec<f32>>> {
    let ramp = |len: usize| (0..len).map(|i| ((i * 11 + step * 5 + replica * 3) % 23) as f32 / 16.0 - 0.7).collect();
    let mut all: Vec<Option<Vec<f32>>> = variables().iter().map(|(_, values)| Some(ramp(values.len()))).collect();
    if step % 2 == 1 {
        all[2] = None;
    }
    if matches!(case, Case::Scaled | Case::GlobalNorm) && step == 2 && replica == 1 {
        all[1].as_mut().unwrap()[8999] = f32::INFINITY;
    }
    all
}

/// Trains in host memory.
fn on_host(case: Case) -> Vec<Left> {
    let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build().unwrap();
    let tensor = |values: Vec<f32>| HostTensor::new(&[values.len()], values).unwrap();
    let values = variables().into_iter().map(|(name, values)| (name, tensor(values)));
    let model = HostModel::new(&strategy, values).unwrap();
    let optimizer = case.build(&model).unwrap();
    let loss =
        |replica, step| HostLoss(gradients(case, replica, step).into_iter().map(|own| own.map(tensor)).collect());
    train(&strategy, &optimizer, loss, || model.values().unwrap())
}

/// Trains on two GPUs, whose copies are equal after each step.
fn on_gpus(case: Case) -> Vec<Left> {
    let strategy = MirroredStrategy::builder().num_gpus(2).build().unwrap();
    let model = GpuModel::new(&strategy, &variables());
    let optimizer = case.build(&model).unwrap();
    let loss = |replica, step| {
        let put = |own: Vec<f32>| model.put(replica, &own);
        GpuLoss(gradients(case, replica, step).into_iter().map(|own| own.map(put)).collect())
    };
    train(&strategy, &optimizer, loss, || {
        let [first, second] = [0, 1].map(|local| model.values(local));
        assert!(first == second, "{case:?}: replicas differ");
        first
    })
}

fn train<L: TensorLibrary<Error = HostError>>(
    strategy: &Strategy,
    optimizer: &Optimizer<L>,
    loss: impl Fn(usize, usize) -> L::Loss + Sync,
    values: impl Fn() -> Vec<Vec<f32>>,
) -> Vec<Left> {
    let step = |step: usize| {
        if step == 3 {
            // A run that fails on one replica, and leaves nothing on the other.
            let failed =
                strategy.run_with(optimizer, |context, optimizer| match context.replica_id() {
                    0 => optimizer.minimize(context, &loss(0, step)),
                    _ => Err(distribute_strategy::Error::Merge { replica: 1, problem: "as this test wants it".into() }
                        .into()),
                });
            assert!(failed.unwrap_err().to_string().contains("as this test wants it"));
        }
        let run = strategy
            .run_with(optimizer, |context, optimizer| optimizer.minimize(context, &loss(context.replica_id(), step)));
        run.unwrap();
        (values(), optimizer.gradient_norm(), optimizer.loss_scale())
    };
    (0..STEPS).map(step).collect()
}

#[test]
fn optimizers_on_gpus_do_what_those_in_host_memory_do() {
    let test = "optimizers::optimizers_on_gpus_do_what_those_in_host_memory_do";
    // The second GPU takes the kernels that were compiled for the first.
    let cache = tempfile::tempdir().unwrap();
    let cache = cache.path().to_string_lossy();
    if !simulated_cuda::inside(test, &[("SIMULATED_CUDA_DEVICES", "2"), ("DISTRIBUTE_KERNEL_CACHE", &cache)]) {
        return;
    }
    for case in [Case::Scaled, Case::Norm, Case::GlobalNorm, Case::Value, Case::Lamb, Case::Compressed, Case::Sharded] {
        let (host, gpus) = (on_host(case), on_gpus(case));
        for (step, (host, gpus)) in host.iter().zip(&gpus).enumerate() {
            assert_eq!(host.2, gpus.2, "{case:?}: the loss scale after step {step}");
            let close = |a: f64, b: f64, limit: f64| (a - b).abs() <= limit * b.abs().max(1e-3);
            let equal = match (host.1, gpus.1) {
                (Some(host), Some(gpus)) => close(gpus, host, 1e-12),
                (host, gpus) => host == gpus,
            };
            assert!(equal, "{case:?}: norms {:?} and {:?} in step {step}", host.1, gpus.1);
            let same = |(host, gpus): (&f32, &f32)| match case.is_exact() {
                true => host.to_bits() == gpus.to_bits(),
                false => close(f64::from(*gpus), f64::from(*host), 1e-5),
            };
            for (index, (host, gpus)) in host.0.iter().zip(&gpus.0).enumerate() {
                let worse = host.iter().zip(gpus).position(|pair| !same(pair));
                let pair = worse.map(|at| (host[at], gpus[at]));
                assert_eq!(pair, None, "{case:?}: element {worse:?} of variable {index} in step {step}");
            }
        }
        // The step with an infinite gradient was skipped, and others were not.
        let changed: Vec<bool> = gpus.windows(2).map(|pair| pair[0].0 != pair[1].0).collect();
        assert_eq!(changed, [true, !matches!(case, Case::Scaled | Case::GlobalNorm), true, true], "{case:?}");
    }
    let strategy = MirroredStrategy::builder().num_gpus(2).build().unwrap();
    let model = GpuModel::new(&strategy, &variables());
    let optimizer = Sgd::new(0.1).build(&model).unwrap().compress(Compression::TopK(0.1)).unwrap();
    let run = strategy.run_with(&optimizer, |context, optimizer| {
        let own = gradients(Case::Value, context.replica_id(), 0).into_iter();
        let put = |own: Vec<f32>| model.put(context.local_replica_id(), &own);
        optimizer.minimize(context, &GpuLoss(own.map(|own| own.map(put)).collect()))
    });
    let told = run.unwrap_err().to_string();
    assert!(told.contains("top-k") && told.contains("f16 or bf16"), "{told}");
}
