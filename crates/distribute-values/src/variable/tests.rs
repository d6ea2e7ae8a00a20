//! The tables of what a read and a write do: synchronization × aggregation × context.

use super::*;
use crate::{HostTensor, PerWorkerVariable};

fn variable(synchronization: Synchronization, aggregation: Aggregation, start: f64) -> DistributedVariable<HostTensor> {
    let components = vec![HostTensor::scalar(start), HostTensor::scalar(start)];
    DistributedVariable::new("v", components, VariableOptions { synchronization, aggregation, local_writes: false })
        .unwrap()
}

fn locals(variable: &DistributedVariable<HostTensor>) -> Vec<f64> {
    variable.components().iter().map(|component| component.to_elements::<f64>().unwrap()[0]).collect()
}

/// Every replica assigns a value of its own, at the same time.
fn in_replicas(
    variable: &DistributedVariable<HostTensor>,
    groups: &[ProcessGroup],
    assignment: Assignment,
    values: [f64; 2],
) -> Result<()> {
    std::thread::scope(|scope| {
        let handles: Vec<_> = groups
            .iter()
            .enumerate()
            .map(|(local, group)| {
                let value = HostTensor::scalar(values[local]);
                scope.spawn(move || variable.assign(CallContext::Replica { local, group }, assignment, &value))
            })
            .collect();
        handles.into_iter().try_for_each(|handle| handle.join().unwrap())
    })
}

#[test]
fn on_write_in_replicas_aggregates_before_writing() {
    let cases = [(Aggregation::Sum, 5.0), (Aggregation::Mean, 2.5), (Aggregation::OnlyFirstReplica, 2.0)];
    for (aggregation, want) in cases {
        let groups = ProcessGroup::local(2).unwrap();
        for (assignment, start, result) in
            [(Assignment::Set, 0.0, want), (Assignment::Add, 1.0, 1.0 + want), (Assignment::Sub, 1.0, 1.0 - want)]
        {
            let v = variable(Synchronization::OnWrite, aggregation, start);
            in_replicas(&v, &groups, assignment, [2.0, 3.0]).unwrap();
            assert_eq!(locals(&v), [result, result], "{aggregation:?} {assignment:?}");
            assert_eq!(
                v.read_value(CallContext::Cross { groups: &groups }).unwrap().to_elements::<f64>().unwrap(),
                [result]
            );
        }
    }
}

#[test]
fn on_write_without_aggregation_is_refused_in_a_replica_and_allowed_outside() {
    let groups = ProcessGroup::local(2).unwrap();
    let v = variable(Synchronization::OnWrite, Aggregation::None, 0.0);
    let error = in_replicas(&v, &groups, Assignment::Set, [1.0, 1.0]).unwrap_err().to_string();
    assert!(error.contains("\"v\"") && error.contains("aggregation"), "{error}");
    v.assign(CallContext::Cross { groups: &groups }, Assignment::Set, &HostTensor::scalar(4.0)).unwrap();
    assert_eq!(locals(&v), [4.0, 4.0]);
    v.assign(CallContext::Update { local: 1 }, Assignment::Add, &HostTensor::scalar(1.0)).unwrap();
    assert_eq!(locals(&v), [4.0, 5.0]);
}

#[test]
fn on_read_combines_when_read_outside() {
    let groups = ProcessGroup::local(2).unwrap();
    let cases = [(Aggregation::Sum, 7.0), (Aggregation::Mean, 3.5), (Aggregation::OnlyFirstReplica, 3.0)];
    for (aggregation, want) in cases {
        let v = variable(Synchronization::OnRead, aggregation, 0.0);
        in_replicas(&v, &groups, Assignment::Add, [3.0, 4.0]).unwrap();
        assert_eq!(locals(&v), [3.0, 4.0]);
        assert_eq!(v.read_value(CallContext::Cross { groups: &groups }).unwrap().to_elements::<f64>().unwrap(), [want]);
        let mine = v.read_value(CallContext::Replica { local: 1, group: &groups[1] }).unwrap();
        assert_eq!(mine.to_elements::<f64>().unwrap(), [4.0]);
    }
    let v = variable(Synchronization::OnRead, Aggregation::None, 0.0);
    assert!(v.read_value(CallContext::Cross { groups: &groups }).is_err());
}

