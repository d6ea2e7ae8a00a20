//! A digest of strings and numbers that is the same in every build and on every machine.

/// 128-bit FNV-1a over length-prefixed fields, so that no two sequences of fields yield the same input bytes. It
/// detects accidental differences; it is not collision-resistant against an attacker.
pub(crate) struct Digest(u128);

impl Digest {
    /// Creates a digest, seeded with the kind of content.
    pub(crate) fn new(kind: &str) -> Digest {
        let mut digest = Digest(OFFSET);
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
        self.0 = bytes.iter().fold(self.0, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME));
    }
}

/// From Eastlake and others, "The FNV Non-Cryptographic Hash Algorithm", section 5.
const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
const PRIME: u128 = (1 << 88) + (1 << 8) + 0x3b;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_fnv_1a() {
        let mut digest = Digest(OFFSET);
        digest.bytes(b"a");
        // A test vector from the algorithm's specification.
        assert_eq!(digest.0, 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }

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
