//! Tests with simulated plugins, each with its own script.
#![expect(unsafe_code, reason = "functions of C are called")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::fs;
use std::path::Path;
use std::process::Command;

use pjrt_sys::{
    Arguments, ClientCreateArgs, ClientDestroyArgs, ClientPlatformNameArgs, Code, ENV_SKIP_METADATA, Error, Function,
    Library, PluginInitializeArgs, Problem, Search, TABLE_START, Version,
};
use simulated_pjrt::{Fail, Installed, Live, Script, install};
use tempfile::TempDir;

fn installed(script: &Script) -> (TempDir, Installed) {
    let folder = tempfile::tempdir().unwrap();
    let plugin = install(folder.path(), script).unwrap();
    (folder, plugin)
}

/// Opens a plugin with a script. The folder may go while it is open.
fn open(script: &Script) -> Result<(Library, Installed, TempDir), Error> {
    let (folder, plugin) = installed(script);
    Ok((Library::open(&Search::file(plugin.path()))?, plugin, folder))
}

/// Opens a plugin that is refused, and returns the reason.
fn refused(script: &Script) -> String {
    match open(script).unwrap_err() {
        Error::NotFound { attempts, .. } => attempts[0].problem.to_string(),
        other => panic!("not refused: {other}"),
    }
}

#[test]
fn a_client_is_created_and_destroyed_and_nothing_is_left() {
    let (plugin, installed, _folder) = open(&Script::default()).unwrap();
    assert_eq!((plugin.version(), plugin.path()), (Version::HEADER, installed.path()));
    let mut create = ClientCreateArgs::new();
    create.create_options = [].as_ptr();
    // SAFETY: the plugin is initialised once.
    unsafe { plugin.call(&mut PluginInitializeArgs::new()) }.unwrap();
    // SAFETY: there are no options and no callbacks.
    unsafe { plugin.call(&mut create) }.unwrap();
    assert_eq!(installed.live(), Live { clients: 1, ..Live::default() });
    let mut name = ClientPlatformNameArgs { client: create.client, ..Arguments::new() };
    // SAFETY: the client exists.
    unsafe { plugin.call(&mut name) }.unwrap();
    assert_eq!(name.platform_name_size, 9);
    // SAFETY: the client is no longer used.
    unsafe { plugin.call(&mut ClientDestroyArgs { client: create.client, ..Arguments::new() }) }.unwrap();
    assert_eq!(installed.live(), Live::default());
}

#[test]
fn tables_that_cannot_be_used_are_refused_with_the_reason() {
    assert_eq!(refused(&Script { no_table: true, ..Script::default() }), "its GetPjrtApi returned null");
    let short = |bytes| refused(&Script { table_bytes: Some(bytes), ..Script::default() });
    for bytes in [0, 8, TABLE_START, TABLE_START + 23] {
        assert_eq!(short(bytes), format!("its table has {bytes} bytes, and at least 64 are needed"));
    }
    let newer = refused(&Script { version: (1, 0), ..Script::default() });
    assert_eq!(newer, "it has version 1.0 of PJRT, and this program uses version 0");
    let null = Script { null: vec!["PJRT_Error_Message".to_owned()], ..Script::default() };
    assert_eq!(refused(&null), "its table has null in place of PJRT_Error_Message, without which errors have no text");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.so");
    fs::write(&file, "no library").unwrap();
    let error = Library::open(&Search::file(&file)).unwrap_err().to_string();
    assert!(error.contains("the file that was given for the PJRT plugin cannot be used"), "{error}");
    let libc = Library::open(&Search::file("libc.so.6")).unwrap_err();
    let Error::NotFound { attempts, .. } = libc else { panic!("{libc}") };
    assert!(matches!(attempts[0].problem, Problem::NotPlugin), "{}", attempts[0]);
}

