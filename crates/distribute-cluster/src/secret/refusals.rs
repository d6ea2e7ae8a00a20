//! Refused callers, each reported once.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};

/// The addresses whose refusal was reported. Its memory is bounded: after 64 addresses no further one is reported.
#[derive(Debug, Default)]
pub struct Refusals(Mutex<BTreeSet<Option<IpAddr>>>);

impl Refusals {
    /// The number of addresses that are reported.
    pub const MAX_ADDRESSES: usize = 64;

    /// Returns whether a refusal of this peer is to be reported: it is the first of its address, whatever the port.
    pub fn is_first(&self, peer: Option<SocketAddr>) -> bool {
        // A set is changed whole.
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.len() < Refusals::MAX_ADDRESSES && known.insert(peer.map(|peer| peer.ip().to_canonical()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_is_reported_once_within_bounds() {
        let refusals = Refusals::default();
        let peer = |host: u8, port| Some(SocketAddr::from(([10, 0, 0, host], port)));
        assert!(refusals.is_first(peer(1, 1)) && refusals.is_first(peer(2, 1)) && refusals.is_first(None));
        assert!(!refusals.is_first(peer(1, 2)) && !refusals.is_first(None));
        let reported = (0..=255).filter(|host| refusals.is_first(peer(*host, 9))).count();
        assert_eq!(reported, Refusals::MAX_ADDRESSES - 3);
    }
}
