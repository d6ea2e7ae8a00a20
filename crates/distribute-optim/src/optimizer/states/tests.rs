use std::ops::ControlFlow;

use distribute_collectives::Compression;
use distribute_device::BufferRef;
use distribute_strategy::{MirroredStrategy, Strategy};
use distribute_values::{Host, HostTensor, TensorStorage};

use super::*;
use crate::{Adam, HostError, HostLoss, HostModel, Optimizer, Sgd, Trainable, audit};

const SHAPES: [(&str, &[usize]); 2] = [("fc.weight", &[3, 5]), ("fc.bias", &[3])];

fn ramp(shape: &[usize], scale: f32) -> HostTensor<f32> {
    let len: usize = shape.iter().product();
    HostTensor::new(shape, (0..len).map(|i| scale * (i as f32 - 4.5)).collect()).unwrap()
}

fn trained(sharded: bool) -> (Strategy, HostModel, Optimizer<Host>) {
    trained_on(1, sharded)
}

/// Makes a step on three replicas of `ranks` tensor ranks each.
fn trained_on(ranks: usize, sharded: bool) -> (Strategy, HostModel, Optimizer<Host>) {
    let devices: Vec<String> = (0..3 * ranks).map(|index| format!("CPU:{index}")).collect();
    let strategy = MirroredStrategy::builder().devices(devices).tensor_parallel(ranks).build().unwrap();
    let layer = HostModel::new(&strategy, SHAPES.map(|(name, shape)| (name, ramp(shape, 0.1)))).unwrap();
    let optimizer = Adam::new(0.1).build(&layer).unwrap();
    let optimizer = if sharded { optimizer.zero1().unwrap() } else { optimizer };
    step(&strategy, &optimizer).unwrap();
    (strategy, layer, optimizer)
}

fn step(strategy: &Strategy, optimizer: &Optimizer<Host>) -> Result<(), HostError> {
    let step = strategy.run_with(optimizer, |context, optimizer| {
        let share = 1.0 + context.replica_id() as f32;
        optimizer.minimize(context, &HostLoss(SHAPES.map(|(_, shape)| Some(ramp(shape, share))).to_vec()))
    });
    step.map(drop)
}

/// Returns the parameters and slots of one replica.
fn values(layer: &HostModel, optimizer: &Optimizer<Host>, replica: usize) -> Vec<Vec<f32>> {
    let parameters = layer.parameters().variables().iter().map(|variable| &variable.components()[replica]);
    let slots = optimizer.slots().map(|slot| &slot.components()[replica]);
    parameters.chain(slots).map(|tensor| tensor.to_elements().unwrap()).collect()
}

fn fill(tensor: &HostTensor<f32>, elements: &[f32]) {
    let value = tensor.beside(&tensor.shape(), BufferRef::from(elements)).unwrap();
    overwrite::<Host>(std::slice::from_ref(tensor), &value).unwrap();
}

#[test]
fn a_replica_that_failed_amid_its_update_gets_anothers_values() {
    let (strategy, layer, optimizer) = trained(false);
    let (_, undisturbed, other) = trained(false);
    let expected = values(&undisturbed, &other, 0);
    fill(&layer.parameters().variables()[0].components()[1], &[1.0; 15]);
    fill(&optimizer.slots[1][0].components()[1], &[1.0; 3]);
    optimizer.states.each[1].lock().change = Change::Begun;
    optimizer.states.settle().unwrap();
    assert!((0..3).all(|replica| values(&layer, &optimizer, replica) == expected));
    step(&strategy, &optimizer).unwrap();
    audit(&strategy, layer.parameters()).unwrap();
}

#[test]
fn parts_that_replicas_could_not_gather_come_from_their_owners() {
    for ranks in [1, 2] {
        let (strategy, layer, optimizer) = trained_on(ranks, true);
        let expected = values(&layer, &optimizer, 0);
        let component = |variable: usize, local: usize| &layer.parameters().variables()[variable].components()[local];
        // The state after an update of its own part alone: of the 18 elements of a bucket, bias first, a third each.
        for local in 0..3 * ranks {
            let plan = optimizer.states.plan().unwrap();
            for bucket in plan.gradients() {
                let mut at = 0;
                let count = |index: usize| component(index, local).to_elements::<f32>().unwrap().len();
                let len: usize = bucket.members.iter().map(|index| count(*index)).sum();
                let own = distribute_collectives::schedule::part(len, 3, local / ranks);
                for index in bucket.members.iter().copied() {
                    let kept: Vec<f32> = component(index, local).to_elements().unwrap();
                    let spoilt = |(i, kept): (usize, &f32)| if own.contains(&(at + i)) { *kept } else { f32::NAN };
                    fill(component(index, local), &kept.iter().enumerate().map(spoilt).collect::<Vec<f32>>());
                    at += kept.len();
                }
            }
            optimizer.states.each[local].lock().change = Change::OwnPart;
        }
        optimizer.states.settle().unwrap();
        assert!((0..3 * ranks).all(|local| values(&layer, &optimizer, local) == expected), "{ranks} ranks");
        step(&strategy, &optimizer).unwrap();
    }
}

