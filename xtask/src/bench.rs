//! Measurements, as tables and as JSON lines.

use clap::Subcommand;

pub(crate) mod allreduce;
mod limits;
mod processes;
mod train;

#[derive(Subcommand)]
pub(crate) enum Bench {
    /// All-reduce over transports, rank counts and sizes, every result verified.
    Allreduce(allreduce::Flags),
    /// Training of a small model on several arrangements of replicas.
    Train(train::Flags),
    /// One process of a measurement; started by the others.
    #[command(hide = true)]
    Rank {
        #[command(subcommand)]
        bench: RankBench,
    },
}

#[derive(Subcommand)]
pub(crate) enum RankBench {
    Allreduce(allreduce::Flags),
    Train(train::RankFlags),
}

impl Bench {
    pub(crate) fn run(self) -> Result<(), String> {
        match self {
            Bench::Allreduce(flags) => allreduce::run(&flags),
            Bench::Train(flags) => train::run(&flags),
            Bench::Rank { bench: RankBench::Allreduce(flags) } => allreduce::run_rank(&flags),
            Bench::Rank { bench: RankBench::Train(flags) } => train::run_rank(&flags),
        }
    }
}

/// The middle, least and greatest of some times in seconds.
pub(crate) fn spread(mut seconds: Vec<f64>) -> (f64, f64, f64) {
    seconds.sort_by(f64::total_cmp);
    let at = |index: usize| seconds.get(index).copied().unwrap_or(f64::NAN);
    (at(seconds.len() / 2), at(0), at(seconds.len().saturating_sub(1)))
}

/// Any error as text.
pub(crate) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
