//! The messages of the protocol files in `proto`.
#![expect(unreachable_pub, reason = "generated from the protocol files")]

include!("../proto/distribute.v1.rs");
