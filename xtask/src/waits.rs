//! Holds the tables under "Waits" in docs/reliability.md against the code of the crates that users run: every file that
//! waits is named there with what ends the wait, and every file that is named waits.
//!
//! Waits are found by text: calls that can block, of the standard library, crossbeam, tokio, rustix, NCCL and CUDA's
//! driver, and of methods of the same names here. Comments, strings and test code do not count.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::source::code;

/// Files by their crate and by their path in its `src`, each with its waits.
type Files = BTreeMap<(String, String), Vec<Wait>>;

/// A call that can block.
#[derive(Debug, PartialEq)]
struct Wait {
    line: usize,
    call: &'static str,
    /// Whether an argument or the caller may limit it.
    is_limited: bool,
}

/// A row of a table of waits.
#[derive(Debug)]
struct Row {
    line: usize,
    in_crate: String,
    files: Vec<String>,
    at_most: String,
}

/// The part of a file that users run.
#[derive(Debug)]
struct Source {
    /// By their numbers, from 1; without comments, strings and modules of tests.
    lines: Vec<(usize, String)>,
    /// Modules of tests that are files of their own.
    test_modules: Vec<String>,
}

/// The attributes of code that users do not run.
const TESTS: [&str; 3] = ["#[cfg(test)]", "#[cfg(all(test", "#[cfg(any(test, fuzzing))]"];

impl Source {
    fn of(text: &str) -> Source {
        let (text, mut source) = (code(text), Source { lines: Vec::new(), test_modules: Vec::new() });
        let mut lines = text.lines().zip(1..);
        while let Some((line, number)) = lines.next() {
            if !TESTS.iter().any(|test| line.starts_with(test)) {
                source.lines.push((number, line.to_owned()));
                continue;
            }
            let item = lines.by_ref().find(|(line, _)| !line.starts_with("#[")).map_or("", |(line, _)| line);
            if let Some(name) = item.strip_suffix(';').and_then(|item| Some(item.split_once("mod ")?.1)) {
                source.test_modules.push(name.to_owned());
            } else if item.ends_with('{') {
                lines.by_ref().find(|(line, _)| line.starts_with('}'));
            }
        }
        source
    }

    fn waits(&self) -> Vec<Wait> {
        let mut waits = Vec::new();
        for (place, (number, line)) in self.lines.iter().enumerate() {
            if !line.as_bytes().contains(&b'(') && !line.contains(".await") {
                continue;
            }
            let next = self.lines.get(place + 1).map_or("", |(_, next)| next.trim_start());
            let wait = |call, is_limited| calls(line, call).then_some(Wait { line: *number, call, is_limited });
            // A condition variable's plain `wait` takes a guard, or returns a poisoned lock's error; none of ours does.
            let plain = line.contains(".wait(&mut ") || line.contains(".unwrap") || next.starts_with(".unwrap");
            let of_lock = |wait: &Wait| wait.call == ".wait(" && plain;
            let limited = LIMITED.into_iter().filter_map(|call| wait(call, true));
            let limited = limited.map(|wait| Wait { is_limited: !of_lock(&wait), ..wait });
            // As in `timeout_at(deadline, arrived.recv())`.
            let unlimited = UNLIMITED.into_iter().filter_map(|call| wait(call, line.contains("timeout")));
            waits.extend(limited.chain(unlimited));
        }
        waits
    }
}

/// Whether a line calls a function; a definition, or a longer name that contains this one, does not count.
fn calls(line: &str, call: &str) -> bool {
    if !line.contains(call) {
        return false;
    }
    let line = NO_WAITS.iter().fold(line.to_owned(), |line, other| line.replace(other, ""));
    let in_name = |next: char| next.is_alphanumeric() || next == '_';
    line.match_indices(call).any(|(at, _)| {
        let (before, after) = (&line[..at], &line[at + call.len()..]);
        let begins = call.starts_with('.') || !before.ends_with(in_name) && !before.ends_with("fn ");
        begins && !(call.ends_with(in_name) && after.starts_with(in_name))
    })
}

/// The waits of all crates that users run.
fn files(crates: &Path) -> Files {
    let mut files = Files::new();
    for folder in children(crates) {
        let name = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if TEST_CRATES.contains(&name.as_str()) {
            continue;
        }
        let root = folder.join("src");
        let mut sources = BTreeMap::new();
        read(&root, &mut sources);
        let tests: Vec<PathBuf> = sources.iter().flat_map(|(path, source)| test_paths(path, source)).collect();
        let is_test = |path: &Path| tests.iter().any(|test| path.with_extension("").starts_with(test));
        for (path, source) in sources.iter().filter(|(path, _)| !is_test(path)) {
            let path = path.strip_prefix(&root).map(|path| path.display().to_string()).unwrap_or_default();
            files.insert((name.clone(), path), source.waits());
        }
    }
    files
}

