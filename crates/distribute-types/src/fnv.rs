//! The FNV-1a hash, for equality comparisons and for numbers derived from names. It is not collision resistant, so
//! memory safety never depends on it.

/// The initial state of [`fnv1a_32`].
pub const FNV32: u32 = 0x811c_9dc5;

/// The initial state of [`fnv1a_64`].
pub const FNV64: u64 = 0xcbf2_9ce4_8422_2325;

/// The initial state of [`fnv1a_128`].
pub const FNV128: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;

macro_rules! fnv1a {
    ($($name:ident $bits:ty, $begin:ident, $prime:expr, $example:literal;)*) => {$(
        #[doc = concat!("Returns the FNV-1a hash of bytes, continued from `state`. The initial state is [`",
            stringify!($begin), "`].")]
        ///
        /// # Examples
        /// ```
        #[doc = concat!("use distribute_types::{", stringify!($begin), ", ", stringify!($name), "};")]
        #[doc = concat!("assert_eq!(", stringify!($name), "(", stringify!($begin), ", *b\"a\"), ", $example, ");")]
        /// ```
        ///
        /// # Source
        /// RFC 9923, "The FNV Non-Cryptographic Hash Algorithm".
        pub fn $name(state: $bits, bytes: impl IntoIterator<Item = u8>) -> $bits {
            bytes.into_iter().fold(state, |hash, byte| (hash ^ <$bits>::from(byte)).wrapping_mul($prime))
        }
    )*};
}

fnv1a! {
    fnv1a_32 u32, FNV32, 0x0100_0193, "0xe40c_292c";
    fnv1a_64 u64, FNV64, 0x0100_0000_01b3, "0xaf63_dc4c_8601_ec8c";
    fnv1a_128 u128, FNV128, (1 << 88) + (1 << 8) + 0x3b, "0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964";
}
