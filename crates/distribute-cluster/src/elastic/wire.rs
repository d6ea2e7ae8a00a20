//! Messages between the processes of an elastic job as they travel, and generations as they are stored.

use std::sync::Arc;

use prost::Message as _;

use super::core::{Ballot, Message, Promise, Settings};
use super::generation::{Candidate, Change, ElasticMember, Generation, check_address};
use crate::frames::Preamble;
use crate::job::{Digest, JobId};
use crate::messages::{
    ElasticAccept, ElasticAccepted, ElasticBallot, ElasticCandidate, ElasticChange, ElasticDecided, ElasticGeneration,
    ElasticHello, ElasticJoin, ElasticLeave, ElasticMember as WireMember, ElasticMessage, ElasticNack, ElasticPrepare,
    ElasticPromise, ElasticRefusal, ElasticVote, ElasticWait, elastic_message::Kind,
};
use crate::text::clean;

/// The first bytes in either direction.
pub(super) const PREAMBLE: Preamble = *b"distelas";

/// Grows when messages change.
const VERSION: u32 = 4;

/// Limit of a greeting.
pub(super) const MAX_HELLO_BYTES: usize = 1024;

/// Limit of a message: the largest generation, whose members have the longest addresses.
pub(super) const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// Length limit of a job's name and of a reason in a greeting, in characters.
const SHOWN: usize = 200;

/// The options that all processes of a job must have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Common {
    /// The smallest and the largest number of members.
    pub(super) members: (u32, u32),
    /// Whether a majority decides generations; else a register does.
    pub(super) majority: bool,
    /// The digest of the seeds, of a process that may vote for the first generation. Other processes need not have the
    /// same: they use the seeds to find members.
    pub(super) seeds: Option<[u8; 16]>,
}

/// How the options of two processes of a job differ.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Difference {
    /// The options of the program, in a clause.
    Options(String),
    /// The seeds of two processes that may decide the first generation. It may be over once there is one.
    Seeds,
}

impl Common {
    pub(super) fn new(settings: &Settings) -> Common {
        let number = |members: usize| u32::try_from(members).unwrap_or(u32::MAX);
        let seeds = || {
            let mut digest = Digest::new("seeds");
            settings.seeds.iter().for_each(|seed| digest.text(seed));
            digest.finish()
        };
        Common {
            members: (number(settings.min), number(settings.max)),
            majority: settings.majority,
            seeds: (settings.majority && settings.seat.is_some()).then(seeds),
        }
    }

    /// Returns the options of a process that knows a generation if `is_founded`: seeds do not matter any more.
    pub(super) fn now(&self, is_founded: bool) -> Common {
        Common { seeds: self.seeds.filter(|_| !is_founded), ..self.clone() }
    }

    /// Returns how another process's options differ from this one's.
    pub(super) fn difference(&self, theirs: &Common) -> Option<Difference> {
        let by = |majority| if majority { "a majority decides" } else { "a register decides" };
        let members = |(min, max): (u32, u32)| format!("members is {min}..={max}");
        let options = if self.majority != theirs.majority {
            format!("{} there, {} here", by(theirs.majority), by(self.majority))
        } else if self.members != theirs.members {
            format!("{} there, {} here", members(theirs.members), members(self.members))
        } else {
            let is_other = self.seeds.zip(theirs.seeds).is_some_and(|(ours, theirs)| ours != theirs);
            return is_other.then_some(Difference::Seeds);
        };
        Some(Difference::Options(options))
    }
}

impl Difference {
    /// Returns the difference as a clause about the other process, with a remedy.
    pub(super) fn reason(&self) -> String {
        let (what, options) = match self {
            Difference::Options(options) => (options.as_str(), "members and authority (DISTRIBUTE_GENERATIONS)"),
            Difference::Seeds => ("the seeds are not the same", "seeds in the same order"),
        };
        format!("it has other options: {what}; give all processes of the job the same {options}")
    }
}

/// The description that a process of the job gives of itself.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    /// The address at which it takes messages.
    pub(super) control: String,
    pub(super) common: Common,
}

