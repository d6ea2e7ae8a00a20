//! Real processes: how a kill appears to the remaining members.
#![cfg(feature = "coordination")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use distribute_cluster::{Coordination, CoordinationOptions, FailureCause, Membership, TfConfigResolver};

const SOON: Duration = Duration::from_secs(10);

/// The body of a started process.
#[test]
#[ignore = "a process that other tests start"]
fn a_member_until_it_is_killed() {
    let Some(membership) = Membership::from_env().unwrap() else { return };
    let options = CoordinationOptions::default().join_timeout(SOON);
    let coordination = Coordination::start(&membership, options).unwrap();
    coordination.put("pid", std::process::id().to_string().as_bytes()).unwrap();
    let (tell, told) = mpsc::channel();
    coordination.on_failure(move |failure| drop(tell.send(failure.to_string())));
    println!("joined as {}", membership.task());
    if let Ok(failure) = told.recv_timeout(SOON) {
        println!("told: {failure}");
    }
}

/// A process that is killed on drop.
struct Member(Child);

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(rank: u32, size: u32, port: u16) -> (Member, mpsc::Receiver<String>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    started(command.args(["--exact", "a_member_until_it_is_killed", "--ignored", "--nocapture"]), rank, size, port)
}

fn started(command: &mut Command, rank: u32, size: u32, port: u16) -> (Member, mpsc::Receiver<String>) {
    let mut child = command
        .env_remove("TF_CONFIG")
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", size.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("DISTRIBUTE_PORT", port.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (tell, lines) = mpsc::channel();
    let output = BufReader::new(child.stdout.take().unwrap());
    std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
    (Member(child), lines)
}

/// Waits for a line that contains `words`.
fn line(lines: &mpsc::Receiver<String>, words: &str) -> String {
    let deadline = Instant::now() + SOON;
    loop {
        let line = lines.recv_timeout(deadline - Instant::now()).unwrap();
        if line.contains(words) {
            return line;
        }
    }
}

/// Prints what a started process reads from its environment.
#[test]
#[ignore = "a process that other tests start"]
fn a_reader_of_its_environment() {
    if std::env::var_os("DISTRIBUTE_TEST_READER").is_none() {
        return;
    }
    let membership = Membership::from_env().map(|found| found.map(|membership| membership.rank));
    println!("membership: {:?}", membership.map_err(|error| error.to_string()));
    println!("resolver: {:?}", TfConfigResolver::from_env().map(drop).map_err(|error| error.to_string()));
    println!("options: {:?}", CoordinationOptions::from_env().map(drop).map_err(|error| error.to_string()));
}

#[test]
fn variables_that_are_no_text_are_errors() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    for (name, reader) in [
        ("TF_CONFIG", "membership"),
        ("TF_CONFIG", "resolver"),
        ("RANK", "membership"),
        ("WORLD_SIZE", "membership"),
        ("OMPI_COMM_WORLD_RANK", "membership"),
        ("SLURM_PROCID", "membership"),
        ("DISTRIBUTE_JOB_ID", "resolver"),
        ("DISTRIBUTE_JOB_ID", "options"),
        ("DISTRIBUTE_TIMEOUT", "options"),
        ("DISTRIBUTE_INTERFACE", "options"),
    ] {
        let mut reader_of = Command::new(std::env::current_exe().unwrap());
        for other in ["TF_CONFIG", "RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "DISTRIBUTE_JOB_ID"] {
            reader_of.env_remove(other);
        }
        let output = reader_of
            .args(["--exact", "a_reader_of_its_environment", "--ignored", "--nocapture"])
            .env("DISTRIBUTE_TEST_READER", "1")
            .env(name, OsStr::from_bytes(b"caf\xe9\n"))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = text.lines().find(|line| line.contains(&format!("{reader}: "))).unwrap();
        let words = format!("the environment: the value of {name} is not UTF-8");
        assert!(line.contains("Err(") && line.contains(&words), "{name}, {reader}: {text}");
    }
}

