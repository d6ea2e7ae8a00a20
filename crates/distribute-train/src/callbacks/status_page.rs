//! A page that shows the state of a job, served by its chief.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};

use distribute_strategy::{Strategy, WeakStrategy};

use super::{Callback, Training};
use crate::progress::{self, Activity, Event, Link, Message, Pulse, Status, Vitals};
use crate::status::{Board, Job, Server};
use crate::{Error, Result};

/// Serves a status page on the chief until it is dropped, to which all workers report: see [`status`](crate::status).
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
    address: SocketAddr,
    /// Held until the training begins, which determines whether this process is the chief.
    listener: Option<TcpListener>,
    server: Option<Server>,
    /// Reports the steps of this task; none before training, and none in a custom loop, whose progress has it.
    pulse: Option<Pulse>,
    /// The state of the chief's training.
    status: Status,
    steps: u64,
}

impl StatusPage {
    /// Serves at an address of this machine, such as `127.0.0.1:8080`.
    ///
    /// # Errors
    /// [`Error::Listen`] if the address cannot be listened on.
    pub fn serve(address: &str) -> Result<StatusPage> {
        let listener = crate::status::bind(address)?;
        let failed = |source| Error::Listen { address: address.to_owned(), source };
        let address = listener.local_addr().map_err(failed)?;
        let (status, steps) = (Status::default(), 0);
        Ok(StatusPage { address, listener: Some(listener), server: None, pulse: None, status, steps })
    }

    /// Returns the address of the page.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Begins a run: serves on the chief, and returns what reports this task's steps.
    pub(crate) fn begin(&mut self, strategy: &Strategy, options: &progress::Options) -> Result<Pulse> {
        let listener = self.listener.take().filter(|_| options.is_chief);
        let Some(listener) = listener else {
            // Workers other than the chief release their port.
            let link: Box<dyn Link> = Box::new(ToChief { strategy: strategy.downgrade() });
            return Pulse::start(&options.task, None, options.sources(), vec![link]).map_err(Error::Thread);
        };
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
            let title = training.strategy.describe();
            let options = progress::Options { title, ..progress::Options::of(training.strategy) };
            self.pulse = Some(self.begin(training.strategy, &options)?);
        }
        self.steps = training.step;
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
