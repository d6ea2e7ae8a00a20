//! Processes that meet at a store instead of the coordination service.
#![expect(clippy::print_stdout, reason = "members say how they ended")]

use std::path::Path;
use std::time::{Duration, Instant};

use distribute_collectives::{ProcessGroup, Rank, ReduceOp};
use distribute_testkit::{Job, JobBuilder, Outcome, Signal};

const DEADLINE: Duration = Duration::from_secs(60);

/// Set for members.
const MEMBER: &str = "STORE_MEMBER";

/// The program that each process of the other tests runs.
#[test]
#[ignore = "a process that other tests start"]
fn member() {
    let Ok(scenario) = std::env::var(MEMBER) else { return };
    match act(&scenario) {
        Ok(()) => println!("outcome: fine"),
        Err(error) => println!("outcome: {error}"),
    }
}

fn act(scenario: &str) -> distribute_collectives::Result<()> {
    let group = ProcessGroup::from_env()?;
    let (me, ranks) = (group.rank().0, group.world_size() as u32);
    let sum = |group: &ProcessGroup, value: u32| {
        let mut values = [value; 1000];
        group.all_reduce(&mut values, ReduceOp::Sum)?;
        Ok::<u32, distribute_collectives::Error>(values[999])
    };
    assert_eq!(sum(&group, me)?, ranks * (ranks - 1) / 2);
    println!("ready");
    if scenario == "endless" {
        loop {
            sum(&group, 1)?;
        }
    }
    // Groups and pairs that connect later meet at the store, too.
    let half = group.split(Some(me % 2), me as i32)?.unwrap();
    assert_eq!(sum(&half, 1)? as usize, half.world_size());
    match me {
        0 => group.send(&[7u32], Rank(ranks - 1))?,
        rank if rank == ranks - 1 => {
            let mut received = [0u32];
            group.recv(&mut received, Rank(0))?;
            assert_eq!(received, [7]);
        }
        _ => {}
    }
    group.barrier()
}

/// Three processes with no address of a leader, that meet in a folder.
fn job(scenario: &str, folder: &Path, ranks: u32) -> JobBuilder {
    let place = move |rank: u32| {
        // Nothing listens at the leader's address.
        let place = [("RANK", rank.to_string()), ("WORLD_SIZE", "3".to_owned())];
        let leader = [("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", "1".to_owned())];
        place.into_iter().chain(leader).map(|(name, value)| (name.to_owned(), value)).collect()
    };
    let job = Job::of_test("stores::member").unwrap().tasks(ranks).task_env(place).env("DISTRIBUTE_JOB_ID", "stores-1");
    job.env(MEMBER, scenario).env("DISTRIBUTE_STORE", format!("file:{}", folder.display()))
}

#[track_caller]
fn said(outcome: &Outcome) -> &str {
    let found = outcome.stdout.lines().find_map(|line| line.strip_prefix("outcome: "));
    found.unwrap_or_else(|| panic!("it said nothing: {outcome:?}"))
}

#[test]
fn processes_meet_in_a_folder_again_and_again() {
    let folder = tempfile::tempdir().unwrap();
    // What one start has left in the folder does not mislead the next.
    for transport in ["auto", "tcp", "grpc"] {
        let job = job("all", folder.path(), 3).env("DISTRIBUTE_TRANSPORT", transport);
        for outcome in job.start().unwrap().wait_all(DEADLINE).unwrap() {
            assert_eq!(said(&outcome), "fine", "{transport}: {outcome:?}");
        }
    }
}

#[test]
fn a_killed_process_is_named_by_those_that_are_connected_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job("endless", folder.path(), 3).start().unwrap();
    (0..3).for_each(|rank| drop(job.wait_for_line(rank, "ready", DEADLINE).unwrap()));
    job.kill(1, Signal::KILL).unwrap();
    let killed = Instant::now();
    for rank in [0, 2] {
        let outcome = job.wait(rank, DEADLINE).unwrap();
        assert!(said(&outcome).contains("lost worker:1 during all_reduce #"), "{outcome:?}");
    }
    assert!(killed.elapsed() < Duration::from_secs(1), "{:?}", killed.elapsed());
}

#[test]
fn a_process_that_does_not_come_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let job = job("all", folder.path(), 2).env("DISTRIBUTE_TIMEOUT", "3");
    let outcomes = job.start().unwrap().wait_all(DEADLINE).unwrap();
    let text = said(&outcomes[0]);
    assert!(text.contains("worker:0: worker:2 did not join within 3 s"), "{text}");
    assert!(said(&outcomes[1]).contains("worker:2"), "{outcomes:?}");
}

#[test]
fn a_job_without_an_identity_does_not_meet_another_one_in_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let job = job("all", folder.path(), 1).env("DISTRIBUTE_JOB_ID", "");
    let outcome = job.start().unwrap().wait_all(DEADLINE).unwrap().remove(0);
    assert!(said(&outcome).contains("Set DISTRIBUTE_JOB_ID to the same name on every task"), "{outcome:?}");
}

#[test]
fn a_store_that_is_none_is_a_wrong_setting() {
    for (given, words) in [
        ("redis://host", "DISTRIBUTE_STORE \"redis://host\" is not known; give file:FOLDER"),
        ("file:", "DISTRIBUTE_STORE \"file:\" is not known; give file:FOLDER"),
        ("file:/proc/none", "DISTRIBUTE_STORE file:/proc/none: the store cannot be used: /proc/none: "),
    ] {
        let job = job("all", Path::new("unused"), 1).env("DISTRIBUTE_STORE", given);
        let outcome = job.start().unwrap().wait_all(DEADLINE).unwrap().remove(0);
        assert!(said(&outcome).contains(words), "{outcome:?}");
    }
}
