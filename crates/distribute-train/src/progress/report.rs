//! The interface to progress for training loops.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::bar::{self, BarRenderer};
use super::calls::CallSource;
use super::clock::{Clock, SystemClock};
use super::form::{Form, status_address};
use super::launcher::Launcher;
use super::lines::{JsonRenderer, PlainRenderer};
use super::log::BarSlot;
use super::protocol::{Event, Status};
use super::pulse::{Pulse, Sources, TcpLink};
use super::render::Renderer;
use super::reporter::Reporter;
use super::sink::Sink;
use super::summary::Summary;
use super::vitals::{Activity, WaitSource};
use crate::Error;

/// The description of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// One line that describes the run.
    pub title: String,
    /// The number of epochs.
    pub epochs: u32,
    /// Steps per epoch; if unknown, it is taken from the first epoch.
    pub steps_per_epoch: Option<u64>,
    /// This task, as `job:index`.
    pub task: String,
    /// Whether this task reports. The others stay silent, except for their [vital signs](super::Vitals).
    pub is_chief: bool,
    /// The times for which this task waits, for its vital signs.
    pub waits: WaitSource,
    /// The calls of process groups in which this task is, for its vital signs.
    pub calls: CallSource,
}

impl Options {
    /// Returns what the vital signs are read from.
    pub(crate) fn sources(&self) -> Sources {
        Sources { waits: self.waits.clone(), calls: self.calls.clone() }
    }
}

#[cfg(feature = "checkpoint")]
impl Options {
    /// Returns the options of one untitled epoch of unknown length, reported by the chief of a strategy's processes.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::Strategy;
    /// use distribute_train::progress::Options;
    /// let strategy = Strategy::default_strategy()?;
    /// let options = Options { title: "mnist".into(), epochs: 5, ..Options::of(&strategy) };
    /// assert!(options.is_chief && options.task == "worker:0");
    /// # Ok::<(), distribute_strategy::Error>(())
    /// ```
    pub fn of(strategy: &distribute_strategy::Strategy) -> Options {
        let task = strategy.coordination().map(|coordination| coordination.membership().task().to_string());
        let task = task.unwrap_or_else(|| "worker:0".to_owned());
        let (waits, calls) = (WaitSource::of(strategy), CallSource::of_process());
        Options { task, is_chief: strategy.is_chief(), waits, calls, ..Options::default() }
    }
}

impl Default for Options {
    /// Returns the options of one untitled epoch of unknown length, reported by `chief:0`.
    fn default() -> Self {
        let (task, waits, calls) = ("chief:0".into(), WaitSource::default(), CallSource::default());
        Self { title: String::new(), epochs: 1, steps_per_epoch: None, task, is_chief: true, waits, calls }
    }
}

/// Reports the progress of a training run. Call it on every task: those other than the chief report only their
/// [vital signs](super::Vitals), and only while a status page is shown.
///
/// If it is dropped without [`finish`](Self::finish), it writes queued events and leaves the terminal at the start of a
/// line; no summary is printed.
pub struct Progress {
    options: Options,
    outputs: Outputs,
    reporter: Option<Reporter>,
    /// Reports to the launcher's status page and to this task's own.
    pulses: Vec<Pulse>,
    /// The page that this task serves.
    #[cfg(all(feature = "checkpoint", feature = "status"))]
    page: Option<crate::callbacks::StatusPage>,
    /// Further destinations of the chief's progress.
    sinks: Vec<Box<dyn Sink>>,
    summary_taken: Arc<AtomicBool>,
    epoch: Epoch,
    posted_at: Option<Duration>,
}

impl Progress {
    /// Returns whether this task shows the progress of all.
    #[cfg(feature = "checkpoint")]
    pub(crate) fn is_chief(&self) -> bool {
        self.options.is_chief
    }