/// Returns the processor time that a process has used, in clock ticks.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
#[cfg(target_os = "linux")]
fn a_leader_without_file_descriptors_waits_for_them_and_goes_on() {
    const LIMIT: usize = 40;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let script = format!("ulimit -n {LIMIT} && exec \"$0\" --exact a_member_until_it_is_killed --ignored --nocapture");
    let (leader, lines) =
        started(Command::new("sh").args(["-c", &script]).arg(std::env::current_exe().unwrap()), 0, 2, port);
    let pid = leader.0.id();
    let open = || std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    let deadline = Instant::now() + SOON;
    let mut sockets = Vec::new();
    while open() < LIMIT {
        assert!(Instant::now() < deadline, "{} descriptors are open", open());
        match std::net::TcpStream::connect(("127.0.0.1", port)) {
            Ok(socket) => sockets.push(socket),
            Err(_) => std::thread::yield_now(),
        }
    }
    // More connections wait in the backlog, which the leader cannot accept.
    sockets.extend((0..20).map(|_| std::net::TcpStream::connect(("127.0.0.1", port)).unwrap()));
    let (before, begun) = (ticks(pid), Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    let (used, passed) = (ticks(pid) - before, begun.elapsed());
    // A tick is a hundredth of a second; a busy loop would use all of the time.
    assert!(used < 30, "{used} ticks within {passed:?}");
    assert!(open() >= LIMIT, "{} descriptors are open", open());
    drop(sockets);
    let options = CoordinationOptions::default().join_timeout(SOON);
    let member = Coordination::start(&Membership::new(1, 2, format!("127.0.0.1:{port}")).unwrap(), options).unwrap();
    line(&lines, "joined as worker:0");
    drop(member);
}

#[test]
fn survivors_learn_at_once_of_a_killed_member() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let started = Instant::now();
    let (victim, joined) = start(1, 3, port);
    let (_survivor, told) = start(2, 3, port);
    let membership = Membership::new(0, 3, format!("127.0.0.1:{port}")).unwrap();
    let options = CoordinationOptions::default().join_timeout(SOON).listener(Some(listener.into()));
    let leader = Coordination::start(&membership, options).unwrap();
    line(&joined, "joined as worker:1");
    line(&told, "joined as worker:2");
    println!("three processes met within {:?}", started.elapsed());
    let (tell, failures) = mpsc::channel();
    leader.on_failure(move |failure| drop(tell.send((failure.clone(), Instant::now()))));
    let killed = Instant::now();
    drop(victim);
    let (failure, noticed) = failures.recv_timeout(SOON).unwrap();
    assert!(failure.rank == 1 && matches!(failure.cause, FailureCause::Lost { .. }), "{failure}");
    println!("the leader knew after {:?}", noticed - killed);
    assert!(noticed - killed < Duration::from_secs(2));
    let told = line(&told, "told: ");
    assert!(told.contains("lost worker:1: its process ended or its connection broke"), "{told}");
}

#[test]
fn members_learn_at_once_of_a_killed_leader() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // The leader of this job is another process, which listens itself.
    drop(listener);
    let (victim, joined) = start(0, 2, port);
    let options = CoordinationOptions::default().join_timeout(SOON);
    let member = Coordination::start(&Membership::new(1, 2, format!("127.0.0.1:{port}")).unwrap(), options).unwrap();
    line(&joined, "joined as worker:0");
    let killed = Instant::now();
    let text = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| member.barrier("step 7", SOON).unwrap_err().to_string());
        drop(victim);
        waiting.join().unwrap()
    });
    println!("the member knew after {:?}", killed.elapsed());
    assert!(text.starts_with("worker:1: barrier \"step 7\": lost worker:0: its process ended"), "{text}");
    assert!(killed.elapsed() < Duration::from_secs(2));
}
