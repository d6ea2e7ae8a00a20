//! Random numbers by which members of a group, and parts of their memory, are told from others.

use std::fmt;
use std::io;
use std::str::FromStr;

use distribute_types::{FNV64, fnv1a_64};

/// A random number that identifies a group or a segment: a process that reads it in memory has found the memory to
/// which it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Nonce([u64; 2]);

impl Nonce {
    pub(crate) const LEN: usize = 16;

    /// A new one, from the system's source of randomness.
    pub(crate) fn new() -> io::Result<Nonce> {
        let mut bytes = [0; Self::LEN];
        getrandom::fill(&mut bytes)?;
        Ok(Nonce::from_bytes(bytes))
    }

    pub(crate) fn from_bytes(bytes: [u8; Self::LEN]) -> Nonce {
        let number = u128::from_le_bytes(bytes);
        Nonce([number as u64, (number >> 64) as u64])
    }

    pub(crate) fn to_bytes(self) -> [u8; Self::LEN] {
        (u128::from(self.0[0]) | u128::from(self.0[1]) << 64).to_le_bytes()
    }

    #[cfg(target_os = "linux")]
    pub(crate) fn words(self) -> [u64; 2] {
        self.0
    }

    /// Derives a nonce from a list of addresses, for members that were given none.
    pub(crate) fn of_addresses(addresses: &[String]) -> Nonce {
        let bytes = || addresses.iter().flat_map(|address| address.bytes().chain([0]));
        Nonce([fnv1a_64(FNV64, bytes()), fnv1a_64(FNV64 ^ 1, bytes())])
    }
}

impl fmt::Display for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.0[1], self.0[0])
    }
}

impl FromStr for Nonce {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Nonce, Self::Err> {
        u128::from_str_radix(text, 16).map(|number| Nonce::from_bytes(number.to_le_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonces_differ_and_read_back() {
        let [a, b] = [(); 2].map(|()| Nonce::new().unwrap());
        assert_ne!(a, b);
        assert_eq!(Nonce::from_bytes(a.to_bytes()), a);
        assert_eq!(a.to_string().parse(), Ok(a));
    }

    #[test]
    fn lists_of_addresses_that_differ_have_others() {
        let of = |list: &[&str]| Nonce::of_addresses(&list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>());
        assert_eq!(of(&["a:1", "b:2"]), of(&["a:1", "b:2"]));
        assert_ne!(of(&["a:1", "b:2"]), of(&["b:2", "a:1"]));
        assert_ne!(of(&["a:1b:2"]), of(&["a:1", "b:2"]));
    }
}
