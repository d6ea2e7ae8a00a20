//! `cargo xtask bench join`: how long tasks take to join a job's coordination service and to form a group, all at once.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use distribute::cluster::{Coordination, CoordinationOptions, JobId, Membership};
use distribute::collectives::ProcessGroup;
use serde::{Deserialize, Serialize};

use super::processes::{self, Ranks};
use crate::error::text;

#[derive(Args, Clone)]
pub(crate) struct Flags {
    /// Numbers of tasks that join the service, as threads of this process
    #[arg(long, value_delimiter = ',', default_value = "16,64,256,1024")]
    tasks: Vec<u32>,
    /// Numbers of processes that form a group over TCP
    #[arg(long, value_delimiter = ',', default_value = "16,64")]
    processes: Vec<usize>,
    /// Repetitions, of which the median is shown
    #[arg(long, default_value_t = 3)]
    reps: usize,
}

#[derive(Args, Clone)]
pub(crate) struct RankFlags {}

/// The times of one rank, in µs since 1970.
#[derive(Serialize, Deserialize)]
struct Times {
    last_start: u64,
    last_end: u64,
}

const DEADLINE: Duration = Duration::from_secs(120);

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    println!(
        "# service: all tasks have joined and passed a barrier; messages and bytes that the leader received for it"
    );
    println!("{:>6} {:>10} {:>10} {:>9} {:>10}", "tasks", "join ms", "per task", "messages", "KiB");
    for tasks in &flags.tasks {
        let mut millis = Vec::new();
        for _ in 0..flags.reps.max(1) {
            millis.push(join(*tasks, None)?.as_secs_f64() * 1e3);
        }
        millis.sort_by(f64::total_cmp);
        let median = millis[millis.len() / 2];
        let counts = Arc::new(Counts::default());
        join(*tasks, Some(Arc::clone(&counts)))?;
        let (messages, bytes) = (counts.messages.load(Ordering::Relaxed), counts.bytes.load(Ordering::Relaxed));
        let each = median / f64::from(*tasks);
        println!("{tasks:>6} {median:>10.1} {each:>10.3} {messages:>9} {:>10.1}", bytes as f64 / 1024.0);
    }
    if !flags.processes.is_empty() {
        println!(
            "# group: from the start of the last process to the end of its first barrier in the last one, over TCP"
        );
        println!("{:>6} {:>10} {:>10}", "ranks", "ms", "per rank");
    }
    for ranks in &flags.processes {
        let mut millis = Vec::new();
        for _ in 0..flags.reps.max(1) {
            let arguments = ["bench", "rank", "join"].map(str::to_owned);
            let ranks = Ranks { count: *ranks, transport: "tcp", algorithm: "auto", threads: Some(1) };
            processes::run(&ranks, &arguments, DEADLINE, |line| {
                let times: Times = serde_json::from_str(line).map_err(|error| format!("{error}: {line}"))?;
                millis.push(times.last_end.saturating_sub(times.last_start) as f64 / 1e3);
                Ok(())
            })?;
        }
        millis.sort_by(f64::total_cmp);
        let median = millis.get(millis.len() / 2).copied().ok_or("rank 0 printed nothing")?;
        println!("{ranks:>6} {median:>10.1} {:>10.3}", median / *ranks as f64);
    }
    Ok(())
}

/// One process of a group; rank 0 prints.
pub(crate) fn run_rank() -> Result<(), String> {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map(|time| time.as_micros() as u64).map_err(text);
    let begun = now()?;
    let group = ProcessGroup::from_env().map_err(text)?;
    group.barrier().map_err(text)?;
    let own = [begun, now()?];
    let mut all = vec![0; 2 * group.world_size()];
    group.all_gather(&own, &mut all).map_err(text)?;
    let last = |at: usize| all.iter().skip(at).step_by(2).max().copied().unwrap_or_default();
    if group.rank().0 == 0 {
        println!("{}", serde_json::to_string(&Times { last_start: last(0), last_end: last(1) }).map_err(text)?);
    }
    group.barrier().map_err(text)
}

