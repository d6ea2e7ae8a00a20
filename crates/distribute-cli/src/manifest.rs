//! `distribute manifest`: job files in which each task finds its place by the variables that a program reads.

pub(crate) mod args;
mod checks;
mod compose;
mod job;
mod job_set;
mod kubernetes;
mod slurm;
mod tasks;
mod tf_job;
mod train_job;
mod yaml;

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::Path;

use self::args::{Manifest, Platform, Program};
use crate::error::Error;

/// Returns the job file, or writes it and returns nothing.
///
/// # Errors
/// [`Error::Manifest`] if options contradict each other, [`Error::Exists`] or [`Error::Write`] if the file cannot be
/// written.
pub(crate) fn run(args: &Manifest) -> Result<String, Error> {
    let (program, text) = match &args.platform {
        Platform::Job(job) => (&job.program, job::file(job)),
        Platform::JobSet(job) => (&job.program, job_set::file(job)),
        Platform::TfJob(job) => (&job.program, tf_job::file(job)),
        Platform::TrainJob(job) => (&job.program, train_job::file(job)),
        Platform::Slurm(job) => (&job.program, slurm::file(job)),
        Platform::Compose(job) => (&job.program, compose::file(job)),
    };
    check(program)?;
    let text = text?;
    match &program.output {
        None => Ok(text),
        Some(path) => write(path, &text).map(|()| String::new()),
    }
}

/// Checks that no variable is given twice.
fn check(program: &Program) -> Result<(), Error> {
    let mut names: Vec<&str> = program.env.iter().map(|variable| variable.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(pair) => Err(Error::Manifest {
            problem: format!("the variable {} has several values", pair[0]),
            given: format!("--env {}=… more than once", pair[0]),
            expected: "one value".into(),
            remedy: "leave out the others".into(),
        }),
    }
}

/// Writes a new file.
fn write(path: &Path, text: &str) -> Result<(), Error> {
    let written = File::create_new(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|source| match source.kind() {
        ErrorKind::AlreadyExists => Error::Exists { path: path.to_owned() },
        _ => Error::Write { path: path.to_owned(), source },
    })
}
