//! The data workers that a consumer knows.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use tonic::{Code, Status};

use crate::wire::proto::{LocateRequest, Located};
use crate::wire::{Identity, Link, dispatcher, is_lost};
use crate::{Error, Result, ServiceOptions};

/// The data workers that serve a dataset, as the dispatcher named them last. It is asked again for each stream, though
/// not more often than every half second; while it does not answer, those that it named last are tried.
pub(super) struct Directory {
    pub(super) dispatcher: String,
    dataset: String,
    identity: Identity,
    /// Made on the runtime.
    link: Mutex<Option<Link>>,
    state: Mutex<State>,
    /// Held while the dispatcher is asked, so that streams do not ask at the same time.
    asking: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    workers: Vec<String>,
    /// The digest of the dataset's settings, once it is known; it must not change.
    digest: Bytes,
    asked: Option<Instant>,
    /// Whether the last question got no answer.
    unanswered: bool,
    /// Why there is no data worker, or the dispatcher did not answer.
    problem: Option<String>,
    /// Data workers that failed, until when they are left out, and how often in a row.
    failed: HashMap<String, (Instant, u32)>,
}

impl Directory {
    pub(super) fn new(dispatcher: String, options: &ServiceOptions, identity: Identity) -> Directory {
        let dataset = options.name.clone();
        let (link, state, asking) = (Mutex::new(None), Mutex::default(), tokio::sync::Mutex::new(()));
        Directory { dispatcher, dataset, identity, link, state, asking }
    }

    /// Returns a data worker that has not failed lately, and the digest that its dataset must have; `None` if there is
    /// none at the moment. `turn` spreads streams over data workers.
    ///
    /// # Errors
    /// [`Error::Refused`], or [`Error::Changed`] if the dispatcher knows another dataset than before.
    pub(super) async fn choose(&self, turn: usize) -> Result<Option<(String, Bytes)>> {
        self.refresh().await?;
        let mut state = self.state.lock();
        let now = Instant::now();
        // Those that are no longer named are forgotten after a while.
        state.failed.retain(|_, (until, _)| now.saturating_duration_since(*until) < FORGET);
        let is_well = |worker: &&String| state.failed.get(*worker).is_none_or(|(until, _)| *until <= now);
        let well: Vec<&String> = state.workers.iter().filter(is_well).collect();
        let chosen = turn.checked_rem(well.len()).and_then(|at| well.get(at));
        Ok(chosen.map(|worker| ((*worker).clone(), state.digest.clone())))
    }

    /// Returns the digest of the dataset's settings; `None` if the dispatcher does not answer or does not know it yet.
    ///
    /// # Errors
    /// [`Error::Refused`], or [`Error::Changed`] if the dispatcher knows another dataset than before.
    pub(super) async fn digest(&self) -> Result<Option<Bytes>> {
        self.refresh().await?;
        Ok(Some(self.state.lock().digest.clone()).filter(|digest| !digest.is_empty()))
    }

    /// Notes that a data worker failed; it is left out for a while.
    pub(super) fn failed(&self, worker: &str) {
        let mut state = self.state.lock();
        let times = state.failed.get(worker).map_or(0, |(_, times)| *times).saturating_add(1);
        state.failed.insert(worker.to_owned(), (Instant::now() + LEFT_OUT * times.min(MOST_TIMES), times));
    }

    /// Notes that a data worker yields elements.
    pub(super) fn works(&self, worker: &str) {
        self.state.lock().failed.remove(worker);
    }

    /// Returns why there is no data worker, if the dispatcher is the reason.
    pub(super) fn problem(&self) -> Option<String> {
        self.state.lock().problem.clone()
    }

    async fn refresh(&self) -> Result<()> {
        let _asking = self.asking.lock().await;
        let is_recent = {
            let state = self.state.lock();
            // A dispatcher that does not answer delays each stream by the time of a call.
            let pause = if state.unanswered && !state.workers.is_empty() { UNANSWERED } else { REFRESH };
            state.asked.is_some_and(|asked| asked.elapsed() < pause)
        };
        if is_recent {
            return Ok(());
        }
        let answer = self.ask().await;
        let mut state = self.state.lock();
        state.asked = Some(Instant::now());
        state.unanswered = false;
        let located = match answer {
            Ok(located) => located,
            Err(status) if is_lost(&status) || status.code() == Code::Internal => {
                state.unanswered = true;
                state.problem = Some(format!("the dispatcher does not answer: {}", status.message()));
                return Ok(());
            }
            Err(status) => {
                let who = format!("the dispatcher at {}", self.dispatcher);
                return Err(Error::Refused { who, message: status.message().to_owned() });
            }
        };
        let Located { workers, digest, datasets } = located;
        if !digest.is_empty() && !state.digest.is_empty() && digest != state.digest {
            return Err(Error::Changed { dispatcher: self.dispatcher.clone(), dataset: self.dataset.clone() });
        }
        state.problem = match (workers.is_empty(), digest.is_empty(), datasets.is_empty()) {
            (false, ..) => None,
            (_, true, true) => Some("no data worker has registered".to_owned()),
            (_, true, false) => Some(format!("data workers serve {datasets:?}, and not {:?}", self.dataset)),
            (_, false, _) => Some("all data workers that served it are gone".to_owned()),
        };
        if !digest.is_empty() {
            state.digest = digest;
        }
        // A dispatcher that was started again does not know them yet.
        if !workers.is_empty() {
            state.workers = workers;
        }
        Ok(())
    }

    async fn ask(&self) -> Result<Located, Status> {
        let link = {
            let mut link = self.link.lock();
            match &*link {
                Some(link) => link.clone(),
                None => link.insert(Link::new(&self.dispatcher, &self.identity, TIMEOUT)?).clone(),
            }
        };
        link.call(dispatcher!("Locate"), LocateRequest { dataset: self.dataset.clone() }, TIMEOUT).await
    }
}

/// The shortest interval between two questions.
const REFRESH: Duration = Duration::from_millis(500);

/// The same, if the dispatcher did not answer and data workers are known.
const UNANSWERED: Duration = Duration::from_secs(5);

/// How long the dispatcher has to answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// How long a data worker is left out after a failure, for each failure in a row.
const LEFT_OUT: Duration = Duration::from_millis(200);

/// The failures in a row that count.
const MOST_TIMES: u32 = 25;

/// How long failures are remembered.
const FORGET: Duration = Duration::from_secs(30);
