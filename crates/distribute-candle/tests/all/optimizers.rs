//! Features of optimizers other than their arithmetic: sharded state, clipping, loss scales, compression, accumulation,
//! 16 bits.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::linear;
use distribute_candle::{
    Adagrad, Adam, AdamW, Candle, CandleContext, CandleStrategy, Clip, Ema, Error, Lamb, LossScale, Model, Optimizer,
    ReplicaOptimizer, RmsProp, ScopeOptions, Sgd, cross_entropy_per_example,
};
use distribute_collectives::Compression;
use distribute_strategy::{CentralStorageStrategy, ReplicaContext, Strategy};
use distribute_testkit::apart;
use distribute_values::TensorStorage;

use crate::common::*;

#[test]
fn wrong_settings_are_sentences() {
    let strategy = mirrored(1);
    let model = strategy.scope(Mlp::new).unwrap();
    let error = Adam::new(-1.0).build(&model).err().unwrap().to_string();
    assert!(error.contains("learning rate of Adam is -1"), "{error}");
    let wrong = strategy.scope(|vb| {
        linear(2, 2, vb.pp("same"))?;
        linear(3, 2, vb.pp("same"))
    });
    assert!(wrong.err().unwrap().to_string().contains("different paths"));
}

#[test]
fn every_optimizer_trains_replicas_as_one() {
    type Build = fn(&Model<Mlp>) -> distribute_candle::Result<Optimizer>;
    let all: [(&str, Build); 9] = [
        ("sgd", |model| Sgd::new(0.1).build(model)),
        ("momentum", |model| Sgd::new(0.05).momentum(0.9).build(model)),
        ("nesterov", |model| Sgd::new(0.05).momentum(0.9).nesterov().build(model)),
        ("adam", |model| Adam::new(0.01).build(model)),
        ("adamw", |model| AdamW::new(0.01, 0.1).build(model)),
        ("adagrad", |model| Adagrad::new(0.05).build(model)),
        ("rms_prop", |model| RmsProp::new(0.005).centered().momentum(0.5).build(model)),
        ("lamb", |model| Lamb::new(0.01).build(model)),
        ("clipped", |model| Sgd::new(0.5).build(model)?.clip(Clip::GlobalNorm(0.05))),
    ];
    for (name, build) in all {
        let (one, losses_of_one) = train_with(1, build);
        let (two, losses) = train_with(2, build);
        assert!(losses[9] < losses[0], "{name}: {losses:?}");
        assert_eq!(two[0], two[1], "{name}");
        assert!(apart(&two[0], &one[0]) < 4e-5, "{name}: {:?} {:?}", two[0], one[0]);
        assert!(apart(&losses, &losses_of_one) < 1e-5, "{name}: {losses:?} {losses_of_one:?}");
    }
}

#[test]
fn sharded_state_gives_the_same_parameters_in_a_part_of_the_memory() {
    type Build = fn(&Model<Mlp>) -> distribute_candle::Result<Optimizer>;
    let all: [Build; 6] = [
        |model| Sgd::new(0.1).build(model),
        |model| Sgd::new(0.05).momentum(0.9).nesterov().build(model),
        |model| AdamW::new(0.01, 0.1).build(model),
        |model| Adagrad::new(0.05).build(model),
        |model| RmsProp::new(0.005).centered().momentum(0.5).build(model),
        |model| Adam::new(0.01).build(model)?.clip(Clip::Value(0.01)),
    ];
    for (index, build) in all.into_iter().enumerate() {
        for replicas in [1, 2, 3] {
            let (whole, _) = train_with(replicas, build);
            let (sharded, _) = train_with(replicas, |model| build(model)?.zero1());
            // Replicas of one process sum in the same order in both modes.
            assert_eq!(sharded, whole, "{index} on {replicas}");
        }
    }
}

#[test]
fn sharded_state_takes_its_share_of_the_memory() {
    let bytes = |replicas: usize, sharded: bool| {
        let strategy = mirrored(replicas);
        let model = strategy.scope(Mlp::new).unwrap();
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        let optimizer = if sharded { optimizer.zero1().unwrap() } else { optimizer };
        step(&strategy, &model, &optimizer);
        (optimizer.state_bytes(), model.num_parameters())
    };
    let (whole, parameters) = bytes(4, false);
    assert_eq!(whole, 2 * 4 * parameters);
    let (sharded, _) = bytes(4, true);
    // If the elements do not divide evenly, the first part has one more.
    assert_eq!(sharded, 2 * 4 * parameters.div_ceil(4));
}

