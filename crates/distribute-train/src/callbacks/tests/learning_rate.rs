//! Rates by schedule, by the number of replicas, and on a plateau.

use super::*;

#[test]
fn the_rate_falls_on_a_plateau_and_not_below_its_least() {
    for (values, rate) in [(&[1.0, 1.0][..], 0.5), (&[1.0; 4], 0.3)] {
        let mut toy = Toy::new();
        let mut plateau = ReduceLrOnPlateau::new("val_loss").patience(0).factor(0.5).min_learning_rate(0.3);
        toy.train(&mut plateau, "val_loss", values);
        assert_eq!(toy.learning_rate, rate);
    }
    // As tf.keras counts: the best, and as many epochs as the patience; a change below the smallest is none.
    let reduced = |plateau: ReduceLrOnPlateau, values: &[f64]| {
        let mut toy = Toy::new();
        toy.train(&mut plateau.factor(0.5), "val_loss", values);
        toy.learning_rate
    };
    let plateau = |patience| ReduceLrOnPlateau::new("val_loss").patience(patience);
    assert_eq!(reduced(plateau(2), &[1.0; 2]), 1.0);
    assert_eq!(reduced(plateau(2), &[1.0; 3]), 0.5);
    assert_eq!(reduced(plateau(2), &[1.0; 5]), 0.25);
    assert_eq!(reduced(plateau(1), &[1.0, 0.99995]), 0.5);
    assert_eq!(reduced(plateau(1).min_delta(1e-5), &[1.0, 0.99995]), 1.0);
    // A schedule may have set a lower one.
    let mut toy = Toy::new();
    let mut plateau = ReduceLrOnPlateau::new("val_loss").patience(0).factor(0.5).min_learning_rate(3.0);
    toy.train(&mut plateau, "val_loss", &[1.0; 4]);
    assert_eq!(toy.learning_rate, 1.0);
}

#[test]
fn after_a_reduction_epochs_do_not_count_for_a_while_also_if_training_is_resumed_meanwhile() {
    // The rates after each epoch, as tf.keras computes them for a patience of 1.
    let rates = |cooldown: u32, values: &[f64]| -> Vec<f64> {
        let mut toy = Toy::new();
        let new = || ReduceLrOnPlateau::new("val_loss").patience(1).factor(0.5).cooldown(cooldown);
        let mut plateau = new();
        let epoch = |value: &f64| {
            toy.train(&mut plateau, "val_loss", std::slice::from_ref(value));
            let mut resumed = new();
            resumed.set_state(&plateau.state());
            plateau = resumed;
            toy.learning_rate
        };
        values.iter().map(epoch).collect()
    };
    assert_eq!(rates(0, &[1.0; 5]), [1.0, 0.5, 0.25, 0.125, 0.0625]);
    assert_eq!(rates(1, &[1.0; 5]), rates(0, &[1.0; 5]));
    assert_eq!(rates(2, &[1.0; 6]), [1.0, 0.5, 0.5, 0.25, 0.25, 0.125]);
    assert_eq!(rates(3, &[1.0; 6]), [1.0, 0.5, 0.5, 0.5, 0.25, 0.25]);
    assert_eq!(rates(2, &[1.0, 1.0, 0.5, 0.4, 0.4, 0.4]), [1.0, 0.5, 0.5, 0.5, 0.25, 0.25]);
}

#[test]
fn schedules_go_by_epoch_or_by_step() {
    let mut toy = Toy::new();
    toy.train(&mut LearningRateSchedule::new(|epoch, rate| rate / f64::from(epoch)), "x", &[1.0, 1.0, 1.0]);
    assert_eq!(toy.learning_rate, 1.0 / 6.0);
    toy.train(&mut LearningRateSchedule::by_step(|step| step as f64), "x", &[1.0]);
    assert_eq!(toy.learning_rate, 12.0);
}

#[test]
fn an_epoch_that_begins_again_keeps_its_rate() {
    let halved = || LearningRateSchedule::new(|_, rate| rate / 2.0);
    let (mut toy, mut schedule) = (Toy::new(), halved());
    toy.train(&mut schedule, "x", &[1.0, 1.0]);
    // In the same process, and in one that was restarted.
    toy.show(&[], |training| schedule.epoch_begin(training)).unwrap();
    let mut restarted = halved();
    restarted.set_state(&schedule.state());
    toy.show(&[], |training| restarted.epoch_begin(training)).unwrap();
    assert_eq!(toy.learning_rate, 0.25);
    toy.train(&mut restarted, "x", &[1.0]);
    assert_eq!(toy.learning_rate, 0.125);
}

#[test]
fn a_rate_grows_with_the_replicas_little_by_little() {
    let devices: Vec<String> = (0..4).map(|index| format!("CPU:{index}")).collect();
    let strategy = distribute_strategy::MirroredStrategy::builder().devices(devices).build().unwrap();
    let mut toy = Toy { strategy, ..Toy::new() };
    let mut scale = ScaleByReplicas::new().warm_up(6);
    let mut rates = Vec::new();
    for step in 0..=7 {
        toy.step = step;
        toy.show(&[], |training| scale.step_end(training)).unwrap();
        rates.push(toy.learning_rate);
    }
    assert_eq!(rates, [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.0]);
}

