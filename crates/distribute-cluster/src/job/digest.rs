//! A digest of strings and numbers that is the same in every build and on every machine.

use distribute_types::{FNV128, fnv1a_128};

/// 128-bit FNV-1a over length-prefixed fields, so that no two sequences of fields yield the same input bytes. It
/// detects accidental differences; it is not collision-resistant against an attacker.
pub(crate) struct Digest(u128);

impl Digest {
    /// Creates a digest, seeded with the kind of content.
    pub(crate) fn new(kind: &str) -> Digest {
        let mut digest = Digest(FNV128);
        digest.text(kind);
        digest
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.bytes(text.as_bytes());
    }

    pub(crate) fn number(&mut self, number: u64) {
        self.bytes(&number.to_le_bytes());
    }

    pub(crate) fn finish(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.0 = fnv1a_128(self.0, bytes.iter().copied());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_run_together() {
        let of = |texts: &[&str]| {
            let mut digest = Digest::new("k");
            texts.iter().for_each(|text| digest.text(text));
            digest.finish()
        };
        assert_ne!(of(&["ab", "c"]), of(&["a", "bc"]));
        assert_ne!(of(&["ab"]), of(&["a", "b"]));
    }
}
