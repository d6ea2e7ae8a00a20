//! Groups of parameters by their ids, which each worker's model draws at random.

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::train::{Learner, LearningResult};
use distribute_burn::learner::{DataParallel, DistributedTraining};
use distribute_strategy::Strategy;

use crate::common::*;

fn launch(strategy: &Strategy, reduces_after_backward: bool, learner: Learner<Net>) -> LearningResult<Net> {
    let folder = tempfile::tempdir().unwrap();
    let parallel = DataParallel::new(strategy);
    let parallel = if reduces_after_backward { parallel.reduce_after_backward() } else { parallel };
    let (training, _) = training(folder.path(), loader(rows(64), 8), loader(rows(8), 8));
    training.distributed_with(parallel).launch(learner)
}

/// The workers' models have different initial values too, of which all take the chief's.
fn net(strategy: &Strategy) -> Net {
    Net::seeded(false, if strategy.is_chief() { 11 } else { 12 })
}

#[test]
fn learning_rates_of_groups_by_id_act_on_every_worker() {
    for reduces_after_backward in [true, false] {
        let results = on_workers(2, 1, |strategy, _| {
            let net = net(&strategy);
            let scheduler = ModuleLrScheduler::new(0.03).with_group(net.hidden_ids(), 0.0);
            let learner = Learner::new(net, AdamWConfig::new().with_weight_decay(0.1).init(), scheduler);
            let result = launch(&strategy, reduces_after_backward, learner);
            assert_eq!(error_of(&result), "no error");
            result.model
        });
        let before = Net::new(false);
        for model in &results {
            assert_eq!(model.hidden_layer(), before.hidden_layer());
            assert_ne!(values(model), values(&before));
        }
        assert_eq!(values(&results[0]), values(&results[1]));
    }
}

#[test]
fn optimizers_of_groups_by_id_act_on_every_worker() {
    let train = |strategy: &Strategy| {
        let net = net(strategy);
        let optimizer: ModuleOptimizer = AdamWConfig::new().init();
        let optimizer = optimizer.with_group(net.hidden_ids(), SgdConfig::new().build(), None);
        let result = launch(strategy, true, Learner::new(net, optimizer, 0.03));
        assert_eq!(error_of(&result), "no error");
        values(&result.model)
    };
    let expected = train(&mirrored(2));
    assert_eq!(on_workers(2, 1, |strategy, _| train(&strategy)), [expected.clone(), expected.clone()]);
    assert_eq!(on_sharded_workers(2, |strategy, _| train(&strategy)), [expected.clone(), expected]);
}

/// The chief's, by which other workers replace their own, with the ids of their parameters.
#[test]
fn the_state_of_an_optimizer_is_the_chiefs() {
    let expected = launch(&mirrored(2), true, experienced(Net::new(false))).model;
    let trained = on_workers(2, 1, |strategy, _| {
        let net = Net::new(false);
        let own = if strategy.is_chief() { experienced(net) } else { learner(net) };
        values(&launch(&strategy, true, own).model)
    });
    assert_eq!(trained, [values(&expected), values(&expected)]);
}

#[test]
fn learning_rates_that_differ_between_workers_are_named() {
    let errors = on_workers(2, 1, |strategy, rank| {
        let net = net(&strategy);
        let scheduler = ModuleLrScheduler::new(0.03);
        let scheduler = if rank == 1 { scheduler.with_group(net.hidden_ids(), 0.5) } else { scheduler };
        error_of(&launch(&strategy, true, Learner::new(net, SgdConfig::new().init(), scheduler)))
    });
    for told in errors {
        assert!(told.contains("learning rate of hidden.weight: 0.03"), "{told}");
        assert!(told.contains("learning rate of hidden.weight: 0.5"), "{told}");
    }
}
