//! Sub-groups.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::ProcessGroup;
use super::children::ChildKey;
use super::job::JobMembership;
use super::join::MAX_CONNECT;
use super::reductions::check_len;
use crate::recorder::digest;
use crate::transport::{self, ConnectError, GroupIdentity, Nonce, Proofs, TransportKind, join_host, listen, new_nonce};
use crate::{Error, Options, Rank, Result};

/// Maximum length of a process's address with its port.
const ADDRESS_BYTES: usize = 280;

/// Bytes that each rank sends to the others: its address and a nonce. The nonce of a group's first rank is used.
const ENDPOINT_BYTES: usize = ADDRESS_BYTES + Nonce::LEN;

impl ProcessGroup {
    /// Divides the group: ranks that pass the same colour form a new group, ordered by `key` and then by their rank in
    /// this group. A rank that passes `None` gets no group.
    ///
    /// The new group is independent of this one: both can be used at the same time, from several threads.
    ///
    /// # Ordering
    /// Every rank of the group must call this.
    ///
    /// # Cost
    /// Three operations of this group, and new connections between the processes of each new group.
    ///
    /// # Errors
    /// [`Error::Connect`] if processes cannot be connected, [`Error::NotConnectable`] if the transport was supplied by
    /// the user, and the errors of every operation: see [`ProcessGroup`].
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::{ProcessGroup, ReduceOp};
    ///
    /// let ranks = ProcessGroup::local(4)?;
    /// std::thread::scope(|scope| {
    ///     for group in &ranks {
    ///         scope.spawn(move || {
    ///             let me = group.rank().0;
    ///             let half = group.split(Some(me % 2), 0).expect("all ranks split").expect("all have a colour");
    ///             let mut sum = [me];
    ///             half.all_reduce(&mut sum, ReduceOp::Sum).expect("both ranks of the half take part");
    ///             assert_eq!(sum, [if me % 2 == 0 { 0 + 2 } else { 1 + 3 }]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), distribute_collectives::Error>(())
    /// ```
    ///
    /// # Source
    /// `MPI_Comm_split`, `ncclCommSplit`.
    pub fn split(&self, color: Option<u32>, key: i32) -> Result<Option<ProcessGroup>> {
        let split = self.splits.fetch_add(1, Ordering::Relaxed);
        let mine = [color.map_or(-1, i64::from), i64::from(key)];
        let mut all = vec![0i64; 2 * self.world_size()];
        self.all_gather(&mine, &mut all)?;
        let mut members: Vec<usize> =
            (0..self.world_size()).filter(|rank| mine[0] >= 0 && all[2 * rank] == mine[0]).collect();
        members.sort_by_key(|rank| (all[2 * rank + 1], *rank));
        self.form(split, &members, mine[0])
    }

    /// Creates a group of the given ranks, in the given order. Returns `None` on all other ranks.
    ///
    /// # Ordering
    /// Every rank of this group must call it. Those of one new group pass the same ranks; several groups without common
    /// ranks can be created at once, and ranks of none of them may pass any list in which they are not.
    ///
    /// # Errors
    /// [`Error::RankOutside`] for a rank that is not in the group or occurs twice, [`Error::Length`] if a rank of the
    /// new group has passed other ranks or another order, and the errors of [`split`](ProcessGroup::split).
    ///
    /// # Source
    /// `MPI_Group_incl` with `MPI_Comm_create`; `torch.distributed.new_group`.
    pub fn subgroup(&self, ranks: &[Rank]) -> Result<Option<ProcessGroup>> {
        for (place, rank) in ranks.iter().enumerate() {
            self.check_rank("rank", *rank)?;
            if ranks[..place].contains(rank) {
                return Err(Error::RankOutside {
                    what: "second occurrence of rank",
                    given: rank.0,
                    world_size: self.world_size(),
                });
            }
        }
        let place = ranks.iter().position(|rank| *rank == self.rank());
        let color = digest(&format!("{ranks:?}")) as u32;
        let key = place.and_then(|place| i32::try_from(place).ok()).unwrap_or(0);
        let formed = self.split(place.map(|_| color), key)?;
        if let Some(group) = &formed {
            let remedy = "some of its ranks have passed other ranks, or another order; pass the same on all of them";
            check_len("ranks of a subgroup", group.world_size(), ranks.len(), remedy)?;
        }
        Ok(formed)
    }