    /// Creates progress in the given form.
    ///
    /// # Errors
    /// [`Error::Thread`] if a thread cannot be started; [`Error::BadStatusAddress`] if `DISTRIBUTE_STATUS_ADDR`, which
    /// `distribute run --status` sets, is not an address.
    pub fn new(options: Options, form: Form) -> Result<Self, Error> {
        Self::with_outputs(options, form.resolved(), Outputs { status: status_address()?, ..Outputs::standard() })
    }

    /// Creates progress in the form that the environment selects, see [`Form::from_env`].
    ///
    /// # Errors
    /// The errors of [`Form::from_env`] on every task, and those of [`new`](Self::new).
    pub fn from_env(options: Options) -> Result<Self, Error> {
        Self::new(options, Form::from_env()?)
    }

    fn with_outputs(options: Options, form: Form, outputs: Outputs) -> Result<Self, Error> {
        let summary_taken = Arc::new(AtomicBool::new(false));
        let renderer = match &form {
            _ if !options.is_chief => None,
            form => renderer(form, &options.task, &outputs, &summary_taken),
        };
        let screen = renderer.map(|renderer| Arc::new(Mutex::new(renderer)));
        let reporter = screen.as_ref().map(|screen| Reporter::start(Arc::clone(screen)));
        let reporter = reporter.transpose().map_err(Error::Thread)?;
        if let Some(reporter) = &reporter {
            reporter.post(Event::Begin { title: options.title.clone() });
        }
        let mut pulses = Vec::new();
        if let Some(addr) = &outputs.status {
            let (title, link) = (options.is_chief.then(|| options.title.clone()), TcpLink::new(addr.clone()));
            let pulse = Pulse::start(&options.task, title, options.sources(), vec![Box::new(link)]);
            pulses.push(pulse.map_err(Error::Thread)?);
        }
        let steps = options.steps_per_epoch;
        let epoch = Epoch { status: Status { epochs: options.epochs, steps, ..Status::default() }, ..Epoch::default() };
        // Only a bar interferes with log lines; with the other forms they need not wait.
        if let Some(screen) = screen.filter(|_| form == Form::Bar) {
            outputs.bar.set(&screen);
        }
        Ok(Self {
            options,
            outputs,
            reporter,
            pulses,
            #[cfg(all(feature = "checkpoint", feature = "status"))]
            page: None,
            sinks: Vec::new(),
            summary_taken,
            epoch,
            posted_at: None,
        })
    }

    /// Serves a status page for this run on the chief; the other tasks report to it. Every task must call this. It is
    /// for runs without `distribute run --status`, and for loops without callbacks.
    ///
    /// # Errors
    /// [`Error::Listen`] or [`Error::Thread`] if the server cannot be started.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::Strategy;
    /// use distribute_train::callbacks::StatusPage;
    /// use distribute_train::progress::{Form, Options, Progress};
    /// let strategy = Strategy::default_strategy()?;
    /// let progress = Progress::new(Options::of(&strategy), Form::Off)?;
    /// let mut progress = progress.with_status(StatusPage::serve("127.0.0.1:0")?, &strategy)?;
    /// progress.epoch(1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[cfg(all(feature = "checkpoint", feature = "status"))]
    pub fn with_status(
        mut self,
        mut page: crate::callbacks::StatusPage,
        strategy: &distribute_strategy::Strategy,
    ) -> Result<Self, Error> {
        self.pulses.push(page.begin(strategy, &self.options)?);
        self.page = Some(page);
        Ok(self)
    }

