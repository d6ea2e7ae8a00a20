use distribute_collectives::{Compression, Rank, ReduceOp};
use distribute_device::BufferMut;
use distribute_strategy::{
    Error as StrategyError, LocalReplica, LocalUpdates, MirroredStrategy, Replicas, Request, Strategy, StrategyExtended,
};
use distribute_values::{Host, HostTensor, TensorStorage};

use crate::{Ema, HostError, HostLoss, HostModel, LossScale, Optimizer, Sgd, SparseGradients, Trainable};

/// How replicas become equal.
#[derive(Clone, Copy, PartialEq)]
enum How {
    /// By the means of variables and state.
    Mean,
    /// By the first replica's variables.
    First,
    /// Not at all, by an error on the second replica in the first synchronization.
    Fails,
}

struct Local {
    over: Strategy,
    every: u64,
    how: How,
    shares: bool,
}

impl LocalUpdates for Local {
    fn is_due(&self, steps: u64) -> bool {
        steps.is_multiple_of(self.every)
    }

    fn synchronize(&self, replica: &dyn LocalReplica) -> distribute_strategy::Result<()> {
        match self.how {
            How::Fails if replica.group().rank() == Rank(1) => return Err(StrategyError::NoData),
            How::Mean | How::Fails => replica.average_variables()?,
            How::First => {
                let mut broadcast = |_: &str, buffer: &mut BufferMut<'_>| {
                    let own = buffer.as_mut_slice::<f32>().map_err(distribute_values::Error::from)?;
                    Ok(replica.group().broadcast(own, Rank(0))?)
                };
                return replica.change_variables(&mut broadcast);
            }
        }
        replica.average_state()
    }
}

impl StrategyExtended for Local {
    fn name(&self) -> &'static str {
        "Local"
    }
    fn replicas(&self) -> &Replicas {
        self.over.extended().replicas()
    }
    fn describe(&self) -> String {
        format!("local updates over {}", self.over.describe())
    }
    fn shares_variables(&self) -> bool {
        self.shares
    }
    fn local_updates(&self) -> Option<&dyn LocalUpdates> {
        Some(self)
    }
}

fn mirrored(replicas: usize) -> Strategy {
    MirroredStrategy::builder().num_replicas(replicas).build().unwrap()
}

fn local(replicas: usize, every: u64, how: How) -> Strategy {
    Strategy::new(Local { over: mirrored(replicas), every, how, shares: false })
}

fn tensor(values: &[f32]) -> HostTensor<f32> {
    HostTensor::new(&[values.len()], values.to_vec()).unwrap()
}

fn model(strategy: &Strategy) -> HostModel {
    HostModel::new(strategy, [("w", tensor(&[0.5, -1.0])), ("b", tensor(&[0.25]))]).unwrap()
}

fn momentum(model: &HostModel) -> Optimizer<Host> {
    Sgd::new(0.5).momentum(0.5).build(model).unwrap()
}

/// A replica's share of the gradient of a step, in numbers whose sums and products are exact.
fn share(step: usize, replica: usize) -> Vec<Vec<f32>> {
    let of = |at: usize| (1 + replica * 2 + at) as f32 * 0.25 - step as f32 * 0.5;
    vec![vec![of(0), of(3)], vec![of(1)]]
}

fn loss(step: usize, replica: usize) -> HostLoss {
    HostLoss(share(step, replica).iter().map(|values| Some(tensor(values))).collect())
}

fn train(strategy: &Strategy, optimizer: &Optimizer<Host>, step: usize) -> Result<(), HostError> {
    let run = strategy
        .run_with(optimizer, |context, optimizer| optimizer.minimize(context, &loss(step, context.replica_id())));
    run.map(drop)
}

/// Returns each replica's copies of all variables, one after another.
fn copies(model: &HostModel, replicas: usize) -> Vec<Vec<f32>> {
    let of = |local: usize| {
        let all = model.parameters().variables().iter();
        all.flat_map(|variable| variable.components()[local].to_elements::<f32>().unwrap()).collect()
    };
    (0..replicas).map(of).collect()
}

#[test]
fn replicas_train_apart_and_become_the_mean() {
    for replicas in [1, 2, 4] {
        let strategy = local(replicas, 3, How::Mean);
        let model = model(&strategy);
        let optimizer = momentum(&model);
        // Each replica's variables and momentum, computed one after another.
        let mut expected: Vec<[Vec<f32>; 2]> = vec![[vec![0.5, -1.0, 0.25], vec![0.0; 3]]; replicas];
        for step in 0..7 {
            train(&strategy, &optimizer, step).unwrap();
            for (replica, [values, momenta]) in expected.iter_mut().enumerate() {
                for (at, gradient) in share(step, replica).concat().into_iter().enumerate() {
                    momenta[at] = momenta[at] * 0.5 + gradient * replicas as f32;
                    values[at] -= 0.5 * momenta[at];
                }
            }
            if (step + 1) % 3 == 0 {
                for part in 0..2 {
                    let mean = |at: usize| expected.iter().map(|of| of[part][at]).sum::<f32>() / replicas as f32;
                    let mean: Vec<f32> = (0..3).map(mean).collect();
                    expected.iter_mut().for_each(|of| of[part].clone_from(&mean));
                }
            }
            let values: Vec<Vec<f32>> = expected.iter().map(|[values, _]| values.clone()).collect();
            assert_eq!(copies(&model, replicas), values, "{replicas} replicas, step {step}");
            let is_equal = replicas == 1 || (step + 1) % 3 == 0;
            assert_eq!(model.parameters().check_equal().is_ok(), is_equal, "step {step}");
        }
        // The state, which has the learning rate in it, is the mean too.
        optimizer.synchronize(&strategy).unwrap();
        let mean = |at: usize| -0.5 * expected.iter().map(|[_, momenta]| momenta[at]).sum::<f32>() / replicas as f32;
        let momenta: Vec<f32> =
            optimizer.slots().flat_map(|slot| slot.components()[0].to_elements::<f32>().unwrap()).collect();
        assert_eq!(momenta, (0..3).map(mean).collect::<Vec<_>>());
    }
}

