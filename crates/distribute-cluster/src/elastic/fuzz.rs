//! The messages between the processes of an elastic job, the state machine that takes them, and stored generations.

use std::time::Duration;

use prost::Message as _;

use super::core::{Action, Core, Event, Settings};
use super::generation::{Candidate, Change, Generation};
use super::register;
use super::wire::{Common, MAX_HELLO_BYTES, MAX_MESSAGE_BYTES, PREAMBLE, greeted, read};
use crate::JobId;
use crate::fuzz::{Input, messages as arrivals};
use crate::messages::ElasticMessage;

const SEEDS: [&str; 3] = ["a:1", "b:1", "c:1"];

/// The first byte chooses what the process is, the second the length of the pieces in which messages arrive.
pub(crate) fn messages(bytes: &[u8]) -> bool {
    let mut input = Input(bytes);
    let flags = input.byte();
    let (received, _) = arrivals::<ElasticMessage>(input, PREAMBLE, MAX_MESSAGE_BYTES);
    let job = JobId::new("job").expect("a name");
    let settings = Settings {
        min: 1,
        max: 4,
        join_window: Duration::from_secs(1),
        answer_window: Duration::from_secs(1),
        join_timeout: Duration::from_secs(600),
        majority: flags & 1 == 0,
        seeds: SEEDS.map(str::to_owned).to_vec(),
        seat: (flags & 2 == 0).then_some(0),
    };
    let mut now = Duration::ZERO;
    let common = Common::new(&settings);
    let mut core = Core::new(settings, candidate(1), now);
    check(&core.start(now));
    let mut is_accepted = false;
    for (place, message) in received.into_iter().enumerate() {
        if message.encoded_len() <= MAX_HELLO_BYTES {
            match greeted(message.clone(), &job) {
                Ok(greeting) => {
                    assert!(greeting.control.len() <= Generation::MAX_ADDRESS_BYTES);
                    let (ours, theirs) = (common.difference(&greeting.common), greeting.common.difference(&common));
                    assert_eq!(ours.is_some(), theirs.is_some());
                    assert!(ours.is_none_or(|difference| difference.reason().len() < 400));
                }
                Err(reason) => assert!(!reason.contains('\n')),
            }
        }
        let Some(message) = read(message) else { continue };
        is_accepted = true;
        let again = ElasticMessage::from(message.clone());
        assert_eq!(read(again).as_ref(), Some(&message));
        now += Duration::from_millis(300);
        let before = core.newest().number;
        let from = SEEDS[place % SEEDS.len()].to_owned();
        check(&core.handle(now, Event::Message { from, message }));
        check(&core.handle(now, Event::Timer));
        let newest = core.newest();
        assert!(newest.number >= before && (newest.number == 0 || newest.check().is_ok()));
    }
    // Whatever was received, time passes as before.
    for _ in 0..4 {
        now += Duration::from_secs(2);
        check(&core.handle(now, Event::Timer));
    }
    is_accepted
}

/// Checks what the process would do.
fn check(actions: &[Action]) {
    for action in actions {
        match action {
            Action::Send { message, .. } => {
                let bytes = ElasticMessage::from(message.clone()).encode_to_vec();
                assert!(bytes.len() <= MAX_MESSAGE_BYTES);
                let decoded = ElasticMessage::decode(&*bytes).expect("it was encoded");
                // A round after the last one is refused by others.
                assert!(read(decoded).is_none_or(|read| read == *message));
            }
            Action::Decided { generation, .. } => assert!(generation.check().is_ok()),
            Action::Decide(generation) => assert!(generation.check().is_ok()),
            Action::End(reason) => assert!(!reason.is_empty()),
            Action::Timer(_) | Action::ReadRegister | Action::Left | Action::JobEnded => {}
        }
    }
}

