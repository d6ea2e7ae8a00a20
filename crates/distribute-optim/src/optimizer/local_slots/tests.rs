//! Outer steps of `DilocoStrategy`, whose state is in slots of local updates.

use std::any::Any;
use std::ops::Range;

use distribute_collectives::{ProcessGroup, Rank};
use distribute_device::BufferMut;
use distribute_strategy::{
    ChangeSlots, DilocoBuilder, DilocoStrategy, Error as StrategyError, LocalExtent, LocalOccasion, LocalReplica,
    MirroredStrategy, OuterNesterov, ReadSlots, Replicas, Strategy, StrategyExtended, Wire,
};
use distribute_values::{Host, HostTensor, TensorStorage};

use super::*;
use crate::{Adam, HostError, HostLoss, HostModel, Sgd, Trainable};

mod overlapped;
mod summed;

const MEAN: OuterNesterov = OuterNesterov { learning_rate: 1.0, momentum: 0.0 };

fn mirrored(replicas: usize) -> Strategy {
    MirroredStrategy::builder().num_replicas(replicas).build().unwrap()
}

fn diloco(replicas: usize, builder: DilocoBuilder) -> Strategy {
    builder.over(mirrored(replicas)).unwrap()
}

fn every(steps: u64) -> DilocoBuilder {
    DilocoStrategy::builder().inner_steps(steps)
}

/// Two variables of 300 and 5 elements.
const LENS: [usize; 2] = [300, 5];

fn model(strategy: &Strategy) -> HostModel {
    let variable = |name, len: usize| {
        let values = (0..len).map(|at| ((at * 37 % 101) as f32 - 50.0) / 33.0).collect();
        (name, HostTensor::new(&[len], values).unwrap())
    };
    HostModel::new(strategy, [variable("w", LENS[0]), variable("b", LENS[1])]).unwrap()
}

/// A replica's share of the gradient of a step: numbers whose sums and products are rounded.
fn share(step: usize, replica: usize) -> Vec<Vec<f32>> {
    let of =
        |variable: usize, at: usize| ((7 + 3 * at + 11 * step + 29 * replica + variable) as f32 * 0.37).sin() * 0.1;
    (0..2).map(|variable| (0..LENS[variable]).map(|at| of(variable, at)).collect()).collect()
}

fn loss(step: usize, replica: usize) -> HostLoss {
    HostLoss(share(step, replica).into_iter().map(|of| Some(HostTensor::new(&[of.len()], of).unwrap())).collect())
}

fn train(strategy: &Strategy, optimizer: &Optimizer<Host>, step: usize) -> Result<(), HostError> {
    let run = strategy
        .run_with(optimizer, |context, optimizer| optimizer.minimize(context, &loss(step, context.replica_id())));
    run.map(drop)
}

/// Returns each replica's copies of a variable.
fn copies(model: &HostModel, variable: usize) -> Vec<Vec<f32>> {
    model.parameters().variables()[variable].components().iter().map(|it| it.to_elements().unwrap()).collect()
}

/// Returns a replica's slots, by variable.
fn slots(optimizer: &Optimizer<Host>, replica: usize) -> Vec<Vec<Vec<f32>>> {
    optimizer.states.each[replica].lock().local.all().to_vec()
}

fn are_equal(all: &[Vec<f32>]) -> bool {
    all.iter().all(|one| one.iter().zip(&all[0]).all(|(a, b)| a.to_bits() == b.to_bits()))
}

#[test]
fn one_step_apart_with_a_plain_mean_is_a_sum_of_gradients_bit_for_bit() {
    for replicas in [1, 2, 3] {
        let (apart, together) = (diloco(replicas, every(1).outer(MEAN)), mirrored(replicas));
        let (one, other) = (model(&apart), model(&together));
        let (first, second) = (Sgd::new(0.3).build(&one).unwrap(), Sgd::new(0.3).build(&other).unwrap());
        for step in 0..5 {
            train(&apart, &first, step).unwrap();
            train(&together, &second, step).unwrap();
        }
        for variable in 0..2 {
            let all = [copies(&one, variable), copies(&other, variable)].concat();
            assert!(are_equal(&all), "{replicas} replicas");
        }
        // With momentum each replica makes a step of its own, whose mean is that of the sum but for rounding.
        let (one, other) = (model(&apart), model(&together));
        let sgd = |model: &HostModel| Sgd::new(0.3).momentum(0.9).build(model).unwrap();
        let (first, second) = (sgd(&one), sgd(&other));
        for step in 0..5 {
            train(&apart, &first, step).unwrap();
            train(&together, &second, step).unwrap();
        }
        assert_eq!(first.memory().local_slot_bytes, 4 * 305);
        for (got, expected) in copies(&one, 0)[0].iter().zip(&copies(&other, 0)[0]) {
            assert!((got - expected).abs() < 1e-5, "{got}, not {expected}");
        }
    }
}

