//! Parameters of 16 bits, with copies in f32.

use std::ops::{ControlFlow, Range};

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use distribute_burn::{
    Adam, Burn, BurnContext, BurnStrategy, BurnTensor, Error, LossScale, Model, Optimizer, Sgd, cast_module,
    cross_entropy_per_example,
};
use distribute_device::{DType, bf16, f16};
use distribute_optim::backend::TensorLibrary;
use distribute_strategy::Strategy;
use distribute_testkit::short_or_long;
use distribute_train::checkpoint::{Checkpointed, Snapshot};
use distribute_values::TensorStorage;

use crate::common::*;

const SHORT: [FloatDType; 2] = [FloatDType::F16, FloatDType::BF16];

fn scope_in<M: Classifier>(strategy: &Strategy, dtype: FloatDType) -> Model<M> {
    strategy.scope(|device| cast_module(M::new(device), dtype)).unwrap()
}

/// Makes steps on inputs of a type, with losses in f32; returns the losses.
fn train_in<M: Classifier>(
    strategy: &Strategy,
    model: &Model<M>,
    optimizer: &Optimizer,
    dtype: FloatDType,
    steps: Range<usize>,
) -> Vec<f32> {
    let device = Device::flex().autodiff();
    let step = |step: usize| {
        let parts = cut(&batch(step % 3, 24), strategy.num_replicas_in_sync(), &device);
        let losses = strategy.run_with((model, optimizer), |context, (model, optimizer)| {
            let (x, y) = parts[context.replica_id()].clone();
            let losses = cross_entropy_per_example(model.forward(x.cast(dtype)), y)?;
            let loss = context.average_loss(losses, 24);
            optimizer.minimize(context, &loss)?;
            Ok::<_, Error>(loss.into_scalar::<f32>())
        });
        losses.unwrap().values().iter().sum()
    };
    steps.map(step).collect()
}

fn wide(tensor: &BurnTensor) -> Vec<f32> {
    Burn::cast(tensor, DType::F32).unwrap().to_elements().unwrap()
}

/// Returns the elements of all whole variables in f32.
fn wide_wholes<M: Classifier>(strategy: &Strategy, model: &Model<M>) -> Vec<Vec<f32>> {
    model.variables().iter().map(|variable| wide(&variable.whole(strategy).unwrap())).collect()
}

fn adam<M: Classifier>(model: &Model<M>) -> Optimizer {
    Adam::new(0.01).build(model).unwrap().scale_losses(LossScale::dynamic().initial(1024.0)).unwrap()
}

fn momentum<M: Classifier>(model: &Model<M>) -> Optimizer {
    Sgd::new(0.1).momentum(0.9).build(model).unwrap().scale_losses(LossScale::fixed(64.0)).unwrap()
}

/// Compares training in 16 bits with training in f32, and shards with mirrors.
fn follows_full_precision<M: Classifier>(optimizers: usize) {
    for build in [adam::<M>, momentum::<M>].into_iter().take(optimizers) {
        let run = |strategy: &Strategy, dtype: FloatDType| {
            let model = scope_in::<M>(strategy, dtype);
            let losses = train_in(strategy, &model, &build(&model), dtype, 0..24);
            model.audit(strategy).unwrap();
            for variable in model.variables() {
                assert_eq!(variable.components()[0].dtype().unwrap().to_string(), format!("{dtype:?}").to_lowercase());
            }
            (losses, wide_wholes(strategy, &model))
        };
        let strategies = [one(), mirrored(2)];
        let full = strategies.each_ref().map(|strategy| run(strategy, FloatDType::F32).0);
        assert!(full[0][23] < full[0][2], "{full:?}");
        for dtype in SHORT {
            let [alone, mirrors] = strategies.each_ref().map(|strategy| run(strategy, dtype));
            for (short, full) in alone.0.iter().chain(&mirrors.0).zip(full.concat()) {
                assert!((short - full).abs() < 0.05 * (1.0 + full), "{dtype:?}: {short} and {full}");
            }
            assert_eq!(run(&sharded(2), dtype), mirrors, "{dtype:?}");
        }
    }
}

