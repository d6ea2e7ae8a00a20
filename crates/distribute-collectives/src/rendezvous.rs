//! How the processes of a group find each other.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use distribute_cluster::{Coordination, CoordinationOptions, FailureCause, Membership};

use crate::bridge::Job;
use crate::group::first;
use crate::team::Team;
use crate::transport::{self, ConnectError};
use crate::{Error, Options, ProcessGroup, Rank, Result};

impl ProcessGroup {
    /// The group that the environment describes: TF_CONFIG, else RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, else what
    /// Open MPI or Slurm set, else a group of this process alone.
    ///
    /// The members meet at the leader's coordination service; see [`distribute_cluster`] for the variables. Options come
    /// from [`Options::from_env`].
    ///
    /// # Errors
    /// [`Error::Cluster`] where the variables are wrong or members are missing, [`Error::Connect`] where sockets fail.
    pub fn from_env() -> Result<ProcessGroup> {
        let options = Options::from_env()?;
        let Some(membership) = Membership::from_env()? else {
            return first(ProcessGroup::local_with(1, &options)?);
        };
        let coordination = Coordination::start(&membership, CoordinationOptions::from_env()?)?;
        first(ProcessGroup::join(&Arc::new(coordination), 1, &options)?)
    }

    /// The `local_ranks` ranks of this process in a group of all members of a coordination service.
    ///
    /// Every member calls this with the same name and the same number of local ranks. Groups that live at the same time need
    /// names of their own; after an abort a group can be joined anew under its old name, as its next generation.
    ///
    /// # Errors
    /// [`Error::Cluster`] where members are missing, [`Error::Connect`] where sockets fail,
    /// [`Error::Disagreement`] where members were given different options.
    pub fn join(coordination: &Arc<Coordination>, local_ranks: usize, options: &Options) -> Result<Vec<ProcessGroup>> {
        let membership = coordination.membership();
        let processes = membership.world_size() as usize;
        let process = membership.rank as usize;
        if processes == 1 {
            return ProcessGroup::local_with(local_ranks, options);
        }
        let deadline = Instant::now() + options.timeout.min(MAX_CONNECT);
        let kind = options.transport;
        let tasks: Vec<String> = membership.tasks.iter().map(ToString::to_string).collect();
        let listener =
            listen(&coordination.local_host()).map_err(|error| error.into_error(&tasks[process], &options.name))?;
        let port = listener.local_addr().map_or(0, |address| address.port());
        let mine = Endpoint {
            transport: kind.name().to_owned(),
            local_ranks,
            generation: GENERATIONS.fetch_add(1, Ordering::Relaxed),
            address: join_host(&coordination.local_host(), port),
        };
        let key = format!("group/{}/endpoint", options.name);
        let all = coordination.exchange(&key, mine.encode().as_bytes(), options.timeout.min(MAX_CONNECT))?;
        let endpoints: Vec<Endpoint> = all.iter().map(|bytes| Endpoint::decode(bytes)).collect();
        for (other, endpoint) in endpoints.iter().enumerate() {
            mine.agree(endpoint, &options.name, &tasks[process], &tasks[other])?;
        }
        // The first member's word counts.
        let generation = endpoints.first().map_or(0, |endpoint| endpoint.generation);
        let addresses: Vec<String> = endpoints.into_iter().map(|endpoint| endpoint.address).collect();
        let group = (options.name.as_str(), group_id(&options.name, generation));
        let transport = transport::open(kind, process, &addresses, listener, group, &tasks[process], deadline)?;
        let names = (0..processes * local_ranks)
            .map(|rank| match local_ranks {
                1 => tasks[rank].clone(),
                _ => format!("{} replica {}", tasks[rank / local_ranks], rank % local_ranks),
            })
            .collect();
        tracing::info!(group = options.name, transport = transport.name(), processes, local_ranks, "group connected");
        let job = Job { coordination: coordination.clone(), processes: (0..processes).collect(), generation };
        ProcessGroup::bridged(transport, process, local_ranks, names, options, Some(job))
    }
}

impl Job {
    /// Aborts the group when the coordination service says that one of its processes has failed.
    pub(crate) fn watch(self, team: &Arc<Team>) {
        let (team, processes) = (Arc::downgrade(team), self.processes);
        self.coordination.on_failure(move |failure| {
            let process = processes.iter().position(|process| *process == failure.rank as usize);
            let (Some(team), Some(process)) = (team.upgrade(), process) else { return };
            let (peer, group) = (failure.task.to_string(), team.name.clone());
            let error = match &failure.cause {
                FailureCause::Lost { how, last_heard } => Error::PeerLost {
                    name: team.local_name(0),
                    peer_rank: Rank::of(process * team.local_ranks),
                    peer: peer.clone(),
                    during: "a pause between operations".to_owned(),
                    how: format!("{how} (last heard from {:.1} s ago)", last_heard.as_secs_f64()),
                },
                FailureCause::Reported(reason) => Error::aborted(&group, &peer, reason, failure.kind),
                _ => Error::aborted(&group, &peer, &failure.to_string(), failure.kind),
            };
            team.abort(&peer, &error);
        });
    }
}

/// Groups that this process has joined.
static GENERATIONS: AtomicU64 = AtomicU64::new(0);

/// Members of a group that is being formed have met already, so connecting takes no longer than this.
pub(crate) const MAX_CONNECT: Duration = Duration::from_secs(60);

/// What a member tells the others before they connect.
struct Endpoint {
    transport: String,
    local_ranks: usize,
    generation: u64,
    address: String,
}

impl Endpoint {
    fn encode(&self) -> String {
        format!("{} {} {} {}", self.transport, self.local_ranks, self.generation, self.address)
    }

    fn decode(bytes: &[u8]) -> Endpoint {
        let text = String::from_utf8_lossy(bytes);
        let mut words = text.splitn(4, ' ');
        let mut word = || words.next().unwrap_or_default().to_owned();
        Endpoint {
            transport: word(),
            local_ranks: word().parse().unwrap_or(0),
            generation: word().parse().unwrap_or(0),
            address: word(),
        }
    }

    fn agree(&self, other: &Endpoint, group: &str, here: &str, there: &str) -> Result<()> {
        let differ = |what, mine: String, theirs: String| Error::Disagreement {
            group: group.to_owned(),
            what,
            here: here.to_owned(),
            mine: mine.into(),
            there: there.to_owned(),
            theirs: theirs.into(),
        };
        if self.local_ranks != other.local_ranks {
            let (mine, theirs) = (self.local_ranks.to_string(), other.local_ranks.to_string());
            return Err(differ("number of replicas per process", mine, theirs));
        }
        if self.transport != other.transport {
            return Err(differ("transport", self.transport.clone(), other.transport.clone()));
        }
        Ok(())
    }
}

/// Listens where peers can reach this process: on the address of its host name, else on all interfaces.
pub(crate) fn listen(host: &str) -> Result<TcpListener, ConnectError> {
    TcpListener::bind((host, 0))
        .or_else(|_| TcpListener::bind("[::]:0"))
        .or_else(|_| TcpListener::bind("0.0.0.0:0"))
        .map_err(|source| ConnectError { action: "listen on a port of", address: host.to_owned(), source })
}

pub(crate) fn join_host(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Tells connections of one group from those of another. FNV-1a: collisions are harmless but for a clearer refusal.
pub(crate) fn group_id(name: &str, generation: u64) -> u64 {
    let bytes = name.bytes().chain(generation.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
