//! Tests with the NCCL of this machine, if it has one; a GPU is not required. Otherwise each test reports that it was
//! skipped.
#![expect(unsafe_code, reason = "functions of C are called")]

use std::env;
use std::ptr;
use std::time::Duration;

use distribute_testkit::{Job, skipped, within};
use nccl_sys::{Code, Config, DataType, ENV_LIBRARY, Error, Library, RedOp, UniqueId, Version};

/// Set for the child that meets on an interface that does not exist.
const CHILD: &str = "NCCL_SYS_TEST_CHILD";
const LIMIT: Duration = Duration::from_secs(60);

fn nccl() -> Option<Library> {
    match Library::load() {
        Ok(library) => Some(library),
        Err(error) => {
            skipped(error);
            None
        }
    }
}

fn code(error: &Error) -> Code {
    match error {
        Error::Call { code, .. } => *code,
        other => panic!("no failed call: {other}"),
    }
}

#[test]
fn the_version_and_the_file_are_told() {
    let Some(nccl) = nccl() else { return };
    assert!(nccl.version() >= Version::OLDEST, "{nccl:?}");
    assert!(nccl.path().file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnccl")), "{nccl:?}");
    assert!(nccl.path().is_file(), "{nccl:?}");
}

#[test]
fn every_function_of_its_version_is_there() {
    let Some(nccl) = nccl() else { return };
    for (function, since) in [
        ("ncclCommSplit", Version::new(2, 18, 0)),
        ("ncclCommRegister", Version::new(2, 19, 0)),
        ("ncclMemAlloc", Version::new(2, 19, 0)),
        ("ncclGroupSimulateEnd", Version::new(2, 22, 0)),
        ("ncclCommShrink", Version::new(2, 27, 0)),
        ("ncclAlltoAll", Version::new(2, 28, 0)),
        ("ncclGather", Version::new(2, 28, 0)),
        ("ncclScatter", Version::new(2, 28, 0)),
    ] {
        assert_eq!(nccl.has(function), nccl.version() >= since, "{function} in {}", nccl.version());
    }
    assert!(!nccl.has("ncclOfTomorrow"));
}

#[test]
fn ids_differ() {
    let Some(nccl) = nccl() else { return };
    let (first, second) = (nccl.unique_id().unwrap(), nccl.unique_id().unwrap());
    assert_ne!(first, second);
    assert_eq!(UniqueId::from_bytes(*first.as_bytes()), first);
}

#[test]
fn codes_have_sentences() {
    let Some(nccl) = nccl() else { return };
    assert_eq!(nccl.error_string(Code::SUCCESS), "no error");
    assert!(nccl.error_string(Code::INVALID_USAGE).starts_with("invalid usage"));
    assert_eq!(nccl.error_string(Code(99)), "unknown result code");
}

#[test]
fn a_group_without_calls_does_nothing() {
    let Some(nccl) = nccl() else { return };
    nccl.group_start().unwrap();
    nccl.group_start().unwrap();
    let _ = nccl.group_end().unwrap();
    let _ = nccl.group_end().unwrap();
}

#[test]
fn without_a_communicator_calls_fail_in_words() {
    let Some(nccl) = nccl() else { return };
    let null = ptr::null_mut();
    // SAFETY: NCCL rejects a null communicator before it reads anything else.
    let reduced =
        unsafe { nccl.all_reduce(null, null, 0, DataType::FLOAT32, RedOp::SUM, ptr::null_mut(), null) }.unwrap_err();
    assert_eq!(code(&reduced), Code::INVALID_ARGUMENT);
    let text = reduced.to_string();
    assert!(text.starts_with("ncclAllReduce failed: ncclInvalidArgument (code 4): invalid argument"), "{text}");
    // SAFETY: as above.
    let state = unsafe { nccl.comm_async_error(ptr::null_mut()) };
    assert_eq!(code(&state.unwrap_err()), Code::INVALID_ARGUMENT);
    // SAFETY: aborting null has no effect.
    let ended = unsafe { nccl.comm_abort(ptr::null_mut()) };
    let _ = ended.unwrap();
}

#[test]
fn where_there_is_no_device_joining_fails_in_words() {
    let Some(nccl) = nccl() else { return };
    within(LIMIT, move || {
        let config = Config::new();
        let id = nccl.unique_id().unwrap();
        let mut comm = ptr::null_mut();
        // SAFETY: `comm` stays during the blocking call.
        match unsafe { nccl.comm_init_rank_config(&mut comm, 1, id, 0, &config) } {
            Ok(_) => {
                skipped("there is a device");
                // SAFETY: the communicator was made above.
                let _ = unsafe { nccl.comm_destroy(comm) }.unwrap();
            }
            Err(error) => {
                assert_eq!(code(&error), Code::UNHANDLED_CUDA_ERROR, "{error}");
                let text = error.to_string();
                assert!(text.contains("ncclCommInitRankConfig") && text.contains("the last words"), "{text}");
                assert!(comm.is_null());
            }
        }
    });
}

#[test]
fn a_setting_that_this_nccl_would_ignore_is_refused() {
    let Some(nccl) = nccl() else { return };
    let config = Config::new().max_p2p_peers(4);
    if config.version() <= nccl.version() {
        skipped(format_args!("NCCL {} knows every setting", nccl.version()));
        return;
    }
    let id = nccl.unique_id().unwrap();
    let mut comm = ptr::null_mut();
    // SAFETY: no C function is called.
    let joined = unsafe { nccl.comm_init_rank_config(&mut comm, 1, id, 0, &config) };
    assert!(matches!(joined, Err(Error::ConfigTooNew { .. })));
}

/// NCCL selects its interface once per process, so a child process is used.
#[test]
fn an_interface_that_is_not_there_is_told() {
    let Some(nccl) = nccl() else { return };
    if env::var_os(CHILD).is_some() {
        println!("told: {}", nccl.unique_id().unwrap_err());
        return;
    }
    let mut job = Job::builder(env::current_exe().unwrap())
        .args(["an_interface_that_is_not_there_is_told", "--exact", "--nocapture"])
        .env(CHILD, "1")
        .env(ENV_LIBRARY, nccl.path().to_string_lossy())
        .env("NCCL_SOCKET_IFNAME", "=nope0")
        .start()
        .unwrap();
    let outcome = job.wait_all(LIMIT).unwrap().remove(0);
    let told = outcome.stdout.lines().find(|line| line.contains("told: ")).unwrap_or_default();
    assert!(told.contains("ncclGetUniqueId failed: ncclInvalidUsage (code 5)"), "{outcome:?}");
    assert!(told.contains("no socket interface found"), "{outcome:?}");
}
