//! Compiled programs on disk.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use distribute_device::Error;
use distribute_device::pjrt::{CacheOutcome, Client, ClientOptions, CompileOptions, Plugin, ProgramCache, Search};
use simulated_pjrt::{Fail, Live, Script};

use super::Simulated;
use crate::programs::{soon, step};

fn get(cache: &ProgramCache, client: &Client, program: &str) -> CacheOutcome {
    cache.get_or_compile(client, program, &CompileOptions::default(), soon()).unwrap().1
}

fn programs(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn files_that_cannot_be_used_are_replaced_with_a_notice() {
    let simulated = Simulated::new(&Script::default());
    let client = simulated.client();
    let folder = tempfile::tempdir().unwrap();
    let cache = ProgramCache::open(folder.path().join("a/b"), 1 << 20).unwrap();
    let program = step(1, false);
    assert_eq!(get(&cache, &client, &program), CacheOutcome::Stored);
    let file = programs(&folder.path().join("a/b")).remove(0);
    let good = fs::read(&file).unwrap();
    assert_eq!(get(&cache, &client, &program), CacheOutcome::Found);
    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    for (bad, why) in [
        (Vec::new(), "0 bytes are not the size of a program"),
        (good[..39].to_vec(), "39 bytes are not the size of a program"),
        (good[..good.len() - 1].to_vec(), "the checksum is wrong"),
        (flipped, "the checksum is wrong"),
        (vec![0; 2 << 20], "2097152 bytes are not the size of a program"),
    ] {
        fs::write(&file, bad).unwrap();
        let outcome = get(&cache, &client, &program);
        assert!(matches!(&outcome, CacheOutcome::Replaced { problem } if problem.contains(why)), "{why}: {outcome:?}");
        assert_eq!(fs::read(&file).unwrap(), good);
    }
    // Another program, other options and other devices are other files.
    assert_eq!(get(&cache, &client, &step(1, true)), CacheOutcome::Stored);
    let options = CompileOptions::default().with("xla_option", true);
    assert_eq!(cache.get_or_compile(&client, &program, &options, soon()).unwrap().1, CacheOutcome::Stored);
    assert_eq!(programs(&folder.path().join("a/b")).len(), 3);
    drop(client);
    assert_eq!(simulated.live(), Live::default());
}

#[test]
fn programs_that_the_plugin_does_not_give_or_take_are_compiled() {
    let folder = tempfile::tempdir().unwrap();
    let cache = ProgramCache::open(folder.path(), 1 << 20).unwrap();
    let with = |function: &str| {
        Simulated::new(&Script { fail: vec![Fail::new(function, 1, 12, "not supported")], ..Script::default() })
    };
    let simulated = with("PJRT_Executable_Serialize");
    let client = simulated.client();
    let outcome = get(&cache, &client, &step(1, false));
    assert!(
        matches!(&outcome, CacheOutcome::NotStored { problem } if problem.contains("not supported")),
        "{outcome:?}"
    );
    assert!(programs(folder.path()).is_empty());
    let simulated = with("PJRT_Executable_DeserializeAndLoad");
    let client = simulated.client();
    assert_eq!(get(&cache, &client, &step(1, false)), CacheOutcome::Stored);
    let outcome = get(&cache, &client, &step(1, false));
    assert!(matches!(&outcome, CacheOutcome::Replaced { problem } if problem.contains("not supported")), "{outcome:?}");
    assert_eq!(get(&cache, &client, &step(1, false)), CacheOutcome::Found);
    let error = cache.get_or_compile(&client, "nonsense", &CompileOptions::default(), soon()).unwrap_err();
    assert!(matches!(error, Error::Pjrt { code: 3, .. }), "{error}");
    fs::write(folder.path().join("file"), "").unwrap();
    let error = ProgramCache::open(folder.path().join("file/folder"), 1).unwrap_err().to_string();
    assert!(error.contains("name a folder that can be written"), "{error}");
}

#[test]
fn the_folder_stays_within_its_limit_and_keeps_what_was_used_last() {
    let simulated = Simulated::new(&Script::default());
    let client = simulated.client();
    let folder = tempfile::tempdir().unwrap();
    let program = |number: u32| format!("// {number}\n{}", step(1, false));
    let wide = ProgramCache::open(folder.path(), 1 << 20).unwrap();
    assert_eq!(get(&wide, &client, &program(1)), CacheOutcome::Stored);
    let one = fs::metadata(&programs(folder.path())[0]).unwrap().len();
    let first = programs(folder.path()).remove(0);
    assert_eq!(get(&wide, &client, &program(2)), CacheOutcome::Stored);
    let age = |file: &Path, seconds| {
        let file = fs::File::options().append(true).open(file).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(seconds)).unwrap();
    };
    for file in programs(folder.path()) {
        age(&file, 100);
    }
    let (stale, fresh) = (folder.path().join("x.7-0.part"), folder.path().join("x.8-0.part"));
    for part in [&stale, &fresh] {
        fs::write(part, "part").unwrap();
    }
    age(&stale, 4000);
    // The first is used again, so that the second is the one to go.
    assert_eq!(get(&wide, &client, &program(1)), CacheOutcome::Found);
    let narrow = ProgramCache::open(folder.path(), 2 * one + one / 2).unwrap();
    assert_eq!(get(&narrow, &client, &program(3)), CacheOutcome::Stored);
    assert!(first.exists() && fresh.exists() && !stale.exists());
    assert_eq!(programs(folder.path()).len(), 3, "two programs and the part of a process that may write it");
    assert_eq!(get(&narrow, &client, &program(2)), CacheOutcome::Stored);
    let none = ProgramCache::open(folder.path(), 10).unwrap();
    let outcome = get(&none, &client, &program(4));
    let told = matches!(&outcome, CacheOutcome::NotStored { problem } if problem.contains("raise its limit"));
    assert!(told, "{outcome:?}");
}

