//! Groups of several processes: how members find each other and compare their options.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use distribute_cluster::secret::warn_if_exposed;
use distribute_cluster::{FileStore, Membership, Rendezvous, StoreRendezvous};
use serde::{Deserialize, Serialize};

use super::job::JobMembership;
use super::{ProcessGroup, first};
use crate::transport::{self, GroupIdentity, Nonce, Proofs, join_host, listen, new_nonce};
use crate::{Error, Options, Result, environment};

impl ProcessGroup {
    /// Joins the group that the environment describes: TF_CONFIG, else RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT,
    /// else the variables of Open MPI or Slurm, else a group of this process alone.
    ///
    /// The members meet at the leader's coordination service (feature `coordination`, enabled by default), or in the
    /// folder that DISTRIBUTE_STORE names, `file:/shared/folder`: see [`distribute_cluster`]. Jobs that meet in one
    /// folder are kept apart by their identities, so that the folder needs DISTRIBUTE_JOB_ID where no scheduler gives
    /// one. Options are read by [`Options::from_env`].
    ///
    /// # Errors
    /// [`Error::Cluster`] if the variables are invalid, members are missing, the folder cannot be used or the job has
    /// no identity for it, [`Error::UnknownName`] if DISTRIBUTE_STORE is malformed, [`Error::NotBuilt`] if it is not
    /// set and the feature is off, [`Error::Connect`] if sockets fail.
    pub fn from_env() -> Result<ProcessGroup> {
        let options = Options::from_env()?;
        let Some(membership) = Membership::from_env()? else {
            return first(ProcessGroup::local_with(1, &options)?);
        };
        match environment::text(STORE).filter(|given| !given.trim().is_empty()) {
            None => first(ProcessGroup::join(&coordination(&membership)?, 1, &options)?),
            Some(given) => {
                let store = store(&given, &membership.task().to_string())?;
                let meeting = StoreRendezvous::start(store, membership, options.timeout.min(MAX_MEET))?;
                first(ProcessGroup::join(&Arc::new(meeting), 1, &options)?)
            }
        }
    }

    /// Joins a group of all members that meet at `rendezvous`, with `local_ranks` ranks of this process.
    ///
    /// Every member calls this with the same name and the same number of local ranks. Groups that exist at the same
    /// time need different names. After an abort a group can be joined again under its old name, as its next
    /// generation.
    ///
    /// # Errors
    /// [`Error::Cluster`] if members are missing, [`Error::Connect`] if sockets fail, [`Error::Disagreement`] if
    /// members were given different options, [`Error::Secret`] if they do not have the same secret.
    ///
    /// # Examples
    /// Two processes that reach one folder and nothing else need no address of a leader:
    /// ```
    /// use std::sync::Arc;
    /// use std::time::Duration;
    /// use distribute_cluster::{FileStore, JobId, Membership, StoreRendezvous};
    /// use distribute_collectives::{Options, ProcessGroup, ReduceOp};
    ///
    /// let folder = tempfile::tempdir()?;
    /// let process = |rank| {
    ///     let store = FileStore::new(folder.path())?;
    ///     let membership = Membership::new(rank, 2, "127.0.0.1:1")?.with_job_id(JobId::new("sum-1")?);
    ///     let meeting = Arc::new(StoreRendezvous::start(store, membership, Duration::from_secs(10))?);
    ///     let group = ProcessGroup::join(&meeting, 1, &Options::default())?.remove(0);
    ///     let mut values = [1.0 + rank as f32];
    ///     group.all_reduce(&mut values, ReduceOp::Sum)?;
    ///     Ok::<_, Box<dyn std::error::Error + Send + Sync>>(values)
    /// };
    /// # std::thread::scope(|scope| {
    /// #     let ranks = [0, 1].map(|rank| scope.spawn(move || process(rank)));
    /// #     ranks.map(|rank| assert_eq!(rank.join().unwrap().unwrap(), [3.0]));
    /// # });
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn join<R: Rendezvous + 'static>(
        rendezvous: &Arc<R>,
        local_ranks: usize,
        options: &Options,
    ) -> Result<Vec<ProcessGroup>> {
        ProcessGroup::join_at(rendezvous.clone(), local_ranks, options)
    }

    fn join_at(rendezvous: Arc<dyn Rendezvous>, local_ranks: usize, options: &Options) -> Result<Vec<ProcessGroup>> {
        let membership = rendezvous.membership();
        let processes = membership.world_size() as usize;
        let process = membership.rank as usize;
        if processes == 1 {
            return ProcessGroup::local_with(local_ranks, options);
        }
        let kind = options.transport;
        let tasks: Vec<String> = membership.tasks.iter().map(ToString::to_string).collect();
        let listener =
            listen(&rendezvous.local_host()).map_err(|error| error.into_error(&tasks[process], &options.name))?;
        let bound = listener.local_addr().ok();
        let port = bound.map_or(0, |address| address.port());
        let proofs = Proofs { secret: rendezvous.secret(), tls: rendezvous.tls() };
        let service = format!("{}, for the members of its process groups,", tasks[process]);
        let bound = bound.map(|address| address.ip());
        warn_if_exposed(&service, bound, (proofs.secret.as_ref(), proofs.tls.as_ref()), "DISTRIBUTE_JOB_SECRET_FILE");
        let nonce = new_nonce().map_err(|error| error.into_error(&tasks[process], &options.name))?;
        let mine = Endpoint {
            options: Agreed::new(options, local_ranks),
            generation: GENERATIONS.fetch_add(1, Ordering::Relaxed),
            nonce,
            address: join_host(&rendezvous.local_host(), port),
        };
        let key = format!("group/{}/endpoint", options.name);
        let all = rendezvous.exchange(&key, &mine.encode(), options.timeout.min(MAX_CONNECT))?;
        // All members are there only now: the time that the last one took to come is not that of connecting.
        let deadline = Instant::now() + options.timeout.min(MAX_CONNECT);
        let mut endpoints: Vec<Endpoint> = Vec::with_capacity(all.len());
        for (other, bytes) in all.iter().enumerate() {
            let endpoint = Endpoint::decode(bytes).ok_or_else(|| Error::Disagreement {
                group: options.name.clone(),
                what: "protocol".into(),
                here: tasks[process].clone(),
                mine: PROTOCOL.into(),
                there: tasks[other].clone(),
                theirs: "one that this version cannot read".into(),
            })?;
            mine.options.compare(&endpoint.options, &options.name, &tasks[process], &tasks[other])?;
            endpoints.push(endpoint);
        }
        // The first member's generation and nonce are used.
        let (generation, nonce) = endpoints.first().map_or((0, nonce), |first| (first.generation, first.nonce));
        let addresses: Vec<String> = endpoints.into_iter().map(|endpoint| endpoint.address).collect();
        let group = GroupIdentity { name: &options.name, nonce, proofs };
        let transport = transport::open(kind, process, &addresses, listener, group, &tasks[process], deadline)?;
        let names = (0..processes * local_ranks)
            .map(|rank| match local_ranks {
                1 => tasks[rank].clone(),
                _ => format!("{} replica {}", tasks[rank / local_ranks], rank % local_ranks),
            })
            .collect();
        tracing::info!(group = options.name, transport = transport.name(), processes, local_ranks, "group connected");
        let job = JobMembership { rendezvous, processes: (0..processes).collect(), generation };
        ProcessGroup::connected(transport, process, local_ranks, names, options, Some(job))
    }
}

