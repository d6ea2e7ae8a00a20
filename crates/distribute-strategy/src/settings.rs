//! Settings of a program that must be equal on all workers.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

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

impl Settings {
    /// Declares a setting, or replaces its value.
    pub(crate) fn declare(&self, name: &str, value: String) {
        let mut declared = self.lock();
        declared.by_name.insert(name.to_owned(), value);
        let texts = declared.by_name.iter().flat_map(|(name, value)| [name.as_str(), "\0", value.as_str(), "\0"]);
        declared.digest = digest(0, texts.flat_map(str::bytes));
    }

    /// Returns one line for each setting.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.lock().by_name.iter().map(|(name, value)| format!("{name}: {value}")).collect()
    }

    /// Returns the numbers of a step header that identify these settings and, by its digest, those of the optimizer.
    pub(crate) fn words(&self, optimizer: u64) -> [u32; 2] {
        let declared = self.lock().digest;
        let all = digest(declared, optimizer.to_le_bytes());
        // The sum of equal digests is their multiple; the sum of different ones is so by chance once in four thousand
        // million.
        [all >> 48, all >> 32].map(|number| number as u32 & ((1 << DIGEST_BITS) - 1))
    }

    fn lock(&self) -> MutexGuard<'_, Declared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Computes the 64-bit FNV-1a hash of `bytes`, chained to the hash `before`.
pub fn digest(before: u64, bytes: impl IntoIterator<Item = u8>) -> u64 {
    let basis = 0xcbf2_9ce4_8422_2325 ^ before;
    bytes.into_iter().fold(basis, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
