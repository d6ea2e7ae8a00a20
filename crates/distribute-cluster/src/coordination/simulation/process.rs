//! The processes: a member joins, exchanges values and leaves; a stranger tries to get in.

use std::sync::Arc;
use std::time::Duration;

use distribute_testkit::simulation::Random;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::scenario::{EXCHANGE_TIMEOUT, HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, JOIN_TIMEOUT};
use crate::coordination::alarm::Alarm;
use crate::coordination::connection::claimed;
use crate::coordination::join::join_unless_over;
use crate::coordination::leader::Leader;
use crate::coordination::member::Member;
use crate::coordination::{CoordinationOptions, roster, terms, wire};
use crate::frames;
use crate::net::{Network, Place, TcpStream};
use crate::secret;
use crate::{Error, FailureCause, Incarnation, JobId, JobSecret, Membership, Task};

/// The port of the leader.
pub(super) const PORT: u16 = 5000;

/// A process.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub(super) process: usize,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) job: &'static str,
    pub(super) secret: Option<&'static str>,
    pub(super) rounds: u32,
    pub(super) seed: u64,
    /// Whether it gives up some exchanges early.
    pub(super) impatient: bool,
    /// Whether it leads; a second process of rank 0 does too, if it can listen.
    pub(super) leads: bool,
}

/// An event that a process reports.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Event {
    Leads(Incarnation),
    Joined {
        incarnation: Incarnation,
    },
    /// How long it took by the process's own clock, and the error.
    NotJoined {
        took: Duration,
        error: String,
        names: Option<String>,
    },
    Enters {
        round: u32,
        attempt: u32,
    },
    Passes {
        round: u32,
        attempt: u32,
        values: Vec<Vec<u8>>,
    },
    Misses {
        round: u32,
        attempt: u32,
        error: String,
    },
    Put {
        key: String,
        value: Vec<u8>,
    },
    Got {
        key: String,
        value: Vec<u8>,
    },
    /// It learned of the failure of a rank, which was found to be lost.
    Failure {
        rank: u32,
    },
    /// A stranger was let in.
    Admitted,
    Ends,
}

/// The events of all processes, with the time and the process.
#[derive(Clone, Default)]
pub(super) struct Journal(Arc<Mutex<Told>>);

#[derive(Default)]
struct Told {
    now: u64,
    events: Vec<(u64, usize, Event)>,
    ended: Vec<usize>,
}

impl Journal {
    pub(super) fn set(&self, now: u64) {
        self.0.lock().now = now;
    }

    pub(super) fn tell(&self, process: usize, event: Event) {
        let mut journal = self.0.lock();
        if event == Event::Ends {
            journal.ended.push(process);
        }
        let now = journal.now;
        journal.events.push((now, process, event));
    }

    pub(super) fn has_ended(&self, process: usize) -> bool {
        self.0.lock().ended.contains(&process)
    }

    pub(super) fn events(&self) -> Vec<(u64, usize, Event)> {
        self.0.lock().events.clone()
    }
}

impl Spec {
    pub(super) fn membership(&self, leader: std::net::IpAddr) -> Membership {
        let address = format!("{leader}:{PORT}");
        let tasks: Vec<Task> = (0..self.ranks).map(|index| Task::new(crate::TaskType::Worker, index)).collect();
        let membership = Membership::new(self.rank, self.ranks, address).expect("the address is one");
        let job = JobId::new(self.job).expect("the name is one");
        Membership { tasks, ..membership }.with_job_id(job)
    }

    fn secret(&self) -> Option<JobSecret> {
        self.secret.map(|secret| JobSecret::new(secret).expect("it is long enough"))
    }

    fn options(&self) -> CoordinationOptions {
        CoordinationOptions {
            join_timeout: JOIN_TIMEOUT,
            heartbeat_interval: HEARTBEAT_INTERVAL,
            heartbeat_timeout: HEARTBEAT_TIMEOUT,
            progress_interval: Duration::from_secs(3600),
            secret: self.secret(),
            ..CoordinationOptions::default()
        }
    }
}

