//! The search for a plugin's file.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The environment variable that names the plugin's file.
pub const ENV_PLUGIN: &str = "DISTRIBUTE_PJRT_PLUGIN";

/// The environment variable that names libtpu's file, as for JAX.
pub const ENV_TPU_LIBRARY: &str = "TPU_LIBRARY_PATH";

/// The environment variable by which libtpu asks no metadata server.
pub const ENV_SKIP_METADATA: &str = "TPU_SKIP_MDS_QUERY";

/// The places that are searched for a plugin.
///
/// A file that is named explicitly, by the caller, by [`ENV_PLUGIN`] or by [`ENV_TPU_LIBRARY`], in this order, is the
/// only one tried. Otherwise libtpu is searched for in these places:
/// - the Python package `libtpu` of `VIRTUAL_ENV`, and of the installation of the `python3` that `PATH` finds first;
///   Python is not started;
/// - `libtpu.so`, wherever the system's loader finds it.
///
/// # libtpu without TPU chips
/// libtpu asks Google Cloud's metadata server when it is initialised, for minutes if there is none, unless
/// [`ENV_SKIP_METADATA`] is set. Whether this machine has chips is for the caller to find out: without
/// [`with_tpu_chips`](Self::with_tpu_chips), and without the variable, a file that is called libtpu is refused. The
/// crate does not set the variable itself, since another thread may read the environment at that time.
///
/// # Examples
/// ```
/// use pjrt_sys::{Library, Search};
///
/// let error = Library::open(&Search::file("/no/such/plugin.so")).unwrap_err();
/// assert!(error.to_string().contains("/no/such/plugin.so: cannot open shared object file"));
/// ```
#[derive(Debug, Clone, Default)]
pub struct Search {
    file: Option<PathBuf>,
    tpu_chips: bool,
}

/// The source of an explicit file name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamedBy {
    /// [`Search::file`].
    Caller,
    /// [`ENV_PLUGIN`].
    Environment,
    /// [`ENV_TPU_LIBRARY`].
    TpuEnvironment,
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
        Self { file: Some(path.into()), tpu_chips: false }
    }

    /// States whether this machine has TPU chips, so that libtpu may ask its metadata server. Default: it has none.
    #[must_use]
    pub fn with_tpu_chips(mut self, has_chips: bool) -> Self {
        self.tpu_chips = has_chips;
        self
    }

    /// Returns whether libtpu would wait for a metadata server that is probably not there.
    pub(crate) fn asks_in_vain(&self) -> bool {
        !self.tpu_chips && var(ENV_SKIP_METADATA).is_none()
    }

    pub(crate) fn plan(&self) -> Plan {
        self.plan_with(&var)
    }

    fn plan_with(&self, var: &dyn Fn(&str) -> Option<OsString>) -> Plan {
        let by_variable = |name, by| var(name).map(|file| (by, PathBuf::from(file)));
        let caller = self.file.clone().map(|file| (NamedBy::Caller, file));
        let named = caller
            .or_else(|| by_variable(ENV_PLUGIN, NamedBy::Environment))
            .or_else(|| by_variable(ENV_TPU_LIBRARY, NamedBy::TpuEnvironment));
        match named {
            Some((by, file)) => Plan { named_by: Some(by), places: vec![Candidate::File(file)] },
            None => Plan { named_by: None, places: usual_places(var) },
        }
    }
}

/// Returns the value of a variable that is not empty.
fn var(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
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
    /// The packages of all Pythons below `prefix/lib`.
    Packages { prefix: PathBuf, packages: &'static str },
}

impl Candidate {
    /// Returns the existing files; an explicit file is assumed to exist.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let (prefix, packages) = match self {
            Self::File(file) => return vec![file.clone()],
            Self::Packages { prefix, packages } => (prefix, packages),
        };
        let entries = prefix.join("lib").read_dir().into_iter().flatten().flatten();
        let pythons = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"));
        let files = pythons.map(|python| python.path().join(packages).join("libtpu").join(LIBTPU));
        let mut files: Vec<_> = files.filter(|file| file.is_file()).collect();
        files.sort();
        files
    }

    /// Returns the place as an error names it if no file exists.
    pub(crate) fn pattern(&self) -> PathBuf {
        match self {
            Self::File(file) => file.clone(),
            Self::Packages { prefix, packages } => {
                prefix.join("lib/python3*").join(packages).join("libtpu").join(LIBTPU)
            }
        }
    }
}

