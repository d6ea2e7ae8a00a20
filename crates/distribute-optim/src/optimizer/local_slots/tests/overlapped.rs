//! Reductions that overlap with inner steps.

use super::*;

fn overlapped(replicas: usize, wire: Wire, overlap: u64) -> Strategy {
    let outer = OuterNesterov { learning_rate: 0.7, momentum: 0.9 };
    diloco(replicas, every(4).fragments(2).outer(outer).wire(wire).overlap(overlap).mixing(0.25))
}

/// Returns whether each replica has a reduction in progress.
fn in_progress(optimizer: &Optimizer<Host>) -> Vec<bool> {
    optimizer.states.each.iter().map(|state| state.lock().in_progress.is_some()).collect()
}

/// A fragment of one element, computed in f64.
struct Fragment {
    outer: f64,
    momentum: f64,
    inner: Vec<f64>,
    /// The mean of the changes that are being reduced.
    sent: f64,
}

#[test]
fn outer_steps_come_later_and_are_mixed() {
    for (replicas, wire, tolerance) in [(1, Wire::F32, 1e-5), (2, Wire::F32, 1e-5), (3, Wire::Int8, 0.02)] {
        for overlap in 1..4 {
            let strategy = overlapped(replicas, wire, overlap);
            let model = model(&strategy);
            let optimizer = Sgd::new(0.3).build(&model).unwrap();
            let mut fragments: Vec<Fragment> = (0..2)
                .map(|variable| {
                    let outer = f64::from(copies(&model, variable)[0][0]);
                    Fragment { outer, momentum: 0.0, inner: vec![outer; replicas], sent: 0.0 }
                })
                .collect();
            for step in 0..14 {
                train(&strategy, &optimizer, step).unwrap();
                let steps = step as u64 + 1;
                for (variable, fragment) in fragments.iter_mut().enumerate() {
                    for (replica, value) in fragment.inner.iter_mut().enumerate() {
                        *value -= 0.3 * f64::from(share(step, replica)[variable][0]) * replicas as f64;
                    }
                    // The first begins after steps 4, 8 and 12, and the second after 2, 6 and 10.
                    let begins = |steps: u64| steps > 0 && (steps + 2 * variable as u64).is_multiple_of(4);
                    if steps.checked_sub(overlap).is_some_and(begins) {
                        fragment.momentum = 0.9 * fragment.momentum + fragment.sent;
                        fragment.outer -= 0.7 * (fragment.sent + 0.9 * fragment.momentum);
                        fragment.inner.iter_mut().for_each(|value| *value = 0.25 * *value + 0.75 * fragment.outer);
                    }
                    if begins(steps) {
                        let moved = fragment.inner.iter().map(|value| fragment.outer - value).sum::<f64>();
                        fragment.sent = moved / replicas as f64;
                    }
                    for (got, expected) in copies(&model, variable).iter().zip(&fragment.inner) {
                        let what = format!("{replicas}, {wire:?}, {overlap}, step {step}, {variable}");
                        assert!((f64::from(got[0]) - expected).abs() < tolerance, "{what}: {}, {expected}", got[0]);
                    }
                }
                // With three steps of overlap there is always one in progress, once the first has begun.
                let begun = |ago: u64| steps.checked_sub(ago).is_some_and(|at| at > 0 && at.is_multiple_of(2));
                assert_eq!(in_progress(&optimizer), vec![(0..overlap).any(begun); replicas], "{overlap}, {step}");
            }
            // Outer parameters, momentum, changes that were sent, and what was lost.
            let slots = 3 + usize::from(wire == Wire::Int8);
            assert_eq!(optimizer.memory().local_slot_bytes, slots * 4 * 305);
        }
    }
}