fn read(folder: &Path, sources: &mut BTreeMap<PathBuf, Source>) {
    for path in children(folder) {
        if path.is_dir() {
            read(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            sources.insert(path, Source::of(&text));
        }
    }
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// Where the modules of tests of a file are, without `.rs`.
fn test_paths(path: &Path, source: &Source) -> Vec<PathBuf> {
    let folder = match path.file_stem().and_then(|stem| stem.to_str()) {
        Some("lib" | "main") => path.with_file_name(""),
        _ => path.with_extension(""),
    };
    source.test_modules.iter().map(|name| folder.join(name)).collect()
}

/// The rows of the tables under "Waits", each with the crate that the heading above it names.
fn rows(document: &str) -> Vec<Row> {
    let lines = document.lines().zip(1..).skip_while(|(line, _)| *line != "## Waits").skip(1);
    let (mut rows, mut in_crate) = (Vec::new(), "");
    for (text, line) in lines.take_while(|(line, _)| !line.starts_with("## ")) {
        in_crate = text.strip_prefix("### ").unwrap_or(in_crate);
        let cells: Vec<&str> = text.split('|').map(str::trim).collect();
        if let ["", place, _, at_most, _, ""] = cells[..]
            && place.contains('`')
        {
            let files = place.split('`').skip(1).step_by(2).map(str::to_owned).collect();
            rows.push(Row { line, in_crate: in_crate.to_owned(), files, at_most: at_most.to_owned() });
        }
    }
    rows
}

/// The differences between the code and the tables, in words.
fn problems(files: &Files, rows: &[Row]) -> Vec<String> {
    let mut problems = Vec::new();
    for Row { line, in_crate, files: named, at_most } in rows {
        let row = format!("docs/reliability.md:{line}");
        for file in named {
            if files.get(&(in_crate.clone(), file.clone())).is_none_or(Vec::is_empty) {
                problems.push(format!("{row}: `{file}` of {in_crate} is not there or waits for nothing: take it out"));
            }
        }
        if at_most.is_empty() || at_most == REASON {
            problems.push(format!("{row}: it does not say what ends the wait: give the bound, or \"{REASON} …\""));
        }
    }
    for ((in_crate, file), waits) in files {
        let named: Vec<&Row> =
            rows.iter().filter(|row| row.in_crate == *in_crate && row.files.contains(file)).collect();
        let has_reason = named.iter().any(|row| row.at_most.starts_with(REASON));
        for Wait { line, call, is_limited } in waits {
            let place = format!("crates/{in_crate}/src/{file}:{line}: `{call}`");
            if named.is_empty() {
                problems.push(format!(
                    "{place} can block: name the file in the table of {in_crate} under \"## Waits\" in \
                    docs/reliability.md, \
                     with what ends the wait"
                ));
            } else if !is_limited && !has_reason {
                problems.push(format!(
                    "{place} has no deadline: give it one, or name the file in a row of docs/reliability.md \
                    whose \"at most\" \
                     begins with \"{REASON}\" and says what ends the wait"
                ));
            }
        }
    }
    problems
}

/// Begins "at most" where a wait has no deadline; the reason follows.
const REASON: &str = "none:";

/// Crates that run in tests alone.
const TEST_CRATES: [&str; 8] = [
    "distribute-benches",
    "distribute-conformance",
    "distribute-gpu-checks",
    "distribute-gpu-training",
    "distribute-testkit",
    "simulated-cuda",
    "simulated-nccl",
    "simulated-pjrt",
];

/// Calls with a limit, or that callers limit: by a timeout of the socket, a `select!`, a deadline of the whole. A
/// bounded channel blocks its senders, and receivers that are iterated over.
const LIMITED: [&str; 29] = [
    ".accept()",
    ".await",
    ".read_exact(",
    ".read_line(",
    ".read_to_end(",
    ".recv_deadline(",
    ".recv_timeout(",
    ".send_deadline(",
    ".send_timeout(",
    ".synchronize(",
    ".wait(",
    ".wait_for(",
    ".wait_timeout(",
    ".wait_timeout_while(",
    ".wait_while_for(",
    "block_on(",
    "bounded(",
    "bounded::<",
    "connect_timeout(",
    "look_up(",
    "park_timeout(",
    "poll(&mut ",
    "shutdown_timeout(",
    "sleep(",
    "spin_loop(",
    "sync_channel(",
    "time::timeout(",
    "timeout_at(",
    "yield_now(",
];

/// Calls without any.
const UNLIMITED: [&str; 21] = [
    ".changed()",
    ".closed()",
    ".comm_abort(",
    ".comm_destroy(",
    ".forever()",
    ".frame()",
    ".join()",
    ".notified()",
    ".to_socket_addrs()",
    ".wait_while(",
    "TcpStream::connect(",
    "UnixStream::connect(",
    "barrier.wait()",
    "child.wait()",
    "free_host(",
    "free_sync(",
    "lookup_host(",
    "park()",
    "reader.read(",
    // An arm of crossbeam's `select!`.
    "recv(",
    "thread::scope(",
];

/// Methods of ours that are called as one that blocks: they put parts of a payload together.
const NO_WAITS: [&str; 2] = ["arguments.join()", "payload.join()"];

mod tests {
    use super::*;

    /// The waits of a file that is all there is of a crate `distribute-x`.
    fn only(text: &str) -> Files {
        Files::from([(("distribute-x".to_owned(), "a.rs".to_owned()), Source::of(text).waits())])
    }

    fn table(row: &str) -> Vec<Row> {
        rows(&format!(
            "| `b.rs` | | | |\n## Waits\n### distribute-x\n| where | waits for | at most | then \
            |\n|---|---|---|---|\n{row}\n"
        ))
    }

    #[test]
    fn the_tables_say_what_ends_each_wait_of_the_code() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let document = fs::read_to_string(root.join("docs/reliability.md")).unwrap();
        let problems = problems(&files(&root.join("crates")), &rows(&document));
        assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    }

    #[test]
    fn waits_are_found_on_their_lines() {
        let text = "fn f() {\n    thread.join();\n    let state = changed\n        .wait(state)\n        \
        .unwrap();\n    work.wait()?;\n}";
        let wait = |line, call, is_limited| Wait { line, call, is_limited };
        let expected = [wait(2, ".join()", false), wait(4, ".wait(", false), wait(6, ".wait(", true)];
        assert_eq!(Source::of(text).waits(), expected);
        assert!(Source::of("timeout_at(deadline, arrived.recv()).await").waits().iter().all(|wait| wait.is_limited));
    }

    #[test]
    fn comments_strings_and_names_that_are_alike_are_no_waits() {
        let text = r##"
            // thread.join();
            /* thread.join();
               thread.join(); */
            let quote = ('"', b'\'', "\"", "thread.join(); \
                thread.join();", r#""thread.join()"#);
            fn block_on(&self) {}
            fn first<'a>(lines: &'a [&'a str]) -> String { lines.join(", ") + &payload.join() + &try_recv() }
        "##;
        assert_eq!(Source::of(text).waits(), []);
    }

    #[test]
    fn tests_are_no_waits() {
        let inside = Source::of("#[cfg(test)]\nmod tests {\n    use x;\n    thread.join();\n}\nthread.join();");
        assert_eq!(inside.waits().iter().map(|wait| wait.line).collect::<Vec<_>>(), [6]);
        let beside = Source::of("#[cfg(all(test, loom))]\nmod model;\n#[cfg(test)]\npub(crate) mod tests;");
        assert_eq!(test_paths(Path::new("src/a.rs"), &beside), [Path::new("src/a/model"), Path::new("src/a/tests")]);
        assert_eq!(test_paths(Path::new("src/lib.rs"), &beside)[0], Path::new("src/model"));
    }

    #[test]
    fn a_wait_that_no_row_names_is_reported() {
        let [problem] = &problems(&only("fn f() {\n    thread::sleep(time);\n}"), &table(""))[..] else { panic!() };
        assert!(problem.starts_with("crates/distribute-x/src/a.rs:2: `sleep(` can block: name the file"), "{problem}");
        // Nor does one of another section, or of another crate.
        assert_eq!(problems(&only("thread.join()"), &table("### distribute-y\n| `a.rs` | | none: x | |")).len(), 2);
    }

    #[test]
    fn a_row_that_names_no_wait_is_reported() {
        let [problem] = &problems(&only("fn f() {}"), &table("| `a.rs` | peers | 5 s | error |"))[..] else { panic!() };
        assert!(
            problem.starts_with("docs/reliability.md:6: `a.rs` of distribute-x is not there or waits"),
            "{problem}"
        );
        assert_eq!(problems(&Files::new(), &table("| `a.rs`, `c.rs` | peers | 5 s | error |")).len(), 2);
    }

    #[test]
    fn a_wait_without_a_deadline_needs_a_reason() {
        let problems = |row: &str| problems(&only("thread.join();"), &table(row));
        let [problem] = &problems("| `a.rs` | its thread | 5 s | |")[..] else { panic!() };
        assert!(
            problem.starts_with("crates/distribute-x/src/a.rs:1: `.join()` has no deadline: give it one"),
            "{problem}"
        );
        assert_eq!(problems("| `a.rs` | its thread | none: it ends with its reader | |"), [""; 0]);
        assert!(problems("| `a.rs` | its thread | none: | |")[0].contains("what ends the wait"));
    }
}
