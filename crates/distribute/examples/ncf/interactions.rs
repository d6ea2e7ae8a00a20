//! Which user has met which item: MovieLens' ratings, or generated ones.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{Device, Result as CandleResult, Tensor};
use clap::Args;
use distribute::Error;
use distribute::input::read::{Csv, ReadOptions};
use distribute::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The choice of interactions.
#[derive(Args)]
pub(crate) struct Source {
    /// Ratings in the form of MovieLens 100K's u.data: user, item, rating and time, with tabs. Default: generated ones.
    #[arg(long)]
    ratings: Option<PathBuf>,
    /// Number of generated users.
    #[arg(long, default_value_t = 600, conflicts_with = "ratings")]
    users: usize,
    /// Number of generated items.
    #[arg(long, default_value_t = 800, conflicts_with = "ratings")]
    items: usize,
}

/// Interactions without their ratings: that a user has rated an item is what is learnt.
pub(crate) struct Interactions {
    /// The items of each user to learn from; items and users are numbered from 0.
    seen: Vec<BTreeSet<u32>>,
    items: u32,
    /// Users and items to learn from.
    train: Vec<(u32, u32)>,
    /// The latest item of each user who has others too, which is to be predicted.
    latest: Vec<(u32, u32)>,
}

/// Items that a user has not met, for each that they have met, in training.
const NEGATIVES: usize = 4;
/// The same for each item of the test.
const TEST_NEGATIVES: usize = 99;

impl Source {
    /// Reads or generates the interactions.
    pub(crate) fn read(&self) -> distribute::Result<Interactions> {
        let events = match &self.ratings {
            Some(path) => ratings(path)?,
            None if self.users == 0 || self.items < 100 => {
                let (users, items) = (self.users, self.items);
                let problem =
                    format!("--users {users} --items {items} are too few; give a user and 100 items at least");
                return Err(Error::program(problem));
            }
            None => generated(self.users as u32, self.items as u32),
        };
        Interactions::new(events)
    }
}

/// Reads users, items and times.
fn ratings(path: &Path) -> distribute::Result<Vec<(u32, u32, i64)>> {
    let rows = Csv::<(u32, u32, f32, i64)>::new().has_headers(false).delimiter(b'\t');
    let rows = Dataset::from_files([path]).read(rows, ReadOptions::default());
    rows.iter().map(|row| row.map(|(user, item, _, time)| (user, item, time)).map_err(Error::from)).collect()
}

/// Generates users who mostly choose items of the two genres that they like, popular ones more often.
fn generated(users: u32, items: u32) -> Vec<(u32, u32, i64)> {
    const GENRES: u32 = 12;
    const OF_USER: i64 = 40;
    let of_user = |user: u32| {
        let mut random = ChaCha8Rng::seed_from_u64(u64::from(user));
        let likes = [random.next_u32() % GENRES, random.next_u32() % GENRES];
        let event = move |time| {
            let wanted = random.next_u32();
            let chance = f64::from(random.next_u32()) / f64::from(u32::MAX);
            // Of a genre the first items are the most popular.
            let place = (chance * chance * f64::from(items / GENRES)) as u32;
            // One choice in five is of any genre.
            let genre = if wanted % 5 == 0 { wanted / 5 % GENRES } else { likes[(wanted / 5 % 2) as usize] };
            (user, place * GENRES + genre, time)
        };
        (0..OF_USER).map(event)
    };
    (0..users).flat_map(of_user).collect()
}

impl Interactions {
    fn new(mut events: Vec<(u32, u32, i64)>) -> distribute::Result<Interactions> {
        events.sort_by_key(|(user, item, time)| (*user, *time, *item));
        let (mut user_numbers, mut item_numbers) = (BTreeMap::new(), BTreeMap::new());
        let number = |numbers: &mut BTreeMap<u32, u32>, name| {
            let next = numbers.len() as u32;
            *numbers.entry(name).or_insert(next)
        };
        let mut of_users: Vec<Vec<u32>> = Vec::new();
        let mut seen: Vec<BTreeSet<u32>> = Vec::new();
        for (user, item, _) in events {
            let (user, item) = (number(&mut user_numbers, user), number(&mut item_numbers, item));
            if user as usize == seen.len() {
                seen.push(BTreeSet::new());
                of_users.push(Vec::new());
            }
            if seen[user as usize].insert(item) {
                of_users[user as usize].push(item);
            }
        }
        let most = seen.iter().map(BTreeSet::len).max().unwrap_or(0);
        let (mut train, mut latest) = (Vec::new(), Vec::new());
        for ((user, mut items), seen) in (0..).zip(of_users).zip(&mut seen) {
            if let Some(item) = items.pop_if(|_| seen.len() > 1) {
                latest.push((user, item));
                // Training must not tell it from the items that the user has not met.
                seen.remove(&item);
            }
            train.extend(items.into_iter().map(|item| (user, item)));
        }
        if latest.is_empty() || most + TEST_NEGATIVES > item_numbers.len() {
            return Err(Error::program(format!(
                "{} users have rated {} items, one of them {most}; expected a user with two, and {TEST_NEGATIVES} \
                 items that a user has not rated",
                seen.len(),
                item_numbers.len()
            )));
        }
        Ok(Interactions { seen, items: item_numbers.len() as u32, train, latest })
    }