    /// Performs the last two steps of a split: leaders send their listening addresses, connect, and store handles for
    /// the other ranks of their processes.
    fn form(&self, split: u64, members: &[usize], color: i64) -> Result<Option<ProcessGroup>> {
        let me = self.rank().index();
        let placement = Placement::new(members, self.engine.context.local_ranks);
        let leads = members.contains(&me) && placement.leader_of(members, me) == me;
        let leads_far = leads && placement.processes.len() > 1;
        let listening = leads_far.then(|| self.open_listener());
        let mut endpoint = vec![0u8; ENDPOINT_BYTES];
        if let Some(Ok((_, text, nonce))) = &listening {
            endpoint[..text.len()].copy_from_slice(text.as_bytes());
            endpoint[ADDRESS_BYTES..].copy_from_slice(&nonce.to_bytes());
        }
        let mut endpoints = vec![0u8; ENDPOINT_BYTES * self.world_size()];
        self.all_gather(&endpoint, &mut endpoints)?;
        if leads {
            let names = members.iter().map(|rank| self.rank_name(Rank::of(*rank)).to_owned()).collect();
            let name = format!("{}/{split}.{color}", self.name());
            let options = Options { name, ..self.options.as_ref().clone() };
            let made = match listening {
                None => Ok(ProcessGroup::local_named(names, &options)),
                Some(listening) => listening.and_then(|(listener, ..)| {
                    self.connect(&placement, members, names, listener, &endpoints, &options)
                }),
            };
            let block = placement.block_of(members, me);
            match made {
                Ok(handles) => {
                    let keys = block.into_iter().map(|rank| ChildKey::Split(split, rank));
                    self.children.leave(keys.zip(handles.into_iter().map(Ok)));
                }
                Err(error) => {
                    let keys = block.into_iter().map(|rank| ChildKey::Split(split, rank));
                    self.children.leave(keys.map(|key| (key, Err(error.clone()))));
                }
            }
        }
        self.barrier()?;
        self.children.take(ChildKey::Split(split, me)).transpose()
    }

    /// Opens a listener that peers can reach. Returns it with its address and a nonce for the group that connects
    /// there.
    pub(super) fn open_listener(&self) -> Result<(std::net::TcpListener, String, Nonce)> {
        let needs = "a transport that knows this host's address";
        let not_connectable = || Error::NotConnectable { what: "split", group: self.name().to_owned(), needs };
        let host = self.engine.inter_process().and_then(|stage| stage.local_host()).ok_or_else(not_connectable)?;
        let name = self.rank_name(self.rank());
        let failed = |error: ConnectError| error.into_error(name, self.name());
        let listener = listen(host).map_err(failed)?;
        let nonce = new_nonce().map_err(failed)?;
        let port = listener.local_addr().map_or(0, |address| address.port());
        let address = join_host(host, port);
        if address.len() <= ADDRESS_BYTES { Ok((listener, address, nonce)) } else { Err(not_connectable()) }
    }

    /// Returns by what connections of a new group are recognised: by what those of this one are.
    pub(crate) fn proofs(&self) -> Proofs {
        self.engine.inter_process().map(|stage| stage.proofs()).unwrap_or_default()
    }

    /// Returns the transport of a new group: the kind that this one was opened with, which is the same on all ranks.
    /// Its name is not: a process that is alone on its host shares no memory, although others do.
    pub(super) fn transport_kind(&self, what: &'static str) -> Result<TransportKind> {
        let needs = "a transport of this crate";
        let not_connectable = || Error::NotConnectable { what, group: self.name().to_owned(), needs };
        self.engine.inter_process().and_then(|stage| stage.kind()).ok_or_else(not_connectable)
    }

