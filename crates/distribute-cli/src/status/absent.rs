//! The launcher without a status page.

use std::ffi::OsStr;

use crossbeam_channel::Sender;

use crate::error::Error;
use crate::job::Task;
use crate::outcome::Exit;
use crate::output::Tail;
use crate::status::Reports;

/// No options.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {}

/// No page.
#[derive(Debug)]
pub(crate) struct Status;

impl Status {
    pub(crate) fn start(_: &Options, _: &[Task], _: &OsStr, _: Reports, _: &Sender<String>) -> Result<Self, Error> {
        Ok(Self)
    }

    pub(crate) fn environment(&self, _: &str) -> Option<(&'static str, String)> {
        None
    }

    pub(crate) fn started(&mut self, _: usize, _: i32, _: Option<Tail>) {}

    pub(crate) fn signalled(&mut self, _: usize, _: i32) {}

    pub(crate) fn ended(&mut self, _: usize, _: Exit) {}

    pub(crate) fn poll(&mut self) {}
}
