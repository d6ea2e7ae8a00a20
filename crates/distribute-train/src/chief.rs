//! Values of the chief, sent to every worker, and errors of one worker that end the work of all.

use distribute_collectives::{Rank, ReduceOp, on_local_ranks};
use distribute_device::Element;
use distribute_strategy::Strategy;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// Returns the chief's value on every worker, if no worker has an error. Every worker must call this; the values of the
/// others are ignored.
///
/// # Errors
/// The worker's own error; on workers without one [`Error::Chief`] or [`Error::OnWorker`] with the message of the first
/// worker that has one; [`Error::State`] if the value cannot be serialized; [`Error::Collective`] if a worker is
/// missing or fails.
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
    let length = outcome.as_ref().map_or(0, Vec::len);
    let agreed = agree(strategy, length, outcome.as_ref().err().map(ToString::to_string));
    // The own error says more than that of the others, or of telling them.
    let bytes = outcome?;
    Ok(sent(strategy, CHIEF, bytes, agreed?)?)
}

/// Returns this worker's value, if no worker has an error. Every worker must call this.
///
/// # Errors
/// The errors of [`from_chief`] occur in the same cases.
pub(crate) fn agreed<T, E: From<Error> + ToString>(strategy: &Strategy, outcome: Result<T, E>) -> Result<T, E> {
    if strategy.topology().workers() == 1 {
        return outcome;
    }
    let agreed = agree(strategy, 0, outcome.as_ref().err().map(ToString::to_string));
    let value = outcome?;
    agreed?;
    Ok(value)
}

/// Returns the chief's length on every worker, if no worker has a failure.
///
/// # Errors
/// [`Error::Chief`] or [`Error::OnWorker`] with the first worker's failure, also on this worker;
/// [`Error::Collective`] if a worker is missing or fails.
fn agree(strategy: &Strategy, length: usize, failure: Option<String>) -> Result<u64> {
    let (workers, worker) = (strategy.topology().workers(), strategy.topology().worker());
    // The greatest number is that of the first worker that has failed.
    let failed = failure.as_ref().map_or(0, |_| (workers - worker) as u64);
    let of_chief = if worker == CHIEF { length as u64 } else { 0 };
    let values = vec![failed, of_chief];
    let all = on_local_ranks(&strategy.groups(), |_, group| group.start().all_reduce(values.clone(), ReduceOp::Max))?;
    let all: Vec<u64> = all.unwrap_or_default();
    let (failed, length) = (all.first().copied().unwrap_or(0), all.get(1).copied().unwrap_or(0));
    if failed == 0 {
        return Ok(length);
    }
    let first = workers.saturating_sub(usize::try_from(failed).unwrap_or(workers));
    let text = failure.unwrap_or_default().into_bytes();
    let length = broadcast(strategy, first, vec![text.len() as u64])?.first().copied().unwrap_or(0);
    let problem = String::from_utf8_lossy(&sent(strategy, first, text, length)?).into_owned();
    if first == CHIEF {
        return Err(Error::Chief(problem));
    }
    let groups = strategy.groups();
    let name = groups.first().map_or("worker", |group| group.rank_name(first_rank(strategy, first)));
    // Ranks of workers with several replicas are named by their replica too.
    let worker = name.split(' ').next().unwrap_or(name).to_owned();
    Err(Error::OnWorker { worker, problem })
}

/// Returns a worker's bytes, of this length, on every worker; the bytes of the others are ignored.
fn sent(strategy: &Strategy, worker: usize, mut bytes: Vec<u8>, length: u64) -> Result<Vec<u8>> {
    // The length comes from another process, so a failed allocation must not abort.
    let wanted = usize::try_from(length).ok().filter(|wanted| {
        let more = wanted.saturating_sub(bytes.len());
        bytes.try_reserve_exact(more).is_ok()
    });
    let no_memory =
        || Error::Part(format!("another process sends {length} bytes, too many for the memory here").into());
    bytes.resize(wanted.ok_or_else(no_memory)?, 0);
    broadcast(strategy, worker, bytes)
}

/// Broadcasts a worker's values; all workers must pass equally many.
fn broadcast<T: Element>(strategy: &Strategy, worker: usize, values: Vec<T>) -> Result<Vec<T>> {
    let root = first_rank(strategy, worker);
    let all = on_local_ranks(&strategy.groups(), |_, group| group.start().broadcast(values.clone(), root))?;
    Ok(all.unwrap_or_default())
}

/// Returns the first rank of a worker.
fn first_rank(strategy: &Strategy, worker: usize) -> Rank {
    Rank::of(worker * strategy.topology().replicas_per_worker())
}

/// The number of the chief among the workers.
const CHIEF: usize = 0;

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use distribute_cluster::Membership;
    use distribute_strategy::{CommunicationOptions, MultiWorkerMirroredStrategy};
    use distribute_testkit::Ports;

    use super::*;

    /// Runs this on three workers of two replicas each, whose collectives may take a minute.
    fn three_workers<T: Send>(work: impl Fn(usize, &Strategy) -> T + Sync) -> [T; 3] {
        let address = format!("127.0.0.1:{}", Ports::reserve(1).unwrap().release()[0]);
        let worker = &|rank: usize| {
            let strategy = MultiWorkerMirroredStrategy::builder()
                .devices(["CPU:0", "CPU:1"])
                .membership(Membership::new(rank as u32, 3, &address).unwrap())
                .communication(CommunicationOptions::default().timeout(Duration::from_secs(60)))
                .build()
                .unwrap();
            work(rank, &strategy)
        };
        std::thread::scope(|scope| {
            let workers = [0, 1, 2].map(|rank| scope.spawn(move || worker(rank)));
            workers.map(|worker| worker.join().unwrap())
        })
    }

    #[test]
    fn an_error_of_any_worker_is_one_of_all_and_they_go_on_together() {
        let began = Instant::now();
        let all = three_workers(|rank, strategy| {
            let fails = |failing: &[usize]| match failing.contains(&rank) {
                true => Err(Error::Part(format!("worker {rank} has no ink").into())),
                false => Ok(rank),
            };
            let told = [&[][..], &[2], &[1, 2], &[0]].map(|failing| {
                let of_chief = from_chief(strategy, fails(failing)).map_err(|error| error.to_string());
                (of_chief, agreed(strategy, fails(failing)).map_err(|error| error.to_string()))
            });
            assert_eq!(from_chief::<_, Error>(strategy, Ok(rank + 7)).unwrap(), 7);
            told
        });
        let expected = |rank: usize| {
            let own = format!("worker {rank} has no ink");
            let of = |first: usize| match first {
                0 => "on the chief: worker 0 has no ink".to_owned(),
                first => format!("on worker:{first}: worker {first} has no ink"),
            };
            let told = |failing: &[usize]| if failing.contains(&rank) { own.clone() } else { of(failing[0]) };
            [&[2][..], &[1, 2], &[0]].map(|failing| (Err(told(failing)), Err(told(failing))))
        };
        for (rank, told) in all.into_iter().enumerate() {
            assert_eq!(told[0], (Ok(0), Ok(rank)));
            assert_eq!(told[1..], expected(rank));
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    }
}
