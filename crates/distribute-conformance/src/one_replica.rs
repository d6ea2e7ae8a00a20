//! Trainings on one replica, which those of all strategies are compared with.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{fs, io};

use distribute::prelude::Strategy;
use tempfile::NamedTempFile;

use crate::check::Stop;

/// The folder with the parameters of the trainings that were made, which the suite and its processes share.
static MADE: OnceLock<PathBuf> = OnceLock::new();

/// Sets the folder that trainings are kept in; the first call counts. Without one, each training is made whenever it is
/// needed.
pub(crate) fn keep_in(folder: &Path) {
    MADE.get_or_init(|| folder.to_owned());
}

/// Returns the parameters that a training gives on one replica; `key` tells trainings apart.
pub(crate) fn on_one(key: &str, train: impl FnOnce(&Strategy) -> Result<Vec<f32>, Stop>) -> Result<Vec<f32>, Stop> {
    let train = || train(&Strategy::default_strategy()?);
    let Some(folder) = MADE.get() else { return train() };
    let file = folder.join(key.replace(|letter: char| !letter.is_ascii_alphanumeric(), "-"));
    match fs::read(&file) {
        Ok(bytes) => Ok(bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let parameters = train()?;
            // Others see all of the file or nothing.
            let mut kept = NamedTempFile::new_in(folder)?;
            for parameter in &parameters {
                kept.write_all(&parameter.to_le_bytes())?;
            }
            kept.persist(file)?;
            Ok(parameters)
        }
        Err(error) => Err(error.into()),
    }
}
