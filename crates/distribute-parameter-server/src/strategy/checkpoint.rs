//! Variables on servers in checkpoints. They are stored whole, under their names, so that they can be restored on any
//! number of servers and under any other strategy.

use std::collections::BTreeMap;

use distribute_rules::UpdateRule;
use distribute_strategy::Strategy;
use distribute_train::BoxError;
use distribute_train::checkpoint::{CheckpointManager, Checkpointed, PutBytes, Snapshot};
use distribute_types::Classified;
use serde::{Deserialize, Serialize};

use self::restore::Plan;
use super::{Inner, ParameterServerStrategy};
use crate::parameters::VariableInfo;
use crate::{Error, Result};

mod restore;

/// The files of a checkpoint.
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";

/// The state of optimizers besides their slots.
#[derive(Debug, Default, Serialize, Deserialize)]
struct OptimizerStates {
    /// By number: the steps made, and the learning rate. Empty in a checkpoint of another strategy.
    #[serde(default)]
    parameter_server: BTreeMap<u32, (u64, f64)>,
    /// The state of an optimizer that is the only one, in the form that other strategies save and restore.
    #[serde(flatten)]
    alone: Option<Alone>,
}

/// The state of an optimizer under other strategies.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Alone {
    steps: u64,
    learning_rate: f64,
    #[serde(default)]
    loss_scale: Option<f64>,
    #[serde(default)]
    good_steps: u32,
    /// The steps of variables that had a gradient in some steps only, by name. Servers count the steps of an optimizer,
    /// so they save none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    counts: BTreeMap<String, u64>,
}

impl OptimizerStates {
    /// Adds the form of other strategies, if there is one optimizer.
    fn shared(self) -> OptimizerStates {
        let mut states = self.parameter_server.values();
        let alone = match (states.next(), states.next()) {
            (Some(&(steps, learning_rate)), None) => {
                Some(Alone { steps, learning_rate, loss_scale: None, good_steps: 0, counts: BTreeMap::new() })
            }
            _ => None,
        };
        OptimizerStates { alone, ..self }
    }

    /// Describes the step counts of an optimizer's variables that servers cannot continue; `None` if there are none, or
    /// its rule does not count steps.
    fn lost_counts(&self, rule: &UpdateRule, names: &[String]) -> Option<String> {
        let alone = self.alone.as_ref().filter(|_| self.parameter_server.is_empty() && rule.counts_steps())?;
        let of_variable = |name: &String| alone.counts.get(name).map(|count| format!("{name:?} {count}"));
        let lost: Vec<String> = names.iter().filter_map(of_variable).collect();
        (!lost.is_empty()).then(|| {
            format!(
                "variables of the checkpoint have made fewer steps than their optimizer ({}), and continue with its \
                 {} steps, since servers count those of an optimizer only: their bias corrections change",
                lost.join(", "),
                alone.steps
            )
        })
    }

    /// Returns the steps made and the learning rate, by number.
    fn by_number(self) -> BTreeMap<u32, (u64, f64)> {
        match self.alone {
            Some(alone) if self.parameter_server.is_empty() => {
                BTreeMap::from([(0, (alone.steps, alone.learning_rate))])
            }
            _ => self.parameter_server,
        }
    }
}

