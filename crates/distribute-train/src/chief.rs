//! What the chief alone knows, told to every worker.

use distribute_collectives::{Rank, on_local_ranks};
use distribute_device::Element;
use distribute_strategy::Strategy;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// What the chief has got, or that it has failed, on every worker: every worker calls this; what the others bring is ignored,
/// unless it is a failure of their own.
///
/// # Errors
/// On the chief its own; on the others [`Error::Chief`] with its sentence. The collective's.
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
    if strategy.topology().workers == 1 {
        return outcome;
    }
    let json = |source| Error::State { key: "what the chief says".to_owned(), source };
    let bytes = outcome.and_then(|value| serde_json::to_vec(&value).map_err(|error| json(error).into()));
    Ok(serde_json::from_slice(&bytes_from_chief(strategy, bytes)?).map_err(json)?)
}

/// As [`from_chief`], of bytes.
pub(crate) fn bytes_from_chief<E: From<Error> + ToString>(
    strategy: &Strategy,
    outcome: Result<Vec<u8>, E>,
) -> Result<Vec<u8>, E> {
    if strategy.topology().workers == 1 {
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
    // Of another process: it is no reason to abort.
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

/// The chief's values, of which all workers have as many.
fn broadcast<T: Element>(strategy: &Strategy, values: Vec<T>) -> Result<Vec<T>> {
    let all = on_local_ranks(&strategy.groups(), |_, group| group.broadcast_async(values.clone(), Rank(0)))?;
    Ok(all.unwrap_or_default())
}
