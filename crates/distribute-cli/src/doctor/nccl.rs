//! NCCL, the library that reduces between GPUs.

use super::report::Check;

/// Checks which NCCL jobs would use; if there is none, why, and whether it is needed.
#[cfg(feature = "cuda")]
pub(crate) fn nccl(has_gpus: bool) -> Check {
    judge(nccl_sys::Library::load().map(|nccl| (nccl.version(), nccl.path().to_owned())), has_gpus)
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn nccl(_has_gpus: bool) -> Check {
    Check::skipped("nccl", "this build has no CUDA support (Cargo feature cuda)")
}

#[cfg(feature = "cuda")]
fn judge(loaded: Result<(nccl_sys::Version, std::path::PathBuf), nccl_sys::Error>, has_gpus: bool) -> Check {
    match loaded {
        Ok((version, path)) => Check::ok("nccl", format!("NCCL {version} at {}", path.display())),
        Err(nccl_sys::Error::NotFound { named_by: None, attempts }) => {
            let found = format!("no NCCL among {}", super::seen::count(attempts.len(), "file"));
            let check = match has_gpus {
                false => Check::skipped("nccl", found).why("there is not a GPU that would need one"),
                true => Check::warn("nccl", found)
                    .why("GPUs of one process reduce by kernels of ours, those of several processes through the host")
                    .remedy(format!("install libnccl2 2.18 or newer, or name its file by {}", nccl_sys::ENV_LIBRARY)),
            };
            check.details(attempts.iter().map(ToString::to_string))
        }
        // A file that the user has named.
        Err(error) => Check::warn("nccl", error.to_string()),
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use nccl_sys::{Attempt, Error, Problem, Version};

    use super::*;
    use crate::doctor::report::Status;

    #[test]
    fn a_missing_nccl_matters_where_there_are_gpus() {
        let missing = |has_gpus| {
            let attempts = vec![Attempt { file: "/usr/lib/libnccl.so.2".into(), problem: Problem::NoSuchFile }];
            judge(Err(Error::NotFound { named_by: None, attempts }), has_gpus)
        };
        assert_eq!((missing(true).status, missing(false).status), (Status::Warn, Status::Skipped));
        assert_eq!(missing(true).details, ["/usr/lib/libnccl.so.2: there is no such file"]);
        assert!(missing(true).remedy.unwrap().contains("DISTRIBUTE_NCCL_LIBRARY"));
        let found = judge(Ok((Version::OLDEST, "/usr/lib/libnccl.so.2".into())), true);
        assert_eq!((found.status, found.found.as_str()), (Status::Ok, "NCCL 2.18.0 at /usr/lib/libnccl.so.2"));
    }
}
