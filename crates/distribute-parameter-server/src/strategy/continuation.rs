//! Continuing with what servers have kept of an earlier coordinator.

use std::sync::atomic::Ordering;

use distribute_rules::OptimizerDescription;

use super::attachment::{Completion, Restoring};
use super::{Inner, ParameterServerStrategy};
use crate::steps::EndedSteps;
use crate::wire::proto::{CompleteRequest, CreateShard, Done, FindRequest, Found, OptimizerOfShards};
use crate::wire::ps;
use crate::{Error, Result, numbers};

impl ParameterServerStrategy {
    /// Returns whether the servers have kept what an earlier coordinator has made, see
    /// [`restart_in_place`](crate::ParameterServerOptions::restart_in_place).
    pub fn is_continued(&self) -> bool {
        self.inner.is_continued
    }

    /// Returns the step with which training continues, for
    /// [`schedule_step`](crate::ClusterCoordinator::schedule_step): all steps before it have ended. It is 0 unless the
    /// strategy [is continued](ParameterServerStrategy::is_continued).
    ///
    /// Before this call the coordinator cannot assign variables that the servers have kept, so that what a program does
    /// at its beginning does not undo the training.
    pub fn first_step(&self) -> u64 {
        self.inner.parameters.sealed.store(false, Ordering::Release);
        self.inner.ledger.first()
    }

    /// Returns whether the coordinator can be restarted in place.
    pub fn restarts_in_place(&self) -> bool {
        self.inner.options.restart_in_place
    }

    /// Records that all steps before `until` have ended, which a program knows if it has restored a checkpoint that was
    /// saved then: servers learn of the end of a step with the changes of a later one. Returns the step with which
    /// training continues, which is a later one if the servers know more. It has no effect after the first step.
    ///
    /// Checkpoints that are restored after this call take the place of what the servers have kept.
    ///
    /// # Errors
    /// [`Error::Step`] if the servers do not know of these steps, as those of another training.
    pub fn confirm_steps(&self, until: u64) -> Result<u64> {
        let confirmed = self.inner.ledger.confirm(until).map_err(|error| self.inner.failed(error))?;
        self.inner.forget_failure();
        // The program knows where it continues, so what it restores from now on is meant.
        self.prefer_checkpoint();
        Ok(confirmed)
    }

    /// Loads the next checkpoint over what the servers have kept. Otherwise a strategy that
    /// [is continued](ParameterServerStrategy::is_continued) keeps their values, which are newer than those of its
    /// checkpoints, until its first step.
    pub fn prefer_checkpoint(&self) {
        self.inner.completion.state.lock().prefers_checkpoint = true;
    }
}

impl Inner {
    /// Returns whether a checkpoint leaves the servers' values as they are.
    pub(super) fn keeps_values(&self) -> bool {
        self.is_continued && !self.ledger.has_begun() && !self.completion.state.lock().prefers_checkpoint
    }

    /// Records that all variables were restored.
    pub(super) fn note_restored(&self) {
        self.ledger.reset();
        let coordinator = self.coordinator.lock().upgrade();
        if let Some(coordinator) = coordinator {
            coordinator.shared.lock().abandon_round();
        }
        self.hold.lock().steps = None;
        self.parameters.sealed.store(false, Ordering::Release);
        self.completion.is_told.store(false, Ordering::Release);
        *self.completion.state.lock() = Restoring { restored: true, prefers_checkpoint: false };
    }

    /// Checks that nothing is made after the first step, since a coordinator that is restarted then could not tell
    /// whether it is there.
    pub(super) fn check_not_begun(&self, name: &str) -> Result<()> {
        if self.options.restart_in_place && self.ledger.has_begun() {
            let problem = "the coordinator can be restarted in place, so all variables and optimizers must be made \
                           before the first step";
            return Err(Error::Variable { name: name.to_owned(), problem: problem.to_owned() });
        }
        Ok(())
    }

