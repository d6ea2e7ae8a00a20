use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::*;

fn secret(text: &str) -> JobSecret {
    JobSecret::new(text).unwrap()
}

fn terms(identity: &str) -> Terms {
    Terms::new("test 1", identity)
}

const ONE: &str = "a secret of one job";

/// Everything that was sent, and how the exchange ended on both sides.
struct Outcome {
    to_listener: Vec<Vec<u8>>,
    to_caller: Vec<Vec<u8>>,
    caller: Option<Event>,
    listener: Option<Event>,
}

/// Carries messages between both sides until neither has more to say.
fn carried(caller: (&JobSecret, &Terms), listener: (Option<&JobSecret>, &Terms)) -> Outcome {
    let (mut calling, first) = Calling::new(caller.0, caller.1, b"rank 1").unwrap();
    let mut listening = Listening::new(listener.0, listener.1).unwrap();
    let mut outcome = Outcome { to_listener: vec![first], to_caller: Vec::new(), caller: None, listener: None };
    while outcome.caller.is_none() || outcome.listener.is_none() {
        let event = listening.receive(&mut &outcome.to_listener.last().unwrap()[..]);
        let answer = match &event {
            Event::Send(bytes) | Event::Proved { send: bytes, .. } | Event::Failed { send: bytes, .. } => bytes.clone(),
            other => panic!("{other:?}"),
        };
        outcome.listener = (!matches!(event, Event::Send(_))).then_some(event);
        outcome.to_caller.push(answer.clone());
        match calling.receive(&mut &answer[..]) {
            Event::Send(bytes) => outcome.to_listener.push(bytes),
            event => outcome.caller = Some(event),
        }
    }
    outcome
}

fn proved(event: &Event) -> bool {
    matches!(event, Event::Proved { .. })
}

fn problem(event: Option<Event>) -> Problem {
    match event {
        Some(Event::Failed { problem, .. }) => problem,
        other => panic!("{other:?}"),
    }
}

#[test]
fn both_sides_prove_one_secret_without_sending_it() {
    let (one, terms) = (secret(ONE), terms("00 job"));
    let outcome = carried((&one, &terms), (Some(&one), &terms));
    assert!(matches!(outcome.caller, Some(Event::Proved { .. })), "{:?}", outcome.caller);
    assert!(matches!(&outcome.listener, Some(Event::Proved { claim, .. }) if claim == b"rank 1"));
    let sent = [outcome.to_listener.concat(), outcome.to_caller.concat()].concat();
    assert!(!sent.windows(8).any(|window| ONE.as_bytes().windows(8).any(|part| part == window)));
    // No two exchanges have anything random in common.
    let again = carried((&one, &terms), (Some(&one), &terms));
    assert!(outcome.to_listener.iter().zip(&again.to_listener).all(|(first, second)| first != second));
    assert!(outcome.to_caller.iter().zip(&again.to_caller).all(|(first, second)| first != second));
}

#[test]
fn proofs_are_bound_to_their_connection() {
    let (one, terms) = (secret(ONE), terms("00 job"));
    let (near, far) = (terms.bound_to(&[1; 32]), terms.bound_to(&[2; 32]));
    let outcome = carried((&one, &near), (Some(&one), &near));
    assert!(outcome.caller.is_some_and(|event| proved(&event)) && outcome.listener.is_some_and(|event| proved(&event)));
    // A process in the middle has two connections, and relays what it is sent on one to the other.
    for (caller, listener) in [(&near, &far), (&near, &terms), (&terms, &far)] {
        let relayed = carried((&one, caller), (Some(&one), listener));
        assert_eq!((problem(relayed.caller), problem(relayed.listener)), (Problem::Wrong, Problem::Wrong));
    }
}