/// Returns the greeting of a process.
pub(super) fn hello(job: &JobId, control: &str, common: &Common) -> ElasticMessage {
    let hello = ElasticHello {
        version: VERSION,
        job: Vec::from(job.to_bytes()).into(),
        job_name: clean(job.name(), SHOWN),
        control: control.to_owned(),
        min_members: common.members.0,
        max_members: common.members.1,
        majority: common.majority,
        seeds: common.seeds.map(Vec::from).unwrap_or_default().into(),
    };
    ElasticMessage { kind: Some(Kind::Hello(hello)) }
}

/// Returns the refusal of another job's process.
pub(super) fn refusal(reason: String) -> ElasticMessage {
    ElasticMessage { kind: Some(Kind::Refusal(ElasticRefusal { reason })) }
}

/// Returns what a process of this job says of itself in its greeting.
///
/// # Errors
/// A sentence, if it is of another job or no greeting.
pub(super) fn greeted(message: ElasticMessage, job: &JobId) -> Result<Greeting, String> {
    let hello = match message.kind {
        Some(Kind::Hello(hello)) => hello,
        Some(Kind::Refusal(ElasticRefusal { reason })) => return Err(clean(&reason, SHOWN * 2)),
        _ => return Err("it did not greet".to_owned()),
    };
    if hello.version != VERSION {
        let theirs = hello.version;
        return Err(format!("it has version {theirs} of the messages, not {VERSION}; use one build for all processes"));
    }
    if hello.job != job.to_bytes().as_slice() {
        let theirs = clean(&hello.job_name, SHOWN);
        return Err(format!("it belongs to job {theirs}, not to {job}; give each job addresses of its own"));
    }
    check_address(&hello.control)?;
    let seeds = match &*hello.seeds {
        [] => None,
        seeds => Some(seeds.try_into().map_err(|_| "its greeting is malformed".to_owned())?),
    };
    let members = (hello.min_members, hello.max_members);
    Ok(Greeting { control: hello.control, common: Common { members, majority: hello.majority, seeds } })
}

impl From<Message> for ElasticMessage {
    fn from(message: Message) -> ElasticMessage {
        let kind = match message {
            Message::Join { have, candidate } => Kind::Join(ElasticJoin { have, candidate: Some(candidate.into()) }),
            Message::Wait { leader, number } => Kind::Wait(ElasticWait { leader, number }),
            Message::Prepare { base, ballot } => Kind::Prepare(ElasticPrepare { base, ballot: Some(ballot.into()) }),
            Message::Promise(Promise { base, ballot, voter, accepted, candidate, is_leaving }) => {
                let accepted = accepted.map(|(ballot, change)| vote(ballot, &change));
                let candidate = candidate.map(Into::into);
                let ballot = Some(ballot.into());
                Kind::Promise(ElasticPromise { base, ballot, voter, accepted, candidate, is_leaving })
            }
            Message::Accept { base, ballot, change } => {
                Kind::Accept(ElasticAccept { base, vote: Some(vote(ballot, &change)) })
            }
            Message::Accepted { base, ballot, voter } => {
                Kind::Accepted(ElasticAccepted { base, ballot: Some(ballot.into()), voter })
            }
            Message::Nack { base, ballot, promised } => {
                Kind::Nack(ElasticNack { base, ballot: Some(ballot.into()), promised: Some(promised.into()) })
            }
            Message::Decided { number, change } => {
                Kind::Decided(ElasticDecided { number, change: Some((&*change).into()) })
            }
            Message::Whole(generation) => Kind::Whole((&*generation).into()),
            Message::Notice { number } => Kind::Notice(number),
            Message::Learned { number } => Kind::Learned(number),
            Message::Ask { have } => Kind::Ask(have),
            Message::Leave { base, join_number } => Kind::Leave(ElasticLeave { base, join_number }),
        };
        ElasticMessage { kind: Some(kind) }
    }
}