/// Saves all variables and slots, and restores them, piece by piece: the coordinator holds a few pieces of 4 MiB,
/// whatever the size of the variables. Workers may continue meanwhile: each shard is consistent in itself, but the
/// shards of a checkpoint may be some steps apart, as they are in training. Save after `join` for the values of one
/// moment. A restore while functions wait or run is refused; one that fails in the middle leaves servers that refuse
/// changes and reads until a checkpoint is restored.
impl Checkpointed for ParameterServerStrategy {
    fn streams(&self) -> bool {
        true
    }

    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        let inner = &self.inner;
        inner.list_abandoned();
        inner.note_run(snapshot);
        let table = inner.parameters.table();
        let variables: Vec<&VariableInfo> = table.variables.values().map(|variable| &**variable).collect();
        let tensors: Vec<_> = variables.iter().map(|of| (of.name.as_str(), of.dtype, &of.shape[..])).collect();
        snapshot.put_in_pieces(strategy, MODEL, &tensors, |index, put| inner.pass(variables[index], "", put))?;
        let optimizers = inner.made.lock().optimizers.clone();
        let (mut states, mut slots) = (OptimizerStates::default(), BTreeMap::new());
        let steps = inner.parameters.block_on(inner.steps()).map_err(boxed)?;
        for (number, (description, names)) in (0..).zip(optimizers) {
            states
                .parameter_server
                .insert(number, (steps.get(&number).copied().unwrap_or(0), description.learning_rate));
            for name in names {
                let Some(variable) = table.variables.get(&name) else { continue };
                // Optimizers of one variable share its slots.
                slots.extend(description.rule.slots().iter().map(|slot| (format!("{name}/{slot}"), (variable, *slot))));
            }
        }
        let slots: Vec<_> = slots.into_iter().collect();
        let tensors: Vec<_> = slots.iter().map(|(name, (of, _))| (name.as_str(), of.dtype, &of.shape[..])).collect();
        snapshot.put_in_pieces(strategy, OPTIMIZER, &tensors, |index, put| {
            let (_, (variable, slot)) = slots[index];
            inner.pass(variable, slot, put)
        })?;
        snapshot.put_state(OPTIMIZER, &states.shared())?;
        Ok(())
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        let inner = &self.inner;
        let plans = (0..inner.parameters.servers()).map(|server| inner.plan(server, snapshot));
        // Before anything is overwritten: for example, the checkpoint is of another model.
        let plans: Vec<Plan> = plans.collect::<Result<_>>().map_err(|error| boxed(inner.failed(error)))?;
        if inner.keeps_values() {
            tracing::info!(
                "the checkpoint of step {} is older than the variables on the servers, which are kept",
                snapshot.step()
            );
            inner.note_run(snapshot);
            return Ok(());
        }
        if inner.is_active() {
            let problem = "functions wait or run while a checkpoint is restored; call join first".to_owned();
            return Err(boxed(inner.failed(Error::Variable { name: "all".to_owned(), problem })));
        }
        inner.take_learning_rates(snapshot).map_err(|error| boxed(inner.failed(error)))?;
        if let Some(lost) = inner.lost_counts(snapshot).map_err(|error| boxed(inner.failed(error)))? {
            tracing::warn!("{lost}");
        }
        let restored = inner.parameters.block_on(async {
            // A server that is being restored from another checkpoint would keep that.
            let recovered = tokio::time::timeout(inner.options.server_timeout, inner.restoring.write()).await;
            let problem = || "a server is still being restored, after server_timeout; load it later".to_owned();
            let _loads = recovered.map_err(|_| Error::Variable { name: "all".to_owned(), problem: problem() })?;
            inner.abandon(snapshot);
            inner.restore_all(plans, snapshot).await
        });
        restored.map_err(|error| boxed(inner.failed(error)))?;
        inner.note_restored();
        inner.note_run(snapshot);
        Ok(())
    }
}

impl Inner {
    /// Returns whether functions wait or run.
    fn is_active(&self) -> bool {
        let coordinator = self.coordinator.lock().upgrade();
        self.ledger.is_active() || coordinator.is_some_and(|coordinator| !coordinator.shared.lock().is_idle())
    }

    /// A snapshot without a run is not in a file from which a server could be restored.
    fn note_run(&self, snapshot: &Snapshot) {
        if let Some(run) = snapshot.run() {
            self.made.lock().run = Some(run);
        }
    }

