use super::*;

const DEADLINE: Duration = Duration::from_secs(20);

fn shell(script: &str) -> JobBuilder {
    Job::builder("sh").args(["-c", script])
}

#[test]
fn tasks_have_their_own_environment_and_output() {
    let script = "echo out $RANK $SHARED; echo err $RANK >&2; exit $RANK";
    let job = shell(script).tasks(3).env("SHARED", "yes").task_env(|rank| vec![("RANK".into(), rank.to_string())]);
    let outcomes = job.start().unwrap().wait_all(DEADLINE).unwrap();
    for (rank, outcome) in (0..).zip(outcomes) {
        assert_eq!(outcome.rank, rank);
        assert_eq!(outcome.code, Some(rank as i32));
        assert_eq!(outcome.success(), rank == 0);
        assert_eq!(outcome.stdout, format!("out {rank} yes\n"));
        assert_eq!(outcome.stderr, format!("err {rank}\n"));
    }
}

#[test]
fn a_stopped_task_goes_on_when_it_is_continued() {
    let mut job = shell("echo ready; while :; do echo tick; sleep 0.01; done").start().unwrap();
    job.wait_for_line(0, "ready", DEADLINE).unwrap();
    job.kill(0, Signal::STOP).unwrap();
    assert!(matches!(job.wait(0, Duration::from_millis(50)), Err(Error::StillRunning { rank: 0, .. })));
    job.kill(0, Signal::CONT).unwrap();
    job.kill(0, Signal::TERM).unwrap();
    assert_eq!(job.wait(0, DEADLINE).unwrap().signal, Some(15));
    job.kill(0, Signal::TERM).unwrap();
}

#[test]
fn a_line_that_does_not_come_is_an_error_with_what_was_printed() {
    let job = shell("echo something else; exec sleep 60").start().unwrap();
    job.wait_for_line(0, "something", DEADLINE).unwrap();
    let text = job.wait_for_line(0, "ready", Duration::from_millis(20)).unwrap_err().to_string();
    assert!(text.contains("\"ready\" within 20ms") && text.contains("something else"), "{text}");

    let job = shell("echo an end").start().unwrap();
    let text = job.wait_for_line(0, "ready", DEADLINE).unwrap_err().to_string();
    assert!(text.contains("ended its output") && text.contains("an end"), "{text}");
    assert!(matches!(job.wait_for_line(7, "x", DEADLINE), Err(Error::NoTask { rank: 7, tasks: 1 })));
}

#[test]
fn dropping_a_job_ends_grandchildren_too() {
    let job = shell("(setsid sleep 60 & sleep 61) & echo ready; wait").tasks(2).start().unwrap();
    job.wait_for_line(0, "ready", DEADLINE).unwrap();
    job.wait_for_line(1, "ready", DEADLINE).unwrap();
    assert!(job.family().members().len() >= 2);
    // Panics if a process is left.
    drop(job);
}

#[test]
fn a_program_that_does_not_exist_is_an_error() {
    let text = Job::builder("/nonexistent/program").start().unwrap_err().to_string();
    assert!(text.contains("task 0: /nonexistent/program cannot be started"), "{text}");
}