#[test]
fn a_norm_is_that_of_all_parts_together() {
    let norm = |sharded: bool| {
        let strategy = mirrored(3);
        let model = strategy.scope(Mlp::new).unwrap();
        let optimizer = Sgd::new(0.1).build(&model).unwrap().clip(Clip::GlobalNorm(0.01)).unwrap();
        let optimizer = if sharded { optimizer.zero1().unwrap() } else { optimizer };
        step(&strategy, &model, &optimizer);
        (optimizer.gradient_norm().unwrap(), values(&model, 2).concat())
    };
    let ((whole, parameters), (sharded, others)) = (norm(false), norm(true));
    assert!((whole - sharded).abs() < 1e-9 * whole, "{whole} {sharded}");
    assert!(apart(&parameters, &others) < 1e-7);
}

#[test]
fn what_does_not_go_with_sharded_state_is_a_sentence() {
    let model = mirrored(2).scope(Mlp::new).unwrap();
    let central = CentralStorageStrategy::builder().compute_devices(["CPU:0", "CPU:1"]).build().unwrap();
    let shared = central.scope(Mlp::new).unwrap();
    let refused = [
        Lamb::new(0.1).build(&model).unwrap().zero1(),
        Sgd::new(0.1).build(&model).unwrap().clip(Clip::Norm(1.0)).unwrap().zero1(),
        Sgd::new(0.1).build(&model).unwrap().zero1().unwrap().clip(Clip::Norm(1.0)),
        Sgd::new(0.1).build(&model).unwrap().zero1().unwrap().compress(Compression::Bf16),
        Adam::new(0.1).build(&shared).unwrap().zero1(),
    ];
    for outcome in refused {
        let text = outcome.err().unwrap().to_string();
        assert!(text.starts_with("zero1 does not go with ") && text.contains(": "), "{text}");
    }
}

#[test]
fn scaled_losses_give_the_same_parameters() {
    // Powers of two avoid rounding.
    for sharded in [false, true] {
        let build = |model: &Model<Mlp>| {
            let optimizer = Adam::new(0.01).build(model)?.clip(Clip::GlobalNorm(0.5))?;
            if sharded { optimizer.zero1() } else { Ok(optimizer) }
        };
        let (plain, _) = train_with(2, build);
        let (scaled, _) = train_with(2, |model| build(model)?.scale_losses(LossScale::fixed(1024.0)));
        assert_eq!(plain, scaled);
    }
}

#[test]
fn a_step_whose_gradients_are_not_finite_is_left_out_on_all_replicas() {
    for sharded in [false, true] {
        let strategy = mirrored(3);
        let model = strategy.scope(Mlp::new).unwrap();
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        let optimizer = if sharded { optimizer.zero1().unwrap() } else { optimizer };
        let optimizer = optimizer.scale_losses(LossScale::dynamic().initial(16.0).interval(2)).unwrap();
        step(&strategy, &model, &optimizer);
        let before = values(&model, 0);
        strategy
            .run_with((&model, &optimizer), |context, (model, optimizer)| {
                let x = Tensor::ones((1, 8), DType::F32, &Device::Cpu)?;
                let loss = model.forward(&x)?.sum_all()?;
                // The gradients of one replica overflow.
                let loss = if context.replica_id() == 1 { (loss * f64::INFINITY)? } else { loss };
                optimizer.minimize(context, &loss)
            })
            .unwrap();
        assert_eq!(optimizer.loss_scale(), 8.0);
        (0..3).for_each(|replica| assert_eq!(values(&model, replica), before));
        // Training continues, and the scale grows again after two finite steps.
        (0..2).for_each(|_| step(&strategy, &model, &optimizer));
        assert_eq!(optimizer.loss_scale(), 16.0);
        assert_ne!(values(&model, 0), before);
        assert_eq!(values(&model, 0), values(&model, 2));
    }
}