    fn connect(
        &self,
        placement: &Placement,
        members: &[usize],
        names: Vec<String>,
        listener: std::net::TcpListener,
        endpoints: &[u8],
        options: &Options,
    ) -> Result<Vec<ProcessGroup>> {
        let me = self.rank().index();
        let endpoint =
            |leader: usize| endpoints[leader * ENDPOINT_BYTES..(leader + 1) * ENDPOINT_BYTES].split_at(ADDRESS_BYTES);
        let address = |leader: &usize| String::from_utf8_lossy(endpoint(*leader).0).trim_end_matches('\0').to_owned();
        let leaders: Vec<usize> = placement.processes.iter().map(|block| members[block.start]).collect();
        let process = leaders.iter().position(|leader| *leader == me).unwrap_or(0);
        let addresses: Vec<String> = leaders.iter().map(address).collect();
        // The other ranks wait in the barrier, whose deadline starts now.
        let deadline = Instant::now() + (self.options.timeout / 2).min(MAX_CONNECT);
        let generation = self.job().map_or(0, |job| job.generation);
        // Every group has a first process.
        let nonce = leaders.first().map_or([0; Nonce::LEN], |first| endpoint(*first).1.try_into().unwrap_or_default());
        let group = GroupIdentity { name: &options.name, nonce: Nonce::from_bytes(nonce), proofs: self.proofs() };
        let kind = self.transport_kind("split")?;
        let name = self.rank_name(self.rank());
        let transport = transport::open(kind, process, &addresses, listener, group, name, deadline)?;
        let local_ranks = placement.processes[process].len();
        let home = |leader: &usize| leader / self.engine.context.local_ranks;
        let job = self.job().map(|job| JobMembership {
            rendezvous: job.rendezvous.clone(),
            processes: leaders.iter().map(|leader| job.processes[home(leader)]).collect(),
            generation,
        });
        ProcessGroup::connected(transport, process, local_ranks, names, options, job)
    }
}

/// The distribution of a new group's members over processes: runs of its ranks that one process holds, all of equal
/// length.
///
/// If runs would differ in length, or a process would hold two of them, every rank counts as its own process. This is
/// always correct, but ranks of one process then communicate through the transport.
struct Placement {
    processes: Vec<std::ops::Range<usize>>,
}

impl Placement {
    fn new(members: &[usize], local_ranks: usize) -> Placement {
        let process = |place: usize| members[place] / local_ranks;
        let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
        for place in 0..members.len() {
            match runs.last_mut() {
                Some(run) if process(run.start) == process(place) => run.end = place + 1,
                _ => runs.push(place..place + 1),
            }
        }
        let even = runs.iter().all(|run| run.len() == runs[0].len());
        let mut homes: Vec<usize> = runs.iter().map(|run| process(run.start)).collect();
        homes.sort_unstable();
        homes.dedup();
        let processes =
            if even && homes.len() == runs.len() { runs } else { (0..members.len()).map(|at| at..at + 1).collect() };
        Placement { processes }
    }

    /// Returns the ranks of the parent that share a process of the new group with `rank`.
    fn block_of(&self, members: &[usize], rank: usize) -> Vec<usize> {
        let place = members.iter().position(|member| *member == rank);
        let run = place.and_then(|place| self.processes.iter().find(|run| run.contains(&place)));
        run.map_or_else(Vec::new, |run| members[run.clone()].to_vec())
    }

    fn leader_of(&self, members: &[usize], rank: usize) -> usize {
        self.block_of(members, rank).first().copied().unwrap_or(rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(members: &[usize], local_ranks: usize) -> Vec<usize> {
        Placement::new(members, local_ranks).processes.iter().map(ExactSizeIterator::len).collect()
    }

    #[test]
    fn ranks_of_one_process_stay_together_where_that_is_even() {
        assert_eq!(runs(&[0, 1, 2, 3], 2), [2, 2]);
        assert_eq!(runs(&[3, 2, 1, 0], 2), [2, 2]);
        assert_eq!(runs(&[0, 1], 4), [2]);
        assert_eq!(runs(&[0, 2], 2), [1, 1]);
        // Uneven, and interleaved.
        assert_eq!(runs(&[0, 1, 2], 2), [1, 1, 1]);
        assert_eq!(runs(&[0, 2, 1, 3], 2), [1, 1, 1, 1]);
        assert!(runs(&[], 2).is_empty());
    }
}
