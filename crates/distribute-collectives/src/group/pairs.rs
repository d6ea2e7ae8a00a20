//! Point-to-point messages.

use std::sync::Arc;
use std::time::Instant;

use distribute_device::{BufferMut, BufferRef, DType, Element};

use super::children::ChildKey;
use super::job::JobMembership;
use super::join::MAX_CONNECT;
use super::{ProcessGroup, Request};
use crate::call::Kind;
use crate::engine::memory::{Borrowed, Counts};
use crate::sync::lock;
use crate::transport::{self, GroupIdentity};
use crate::{Error, Options, Rank, Result};

impl ProcessGroup {
    /// Sends values to another rank, which calls [`recv`](ProcessGroup::recv). Returns when the values are on their way
    /// or have arrived.
    ///
    /// Messages from one rank to another arrive in the order in which they were sent. They are independent of the
    /// group's other operations and of messages between other ranks, so several threads may send and receive at once.
    ///
    /// # Cost
    /// The first message of a pair connects it. Within one process the receiver copies directly from the sender's
    /// memory.
    ///
    /// # Errors
    /// [`Error::RankOutside`] if `to` is not a member or is this rank, [`Error::NotConnectable`] between processes of a
    /// group that met nowhere, and the errors of every operation: see [`ProcessGroup`]. Different lengths
    /// are a mismatch on the receiver; a sender in another process may have returned before.
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::{ProcessGroup, Rank};
    ///
    /// let ranks = ProcessGroup::local(2)?;
    /// std::thread::scope(|scope| {
    ///     scope.spawn(|| ranks[0].send(&[1.0, 2.0], Rank(1)).expect("rank 1 receives"));
    ///     let mut values = [0.0; 2];
    ///     ranks[1].recv(&mut values, Rank(0)).expect("rank 0 sends");
    ///     assert_eq!(values, [1.0, 2.0]);
    /// });
    /// # Ok::<(), distribute_collectives::Error>(())
    /// ```
    ///
    /// # Source
    /// `MPI_Send`, `ncclSend`; with rendezvous, not buffered.
    pub fn send<T: Element>(&self, values: &[T], to: Rank) -> Result<()> {
        let pair = self.pair(self.rank(), to)?;
        let mut none: [T; 0] = [];
        let (request, counts) = sending(T::DTYPE, values.len());
        pair.blocking(request, Borrowed::apart(BufferRef::from(values), BufferMut::from(&mut none[..]), counts))
    }

    /// Receives values from another rank, which calls [`send`](ProcessGroup::send).
    ///
    /// # Shapes
    /// `values` has the length of the values that the other rank sends.
    ///
    /// # Errors
    /// The errors of [`send`](ProcessGroup::send) occur in the same cases.
    pub fn recv<T: Element>(&self, values: &mut [T], from: Rank) -> Result<()> {
        let pair = self.pair(from, self.rank())?;
        let none: [T; 0] = [];
        let (request, counts) = receiving(T::DTYPE, values.len());
        pair.blocking(request, Borrowed::apart(BufferRef::from(&none[..]), BufferMut::from(values), counts))
    }

    /// Returns the group of a sender and a receiver, one of which is this rank.
    pub(super) fn pair(&self, from: Rank, to: Rank) -> Result<Arc<ProcessGroup>> {
        self.check_rank("rank", from)?;
        self.check_rank("rank", to)?;
        if from == to {
            return Err(Error::RankOutside {
                what: "a message to oneself: rank",
                given: to.0,
                world_size: self.world_size(),
            });
        }
        let (from, to) = (from.index(), to.index());
        if let Some(pair) = lock(&self.pairs).get(&(from, to)) {
            return Ok(pair.clone());
        }
        let pair = Arc::new(self.make_pair(from, to)?);
        Ok(lock(&self.pairs).entry((from, to)).or_insert(pair).clone())
    }

