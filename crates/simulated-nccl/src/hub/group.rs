//! The ranks of one communicator, and their pending calls. Independent of sockets.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use nccl_sys::{Code, DataType, RedOp};

use crate::failure::Failure;
use crate::reduce::reduce;
use crate::wire::{Answer, Call, Key, Kind, Membership, Request};

/// A communicator as its hub sees it.
#[derive(Debug)]
pub(super) struct Group {
    id: u64,
    /// The connection of each rank.
    members: Vec<u64>,
    left: Vec<bool>,
    broken: bool,
    rounds: HashMap<Key, Round>,
    mail: HashMap<(u32, u32, Key), Half>,
    splits: HashMap<Key, BTreeMap<u32, (u64, i32, i32)>>,
    shrinks: HashMap<(Key, Vec<u32>), BTreeMap<u32, u64>>,
}

/// A message to one connection.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) connection: u64,
    pub(super) answer: Answer,
    pub(super) data: Arc<Vec<u8>>,
}

/// A collective operation that some ranks have not called yet.
#[derive(Debug)]
struct Round {
    call: Call,
    caller: u32,
    parts: BTreeMap<u32, (u64, Vec<u8>)>,
}

/// One side of a message whose other side has not called yet; the receiver has no data.
#[derive(Debug)]
struct Half {
    tag: u64,
    data_type: i32,
    count: u64,
    data: Option<Vec<u8>>,
}