#[test]
fn an_mlp_follows_full_precision() {
    follows_full_precision::<Mlp>(2);
}

#[test]
fn a_convolution_follows_full_precision() {
    follows_full_precision::<Convolution>(2);
}

#[test]
fn attention_follows_full_precision() {
    follows_full_precision::<Attention>(short_or_long(1, 2));
}

#[test]
fn batch_normalisation_follows_full_precision() {
    follows_full_precision::<Normalised>(short_or_long(1, 2));
}

#[test]
fn tied_weights_follow_full_precision() {
    follows_full_precision::<Tied>(2);
}

/// Gives the parameters values in the order in which burn visits them.
struct Fill<'a>(std::slice::Iter<'a, Vec<f32>>, FloatDType);

impl ModuleMapper for Fill<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let values = self.0.next().unwrap();
        param.map(|old| {
            let value = Tensor::<1>::from_floats(&values[..], &Device::flex()).reshape(old.dims());
            Tensor::from_inner(value.cast(self.1)).require_grad()
        })
    }
}

/// Reads the parameters' gradients, in f32.
struct Gradients<'a>(&'a burn::tensor::Gradients, Vec<Vec<f32>>);

impl burn::module::ModuleVisitor for Gradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = param.val().grad(self.0).unwrap().cast(FloatDType::F32);
        self.1.push(gradient.into_data().try_into_vec().unwrap());
    }
}

#[test]
fn two_replicas_are_those_emulated_one_by_one_bit_for_bit() {
    for dtype in SHORT {
        let round = |value: f32| match dtype {
            FloatDType::F16 => f16::from_f32(value).to_f32(),
            _ => bf16::from_f32(value).to_f32(),
        };
        let device = Device::flex().autodiff();
        let module = cast_module(Mlp::new(&device), dtype);
        let strategy = mirrored(2);
        let model = strategy.scope(|_| module.clone()).unwrap();
        let mut masters: Vec<Vec<f32>> = wide_wholes(&strategy, &model);
        let mut velocities: Vec<Vec<f32>> = masters.iter().map(|values| vec![0.0; values.len()]).collect();
        let optimizer = Sgd::new(0.1).momentum(0.9).build(&model).unwrap();
        train_in(&strategy, &model, &optimizer, dtype, 0..12);
        for step in 0..12 {
            let rounded: Vec<Vec<f32>> =
                masters.iter().map(|values| values.iter().map(|value| round(*value)).collect()).collect();
            let of_replicas: Vec<Vec<Vec<f32>>> = cut(&batch(step % 3, 24), 2, &device)
                .into_iter()
                .map(|(x, y)| {
                    let module = module.clone().map(&mut Fill(rounded.iter(), dtype));
                    let losses = cross_entropy_per_example(module.forward(x.cast(dtype)), y).unwrap();
                    let gradients = losses.sum().div_scalar(24.0).backward();
                    let mut visitor = Gradients(&gradients, Vec::new());
                    module.visit(&mut visitor);
                    visitor.1
                })
                .collect();
            for (index, (master, velocity)) in masters.iter_mut().zip(&mut velocities).enumerate() {
                for (at, (p, v)) in master.iter_mut().zip(velocity).enumerate() {
                    // Gradients are exchanged in 16 bits.
                    let gradient = round(of_replicas[0][index][at] + of_replicas[1][index][at]);
                    *v = 0.9 * *v - 0.1 * gradient;
                    *p += *v;
                }
            }
        }
        let kept: Vec<Vec<f32>> = optimizer
            .slots()
            .filter(|slot| slot.name().ends_with("/master"))
            .map(|slot| slot.components()[1].to_elements().unwrap())
            .collect();
        assert_eq!(kept, masters, "{dtype:?}");
    }
}

