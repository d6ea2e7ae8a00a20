//! `cargo xtask bench micro`: inner loops of the workspace, measured by criterion.

mod results;
mod table;

use std::process::Command;
use std::time::SystemTime;

use clap::Args;

use self::results::{Benchmark, read};
use crate::error::text;
use crate::workspace::Workspace;

#[derive(Args)]
pub(crate) struct Flags {
    /// Only benchmarks whose names match this regular expression
    filter: Option<String>,
    /// Compare with the results that were saved under this name, and fail if one is slower
    #[arg(long, value_name = "NAME", conflicts_with = "save_baseline")]
    baseline: Option<String>,
    /// Save the results under this name
    #[arg(long, value_name = "NAME")]
    save_baseline: Option<String>,
    /// Measure each benchmark for a fraction of a second
    #[arg(long)]
    quick: bool,
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    for name in [&flags.baseline, &flags.save_baseline].into_iter().flatten() {
        check(name)?;
    }
    let folder = Workspace::load()?.target("criterion");
    let started = SystemTime::now();
    let mut command = Command::new("cargo");
    command.args(["bench", "--quiet", "--locked", "--package", "distribute-benches", "--"]).args(flags.of_criterion());
    let status = command.env("CRITERION_HOME", &folder).status().map_err(text)?;
    if !status.success() {
        return Err(format!("cargo bench failed: {status}"));
    }
    let benchmarks = read(&folder, started)?;
    if benchmarks.is_empty() {
        let filter = flags.filter.as_deref().unwrap_or_default();
        return Err(format!("no benchmark matches {filter:?}; without a filter all are measured and named"));
    }
    println!("\n{}", table::of(&benchmarks, flags.baseline.is_some()));
    match &flags.baseline {
        Some(baseline) => slower(&benchmarks, baseline),
        None => Ok(()),
    }
}

impl Flags {
    fn of_criterion(&self) -> Vec<&str> {
        let mut arguments = vec!["--noplot"];
        match (&self.baseline, &self.save_baseline) {
            // A benchmark that is newer than the baseline is measured, and compared with nothing.
            (Some(name), _) => arguments.extend(["--baseline-lenient", name]),
            (_, Some(name)) => arguments.extend(["--save-baseline", name]),
            _ => {}
        }
        if self.quick {
            arguments.extend(["--warm-up-time", "0.1", "--measurement-time", "0.4", "--sample-size", "20"]);
        }
        arguments.extend(self.filter.as_deref());
        arguments
    }
}

/// Returns an error if a baseline cannot have this name, which becomes that of a folder.
fn check(name: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    // Folders that criterion uses itself.
    let is_taken = ["new", "change", "report"].contains(&name) || name.starts_with('.');
    match !name.is_empty() && name.chars().all(is_plain) && !is_taken {
        true => Ok(()),
        false => Err(format!(
            "{name:?} cannot name a baseline; use letters, digits, '-', '_' and '.', and none of new, change and report"
        )),
    }
}

/// Returns an error that names the benchmarks that are slower than the baseline.
fn slower(benchmarks: &[Benchmark], baseline: &str) -> Result<(), String> {
    if benchmarks.iter().all(|benchmark| benchmark.change.is_none()) {
        return Err(format!("there is no baseline {baseline:?} of these benchmarks; make it with --save-baseline"));
    }
    let slower: Vec<String> = benchmarks.iter().filter_map(table::slow_down).collect();
    match slower.is_empty() {
        true => Ok(()),
        false => Err(format!("{} slower than {baseline:?}:\n{}", slower.len(), slower.join("\n"))),
    }
}

#[cfg(test)]
mod tests {
    use super::results::{Change, Estimate};
    use super::*;

    fn flags(filter: Option<&str>, baseline: Option<&str>, save_baseline: Option<&str>, quick: bool) -> Flags {
        let [filter, baseline, save_baseline] = [filter, baseline, save_baseline].map(|flag| flag.map(str::to_owned));
        Flags { filter, baseline, save_baseline, quick }
    }

    #[test]
    fn flags_become_those_of_criterion() {
        assert_eq!(flags(None, None, None, false).of_criterion(), ["--noplot"]);
        let compared = flags(Some("adam"), Some("main"), None, false);
        assert_eq!(compared.of_criterion(), ["--noplot", "--baseline-lenient", "main", "adam"]);
        let saved = flags(None, None, Some("main"), true);
        assert_eq!(saved.of_criterion()[..4], ["--noplot", "--save-baseline", "main", "--warm-up-time"]);
    }

    #[test]
    fn names_of_baselines_are_folders_of_their_own() {
        check("main-2").unwrap();
        for name in ["", "new", "change", "..", "a/b", "ä"] {
            let problem = check(name).unwrap_err();
            assert!(problem.contains("use letters"), "{problem}");
        }
    }

    #[test]
    fn a_slow_down_beyond_the_noise_is_an_error() {
        let benchmark = |name: &str, change: Option<[f64; 3]>| {
            let change = change.map(|[low, share, high]| Change { share, low, high });
            Benchmark { name: name.to_owned(), median: Estimate { nanoseconds: 1.0 }, throughput: None, change }
        };
        let same = benchmark("same", Some([-0.01, 0.06, 0.12]));
        let little = benchmark("little", Some([0.01, 0.03, 0.05]));
        let faster = benchmark("faster", Some([-0.3, -0.2, -0.1]));
        let new = benchmark("new", None);
        slower(&[same, little, faster, new], "main").unwrap();
        let all = [benchmark("a", Some([0.06, 0.08, 0.1])), benchmark("b", None)];
        let problem = slower(&all, "main").unwrap_err();
        assert_eq!(problem, "1 slower than \"main\":\na: +8.0 % (+6.0 to +10.0 %)");
        let problem = slower(&all[1..], "main").unwrap_err();
        assert!(problem.contains("--save-baseline"), "{problem}");
    }
}
