//! Installation of plugins from Python packages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::within;
use crate::error::text;

/// A plugin in a Python package.
#[derive(Debug)]
pub(super) struct Plugin {
    pub(super) package: &'static str,
    pub(super) version: &'static str,
    /// The plugin's file in the unpacked package.
    file: &'static str,
    /// The variable that names the file.
    pub(super) variable: &'static str,
}

/// The plugins that tests use: XLA's for CPUs, and libtpu, which compiles without a TPU too.
pub(super) const PLUGINS: [Plugin; 2] = [
    Plugin {
        package: "xla-cpu-pjrt",
        version: "0.0.1",
        file: "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so",
        variable: "DISTRIBUTE_PJRT_PLUGIN",
    },
    Plugin { package: "libtpu", version: "0.0.51", file: "libtpu/libtpu.so", variable: "TPU_LIBRARY_PATH" },
];

impl Plugin {
    pub(super) fn cpu() -> &'static Plugin {
        &PLUGINS[0]
    }

    pub(super) fn libtpu() -> &'static Plugin {
        &PLUGINS[1]
    }

    /// Returns the plugin's file, if it is installed in a folder.
    pub(super) fn installed(&self, folder: &Path) -> Option<PathBuf> {
        Some(self.place(folder).join(self.file)).filter(|file| file.is_file())
    }

    /// Returns the folder of the unpacked package.
    fn place(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{}-{}", self.package, self.version))
    }

    /// Downloads and unpacks the package; returns the sizes of both in bytes.
    fn install(&self, folder: &Path, download: &mut Command) -> Result<(u64, u64), String> {
        let package = format!("{}=={}", self.package, self.version);
        fs::create_dir_all(folder).map_err(text)?;
        let wheels = tempfile::tempdir_in(folder).map_err(text)?;
        let ended = within(download.arg("--dest").arg(wheels.path()).arg(&package), PATIENCE);
        let ended = ended.map_err(|problem| {
            format!("{problem}; install Python 3 with pip, or name the plugin's file in {}", self.variable)
        })?;
        if !ended.success() {
            return Err(format!(
                "pip could not download {package} ({ended}): see its message above. Packages exist for Linux on \
                 x86-64, and some for certain versions of Python only; where pip is missing, install it, and where \
                 the package cannot be had, name a plugin's file in {}",
                self.variable
            ));
        }
        let wheel = only_file(wheels.path())?;
        // Under its name it is complete.
        let (unpacked, place) = (wheels.path().join("unpacked"), self.place(folder));
        // A wheel is a zip file.
        let mut unzip = Command::new("python3");
        let ended = within(unzip.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&unpacked), PATIENCE)?;
        if !ended.success() || !unpacked.join(self.file).is_file() {
            return Err(format!("{} was downloaded and has no {} ({ended})", wheel.display(), self.file));
        }
        if place.exists() {
            fs::remove_dir_all(&place).map_err(text)?;
        }
        fs::rename(&unpacked, &place).map_err(|error| format!("{}: {error}", place.display()))?;
        Ok((fs::metadata(&wheel).map_err(text)?.len(), bytes_of(&place)?))
    }
}

/// Installs the plugins that are missing; fails if none can be used afterwards.
pub(super) fn fetch(folder: &Path) -> Result<(), String> {
    fetch_by(folder, || {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]);
        pip.args(["--only-binary", ":all:"]);
        pip
    })
}

/// The same by another command than pip's, which gets `--dest FOLDER PACKAGE`.
fn fetch_by(folder: &Path, download: impl Fn() -> Command) -> Result<(), String> {
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    let mut problems = Vec::new();
    for plugin in &PLUGINS {
        let name = format!("{} {}", plugin.package, plugin.version);
        if plugin.installed(folder).is_some() {
            println!("{name}: installed before, {}", mib(bytes_of(&plugin.place(folder))?));
            continue;
        }
        match plugin.install(folder, &mut download()) {
            Ok((packed, unpacked)) => println!("{name}: {} downloaded, {} unpacked", mib(packed), mib(unpacked)),
            Err(problem) => {
                println!("{name}: not installed: {problem}");
                problems.push(problem);
            }
        }
    }
    let mut usable = PLUGINS.iter().filter_map(|plugin| Some((plugin, plugin.installed(folder)?))).peekable();
    if usable.peek().is_none() {
        return Err(format!("no PJRT plugin could be installed into {}", folder.display()));
    }
    usable.for_each(|(plugin, file)| println!("export {}='{}'", plugin.variable, file.display()));
    Ok(())
}

/// Returns the file that a download has left.
fn only_file(folder: &Path) -> Result<PathBuf, String> {
    let entries = fs::read_dir(folder).map_err(text)?.collect::<Result<Vec<_>, _>>().map_err(text)?;
    match entries.as_slice() {
        [one] => Ok(one.path()),
        others => Err(format!("pip left {} files in {}; 1 was expected", others.len(), folder.display())),
    }
}

/// Returns the sizes of all files below a folder together.
fn bytes_of(folder: &Path) -> Result<u64, String> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))? {
        let entry = entry.map_err(text)?;
        let metadata = entry.metadata().map_err(text)?;
        bytes += if metadata.is_dir() { bytes_of(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}

/// Longest time of a download.
const PATIENCE: Duration = Duration::from_secs(1800);

#[cfg(test)]
mod tests {
    use super::*;

    /// A download that makes a wheel with one plugin's file, or fails.
    fn make_wheel(plugin: &'static str) -> impl Fn() -> Command {
        let script = "import sys, zipfile\n\
                      plugin, folder, package = sys.argv[1], sys.argv[3], sys.argv[4]\n\
                      if not package.startswith('xla'): sys.exit(1)\n\
                      with zipfile.ZipFile(folder + '/a.whl', 'w') as wheel: wheel.writestr(plugin, 'x' * 10)\n";
        move || {
            let mut python = Command::new("python3");
            python.args(["-c", script, plugin]);
            python
        }
    }

    #[test]
    fn a_package_that_can_be_had_is_installed_once_and_the_other_one_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("pjrt");
        fetch_by(&folder, make_wheel(PLUGINS[0].file)).unwrap();
        let file = PLUGINS[0].installed(&folder).unwrap();
        assert_eq!((fs::read(&file).unwrap(), bytes_of(&folder).unwrap()), (b"xxxxxxxxxx".to_vec(), 10));
        assert_eq!(PLUGINS[1].installed(&folder), None);
        // Nothing is left of the downloads, and what is there is not made again.
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        fs::write(&file, "ours").unwrap();
        fetch_by(&folder, make_wheel(PLUGINS[0].file)).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"ours");
    }

    #[test]
    fn nothing_that_can_be_used_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let none = fetch_by(folder.path(), || Command::new("/no/such/python")).unwrap_err();
        assert!(none.starts_with("no PJRT plugin could be installed into "), "{none}");
        let problem = PLUGINS[0].install(folder.path(), &mut Command::new("/no/such/python")).unwrap_err();
        assert!(
            problem.contains("install Python 3 with pip, or name the plugin's file in DISTRIBUTE_PJRT"),
            "{problem}"
        );
        let problem = PLUGINS[1].install(folder.path(), &mut make_wheel("a")()).unwrap_err();
        assert!(problem.contains("pip could not download libtpu==0.0.51 (exit status: 1)"), "{problem}");
        let problem = PLUGINS[0].install(folder.path(), &mut make_wheel("other.so")()).unwrap_err();
        assert!(problem.contains("has no xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so"), "{problem}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
