//! The status of a Kubeflow TrainJob, which the chief keeps up to date.

use std::ffi::OsString;
use std::path::PathBuf;

use std::time::{Duration, Instant, SystemTime};

use self::post::{Poster, Settings};
use self::report::Gauge;
use self::request::Target;
use super::{Callback, Training};
use crate::progress::{Sink, Status};
use crate::{Error, Result, environment};

mod post;
mod report;
mod request;
#[cfg(test)]
mod stand_in;
#[cfg(test)]
mod tests;

/// Reports the training to Kubeflow Trainer, which shows it in the TrainJob's `status.trainerStatus`: the progress in
/// percent, the estimated remaining time, losses and metrics.
///
/// The chief alone posts, from a thread of its own: at most every 5 s ([`every`](Self::every)), the newest state, in at
/// most 5 s per post. Training never waits for it but at its end, at most 10 s, until 100 % is accepted. A post that
/// fails never fails the training: the first failure is a warning, further ones are logged at the level `debug`. In an
/// elastic job whose chief is lost, the next one posts.
///
/// The token and the certificate are read anew for each post, so both may be replaced during the training. The server
/// is asked directly, not through a proxy.
///
/// - The progress counts epochs, and steps in them where their number is known. It stays below 100 % until training has
///   ended, and is missing while it cannot be estimated. A training that callbacks end early has 100 % at its end; one
///   that an error ends keeps its last status.
/// - Metrics are `currentEpoch`, `totalEpochs`, and those of the newest step and the newest epoch. Values are texts, so
///   NaN and infinities are sent as `NaN`, `inf` and `-inf`. Kubeflow takes 256 metrics with names of 64 characters in
///   64 KiB: longer names are cut, and further metrics are left out with a warning.
///
/// Custom loops give it to [`Progress::with_kubeflow`](crate::progress::Progress::with_kubeflow) instead.
///
/// # Examples
/// ```
/// use distribute_train::callbacks::KubeflowStatus;
/// use distribute_train::trainer::Fit;
/// // Outside of a TrainJob it does nothing.
/// let fit: Fit<(), distribute_train::Error> = Fit::epochs(20).callback(KubeflowStatus::from_env()?);
/// # Ok::<(), distribute_train::Error>(())
/// ```
///
/// # Source
/// Kubeflow Trainer v2.3.0: `TrainerStatus` of `pkg/apis/trainer/v1alpha1/trainjob_types.go` (fields and limits),
/// `pkg/statusserver/server.go` (request, answers, 64 KiB),
/// `pkg/runtime/framework/plugins/trainjobstatus/trainjobstatus.go` (variables); KEP-2779 (names of metrics);
/// `docs/user-guides/trainjob-progress.md` (5 s, and reading the token again). The feature gate `TrainJobStatus` is
/// alpha.
#[derive(Debug)]
pub struct KubeflowStatus {
    target: Target,
    settings: Settings,
    gauge: Gauge,
    /// Posts while this process is the chief.
    poster: Option<Poster>,
    noted: Option<Instant>,
    epoch: Epoch,
}

/// The running epoch of a trainer.
#[derive(Debug, Default)]
struct Epoch {
    /// Steps of all epochs at its begin in this process; none before the first.
    began: Option<u64>,
    /// Its steps that an earlier process made.
    resumed: u64,
    status: Status,
}

impl KubeflowStatus {
    /// Reads `KUBEFLOW_TRAINER_SERVER_URL`, `KUBEFLOW_TRAINER_SERVER_CA_CERT` and `KUBEFLOW_TRAINER_SERVER_TOKEN`,
    /// which Kubeflow Trainer sets in the containers of a TrainJob if its feature gate `TrainJobStatus` is on. Returns
    /// `None` if none of them is set. The files are read later.
    ///
    /// # Errors
    /// [`Error::KubeflowVariables`] if some of them are missing or empty, with their names; [`Error::KubeflowUrl`] if
    /// the first is not a URL of HTTPS.
    pub fn from_env() -> Result<Option<KubeflowStatus>> {
        KubeflowStatus::from_vars(environment::raw)
    }

    /// Creates a status for other places than the environment's: the URL of the TrainJob's status, the file with the
    /// certificate of the server's authority in PEM, and the file with the token.
    ///
    /// # Errors
    /// [`Error::KubeflowUrl`] if the URL is not one of HTTPS. Plain HTTP is for loopback addresses only, since the
    /// token is part of each request.
    ///
    /// # Examples
    /// ```
    /// use distribute_train::callbacks::KubeflowStatus;
    /// let url = "https://trainer.example:10443/apis/trainer.kubeflow.org/v1alpha1/namespaces/a/trainjobs/b/status";
    /// let folder = "/var/run/secrets/kubeflow/trainer";
    /// let status = KubeflowStatus::new(url, format!("{folder}/ca.crt"), format!("{folder}/token"))?;
    /// # Ok::<(), distribute_train::Error>(())
    /// ```
    pub fn new(url: &str, ca_cert: impl Into<PathBuf>, token: impl Into<PathBuf>) -> Result<KubeflowStatus> {
        let target = Target::new(url, ca_cert.into(), token.into())?;
        let (settings, gauge, epoch) = (Settings::default(), Gauge::default(), Epoch::default());
        Ok(KubeflowStatus { target, settings, gauge, poster: None, noted: None, epoch })
    }

