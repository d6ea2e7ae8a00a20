//! `cargo xtask simulate`: all-reduce on clusters that are not at hand, in virtual time. With `--seeds`, the simulators
//! of checkpoints, of coordination and of generations, which look for faults.
//!
//! The very schedules that run between processes are executed under a model: a message takes a latency, and the time of
//! its bytes on the links that it uses (each rank's own inside a host; one network card per host, shared by its ranks,
//! between hosts); combining takes time per byte. Sends and receives of a step overlap; a rank's steps follow each
//! other.

mod check;
pub(crate) mod goodput;
mod network;
mod seeds;

use clap::Args;
use distribute::collectives::Algorithm;
use distribute::collectives::schedule::{Link, Schedule, hierarchical_all_reduce};

use self::network::{Network, Topology};
use crate::bench::collective::parse_size;

#[derive(Args)]
pub(crate) struct Flags {
    /// The operation to simulate; there is all-reduce
    #[arg(default_value = "allreduce")]
    operation: String,
    /// Rank counts: one, several (8,64), or a range that doubles (8..16384)
    #[arg(long, default_value = "8..1024")]
    ranks: String,
    /// Bytes per rank
    #[arg(long, value_delimiter = ',', default_value = "4,64K,1M,64M,1G")]
    sizes: Vec<String>,
    /// Ranks of one host
    #[arg(long, default_value_t = 8)]
    per_host: usize,
    /// Latency between hosts, in µs
    #[arg(long, default_value_t = 5.0)]
    latency_us: f64,
    /// Rate of a host's network card each way, in GB/s
    #[arg(long, default_value_t = 25.0)]
    nic_gb_s: f64,
    /// How many times less the network carries in all than its cards together
    #[arg(long, default_value_t = 1.0)]
    oversubscription: f64,
    /// Latency inside a host, in µs
    #[arg(long, default_value_t = Link::SHARED_MEMORY.latency_s * 1e6)]
    local_latency_us: f64,
    /// Rate inside a host each way, in GB/s
    #[arg(long, default_value_t = 1e-9 / Link::SHARED_MEMORY.per_byte_s)]
    local_gb_s: f64,
    /// Rate of combining, in GB/s
    #[arg(long, default_value_t = 1e-9 / Link::SHARED_MEMORY.per_combined_byte_s)]
    combine_gb_s: f64,
    /// A rank that is slower, as RANK,FACTOR
    #[arg(long)]
    straggler: Option<String>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
    /// Compares with real runs of 2 to 8 processes on this machine, over shm, tcp or grpc
    #[arg(long, value_name = "TRANSPORT")]
    check: Option<String>,
    /// Instead, looks for violations of invariants in this many scenarios of each simulator: crashes, lost writes,
    /// strangers, cut networks
    #[arg(long, value_name = "COUNT")]
    seeds: Option<u64>,
    /// The first seed
    #[arg(long, default_value_t = 0, requires = "seeds")]
    first: u64,
    /// One of the simulators alone
    #[arg(long, requires = "seeds")]
    only: Option<seeds::Simulator>,
}

/// Above this many messages the closed formula takes the place of the simulation.
const MOST_MESSAGES: usize = 1_000_000;

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    if flags.operation != "allreduce" {
        return Err(format!("{:?} cannot be simulated; give `allreduce`", flags.operation));
    }
    if let Some(count) = flags.seeds {
        return seeds::run(count, flags.first, flags.only);
    }
    if let Some(transport) = &flags.check {
        return check::run(transport);
    }
    let sizes = flags.sizes.iter().map(|size| parse_size(size)).collect::<Result<Vec<_>, _>>()?;
    let straggler = flags.straggler.as_deref().map(parse_straggler).transpose()?;
    for ranks in parse_ranks(&flags.ranks)? {
        let topology = Topology {
            ranks,
            per_host: flags.per_host.clamp(1, ranks),
            across: Link {
                latency_s: flags.latency_us * 1e-6,
                per_byte_s: flags.oversubscription / (flags.nic_gb_s * 1e9),
                per_combined_byte_s: 1e-9 / flags.combine_gb_s,
            },
            inside: Link {
                latency_s: flags.local_latency_us * 1e-6,
                per_byte_s: 1e-9 / flags.local_gb_s,
                per_combined_byte_s: 1e-9 / flags.combine_gb_s,
            },
            straggler,
        };
        if !flags.json {
            let hosts = ranks.div_ceil(topology.per_host);
            println!("{ranks} ranks on {hosts} hosts; µs, and bus bandwidth in GB/s; ~ by formula; * fastest");
            let names = Contender::ALL.map(|contender| format!("{:>25}", contender.name()));
            println!("{:>12}{}", "size", names.concat());
        }
        let mut last: Option<usize> = None;
        for bytes in &sizes {
            let times = Contender::ALL.map(|contender| contender.time(*bytes, &topology));
            let best = fastest(&times);
            if let Some(before) = last.filter(|before| *before != best && !flags.json) {
                println!("{:>12}  {} overtakes {}", "", Contender::ALL[best].name(), Contender::ALL[before].name());
            }
            last = Some(best);
            show(flags, ranks, *bytes, &times, best)?;
        }
    }
    Ok(())
}

