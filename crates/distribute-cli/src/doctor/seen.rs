//! The input of checks: files under a root, and environment variables. Tests replace both.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use crate::environment;

/// Files and variables as a process sees them.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    root: PathBuf,
    variables: BTreeMap<String, String>,
}

impl Seen {
    pub(crate) fn by_this_process() -> Self {
        let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
        Self { root: PathBuf::from("/"), variables: environment::all(text) }
    }

    /// Returns the path of `path` below the root.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Returns the text of a file, if it can be read.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.path(path)).ok()
    }

    /// Returns the only line of a file.
    pub(crate) fn line(&self, path: &str) -> Option<String> {
        self.text(path).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    /// Returns the value of a variable; an empty one counts as unset, as in all these crates.
    pub(crate) fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str).filter(|value| !value.trim().is_empty())
    }

    /// Returns a function that looks variables up, for the other crates.
    pub(crate) fn lookup(&self) -> impl Fn(&str) -> Option<String> {
        |name: &str| self.variable(name).map(str::to_owned)
    }

    /// Returns a function that looks variables up, including those set to an empty value, which are errors in the
    /// description of a job.
    pub(crate) fn raw(&self) -> impl Fn(&str) -> Option<String> {
        |name: &str| self.variables.get(name).cloned()
    }

    /// Returns all variables that are not empty, by name.
    pub(crate) fn variables(&self) -> impl Iterator<Item = (&str, &str)> {
        self.variables.keys().filter_map(|name| Some((name.as_str(), self.variable(name)?)))
    }
}

/// Returns the value of the first `name: value` line.
pub(crate) fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim()).filter(|value| !value.is_empty())
}

/// Formats as `64 MiB`, `1.5 GiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["bytes", "KiB", "MiB", "GiB"] {
        if value < 1000.0 {
            return number(value, unit);
        }
        value /= 1024.0;
    }
    number(value, "TiB")
}

fn number(value: f64, unit: &str) -> String {
    match (value * 10.0).round() / 10.0 {
        rounded if rounded >= 100.0 || rounded.fract() == 0.0 => format!("{value:.0} {unit}"),
        rounded => format!("{rounded:.1} {unit}"),
    }
}

/// Formats as `1 core`, `2 cores`.
pub(crate) fn count(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

/// Returns the result of `body`, or `None` if it takes too long, in which case its thread is abandoned.
pub(crate) fn within<T: Send + 'static>(patience: Duration, body: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (done, result) = mpsc::sync_channel(1);
    let run = move || {
        let _ = done.send(body());
    };
    std::thread::Builder::new().name("check".to_owned()).spawn(run).ok()?;
    result.recv_timeout(patience).ok()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    impl Seen {
        /// Returns only these variables, without files.
        pub(crate) fn variables_only(variables: &[(&str, &str)]) -> Self {
            let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            Self { root: PathBuf::from("/nowhere"), variables: variables.iter().map(own).collect() }
        }

        /// Creates these files below a folder that the caller keeps.
        pub(crate) fn with_files(self, files: &[(&str, &str)]) -> (Self, tempfile::TempDir) {
            let folder = tempfile::tempdir().unwrap();
            for (path, text) in files {
                let path = folder.path().join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            (Self { root: folder.path().to_owned(), ..self }, folder)
        }
    }

    #[test]
    fn files_are_looked_up_below_the_root() {
        let (seen, _folder) = Seen::variables_only(&[("A", "1"), ("B", " ")]).with_files(&[("proc/x", " y\n")]);
        assert_eq!(seen.line("/proc/x").as_deref(), Some("y"));
        assert_eq!((seen.line("/proc/z"), seen.exists("/proc")), (None, true));
        assert_eq!((seen.variable("A"), seen.variable("B")), (Some("1"), None));
        assert_eq!(seen.variables().collect::<Vec<_>>(), [("A", "1")]);
    }

    #[test]
    fn quantities_have_units() {
        let shown = [0, 999, 64 << 20, 3 << 29, 50_563_149_824, 5 << 40].map(bytes);
        assert_eq!(shown, ["0 bytes", "999 bytes", "64 MiB", "1.5 GiB", "47.1 GiB", "5 TiB"]);
        assert_eq!((count(1, "core"), count(2, "core")), ("1 core".to_owned(), "2 cores".to_owned()));
        assert_eq!(field("a : 1\nb: 2 \nb: 3", "b"), Some("2"));
    }

    #[test]
    fn nothing_is_waited_for_too_long() {
        assert_eq!(within(Duration::from_secs(60), || 1), Some(1));
        let (hold, held) = mpsc::channel::<()>();
        assert_eq!(within(Duration::from_millis(1), move || held.recv().is_err()), None);
        drop(hold);
    }
}