/// Runs a member, and rank 0's service.
pub(super) async fn member(spec: Spec, place: Place, leader_host: std::net::IpAddr, journal: Journal) {
    let (membership, options) = (spec.membership(leader_host), spec.options());
    let tell = |event| journal.tell(spec.process, event);
    let leader = match spec.leads.then(|| place.listen(PORT)) {
        None => None,
        Some(Err(error)) => {
            let (took, error) = (Duration::ZERO, format!("cannot listen: {error}"));
            tell(Event::NotJoined { took, error, names: None });
            return tell(Event::Ends);
        }
        Some(Ok(listener)) => {
            let address = membership.leader_address.clone();
            let leader = Leader::serving(listener, address, &membership, &options).expect("a service starts");
            tell(Event::Leads(leader.incarnation()));
            Some(leader)
        }
    };
    let alarm = Arc::new(Alarm::new(membership.clone()));
    let (told, process) = (journal.clone(), spec.process);
    alarm.on_failure(Box::new(move |failure| {
        if let FailureCause::Lost { .. } = &failure.cause {
            told.tell(process, Event::Failure { rank: failure.rank });
        }
    }));
    let began = tokio::time::Instant::now();
    let address = membership.leader_address.clone();
    match join_unless_over(membership, address, options, alarm.clone()).await {
        Ok(member) => {
            tell(Event::Joined { incarnation: member.incarnation() });
            work(&spec, &member, &alarm, &tell).await;
            member.leave().await;
        }
        Err(error) => {
            let names = match &error {
                Error::Missing { missing, .. } => Some(missing.clone()),
                Error::Unreachable { leader, .. } => Some(leader.clone()),
                _ => None,
            };
            tell(Event::NotJoined { took: began.elapsed(), error: error.to_string(), names });
        }
    }
    if let Some(leader) = leader {
        leader.close().await;
    }
    tell(Event::Ends);
}

/// Exchanges values, and puts and gets others.
async fn work(spec: &Spec, member: &Member, alarm: &Alarm, tell: &impl Fn(Event)) {
    let random = &mut Random::new(spec.seed ^ ((spec.process as u64) << 32));
    for round in 0..spec.rounds {
        tokio::time::sleep(Duration::from_micros(random.between(0, 500_000))).await;
        let mut attempt = 0;
        loop {
            if attempt == 5 {
                return;
            }
            attempt += 1;
            tell(Event::Enters { round, attempt });
            let value = value(spec.rank, spec.process, round, attempt);
            let exchange = member.exchange(format!("exchange \"{round}\""), &value, EXCHANGE_TIMEOUT);
            // Some callers give up early, and call again.
            let patience =
                if spec.impatient && random.percent(20) { random.between(1_000, 300_000) } else { 60_000_000 };
            let outcome = match tokio::time::timeout(Duration::from_micros(patience), exchange).await {
                Ok(outcome) => outcome.map_err(|error| error.to_string()),
                Err(_) => {
                    tell(Event::Misses { round, attempt, error: "given up".to_owned() });
                    tokio::time::sleep(Duration::from_micros(random.between(0, 600_000))).await;
                    continue;
                }
            };
            match outcome {
                Ok(values) => {
                    tell(Event::Passes { round, attempt, values });
                    break;
                }
                Err(error) => tell(Event::Misses { round, attempt, error }),
            }
            if alarm.failure().is_some() {
                return;
            }
        }
        let (key, put) = (format!("{}", spec.rank), value(spec.rank, spec.process, round, 0));
        if member.put(&key, &put).await.is_err() {
            return;
        }
        tell(Event::Put { key: key.clone(), value: put });
        for key in [key, random.between(0, u64::from(spec.ranks)).to_string()] {
            match member.get(&key, EXCHANGE_TIMEOUT).await {
                Ok(Some(value)) => tell(Event::Got { key, value }),
                Ok(None) => {}
                Err(_) => return,
            }
        }
    }
}

/// Returns what a member contributes.
fn value(rank: u32, process: usize, round: u32, attempt: u32) -> Vec<u8> {
    [rank, process as u32, round, attempt].iter().flat_map(|number| number.to_be_bytes()).collect()
}

