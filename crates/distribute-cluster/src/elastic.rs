//! The members of an elastic job: which processes train together, decided anew when one fails, joins or leaves.

use std::fmt;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use crate::coordination::Driver;
use crate::job::random;
use crate::{Coordination, CoordinationOptions, Error, JobId, Membership, Result};

mod addresses;
mod connections;
mod core;
mod driver;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod generation;
mod member_states;
mod options;
mod register;
#[cfg(test)]
mod simulation;
mod state;
mod state_version;
mod wire;

pub use generation::{ElasticMember, Generation};
pub use member_states::{HeldState, MemberStates, Missing};
pub use options::{Authority, ElasticOptions};
pub use register::{FileRegister, Register};
pub use state_version::StateVersion;

use addresses::Addresses;
use core::{Event, Settings};
use driver::Request;
use generation::{Candidate, process_of};
use state::{Ending, Shared};

/// A process of an elastic job.
///
/// A [`Generation`] is an ordinary job, whose [`Coordination`] is started by [`coordinate`](ElasticJob::coordinate) and
/// finds out when a member fails. The process then tells this one by
/// [`suspect`](ElasticJob::suspect) and waits for the [`next_generation`](ElasticJob::next_generation), whose members
/// are those that are left and those that have asked to join. Each generation is decided at most once, by a majority of
/// the members of the one before or by a register ([`Authority`]), so that two parts of a job never continue both.
///
/// A member that was left out although it lives, because it was frozen or not reached, joins again by itself. Dropping
/// the value ends the process's part without a word, as its death would; [`leave`](ElasticJob::leave) tells the others.
///
/// # Examples
/// Three processes, here threads, of which one fails:
/// ```
/// use std::net::TcpListener;
/// use std::sync::Arc;
/// use distribute_cluster::{ElasticJob, ElasticOptions, JobId};
///
/// let listeners = [0; 3].map(|_| Arc::new(TcpListener::bind("127.0.0.1:0").expect("a free port")));
/// let seeds = listeners.clone().map(|listener| listener.local_addr().expect("it is bound").to_string());
/// let processes = listeners.map(|listener| {
///     let job_id = JobId::new("three").expect("a valid name");
///     let options = ElasticOptions::new(2..=3, seeds.clone(), job_id).listener(listener);
///     # let options = options.join_window(std::time::Duration::from_secs(5));
///     std::thread::spawn(move || ElasticJob::join(options))
/// });
/// let mut jobs = Vec::new();
/// for process in processes {
///     jobs.push(process.join().expect("no panic")?);
/// }
/// jobs.sort_by_key(ElasticJob::rank);
/// let first = jobs[0].generation();
/// assert_eq!((first.number, first.members.len()), (1, 3));
///
/// drop(jobs.pop());
/// jobs.iter().for_each(|job| job.suspect(first.number, &[2]));
/// let second = jobs[1].next_generation(first.number)?;
/// assert_eq!((second.number, second.members.len()), (2, 2));
/// assert_eq!(jobs[1].membership(&second)?.rank, 1);
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
///
/// # Source
/// torchrun's elastic agents and Horovod's elastic driver, which have a store or a driver process as authority; the
/// decisions are those of Paxos, see `docs/adr/0035-generations.md`.
pub struct ElasticJob {
    job: JobId,
    host: String,
    control: String,
    process: u128,
    settings: Settings,
    service: Arc<TcpListener>,
    register: Option<Arc<dyn Register>>,
    /// See [`ElasticOptions::stop`].
    stop: Option<Arc<AtomicBool>>,
    shared: Arc<Shared>,
    requests: mpsc::Sender<Request>,
    driver: Driver,
}

