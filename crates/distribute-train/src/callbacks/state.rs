//! States of callbacks in checkpoints, each with the name of its callback.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The key of the callback's name.
const CALLBACK: &str = "callback";

/// Returns the fields of a callback's state, with its name.
pub(super) fn of(callback: &str, fields: impl Serialize) -> Value {
    let mut state = serde_json::to_value(fields).unwrap_or_default();
    if let Value::Object(fields) = &mut state {
        fields.insert(CALLBACK.to_owned(), callback.into());
    }
    state
}

/// Returns the fields of a callback's state; `None` if there are none, and, with a warning, if the state is of another
/// callback. Earlier versions saved states without a name, which `earlier` reads.
pub(super) fn read<S: DeserializeOwned>(
    callback: &str,
    state: &Value,
    earlier: impl FnOnce(&Value) -> Option<S>,
) -> Option<S> {
    if state.is_null() {
        return None;
    }
    let name = state.get(CALLBACK);
    let found = match name.and_then(Value::as_str) {
        Some(name) if name == callback => S::deserialize(state).ok(),
        Some(_) => None,
        None => earlier(state),
    };
    if found.is_none() {
        let other = name.map_or_else(|| state.to_string(), Value::to_string);
        begins_anew(callback, &format!("the state in its place is of {other}"));
    }
    found
}

/// Warns that a state does not fit the callback that is given it.
pub(super) fn begins_anew(callback: &str, why: &str) {
    distribute_notice::warn!(
        "{callback} begins without the state of the checkpoint: {why}; to resume, give fit the callbacks that it had, \
         in the same order"
    );
}
