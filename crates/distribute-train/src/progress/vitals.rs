//! The vital signs of one task, and their measurement.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use distribute_types::Waits;
use serde::{Deserialize, Serialize};

use super::calls::GroupCall;

/// The vital signs of one task, which every task reports about once a second while a status page is shown.
///
/// Times are in seconds and describe the steps of the last 30 s.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Vitals {
    /// The number of this report, from 1; a reader that finds the same number again has no new report.
    pub report: u64,
    /// The name of the task's host.
    pub host: String,
    /// The id of the task's process.
    pub pid: u32,
    /// The task's activity.
    pub activity: Activity,
    /// Steps that this process has made.
    pub steps: u64,
    /// Steps per second.
    pub steps_per_s: Option<f64>,
    /// The time of a step.
    pub step_s: Option<Spread>,
    /// The median of the time that a step takes by itself, without waiting in collectives.
    pub own_s: Option<f64>,
    /// The median of the time that a step waits in collectives, for peers or for values.
    pub collective_s: Option<f64>,
    /// The mean time that a step waits for data, which is part of its own time.
    pub input_wait_s: Option<f64>,
    /// Resident memory of the process, in bytes.
    pub memory_bytes: Option<u64>,
    /// The calls of process groups that the ranks of the process are in.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<GroupCall>,
}

/// The activity of a task.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Activity {
    /// No step is completed yet.
    #[default]
    Starting,
    /// Making steps.
    Training,
    /// Measuring the model on other data.
    Validating,
    /// Saving a checkpoint.
    Checkpointing,
    /// Training has ended; the process may still run.
    Finished,
}

/// The distribution of a time, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// A tenth of the values are shorter.
    pub p10: f64,
    /// The median.
    pub p50: f64,
    /// A tenth of the values are longer.
    pub p90: f64,
}

impl Spread {
    /// Returns the spread of some values, which it sorts; `None` if there are none.
    fn of(values: &mut [f64]) -> Option<Spread> {
        values.sort_unstable_by(f64::total_cmp);
        let last = values.len().checked_sub(1)?;
        let at = |share: f64| values[(last as f64 * share).round() as usize];
        Some(Spread { p10: at(0.1), p50: at(0.5), p90: at(0.9) })
    }
}

/// Reads for how long this process has waited for peers and for data; without one, the vital signs lack these times.
///
/// # Examples
/// ```
/// use std::time::Instant;
/// use distribute_train::progress::{Options, Waits, WaitSource};
///
/// let begin = Instant::now();
/// let waits = WaitSource::new(move || Some(Waits { collectives: begin.elapsed() / 4, ..Waits::default() }));
/// let options = Options { waits, ..Options::default() };
/// ```
#[derive(Clone, Default)]
pub struct WaitSource(Option<Arc<Read>>);

/// Returns the totals, or `None` if they are not known any more.
type Read = dyn Fn() -> Option<Waits> + Send + Sync;

impl WaitSource {
    /// Creates a source from a function that returns the totals so far, or `None` if they are not known any more. It
    /// is called after every step.
    pub fn new(read: impl Fn() -> Option<Waits> + Send + Sync + 'static) -> WaitSource {
        WaitSource(Some(Arc::new(read)))
    }

    pub(crate) fn read(&self) -> Option<Waits> {
        self.0.as_ref().and_then(|read| read())
    }
}

#[cfg(feature = "checkpoint")]
impl WaitSource {
    /// Creates the source of a strategy's processes. It does not keep the strategy alive.
    pub fn of(strategy: &distribute_strategy::Strategy) -> WaitSource {
        let strategy = strategy.downgrade();
        WaitSource::new(move || strategy.upgrade().map(|strategy| strategy.waits()))
    }
}

impl PartialEq for WaitSource {
    fn eq(&self, other: &WaitSource) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl Eq for WaitSource {}

impl fmt::Debug for WaitSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "WaitSource(a function)" } else { "WaitSource(none)" })
    }
}

/// Measures steps.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    /// The end of the last step, or the begin of the epoch.
    last: Option<(Duration, Option<Waits>)>,
    /// The last steps, oldest first.
    window: VecDeque<Measured>,
    steps: u64,
}