#[test]
fn outer_parameters_of_summed_gradients_are_the_variables_in_each_checkpoint() {
    let strategy = diloco(2, every(1).outer(MEAN));
    let model = model(&strategy);
    let optimizer = Sgd::new(0.3).build(&model).unwrap();
    let saved = || {
        optimizer.synchronize_to_save(&strategy).unwrap();
        let slots = optimizer.local_slots(&strategy).unwrap().into_iter();
        slots.map(|(name, slot)| (name, slot.to_elements().unwrap())).collect::<HashMap<String, Vec<f32>>>()
    };
    let expected =
        || HashMap::from([("w/outer", 0), ("b/outer", 1)].map(|(n, at)| (n.to_owned(), copies(&model, at).remove(0))));
    let first = saved();
    assert!(first == expected(), "before the first step");
    train(&strategy, &optimizer, 0).unwrap();
    assert!(first != expected() && saved() == expected(), "after a step");
    // Those of an older checkpoint are not saved again either.
    optimizer.set_local_slots(first).unwrap();
    train(&strategy, &optimizer, 1).unwrap();
    assert!(saved() == expected(), "after older ones were restored");
}

#[test]
fn outer_steps_are_those_of_the_paper() {
    let outer = OuterNesterov { learning_rate: 0.7, momentum: 0.9 };
    for replicas in [1, 2, 4] {
        let strategy = diloco(replicas, every(3).outer(outer));
        let model = model(&strategy);
        let optimizer = Sgd::new(0.3).momentum(0.5).build(&model).unwrap();
        // The first elements of a variable, computed in f64: each replica's value and momentum, and the outer ones.
        let initial = f64::from(copies(&model, 0)[0][0]);
        let (mut global, mut global_momentum) = (initial, 0.0);
        let mut inner = vec![(initial, 0.0); replicas];
        for step in 0..7 {
            train(&strategy, &optimizer, step).unwrap();
            for (replica, (value, momentum)) in inner.iter_mut().enumerate() {
                *momentum = 0.5 * *momentum + f64::from(share(step, replica)[0][0]) * replicas as f64;
                *value -= 0.3 * *momentum;
            }
            let is_due = (step + 1) % 3 == 0;
            if is_due {
                let change = inner.iter().map(|(value, _)| global - value).sum::<f64>() / replicas as f64;
                global_momentum = 0.9 * global_momentum + change;
                global -= 0.7 * (change + 0.9 * global_momentum);
                // The inner optimizer's state stays as it is.
                inner.iter_mut().for_each(|(value, _)| *value = global);
            }
            for (got, (expected, _)) in copies(&model, 0).iter().zip(&inner) {
                assert!((f64::from(got[0]) - expected).abs() < 1e-5, "step {step}: {}, not {expected}", got[0]);
            }
            assert_eq!(are_equal(&copies(&model, 1)), is_due || replicas == 1, "step {step}");
        }
        // Outer parameters and momentum of 305 variables.
        assert_eq!(optimizer.memory().local_slot_bytes, 2 * 4 * 305);
    }
}

#[test]
fn fragments_become_equal_in_turn_and_in_few_bytes() {
    for wire in [Wire::F32, Wire::Int8] {
        let strategy = diloco(3, every(4).fragments(2).wire(wire));
        let model = model(&strategy);
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        for step in 0..9 {
            let equal = [(step + 1) % 4 == 0, (step + 1) % 4 == 2];
            // A replica without examples synchronizes with the others.
            let run = strategy.run_with(&optimizer, |context, optimizer| {
                context.begin_batch(context.replica_id() != 1 || step % 2 == 0)?;
                let _ = context.weight();
                optimizer.minimize(context, &loss(step, context.replica_id()))
            });
            run.unwrap();
            for (variable, is_equal) in equal.into_iter().enumerate() {
                assert_eq!(are_equal(&copies(&model, variable)), is_equal, "{wire:?}, step {step}, {variable}");
                let of_replica = |replica| slots(&optimizer, replica).swap_remove(variable);
                let all: Vec<Vec<Vec<f32>>> = (0..3).map(of_replica).collect();
                let of = |slot: usize| all.iter().map(|slots| slots[slot].clone()).collect::<Vec<_>>();
                assert!(are_equal(&of(0)) && are_equal(&of(1)));
                assert!(!is_equal || copies(&model, variable) == of(0));
            }
        }
        optimizer.synchronize(&strategy).unwrap();
        model.parameters().check_equal().unwrap();
    }
}