#[test]
fn a_step_that_is_left_out_leaves_nothing_in_a_compression() {
    let compressions = [Compression::Bf16, Compression::PowerSgd(2), Compression::TopK(0.1)];
    for compression in compressions {
        let trained = |spoilt: bool| {
            let strategy = mirrored(2);
            let model = strategy.scope(Mlp::new).unwrap();
            let optimizer = Adam::new(0.01).build(&model).unwrap().compress(compression.clone()).unwrap();
            let optimizer = optimizer.scale_losses(LossScale::fixed(16.0)).unwrap();
            for at in 0..4 {
                if at == 2 && spoilt {
                    let overflow = |context: &ReplicaContext, (model, optimizer): (&Mlp, ReplicaOptimizer<'_>)| {
                        let loss = model.forward(&Tensor::ones((1, 8), DType::F32, &Device::Cpu)?)?.sum_all()?;
                        optimizer.minimize(context, &(loss * f64::INFINITY)?)
                    };
                    strategy.run_with((&model, &optimizer), overflow).unwrap();
                }
                step(&strategy, &model, &optimizer);
            }
            values(&model, 0)
        };
        assert_eq!(trained(true), trained(false), "{compression:?}");
        let model = mirrored(2).scope(Mlp::new).unwrap();
        let optimizer = Adam::new(0.01).build(&model).unwrap().compress(compression).unwrap();
        let told = optimizer.scale_losses(LossScale::dynamic()).err().unwrap().to_string();
        assert!(told.starts_with("compress does not go with a loss scale that changes: "), "{told}");
    }
}

#[test]
fn averages_follow_the_parameters_and_can_take_their_place() {
    let strategy = mirrored(2);
    let model = strategy.scope(Mlp::new).unwrap();
    let optimizer = Sgd::new(0.5).build(&model).unwrap();
    let mut ema = Ema::new(&model, 0.9).unwrap();
    let mut expected = values(&model, 0).concat();
    for n in 0..5 {
        step(&strategy, &model, &optimizer);
        ema.update(&model).unwrap();
        let decay = 0.9f64.min((1.0 + f64::from(n)) / (10.0 + f64::from(n)));
        for (average, value) in expected.iter_mut().zip(values(&model, 0).concat()) {
            *average = (decay * f64::from(*average) + (1.0 - decay) * f64::from(value)) as f32;
        }
    }
    let trained = values(&model, 0);
    ema.swap(&model).unwrap();
    assert_eq!(values(&model, 0).concat(), expected);
    assert_eq!(values(&model, 1).concat(), expected);
    ema.swap(&model).unwrap();
    assert_eq!(values(&model, 0), trained);
    assert_eq!(values(&model, 1), trained);
    assert!(Ema::new(&model, 1.0).is_err());
}

#[test]
fn compressed_gradients_train_nearly_as_well_and_keep_replicas_equal() {
    let (_, exact) = train_with(2, |model| Sgd::new(0.1).build(model));
    type Build = fn(&Model<Mlp>) -> distribute_candle::Result<Optimizer>;
    // The allowed difference of the last loss from the exact one, as a share of the exact one's decrease.
    let all: [(Build, f64); 4] = [
        (|model| Sgd::new(0.1).build(model)?.compress(Compression::F16), 0.01),
        (|model| Sgd::new(0.1).build(model)?.compress(Compression::Bf16), 0.05),
        (|model| Sgd::new(0.1).build(model)?.compress(Compression::TopK(0.25)), 0.8),
        (|model| Sgd::new(0.1).build(model)?.compress(Compression::PowerSgd(2)), 0.5),
    ];
    for (build, tolerance) in all {
        let (two, losses) = train_with(2, build);
        assert_eq!(two[0], two[1]);
        let (fallen, apart) = (exact[0] - exact[9], (losses[9] - exact[9]).abs());
        assert!(losses[9] < losses[0] && apart < tolerance * fallen, "{tolerance}: {losses:?} {exact:?}");
    }
}

#[test]
fn a_compression_that_cannot_be_is_refused_at_once() {
    let model = mirrored(2).scope(Mlp::new).unwrap();
    let error = Sgd::new(0.1).build(&model).unwrap().compress(Compression::TopK(2.0)).err().unwrap().to_string();
    assert_eq!(error, "compression top-k: the share is 2; give one above 0 and at most 1, such as 0.01");
}

