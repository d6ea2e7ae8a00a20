//! Messages between a member and the leader, and their limits.

use super::limits::{MAX_KEY_BYTES, MAX_VALUE_BYTES};
pub(super) use crate::frames::{Preamble, Receiver, send};
pub(super) use crate::messages::*;

/// The first bytes in either direction.
pub(super) const PREAMBLE: Preamble = *b"distcoor";

/// Limit of a message that joins; it may hold the names of a thousand tasks.
pub(super) const MAX_JOIN_BYTES: usize = 1 << 20;

/// Limit of a member's message: a value, and a key that is quoted.
pub(super) const MAX_MEMBER_BYTES: usize = MAX_VALUE_BYTES + 16 * MAX_KEY_BYTES + 1024;

/// Returns the limit of a leader's message: a reply holds the values of all members, or why each of them is absent.
pub(super) fn max_leader_bytes(world_size: usize) -> usize {
    world_size.saturating_mul(MAX_VALUE_BYTES + 64).saturating_add(1 << 20)
}
