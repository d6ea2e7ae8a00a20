//! A printable plan of which replica reads which rows.

use std::path::PathBuf;
use std::sync::Arc;
use std::{fmt, ops::Range};

use crate::dataset::{Facts, Share, Shares, Source, divide};
use crate::distributed::Reads;
use crate::{Cardinality, FileShard, Result, Topology, rebatch::Rebatch};

/// The rows that each worker and replica reads. It prints as a table, which is equal on all workers.
///
/// # Examples
/// ```
/// use distribute_input::{Dataset, InputOptions, Topology, distribute_dataset};
/// let data = Dataset::range(0..70).batch(7);
/// let data = distribute_dataset(&data, Topology::new(2, 0, 2)?, InputOptions::default())?;
/// assert_eq!(data.plan().to_string(), "\
/// global batch 7 over 4 replicas (2 workers x 2), 10 steps a pass
/// each worker walks the whole data and keeps its replicas' rows; sizes repeat every 2 steps
/// worker  replica  step 0  step 1
/// 0       0        0..2    0..2
/// 0       1        2..4    2..3
/// 1       2        4..6    3..5
/// 1       3        6..7    5..7
/// ");
/// # Ok::<(), distribute_input::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataPlan {
    topology: Topology,
    division: Division,
    steps: Cardinality,
    /// The seeds of the shuffles before the distribution.
    seeds: Vec<u64>,
    /// The stages that choose and order elements, and memory budgets.
    stages: Vec<String>,
    /// The files, the numbers of splits and the data that those are of; empty if each worker may have data of its own.
    sources: Vec<String>,
    /// The text that the order of this worker's elements depends on, if each worker may have data of its own.
    own_order: Option<String>,
}

/// How the data are divided between replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Division {
    /// Global batches are divided.
    Global { rebatch: Rebatch, reads: Reads },
    /// Each worker has its own data.
    PerWorker { batch: Option<usize> },
}

impl DataPlan {
    pub(crate) fn new(topology: Topology, division: Division, steps: Cardinality) -> DataPlan {
        let (seeds, stages, sources) = (Vec::new(), Vec::new(), Vec::new());
        DataPlan { topology, division, steps, seeds, stages, sources, own_order: None }
    }

