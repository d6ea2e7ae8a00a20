//! The exchange that proves the job's secret.

use super::Input;
use crate::JobSecret;
use crate::secret::{Calling, Event, Listening, Terms};

const CLAIM: &[u8] = b"rank 1 of 2";

/// Most bytes that either side may ask for: those of the longest message.
const MOST_BYTES: usize = 512;

/// Returns how many bytes a side asks for, and its next action.
type Receive = dyn FnMut(&mut &[u8]) -> (usize, Event);

fn secret() -> JobSecret {
    JobSecret::new([7; 32]).expect("it is long enough")
}

fn terms() -> Terms {
    Terms::new("fuzz 1", "job a")
}

/// Either side of the exchange, which is sent any pieces. It proves nothing to a peer that does not know the secret.
pub fn handshake(bytes: &[u8]) -> bool {
    let (mut input, secret, terms) = (Input(bytes), secret(), terms());
    let flags = input.byte();
    let mut receive: Box<Receive> = match flags & 3 {
        0 => {
            let (mut calling, first) = Calling::new(&secret, &terms, CLAIM).expect("the claim is short");
            assert!(first.len() <= MOST_BYTES);
            Box::new(move |bytes| (calling.wants(), calling.receive(bytes)))
        }
        sort => {
            let secret = Some(&secret).filter(|_| sort > 1);
            let mut listening = Listening::new(secret, &terms).expect("the system has random numbers");
            Box::new(move |bytes| (listening.wants(), listening.receive(bytes)))
        }
    };
    let mut has_answered = false;
    for piece in input {
        let mut rest = piece;
        loop {
            let before = rest.len();
            let (wanted, event) = receive(&mut rest);
            assert!(wanted <= MOST_BYTES, "{wanted} bytes are asked for");
            match event {
                Event::More => {
                    assert!(rest.is_empty());
                    break;
                }
                Event::Send(bytes) => {
                    has_answered = true;
                    assert!(bytes.len() <= MOST_BYTES && rest.len() < before);
                }
                Event::Proved { .. } => panic!("a peer without the secret was believed"),
                Event::Plain(first) => {
                    assert!(first.len() <= MOST_BYTES && flags & 3 != 0);
                    return has_answered;
                }
                Event::Failed { send, .. } => {
                    assert!(send.len() <= MOST_BYTES);
                    return has_answered;
                }
            }
            if rest.is_empty() {
                break;
            }
        }
    }
    has_answered
}

/// Both sides of the exchange, whose messages are cut into pieces and changed on the way as the input says. Each piece
/// of the input stands for a message: the place of a change, what is done there, and the length of the pieces.
pub fn handshake_between(bytes: &[u8]) -> bool {
    let (input, secret, terms) = (Input(bytes), secret(), terms());
    let mut listener = Listening::new(Some(&secret), &terms).expect("the system has random numbers");
    let (mut caller, mut message) = Calling::new(&secret, &terms, CLAIM).expect("the claim is short");
    let mut changes = input.chain(std::iter::repeat(&[][..]));
    let (mut is_changed, mut to_listener) = (false, true);
    // The exchange has four messages; added ones can only end it earlier.
    for _ in 0..8 {
        let (changed, size) = change(message.clone(), changes.next().unwrap_or_default());
        is_changed |= changed != message;
        let mut answer = None;
        for piece in changed.chunks(size) {
            let mut rest = piece;
            let event = if to_listener { listener.receive(&mut rest) } else { caller.receive(&mut rest) };
            match event {
                Event::More => {}
                Event::Send(bytes) => answer = Some(bytes),
                Event::Proved { send, claim } => {
                    // What was proved is what the honest caller said, whatever happened to its bytes.
                    assert_eq!(claim, CLAIM);
                    if !to_listener {
                        return true;
                    }
                    answer = Some(send);
                }
                Event::Plain(_) | Event::Failed { .. } => {
                    assert!(is_changed, "an exchange without changes failed");
                    return false;
                }
            }
            if answer.is_some() {
                break;
            }
        }
        match answer {
            Some(bytes) => message = bytes,
            None => {
                assert!(is_changed, "an exchange without changes stopped");
                return false;
            }
        }
        to_listener = !to_listener;
    }
    panic!("the exchange does not end");
}

/// Returns a message with a change, and the length of the pieces that it arrives in.
fn change(mut message: Vec<u8>, how: &[u8]) -> (Vec<u8>, usize) {
    let mut how = Input(how);
    let size = usize::from(how.byte()).wrapping_sub(1).min(message.len()).max(1);
    if how.0.is_empty() {
        return (message, size);
    }
    let at = usize::from(how.byte()) % message.len();
    match how.byte() % 4 {
        0 => message.truncate(at),
        1 => message[at] ^= how.byte(),
        2 => drop(message.splice(at..at, how.0.iter().copied())),
        _ => message[at..].iter_mut().zip(how.0).for_each(|(byte, other)| *byte = *other),
    }
    (message, size)
}