#[test]
fn synchronized_in_every_step_they_equal_replicas_that_sum_gradients() {
    for replicas in [1, 2, 4] {
        let (apart, together) = (local(replicas, 1, How::Mean), mirrored(replicas));
        let (one, other) = (model(&apart), model(&together));
        let (first, second) = (Sgd::new(0.5).build(&one).unwrap(), Sgd::new(0.5).build(&other).unwrap());
        for step in 0..5 {
            train(&apart, &first, step).unwrap();
            train(&together, &second, step).unwrap();
            assert_eq!(one.values().unwrap(), other.values().unwrap(), "{replicas} replicas, step {step}");
        }
    }
}

#[test]
fn they_communicate_in_synchronizations_only() {
    let strategy = local(2, 3, How::Mean);
    let model = model(&strategy);
    let optimizer = momentum(&model);
    // The first step is preceded by a comparison of settings.
    train(&strategy, &optimizer, 0).unwrap();
    let operations = || strategy.groups()[0].flight_record().operations.len();
    let before = operations();
    train(&strategy, &optimizer, 1).unwrap();
    assert_eq!(operations(), before);
    assert!(optimizer.times().communication.is_zero());
    train(&strategy, &optimizer, 2).unwrap();
    assert!(operations() > before);
    assert!(!optimizer.times().communication.is_zero());
}

#[test]
fn requests_in_one_process_are_heard_in_every_step() {
    let strategy = local(2, 100, How::Mean);
    let model = model(&strategy);
    let optimizer = momentum(&model);
    train(&strategy, &optimizer, 0).unwrap();
    assert!(!strategy.take_request(Request::Leave));
    strategy.request(Request::Leave);
    train(&strategy, &optimizer, 1).unwrap();
    assert!(strategy.take_request(Request::Leave));
}

#[test]
fn an_author_chooses_what_variables_become() {
    let strategy = local(3, 2, How::First);
    let model = model(&strategy);
    let optimizer = momentum(&model);
    for step in 0..2 {
        train(&strategy, &optimizer, step).unwrap();
    }
    let alone = local(1, 2, How::First);
    let of_first = HostModel::new(&alone, [("w", tensor(&[0.5, -1.0])), ("b", tensor(&[0.25]))]).unwrap();
    let optimizer = Sgd::new(1.5).momentum(0.5).build(&of_first).unwrap();
    for step in 0..2 {
        train(&alone, &optimizer, step).unwrap();
    }
    assert_eq!(copies(&model, 3), vec![copies(&of_first, 1).remove(0); 3]);
}

#[test]
fn a_replica_that_fails_before_its_update_leaves_all_as_they_were() {
    let strategy = local(2, 2, How::Mean);
    let model = model(&strategy);
    let optimizer = momentum(&model);
    train(&strategy, &optimizer, 0).unwrap();
    let before = copies(&model, 2);
    let run = strategy.run_with(&optimizer, |context, optimizer| match context.replica_id() {
        0 => optimizer.minimize(context, &loss(1, 0)),
        _ => Err(HostError::Strategy(StrategyError::NoData)),
    });
    assert!(run.is_err());
    assert_eq!(copies(&model, 2), before);
    // All count the same steps, so they synchronize after the same one.
    train(&strategy, &optimizer, 1).unwrap();
    model.parameters().check_equal().unwrap();
    let copies = copies(&model, 2);
    assert_eq!(copies[0], copies[1]);
}

#[test]
fn a_synchronization_that_fails_leaves_variables_as_the_step_made_them() {
    let failing = local(2, 1, How::Fails);
    let apart = local(2, 9, How::Mean);
    let (one, other) = (model(&failing), model(&apart));
    let (optimizer, expected) = (momentum(&one), momentum(&other));
    assert!(train(&failing, &optimizer, 0).is_err());
    train(&apart, &expected, 0).unwrap();
    assert_eq!(copies(&one, 2), copies(&other, 2));
    assert!(one.parameters().check_equal().is_err());
}

