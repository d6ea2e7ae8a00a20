//! Settings that must be the same on all workers, compared with every step.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use distribute_collectives::{Difference, Rank};

use crate::step_word::STEP_WORDS;
use crate::{Error, ReplicaContext, Strategy};

/// Bits of a settings word: sums over as many workers as there can be stay within 32 bits.
const WORD_BITS: u32 = 16;

/// What has been declared.
#[derive(Default)]
pub(crate) struct Settings(Mutex<Declared>);

#[derive(Default)]
struct Declared {
    by_name: BTreeMap<String, String>,
    digest: u64,
}

impl Strategy {
    /// Declares a setting of the program that must be the same on all workers: the next step of an optimizer fails on all of
    /// them where it is not, with a sentence that names the setting and both values. Declaring a name again replaces its value.
    ///
    /// Optimizers, models and distributed datasets declare their own; this is for what a program decides by itself. It costs
    /// nothing: a digest travels with each step.
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

/// 64 bits of FNV-1a.
pub fn digest(before: u64, bytes: impl IntoIterator<Item = u8>) -> u64 {
    let basis = 0xcbf2_9ce4_8422_2325 ^ before;
    bytes.into_iter().fold(basis, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

impl ReplicaContext {
    /// The words of a step that tell settings: of the program and, by its digest, of the optimizer.
    pub(crate) fn settings_words(&self, optimizer: u64) -> [u32; 2] {
        let declared = self.strategy().replicas().settings.0.lock().unwrap_or_else(PoisonError::into_inner).digest;
        let all = digest(declared, optimizer.to_le_bytes());
        // Sums of equal words are their multiples; that of different ones is, by chance, once in four thousand million.
        [all >> 48, all >> 32].map(|word| word as u32 & ((1 << WORD_BITS) - 1))
    }

    /// Compares the sums of a step's words with what equal settings on all workers would give.
    ///
    /// `optimizer` is what was given to [`step_words`](ReplicaContext::step_words); `lines` describes it, one setting a line.
    /// Every replica calls this with the same sums.
    ///
    /// # Errors
    /// [`Error::SettingsDiffer`] names the first setting that differs; those of collectives.
    pub fn check_settings(
        &self,
        sums: [u32; STEP_WORDS],
        optimizer: u64,
        lines: impl FnOnce() -> Vec<String>,
    ) -> Result<(), Error> {
        let workers = self.strategy().topology().workers as u32;
        let expected = self.settings_words(optimizer).map(|word| word.wrapping_mul(workers));
        if sums[STEP_WORDS - 2..] == expected { Ok(()) } else { self.compare_settings(lines()) }
    }

    /// Compares settings with those of all other workers now: those of the program, and `lines`, one setting a line. For what must
    /// be known to be equal before a step's operations, which would differ themselves. Every replica calls this.
    ///
    /// # Errors
    /// As [`check_settings`](ReplicaContext::check_settings).
    pub fn compare_settings(&self, lines: Vec<String>) -> Result<(), Error> {
        if self.strategy().topology().workers == 1 {
            return Ok(());
        }
        let mut all = lines;
        all.extend(self.strategy().declared_lines());
        let group = self.group();
        let found = group.first_difference(&all).map_err(Error::from)?;
        let Some(Difference { mine, theirs, rank, .. }) = found else {
            // What was declared has changed since the step began.
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
        // Here, where the kind is known: a worker that has not read all answers yet ends with the same exit code.
        group.abort_as(&error.to_string(), error.failure_kind());
        Err(error)
    }
}
