//! Short digests for comparing what should be equal. They are not collision resistant, so memory safety never depends
//! on them.
//!
//! # Source
//! FNV-1a: draft-eastlake-fnv.

pub(crate) fn fnv1a_32(bytes: impl IntoIterator<Item = u8>) -> u32 {
    bytes.into_iter().fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// `salt` makes digests of the same bytes different.
pub(crate) fn fnv1a_64(salt: u64, bytes: impl IntoIterator<Item = u8>) -> u64 {
    let basis = 0xcbf2_9ce4_8422_2325 ^ salt;
    bytes.into_iter().fold(basis, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_the_source() {
        assert_eq!(fnv1a_32(*b"foobar"), 0xbf9c_f968);
        assert_eq!(fnv1a_64(0, *b"foobar"), 0x8594_4171_f739_67e8);
        assert_ne!(fnv1a_64(1, *b"foobar"), fnv1a_64(0, *b"foobar"));
    }
}
