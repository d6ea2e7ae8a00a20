//! The launchers of a job's hosts: how they meet, and what they tell each other.
//!
//! The same command runs on every host. The launcher that can listen on the rendezvous address leads: it supervises all
//! tasks as if they were its own. The others start, signal and report their hosts' tasks as it tells them.

mod leader;
mod link;
mod member;
mod protocol;
mod rendezvous;
mod roll_call;

pub(crate) use leader::{FromHost, Hosts, Report, Woken};
pub(crate) use member::Member;
pub(crate) use protocol::{Command, Hello, Last, ToLeader, ToMember};
pub(crate) use rendezvous::{Door, Role, find_role};