#[test]
fn what_compression_owes_to_a_variable_is_kept_in_steps_without_it() {
    let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build().unwrap();
    let scalar = |value: f32| HostTensor::new(&[1], vec![value]).unwrap();
    let model = HostModel::new(&strategy, ["a", "b"].map(|name| (name, scalar(0.0)))).unwrap();
    let optimizer = Sgd::new(1.0).build(&model).unwrap().compress(Compression::TopK(0.5)).unwrap();
    // The larger of both is sent: a, then what is left of b, which has no gradient in that step, then that again.
    for (gradients, expected) in [
        ([Some(8.0), Some(1.0)], [-16.0, 0.0]),
        ([Some(0.5), None], [-16.0, 0.0]),
        ([Some(0.0), Some(0.0)], [-16.0, -2.0]),
    ] {
        let run = strategy.run_with(&optimizer, |context, optimizer| {
            optimizer.minimize(context, &HostLoss(gradients.map(|value| value.map(scalar)).to_vec()))
        });
        run.unwrap();
        for replica in 0..2 {
            assert_eq!(values(&model, &optimizer, replica).concat(), expected, "{gradients:?}, replica {replica}");
        }
    }
}

#[test]
fn what_compression_has_not_sent_is_not_sent_after_a_restore() {
    let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build().unwrap();
    let step = |optimizer: &Optimizer<Host>, scale: f32| {
        let run = strategy.run_with(optimizer, |context, optimizer| {
            let share = scale * (1.0 + context.replica_id() as f32);
            optimizer.minimize(context, &HostLoss(SHAPES.map(|(_, shape)| Some(ramp(shape, share))).to_vec()))
        });
        run.unwrap();
    };
    let start = || SHAPES.map(|(name, shape)| (name, ramp(shape, 0.1)));
    for compression in [Compression::TopK(0.2), Compression::PowerSgd(1), Compression::Bf16] {
        let build = || {
            let model = HostModel::new(&strategy, start()).unwrap();
            let optimizer = Sgd::new(0.1).momentum(0.9).build(&model).unwrap().compress(compression.clone()).unwrap();
            (model, optimizer)
        };
        let ((model, optimizer), (other_model, other)) = (build(), build());
        let saved = optimizer.state();
        step(&optimizer, 1e3);
        for (variable, (_, value)) in model.parameters().variables().iter().zip(start()) {
            overwrite::<Host>(variable.components(), &value).unwrap();
        }
        let zeroes =
            |_: &str, _: &HostTensor<f32>, shape: &[usize]| Ok::<_, distribute_values::Error>(ramp(shape, 0.0));
        optimizer.restore_slots(zeroes).unwrap();
        optimizer.set_state(&saved);
        step(&optimizer, 0.3);
        step(&other, 0.3);
        for replica in 0..2 {
            let [restored, fresh] = [(&model, &optimizer), (&other_model, &other)].map(|(model, optimizer)| {
                let values = values(model, optimizer, replica).concat();
                values.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
            });
            assert_eq!(restored, fresh, "{compression:?}, replica {replica}");
        }
    }
}

#[test]
fn a_model_that_no_replica_has_whole_is_not_trained_until_it_is_restored() {
    let (strategy, layer, optimizer) = trained(false);
    let state = optimizer.state();
    (0..3).for_each(|replica| optimizer.states.each[replica].lock().change = Change::Begun);
    assert!(optimizer.states.settle().is_err());
    let error = step(&strategy, &optimizer).unwrap_err().to_string();
    assert!(error.contains("restore the newest checkpoint"), "{error}");
    let visited = optimizer.visit_whole_slots(&strategy, |_, _| ControlFlow::<()>::Continue(()));
    assert!(layer.parameters().check_whole().is_err() && visited.is_err());
    layer.parameters().set_torn(false);
    optimizer.set_state(&state);
    step(&strategy, &optimizer).unwrap();
}
