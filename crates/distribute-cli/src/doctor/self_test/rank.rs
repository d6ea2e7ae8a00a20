//! One process of the job.

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use distribute_cluster::{Coordination, CoordinationOptions, JobSecret, Membership};
use distribute_collectives::{Options, ProcessGroup, ReduceOp, TransportKind};
use parking_lot::Mutex;

use super::{Measured, Speed};
use crate::outcome::INFRASTRUCTURE;

/// Joins the job and reduces over each transport; rank 0 prints the results.
pub(crate) fn rank(transports: &[TransportKind]) -> ExitCode {
    let doing = Arc::new(Mutex::new("meeting the others".to_owned()));
    end_in_time(&doing);
    match reduce(transports, &doing) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{}: {error}", doing.lock());
            ExitCode::from(INFRASTRUCTURE as u8)
        }
    }
}

/// Ends this process when it takes too long, whatever it waits for.
fn end_in_time(doing: &Arc<Mutex<String>>) {
    let doing = Arc::clone(doing);
    thread::spawn(move || {
        thread::sleep(LIFE);
        let doing = doing.lock().clone();
        eprintln!("{doing}: not done after {} s", LIFE.as_secs_f64());
        std::process::exit(INFRASTRUCTURE);
    });
}

/// Returns whether every transport passed on every rank.
fn reduce(transports: &[TransportKind], doing: &Mutex<String>) -> Result<bool, Box<dyn Error>> {
    let membership = Membership::from_env()?.ok_or("the launcher has described no job")?;
    let secret = JobSecret::from_env()?.ok_or("the launcher has given the job no secret")?;
    let options = CoordinationOptions::default().join_timeout(STEP).secret(secret);
    let coordination = Arc::new(Coordination::start(&membership, options)?);
    let mut all_passed = true;
    for kind in transports {
        *doing.lock() = format!("all-reduce over {}", kind.name());
        let own = measure(&coordination, *kind).map_err(|error| error.to_string());
        // A failure on one rank may look like a success on others.
        let all = coordination.exchange(&format!("outcome/{}", kind.name()), &serde_json::to_vec(&own)?, STEP)?;
        let mut outcome = own;
        for other in &all {
            let other: Result<Speed, String> = serde_json::from_slice(other)?;
            outcome = outcome.and_then(|speed| other.map(|_| speed));
        }
        all_passed &= outcome.is_ok();
        if membership.is_leader() {
            let line = serde_json::to_string(&Measured { transport: kind.name().to_owned(), outcome })?;
            writeln!(std::io::stdout(), "{line}")?;
        }
    }
    Ok(all_passed)
}

fn measure(coordination: &Arc<Coordination>, kind: TransportKind) -> Result<Speed, Box<dyn Error>> {
    let options = Options::default().name(kind.name().to_owned()).transport(kind).timeout(STEP);
    let group = ProcessGroup::join(coordination, 1, &options)?.pop().ok_or("the group has no rank here")?;
    verify(&group)?;
    let ranks = group.world_size() as f64;
    let mut large = vec![0_f32; 1 << 20];
    let large_s = seconds(&group, &mut large, 2, 0.25)?;
    let latency_s = seconds(&group, &mut [0.0; 2], 20, 0.05)?;
    let bus_bytes_per_s = 2.0 * (ranks - 1.0) / ranks * size_of_val(large.as_slice()) as f64 / large_s;
    Ok(Speed { bus_bytes_per_s, latency_s })
}

/// Adds values whose sums are exact, and checks each of them.
fn verify(group: &ProcessGroup) -> Result<(), Box<dyn Error>> {
    let value = |rank: usize, at: usize| ((at * 7 + rank * 13) % 1009) as f32;
    let rank = group.rank().0 as usize;
    // Not a multiple of any block length, which could hide a wrong one.
    let len = (1 << 20) + 3;
    let mut values: Vec<f32> = (0..len).map(|at| value(rank, at)).collect();
    group.all_reduce(&mut values, ReduceOp::Sum)?;
    let sum = |at| (0..group.world_size()).map(|rank| value(rank, at)).sum::<f32>();
    match values.iter().enumerate().filter(|(at, value)| **value != sum(*at)).count() {
        0 => Ok(()),
        wrong => Err(format!("{wrong} of {len} sums are wrong on rank {rank}, which is an error in distribute").into()),
    }
}

/// Measures the seconds of one all-reduce in the fastest of a few batches, which together take about `budget_s`, since
/// other programs may be using the machine.
fn seconds(group: &ProcessGroup, values: &mut [f32], warm_up: u32, budget_s: f64) -> Result<f64, Box<dyn Error>> {
    let mut time = |rounds: u32| -> Result<f64, Box<dyn Error>> {
        group.barrier()?;
        let begun = Instant::now();
        for _ in 0..rounds {
            group.all_reduce(values, ReduceOp::Sum)?;
        }
        Ok(begun.elapsed().as_secs_f64() / f64::from(rounds))
    };
    // All ranks must call it equally often.
    let mut rough = [time(warm_up)?];
    group.all_reduce(&mut rough, ReduceOp::Max)?;
    let affordable = budget_s / rough[0].max(1e-7);
    let batches = affordable.clamp(1.0, BATCHES) as u32;
    let rounds = (affordable / BATCHES).clamp(1.0, 2000.0) as u32;
    (0..batches).try_fold(f64::INFINITY, |fastest, _| Ok(fastest.min(time(rounds)?)))
}

const BATCHES: f64 = 5.0;

/// Time limit of joining, and of one operation.
const STEP: Duration = Duration::from_secs(4);

/// Time limit of the whole process.
const LIFE: Duration = Duration::from_millis(7500);