    /// Also reports the run to Kubeflow Trainer, in a TrainJob: see
    /// [`KubeflowStatus`](crate::callbacks::KubeflowStatus). `None` reports nothing, and so do tasks other than the
    /// chief.
    ///
    /// # Errors
    /// [`Error::Thread`] if the thread that posts cannot be started.
    ///
    /// # Examples
    /// ```
    /// use distribute_train::callbacks::KubeflowStatus;
    /// use distribute_train::progress::{Form, Options, Progress};
    /// let progress = Progress::new(Options::default(), Form::Off)?;
    /// let mut progress = progress.with_kubeflow(KubeflowStatus::from_env()?)?;
    /// progress.epoch(1);
    /// # Ok::<(), distribute_train::Error>(())
    /// ```
    #[cfg(feature = "kubeflow")]
    pub fn with_kubeflow(mut self, status: impl Into<Option<crate::callbacks::KubeflowStatus>>) -> Result<Self, Error> {
        if let Some(mut status) = status.into().filter(|_| self.options.is_chief) {
            status.start()?;
            self.sinks.push(Box::new(status));
        }
        Ok(self)
    }

    /// Starts an epoch; they are counted from 1.
    pub fn epoch(&mut self, epoch: u32) {
        let now = self.outputs.clock.elapsed();
        self.epoch.begin(epoch, now);
        self.pulses.iter().for_each(Pulse::epoch);
        // Shows that the run is alive, however long its first step takes.
        self.post(false);
    }

    /// Continues an epoch of which an earlier run has made `steps` steps.
    pub fn continue_after(&mut self, steps: u64) {
        (self.epoch.status.step, self.epoch.status.resumed) = (steps, steps);
    }

    /// Reports completed steps, one or several since the last call: the `step`th of the epoch, counted from 1, was the
    /// last, and they were over `examples` examples of all replicas. Cheap enough for every step.
    pub fn step(&mut self, step: u64, examples: u64, metrics: &[(&str, f64)]) {
        if !self.pulses.is_empty() {
            let steps = step.saturating_sub(self.epoch.status.step);
            self.pulses.iter().for_each(|pulse| pulse.step(steps));
            self.epoch.status.step = step;
        }
        if !self.is_shown() {
            return;
        }
        let now = self.outputs.clock.elapsed();
        self.epoch.step(step, examples, metrics, now);
        if self.posted_at.is_none_or(|at| now.saturating_sub(at) >= POST_INTERVAL) {
            self.posted_at = Some(now);
            self.post(false);
        }
    }

    /// Tells what this task does apart from steps, such as saving a checkpoint, until its next step or epoch. A status
    /// page shows it if it takes long enough to be seen.
    pub fn activity(&mut self, activity: Activity) {
        self.pulses.iter().for_each(|pulse| pulse.activity(activity));
    }

    /// Reports a completed epoch, including its validation. Metrics replace those of the last step with the same name;
    /// the others are kept.
    pub fn end_epoch(&mut self, metrics: &[(&str, f64)]) {
        if !self.is_shown() {
            return;
        }
        self.epoch.end(metrics, self.outputs.clock.elapsed());
        self.post(true);
    }

    /// Ends the run: writes queued events, waiting at most two seconds for a slow destination, and prints the summary
    /// on standard output. The end of a Kubeflow status may take 10 s more.
    ///
    /// Under the launcher the summary is part of the `End` event and the launcher prints it; this process prints it
    /// only if the launcher is gone.
    pub fn finish(mut self, summary: &Summary) {
        if !self.options.is_chief {
            return;
        }
        let summary = summary.to_string();
        self.pulses.iter().for_each(|pulse| pulse.finish(Some(summary.clone())));
        if let Some(mut reporter) = self.reporter.take() {
            reporter.post(Event::End { summary: summary.clone() });
            reporter.close(FINISH_DEADLINE);
        }
        if !self.summary_taken.load(Ordering::Acquire) {
            let mut out = (self.outputs.stdout)();
            if let Err(error) = out.write_all(summary.as_bytes()).and_then(|()| out.flush()) {
                tracing::debug!(%error, "the summary cannot be written");
            }
        }
        self.sinks.iter_mut().for_each(|sink| sink.finish());
    }
}

impl Progress {
    /// Returns whether the run's progress is shown anywhere.
    fn is_shown(&self) -> bool {
        let has_others = !self.pulses.is_empty() || !self.sinks.is_empty();
        self.reporter.is_some() || self.options.is_chief && has_others
    }