/// The times of one step, in seconds.
#[derive(Debug, Clone, Copy)]
struct Measured {
    ended: Duration,
    wall: f64,
    collectives: Option<f64>,
    input: Option<f64>,
}

impl Meter {
    /// Starts the first step after a pause, which is not part of it.
    pub(crate) fn resume(&mut self, now: Duration, waits: Option<Waits>) {
        self.last = Some((now, waits));
    }

    /// Records the end of `count` steps since the last call.
    pub(crate) fn step(&mut self, count: u64, now: Duration, waits: Option<Waits>) {
        let before = self.last.replace((now, waits));
        self.steps += count;
        let (Some((began, before)), true) = (before, count > 0) else { return };
        let per_step = |time: Duration| time.as_secs_f64() / count as f64;
        let waited = waits.zip(before).map(|(waits, before)| waits.since(before));
        let wall = per_step(now.saturating_sub(began));
        self.window.push_back(Measured {
            ended: now,
            wall,
            collectives: waited.map(|waited| per_step(waited.collectives).min(wall)),
            input: waited.map(|waited| per_step(waited.input).min(wall)),
        });
        let is_old = |step: &Measured| now.saturating_sub(step.ended) > WINDOW;
        while self.window.len() > MOST || (self.window.len() > FEWEST && self.window.front().is_some_and(is_old)) {
            self.window.pop_front();
        }
    }

    /// Returns whether no step is recorded.
    pub(crate) fn is_empty(&self) -> bool {
        self.steps == 0
    }

    /// Returns the vital signs so far.
    pub(crate) fn vitals(&self, now: Duration, activity: Activity, host: &str) -> Vitals {
        let of = |time: fn(&Measured) -> Option<f64>| self.window.iter().filter_map(time).collect::<Vec<_>>();
        let median = |mut values: Vec<f64>| Spread::of(&mut values).map(|spread| spread.p50);
        let input = of(|step| step.input);
        let step_s = Spread::of(&mut of(|step| Some(step.wall)));
        Vitals {
            report: 0,
            host: host.to_owned(),
            pid: std::process::id(),
            activity,
            steps: self.steps,
            steps_per_s: step_s.and_then(|spread| self.rate(now, spread.p90)),
            step_s,
            own_s: median(of(|step| Some(step.wall - step.collectives?))),
            collective_s: median(of(|step| step.collectives)),
            input_wait_s: (!input.is_empty()).then(|| input.iter().sum::<f64>() / input.len() as f64),
            memory_bytes: memory_bytes(),
            calls: Vec::new(),
        }
    }

    /// Returns steps per second; a step that takes longer than usual lowers them before its end.
    fn rate(&self, now: Duration, usual_s: f64) -> Option<f64> {
        let (ended, _) = self.last?;
        let late_s = (now.saturating_sub(ended).as_secs_f64() - usual_s).max(0.0);
        let all_s = self.window.iter().map(|step| step.wall).sum::<f64>() + late_s;
        (all_s > 0.0).then(|| self.window.len() as f64 / all_s)
    }
}

/// Returns the name of this host.
pub(crate) fn host() -> String {
    #[cfg(unix)]
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    let name = super::form::computer_name();
    name
}

/// Returns the largest resident memory that this process has had, in bytes: all replicas of the process together, with
/// intermediate results and everything else. `None` where the system does not tell it; Linux does.
///
/// # Examples
/// ```
/// use distribute_train::progress::{Summary, peak_memory_bytes};
/// let summary = Summary { peak_memory_bytes: peak_memory_bytes(), ..Summary::default() };
/// ```
pub fn peak_memory_bytes() -> Option<u64> {
    status_bytes("VmHWM:")
}

/// Returns the resident memory of this process, where Linux tells it.
fn memory_bytes() -> Option<u64> {
    status_bytes("VmRSS:")
}

/// Returns a size that the kernel tells of this process.
fn status_bytes(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib = status.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB"));
    Some(kib?.trim().parse::<u64>().ok()? * 1024)
}

/// The time that the vital signs describe: short enough to show a change, long enough for a median.
const WINDOW: Duration = Duration::from_secs(30);

