//! Processes that die, freeze, are late or make other calls: every surviving process gets an error in time that names
//! the cause, and no process hangs.
#![expect(clippy::print_stdout, reason = "members say how they ended")]

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use distribute_cluster::{Coordination, CoordinationOptions, FailureKind, Membership};
use distribute_collectives::{Error, Options, ProcessGroup, Rank, ReduceOp, TransportKind};
use distribute_testkit::{Job, JobBuilder, Outcome, Ports, Signal, skipped};

use crate::harness;

const DEADLINE: Duration = Duration::from_secs(60);

/// The variable that selects what the members of a job do after they have met.
const SCENARIO: &str = "FAULT_SCENARIO";

/// The program that each process of the other tests runs.
#[test]
#[ignore = "a process that other tests start"]
fn member() {
    let Ok(scenario) = std::env::var(SCENARIO) else { return };
    match meet(&scenario).and_then(|(coordination, group, options)| act(&scenario, &group, &coordination, &options)) {
        Ok(()) => println!("outcome: fine"),
        Err(error) => println!("outcome: {error}"),
    }
}

fn meet(scenario: &str) -> distribute_collectives::Result<(Arc<Coordination>, ProcessGroup, Options)> {
    let heartbeats = CoordinationOptions::from_env()?
        .heartbeat_interval(Duration::from_millis(200))
        .heartbeat_timeout(Duration::from_secs(2))
        .join_timeout(Duration::from_secs(if scenario == "too late" { 1 } else { 20 }));
    let membership = Membership::from_env()?.unwrap();
    if scenario.ends_with("late") && membership.rank == 1 {
        std::thread::sleep(Duration::from_millis(2500));
    }
    let coordination = Arc::new(Coordination::start(&membership, heartbeats)?);
    let timeout = if scenario == "absent" { Duration::from_secs(2) } else { Duration::from_secs(20) };
    let options = Options::from_env()?.timeout(timeout);
    let group = ProcessGroup::join(&coordination, 1, &options)?.remove(0);
    Ok((coordination, group, options))
}

fn act(
    scenario: &str,
    group: &ProcessGroup,
    coordination: &Arc<Coordination>,
    options: &Options,
) -> distribute_collectives::Result<()> {
    let me = group.rank().0;
    let sum = |group: &ProcessGroup| {
        let mut values = vec![1u32; 1000];
        group.all_reduce(&mut values, ReduceOp::Sum)?;
        assert!(values.iter().all(|value| *value as usize == group.world_size()));
        Ok(())
    };
    sum(group)?;
    println!("ready");
    match (scenario, me) {
        // Repeats until the fault occurs.
        ("endless", _) => loop {
            sum(group)?;
        },
        ("steps", _) => {
            for _ in 0..30 {
                sum(group)?;
                std::thread::sleep(Duration::from_millis(50));
            }
            Ok(())
        }
        ("shape", 1) => group.all_reduce(&mut [0.0f32; 7], ReduceOp::Sum),
        ("dtype", 1) => group.all_reduce(&mut [0i32; 8], ReduceOp::Sum),
        ("op", 1) => group.all_reduce(&mut [0.0f32; 8], ReduceOp::Max),
        ("kind", 1) => group.broadcast(&mut [0.0f32; 8], Rank(0)),
        ("shape" | "dtype" | "op" | "kind", _) => group.all_reduce(&mut [0.0f32; 8], ReduceOp::Sum),
        ("order", 1) => group.barrier().and_then(|()| sum(group)),
        ("order", _) => sum(group).and_then(|()| group.barrier()),
        ("leave", 1) => Ok(()),
        ("panic", 1) => panic!("as planned"),
        ("absent", 1) => {
            // The process is alive, but makes no call while the others wait.
            std::thread::sleep(Duration::from_secs(4));
            Ok(())
        }
        ("again", _) => {
            for round in 1..=3 {
                let name = "again".to_owned();
                let fresh = ProcessGroup::join(coordination, 1, &options.clone().name(name))?.remove(0);
                sum(&fresh)?;
                // An abort also ends messages that are on their way: the rank that aborts receives the last one.
                let aborts = round % 2;
                match me == aborts {
                    false => fresh.send(&[round], Rank(aborts))?,
                    true => fresh.recv(&mut [0u32], Rank(1 - aborts))?,
                }
                if me == aborts {
                    fresh.abort("to begin anew", FailureKind::Permanent);
                }
                let error = fresh.barrier().unwrap_err().to_string();
                assert!(error.contains("to begin anew"), "{error}");
            }
            sum(group)
        }
        ("hosts", _) => {
            println!("transport: {}", group.transport_name());
            for count in [5, 100_000] {
                let mut values: Vec<f32> = (0..count).map(|index| (me + index % 7) as f32).collect();
                group.all_reduce(&mut values, ReduceOp::Mean)?;
                let mean = (group.world_size() - 1) as f32 / 2.0;
                assert!((0..count).zip(&values).all(|(index, value)| *value == mean + (index % 7) as f32));
            }
            sum(&group.split(Some(me / 2), 0)?.unwrap())?;
            sum(&group.split(Some(0), 0)?.unwrap())?;
            let last = group.world_size() as u32 - 1;
            match me {
                0 => group.recv(&mut [0u32], Rank(last)),
                rank if rank == last => group.send(&[1u32], Rank(0)),
                _ => Ok(()),
            }
        }
        _ => sum(group),
    }
}

