//! A page that shows the state of a job, served by its chief.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use distribute_strategy::{Strategy, WeakStrategy};

use super::{Callback, Training};
use crate::progress::{self, Activity, Event, Link, Message, Pulse, Status, Vitals};
use crate::status::{Board, Job, Port, RELEASE, Server};
use crate::{Error, Result};

/// Serves a status page on the chief until it is dropped, to which all workers report: see [`status`](crate::status).
/// In an elastic job whose chief is lost, the next one serves it at the same address of its own host.
///
/// For programs that `distribute run --status` does not start. Workers send their vital signs about once a second
/// through the job's coordination service, from a thread of their own. Custom loops give it to
/// [`Progress::with_status`](crate::progress::Progress::with_status) instead.
///
/// A loopback address is reached from this machine only; anyone who reaches another one can read the page.
///
/// # Examples
/// ```
/// use distribute_train::callbacks::StatusPage;
/// let page = StatusPage::serve("127.0.0.1:0")?;                        // a free port
/// assert_ne!(page.address().port(), 0);
/// # Ok::<(), distribute_train::Error>(())
/// ```
#[derive(Debug)]
pub struct StatusPage {
    /// Held until the training begins, which determines whether this process is the chief.
    port: Port,
    /// That of the chief.
    server: Option<Server>,
    /// Whether this process was the chief when it began to report; none before.
    was_chief: Option<bool>,
    /// Reports the steps of this task; none before training, and none in a custom loop, whose progress has it.
    pulse: Option<Pulse>,
    /// The state of the chief's training.
    status: Status,
    steps: u64,
}

impl StatusPage {
    /// Serves at an address of this machine, such as `127.0.0.1:8080`. All workers of a host may be given the same one;
    /// the chief serves at it.
    ///
    /// # Errors
    /// [`Error::Listen`] if the address cannot be listened on. That another process has the port is an error of the
    /// chief's training, if it does not release it within 5 s.
    pub fn serve(address: &str) -> Result<StatusPage> {
        let (port, status) = (Port::reserve(address)?, Status::default());
        Ok(StatusPage { port, server: None, was_chief: None, pulse: None, status, steps: 0 })
    }

    /// Returns the address of the page.
    pub fn address(&self) -> SocketAddr {
        self.port.address()
    }

    /// Begins a run: serves on the chief, and returns what reports this task's steps.
    pub(crate) fn begin(&mut self, strategy: &Strategy, options: &progress::Options) -> Result<Pulse> {
        self.was_chief = Some(options.is_chief);
        if !options.is_chief {
            self.port.release();
            let link: Box<dyn Link> = Box::new(ToChief { strategy: strategy.downgrade() });
            return Pulse::start(&options.task, None, options.sources(), vec![link]).map_err(Error::Thread);
        }
        let listener = self.port.listen(RELEASE)?;
        let program = std::env::current_exe().ok();
        let name = program.as_deref().and_then(|path| path.file_stem()).map(|name| name.to_string_lossy().into_owned());
        let mut job = Job::new(name.as_deref().unwrap_or("training"));
        match strategy.coordination() {
            Some(coordination) => {
                coordination.membership().tasks.iter().for_each(|task| job.expect(&task.to_string()));
            }
            None => job.expect(&options.task),
        }
        let board = Board::new(job);
        self.server = Some(Server::start(listener, crate::status::routes(&board))?);
        let link =
            Box::new(OnChief { strategy: strategy.downgrade(), board, has_failed: false, known: BTreeMap::new() });
        let title = Some(options.title.clone());
        Pulse::start(&options.task, title, options.sources(), vec![link]).map_err(Error::Thread)
    }

    fn begin_in(&mut self, training: &Training<'_>) -> Result<()> {
        let title = training.strategy.describe();
        let options = progress::Options { title, ..progress::Options::of(training.strategy) };
        self.pulse = Some(self.begin(training.strategy, &options)?);
        Ok(())
    }

