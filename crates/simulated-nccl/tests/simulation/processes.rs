//! Ranks that are processes: they die, leave early, and fail as the environment requests.

use std::path::Path;
use std::time::{Duration, Instant};
use std::{env, fs, ptr, thread};

use distribute_testkit::{Job, Signal};
use nccl_sys::{Code, Library, UniqueId};

use crate::support::{LIMIT, abort, code, destroy, join, nccl, state, state_after, sum};

/// Selects what a child does.
const PART: &str = "SIMULATED_NCCL_TEST_PART";
const RANK: &str = "SIMULATED_NCCL_TEST_RANK";
const ID: &str = "SIMULATED_NCCL_TEST_ID";

/// Starts three children that run a part.
fn three(part: &str, id: &Path) -> Job {
    let job = Job::of_test("processes::child").unwrap();
    let job = job.tasks(3).env(PART, part).env(ID, id.to_string_lossy());
    job.task_env(|rank| vec![(RANK.into(), rank.to_string())]).start().unwrap()
}

#[test]
fn the_end_of_a_rank_reaches_the_others() {
    // Rank 0 runs the hub.
    for (victim, others) in [(1, [0, 2]), (0, [1, 2])] {
        let folder = tempfile::tempdir().unwrap();
        let mut job = three("watch", &folder.path().join("id"));
        for rank in 0..3 {
            job.wait_for_line(rank, "added up", LIMIT).unwrap();
        }
        job.kill(victim, Signal::KILL).unwrap();
        for rank in others {
            let line = job.wait_for_line(rank, "state:", LIMIT).unwrap();
            assert_eq!(line, "state: Code(6)");
        }
        let outcomes = job.wait_all(LIMIT).unwrap();
        assert!(others.iter().all(|rank| outcomes[*rank as usize].success()), "{outcomes:?}");
    }
}

#[test]
fn who_made_the_id_may_leave_before_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = three("leave", &folder.path().join("id"));
    let outcomes = job.wait_all(LIMIT).unwrap();
    assert!(outcomes.iter().all(|outcome| outcome.passed()), "{outcomes:?}");
}

#[test]
fn failures_are_injected() {
    let mut job = Job::of_test("processes::child")
        .unwrap()
        .env(PART, "fail")
        .env("SIMULATED_NCCL_FAIL", "ncclAllReduce:2:3;ncclCommGetAsyncError:2:6")
        .start()
        .unwrap();
    let outcomes = job.wait_all(LIMIT).unwrap();
    assert!(outcomes[0].passed(), "{outcomes:?}");
}

#[test]
#[ignore = "a process that other tests start"]
fn child() {
    let Ok(part) = env::var(PART) else { return };
    match part.as_str() {
        "watch" => {
            let (nccl, comm, _) = joined();
            println!("added up");
            println!("state: {:?}", state_after(&nccl, comm, Code::SUCCESS));
            abort(&nccl, comm);
        }
        "leave" => leave(),
        _ => fail(),
    }
}

/// Joins with the settings of the environment.
fn joined() -> (Library, nccl_sys::Comm, usize) {
    let nccl = nccl();
    let rank = env::var(RANK).unwrap().parse().unwrap();
    let id = carried(&nccl, rank);
    let comm = join(&nccl, 3, id, rank);
    assert_eq!(sum(&nccl, comm, 1).unwrap().1, 3);
    (nccl, comm, rank)
}

/// Passes the id through a file.
fn carried(nccl: &Library, rank: usize) -> UniqueId {
    let file = env::var(ID).unwrap();
    if rank == 0 {
        let id = nccl.unique_id().unwrap();
        fs::write(format!("{file}.new"), id.as_bytes()).unwrap();
        fs::rename(format!("{file}.new"), &file).unwrap();
        return id;
    }
    let deadline = Instant::now() + LIMIT;
    loop {
        match fs::read(&file) {
            Ok(bytes) => return UniqueId::from_bytes(bytes.try_into().unwrap()),
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Rank 0 leaves at once, while the others continue without it.
fn leave() {
    let (nccl, comm, rank) = joined();
    let mut others = ptr::null_mut();
    let color = if rank == 0 { Library::NO_COLOR } else { 0 };
    // SAFETY: `others` stays during the blocking call.
    let _ = unsafe { nccl.comm_split(comm, color, 0, &mut others, None) }.unwrap();
    destroy(&nccl, comm);
    if rank > 0 {
        thread::sleep(Duration::from_millis(200));
        assert_eq!(sum(&nccl, others, 1).unwrap().1, 2);
        destroy(&nccl, others);
    }
}

fn fail() {
    let nccl = nccl();
    let comm = join(&nccl, 1, nccl.unique_id().unwrap(), 0);
    assert_eq!(sum(&nccl, comm, 1).unwrap().1, 1);
    let failed = sum(&nccl, comm, 1);
    assert!(failed.as_ref().unwrap_err().to_string().contains("ncclAllReduce: a simulated failure"), "{failed:?}");
    assert_eq!(code(failed), Code::INTERNAL_ERROR);
    assert_eq!(sum(&nccl, comm, 1).unwrap().1, 1);
    let states = [(); 3].map(|()| state(&nccl, comm));
    assert_eq!(states, [Code::SUCCESS, Code::REMOTE_ERROR, Code::REMOTE_ERROR]);
    assert_eq!(code(sum(&nccl, comm, 1)), Code::REMOTE_ERROR);
    abort(&nccl, comm);
}
