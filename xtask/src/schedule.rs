//! `cargo xtask schedule`: what each rank does in an algorithm, as text.

use clap::Args;
use distribute::collectives::Algorithm;
use distribute::collectives::schedule::{
    Action, Schedule, Transfer, binomial_broadcast, binomial_reduce, dissemination_all_gather, dissemination_barrier,
    hierarchical_all_reduce, ring_all_gather, ring_reduce_scatter,
};

#[derive(Args)]
pub(crate) struct Flags {
    /// ring, recursive-doubling, halving-doubling, tree, double-tree, hierarchical, ring-reduce-scatter,
    /// ring-all-gather, dissemination-all-gather, broadcast, reduce or barrier
    algorithm: String,
    /// Number of ranks
    #[arg(long, default_value_t = 4)]
    ranks: usize,
    /// Number of elements; one per rank by default
    #[arg(long)]
    count: Option<usize>,
    /// Ranks of one host, for hierarchical
    #[arg(long, default_value_t = 2)]
    per_host: usize,
    /// Only what this rank does
    #[arg(long)]
    rank: Option<usize>,
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let ranks = flags.ranks.max(1);
    let count = flags.count.unwrap_or(ranks);
    let hosts: Vec<usize> = (0..ranks).map(|rank| rank / flags.per_host.max(1)).collect();
    let of_rank = |rank: usize| -> Result<Schedule, String> {
        Ok(match flags.algorithm.as_str() {
            "hierarchical" => hierarchical_all_reduce(rank, &hosts, count),
            "ring-reduce-scatter" => ring_reduce_scatter(rank, ranks, count),
            "ring-all-gather" => ring_all_gather(rank, ranks, count),
            "dissemination-all-gather" => dissemination_all_gather(rank, ranks, count),
            "broadcast" => binomial_broadcast(rank, ranks, 0, count),
            "reduce" => binomial_reduce(rank, ranks, 0, count),
            "barrier" => dissemination_barrier(rank, ranks),
            name => name.parse::<Algorithm>().map_err(|error| error.to_string())?.schedule(rank, ranks, count),
        })
    };
    let schedules = (0..ranks).map(of_rank).collect::<Result<Vec<_>, _>>()?;
    println!("{} · {ranks} ranks · {count} elements      + combines, = replaces, ✓ final there", flags.algorithm);
    let steps = schedules.iter().map(Vec::len).max().unwrap_or(0);
    for step in 0..steps {
        println!("step {}", step + 1);
        for (rank, schedule) in schedules.iter().enumerate() {
            let Some(step) = schedule.get(step) else { continue };
            if flags.rank.is_some_and(|only| only != rank) {
                continue;
            }
            let show = |arrow: &str, transfers: &[Transfer]| -> Vec<String> {
                transfers
                    .iter()
                    .map(|it| format!("{arrow} {} {}{}", it.peer, mark(it.action), range(&it.range)))
                    .collect()
            };
            let done = step.complete.as_ref().map(|it| format!("✓ {}", range(it)));
            let all = [show("→", &step.sends), show("←", &step.receives)].concat();
            let line: Vec<String> = all.into_iter().chain(done).map(|text| format!("{text:<16}")).collect();
            if !line.is_empty() {
                println!("  {rank:>3}  {}", line.join("  ").trim_end());
            }
        }
    }
    let sent = |schedule: &Schedule| -> usize {
        schedule.iter().flat_map(|step| &step.sends).map(|send| send.range.len()).sum()
    };
    let most = schedules.iter().map(sent).max().unwrap_or(0);
    println!(
        "{steps} steps; a rank sends at most {most} elements, {:.2} of {count}",
        most as f64 / count.max(1) as f64
    );
    Ok(())
}

fn mark(action: Action) -> char {
    match action {
        Action::Combine => '+',
        Action::Copy => '=',
    }
}

fn range(range: &std::ops::Range<usize>) -> String {
    match range.len() {
        0 => "nothing".to_owned(),
        1 => range.start.to_string(),
        _ => format!("{}..{}", range.start, range.end),
    }
}