    fn note(&mut self, training: &Training<'_>, is_epoch: bool) {
        let Some(pulse) = &self.pulse else { return };
        // Values of the last validation stay while there are none.
        for (name, value) in training.values {
            match self.status.metrics.iter_mut().find(|(known, _)| known == name) {
                Some((_, known)) => *known = *value,
                None => self.status.metrics.push((name.clone(), *value)),
            }
        }
        (self.status.epoch, self.status.total_steps) = (training.epoch, Some(training.step));
        pulse.progress(&self.status, is_epoch);
    }
}

impl Callback for StatusPage {
    fn train_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        if self.pulse.is_none() {
            self.begin_in(training)?;
        }
        self.steps = training.step;
        Ok(())
    }

    fn members_changed(&mut self, training: &mut Training<'_>) -> Result<()> {
        if self.was_chief.is_some_and(|was_chief| was_chief != training.is_chief()) {
            (self.pulse, self.server) = (None, None);
            if let Err(error) = self.begin_in(training) {
                distribute_notice::warn!("this process does not report to a status page any more: {error}");
            }
        }
        Ok(())
    }

    fn epoch_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.status.step = 0;
        self.note(training, false);
        self.pulse.iter().for_each(Pulse::epoch);
        Ok(())
    }

    fn step_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        let steps = training.step.saturating_sub(self.steps);
        self.steps = training.step;
        self.status.step += steps;
        self.pulse.iter().for_each(|pulse| pulse.step(steps));
        self.note(training, false);
        Ok(())
    }

    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.note(training, true);
        Ok(())
    }

    fn train_end(&mut self, _: &mut Training<'_>) -> Result<()> {
        self.pulse.iter().for_each(|pulse| pulse.activity(Activity::Finished));
        Ok(())
    }
}

/// Takes a worker's vital signs to the chief, through the coordination service.
struct ToChief {
    strategy: WeakStrategy,
}

impl Link for ToChief {
    fn send(&mut self, messages: &[Message]) {
        let Some(strategy) = self.strategy.upgrade() else { return };
        let Some(coordination) = strategy.coordination() else { return };
        let vitals = messages.iter().find(|message| matches!(message.event, Event::Vitals(_)));
        let Some(Ok(value)) = vitals.map(serde_json::to_vec) else { return };
        if let Err(error) = coordination.put(&key(coordination.membership().rank), &value) {
            tracing::debug!(%error, "the vital signs cannot be sent to the chief");
        }
    }
}

/// Puts the chief's own reports and those of the workers on the board.
struct OnChief {
    strategy: WeakStrategy,
    board: Board,
    has_failed: bool,
    /// The number of the last report of each rank.
    known: BTreeMap<u32, u64>,
}

impl OnChief {
    /// Fetches the other workers' reports.
    fn fetch(&mut self) {
        let Some(strategy) = self.strategy.upgrade() else { return };
        let Some(coordination) = strategy.coordination() else { return };
        if let Some(failure) = coordination.failure().filter(|_| !self.has_failed) {
            self.has_failed = true;
            let lost = failure.task.to_string();
            self.board.update(|job, now| job.lose(&lost, &failure.to_string(), now));
        }
        let membership = coordination.membership();
        for rank in (0..membership.world_size()).filter(|rank| *rank != membership.rank) {
            match coordination.try_get(&key(rank)) {
                Ok(Some(value)) => {
                    let Ok(message) = serde_json::from_slice::<Message>(&value) else { continue };
                    // The store keeps the last report of a worker that has stopped.
                    let Event::Vitals(Vitals { report, .. }) = message.event else { continue };
                    if self.known.insert(rank, report) != Some(report) {
                        self.board.update(|job, now| job.receive(&message, now));
                    }
                }
                Ok(None) => {}
                // The service has ended, and with it the job.
                Err(_) => return,
            }
        }
    }
}

impl Link for OnChief {
    fn send(&mut self, messages: &[Message]) {
        self.board.update(|job, now| messages.iter().for_each(|message| job.receive(message, now)));
        self.fetch();
    }
}

/// Returns the key of a worker's reports.
fn key(rank: u32) -> String {
    format!("distribute/status/{rank}")
}
