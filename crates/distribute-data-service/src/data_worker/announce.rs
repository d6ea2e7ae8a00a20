//! Announces a data worker to its dispatcher.

use std::time::{Duration, Instant};

use tokio::sync::watch;
use tonic::Status;

use crate::wire::proto::{Registered, Registration};
use crate::wire::{Identity, Link, dispatcher, is_lost};
use crate::{Error, Result};

/// Where a data worker announces itself, and as what.
#[derive(Clone, Debug)]
pub(super) struct Announcer {
    pub(super) dispatcher: String,
    pub(super) registration: Registration,
    pub(super) identity: Identity,
    /// How long to serve without an answer of the dispatcher.
    pub(super) dispatcher_timeout: Duration,
}

/// The last answer of the dispatcher.
#[derive(Clone, Debug)]
pub(super) enum Standing {
    /// It has not answered yet, for this reason.
    Unanswered(String),
    /// It knows this data worker.
    Registered,
    /// It refuses this data worker.
    Refused(String),
    /// It has not answered for too long, for this reason.
    Alone(String),
}

impl Announcer {
    /// Announces every second, until the dispatcher refuses or is silent for too long. Call on the runtime.
    pub(super) fn start(&self) -> watch::Receiver<Standing> {
        let (sender, receiver) = watch::channel(Standing::Unanswered("it was not asked yet".to_owned()));
        let announcer = self.clone();
        tokio::spawn(async move {
            let link = match Link::new(&announcer.dispatcher, &announcer.identity, TIMEOUT) {
                Ok(link) => link,
                Err(status) => return drop(sender.send(Standing::Refused(status.message().to_owned()))),
            };
            let (mut beats, mut answered) = (tokio::time::interval(INTERVAL), Instant::now());
            beats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                beats.tick().await;
                let registration = announcer.registration.clone();
                let outcome: Result<Registered, Status> =
                    link.call(dispatcher!("Register"), registration, TIMEOUT).await;
                let standing = match outcome {
                    Ok(Registered {}) => {
                        answered = Instant::now();
                        Standing::Registered
                    }
                    Err(status) if !is_lost(&status) => Standing::Refused(status.message().to_owned()),
                    Err(status) if answered.elapsed() >= announcer.dispatcher_timeout => {
                        Standing::Alone(status.message().to_owned())
                    }
                    Err(status) => Standing::Unanswered(status.message().to_owned()),
                };
                let is_over = matches!(standing, Standing::Refused(_) | Standing::Alone(_));
                if sender.send(standing).is_err() || is_over {
                    return;
                }
            }
        });
        receiver
    }

    /// Returns once the dispatcher knows this data worker.
    ///
    /// # Errors
    /// [`Error::Refused`]; [`Error::NoDispatcher`] after `timeout`.
    pub(super) async fn registered(&self, standing: &mut watch::Receiver<Standing>, timeout: Duration) -> Result<()> {
        let told = standing.wait_for(|standing| !matches!(standing, Standing::Unanswered(_)));
        let told = tokio::time::timeout(timeout, told).await.map(|told| told.map(|standing| standing.clone()));
        match told {
            Ok(Ok(Standing::Registered)) => Ok(()),
            Ok(Ok(standing)) => Err(self.error(standing, timeout)),
            Ok(Err(_)) | Err(_) => {
                let last = standing.borrow().clone();
                Err(self.error(last, timeout))
            }
        }
    }

    /// Returns the error for which the data worker must end, once there is one.
    pub(super) async fn failure(&self, standing: &mut watch::Receiver<Standing>) -> Error {
        let over = standing.wait_for(|standing| matches!(standing, Standing::Refused(_) | Standing::Alone(_))).await;
        let last = match over {
            Ok(standing) => standing.clone(),
            Err(_) => Standing::Alone("announcing ended".to_owned()),
        };
        self.error(last, self.dispatcher_timeout)
    }

    fn error(&self, standing: Standing, waited: Duration) -> Error {
        let address = self.dispatcher.clone();
        match standing {
            Standing::Refused(message) => Error::Refused { who: format!("the dispatcher at {address}"), message },
            Standing::Unanswered(last) | Standing::Alone(last) => Error::NoDispatcher { address, waited, last },
            Standing::Registered => Error::NoDispatcher { address, waited, last: "it answered too late".to_owned() },
        }
    }
}

/// The interval of announcements, which are heartbeats.
const INTERVAL: Duration = Duration::from_secs(1);

/// How long the dispatcher has to answer.
const TIMEOUT: Duration = Duration::from_secs(2);