#[test]
fn accumulated_parts_equal_the_whole_batch() {
    let whole = train_with(2, |model| Sgd::new(0.1).build(model)).0;
    let strategy = mirrored(2);
    let model = strategy.scope(Mlp::new).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let batch = parts(2, 12);
    for _ in 0..10 {
        strategy
            .run_with((&model, &optimizer, batch.clone()), |context, (model, optimizer, (x, y))| {
                // Six examples in parts of 1, 2 and 3; the second replica takes them in two parts.
                let cuts: &[usize] = if context.replica_id() == 0 { &[0, 1, 3, 6] } else { &[0, 2, 6] };
                for (part, cut) in cuts.windows(2).enumerate() {
                    let (start, len) = (cut[0], cut[1] - cut[0]);
                    let logits = model.forward(&x.narrow(0, start, len)?)?;
                    let per_example = cross_entropy_per_example(&logits, &y.narrow(0, start, len)?)?;
                    let loss = context.average_loss(&per_example, 12)?;
                    match part + 2 == cuts.len() {
                        true => optimizer.minimize(context, &loss)?,
                        false => optimizer.accumulate(context, &loss)?,
                    }
                }
                Ok::<_, Error>(())
            })
            .unwrap();
    }
    assert_eq!(values(&model, 0), values(&model, 1));
    let apart = apart(&values(&model, 0).concat(), &whole[0]);
    assert!(apart < 4e-5, "{apart:e}");
}

#[test]
fn the_norm_of_the_gradients_is_known_after_a_clipped_step() {
    let strategy = mirrored(2);
    let model = strategy.scope(Mlp::new).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap().clip(Clip::GlobalNorm(1e-3)).unwrap();
    assert_eq!(optimizer.gradient_norm(), None);
    let before = values(&model, 0).concat();
    strategy
        .run_with((&model, &optimizer, parts(2, 12)), |context, (model, optimizer, (x, y))| {
            let per_example = cross_entropy_per_example(&model.forward(&x)?, &y)?;
            optimizer.minimize(context, &context.average_loss(&per_example, 12)?)
        })
        .unwrap();
    assert!(optimizer.gradient_norm().unwrap() > 1e-3);
    let after = values(&model, 0).concat();
    let moved: f64 = before.iter().zip(&after).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    // The learning rate times the limit.
    assert!((moved.sqrt() - 1e-4).abs() < 1e-6, "{}", moved.sqrt());
}

/// Trains on half-precision inputs; returns the parameters of replica 0 at the end, in f32.
fn train_in(dtype: DType, strategy: &Strategy, steps: usize) -> (Model<Mlp>, Vec<Vec<f32>>, Vec<f64>) {
    let model = strategy.scope_with(ScopeOptions::default().dtype(dtype), Mlp::new).unwrap();
    let optimizer = Adam::new(0.01).build(&model).unwrap().scale_losses(LossScale::dynamic().initial(1024.0)).unwrap();
    let losses = (0..steps)
        .map(|_| {
            let losses =
                strategy.run_with((&model, &optimizer, parts(2, 24)), |context, (model, optimizer, (x, y))| {
                    let logits = model.forward(&x.to_dtype(dtype)?)?.to_dtype(DType::F32)?;
                    let loss = context.average_loss(&cross_entropy_per_example(&logits, &y)?, 24)?;
                    optimizer.minimize(context, &loss)?;
                    Ok::<_, Error>(f64::from(loss.to_scalar::<f32>()?))
                });
            losses.unwrap().iter().sum()
        })
        .collect();
    let wide = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    let values = model.variables().iter().map(|variable| wide(&variable.components()[0])).collect();
    (model, values, losses)
}

#[test]
fn mixed_precision_follows_full_precision_and_keeps_replicas_equal() {
    let central = CentralStorageStrategy::builder().compute_devices(["CPU:0", "CPU:1"]).build().unwrap();
    let (_, _, full) = train_in(DType::F32, &mirrored(2), 60);
    let (model, values, half) = train_in(DType::F16, &mirrored(2), 60);
    for (full, half) in full.iter().zip(&half) {
        assert!((full - half).abs() < 0.01, "losses {full} and {half}");
    }
    assert!(half[59] < 0.7 * half[0], "{half:?}");
    model.audit(&mirrored(2)).unwrap();
    assert!(model.variables().iter().all(|variable| variable.components()[0].dtype() == DType::F16));
    assert_eq!(train_in(DType::F16, &central, 60).1, values);
}