/// Lets `tasks` threads join one job at once and pass a barrier; returns how long that took. Where messages are to be
/// counted, the members reach the leader through a relay.
fn join(tasks: u32, counts: Option<Arc<Counts>>) -> Result<Duration, String> {
    let listener = Arc::new(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(text)?);
    let leader = listener.local_addr().map_err(text)?;
    let for_members = match counts {
        Some(counts) => relay(leader, counts)?,
        None => leader,
    };
    let job_id = Some(JobId::random().map_err(text)?);
    let begun = Instant::now();
    let all = thread::scope(|scope| {
        let member = |rank: u32| {
            let is_leader = rank == 0;
            let address = if is_leader { leader } else { for_members };
            let mut options = CoordinationOptions::default();
            options.listener = is_leader.then(|| Arc::clone(&listener));
            options.job_id = job_id.clone();
            options.join_timeout = DEADLINE;
            move || -> Result<Coordination, String> {
                let membership = Membership::new(rank, tasks, address.to_string()).map_err(text)?;
                let member = Coordination::start(&membership, options).map_err(text)?;
                member.barrier("joined", DEADLINE).map_err(text)?;
                Ok(member)
            }
        };
        let threads = (0..tasks).map(|rank| thread::Builder::new().stack_size(STACK).spawn_scoped(scope, member(rank)));
        let threads = threads.collect::<Result<Vec<_>, _>>().map_err(text)?;
        let joined = threads.into_iter().map(|thread| thread.join().map_err(|_| "a task panicked".to_owned())?);
        joined.collect::<Result<Vec<_>, String>>()
    })?;
    let took = begun.elapsed();
    drop(all);
    Ok(took)
}

/// Messages that the leader has received.
#[derive(Default)]
struct Counts {
    messages: AtomicU64,
    bytes: AtomicU64,
}

/// Passes connections on to the leader, and counts what goes there. Returns the address to connect to.
fn relay(leader: SocketAddr, counts: Arc<Counts>) -> Result<SocketAddr, String> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(text)?;
    let address = listener.local_addr().map_err(text)?;
    let accept = move || {
        // Ends with the process.
        for member in listener.incoming().flatten() {
            let Ok(onward) = TcpStream::connect(leader) else { continue };
            let (Ok(back), Ok(member_back)) = (onward.try_clone(), member.try_clone()) else { continue };
            let counts = Arc::clone(&counts);
            // A relay that cannot be started closes the connection, and the member connects again.
            let _ = thread::Builder::new().stack_size(STACK).spawn(move || pass_on(member, onward, &counts));
            let _ = thread::Builder::new().stack_size(STACK).spawn(move || {
                let _ = std::io::copy(&mut &back, &mut &member_back);
                let _ = member_back.shutdown(Shutdown::Write);
            });
        }
    };
    thread::Builder::new().spawn(accept).map_err(text)?;
    Ok(address)
}

/// Passes on what a member sends: a preamble of 8 bytes, then messages, each after its length in 4 bytes.
fn pass_on(mut member: TcpStream, mut leader: TcpStream, counts: &Counts) {
    let mut message = vec![0; 8];
    let mut preamble = true;
    loop {
        if member.read_exact(&mut message[..if preamble { 8 } else { 4 }]).is_err() {
            let _ = leader.shutdown(Shutdown::Write);
            return;
        }
        if !preamble {
            let mut length = [0; 4];
            length.copy_from_slice(&message[..4]);
            message.resize(4 + u32::from_be_bytes(length) as usize, 0);
            if member.read_exact(&mut message[4..]).is_err() {
                return;
            }
            counts.messages.fetch_add(1, Ordering::Relaxed);
        }
        counts.bytes.fetch_add(message.len() as u64, Ordering::Relaxed);
        if leader.write_all(&message).is_err() {
            return;
        }
        message.resize(4, 0);
        preamble = false;
    }
}

/// Enough for a task; a thousand of them fit into little memory.
const STACK: usize = 256 << 10;
