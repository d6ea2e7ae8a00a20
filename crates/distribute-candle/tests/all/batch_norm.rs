//! Synchronised batch normalisation in difficult cases: many buckets of gradients, replicas without examples, failures.

use std::time::{Duration, Instant};

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{BatchNormConfig, Conv2dConfig, Linear, ModuleT, VarBuilder, VarMap, batch_norm, linear};
use distribute_candle::{
    CandleContext, CandleStrategy, Conv2d, Error, Model, Sgd, SyncBatchNorm, add, cross_entropy_per_example,
    sync_batch_norm,
};
use distribute_strategy::{CommunicationOptions, MirroredStrategy, Strategy};

/// A model with more than one bucket on either side of the normalisation.
struct Wide {
    first: Linear,
    norm: SyncBatchNorm,
    second: Linear,
    third: Linear,
    /// Whether the normalised elements are added to their input, and rectified.
    rectifies: bool,
}

impl Wide {
    /// Creates a network whose normalisation has 600 elements for each example, in this many channels.
    fn new(channels: usize, rectifies: bool, vb: VarBuilder<'_>) -> candle_core::Result<Wide> {
        Ok(Wide {
            rectifies,
            first: linear(500, 600, vb.pp("first"))?,
            norm: sync_batch_norm(channels, BatchNormConfig::default(), vb.pp("norm"))?,
            second: linear(600, 600, vb.pp("second"))?,
            third: linear(600, 3, vb.pp("third"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let channels = self.norm.running_mean().dim(0)?;
        let x = self.first.forward(x)?.reshape(((), channels, 600 / channels))?;
        let x = match self.rectifies {
            true => self.norm.forward_relu(&x, Some(&x), true)?,
            false => self.norm.forward_t(&x, true)?,
        };
        let x = x.flatten_from(1)?.tanh()?;
        self.third.forward(&self.second.forward(&x)?.tanh()?)
    }
}

fn mirrored(replicas: usize) -> Strategy {
    let devices: Vec<String> = (0..replicas).map(|index| format!("CPU:{index}")).collect();
    MirroredStrategy::builder().devices(devices).build().unwrap()
}

fn train(strategy: &Strategy, examples: usize, channels: usize, rectifies: bool) -> Model<Wide> {
    let model = strategy.scope(|vb| Wide::new(channels, rectifies, vb)).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let x: Vec<f32> = (0..examples * 500).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let x = Tensor::from_vec(x, (examples, 500), &Device::Cpu).unwrap();
    let y = Tensor::from_vec((0..examples as u32).map(|i| i % 3).collect(), examples, &Device::Cpu).unwrap();
    for _ in 0..3 {
        let parts = strategy
            .distribute_values_from_function(|context| {
                let rows = distribute_collectives::schedule::part(examples, context.num_replicas, context.replica_id);
                Ok::<_, Error>((x.narrow(0, rows.start, rows.len())?, y.narrow(0, rows.start, rows.len())?))
            })
            .unwrap();
        strategy
            .run_with((&model, &optimizer, parts), |context, (model, optimizer, (x, y))| {
                let per_example = cross_entropy_per_example(&model.forward(&x)?, &y)?;
                optimizer.minimize(context, &context.average_loss(&per_example, examples)?)
            })
            .unwrap();
    }
    model
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn a_batch_without_examples_changes_no_statistic_of_others_in_its_run() {
    let strategy = mirrored(1);
    let of = |batches: &[bool]| -> Vec<Vec<f32>> {
        let model = strategy.scope(|vb| batch_norm(4, BatchNormConfig::default(), vb)).unwrap();
        let outcome = strategy.run_with(&model, |context, model| {
            for has_examples in batches {
                context.begin_batch(*has_examples)?;
                let scale = if *has_examples { 1.0 } else { 100.0 };
                model.forward_t(&(Tensor::arange(0f32, 8.0, &Device::Cpu)?.reshape((2, 4))? * scale)?, true)?;
            }
            Ok::<(), Error>(())
        });
        outcome.unwrap();
        model.variables().iter().map(|variable| flat(&variable.components()[0])).collect()
    };
    let alone = of(&[true]);
    assert_ne!(alone, of(&[]));
    assert_eq!(of(&[true, false]), alone);
    assert_eq!(of(&[false, true]), alone);
}

#[test]
fn many_buckets_and_empty_replicas_train_as_one_replica() {
    // Channels of one element, and images.
    let cases = [(8, 600, false), (3, 600, false), (8, 24, false), (3, 24, false), (8, 24, true), (3, 24, true)];
    for (examples, channels, rectifies) in cases {
        let [four, one] = [4, 1].map(|replicas| train(&mirrored(replicas), examples, channels, rectifies));
        for (ours, theirs) in four.variables().iter().zip(one.variables()) {
            for component in ours.components() {
                for (a, b) in flat(component).iter().zip(flat(&theirs.components()[0])) {
                    assert!((a - b).abs() < 4e-5 * b.abs().max(1.0), "{}: {a} {b}", ours.name());
                }
            }
        }
    }
}

#[test]
fn one_replica_normalises_as_candle_does() {
    // Few elements of a channel, and as many as make an image.
    for size in [5, 20] {
        let (of_ours, of_theirs) = (VarMap::new(), VarMap::new());
        let builder = |variables| VarBuilder::from_varmap(variables, DType::F32, &Device::Cpu);
        let ours = sync_batch_norm(4, BatchNormConfig::default(), builder(&of_ours)).unwrap();
        let theirs = batch_norm(4, BatchNormConfig::default(), builder(&of_theirs)).unwrap();
        let numbers =
            |seed: usize| -> Vec<f32> { (0..12 * size).map(|i| ((i * seed % 23) as f32 - 11.0) / 5.0).collect() };
        let tensor = |seed| Tensor::from_vec(numbers(seed), (3, 4, size), &Device::Cpu).unwrap();
        let (x, factors) = (Var::from_tensor(&tensor(7)).unwrap(), tensor(5));
        let close = |what: &str, a: &Tensor, b: &Tensor| {
            let (a, b) = (flat(a), flat(b));
            assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 2e-5 * b.abs().max(1.0)), "{what}: {a:?} {b:?}");
        };
        for train in [true, false] {
            let [a, b] = [&ours as &dyn ModuleT, &theirs].map(|norm| norm.forward_t(&x, train).unwrap());
            close("the result", &a, &b);
            let [a, b] = [a, b].map(|y| (y * &factors).unwrap().sum_all().unwrap().backward().unwrap());
            close("the gradient", a.get(&x).unwrap(), b.get(&x).unwrap());
            for name in ["weight", "bias"] {
                let of = |gradients: &GradStore, variables: &VarMap| {
                    gradients.get(&variables.data().lock().unwrap()[name]).unwrap().clone()
                };
                close(name, &of(&a, &of_ours), &of(&b, &of_theirs));
            }
        }
        close("the mean", ours.running_mean(), theirs.running_mean());
        close("the variance", ours.running_var(), theirs.running_var());
    }
}

#[test]
fn one_operation_normalises_and_rectifies_as_several_do() {
    // Few elements of a channel, and as many as make an image.
    for (size, dtype) in [(5, DType::F32), (20, DType::F32), (20, DType::F64)] {
        let variables = VarMap::new();
        let vb = VarBuilder::from_varmap(&variables, dtype, &Device::Cpu);
        let norm = sync_batch_norm(4, BatchNormConfig::default(), vb).unwrap();
        for (name, values) in [("weight", [0.5f32, 2.0, -1.0, 1.5]), ("bias", [0.1f32, -0.3, 0.5, 0.0])] {
            let values = Tensor::new(&values, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            variables.data().lock().unwrap()[name].set(&values).unwrap();
        }
        let tensor = |seed: usize| {
            let numbers: Vec<f32> = (0..12 * size).map(|i| ((i * seed % 23) as f32 - 11.0) / 5.0).collect();
            Tensor::from_vec(numbers, (3, 4, size), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
        };
        let (x, shortcut) = (Var::from_tensor(&tensor(7)).unwrap(), Var::from_tensor(&tensor(3)).unwrap());
        for (train, adds) in [(true, false), (true, true), (false, false), (false, true)] {
            let one = norm.forward_relu(&x, adds.then_some(&shortcut), train).unwrap();
            let normed = norm.forward_t(&x, train).unwrap();
            let several = if adds { (normed + shortcut.as_tensor()).unwrap() } else { normed }.relu().unwrap();
            let results = [&one, &several].map(|y| flat(&y.to_dtype(DType::F32).unwrap()));
            let gradients = [one, several].map(|y| {
                let gradients = (y * tensor(5)).unwrap().sum_all().unwrap().backward().unwrap();
                let data = variables.data().lock().unwrap();
                let of = |variable: &Tensor| gradients.get(variable).map(|x| flat(&x.to_dtype(DType::F32).unwrap()));
                [of(&x), of(&shortcut), of(&data["weight"]), of(&data["bias"])]
            });
            let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 2e-5 * b.abs().max(1.0));
            assert!(close(&results[0], &results[1]), "{train} {adds}: {results:?}");
            for (what, (a, b)) in gradients[0].iter().zip(&gradients[1]).enumerate() {
                let same = match (a, b) {
                    (Some(a), Some(b)) => close(a, b),
                    (None, None) => what == 1 && !adds,
                    _ => false,
                };
                assert!(same, "gradient {what}, {size} {train} {adds}: {a:?} {b:?}");
            }
        }
        let error = norm.forward_relu(&x, Some(&tensor(3).narrow(0, 0, 2).unwrap()), true).unwrap_err().to_string();
        assert!(error.contains("the shortcut is [2, 4,"), "{error}");
    }
}

/// Numbers in no order.
fn numbers(shape: &[usize], seed: usize, dtype: DType) -> Tensor {
    let of = |at: usize| ((at * 7919 + seed * 31) % 10_007) as f64 / 2000.0 - 2.5;
    let all: Vec<f64> = (0..shape.iter().product()).map(of).collect();
    Tensor::from_vec(all, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// How a block adds its branches.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Adds {
    InOneOperation,
    ByAdd,
}

/// A block of a residual network whose shortcut is normalised too; returns the gradients of its three weights.
///
/// `norm` normalises for the first, the second or the third time, adds the shortcut and rectifies if it is told to.
fn block(
    x: &Tensor,
    convolved: impl Fn(&Tensor, &Var) -> candle_core::Result<Tensor>,
    norm: impl Fn(usize, &Tensor, Option<&Tensor>, bool) -> candle_core::Result<Tensor>,
) -> candle_core::Result<Vec<Vec<f64>>> {
    let weights: Vec<Var> =
        (0..3).map(|seed| Var::from_tensor(&numbers(&[3, 3, 1, 1], 40 + seed, x.dtype()))).collect::<Result<_, _>>()?;
    let inner = norm(0, &convolved(x, &weights[0])?, None, true)?;
    let shortcut = norm(1, &convolved(x, &weights[1])?, None, false)?;
    let y = norm(2, &convolved(&inner, &weights[2])?, Some(&shortcut), true)?;
    let gradients = (y.sqr()? + (y.powf(3.0)? * 0.3)?)?.sum_all()?.backward()?;
    let of = |weight: &Var| match gradients.get(weight) {
        Some(gradient) => gradient.to_dtype(DType::F64)?.flatten_all()?.to_vec1(),
        None => Ok(vec![0.0; 9]),
    };
    weights.iter().map(of).collect()
}

/// Compares the gradients of replicas that have batches of these shapes with those of their batches together.
fn compare_block(shapes: [[usize; 4]; 2], dtype: DType, adds: Adds) {
    let communication = CommunicationOptions::default().timeout(Duration::from_secs(60));
    let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).communication(communication);
    let batches = [0, 1].map(|replica| numbers(&shapes[replica], replica, dtype));
    let outcome = strategy.build().unwrap().run_with((), |context, ()| {
        let variables = VarMap::new();
        let vb = VarBuilder::from_varmap(&variables, dtype, &Device::Cpu);
        let norms: Vec<SyncBatchNorm> = ["first", "shortcut", "second"]
            .iter()
            .map(|name| sync_batch_norm(3, BatchNormConfig::default(), vb.pp(name)))
            .collect::<Result<_, _>>()?;
        let convolved = |x: &Tensor, weight: &Var| {
            candle_core::Module::forward(&Conv2d::new(weight.as_tensor().clone(), None, Conv2dConfig::default()), x)
        };
        Ok::<_, Error>(block(&batches[context.replica_id()], convolved, |at, x, shortcut, rectifies| {
            match (shortcut, rectifies) {
                (Some(shortcut), _) if adds == Adds::ByAdd => {
                    distribute_candle::relu(&add(shortcut, &norms[at].forward_t(x, true)?)?)
                }
                (_, true) => norms[at].forward_relu(x, shortcut, true),
                (_, false) => norms[at].forward_t(x, true),
            }
        })?)
    });
    let of_replicas = outcome.unwrap_or_else(|error| panic!("{shapes:?} {dtype:?} {adds:?}: {error}")).into_values();

    let together: Vec<Tensor> = batches
        .iter()
        .filter(|batch| batch.elem_count() > 0)
        .map(|batch| batch.to_dtype(DType::F64).unwrap().transpose(0, 1).unwrap().flatten_from(1).unwrap())
        .collect();
    let x = Tensor::cat(&together, 1).unwrap().reshape((1, 3, 1, ())).unwrap();
    let convolved =
        |x: &Tensor, weight: &Var| weight.reshape((3, 3))?.matmul(&x.reshape((3, ()))?)?.reshape((1, 3, 1, x.dim(3)?));
    let expected = block(&x, convolved, |_, x, shortcut, rectifies| {
        let centred = x.broadcast_sub(&x.mean_keepdim(3)?)?;
        let normed = centred.broadcast_div(&(centred.sqr()?.mean_keepdim(3)? + 1e-5)?.sqrt()?)?;
        let sum = shortcut.map_or(Ok(normed.clone()), |shortcut| normed + shortcut)?;
        if rectifies { sum.relu() } else { Ok(sum) }
    });
    let tolerance = if dtype == DType::F32 { 2e-4 } else { 1e-9 };
    for (at, expected) in expected.unwrap().iter().enumerate() {
        let scale = expected.iter().fold(1.0, |most, x| f64::max(most, x.abs()));
        for (nth, expected) in expected.iter().enumerate() {
            let got = of_replicas[0][at][nth] + of_replicas[1][at][nth];
            let is_near = (got - expected).abs() < tolerance * scale;
            assert!(is_near, "{shapes:?} {dtype:?} {adds:?}: weight {at}, {nth}: {got} instead of {expected}");
        }
    }
}

#[test]
fn replicas_that_normalise_in_different_ways_exchange_the_sums_of_the_same_layer() {
    // One replica's planes are long enough for a fused operation, and the other's are not; or one has no examples.
    for shapes in [[[2, 3, 1, 15], [2, 3, 1, 16]], [[2, 3, 1, 20], [3, 3, 1, 4]], [[2, 3, 1, 16], [0, 3, 1, 16]]] {
        for dtype in [DType::F32, DType::F64] {
            compare_block(shapes, dtype, Adds::InOneOperation);
            compare_block(shapes, dtype, Adds::ByAdd);
        }
    }
    compare_block([[2, 3, 1, 5], [0, 3, 1, 5]], DType::F64, Adds::InOneOperation);
}

#[test]
fn branches_of_an_empty_batch_stay_in_the_graph_in_any_type() {
    for dtype in [DType::F32, DType::BF16] {
        let [x, y] = [1, 2].map(|seed| Var::from_tensor(&numbers(&[0, 3], seed, dtype)).unwrap());
        let gradients = add(&x, &y).unwrap().sum_all().unwrap().backward().unwrap();
        assert!(gradients.get(&x).is_some() && gradients.get(&y).is_some(), "{dtype:?}");
        assert!(add(&x, &numbers(&[0, 4], 1, dtype)).is_err());
        // The shortcut of a normalised batch too, in training and in evaluation.
        let vb = VarBuilder::from_varmap(&VarMap::new(), dtype, &Device::Cpu);
        let norm = sync_batch_norm(3, BatchNormConfig::default(), vb).unwrap();
        for train in [true, false] {
            let z = norm.forward_relu(&x, Some(&y), train).unwrap().sum_all().unwrap();
            let gradients = z.backward().unwrap();
            assert!(gradients.get(&x).is_some() && gradients.get(&y).is_some(), "{dtype:?} {train}");
        }
    }
}

#[test]
fn sums_of_different_layers_are_never_combined() {
    let communication = CommunicationOptions::default().timeout(Duration::from_secs(60));
    let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).communication(communication);
    let strategy = strategy.build().unwrap();
    // In forward, and in backward alone; planes of one element, and such as fused operations take.
    for (backward, size) in [(false, 1), (true, 1), (false, 16), (true, 16)] {
        let model = strategy.scope(|vb| {
            let norm = |name: &str| sync_batch_norm(2, BatchNormConfig::default(), vb.pp(name));
            Ok([norm("body.one")?, norm("body.other")?])
        });
        let model = model.unwrap();
        let outcome = strategy.run_with(&model, |context, norms| {
            let x = Var::from_tensor(&numbers(&[4, 2, size], context.replica_id(), DType::F32))?;
            let is_first = context.replica_id() == 0;
            let order = if backward || is_first { [0, 1] } else { [1, 0] };
            let [a, b] = order.map(|at| norms[at].forward_t(&x, true));
            let (a, b) = (a?.sqr()?, b?.sqr()?);
            if is_first { add(&a, &b) } else { add(&b, &a) }?.sum_all()?.backward()?;
            Ok::<_, Error>(())
        });
        let error = outcome.unwrap_err().to_string();
        let direction = if backward { "backward" } else { "forward" };
        for expected in [format!("{direction} of \"body.one\""), format!("{direction} of \"body.other\"")] {
            assert!(error.contains(&expected), "{backward} {size}: {error}");
        }
    }
}

#[test]
fn a_replica_that_fails_does_not_leave_others_in_the_normalisation() {
    let strategy = mirrored(2);
    let model = strategy.scope(|vb| sync_batch_norm(2, BatchNormConfig::default(), vb.pp("norm"))).unwrap();
    let x = Tensor::ones((2, 2), candle_core::DType::F32, &Device::Cpu).unwrap();
    for fails in [false, true, false] {
        let began = Instant::now();
        let outcome = strategy.run_with(&model, |context, norm| {
            if fails && context.replica_id() == 1 {
                return Err(Error::Candle(candle_core::Error::Msg("as planned".to_owned())));
            }
            norm.forward_t(&x, true)?;
            Ok(())
        });
        assert_eq!(outcome.is_err(), fails, "{outcome:?}");
        // The time limit of the others is five minutes.
        assert!(began.elapsed() < Duration::from_secs(60));
    }
}

#[test]
fn channels_that_do_not_fit_are_a_sentence() {
    let strategy = mirrored(1);
    let model = strategy.scope(|vb| sync_batch_norm(2, BatchNormConfig::default(), vb.pp("norm"))).unwrap();
    let x = Tensor::ones((2, 3), candle_core::DType::F32, &Device::Cpu).unwrap();
    let error = model.first().forward_t(&x, true).unwrap_err().to_string();
    assert!(error.contains("the input has shape [2, 3]; give (examples, 2, …)"), "{error}");
    let wrong = BatchNormConfig { momentum: 2.0, ..BatchNormConfig::default() };
    let error = strategy.scope(|vb| sync_batch_norm(2, wrong, vb.pp("other"))).err().unwrap().to_string();
    assert!(error.contains("momentum 2"), "{error}");
}