#[test]
fn callers_with_tls_alone_and_without_it_are_told_what_is_missing() {
    let terms = terms("00 job");
    let mut listening = Listening::new(None, &terms).unwrap();
    let hello = [0x16, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3];
    let missing = Problem::Tls(TlsProblem::MissingHere);
    let alert = ALERT_WITHOUT_TLS.to_vec();
    assert_eq!(listening.receive(&mut &hello[..]), Event::Failed { send: alert, problem: missing.clone() });
    let one = secret(ONE);
    let (mut calling, first) = Calling::new(&one, &terms, b"rank 1").unwrap();
    let listening = Listening::new(Some(&one), &terms).unwrap();
    let mut listening = listening.refusing(Problem::Tls(TlsProblem::MissingThere));
    let Event::Failed { send, .. } = listening.receive(&mut &first[..]) else { panic!("it is not refused") };
    assert_eq!(calling.receive(&mut &send[..]), Event::failed(missing));
}

#[test]
fn what_differs_is_said_to_both_sides() {
    let (one, job) = (secret(ONE), terms("00 a"));
    let wrong = carried((&secret("the secret of another"), &job), (Some(&one), &job));
    assert_eq!((problem(wrong.caller), problem(wrong.listener)), (Problem::Wrong, Problem::Wrong));
    // The listener gave nothing that depends on its secret: only its challenge, and that it refuses.
    assert_eq!(wrong.to_caller[1], Problem::Wrong.to_bytes());
    let none = carried((&one, &job), (None, &job));
    assert_eq!((problem(none.caller), problem(none.listener)), (Problem::MissingThere, Problem::MissingHere));
    let other = carried((&one, &terms("11 b")), (Some(&one), &job));
    let text = problem(other.caller).to_string();
    assert_eq!(text, "the other side belongs to a, and this process to b");
    assert_eq!(problem(other.listener).to_string(), "the other side belongs to b, and this process to a");
    // Another protocol of the same job.
    let protocols = carried((&one, &Terms::new("test 2", "00 a")), (Some(&one), &job));
    assert_eq!(problem(protocols.listener), Problem::Wrong);
    for problem in [Problem::Wrong, Problem::MissingHere, Problem::MissingThere] {
        assert_eq!(Problem::of_listener(&problem.to_bytes()[HEAD_BYTES..], ""), problem.seen_from_there());
        assert!(!problem.to_string().contains(ONE));
    }
}

#[test]
fn a_recorded_exchange_proves_nothing_again() {
    let (one, job) = (secret(ONE), terms("00 a"));
    let recorded = carried((&one, &job), (Some(&one), &job));
    // A caller that repeats what one has sent.
    let mut listening = Listening::new(Some(&one), &job).unwrap();
    assert!(matches!(listening.receive(&mut &recorded.to_listener[0][..]), Event::Send(_)));
    let event = listening.receive(&mut &recorded.to_listener[1][..]);
    assert_eq!(problem(Some(event)), Problem::Wrong);
    // A listener that repeats what one has sent.
    let (mut calling, _) = Calling::new(&one, &job, b"rank 1").unwrap();
    assert!(matches!(calling.receive(&mut &recorded.to_caller[0][..]), Event::Send(_)));
    assert_eq!(problem(Some(calling.receive(&mut &recorded.to_caller[1][..]))), Problem::Wrong);
}

#[test]
fn a_proof_that_is_sent_back_proves_nothing() {
    let (one, job) = (secret(ONE), terms("00 a"));
    // A listener without the secret sends the caller's own challenge and proof back to it.
    let (mut calling, first) = Calling::new(&one, &job, b"").unwrap();
    let challenge = frame(Code::Challenge, &[&first[HEAD_BYTES..HEAD_BYTES + CHALLENGE_BYTES]]);
    let Event::Send(proof) = calling.receive(&mut &challenge[..]) else { panic!("a proof is sent") };
    assert_eq!(problem(Some(calling.receive(&mut &proof[..]))), Problem::Wrong);
    // A caller without the secret lets another listener of the job answer the challenge: listeners answer nothing that
    // is not proved before, and a proof of that side is not one of this.
    let mut listening = Listening::new(Some(&one), &job).unwrap();
    let call = frame(Code::Call, &[&[7; CHALLENGE_BYTES], &[4], b"00 a"]);
    assert!(matches!(listening.receive(&mut &call[..]), Event::Send(_)));
    let exchange = Exchange { caller: [7; CHALLENGE_BYTES], listener: listening.challenge };
    let theirs = frame(Code::Proof, &[&exchange.prove(&one, &job, Side::Listener, b"")]);
    assert_eq!(problem(Some(listening.receive(&mut &theirs[..]))), Problem::Wrong);
}

