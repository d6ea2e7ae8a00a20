//! The options of a consumer.

use std::time::Duration;

use distribute_cluster::{JobId, JobSecret, JobTls};

use crate::{Error, Result};

/// Options of a [`dataset`](crate::dataset) that data workers serve.
///
/// `splits` and `streams` determine the order of the elements, and must be equal in all workers of a training job.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use distribute_data_service::ServiceOptions;
/// let options = ServiceOptions::new("train").splits(64).silence(Duration::from_secs(20));
/// assert_eq!(options.name, "train");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServiceOptions {
    /// The name under which data workers serve the dataset.
    pub name: String,
    /// The dispatcher's host:port. Default: DISTRIBUTE_DATA_SERVICE.
    pub dispatcher: Option<String>,
    /// The identity of the data service. Default: the one that DISTRIBUTE_DATA_SERVICE_ID names, else one that all
    /// services without a name share.
    pub identity: Option<JobId>,
    /// The secret that all processes of the data service prove to each other on every connection. Default: what
    /// DISTRIBUTE_DATA_SERVICE_SECRET_FILE or DISTRIBUTE_DATA_SERVICE_SECRET gives.
    pub secret: Option<JobSecret>,
    /// The certificate by which processes of the data service use TLS; all of them, or none. Default: what
    /// DISTRIBUTE_TLS_CA, DISTRIBUTE_TLS_CERT and DISTRIBUTE_TLS_KEY give.
    pub tls: Option<JobTls>,
    /// The number of splits of a pass, which the workers of a training job divide. 1 to 65,536. Default: 16. Give a
    /// multiple of the number of training workers, and at most as many as there are files.
    pub splits: usize,
    /// The number of splits that a training worker reads at once, an element of each in turn. 1 to 1,024. Default: 4.
    pub streams: usize,
    /// The number of elements that are read ahead of each of these splits. At least 1. Default: 64.
    pub read_ahead_elements: usize,
    /// The bytes that are read ahead of each of these splits, or one element if it has more. At least 1. Default:
    /// 16 MiB.
    pub read_ahead_bytes: usize,
    /// The most bytes of an element, as it is sent. 1 KiB to 1 GiB. Default: 64 MiB.
    pub max_element_bytes: usize,
    /// Silence after which a data worker is left for another one. One that is at work gives a sign of life every
    /// 500 ms. At least 1 s. Default: 10 s.
    pub silence: Duration,
    /// How long to look for a data worker before the pass ends with an error. `distribute_dataset` waits as long for a
    /// first one that serves the name. Default: 60 s.
    pub worker_timeout: Duration,
    /// How long a split may yield nothing although data workers are at work on it. Default: 30 min.
    pub element_timeout: Duration,
}

impl ServiceOptions {
    /// Creates the default options for the dataset of a name.
    pub fn new(name: impl Into<String>) -> ServiceOptions {
        ServiceOptions {
            name: name.into(),
            dispatcher: None,
            identity: None,
            secret: None,
            tls: None,
            splits: 16,
            streams: 4,
            read_ahead_elements: 64,
            read_ahead_bytes: 16 << 20,
            max_element_bytes: 64 << 20,
            silence: Duration::from_secs(10),
            worker_timeout: Duration::from_secs(60),
            element_timeout: Duration::from_secs(30 * 60),
        }
    }

    /// Sets [`dispatcher`](field@Self::dispatcher).
    #[must_use]
    pub fn dispatcher(self, address: impl Into<String>) -> ServiceOptions {
        ServiceOptions { dispatcher: Some(address.into()), ..self }
    }

    /// Sets [`identity`](field@Self::identity).
    #[must_use]
    pub fn identity(self, identity: JobId) -> ServiceOptions {
        ServiceOptions { identity: Some(identity), ..self }
    }

    /// Sets [`secret`](field@Self::secret).
    #[must_use]
    pub fn secret(self, secret: JobSecret) -> ServiceOptions {
        ServiceOptions { secret: Some(secret), ..self }
    }

    /// Sets [`tls`](field@Self::tls).
    #[must_use]
    pub fn tls(self, tls: JobTls) -> ServiceOptions {
        ServiceOptions { tls: Some(tls), ..self }
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// [`Error::Option`].
    pub(crate) fn check(&self) -> Result<()> {
        let number = |what, given: usize, range: std::ops::RangeInclusive<usize>, expected| {
            let refused = Error::Option { what, given: given.to_string(), expected };
            if range.contains(&given) { Ok(()) } else { Err(refused) }
        };
        number("the number of splits", self.splits, 1..=65_536, "1 to 65,536")?;
        number("the number of streams", self.streams, 1..=1024, "1 to 1,024")?;
        number("read_ahead_elements", self.read_ahead_elements, 1..=MAX_AHEAD, "1 to 500,000,000")?;
        number("read_ahead_bytes", self.read_ahead_bytes, 1..=usize::MAX, "at least 1")?;
        number("max_element_bytes", self.max_element_bytes, 1 << 10..=1 << 30, "1 KiB to 1 GiB")?;
        let short = [("silence", self.silence), ("element_timeout", self.element_timeout)];
        if let Some((what, given)) = short.into_iter().find(|(_, given)| *given < MIN_SILENCE) {
            return Err(Error::Option { what, given: format!("{given:?}"), expected: "at least 1 s" });
        }
        Ok(())
    }
}

distribute_types::setters! {
    ServiceOptions {
        splits: usize,
        streams: usize,
        read_ahead_elements: usize,
        read_ahead_bytes: usize,
        max_element_bytes: usize,
        silence: Duration,
        worker_timeout: Duration,
        element_timeout: Duration,
    }
}

/// Twice the interval in which data workers give signs of life.
const MIN_SILENCE: Duration = Duration::from_secs(1);

/// The most permits of a semaphore, and more than any memory holds.
const MAX_AHEAD: usize = 500_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_out_of_range_are_refused_in_words() {
        let options = ServiceOptions::new("train");
        assert!(options.check().is_ok());
        for (wrong, words) in [
            (options.clone().splits(0), "the number of splits is 0; expected 1 to 65,536"),
            (options.clone().streams(0), "the number of streams is 0"),
            (options.clone().read_ahead_elements(0), "read_ahead_elements is 0"),
            (options.clone().read_ahead_bytes(0), "read_ahead_bytes is 0"),
            (options.clone().max_element_bytes(1), "max_element_bytes is 1; expected 1 KiB"),
            (options.clone().silence(Duration::from_millis(999)), "silence is 999ms; expected at least 1 s"),
        ] {
            let text = wrong.check().unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        }
    }
}