/// Returns a message; `None` if it is none that a process of this version sends.
pub(super) fn read(message: ElasticMessage) -> Option<Message> {
    Some(match message.kind? {
        Kind::Hello(_) | Kind::Refusal(_) => return None,
        Kind::Join(join) => Message::Join { have: join.have, candidate: candidate(join.candidate?)? },
        Kind::Wait(ElasticWait { leader, number }) => Message::Wait { leader, number },
        Kind::Prepare(prepare) => Message::Prepare { base: prepare.base, ballot: read_ballot(prepare.ballot?)? },
        Kind::Promise(promise) => {
            let ElasticPromise { base, ballot, voter, accepted, candidate: own, is_leaving } = promise;
            let accepted = match accepted {
                Some(ElasticVote { ballot, change: made }) => Some((read_ballot(ballot?)?, Arc::new(change(made?)?))),
                None => None,
            };
            let candidate = match own {
                Some(own) => Some(candidate(own)?),
                None => None,
            };
            Message::Promise(Promise { base, ballot: read_ballot(ballot?)?, voter, accepted, candidate, is_leaving })
        }
        Kind::Accept(ElasticAccept { base, vote }) => {
            let ElasticVote { ballot, change: made } = vote?;
            Message::Accept { base, ballot: read_ballot(ballot?)?, change: Arc::new(change(made?)?) }
        }
        Kind::Accepted(ElasticAccepted { base, ballot, voter }) => {
            Message::Accepted { base, ballot: read_ballot(ballot?)?, voter }
        }
        Kind::Nack(ElasticNack { base, ballot, promised }) => {
            Message::Nack { base, ballot: read_ballot(ballot?)?, promised: read_ballot(promised?)? }
        }
        Kind::Decided(ElasticDecided { number, change: made }) => {
            Message::Decided { number, change: Arc::new(change(made?)?) }
        }
        Kind::Whole(whole) => Message::Whole(Arc::new(generation(whole)?)),
        Kind::Notice(number) => Message::Notice { number },
        Kind::Learned(number) => Message::Learned { number },
        Kind::Ask(have) => Message::Ask { have },
        Kind::Leave(ElasticLeave { base, join_number }) => Message::Leave { base, join_number },
    })
}

fn vote(ballot: Ballot, change: &Change) -> ElasticVote {
    ElasticVote { ballot: Some(ballot.into()), change: Some(change.into()) }
}

fn candidate(from: ElasticCandidate) -> Option<Candidate> {
    let identity = u128::from_be_bytes(from.identity.as_ref().try_into().ok()?);
    let known = check_address(&from.control).is_ok() && check_address(&from.service).is_ok();
    known.then_some(Candidate { identity, control: from.control, service: from.service })
}

fn change(from: ElasticChange) -> Option<Change> {
    let is_large = from.removed.len().max(from.added.len()) > Generation::MAX_MEMBERS;
    let added: Option<Vec<Candidate>> = from.added.into_iter().map(candidate).collect();
    Some(Change { removed: from.removed, added: added.filter(|_| !is_large)?, trains: from.trains })
}

fn generation(from: ElasticGeneration) -> Option<Generation> {
    let member = |member: WireMember| {
        let identity = u128::from_be_bytes(member.identity.as_ref().try_into().ok()?);
        let WireMember { join_number, joined_in, control, service, .. } = member;
        Some(ElasticMember { join_number, joined_in, identity, control, service })
    };
    let members: Option<Vec<ElasticMember>> = from.members.into_iter().map(member).collect();
    let ElasticGeneration { number, next_join, trained, .. } = from;
    let generation = Generation { number, members: members?, next_join, trained };
    generation.check().is_ok().then_some(generation)
}

impl From<Ballot> for ElasticBallot {
    fn from(Ballot { round, join_number }: Ballot) -> ElasticBallot {
        ElasticBallot { round, join_number }
    }
}

fn read_ballot(ElasticBallot { round, join_number }: ElasticBallot) -> Option<Ballot> {
    (round <= Generation::LAST).then_some(Ballot { round, join_number })
}

impl From<Candidate> for ElasticCandidate {
    fn from(Candidate { identity, control, service }: Candidate) -> ElasticCandidate {
        ElasticCandidate { identity: Vec::from(identity.to_be_bytes()).into(), control, service }
    }
}