#[test]
fn claims_are_part_of_the_proof() {
    let (one, job) = (secret(ONE), terms("00 a"));
    let (mut calling, first) = Calling::new(&one, &job, b"rank 1").unwrap();
    let mut listening = Listening::new(Some(&one), &job).unwrap();
    let mut changed = first;
    *changed.last_mut().unwrap() = b'2';
    let Event::Send(challenge) = listening.receive(&mut &changed[..]) else { panic!("a challenge is sent") };
    let Event::Send(proof) = calling.receive(&mut &challenge[..]) else { panic!("a proof is sent") };
    assert_eq!(problem(Some(listening.receive(&mut &proof[..]))), Problem::Wrong);
    assert!(Calling::new(&one, &job, &[0; 201]).is_err());
}

#[test]
fn other_protocols_are_handed_on_as_they_came() {
    // The last one has a code that no message has, and says that 33 bytes follow.
    let unknown = [&b"dst-sec1<\0!"[..], &[8; 33]].concat();
    for first in [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], b"d", b"dst-tcp2abc", b"dst-sec2abcdefgh", &unknown] {
        let mut listening = Listening::new(Some(&secret(ONE)), &terms("")).unwrap();
        let (mut rest, mut seen) = (first, Vec::new());
        while let Some((byte, after)) = rest.split_first() {
            rest = after;
            match listening.receive(&mut &[*byte][..]) {
                Event::More => {}
                Event::Plain(bytes) => {
                    assert!(bytes.len() <= HEAD_BYTES, "{bytes:?}");
                    seen = [&bytes[..], rest].concat();
                    break;
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(seen == first || (seen.is_empty() && first == b"d"), "{first:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

    #[test]
    fn changed_and_cut_messages_prove_nothing(place in any::<prop::sample::Index>(), change in 1u8.., cut: bool) {
        let (one, job) = (secret(ONE), terms("00 a"));
        let (mut calling, first) = Calling::new(&one, &job, b"rank 1").unwrap();
        let mut listening = Listening::new(Some(&one), &job).unwrap();
        let spoilt = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            let place = place.index(bytes.len());
            if cut { bytes.truncate(place) } else { bytes[place] ^= change }
            bytes
        };
        let Event::Send(challenge) = listening.receive(&mut &first[..]) else { panic!("a challenge is sent") };
        let Event::Send(proof) = calling.receive(&mut &challenge[..]) else { panic!("a proof is sent") };
        let event = listening.receive(&mut &spoilt(&proof)[..]);
        prop_assert!(matches!(event, Event::More | Event::Failed { .. }), "{event:?}");
    }

    #[test]
    fn any_bytes_end_or_wait_and_are_never_kept_beyond_a_message(
        bytes: Vec<u8>, code in 0u8..6, length in 0u16..600, piece in 1usize..40,
    ) {
        let (one, job) = (secret(ONE), terms("00 a"));
        let framed = [&MAGIC[..], &[code], &length.to_be_bytes(), &bytes].concat();
        for bytes in [bytes, framed] {
            let mut listening = Listening::new(Some(&one), &job).unwrap();
            let (mut calling, _) = Calling::new(&one, &job, b"").unwrap();
            for piece in bytes.chunks(piece) {
                let mut rest = piece;
                let event = listening.receive(&mut rest);
                prop_assert!(!proved(&event));
                let mut again = piece;
                prop_assert!(!proved(&calling.receive(&mut again)));
                prop_assert!(listening.reader.bytes.len() <= HEAD_BYTES + MAX_BODY_BYTES);
                if !matches!(event, Event::More) {
                    break;
                }
            }
        }
    }
}
