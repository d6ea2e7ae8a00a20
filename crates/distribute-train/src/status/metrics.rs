//! The state of a job in the OpenMetrics text format.

use std::fmt;
use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::{State, TaskView, View};

type Labels = Vec<(&'static str, String)>;

type Gauges = Family<Labels, Gauge<f64, AtomicU64>>;

/// Returns the numbers of a view. Those of tasks have the labels `job`, `task` and `role`, those of the job only `job`.
///
/// # Errors
/// None: the formatter writes to memory.
pub(super) fn text(view: &View) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("distribute");
    let job = || vec![("job", view.job.name.clone())];
    let mut of_job =
        |name: &str, help: &str, values: Vec<(Labels, Option<f64>)>| gauges(&mut registry, name, help, values);
    of_job("job_elapsed_seconds", "Time since the job began", vec![(job(), Some(view.job.elapsed_s))]);
    of_job("epoch", "The epoch under way", vec![(job(), view.job.epoch.map(f64::from))]);
    of_job("step", "Steps done in all epochs", vec![(job(), view.job.step.map(|step| step as f64))]);
    of_job("examples_per_second", "Examples of the global batch per second", vec![(job(), view.job.examples_per_s)]);
    let named = |name: &String| job().into_iter().chain([("name", name.clone())]).collect();
    let values = view.job.metrics.iter().map(|metric| (named(&metric.name), Some(metric.value)));
    of_job("value", "Losses and metrics, by their names", values.collect());

    let labels = |task: &TaskView| -> Labels {
        vec![("job", view.job.name.clone()), ("task", task.task.clone()), ("role", task.role.clone())]
    };
    let mut of_tasks = |name: &str, help: &str, number: fn(&TaskView) -> Option<f64>| {
        let values = view.tasks.iter().map(|task| (labels(task), number(task)));
        gauges(&mut registry, name, help, values.collect());
    };
    of_tasks("worker_up", "Whether the task's process runs and reports", |task| {
        Some(f64::from(u8::from(!matches!(task.state, State::Waiting | State::Ended | State::Failed | State::Lost))))
    });
    of_tasks("steps_per_second", "Steps per second", |task| task.steps_per_s);
    of_tasks("own_step_seconds", "Median time of a step without collectives", |task| task.own_s);
    of_tasks("communication_seconds", "Time of a step that the exchange of values takes", |task| task.communication_s);
    of_tasks("peer_wait_seconds", "Time of a step spent waiting for slower tasks", |task| task.peer_wait_s);
    of_tasks("input_wait_seconds", "Time of a step spent waiting for data", |task| task.input_wait_s);
    of_tasks("memory_bytes", "Resident memory", |task| task.memory_bytes.map(|bytes| bytes as f64));
    of_tasks("straggler", "Whether its own time is more than 1.2 times the others'", |task| {
        Some(f64::from(u8::from(task.straggler)))
    });
    let spreads = view.tasks.iter().filter_map(|task| Some((task, task.step_s?)));
    let quantiles = spreads.flat_map(|(task, spread)| {
        [("0.1", spread.p10), ("0.5", spread.p50), ("0.9", spread.p90)].map(|(quantile, value)| {
            let labels = labels(task).into_iter().chain([("quantile", quantile.to_owned())]);
            (labels.collect(), Some(value))
        })
    });
    gauges(&mut registry, "step_seconds", "Time of a step, by quantile", quantiles.collect());
    let counters = [
        ("steps", "Steps that the task's process has made", (|task| task.steps) as fn(&TaskView) -> Option<u64>),
        ("restarts", "Restarts of the task's process", |task| Some(task.restarts.into())),
    ];
    for (name, help, number) in counters {
        let family = Family::<Labels, Counter>::default();
        for (task, number) in view.tasks.iter().filter_map(|task| Some((task, number(task)?))) {
            family.get_or_create(&labels(task)).inc_by(number);
        }
        registry.register(name, help, family);
    }
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

/// Registers the values that are known.
fn gauges(registry: &mut Registry, name: &str, help: &str, values: Vec<(Labels, Option<f64>)>) {
    let family = Gauges::default();
    for (labels, value) in values.into_iter().filter_map(|(labels, value)| Some((labels, value?))) {
        family.get_or_create(&labels).set(value);
    }
    registry.register(name, help, family);
}
