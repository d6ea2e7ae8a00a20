//! Positions of passes, from which another run can resume.

use serde::{Deserialize, Serialize};

use crate::dataset::Share;
use crate::plan::DataPlan;
use crate::{Error, Result, Topology, UnequalData};

/// The position of a pass over a distributed dataset, for checkpoints.
///
/// A pass can be resumed with another number of workers; each remaining example is then seen exactly once.
///
/// # Examples
/// ```
/// use distribute_input::{Dataset, InputOptions, Topology, distribute_dataset};
/// let data = Dataset::range(0..9).shuffle(9, 7).batch(2);
/// let one = distribute_dataset(&data, Topology::local(1)?, InputOptions::default())?;
/// let mut pass = one.iter();
/// pass.next();
/// let position = pass.position().clone();
/// let rest: Vec<_> = pass.collect::<Result<_, _>>()?;
/// let again: Vec<_> = one.iter_from(&position)?.collect::<Result<_, _>>()?;
/// assert_eq!(again, rest);
/// # Ok::<(), distribute_input::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputPosition {
    pub(crate) epoch: u64,
    /// Steps taken, on which the sizes of the parts depend. Positions of older versions have none.
    #[serde(default)]
    pub(crate) steps: u64,
    pub(crate) read_mode: ReadMode,
    pub(crate) lanes: Vec<Lane>,
    /// The share of each step in the data of an input function. Positions of older versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) taken: Option<Taken>,
    /// The files, seeds of shuffles and stages that the order of the rows depends on. `None` if workers may have data
    /// of their own, and in positions of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) order: Option<String>,
    /// The same of each worker, if workers may have data of their own. Positions of older versions have none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) orders: Vec<String>,
}

/// The data of an input function that one step of a worker takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Taken {
    /// The number of datasets that the function has returned.
    pub(crate) pipelines: u64,
    /// Elements of each of them.
    pub(crate) batches: u64,
    /// Rows of each of them, if batches have a known size.
    pub(crate) rows: Option<u64>,
}

impl Taken {
    /// Returns whether as many steps have taken equally many rows.
    fn is_as_much_as(self, other: Taken) -> bool {
        let of_each = match (self.rows, other.rows) {
            (Some(rows), Some(others)) => rows == others,
            _ => self.batches == other.batches,
        };
        self.pipelines == other.pipelines && of_each
    }
}

/// How the lanes of a position are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ReadMode {
    /// All workers read them together and keep rows of each batch.
    Walk,
    /// Each worker reads lanes of its own.
    Lanes,
    /// Each worker reads the data of its input function.
    Function,
}

/// A sequence of rows that one worker reads, or that all workers read together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lane {
    /// The share of the source; `None` for the whole.
    pub(crate) share: Option<Share>,
    /// The cuts applied to the share, in order.
    pub(crate) cuts: Vec<Cut>,
    /// The number of rows seen after the cuts.
    pub(crate) seen: u64,
    pub(crate) ended: bool,
    /// The number of replicas of each worker when the pass began, on which the end of the share depends. `None` for the
    /// whole of a source, and in positions of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) replicas: Option<usize>,
}

/// Skips the first `skip` rows and keeps every `count`-th row after them, beginning with row `index`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cut {
    pub(crate) skip: u64,
    pub(crate) count: u64,
    pub(crate) index: u64,
}

impl Lane {
    pub(crate) fn of(share: Option<Share>) -> Lane {
        Lane { share, cuts: Vec::new(), seen: 0, ended: false, replicas: None }
    }

    /// Creates the lane of a share that a worker with this many replicas begins to read.
    pub(crate) fn of_worker(share: Option<Share>, replicas: usize) -> Lane {
        Lane { replicas: share.map(|_| replicas), ..Lane::of(share) }
    }

    /// Returns the number of rows that were passed.
    pub(crate) fn passed(&self) -> u64 {
        self.cuts.iter().fold(self.seen, |passed, cut| passed.saturating_add(cut.skip))
    }

    /// Returns the unseen rows of the lane, or one of `count` equal parts of them.
    fn rest(&self, count: u64, index: u64) -> Lane {
        let mut cuts = self.cuts.clone();
        if self.seen > 0 || count > 1 {
            cuts.push(Cut { skip: self.seen, count, index });
        }
        Lane { share: self.share, cuts, seen: 0, ended: self.ended, replicas: self.replicas }
    }
}

