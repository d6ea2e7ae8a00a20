use distribute_cluster::TaskType;
use proptest::prelude::*;

use super::*;

fn island(index: u32) -> Task {
    Task::new(TaskType::Worker, index)
}

fn from(index: u32, version: u64, examples: u64) -> Origin {
    Origin { island: island(index), version, examples, steps: 0, process: 0 }
}

fn known(count: u32) -> BTreeSet<Task> {
    (0..count).map(island).collect()
}

fn rules(quorum: usize, grace_ms: u64, staleness: u64) -> Rules {
    let outer = OuterNesterov { learning_rate: 1.0, momentum: 0.0 };
    Rules { outer, quorum, grace: Duration::from_millis(grace_ms), staleness }
}

fn fragment(rules: &Rules, values: &[f32]) -> OuterFragment {
    OuterFragment::new(rules, values.to_vec(), Vec::new(), 0)
}

#[test]
fn a_step_is_made_when_the_window_after_the_quorum_closes() {
    let (rules, all, start) = (rules(2, 100, 0), known(3), Instant::now());
    let at = |ms| start + Duration::from_millis(ms);
    let mut fragment = fragment(&rules, &[8.0]);
    fragment.take(at(0), &rules, from(0, 0, 1), vec![4.0]).unwrap();
    assert!(!fragment.advance(at(0), &rules, &all) && fragment.closes_at(&rules).is_none());
    // No number of contributions of one island is a quorum, and no time makes up for it.
    assert!(!fragment.advance(at(100_000), &rules, &all));
    let taken = fragment.take(at(100_000), &rules, from(1, 0, 1), vec![2.0]).unwrap();
    assert_eq!(taken, Taken::Counted { step: 1, late: 0 });
    assert_eq!(fragment.closes_at(&rules), Some(at(100_100)));
    assert!(!fragment.advance(at(100_099), &rules, &all));
    assert!(fragment.advance(at(100_100), &rules, &all));
    assert_eq!((fragment.version(), fragment.values()), (1, &[5.0][..]));
    assert!(!fragment.advance(at(200_000), &rules, &all), "an outer step needs contributions");
}

#[test]
fn a_step_is_made_at_once_when_all_known_islands_have_contributed() {
    let (rules, now) = (rules(2, 1_000_000, 0), Instant::now());
    let mut fragment = fragment(&rules, &[8.0]);
    for (index, changes) in [(0, 4.0), (1, 2.0)] {
        fragment.take(now, &rules, from(index, 0, 1), vec![changes]).unwrap();
        assert!(!fragment.advance(now, &rules, &known(3)), "one is missing");
    }
    // The third has left.
    assert!(fragment.advance(now, &rules, &known(2)));
    // All that are left are fewer than the quorum.
    fragment.take(now, &rules, from(0, 1, 1), vec![1.0]).unwrap();
    assert!(!fragment.advance(now, &rules, &known(1)));
}

#[test]
fn changes_of_a_process_that_was_replaced_are_not_added_to_those_of_the_next() {
    let (rules, now) = (rules(2, 0, 0), Instant::now());
    let mut fragment = fragment(&rules, &[16.0]);
    fragment.take(now, &rules, Origin { steps: 8, ..from(0, 0, 10) }, vec![3.0]).unwrap();
    fragment.take(now, &rules, Origin { steps: 7, process: 1, ..from(0, 0, 20) }, vec![2.0]).unwrap();
    assert_eq!(fragment.steps_of(island(0)), 7);
    fragment.take(now, &rules, from(1, 0, 20), vec![8.0]).unwrap();
    assert!(fragment.advance(now, &rules, &known(2)));
    assert_eq!(fragment.values(), [16.0 - 5.0]);
}

#[test]
fn changes_of_one_island_are_added_and_weighted_as_one() {
    let (rules, now) = (rules(2, 0, 0), Instant::now());
    let mut fragment = fragment(&rules, &[16.0]);
    fragment.take(now, &rules, from(0, 0, 10), vec![1.0]).unwrap();
    fragment.take(now, &rules, from(0, 0, 20), vec![3.0]).unwrap();
    fragment.take(now, &rules, from(1, 0, 10), vec![8.0]).unwrap();
    assert!(fragment.advance(now, &rules, &known(2)));
    // (30 * 4 + 10 * 8) / 40
    assert_eq!(fragment.values(), [16.0 - 5.0]);
}

#[test]
fn late_changes_count_up_to_the_staleness() {
    let (rules, now) = (rules(1, 0, 2), Instant::now());
    let mut fragment = fragment(&rules, &[0.0]);
    for step in 0..3 {
        fragment.take(now, &rules, from(0, step, 1), vec![1.0]).unwrap();
        assert!(fragment.advance(now, &rules, &known(2)));
    }
    let taken = fragment.take(now, &rules, from(1, 0, 1), vec![100.0]).unwrap();
    assert_eq!(taken, Taken::TooLate { late: 3 });
    assert!(!fragment.advance(now, &rules, &known(2)));
    let taken = fragment.take(now, &rules, from(1, 1, 1), vec![100.0]).unwrap();
    assert_eq!(taken, Taken::Counted { step: 4, late: 2 });
    assert!(fragment.advance(now, &rules, &known(2)));
    assert_eq!(fragment.values(), [-103.0]);
}