impl Group {
    pub(super) fn new(id: u64, members: Vec<u64>) -> Self {
        let left = vec![false; members.len()];
        let (rounds, mail, splits, shrinks) = Default::default();
        Self { id, members, left, broken: false, rounds, mail, splits, shrinks }
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn rank_of(&self, connection: u64) -> Option<u32> {
        self.members.iter().position(|member| *member == connection).and_then(|rank| rank.try_into().ok())
    }

    pub(super) fn is_over(&self) -> bool {
        self.left.iter().all(|left| *left)
    }

    /// Handles a rank's request; new communicators are numbered after `last`.
    pub(super) fn handle(
        &mut self,
        rank: u32,
        request: Request,
        data: Vec<u8>,
        last: &mut u64,
    ) -> (Vec<Reply>, Vec<Self>) {
        match request {
            Request::Leave { aborted, .. } => return (self.leave(rank, aborted), Vec::new()),
            Request::Shrink { tag, key, excluded, .. } => return self.shrink(rank, tag, key, excluded, last),
            // Waiters keep waiting until their communicator is aborted.
            _ if self.broken => return (Vec::new(), Vec::new()),
            _ => {}
        }
        let replies = match request {
            Request::Collective { tag, key, call, .. } => self.collective(rank, tag, key, call, data),
            Request::Send { tag, key, peer, data_type, count, .. } => {
                self.message((rank, peer, key), Half { tag, data_type, count, data: Some(data) })
            }
            Request::Recv { tag, key, peer, data_type, count, .. } => {
                self.message((peer, rank, key), Half { tag, data_type, count, data: None })
            }
            Request::Split { tag, key, color, order, .. } => return self.split(rank, tag, key, color, order, last),
            Request::Hello { .. } | Request::Shrink { .. } | Request::Leave { .. } => Vec::new(),
        };
        (replies, Vec::new())
    }

    /// Handles the end of a connection; if its rank had not left, the others are told.
    pub(super) fn lost(&mut self, connection: u64) -> Vec<Reply> {
        match self.rank_of(connection) {
            Some(rank) if !self.left[rank as usize] => self.leave(rank, true),
            _ => Vec::new(),
        }
    }

    fn leave(&mut self, rank: u32, broken: bool) -> Vec<Reply> {
        self.left[rank as usize] = true;
        match broken {
            true => self.break_up(Failure::new(Code::REMOTE_ERROR, format!("rank {rank} has ended or aborted"))),
            false => Vec::new(),
        }
    }

    fn break_up(&mut self, failure: Failure) -> Vec<Reply> {
        self.broken = true;
        let answer = Answer::Broken { group: self.id, failure };
        let here = self.members.iter().zip(&self.left).filter(|(_, left)| !**left);
        here.map(|(member, _)| Reply { connection: *member, answer: answer.clone(), data: Arc::default() }).collect()
    }

    fn collective(&mut self, rank: u32, tag: u64, key: Key, call: Call, data: Vec<u8>) -> Vec<Reply> {
        let round = self.rounds.entry(key).or_insert(Round { call, caller: rank, parts: BTreeMap::new() });
        if round.call != call {
            let text = format!("rank {} called {:?}, rank {rank} called {call:?}", round.caller, round.call);
            return self.break_up(Failure::new(Code::INVALID_USAGE, text));
        }
        round.parts.insert(rank, (tag, data));
        if round.parts.len() < self.members.len() {
            return Vec::new();
        }
        let Some(round) = self.rounds.remove(&key) else { return Vec::new() };
        let (tags, parts): (Vec<_>, Vec<_>) = round.parts.into_values().unzip();
        let Some(results) = results(&call, parts) else {
            let text = format!("the data of {call:?} have not the length or type that they should");
            return self.break_up(Failure::new(Code::INVALID_ARGUMENT, text));
        };
        let done = self.members.iter().zip(tags).zip(results);
        done.map(|((member, tag), data)| Reply { connection: *member, answer: Answer::Done { tag }, data }).collect()
    }

    fn message(&mut self, line: (u32, u32, Key), half: Half) -> Vec<Reply> {
        let Some(other) = self.mail.remove(&line) else {
            self.mail.insert(line, half);
            return Vec::new();
        };
        let (from, to, _) = line;
        if (other.data_type, other.count) != (half.data_type, half.count) {
            let text = format!(
                "rank {from} and rank {to} differ in a message: {} elements of type {} and {} of type {}",
                other.count, other.data_type, half.count, half.data_type
            );
            return self.break_up(Failure::new(Code::INVALID_USAGE, text));
        }
        let (sender, receiver) = if half.data.is_some() { (half, other) } else { (other, half) };
        let reply = |rank: u32, tag, data| {
            let connection = *self.members.get(rank as usize)?;
            Some(Reply { connection, answer: Answer::Done { tag }, data })
        };
        let data = Arc::new(sender.data.unwrap_or_default());
        [reply(from, sender.tag, Arc::default()), reply(to, receiver.tag, data)].into_iter().flatten().collect()
    }

    fn split(
        &mut self,
        rank: u32,
        tag: u64,
        key: Key,
        color: i32,
        order: i32,
        last: &mut u64,
    ) -> (Vec<Reply>, Vec<Self>) {
        let round = self.splits.entry(key).or_default();
        round.insert(rank, (tag, color, order));
        if round.len() < self.members.len() {
            return (Vec::new(), Vec::new());
        }
        let mut colors = BTreeMap::<_, Vec<_>>::new();
        for (rank, (tag, color, order)) in self.splits.remove(&key).unwrap_or_default() {
            colors.entry(color).or_default().push((order, rank, tag));
        }
        let (mut replies, mut formed) = (Vec::new(), Vec::new());
        for (color, mut ranks) in colors {
            ranks.sort_unstable();
            let ranks: Vec<_> = ranks.into_iter().map(|(_, rank, tag)| (rank, tag)).collect();
            let (told, group) = self.form(&ranks, color >= 0, last);
            replies.extend(told);
            formed.extend(group);
        }
        (replies, formed)
    }

    fn shrink(&mut self, rank: u32, tag: u64, key: Key, excluded: Vec<u32>, last: &mut u64) -> (Vec<Reply>, Vec<Self>) {
        let remaining = (0..).zip(&self.members).filter(|(rank, _)| !excluded.contains(rank)).count();
        let round = self.shrinks.entry((key, excluded.clone())).or_default();
        round.insert(rank, tag);
        if round.len() < remaining {
            return (Vec::new(), Vec::new());
        }
        let ranks: Vec<_> = self.shrinks.remove(&(key, excluded)).unwrap_or_default().into_iter().collect();
        let (replies, group) = self.form(&ranks, true, last);
        (replies, group.into_iter().collect())
    }

    /// Forms a communicator of ranks in their order, or tells them that they are in none.
    fn form(&self, ranks: &[(u32, u64)], wanted: bool, last: &mut u64) -> (Vec<Reply>, Option<Self>) {
        let members: Vec<_> = ranks.iter().map(|(rank, _)| self.members[*rank as usize]).collect();
        if wanted {
            *last += 1;
        }
        let count = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
        let replies = (0..).zip(ranks).zip(&members).map(|((rank, (_, tag)), connection)| {
            let member = wanted.then_some(Membership { group: *last, rank, ranks: count });
            Reply { connection: *connection, answer: Answer::Member { tag: *tag, member }, data: Arc::default() }
        });
        (replies.collect(), wanted.then(|| Self::new(*last, members.clone())))
    }
}

/// Returns the result of each rank; `None` if lengths do not match.
fn results(call: &Call, parts: Vec<Vec<u8>>) -> Option<Vec<Arc<Vec<u8>>>> {
    let data_type = DataType(call.data_type);
    let ranks = parts.len();
    let root = usize::try_from(call.root).ok()?;
    let block = data_type.size_bytes()?.checked_mul(call.count.try_into().ok()?)?;
    let whole = block.checked_mul(ranks)?;
    let fits = |(rank, part): (usize, &Vec<u8>)| {
        part.len()
            == match call.kind {
                Kind::AllReduce | Kind::Reduce | Kind::AllGather | Kind::Gather => block,
                Kind::ReduceScatter | Kind::AllToAll => whole,
                Kind::Broadcast if rank == root => block,
                Kind::Scatter if rank == root => whole,
                Kind::Broadcast | Kind::Scatter => 0,
            }
    };
    if root >= ranks || !parts.iter().enumerate().all(fits) {
        return None;
    }
    let blocks = |bytes: &[u8]| -> Vec<_> {
        (0..ranks).map(|rank| Arc::new(bytes[rank * block..(rank + 1) * block].to_vec())).collect()
    };
    let all = |bytes: Vec<u8>| {
        let bytes = Arc::new(bytes);
        vec![bytes; ranks]
    };
    let to_root = |bytes: Vec<u8>| {
        let mut results: Vec<_> = (0..ranks).map(|_| Arc::default()).collect();
        results[root] = Arc::new(bytes);
        results
    };
    let sum = |parts: &[Vec<u8>]| reduce(data_type, RedOp(call.op), parts);
    Some(match call.kind {
        Kind::AllReduce => all(sum(&parts)?),
        Kind::Reduce => to_root(sum(&parts)?),
        Kind::ReduceScatter => blocks(&sum(&parts)?),
        Kind::Broadcast => all(parts.into_iter().nth(root)?),
        Kind::AllGather => all(parts.concat()),
        Kind::Gather => to_root(parts.concat()),
        Kind::Scatter => blocks(&parts[root]),
        Kind::AllToAll => {
            let rows: Vec<_> = parts.iter().map(|part| blocks(part)).collect();
            (0..ranks).map(|to| Arc::new(rows.iter().flat_map(|row| row[to].iter().copied()).collect())).collect()
        }
    })
}
