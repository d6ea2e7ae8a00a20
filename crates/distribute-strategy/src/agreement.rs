//! The agreement of processes in every step: requests, and the equality of their settings.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use distribute_collectives::{Difference, ProcessGroup, Rank};
use distribute_types::ErrorClass;

use crate::step_header::{Request, Requests, StepHeader};
use crate::{Error, ReplicaContext, Strategy};

impl Strategy {
    /// Requests this of all processes.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::{Request, Strategy};
    /// let strategy = Strategy::default_strategy()?;
    /// strategy.request(Request::End);
    /// // After the next step of an optimizer, on every process: strategy.take_request(Request::End)
    /// # Ok::<(), distribute_strategy::Error>(())
    /// ```
    pub fn request(&self, request: Request) {
        self.request_flag(request).store(true, Ordering::Relaxed);
    }

    /// Cancels this process's request, if no step has carried it yet.
    pub fn cancel_request(&self, request: Request) {
        self.request_flag(request).store(false, Ordering::Relaxed);
    }

    /// Returns the flag that makes the same request as [`request`](Strategy::request) when it is set, from any thread
    /// or a signal handler.
    pub fn request_flag(&self, request: Request) -> Arc<AtomicBool> {
        Arc::clone(self.replicas().step.asked(request))
    }

    /// Returns whether a process has made this request: true once on each process, after the same step.
    pub fn take_request(&self, request: Request) -> bool {
        self.take_requests(request).processes > 0
    }

    /// Returns how many processes have made this request since it was last taken, and whether this one has: the same
    /// number on each process, after the same step. In an elastic job a request is void when its members change before
    /// it is taken; those that have made it make it again.
    pub fn take_requests(&self, request: Request) -> Requests {
        self.replicas().step.take_requests(request)
    }

    /// Notes a step that carries no header, since a compiled program or a worker of parameter servers has made it: the
    /// requests of this process, which is the only one, have then been made of all. For authors of tensor libraries'
    /// integrations.
    pub fn agree_alone(&self) {
        let step = &self.replicas().step;
        step.agree(step.header(<[u32; 2]>::default()));
    }

    /// Declares a setting of the program that must be equal on all workers. If it is not, the next optimizer step fails
    /// on all of them with an error that names the setting and both values. Declaring a name again replaces its value.
    ///
    /// Optimizers, models and distributed datasets declare their own settings; this is for those that a program chooses
    /// itself. It costs nothing: a digest travels with each step.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::Strategy;
    /// let strategy = Strategy::default_strategy()?;
    /// strategy.declare("epochs", 5);
    /// # Ok::<(), distribute_strategy::Error>(())
    /// ```
    pub fn declare(&self, name: &str, value: impl std::fmt::Display) {
        self.replicas().settings.declare(name, value.to_string());
    }
}

impl Error {
    /// Returns the [`SettingsDiffer`](Error::SettingsDiffer) of a difference that the group has found.
    pub fn of_difference(group: &ProcessGroup, Difference { mine, theirs, rank, .. }: Difference) -> Error {
        let missing = || "nothing of the kind".to_owned();
        let name = |rank: Rank| group.rank_name(rank).to_owned();
        Error::SettingsDiffer {
            here: name(group.rank()),
            mine: mine.unwrap_or_else(missing),
            there: name(rank),
            theirs: theirs.unwrap_or_else(missing),
        }
    }
}

impl ReplicaContext {
    /// Returns the header that this replica adds to a step's reductions. For authors of optimizers: the sums over all
    /// replicas go to [`check_settings`](ReplicaContext::check_settings) and
    /// [`agree_on_step`](ReplicaContext::agree_on_step).
    ///
    /// `settings` is a digest of the optimizer's settings, equal on all replicas of a process.
    pub fn step_header(&self, settings: u64) -> StepHeader {
        let replicas = self.strategy().replicas();
        let local = self.local_replica_id();
        match replicas.mesh.replica_of(local) {
            0 if local == 0 => replicas.step.header(replicas.settings.words(settings)),
            // The group of another place than the first, which carries the settings only.
            0 => StepHeader::with_settings(replicas.settings.words(settings)),
            _ => StepHeader::default(),
        }
    }

    /// Records the sums of every replica's [`step_header`](ReplicaContext::step_header).
    pub fn agree_on_step(&self, sums: StepHeader) {
        if self.local_replica_id() == 0 {
            self.strategy().replicas().step.agree(sums);
        }
    }

    /// Compares the sums of a step's headers with those that equal settings on all workers would give.
    ///
    /// `optimizer` is the digest that was passed to [`step_header`](ReplicaContext::step_header); `lines` describes the
    /// optimizer, one setting per line. Every replica calls this with the same sums.
    ///
    /// # Errors
    /// [`Error::SettingsDiffer`] names the first setting that differs; [`Error::Collective`] if a worker is missing or
    /// fails.
    pub fn check_settings(
        &self,
        sums: StepHeader,
        optimizer: u64,
        lines: impl FnOnce() -> Vec<String>,
    ) -> Result<(), Error> {
        let workers = self.strategy().topology().workers() as u32;
        let expected = self.strategy().replicas().settings.words(optimizer).map(|number| number.wrapping_mul(workers));
        if sums.settings == expected { Ok(()) } else { self.compare_settings(lines()) }
    }

    /// Compares the program's settings and `lines`, one setting per line, with those of all other workers at once. For
    /// settings that must be equal before a step's operations, because those would differ themselves. Every replica
    /// calls this.
    ///
    /// # Errors
    /// [`Error::SettingsDiffer`] names the first setting that differs; [`Error::Collective`] if a worker is missing or
    /// fails.
    pub fn compare_settings(&self, lines: Vec<String>) -> Result<(), Error> {
        if self.strategy().topology().workers() == 1 {
            return Ok(());
        }
        let mut all = lines;
        all.extend(self.strategy().replicas().settings.lines());
        let group = self.group();
        let Some(found) = group.first_difference(&all).map_err(Error::from)? else {
            // The declared settings have changed since the step began.
            return Ok(());
        };
        let error = Error::of_difference(group, found);
        // Aborted here, where the kind is known, so that a worker that has not read all answers yet ends with the same
        // exit code.
        group.abort(&error.to_string(), error.failure_kind());
        Err(error)
    }
}
