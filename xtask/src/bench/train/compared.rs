//! The same models trained by torch and TensorFlow.

use std::time::Duration;

use clap::ValueEnum;

use super::{Arrangement, Flags, Model, Round, named};
use crate::bench::peers::{Python, TENSORFLOW, TORCH};

/// A library that ours is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Peer {
    Torch,
    Tensorflow,
}

impl Peer {
    pub(super) fn name(self) -> &'static str {
        match self {
            Peer::Torch => "torch",
            Peer::Tensorflow => "tensorflow",
        }
    }

    fn python(self) -> Python {
        match self {
            Peer::Torch => TORCH,
            Peer::Tensorflow => TENSORFLOW,
        }
    }

    pub(super) fn say_if_missing(self) {
        if !self.python().is_installed() {
            println!("skipped: {} is not installed ({})", self.name(), self.python().set_up());
        }
    }

    /// Returns its strategies: the argument of its script, a description, replicas and processes.
    pub(super) fn arrangements(self, processes: usize) -> Vec<Arrangement> {
        match self {
            Peer::Torch => vec![
                ("alone", "no distribution, all cores", 1, 1),
                ("ddp", "DistributedDataParallel, gloo", processes, processes),
            ],
            Peer::Tensorflow => vec![
                ("mirrored", "MirroredStrategy", 2, 1),
                ("workers", "MultiWorkerMirroredStrategy, RING", processes, processes),
            ],
        }
    }

    /// Trains by one of its strategies; `None` where it is not installed.
    pub(super) fn run(
        self,
        flags: &Flags,
        model: Model,
        (name, _, _, processes): &Arrangement,
    ) -> Result<Option<Round>, String> {
        let script = match self {
            Peer::Torch => "xtask/peers/torch_ddp.py",
            Peer::Tensorflow => "xtask/peers/tf_train.py",
        };
        let model_name = named(&model);
        let arguments = [model_name, model.batch().to_string(), flags.seconds.to_string()];
        let strategy = (self == Peer::Tensorflow).then(|| (*name).to_owned());
        let arguments: Vec<String> = strategy.into_iter().chain(arguments).collect();
        // Also compiles, warms up and measures alone.
        let limit = Duration::from_secs_f64(flags.seconds * 8.0 + 600.0);
        let read = |printed: &str| {
            serde_json::from_str(printed).map_err(|error| format!("it printed no line of JSON: {error}"))
        };
        self.python().run(script, *processes, &arguments, limit, read)
    }
}
