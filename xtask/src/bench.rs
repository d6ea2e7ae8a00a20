//! Measurements, as tables and as JSON lines.

use clap::Subcommand;

use self::collective::Operation;

mod accuracy;
pub(crate) mod collective;
mod cuda;
mod input;
mod join;
mod latency;
mod limits;
mod micro;
pub(crate) mod peers;
mod plot;
mod processes;
mod ps;
pub(crate) mod spread;
mod train;

#[derive(Subcommand)]
pub(crate) enum Bench {
    /// All-reduce over transports, rank counts and sizes, every result verified.
    Allreduce(collective::Flags),
    /// All-gather; the size is that of the gathered values.
    Allgather(collective::Flags),
    /// Reduce-scatter; the size is that of the values to reduce.
    #[command(name = "reduce_scatter")]
    ReduceScatter(collective::Flags),
    /// Broadcast, roots taking turns.
    Broadcast(collective::Flags),
    /// All-to-all; the size is that of all parts of a rank.
    Alltoall(collective::Flags),
    /// The shortest operations: median, percentiles and the worst.
    Latency(latency::Flags),
    /// Tasks that join a job, all at once.
    Join(join::Flags),
    /// Reading, shuffling, decoding and batching files.
    Input(input::Flags),
    /// Training of a small model on several arrangements of replicas.
    Train(train::Flags),
    /// Results of examples over some seeds, next to those of the same programs in torch.
    Accuracy(accuracy::Flags),
    /// Copies, kernels and collectives of the GPUs here.
    Cuda(cuda::Flags),
    /// Training against parameter servers, and what it moves.
    Ps(ps::Flags),
    /// Inner loops by criterion: kernels, codecs, stages of pipelines, checkpoints, optimizers; against a baseline.
    Micro(micro::Flags),
    /// One process of a measurement; started by the others.
    #[command(hide = true)]
    Rank {
        #[command(subcommand)]
        bench: RankBench,
    },
}

#[derive(Subcommand)]
pub(crate) enum RankBench {
    Allreduce(collective::Flags),
    Allgather(collective::Flags),
    #[command(name = "reduce_scatter")]
    ReduceScatter(collective::Flags),
    Broadcast(collective::Flags),
    Alltoall(collective::Flags),
    Join(join::RankFlags),
    Latency(latency::Flags),
    Train(train::RankFlags),
    Ps(ps::RankFlags),
}

impl Bench {
    pub(crate) fn run(self) -> Result<(), String> {
        match self {
            Bench::Allreduce(flags) => collective::run(Operation::AllReduce, &flags),
            Bench::Allgather(flags) => collective::run(Operation::AllGather, &flags),
            Bench::ReduceScatter(flags) => collective::run(Operation::ReduceScatter, &flags),
            Bench::Broadcast(flags) => collective::run(Operation::Broadcast, &flags),
            Bench::Alltoall(flags) => collective::run(Operation::AllToAll, &flags),
            Bench::Latency(flags) => latency::run(&flags),
            Bench::Join(flags) => join::run(&flags),
            Bench::Input(flags) => input::run(&flags),
            Bench::Train(flags) => train::run(&flags),
            Bench::Accuracy(flags) => accuracy::run(&flags),
            Bench::Cuda(flags) => cuda::run(&flags),
            Bench::Ps(flags) => ps::run(&flags),
            Bench::Micro(flags) => micro::run(&flags),
            Bench::Rank { bench } => match bench {
                RankBench::Allreduce(flags) => collective::run_rank(Operation::AllReduce, &flags),
                RankBench::Allgather(flags) => collective::run_rank(Operation::AllGather, &flags),
                RankBench::ReduceScatter(flags) => collective::run_rank(Operation::ReduceScatter, &flags),
                RankBench::Broadcast(flags) => collective::run_rank(Operation::Broadcast, &flags),
                RankBench::Alltoall(flags) => collective::run_rank(Operation::AllToAll, &flags),
                RankBench::Join(_) => join::run_rank(),
                RankBench::Latency(flags) => latency::run_rank(&flags),
                RankBench::Train(flags) => train::run_rank(&flags),
                RankBench::Ps(flags) => ps::run_rank(&flags),
            },
        }
    }
}