impl From<&Change> for ElasticChange {
    fn from(change: &Change) -> ElasticChange {
        let added = change.added.iter().cloned().map(Into::into).collect();
        ElasticChange { removed: change.removed.clone(), added, trains: change.trains }
    }
}

impl From<&Generation> for ElasticGeneration {
    fn from(generation: &Generation) -> ElasticGeneration {
        let member = |member: &ElasticMember| WireMember {
            join_number: member.join_number,
            joined_in: member.joined_in,
            identity: Vec::from(member.identity.to_be_bytes()).into(),
            control: member.control.clone(),
            service: member.service.clone(),
        };
        let Generation { number, next_join, trained, .. } = *generation;
        ElasticGeneration { number, next_join, members: generation.members.iter().map(member).collect(), trained }
    }
}

impl Generation {
    /// Returns the bytes by which a [`Register`](crate::Register) can store it; at most 1 MiB.
    pub fn to_bytes(&self) -> Vec<u8> {
        ElasticGeneration::from(self).encode_to_vec()
    }

    /// Reads a generation from [`to_bytes`](Generation::to_bytes).
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) if they are not the bytes of a generation.
    pub fn from_bytes(bytes: &[u8]) -> crate::Result<Generation> {
        let whole = Some(bytes).filter(|bytes| bytes.len() <= MAX_MESSAGE_BYTES);
        let decoded = whole.and_then(|bytes| ElasticGeneration::decode(bytes).ok()).and_then(generation);
        decoded.ok_or_else(|| {
            let given = format!("{} bytes", bytes.len());
            let remedy = "Store what Generation::to_bytes returned, unchanged.";
            crate::Error::config("generation", "the bytes are not those of one", given, "a stored generation", remedy)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidate(identity: u128) -> Candidate {
        Candidate { identity, control: format!("{}:1", "h".repeat(98)), service: format!("{}:2", "s".repeat(98)) }
    }

    #[test]
    fn messages_arrive_as_they_were_sent_and_the_largest_fit() {
        let (ballot, promised) = (Ballot { round: 3, join_number: 7 }, Ballot { round: 4, join_number: 1 });
        let added = (0..4096).map(|place| candidate(u128::MAX - place)).collect();
        let change = Arc::new(Change { removed: vec![1, 2], added, trains: true });
        let large = Change { added: change.added.clone(), ..Change::default() };
        let mut whole = Generation::of_seeds(&[]).apply(&large).unwrap();
        (whole.number, whole.next_join, whole.trained) = (Generation::LAST, Generation::LAST, Generation::LAST - 1);
        for (place, member) in whole.members.iter_mut().enumerate() {
            (member.joined_in, member.join_number) = (Generation::LAST, Generation::LAST - 5000 + place as u64);
        }
        assert_eq!(Generation::from_bytes(&whole.to_bytes()).unwrap(), whole);
        let promise = Promise {
            base: 2,
            ballot,
            voter: 9,
            accepted: Some((promised, change.clone())),
            candidate: Some(candidate(1)),
            is_leaving: true,
        };
        let messages = [
            Message::Join { have: 5, candidate: candidate(2) },
            Message::Wait { leader: "a:1".to_owned(), number: 5 },
            Message::Prepare { base: 0, ballot },
            Message::Promise(Promise { accepted: None, candidate: None, ..promise.clone() }),
            Message::Promise(promise),
            Message::Accept { base: 1, ballot, change: change.clone() },
            Message::Accepted { base: 1, ballot, voter: 0 },
            Message::Nack { base: 1, ballot, promised },
            Message::Decided { number: 2, change },
            Message::Whole(Arc::new(whole)),
            Message::Notice { number: 1 },
            Message::Learned { number: 2 },
            Message::Ask { have: 0 },
            Message::Leave { base: 3, join_number: 4 },
        ];
        for message in messages {
            let bytes = ElasticMessage::from(message.clone()).encode_to_vec();
            assert!(bytes.len() <= MAX_MESSAGE_BYTES, "{} bytes", bytes.len());
            assert_eq!(read(ElasticMessage::decode(&*bytes).unwrap()), Some(message));
        }
    }

    #[test]
    fn numbers_that_have_no_next_one_are_refused() {
        let change = Change { added: vec![candidate(1)], ..Change::default() };
        let mut last = Generation::of_seeds(&[]).apply(&change).unwrap();
        last.number = Generation::LAST;
        assert_eq!(Generation::from_bytes(&last.to_bytes()).unwrap(), last);
        assert!(last.apply(&Change { added: vec![candidate(2)], ..change }).unwrap_err().contains("beyond the last"));
        for (number, next_join) in [(Generation::LAST + 1, 1), (u64::MAX, 1), (1, Generation::LAST + 1), (1, u64::MAX)]
        {
            let generation = Generation { number, next_join, ..last.clone() };
            assert!(Generation::from_bytes(&generation.to_bytes()).is_err(), "{number}, {next_join}");
        }
        let round = |round| read(Message::Prepare { base: 1, ballot: Ballot { round, join_number: 1 } }.into());
        assert!(round(Generation::LAST).is_some() && round(u64::MAX).is_none());
    }

    #[test]
    fn other_jobs_and_versions_are_refused_in_words() {
        let (ours, theirs) = (JobId::new("ours").unwrap(), JobId::new("theirs").unwrap());
        let common = Common { members: (1, 3), majority: true, seeds: Some([7; 16]) };
        let hello = |job: &JobId, control: &str| hello(job, control, &common);
        let greeting = Greeting { control: "a:1".to_owned(), common: common.clone() };
        assert_eq!(greeted(hello(&ours, "a:1"), &ours), Ok(greeting));
        let text = greeted(hello(&theirs, "a:1"), &ours).unwrap_err();
        assert!(text.starts_with("it belongs to job theirs, not to ours"), "{text}");
        assert!(greeted(hello(&ours, "nowhere"), &ours).unwrap_err().contains("host:port"));
        assert!(greeted(Message::Ask { have: 1 }.into(), &ours).unwrap_err().contains("did not greet"));
        assert_eq!(greeted(refusal("full\n".to_owned()), &ours).unwrap_err(), "full\\n");
        let Some(Kind::Hello(greeting)) = hello(&ours, "a:1").kind else { panic!("it is a greeting") };
        let short = ElasticHello { seeds: vec![7; 15].into(), ..greeting };
        let text = greeted(ElasticMessage { kind: Some(Kind::Hello(short)) }, &ours).unwrap_err();
        assert!(text.contains("malformed"), "{text}");
    }

    #[test]
    fn options_that_differ_are_named() {
        let common = Common { members: (1, 3), majority: true, seeds: Some([7; 16]) };
        let differs = |theirs: Common| common.difference(&theirs);
        let options = |text: &str| Some(Difference::Options(text.to_owned()));
        assert_eq!(differs(common.clone()), None);
        assert_eq!(
            differs(Common { majority: false, seeds: None, ..common.clone() }),
            options("a register decides there, a majority decides here")
        );
        assert_eq!(
            differs(Common { members: (1, 4), ..common.clone() }),
            options("members is 1..=4 there, members is 1..=3 here")
        );
        let other = Common { seeds: Some([8; 16]), ..common.clone() };
        assert_eq!(differs(other.clone()), Some(Difference::Seeds));
        // Seeds of those that do not vote for the first generation, or know one.
        assert_eq!((differs(Common { seeds: None, ..common.clone() }), differs(other.now(true))), (None, None));
        let reasons = [Difference::Seeds, options("members").unwrap()].map(|difference| difference.reason());
        assert!(reasons.iter().all(|reason| reason.contains("give all processes of the job the same")), "{reasons:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        #[test]
        fn any_bytes_are_read_without_harm(bytes: Vec<u8>) {
            if let Ok(message) = ElasticMessage::decode(&*bytes) {
                read(message);
            }
            prop_assert!(Generation::from_bytes(&bytes).is_err());
        }
    }
}
