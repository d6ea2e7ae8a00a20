//! Options of the communication between replicas.

use std::str::FromStr;
use std::time::Duration;

use distribute_collectives::{Algorithm, DeviceImplementation, Options, TransportKind};
use distribute_device::{DeviceKind, DeviceSpec};

use crate::Result;

/// The implementation of the collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Implementation {
    /// Chosen by devices, sizes and network.
    #[default]
    Auto,
    /// This workspace's collectives, with rings between processes.
    Ring,
    /// NVIDIA's NCCL between GPUs; on other devices this workspace's collectives, with a warning.
    Nccl,
}

impl FromStr for Implementation {
    type Err = distribute_collectives::Error;

    /// Parses a name, in any case: `auto`, `RING`.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name.to_ascii_lowercase().as_str() {
            "auto" => Ok(Implementation::Auto),
            "ring" => Ok(Implementation::Ring),
            "nccl" => Ok(Implementation::Nccl),
            _ => Err(distribute_collectives::Error::UnknownName {
                what: "implementation",
                given: name.to_owned(),
                expected: "auto, ring or nccl",
            }),
        }
    }
}

/// Options of the communication between replicas.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use distribute_strategy::{CommunicationOptions, MirroredStrategy};
///
/// let options = CommunicationOptions::default().timeout(Duration::from_secs(30));
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).communication(options).build()?;
/// # Ok::<(), distribute_strategy::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.experimental.CommunicationOptions`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommunicationOptions {
    /// The implementation of the collectives.
    pub implementation: Implementation,
    /// Bytes of gradients that are reduced together; 0 for all of a step. Default: 1 MiB, 16 MiB on GPUs.
    pub bytes_per_pack: Option<usize>,
    /// The deadline of one operation. Default: DISTRIBUTE_TIMEOUT, else five minutes.
    pub timeout: Option<Duration>,
    /// The transport between processes. Default: DISTRIBUTE_TRANSPORT, else chosen automatically.
    pub transport: Option<TransportKind>,
    /// The algorithm of an all-reduce between processes. Default: the implementation's, DISTRIBUTE_ALGORITHM, else
    /// chosen by size.
    pub algorithm: Option<Algorithm>,
}

distribute_types::setters! {
    CommunicationOptions {
        implementation: Implementation,
    } into {
        bytes_per_pack: Option<usize>,
        timeout: Option<Duration>,
        transport: Option<TransportKind>,
        algorithm: Option<Algorithm>,
    }
}

impl CommunicationOptions {
    /// Returns these options, overridden by those of `other` that are not defaults.
    ///
    /// # Source
    /// `tf.distribute.experimental.CommunicationOptions.merge`, whose argument wins wherever it is not a default.
    pub fn merge(self, other: CommunicationOptions) -> CommunicationOptions {
        CommunicationOptions {
            implementation: match other.implementation {
                Implementation::Auto => self.implementation,
                chosen => chosen,
            },
            bytes_per_pack: other.bytes_per_pack.or(self.bytes_per_pack),
            timeout: other.timeout.or(self.timeout),
            transport: other.transport.or(self.transport),
            algorithm: other.algorithm.or(self.algorithm),
        }
    }

    /// Returns the options of a group of replicas on these devices; the environment supplies those that are not set
    /// here.
    pub(crate) fn options(self, devices: &[DeviceSpec]) -> Result<Options> {
        let mut options = Options::from_env()?;
        options.timeout = self.timeout.unwrap_or(options.timeout);
        options.transport = self.transport.unwrap_or(options.transport);
        options.bytes_per_pack = self.bytes_per_pack.or(options.bytes_per_pack);
        match self.implementation {
            Implementation::Auto => {}
            Implementation::Ring => {
                options.algorithm = Algorithm::Ring;
                options.device_implementation = DeviceImplementation::Kernels;
            }
            Implementation::Nccl => {
                options.device_implementation = DeviceImplementation::Nccl;
                if let Some(device) = devices.iter().find(|device| device.kind() != Some(DeviceKind::Gpu)) {
                    distribute_notice::warn!(
                        "NCCL was asked for, but {} is not a GPU; our own collectives are used",
                        device.short()
                    );
                }
            }
        }
        options.algorithm = self.algorithm.unwrap_or(options.algorithm);
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_wins_over_defaults() {
        let base = CommunicationOptions {
            bytes_per_pack: Some(1),
            timeout: Some(Duration::from_secs(1)),
            ..Default::default()
        };
        let other = CommunicationOptions {
            implementation: Implementation::Ring,
            bytes_per_pack: Some(2),
            ..Default::default()
        };
        let merged = base.merge(other);
        assert_eq!(merged.implementation, Implementation::Ring);
        assert_eq!((merged.bytes_per_pack, merged.timeout), (Some(2), Some(Duration::from_secs(1))));
        let options = merged.options(&[]).unwrap();
        assert_eq!((options.algorithm, options.bytes_per_pack), (Algorithm::Ring, Some(2)));
    }

    #[test]
    fn names_are_read_in_any_case() {
        assert_eq!("NCCL".parse::<Implementation>().unwrap(), Implementation::Nccl);
        assert!("mpi".parse::<Implementation>().unwrap_err().to_string().contains("auto, ring or nccl"));
    }
}
