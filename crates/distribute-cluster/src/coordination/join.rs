//! The joining member's side: finding the leader and waiting for the others.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::alarm::Alarm;
use super::connection::claimed;
use super::member::{Attendance, Event, Member};
use super::roster::{VERSION, digest, micros};
use super::{CoordinationOptions, Waiting, terms, wire};
use crate::host::split_bare;
use crate::net::TcpStream;
use crate::secret::{self, JOB_REMEDY, Problem};
use crate::text::{LONGEST, clean};
use crate::tls::socket::Socket;
use crate::{Error, Incarnation, Membership, Result, Task};

/// Joins like [`join`], until a newer generation of an elastic job is decided.
pub(super) async fn join_unless_over(
    membership: Membership,
    address: String,
    options: CoordinationOptions,
    alarm: Arc<Alarm>,
) -> Result<Member> {
    let (newest, generation) = (options.newest.clone(), membership.job_id().generation());
    let (Some(mut newest), Some((_, number))) = (newest, generation) else {
        return join(membership, address, options, alarm).await;
    };
    let task = membership.clone();
    let over = async move {
        match newest.wait_for(|newest| *newest > number).await.map(|newest| *newest) {
            Ok(newer) => newer,
            // The elastic job was dropped, and decides nothing more.
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        joined = join(membership, address, options, alarm) => joined,
        newer = over => Err(task.generation_over(newer)),
    }
}

/// Connects to the leader and waits until all members have joined.
async fn join(
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
        biased;
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
        let stream = self.connect().await?;
        let job = self.membership.job_id();
        let id = Vec::from(job.to_bytes()).into();
        let named = self.membership.tasks.len() <= MAX_NAMED;
        let (elastic, generation) =
            job.generation().map_or_else(Default::default, |(elastic, number)| (Vec::from(elastic), number));
        let job =
            wire::Job { id, name: job.to_string(), derived: job.is_derived(), elastic: elastic.into(), generation };
        let join = wire::Join {
            version: VERSION,
            rank: self.membership.rank,
            process: self.process,
            tasks: self.membership.tasks.iter().filter(|_| named).map(ToString::to_string).collect(),
            world_size: self.membership.world_size(),
            tasks_digest: Vec::from(digest(&self.membership.tasks)).into(),
            job: Some(job),
            heartbeat_interval_us: micros(self.options.heartbeat_interval),
            heartbeat_timeout_us: micros(self.options.heartbeat_timeout),
        };
        let stream = self.identify(stream, &claimed(&join)).await?;
        let mut attendance = Attendance::begin(stream, join, self.membership.tasks.len(), &self.options);
        let mut incarnation: Option<Incarnation> = None;
        loop {
            let event = match &incarnation {
                // What listens there may be no leader.
                None => tokio::time::timeout(CONNECT, attendance.next()).await,
                Some(_) => Ok(attendance.next().await),
            };
            let Ok(event) = event else {
                return Err(AttemptError::Retry("what listens there does not answer".to_owned()));
            };
            match event {
                Event::Welcome(welcome) => {
                    let Ok(drawn) = <[u8; 16]>::try_from(&*welcome.incarnation) else { return Err(no_leader()) };
                    incarnation = Some(Incarnation::from_bytes(drawn));
                    attendance.arrive();
                }
                Event::State(state) => {
                    self.note(&state);
                    if state.closing {
                        return Err(AttemptError::Final(self.missing()));
                    }
                    if state.missing.is_empty() {
                        let (membership, alarm) = (&self.membership, self.alarm.clone());
                        let incarnation = incarnation.ok_or_else(no_leader)?;
                        return Ok(Member::begin(attendance, &state, membership, incarnation, alarm));
                    }
                }
                Event::Refused(refusal) if refusal.generation > 0 => {
                    return Err(AttemptError::Final(self.membership.generation_over(refusal.generation)));
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
                Event::Broken(Some(problem)) => {
                    let problem = clean(&problem, LONGEST);
                    return Err(AttemptError::Retry(format!(
                        "what listens there does not answer as a leader: {problem}"
                    )));
                }
                Event::Broken(None) if incarnation.is_none() => return Err(no_leader()),
                Event::Broken(None) => return Err(AttemptError::Retry("the connection broke".to_owned())),
                Event::Reply(_) => {}
            }
        }
    }

    /// Shows the certificate and proves the job's secret, as far as there are both, and verifies those of the leader.
    async fn identify(&self, stream: TcpStream, claim: &[u8]) -> Result<Socket, AttemptError> {
        let terms = terms(&self.membership);
        let proof = self.options.secret.as_ref().map(|secret| (secret, &terms, claim));
        let identifying = secret::identify(stream, self.options.tls.as_ref(), proof);
        let problem = match tokio::time::timeout(CONNECT, identifying).await {
            Ok(Ok(Ok(socket))) => return Ok(socket),
            // The leader may not be there yet, and another program may listen meanwhile.
            Ok(Ok(Err(problem))) if problem.is_passing() => return Err(AttemptError::Retry(problem.to_string())),
            Ok(Ok(Err(problem))) => problem,
            Ok(Err(error)) => return Err(AttemptError::Retry(error.to_string())),
            Err(_) => return Err(AttemptError::Retry("what listens there does not answer".to_owned())),
        };
        let (task, address) = (self.membership.task().to_string(), self.membership.leader_address.clone());
        Err(AttemptError::Final(match problem {
            Problem::Other { theirs, ours } => {
                let name = |identity: &str| identity.split_once(' ').map_or(identity, |(_, name)| name).to_owned();
                let (theirs, ours, leader) = (name(&theirs), name(&ours), self.membership.tasks[0]);
                let reason = format!(
                    "it belongs to job {ours}, but {leader} leads job {theirs}; give each job an address of its own, \
                     or, if it is one job, set DISTRIBUTE_JOB_ID alike on all of its tasks"
                );
                Error::Refused { task, address, reason }
            }
            problem => {
                let (peer, remedy) = (format!("the leader at {address}"), problem.remedy(JOB_REMEDY));
                Error::Secret { task, peer, problem, remedy }
            }
        }))
    }

    async fn connect(&self) -> Result<TcpStream, AttemptError> {
        let retry = |problem: String| Err(AttemptError::Retry(problem));
        // A name lookup has no deadline of its own.
        let look_up = async { tokio::net::lookup_host(split_bare(&self.address)?).await };
        let found = match tokio::time::timeout(CONNECT, look_up).await {
            Ok(found) => found,
            Err(_) => return retry(format!("its name was not found within {} s", CONNECT.as_secs())),
        };
        let addresses: Vec<SocketAddr> = match found {
            Ok(found) => found.collect(),
            Err(error) if error.kind() == ErrorKind::InvalidInput => {
                let remedy = "Correct the leader's address.";
                let (problem, given) = (error.to_string(), self.address.clone());
                let error = Error::config("the leader's address", problem, given, "host:port", remedy);
                return Err(AttemptError::Final(error));
            }
            Err(error) => return retry(error.to_string()),
        };
        let stream = match tokio::time::timeout(CONNECT, TcpStream::connect(&*addresses)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return retry(error.to_string()),
            Err(_) => return retry(format!("it did not accept the connection within {} s", CONNECT.as_secs())),
        };
        // Disables Nagle's algorithm for small messages; the connection works without this, so an error is ignored.
        let _ = stream.set_nodelay(true);
        Ok(stream)
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
