//! Log output of programs that have no subscriber of their own.

use std::env::VarError;
use std::error::Error;
use std::fmt;
use std::io::{IsTerminal, stderr};
use std::time::SystemTime;

use distribute_train::progress::{LogWriter, colors_allowed};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::FromEnvError;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;

/// Prints log messages to standard error, above the progress bar if there is one: warnings, the tasks that a starting
/// job waits for, the checkpoint from which training resumes, and the reason why it ends.
///
/// `RUST_LOG` selects other messages; one that is not a filter of tracing-subscriber is reported, and these are shown.
/// Call it first in `main`. It does nothing if the program has a subscriber already.
///
/// # Examples
/// ```
/// distribute::init_logging();
/// ```
pub fn init_logging() {
    let (filter, refused) = match EnvFilter::try_from_default_env() {
        Ok(filter) => (filter, None),
        Err(error) => (EnvFilter::new(SHOWN), Some(error).filter(|error| !is_unset(error))),
    };
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(LogWriter::stderr);
    let lines = lines.with_target(false).with_ansi(colors_allowed());
    // The only possible error is that there is a subscriber, whose filter is not ours.
    let installed =
        if stderr().is_terminal() { lines.without_time().try_init() } else { lines.with_timer(Seconds).try_init() };
    if let (Ok(()), Some(error)) = (installed, refused) {
        distribute_notice::warn!("RUST_LOG does not say which messages to show ({error}); {SHOWN} is used");
    }
}

fn is_unset(error: &FromEnvError) -> bool {
    matches!(error.source().and_then(|source| source.downcast_ref()), Some(VarError::NotPresent))
}

const SHOWN: &str =
    "warn,distribute_cluster=info,distribute_train=info,distribute_candle=info,distribute_estimator=info";

/// Formats times like progress lines: `2026-11-20T20:41:07Z`.
struct Seconds;

impl FormatTime for Seconds {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        write!(writer, "{}", humantime::format_rfc3339_seconds(SystemTime::now()))
    }
}
