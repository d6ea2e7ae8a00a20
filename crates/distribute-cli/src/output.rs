//! The output of the tasks, on its way to the user.
//!
//! One thread per stream reads, splits into lines and writes logs; one thread draws, so that lines and the bar never
//! mix.

mod lines;
mod screen;
mod standard;
mod stream;

pub(crate) use screen::{Look, Screen, ends_within};
pub(crate) use standard::{print, say};
pub(crate) use stream::{Follow, Tail};

/// The standard stream that a line came from and goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

/// The input of the drawing thread.
#[derive(Debug)]
pub(crate) enum Output {
    /// Lines of a task, without their line ends; of a launcher of another host, which has marked them, without a rank.
    Lines { rank: Option<usize>, stream: Stream, lines: Vec<String> },
    /// Progress of the job.
    Progress(distribute_train::progress::Event),
    /// The report of an attempt that has failed.
    Report(String),
}