    /// Notes of which checkpoints no server gets its part any more, since a snapshot of an earlier step is loaded. If
    /// the folder cannot be listed, it is listed later: the snapshot may come from another.
    fn abandon(&self, snapshot: &Snapshot) {
        let Some(folder) = &self.options.restore_servers_from else { return };
        let mut abandoned = self.made.lock().abandoned.clone();
        if let Err(error) = CheckpointManager::new(folder).abandon(snapshot, &mut abandoned) {
            tracing::warn!(
                "the folder of restore_servers_from cannot be listed ({error}): until a checkpoint is saved in it, no \
                 server that is started again gets its part of one that is newer than that of step {}",
                snapshot.step()
            );
        }
        self.made.lock().abandoned = abandoned;
    }

    /// Lists the folder that could not be listed when a snapshot was loaded, before a checkpoint is added to it.
    fn list_abandoned(&self) {
        let Some(folder) = &self.options.restore_servers_from else { return };
        let mut abandoned = self.made.lock().abandoned.clone();
        match CheckpointManager::new(folder).list_abandoned(&mut abandoned) {
            Ok(()) => self.made.lock().abandoned = abandoned,
            Err(error) => tracing::warn!(
                "the folder of restore_servers_from still cannot be listed ({error}): no server that is started again \
                 gets its part of what is saved in it now, but of an earlier checkpoint"
            ),
        }
    }

    /// Passes the elements of a variable, or of a slot, on to a checkpoint.
    fn pass(&self, variable: &VariableInfo, slot: &str, put: &mut PutBytes<'_>) -> Result<(), BoxError> {
        let mut show = |bytes: &[u8]| Ok(put(bytes)?);
        self.parameters.block_on(self.parameters.in_pieces(variable, slot, &mut show)).map_err(boxed)
    }

    /// Returns how many steps each optimizer has made: the maximum over the servers.
    async fn steps(&self) -> Result<BTreeMap<u32, u64>> {
        let mut steps: BTreeMap<u32, u64> = BTreeMap::new();
        for optimizer in self.parameters.describe().await?.into_iter().flat_map(|server| server.optimizers) {
            let known = steps.entry(optimizer.optimizer).or_default();
            *known = (*known).max(optimizer.steps);
        }
        Ok(steps)
    }
}

/// Returns an error in a form that keeps its class: that of a lost server, which a restart helps, is not permanent.
fn boxed(error: Error) -> BoxError {
    match error {
        Error::Train(error) => error.into(),
        error => Classified::new(error).into(),
    }
}

#[cfg(test)]
mod tests {
    use distribute_optim::OptimizerState;

    use super::*;

    #[test]
    fn step_counts_of_variables_that_servers_cannot_continue_are_named() {
        let counts = serde_json::json!({"table": 10, "other": 3});
        let saved = serde_json::json!({
            "steps": 1000, "learning_rate": 0.5, "loss_scale": null, "good_steps": 0, "counts": counts,
        });
        // The form of other strategies.
        let state: OptimizerState = serde_json::from_value(saved).unwrap();
        let states: OptimizerStates = serde_json::from_value(serde_json::to_value(state).unwrap()).unwrap();
        let adam = UpdateRule::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 };
        let names = ["bias", "table"].map(str::to_owned);
        let told = states.lost_counts(&adam, &names).unwrap();
        assert!(told.contains("(\"table\" 10), and continue with its 1000 steps"), "{told}");
        let sgd = UpdateRule::Sgd { momentum: 0.9, nesterov: false };
        assert_eq!((states.lost_counts(&sgd, &names), states.lost_counts(&adam, &names[..1])), (None, None));
        assert_eq!(states.by_number(), BTreeMap::from([(0, (1000, 0.5))]));
        // Servers save no such counts.
        let parameter_server = BTreeMap::from([(0, (1000, 0.5))]);
        let own = OptimizerStates { parameter_server, alone: None }.shared();
        assert_eq!(own.lost_counts(&adam, &names), None);
        let saved = serde_json::to_value(&own).unwrap();
        assert!(saved.get("steps").is_some() && saved.get("counts").is_none(), "{saved}");
    }
}