fn usual_places(var: &dyn Fn(&str) -> Option<OsString>) -> Vec<Candidate> {
    let mut prefixes: Vec<PathBuf> = var("VIRTUAL_ENV").map(PathBuf::from).into_iter().collect();
    let path = var("PATH").unwrap_or_default();
    let python = env::split_paths(&path).map(|folder| folder.join("python3")).find(|file| file.is_file());
    // The folder that has the link is that of a virtual environment; the file that it leads to, of the installation.
    let real = python.as_ref().and_then(|file| file.canonicalize().ok());
    prefixes.extend(python.iter().chain(&real).filter_map(|file| prefix_of(file)));
    let mut places = Vec::new();
    for prefix in prefixes {
        for packages in ["site-packages", "dist-packages"] {
            let place = Candidate::Packages { prefix: prefix.clone(), packages };
            if !places.contains(&place) {
                places.push(place);
            }
        }
    }
    places.push(Candidate::File(LIBTPU.into()));
    places
}

/// Returns `/usr` for `/usr/bin/python3`.
fn prefix_of(python: &Path) -> Option<PathBuf> {
    python.parent()?.parent().map(Path::to_owned)
}

/// Returns whether a file is libtpu by its name, or by the name that it leads to.
pub(crate) fn is_libtpu(file: &Path) -> bool {
    let named = |file: &Path| file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libtpu"));
    named(file) || file.canonicalize().is_ok_and(|real| named(&real))
}

const LIBTPU: &str = "libtpu.so";

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn plan(search: &Search, vars: &[(&str, &Path)]) -> Plan {
        let find = |name: &str| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        search.plan_with(&find)
    }

    fn patterns(plan: &Plan) -> Vec<String> {
        plan.places.iter().map(|place| place.pattern().display().to_string()).collect()
    }

    #[test]
    fn a_named_file_is_the_only_one_tried_and_the_caller_comes_first() {
        let vars = [(ENV_PLUGIN, Path::new("/b.so")), (ENV_TPU_LIBRARY, Path::new("/c.so"))];
        let named = |search: Search, vars: &[(&str, &Path)]| {
            let plan = plan(&search, vars);
            (plan.named_by, patterns(&plan))
        };
        let only = |by, file: &str| (Some(by), vec![file.to_owned()]);
        assert_eq!(named(Search::file("/a.so"), &vars), only(NamedBy::Caller, "/a.so"));
        assert_eq!(named(Search::new(), &vars), only(NamedBy::Environment, "/b.so"));
        assert_eq!(named(Search::new(), &vars[1..]), only(NamedBy::TpuEnvironment, "/c.so"));
    }

    #[test]
    fn packages_are_found_by_the_layout_of_pythons_folders() {
        let root = tempfile::tempdir().unwrap();
        let (bin, venv) = (root.path().join("usr/bin"), root.path().join("venv"));
        fs::create_dir_all(&bin).unwrap();
        fs::write(bin.join("python3"), "").unwrap();
        for python in ["python3.11", "python3.12", "python2.7"] {
            let folder = venv.join("lib").join(python).join("site-packages/libtpu");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(LIBTPU), "").unwrap();
        }
        let found = plan(&Search::new(), &[("VIRTUAL_ENV", &venv), ("PATH", &bin)]);
        let patterns: Vec<_> =
            patterns(&found).iter().map(|text| text.replace(&root.path().display().to_string(), "")).collect();
        assert_eq!(
            patterns,
            [
                "/venv/lib/python3*/site-packages/libtpu/libtpu.so",
                "/venv/lib/python3*/dist-packages/libtpu/libtpu.so",
                "/usr/lib/python3*/site-packages/libtpu/libtpu.so",
                "/usr/lib/python3*/dist-packages/libtpu/libtpu.so",
                "libtpu.so",
            ]
        );
        let files = found.places[0].files();
        let pythons: Vec<_> = files.iter().map(|file| file.strip_prefix(venv.join("lib")).unwrap()).collect();
        assert_eq!(
            pythons,
            [
                Path::new("python3.11/site-packages/libtpu/libtpu.so"),
                Path::new("python3.12/site-packages/libtpu/libtpu.so"),
            ]
        );
    }

    #[test]
    fn libtpu_is_recognised_by_its_name_and_behind_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("libtpu-2.so"), folder.path().join("plugin.so"));
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(is_libtpu(&file) && is_libtpu(&link) && is_libtpu(Path::new("libtpu.so")));
        assert!(!is_libtpu(Path::new("/opt/xla_cpu_pjrt.so")));
    }
}
