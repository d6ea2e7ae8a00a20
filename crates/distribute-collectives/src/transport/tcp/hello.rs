//! The first bytes that members send each other on a connection.

use super::super::Nonce;

/// The first bytes on every connection: who is calling.
pub(super) struct Hello {
    pub(super) group: Nonce,
    pub(super) rank: usize,
    pub(super) channel: usize,
}

impl Hello {
    pub(super) const LEN: usize = 8 + Nonce::LEN + 4 + 4;

    pub(super) fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(HELLO);
        bytes[8..24].copy_from_slice(&self.group.to_bytes());
        bytes[24..28].copy_from_slice(&(self.rank as u32).to_le_bytes());
        bytes[28..32].copy_from_slice(&(self.channel as u32).to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; Self::LEN]) -> Option<Hello> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let group = Nonce::from_bytes(bytes[8..24].try_into().ok()?);
        bytes.starts_with(HELLO).then(|| Hello { group, rank: word(24) as usize, channel: word(28) as usize })
    }
}

/// The answer to a hello: who accepted.
pub(super) struct Welcome {
    pub(super) group: Nonce,
    pub(super) rank: usize,
}

impl Welcome {
    pub(super) const LEN: usize = 8 + Nonce::LEN + 4;

    pub(super) fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(WELCOME);
        bytes[8..24].copy_from_slice(&self.group.to_bytes());
        bytes[24..28].copy_from_slice(&(self.rank as u32).to_le_bytes());
        bytes
    }
}

const HELLO: &[u8; 8] = b"dst-tcp2";
const WELCOME: &[u8; 8] = b"dst-wlc2";

/// Returns the claim that a member proves on its connection: its hello, and the member that it calls.
pub(super) fn claim(hello: &Hello, callee: usize) -> Vec<u8> {
    [&hello.encode()[..], &(callee as u32).to_le_bytes()].concat()
}

/// Returns the hello in a claim that is made to `callee`.
pub(super) fn claimed(claim: &[u8], callee: usize) -> Option<Hello> {
    let (hello, named) = claim.split_first_chunk::<{ Hello::LEN }>()?;
    Hello::decode(hello).filter(|_| named == (callee as u32).to_le_bytes())
}
