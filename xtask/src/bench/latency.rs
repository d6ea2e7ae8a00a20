//! `cargo xtask bench latency`: how long the shortest operations take, and how much longer the slow ones among them.

use std::time::{Duration, Instant};

use clap::Args;
use distribute::collectives::{ProcessGroup, Rank, ReduceOp};
use serde::{Deserialize, Serialize};

use super::processes::{self, Ranks};
use crate::error::text;

#[derive(Args, Clone)]
pub(crate) struct Flags {
    /// Transports: local (threads of one process), shm, tcp and grpc (processes)
    #[arg(long, value_delimiter = ',', default_value = "local,shm,tcp,grpc")]
    transport: Vec<String>,
    /// Rank counts
    #[arg(long, value_delimiter = ',', default_value = "2,4")]
    ranks: Vec<usize>,
    /// Measured repetitions
    #[arg(long, default_value_t = 20_000)]
    reps: usize,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// One operation's times in microseconds.
#[derive(Serialize, Deserialize)]
struct Row {
    bench: String,
    operation: String,
    transport: String,
    ranks: usize,
    min_us: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    max_us: f64,
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    if !flags.json {
        println!("# µs; pingpong is there and back, by send and recv; `allreduce` and `broadcast` move 4 bytes");
        println!(
            "{:>9} {:>5} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "transport", "ranks", "operation", "min", "p50", "p99", "p99.9", "max"
        );
    }
    for transport in &flags.transport {
        for ranks in &flags.ranks {
            if transport == "local" {
                for row in measure_local(flags, *ranks)? {
                    print(flags, &row)?;
                }
                continue;
            }
            let arguments: Vec<String> =
                ["bench", "rank", "latency", "--reps", &flags.reps.to_string()].map(str::to_owned).into();
            let ranks = Ranks { count: *ranks, transport, algorithm: "auto", threads: Some(1) };
            processes::run(&ranks, &arguments, Duration::from_secs(600), |line| {
                print(flags, &serde_json::from_str(line).map_err(|error| format!("{error}: {line}"))?)
            })?;
        }
    }
    Ok(())
}

/// One process of a measurement between processes; rank 0 prints.
pub(crate) fn run_rank(flags: &Flags) -> Result<(), String> {
    let group = ProcessGroup::from_env().map_err(text)?;
    for row in measure(flags, &group)? {
        if group.rank().0 == 0 {
            println!("{}", serde_json::to_string(&row).map_err(text)?);
        }
    }
    group.barrier().map_err(text)
}

fn print(flags: &Flags, row: &Row) -> Result<(), String> {
    if flags.json {
        println!("{}", serde_json::to_string(row).map_err(text)?);
        return Ok(());
    }
    let Row { operation, transport, ranks, min_us, p50_us, p99_us, p999_us, max_us, .. } = row;
    println!(
        "{transport:>9} {ranks:>5} {operation:>10} {min_us:>9.2} {p50_us:>9.2} {p99_us:>9.2} {p999_us:>9.2} \
        {max_us:>9.2}"
    );
    Ok(())
}

fn measure_local(flags: &Flags, ranks: usize) -> Result<Vec<Row>, String> {
    let groups = ProcessGroup::local(ranks).map_err(text)?;
    std::thread::scope(|scope| {
        let handles: Vec<_> = groups.iter().map(|group| scope.spawn(move || measure(flags, group))).collect();
        let mut all = Vec::new();
        for handle in handles {
            all.push(handle.join().map_err(|_| "a rank panicked".to_owned())??);
        }
        Ok(all.swap_remove(0))
    })
}

fn measure(flags: &Flags, group: &ProcessGroup) -> Result<Vec<Row>, String> {
    let (mut values, mut calls) = ([1.0f32], 0);
    let mut rows = vec![times(flags, group, "barrier", || group.barrier().map_err(text))?];
    rows.push(times(flags, group, "allreduce", || group.all_reduce(&mut values, ReduceOp::Max).map_err(text))?);
    let world = group.world_size() as u32;
    rows.push(times(flags, group, "broadcast", || {
        // Roots take turns, so that no rank runs ahead of the others.
        calls += 1;
        group.broadcast(&mut [0.0f32], Rank(calls % world)).map_err(text)
    })?);
    rows.push(times(flags, group, "pingpong", || match group.rank().0 {
        0 => group.send(&[1.0f32], Rank(1)).and_then(|()| group.recv(&mut [0.0f32], Rank(1))).map_err(text),
        1 => group.recv(&mut [0.0f32], Rank(0)).and_then(|()| group.send(&[1.0f32], Rank(0))).map_err(text),
        _ => Ok(()),
    })?);
    Ok(rows)
}

fn times(
    flags: &Flags,
    group: &ProcessGroup,
    operation: &str,
    mut call: impl FnMut() -> Result<(), String>,
) -> Result<Row, String> {
    for _ in 0..flags.reps.div_ceil(20) {
        call()?;
    }
    group.barrier().map_err(text)?;
    let mut micros = Vec::with_capacity(flags.reps);
    for _ in 0..flags.reps {
        let started = Instant::now();
        call()?;
        micros.push(started.elapsed().as_secs_f64() * 1e6);
    }
    micros.sort_by(f64::total_cmp);
    let share = |share: f64| micros[((micros.len() - 1) as f64 * share) as usize];
    Ok(Row {
        bench: "latency".to_owned(),
        operation: operation.to_owned(),
        transport: group.transport_name().to_owned(),
        ranks: group.world_size(),
        min_us: share(0.0),
        p50_us: share(0.5),
        p99_us: share(0.99),
        p999_us: share(0.999),
        max_us: share(1.0),
    })
}
