//! The state of a dispatcher: the data workers that live, and the settings of the datasets that they serve.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use distribute_types::{FNV128, fnv1a_128};

use crate::wire::proto::{Located, Registration, Setting};

/// It does no input or output; callers pass the time.
#[derive(Debug)]
pub(crate) struct Registry {
    silence: Duration,
    workers: BTreeMap<String, Worker>,
    /// The settings of each dataset, by the first data worker that served it.
    datasets: BTreeMap<String, Dataset>,
}

#[derive(Debug)]
struct Worker {
    heard: Instant,
    datasets: Vec<String>,
}

#[derive(Debug)]
struct Dataset {
    settings: Vec<Setting>,
    digest: [u8; 16],
    first: String,
}

impl Registry {
    pub(crate) fn new(silence: Duration) -> Registry {
        Registry { silence, workers: BTreeMap::new(), datasets: BTreeMap::new() }
    }

    /// Notes that a data worker lives. Announcing again is the heartbeat.
    ///
    /// # Errors
    /// A sentence, if a dataset differs from the one that is known by its name, or if there are too many.
    pub(crate) fn register(&mut self, registration: Registration, now: Instant) -> Result<(), String> {
        self.forget(now);
        let Registration { address, datasets } = registration;
        if address.len() > MAX_NAME_BYTES || datasets.iter().any(|dataset| dataset.name.len() > MAX_NAME_BYTES) {
            return Err(format!("an address or a name is longer than {MAX_NAME_BYTES} bytes; shorten it"));
        }
        for dataset in &datasets {
            if let Some(known) = self.datasets.get(&dataset.name)
                && let Some(difference) = difference(&known.settings, &dataset.settings)
            {
                return Err(format!(
                    "dataset {:?} of the data worker at {address} is not the one that {} served first: {difference}; \
                     run the same program with the same settings and files as every data worker, or start the \
                     dispatcher again for other data",
                    dataset.name, known.first
                ));
            }
        }
        let new = datasets.iter().filter(|dataset| !self.datasets.contains_key(&dataset.name)).count();
        if self.datasets.len() + new > MAX_DATASETS {
            return Err(format!("there are more than {MAX_DATASETS} datasets; start another dispatcher"));
        }
        if self.workers.len() >= MAX_WORKERS && !self.workers.contains_key(&address) {
            return Err(format!("there are {MAX_WORKERS} data workers already; start another dispatcher"));
        }
        let names = datasets.iter().map(|dataset| dataset.name.clone()).collect();
        for dataset in datasets {
            let digest = digest(&dataset.settings);
            let first = address.clone();
            self.datasets.entry(dataset.name).or_insert(Dataset { settings: dataset.settings, digest, first });
        }
        let is_new = self.workers.insert(address.clone(), Worker { heard: now, datasets: names }).is_none();
        if is_new {
            tracing::info!("the data worker at {address} has joined; there are {}", self.workers.len());
        }
        Ok(())
    }

    /// Returns the data workers that serve a dataset.
    pub(crate) fn locate(&mut self, dataset: &str, now: Instant) -> Located {
        self.forget(now);
        let serves = |worker: &Worker| worker.datasets.iter().any(|name| name == dataset);
        let workers = self.workers.iter().filter(|(_, worker)| serves(worker)).map(|(address, _)| address.clone());
        let digest = self.datasets.get(dataset).map(|known| known.digest.to_vec()).unwrap_or_default();
        Located {
            workers: workers.collect(),
            digest: digest.into(),
            datasets: self.datasets.keys().take(MAX_NAMED).cloned().collect(),
        }
    }

    /// Returns the addresses of all data workers that live.
    pub(crate) fn workers(&mut self, now: Instant) -> Vec<String> {
        self.forget(now);
        self.workers.keys().cloned().collect()
    }

    fn forget(&mut self, now: Instant) {
        let silence = self.silence;
        self.workers.retain(|address, worker| {
            let lives = now.saturating_duration_since(worker.heard) < silence;
            if !lives {
                tracing::warn!("the data worker at {address} was silent for {silence:?} and is forgotten");
            }
            lives
        });
    }
}

/// Returns the digest of a dataset's settings.
pub(crate) fn digest(settings: &[Setting]) -> [u8; 16] {
    let texts = settings.iter().flat_map(|setting| [&setting.name, &setting.value]);
    let digest = texts.fold(FNV128, |digest, text| {
        // The length keeps texts apart.
        fnv1a_128(digest, (text.len() as u64).to_le_bytes().into_iter().chain(text.bytes()))
    });
    digest.to_be_bytes()
}

/// Describes the first difference between the settings of two data workers.
fn difference(first: &[Setting], second: &[Setting]) -> Option<String> {
    let value = |settings: &[Setting], name: &str| {
        let found = settings.iter().find(|setting| setting.name == name);
        found.map_or_else(|| "missing".to_owned(), |setting| setting.value.clone())
    };
    let mut names = first.iter().chain(second).map(|setting| &setting.name);
    let name = names.find(|name| value(first, name) != value(second, name))?;
    Some(format!("its {name} is {}, and there {}", value(second, name), value(first, name)))
}

const MAX_DATASETS: usize = 1024;
const MAX_NAME_BYTES: usize = 512;

/// An answer with the addresses of all of them is shorter than the longest message.
const MAX_WORKERS: usize = 1024;

/// The most names of datasets in an answer, for messages.
const MAX_NAMED: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::ServedDataset;

    fn registration(address: &str, seed: &str) -> Registration {
        let setting = |name: &str, value: &str| Setting { name: name.to_owned(), value: value.to_owned() };
        let settings = vec![setting("batch", "none"), setting("seeds of shuffles", seed)];
        let datasets = vec![ServedDataset { name: "train".to_owned(), settings }];
        Registration { address: address.to_owned(), datasets }
    }

    #[test]
    fn silent_workers_are_forgotten_and_the_settings_kept() {
        let (mut registry, begun) = (Registry::new(Duration::from_secs(5)), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        registry.register(registration("b:1", "[1]"), at(0)).unwrap();
        registry.register(registration("a:1", "[1]"), at(3)).unwrap();
        assert_eq!(registry.locate("train", at(4)).workers, ["a:1", "b:1"]);
        assert!(registry.locate("test", at(4)).workers.is_empty());
        assert_eq!(registry.locate("train", at(6)).workers, ["a:1"]);
        registry.register(registration("b:1", "[1]"), at(7)).unwrap();
        assert_eq!(registry.workers(at(7)), ["a:1", "b:1"]);
        assert_eq!(registry.locate("train", at(20)).digest.len(), 16);
        let refused = registry.register(registration("c:1", "[2]"), at(21)).unwrap_err();
        for words in ["\"train\"", "c:1", "that b:1 served first", "seeds of shuffles is [2], and there [1]"] {
            assert!(refused.contains(words), "{refused}");
        }
        assert!(registry.workers(at(21)).is_empty());
    }
}
