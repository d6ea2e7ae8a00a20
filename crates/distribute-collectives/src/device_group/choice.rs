//! The choice of a backend for the ranks' devices.

use std::fmt;

use distribute_device::Device;
use serde::{Deserialize, Serialize};

use super::implementation::DeviceImplementation;
use crate::{Error, ProcessGroup, Result};

/// The backend that was chosen, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) kind: BackendKind,
    because: String,
    /// The backend that was requested and is not available.
    instead_of: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BackendKind {
    Host,
    Kernels,
    Nccl,
}

/// The properties of a rank's device from which all ranks derive the same choice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Facts {
    device: String,
    process: usize,
    /// The physical GPU of the device; `None` for other devices.
    gpu: Option<String>,
    /// This rank's NCCL, or why it is not available.
    nccl: std::result::Result<Nccl, String>,
}

/// The NCCL of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Nccl {
    pub(super) version: String,
    /// Whether it accepts several ranks on one GPU.
    pub(super) shares_gpus: bool,
}

/// Maximum length of the encoded properties of a rank's device, which are a few hundred bytes.
const MAX_FACTS_BYTES: usize = 64 * 1024;

impl Facts {
    /// `gpu` is the identity of the physical GPU, `nccl` says which NCCL this process has.
    pub(super) fn of(
        device: &dyn Device,
        group: &ProcessGroup,
        gpu: Option<String>,
        nccl: impl FnOnce() -> std::result::Result<Nccl, String>,
    ) -> Facts {
        let nccl = match &gpu {
            Some(_) => nccl(),
            None => Err(format!("{} is not a GPU of this build", device.spec().short())),
        };
        Facts { device: device.spec().short(), process: group.process(), gpu, nccl }
    }

    /// Collects the properties of every rank's device.
    pub(super) fn exchange(&self, group: &ProcessGroup) -> Result<Vec<Facts>> {
        let mine = serde_json::to_vec(self).unwrap_or_default();
        let mut counts = vec![0u64; group.world_size()];
        group.all_gather(&[mine.len() as u64], &mut counts)?;
        let counts: Vec<usize> = counts.into_iter().map(|count| count as usize).collect();
        if let Some(got) = counts.iter().copied().find(|count| *count > MAX_FACTS_BYTES) {
            let what = "description of a rank's device";
            let remedy = "the rank runs another version of this crate; run the same on all ranks";
            return Err(Error::Length { what, got, expected: MAX_FACTS_BYTES, remedy });
        }
        let mut all = vec![0; counts.iter().sum()];
        group.parts(&counts).all_gather(&mine, &mut all)?;
        let mut rest = all.as_slice();
        Ok(counts
            .into_iter()
            .enumerate()
            .map(|(rank, count)| {
                let (own, others) = rest.split_at(count);
                rest = others;
                serde_json::from_slice(own).unwrap_or_else(|_| Facts::unknown(rank))
            })
            .collect())
    }

    /// Returns placeholder properties for a rank of another version of this crate.
    fn unknown(rank: usize) -> Facts {
        let nccl = Err(format!("rank {rank} runs another version of this crate"));
        Facts { device: format!("the device of rank {rank}"), process: rank, gpu: None, nccl }
    }
}

/// Chooses a backend, the same on every rank, since all have the same input.
pub(super) fn choose(asked: DeviceImplementation, ranks: &[Facts]) -> Choice {
    if let Some(other) = ranks.iter().find(|rank| rank.gpu.is_none()) {
        return host(asked, format!("{} is not a GPU", other.device));
    }
    let no_nccl = obstacle(asked, ranks);
    let one_process = ranks.iter().all(|rank| rank.process == ranks[0].process);
    let kernels =
        |because: String, instead_of: Option<String>| Choice { kind: BackendKind::Kernels, because, instead_of };
    match (asked, no_nccl) {
        (DeviceImplementation::Host, _) => host(asked, "it was asked for".to_owned()),
        (DeviceImplementation::Kernels, _) => kernels("they were asked for".to_owned(), None),
        (DeviceImplementation::Auto | DeviceImplementation::Nccl, None) if ranks.len() > 1 => {
            let version = ranks[0].nccl.as_ref().map_or("", |nccl| nccl.version.as_str());
            let because = match twins(ranks) {
                None => format!("every rank has a GPU of its own and NCCL {version}"),
                Some([twin, rank]) => format!(
                    "it was asked for, and NCCL {version} is set to accept {} and {} on one GPU",
                    twin.device, rank.device
                ),
            };
            Choice { kind: BackendKind::Nccl, because, instead_of: None }
        }
        (asked, obstacle) => {
            let obstacle = obstacle.unwrap_or_else(|| "there is one rank".to_owned());
            let instead_of = (asked == DeviceImplementation::Nccl && ranks.len() > 1).then(|| "NCCL".to_owned());
            let between = if one_process { "" } else { "; between processes through the host" };
            kernels(format!("{obstacle}{between}"), instead_of)
        }
    }
}

fn host(asked: DeviceImplementation, because: String) -> Choice {
    let instead_of = match asked {
        DeviceImplementation::Nccl => Some("NCCL".to_owned()),
        DeviceImplementation::Kernels => Some("kernels".to_owned()),
        DeviceImplementation::Auto | DeviceImplementation::Host => None,
    };
    Choice { kind: BackendKind::Host, because, instead_of }
}

/// Returns the first two ranks that share a GPU.
fn twins(ranks: &[Facts]) -> Option<[&Facts; 2]> {
    let mut pairs = ranks.iter().enumerate().map(|(place, rank)| (rank, &ranks[..place]));
    pairs.find_map(|(rank, before)| Some([before.iter().find(|other| other.gpu == rank.gpu)?, rank]))
}

