//! The results of criterion's benchmarks, as it leaves them in a folder for each.

use std::fs;
use std::path::Path;
use std::time::SystemTime;

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// One benchmark of the last run.
#[derive(Debug, PartialEq)]
pub(super) struct Benchmark {
    pub(super) name: String,
    /// The time of an iteration.
    pub(super) median: Estimate,
    pub(super) throughput: Option<Throughput>,
    /// The change against the baseline, if there is one of this benchmark.
    pub(super) change: Option<Change>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Estimate {
    pub(super) nanoseconds: f64,
}

/// The amount that an iteration processes.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub(super) enum Throughput {
    Bytes(u64),
    Elements(u64),
}

/// The change of the median as a share, 0.1 for a tenth more time, and its confidence interval of 95 %.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Change {
    pub(super) share: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

/// Reads the benchmarks that were measured after `since`, in the order of their names.
pub(super) fn read(folder: &Path, since: SystemTime) -> Result<Vec<Benchmark>, String> {
    let mut found = Vec::new();
    visit(folder, since, &mut found)?;
    found.sort_by_cached_key(|benchmark| natural(&benchmark.name));
    Ok(found)
}

fn visit(folder: &Path, since: SystemTime, found: &mut Vec<Benchmark>) -> Result<(), String> {
    let new = folder.join("new");
    if let Some(estimates) = parsed::<Estimates>(&new.join("estimates.json"), since)? {
        let Some(described) = parsed::<Described>(&new.join("benchmark.json"), since)? else {
            return Err(format!("{} has estimates and no benchmark.json; remove it", new.display()));
        };
        let change = parsed::<Estimates>(&folder.join("change").join("estimates.json"), since)?;
        found.push(Benchmark {
            name: described.full_id,
            median: Estimate { nanoseconds: estimates.median.point_estimate },
            throughput: described.throughput,
            change: change.map(|change| change.median.into()),
        });
    }
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for entry in entries {
        let path = entry.map_err(|error| format!("{}: {error}", folder.display()))?.path();
        if path.is_dir() && path != new {
            visit(&path, since, found)?;
        }
    }
    Ok(())
}

/// Parses a file; `None` if it does not exist, or is older.
fn parsed<T: DeserializeOwned>(path: &Path, since: SystemTime) -> Result<Option<T>, String> {
    let problem = |problem: &dyn std::fmt::Display| format!("{}: {problem}", path.display());
    let written = match fs::metadata(path).and_then(|file| file.modified()) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        written => written.map_err(|error| problem(&error))?,
    };
    if written < since {
        return Ok(None);
    }
    let text = fs::read_to_string(path).map_err(|error| problem(&error))?;
    serde_json::from_str(&text).map(Some).map_err(|error| problem(&error))
}

/// Returns a key by which "64 B" comes before "1 KiB", and "2 threads" before "10 threads".
fn natural(name: &str) -> Vec<(String, u64)> {
    let name = name.replace(" KiB", "000 B").replace(" MiB", "000000 B");
    let mut parts: Vec<(String, u64)> = vec![Default::default()];
    for c in name.chars() {
        let ends_number = parts.last().is_some_and(|(_, number)| *number > 0) && !c.is_ascii_digit();
        if ends_number {
            parts.push(Default::default());
        }
        if let Some((text, number)) = parts.last_mut() {
            match c.to_digit(10) {
                Some(digit) => *number = number.saturating_mul(10).saturating_add(digit.into()),
                None => text.push(c),
            }
        }
    }
    parts
}

/// `estimates.json`: times in nanoseconds, or changes as shares.
#[derive(Deserialize)]
struct Estimates {
    median: Statistic,
}

#[derive(Deserialize)]
struct Statistic {
    point_estimate: f64,
    confidence_interval: Interval,
}

#[derive(Deserialize)]
struct Interval {
    lower_bound: f64,
    upper_bound: f64,
}

/// `benchmark.json`.
#[derive(Deserialize)]
struct Described {
    full_id: String,
    throughput: Option<Throughput>,
}

impl From<Statistic> for Change {
    fn from(statistic: Statistic) -> Change {
        let Interval { lower_bound: low, upper_bound: high } = statistic.confidence_interval;
        Change { share: statistic.point_estimate, low, high }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Returns the text of an `estimates.json` with the statistics that criterion writes.
    fn estimates([low, estimate, high]: [f64; 3]) -> String {
        let statistic = |estimate: f64| {
            let interval = format!(r#"{{"confidence_level":0.95,"lower_bound":{low},"upper_bound":{high}}}"#);
            format!(r#"{{"confidence_interval":{interval},"point_estimate":{estimate},"standard_error":0.1}}"#)
        };
        format!(r#"{{"mean":{},"median":{},"slope":null}}"#, statistic(estimate * 2.0), statistic(estimate))
    }

    fn write(folder: &Path, path: &str, text: &str) {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn described(name: &str, throughput: &str) -> String {
        format!(r#"{{"group_id":"g","full_id":"{name}","throughput":{throughput},"directory_name":"d"}}"#)
    }

    #[test]
    fn benchmarks_of_the_last_run_are_found_with_their_changes() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "sum/f32/1 KiB/new/estimates.json", &estimates([9.0, 10.0, 11.0]));
        write(folder.path(), "sum/f32/1 KiB/new/benchmark.json", &described("sum/f32/1 KiB", r#"{"Bytes":1024}"#));
        write(folder.path(), "sum/f32/1 KiB/change/estimates.json", &estimates([-0.1, 0.05, 0.1]));
        // A baseline is not a benchmark.
        write(folder.path(), "sum/f32/1 KiB/main/estimates.json", &estimates([9.0, 10.0, 11.0]));
        write(folder.path(), "sum/f32/64 B/new/estimates.json", &estimates([1.0, 2.0, 3.0]));
        write(folder.path(), "sum/f32/64 B/new/benchmark.json", &described("sum/f32/64 B", "null"));
        let found = read(folder.path(), SystemTime::UNIX_EPOCH).unwrap();
        let names: Vec<&str> = found.iter().map(|benchmark| benchmark.name.as_str()).collect();
        assert_eq!(names, ["sum/f32/64 B", "sum/f32/1 KiB"]);
        assert_eq!((found[0].throughput, found[0].change), (None, None));
        assert_eq!((found[0].median.nanoseconds, found[1].median.nanoseconds), (2.0, 10.0));
        assert_eq!(found[1].throughput, Some(Throughput::Bytes(1024)));
        assert_eq!(found[1].change, Some(Change { share: 0.05, low: -0.1, high: 0.1 }));
        let later = SystemTime::now() + Duration::from_secs(3600);
        assert_eq!(read(folder.path(), later).unwrap(), []);
    }

    #[test]
    fn files_that_cannot_be_read_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let problem = read(&folder.path().join("missing"), SystemTime::UNIX_EPOCH).unwrap_err();
        assert!(problem.contains("missing"), "{problem}");
        write(folder.path(), "a/new/estimates.json", &estimates([1.0, 2.0, 3.0]));
        let problem = read(folder.path(), SystemTime::UNIX_EPOCH).unwrap_err();
        assert!(problem.contains("no benchmark.json"), "{problem}");
        write(folder.path(), "a/new/estimates.json", "{");
        let problem = read(folder.path(), SystemTime::UNIX_EPOCH).unwrap_err();
        assert!(problem.contains("a/new/estimates.json"), "{problem}");
    }
}