    /// Returns the numbers of users and of items.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        (self.seen.len(), self.items as usize)
    }

    /// Returns the number of batches of a pass over the interactions; a last one that is short is a part of one.
    pub(crate) fn batches(&self, batch: usize) -> f64 {
        self.train.len() as f64 / batch.max(1) as f64
    }

    /// Returns an item that a user has met, and then others, which the user has not met in training.
    ///
    /// The others depend on a number alone, so that they are the same wherever they are drawn.
    fn candidates(&self, (user, item): (u32, u32), others: usize, number: u64) -> impl Iterator<Item = u32> {
        let mut random = ChaCha8Rng::seed_from_u64(number);
        let mut drawn = BTreeSet::new();
        let mut chosen = vec![item];
        while chosen.len() <= others {
            let other = random.next_u32() % self.items;
            if other != item && !self.seen[user as usize].contains(&other) && drawn.insert(other) {
                chosen.push(other);
            }
        }
        chosen.into_iter()
    }

    /// Returns the interactions for training, in a new order and with new negatives in each pass. The item to predict
    /// may be among the negatives of its user.
    ///
    /// # Shapes
    /// Users: (examples); items: (examples, 5), of which the user has met the first.
    pub(crate) fn train(self: &Arc<Self>, batch: usize, seed: u64) -> distribute::Result<Dataset<(Tensor, Tensor)>> {
        let (all, count) = (self.clone(), self.train.len());
        let pairs = Dataset::from_tensor_slices(tensors(&self.train)?).shuffle(count, seed).batch(batch);
        // Each interaction gets another of these numbers in each pass.
        let numbers = Dataset::range(0..count as i64).shuffle(count, seed.wrapping_add(1)).batch(batch);
        Ok(pairs.zip(numbers).map(move |((users, items), numbers)| {
            let pairs = users.to_vec1::<u32>()?.into_iter().zip(items.to_vec1::<u32>()?);
            let with_number = pairs.zip(numbers.as_slice());
            let rows: Vec<u32> = with_number
                .flat_map(|(pair, number)| all.candidates(pair, NEGATIVES, seed ^ number.cast_unsigned()))
                .collect();
            Ok((users, Tensor::from_vec(rows, (numbers.as_slice().len(), 1 + NEGATIVES), &Device::Cpu)?))
        }))
    }

    /// Returns the test: for each user the item to predict, among 99 that the user has not met.
    ///
    /// # Shapes
    /// As [`train`](Interactions::train), with 100 items.
    pub(crate) fn test(&self) -> distribute::Result<Dataset<(Tensor, Tensor)>> {
        let of_pair = |(number, pair): (u64, &(u32, u32))| self.candidates(*pair, TEST_NEGATIVES, !number);
        let rows: Vec<u32> = (0..).zip(&self.latest).flat_map(of_pair).collect();
        let rows = Tensor::from_vec(rows, (self.latest.len(), 1 + TEST_NEGATIVES), &Device::Cpu)?;
        Ok(Dataset::from_tensor_slices((tensors(&self.latest)?.0, rows)).batch(100))
    }

    /// Returns the number of users who have met each item in training, by which a model that knows no user would sort.
    pub(crate) fn popularity(&self) -> Vec<f32> {
        let mut counts = vec![0.0; self.items as usize];
        self.train.iter().for_each(|(_, item)| counts[*item as usize] += 1.0);
        counts
    }
}

fn tensors(pairs: &[(u32, u32)]) -> CandleResult<(Tensor, Tensor)> {
    let (users, items): (Vec<u32>, Vec<u32>) = pairs.iter().copied().unzip();
    Ok((Tensor::new(users, &Device::Cpu)?, Tensor::new(items, &Device::Cpu)?))
}
