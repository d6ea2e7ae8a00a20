//! The end of a program: messages and exit codes.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::Result;

/// Converts a program's outcome into its exit code. An error's message is written to standard error, and the code tells
/// job managers [what to do](crate::Error::exit_code).
///
/// The message is also written where the manager looks for it, if that place exists: to the file that
/// TORCHELASTIC_ERROR_FILE names (torchrun, `distribute run`), to `/dev/termination-log` in a pod of Kubernetes
/// (`kubectl describe pod`), and to `/opt/ml/output/failure` in SageMaker (FailureReason).
///
/// # Examples
/// ```
/// use std::process::ExitCode;
///
/// fn train() -> distribute::Result<()> {
///     Ok(())
/// }
///
/// fn main() -> ExitCode {
///     distribute::exit(train())
/// }
/// ```
#[expect(clippy::print_stderr, reason = "it is the program's last word")]
pub fn exit(outcome: Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let message = error.to_string();
            eprintln!("error: {message}");
            let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
            for place in places(|name| variable(name).map(PathBuf::from), Path::new("/")) {
                if let Err(error) = place.write(&message) {
                    eprintln!("warning: the error could not be written to {}: {error}", place.path().display());
                }
            }
            ExitCode::from(error.exit_code())
        }
    }
}

/// Where a manager looks for the error of a program.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// A JSON object with a message and a time.
    TorchElastic(PathBuf),
    /// The text.
    Text(PathBuf),
}

/// Returns the places that exist, given the environment and the root of the file system.
fn places(variable: impl Fn(&str) -> Option<PathBuf>, root: &Path) -> Vec<Place> {
    let mut places: Vec<Place> = variable("TORCHELASTIC_ERROR_FILE").map(Place::TorchElastic).into_iter().collect();
    let log = root.join("dev/termination-log");
    // The file exists in containers of pods alone, but a program that others start should write no file unasked.
    if variable("KUBERNETES_SERVICE_HOST").is_some() && log.is_file() {
        places.push(Place::Text(log));
    }
    if root.join("opt/ml/input/config/resourceconfig.json").is_file() {
        places.push(Place::Text(root.join("opt/ml/output/failure")));
    }
    places
}

impl Place {
    fn path(&self) -> &Path {
        match self {
            Place::TorchElastic(path) | Place::Text(path) => path,
        }
    }

    fn write(&self, message: &str) -> io::Result<()> {
        match self {
            Place::TorchElastic(path) => {
                // A clock before 1970 has no time to tell.
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
                std::fs::write(path, serde_json::json!({ "message": message, "timestamp": now }).to_string())
            }
            // Kubernetes reads the last 4 KiB of a file, SageMaker 1 KiB.
            Place::Text(path) => std::fs::write(path, message.chars().take(1000).collect::<String>()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_written_where_managers_look() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("error.json");
        let torch = |name: &str| (name == "TORCHELASTIC_ERROR_FILE").then(|| file.clone());
        let found = places(torch, root.path());
        assert_eq!(found, [Place::TorchElastic(file.clone())]);
        found[0].write("disk \"full\"").unwrap();
        let written: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        assert_eq!(written["message"], "disk \"full\"");
        assert!(written["timestamp"].as_u64().unwrap() > 1_700_000_000);

        assert_eq!(places(|_| None, root.path()), []);
        for (folder, name) in [("dev", "termination-log"), ("opt/ml/input/config", "resourceconfig.json")] {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
            std::fs::write(root.path().join(folder).join(name), "").unwrap();
        }
        std::fs::create_dir_all(root.path().join("opt/ml/output")).unwrap();
        let pod = |name: &str| (name == "KUBERNETES_SERVICE_HOST").then(|| "10.0.0.1".into());
        assert_eq!(places(|_| None, root.path()).len(), 1, "no pod");
        for place in places(pod, root.path()) {
            place.write(&"x".repeat(5000)).unwrap();
            assert_eq!(std::fs::read_to_string(place.path()).unwrap().len(), 1000, "{place:?}");
        }
    }
}
