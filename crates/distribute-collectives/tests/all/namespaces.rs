//! Processes in separate pid namespaces, like containers of one host: equal process ids refer to different processes
//! there, and no process may mistake another's memory for its peer's. Containers of one network, as those of a pod,
//! pass their memory to each other.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use distribute_cluster::{Coordination, CoordinationOptions, Membership};
use distribute_collectives::{Options, ProcessGroup, ReduceOp};
use distribute_testkit::{Job, Ports, skipped};

const DEADLINE: Duration = Duration::from_secs(60);

/// Set for members.
const MEMBER: &str = "NAMESPACE_MEMBER";

/// The program that each process of the other tests runs.
#[test]
#[ignore = "a process that other tests start"]
fn member() {
    if std::env::var_os(MEMBER).is_none() {
        return;
    }
    let act = || {
        let membership = Membership::from_env()?.unwrap();
        let coordination = Arc::new(Coordination::start(&membership, CoordinationOptions::from_env()?)?);
        let options = Options::from_env()?.timeout(Duration::from_secs(15));
        let group = ProcessGroup::join(&coordination, 1, &options)?.remove(0);
        let (me, ranks) = (group.rank().0, group.world_size() as u32);
        // Through the rings, and by reading directly from each other's memory where that is possible.
        for len in [3, 200_000] {
            let mut values: Vec<u32> = (0..len).map(|index| index * ranks + me).collect();
            group.all_reduce(&mut values, ReduceOp::Sum)?;
            let expected = |index: u32| index * ranks * ranks + ranks * (ranks - 1) / 2;
            assert!((0..len).zip(&values).all(|(index, value)| *value == expected(index)), "a wrong sum on rank {me}");
        }
        group.barrier()?;
        println!("rank {me} is fine over {}", group.transport_name());
        Ok::<(), distribute_collectives::Error>(())
    };
    if let Err(error) = act() {
        println!("a member failed: {error}");
    }
}

/// Returns whether this machine allows a test to create pid namespaces; prints a message if not.
fn can_unshare(what: &str) -> bool {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "true"]).stdout(Stdio::null()).stderr(Stdio::null());
    let can = command.status().is_ok_and(|status| status.success());
    if !can {
        skipped(format_args!("{what}: `unshare --pid` is missing or not permitted here"));
    }
    can
}

/// Returns a shell command that runs members with these ranks at the same time, and ends with them.
fn members(ranks: &[u32]) -> String {
    let one = |rank: &u32| format!("RANK={rank} \"$PROGRAM\" namespaces::member --exact --ignored --nocapture & ");
    ranks.iter().map(one).chain(["wait".to_owned()]).collect()
}

/// Wraps the command in its own pid namespace, which sees its own processes in /proc or, without `mounts`, its
/// parent's.
fn contained(command: &str, mounts: bool) -> String {
    let mount = if mounts { "--mount-proc" } else { "" };
    format!("unshare --pid --fork --kill-child {mount} sh -c '{command}'")
}

/// Returns the command of a member that is the only one of its container.
fn member_command(rank: u32) -> String {
    format!("RANK={rank} exec \"$PROGRAM\" namespaces::member --exact --ignored --nocapture")
}

/// Returns the command of a container with one member.
fn alone(rank: u32, mounts: bool) -> String {
    contained(&member_command(rank), mounts)
}

/// Runs the containers' commands at the same time; returns the transport over which each rank reached the others.
#[track_caller]
fn run(containers: Vec<String>, ranks: usize) -> Vec<String> {
    let port = Ports::reserve(1).unwrap().release()[0];
    let program = std::env::current_exe().unwrap();
    let count = u32::try_from(containers.len()).unwrap();
    let mut job = Job::builder("sh")
        .args(["-c", "eval \"$CONTAINER\""])
        .tasks(count)
        .task_env(move |index| vec![("CONTAINER".to_owned(), containers[index as usize].clone())])
        .env("PROGRAM", program.to_string_lossy())
        .env(MEMBER, "1")
        .env("WORLD_SIZE", ranks.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", "1")
        .env("DISTRIBUTE_PORT", port.to_string())
        .env("DISTRIBUTE_ALGORITHM", "ring")
        .start()
        .unwrap();
    let outcomes = job.wait_all(DEADLINE).unwrap();
    let printed: String = outcomes.iter().map(|outcome| outcome.stdout.as_str()).collect();
    let over = |rank| {
        let begin = format!("rank {rank} is fine over ");
        let line = printed.lines().find_map(|line| Some(line.split_once(&begin)?.1.to_owned()));
        line.unwrap_or_else(|| panic!("rank {rank} is not fine: {outcomes:?}"))
    };
    (0..ranks).map(over).collect()
}

#[test]
fn four_processes_that_are_each_the_first_of_their_namespace_share_memory() {
    if !can_unshare("four containers of one process") {
        return;
    }
    for mounts in [true, false] {
        assert_eq!(run((0..4).map(|rank| alone(rank, mounts)).collect(), 4), ["shm"; 4]);
    }
}

#[test]
fn processes_of_user_namespaces_share_memory() {
    let own = "unshare --user --map-root-user";
    if !Command::new("sh").args(["-c", &format!("{own} true")]).status().is_ok_and(|status| status.success()) {
        skipped(format_args!("two user namespaces: `unshare --user` is missing or not permitted here"));
        return;
    }
    assert_eq!(run([0, 1].map(|rank| format!("{own} sh -c '{}'", member_command(rank))).to_vec(), 2), ["shm"; 2]);
}

#[test]
fn containers_that_are_told_to_be_other_hosts_use_tcp() {
    if !can_unshare("two containers with host ids") {
        return;
    }
    let containers = [0, 1].map(|rank| format!("export DISTRIBUTE_HOST_ID={rank}; {}", alone(rank, true)));
    assert_eq!(run(containers.to_vec(), 2), ["tcp"; 2]);
}

#[test]
fn two_containers_of_three_share_memory_inside_each_and_between_them() {
    if !can_unshare("two containers of three processes") {
        return;
    }
    // Where /proc shows other processes, no process finds its peers there.
    for mounts in [true, false] {
        let containers = [[0, 2, 4], [1, 3, 5]].map(|ranks| contained(&members(&ranks), mounts));
        assert_eq!(run(containers.to_vec(), 6), ["shm"; 6]);
    }
}

#[test]
fn a_namespace_inside_another_is_another() {
    if !can_unshare("a container in a container") {
        return;
    }
    // The inner command has no quotes, so one level of quoting is enough.
    let inner = "unshare --pid --fork --kill-child --mount-proc sh -c \"$INNER\"";
    let outer = format!("{inner} & {}", members(&[0, 1]));
    let container =
        format!("INNER='{}' && export INNER && {}", members(&[2, 3]), contained(&outer.replace('\'', ""), true));
    assert_eq!(run(vec![container], 4), ["shm"; 4]);
}
