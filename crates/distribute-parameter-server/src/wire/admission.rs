//! Admission: the headers of a call, which are verified before its body is read.

use std::sync::Arc;

use distribute_cluster::grpc::Credentials;
use distribute_cluster::secret::{JOB_REMEDY, Terms};
use distribute_cluster::{Acquaintance, ClusterResolver, Door, JobId, JobSecret, JobTls, Task, printable};
use http::{HeaderMap, HeaderName, HeaderValue};
use tonic::Status;

use super::VERSION;

const VERSION_HEADER: &str = "distribute-version";
const JOB_HEADER: &str = "distribute-job";
const TASK_HEADER: &str = "distribute-task";
const SESSION_HEADER: &str = "distribute-session";

/// The job of this process: its identity, the secret that its tasks prove to each other, and the certificate by which
/// they use TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwnJob {
    pub(crate) id: JobId,
    pub(crate) secret: Option<JobSecret>,
    pub(crate) tls: Option<JobTls>,
}

impl OwnJob {
    /// Reads all from the environment; the identity may be the cluster's.
    ///
    /// # Errors
    /// If one is malformed.
    pub(crate) fn from_env(cluster: &impl ClusterResolver) -> Result<OwnJob, distribute_cluster::Error> {
        Ok(OwnJob { id: JobId::from_env(cluster)?, secret: JobSecret::from_env()?, tls: JobTls::from_env()? })
    }

    /// Returns what both sides of a connection agree on before they prove the secret.
    fn terms(&self) -> Terms {
        Terms::new("parameter server 2", self.id.header_text())
    }

    /// Returns what callers of a task have to prove before anything else of theirs is read.
    pub(crate) fn door(&self, task: Task) -> Arc<Door> {
        let door = Door::new(task.to_string(), self.secret.clone(), self.terms(), JOB_REMEDY);
        Arc::new(door.tls(self.tls.clone()))
    }
}

/// The task that a call is for, and the job and session that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Addressee {
    pub(crate) job: OwnJob,
    pub(crate) task: Task,
    pub(crate) session: u64,
}

impl Addressee {
    /// Returns the headers of calls to it.
    pub(super) fn headers(&self) -> Result<HeaderMap, Status> {
        let value = |text: String| HeaderValue::try_from(text).map_err(|error| Status::internal(error.to_string()));
        Ok(HeaderMap::from_iter([
            (HeaderName::from_static(VERSION_HEADER), VERSION.into()),
            (HeaderName::from_static(JOB_HEADER), value(self.job.id.header_text())?),
            (HeaderName::from_static(TASK_HEADER), value(self.task.to_string())?),
            (HeaderName::from_static(SESSION_HEADER), self.session.into()),
        ]))
    }

    /// Returns what connections to it show and prove, if the job uses TLS or has a secret.
    pub(super) fn credentials(&self) -> Option<Credentials> {
        let OwnJob { secret, tls, .. } = self.job.clone();
        Credentials::new((secret, tls), self.job.terms(), self.task.to_string(), JOB_REMEDY)
    }
}

/// The identity of this task, by which calls meant for others are refused.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) job: OwnJob,
    pub(crate) task: Task,
    /// Job and task in the form of the headers.
    written_job: String,
    written_task: String,
}

impl Identity {
    pub(crate) fn new(job: OwnJob, task: Task) -> Identity {
        let (written_job, written_task) = (job.id.header_text(), task.to_string());
        Identity { job, task, written_job, written_task }
    }

    /// Refuses a call on a connection that has not shown a certificate or proved the job's secret, if there are these,
    /// or has proved it to another task.
    ///
    /// # Errors
    /// `unauthenticated`, or `permission_denied` for another task.
    pub(super) fn check_proof(&self, door: &Door, caller: Option<&Acquaintance>) -> Result<(), Status> {
        let Some(caller) = caller else {
            return if door.is_locked() { Err(Status::unauthenticated("the caller is not known")) } else { Ok(()) };
        };
        match (door.refusal_of(caller), caller.claim()) {
            (Some(reason), _) => Err(Status::unauthenticated(reason)),
            (None, Some(called)) if called != self.written_task.as_bytes() => {
                let called = printable(&String::from_utf8_lossy(called), 80);
                let problem = format!("it is {}, and {called} was called; give every task the same cluster", self.task);
                Err(Status::permission_denied(problem))
            }
            (None, _) => Ok(()),
        }
    }

    /// Returns the session of a call that is meant for this task.
    ///
    /// # Errors
    /// `unauthenticated` if it names no job or no session; `permission_denied` if it belongs to another job or is for
    /// another task; `failed_precondition` if it has another version.
    pub(super) fn admit(&self, headers: &HeaderMap) -> Result<u64, Status> {
        let Identity { job, task, written_job, written_task } = self;
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let Some(of_caller) = text(JOB_HEADER) else {
            let problem = format!("{task} answers the tasks of its job alone, and this call names no job");
            return Err(Status::unauthenticated(problem));
        };
        let version = text(VERSION_HEADER).unwrap_or("none");
        if version.parse() != Ok(VERSION) {
            let problem =
                format!("it speaks version {VERSION} and the caller {version}; run the same build on every task");
            return Err(Status::failed_precondition(problem));
        }
        let job = &job.id;
        if of_caller != written_job {
            let of_caller = of_caller.split_once(' ').map_or(of_caller, |(_, name)| name);
            let problem = format!(
                "it belongs to job {job}, and the caller to job {of_caller}; give every task of a job the same cluster \
                and the \
                 same DISTRIBUTE_JOB_ID, and each job ports of its own"
            );
            return Err(Status::permission_denied(problem));
        }
        let called = text(TASK_HEADER).unwrap_or("none");
        if called != written_task {
            let problem = format!("it is {task}, and {called} was called; give every task the same cluster");
            return Err(Status::permission_denied(problem));
        }
        text(SESSION_HEADER)
            .and_then(|session| session.parse().ok())
            .ok_or_else(|| Status::unauthenticated("this call names no session"))
    }
}

#[cfg(test)]
mod tests {
    use distribute_cluster::TaskType;

    use super::*;

    fn identity() -> Identity {
        let job = OwnJob { id: JobId::new("a").unwrap(), secret: None, tls: None };
        Identity::new(job, Task::new(TaskType::Ps, 1))
    }

    fn admitted(change: impl FnOnce(&mut HeaderMap)) -> Result<u64, Status> {
        let Identity { job, task, .. } = identity();
        let mut headers = Addressee { job, task, session: 7 }.headers().unwrap();
        change(&mut headers);
        identity().admit(&headers)
    }

    #[test]
    fn calls_of_others_are_refused_in_words() {
        assert_eq!(admitted(|_| {}).unwrap(), 7);
        for (name, value, words) in [
            (JOB_HEADER, "00 b", "belongs to job a, and the caller to job b"),
            (TASK_HEADER, "ps:0", "it is ps:1, and ps:0 was called"),
            (VERSION_HEADER, "1", "version 4 and the caller 1"),
            (SESSION_HEADER, "x", "no session"),
        ] {
            let error = admitted(|headers| drop(headers.insert(name, HeaderValue::from_static(value)))).unwrap_err();
            assert!(error.message().contains(words), "{error}");
            assert!(admitted(|headers| drop(headers.remove(name))).is_err(), "{name}");
        }
    }
}