#[test]
fn a_function_that_the_table_lacks_is_not_called() {
    // The table is cut after each function in turn: what it still has is there, and all else is missing.
    for functions in [3, 10, 11, 60, 117, 118] {
        let script = Script { functions: Some(functions), version: (0, 54), ..Script::default() };
        let (plugin, _, _folder) = open(&script).unwrap();
        assert!(Function::ALL[functions..].iter().all(|function| !plugin.has(*function)), "{functions}");
        assert_eq!(plugin.has(Function::PJRT_Client_Create), functions > 10);
        if functions <= 10 {
            // SAFETY: the function is not called.
            let error = unsafe { plugin.call(&mut ClientCreateArgs::new()) }.unwrap_err().to_string();
            assert!(error.starts_with("PJRT_Client_Create is not in the PJRT plugin /"), "{error}");
            assert!(error.ends_with("of version 0.54: its table ends before it; install a newer one"), "{error}");
        }
    }
    let null = Script { null: vec!["PJRT_Client_Create".to_owned()], ..Script::default() };
    let (plugin, _, _folder) = open(&null).unwrap();
    // SAFETY: the function is not called.
    let error = unsafe { plugin.call(&mut ClientCreateArgs::new()) }.unwrap_err().to_string();
    assert!(error.ends_with("of version 0.81: its entry is null; install a newer one"), "{error}");
}

#[test]
fn errors_have_their_code_and_any_text() {
    let fail = |nth, code, text: Option<&[u8]>| Fail {
        what: "PJRT_Plugin_Initialize".to_owned(),
        nth,
        code,
        text: text.map(<[u8]>::to_vec),
    };
    let long = vec![b'x'; 3 << 20];
    let fails = vec![
        fail(1, 3, Some(b"wrong")),
        fail(2, 99, Some(b"")),
        fail(3, 14, None),
        fail(4, 13, Some(b"a\0b \xff\xfe")),
        fail(5, 8, Some(&long)),
    ];
    let (plugin, installed, _folder) = open(&Script { fail: fails, ..Script::default() }).unwrap();
    let next = || {
        // SAFETY: the plugin may be initialised.
        match unsafe { plugin.call(&mut PluginInitializeArgs::new()) }.unwrap_err() {
            Error::Call { function: "PJRT_Plugin_Initialize", code, text } => (code, text),
            other => panic!("{other}"),
        }
    };
    assert_eq!(next(), (Code::INVALID_ARGUMENT, "wrong".to_owned()));
    assert_eq!(next(), (Code(99), String::new()));
    assert_eq!(next(), (Code::UNAVAILABLE, String::new()));
    assert_eq!(next(), (Code::INTERNAL, "a\0b \u{fffd}\u{fffd}".to_owned()));
    assert_eq!(next(), (Code::RESOURCE_EXHAUSTED, "x".repeat(1 << 20)));
    assert_eq!(installed.live(), Live::default());
}

#[test]
fn a_plugin_that_needs_longer_structs_says_so() {
    let needs = [("PJRT_Client_Create".to_owned(), 96)].into();
    let (plugin, installed, _folder) = open(&Script { needs_bytes: needs, ..Script::default() }).unwrap();
    // SAFETY: the plugin refuses the call.
    let error = unsafe { plugin.call(&mut ClientCreateArgs::new()) }.unwrap_err().to_string();
    assert_eq!(
        error,
        "PJRT_Client_Create failed: INVALID_ARGUMENT (code 3): Unexpected PJRT_Client_Create_Args size: expected 96, \
         got 88"
    );
    assert_eq!(installed.live(), Live::default());
}

/// Set for the child that opens what is called libtpu.
const CHILD: &str = "PJRT_SYS_TEST_LIBTPU";

#[test]
fn libtpu_is_refused_where_it_would_ask_a_metadata_server() {
    let (folder, plugin) = installed(&Script::default());
    let libtpu = folder.path().join("libtpu.so");
    fs::rename(plugin.path(), &libtpu).unwrap();
    let child = |skip: Option<&str>| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "child", "--ignored", "--nocapture"])
            .env(CHILD, &libtpu)
            .env_remove(ENV_SKIP_METADATA);
        command.envs(skip.map(|value| (ENV_SKIP_METADATA, value)));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let refused = child(None);
    assert!(refused.contains("set TPU_SKIP_MDS_QUERY=1 before the program starts"), "{refused}");
    assert!(refused.contains("with chips: true"), "{refused}");
    assert!(child(Some("1")).contains("opened"));
}

#[test]
#[ignore = "a process that other tests start"]
fn child() {
    let Some(file) = std::env::var_os(CHILD) else { return };
    match Library::open(&Search::file(Path::new(&file))) {
        Ok(_) => println!("opened"),
        Err(error) => println!("{error}"),
    }
    println!("with chips: {}", Library::open(&Search::file(Path::new(&file)).with_tpu_chips(true)).is_ok());
}
