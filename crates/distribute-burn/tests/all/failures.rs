//! Steps after a failed run.

use std::sync::atomic::{AtomicBool, Ordering};

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::NoCheckpointing;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_flex::Flex;
use distribute_burn::{BurnContext, Error, Sgd};
use distribute_strategy::Strategy;

use crate::common::*;

static FAILS: AtomicBool = AtomicBool::new(false);

/// An identity whose backward panics while [`FAILS`] is set.
#[derive(Debug)]
struct Trap;

impl Backward<Flex, 1> for Trap {
    type State = ();

    fn backward(self, ops: Ops<(), 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        assert!(!FAILS.load(Ordering::Acquire), "a failure in the middle of backward");
        let gradient = gradients.consume::<Flex>(&ops.node);
        if let Some(parent) = &ops.parents[0] {
            gradients.register::<Flex>(parent.id, gradient);
        }
    }
}

fn trap(x: Tensor<2>) -> Tensor<2> {
    let x = x.try_into_primitive::<Autodiff<Flex>>().unwrap();
    let value = x.primitive().clone();
    Tensor::from_primitive::<Autodiff<Flex>>(
        match Trap.prepare::<NoCheckpointing>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish((), value),
            OpsKind::UnTracked(prepared) => prepared.finish(value),
        },
    )
}

/// A tied weight, whose second use has returned its gradient when backward meets the trap.
#[derive(Module, Debug)]
struct Trapped {
    inner: Tied,
}

impl Classifier for Trapped {
    fn new(device: &Device) -> Trapped {
        Trapped { inner: Tied::new(device) }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let Tied { first, second, head } = &self.inner;
        head.forward(second.forward(trap(first.forward(x))))
    }
}

/// Returns the parameters after a step, which follows a failed one if `fails`.
fn after_a_step(strategy: &Strategy, fails: bool) -> Vec<(String, Vec<f32>)> {
    let model = scope::<Trapped>(strategy);
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let parts = cut(&batch(0, 24), strategy.num_replicas_in_sync(), &Device::flex().autodiff());
    let step = || {
        strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
            let (x, y) = parts[context.replica_id()].clone();
            optimizer.minimize(context, &context.average_loss(losses(model.forward(x), y), 24))?;
            Ok::<_, Error>(())
        })
    };
    step().unwrap();
    if fails {
        FAILS.store(true, Ordering::Release);
        assert!(step().is_err());
        FAILS.store(false, Ordering::Release);
    }
    step().unwrap();
    wholes(strategy, &model)
}

#[test]
fn gradients_that_a_failed_backward_has_taken_are_not_added_to_the_next() {
    for strategy in [|| mirrored(2), || sharded(2)] {
        assert_eq!(after_a_step(&strategy(), true), after_a_step(&strategy(), false));
    }
}