    /// Sets the shortest time from one post to the next. Default: 5 s, which Kubeflow asks for, since each post is an
    /// update of an object in Kubernetes. The last post of a training does not wait for it.
    pub fn every(mut self, interval: Duration) -> KubeflowStatus {
        self.settings.interval = interval;
        self
    }

    fn from_vars(var: impl Fn(&str) -> Option<OsString>) -> Result<Option<KubeflowStatus>> {
        let given = VARIABLES.map(|name| var(name).filter(|value| !value.is_empty()));
        match given {
            [None, None, None] => Ok(None),
            [Some(url), Some(ca_cert), Some(token)] => {
                KubeflowStatus::new(&url.to_string_lossy(), ca_cert, token).map(Some)
            }
            given => {
                let names = |is_set: bool| {
                    let names = VARIABLES.iter().zip(&given).filter(|(_, value)| value.is_some() == is_set);
                    names.map(|(name, _)| *name).collect::<Vec<_>>().join(" and ")
                };
                Err(Error::KubeflowVariables { set: names(true), missing: names(false) })
            }
        }
    }

    /// Starts the thread that posts.
    pub(crate) fn start(&mut self) -> Result<()> {
        if self.poster.is_none() {
            let poster = Poster::start(self.target.clone(), self.settings.clone());
            self.poster = Some(poster.map_err(Error::Thread)?);
        }
        Ok(())
    }

    /// Returns whether a state is new enough to be passed to the thread.
    fn is_due(&self, is_epoch: bool) -> bool {
        let is_recent = self.noted.is_some_and(|noted| noted.elapsed() < NOTE_INTERVAL);
        self.poster.is_some() && (is_epoch || !is_recent)
    }

    fn note(&mut self, training: &Training<'_>, is_epoch: bool) {
        if self.is_due(is_epoch) {
            let mut status = std::mem::take(&mut self.epoch.status);
            status.step = self.epoch.resumed + training.step.saturating_sub(self.epoch.began.unwrap_or(0));
            status.metrics.clear();
            status.metrics.extend_from_slice(training.values);
            self.progress(&status, is_epoch);
            if is_epoch && training.steps_per_epoch.is_none() {
                // The next one is most likely as long.
                status.steps = Some(status.step);
            }
            self.epoch.status = status;
        }
    }
}

impl Sink for KubeflowStatus {
    fn progress(&mut self, status: &Status, is_epoch: bool) {
        let Some(poster) = self.poster.as_ref().filter(|_| self.is_due(is_epoch)) else { return };
        let now = Instant::now();
        poster.send(self.gauge.report(status, is_epoch, now, SystemTime::now()));
        self.noted = Some(now);
    }

    fn finish(&mut self) {
        if let Some(poster) = self.poster.take() {
            poster.finish(self.gauge.last(SystemTime::now()));
        }
    }
}

impl Callback for KubeflowStatus {
    fn train_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        if training.is_chief() { self.start() } else { Ok(()) }
    }

    fn members_changed(&mut self, training: &mut Training<'_>) -> Result<()> {
        if training.is_chief() {
            return self.start();
        }
        self.poster = None;
        Ok(())
    }

    fn epoch_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        // Only the first epoch of a process may have been begun by another.
        let before = |steps: u64| training.step.saturating_sub(u64::from(training.epoch.saturating_sub(1)) * steps);
        let resumed = match (self.epoch.began, training.steps_per_epoch) {
            (None, Some(steps)) => before(steps).min(steps),
            _ => 0,
        };
        (self.epoch.began, self.epoch.resumed) = (Some(training.step), resumed);
        let status = &mut self.epoch.status;
        (status.epoch, status.epochs) = (training.epoch, training.epochs);
        status.steps = training.steps_per_epoch.or(status.steps);
        self.note(training, false);
        Ok(())
    }

    fn step_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.note(training, false);
        Ok(())
    }

    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.note(training, true);
        Ok(())
    }

    fn train_end(&mut self, _: &mut Training<'_>) -> Result<()> {
        self.finish();
        Ok(())
    }
}

/// The URL, the certificate and the token.
const VARIABLES: [&str; 3] =
    ["KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN"];

/// A shorter time between copies of the state would burden the training thread without use.
const NOTE_INTERVAL: Duration = Duration::from_millis(50);
