//! Positions of passes, from which another run can resume.

use serde::{Deserialize, Serialize};

use crate::dataset::Share;
use crate::{Error, Result, Topology};

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
        Lane { share, cuts: Vec::new(), seen: 0, ended: false }
    }

    /// Returns the unseen rows of the lane, or one of `count` equal parts of them.
    fn rest(&self, count: u64, index: u64) -> Lane {
        let mut cuts = self.cuts.clone();
        if self.seen > 0 || count > 1 {
            cuts.push(Cut { skip: self.seen, count, index });
        }
        Lane { share: self.share, cuts, seen: 0, ended: self.ended }
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
            all.steps = all.steps.max(other.steps);
            match all.read_mode {
                ReadMode::Walk if other.lanes != all.lanes => return refuse("workers have not walked equally far"),
                ReadMode::Walk => {}
                ReadMode::Lanes | ReadMode::Function => all.lanes.extend(other.lanes),
            }
        }
        Ok(all)
    }

    /// Returns the lanes that a worker reads when it resumes.
    pub(crate) fn lanes_of(&self, topology: Topology) -> Result<Vec<Lane>> {
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
