//! What the tasks print, on its way to the user.
//!
//! One thread per stream reads, cuts into lines and keeps logs; one thread draws, so that lines and the bar never mix.

mod lines;
mod screen;
mod stream;

pub(crate) use screen::{Look, Screen, ends_within};
pub(crate) use stream::{Follow, Tail};

/// Where a line came from, and where it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

/// What the drawing thread is given.
#[derive(Debug)]
pub(crate) enum Output {
    /// Lines of a task, without their ends.
    Lines { rank: usize, stream: Stream, lines: Vec<String> },
    /// Progress of the job.
    Progress(distribute_train::progress::Event),
}
