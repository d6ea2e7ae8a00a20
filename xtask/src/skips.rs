//! Checks of how tests are skipped, and of the tests that are bodies of processes.

use std::path::{Path, PathBuf};

use crate::source::{self, files};

/// The crate whose function prints why a test is skipped.
const TESTKIT: &str = "distribute-testkit/src/skip.rs";

/// Programs whose output tells what they skip on GPUs; no test asks them for GPUs.
const PROGRAMS: [&str; 2] = ["distribute-gpu-checks/src/main.rs", "distribute-gpu-training/src/main.rs"];

/// Returns the sources of all crates, without those that may print skips as they do.
fn sources(crates: &Path) -> Vec<PathBuf> {
    let all = files(crates, "rs").unwrap();
    all.into_iter().filter(|path| !path.ends_with(TESTKIT) && !PROGRAMS.iter().any(|of| path.ends_with(of))).collect()
}

/// Returns the lines that print a skip by a macro, whose output `cargo test` captures.
fn captured(text: &str) -> Vec<usize> {
    let calls = text.match_indices("!(").filter(|(at, _)| text[at + 2..].trim_start().starts_with("\"skipped"));
    calls.map(|(at, _)| 1 + text[..at].matches('\n').count()).collect()
}

/// Returns the tests that do nothing unless a variable is set: bodies of processes, which count as passed.
fn vacuous(text: &str) -> Vec<&str> {
    let tests = text.split("#[test]\n").skip(1).filter(|test| test.trim_start().starts_with("fn "));
    tests.filter(|test| gives_up(&first_statement(test))).filter_map(|test| test.lines().next()).collect()
}

fn first_statement(test: &str) -> String {
    let (mut statement, mut lines) = (String::new(), test.lines().skip(1));
    while let Some(line) = lines.next().filter(|_| statement.len() < 400) {
        statement.extend([line, "\n"]);
        let is_nested = line.starts_with("     ");
        if !is_nested && line.ends_with([';', '}']) {
            break;
        }
    }
    statement
}

/// Returns whether a statement leaves its function without a word if a variable is not set.
fn gives_up(statement: &str) -> bool {
    let leaves = ["else { return }", "is_none() {", "Err(_) => return", "Err(_) => {}"];
    statement.contains("env::var")
        && leaves.iter().any(|how| statement.contains(how))
        && !statement.contains("skipped(")
}

#[test]
fn skips_are_printed_where_they_are_seen() {
    for path in sources(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../crates"))) {
        let text = source::read(&path).unwrap();
        let lines = captured(&text);
        assert!(
            lines.is_empty(),
            "{}:{lines:?}: call distribute_testkit::skipped: cargo test captures this",
            path.display()
        );
    }
}

#[test]
fn bodies_of_processes_do_not_count_as_tests() {
    for path in sources(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../crates"))) {
        let text = source::read(&path).unwrap();
        let tests = vacuous(&text);
        assert!(
            tests.is_empty(),
            "{}: {tests:?} does nothing unless a variable is set; mark it #[ignore = \"a process that other tests \
             start\"], and start it by distribute_testkit::Job::of_test",
            path.display()
        );
    }
}

#[test]
fn both_are_found() {
    assert_eq!(
        captured("a\nprintln!(\"skipped: x\");\neprintln!(\n    \"skipped\");\nassert_eq!(a, \"skipped: x\");"),
        [2, 3]
    );
    let body = |statement: &str| format!("#[test]\nfn f() {{\n{statement}\n    rest();\n}}\n");
    for statement in [
        "    let Ok(a) = std::env::var(A) else { return };",
        "    if env::var_os(A).is_none() {\n        return;\n    }",
        "    match env::var(A) {\n        Ok(_) => {}\n        Err(_) => return,\n    }",
    ] {
        assert_eq!(vacuous(&body(statement)), ["fn f() {"], "{statement}");
        assert!(vacuous(&body(statement).replace("fn f", "#[ignore = \"\"]\nfn f")).is_empty(), "{statement}");
    }
    let skips = "    let Some(a) = env::var_os(A) else {\n        return skipped(\"A is not set\");\n    };";
    for statement in
        [skips, "    if env::var(A).is_ok() {\n        return;\n    }", "    let Some(a) = b else { return };"]
    {
        assert!(vacuous(&body(statement)).is_empty(), "{statement}");
    }
}