fn show(flags: &Flags, ranks: usize, bytes: usize, times: &[Time], best: usize) -> Result<(), String> {
    let busbw = |seconds: f64| bytes as f64 / seconds / 1e9 * 2.0 * (ranks as f64 - 1.0) / ranks as f64;
    if flags.json {
        for (contender, time) in Contender::ALL.iter().zip(times) {
            let row = serde_json::json!({
                "bench": "simulate", "op": "allreduce", "algorithm": contender.name(), "ranks": ranks, "bytes": bytes,
                "time_us": time.seconds * 1e6, "busbw_gb_s": busbw(time.seconds), "simulated": time.simulated,
            });
            println!("{}", serde_json::to_string(&row).map_err(|error| error.to_string())?);
        }
        return Ok(());
    }
    let cells: Vec<String> = times
        .iter()
        .enumerate()
        .map(|(index, time)| {
            let marks = format!("{}{}", if time.simulated { "" } else { "~" }, if index == best { "*" } else { "" });
            format!("{:>25}", format!("{marks}{:.1} {:>7.2}", time.seconds * 1e6, busbw(time.seconds)))
        })
        .collect();
    println!("{bytes:>12}{}", cells.concat());
    Ok(())
}

fn fastest(times: &[Time]) -> usize {
    let mut order: Vec<usize> = (0..times.len()).collect();
    order.sort_by(|a, b| times[*a].seconds.total_cmp(&times[*b].seconds));
    order.first().copied().unwrap_or(0)
}

#[derive(Clone, Copy)]
struct Time {
    seconds: f64,
    simulated: bool,
}

#[derive(Clone, Copy)]
enum Contender {
    Flat(usize),
    Hierarchical,
}

impl Contender {
    const ALL: [Contender; 6] = [
        Contender::Flat(0),
        Contender::Flat(1),
        Contender::Flat(2),
        Contender::Flat(3),
        Contender::Flat(4),
        Contender::Hierarchical,
    ];

    fn name(&self) -> String {
        match self {
            Contender::Flat(index) => Algorithm::BUILT_IN[*index].name().to_owned(),
            Contender::Hierarchical => "hierarchical".to_owned(),
        }
    }

    fn time(self, bytes: usize, topology: &Topology) -> Time {
        let hosts: Vec<usize> = (0..topology.ranks).map(|rank| rank / topology.per_host).collect();
        let schedule = |rank: usize| -> Schedule {
            match self {
                Contender::Flat(index) => Algorithm::BUILT_IN[index].schedule(rank, topology.ranks, bytes),
                Contender::Hierarchical => hierarchical_all_reduce(rank, &hosts, bytes),
            }
        };
        // The first rank leads its host, so no other rank has more steps.
        let steps = schedule(0).len();
        if steps.saturating_mul(topology.ranks) > MOST_MESSAGES {
            return Time { seconds: self.formula(bytes, topology), simulated: false };
        }
        Time { seconds: Network::new(topology).run(schedule), simulated: true }
    }
}

impl Contender {
    /// The result of the simulation for equal ranks: a ring crosses hosts once for each host, whatever its ranks.
    fn formula(self, bytes: usize, topology: &Topology) -> f64 {
        let (across, inside, per_host) = (&topology.across, &topology.inside, topology.per_host as f64);
        let hosts = topology.ranks.div_ceil(topology.per_host);
        let predict =
            |algorithm: &Algorithm, ranks, link: &Link| algorithm.predict(bytes, ranks, link).unwrap_or(f64::NAN);
        match self {
            Contender::Flat(0) => {
                let latency_s = (across.latency_s + (per_host - 1.0) * inside.latency_s) / per_host;
                predict(&Algorithm::Ring, topology.ranks, &Link { latency_s, ..*across })
            }
            Contender::Flat(index) => predict(&Algorithm::BUILT_IN[index], topology.ranks, across),
            Contender::Hierarchical => {
                predict(&Algorithm::Ring, hosts, across) + predict(&Algorithm::Tree, topology.per_host, inside)
            }
        }
    }
}

/// `8`, `8,64` or `8..16384`, which doubles.
fn parse_ranks(text: &str) -> Result<Vec<usize>, String> {
    let number = |text: &str| match text.trim().parse::<usize>() {
        Ok(ranks @ 1..=1_000_000) => Ok(ranks),
        _ => {
            Err(format!("--ranks: {text:?} is not a number of ranks; give one such as 8, several as 8,64, or 8..1024"))
        }
    };
    match text.split_once("..") {
        Some((first, last)) => {
            let (first, last) = (number(first)?, number(last)?);
            Ok(std::iter::successors(Some(first), |ranks| Some(ranks * 2)).take_while(|ranks| *ranks <= last).collect())
        }
        None => text.split(',').map(number).collect(),
    }
}

fn parse_straggler(text: &str) -> Result<(usize, f64), String> {
    let wrong =
        || format!("--straggler: {text:?} is not RANK,FACTOR, such as 3,4 for a rank 3 that is four times slower");
    let (rank, factor) = text.split_once(',').ok_or_else(wrong)?;
    let factor = factor.trim().parse::<f64>().ok().filter(|factor| *factor >= 1.0).ok_or_else(wrong)?;
    Ok((rank.trim().parse().map_err(|_| wrong())?, factor))
}
