//! The workspace as cargo describes it: its crates, their dependencies and their features.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

/// The workspace of the folder in which the command runs.
#[derive(Debug, Deserialize)]
pub(crate) struct Workspace {
    pub(crate) packages: Vec<Package>,
    #[serde(rename = "workspace_root")]
    pub(crate) root: PathBuf,
    target_directory: PathBuf,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    manifest_path: PathBuf,
    #[serde(default)]
    pub(crate) dependencies: Vec<Dependency>,
    /// Each feature with what it turns on.
    #[serde(default)]
    pub(crate) features: BTreeMap<String, Vec<String>>,
    /// The registries that it may go to; `None` stands for all.
    publish: Option<Vec<String>>,
    pub(crate) description: Option<String>,
    pub(crate) license: Option<String>,
    pub(crate) readme: Option<String>,
    pub(crate) repository: Option<String>,
    pub(crate) rust_version: Option<String>,
    #[serde(default)]
    pub(crate) keywords: Vec<String>,
    #[serde(default)]
    pub(crate) categories: Vec<String>,
    /// The part of the manifest for other programs than cargo.
    metadata: Option<Metadata>,
}

/// A dependency as a manifest declares it.
#[derive(Debug, Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    kind: Option<String>,
    /// The versions that it accepts; `*` where it has none.
    pub(crate) req: String,
    pub(crate) optional: bool,
}

#[derive(Debug, Deserialize)]
struct Metadata {
    docs: Option<Docs>,
}

#[derive(Debug, Deserialize)]
struct Docs {
    rs: Option<HostedDocs>,
}

/// The features that docs.rs is to build.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(crate) struct HostedDocs {
    pub(crate) all_features: bool,
    pub(crate) features: Vec<String>,
}

impl Workspace {
    /// Asks cargo, which reads the manifests alone.
    pub(crate) fn load() -> Result<Workspace, String> {
        let mut cargo = Command::new("cargo");
        cargo.args(["metadata", "--no-deps", "--format-version", "1", "--locked"]);
        let output = cargo.output().map_err(|error| format!("cargo metadata could not be started: {error}"))?;
        if !output.status.success() {
            return Err(format!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).trim()));
        }
        let text = String::from_utf8(output.stdout).map_err(|error| format!("cargo metadata: {error}"))?;
        Workspace::parse(&text)
    }

    pub(crate) fn parse(text: &str) -> Result<Workspace, String> {
        let mut workspace: Workspace =
            serde_json::from_str(text).map_err(|error| format!("cargo metadata: {error}"))?;
        workspace.packages.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(workspace)
    }

    pub(crate) fn package(&self, name: &str) -> Option<&Package> {
        self.packages.iter().find(|package| package.name == name)
    }

    /// The crates that go to a registry, or the one of these that is asked for.
    pub(crate) fn published(&self, only: Option<&str>) -> Result<Vec<&Package>, String> {
        let published: Vec<&Package> = self.packages.iter().filter(|package| package.is_published()).collect();
        let Some(only) = only else { return Ok(published) };
        match published.iter().find(|package| package.name == only) {
            Some(package) => Ok(vec![*package]),
            None => {
                let names: Vec<&str> = published.iter().map(|package| package.name.as_str()).collect();
                Err(format!("{only:?} is not a published crate; these are: {}", names.join(", ")))
            }
        }
    }

    /// A target folder of its own, for builds with other settings than those of daily work.
    pub(crate) fn target(&self, name: &str) -> PathBuf {
        self.target_directory.join(name)
    }
}

impl Package {
    pub(crate) fn is_published(&self) -> bool {
        self.publish.as_ref().is_none_or(|registries| !registries.is_empty())
    }

    pub(crate) fn folder(&self) -> &Path {
        self.manifest_path.parent().unwrap_or(Path::new(""))
    }

    /// Its features in order, without `default` and those that need NVIDIA's compiler.
    pub(crate) fn buildable_features(&self) -> Vec<&str> {
        let names = self.features.keys().map(String::as_str);
        names.filter(|name| *name != "default" && !NEEDS_NVCC.contains(name)).collect()
    }

    /// Its features that only build where NVIDIA's compiler is.
    pub(crate) fn nvcc_features(&self) -> Vec<&str> {
        self.features.keys().map(String::as_str).filter(|name| NEEDS_NVCC.contains(name)).collect()
    }

    /// All features that these turn on, themselves included.
    pub(crate) fn closure<'a>(&'a self, features: &[&'a str]) -> BTreeSet<&'a str> {
        let (mut all, mut next) = (BTreeSet::new(), features.to_vec());
        while let Some(feature) = next.pop() {
            let Some(values) = self.features.get(feature) else { continue };
            // `default` is a name for others.
            if feature == "default" || all.insert(feature) {
                next.extend(values.iter().map(String::as_str));
            }
        }
        all
    }

    /// Returns what docs.rs is to build of it.
    pub(crate) fn hosted_docs(&self) -> HostedDocs {
        let docs = self.metadata.as_ref().and_then(|metadata| metadata.docs.as_ref()?.rs.clone());
        docs.unwrap_or_default()
    }

    /// The features that turn an optional dependency on.
    pub(crate) fn features_of(&self, dependency: &str) -> Vec<&str> {
        let (explicit, implicit) = (format!("dep:{dependency}"), dependency);
        let turns_on = |values: &[String]| values.iter().any(|value| *value == explicit || value == implicit);
        self.features.iter().filter(|(_, values)| turns_on(values)).map(|(name, _)| name.as_str()).collect()
    }
}

impl Dependency {
    /// Whether users of the crate get it too, as opposed to those of builds and tests.
    pub(crate) fn is_normal(&self) -> bool {
        self.kind.as_deref().is_none_or(|kind| kind == "normal")
    }

    /// Whether only tests and examples of the crate have it.
    pub(crate) fn is_for_tests(&self) -> bool {
        self.kind.as_deref() == Some("dev")
    }

    /// Whether it names versions, and not a path alone.
    pub(crate) fn has_version(&self) -> bool {
        self.req != "*"
    }
}

/// Features that compile CUDA's kernels.
const NEEDS_NVCC: [&str; 1] = ["candle-cuda"];

#[cfg(test)]
impl Workspace {
    /// A workspace of crates, each given by its name and by the fields that it has besides, as JSON.
    pub(crate) fn of(crates: &[(&str, &str)]) -> Workspace {
        let package = |(name, fields): &(&str, &str)| {
            let comma = if fields.is_empty() { "" } else { "," };
            format!(r#"{{"name":"{name}","version":"0.1.0","manifest_path":"/w/{name}/Cargo.toml"{comma}{fields}}}"#)
        };
        let packages: Vec<String> = crates.iter().map(package).collect();
        let packages = packages.join(",");
        let text = format!(r#"{{"packages":[{packages}],"workspace_root":"/w","target_directory":"/w/target"}}"#);
        Workspace::parse(&text).unwrap_or_else(|problem| panic!("{problem}"))
    }
}
