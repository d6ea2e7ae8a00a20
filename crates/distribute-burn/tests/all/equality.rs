//! The same training on one replica and on several.

use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor};
use distribute_burn::{Adam, BurnContext, Error, Model, Optimizer, Sgd};

use distribute_strategy::{CentralStorageStrategy, DilocoStrategy, Strategy};

use crate::common::*;

fn equal_on_one_and_many<M: Classifier>(build: impl Fn(&Model<M>) -> Result<Optimizer, Error>) {
    let run = |replicas: usize| {
        let strategy = if replicas == 1 { one() } else { mirrored(replicas) };
        let model = scope::<M>(&strategy);
        let optimizer = build(&model).unwrap();
        let losses = train(&strategy, &model, &optimizer, 12);
        for local in 1..replicas {
            assert_eq!(values(&model, local), values(&model, 0), "replica {local} of {replicas}");
        }
        (losses, values(&model, 0))
    };
    let (losses, parameters) = run(1);
    assert!(losses[10] < losses[0], "nothing was learnt: {losses:?}");
    for replicas in [2, 3] {
        let (of_many, parameters_of_many) = run(replicas);
        assert_close(&losses, &of_many, 2e-4, "losses");
        for ((name, one), (_, many)) in parameters.iter().zip(&parameters_of_many) {
            assert_close(one, many, 2e-3, name);
        }
    }
}

#[test]
fn replicas_that_share_one_copy_train_as_mirrored_ones() {
    let run = |strategy: Strategy| {
        let model = scope::<Tied>(&strategy);
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        (train(&strategy, &model, &optimizer, 6), values(&model, 1))
    };
    let central = CentralStorageStrategy::builder().compute_devices(["CPU:0", "CPU:1"]).build().unwrap();
    assert_eq!(run(central), run(mirrored(2)));
}

#[test]
fn a_module_of_replicas_that_are_apart_is_refused() {
    let strategy = DilocoStrategy::builder().inner_steps(100).over(mirrored(2)).unwrap();
    let model = scope::<Mlp>(&strategy);
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    model.to_module(&strategy).unwrap();
    train(&strategy, &model, &optimizer, 1);
    assert_ne!(values(&model, 0), values(&model, 1));
    let told = model.to_module(&strategy).unwrap_err();
    assert!(matches!(told, Error::Optim(distribute_optim::Error::Apart)), "{told}");
    optimizer.synchronize(&strategy).unwrap();
    let module = model.to_module(&strategy).unwrap();
    let bias = module.head.bias.unwrap().val().into_data().try_to_vec::<f32>().unwrap();
    assert!(values(&model, 0).contains(&("head.bias".to_owned(), bias)));
    assert_eq!(values(&model, 0), values(&model, 1));
}

#[test]
fn an_mlp_trains_alike_on_one_replica_and_several() {
    equal_on_one_and_many::<Mlp>(|model| Adam::new(0.01).build(model));
}

#[test]
fn tied_weights_train_alike_on_one_replica_and_several() {
    equal_on_one_and_many::<Tied>(|model| Adam::new(0.01).build(model));
}

#[test]
fn a_convolution_trains_alike_on_one_replica_and_several() {
    equal_on_one_and_many::<Convolution>(|model| Adam::new(0.01).build(model));
}

#[test]
fn attention_trains_alike_on_one_replica_and_several() {
    // A bias of the keys has no effect, so its gradient is rounding, which Adam would scale up.
    equal_on_one_and_many::<Attention>(|model| Sgd::new(0.1).momentum(0.9).build(model));
}

#[test]
fn a_tied_weight_is_one_variable() {
    let model = scope::<Tied>(&mirrored(2));
    let names: Vec<&str> = model.variables().iter().map(distribute_burn::Variable::name).collect();
    assert_eq!(names, ["first.weight", "first.bias", "second.bias", "head.weight", "head.bias"]);
}

/// Makes the same steps by burn alone: backward on each replica's rows, one after another, and the sum of the
/// gradients.
fn emulated<M: Classifier>(replicas: usize, steps: usize, learning_rate: f64) -> (Vec<f32>, M) {
    let device = Device::flex().autodiff();
    let mut model = M::new(&device);
    let mut optimizer: ModuleOptimizer = SgdConfig::new().init();
    let mut all = Vec::new();
    for step in 0..steps {
        let rows = if step + 1 == steps { 9 } else { 24 };
        let mut loss_of_all = 0.0;
        let mut sums = GradientsParams::new();
        for (x, y) in cut(&batch(step, rows), replicas, &device) {
            let loss = losses(model.forward(x), y).sum().div_scalar(rows as f64);
            loss_of_all += loss.clone().into_scalar::<f32>();
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model.visit(&mut Add { from: gradients, to: &mut sums });
        }
        model = optimizer.step(learning_rate, model, sums);
        all.push(loss_of_all);
    }
    (all, model)
}

struct Add<'a> {
    from: GradientsParams,
    to: &'a mut GradientsParams,
}

impl burn::module::ModuleVisitor for Add<'_> {
    fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<D>>) {
        let Some(gradient) = self.from.remove::<D>(param.id) else { return };
        let sum = match self.to.remove::<D>(param.id) {
            Some(sum) => sum + gradient,
            None => gradient,
        };
        self.to.register(param.id, sum);
    }
}

