//! States of callbacks in checkpoints, and in what processes that join get.

use serde_json::Value;

use super::{Session, Standing};
use crate::callbacks::Callback;
use crate::trainer::Trainee;

impl Standing {
    /// Records the states of this process's callbacks, with their names.
    pub(super) fn keep_states(&mut self, callbacks: &[Box<dyn Callback>]) {
        self.callbacks = states(callbacks);
        self.callback_names = callbacks.iter().map(|callback| callback.name().to_owned()).collect();
    }
}

impl<T: Trainee> Session<'_, T> {
    /// Restores the callbacks' states from a checkpoint. Returns whether there is one, which is the same on all workers
    /// though they may have different callbacks.
    pub(super) fn give_states(&mut self, callbacks: &mut [Box<dyn Callback>]) -> bool {
        let states = std::mem::take(&mut self.standing.callbacks);
        let names = std::mem::take(&mut self.standing.callback_names);
        if names.len() == states.len() {
            let left = give_by_name(callbacks, &names, &states);
            if !left.is_empty() && self.trainer.strategy().is_chief() {
                let left = left.join(", ");
                distribute_notice::warn!(
                    "fit was not given these callbacks, whose states the checkpoint has: {left}; to resume with them, \
                     give fit the callbacks that it had"
                );
            }
            return !states.is_empty();
        }
        // Earlier versions saved no names.
        if states.len() != callbacks.len() {
            let (saved, given) = (states.len(), callbacks.len());
            distribute_notice::warn!(
                "the checkpoint has {saved} callbacks, and fit was given {given}: they begin anew"
            );
            return false;
        }
        callbacks.iter_mut().zip(&states).for_each(|(callback, state)| callback.set_state(state));
        true
    }

    /// Gives callbacks the states, and the optimizer the learning rate, of before the end of the epoch.
    pub(super) fn take_back(&mut self, callbacks: &mut [Box<dyn Callback>], (states, rate): (Vec<Value>, f64)) {
        callbacks.iter_mut().zip(&states).for_each(|(callback, state)| callback.set_state(state));
        self.trainer.set_learning_rate(rate);
    }
}

/// Returns the states of callbacks, in their order.
pub(super) fn states(callbacks: &[Box<dyn Callback>]) -> Vec<Value> {
    callbacks.iter().map(|callback| callback.state()).collect()
}

/// Gives the i-th callback of a name the i-th state of that name: other callbacks may be those of one worker. Returns
/// the names of the callbacks that are missing here and had a state.
fn give_by_name<'a>(callbacks: &mut [Box<dyn Callback>], names: &'a [String], states: &[Value]) -> Vec<&'a str> {
    let mut left: Vec<(&str, &Value)> = names.iter().map(String::as_str).zip(states).collect();
    for callback in callbacks {
        if let Some(place) = left.iter().position(|(name, _)| *name == callback.name()) {
            callback.set_state(left.remove(place).1);
        }
    }
    left.into_iter().filter(|(_, state)| !state.is_null()).map(|(name, _)| name).collect()
}
