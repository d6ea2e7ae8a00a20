//! The joining member's side: finding the leader and waiting for the others.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tonic::transport::{Channel, Endpoint};

use super::alarm::Alarm;
use super::limits::MAX_VALUE_BYTES;
use super::member::{Attendance, Credentials, Event, Member};
use super::roster::{VERSION, digest};
use super::wire::coordination_client::CoordinationClient;
use super::{CoordinationOptions, Waiting, wire};
use crate::text::{LONGEST, clean};
use crate::{Error, Incarnation, Membership, Result, Task};

/// Connects to the leader and waits until all members have joined.
pub(super) async fn join(
    membership: Membership,
    address: String,
    options: CoordinationOptions,
    alarm: Arc<Alarm>,
) -> Result<Member> {
    let started = Instant::now();
    let waiting = Waiting {
        task: membership.task(),
        missing: membership.tasks.clone(),
        missing_count: membership.world_size(),
        world_size: membership.world_size(),
        leader: format!("{} at {}", membership.tasks[0], membership.leader_address),
        problem: Some("not connected yet".to_owned()),
        waited: Duration::ZERO,
        timeout: options.join_timeout,
    };
    // The standard library's random keys make it unlikely that two processes draw the same number.
    let process = RandomState::new().hash_one(std::process::id());
    let joiner = Joiner { membership, address, options, alarm, process, waiting: Mutex::new(waiting), started };
    tokio::select! {
        joined = joiner.seek() => joined,
        never = joiner.tell() => match never {},
        () = tokio::time::sleep(joiner.options.join_timeout) => Err(joiner.too_late()),
    }
}

/// A member that is joining.
struct Joiner {
    membership: Membership,
    address: String,
    options: CoordinationOptions,
    alarm: Arc<Alarm>,
    process: u64,
    waiting: Mutex<Waiting>,
    started: Instant,
}

fn no_leader() -> AttemptError {
    AttemptError::Retry("what listens there does not answer as a leader".to_owned())
}

/// Why an attempt to join failed.
enum AttemptError {
    /// A later attempt may succeed.
    Retry(String),
    /// No later attempt can succeed.
    Final(Error),
}

impl Joiner {
    async fn seek(&self) -> Result<Member> {
        let mut pause = FIRST_PAUSE;
        loop {
            match self.attempt().await {
                Ok(member) => return Ok(member),
                Err(AttemptError::Final(error)) => return Err(error),
                Err(AttemptError::Retry(problem)) => self.waiting.lock().problem = Some(problem),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 3 / 2).min(LAST_PAUSE);
        }
    }

    async fn attempt(&self) -> Result<Member, AttemptError> {
        let mut client = self.connect().await?;
        let job = self.membership.job_id();
        let id = Vec::from(job.to_bytes()).into();
        let named = self.membership.tasks.len() <= MAX_NAMED;
        let job = wire::Job { id, name: job.to_string(), derived: job.is_derived() };
        let join = wire::Join {
            version: VERSION,
            rank: self.membership.rank,
            process: self.process,
            tasks: self.membership.tasks.iter().filter(|_| named).map(ToString::to_string).collect(),
            world_size: self.membership.world_size(),
            tasks_digest: Vec::from(digest(&self.membership.tasks)).into(),
            job: Some(job.clone()),
        };
        let again = |status: tonic::Status| {
            let status = clean(&status.to_string(), LONGEST);
            AttemptError::Retry(format!("what listens there does not answer as a leader: {status}"))
        };
        let attend = Attendance::begin(&mut client, join, &self.options);
        let mut attendance = match tokio::time::timeout(CONNECT, attend).await {
            Ok(begun) => begun.map_err(again)?,
            Err(_) => return Err(AttemptError::Retry("what listens there does not answer".to_owned())),
        };
        let mut credentials: Option<Credentials> = None;
        loop {
            match attendance.next().await {
                Event::Welcome(welcome) => {
                    let Ok(incarnation) = <[u8; 16]>::try_from(&*welcome.incarnation) else { return Err(no_leader()) };
                    let (job, rank, session) = (Some(job.clone()), self.membership.rank, welcome.session);
                    let caller = wire::Caller { job, rank, session };
                    credentials = Some(Credentials { caller, incarnation: Incarnation::from_bytes(incarnation) });
                }
                Event::State(state) => {
                    self.note(&state);
                    if state.closing {
                        return Err(AttemptError::Final(self.missing()));
                    }
                    if state.missing.is_empty() {
                        let (membership, alarm) = (&self.membership, self.alarm.clone());
                        let credentials = credentials.ok_or_else(no_leader)?;
                        return Ok(Member::begin(client, attendance, &state, membership, credentials, alarm));
                    }
                }
                Event::Refused(refusal) if refusal.passing => {
                    return Err(AttemptError::Retry(clean(&refusal.reason, LONGEST)));
                }
                Event::Refused(refusal) => {
                    return Err(AttemptError::Final(Error::Refused {
                        task: self.membership.task().to_string(),
                        address: self.membership.leader_address.clone(),
                        reason: clean(&refusal.reason, LONGEST),
                    }));
                }
                Event::Silent(silence) => {
                    return Err(AttemptError::Retry(format!("silent for {:.1} s", silence.as_secs_f64())));
                }
                Event::Broken => return Err(AttemptError::Retry("the connection broke".to_owned())),
            }
        }
    }

