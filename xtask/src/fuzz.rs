//! `cargo xtask fuzz`: runs the fuzz targets of `fuzz/`, each for a minute, by cargo-fuzz and nightly Rust. Without
//! these it replays their corpora, as the tests of the crates do.

mod report;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use self::report::Report;
use crate::source;
use crate::workspace::Workspace;

#[derive(Args)]
pub(crate) struct Flags {
    /// The targets; without any, all.
    targets: Vec<String>,
    /// How long each target runs.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: u32,
    /// Adds the inputs that reach more of the code to the corpus of the repository, minimised.
    #[arg(long)]
    keep: bool,
    /// Prints the targets with their crates, and runs nothing.
    #[arg(long, conflicts_with_all = ["targets", "seconds", "keep"])]
    list: bool,
}

/// A fuzz target: a function of a crate.
#[derive(Debug, PartialEq, Eq)]
struct Target {
    name: String,
    package: String,
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let workspace = Workspace::load()?;
    let all = targets(&workspace.root)?;
    if flags.list {
        all.iter().for_each(|target| println!("{:<20} {}", target.name, target.package));
        return Ok(());
    }
    let chosen = choose(all, &flags.targets)?;
    if let Some(missing) = missing() {
        println!("skipped: fuzzing, for {missing}; the corpora are replayed instead");
        return replay(&chosen);
    }
    let runner = Runner { folder: workspace.root.join("fuzz"), work: workspace.target("fuzz"), flags };
    let mut failed = Vec::new();
    for target in &chosen {
        match runner.fuzz(&target.name)? {
            report if report.crash.is_none() => println!("passed: {:<20} {report}", target.name),
            report => {
                println!("FAILED: {:<20} {report}", target.name);
                failed.extend(report.crash.map(|input| runner.minimised(&target.name, &input)));
            }
        }
        if flags.keep {
            println!("kept: {} inputs of {}", runner.keep(&target.name)?, target.name);
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("targets failed; run again with:\n  {}", failed.join("\n  "))),
    }
}

