//! Selections, repetitions and orders of elements or of row numbers.

use std::fmt;
use std::sync::Arc;

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::budget::Limit;
use super::cardinality::Cardinality;
use super::pass::{Items, Opener, Pass};
use crate::Result;

/// A selection among the elements of a sequence, applied to elements or to row numbers.
#[derive(Clone, Copy)]
pub(crate) enum Selection {
    Take(usize),
    Skip(usize),
    Shard { count: usize, index: usize },
    Repeat(Option<usize>),
    Shuffle { buffer_size: usize, seed: u64, each_pass: bool },
}

impl fmt::Display for Selection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Selection::Take(count) => write!(formatter, "take {count}"),
            Selection::Skip(count) => write!(formatter, "skip {count}"),
            Selection::Shard { count, index } => write!(formatter, "shard {index} of {count}"),
            Selection::Repeat(Some(times)) => write!(formatter, "repeat {times}"),
            Selection::Repeat(None) => formatter.write_str("repeat forever"),
            Selection::Shuffle { buffer_size, seed, each_pass: true } => {
                write!(formatter, "shuffle {buffer_size} {seed}")
            }
            Selection::Shuffle { buffer_size, seed, each_pass: false } => {
                write!(formatter, "shuffle once {buffer_size} {seed}")
            }
        }
    }
}

impl Selection {
    pub(crate) fn apply<X: Send + 'static>(self, open: Opener<X>) -> Opener<X> {
        match self {
            Selection::Take(count) => Arc::new(move |pass| Box::new(open(pass).take(count)) as Items<X>),
            Selection::Skip(count) => filtered(open, move |index| index >= count),
            Selection::Shard { count, index } => filtered(open, move |at| at.checked_rem(count) == Some(index)),
            Selection::Repeat(times) => Arc::new(move |pass| Box::new(Repeated::new(&open, pass, times)) as Items<X>),
            Selection::Shuffle { buffer_size, seed, each_pass } => Arc::new(move |pass| {
                let random = if each_pass { pass.random(seed) } else { pass.clone().first().random(seed) };
                let limit = match pass.limit("shuffle") {
                    Ok(limit) => limit,
                    Err(error) => return Box::new(std::iter::once(Err(error))) as Items<X>,
                };
                let upstream = Some(open(pass));
                Box::new(Shuffled { upstream, buffer: Vec::new(), buffer_size, random, limit, held: 0, largest: 0 })
                    as Items<X>
            }),
        }
    }

    /// Returns the number of elements of a sequence of `before` elements after the selection.
    pub(crate) fn cardinality(self, before: Cardinality) -> Cardinality {
        match self {
            Selection::Take(count) => match before {
                Cardinality::Infinite => Cardinality::Known(count),
                Cardinality::Unknown if count == 0 => Cardinality::Known(0),
                other => other.map(|known| known.min(count)),
            },
            Selection::Skip(count) => before.map(|known| known.saturating_sub(count)),
            // A count of zero is an error that was noted; 1 avoids a division by zero here.
            Selection::Shard { count, index } => before.map(|known| known.saturating_sub(index).div_ceil(count.max(1))),
            Selection::Repeat(Some(0)) => Cardinality::Known(0),
            Selection::Repeat(Some(times)) => before.map(|known| known.saturating_mul(times)),
            Selection::Repeat(None) if before == Cardinality::Known(0) => before,
            Selection::Repeat(None) => Cardinality::Infinite,
            Selection::Shuffle { .. } => before,
        }
    }
}

/// Keeps the elements whose index satisfies `wanted`, and every error.
fn filtered<X: Send + 'static>(
    open: Opener<X>,
    wanted: impl Fn(usize) -> bool + Copy + Send + Sync + 'static,
) -> Opener<X> {
    Arc::new(move |pass| {
        let indexed = open(pass).enumerate();
        Box::new(indexed.filter_map(move |(index, item)| (item.is_err() || wanted(index)).then_some(item))) as Items<X>
    })
}

struct Repeated<X> {
    open: Opener<X>,
    pass: Pass,
    times: Option<usize>,
    begun: u64,
    current: Option<Items<X>>,
    /// Whether the current repetition has yielded an item; an empty one ends the repetitions.
    fruitful: bool,
}

impl<X> Repeated<X> {
    fn new(open: &Opener<X>, pass: Pass, times: Option<usize>) -> Repeated<X> {
        Repeated { open: Arc::clone(open), pass, times, begun: 0, current: None, fruitful: true }
    }
}

impl<X> Iterator for Repeated<X> {
    type Item = Result<X>;

    fn next(&mut self) -> Option<Result<X>> {
        loop {
            if let Some(item) = self.current.as_mut().and_then(Iterator::next) {
                self.fruitful = true;
                return Some(item);
            }
            self.current = None;
            if !self.fruitful || self.times.is_some_and(|times| self.begun >= times as u64) {
                return None;
            }
            self.current = Some((self.open)(self.pass.clone().repetition(self.begun, self.times)));
            self.fruitful = false;
            self.begun += 1;
        }
    }
}

struct Shuffled<X> {
    upstream: Option<Items<X>>,
    buffer: Vec<X>,
    buffer_size: usize,
    random: ChaCha8Rng,
    limit: Limit<X>,
    /// The bytes of the elements in the buffer, and of the largest element so far.
    held: usize,
    largest: usize,
}

impl<X> Iterator for Shuffled<X> {
    type Item = Result<X>;

    fn next(&mut self) -> Option<Result<X>> {
        while let Some(upstream) = &mut self.upstream
            && self.buffer.len() < self.buffer_size
            && (self.buffer.is_empty() || self.limit.has_room(self.held, self.largest))
        {
            match upstream.next() {
                Some(Ok(item)) => {
                    let size = self.limit.size(&item);
                    self.held = self.held.saturating_add(size);
                    self.largest = self.largest.max(size);
                    self.buffer.push(item);
                }
                Some(Err(error)) => {
                    self.upstream = None;
                    return Some(Err(error));
                }
                None => self.upstream = None,
            }
        }
        if self.buffer.is_empty() {
            return None;
        }
        let drawn = self.random.random_range(0..self.buffer.len());
        let item = self.buffer.swap_remove(drawn);
        self.held = self.held.saturating_sub(self.limit.size(&item));
        Some(Ok(item))
    }
}