/// Returns the reason why NCCL cannot be used, if there is one.
fn obstacle(asked: DeviceImplementation, ranks: &[Facts]) -> Option<String> {
    let shares_gpus = |rank: &Facts| rank.nccl.as_ref().is_ok_and(|nccl| nccl.shares_gpus);
    // Ranks of a GPU wait for each other on it, so kernels are better unless NCCL was asked for.
    let may_share = asked == DeviceImplementation::Nccl && ranks.iter().all(shares_gpus);
    if let Some([twin, rank]) = twins(ranks).filter(|_| !may_share) {
        return Some(format!("{} and {} are on one GPU, which NCCL does not take twice", twin.device, rank.device));
    }
    if let Some((rank, reason)) = ranks.iter().find_map(|rank| rank.nccl.as_ref().err().map(|reason| (rank, reason))) {
        return Some(format!("no NCCL for {}: {reason}", rank.device));
    }
    let mut versions = ranks.iter().filter_map(|rank| Some((rank, &rank.nccl.as_ref().ok()?.version)));
    let (first, version) = versions.next()?;
    let (other, differs) = versions.find(|(_, other)| *other != version)?;
    Some(format!("{} has NCCL {version}, but {} has {differs}", first.device, other.device))
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.kind {
            BackendKind::Host => "the host's memory",
            BackendKind::Kernels => "kernels in the GPUs' memory",
            BackendKind::Nccl => "NCCL",
        };
        write!(f, "collectives of devices by {name}")?;
        if let Some(asked) = &self.instead_of {
            write!(f, " instead of {asked}")?;
        }
        write!(f, ": {}", self.because)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(device: &str, process: usize, gpu: Option<&str>, nccl: Option<&str>) -> Facts {
        let nccl = nccl.map(|version| Nccl { version: version.to_owned(), shares_gpus: false });
        let nccl = nccl.ok_or_else(|| "libnccl.so.2 was not found".to_owned());
        Facts { device: device.to_owned(), process, gpu: gpu.map(str::to_owned), nccl }
    }

    #[test]
    fn an_impossible_length_of_a_description_is_an_error() {
        let groups = ProcessGroup::local(2).unwrap();
        std::thread::scope(|scope| {
            let claims = scope.spawn(|| groups[1].all_gather(&[u64::MAX], &mut [0; 2]));
            let error = rank("CPU:0", 0, None, None).exchange(&groups[0]).unwrap_err();
            assert!(matches!(error, Error::Length { got: usize::MAX, .. }), "{error}");
            claims.join().expect("no panic").unwrap();
        });
    }

    #[test]
    fn a_cpu_among_the_devices_means_the_host() {
        let ranks = [rank("GPU:0", 0, Some("a"), Some("2.28.9")), rank("CPU:0", 0, None, None)];
        let choice = choose(DeviceImplementation::Auto, &ranks);
        assert_eq!(choice.to_string(), "collectives of devices by the host's memory: CPU:0 is not a GPU");
        let choice = choose(DeviceImplementation::Nccl, &ranks).to_string();
        assert!(choice.contains("instead of NCCL"), "{choice}");
    }

    #[test]
    fn nccl_takes_gpus_of_their_own() {
        let both = [rank("GPU:0", 0, Some("a"), Some("2.28.9")), rank("GPU:1", 0, Some("b"), Some("2.28.9"))];
        assert_eq!(choose(DeviceImplementation::Auto, &both).kind, BackendKind::Nccl);
        assert_eq!(choose(DeviceImplementation::Kernels, &both).kind, BackendKind::Kernels);
        assert_eq!(choose(DeviceImplementation::Host, &both).kind, BackendKind::Host);
        let shared = [rank("GPU:0", 0, Some("a"), Some("2.28.9")), rank("GPU:1", 0, Some("a"), Some("2.28.9"))];
        let choice = choose(DeviceImplementation::Nccl, &shared);
        let said = choice.to_string();
        assert!(choice.kind == BackendKind::Kernels && said.contains("GPU:0 and GPU:1 are on one GPU"), "{said}");
        let sharing = shared.clone().map(|mut rank| {
            rank.nccl = Ok(Nccl { version: "2.31.2".to_owned(), shares_gpus: true });
            rank
        });
        assert_eq!(choose(DeviceImplementation::Auto, &sharing).kind, BackendKind::Kernels);
        let choice = choose(DeviceImplementation::Nccl, &sharing);
        let said = choice.to_string();
        assert!(choice.kind == BackendKind::Nccl && said.contains("GPU:0 and GPU:1 on one GPU"), "{said}");
        let half = [shared[0].clone(), sharing[1].clone()];
        assert_eq!(choose(DeviceImplementation::Nccl, &half).kind, BackendKind::Kernels);
        let mixed = [rank("GPU:0", 0, Some("a"), Some("2.28.9")), rank("GPU:1", 1, Some("b"), Some("2.21.5"))];
        let said = choose(DeviceImplementation::Auto, &mixed).to_string();
        assert!(said.contains("has NCCL 2.28.9, but GPU:1 has 2.21.5") && said.contains("through the host"), "{said}");
        let absent = [rank("GPU:0", 0, Some("a"), None), rank("GPU:1", 0, Some("b"), Some("2.21.5"))];
        let said = choose(DeviceImplementation::Nccl, &absent).to_string();
        assert!(said.contains("instead of NCCL") && said.contains("libnccl.so.2 was not found"), "{said}");
        assert_eq!(choose(DeviceImplementation::Auto, &both[..1]).kind, BackendKind::Kernels);
    }
}
