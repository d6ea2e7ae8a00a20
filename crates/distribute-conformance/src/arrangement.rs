//! The strategies that the scenarios run under, and clusters of parameter servers.

use distribute::prelude::*;
use distribute::strategy::TpuStrategy;

use crate::place::Place;

/// A strategy and its replicas.
pub(crate) struct Arrangement {
    pub(crate) name: &'static str,
    /// A short name for headings.
    pub(crate) short: &'static str,
    kind: Kind,
    /// The number of ranks of each process: its devices.
    ranks: usize,
    /// The number of ranks of each replica.
    tensor: usize,
    /// The number of processes, if the strategy spans several or could.
    pub(crate) workers: Option<u32>,
    /// Whether another arrangement of the same kind has as many things that can go wrong.
    pub(crate) is_extra: bool,
}

enum Kind {
    Default,
    OneDevice,
    Mirrored,
    CentralStorage,
    MultiWorkerMirrored,
    /// Shards every parameter, also small ones.
    FullySharded,
    /// On the devices of XLA's plugin for CPUs.
    Tpu,
    /// Two servers and as many workers, with `ranks` replicas each.
    ParameterServer {
        workers: usize,
    },
}

impl Arrangement {
    const fn alone(name: &'static str, short: &'static str, kind: Kind, ranks: usize) -> Arrangement {
        Arrangement { name, short, kind, ranks, tensor: 1, workers: None, is_extra: false }
    }

    const fn workers(name: &'static str, short: &'static str, workers: u32, ranks: usize) -> Arrangement {
        Arrangement {
            kind: Kind::MultiWorkerMirrored,
            workers: Some(workers),
            ..Arrangement::alone(name, short, Kind::Default, ranks)
        }
    }

    /// Makes each two neighbouring ranks a tensor group. The models of the suite have no layers that are split, so all
    /// promises hold for the replicas, whose ranks compute the same.
    const fn in_pairs(self) -> Arrangement {
        Arrangement { tensor: 2, ..self }
    }

    const fn extra(self) -> Arrangement {
        Arrangement { is_extra: true, ..self }
    }

    const fn sharded(self) -> Arrangement {
        Arrangement { kind: Kind::FullySharded, ..self }
    }

    pub(crate) const ALL: [Arrangement; 21] = [
        Arrangement::alone("Default", "default", Kind::Default, 1),
        Arrangement::alone("OneDevice", "one device", Kind::OneDevice, 1),
        Arrangement::alone("Mirrored 1", "mirrored 1", Kind::Mirrored, 1).extra(),
        Arrangement::alone("Mirrored 2", "mirrored 2", Kind::Mirrored, 2),
        Arrangement::alone("Mirrored 4", "mirrored 4", Kind::Mirrored, 4).extra(),
        Arrangement::alone("Mirrored 2 of 2 tensor ranks", "mesh 2×2", Kind::Mirrored, 4).in_pairs().extra(),
        Arrangement::alone("CentralStorage 2", "central 2", Kind::CentralStorage, 2),
        Arrangement::workers("MultiWorkerMirrored 1x1", "workers 1×1", 1, 1).extra(),
        Arrangement::workers("MultiWorkerMirrored 2x1", "workers 2×1", 2, 1),
        Arrangement::workers("MultiWorkerMirrored 2x2", "workers 2×2", 2, 2).extra(),
        Arrangement::workers("MultiWorkerMirrored 2x1 of 2 tensor ranks", "workers 2×1×2", 2, 2).in_pairs().extra(),
        Arrangement::alone("FullySharded 2", "sharded 2", Kind::FullySharded, 2),
        Arrangement::alone("FullySharded 4", "sharded 4", Kind::FullySharded, 4).extra(),
        Arrangement::workers("FullySharded 2x1", "sharded 2×1", 2, 1).sharded(),
        Arrangement::alone("ParameterServer 1x1", "servers 1×1", Kind::ParameterServer { workers: 1 }, 1),
        Arrangement::alone("ParameterServer 1x2", "servers 1×2", Kind::ParameterServer { workers: 1 }, 2),
        Arrangement::alone("ParameterServer 2x1", "servers 2×1", Kind::ParameterServer { workers: 2 }, 1),
        Arrangement::alone("Tpu 1", "tpu 1", Kind::Tpu, 1),
        Arrangement::alone("Tpu 2", "tpu 2", Kind::Tpu, 2),
        Arrangement::alone("Tpu 4", "tpu 4", Kind::Tpu, 4),
        Arrangement::alone("Tpu 8", "tpu 8", Kind::Tpu, 8),
    ];

    /// Returns whether steps are compiled programs, which may refuse what a scenario is about.
    pub(crate) fn is_compiled(&self) -> bool {
        matches!(self.kind, Kind::Tpu)
    }

    /// Returns why the strategy cannot be tried here, if it cannot.
    pub(crate) fn missing(&self) -> Option<&'static str> {
        match self.kind {
            Kind::Tpu if std::env::var_os("DISTRIBUTE_PJRT_PLUGIN").is_none() => {
                Some("DISTRIBUTE_PJRT_PLUGIN names no plugin for CPUs; `cargo xtask pjrt --fetch` fetches one")
            }
            _ => None,
        }
    }

    pub(crate) fn place(&self) -> distribute::Result<Place> {
        let devices: Vec<String> = (0..self.ranks).map(|index| format!("CPU:{index}")).collect();
        let strategy = match self.kind {
            Kind::ParameterServer { workers } => return Ok(Place::Servers { workers, replicas: self.ranks }),
            Kind::Default => Strategy::default_strategy()?,
            Kind::OneDevice => OneDeviceStrategy::builder("CPU:0").build()?,
            Kind::Mirrored => MirroredStrategy::builder().devices(devices).tensor_parallel(self.tensor).build()?,
            Kind::CentralStorage => CentralStorageStrategy::builder().compute_devices(devices).build()?,
            Kind::MultiWorkerMirrored => {
                MultiWorkerMirroredStrategy::builder().devices(devices).tensor_parallel(self.tensor).build()?
            }
            Kind::Tpu => TpuStrategy::builder().replicas(self.ranks).build()?,
            Kind::FullySharded => FullyShardedStrategy::builder().devices(devices).mirror_below(1).build()?,
        };
        Ok(Place::Strategy(strategy))
    }
}
