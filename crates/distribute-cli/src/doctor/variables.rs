//! The relevant variables, and unknown ones with this project's prefix.

use clap::CommandFactory;

use super::report::Check;
use super::seen::Seen;
use crate::args::Cli;

/// Names variables with this project's prefix that no code reads, and shows the others that matter. Secrets are not
/// shown.
pub(crate) fn variables(seen: &Seen) -> Check {
    let known = known();
    let is_ours = |name: &str| name.starts_with(PREFIX) && !name.starts_with(TESTS);
    let set: Vec<(&str, &str)> = seen.variables().filter(|(name, _)| is_ours(name) || matters(name)).collect();
    let unread: Vec<&str> =
        set.iter().map(|(name, _)| *name).filter(|name| is_ours(name) && !known.iter().any(|it| it == name)).collect();
    let found = match set.as_slice() {
        [] => "none that matters is set".to_owned(),
        set => set
            .iter()
            .map(|(name, value)| format!("{name}={}", short(&shown(name, value))))
            .collect::<Vec<_>>()
            .join(" "),
    };
    let long = set.iter().filter(|(_, value)| value.chars().count() > LONGEST);
    let details: Vec<String> = long.map(|(name, value)| format!("{name}={}", shown(name, value))).collect();
    match unread.as_slice() {
        [] => Check::ok("variables", found).details(details),
        unread => {
            let near = unread.iter().filter_map(|name| Some(format!("{} instead of {name}", nearest(name, &known)?)));
            let near: Vec<String> = near.collect();
            let remedy = match near.as_slice() {
                [] => "unset it".to_owned(),
                near => format!("set {}", near.join(", ")),
            };
            let unused = format!("not read by anything: {}", unread.join(", "));
            Check::warn("variables", unused).why(format!("set are {found}")).remedy(remedy).details(details)
        }
    }
}

/// Returns the variables that these crates read, including those of the launcher's flags.
fn known() -> Vec<String> {
    let commands = Cli::command();
    let flags = commands.get_subcommands().flat_map(|command| command.get_arguments());
    let flags = flags.filter_map(|flag| Some(flag.get_env()?.to_string_lossy().into_owned()));
    OURS.iter().map(|name| (*name).to_owned()).chain(flags).collect()
}

/// Returns whether a reader of the report needs to know of a variable.
fn matters(name: &str) -> bool {
    EXACT.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

fn nearest<'a>(name: &str, known: &'a [String]) -> Option<&'a str> {
    let distance = |other: &&String| strsim::osa_distance(name, other);
    known.iter().min_by_key(distance).filter(|other| distance(other) <= 3).map(String::as_str)
}

/// Formats a value so that it may be pasted into an issue.
fn shown(name: &str, value: &str) -> String {
    let upper = name.to_ascii_uppercase();
    if SECRET.iter().any(|word| upper.contains(word)) {
        return "(not shown)".to_owned();
    }
    // `http://user:password@proxy`
    match value.split_once("://").map(|(scheme, rest)| (scheme, rest.rsplit_once('@'))) {
        Some((scheme, Some((_, host)))) => format!("{scheme}://(not shown)@{host}"),
        _ => value.to_owned(),
    }
}

/// Returns the beginning of a long value.
fn short(value: &str) -> String {
    match value.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}

const PREFIX: &str = "DISTRIBUTE_";

/// Read by tests only.
const TESTS: &str = "DISTRIBUTE_TEST";

/// Read by the libraries.
const OURS: [&str; 35] = [
    "DISTRIBUTE_ALGORITHM",
    "DISTRIBUTE_ALONE",
    "DISTRIBUTE_DATA_SERVICE",
    "DISTRIBUTE_DATA_SERVICE_ID",
    "DISTRIBUTE_DATA_SERVICE_SECRET",
    "DISTRIBUTE_DATA_SERVICE_SECRET_FILE",
    "DISTRIBUTE_FLIGHT_DIR",
    "DISTRIBUTE_GENERATIONS",
    "DISTRIBUTE_HOST_ID",
    "DISTRIBUTE_INTERFACE",
    "DISTRIBUTE_JOBS_DIR",
    "DISTRIBUTE_JOB_ID",
    "DISTRIBUTE_JOB_SECRET",
    "DISTRIBUTE_JOB_SECRET_FILE",
    "DISTRIBUTE_KERNEL_CACHE",
    "DISTRIBUTE_LINK",
    "DISTRIBUTE_LOG",
    "DISTRIBUTE_NCCL_LIBRARY",
    "DISTRIBUTE_NVRTC_LIBRARY",
    "DISTRIBUTE_PJRT_PLUGIN",
    "DISTRIBUTE_PORT",
    "DISTRIBUTE_PROGRESS",
    "DISTRIBUTE_PROGRESS_ADDR",
    "DISTRIBUTE_RESTART_COUNT",
    "DISTRIBUTE_STATUS_ADDR",
    "DISTRIBUTE_STORAGE_RETRY",
    "DISTRIBUTE_STORE",
    "DISTRIBUTE_TASK_RESTARTS",
    "DISTRIBUTE_TIMEOUT",
    "DISTRIBUTE_TLS_CA",
    "DISTRIBUTE_TLS_CERT",
    "DISTRIBUTE_TLS_KEY",
    "DISTRIBUTE_TLS_NAME",
    "DISTRIBUTE_TRACE",
    "DISTRIBUTE_TRANSPORT",
];