/// Both with an optimizer of this project, and with burn's own.
#[test]
fn two_replicas_give_the_bits_of_a_sequential_emulation() {
    let strategy = mirrored(2);
    let (losses, emulated) = emulated::<Mlp>(2, 8, 0.05);
    let expected = scope_of(&strategy, &emulated);
    let own = scope::<Mlp>(&strategy);
    let burns = scope::<Mlp>(&strategy);
    let with_own = Sgd::new(0.05).build(&own).unwrap();
    let with_burns = burns.optimizer(SgdConfig::new().init(), 0.05, "SGD").unwrap();
    assert_eq!(train(&strategy, &own, &with_own, 8), losses);
    assert_eq!(train(&strategy, &burns, &with_burns, 8), losses);
    assert_eq!(values(&own, 0), expected);
    assert_eq!(values(&burns, 0), expected);
    assert_eq!(values(&burns, 1), expected);
}

fn scope_of(strategy: &distribute_strategy::Strategy, module: &Mlp) -> Vec<(String, Vec<f32>)> {
    let model = scope::<Mlp>(strategy);
    model.load_module(module).unwrap();
    values(&model, 1)
}

#[test]
fn gradients_come_last_layer_first_while_backward_runs() {
    let strategy = one();
    let model = scope::<Mlp>(&strategy);
    // A program's own backward gets all gradients from burn.
    let gradients = strategy
        .run_with(&model, |context, model| {
            let loss = model.forward(noise(&context.burn_device()?)).sum();
            Ok::<_, Error>(GradientsParams::from_grads(loss.backward(), model).len())
        })
        .unwrap();
    assert_eq!(gradients.values(), [8]);
}

#[test]
fn accumulated_gradients_equal_those_of_one_batch() {
    let run = |parts: usize| {
        let strategy = mirrored(2);
        let model = scope::<Mlp>(&strategy);
        let optimizer = Sgd::new(0.1).build(&model).unwrap();
        let device = Device::flex().autodiff();
        for step in 0..4 {
            let pieces = cut(&batch(step, 24), 2 * parts, &device);
            strategy
                .run_with((&model, &optimizer), |context, (model, optimizer)| {
                    for part in 0..parts {
                        let (x, y) = pieces[context.replica_id() * parts + part].clone();
                        let loss = context.average_loss(losses(model.forward(x), y), 24);
                        if part + 1 < parts {
                            optimizer.accumulate(context, &loss)?;
                        } else {
                            optimizer.minimize(context, &loss)?;
                        }
                    }
                    Ok::<_, Error>(())
                })
                .unwrap();
        }
        values(&model, 1)
    };
    for ((name, whole), (_, accumulated)) in run(1).iter().zip(&run(3)) {
        assert_close(whole, accumulated, 1e-5, name);
    }
}

#[test]
fn frozen_variables_stay_as_they_are() {
    let strategy = mirrored(2);
    let mut model = scope::<Mlp>(&strategy);
    assert_eq!(model.freeze(|name| name.starts_with("hidden.")).unwrap(), 6);
    let before = values(&model, 0);
    let optimizer = Adam::new(0.01).build(&model).unwrap();
    assert!(matches!(model.freeze(|_| true), Err(Error::FrozenLate)));
    train(&strategy, &model, &optimizer, 3);
    for ((name, before), (_, after)) in before.iter().zip(&values(&model, 1)) {
        assert_eq!(before == after, name.starts_with("hidden."), "{name}");
    }
    drop(optimizer);
    assert_eq!(model.unfreeze(|_| true).unwrap(), 6);
    let optimizer = Adam::new(0.01).build(&model).unwrap();
    let frozen = values(&model, 0);
    train(&strategy, &model, &optimizer, 3);
    assert!(values(&model, 1).iter().zip(&frozen).all(|(after, before)| after.1 != before.1));
}

#[test]
fn a_parameter_that_burn_has_frozen_is_not_trained() {
    #[derive(Module, Debug)]
    struct HalfFrozen {
        inner: Mlp,
    }
    impl Classifier for HalfFrozen {
        fn new(device: &Device) -> HalfFrozen {
            let mut inner = Mlp::new(device);
            inner.hidden = inner.hidden.into_iter().map(Module::no_grad).collect();
            HalfFrozen { inner }
        }
        fn forward(&self, x: Tensor<2>) -> Tensor<2> {
            self.inner.forward(x)
        }
    }
    for strategy in [mirrored(2), sharded(2)] {
        let mut model = scope::<HalfFrozen>(&strategy);
        assert_eq!(model.unfreeze(|_| true).unwrap(), 0, "{}", strategy.name());
        assert_eq!((model.freeze(|_| true).unwrap(), model.unfreeze(|_| true).unwrap()), (2, 2));
        let before = wholes(&strategy, &model);
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        train(&strategy, &model, &optimizer, 3);
        for ((name, before), (_, after)) in before.iter().zip(&wholes(&strategy, &model)) {
            assert_eq!(before == after, name.contains("hidden."), "{name}");
        }
    }
}