/// Makes steps whose gradient is 1 with a rate of 1e-4; returns the copy in f32 of the only weight, and its beginning.
fn small_steps(strategy: &Strategy, build: impl Fn(&Model<Linear>) -> Optimizer) -> (f32, f32, f32) {
    let model = strategy
        .scope(|device| {
            let layer = seeded(device, |device| LinearConfig::new(1, 1).with_bias(false).init(device));
            layer.map(&mut Fill([vec![1.0]].iter(), FloatDType::F16))
        })
        .unwrap();
    let optimizer = build(&model);
    for _ in 0..30 {
        let run = strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
            let x = Tensor::<2>::ones([1, 1], &context.burn_device()?).cast(FloatDType::F16);
            let n = context.num_replicas_in_sync();
            optimizer.minimize(context, &context.average_loss(model.forward(x).cast(FloatDType::F32), n))
        });
        run.unwrap();
    }
    let mut master = f32::NAN;
    let visited = optimizer.visit_whole_slots(strategy, |name, slot| {
        if name == "weight/master" {
            master = slot.unwrap().to_elements::<f32>().unwrap()[0];
        }
        ControlFlow::<()>::Continue(())
    });
    assert!(visited.unwrap().is_continue());
    (1.0, master, wide(&model.variables()[0].whole(strategy).unwrap())[0])
}

#[test]
fn a_copy_in_32_bits_keeps_what_16_would_lose() {
    let plain = |model: &Model<Linear>| Sgd::new(1e-4).build(model).unwrap();
    let zero1 = |model: &Model<Linear>| Sgd::new(1e-4).build(model).unwrap().zero1().unwrap();
    for (start, master, parameter) in
        [small_steps(&mirrored(2), plain), small_steps(&mirrored(2), zero1), small_steps(&sharded(2), plain)]
    {
        assert!((start - 30.0 * 1e-4 - master).abs() < 1e-6, "{start} {master}");
        assert_eq!(parameter, f16::from_f32(master).to_f32());
    }
    // burn's own optimizers have no such copy, and 1 − 1e-4 is 1 in f16.
    let own = |model: &Model<Linear>| model.optimizer(SgdConfig::new().init(), 1e-4, "SGD").unwrap();
    assert_eq!(small_steps(&mirrored(2), own).2, 1.0);
}

#[test]
fn a_step_that_overflows_is_skipped_on_all_replicas() {
    for strategy in [one(), mirrored(2), sharded(2)] {
        let model = scope_in::<Mlp>(&strategy, FloatDType::F16);
        let scale = LossScale::dynamic().initial((1u64 << 30) as f64).interval(1000);
        let optimizer = Sgd::new(0.1).build(&model).unwrap().scale_losses(scale).unwrap();
        let before = wide_wholes(&strategy, &model);
        train_in(&strategy, &model, &optimizer, FloatDType::F16, 0..1);
        assert_eq!(wide_wholes(&strategy, &model), before);
        assert_eq!(optimizer.loss_scale(), (1u64 << 29) as f64);
        train_in(&strategy, &model, &optimizer, FloatDType::F16, 1..24);
        model.audit(&strategy).unwrap();
        assert!(optimizer.loss_scale() < 1e8, "{}", optimizer.loss_scale());
        let after = wide_wholes(&strategy, &model);
        assert!(after != before && after.concat().iter().all(|value| value.is_finite()));
    }
}

#[test]
fn the_copies_in_32_bits_are_saved_and_restored() {
    for dtype in SHORT {
        for (from, to) in
            [(mirrored(2), mirrored(2)), (sharded(2), mirrored(2)), (mirrored(2), sharded(2)), (one(), one())]
        {
            let model = scope_in::<Convolution>(&from, dtype);
            let optimizer = adam(&model);
            train_in(&from, &model, &optimizer, dtype, 0..3);
            let mut snapshot = Snapshot::new(3);
            model.save(&from, &mut snapshot).unwrap();
            optimizer.save(&from, &mut snapshot).unwrap();
            let losses = train_in(&from, &model, &optimizer, dtype, 3..8);
            let restored = scope_in::<Convolution>(&to, dtype);
            let other = Adam::new(0.5).build(&restored).unwrap().scale_losses(LossScale::dynamic()).unwrap();
            restored.load(&to, &snapshot).unwrap();
            other.load(&to, &snapshot).unwrap();
            assert_eq!(other.loss_scale(), 1024.0);
            assert_eq!(train_in(&to, &restored, &other, dtype, 3..8), losses, "{dtype:?}");
            assert_eq!(wide_wholes(&to, &restored), wide_wholes(&from, &model));
            // A model in f32 is another.
            let told = scope::<Convolution>(&to).load(&to, &snapshot).unwrap_err().to_string();
            assert!(told.contains("the checkpoint has") && told.contains("and the program f32"), "{told}");
        }
    }
}

