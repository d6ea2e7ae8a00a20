//! Dropout drops what the seed, the layer, the replica and the number of calls determine, and nothing else.

use candle_core::{DType, Device, Module, ModuleT, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use distribute_candle::{
    Adam, CandleContext, CandleStrategy, Dropout, Error, Model, Optimizer, ScopeOptions, Sharded, dropout,
};
use distribute_strategy::{MirroredStrategy, Strategy};
use distribute_train::checkpoint::CheckpointManager;

fn mirrored(replicas: usize) -> Strategy {
    let devices: Vec<String> = (0..replicas).map(|index| format!("CPU:{index}")).collect();
    MirroredStrategy::builder().devices(devices).build().unwrap()
}

/// Returns what each replica keeps of ones.
fn kept(strategy: &Strategy, model: &Model<Dropout>, count: usize) -> Vec<Vec<f32>> {
    let ones = Tensor::ones(count, DType::F32, &Device::Cpu).unwrap();
    let kept = strategy.run_with(model, |_, layer| Ok::<_, Error>(layer.forward_t(&ones, true)?.to_vec1::<f32>()?));
    kept.unwrap().into_values()
}

fn layer(strategy: &Strategy, seed: u64, probability: f64, name: &str) -> Model<Dropout> {
    strategy.scope_seeded(seed, |vb| dropout(probability, vb.pp(name))).unwrap()
}

#[test]
fn elements_are_dropped_as_often_as_asked_and_the_mean_is_kept() {
    let strategy = mirrored(1);
    for probability in [0.1, 0.5, 0.9] {
        let kept = kept(&strategy, &layer(&strategy, 1, probability, "a"), 20_000).remove(0);
        let dropped = kept.iter().filter(|x| **x == 0.0).count() as f64 / kept.len() as f64;
        assert!((dropped - probability).abs() < 0.015, "{probability}: {dropped}");
        let rest = (1.0 / (1.0 - probability)) as f32;
        assert!(kept.iter().all(|x| *x == 0.0 || *x == rest), "{probability}");
    }
    // In 64 bits the factor has 64 bits.
    let tenth = layer(&strategy, 1, 0.1, "a");
    let x = Tensor::ones(100, DType::F64, &Device::Cpu).unwrap();
    let kept64 = tenth.first().forward_t(&x, true).unwrap().to_vec1::<f64>().unwrap();
    assert!(kept64.iter().all(|x| *x == 0.0 || *x == 1.0 / 0.9), "{kept64:?}");
    let all = layer(&strategy, 1, 0.0, "a");
    assert!(kept(&strategy, &all, 100)[0].iter().all(|x| *x == 1.0));
    let half = layer(&strategy, 1, 0.5, "a");
    let x = Tensor::ones(100, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(half.first().forward_t(&x, false).unwrap().to_vec1::<f32>().unwrap(), [1.0; 100]);
}

#[test]
fn seeds_layers_replicas_and_calls_differ_and_runs_repeat() {
    let two = mirrored(2);
    let draws = |seed, name| {
        let model = layer(&two, seed, 0.5, name);
        (0..2).flat_map(|_| kept(&two, &model, 64)).collect::<Vec<_>>()
    };
    let mut all = [draws(1, "a"), draws(2, "a"), draws(1, "b")].concat();
    assert_eq!(draws(1, "a"), all[..4]);
    // A replica's elements do not depend on the number of replicas.
    let one = mirrored(1);
    assert_eq!(kept(&one, &layer(&one, 1, 0.5, "a"), 64)[0], all[0]);
    all.sort_by(|a, b| a.partial_cmp(b).unwrap());
    all.dedup();
    assert_eq!(all.len(), 12);
}

#[test]
fn the_gradient_is_that_of_the_elements_that_were_kept() {
    let layer = layer(&mirrored(1), 3, 0.5, "a");
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let x = candle_core::Var::ones(50, dtype, &Device::Cpu).unwrap();
        let y = layer.first().forward_t(&x, true).unwrap();
        assert_eq!(y.dtype(), dtype);
        let gradients = y.backward().unwrap();
        let numbers = |x: &Tensor| x.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(numbers(gradients.get(&x).unwrap()), numbers(&y));
    }
}

#[test]
fn probabilities_and_types_that_do_not_fit_get_a_sentence() {
    let strategy = mirrored(1);
    for probability in [-0.1, 1.0, f64::NAN] {
        let problem = strategy.scope(|vb| dropout(probability, vb.pp("encoder.dropout"))).err().unwrap().to_string();
        assert!(problem.contains("\"encoder.dropout\"") && problem.contains("not including, 1"), "{problem}");
    }
    let twice = |vb: VarBuilder<'_>| Ok([dropout(0.5, vb.pp("a"))?, dropout(0.5, vb.pp("a"))?]);
    let problem = strategy.scope(twice).err().unwrap().to_string();
    assert!(problem.contains("another dropout layer at this path"), "{problem}");
    let indices = Tensor::ones(3, DType::U32, &Device::Cpu).unwrap();
    let problem = layer(&strategy, 0, 0.5, "a").first().forward_t(&indices, true).unwrap_err().to_string();
    assert!(problem.contains("U32; give floats"), "{problem}");
}

struct Net {
    first: Linear,
    inner: Sharded<(Linear, Dropout)>,
    dropout: Dropout,
    last: Linear,
    recomputes: bool,
}

impl Net {
    fn new(vb: VarBuilder<'_>, recomputes: bool) -> candle_core::Result<Net> {
        let inner = |vb: VarBuilder<'_>| Ok((linear(16, 16, vb.pp("linear"))?, dropout(0.2, vb.pp("dropout"))?));
        Ok(Net {
            first: linear(8, 16, vb.pp("first"))?,
            dropout: dropout(0.3, vb.pp("dropout"))?,
            inner: Sharded::new(vb.pp("inner"), inner)?,
            last: linear(16, 1, vb.pp("last"))?,
            recomputes,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        fn inner((linear, dropout): &(Linear, Dropout), x: &Tensor) -> candle_core::Result<Tensor> {
            dropout.forward_t(&linear.forward(x)?.tanh()?, true)
        }
        let x = self.dropout.forward_t(&self.first.forward(x)?.tanh()?, true)?;
        let x = if self.recomputes { self.inner.recompute(&x, inner)? } else { self.inner.run(&x, inner)? };
        // It runs twice: its stream has two uses in a step.
        let x = if self.recomputes { self.inner.recompute(&x, inner)? } else { self.inner.run(&x, inner)? };
        self.last.forward(&x)
    }
}

type Training = (Model<Net>, Optimizer);

fn training(strategy: &Strategy, recomputes: bool) -> Training {
    let model = strategy.scope_with(ScopeOptions::default().seed(5), |vb| Net::new(vb, recomputes)).unwrap();
    let optimizer = Adam::new(0.01).build(&model).unwrap();
    (model, optimizer)
}

/// Makes a step, which fails on the replica `failing` after its gradients were computed.
fn step(strategy: &Strategy, (model, optimizer): &Training, failing: Option<usize>) -> Result<f32, Error> {
    let x = Tensor::arange(0f32, 48.0, &Device::Cpu)?.reshape((6, 8))?.affine(0.02, -0.5)?;
    let losses = strategy.run_with((model, optimizer), |context, (model, optimizer)| {
        let loss = context.average_loss(&(model.forward(&x)? - 1.0)?.sqr()?.squeeze(1)?, 12)?;
        if failing == Some(context.replica_id()) {
            return Err(Error::NoExamples { what: "fail" });
        }
        optimizer.minimize(context, &loss)?;
        Ok::<_, Error>(loss.to_scalar::<f32>()?)
    })?;
    Ok(losses.values().iter().sum())
}

fn steps(strategy: &Strategy, training: &Training, count: usize) -> Vec<f32> {
    (0..count).map(|_| step(strategy, training, None).unwrap()).collect()
}

#[test]
fn a_failed_step_draws_nothing() {
    let strategy = mirrored(2);
    let undisturbed = steps(&strategy, &training(&strategy, false), 4);
    let disturbed = training(&strategy, false);
    let mut losses = steps(&strategy, &disturbed, 2);
    for failing in [0, 1] {
        assert!(step(&strategy, &disturbed, Some(failing)).is_err());
    }
    losses.extend(steps(&strategy, &disturbed, 2));
    assert_eq!(losses, undisturbed);
}

#[test]
fn a_restored_checkpoint_continues_the_streams() {
    let strategy = mirrored(2);
    let undisturbed = steps(&strategy, &training(&strategy, false), 5);
    let folder = tempfile::tempdir().unwrap();
    let before = training(&strategy, false);
    assert_eq!(steps(&strategy, &before, 3), undisturbed[..3]);
    let mut checkpoints = CheckpointManager::new(folder.path());
    checkpoints.save(&strategy, 3, &[&before.0, &before.1], &()).unwrap();
    checkpoints.finish().unwrap();
    drop(before);
    let (strategy, mut checkpoints) = (mirrored(2), CheckpointManager::new(folder.path()));
    let after = training(&strategy, false);
    let restored: Option<(u64, ())> = checkpoints.restore(&strategy, &[&after.0, &after.1]).unwrap();
    assert_eq!(restored.unwrap().0, 3);
    assert_eq!(steps(&strategy, &after, 2), undisturbed[3..]);
}

#[test]
fn a_block_that_is_computed_again_drops_the_same_elements() {
    let strategy = mirrored(2);
    let [kept, recomputed] = [false, true].map(|recomputes| {
        let training = training(&strategy, recomputes);
        let losses = steps(&strategy, &training, 4);
        let values = training.0.variables().iter().map(|variable| variable.components()[1].flatten_all().unwrap());
        (losses, values.map(|value| value.to_vec1::<f32>().unwrap()).collect::<Vec<_>>())
    });
    assert_eq!(kept, recomputed);
}