impl InputPosition {
    /// Returns the number of the pass.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Joins the positions of all workers.
    ///
    /// # Errors
    /// [`Error::Position`] if `workers` is empty, or if they are not positions in the same pass over the same data.
    pub fn of_all(workers: Vec<InputPosition>) -> Result<InputPosition> {
        let refuse = |problem: &str| Err(Error::Position { problem: problem.to_owned() });
        let mut workers = workers.into_iter();
        let Some(mut all) = workers.next() else { return refuse("there is no worker's position") };
        for other in workers {
            if (other.epoch, other.read_mode) != (all.epoch, all.read_mode) {
                return refuse("workers are in different passes, or read in different ways");
            }
            if other.order != all.order {
                return refuse("workers have other files, seeds of shuffles or stages than the first one");
            }
            all.steps = all.steps.max(other.steps);
            match all.read_mode {
                ReadMode::Walk if other.lanes != all.lanes => return refuse("workers have not walked equally far"),
                ReadMode::Walk => {}
                ReadMode::Lanes | ReadMode::Function => {
                    all.lanes.extend(other.lanes);
                    all.orders.extend(other.orders);
                }
            }
        }
        Ok(all)
    }

    /// Checks that a dataset that is read in this way has its rows in the order of this position, and counts steps as
    /// it does.
    pub(crate) fn check(&self, read_mode: ReadMode, taken: Option<Taken>, plan: &DataPlan) -> Result<()> {
        let refuse = |problem: String| Err(Error::Position { problem });
        // At its beginning a pass is the same, however it is counted.
        if self.lanes.iter().all(|lane| lane.passed() == 0) {
            return Ok(());
        }
        let of_function = |mode| if mode == ReadMode::Function { "of an input function" } else { "of a dataset" };
        // Positions of functions count steps, others rows, which is the same if a step has one.
        let is_the_same = match self.read_mode {
            ReadMode::Function => plan.global_batch() == Some(1),
            ReadMode::Walk | ReadMode::Lanes => self.lanes.iter().all(|lane| lane.passed() == self.steps),
        };
        if (self.read_mode == ReadMode::Function) != (read_mode == ReadMode::Function) && !is_the_same {
            let (saved, now) = (of_function(self.read_mode), of_function(read_mode));
            return refuse(format!("it is one {saved}, and the data is that {now}; distribute it as before"));
        }
        let topology = plan.topology();
        let own = self.orders.get(topology.worker()).filter(|_| self.orders.len() == topology.workers());
        let own = own.map(String::as_str);
        for (saved, now) in [(self.order.as_deref(), plan.order().as_deref()), (own, plan.own_order())] {
            if let (Some(saved), Some(now)) = (saved, now)
                && saved != now
            {
                return refuse(format!(
                    "it counts rows in the order of <{saved}>, and the data has that of <{now}>: others would be \
                     skipped than were seen; read the files, seeds and stages that it was saved with"
                ));
            }
        }
        match (self.taken, taken) {
            (Some(saved), Some(now)) if !saved.is_as_much_as(now) => {
                let told = |of: Taken| {
                    let rows = of.rows.map_or_else(|| "unknown".to_owned(), |rows| rows.to_string());
                    format!("{} batches, {rows} rows of each of {} datasets", of.batches, of.pipelines)
                };
                refuse(format!(
                    "its steps took {} of the input function, and now a step takes {}; use as many replicas in each \
                     process, or as many rows in all",
                    told(saved),
                    told(now)
                ))
            }
            _ => Ok(()),
        }
    }

    /// Returns the lanes that a worker reads when it resumes. Lanes that cannot be dealt evenly are divided by rows if
    /// the pass ends with the worker that has the fewest, and else among as few workers as can be, since each of them
    /// reads the whole lane.
    pub(crate) fn lanes_of(&self, topology: Topology, unequal: UnequalData) -> Result<Vec<Lane>> {
        let (workers, worker) = (topology.workers(), topology.worker());
        match self.read_mode {
            ReadMode::Walk => Ok(self.lanes.iter().map(|lane| lane.rest(1, 0)).collect()),
            ReadMode::Function if self.lanes.len() != workers => {
                let saved = self.lanes.len();
                let problem = format!(
                    "it was saved by {saved} workers whose input function chose their data, there are {workers} now"
                );
                Err(Error::Position { problem })
            }
            ReadMode::Function => Ok(vec![self.lanes[worker].rest(1, 0)]),
            ReadMode::Lanes => {
                let left: Vec<&Lane> = self.lanes.iter().filter(|lane| !lane.ended).collect();
                if unequal != UnequalData::Pad {
                    let (whole, shared) = left.split_at(left.len() / workers * workers);
                    let whole = whole.iter().skip(worker).step_by(workers).map(|lane| lane.rest(1, 0));
                    let shared = shared.iter().map(|lane| lane.rest(workers as u64, worker as u64));
                    return Ok(whole.chain(shared).collect());
                }
                if left.len() >= workers || left.is_empty() {
                    return Ok(left.into_iter().skip(worker).step_by(workers).map(|lane| lane.rest(1, 0)).collect());
                }
                // There are more workers than lanes: workers that share a lane take its rows in turn.
                let lane = worker % left.len();
                let sharing = (lane..workers).step_by(left.len()).count() as u64;
                Ok(vec![left[lane].rest(sharing, (worker / left.len()) as u64)])
            }
        }
    }
}
