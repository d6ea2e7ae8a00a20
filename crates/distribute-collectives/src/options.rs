//! Options of process groups.

use std::time::Duration;

use crate::environment;
use crate::schedule::{Algorithm, Link};
use crate::transport::TransportKind;
use crate::{DeviceImplementation, Error, Result, SharedCrossDeviceOps};

/// Options of a process group.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use distribute_collectives::Options;
/// let options = Options::default().timeout(Duration::from_secs(30));
/// assert_eq!(options.name, "world");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// Name of the group in errors; groups of the same members need different names. Default: `world`.
    pub name: String,
    /// Time limit for one operation, from the call to the result. Default: 5 minutes, long enough for a peer that
    /// writes a checkpoint. A limit above a year counts as a year. The death of a peer is detected at once, independent
    /// of this limit.
    pub timeout: Duration,
    /// Transport between processes. Default: [`TransportKind::Auto`].
    pub transport: TransportKind,
    /// Algorithm of an all-reduce between processes. Default: [`Algorithm::Auto`].
    pub algorithm: Algorithm,
    /// Cost of connections, from which [`Algorithm::Auto`] chooses; equal on all members. Default: figures of the
    /// transport.
    pub link: Option<Link>,
    /// Replacement for the way in which the ranks of this process combine their values. Default: each thread reduces a
    /// part.
    pub cross_device_ops: Option<SharedCrossDeviceOps>,
    /// Bytes of gradients, or of other values that become ready one after another, to reduce together; 0 for all values
    /// of a step. Smaller packs start earlier in backward, larger ones need fewer operations; between processes an
    /// operation costs about as much as moving 64 KiB. Equal on all members. Default: 1 MiB in host memory; a library
    /// of GPUs may have another one.
    pub bytes_per_pack: Option<usize>,
    /// Backend of a [`DeviceGroup`](crate::DeviceGroup) of these ranks; equal on all members. Default:
    /// [`DeviceImplementation::Auto`].
    pub device_implementation: DeviceImplementation,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            name: "world".to_owned(),
            timeout: Duration::from_secs(300),
            transport: TransportKind::Auto,
            algorithm: Algorithm::Auto,
            link: None,
            cross_device_ops: None,
            bytes_per_pack: None,
            device_implementation: DeviceImplementation::Auto,
        }
    }
}

distribute_types::setters! {
    Options {
        timeout: Duration,
        transport: TransportKind,
        algorithm: Algorithm,
        device_implementation: DeviceImplementation,
    } into {
        name: String,
        bytes_per_pack: Option<usize>,
        link: Option<Link>,
        cross_device_ops: Option<SharedCrossDeviceOps>,
    }
}

impl Options {
    /// Returns the defaults, changed by `DISTRIBUTE_TIMEOUT` (seconds), `DISTRIBUTE_TRANSPORT`, `DISTRIBUTE_ALGORITHM`
    /// and `DISTRIBUTE_LINK`.
    ///
    /// # Errors
    /// [`Error::UnknownName`] if one of them cannot be parsed.
    pub fn from_env() -> Result<Options> {
        Options::from_vars(environment::text)
    }

    /// Reads options like [`from_env`](Options::from_env), with a function that looks up the variables.
    ///
    /// # Errors
    /// [`Error::UnknownName`] if one of them cannot be parsed.
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>) -> Result<Options> {
        let mut options = Options::default();
        if let Some(given) = variable("DISTRIBUTE_TIMEOUT") {
            let seconds = given.parse::<f64>().ok().filter(|seconds| *seconds > 0.0 && *seconds < 1e9);
            options.timeout = seconds.map(Duration::from_secs_f64).ok_or(Error::UnknownName {
                what: "DISTRIBUTE_TIMEOUT",
                given,
                expected: "a number of seconds above 0, such as 30 or 0.5",
            })?;
        }
        if let Some(given) = variable("DISTRIBUTE_TRANSPORT") {
            options.transport = given.parse().map_err(of_variable("DISTRIBUTE_TRANSPORT"))?;
        }
        if let Some(given) = variable("DISTRIBUTE_ALGORITHM") {
            options.algorithm = given.parse().map_err(of_variable("DISTRIBUTE_ALGORITHM"))?;
        }
        if let Some(given) = variable("DISTRIBUTE_LINK") {
            options.link = Some(Link::parse(&given)?);
        }
        Ok(options)
    }
}

/// Returns a function that makes the error of an unknown name one of the variable that has it.
fn of_variable(name: &'static str) -> impl Fn(Error) -> Error {
    move |error| match error {
        Error::UnknownName { given, expected, .. } => Error::UnknownName { what: name, given, expected },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_change_the_defaults() {
        let vars = |name: &str| match name {
            "DISTRIBUTE_TIMEOUT" => Some("2.5".to_owned()),
            "DISTRIBUTE_TRANSPORT" => Some("tcp".to_owned()),
            "DISTRIBUTE_ALGORITHM" => Some("ring".to_owned()),
            _ => None,
        };
        let options = Options::from_vars(vars).unwrap();
        assert_eq!(options.timeout, Duration::from_millis(2500));
        assert_eq!(options.transport, TransportKind::Tcp);
        assert_eq!(options.algorithm, Algorithm::Ring);
    }

    #[test]
    fn a_wrong_variable_is_a_sentence_that_names_it() {
        for variable in ["DISTRIBUTE_TIMEOUT", "DISTRIBUTE_TRANSPORT", "DISTRIBUTE_ALGORITHM", "DISTRIBUTE_LINK"] {
            let vars = |name: &str| (name == variable).then(|| "soon".to_owned());
            let error = Options::from_vars(vars).unwrap_err().to_string();
            assert!(error.contains(variable) && error.contains("soon"), "{error}");
        }
    }
}