/// The variable that names the store at which members meet.
const STORE: &str = "DISTRIBUTE_STORE";

/// Limit for meeting at a store; `join_timeout` of the coordination service has the same default.
const MAX_MEET: Duration = Duration::from_secs(300);

/// Joins the coordination service of the job.
#[cfg(feature = "coordination")]
fn coordination(membership: &Membership) -> Result<Arc<distribute_cluster::Coordination>> {
    use distribute_cluster::{Coordination, CoordinationOptions};
    Ok(Arc::new(Coordination::start(membership, CoordinationOptions::from_env()?)?))
}

/// Joins the coordination service of the job, which is not built.
#[cfg(not(feature = "coordination"))]
fn coordination(_: &Membership) -> Result<Arc<StoreRendezvous<FileStore>>> {
    let needed = "the coordination service, at which members meet if DISTRIBUTE_STORE is not set,";
    Err(Error::NotBuilt { needed, feature: "coordination" })
}

/// Returns the store of a value of DISTRIBUTE_STORE.
fn store(given: &str, task: &str) -> Result<FileStore> {
    let folder = given.trim().strip_prefix("file:").filter(|folder| !folder.is_empty());
    let expected = "file:FOLDER, with a folder that all tasks reach and may write";
    let folder = folder.ok_or_else(|| Error::UnknownName { what: STORE, given: given.to_owned(), expected })?;
    FileStore::new(folder).map_err(|source| {
        let (task, what) = (task.to_owned(), format!("{STORE} {given}"));
        Error::from(distribute_cluster::Error::Store { task, what, source })
    })
}

/// Number of groups that this process has joined.
static GENERATIONS: AtomicU64 = AtomicU64::new(0);

/// Time limit for connecting the members of a group, after they have met.
pub(super) const MAX_CONNECT: Duration = Duration::from_secs(60);

/// The protocol between members of a group; members with different protocols cannot read each other's messages.
const PROTOCOL: &str = concat!("distribute-collectives ", env!("CARGO_PKG_VERSION"), ", messages dst2");