    /// Compares a variable with what the servers have kept; returns whether they have.
    ///
    /// # Errors
    /// [`Error::OtherTraining`] if they hold another one.
    pub(super) fn claim_variable(&self, name: &str, asked: &[(usize, CreateShard)]) -> Result<bool> {
        if !self.is_continued {
            return Ok(false);
        }
        let mut made = self.made.lock();
        let Some(found) = made.kept.shards.remove(name) else {
            let known: Vec<&str> = made.kept.shards.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "no others".to_owned() } else { known.join(", ") };
            return Err(other_training(format!("variable {name:?} is not on the servers, which hold {known}")));
        };
        let [found, asked] = [&found[..], asked].map(described);
        match found == asked {
            true => Ok(true),
            false => Err(other_training(format!("variable {name:?} is {found} on the servers, and {asked} here"))),
        }
    }

    /// Compares an optimizer with what the servers have kept. Returns the description that they use, with the learning
    /// rate that was set last, and whether a server does not have that yet.
    ///
    /// # Errors
    /// [`Error::OtherTraining`] if they hold another one.
    pub(super) fn claim_optimizer(
        &self,
        number: u32,
        asked: &[(usize, OptimizerOfShards)],
    ) -> Result<Option<(OptimizerDescription, bool)>> {
        if !self.is_continued {
            return Ok(None);
        }
        let found = self.made.lock().kept.optimizers.remove(&number).unwrap_or_default();
        let of = |all: &[(usize, OptimizerOfShards)]| {
            let one = |(server, about): &(usize, OptimizerOfShards)| {
                let mut shards = about.shards.clone();
                shards.sort_unstable();
                (*server, about.made_as.clone(), shards, about.contributions)
            };
            all.iter().map(one).collect::<Vec<_>>()
        };
        if of(&found) != of(asked) {
            let as_made = |all: &[(usize, OptimizerOfShards)]| {
                let first = all.first().map_or("none", |(_, about)| about.made_as.as_str());
                let shards: usize = all.iter().map(|(_, about)| about.shards.len()).sum();
                format!("{first} of {shards} shards")
            };
            let (found, asked) = (as_made(&found), as_made(asked));
            return Err(other_training(format!("optimizer {number} is {found} on the servers, and {asked} here")));
        }
        // Servers are told a new rate one after another, so that the first one has the newest.
        let Some((_, newest)) = found.first() else { return Ok(None) };
        let differs = found.iter().any(|(_, about)| about.description != newest.description);
        let description = serde_json::from_str(&newest.description);
        let unreadable = |error| other_training(format!("optimizer {number} on the servers cannot be read: {error}"));
        Ok(Some((description.map_err(unreadable)?, differs)))
    }

    /// Tells all servers that everything is made, before the first step, and after a restore that steps are numbered
    /// anew.
    ///
    /// # Errors
    /// [`Error::OtherTraining`] if the servers hold something that the program has not made.
    pub(crate) fn complete(&self) -> Result<()> {
        let Completion { is_told, turn, state } = &self.completion;
        // Servers know which steps have ended also if no other coordinator can continue with what they hold.
        let is_needed = || self.options.restart_in_place || state.lock().restored;
        let is_done = || is_told.load(Ordering::Acquire) || !is_needed();
        if is_done() {
            return Ok(());
        }
        let _turn = turn.lock();
        if is_done() {
            return Ok(());
        }
        let restored = state.lock().restored;
        {
            let made = self.made.lock();
            let variables = made.kept.shards.keys().map(|name| format!("variable {name:?}"));
            let optimizers = made.kept.optimizers.keys().map(|number| format!("optimizer {number}"));
            let left: Vec<String> = variables.chain(optimizers).collect();
            if !left.is_empty() {
                let left = left.join(", ");
                return Err(self.failed(other_training(format!("the servers hold {left}, which this program lacks"))));
            }
        }
        for server in 0..self.parameters.servers() {
            let told = self.parameters.block_on(self.tell_complete(server, restored));
            told.map_err(|error| self.failed(error))?;
        }
        state.lock().restored = false;
        is_told.store(true, Ordering::Release);
        Ok(())
    }

    /// Tells a server that was restored that it has everything again.
    pub(crate) async fn complete_again(&self, server: usize) -> Result<()> {
        let is_told = self.completion.is_told.load(Ordering::Acquire);
        if is_told { self.tell_complete(server, false).await } else { Ok(()) }
    }

    async fn tell_complete(&self, server: usize, restored: bool) -> Result<()> {
        let parameters = &self.parameters;
        let request = CompleteRequest { session: parameters.session(), restored };
        let told = parameters.link(server).call::<Done>(ps!("Complete"), request, parameters.message_timeout()).await;
        told.map(drop).map_err(parameters.failed(server, "Complete"))
    }

    /// Learns from a server what has changed since it was found; returns whether it still holds the same training.
    pub(super) async fn find_again(&self, server: usize) -> Result<bool> {
        let parameters = &self.parameters;
        let found: Found = parameters
            .link(server)
            .call(ps!("Find"), FindRequest {}, parameters.message_timeout())
            .await
            .map_err(parameters.failed(server, "Find"))?;
        let news = EndedSteps::of(found.steps.as_ref()).map_err(parameters.failed(server, "Find"))?;
        let mut hold = self.hold.lock();
        let mut ended = EndedSteps::of(hold.steps.as_ref()).map_err(parameters.failed(server, "Find"))?;
        ended.learn(&news);
        hold.steps = Some(ended.record());
        Ok(found.complete && found.lineage == hold.lineage)
    }
}

/// Describes a variable by what the servers must agree on with the program.
fn described(shards: &[(usize, CreateShard)]) -> String {
    let Some((_, first)) = shards.first() else { return "nothing".to_owned() };
    let dtype = numbers::dtype(first.dtype).map_or_else(|| "of an unknown type".to_owned(), |dtype| dtype.to_string());
    let kind = if first.trainable { "trained" } else { "untrained" };
    let place = |(server, shard): &(usize, CreateShard)| {
        let (number, rows) = (shard.shard, shard.first_row..shard.first_row.saturating_add(shard.rows));
        format!("rows {rows:?} on ps:{server} as shard {number}")
    };
    let places: Vec<String> = shards.iter().map(place).collect();
    format!("{dtype} {:?}, {kind}, {}", first.shape, places.join(", "))
}

fn other_training(problem: String) -> Error {
    Error::OtherTraining { problem }
}