impl ElasticJob {
    /// Joins a job, and returns when a generation is decided that has this process. Usable several times in a process.
    ///
    /// # Errors
    /// [`Error::Config`] if the options are invalid, [`Error::Control`] if an address cannot be listened on,
    /// [`Error::TooFew`] if no generation has this process within [`join_timeout`](ElasticOptions::join_timeout),
    /// [`Error::Stopped`] if it is told to [`stop`](ElasticOptions::stop) before,
    /// [`Error::Random`] and [`Error::Thread`] if the system fails.
    ///
    /// # Examples
    /// ```
    /// # use std::{net::TcpListener, sync::Arc};
    /// # use distribute_cluster::{CoordinationOptions, ElasticJob, ElasticOptions, JobId};
    /// # let listener = Arc::new(TcpListener::bind("127.0.0.1:0")?);
    /// # let seeds = [listener.local_addr()?.to_string()];
    /// # let options = ElasticOptions::new(1..=1, seeds, JobId::new("alone")?).listener(listener);
    /// let job = ElasticJob::join(options)?;
    /// assert_eq!((job.generation().number, job.rank()), (1, 0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn join(mut options: ElasticOptions) -> Result<ElasticJob> {
        options.check()?;
        let Addresses { listener, control, host, seat, service, service_address } = Addresses::find(&options)?;
        let register = match &options.authority {
            Authority::Majority => None,
            Authority::Register(register) => Some(register.clone()),
        };
        // Without seeds, each process may be the first: the register decides which.
        let alone = options.seeds.is_empty();
        let settings = Settings {
            min: *options.members.start() as usize,
            max: *options.members.end() as usize,
            join_window: options.join_window,
            answer_window: options.answer_window,
            join_timeout: options.join_timeout,
            majority: register.is_none(),
            seeds: if alone { vec![control.clone()] } else { options.seeds },
            seat: if alone { Some(0) } else { seat }.filter(|_| options.founding),
        };
        // The lowest bits count how often the process was removed.
        let identity = u128::from_be_bytes(random()?) >> 32 << 32;
        let own = Candidate { identity, control: control.clone(), service: service_address };
        let driver = Driver::start("elastic")?;
        let failed = |source| Error::Control { address: control.clone(), source };
        let listener = {
            let _guard = driver.handle().enter();
            tokio::net::TcpListener::from_std(listener).map_err(failed)?
        };
        let shared = Arc::new(Shared::new());
        let running = driver::start(
            settings.clone(),
            own,
            (options.job_id.clone(), options.secret.clone(), options.tls.clone()),
            listener,
            register.clone(),
            shared.clone(),
        );
        let requests = driver.call(running, Driver::MARGIN).ok_or_else(|| unanswered(&control, "joining"))?;
        let process = process_of(identity);
        let (job, stop) = (options.job_id, options.stop);
        let joining =
            ElasticJob { job, host, control, process, settings, service, register, stop, shared, requests, driver };
        joining.next_generation(0)?;
        Membership::mark_joined();
        Ok(joining)
    }

    /// Returns the newest decided generation that has this process.
    pub fn generation(&self) -> Generation {
        let own = self.shared.own();
        own.map_or_else(|| Generation::of_seeds(&[]), |(generation, _)| Generation::clone(&generation))
    }

    /// Returns this process's rank in [`generation`](ElasticJob::generation).
    pub fn rank(&self) -> u32 {
        self.shared.own().map_or(0, |(_, rank)| rank)
    }

    /// Returns the `host:port` at which this process takes control messages.
    pub fn control(&self) -> &str {
        &self.control
    }

    /// Returns the membership by which a generation's members start their coordination and their process groups: tasks
    /// `worker:0` and up, led by rank 0 at its [service address](ElasticMember::service). Each generation has an
    /// identity of its own, so that processes of different generations refuse each other.
    ///
    /// [`coordinate`](ElasticJob::coordinate) starts the coordination with it. If another function does, its options
    /// must not have an identity: that would replace the generation's.
    ///
    /// # Errors
    /// [`Error::Config`] if this process is not a member of the generation.
    ///
    /// # Examples
    /// ```
    /// # use std::{net::TcpListener, sync::Arc};
    /// # use distribute_cluster::{CoordinationOptions, ElasticJob, ElasticOptions, JobId};
    /// # let listener = Arc::new(TcpListener::bind("127.0.0.1:0")?);
    /// # let seeds = [listener.local_addr()?.to_string()];
    /// # let options = ElasticOptions::new(1..=1, seeds, JobId::new("alone")?).listener(listener);
    /// # let job = ElasticJob::join(options)?;
    /// let membership = job.membership(&job.generation())?;
    /// assert_eq!((membership.rank, membership.world_size()), (0, 1));
    /// assert_eq!(membership.job_id().to_string(), "alone.1");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn membership(&self, generation: &Generation) -> Result<Membership> {
        let own = generation.members.iter().position(|member| process_of(member.identity) == self.process);
        let (Some(rank), Some(leader)) = (own, generation.members.first()) else {
            let problem = "this process is not a member of it";
            let remedy = "Take a generation that next_generation returned.";
            let given = generation.to_string();
            return Err(Error::config("generation", problem, given, "a generation of this process", remedy));
        };
        let size = generation.members.len() as u32;
        let mut membership = Membership::new(rank as u32, size, leader.service.clone())?;
        membership.addresses = generation.members.iter().map(|member| Some(member.service.clone())).collect();
        membership.advertised_host = Some(self.host.clone());
        membership.source = "an elastic job";
        Ok(membership.with_job_id(self.job.of_generation(generation.number, &generation.digest())))
    }

    /// Starts the coordination of a generation. It ends as soon as a newer one is decided. If members do not join in
    /// time the generation is over: those that are gone are left out of the next one, so that `join_timeout` should be
    /// seconds rather than minutes. `listener` and `job_id` of the options are replaced.
    ///
    /// # Errors
    /// [`Error::GenerationOver`] if a newer generation is decided, [`Error::Missing`] or [`Error::Unreachable`] if
    /// members do not join within `join_timeout`: in these cases wait for the
    /// [`next_generation`](ElasticJob::next_generation). [`Error::Config`] if this process is not a member of the
    /// generation, and the other errors of [`Coordination::start`].
    ///
    /// # Examples
    /// ```
    /// # use std::{net::TcpListener, sync::Arc};
    /// # use distribute_cluster::{CoordinationOptions, ElasticJob, ElasticOptions, JobId};
    /// # let listener = Arc::new(TcpListener::bind("127.0.0.1:0")?);
    /// # let seeds = [listener.local_addr()?.to_string()];
    /// # let options = ElasticOptions::new(1..=1, seeds, JobId::new("alone")?).listener(listener);
    /// # let job = ElasticJob::join(options)?;
    /// let coordination = job.coordinate(&job.generation(), CoordinationOptions::default())?;
    /// assert_eq!(coordination.membership().world_size(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn coordinate(&self, generation: &Generation, options: CoordinationOptions) -> Result<Coordination> {
        let membership = self.membership(generation)?;
        let (listener, newest) = (membership.is_leader().then(|| self.service.clone()), Some(self.shared.newest()));
        let options = CoordinationOptions { listener, newest, job_id: None, ..options };
        Coordination::start(&membership, options).inspect_err(|error| {
            if matches!(error, Error::Missing { .. } | Error::Unreachable { .. }) {
                self.suspect(generation.number, &[]);
            }
        })
    }

    /// Returns the listener of this process's service address, for
    /// [`CoordinationOptions::listener`](crate::CoordinationOptions::listener). It lives as long as the process's part
    /// in the job, and serves each generation that the process leads.
    ///
    /// # Examples
    /// ```
    /// # use std::{net::TcpListener, sync::Arc};
    /// # use distribute_cluster::{CoordinationOptions, ElasticJob, ElasticOptions, JobId};
    /// # let listener = Arc::new(TcpListener::bind("127.0.0.1:0")?);
    /// # let seeds = [listener.local_addr()?.to_string()];
    /// # let options = ElasticOptions::new(1..=1, seeds, JobId::new("alone")?).listener(listener);
    /// # let job = ElasticJob::join(options)?;
    /// let address = job.listener().local_addr()?.to_string();
    /// assert_eq!(job.generation().members[0].service, address);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn listener(&self) -> Arc<TcpListener> {
        self.service.clone()
    }

    /// Tells that a generation is over for this process, which saw the loss of these ranks; the list may be empty. The
    /// next generation is then decided without them. Older generations and ranks that do not exist are ignored.
    ///
    /// Returns at once; may be called on any thread.
    ///
    /// # Examples
    /// ```
    /// # use std::{net::TcpListener, sync::Arc};
    /// # use distribute_cluster::{CoordinationOptions, ElasticJob, ElasticOptions, JobId};
    /// # let listener = Arc::new(TcpListener::bind("127.0.0.1:0")?);
    /// # let seeds = [listener.local_addr()?.to_string()];
    /// # let options = ElasticOptions::new(1..=1, seeds, JobId::new("alone")?).listener(listener);
    /// # let job = ElasticJob::join(options)?;
    /// // A collective has failed, and no rank was seen to be lost.
    /// job.suspect(1, &[]);
    /// assert_eq!(job.next_generation(1)?.members.len(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn suspect(&self, generation: u64, ranks: &[u32]) {
        self.tell(Event::Suspect { generation, ranks: ranks.to_vec() });
    }

    /// Waits until a generation after this number has this process, also if it was left out meanwhile and has joined
    /// again. Ends within [`join_timeout`](ElasticOptions::join_timeout) of the end of a generation.
    ///
    /// # Errors
    /// [`Error::TooFew`] if none was decided in time, with the reason: too few members are left, a majority of them is
    /// not there, or the register fails; also if this process has left. Its class is retryable. [`Error::Stopped`] if
    /// this process is told to [`stop`](ElasticOptions::stop).
    ///
    /// # Examples
    /// ```
    /// # use std::{net::TcpListener, sync::Arc};
    /// # use distribute_cluster::{CoordinationOptions, ElasticJob, ElasticOptions, JobId};
    /// # let listener = Arc::new(TcpListener::bind("127.0.0.1:0")?);
    /// # let seeds = [listener.local_addr()?.to_string()];
    /// # let options = ElasticOptions::new(1..=1, seeds, JobId::new("alone")?).listener(listener);
    /// # let job = ElasticJob::join(options)?;
    /// let first = job.next_generation(0)?;
    /// job.suspect(first.number, &[]);
    /// assert_eq!(job.next_generation(first.number)?.number, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn next_generation(&self, after: u64) -> Result<Generation> {
        let timeout = self.settings.join_timeout.saturating_add(Driver::MARGIN);
        let waited = self.settings.join_timeout;
        let control = self.control.clone();
        let failed = |ending| match ending {
            Ending::OfTheJob => Error::JobEnded { control },
            Ending::Stopped => Error::Stopped { control },
            Ending::OfThisProcess(problem) => Error::TooFew { control, waited, problem },
            Ending::Differs { address, options } => {
                let problem = format!("the process at {address}, of the same job, has others");
                let remedy = "Give all processes of the job the same members and authority (DISTRIBUTE_GENERATIONS).";
                Error::config("the options of an elastic job", problem, options, "the same options", remedy)
            }
        };
        self.shared
            .wait(after, timeout, self.stop.as_deref())
            .map(|generation| Generation::clone(&generation))
            .map_err(failed)
    }

    /// Asks whether this process may train in a generation from now on. It must have the state that the generation
    /// begins with, its own or [another member's](MemberStates), and must make no step before.
    ///
    /// This is what [`Generation::trained`] rests on: a process may not begin once it has proposed the next generation
    /// as one that follows on a generation that has not trained, and a step needs all members.
    ///
    /// # Errors
    /// [`Error::GenerationOver`] if the generation is over, or the next one is proposed; [`Error::Call`] if the thread
    /// of the job does not answer in time.
    ///
    /// # Examples
    /// ```
    /// # use std::{net::TcpListener, sync::Arc};
    /// # use distribute_cluster::{CoordinationOptions, ElasticJob, ElasticOptions, JobId};
    /// # let listener = Arc::new(TcpListener::bind("127.0.0.1:0")?);
    /// # let seeds = [listener.local_addr()?.to_string()];
    /// # let options = ElasticOptions::new(1..=1, seeds, JobId::new("alone")?).listener(listener);
    /// # let job = ElasticJob::join(options)?;
    /// job.begin_training(1)?;
    /// job.suspect(1, &[]);
    /// assert_eq!(job.next_generation(1)?.trained, 1);
    /// assert!(job.begin_training(1).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn begin_training(&self, generation: u64) -> Result<()> {
        let (answer, answered) = oneshot::channel();
        let requests = self.requests.clone();
        let begin = async move {
            requests.send(Request::BeginTraining { generation, answer }).await.ok()?;
            answered.await.ok()
        };
        match self.driver.call(begin, BEGINNING).flatten() {
            Some(true) => Ok(()),
            Some(false) => {
                let newer = (*self.shared.newest().borrow()).max(generation + 1);
                Err(Error::GenerationOver { task: self.control.clone(), generation, newer })
            }
            None => Err(unanswered(&self.control, "beginning to train")),
        }
    }

    /// Calls `callback` with the number of each generation that is decided from now on, so that collectives of the
    /// current one can be aborted; at once if one is known already that does not have this process. Callbacks are kept
    /// as long as the value, and run on the thread of the job. They must return soon; a panic in one is caught.
    ///
    /// # Examples
    /// ```
    /// # use std::{net::TcpListener, sync::Arc};
    /// # use distribute_cluster::{CoordinationOptions, ElasticJob, ElasticOptions, JobId};
    /// # let listener = Arc::new(TcpListener::bind("127.0.0.1:0")?);
    /// # let seeds = [listener.local_addr()?.to_string()];
    /// # let options = ElasticOptions::new(1..=1, seeds, JobId::new("alone")?).listener(listener);
    /// # let job = ElasticJob::join(options)?;
    /// let (tell, told) = std::sync::mpsc::channel();
    /// job.on_change(move |number| tell.send(number).expect("it is received"));
    /// job.suspect(1, &[]);
    /// assert_eq!(told.recv_timeout(std::time::Duration::from_secs(10))?, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn on_change(&self, callback: impl Fn(u64) + Send + Sync + 'static) {
        self.shared.on_change(Arc::new(callback));
    }

    /// Tells the register, if there is one, that the job has ended: processes that come too late then get
    /// [`Error::JobEnded`] at once. To be called when the work of all members is done, by at least one of them; members
    /// that wait for a generation get that error too.
    ///
    /// # Errors
    /// [`Error::Store`], or that of another register, if it cannot be reached; [`Error::Call`] if it does not answer
    /// within a few seconds.
    pub fn end(&self) -> Result<()> {
        let Some(register) = self.register.clone() else { return Ok(()) };
        let ending = async move { tokio::task::spawn_blocking(move || register.end()).await };
        match self.driver.call(ending, ENDING) {
            Some(Ok(ended)) => ended,
            _ => {
                let reason = "the register does not answer".to_owned();
                Err(Error::Call { task: self.control.clone(), what: "ending the job".to_owned(), reason })
            }
        }
    }

    /// Asks to be left out of the next generation, and waits until it is decided: a few windows, and 2 s. The request
    /// is not granted if fewer members would remain than there may be. The process must not join collectives of the
    /// generation any more; drop the value afterwards.
    ///
    /// # Examples
    /// ```
    /// # use std::{net::TcpListener, sync::Arc};
    /// # use distribute_cluster::{CoordinationOptions, ElasticJob, ElasticOptions, JobId};
    /// # let listener = Arc::new(TcpListener::bind("127.0.0.1:0")?);
    /// # let seeds = [listener.local_addr()?.to_string()];
    /// # let options = ElasticOptions::new(1..=1, seeds, JobId::new("alone")?).listener(listener);
    /// # let window = std::time::Duration::from_millis(10);
    /// # let job = ElasticJob::join(options.join_window(window).answer_window(window))?;
    /// // No other process could continue the job, so the request is not granted.
    /// job.leave();
    /// assert_eq!(job.generation().number, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn leave(&self) {
        self.tell(Event::Leave);
        let Settings { answer_window, join_window, .. } = self.settings;
        let timeout = answer_window * 4 + join_window + Duration::from_secs(2);
        if !self.driver.is_current() && !self.shared.wait_until_left(timeout) {
            tracing::warn!(control = self.control, "no generation without this process was decided in time");
        }
    }

    fn tell(&self, event: Event) {
        let requests = self.requests.clone();
        // The event loop ends only with this value.
        self.driver.call(async move { requests.send(Request::Event(event)).await.is_ok() }, Driver::MARGIN);
    }
}

/// Returns the error of a request to the thread of a job that has no answer.
fn unanswered(control: &str, what: &str) -> Error {
    let reason = "the thread of the elastic job does not answer".to_owned();
    Error::Call { task: control.to_owned(), what: what.to_owned(), reason }
}

/// How long the thread of the job may take to answer.
const BEGINNING: Duration = Duration::from_secs(5);

/// How long a register may take to record the job's end.
const ENDING: Duration = Duration::from_secs(15);

impl fmt::Debug for ElasticJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let generation = self.generation().number;
        f.debug_struct("ElasticJob").field("control", &self.control).field("generation", &generation).finish()
    }
}

#[cfg(test)]
mod tests;