    fn post(&mut self, is_epoch: bool) {
        if self.options.is_chief {
            self.pulses.iter().for_each(|pulse| pulse.progress(&self.epoch.status, is_epoch));
            self.sinks.iter_mut().for_each(|sink| sink.progress(&self.epoch.status, is_epoch));
        }
        if let Some(reporter) = &self.reporter {
            let status = self.epoch.status.clone();
            reporter.post(if is_epoch { Event::Epoch(status) } else { Event::Step(status) });
        }
    }
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Progress").field("options", &self.options).finish_non_exhaustive()
    }
}

fn renderer(form: &Form, task: &str, outputs: &Outputs, summary_taken: &Arc<AtomicBool>) -> Option<Box<dyn Renderer>> {
    let stderr = (outputs.stderr)();
    let clock = SystemClock::new();
    match form {
        Form::Off => None,
        Form::Bar => {
            let bar = BarRenderer::new(stderr, bar::terminal_width);
            Some(Box::new(bar.with_colors(bar::colors_allowed())))
        }
        Form::Json => Some(Box::new(JsonRenderer::new(stderr, clock))),
        Form::Launcher { addr } => {
            let taken = Arc::clone(summary_taken);
            Some(Box::new(Launcher::new(addr.clone(), task.to_owned(), stderr, clock, taken)))
        }
        Form::Plain | Form::Auto => Some(Box::new(PlainRenderer::new(stderr, clock))),
    }
}

/// The destinations of a run, which tests replace.
struct Outputs {
    stderr: Box<dyn Fn() -> Box<dyn Write + Send> + Send>,
    stdout: Box<dyn Fn() -> Box<dyn Write + Send> + Send>,
    clock: Box<dyn Clock>,
    bar: BarSlot,
    /// The address to which the vital signs are sent, if a status page is shown.
    status: Option<String>,
}

impl Outputs {
    fn standard() -> Self {
        Self {
            stderr: Box::new(|| Box::new(io::stderr())),
            stdout: Box::new(|| Box::new(io::stdout())),
            clock: Box::new(SystemClock::new()),
            bar: BarSlot::of_stderr(),
            status: None,
        }
    }
}

/// The running epoch.
#[derive(Default)]
struct Epoch {
    status: Status,
    began: Duration,
    examples: u64,
}

impl Epoch {
    fn begin(&mut self, epoch: u32, now: Duration) {
        self.began = now;
        self.examples = 0;
        let status = &mut self.status;
        status.epoch = epoch;
        (status.step, status.resumed) = (0, 0);
        status.elapsed_s = 0.0;
        status.examples_per_s = 0.0;
        status.metrics.clear();
    }

    fn step(&mut self, step: u64, examples: u64, metrics: &[(&str, f64)], now: Duration) {
        self.examples += examples;
        self.status.step = step;
        self.status.elapsed_s = now.saturating_sub(self.began).as_secs_f64();
        if self.status.elapsed_s > 0.0 {
            self.status.examples_per_s = self.examples as f64 / self.status.elapsed_s;
        }
        self.set(metrics);
    }

    fn end(&mut self, metrics: &[(&str, f64)], now: Duration) {
        self.status.elapsed_s = now.saturating_sub(self.began).as_secs_f64();
        if self.status.step > 0 {
            self.status.steps = self.status.steps.or(Some(self.status.step));
        }
        self.set(metrics);
    }

    fn set(&mut self, metrics: &[(&str, f64)]) {
        for (name, value) in metrics {
            match self.status.metrics.iter_mut().find(|(known, _)| known == name) {
                Some((_, known)) => *known = *value,
                None => self.status.metrics.push(((*name).to_owned(), *value)),
            }
        }
    }
}

/// Twice as often as a bar is redrawn; copying more often would burden the training thread without use.
const POST_INTERVAL: Duration = Duration::from_millis(50);

const FINISH_DEADLINE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