fn job(scenario: &str, tasks: u32, transport: &str) -> JobBuilder {
    job_with(scenario, tasks, transport, |_| Vec::new())
}

/// Starts members that consider themselves to be on different hosts.
fn job_on_hosts(tasks: u32, host: impl Fn(u32) -> u32 + 'static) -> JobBuilder {
    job_with("hosts", tasks, "auto", move |rank| vec![("DISTRIBUTE_HOST_ID", host(rank).to_string())])
}

fn job_with(
    scenario: &str,
    tasks: u32,
    transport: &str,
    more: impl Fn(u32) -> Vec<(&'static str, String)> + 'static,
) -> JobBuilder {
    let port = Ports::reserve(1).unwrap().release()[0];
    let place = move |rank: u32| {
        [("RANK", rank.to_string()), ("WORLD_SIZE", tasks.to_string()), ("MASTER_ADDR", "127.0.0.1".to_owned())]
            .into_iter()
            .chain([("DISTRIBUTE_PORT", port.to_string()), ("MASTER_PORT", "1".to_owned())])
            .chain(more(rank))
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    };
    let job = Job::of_test("faults::member").unwrap().tasks(tasks).task_env(place);
    job.env(SCENARIO, scenario).env("DISTRIBUTE_TRANSPORT", transport)
}

const TRANSPORTS: [&str; 3] = ["shm", "tcp", "grpc"];

/// Returns the outcome that a member printed.
#[track_caller]
fn said(outcome: &Outcome) -> &str {
    let found = outcome.stdout.lines().find_map(|line| line.strip_prefix("outcome: "));
    found.unwrap_or_else(|| panic!("it said nothing: {outcome:?}"))
}

fn run(scenario: &str, tasks: u32, transport: &str) -> Vec<Outcome> {
    job(scenario, tasks, transport).start().unwrap().wait_all(DEADLINE).unwrap()
}

#[test]
fn a_killed_process_is_an_error_on_the_others_at_once() {
    for transport in TRANSPORTS {
        for victim in [0, 2] {
            let mut job = job("endless", 3, transport).start().unwrap();
            (0..3).for_each(|rank| drop(job.wait_for_line(rank, "ready", DEADLINE).unwrap()));
            job.kill(victim, Signal::KILL).unwrap();
            let killed = Instant::now();
            for rank in (0..3).filter(|rank| *rank != victim) {
                let outcome = job.wait(rank, DEADLINE).unwrap();
                let error = said(&outcome);
                assert!(error.contains(&format!("lost worker:{victim} during all_reduce #")), "{transport}: {error}");
            }
            assert!(killed.elapsed() < Duration::from_secs(1), "{transport}: {:?}", killed.elapsed());
        }
    }
}

#[test]
fn a_process_that_is_stopped_for_a_moment_goes_on() {
    for transport in TRANSPORTS {
        let mut job = job("steps", 2, transport).start().unwrap();
        job.wait_for_line(1, "ready", DEADLINE).unwrap();
        job.kill(1, Signal::STOP).unwrap();
        // Less than the heartbeat timeout; the other process waits meanwhile.
        std::thread::sleep(Duration::from_millis(700));
        job.kill(1, Signal::CONT).unwrap();
        for outcome in job.wait_all(DEADLINE).unwrap() {
            assert_eq!(said(&outcome), "fine", "{transport}");
        }
    }
}

#[test]
fn a_frozen_process_is_named_when_its_heart_has_been_silent_for_too_long() {
    let mut job = job("endless", 2, "auto").start().unwrap();
    (0..2).for_each(|rank| drop(job.wait_for_line(rank, "ready", DEADLINE).unwrap()));
    job.kill(1, Signal::STOP).unwrap();
    let stopped = Instant::now();
    let outcome = job.wait(0, DEADLINE).unwrap();
    let error = said(&outcome);
    assert!(error.contains("lost worker:1 during all_reduce #"), "{error}");
    let elapsed = stopped.elapsed();
    assert!((Duration::from_secs(1)..Duration::from_secs(4)).contains(&elapsed), "{elapsed:?}");
}

#[test]
fn calls_that_differ_are_named_on_every_rank() {
    for transport in TRANSPORTS {
        for (scenario, words) in [
            ("shape", ["all_reduce #1 of 8 f32", "all_reduce #1 of 7 f32"]),
            ("dtype", ["all_reduce #1 of 8 f32", "all_reduce #1 of 8 i32"]),
            ("op", ["all_reduce #1 of 8 f32, sum", "all_reduce #1 of 8 f32, max"]),
            ("kind", ["all_reduce #1 of 8 f32", "broadcast #1 of 8 f32"]),
            ("order", ["all_reduce #1 of 1000 u32", "barrier #1"]),
        ] {
            for outcome in run(scenario, 2, transport) {
                let error = said(&outcome);
                assert!(words.iter().all(|word| error.contains(word)), "{transport} {scenario}: {error}");
                assert!(error.contains("worker:0") && error.contains("worker:1"), "{transport} {scenario}: {error}");
            }
        }
    }
}

#[test]
fn a_rank_that_leaves_or_panics_is_named() {
    for transport in TRANSPORTS {
        let outcomes = run("leave", 3, transport);
        for rank in [0, 2] {
            let error = said(&outcomes[rank]);
            assert!(error.contains("worker:1") && error.contains("all_reduce #1"), "{transport}: {error}");
        }
        let outcomes = run("panic", 3, transport);
        for rank in [0, 2] {
            assert!(said(&outcomes[rank]).contains("worker:1"), "{transport}: {outcomes:?}");
        }
    }
}

#[test]
fn a_rank_that_only_sends_to_one_that_left_or_aborted_is_told_at_once() {
    // More than the queues and sockets hold.
    const LEN: usize = 32 << 20;
    for kind in [TransportKind::Shm, TransportKind::Tcp, TransportKind::Grpc] {
        for aborts in [false, true] {
            let mut groups = harness::groups(2, 1, &harness::quick().transport(kind));
            let last = groups.remove(1);
            if aborts {
                last.abort("as planned", FailureKind::Permanent);
            }
            drop(last);
            std::thread::sleep(Duration::from_millis(300));
            let started = Instant::now();
            let error = groups[0].broadcast(&mut vec![0u8; LEN], Rank(0)).unwrap_err();
            match aborts {
                false => assert!(matches!(error, Error::PeerLeft { .. }), "{kind:?}: {error}"),
                true => assert!(error.to_string().contains("as planned"), "{kind:?}: {error}"),
            }
            assert!(started.elapsed() < Duration::from_secs(2), "{kind:?}: {:?}", started.elapsed());
        }
    }
}

#[test]
fn a_call_that_one_rank_never_makes_ends_at_the_deadline_with_its_name() {
    for transport in TRANSPORTS {
        let outcomes = run("absent", 3, transport);
        for rank in [0, 2] {
            let error = said(&outcomes[rank]);
            let named = error.contains("did not finish within 2.") && error.contains("waiting for worker:1");
            assert!(named && !error.contains("waiting for worker:0"), "{transport}: {error}");
        }
    }
}

#[test]
fn after_an_abort_groups_are_formed_anew() {
    for transport in TRANSPORTS {
        for outcome in run("again", 2, transport) {
            assert_eq!(said(&outcome), "fine", "{transport}");
        }
    }
}

#[test]
fn pairs_on_one_host_share_memory_and_the_others_use_sockets() {
    let mut job = job_on_hosts(5, |rank| rank % 2).start().unwrap();
    for outcome in job.wait_all(DEADLINE).unwrap() {
        assert_eq!(said(&outcome), "fine", "{outcome:?}");
        assert!(outcome.stdout.contains("transport: shm+tcp"), "{outcome:?}");
    }
    // A process that is alone on its host shares no memory.
    let mut job = job_on_hosts(2, |rank| rank).start().unwrap();
    assert!(job.wait_all(DEADLINE).unwrap().iter().all(|outcome| outcome.stdout.contains("transport: tcp")));
}

#[test]
fn sub_groups_and_pairs_are_connected_alike_on_all_ranks_where_one_is_alone_on_its_host() {
    let mut job = job_on_hosts(3, |rank| rank / 2).start().unwrap();
    for (outcome, transport) in job.wait_all(DEADLINE).unwrap().iter().zip(["shm+tcp", "shm+tcp", "tcp"]) {
        assert_eq!(said(outcome), "fine", "{outcome:?}");
        assert!(outcome.stdout.lines().any(|line| line == format!("transport: {transport}")), "{outcome:?}");
    }
}

#[test]
fn a_member_that_comes_late_is_waited_for_and_one_that_comes_too_late_is_named() {
    for outcome in run("late", 3, "auto") {
        assert_eq!(said(&outcome), "fine");
    }
    let outcomes = run("too late", 3, "auto");
    for rank in [0, 2] {
        let error = said(&outcomes[rank]);
        assert!(error.contains("worker:1") && error.contains("did not join within"), "{error}");
    }
    assert!(said(&outcomes[1]).contains("worker:0"), "{outcomes:?}");
}

#[test]
fn a_rank_that_two_processes_claim_is_named_and_the_first_goes_on() {
    // The third process claims to be the second of two.
    let claim = |rank: u32| vec![("RANK", rank.min(1).to_string()), ("WORLD_SIZE", "2".to_owned())];
    let outcomes = job_with("steps", 3, "auto", claim).start().unwrap().wait_all(DEADLINE).unwrap();
    assert_eq!(said(&outcomes[0]), "fine");
    let of_claimants = [said(&outcomes[1]), said(&outcomes[2])];
    assert!(of_claimants.contains(&"fine"), "{of_claimants:?}");
    let refused = of_claimants.into_iter().find(|said| *said != "fine").unwrap();
    assert!(refused.contains("worker:1") && refused.contains("index of its own"), "{refused}");
}

#[test]
fn the_interface_can_be_chosen() {
    let on =
        |interface: &'static str| job_with("", 2, "tcp", move |_| vec![("DISTRIBUTE_INTERFACE", interface.into())]);
    // No process has the addresses of the description, but for the one at which they join.
    let port = Ports::reserve(1).unwrap().release()[0];
    let config = move |rank: u32| {
        let workers = format!(r#"["127.0.0.1:{port}", "192.0.2.1:1", "192.0.2.2:1"]"#);
        let task = format!(r#"{{"type": "worker", "index": {rank}}}"#);
        vec![("TF_CONFIG".to_owned(), format!(r#"{{"cluster": {{"worker": {workers}}}, "task": {task}}}"#))]
    };
    let job = Job::of_test("faults::member").unwrap().tasks(3).task_env(config).env(SCENARIO, "");
    let job = job.env("DISTRIBUTE_TRANSPORT", "tcp").env("DISTRIBUTE_TIMEOUT", "10").env("DISTRIBUTE_INTERFACE", "=lo");
    for outcome in job.start().unwrap().wait_all(DEADLINE).unwrap() {
        assert_eq!(said(&outcome), "fine", "{outcome:?}");
    }
    for outcome in on("nowhere").start().unwrap().wait_all(DEADLINE).unwrap() {
        assert!(said(&outcome).contains("DISTRIBUTE_INTERFACE"), "{outcome:?}");
    }
}

/// Set if the test runs with a small /dev/shm.
const SMALL_SHM: &str = "FAULT_SMALL_SHM";

#[test]
fn shared_memory_takes_no_room_in_dev_shm() {
    if std::env::var(SMALL_SHM).is_ok() {
        for outcome in run("hosts", 2, "shm") {
            assert_eq!(said(&outcome), "fine", "{outcome:?}");
        }
        return;
    }
    if !Command::new("unshare").args(["-rm", "true"]).status().is_ok_and(|status| status.success()) {
        return skipped("this system does not let its users make namespaces");
    }
    let script = "mount -t tmpfs -o size=64k tmpfs /dev/shm && exec \"$0\" shared_memory_takes_no_room --nocapture";
    let program = std::env::current_exe().unwrap();
    let within = Command::new("unshare").args(["-rm", "sh", "-c", script]).arg(program).env(SMALL_SHM, "1").output();
    let within = within.unwrap();
    assert!(within.status.success(), "{}", String::from_utf8_lossy(&within.stdout));
}

#[test]
fn flight_records_of_a_failure_name_the_culprit() {
    let folder = tempfile::tempdir().unwrap();
    let job = job("order", 2, "auto").env("DISTRIBUTE_FLIGHT_DIR", folder.path().to_str().unwrap());
    job.start().unwrap().wait_all(DEADLINE).unwrap();
    let records = distribute_collectives::FlightRecord::read_all(folder.path()).unwrap();
    assert_eq!(records.len(), 2);
    let text = distribute_collectives::explain(&records);
    assert!(text.contains("verdict: the calls part at #1: worker:0 calls all_reduce #1"), "{text}");
}