#[test]
fn a_hundred_steps_send_a_hundredth_of_the_bytes() {
    let sent = |strategy: &Strategy| {
        let model = model(strategy);
        let optimizer = Sgd::new(0.01).build(&model).unwrap().audit_every(0);
        let bytes = || strategy.groups()[0].flight_record().operations.iter().map(|call| call.bytes).sum::<u64>();
        // The first step compares settings too.
        train(strategy, &optimizer, 0).unwrap();
        let before = bytes();
        (1..101).for_each(|step| train(strategy, &optimizer, step).unwrap());
        bytes() - before
    };
    let eight = sent(&diloco(2, every(100).wire(Wire::Int8)));
    let each = sent(&mirrored(2));
    // Both send 2 (n - 1) / n times the bytes of the values. In eight bits these are an all-to-all and an all-gather,
    // with messages of the larger part: the two blocks of 300 values. The record has both parts of the first.
    let expected = 3 * (300 + 2 * 4);
    assert!((expected..expected + 100).contains(&eight), "{eight}");
    assert!(each >= 100 * 4 * 305 && each > 100 * eight, "{each} bytes in every step, {eight} apart");
}

#[test]
fn what_eight_bits_lose_is_kept_until_the_model_is_saved() {
    let strategy = diloco(2, every(2).wire(Wire::Int8).outer(MEAN));
    let model = model(&strategy);
    let optimizer = Sgd::new(0.3).build(&model).unwrap();
    let residuals = || [0, 1].map(|replica| slots(&optimizer, replica)[0][1].clone());
    (0..2).for_each(|step| train(&strategy, &optimizer, step).unwrap());
    // With a learning rate of 1, what parameters lack of the mean of all changes is the mean of what was lost.
    let [first, second] = residuals();
    assert_ne!(first, second);
    let initial = copies(&self::model(&strategy), 0).remove(0);
    for at in 0..LENS[0] {
        let change: f32 = (0..2).map(|step| 0.3 * (share(step, 0)[0][at] + share(step, 1)[0][at])).sum();
        let sum = copies(&model, 0)[0][at] - (first[at] + second[at]) / 2.0;
        assert!((sum - (initial[at] - change)).abs() < 1e-5, "{sum}");
    }
    // Variables are equal, but not what was lost.
    model.parameters().check_equal().unwrap();
    optimizer.synchronize(&strategy).unwrap();
    assert_eq!(residuals(), [first.clone(), second.clone()]);
    optimizer.synchronize_to_save(&strategy).unwrap();
    let mean: Vec<f32> = first.iter().zip(&second).map(|(a, b)| (a + b) / 2.0).collect();
    assert_eq!(residuals(), [mean.clone(), mean]);
    let names: Vec<String> = optimizer.local_slots(&strategy).unwrap().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["w/outer", "w/residual", "b/outer", "b/residual"]);
}

#[test]
fn a_restored_run_continues_as_the_saved_one() {
    let strategy = diloco(2, every(4).fragments(2).wire(Wire::Int8));
    let (one, other) = (model(&strategy), model(&strategy));
    let adam = |model: &HostModel| Adam::new(0.01).build(model).unwrap();
    let (first, second) = (adam(&one), adam(&other));
    (0..7).for_each(|step| train(&strategy, &first, step).unwrap());
    first.synchronize_to_save(&strategy).unwrap();
    // As a checkpoint does.
    let restore = |slots: HashMap<String, Vec<f32>>| {
        for (variable, value) in other.parameters().variables().iter().zip(one.parameters().variables()) {
            variable.overwrite(&value.components()[0]).unwrap();
        }
        other.parameters().set_torn(false);
        let saved: HashMap<&str, &HostTensor<f32>> =
            first.slots().map(|slot| (slot.name(), &slot.components()[0])).collect();
        second.restore_slots(|name, _, _| Ok::<_, distribute_values::Error>(saved[name].clone())).unwrap();
        second.set_local_slots(slots).unwrap();
        second.set_state(&first.state());
    };
    let all = first.local_slots(&strategy).unwrap();
    restore(all.into_iter().map(|(name, slot)| (name, slot.to_elements().unwrap())).collect());
    for step in 7..13 {
        train(&strategy, &first, step).unwrap();
        train(&strategy, &second, step).unwrap();
    }
    for variable in 0..2 {
        assert_eq!(copies(&one, variable), copies(&other, variable));
        assert_eq!(slots(&first, 1), slots(&second, 1));
    }
    // Values without slots begin anew.
    first.synchronize_to_save(&strategy).unwrap();
    restore(HashMap::new());
    train(&strategy, &second, 13).unwrap();
    // The second fragment has made an outer step since.
    let [outer, momentum, residual] = &slots(&second, 0)[0][..] else { panic!("three slots") };
    assert_eq!(*outer, one.values().unwrap()[0]);
    assert!(momentum.iter().chain(residual).all(|x| *x == 0.0));
    // So does a model that is loaded alone.
    other.parameters().variables()[0].overwrite(&HostTensor::new(&[300], vec![7.0; 300]).unwrap()).unwrap();
    other.parameters().set_torn(false);
    train(&strategy, &second, 14).unwrap();
    assert_eq!(slots(&second, 1)[0][0], [7.0; 300]);
    let told = second.set_local_slots(HashMap::from([("w/outer".to_owned(), vec![0.0; 3])])).unwrap_err().to_string();
    assert!(told.contains("3 elements were given, and its variable has 300"), "{told}");
}