#[test]
fn a_run_that_fails_after_a_synchronization_does_not_undo_it() {
    let strategy = local(2, 1, How::Mean);
    let model = model(&strategy);
    let optimizer = momentum(&model);
    let counts = || optimizer.states.each.iter().map(|state| state.lock().standing.counts.of(1)).collect::<Vec<_>>();
    let run = strategy.run_with(&optimizer, |context, optimizer| {
        let HostLoss(mut gradients) = loss(0, context.replica_id());
        if context.replica_id() == 1 {
            gradients[1] = None;
        }
        optimizer.minimize(context, &HostLoss(gradients))?;
        Err::<(), _>(HostError::Strategy(StrategyError::NoData))
    });
    assert!(run.is_err());
    // The second variable has a step on both replicas, as its state has.
    assert_eq!(counts(), [1, 1]);
    model.parameters().check_equal().unwrap();
}

#[test]
fn a_replica_without_examples_makes_no_update() {
    let strategy = local(2, 2, How::Mean);
    let model = model(&strategy);
    let optimizer = momentum(&model);
    let before = copies(&model, 2);
    let run = strategy.run_with(&optimizer, |context, optimizer| {
        context.begin_batch(context.replica_id() == 0)?;
        let _ = context.weight();
        optimizer.minimize(context, &loss(0, context.replica_id()))
    });
    run.unwrap();
    let after = copies(&model, 2);
    assert_ne!(after[0], before[0]);
    assert_eq!(after[1], before[1]);
}

#[test]
fn an_average_needs_equal_copies() {
    let strategy = local(2, 5, How::Mean);
    let model = model(&strategy);
    let optimizer = momentum(&model);
    let mut ema = Ema::new(&model, 0.5).unwrap();
    assert_eq!(optimizer.memory().gradient_bytes, None);
    train(&strategy, &optimizer, 0).unwrap();
    assert_eq!(optimizer.memory().gradient_bytes, Some(12));
    for told in [ema.update(&model).unwrap_err(), Ema::new(&model, 0.5).map(drop).unwrap_err()] {
        assert!(matches!(told, HostError::Optim(crate::Error::Apart)), "{told}");
    }
    optimizer.synchronize(&strategy).unwrap();
    ema.update(&model).unwrap();
    // Nothing is left to do.
    let before = strategy.groups()[0].flight_record().operations.len();
    optimizer.synchronize(&strategy).unwrap();
    assert_eq!(strategy.groups()[0].flight_record().operations.len(), before);
}

#[test]
fn averages_take_the_place_of_equal_copies_only() {
    let strategy = local(2, 4, How::Mean);
    let model = model(&strategy);
    let optimizer = momentum(&model);
    let mut ema = Ema::new(&model, 0.5).unwrap();
    train(&strategy, &optimizer, 0).unwrap();
    let apart = copies(&model, 2);
    assert_ne!(apart[0], apart[1]);
    let told = ema.swap(&model).unwrap_err();
    assert!(matches!(told, HostError::Optim(crate::Error::Apart)), "{told}");
    assert_eq!(copies(&model, 2), apart);
    ema.check_not_swapped().unwrap();
    optimizer.synchronize(&strategy).unwrap();
    let equal = copies(&model, 2);
    ema.swap(&model).unwrap();
    assert_ne!(copies(&model, 2), equal);
    ema.swap(&model).unwrap();
    assert_eq!(copies(&model, 2), equal);
}

#[test]
fn settings_that_cannot_act_are_refused() {
    let strategy = local(2, 2, How::Mean);
    let model = model(&strategy);
    let told = |outcome: Result<Optimizer<Host>, HostError>| {
        let outcome = outcome.and_then(|optimizer| train(&strategy, &optimizer, 0));
        let told = outcome.unwrap_err().to_string();
        assert!(told.contains("does not go with a strategy of local updates"), "{told}");
        told
    };
    let sgd = || Sgd::new(0.5).build(&model);
    assert!(told(sgd().and_then(|it| it.compress(Compression::Bf16))).starts_with("compress"));
    assert!(told(sgd().and_then(Optimizer::zero1)).starts_with("zero1"));
    assert!(told(sgd().and_then(|it| it.scale_losses(LossScale::fixed(8.0)))).starts_with("scale_losses"));
    let rows = sgd().map(|it| it.sparse_gradients(SparseGradients::Rows));
    assert!(told(rows).starts_with("SparseGradients::Rows"));
    let shared = Strategy::new(Local { over: mirrored(2), every: 1, how: How::Mean, shares: true });
    assert!(told(Sgd::new(0.5).build(&self::model(&shared))).starts_with("shared variables"));
    let optimizer = sgd().unwrap();
    let run = strategy.run_with(&optimizer, |context, optimizer| {
        let sums = optimizer.sum_gradients(context, [("b", tensor(&[1.0]))])?;
        optimizer.apply_aggregated_gradients(context, sums)
    });
    let told = run.map(drop).unwrap_err().to_string();
    assert!(told.starts_with("apply_aggregated_gradients does not go with a strategy of local updates"), "{told}");
    // The mean of what replicas have is not what they have.
    let run = strategy.run_with((), |context, ()| context.all_reduce(ReduceOp::Sum, &1.0));
    assert_eq!(run.unwrap().values(), [2.0, 2.0]);
}
