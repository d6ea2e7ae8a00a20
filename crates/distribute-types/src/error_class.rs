//! Classification of errors: their scope, whether a restart helps, and the exit code.

/// The kind of a failure, which determines whether a restart helps. It is sent with the failure, so that all processes
/// of a job exit with codes of the same kind and job managers restart the job or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// A process or a connection was lost, or a peer was too slow: the same program may succeed after a restart.
    Retryable,
    /// The program's own error, which would occur again.
    Permanent,
    /// Processes were described or configured inconsistently or incorrectly.
    Configuration,
}

impl FailureKind {
    /// Returns the exit code of a process that ends by a failure of this kind: 138, 1 or 2.
    pub const fn exit_code(self) -> u8 {
        match self {
            FailureKind::Retryable => 138,
            FailureKind::Permanent => 1,
            FailureKind::Configuration => 2,
        }
    }

    /// Returns the number that represents it in messages.
    pub const fn code(self) -> u32 {
        match self {
            FailureKind::Retryable => 0,
            FailureKind::Permanent => 1,
            FailureKind::Configuration => 2,
        }
    }

    /// Returns the kind with this number. For a number that this build does not know, returns the kind of failures
    /// against which a restart may help.
    pub const fn from_code(code: u32) -> FailureKind {
        match code {
            1 => FailureKind::Permanent,
            2 => FailureKind::Configuration,
            _ => FailureKind::Retryable,
        }
    }
}

/// The part of a job that an error concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scope {
    /// This call or this process alone.
    Caller,
    /// One other process.
    Peer,
    /// Every rank of a process group.
    Group,
    /// Every task of the job.
    Cluster,
}

/// The class of an error: its scope, its kind, and the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Class {
    /// The part of the job that it concerns.
    pub scope: Scope,
    /// Whether a restart helps; if a peer failed, whether a restart helps against that failure.
    pub kind: FailureKind,
    /// The exit code of a process that ends by the error, if it is not the kind's.
    exit_code: Option<u8>,
}

impl Class {
    /// Creates a class from a scope and a kind.
    pub const fn new(scope: Scope, kind: FailureKind) -> Class {
        Class { scope, kind, exit_code: None }
    }

    /// The class of the program's own errors: of this process only, and permanent.
    pub const PERMANENT: Class = Class::new(Scope::Caller, FailureKind::Permanent);

    /// The class of an invalid setting of this process.
    pub const CONFIGURATION: Class = Class::new(Scope::Caller, FailureKind::Configuration);

    /// Replaces the exit code, for processes that a signal ends.
    #[must_use]
    pub const fn with_exit_code(self, exit_code: u8) -> Class {
        Class { exit_code: Some(exit_code), ..self }
    }

    /// Returns the exit code of a process that ends by the error.
    pub const fn exit_code(self) -> u8 {
        match self.exit_code {
            Some(code) => code,
            None => self.kind.exit_code(),
        }
    }
}

/// An error with a class. An error that wraps another one has the class of that one.
///
/// # Examples
/// ```
/// use distribute_types::{Class, ErrorClass, FailureKind, Scope};
///
/// #[derive(Debug, thiserror::Error)]
/// enum Error {
///     #[error("lost worker:1")]
///     PeerLost,
///     #[error("the learning rate is -1; expected 0 or more")]
///     Setting,
/// }
///
/// impl ErrorClass for Error {
///     fn class(&self) -> Class {
///         match self {
///             Error::PeerLost => Class::new(Scope::Peer, FailureKind::Retryable),
///             Error::Setting => Class::PERMANENT,
///         }
///     }
/// }
///
/// assert_eq!((Error::PeerLost.exit_code(), Error::PeerLost.is_retryable()), (138, true));
/// assert_eq!((Error::Setting.exit_code(), Error::Setting.is_retryable()), (1, false));
/// ```
pub trait ErrorClass: std::error::Error {
    /// Returns the class of the error.
    fn class(&self) -> Class;

    /// Returns the part of the job that the error concerns.
    fn scope(&self) -> Scope {
        self.class().scope
    }

    /// Returns the kind of the error; if a peer failed, the kind of that failure.
    fn failure_kind(&self) -> FailureKind {
        self.class().kind
    }

    /// Returns whether the same program may succeed after a restart.
    fn is_retryable(&self) -> bool {
        self.failure_kind() == FailureKind::Retryable
    }

    /// Returns the exit code of a process that ends by the error.
    fn exit_code(&self) -> u8 {
        self.class().exit_code()
    }
}

/// An error with its class, as a boxed type for traits whose methods return any error.
///
/// # Examples
/// ```
/// # #[derive(Debug, thiserror::Error)]
/// # #[error("lost worker:1")]
/// # struct PeerLost;
/// # impl distribute_types::ErrorClass for PeerLost {
/// #     fn class(&self) -> Class {
/// #         Class::new(distribute_types::Scope::Peer, distribute_types::FailureKind::Retryable)
/// #     }
/// # }
/// use distribute_types::{Class, Classified, ErrorClass};
///
/// let error: Box<dyn std::error::Error + Send + Sync> = Classified::new(PeerLost).into();
/// assert_eq!(Classified::class_of(&*error).exit_code(), 138);
/// assert_eq!(Classified::class_of(&std::fmt::Error).exit_code(), 1);
/// ```
#[derive(Debug)]
pub struct Classified(Box<dyn ErrorClass + Send + Sync>);

impl Classified {
    /// Wraps an error.
    pub fn new(error: impl ErrorClass + Send + Sync + 'static) -> Classified {
        Classified(Box::new(error))
    }

    /// Returns the class of a wrapped error, and [`Class::PERMANENT`] for all other errors.
    pub fn class_of(error: &(dyn std::error::Error + 'static)) -> Class {
        error.downcast_ref::<Classified>().map_or(Class::PERMANENT, ErrorClass::class)
    }
}

impl std::fmt::Display for Classified {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Classified {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

impl ErrorClass for Classified {
    fn class(&self) -> Class {
        self.0.class()
    }
}