#[test]
fn burns_own_optimizers_update_16_bits() {
    for (name, config, dtype) in [
        ("SGD", SgdConfig::new().init(), FloatDType::F16),
        ("SGD", SgdConfig::new().init(), FloatDType::BF16),
        ("Adam", AdamConfig::new().init(), FloatDType::BF16),
    ] {
        let config: ModuleOptimizer = config;
        let built = |strategy: &Strategy| {
            let model = scope_in::<Mlp>(strategy, dtype);
            let optimizer = model.optimizer(config.clone(), 0.02, name).unwrap();
            (model, optimizer.scale_losses(LossScale::fixed(16.0)).unwrap())
        };
        let run = |strategy: &Strategy| {
            let (model, optimizer) = built(strategy);
            let losses = train_in(strategy, &model, &optimizer, dtype, 0..24);
            // burn would restore its state in f32.
            let told = optimizer.save(strategy, &mut Snapshot::new(24)).unwrap_err().to_string();
            assert!(told.contains("cannot be saved: burn restores it in f32"), "{told}");
            let told = optimizer.set_library_state(&[]).unwrap_err().to_string();
            assert!(told.contains("cannot be restored: burn restores it in f32"), "{told}");
            (losses, wide_wholes(strategy, &model))
        };
        let mirrors = run(&mirrored(2));
        assert!(mirrors.0[23] < mirrors.0[2], "{name} in {dtype:?}: {:?}", mirrors.0);
        assert_eq!(run(&sharded(2)), mirrors, "{name} in {dtype:?}");
    }
}

/// Multiplies every parameter by a factor.
struct Times(f64);

impl ModuleMapper for Times {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| Tensor::from_inner(value.without_autodiff().mul_scalar(self.0)).require_grad())
    }
}

#[test]
fn modules_of_another_type_are_converted_before_an_optimizer_is_built() {
    for strategy in [mirrored(2), sharded(2)] {
        let module = scope::<Mlp>(&one()).to_module(&one()).unwrap();
        for dtype in SHORT {
            let model = scope_in::<Mlp>(&strategy, dtype);
            let expected = wide_wholes(&strategy, &model);
            model.load_module(&cast_module(module.clone().map(&mut Times(0.0)), dtype)).unwrap();
            assert_ne!(wide_wholes(&strategy, &model), expected);
            model.load_module(&module).unwrap();
            assert_eq!(wide_wholes(&strategy, &model), expected);
            // 65504 is the largest number of f16.
            let loaded = model.load_module(&module.clone().map(&mut Times(1e7)));
            if dtype == FloatDType::F16 {
                let told = loaded.unwrap_err().to_string();
                assert!(told.contains("\"hidden.0.weight\" has values that F16 cannot hold"), "{told}");
                assert_eq!(wide_wholes(&strategy, &model), expected);
            } else {
                loaded.unwrap();
            }
            let optimizer = Adam::new(0.01).build(&model).unwrap();
            let told = model.load_module(&module).unwrap_err();
            assert!(matches!(&told, Error::LoadedLate { name } if name == "hidden.0.weight"), "{told}");
            drop(optimizer);
            model.load_module(&module).unwrap();
        }
        // And from 16 bits to 32.
        let model = scope::<Mlp>(&strategy);
        let short = cast_module(module.clone(), FloatDType::BF16);
        let _optimizer = Adam::new(0.01).build(&model).unwrap();
        model.load_module(&short).unwrap();
        let rounded: Vec<f32> =
            wholes(&one(), &scope::<Mlp>(&one())).into_iter().flat_map(|(_, values)| values).collect();
        let rounded: Vec<f32> = rounded.iter().map(|value| bf16::from_f32(*value).to_f32()).collect();
        assert_eq!(wide_wholes(&strategy, &model).concat(), rounded);
    }
}
