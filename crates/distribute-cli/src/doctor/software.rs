//! This build, and the system that it runs on.

use super::report::Check;
use super::seen::Seen;

/// Checks the version of this program, and how it was built.
pub(crate) fn build(optimized: bool) -> Check {
    let kind = if optimized { "release" } else { "debug" };
    let (version, arch, os) = (env!("CARGO_PKG_VERSION"), std::env::consts::ARCH, std::env::consts::OS);
    let found = format!("{version}, {kind} build for {arch} {os}");
    match optimized {
        true => Check::ok("distribute", found),
        false => Check::warn("distribute", found)
            .why("it reduces and computes several times slower than a release build")
            .remedy("cargo build --release, for your program too"),
    }
}

/// Reports the operating system, kernel, C library and container.
pub(crate) fn system(seen: &Seen, glibc: Option<&str>) -> Check {
    let release = seen.text("/etc/os-release").unwrap_or_default();
    let mut pairs = release.lines().filter_map(|line| line.split_once('='));
    let name = pairs.find(|(key, _)| *key == "PRETTY_NAME").map(|(_, name)| name.trim_matches(['"', '\'']).to_owned());
    let kernel = seen.line("/proc/sys/kernel/osrelease").map(|release| format!("Linux {release}"));
    let libc = glibc.map(|version| format!("glibc {version}"));
    let container = container(seen).map(|container| format!("in a container ({container})"));
    let all: Vec<String> = [name, kernel, libc, container].into_iter().flatten().collect();
    match all.as_slice() {
        [] => Check::skipped("system", "it says nothing of itself"),
        all => Check::ok("system", all.join(", ")),
    }
}

/// Returns the kind of container that this process runs in, if it can be detected.
pub(crate) fn container(seen: &Seen) -> Option<&'static str> {
    if seen.variable("KUBERNETES_SERVICE_HOST").is_some() {
        Some("Kubernetes")
    } else if seen.exists("/.dockerenv") {
        Some("Docker")
    } else if seen.exists("/run/.containerenv") {
        Some("Podman")
    } else if seen.variable("APPTAINER_NAME").or(seen.variable("SINGULARITY_NAME")).is_some() {
        Some("Apptainer")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::Status;

    #[test]
    fn a_build_that_is_not_optimised_is_warned_about() {
        assert_eq!(build(true).status, Status::Ok);
        let debug = build(false);
        assert_eq!(debug.status, Status::Warn);
        assert!(debug.found.contains(", debug build for "), "{debug:?}");
    }

    #[test]
    fn the_system_is_told_from_what_there_is() {
        let files = [
            ("etc/os-release", "ID=debian\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n"),
            ("proc/sys/kernel/osrelease", "6.8.0\n"),
            (".dockerenv", ""),
        ];
        let (seen, _folder) = Seen::variables_only(&[]).with_files(&files);
        let expected = "Debian GNU/Linux 12 (bookworm), Linux 6.8.0, glibc 2.36, in a container (Docker)";
        assert_eq!(system(&seen, Some("2.36")).found, expected);
        let nothing = system(&Seen::variables_only(&[]), None);
        assert_eq!(nothing.status, Status::Skipped);
        let pod = Seen::variables_only(&[("KUBERNETES_SERVICE_HOST", "10.0.0.1")]);
        assert_eq!(container(&pod), Some("Kubernetes"));
    }
}