/// Makes the second replica fail in outer steps.
struct Failing {
    over: Strategy,
    at: At,
}

#[derive(Clone, Copy, PartialEq)]
enum At {
    /// After the changes of all have arrived.
    Received,
    /// After one of two variables is changed.
    HalfChanged,
}

struct FailingReplica<'a> {
    replica: &'a dyn LocalReplica,
    at: At,
}

impl LocalReplica for FailingReplica<'_> {
    fn group(&self) -> &ProcessGroup {
        self.replica.group()
    }
    fn average_variables(&self) -> distribute_strategy::Result<()> {
        self.replica.average_variables()
    }
    fn average_state(&self) -> distribute_strategy::Result<()> {
        self.replica.average_state()
    }
    fn change_variables(
        &self,
        body: &mut dyn FnMut(&str, &mut BufferMut<'_>) -> distribute_strategy::Result<()>,
    ) -> distribute_strategy::Result<()> {
        self.replica.change_variables(body)
    }
    fn variables(&self) -> distribute_strategy::Result<Vec<LocalVariable>> {
        self.replica.variables()
    }
    fn read_slots(&self, variables: Range<usize>, body: &mut ReadSlots<'_>) -> distribute_strategy::Result<()> {
        self.replica.read_slots(variables, body)
    }
    fn change_slots(&self, variables: Range<usize>, body: &mut ChangeSlots<'_>) -> distribute_strategy::Result<()> {
        let fails = self.group().rank() == Rank(1);
        if fails && self.at == At::Received {
            return Err(StrategyError::NoData);
        }
        self.replica.change_slots(variables, &mut |index, values, slots| match index {
            1 if fails => Err(StrategyError::NoData),
            _ => body(index, values, slots),
        })
    }
    fn keep_in_progress(&self, work: Box<dyn Any + Send>) {
        self.replica.keep_in_progress(work);
    }
    fn take_in_progress(&self) -> Option<Box<dyn Any + Send>> {
        self.replica.take_in_progress()
    }
}

impl LocalUpdates for Failing {
    fn is_due(&self, steps: u64) -> bool {
        self.over.extended().local_updates().unwrap().is_due(steps)
    }
    fn synchronize_for(
        &self,
        occasion: LocalOccasion,
        replica: &dyn LocalReplica,
    ) -> distribute_strategy::Result<LocalExtent> {
        let replica = FailingReplica { replica, at: self.at };
        self.over.extended().local_updates().unwrap().synchronize_for(occasion, &replica)
    }
    fn slots(&self) -> &[LocalSlot] {
        self.over.extended().local_updates().unwrap().slots()
    }
}

impl StrategyExtended for Failing {
    fn name(&self) -> &'static str {
        "Failing"
    }
    fn replicas(&self) -> &Replicas {
        self.over.extended().replicas()
    }
    fn describe(&self) -> String {
        "failing".to_owned()
    }
    fn local_updates(&self) -> Option<&dyn LocalUpdates> {
        Some(self)
    }
}

#[test]
fn an_outer_step_is_made_on_all_replicas_or_on_none() {
    for at in [At::Received, At::HalfChanged] {
        let failing = Strategy::new(Failing { over: diloco(2, every(2).wire(Wire::Int8)), at });
        let calm = diloco(2, every(if at == At::Received { 9 } else { 2 }).wire(Wire::Int8));
        let (one, other) = (model(&failing), model(&calm));
        let sgd = |model: &HostModel| Sgd::new(0.3).build(model).unwrap();
        let (optimizer, expected) = (sgd(&one), sgd(&other));
        train(&failing, &optimizer, 0).unwrap();
        assert!(train(&failing, &optimizer, 1).is_err());
        (0..2).for_each(|step| train(&calm, &expected, step).unwrap());
        // The step of the inner optimizer is made; the outer one, if it had begun, comes from the first replica.
        for replica in 0..2 {
            let from = if at == At::Received { replica } else { 0 };
            assert_eq!(slots(&optimizer, replica), slots(&expected, from));
            for variable in 0..2 {
                assert_eq!(copies(&one, variable)[replica], copies(&other, variable)[from]);
            }
        }
    }
}
