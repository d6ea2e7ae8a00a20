//! The search for NCCL's library file.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The environment variable that names NCCL's file.
pub const ENV_LIBRARY: &str = "DISTRIBUTE_NCCL_LIBRARY";

/// The places that are searched for NCCL.
///
/// A file that is named explicitly, by the caller or by [`ENV_LIBRARY`], is the only one tried, so that no other NCCL
/// than the requested one is used. Otherwise these are tried in order:
/// - `libnccl.so.2`, then `libnccl.so`, wherever the system's loader finds them (`LD_LIBRARY_PATH`, packages, libraries
///   that the process has already loaded);
/// - `lib64` of `CUDA_HOME`, of `CUDA_PATH` and of `/usr/local/cuda`;
/// - the Python wheels `nvidia-nccl-cu*` of `VIRTUAL_ENV`, of `CONDA_PREFIX` (and its `lib`), of the user and of the
///   system.
///
/// # Examples
/// ```
/// use nccl_sys::{Library, Search};
///
/// let error = Library::open(&Search::file("/no/such/libnccl.so.2")).unwrap_err();
/// assert!(error.to_string().contains("/no/such/libnccl.so.2: cannot open shared object file"));
/// ```
#[derive(Debug, Clone, Default)]
pub struct Search {
    file: Option<PathBuf>,
}

/// The source of an explicit file name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamedBy {
    /// [`Search::file`].
    Caller,
    /// [`ENV_LIBRARY`].
    Environment,
}

impl Search {
    /// Creates a search of the default places.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a search for this file only; the system's loader searches for a name without a folder.
    #[must_use]
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self { file: Some(path.into()) }
    }

    pub(crate) fn plan(&self) -> Plan {
        self.plan_with(&|name| env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn plan_with(&self, var: &dyn Fn(&str) -> Option<OsString>) -> Plan {
        let named = match &self.file {
            Some(file) => Some((NamedBy::Caller, file.clone())),
            None => var(ENV_LIBRARY).map(|file| (NamedBy::Environment, file.into())),
        };
        match named {
            Some((by, file)) => Plan { named_by: Some(by), places: vec![Candidate::File(file)] },
            None => Plan { named_by: None, places: usual_places(var) },
        }
    }
}

/// The files to try, in order.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) named_by: Option<NamedBy>,
    pub(crate) places: Vec<Candidate>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Candidate {
    /// A file, or a name for the loader.
    File(PathBuf),
    /// The subfolders `python3*` of a folder, and the file below each.
    Pythons { folder: PathBuf, below: PathBuf },
}

impl Candidate {
    /// Returns the existing files; an explicit file is assumed to exist.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let (folder, below) = match self {
            Self::File(file) => return vec![file.clone()],
            Self::Pythons { folder, below } => (folder, below),
        };
        let entries = folder.read_dir().into_iter().flatten().flatten();
        let pythons = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"));
        let mut files: Vec<_> = pythons.map(|python| python.path().join(below)).filter(|file| file.is_file()).collect();
        files.sort();
        files
    }

    /// Returns the place as an error names it if no file exists.
    pub(crate) fn pattern(&self) -> PathBuf {
        match self {
            Self::File(file) => file.clone(),
            Self::Pythons { folder, below } => folder.join("python3*").join(below),
        }
    }
}

fn usual_places(var: &dyn Fn(&str) -> Option<OsString>) -> Vec<Candidate> {
    let root = |name: &str| var(name).map(PathBuf::from);
    let mut places = vec![Candidate::File(SONAME.into()), Candidate::File("libnccl.so".into())];
    let toolkits = [root("CUDA_HOME"), root("CUDA_PATH"), Some("/usr/local/cuda".into())];
    places.extend(toolkits.into_iter().flatten().map(|toolkit| Candidate::File(toolkit.join("lib64").join(SONAME))));
    places.extend(root("VIRTUAL_ENV").map(|venv| wheels(&venv, "site-packages")));
    if let Some(conda) = root("CONDA_PREFIX") {
        places.push(Candidate::File(conda.join("lib").join(SONAME)));
        places.push(wheels(&conda, "site-packages"));
    }
    places.extend(root("HOME").map(|home| wheels(&home.join(".local"), "site-packages")));
    places.push(wheels(Path::new("/usr/local"), "dist-packages"));
    places.push(wheels(Path::new("/usr/local"), "site-packages"));
    places.push(wheels(Path::new("/usr"), "dist-packages"));

    let mut distinct = Vec::with_capacity(places.len());
    for place in places {
        if !distinct.contains(&place) {
            distinct.push(place);
        }
    }
    distinct
}

fn wheels(prefix: &Path, packages: &str) -> Candidate {
    Candidate::Pythons { folder: prefix.join("lib"), below: Path::new(packages).join("nvidia/nccl/lib").join(SONAME) }
}

const SONAME: &str = "libnccl.so.2";

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn plan(search: &Search, vars: &[(&str, &str)]) -> Plan {
        let vars: Vec<_> = vars.iter().map(|(name, value)| ((*name).to_owned(), OsString::from(value))).collect();
        search.plan_with(&move |name| vars.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone()))
    }

    fn patterns(plan: &Plan) -> Vec<String> {
        plan.places.iter().map(|place| place.pattern().display().to_string()).collect()
    }

    #[test]
    fn a_file_that_somebody_names_is_the_only_one_tried() {
        let both = plan(&Search::file("/a.so"), &[(ENV_LIBRARY, "/b.so")]);
        assert_eq!((both.named_by, patterns(&both)), (Some(NamedBy::Caller), vec!["/a.so".to_owned()]));
        let env = plan(&Search::new(), &[(ENV_LIBRARY, "/b.so")]);
        assert_eq!((env.named_by, patterns(&env)), (Some(NamedBy::Environment), vec!["/b.so".to_owned()]));
    }

    #[test]
    fn the_loader_comes_first_then_toolkits_then_wheels_and_nothing_twice() {
        let vars = [("CUDA_HOME", "/usr/local/cuda"), ("CUDA_PATH", "/opt/cuda"), ("HOME", "/home/me")];
        let all =
            plan(&Search::new(), &[vars.as_slice(), &[("VIRTUAL_ENV", "/venv"), ("CONDA_PREFIX", "/conda")]].concat());
        assert_eq!(all.named_by, None);
        assert_eq!(
            patterns(&all),
            [
                "libnccl.so.2",
                "libnccl.so",
                "/usr/local/cuda/lib64/libnccl.so.2",
                "/opt/cuda/lib64/libnccl.so.2",
                "/venv/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2",
                "/conda/lib/libnccl.so.2",
                "/conda/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2",
                "/home/me/.local/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2",
                "/usr/local/lib/python3*/dist-packages/nvidia/nccl/lib/libnccl.so.2",
                "/usr/local/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2",
                "/usr/lib/python3*/dist-packages/nvidia/nccl/lib/libnccl.so.2",
            ]
        );
    }

    #[test]
    fn wheels_are_found_under_every_python() {
        let venv = tempfile::tempdir().unwrap();
        for python in ["python3.11", "python3.12", "python2.7"] {
            let folder = venv.path().join("lib").join(python).join("site-packages/nvidia/nccl/lib");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(SONAME), "").unwrap();
        }
        fs::create_dir_all(venv.path().join("lib/python3.13/site-packages")).unwrap();
        let found = wheels(venv.path(), "site-packages").files();
        let pythons: Vec<_> = found.iter().map(|file| file.strip_prefix(venv.path().join("lib")).unwrap()).collect();
        assert_eq!(
            pythons,
            [
                Path::new("python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2"),
                Path::new("python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"),
            ]
        );
    }
}
