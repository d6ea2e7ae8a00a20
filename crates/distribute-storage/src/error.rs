//! Errors of stores. They name codes that servers answer with, and never their texts, which may quote a request with
//! its signature.

use std::error::Error as StdError;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use distribute_types::{Class, ErrorClass, FailureKind, Scope};
use object_store::client::{HttpError, HttpErrorKind};

use crate::client::NotImplemented;

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a store. Its message names the URL.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A URL cannot be used.
    #[error("{url}: {problem}")]
    Url {
        /// The URL, or its part that holds no secret.
        url: String,
        /// The problem, with a remedy.
        problem: &'static str,
    },
    /// The settings for a store are missing or contradict each other.
    #[error(
        "{url}: the settings for this store are wrong: {problem}; see the variables {variables} of the environment"
    )]
    Settings {
        /// The store.
        url: String,
        /// The problem.
        problem: String,
        /// The variables that set it.
        variables: &'static str,
    },
    /// `DISTRIBUTE_STORAGE_RETRY` is not a number of seconds.
    #[error("DISTRIBUTE_STORAGE_RETRY is {given:?}; expected seconds from 0 to {most}; unset it for 180")]
    Retry {
        /// The variable's value.
        given: String,
        /// The largest value.
        most: u64,
    },
    /// There is no credential, or the store does not accept it.
    #[error("{action} {url}: {problem}; set a valid one by {variables}, or run where the machine has one")]
    Credential {
        /// The object or store.
        url: String,
        /// The operation.
        action: &'static str,
        /// The problem, with the store's code.
        problem: String,
        /// The variables that set it.
        variables: &'static str,
    },
    /// The credential is valid, and not allowed to do this.
    #[error(
        "{action} {url}: permission denied ({code}); the credential is accepted but not for {action} here, for example \
         because it may only read; give it this permission, or choose another place"
    )]
    Denied {
        /// The object or store.
        url: String,
        /// The operation.
        action: &'static str,
        /// The store's answer.
        code: String,
    },
    /// The bucket or container does not exist.
    #[error(
        "{action} {url}: the bucket does not exist; create it, or look for a mistake in its name, region or endpoint"
    )]
    NoBucket {
        /// The object or store.
        url: String,
        /// The operation.
        action: &'static str,
    },
    /// The object does not exist.
    #[error("{url}: there is no such object; look at the name, or whether it has been removed")]
    NotFound {
        /// The object.
        url: String,
    },
    /// An object that was to be created exists.
    #[error("{url}: the object exists, and was to be new; another process may be writing here")]
    Exists {
        /// The object.
        url: String,
    },
    /// An object was replaced while it was read.
    #[error("{url}: the object has been replaced while it was read; read it again from the beginning")]
    Changed {
        /// The object.
        url: String,
    },
    /// The store could not be reached, or a connection was cut, and repeating did not help.
    #[error(
        "{action} {url}: {problem}; repeated without success for {} s (DISTRIBUTE_STORAGE_RETRY); look at the network \
         and the endpoint", tried.as_secs()
    )]
    Connection {
        /// The object or store.
        url: String,
        /// The operation.
        action: &'static str,
        /// The problem of the last attempt.
        problem: String,
        /// The time for which it was repeated, at most.
        tried: Duration,
    },
    /// An operation is not done within its limit.
    #[error("{action} {url}: not done within {} s; look at the network and the endpoint", waited.as_secs())]
    Slow {
        /// The object or store.
        url: String,
        /// The operation.
        action: &'static str,
        /// The limit.
        waited: Duration,
    },
    /// An object is larger than what the caller can hold.
    #[error("{url}: it has {bytes} bytes, of at most {most}")]
    TooLarge {
        /// The object.
        url: String,
        /// Its length.
        bytes: u64,
        /// The largest length.
        most: u64,
    },
    /// An object has another length than its store has said.
    #[error("{url}: {got} bytes came of {expected}; read it again")]
    Truncated {
        /// The object.
        url: String,
        /// The number of bytes that came.
        got: u64,
        /// The number of bytes announced.
        expected: u64,
    },
    /// The store answers with another error.
    #[error(
        "{action} {url}: the store answers {problem}; look at the endpoint, the region and what the store supports"
    )]
    Answer {
        /// The object or store.
        url: String,
        /// The operation.
        action: &'static str,
        /// The answer.
        problem: String,
    },
    /// A file of the cache cannot be read or written.
    #[error("the cache at {}: {source}; choose a folder that can be written and has room", path.display())]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The threads that requests run on cannot be started, or have ended.
    #[error("requests to stores cannot run: {problem}; look at the limit of threads")]
    Thread {
        /// The problem.
        problem: String,
    },
}

