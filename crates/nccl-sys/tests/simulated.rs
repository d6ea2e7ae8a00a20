//! Tests with a simulated NCCL, whose version and failures are chosen by the environment of a child.
#![expect(unsafe_code, reason = "functions of C are called")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::env;
use std::ffi::c_void;
use std::path::Path;
use std::ptr;
use std::time::Duration;

use distribute_testkit::{Job, Outcome, within};
use nccl_sys::{Code, Comm, Config, DataType, ENV_LIBRARY, Error, Library, Progress, RedOp, Search, Version};

/// Selects what a child does.
const PART: &str = "NCCL_SYS_TEST_PART";
const LIMIT: Duration = Duration::from_secs(60);

/// Runs a part in a child whose NCCL is the simulated one, by [`ENV_LIBRARY`].
fn in_child(part: &str, variable: (&str, &str)) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let file = simulated_nccl::install(folder.path()).unwrap();
    let job = Job::of_test("child").unwrap();
    let job = job.env(PART, part).env(ENV_LIBRARY, file.to_string_lossy()).env(variable.0, variable.1);
    let outcome = job.start().unwrap().wait_all(LIMIT).unwrap().remove(0);
    assert!(outcome.passed(), "{outcome:?}");
    outcome
}

#[test]
fn an_nccl_that_is_too_old_is_not_taken() {
    let outcome = in_child("too old", ("SIMULATED_NCCL_VERSION", "21500"));
    assert!(outcome.stdout.contains("it is NCCL 2.15.0, and the oldest that can be used is 2.18.0"), "{outcome:?}");
    assert!(outcome.stdout.contains(&format!("the file that {ENV_LIBRARY} gives")), "{outcome:?}");
}

#[test]
fn settings_that_came_later_are_refused() {
    in_child("settings", ("SIMULATED_NCCL_VERSION", "21805"));
}

#[test]
fn failures_carry_code_name_and_words() {
    in_child("failure", ("SIMULATED_NCCL_FAIL", "ncclCommCount:1:8"));
}

#[test]
#[ignore = "a process that other tests start"]
fn child() {
    match env::var(PART).as_deref() {
        Ok("too old") => println!("{}", Library::load().unwrap_err()),
        Ok("settings") => settings(),
        Ok(_) => failure(),
        Err(_) => {}
    }
}

fn settings() {
    let nccl = Library::load().unwrap();
    assert_eq!(nccl.version(), Version::new(2, 18, 5));
    let id = nccl.unique_id().unwrap();
    let mut comm = ptr::null_mut();
    let init = |comm: &mut Comm, config: Config<'_>| {
        // SAFETY: `comm` stays during the blocking call.
        unsafe { nccl.comm_init_rank_config(comm, 1, id, 0, &config) }
    };
    let refused = init(&mut comm, Config::new().comm_name(c"gradients")).unwrap_err().to_string();
    assert!(refused.contains("settings of NCCL 2.27.0, and the NCCL at hand is 2.18.5"), "{refused}");
    let joined = init(&mut comm, Config::new().net_name(c"Socket").ctas(1, 2));
    assert_eq!(joined.unwrap(), Progress::Done);
    // SAFETY: the communicator was made above.
    let _ = unsafe { nccl.comm_destroy(comm) }.unwrap();
}

fn failure() {
    let nccl = Library::load().unwrap();
    let comm = alone(&nccl);
    // SAFETY: the communicator was made above.
    let count = || unsafe { nccl.comm_count(comm) };
    let failed = count().unwrap_err();
    assert!(matches!(failed, Error::Call { code: Code::TIMEOUT, name: "unknown result", .. }), "{failed:?}");
    let text = failed.to_string();
    assert!(text.starts_with("ncclCommCount failed: unknown result (code 8): unknown result code"), "{text}");
    assert!(text.ends_with("the last words of NCCL in this process: ncclCommCount: a simulated failure"), "{text}");
    assert_eq!(count().unwrap(), 1);
    // The message is kept by a call that succeeds.
    assert_eq!(nccl.last_error().as_deref(), Some("ncclCommCount: a simulated failure"));
    // SAFETY: the communicator is no longer used.
    let _ = unsafe { nccl.comm_destroy(comm) }.unwrap();
}

fn alone(nccl: &Library) -> Comm {
    let mut comm = ptr::null_mut();
    let id = nccl.unique_id().unwrap();
    // SAFETY: `comm` stays during the blocking call.
    let _ = unsafe { nccl.comm_init_rank(&mut comm, 1, id, 0) }.unwrap();
    comm
}

#[test]
fn a_rank_alone_does_everything() {
    let folder = tempfile::tempdir().unwrap();
    let file = simulated_nccl::install(folder.path()).unwrap();
    within(LIMIT, move || {
        let nccl = Library::open(&Search::file(&file)).unwrap();
        assert_eq!((nccl.version(), nccl.path()), (Version::new(2, 28, 9), Path::new(&file)));
        let comm = alone(&nccl);
        let (mut values, null) = ([1f32, 2.0], ptr::null_mut());
        let memory: *mut c_void = values.as_mut_ptr().cast();
        // SAFETY: two elements are sent and received.
        let done = unsafe { nccl.all_reduce(memory, memory, 2, DataType::FLOAT32, RedOp::AVG, comm, null) };
        assert_eq!((done.unwrap(), values), (Progress::Done, [1.0, 2.0]));
        // SAFETY: the communicator was made above.
        let place = unsafe { nccl.comm_rank(comm) };
        // SAFETY: as above.
        let state = unsafe { nccl.comm_async_error(comm) };
        assert_eq!((place.unwrap(), state.unwrap()), (0, Code::SUCCESS));
        // SAFETY: nothing is issued afterwards.
        let _ = unsafe { nccl.comm_finalize(comm) }.unwrap();
        // SAFETY: the communicator is no longer used.
        let _ = unsafe { nccl.comm_destroy(comm) }.unwrap();
    });
}
