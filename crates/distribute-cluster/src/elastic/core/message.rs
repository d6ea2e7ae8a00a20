//! Messages between processes, and the events and actions of the state machine.

use std::sync::Arc;
use std::time::Duration;

use crate::elastic::generation::{Candidate, Change, Generation};

/// A proposer's number: later ones fence earlier ones. Round 0 is the leader's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::elastic) struct Ballot {
    pub(in crate::elastic) round: u64,
    pub(in crate::elastic) join_number: u64,
}

/// A message about the generation after `base`.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::elastic) enum Message {
    /// Asks to become a member. `have` is the newest generation that the process knows.
    Join {
        have: u64,
        candidate: Candidate,
    },
    /// Answers a join by the address of the one that proposes the next generation, and the number of the newest one
    /// that the answering process knows.
    Wait {
        leader: String,
        number: u64,
    },
    /// Asks whether a member is there, and for its promise to vote for no earlier ballot.
    Prepare {
        base: u64,
        ballot: Ballot,
    },
    Promise(Promise),
    /// Asks for a vote.
    Accept {
        base: u64,
        ballot: Ballot,
        change: Arc<Change>,
    },
    Accepted {
        base: u64,
        ballot: Ballot,
        voter: u64,
    },
    /// Refuses a ballot: a later one has been promised.
    Nack {
        base: u64,
        ballot: Ballot,
        promised: Ballot,
    },
    /// Tells what was decided after the generation before `number`.
    Decided {
        number: u64,
        change: Arc<Change>,
    },
    /// Tells a decided generation to a process that does not know the one before.
    Whole(Arc<Generation>),
    /// Tells that a generation is decided, without its members.
    Notice {
        number: u64,
    },
    /// Acknowledges a decided generation.
    Learned {
        number: u64,
    },
    /// Asks for what was decided after generation `have`.
    Ask {
        have: u64,
    },
    /// A member asks to be left out of the next generation.
    Leave {
        base: u64,
        join_number: u64,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub(in crate::elastic) struct Promise {
    pub(in crate::elastic) base: u64,
    pub(in crate::elastic) ballot: Ballot,
    pub(in crate::elastic) voter: u64,
    /// The vote that it gave last.
    pub(in crate::elastic) accepted: Option<(Ballot, Arc<Change>)>,
    /// A seed's description of itself; members are known.
    pub(in crate::elastic) candidate: Option<Candidate>,
    pub(in crate::elastic) is_leaving: bool,
}

/// An event of a process.
#[derive(Debug)]
pub(in crate::elastic) enum Event {
    Message {
        from: String,
        message: Message,
    },
    /// The time of the last [`Action::Timer`] is there.
    Timer,
    /// A connection to the process at an address has ended.
    Closed {
        address: String,
    },
    /// A connection to an address has ended before the process there has answered, which may be gone or ending.
    Unanswered {
        address: String,
    },
    /// No process listens at an address any more.
    Gone {
        address: String,
    },
    /// A generation is over for this process, which saw the loss of these ranks.
    Suspect {
        generation: u64,
        ranks: Vec<u32>,
    },
    Leave,
    /// The register was read.
    Read(Result<Option<Generation>, String>),
    /// The register has decided.
    Registered(Result<Generation, String>),
    /// The register says that the job has ended.
    Ended,
}

/// An action that a process is to take.
#[derive(Debug)]
pub(in crate::elastic) enum Action {
    Send {
        to: String,
        message: Message,
    },
    /// Replaces the timer that was set before.
    Timer(Duration),
    ReadRegister,
    Decide(Generation),
    /// A newer generation is known, of which this process may be a member.
    Decided {
        generation: Arc<Generation>,
        is_member: bool,
    },
    /// This process has asked to leave and is not a member any more.
    Left,
    /// No generation was decided in time; the reason is a sentence.
    End(String),
    /// The job has ended for all.
    JobEnded,
}