/// Returns the targets in the order of their names.
fn targets(root: &Path) -> Result<Vec<Target>, String> {
    let mut all = Vec::new();
    for path in source::files(&root.join("fuzz/fuzz_targets"), "rs")? {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = source::read(&path)?;
        let called = text.split_once("::fuzz::").and_then(|(before, after)| {
            let package = before.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next()?;
            after.starts_with(&format!("{name}(")).then(|| package.replace('_', "-"))
        });
        let package = called.ok_or_else(|| format!("{} does not call a function {name}", path.display()))?;
        all.push(Target { name, package });
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

fn choose(all: Vec<Target>, names: &[String]) -> Result<Vec<Target>, String> {
    if let Some(unknown) = names.iter().find(|name| all.iter().all(|target| target.name != **name)) {
        let known: Vec<&str> = all.iter().map(|target| target.name.as_str()).collect();
        return Err(format!("{unknown:?} is not a fuzz target; these are: {}", known.join(", ")));
    }
    Ok(all.into_iter().filter(|target| names.is_empty() || names.contains(&target.name)).collect())
}

/// Returns what is missing to fuzz, and how to install it.
fn missing() -> Option<&'static str> {
    let is_there = |arguments: &[&str]| {
        let output = Command::new("cargo").args(arguments).env_remove("RUSTUP_TOOLCHAIN").output();
        output.is_ok_and(|output| output.status.success())
    };
    match (is_there(&["+nightly", "--version"]), is_there(&["+nightly", "fuzz", "--version"])) {
        (false, _) => Some("nightly Rust is not installed (rustup toolchain install nightly)"),
        (true, false) => Some("cargo-fuzz is not installed (cargo install cargo-fuzz)"),
        (true, true) => None,
    }
}

/// Runs the tests that replay the corpora of the targets.
fn replay(targets: &[Target]) -> Result<(), String> {
    let packages: BTreeSet<&str> = targets.iter().map(|target| target.package.as_str()).collect();
    let mut cargo = Command::new("cargo");
    cargo.args(["test", "--locked", "--lib"]);
    for package in &packages {
        cargo.args(["--package", package]);
    }
    let features = FEATURES.iter().filter(|feature| packages.contains(feature.split('/').next().unwrap_or_default()));
    cargo.arg("--features").arg(features.copied().collect::<Vec<&str>>().join(","));
    cargo.arg("fuzz::tests::replay");
    let status = cargo.status().map_err(|error| format!("cargo could not be started: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("cargo test failed: {status}")) }
}

/// Features that targets need and that the crates' own tests do not turn on.
const FEATURES: [&str; 5] = [
    "distribute-cluster/gce",
    "distribute-cluster/grpc",
    "distribute-cluster/kubernetes",
    "distribute-cluster/tpu",
    "distribute-train/status",
];

/// Runs cargo-fuzz.
struct Runner<'a> {
    /// The workspace of the targets.
    folder: PathBuf,
    /// Builds, working corpora and inputs that fail.
    work: PathBuf,
    flags: &'a Flags,
}

impl Runner<'_> {
    fn cargo(&self, subcommand: &str, name: &str) -> Command {
        let mut cargo = Command::new("cargo");
        cargo.args(["+nightly", "fuzz", subcommand, "--fuzz-dir"]).arg(&self.folder);
        cargo.arg("--target-dir").arg(&self.work).arg(name).env_remove("RUSTUP_TOOLCHAIN");
        cargo
    }

    fn committed(&self, name: &str) -> PathBuf {
        self.folder.join("corpus").join(name)
    }

    /// New inputs are kept here, and the next run begins with them.
    fn working(&self, name: &str) -> PathBuf {
        self.work.join("corpus").join(name)
    }

    /// Runs a target until its time is over or an input fails.
    fn fuzz(&self, name: &str) -> Result<Report, String> {
        let (working, artifacts) = (self.working(name), self.work.join("artifacts").join(name));
        for folder in [&working, &artifacts] {
            fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        }
        let mut cargo = self.cargo("run", name);
        cargo.arg(working).arg(self.committed(name)).arg("--").args(LIMITS);
        cargo.arg(format!("-max_total_time={}", self.flags.seconds));
        cargo.arg(format!("-artifact_prefix={}/", artifacts.display()));
        let output = cargo.output().map_err(|error| format!("cargo fuzz could not be started: {error}"))?;
        let text = String::from_utf8_lossy(&output.stderr);
        let report = Report::of(&text);
        if !output.status.success() && report.crash.is_none() {
            let last: Vec<&str> = text.lines().rev().take(30).collect();
            let last: Vec<&str> = last.into_iter().rev().collect();
            return Err(format!("{name} could not be run: {}\n{}", output.status, last.join("\n")));
        }
        Ok(report)
    }

    /// Minimises an input that fails, and returns the command that runs it again.
    fn minimised(&self, name: &str, input: &str) -> String {
        let mut cargo = self.cargo("tmin", name);
        cargo.args(["--runs", "2000"]).arg(input).arg("--").args(LIMITS);
        let output = cargo.output().map(|output| String::from_utf8_lossy(&output.stderr).into_owned());
        let smaller = output.unwrap_or_default().lines().rev().find_map(|line| {
            let path = line.trim().strip_prefix("cargo fuzz run ")?.split_whitespace().last()?;
            Path::new(path).exists().then(|| path.to_owned())
        });
        let path = smaller.unwrap_or_else(|| input.to_owned());
        format!("cargo +nightly fuzz run --target-dir {} {name} {path}", self.work.display())
    }

    /// Merges what is new of the working corpus into that of the repository, and returns how many inputs were added:
    /// the smallest ones, so that the corpus stays small.
    fn keep(&self, name: &str) -> Result<usize, String> {
        let committed = self.committed(name);
        let failed = |error: std::io::Error| format!("{}: {error}", committed.display());
        let merged = tempfile::tempdir().map_err(failed)?;
        let before: BTreeSet<_> = copy(&committed, merged.path()).map_err(failed)?.into_iter().collect();
        let mut cargo = self.cargo("run", name);
        cargo.arg(merged.path()).arg(self.working(name)).args(["--", "-merge=1"]).args(LIMITS);
        let output = cargo.output().map_err(|error| format!("cargo fuzz could not be started: {error}"))?;
        if !output.status.success() {
            return Err(format!("the corpus of {name} could not be merged: {}", output.status));
        }
        let mut new = Vec::new();
        for entry in fs::read_dir(merged.path()).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let bytes = entry.metadata().map_err(failed)?.len();
            if !before.contains(&entry.file_name()) && bytes <= LARGEST_KEPT {
                new.push((bytes, entry.path()));
            }
        }
        new.sort();
        new.truncate(MOST_FILES.saturating_sub(before.len()));
        fs::create_dir_all(&committed).map_err(failed)?;
        for (_, path) in &new {
            fs::copy(path, committed.join(path.file_name().unwrap_or_default())).map_err(failed)?;
        }
        Ok(new.len())
    }
}