/// Reads what a member has contributed: rank, process, round and attempt.
pub(super) fn read_value(value: &[u8]) -> Option<[u32; 4]> {
    let bytes: &[u8; 16] = value.try_into().ok()?;
    let number =
        |place: usize| u32::from_be_bytes([bytes[place], bytes[place + 1], bytes[place + 2], bytes[place + 3]]);
    Some([number(0), number(4), number(8), number(12)])
}

/// Calls the leader, sends bytes, and reads until the leader hangs up, or for a while.
pub(super) async fn caller(bytes: Vec<u8>, process: usize, address: std::net::SocketAddr, journal: Journal) {
    if let Ok(mut stream) = TcpStream::connect(&[address]).await
        && stream.write_all(&bytes).await.is_ok()
    {
        let mut answer = Vec::new();
        drop(tokio::time::timeout(Duration::from_secs(15), stream.read_to_end(&mut answer)).await);
        if is_welcome(&answer) {
            journal.tell(process, Event::Admitted);
        }
    }
    journal.tell(process, Event::Ends);
}

/// Sends what another caller has sent, if any has.
pub(super) async fn replay(
    network: Network,
    draw: u64,
    process: usize,
    address: std::net::SocketAddr,
    journal: Journal,
) {
    let recorded = network.recorded();
    match recorded.is_empty() {
        true => journal.tell(process, Event::Ends),
        false => caller(recorded[(draw % recorded.len() as u64) as usize].clone(), process, address, journal).await,
    }
}

/// Proves the secret as one rank, and joins as the next one.
pub(super) async fn false_claim(spec: Spec, leader_host: std::net::IpAddr, journal: Journal) {
    let membership = spec.membership(leader_host);
    let join = |rank: u32| wire::Join {
        version: roster::VERSION,
        rank,
        process: 1 << 40,
        tasks: membership.tasks.iter().map(ToString::to_string).collect(),
        world_size: spec.ranks,
        tasks_digest: Vec::from(roster::digest(&membership.tasks)).into(),
        job: Some(wire::Job {
            id: Vec::from(membership.job_id().to_bytes()).into(),
            name: spec.job.to_owned(),
            ..wire::Job::default()
        }),
        heartbeat_interval_us: roster::micros(HEARTBEAT_INTERVAL),
        heartbeat_timeout_us: roster::micros(HEARTBEAT_TIMEOUT),
    };
    let attempt = async {
        let secret = spec.secret()?;
        let stream = TcpStream::connect(&[std::net::SocketAddr::new(leader_host, PORT)]).await.ok()?;
        let claim = claimed(&join((spec.rank + 1) % spec.ranks));
        let terms = terms(&membership);
        let mut stream = secret::identify(stream, None, Some((&secret, &terms, &claim))).await.ok()?.ok()?;
        let (send, queue) = tokio::sync::mpsc::channel(1);
        let kind = Some(wire::member_message::Kind::Join(join(spec.rank)));
        send.send(wire::MemberMessage { kind }).await.ok()?;
        drop(send);
        frames::send(&mut stream, wire::PREAMBLE, queue, Duration::from_secs(1)).await.ok()?;
        let mut answer = Vec::new();
        drop(tokio::time::timeout(Duration::from_secs(3), stream.read_to_end(&mut answer)).await);
        is_welcome(&answer).then_some(())
    };
    if attempt.await.is_some() {
        journal.tell(spec.process, Event::Admitted);
    }
    journal.tell(spec.process, Event::Ends);
}

/// Returns whether a leader's bytes welcome a member: after the preamble and a length, the first field of the message.
fn is_welcome(answer: &[u8]) -> bool {
    use prost::Message;
    let Some(rest) = answer.strip_prefix(&wire::PREAMBLE) else { return false };
    let Some((length, rest)) = rest.split_first_chunk::<4>() else { return false };
    let Some(body) = rest.get(..u32::from_be_bytes(*length) as usize) else { return false };
    let message = wire::LeaderMessage::decode(body).ok().and_then(|message| message.kind);
    matches!(message, Some(wire::leader_message::Kind::Welcome(_)))
}