#[test]
fn a_round_without_any_change_is_an_outer_step_too() {
    let momenta = |overlap: u64, steps: usize| {
        let builder = if overlap > 0 { every(2).overlap(overlap).mixing(0.0) } else { every(2) };
        let strategy = diloco(2, builder);
        let model = model(&strategy);
        let optimizer = Sgd::new(0.3).build(&model).unwrap();
        for step in 0..steps {
            optimizer.set_learning_rate(if step < 2 { 0.3 } else { 0.0 });
            train(&strategy, &optimizer, step).unwrap();
        }
        let of = |replica: usize| slots(&optimizer, replica).into_iter().map(|slots| slots[..2].to_vec());
        [0, 1].map(|replica| of(replica).collect::<Vec<_>>())
    };
    // The second outer step is made after four steps, or one later.
    let expected = momenta(0, 4);
    assert!(expected != momenta(0, 2), "the second outer step has no effect");
    assert!(momenta(1, 5) == expected, "the second outer step is missing");
}

#[test]
fn a_failed_run_amid_a_reduction_changes_no_bit() {
    for wire in [Wire::F32, Wire::Int8] {
        let strategy = overlapped(3, wire, 3);
        let train_with = |fails_before: &[usize], is_step: bool| {
            let model = model(&strategy);
            let optimizer = Adam::new(0.01).build(&model).unwrap();
            for step in 0..11 {
                if fails_before.contains(&step) {
                    assert_eq!(in_progress(&optimizer), [true; 3]);
                    // A step, or a run that knows nothing of the optimizer.
                    let failed =
                        strategy.run_with(&optimizer, |context, optimizer| match (is_step, context.replica_id()) {
                            (_, 1) => Err(HostError::from(StrategyError::NoData)),
                            (true, replica) => optimizer.minimize(context, &loss(step, replica)).map(drop),
                            (false, _) => Ok(()),
                        });
                    failed.unwrap_err();
                    assert_eq!(in_progress(&optimizer), [false; 3]);
                }
                train(&strategy, &optimizer, step).unwrap();
            }
            let copies = [0, 1].map(|variable| copies(&model, variable));
            (copies, [0, 1, 2].map(|replica| slots(&optimizer, replica)))
        };
        let calm = train_with(&[], true);
        for is_step in [true, false] {
            assert!(train_with(&[3, 5, 6, 9], is_step) == calm, "{wire:?}, {is_step}");
        }
    }
}

#[test]
fn a_run_that_is_saved_amid_a_reduction_is_restored_to_the_bit() {
    for wire in [Wire::F32, Wire::Int8] {
        let strategy = overlapped(3, wire, 3);
        let (one, other) = (model(&strategy), model(&strategy));
        let sgd = |model: &HostModel| Sgd::new(0.3).build(model).unwrap();
        let (first, second) = (sgd(&one), sgd(&other));
        (0..5).for_each(|step| train(&strategy, &first, step).unwrap());
        assert_eq!(in_progress(&first), [true; 3]);
        let sent = |optimizer: &Optimizer<Host>| [0, 1, 2].map(|replica| slots(optimizer, replica)[0].pop().unwrap());
        assert_ne!(sent(&first)[0], sent(&first)[1]);
        first.synchronize_to_save(&strategy).unwrap();
        assert_eq!(in_progress(&first), [false; 3]);
        assert!(are_equal(&sent(&first)) && sent(&first)[0].iter().any(|change| *change != 0.0));
        // As a checkpoint does.
        for (variable, value) in other.parameters().variables().iter().zip(one.parameters().variables()) {
            variable.overwrite(&value.components()[0]).unwrap();
        }
        other.parameters().set_torn(false);
        let saved = first.local_slots(&strategy).unwrap();
        second
            .set_local_slots(saved.into_iter().map(|(name, slot)| (name, slot.to_elements().unwrap())).collect())
            .unwrap();
        second.set_state(&first.state());
        for step in 5..12 {
            train(&strategy, &first, step).unwrap();
            train(&strategy, &second, step).unwrap();
        }
        for variable in 0..2 {
            assert_eq!(copies(&one, variable), copies(&other, variable));
        }
        assert_eq!(slots(&first, 2), slots(&second, 2));
    }
}
