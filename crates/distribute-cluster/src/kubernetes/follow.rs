//! Follows the pods of a selector: a list, then the changes.

use std::pin::pin;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use futures_util::TryStreamExt;
use tokio::sync::mpsc::Sender;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::api::{Api, Change, Pods, WATCH};
use super::trouble::Trouble;

/// News of the pods of a selector.
#[derive(Debug)]
pub(super) enum News {
    /// All pods.
    All(Pods),
    /// A change since then.
    Change(Change),
    /// The server has failed for longer than it may; there will be no more news.
    Failed(Trouble),
}

/// Sends the news of the pods of a selector.
pub(super) struct Follower {
    pub(super) api: Api,
    pub(super) selector: String,
    /// The selector's number, which is sent with all news.
    pub(super) number: usize,
    /// How long the server may fail.
    pub(super) limit: Duration,
    /// Whether changes are wanted.
    pub(super) watching: watch::Receiver<bool>,
    pub(super) news: Sender<(usize, News)>,
}

impl Follower {
    /// Sends news until the receiver is dropped or the server has failed for too long.
    pub(super) async fn run(mut self) {
        if let Err(trouble) = self.lists_and_changes().await {
            self.tell(News::Failed(trouble)).await;
        }
    }

    async fn lists_and_changes(&mut self) -> Result<(), Trouble> {
        let mut patience = Patience::new(self.limit);
        'list: loop {
            let listed = timeout(patience.left(), self.api.list(&self.selector)).await;
            let (pods, mut version) = match listed.unwrap_or(Err(Trouble::Silent)) {
                Ok(listed) => listed,
                Err(trouble) => {
                    patience.pause(trouble).await?;
                    continue;
                }
            };
            patience.renew();
            self.tell(News::All(pods)).await;
            let _ = self.watching.wait_for(|wanted| *wanted).await;
            while !self.news.is_closed() {
                match self.changes(&mut version, &mut patience).await {
                    Ok(()) => patience.renew(),
                    Err(trouble) => {
                        let is_expired = trouble.is_expired();
                        patience.pause(trouble).await?;
                        if is_expired {
                            continue 'list;
                        }
                    }
                }
            }
            return Ok(());
        }
    }

    /// Sends the changes from `version` on, which it advances, until the server ends the watch.
    async fn changes(&self, version: &mut String, patience: &mut Patience) -> Result<(), Trouble> {
        let opened = timeout(patience.left(), self.api.watch(&self.selector, version)).await;
        let mut changes = pin!(opened.unwrap_or(Err(Trouble::Silent))?);
        patience.succeeded();
        let begin = Instant::now();
        // A connection that is cut without a word looks like one on which nothing happens.
        while let Some(change) = timeout(SILENCE, changes.try_next()).await.unwrap_or(Err(Trouble::Silent))? {
            if let Some(next) = change.version() {
                next.clone_into(version);
            }
            patience.renew();
            self.tell(News::Change(change)).await;
        }
        // A server that ends each watch at once is not asked without a pause.
        sleep(SHORTEST.saturating_sub(begin.elapsed())).await;
        Ok(())
    }

    /// Sends news, if there is a receiver.
    async fn tell(&self, news: News) {
        let _ = self.news.send((self.number, news)).await;
    }
}

/// How long failures are tolerated, and the pauses between attempts.
struct Patience {
    limit: Duration,
    /// The first attempt since the last success.
    since: Option<Instant>,
    /// The last failure since then that is more than silence.
    last: Option<Trouble>,
    pauses: ExponentialBackoff,
}

impl Patience {
    fn new(limit: Duration) -> Patience {
        Patience { limit, since: None, last: None, pauses: pauses() }
    }

    /// Returns the time that is left for an attempt.
    fn left(&mut self) -> Duration {
        let since = *self.since.get_or_insert_with(Instant::now);
        self.limit.saturating_sub(since.elapsed())
    }

    /// Ends the time of failures, but not the growth of the pauses.
    fn succeeded(&mut self) {
        (self.since, self.last) = (None, None);
    }

    /// Begins anew.
    fn renew(&mut self) {
        (self.since, self.last, self.pauses) = (None, None, pauses());
    }

    /// Waits before the next attempt, as long as the server asks for or longer.
    ///
    /// # Errors
    /// The failure, if there is no time for another attempt or if none can help. One that says more takes the place of
    /// an attempt for which there was no time.
    async fn pause(&mut self, trouble: Trouble) -> Result<(), Trouble> {
        let trouble = match (trouble, self.last.take()) {
            (Trouble::Silent, Some(last)) => last,
            (trouble, _) => trouble,
        };
        let pause = self.pauses.next().unwrap_or(LONGEST).max(trouble.retry_after().unwrap_or_default());
        if !trouble.is_transient() || pause >= self.left() {
            return Err(trouble);
        }
        tracing::debug!(?trouble, ?pause, "the API server of Kubernetes is asked again");
        self.last = Some(trouble).filter(|trouble| *trouble != Trouble::Silent);
        sleep(pause).await;
        Ok(())
    }
}

fn pauses() -> ExponentialBackoff {
    ExponentialBuilder::default()
        .with_min_delay(SHORTEST)
        .with_max_delay(LONGEST)
        .with_jitter()
        .without_max_times()
        .build()
}

/// Pauses between attempts.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);

/// Time without a change after which a watch counts as broken: the server ends each one before.
const SILENCE: Duration = WATCH.saturating_add(Duration::from_secs(10));
