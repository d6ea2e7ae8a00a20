//! Values of the chief, sent to every worker.

use distribute_collectives::{Rank, on_local_ranks};
use distribute_device::Element;
use distribute_strategy::Strategy;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// Returns the chief's outcome on every worker. Every worker must call this; the values of the others are ignored, but
/// their errors are returned.
///
/// # Errors
/// The worker's own error; on workers other than the chief [`Error::Chief`] with the message of the chief's error;
/// [`Error::State`] if the value cannot be serialized; [`Error::Collective`] if a worker is missing or fails.
///
/// # Examples
/// ```
/// use distribute_strategy::Strategy;
/// use distribute_train::{Error, from_chief};
/// let strategy = Strategy::default_strategy()?;
/// let settings: Result<u32, Error> = Ok(7);                        // the chief has read a file, say
/// assert_eq!(from_chief(&strategy, settings)?, 7);
/// # Ok::<(), Error>(())
/// ```
pub fn from_chief<T: Serialize + DeserializeOwned, E: From<Error> + ToString>(
    strategy: &Strategy,
    outcome: Result<T, E>,
) -> Result<T, E> {
    if strategy.topology().workers() == 1 {
        return outcome;
    }
    let json = |source| Error::State { key: "what the chief says".to_owned(), source };
    let bytes = outcome.and_then(|value| serde_json::to_vec(&value).map_err(|error| json(error).into()));
    Ok(serde_json::from_slice(&bytes_from_chief(strategy, bytes)?).map_err(json)?)
}

/// Returns the chief's bytes on every worker, like [`from_chief`].
pub(crate) fn bytes_from_chief<E: From<Error> + ToString>(
    strategy: &Strategy,
    outcome: Result<Vec<u8>, E>,
) -> Result<Vec<u8>, E> {
    if strategy.topology().workers() == 1 {
        return outcome;
    }
    let (mut message, failure) = match outcome {
        Ok(mut bytes) => {
            bytes.push(1);
            (bytes, None)
        }
        Err(error) => {
            let mut text = error.to_string().into_bytes();
            text.push(0);
            (text, Some(error))
        }
    };
    let length = broadcast(strategy, vec![message.len() as u64])?.first().copied().unwrap_or(0);
    // The length comes from another process, so a failed allocation must not abort.
    let wanted = usize::try_from(length).ok().filter(|wanted| {
        let more = wanted.saturating_sub(message.len());
        message.try_reserve_exact(more).is_ok()
    });
    let no_memory = || Error::Part(format!("the chief sends {length} bytes, for which there is no memory here").into());
    message.resize(wanted.ok_or_else(no_memory)?, 0);
    let mut told = broadcast(strategy, message)?;
    match (failure, told.pop()) {
        (Some(error), _) => Err(error),
        (None, Some(1)) => Ok(told),
        (None, _) => Err(Error::Chief(String::from_utf8_lossy(&told).into_owned()).into()),
    }
}

/// Broadcasts the chief's values; all workers must pass equally many.
fn broadcast<T: Element>(strategy: &Strategy, values: Vec<T>) -> Result<Vec<T>> {
    let all = on_local_ranks(&strategy.groups(), |_, group| group.start().broadcast(values.clone(), Rank(0)))?;
    Ok(all.unwrap_or_default())
}
