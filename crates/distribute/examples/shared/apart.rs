//! Flags of replicas that train apart, for the examples that can.

use clap::Args;
use distribute::prelude::*;
use distribute::strategy::{DilocoStrategy, OuterNesterov, Wire};

/// How replicas train apart, if they do.
#[derive(Args, Clone)]
pub(crate) struct Apart {
    /// Lets replicas train apart for this many steps between outer steps (DiLoCo).
    #[arg(long)]
    diloco: Option<u64>,
    /// Sends the changes of `--diloco` in eight bits.
    #[arg(long, requires = "diloco")]
    eight_bits: bool,
    /// Learning rate and momentum of the outer steps of `--diloco`.
    #[arg(long, requires = "diloco", num_args = 2, default_values_t = [0.7, 0.9], value_names = ["RATE", "MOMENTUM"])]
    outer: Vec<f64>,
    /// Lets replicas make this many steps while the changes of `--diloco` are reduced.
    #[arg(long, requires = "diloco", default_value_t = 0)]
    overlap: u64,
}

impl Apart {
    /// Lets the replicas of a strategy train apart, if that is wanted.
    pub(crate) fn over(&self, strategy: Strategy) -> distribute::Result<Strategy> {
        let Some(inner_steps) = self.diloco else { return Ok(strategy) };
        let outer = OuterNesterov { learning_rate: self.outer[0], momentum: self.outer[1] };
        let wire = if self.eight_bits { Wire::Int8 } else { Wire::F32 };
        let diloco = DilocoStrategy::builder().inner_steps(inner_steps).outer(outer).wire(wire);
        Ok(diloco.overlap(self.overlap).over(strategy)?)
    }
}