#[test]
fn a_rate_that_grows_reaches_its_end_however_many_steps_are_run_at_once() {
    let devices: Vec<String> = (0..4).map(|index| format!("CPU:{index}")).collect();
    let strategy = distribute_strategy::MirroredStrategy::builder().devices(devices).build().unwrap();
    for (warm_up, steps, expected) in
        [(6, &[0, 4, 8][..], &[1.0, 3.0, 4.0][..]), (5, &[0, 10], &[1.0, 4.0]), (0, &[0, 8], &[4.0, 4.0])]
    {
        let mut toy = Toy { strategy: strategy.clone(), ..Toy::new() };
        let mut scale = ScaleByReplicas::new().warm_up(warm_up);
        let mut rates = Vec::new();
        for step in steps {
            toy.step = *step;
            let mut restarted = ScaleByReplicas::new().warm_up(warm_up);
            restarted.set_state(&scale.state());
            scale = restarted;
            toy.show(&[], |training| scale.step_end(training)).unwrap();
            rates.push(toy.learning_rate);
        }
        assert_eq!(rates, expected, "{warm_up} steps");
        // From then on, the rate is that of other callbacks.
        (toy.step, toy.learning_rate) = (20, 0.25);
        toy.show(&[], |training| scale.step_end(training)).unwrap();
        assert_eq!(toy.learning_rate, 0.25);
    }
}

#[test]
fn a_rate_follows_the_replicas_of_a_restarted_program() {
    let of = |replicas: usize| {
        let devices: Vec<String> = (0..replicas).map(|index| format!("CPU:{index}")).collect();
        Toy::under(distribute_strategy::MirroredStrategy::builder().devices(devices).build().unwrap())
    };
    let (mut two, mut before) = (of(2), ScaleByReplicas::new());
    two.train(&mut before, "x", &[1.0]);
    assert_eq!(two.learning_rate, 2.0);
    // Another callback has halved it since.
    let (mut four, mut after) = (Toy { learning_rate: 1.0, ..of(4) }, ScaleByReplicas::new());
    after.set_state(&before.state());
    four.train(&mut after, "x", &[1.0, 1.0]);
    assert_eq!(four.learning_rate, 2.0);
    // Within the warm-up it is computed anew.
    let (mut four, mut after) = (Toy { step: 2, ..of(4) }, ScaleByReplicas::new().warm_up(4));
    let mut within = before.state();
    within["done"] = false.into();
    after.set_state(&within);
    four.show(&[], |training| after.epoch_begin(training)).unwrap();
    assert_eq!(four.learning_rate, 2.5);
    // Earlier versions did not save the number.
    let (mut four, mut after) = (of(4), ScaleByReplicas::new());
    after.set_state(&serde_json::json!({ "callback": "ScaleByReplicas", "rate": 1.0, "done": true }));
    four.train(&mut after, "x", &[1.0]);
    assert_eq!(four.learning_rate, 1.0);
    // Within an epoch of a schedule: one that does not depend on the rate before gives the same rate as before.
    let absolute: fn(u32, f64) -> f64 = |epoch, _| 0.25 * f64::from(epoch);
    let relative: fn(u32, f64) -> f64 = |_, rate| rate / 2.0;
    for (schedule, factor) in [(absolute, 1.0), (relative, 2.0)] {
        for is_reversed in [false, true] {
            let callbacks = || {
                let mut both: [Box<dyn Callback>; 2] =
                    [Box::new(ScaleByReplicas::new()), Box::new(LearningRateSchedule::new(schedule))];
                if is_reversed {
                    both.reverse();
                }
                both
            };
            type Hook = fn(&mut dyn Callback, &mut Training<'_>) -> Result<()>;
            let tell = |toy: &mut Toy, callbacks: &mut [Box<dyn Callback>], hook: Hook| {
                for callback in callbacks {
                    toy.show(&[], |training| hook(callback.as_mut(), training)).unwrap();
                }
            };
            let (mut two, mut before) = (of(2), callbacks());
            for epoch in 1..=2 {
                (two.epoch, two.step) = (epoch, u64::from(epoch));
                tell(&mut two, &mut before, |callback, training| callback.epoch_begin(training));
                tell(&mut two, &mut before, |callback, training| callback.step_end(training));
            }
            let (mut four, mut after) =
                (Toy { epoch: 2, step: 2, learning_rate: two.learning_rate, ..of(4) }, callbacks());
            after.iter_mut().zip(&before).for_each(|(after, before)| after.set_state(&before.state()));
            tell(&mut four, &mut after, |callback, training| callback.resumed(training));
            tell(&mut four, &mut after, |callback, training| callback.epoch_begin(training));
            let rates = (four.learning_rate, two.learning_rate * factor);
            assert_eq!(rates.0, rates.1, "reversed: {is_reversed}, factor: {factor}");
        }
    }
}
