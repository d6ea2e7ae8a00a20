//! The tasks of a job, and their description in TF_CONFIG.

use super::args::{Program, Roles};
use crate::error::Error;

/// Numbers of tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tasks {
    pub(super) chief: u32,
    pub(super) workers: u32,
    pub(super) ps: u32,
    pub(super) evaluator: u32,
}

/// A kind of task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Role {
    /// As in TF_CONFIG.
    pub(super) name: &'static str,
    pub(super) count: u32,
    /// Whether its tasks use GPUs.
    pub(super) computes: bool,
}

impl Tasks {
    /// # Errors
    /// [`Error::Manifest`] if there are parameter servers without the chief that coordinates them.
    pub(super) fn new(program: &Program, roles: &Roles) -> Result<Self, Error> {
        if roles.ps > 0 && roles.chief == Some(0) {
            return Err(Error::Manifest {
                problem: "parameter servers need a chief, which coordinates them".into(),
                given: format!("--ps {} --chief 0", roles.ps),
                expected: "a chief, or no parameter servers".into(),
                remedy: "leave out --chief, or give --ps 0".into(),
            });
        }
        let chief = roles.chief.unwrap_or(roles.ps.min(1));
        Ok(Self { chief, workers: program.workers, ps: roles.ps, evaluator: roles.evaluator })
    }

    /// Returns the roles that have tasks, in the order of ranks.
    pub(super) fn roles(self) -> Vec<Role> {
        let role = |name, count, computes| Role { name, count, computes };
        // A chief without parameter servers is one of the workers.
        let all = [
            role("chief", self.chief, self.ps == 0),
            role("worker", self.workers, true),
            role("ps", self.ps, false),
            role(EVALUATOR, self.evaluator, true),
        ];
        all.into_iter().filter(|role| role.count > 0).collect()
    }

    pub(super) fn total(self) -> u32 {
        self.roles().iter().map(|role| role.count).sum()
    }

    /// Returns TF_CONFIG for a task, whose index may be a reference to another variable. The cluster has no evaluator,
    /// which joins no group.
    pub(super) fn tf_config(self, address: impl Fn(Role, u32) -> String, own: Role, index: &str) -> String {
        let member = |role: &Role| role.name != EVALUATOR;
        let jobs = self.roles().into_iter().filter(member).map(|role| {
            let addresses: Vec<_> = (0..role.count).map(|index| format!("\"{}\"", address(role, index))).collect();
            format!("\"{}\": [{}]", role.name, addresses.join(", "))
        });
        let cluster = jobs.collect::<Vec<_>>().join(", ");
        format!(r#"{{"cluster": {{{cluster}}}, "task": {{"type": "{}", "index": {index}}}}}"#, own.name)
    }
}

/// Checks that a name made from that of the job is a label: at most 63 bytes.
///
/// # Errors
/// [`Error::Manifest`] if it is longer.
pub(super) fn fits(name: &str, longest: &str) -> Result<(), Error> {
    match longest.len().checked_sub(LABEL) {
        None | Some(0) => Ok(()),
        Some(beyond) => Err(Error::Manifest {
            problem: "the name of the job is too long for those of its tasks".into(),
            given: format!("{name}, which gives {longest} with {} characters", longest.len()),
            expected: format!("at most {LABEL} characters, so {} for the job", name.len().saturating_sub(beyond)),
            remedy: "shorten --name".into(),
        }),
    }
}

/// The role that joins no group.
pub(super) const EVALUATOR: &str = "evaluator";

/// Longest label of RFC 1035.
const LABEL: usize = 63;