/// The information that each member publishes before it connects: options, address, and the group's identity if it is
/// the first.
#[derive(Serialize, Deserialize)]
struct Endpoint {
    options: Agreed,
    generation: u64,
    #[serde(with = "as_text")]
    nonce: Nonce,
    address: String,
}

/// Bytes of gradients for which members compare the sizes of their packs, which may be any function of the total. It is
/// large enough that different numbers of packs are of different sizes.
const SAMPLE_BYTES: usize = 1 << 30;

/// The options that change what members of a group send, by name; all members must be given the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Agreed(Vec<(String, String)>);

impl Agreed {
    fn new(options: &Options, local_ranks: usize) -> Agreed {
        // Every option is named here, so that a new one cannot be forgotten.
        let Options {
            name: _,
            // Members may have different timeouts.
            timeout: _,
            transport,
            algorithm,
            link,
            cross_device_ops,
            bytes_per_pack,
            device_implementation,
        } = options;
        let own = "default".to_owned();
        let packs = cross_device_ops.as_ref().and_then(|ops| ops.bytes_per_pack(SAMPLE_BYTES));
        let packs = packs.map(|bytes| format!("{bytes} of {SAMPLE_BYTES} bytes"));
        let implementation = cross_device_ops.as_ref().and_then(|ops| ops.device_implementation());
        let implementation = implementation.map(|implementation| format!("{implementation:?}"));
        let fields = [
            ("protocol", PROTOCOL.to_owned()),
            ("number of replicas per process", local_ranks.to_string()),
            ("transport", transport.name().to_owned()),
            ("algorithm", algorithm.name().to_owned()),
            ("link figures", link.as_ref().map_or(own.clone(), ToString::to_string)),
            ("cross-device operations", cross_device_ops.as_ref().map_or(own.clone(), |ops| ops.name().to_owned())),
            ("packs of the cross-device operations", packs.unwrap_or(own.clone())),
            ("device implementation of the cross-device operations", implementation.unwrap_or(own.clone())),
            ("bytes per pack", bytes_per_pack.map_or(own, |bytes| bytes.to_string())),
            ("device implementation", format!("{device_implementation:?}")),
        ];
        Agreed(fields.map(|(name, value)| (name.to_owned(), value)).to_vec())
    }

    /// Returns [`Error::Disagreement`] for the first option that differs.
    fn compare(&self, other: &Agreed, group: &str, here: &str, there: &str) -> Result<()> {
        let value =
            |of: &Agreed, index: usize| of.0.get(index).map_or("missing".into(), |(_, value)| value.as_str().into());
        let Some(index) = (0..self.0.len().max(other.0.len())).find(|index| self.0.get(*index) != other.0.get(*index))
        else {
            return Ok(());
        };
        let what = self.0.get(index).or(other.0.get(index)).map_or("", |(name, _)| name);
        Err(Error::Disagreement {
            group: group.to_owned(),
            what: what.into(),
            here: here.to_owned(),
            mine: value(self, index),
            there: there.to_owned(),
            theirs: value(other, index),
        })
    }
}

impl Endpoint {
    fn encode(&self) -> Vec<u8> {
        // Serializing texts and numbers cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    fn decode(bytes: &[u8]) -> Option<Endpoint> {
        serde_json::from_slice(bytes).ok()
    }
}

/// Reads the information of another process, for fuzzers.
#[cfg(any(test, fuzzing))]
pub(crate) fn endpoint(bytes: &[u8]) -> bool {
    let Some(endpoint) = Endpoint::decode(bytes) else { return false };
    let again = Endpoint::decode(&endpoint.encode()).expect("it was encoded");
    assert_eq!(
        (again.generation, again.nonce, again.options == endpoint.options),
        (endpoint.generation, endpoint.nonce, true)
    );
    assert_eq!(again.address, endpoint.address);
    let ours = Agreed::new(&Options::default(), 1);
    assert_eq!(ours.compare(&endpoint.options, "group", "here", "there").is_ok(), ours == endpoint.options);
    true
}

/// Returns what a member publishes, for the corpus.
#[cfg(test)]
pub(crate) fn sample() -> Vec<u8> {
    let (options, address) = (Agreed::new(&Options::default(), 1), "127.0.0.1:2222".to_owned());
    Endpoint { options, generation: 1, nonce: Nonce::from_bytes([7; 16]), address }.encode()
}

/// Serializes numbers as text.
mod as_text {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use crate::transport::Nonce;