#[test]
fn a_value_that_was_read_stays_and_a_live_view_follows() {
    let groups = ProcessGroup::local(2).unwrap();
    let v = variable(Synchronization::OnWrite, Aggregation::Sum, 1.0);
    let places = [
        CallContext::Cross { groups: &groups },
        CallContext::Replica { local: 1, group: &groups[1] },
        CallContext::Update { local: 0 },
    ];
    let number = |tensor: &HostTensor| tensor.to_elements::<f64>().unwrap()[0];
    for context in places {
        let (read, live) = (v.read_value(context).unwrap(), v.live(context).unwrap());
        let before = number(&read);
        v.assign(places[0], Assignment::Add, &HostTensor::scalar(4.0)).unwrap();
        assert_eq!((number(&read), number(&live)), (before, before + 4.0), "{context:?}");
        // The snapshot does not write back either.
        read.write(&mut |mut buffer| buffer.as_mut_slice::<f64>().unwrap().fill(-1.0)).unwrap();
        assert_eq!(number(&live), before + 4.0);
    }
    let seen = variable(Synchronization::OnRead, Aggregation::Sum, 1.0);
    let error = seen.live(places[0]).unwrap_err().to_string();
    assert!(error.contains("use read_value()"), "{error}");
    seen.live(places[1]).unwrap();
}

#[test]
fn on_read_assignments_outside_follow_the_aggregation() {
    let groups = ProcessGroup::local(2).unwrap();
    let cross = CallContext::Cross { groups: &groups };
    let v = variable(Synchronization::OnRead, Aggregation::Sum, 0.0);
    v.assign(cross, Assignment::Set, &HostTensor::scalar(2.0)).unwrap();
    assert_eq!(locals(&v), [1.0, 1.0]);
    assert!(v.assign(cross, Assignment::Add, &HostTensor::scalar(2.0)).is_err());
    for aggregation in [Aggregation::Mean, Aggregation::OnlyFirstReplica, Aggregation::None] {
        let v = variable(Synchronization::OnRead, aggregation, 1.0);
        v.assign(cross, Assignment::Add, &HostTensor::scalar(2.0)).unwrap();
        assert_eq!(locals(&v), [3.0, 3.0]);
    }
}

#[test]
fn whole_numbers_spread_their_remainder() {
    let groups = ProcessGroup::local(3).unwrap();
    let components = (0..3).map(|_| HostTensor::scalar(0i64)).collect();
    let v = DistributedVariable::new("seen", components, VariableOptions::on_read(Aggregation::Sum)).unwrap();
    v.assign(CallContext::Cross { groups: &groups }, Assignment::Set, &HostTensor::scalar(11)).unwrap();
    let parts: Vec<i64> = v.components().iter().map(|part| part.to_elements::<i64>().unwrap()[0]).collect();
    assert_eq!(parts, [4, 4, 3]);
    assert_eq!(v.read_value(CallContext::Cross { groups: &groups }).unwrap().to_elements::<i64>().unwrap(), [11]);
}

#[test]
fn wrong_options_and_shapes_are_sentences() {
    let options = VariableOptions::on_write(Aggregation::Mean);
    let error = DistributedVariable::new("n", vec![HostTensor::scalar(1i32)], options).unwrap_err().to_string();
    assert!(error.contains("mean of integers"), "{error}");
    let v = variable(Synchronization::OnWrite, Aggregation::Sum, 0.0);
    let wrong = HostTensor::new(&[2], vec![1.0, 2.0]).unwrap();
    assert!(matches!(v.assign(CallContext::Update { local: 0 }, Assignment::Set, &wrong), Err(Error::Shape { .. })));
    let mixed = vec![HostTensor::scalar(1.0), HostTensor::new(&[1], vec![1.0]).unwrap()];
    assert!(DistributedVariable::new("m", mixed, VariableOptions::default()).is_err());
}

#[test]
fn local_writes_stay_in_their_copy_when_asked_for() {
    let groups = ProcessGroup::local(2).unwrap();
    let components = vec![HostTensor::scalar(0.0), HostTensor::scalar(0.0)];
    let options = VariableOptions { local_writes: true, ..VariableOptions::default() };
    let v = DistributedVariable::new("v", components, options).unwrap();
    in_replicas(&v, &groups, Assignment::Add, [2.0, 3.0]).unwrap();
    assert_eq!(locals(&v), [2.0, 3.0]);
    let shared = DistributedVariable::shared("s", HostTensor::scalar(0.0), 2, options).unwrap();
    assert!(in_replicas(&shared, &groups, Assignment::Add, [2.0, 3.0]).is_err());
}

#[test]
fn what_is_saved_is_restored_on_another_number_of_replicas() {
    for (aggregation, saved, restored) in
        [(Aggregation::Sum, 11, vec![4, 4, 3]), (Aggregation::OnlyFirstReplica, 6, vec![6, 6, 6])]
    {
        let groups = ProcessGroup::local(2).unwrap();
        let components = vec![HostTensor::scalar(6i64), HostTensor::scalar(5)];
        let v = DistributedVariable::new("v", components, VariableOptions::on_read(aggregation)).unwrap();
        let kept = v.save(&groups).unwrap();
        assert_eq!(kept.to_elements::<i64>().unwrap(), [saved]);
        let groups = ProcessGroup::local(3).unwrap();
        let components = (0..3).map(|_| HostTensor::scalar(0i64)).collect();
        let v = DistributedVariable::new("v", components, VariableOptions::on_read(aggregation)).unwrap();
        v.restore(&groups, &kept).unwrap();
        let parts: Vec<i64> = v.components().iter().map(|part| part.to_elements::<i64>().unwrap()[0]).collect();
        assert_eq!(parts, restored);
        assert_eq!(v.save(&groups).unwrap().to_elements::<i64>().unwrap(), [saved]);
    }
}

