//! Replicas that sum their gradients, under a strategy that exchanges their variables with others.

use std::sync::atomic::{AtomicBool, Ordering};

use distribute_strategy::{LocalInitial, LocalSlot, LocalUpdates};
use distribute_types::{Class, ErrorClass, FailureKind, Scope};

use super::*;

/// Adds 1 to all variables every second step, and keeps in a slot what they were at first.
struct Exchanging {
    over: Strategy,
    slots: Vec<LocalSlot>,
    fails: AtomicBool,
}

impl LocalUpdates for Exchanging {
    fn is_due(&self, steps: u64) -> bool {
        steps.is_multiple_of(2)
    }
    fn synchronize_for(
        &self,
        occasion: LocalOccasion,
        replica: &dyn LocalReplica,
    ) -> distribute_strategy::Result<LocalExtent> {
        assert!(matches!(occasion, LocalOccasion::Due { .. }), "copies are equal, so nothing is to be done");
        if self.fails.load(Ordering::Relaxed) {
            let class = Class::new(Scope::Peer, FailureKind::Retryable);
            return Err(StrategyError::Exchange { class, source: "nobody answers".into() });
        }
        replica.change_slots(0..2, &mut |_, values, slots| {
            assert_eq!(slots.len(), 1);
            values.iter_mut().for_each(|value| *value += 1.0);
            Ok(())
        })?;
        Ok(LocalExtent::All)
    }
    fn slots(&self) -> &[LocalSlot] {
        &self.slots
    }
    fn sums_gradients(&self) -> bool {
        true
    }
}

impl StrategyExtended for Exchanging {
    fn name(&self) -> &'static str {
        "Exchanging"
    }
    fn replicas(&self) -> &Replicas {
        self.over.extended().replicas()
    }
    fn describe(&self) -> String {
        format!("exchanging over {}", self.over.describe())
    }
    fn local_updates(&self) -> Option<&dyn LocalUpdates> {
        Some(self)
    }
}

fn exchanging(replicas: usize, fails: bool) -> Strategy {
    let slots = vec![LocalSlot { name: "first", initial: LocalInitial::Variable, is_own: false }];
    Strategy::new(Exchanging { over: mirrored(replicas), slots, fails: fails.into() })
}

#[test]
fn gradients_are_summed_in_every_step_and_exchanges_come_between_steps() {
    for replicas in [1, 2, 3] {
        let (strategy, plain) = (exchanging(replicas, false), mirrored(replicas));
        let (own, other) = (model(&strategy), model(&plain));
        let initial = copies(&own, 0)[0].clone();
        // With momentum, which a mean of updates would not keep equal.
        let sgd = |model: &HostModel| Sgd::new(0.3).momentum(0.9).build(model).unwrap();
        let (first, second) = (sgd(&own), sgd(&other));
        for step in 0..5 {
            train(&strategy, &first, step).unwrap();
            train(&plain, &second, step).unwrap();
            own.parameters().check_equal().unwrap();
            let added = step.div_ceil(2) as f32;
            for (got, expected) in copies(&own, 0)[0].iter().zip(&copies(&other, 0)[0]) {
                assert!((got - expected - added).abs() < 1e-5, "step {step}: {got}, not {expected} + {added}");
            }
        }
        assert!(are_equal(&copies(&own, 0)));
        assert_eq!(slots(&first, replicas - 1)[0][0], initial);
        // Nothing is exchanged to read or to save.
        first.synchronize(&strategy).unwrap();
        first.synchronize_to_save(&strategy).unwrap();
    }
}

#[test]
fn a_failed_exchange_is_an_error_of_its_own_class_and_the_step_stays() {
    let strategy = exchanging(2, true);
    let model = model(&strategy);
    let optimizer = Sgd::new(0.3).build(&model).unwrap();
    train(&strategy, &optimizer, 0).unwrap();
    let error = train(&strategy, &optimizer, 1).unwrap_err();
    assert_eq!((error.to_string().as_str(), error.failure_kind()), ("nobody answers", FailureKind::Retryable));
    assert!(are_equal(&copies(&model, 0)));
    assert_eq!(optimizer.states.each[0].lock().standing.steps, 2);
}
