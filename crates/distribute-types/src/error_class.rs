//! What an error calls for: who it concerns, whether a restart helps, and how the process ends.

/// Whether a restart helps against a failure. It travels with the failure, so that all processes of a job end alike and job
/// managers restart the job or do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// A process or a connection was lost, or somebody was too slow: the same program may succeed when it is started again.
    Retryable,
    /// The program's own error, which comes again.
    Permanent,
    /// Processes were described or configured differently or wrongly.
    Configuration,
}

impl FailureKind {
    /// Returns the exit code of a process that ends by such a failure: 138, 1 or 2.
    pub const fn exit_code(self) -> u8 {
        match self {
            FailureKind::Retryable => 138,
            FailureKind::Permanent => 1,
            FailureKind::Configuration => 2,
        }
    }

    /// Returns the number by which it is sent.
    pub const fn code(self) -> u32 {
        match self {
            FailureKind::Retryable => 0,
            FailureKind::Permanent => 1,
            FailureKind::Configuration => 2,
        }
    }

    /// Returns the kind that was sent by this number. A number that this build does not know is taken for a failure against which
    /// a restart may help.
    pub const fn from_code(code: u32) -> FailureKind {
        match code {
            1 => FailureKind::Permanent,
            2 => FailureKind::Configuration,
            _ => FailureKind::Retryable,
        }
    }
}

/// Who an error concerns.
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

/// The answer that an error calls for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Class {
    /// Who it concerns.
    pub scope: Scope,
    /// Whether a restart helps; if a peer failed, whether it helps against that failure.
    pub kind: FailureKind,
    /// The exit code of a process that ends by it, where that is not the kind's.
    exit_code: Option<u8>,
}

impl Class {
    /// Classifies an error by whom it concerns and whether a restart helps.
    pub const fn new(scope: Scope, kind: FailureKind) -> Class {
        Class { scope, kind, exit_code: None }
    }

    /// The class of an error of the program itself: of this process alone, and permanent.
    pub const PERMANENT: Class = Class::new(Scope::Caller, FailureKind::Permanent);

    /// The class of a wrong setting of this process.
    pub const CONFIGURATION: Class = Class::new(Scope::Caller, FailureKind::Configuration);

    /// Replaces the exit code, for processes that are told to end by a signal.
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

/// An error that knows which answer it calls for. Errors that wrap another one have the class of that one.
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
    /// Returns the answer that the error calls for.
    fn class(&self) -> Class;

    /// Returns who the error concerns.
    fn scope(&self) -> Scope {
        self.class().scope
    }

    /// Returns whether a restart helps; if a peer failed, whether it helps against that failure.
    fn failure_kind(&self) -> FailureKind {
        self.class().kind
    }

    /// Returns whether the same program may succeed when it is started again.
    fn is_retryable(&self) -> bool {
        self.failure_kind() == FailureKind::Retryable
    }

    /// Returns the exit code of a process that ends by the error.
    fn exit_code(&self) -> u8 {
        self.class().exit_code()
    }
}

/// An error whose type its receiver cannot name, with its class: for traits whose methods return any error, in a box.
///
/// # Examples
/// ```
/// # #[derive(Debug, thiserror::Error)]
/// # #[error("lost worker:1")]
/// # struct PeerLost;
/// # impl distribute_types::ErrorClass for PeerLost {
/// #     fn class(&self) -> Class { Class::new(distribute_types::Scope::Peer, distribute_types::FailureKind::Retryable) }
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

    /// Returns the class of an error that was wrapped, and that of the program's own for any other.
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
