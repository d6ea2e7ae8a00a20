//! Settings of a program that must be equal on all workers.

use std::collections::BTreeMap;

use distribute_types::{FNV64, fnv1a_64};
use parking_lot::{Mutex, MutexGuard};

/// Bits of the digest in each number of the step header: sums over any number of workers stay within 32 bits.
const DIGEST_BITS: u32 = 16;

/// Precedes the names of settings that passes over data declare.
pub(crate) const INPUT: &str = "input, ";

/// The declared settings.
#[derive(Default)]
pub(crate) struct Settings(Mutex<Declared>);

#[derive(Default)]
struct Declared {
    by_name: BTreeMap<String, String>,
    digest: u64,
}

impl Declared {
    fn digest(&mut self) {
        let texts = self.by_name.iter().flat_map(|(name, value)| [name.as_str(), "\0", value.as_str(), "\0"]);
        self.digest = fnv1a_64(FNV64, texts.flat_map(str::bytes));
    }
}

impl Settings {
    /// Declares a setting, or replaces its value.
    pub(crate) fn declare(&self, name: &str, value: String) {
        let mut declared = self.lock();
        declared.by_name.insert(name.to_owned(), value);
        declared.digest();
    }

    /// Withdraws the settings whose names begin with this prefix.
    pub(crate) fn withdraw(&self, prefix: &str) {
        let mut declared = self.lock();
        declared.by_name.retain(|name, _| !name.starts_with(prefix));
        declared.digest();
    }

    /// Returns one line for each setting.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.lock().by_name.iter().map(|(name, value)| format!("{name}: {value}")).collect()
    }

    /// Returns the numbers of a step header that identify these settings and, by its digest, those of the optimizer.
    pub(crate) fn words(&self, optimizer: u64) -> [u32; 2] {
        let declared = self.lock().digest;
        let all = fnv1a_64(FNV64 ^ declared, optimizer.to_le_bytes());
        // The sum of equal digests is their multiple; the sum of different ones is so by chance once in four thousand
        // million.
        [all >> 48, all >> 32].map(|number| number as u32 & ((1 << DIGEST_BITS) - 1))
    }

    fn lock(&self) -> MutexGuard<'_, Declared> {
        self.0.lock()
    }
}