#[test]
fn what_cannot_count_changes_nothing() {
    let (rules, now) = (rules(1, 0, 9), Instant::now());
    let mut fragment = fragment(&rules, &[0.0, 1.0]);
    let mut told = |version, changes: Vec<f32>| fragment.take(now, &rules, from(0, version, 1), changes);
    assert_eq!(told(1, vec![0.0; 2]), Err(Unfit::FromTheFuture { version: 0 }));
    assert_eq!(told(0, vec![0.0; 3]), Err(Unfit::OtherLength));
    for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert_eq!(told(0, vec![0.0, wrong]), Err(Unfit::NotFinite { at: 1 }));
    }
    assert!(!fragment.advance(now, &rules, &known(1)));
    let slow = Rules { quorum: 2, ..rules };
    fragment.take(now, &slow, from(0, 0, 1), vec![f32::MAX, 0.0]).unwrap();
    let sum = fragment.take(now, &slow, from(0, 0, 1), vec![f32::MAX, 0.0]);
    assert_eq!(sum, Err(Unfit::NotFinite { at: 0 }), "a sum that is not finite");
}

/// The outer step of the paper, in f64 and without rounds: what islands have moved since the last step, by island.
#[derive(Default)]
struct Model {
    values: Vec<f64>,
    momentum: Vec<f64>,
    moved: BTreeMap<u32, (Vec<f64>, f64)>,
    version: u64,
    open_since: Option<u64>,
}

impl Model {
    fn close(&mut self, rules: &Rules, now_ms: u64, islands: u32) {
        let Some(since) = self.open_since else { return };
        if now_ms - since < rules.grace.as_millis() as u64 && self.moved.len() < islands as usize {
            return;
        }
        let examples: f64 = self.moved.values().map(|(_, examples)| examples).sum();
        for at in 0..self.values.len() {
            let gradient = self.moved.values().map(|(moved, weight)| weight / examples * moved[at]).sum::<f64>();
            self.momentum[at] = rules.outer.momentum * self.momentum[at] + gradient;
            let direction = gradient + rules.outer.momentum * self.momentum[at];
            self.values[at] -= rules.outer.learning_rate * direction;
        }
        (self.moved, self.open_since) = (BTreeMap::new(), None);
        self.version += 1;
    }
}

proptest! {
    /// Any islands at any times: steps, versions and refusals are those of the model, values are its up to f32.
    #[test]
    fn outer_steps_are_those_of_a_model_in_f64(
        quorum in 1usize..4,
        grace_ms in 0u64..40,
        staleness in 0u64..3,
        momentum in 0usize..2,
        events in proptest::collection::vec((0u32..4, 0u64..30, 1u64..100, 0u64..4, -8i8..8), 1..60),
    ) {
        let islands = 4;
        let outer = OuterNesterov { learning_rate: 0.5, momentum: [0.0, 0.5][momentum] };
        let rules = Rules { outer, ..rules(quorum, grace_ms, staleness) };
        let start = Instant::now();
        let mut fragment = fragment(&rules, &[1.0, -2.0]);
        let mut model = Model { values: vec![1.0, -2.0], momentum: vec![0.0; 2], ..Model::default() };
        let mut now_ms = 0;
        for (index, pause, examples, lag, change) in events {
            now_ms += pause;
            let now = start + Duration::from_millis(now_ms);
            fragment.advance(now, &rules, &known(islands));
            model.close(&rules, now_ms, islands);
            let version = model.version.saturating_sub(lag);
            let late = model.version - version;
            let changes = [f32::from(change) / 4.0, f32::from(change) / -8.0];
            let taken = fragment.take(now, &rules, from(index, version, examples), changes.to_vec()).unwrap();
            if late > staleness {
                prop_assert_eq!(taken, Taken::TooLate { late });
            } else {
                prop_assert_eq!(taken, Taken::Counted { step: model.version + 1, late });
                let (moved, weight) = model.moved.entry(index).or_insert_with(|| (vec![0.0; 2], 0.0));
                moved.iter_mut().zip(changes).for_each(|(moved, change)| *moved += f64::from(change));
                *weight += examples as f64;
                if model.open_since.is_none() && model.moved.len() >= quorum {
                    model.open_since = Some(now_ms);
                }
            }
            fragment.advance(now, &rules, &known(islands));
            model.close(&rules, now_ms, islands);
            prop_assert_eq!(fragment.version(), model.version);
            for (value, expected) in fragment.values().iter().zip(&model.values) {
                // Each step rounds the mean, the direction and the value once.
                let tolerance = 3e-6 * (1.0 + expected.abs()) * (1.0 + model.version as f64);
                prop_assert!((f64::from(*value) - expected).abs() <= tolerance, "{} is not {}", value, expected);
            }
        }
    }

    /// With all islands, equal examples, and an outer step without momentum at rate 1, the values become the mean of
    /// the islands' parameters. They are multiples of 1/64 here, so that neither differences nor sums nor the mean of
    /// 1, 2, 4 or 8 of them are rounded: bit for bit.
    #[test]
    fn a_step_of_all_islands_is_the_mean_of_their_parameters(
        log in 0u32..4,
        outer in -1000i16..1000,
        inner in proptest::collection::vec(-1000i16..1000, 8),
    ) {
        let (islands, now) = (1 << log, Instant::now());
        let rules = rules(islands as usize, 1_000_000, 0);
        let exact = |number: i16| f32::from(number) / 64.0;
        let mut fragment = fragment(&rules, &[exact(outer)]);
        for index in 0..islands {
            let change = exact(outer) - exact(inner[index as usize]);
            fragment.take(now, &rules, from(index, 0, 7), vec![change]).unwrap();
        }
        prop_assert!(fragment.advance(now, &rules, &known(islands)));
        let mean = inner[..islands as usize].iter().map(|inner| exact(*inner)).sum::<f32>() / islands as f32;
        prop_assert_eq!(fragment.values()[0].to_bits(), mean.to_bits());
    }
}
