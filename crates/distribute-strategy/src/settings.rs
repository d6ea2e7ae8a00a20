//! Settings that must be equal on all workers, compared in every step.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use distribute_collectives::{Difference, Rank};
use distribute_types::ErrorClass;

use crate::step_header::STEP_WORDS;
use crate::{Error, ReplicaContext, Strategy};

/// Bits of the digest in each number of the step header: sums over any number of workers stay within 32 bits.
const DIGEST_BITS: u32 = 16;

/// The declared settings.
#[derive(Default)]
pub(crate) struct Settings(Mutex<Declared>);

#[derive(Default)]
struct Declared {
    by_name: BTreeMap<String, String>,
    digest: u64,
}

impl Strategy {
    /// Declares a setting of the program that must be equal on all workers. If it is not, the next optimizer step fails
    /// on all of them with an error that names the setting and both values. Declaring a name again replaces its value.
    ///
    /// Optimizers, models and distributed datasets declare their own settings; this is for those that a program chooses
    /// itself. It costs nothing: a digest travels with each step.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::Strategy;
    /// let strategy = Strategy::default_strategy()?;
    /// strategy.declare("epochs", 5);
    /// # Ok::<(), distribute_strategy::Error>(())
    /// ```
    pub fn declare(&self, name: &str, value: impl std::fmt::Display) {
        let mut declared = self.replicas().settings.0.lock().unwrap_or_else(PoisonError::into_inner);
        declared.by_name.insert(name.to_owned(), value.to_string());
        let texts = declared.by_name.iter().flat_map(|(name, value)| [name.as_str(), "\0", value.as_str(), "\0"]);
        declared.digest = digest(0, texts.flat_map(str::bytes));
    }

    fn declared_lines(&self) -> Vec<String> {
        let declared = self.replicas().settings.0.lock().unwrap_or_else(PoisonError::into_inner);
        declared.by_name.iter().map(|(name, value)| format!("{name}: {value}")).collect()
    }
}

/// Computes the 64-bit FNV-1a hash of `bytes`, chained to the hash `before`.
pub fn digest(before: u64, bytes: impl IntoIterator<Item = u8>) -> u64 {
    let basis = 0xcbf2_9ce4_8422_2325 ^ before;
    bytes.into_iter().fold(basis, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

impl ReplicaContext {
    /// Returns the numbers of a step header that identify the settings of the program and, by its digest, of the
    /// optimizer.
    pub(crate) fn settings_words(&self, optimizer: u64) -> [u32; 2] {
        let declared = self.strategy().replicas().settings.0.lock().unwrap_or_else(PoisonError::into_inner).digest;
        let all = digest(declared, optimizer.to_le_bytes());
        // The sum of equal digests is their multiple; the sum of different ones is so by chance once in four thousand
        // million.
        [all >> 48, all >> 32].map(|number| number as u32 & ((1 << DIGEST_BITS) - 1))
    }

    /// Compares the sums of a step's headers with those that equal settings on all workers would give.
    ///
    /// `optimizer` is the digest that was passed to [`step_words`](ReplicaContext::step_words); `lines` describes the
    /// optimizer, one setting per line. Every replica calls this with the same sums.
    ///
    /// # Errors
    /// [`Error::SettingsDiffer`] names the first setting that differs; [`Error::Collective`] if a worker is missing or
    /// fails.
    pub fn check_settings(
        &self,
        sums: [u32; STEP_WORDS],
        optimizer: u64,
        lines: impl FnOnce() -> Vec<String>,
    ) -> Result<(), Error> {
        let workers = self.strategy().topology().workers as u32;
        let expected = self.settings_words(optimizer).map(|number| number.wrapping_mul(workers));
        if sums[STEP_WORDS - 2..] == expected { Ok(()) } else { self.compare_settings(lines()) }
    }

    /// Compares the program's settings and `lines`, one setting per line, with those of all other workers at once. For
    /// settings that must be equal before a step's operations, because those would differ themselves. Every replica
    /// calls this.
    ///
    /// # Errors
    /// [`Error::SettingsDiffer`] names the first setting that differs; [`Error::Collective`] if a worker is missing or
    /// fails.
    pub fn compare_settings(&self, lines: Vec<String>) -> Result<(), Error> {
        if self.strategy().topology().workers == 1 {
            return Ok(());
        }
        let mut all = lines;
        all.extend(self.strategy().declared_lines());
        let group = self.group();
        let found = group.first_difference(&all).map_err(Error::from)?;
        let Some(Difference { mine, theirs, rank, .. }) = found else {
            // The declared settings have changed since the step began.
            return Ok(());
        };
        let missing = || "nothing of the kind".to_owned();
        let name = |rank: Rank| group.rank_name(rank).to_owned();
        let error = Error::SettingsDiffer {
            here: name(group.rank()),
            mine: mine.unwrap_or_else(missing),
            there: name(rank),
            theirs: theirs.unwrap_or_else(missing),
        };
        // Aborted here, where the kind is known, so that a worker that has not read all answers yet ends with the same
        // exit code.
        group.abort(&error.to_string(), error.failure_kind());
        Err(error)
    }
}