    /// Adds the order of the datasets that an input function has made.
    pub(crate) fn with_datasets<'a>(self, all: impl Iterator<Item = &'a Facts>) -> DataPlan {
        let order = |facts: &Facts| match facts.counted_rows() {
            Some(rows) => format!("{} of batches of {rows}", own_order(facts)),
            None => own_order(facts),
        };
        DataPlan { own_order: Some(all.map(order).collect::<Vec<_>>().join(" | ")), ..self }
    }

    /// Adds the sources of a dataset, its seeds and its stages.
    ///
    /// # Errors
    /// [`Error::External`](crate::Error::External) if a source does not know its name.
    pub(crate) fn with_sources(self, facts: &Facts) -> Result<DataPlan> {
        let Facts { seeds, stages, sources, .. } = facts.clone();
        let (sources, own_order) = match self.has_common_data() {
            true => (sources.iter().map(Source::name).collect::<Result<_>>()?, None),
            false => (Vec::new(), Some(own_order(facts))),
        };
        Ok(DataPlan { seeds, stages, sources, own_order, ..self })
    }

    /// Returns the named settings that must be equal on all workers for the plan to hold; empty if each worker chooses
    /// its own data.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{Dataset, InputOptions, Topology, distribute_dataset};
    /// let data = Dataset::range(0..70).shuffle(70, 42).batch(7);
    /// let data = distribute_dataset(&data, Topology::new(2, 0, 2)?, InputOptions::default())?;
    /// let settings = data.plan().settings();
    /// assert!(settings.contains(&("global batch", "7".to_owned())));
    /// assert!(settings.contains(&("seeds of shuffles", "[42]".to_owned())));
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let Division::Global { rebatch, reads } = &self.division else { return Vec::new() };
        let policy = match reads {
            Reads::Walk => "every worker walks all data",
            Reads::Own { share: None, .. } => "every worker reads all data by itself",
            Reads::Own { .. } => "every worker reads its own part",
        };
        let mut settings = vec![
            ("global batch", rebatch.global_batch.to_string()),
            ("steps of a pass", self.steps.to_string()),
            ("reading", policy.to_owned()),
            ("seeds of shuffles", format!("{:?}", self.seeds)),
        ];
        // Positions compare them too, where workers read parts of the same data.
        if self.has_common_data() {
            settings.push(("sources", self.sources.join(", ")));
            settings.push(("stages", self.stages.join(", ")));
        }
        settings
    }

    /// Describes what the order of the rows depends on, as far as a dataset knows it; `None` if each worker may have
    /// data of its own.
    pub(crate) fn order(&self) -> Option<String> {
        self.has_common_data().then(|| described(&self.sources, &self.seeds, &self.stages))
    }

    /// Describes what the order of this worker's elements depends on, if each worker may have data of its own.
    pub(crate) fn own_order(&self) -> Option<&str> {
        self.own_order.as_deref()
    }

    /// Returns whether all workers read parts of the same data. Without a share each may have sources of its own.
    fn has_common_data(&self) -> bool {
        match &self.division {
            Division::PerWorker { .. } => false,
            Division::Global { reads, .. } => !matches!(reads, Reads::Own { share: None, .. }),
        }
    }

    /// Returns the workers and replicas that read.
    pub fn topology(&self) -> Topology {
        self.topology
    }

    /// Returns the global batch; `None` if each worker has its own data.
    pub fn global_batch(&self) -> Option<usize> {
        self.rebatch().map(|rebatch| rebatch.global_batch)
    }

    /// Returns the number of steps of a pass.
    pub fn steps(&self) -> Cardinality {
        self.steps
    }

    /// Returns the rows of a full global batch that a replica, numbered over all workers, gets in a step. Returns
    /// `None` if each worker has its own data, or if there is no such replica.
    pub fn rows(&self, step: usize, replica: usize) -> Option<Range<usize>> {
        let rebatch = self.rebatch()?;
        rebatch.ranges(step, rebatch.global_batch).ok()?.nth(replica)
    }

    pub(crate) fn local_batch_sizes(&self, step: usize) -> Option<Vec<usize>> {
        match self.division {
            Division::Global { rebatch, .. } => {
                Some(rebatch.local_ranges(step, rebatch.global_batch).ok()?.map(|range| range.len()).collect())
            }
            Division::PerWorker { batch } => batch.map(|batch| vec![batch; self.topology.replicas_per_worker()]),
        }
    }

    fn rebatch(&self) -> Option<Rebatch> {
        match &self.division {
            Division::Global { rebatch, .. } => Some(*rebatch),
            Division::PerWorker { .. } => None,
        }
    }

    fn table(&self, formatter: &mut fmt::Formatter<'_>, columns: usize) -> fmt::Result {
        let head = |step: usize| {
            if columns == 1 { "rows".to_owned() } else { format!("step {step}") }
        };
        let widest = self.global_batch().map_or(0, |batch| format!("{batch}..{batch}").len());
        let width = widest.max(head(columns - 1).len());
        let mut line = "worker  replica".to_owned();
        (0..columns).for_each(|step| line.push_str(&format!("  {:<width$}", head(step))));
        writeln!(formatter, "{}", line.trim_end())?;
        for replica in 0..self.topology.num_replicas() {
            let mut line = format!("{:<6}  {replica:<7}", replica / self.topology.replicas_per_worker());
            for step in 0..columns {
                let cell = self.rows(step, replica).map_or_else(|| "-".to_owned(), |rows| format!("{rows:?}"));
                line.push_str(&format!("  {cell:<width$}"));
            }
            writeln!(formatter, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

impl DataPlan {
    /// Writes which worker reads which files.
    fn files(&self, formatter: &mut fmt::Formatter<'_>, lists: &[Arc<[PathBuf]>]) -> fmt::Result {
        for index in 0..self.topology.workers() {
            let share = Share { count: self.topology.workers(), index };
            let shards: Vec<FileShard> = lists.iter().flat_map(|paths| divide(paths, share)).collect();
            let name = |shard: &FileShard| {
                let name = shard.path.file_name().unwrap_or(shard.path.as_os_str()).to_string_lossy().into_owned();
                if shard.parts == 1 {
                    name
                } else {
                    format!("{name} (records {} of every {})", shard.part, shard.parts)
                }
            };
            let mut names: Vec<String> = shards.iter().take(MAX_FILES).map(name).collect();
            if shards.len() > MAX_FILES {
                names.push(format!("and {} more", shards.len() - MAX_FILES));
            }
            writeln!(formatter, "worker {index} reads {}", names.join(", "))?;
        }
        Ok(())
    }
}

impl fmt::Display for DataPlan {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (workers, local) = (self.topology.workers(), self.topology.replicas_per_worker());
        let over = format!("{} replicas ({workers} workers x {local})", workers * local);
        let steps = self.steps;
        match &self.division {
            Division::Global { rebatch, reads } => {
                writeln!(formatter, "global batch {} over {over}, {steps} steps a pass", rebatch.global_batch)?;
                let how = match reads {
                    Reads::Walk => "each worker walks the whole data and keeps its replicas' rows",
                    Reads::Own { share: None, .. } => {
                        "each worker reads everything by itself, so each example is seen by every worker"
                    }
                    Reads::Own { shares: Shares::Files(_), .. } => "each worker reads its own files",
                    Reads::Own { shares: Shares::Splits(_), .. } => "each worker reads its own splits",
                    Reads::Own { .. } => "each worker reads what shard_hint leaves it",
                };
                write!(formatter, "{how}")?;
                match rebatch.period() {
                    1 => writeln!(formatter)?,
                    period => writeln!(formatter, "; sizes repeat every {period} steps")?,
                }
                self.table(formatter, rebatch.period().min(MAX_COLUMNS))?;
                if let Reads::Own { shares: Shares::Files(lists), .. } = reads {
                    self.files(formatter, lists)?;
                }
                Ok(())
            }
            Division::PerWorker { batch } => {
                let batch = batch.map_or_else(|| "unbatched elements".to_owned(), |rows| format!("batches of {rows}"));
                writeln!(formatter, "{batch} for each of {over}, {steps} steps a pass of this worker")?;
                writeln!(
                    formatter,
                    "each worker reads the data its input function chose; its replicas take elements in turn"
                )
            }
        }
    }
}

/// Describes what the order of the elements depends on in data of one worker. Sources are not asked for their names,
/// since each worker may have others.
fn own_order(facts: &Facts) -> String {
    let named = facts.sources.iter().filter(|source| matches!(source, Source::Named(_)));
    let sources: Vec<String> = named.flat_map(Source::name).collect();
    described(&sources, &facts.seeds, &facts.stages)
}

fn described(sources: &[String], seeds: &[u64], stages: &[String]) -> String {
    format!("{}; seeds {seeds:?}; stages [{}]", sources.join(", "), stages.join(", "))
}

/// The largest number of files listed for each worker.
const MAX_FILES: usize = 8;
/// The largest number of steps shown, so that the table fits a terminal.
const MAX_COLUMNS: usize = 8;

#[cfg(test)]
mod tests {
    use crate::{Dataset, InputOptions, Topology, distribute_dataset, distribute_datasets_from_function};

    #[test]
    fn an_even_division_has_one_column() {
        let data = Dataset::range(0..12).batch(6).repeat_forever();
        let data = distribute_dataset(&data, Topology::local(3).unwrap(), InputOptions::default()).unwrap();
        let expected = "global batch 6 over 3 replicas (1 workers x 3), infinite steps a pass\n\
            each worker walks the whole data and keeps its replicas' rows\n\
            worker  replica  rows\n0       0        0..2\n0       1        2..4\n0       2        4..6\n";
        assert_eq!(data.plan().to_string(), expected);
        assert_eq!(data.plan().rows(5, 2), Some(4..6));
        assert_eq!(data.plan().rows(0, 3), None);
    }

    #[test]
    fn an_input_function_is_named_as_such() {
        let topology = Topology::new(2, 0, 2).unwrap();
        let data =
            distribute_datasets_from_function(topology, InputOptions::default(), |_| Ok(Dataset::range(0..9).batch(3)));
        let data = data.unwrap();
        let text = data.plan().to_string();
        assert!(text.contains("batches of 3 for each of 4 replicas") && text.contains("2 steps"), "{text}");
        assert_eq!(data.batch_sizes(0), Some(vec![3, 3]));
        assert_eq!(data.plan().global_batch(), None);
    }
}