/// Two variables of one component, as each worker creates its own.
struct Pair {
    on_write: [DistributedVariable<HostTensor>; 2],
    on_read: [DistributedVariable<HostTensor>; 2],
    per_worker: [PerWorkerVariable<HostTensor>; 2],
}

impl Pair {
    fn new(aggregation: Aggregation) -> Pair {
        let make = |name, options| {
            DistributedVariable::new(name, vec![HostTensor::new(&[2], vec![1.0; 2]).unwrap()], options).unwrap()
        };
        Pair {
            on_write: ["a", "b"].map(|name| make(name, VariableOptions::on_write(aggregation))),
            on_read: ["a", "b"].map(|name| make(name, VariableOptions::on_read(aggregation))),
            per_worker: ["a", "b"].map(|name| PerWorkerVariable::new(name, HostTensor::scalar(1.0))),
        }
    }
}

/// An operation of one worker, which has a single rank, on one of its variables.
type Use = fn(&Pair, usize, &[ProcessGroup]) -> Result<()>;

fn own(group: &[ProcessGroup]) -> CallContext<'_> {
    CallContext::Replica { local: 0, group: &group[0] }
}

/// Returns a row for a scatter.
fn row() -> Result<HostTensor> {
    HostTensor::new(&[1], vec![1.0])
}

const USES: [(&str, Use); 6] = [
    ("creation", |pair, at, group| pair.on_write[at].share_initial(group)),
    ("assign", |pair, at, group| {
        pair.on_write[at].assign(own(group), Assignment::Add, &HostTensor::new(&[2], vec![1.0; 2])?)
    }),
    ("scatter", |pair, at, group| pair.on_write[at].scatter(own(group), Scatter::Add, &[1], &row()?)),
    ("read", |pair, at, group| pair.on_read[at].read_value(CallContext::Cross { groups: group }).map(drop)),
    ("save", |pair, at, group| pair.on_read[at].save(group).map(drop)),
    ("read_all", |pair, at, group| pair.per_worker[at].read_all(group).map(drop)),
];

/// Lets two workers of one rank each do something with a pair of variables of their own.
fn workers<R: Send>(
    aggregation: Aggregation,
    each: impl Fn(usize, &Pair, &[ProcessGroup]) -> Result<R> + Sync,
) -> [Result<R>; 2] {
    let groups = ProcessGroup::local(2).unwrap();
    let work = |worker: usize| each(worker, &Pair::new(aggregation), &groups[worker..=worker]);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| work(1));
        [work(0), other.join().unwrap()]
    })
}

#[test]
fn workers_that_use_variables_in_another_order_get_an_error() {
    for aggregation in [Aggregation::Sum, Aggregation::Mean, Aggregation::OnlyFirstReplica] {
        for (named, operation) in USES {
            let used =
                workers(aggregation, |_, pair, group| [0, 1].into_iter().try_for_each(|at| operation(pair, at, group)));
            assert!(used.iter().all(Result::is_ok), "{named} {aggregation:?}: {used:?}");
            let used = workers(aggregation, |worker, pair, group| {
                let order = if worker == 0 { [0, 1] } else { [1, 0] };
                order.into_iter().try_for_each(|at| operation(pair, at, group))
            });
            for (used, name) in used.into_iter().zip(["a", "b"]) {
                let error = used.unwrap_err();
                assert!(matches!(&error, Error::VariableOrder { name: of, .. } if of == name), "{named}: {error}");
                assert!(error.to_string().contains("in the same order"), "{error}");
            }
        }
    }
}

#[test]
fn workers_that_change_a_variable_in_different_ways_get_an_error() {
    let used = workers(Aggregation::Sum, |worker, pair, group| {
        let assignment = [Assignment::Add, Assignment::Sub][worker];
        pair.on_write[0].assign(own(group), assignment, &HostTensor::new(&[2], vec![1.0; 2])?)
    });
    assert!(used.iter().all(Result::is_err), "{used:?}");
    let used = workers(Aggregation::Sum, |worker, pair, group| {
        let scatter = [Scatter::Add, Scatter::Mul][worker];
        pair.on_write[0].scatter(own(group), scatter, &[0], &row()?)
    });
    assert!(used.iter().all(Result::is_err), "{used:?}");
}
