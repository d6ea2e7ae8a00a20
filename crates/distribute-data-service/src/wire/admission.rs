//! Admission: the headers of a call, which are verified before its body is read.

use std::net::TcpListener;
use std::sync::Arc;

use distribute_cluster::grpc::Credentials;
use distribute_cluster::secret::{DATA_SERVICE_REMEDY, Terms, warn_if_exposed};
use distribute_cluster::{Door, JobId, JobSecret, JobTls};
use http::{HeaderMap, HeaderName, HeaderValue};
use tonic::Status;

use super::VERSION;
use crate::environment;

const VERSION_HEADER: &str = "distribute-version";
const JOB_HEADER: &str = "distribute-job";

/// The claim of every caller: all processes of a service have the same rights.
const CLAIM: &str = "a process of the data service";

/// The identity of a process, by which the calls of others are refused.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    job: JobId,
    /// The job in the form of the headers.
    written: String,
    secret: Option<JobSecret>,
    tls: Option<JobTls>,
}

impl Identity {
    pub(crate) fn new(job: JobId, secret: Option<JobSecret>, tls: Option<JobTls>) -> Identity {
        Identity { written: job.header_text(), job, secret, tls }
    }

    /// Returns the identity, the secret and the certificate that are given, or else those of the environment.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) or [`Error::Secret`](crate::Error::Secret) if they are malformed.
    pub(crate) fn of(job: Option<JobId>, secret: Option<JobSecret>, tls: Option<JobTls>) -> crate::Result<Identity> {
        let secret = match secret {
            None => JobSecret::of_data_service()?,
            given => given,
        };
        let tls = match tls {
            None => JobTls::from_env()?,
            given => given,
        };
        Ok(Identity::new(job.map_or_else(environment::identity, Ok)?, secret, tls))
    }

    /// Returns what both sides of a connection agree on before they prove the secret.
    fn terms(&self) -> Terms {
        Terms::new("data service 1", &self.written)
    }

    /// Returns what connections of this process show and prove, if the service uses TLS or has a secret.
    pub(super) fn credentials(&self) -> Option<Credentials> {
        Credentials::new((self.secret.clone(), self.tls.clone()), self.terms(), CLAIM, DATA_SERVICE_REMEDY)
    }

    /// Returns what callers of this process have to show and to prove before anything else of theirs is read.
    pub(super) fn door(&self, service: String) -> Arc<Door> {
        let door = Door::new(service, self.secret.clone(), self.terms(), DATA_SERVICE_REMEDY);
        Arc::new(door.tls(self.tls.clone()))
    }

    /// Warns if others than the service's hosts may reach a listener of it that has neither a secret nor TLS.
    pub(crate) fn warn_if_exposed(&self, service: &str, listener: &TcpListener) {
        let bound = listener.local_addr().ok().map(|address| address.ip());
        let proofs = (self.secret.as_ref(), self.tls.as_ref());
        warn_if_exposed(service, bound, proofs, "DISTRIBUTE_DATA_SERVICE_SECRET_FILE");
    }

    /// Returns the headers of calls by this process.
    pub(crate) fn headers(&self) -> Result<HeaderMap, Status> {
        let job = HeaderValue::try_from(&self.written).map_err(|error| Status::internal(error.to_string()))?;
        Ok(HeaderMap::from_iter([
            (HeaderName::from_static(VERSION_HEADER), VERSION.into()),
            (HeaderName::from_static(JOB_HEADER), job),
        ]))
    }

    /// Admits a call of the same job and version.
    ///
    /// # Errors
    /// `unauthenticated` if it names no job; `failed_precondition` if it has another version; `permission_denied` if it
    /// belongs to another job.
    pub(super) fn admit(&self, headers: &HeaderMap) -> Result<(), Status> {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let Some(of_caller) = text(JOB_HEADER) else {
            return Err(Status::unauthenticated("it answers processes of its job alone, and this call names no job"));
        };
        let version = text(VERSION_HEADER).unwrap_or("none");
        if version.parse() != Ok(VERSION) {
            let problem =
                format!("it speaks version {VERSION} and the caller {version}; run the same build in every process");
            return Err(Status::failed_precondition(problem));
        }
        if of_caller != self.written {
            let of_caller = of_caller.split_once(' ').map_or(of_caller, |(_, name)| name);
            let problem = format!(
                "it belongs to the data service {}, and the caller to {of_caller}; give the dispatcher, the data \
                 workers and the training program the same DISTRIBUTE_DATA_SERVICE_ID",
                self.job
            );
            return Err(Status::permission_denied(problem));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_others_are_refused_in_words() {
        let identity = Identity::new(JobId::new("a").unwrap(), None, None);
        assert!(identity.admit(&identity.headers().unwrap()).is_ok());
        for (name, value, words) in [
            (JOB_HEADER, "00 b", "the data service a, and the caller to b"),
            (VERSION_HEADER, "7", "version 1 and the caller 7"),
        ] {
            let mut headers = identity.headers().unwrap();
            headers.insert(name, HeaderValue::from_static(value));
            let error = identity.admit(&headers).unwrap_err();
            assert!(error.message().contains(words), "{error}");
            headers.remove(name);
            assert!(identity.admit(&headers).is_err(), "{name}");
        }
    }
}