distribute_types::debug_is_display!(Error);

impl ErrorClass for Error {
    fn class(&self) -> Class {
        match self {
            Error::Connection { .. } | Error::Slow { .. } | Error::Truncated { .. } => {
                Class::new(Scope::Cluster, FailureKind::Retryable)
            }
            Error::Url { .. }
            | Error::Settings { .. }
            | Error::Retry { .. }
            | Error::Credential { .. }
            | Error::NoBucket { .. } => Class::CONFIGURATION,
            _ => Class::PERMANENT,
        }
    }
}

impl From<Error> for io::Error {
    /// Wraps the error; [`Error::of`] returns it again.
    fn from(error: Error) -> io::Error {
        let kind = match &error {
            Error::NotFound { .. } => io::ErrorKind::NotFound,
            Error::Denied { .. } => io::ErrorKind::PermissionDenied,
            Error::Exists { .. } => io::ErrorKind::AlreadyExists,
            Error::Url { .. } => io::ErrorKind::InvalidInput,
            Error::TooLarge { .. } | Error::Changed { .. } => io::ErrorKind::InvalidData,
            Error::Connection { .. } | Error::Truncated { .. } => io::ErrorKind::ConnectionAborted,
            Error::Slow { .. } => io::ErrorKind::TimedOut,
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}

impl Error {
    /// Returns the error of a store that an I/O error wraps, if it does.
    pub fn of(error: &io::Error) -> Option<&Error> {
        error.get_ref()?.downcast_ref()
    }

    /// Returns whether the operation may succeed if it is repeated.
    pub fn is_retryable(&self) -> bool {
        ErrorClass::is_retryable(self)
    }

    /// Converts the error of creating a store. Values of variables that may be secret are left out of its text.
    pub(crate) fn settings(url: &str, error: &object_store::Error, variables: &[(String, String)]) -> Error {
        let mut problem = error.to_string();
        for (_, value) in variables.iter().filter(|(name, value)| is_secret(name) && value.len() > 3) {
            problem = problem.replace(value.as_str(), "(not shown)");
        }
        let names = names(url);
        Error::Settings { url: url.to_owned(), problem, variables: names }
    }

    /// Converts the error of a request.
    pub(crate) fn request(url: &str, action: &'static str, error: &object_store::Error, tried: Duration) -> Error {
        use object_store::Error as Of;
        let (url, text, http) = (url.to_owned(), error.to_string(), http(error));
        let code = code(&text);
        let names = names(&url);
        let credential = |problem: String| Error::Credential { url: url.clone(), action, problem, variables: names };
        if METADATA.iter().any(|host| text.contains(host)) {
            return credential("there is no credential, and the machine has no service that gives one".to_owned());
        }
        match &code {
            Some(code) if BAD_CREDENTIAL.contains(&code.as_str()) => {
                return credential(format!("the store does not accept the credential ({code})"));
            }
            Some(code) if NO_BUCKET.contains(&code.as_str()) => return Error::NoBucket { url, action },
            _ => {}
        }
        let status = status(&text);
        let answer = |otherwise: &str| match (&status, &code) {
            (Some(status), Some(code)) => format!("{status} {code}"),
            (Some(status), None) => format!("status {status}"),
            (None, Some(code)) => code.clone(),
            (None, None) => otherwise.to_owned(),
        };
        let unsupported =
            || Error::Answer { url: url.clone(), action, problem: "that it does not support this".to_owned() };
        match error {
            Of::Unauthenticated { .. } => {
                credential(format!("the store does not accept the credential ({})", answer("401")))
            }
            Of::PermissionDenied { .. } => Error::Denied { url, action, code: answer("403") },
            Of::NotFound { .. } => Error::NotFound { url },
            Of::AlreadyExists { .. } => Error::Exists { url },
            Of::Precondition { .. } | Of::NotModified { .. } => Error::Changed { url },
            Of::NotImplemented { .. } | Of::NotSupported { .. } => unsupported(),
            _ if causes(error).any(|cause| cause.is::<NotImplemented>()) => unsupported(),
            _ if http.is_some() => {
                let problem = http.unwrap_or_default();
                Error::Connection { url, action, problem, tried }
            }
            _ if status.as_deref().is_some_and(|status| status.starts_with('5') || status == "429") => {
                Error::Connection { url, action, problem: format!("the store answers {}", answer("an error")), tried }
            }
            Of::InvalidPath { .. } => Error::Url { url, problem: "its name is not valid for an object; rename it" },
            _ if text.contains("redirect") => {
                Error::Answer { url, action, problem: "a redirection, as for another region".to_owned() }
            }
            _ => Error::Answer { url, action, problem: answer("with something that is not an answer of a store") },
        }
    }
}

/// Returns an error and its causes, from the outside in.
fn causes<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

/// Describes a failure of a connection by its innermost cause; `None` if the error is another one.
fn http(error: &object_store::Error) -> Option<String> {
    let http = causes(error).filter_map(|cause| cause.downcast_ref::<HttpError>()).last()?;
    let innermost = causes(error).last().map(ToString::to_string).unwrap_or_default();
    let kind = match http.kind() {
        HttpErrorKind::Connect => "no connection",
        HttpErrorKind::Timeout => "no answer in time",
        _ => "the connection was cut",
    };
    // Only short texts, as of the system, so that no part of a request is shown.
    let plain = innermost.len() <= 80 && !innermost.contains("://") && !innermost.contains('<');
    Some(if plain { format!("{kind} ({innermost})") } else { kind.to_owned() })
}

/// Returns the status that an answer of the store has.
fn status(text: &str) -> Option<String> {
    let digits: String = text.split_once("status code: ")?.1.chars().take_while(char::is_ascii_digit).collect();
    (digits.len() == 3).then_some(digits)
}

/// Returns the code in an answer of the store: `<Code>` of S3, Azure and Google's XML, `reason` of its JSON.
fn code(text: &str) -> Option<String> {
    let after = text.split_once("<Code>").map(|(_, after)| after);
    let after = after.or_else(|| text.split_once("\"reason\": \"").map(|(_, after)| after))?;
    let code: String = after.chars().take_while(char::is_ascii_alphanumeric).collect();
    (1..=64).contains(&code.len()).then_some(code)
}

/// Returns whether a variable's value may be secret.
fn is_secret(name: &str) -> bool {
    ["KEY", "SECRET", "TOKEN", "PASSWORD", "SAS", "CREDENTIAL", "ACCOUNT"].iter().any(|word| name.contains(word))
}

fn names(url: &str) -> &'static str {
    match url.split_once("://").map_or("", |(scheme, _)| scheme) {
        "s3" => "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_REGION, AWS_ENDPOINT_URL)",
        "gs" => "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT",
        "az" => "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
        _ => "AWS_*, GOOGLE_* or AZURE_*",
    }
}

/// Where credentials are fetched from if none are given.
const METADATA: [&str; 4] =
    ["169.254.169.254", "169.254.170.2", "metadata.google.internal", "login.microsoftonline.com"];

const BAD_CREDENTIAL: [&str; 13] = [
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "InvalidClientTokenId",
    "TokenRefreshRequired",
    "RequestTimeTooSkewed",
    "InvalidSecurity",
    "AuthenticationFailed",
    "InvalidAuthenticationInfo",
    "AuthorizationHeaderMalformed",
    "authError",
    "InvalidCredentials",
];

const NO_BUCKET: [&str; 3] = ["NoSuchBucket", "ContainerNotFound", "InvalidBucketName"];

#[cfg(test)]
mod tests;