#[test]
fn gradients_of_16_bits_are_accumulated_in_32() {
    let strategy = mirrored(2);
    let bias = |model: &Model<candle_nn::Linear>| {
        let bias = model.variables()[1].components()[0].to_dtype(DType::F32).unwrap();
        bias.flatten_all().unwrap().to_vec1::<f32>().unwrap()[0]
    };
    for dtype in [DType::BF16, DType::F16] {
        let model = strategy.scope_with(ScopeOptions::default().dtype(dtype), |vb| linear(1, 1, vb.pp("fc"))).unwrap();
        let optimizer = Sgd::new(1e-3).build(&model).unwrap();
        let before = bias(&model);
        let steps = 3000;
        let run = strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
            for step in 1..=steps {
                // The derivative by the bias is 1/2 on each replica.
                let y = model.forward(&Tensor::ones((1, 1), dtype, &Device::Cpu)?)?.to_dtype(DType::F32)?;
                let loss = context.average_loss(&y.sum(1)?, 2)?;
                if step < steps { optimizer.accumulate(context, &loss)? } else { optimizer.minimize(context, &loss)? }
            }
            Ok::<_, Error>(())
        });
        run.unwrap();
        // One 16-bit number for the sum, and one for the bias; ones that were added in 16 bits would stop at 256.
        let moved = before - bias(&model);
        assert!((moved - 3.0).abs() < 0.03, "{moved}, {dtype:?}");
    }
}

#[test]
fn a_master_copy_keeps_what_16_bits_would_lose() {
    let strategy = mirrored(2);
    let half = ScopeOptions::default().dtype(DType::F16);
    let model = strategy.scope_with(half, |vb| linear(1, 1, vb.pp("fc"))).unwrap();
    // 1 + 1e-4 rounds to 1 in f16, but thirty such steps are not lost.
    let optimizer = Sgd::new(1e-4).build(&model).unwrap();
    let before: Vec<f32> =
        model.variables()[0].components()[0].to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    for _ in 0..30 {
        strategy
            .run_with((&model, &optimizer), |context, (model, optimizer)| {
                let y = model.forward(&Tensor::ones((1, 1), DType::F16, &Device::Cpu)?)?.to_dtype(DType::F32)?;
                optimizer.minimize(context, &context.average_loss(&y.sum(1)?, 2)?)
            })
            .unwrap();
    }
    let master = optimizer.slots().find(|slot| slot.name() == "fc.weight/master").unwrap();
    let master: Vec<f32> = master.components()[1].flatten_all().unwrap().to_vec1().unwrap();
    assert!((before[0] - master[0] - 30.0 * 1e-4).abs() < 1e-6, "{before:?} {master:?}");
    // The copies of sharded state are the same.
    let again = strategy.scope_with(half, |vb| linear(1, 1, vb.pp("fc"))).unwrap();
    let optimizer = Sgd::new(1e-4).build(&again).unwrap().zero1().unwrap();
    for _ in 0..30 {
        let run = strategy.run_with((&again, &optimizer), |context, (model, optimizer)| {
            let y = model.forward(&Tensor::ones((1, 1), DType::F16, &Device::Cpu)?)?.to_dtype(DType::F32)?;
            optimizer.minimize(context, &context.average_loss(&y.sum(1)?, 2)?)
        });
        run.unwrap();
    }
    let mut masters = Vec::new();
    let visited = optimizer.visit_whole_slots(&strategy, |name, slot| {
        masters.push((name.to_owned(), slot.unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()));
        std::ops::ControlFlow::<()>::Continue(())
    });
    assert!(visited.unwrap().is_continue());
    let sharded = masters.into_iter().find(|(name, _)| name == "fc.weight/master").unwrap().1;
    assert_eq!(sharded, master);
}

#[test]
fn averages_of_16_bits_are_kept_in_32_and_swapped_back_exactly() {
    let strategy = mirrored(2);
    let half = ScopeOptions::default().dtype(DType::F16);
    let model = strategy.scope_with(half, |vb| linear(4, 1, vb.pp("fc"))).unwrap();
    let bits = |replica: usize| -> Vec<Vec<u8>> {
        let bytes = |tensor: &Tensor| {
            let mut bytes = Vec::new();
            TensorStorage::<Candle>::read(tensor, &mut |buffer| bytes = buffer.as_bytes().to_vec()).unwrap();
            bytes
        };
        model.variables().iter().map(|variable| bytes(&variable.components()[replica])).collect()
    };
    let mut averages = Ema::new(&model, 0.9).unwrap();
    let start = bits(0);
    for variable in model.variables() {
        for component in variable.components() {
            TensorStorage::<Candle>::write(component, &mut |mut buffer| buffer.as_bytes_mut().fill(60)).unwrap();
        }
    }
    let written = bits(0);
    averages.update(&model).unwrap();
    averages.swap(&model).unwrap();
    assert!(bits(0) != written && bits(0) != start && bits(0) == bits(1));
    averages.swap(&model).unwrap();
    assert_eq!((bits(0), bits(1)), (written.clone(), written));
}