const EXACT: [&str; 28] = [
    "CANDLE_NUM_THREADS",
    "CLICOLOR_FORCE",
    "CLUSTER_SPEC",
    "GLOO_SOCKET_IFNAME",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "JOB_COMPLETION_INDEX",
    "KUBERNETES_SERVICE_HOST",
    "LD_LIBRARY_PATH",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NO_COLOR",
    "NO_PROXY",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "RANK",
    "RUST_BACKTRACE",
    "RUST_LOG",
    "SLURM_JOB_ID",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_TASKS",
    "SM_HOSTS",
    "TF_CONFIG",
    "WORLD_SIZE",
    "http_proxy",
    "https_proxy",
];

const PREFIXES: [&str; 11] = [
    "CUDA_",
    "HOROVOD_",
    "JAX_",
    "KUBEFLOW_TRAINER_",
    "MASTER_",
    "NCCL_",
    "OMPI_COMM_WORLD_",
    "PET_",
    "PMI_",
    "RAYON_",
    "TPU_",
];

const SECRET: [&str; 6] = ["TOKEN", "SECRET", "PASSW", "CREDENTIAL", "API_KEY", "PRIVATE"];

/// Longer values are shown in full by `--verbose` only.
const LONGEST: usize = 60;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;
    use crate::doctor::report::Status;

    #[test]
    fn what_matters_is_shown_and_long_values_in_full_only_as_details() {
        let long = "x".repeat(100);
        let seen = Seen::variables_only(&[("NCCL_DEBUG", "INFO"), ("TF_CONFIG", &long), ("HOME", "/root")]);
        let check = variables(&seen);
        assert_eq!(check.found, format!("NCCL_DEBUG=INFO TF_CONFIG={}…", "x".repeat(60)));
        assert_eq!(check.details[0], format!("TF_CONFIG={long}"));
        assert_eq!(variables(&Seen::variables_only(&[("HOME", "/root")])).found, "none that matters is set");
    }

    #[test]
    fn secrets_are_not_shown() {
        let seen = Seen::variables_only(&[
            ("HTTPS_PROXY", "http://me:hunter2@proxy:3128"),
            ("JAX_API_TOKEN", "hunter2"),
            ("DISTRIBUTE_JOB_SECRET", "hunter2 and more"),
            ("NO_PROXY", "10.0.0.0/8"),
        ]);
        let check = variables(&seen);
        assert!(!format!("{check:?}").contains("hunter2"), "{check:?}");
        assert!(check.found.contains("DISTRIBUTE_JOB_SECRET=(not shown)"), "{check:?}");
        assert!(
            check.found.contains("HTTPS_PROXY=http://(not shown)@proxy:3128 JAX_API_TOKEN=(not shown) NO_PROXY=10")
        );
    }

    #[test]
    fn a_misspelt_variable_is_named_with_what_was_meant() {
        let seen = |name| Seen::variables_only(&[(name, "tcp"), ("DISTRIBUTE_WORKERS", "2")]);
        let check = variables(&seen("DISTRIBUTE_TRANSPROT"));
        assert_eq!((check.status, check.found.as_str()), (Status::Warn, "not read by anything: DISTRIBUTE_TRANSPROT"));
        assert_eq!(check.why.as_deref(), Some("set are DISTRIBUTE_TRANSPROT=tcp DISTRIBUTE_WORKERS=2"));
        assert_eq!(check.remedy.as_deref(), Some("set DISTRIBUTE_TRANSPORT instead of DISTRIBUTE_TRANSPROT"));
        assert_eq!(variables(&seen("DISTRIBUTE_SOMETHING_ELSE")).remedy.as_deref(), Some("unset it"));
        assert_eq!(variables(&seen("DISTRIBUTE_TRANSPORT")).status, Status::Ok);
    }

    /// Compares the list of variables with the sources.
    #[test]
    fn every_variable_that_a_crate_reads_is_known() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut read = BTreeSet::new();
        let mut folders = vec![crates];
        while let Some(folder) = folders.pop() {
            for entry in folder.read_dir().unwrap().map(Result::unwrap) {
                let path = entry.path();
                let name = entry.file_name().to_string_lossy().into_owned();
                match entry.file_type().unwrap().is_dir() {
                    true if !["target", "tests", "doctor"].contains(&name.as_str()) => folders.push(path),
                    false if name.ends_with(".rs") && name != "tests.rs" => {
                        let text = std::fs::read_to_string(path).unwrap();
                        let quoted = text.split('"').filter(|text| text.strip_prefix(PREFIX).is_some_and(is_name));
                        read.extend(quoted.map(str::to_owned));
                    }
                    _ => {}
                }
            }
        }
        read.retain(|name| !name.starts_with(TESTS));
        let known: BTreeSet<String> = known().into_iter().collect();
        assert_eq!(
            known.symmetric_difference(&read).collect::<Vec<_>>(),
            Vec::<&String>::new(),
            "OURS and the sources"
        );
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/environment.md");
        let page = std::fs::read_to_string(page).unwrap();
        let quoted = page.split('`').filter(|text| text.strip_prefix(PREFIX).is_some_and(is_name));
        let documented: BTreeSet<String> = quoted.map(str::to_owned).collect();
        let differ: Vec<&String> = known.symmetric_difference(&documented).collect();
        assert_eq!(differ, Vec::<&String>::new(), "the sources and docs/environment.md");
    }

    fn is_name(text: &str) -> bool {
        !text.is_empty() && text.chars().all(|c| c.is_ascii_uppercase() || c == '_')
    }
}