/// The variables by which a test that starts itself tells the folder of programs and the plugin.
const FOLDER: &str = "DISTRIBUTE_TEST_PROGRAMS";
const PLUGIN: &str = "DISTRIBUTE_TEST_PLUGIN";

#[test]
fn other_flags_in_the_environment_compile_again() {
    if let Some(folder) = env::var_os(FOLDER) {
        let plugin = Plugin::open(&Search::file(env::var_os(PLUGIN).unwrap()), soon()).unwrap();
        let client = Client::create(&plugin, ClientOptions::new(), soon()).unwrap();
        get(&ProgramCache::open(folder, 1 << 20).unwrap(), &client, &step(1, false));
        return;
    }
    let (simulated, folder) = (Simulated::new(&Script::default()), tempfile::tempdir().unwrap());
    let (cache, flags) = (folder.path().join("programs"), folder.path().join("flags"));
    fs::write(&flags, "--xla_a=true").unwrap();
    // Returns the number of programs after a process with these flags has asked for one.
    let count_with = |variables: &[(&str, &str)]| {
        let test = ["simulated::cache::other_flags_in_the_environment_compile_again", "--exact"];
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(test).env_remove("XLA_FLAGS").env_remove("LIBTPU_INIT_ARGS").env(FOLDER, &cache);
        command.env(PLUGIN, simulated.installed.path());
        let output = command.envs(variables.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        programs(&cache).len()
    };
    let of_file = [("XLA_FLAGS", flags.to_str().unwrap())];
    assert_eq!(count_with(&[]), 1);
    assert_eq!(count_with(&[("XLA_FLAGS", "")]), 1);
    assert_eq!(count_with(&[("XLA_FLAGS", "--xla_a=true")]), 2);
    assert_eq!(count_with(&[("XLA_FLAGS", "--xla_a=true")]), 2);
    assert_eq!(count_with(&[("LIBTPU_INIT_ARGS", "--xla_a=true")]), 3);
    assert_eq!(count_with(&of_file), 4);
    fs::write(&flags, "--xla_a=false").unwrap();
    assert_eq!(count_with(&of_file), 5);
    assert_eq!(count_with(&of_file), 5);
}
