//! Promises of strategies whose replicas update their own copies of variables.

use distribute::device::DType;
use distribute::optim::{Sgd, Trainable};
use distribute::prelude::Strategy;
use distribute::strategy::{DilocoStrategy, LocalUpdates, OuterNesterov, Replicas, StrategyExtended, Wire};

use crate::check::{Stop, check, check_eq};
use crate::conditions::{is_compiled, local_ids};
use crate::library::{Library, elements, variables};

/// Local SGD over another strategy's replicas.
struct LocalSgd {
    over: Strategy,
    every: u64,
}

impl LocalUpdates for LocalSgd {
    fn is_due(&self, steps: u64) -> bool {
        steps.is_multiple_of(self.every)
    }
}

impl StrategyExtended for LocalSgd {
    fn name(&self) -> &'static str {
        "LocalSgd"
    }
    fn replicas(&self) -> &Replicas {
        self.over.extended().replicas()
    }
    fn describe(&self) -> String {
        format!("LocalSgd every {} steps over {}", self.every, self.over.describe())
    }
    fn local_updates(&self) -> Option<&dyn LocalUpdates> {
        Some(self)
    }
}

pub(super) fn averaged<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    if is_compiled(strategy) {
        return Err(Stop::NotApplicable("its programs sum gradients in every step"));
    }
    let local = Strategy::new(LocalSgd { over: strategy.clone(), every: 2 });
    let bag = L::bag(&local, &[("v", 2.0), ("w", -1.0)], 2, DType::F32)?;
    let optimizer = Sgd::new(0.5).build(&bag)?;
    let n = strategy.num_replicas_in_sync() as f64;
    // A replica's share of the gradient of a step; its own gradient is n times as large.
    let slope = |step: usize, replica: usize, index: usize| (replica + 2 * index + step) as f64 / n;
    let initial = [2.0, -1.0];
    let after = |before: f64, step: usize, replica: usize, index: usize| before - 0.5 * n * slope(step, replica, index);
    let mean = |of: &dyn Fn(usize) -> f64| (0..n as usize).map(of).sum::<f64>() / n;
    for step in 0..3 {
        L::step(&local, &bag, &optimizer, |context, index| Some(vec![slope(step, context.replica_id(), index); 2]))?;
        for (index, variable) in variables(&bag).iter().enumerate() {
            let second = mean(&|replica| after(after(initial[index], 0, replica, index), 1, replica, index));
            for (component, replica) in local_ids(&local).into_iter().enumerate() {
                let expected = match step {
                    0 => after(initial[index], 0, replica, index),
                    1 => second,
                    _ => after(second, 2, replica, index),
                };
                for got in elements(&local, variable, component)? {
                    check!((got - expected).abs() < 1e-5, "step {step}: {got} on replica {replica}, not {expected}");
                }
            }
        }
        let what = format!("whether replicas are apart after step {}", step + 1);
        check_eq!(are_apart(&bag), n > 1.0 && step != 1, what);
    }
    optimizer.synchronize(&local)?;
    check!(!are_apart(&bag), "replicas are apart after they were synchronized");
    Ok(distribute::optim::audit(&local, bag.parameters())?)
}

pub(super) fn outer_steps<L: Library>(strategy: &Strategy) -> Result<(), Stop> {
    let outer = OuterNesterov { learning_rate: 0.5, momentum: 0.5 };
    let over = |wire| DilocoStrategy::builder().inner_steps(2).outer(outer).wire(wire).over(strategy.clone());
    let has_whole_copies = strategy.sharding().is_none() && !strategy.shares_variables();
    if is_compiled(strategy) || !has_whole_copies || strategy.tensor_parallel() > 1 {
        let told = over(Wire::F32).err().map_or_else(String::new, |error| error.to_string());
        check!(told.starts_with("DilocoStrategy cannot be used over"), "it was not refused: {told}");
        return Ok(());
    }
    let n = strategy.num_replicas_in_sync();
    let slope = |step: usize, replica: usize, index: usize| (replica + 2 * index + step) as f64 / n as f64;
    for (wire, tolerance) in [(Wire::F32, 1e-5), (Wire::Int8, 0.05)] {
        let apart = over(wire)?;
        let bag = L::bag(&apart, &[("v", 2.0), ("w", -1.0)], 2, DType::F32)?;
        let optimizer = Sgd::new(0.1).build(&bag)?;
        // For each variable: the outer value and its momentum, and the value of each replica.
        let mut expected = [2.0, -1.0].map(|initial| (initial, 0.0, vec![initial; n]));
        for step in 0..5 {
            L::step(&apart, &bag, &optimizer, |context, index| {
                Some(vec![slope(step, context.replica_id(), index); 2])
            })?;
            for (index, (value, momentum, inner)) in expected.iter_mut().enumerate() {
                for (replica, inner) in inner.iter_mut().enumerate() {
                    *inner -= 0.1 * n as f64 * slope(step, replica, index);
                }
                if step % 2 == 1 {
                    let change = inner.iter().map(|inner| *value - inner).sum::<f64>() / n as f64;
                    *momentum = 0.5 * *momentum + change;
                    *value -= 0.5 * (change + 0.5 * *momentum);
                    inner.fill(*value);
                }
                for (component, replica) in local_ids(&apart).into_iter().enumerate() {
                    for got in elements(&apart, &variables(&bag)[index], component)? {
                        let expected = inner[replica];
                        let is_near = (got - expected).abs() < tolerance;
                        check!(is_near, "{wire:?}, step {step}: {got} on replica {replica}, not {expected}");
                    }
                }
            }
            let what = format!("{wire:?}: whether replicas are apart after step {}", step + 1);
            check_eq!(are_apart(&bag), n > 1 && step % 2 == 0, what);
            if step % 2 == 1 {
                distribute::optim::audit(&apart, bag.parameters())?;
            }
        }
    }
    Ok(())
}

fn are_apart(bag: &impl Trainable) -> bool {
    bag.parameters().check_equal().is_err()
}