/// Bounds of the number of steps that the vital signs describe.
const FEWEST: usize = 5;
const MOST: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn waits(collectives: u64, input: u64) -> Option<Waits> {
        Some(Waits { collectives: ms(collectives), input: ms(input) })
    }

    fn near(value: Option<f64>, expected: f64) -> bool {
        value.is_some_and(|value| (value - expected).abs() < 1e-9)
    }

    #[test]
    fn own_time_is_the_step_without_the_wait_in_collectives() {
        let mut meter = Meter::default();
        meter.resume(ms(0), waits(0, 0));
        for step in 1..=10 {
            meter.step(1, ms(100 * step), waits(30 * step, 10 * step));
        }
        let vitals = meter.vitals(ms(1000), Activity::Training, "here");
        assert_eq!((vitals.steps, vitals.host.as_str(), vitals.pid), (10, "here", std::process::id()));
        assert!(near(vitals.own_s, 0.07) && near(vitals.collective_s, 0.03), "{vitals:?}");
        assert!(near(vitals.input_wait_s, 0.01) && near(vitals.steps_per_s, 10.0), "{vitals:?}");
        assert!(vitals.memory_bytes.is_none_or(|bytes| bytes > 1 << 16), "{vitals:?}");
    }

    #[test]
    fn the_peak_includes_memory_that_has_been_freed() {
        drop(std::hint::black_box(vec![1u8; 64 << 20]));
        let peak = peak_memory_bytes();
        // The kernel's counters of a process are some pages behind.
        assert!(peak.is_none_or(|peak| peak > 60 << 20), "{peak:?}");
        assert_eq!(peak.is_some(), cfg!(target_os = "linux"));
    }

    #[test]
    fn several_steps_at_once_share_their_time() {
        let mut meter = Meter::default();
        meter.resume(ms(0), None);
        meter.step(4, ms(400), None);
        let vitals = meter.vitals(ms(400), Activity::Training, "");
        assert_eq!(vitals.steps, 4);
        assert!(near(vitals.step_s.map(|spread| spread.p50), 0.1), "{vitals:?}");
        assert_eq!((vitals.own_s, vitals.collective_s, vitals.input_wait_s), (None, None, None));
    }

    #[test]
    fn a_pause_is_no_step_and_the_spread_shows_the_tails() {
        let mut meter = Meter::default();
        meter.step(1, ms(50), None);
        assert_eq!(meter.vitals(ms(50), Activity::Training, "").step_s, None);
        meter.resume(ms(10_000), None);
        for step in 1..=10 {
            meter.step(1, ms(10_000 + 10 * step * (step + 1) / 2), None);
        }
        let spread = meter.vitals(ms(10_600), Activity::Training, "").step_s.unwrap();
        assert!(near(Some(spread.p10), 0.02) && near(Some(spread.p90), 0.09), "{spread:?}");
    }

    #[test]
    fn a_step_that_hangs_lowers_the_rate() {
        let mut meter = Meter::default();
        meter.resume(ms(0), None);
        (1..=10).for_each(|step| meter.step(1, ms(100 * step), None));
        assert!(near(meter.vitals(ms(1100), Activity::Training, "").steps_per_s, 10.0));
        assert!(near(meter.vitals(ms(5100), Activity::Training, "").steps_per_s, 2.0));
    }

    #[test]
    fn old_steps_are_forgotten_but_for_a_few() {
        let mut meter = Meter::default();
        meter.resume(ms(0), None);
        (1..=2000).for_each(|step| meter.step(1, ms(step), None));
        assert_eq!(meter.window.len(), MOST);
        (1..=10).for_each(|step| meter.step(1, ms(60_000 * step), None));
        assert_eq!(meter.window.len(), FEWEST);
    }

    #[test]
    fn totals_that_shrink_are_no_negative_wait() {
        let mut meter = Meter::default();
        meter.resume(ms(0), waits(500, 0));
        meter.step(1, ms(100), waits(10, 0));
        meter.step(1, ms(200), waits(910, 0));
        let vitals = meter.vitals(ms(200), Activity::Training, "");
        assert!(near(vitals.step_s.map(|spread| spread.p50), 0.1), "{vitals:?}");
        assert!(vitals.own_s.unwrap() >= 0.0 && vitals.collective_s.unwrap() <= 0.1, "{vitals:?}");
    }
}