/// The content of the register's file, and a generation without the file's beginning and checksum.
pub(crate) fn register(bytes: &[u8]) -> bool {
    let of_file = register::decode(bytes);
    let of_body = Generation::from_bytes(bytes);
    let of_made = register::decode(&register::encode(bytes));
    assert_eq!(of_made.ok(), of_body.as_ref().ok().cloned());
    let found = of_file.ok().or_else(|| of_body.ok());
    if let Some(generation) = &found {
        assert!(generation.check().is_ok() && generation.members.len() <= Generation::MAX_MEMBERS);
        assert_eq!(Generation::from_bytes(&generation.to_bytes()).as_ref().ok(), Some(generation));
        let change = Change { added: vec![candidate(9)], ..Change::default() };
        if let Ok(next) = generation.apply(&change) {
            assert!(next.number > generation.number && next.check().is_ok());
        }
        assert!(!generation.to_string().contains('\n'));
    }
    found.is_some()
}

fn candidate(identity: u128) -> Candidate {
    Candidate { identity: identity << 32, control: "a:1".to_owned(), service: "a:2".to_owned() }
}

/// Returns messages of every kind, for the corpus.
#[cfg(test)]
pub(crate) fn samples() -> Vec<Vec<u8>> {
    use super::core::{Ballot, Message, Promise};
    use super::wire::hello;
    use std::sync::Arc;
    let (ballot, promised) = (Ballot { round: 3, join_number: 1 }, Ballot { round: 4, join_number: 1 });
    let change = Arc::new(Change { removed: vec![1], added: vec![candidate(2), candidate(3)], trains: true });
    let first = Generation::of_seeds(&[]).apply(&Change { removed: Vec::new(), trains: false, ..(*change).clone() });
    let first = Arc::new(first.expect("a first generation"));
    let promise =
        Promise { base: 0, ballot, voter: 1, accepted: None, candidate: Some(candidate(2)), is_leaving: true };
    let last = Generation { number: Generation::LAST, next_join: Generation::LAST, ..(*first).clone() };
    let kinds = [
        Message::Join { have: 0, candidate: candidate(2) },
        Message::Wait { leader: "b:1".to_owned(), number: 1 },
        Message::Prepare { base: 0, ballot },
        Message::Prepare { base: 0, ballot: Ballot { round: Generation::LAST, ..ballot } },
        Message::Promise(promise.clone()),
        Message::Promise(Promise { accepted: Some((promised, change.clone())), ..promise }),
        Message::Accept { base: 0, ballot, change: change.clone() },
        Message::Accepted { base: 0, ballot, voter: 1 },
        Message::Nack { base: 0, ballot, promised },
        Message::Decided {
            number: 1,
            change: Arc::new(Change { removed: Vec::new(), trains: false, ..(*change).clone() }),
        },
        Message::Whole(first),
        Message::Notice { number: 1 },
        Message::Learned { number: 2 },
        Message::Ask { have: 0 },
        Message::Leave { base: 1, join_number: 1 },
        Message::Whole(Arc::new(last)),
        Message::Decided { number: 2, change },
    ];
    let job = JobId::new("job").expect("a name");
    let common = Common { members: (1, 4), majority: true, seeds: Some([7; 16]) };
    let mut all: Vec<ElasticMessage> = vec![hello(&job, "a:1", &common)];
    all.extend(kinds.into_iter().map(ElasticMessage::from));
    let mut samples: Vec<Vec<u8>> = (0..4).map(|flags| sample(flags, &all)).collect();
    samples.extend(all[1..].iter().map(|message| sample(0, std::slice::from_ref(message))));
    samples
}

#[cfg(test)]
fn sample(flags: u8, messages: &[ElasticMessage]) -> Vec<u8> {
    [vec![flags], crate::fuzz::connection(17, PREAMBLE, messages)].concat()
}

/// Returns files of the register, for the corpus.
#[cfg(test)]
pub(crate) fn register_samples() -> Vec<Vec<u8>> {
    let add = |identity| Change { added: vec![candidate(identity)], trains: identity == 2, ..Change::default() };
    let first = Generation::of_seeds(&[]).apply(&add(1)).expect("a first generation");
    let second = first.apply(&add(2)).expect("a second one");
    let last = Generation { number: Generation::LAST, next_join: Generation::LAST, ..second.clone() };
    let bodies = [first, second, last].map(|generation| generation.to_bytes());
    bodies.iter().map(|body| register::encode(body)).chain(bodies.iter().cloned()).collect()
}