    async fn connect(&self) -> Result<CoordinationClient<Channel>, AttemptError> {
        let wrong = |error: tonic::transport::Error| {
            let remedy = "Correct the leader's address.";
            let given = self.address.clone();
            AttemptError::Final(Error::config("the leader's address", cause(&error), given, "host:port", remedy))
        };
        let endpoint = Endpoint::from_shared(format!("http://{}", self.address)).map_err(wrong)?;
        let endpoint = endpoint.connect_timeout(CONNECT).tcp_nodelay(true);
        // A name lookup has no deadline of its own.
        let channel = match tokio::time::timeout(CONNECT * 2, endpoint.connect()).await {
            Ok(connected) => connected.map_err(|error| AttemptError::Retry(cause(&error)))?,
            Err(_) => {
                let problem = format!("its name was not found within {} s", (CONNECT * 2).as_secs());
                return Err(AttemptError::Retry(problem));
            }
        };
        // One reply contains the values of all members.
        let largest = self.membership.tasks.len().saturating_mul(MAX_VALUE_BYTES + 64);
        Ok(CoordinationClient::new(channel).max_decoding_message_size(largest.saturating_add(1 << 20)))
    }

    /// Reports at every progress interval what this task waits for.
    async fn tell(&self) -> std::convert::Infallible {
        loop {
            tokio::time::sleep(self.options.progress_interval).await;
            let mut waiting = self.waiting.lock().clone();
            waiting.waited = self.started.elapsed();
            self.options.tell(&waiting);
        }
    }

    fn note(&self, state: &wire::State) {
        let mut waiting = self.waiting.lock();
        waiting.problem = None;
        waiting.missing = state.missing.iter().filter_map(|rank| self.membership.task_of(*rank)).collect();
        waiting.missing_count = state.missing_count.max(state.missing.len() as u32);
    }

    fn too_late(&self) -> Error {
        let problem = self.waiting.lock().problem.clone();
        match problem {
            None => self.missing(),
            Some(last) => Error::Unreachable {
                task: self.membership.task().to_string(),
                leader: self.membership.tasks[0].to_string(),
                address: self.membership.leader_address.clone(),
                waited: self.options.join_timeout,
                last,
            },
        }
    }

    fn missing(&self) -> Error {
        let (missing, count) = {
            let waiting = self.waiting.lock();
            let first: Vec<Task> = waiting.missing.iter().take(MAX_SHOWN).copied().collect();
            (first, waiting.missing_count as usize)
        };
        let rank = |task: &Task| self.membership.tasks.iter().position(|other| other == task).unwrap_or(0);
        let mut names: Vec<String> = missing.iter().map(|task| self.membership.named(rank(task) as u32)).collect();
        if count > names.len() {
            names.push(format!("and {} more", count - names.len()));
        }
        Error::Missing {
            task: self.membership.task().to_string(),
            waited: self.started.elapsed().min(self.options.join_timeout),
            missing: names.join(", "),
        }
    }
}

/// The number of missing tasks that an error names.
const MAX_SHOWN: usize = 16;

/// Largest job whose members send the names of its tasks, so that the leader can name a difference; members of larger
/// jobs send only a digest.
const MAX_NAMED: usize = 1000;

/// The pause after the first attempt; each further pause is half as long again.
const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// The longest pause between two attempts.
const LAST_PAUSE: Duration = Duration::from_millis(500);

/// Timeout of one attempt to connect, so that a firewall that drops packets does not cause a long wait.
const CONNECT: Duration = Duration::from_secs(5);

/// Returns the message of an error's root cause, which is the part that a user can act on.
fn cause(error: &dyn std::error::Error) -> String {
    let mut root = error;
    while let Some(source) = root.source() {
        root = source;
    }
    root.to_string()
}