    pub(super) fn serialize<S: Serializer>(nonce: &Nonce, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(nonce)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<Nonce, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use distribute_cluster::{Failure, JobId, JobSecret, JobTls};

    use super::*;
    use crate::schedule::Link;
    use crate::{Algorithm, HierarchicalCopyAllReduce, ReductionToOneDevice, TransportKind};

    /// A place where the last member comes just before the timeout.
    struct Late(StoreRendezvous<FileStore>);

    impl Rendezvous for Late {
        fn membership(&self) -> &Membership {
            self.0.membership()
        }

        fn local_host(&self) -> String {
            self.0.local_host()
        }

        fn put(&self, key: &str, value: &[u8]) -> distribute_cluster::Result<()> {
            self.0.put(key, value)
        }

        fn get(&self, key: &str, timeout: Duration) -> distribute_cluster::Result<Vec<u8>> {
            self.0.get(key, timeout)
        }

        fn exchange(&self, key: &str, value: &[u8], timeout: Duration) -> distribute_cluster::Result<Vec<Vec<u8>>> {
            let all = self.0.exchange(key, value, Duration::from_secs(20));
            thread::sleep(timeout);
            all
        }

        fn on_failure(&self, callback: Box<dyn Fn(&Failure) + Send + Sync>) {
            self.0.on_failure(callback);
        }

        fn secret(&self) -> Option<JobSecret> {
            self.0.secret()
        }

        fn tls(&self) -> Option<JobTls> {
            self.0.tls()
        }
    }

    #[test]
    fn the_time_for_connecting_begins_when_the_members_have_met() {
        let folder = tempfile::tempdir().unwrap();
        let join = |rank| {
            let store = FileStore::new(folder.path()).unwrap();
            let job = JobId::new("late").unwrap();
            let membership = Membership::new(rank, 2, "127.0.0.1:1").unwrap().with_job_id(job);
            let meeting = StoreRendezvous::start(store, membership, Duration::from_secs(20)).unwrap();
            let options = Options::default().timeout(Duration::from_millis(500)).transport(TransportKind::Tcp);
            ProcessGroup::join(&Arc::new(Late(meeting)), 1, &options).map(|ranks| ranks.len())
        };
        thread::scope(|scope| {
            let join = &join;
            let members = [0, 1].map(|rank| scope.spawn(move || join(rank)));
            let joined = members.map(|member| member.join().unwrap());
            assert!(joined.iter().all(|joined| matches!(joined, Ok(1))), "{joined:?}");
        });
    }

    #[test]
    fn every_option_that_changes_what_travels_is_compared_by_name() {
        let mine = Options::default();
        let packs = |num_packs| Options {
            cross_device_ops: Some(HierarchicalCopyAllReduce::new(num_packs).into()),
            ..Options::default()
        };
        let changes: [(&str, usize, Options); 7] = [
            ("number of replicas per process", 3, mine.clone()),
            ("transport", 2, Options { transport: TransportKind::Tcp, ..mine.clone() }),
            ("algorithm", 2, Options { algorithm: Algorithm::Tree, ..mine.clone() }),
            ("link figures", 2, Options { link: Some(Link::GRPC), ..mine.clone() }),
            (
                "cross-device operations",
                2,
                Options { cross_device_ops: Some(ReductionToOneDevice::new().into()), ..mine.clone() },
            ),
            ("bytes per pack", 2, Options { bytes_per_pack: Some(17), ..mine.clone() }),
            (
                "device implementation",
                2,
                Options { device_implementation: crate::DeviceImplementation::Host, ..mine.clone() },
            ),
        ];
        let here = Agreed::new(&mine, 2);
        assert!(here.compare(&Agreed::new(&mine, 2), "g", "a", "b").is_ok());
        for (name, local_ranks, options) in changes {
            let error = here.compare(&Agreed::new(&options, local_ranks), "g", "worker:0", "worker:1").unwrap_err();
            let Error::Disagreement { what, mine, theirs, .. } = &error else { panic!("{error}") };
            assert!(&**what == name && mine != theirs, "{error}");
        }
        let error = Agreed::new(&packs(1), 2).compare(&Agreed::new(&packs(4), 2), "g", "a", "b").unwrap_err();
        let Error::Disagreement { what, mine, theirs, .. } = &error else { panic!("{error}") };
        assert_eq!(&**what, "packs of the cross-device operations");
        assert_eq!((&**mine, &**theirs), ("1073741824 of 1073741824 bytes", "268435456 of 1073741824 bytes"));
    }

    #[test]
    fn an_endpoint_reads_back_and_other_bytes_do_not() {
        let nonce = Nonce::new().unwrap();
        let options = Agreed::new(&Options::default(), 1);
        let endpoint = Endpoint { options: options.clone(), generation: 3, nonce, address: "[::1]:80".to_owned() };
        let read = Endpoint::decode(&endpoint.encode()).unwrap();
        assert_eq!(
            (read.options, read.generation, read.nonce, read.address),
            (options, 3, nonce, "[::1]:80".to_owned())
        );
        // The form of an earlier version.
        assert!(Endpoint::decode(b"auto 1 0 127.0.0.1:80").is_none());
    }
}