/// Copies the files of a folder, and returns their names.
fn copy(from: &Path, to: &Path) -> std::io::Result<Vec<std::ffi::OsString>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        fs::copy(entry.path(), to.join(entry.file_name()))?;
        names.push(entry.file_name());
    }
    Ok(names)
}

/// Limits of every run: an input must not take more memory, nor more time, than any message of its size may.
const LIMITS: [&str; 5] =
    ["-rss_limit_mb=2048", "-malloc_limit_mb=512", "-timeout=10", "-max_len=4096", "-print_final_stats=1"];

/// The largest number of files of a committed corpus, and the size of one.
const MOST_FILES: usize = 40;
const LARGEST_KEPT: u64 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
    }

    #[test]
    fn every_target_has_a_binary_a_corpus_and_a_row_of_the_documentation() {
        let manifest = fs::read_to_string(root().join("fuzz/Cargo.toml")).unwrap();
        let page = fs::read_to_string(root().join("docs/reliability.md")).unwrap();
        let (_, section) = page.split_once("\n### Fuzz targets").expect("the page has the section");
        let section = section.split("\n#").next().unwrap_or_default();
        let all = targets(&root()).unwrap();
        for Target { name, package } in &all {
            assert!(manifest.contains(&format!("name = \"{name}\"\npath = \"fuzz_targets/{name}.rs\"")), "{name}");
            assert!(section.contains(&format!("| `{name}` | {package} |")), "{name} of {package} has no row");
            let corpus = root().join("fuzz/corpus").join(name);
            let sizes: Vec<u64> =
                fs::read_dir(&corpus).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).collect();
            assert!(!sizes.is_empty() && sizes.len() <= 2 * MOST_FILES, "{name}: {} files", sizes.len());
        }
        assert_eq!(section.matches("\n| `").count(), all.len(), "rows of targets that are not there");
        assert_eq!(manifest.matches("[[bin]]").count(), all.len());
        assert_eq!(fs::read_dir(root().join("fuzz/corpus")).unwrap().count(), all.len());
    }

    #[test]
    fn unknown_targets_are_named() {
        let of = |name: &str| Target { name: name.to_owned(), package: "a".to_owned() };
        let error = choose(vec![of("call"), of("csv")], &["cal".to_owned()]).unwrap_err();
        assert_eq!(error, "\"cal\" is not a fuzz target; these are: call, csv");
        assert_eq!(choose(vec![of("call"), of("csv")], &["csv".to_owned()]), Ok(vec![of("csv")]));
        assert_eq!(choose(vec![of("call")], &[]), Ok(vec![of("call")]));
    }
}
