//! What can go wrong before progress is shown; later trouble never reaches the training loop.

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// `DISTRIBUTE_PROGRESS` names no form.
    #[error(
        "DISTRIBUTE_PROGRESS is {given:?}; set it to auto, bar, plain, json, launcher or off, or unset it for auto"
    )]
    UnknownForm {
        /// The variable's value.
        given: String,
    },
    /// The launcher form was chosen without saying where the launcher listens.
    #[error(
        "DISTRIBUTE_PROGRESS is \"launcher\", but DISTRIBUTE_PROGRESS_ADDR is not set; set it to the host:port where the \
         launcher listens, or set DISTRIBUTE_PROGRESS to plain"
    )]
    MissingAddress,
    /// `DISTRIBUTE_PROGRESS_ADDR` is no address.
    #[error(
        "DISTRIBUTE_PROGRESS_ADDR is {given:?}; expected host:port with a port from 1 to 65535, such as 127.0.0.1:4711"
    )]
    BadAddress {
        /// The variable's value.
        given: String,
    },
    /// The thread that writes progress could not be started.
    #[error("progress: the writer thread cannot be started; raise the process's thread limit")]
    Thread(#[source] std::io::Error),
}