    fn make_pair(&self, from: usize, to: usize) -> Result<ProcessGroup> {
        let process = |rank: usize| rank / self.engine.context.local_ranks;
        let names = [from, to].map(|rank| self.rank_name(Rank::of(rank)).to_owned()).to_vec();
        let name = format!("{}/{from}-{to}", self.name());
        let options = Options { name, ..self.options.as_ref().clone() };
        if process(from) == process(to) {
            return self.make_local_pair(from, to, names, &options);
        }
        self.connect_pair(process(from), process(to), from == self.rank().index(), names, &options)
    }

    /// Takes the handle that the other rank has stored, or creates both and stores the other's.
    fn make_local_pair(&self, from: usize, to: usize, names: Vec<String>, options: &Options) -> Result<ProcessGroup> {
        let me = self.rank().index();
        let other = if me == from { to } else { from };
        let (mine, theirs) = (ChildKey::Pair(from, to, me), ChildKey::Pair(from, to, other));
        let handle = self.children.take_or_make(mine, theirs, || {
            let mut handles = ProcessGroup::local_named(names, options);
            let (receiver, sender) = (handles.swap_remove(1), handles.swap_remove(0));
            if me == from { (sender, receiver) } else { (receiver, sender) }
        })?;
        if self.engine.has_left(other - self.engine.context.first_rank) {
            drop(self.children.take(theirs));
        }
        Ok(handle)
    }

    /// Connects two processes: the sender publishes its address where the group met.
    fn connect_pair(
        &self,
        from: usize,
        to: usize,
        is_sender: bool,
        names: Vec<String>,
        options: &Options,
    ) -> Result<ProcessGroup> {
        let needs = "a place to meet";
        let not_connectable = Error::NotConnectable { what: "send", group: self.name().to_owned(), needs };
        let home = self.job().ok_or(not_connectable)?;
        let rendezvous = &home.rendezvous;
        let generation = home.generation;
        let key = format!("group/{}/{generation}/sender", options.name);
        let timeout = self.options.timeout.min(MAX_CONNECT);
        let deadline = Instant::now() + timeout;
        let (listener, mine, nonce) = self.open_listener()?;
        let (addresses, nonce) = match is_sender {
            true => {
                rendezvous.put(&key, format!("{nonce} {mine}").as_bytes())?;
                (vec![mine, String::new()], nonce)
            }
            false => {
                let endpoint = String::from_utf8_lossy(&rendezvous.get(&key, timeout)?).into_owned();
                let read = endpoint.split_once(' ').and_then(|(nonce, address)| Some((nonce.parse().ok()?, address)));
                let (nonce, address) = read.ok_or_else(|| Error::Disagreement {
                    group: options.name.clone(),
                    what: "protocol".into(),
                    here: names[1].clone(),
                    mine: "a nonce and an address".into(),
                    there: names[0].clone(),
                    theirs: endpoint.escape_debug().to_string().into(),
                })?;
                (vec![address.to_owned(), mine], nonce)
            }
        };
        let place = usize::from(!is_sender);
        let group = GroupIdentity { name: &options.name, nonce, proofs: self.proofs() };
        let kind = self.transport_kind("send")?;
        let transport = transport::open(kind, place, &addresses, listener, group, &names[place], deadline)?;
        let job = JobMembership {
            rendezvous: rendezvous.clone(),
            processes: vec![home.processes[from], home.processes[to]],
            generation,
        };
        super::first(ProcessGroup::connected(transport, place, 1, names, options, Some(job))?)
    }
}

pub(super) fn sending(dtype: DType, len: usize) -> (Request, Counts) {
    (message(dtype), Counts::Exchange { send: vec![0, len], receive: vec![0, 0] })
}

pub(super) fn receiving(dtype: DType, len: usize) -> (Request, Counts) {
    (message(dtype), Counts::Exchange { send: vec![0, 0], receive: vec![len, 0] })
}

/// The sender is rank 0 of its pair.
fn message(dtype: DType) -> Request {
    Request { root: Some(Rank(0)), ..Request::new(Kind::Send, dtype, 0) }
}
