//! Exercises: the same training with batches of several sizes, and by one replica and by many.

use std::path::PathBuf;

use clap::Args;
use distribute::Error;

use super::plot::{Panel, draw};
use super::{Flags, Outcome, choose, train};

/// Trainings that are compared with each other.
#[derive(Args, Clone)]
pub(crate) struct Exercises {
    /// Trains with the global batches of --batches, and compares them.
    #[arg(long, group = "exercise", conflicts_with_all = FOR_ONE_TRAINING)]
    batch_sweep: bool,
    /// Global batches of --batch-sweep.
    #[arg(long, requires = "batch_sweep", value_delimiter = ',', default_values_t = [32, 64, 128, 256, 512, 1024])]
    batches: Vec<usize>,
    /// Trains on the first of --devices, on the first two, four and so on, and on all, and compares them.
    #[arg(long, group = "exercise", conflicts_with_all = FOR_ONE_TRAINING)]
    compare_one_and_many: bool,
    /// Draws the comparison in this file, as SVG.
    #[arg(long, requires = "exercise")]
    plot: Option<PathBuf>,
}

/// Flags that name files of one training.
const FOR_ONE_TRAINING: [&str; 3] = ["checkpoints", "tensorboard", "losses"];

impl Exercises {
    /// Returns whether there is a comparison to make.
    pub(crate) fn is_chosen(&self) -> bool {
        self.batch_sweep || self.compare_one_and_many
    }

    /// Makes the comparison; prints it, and draws it if a file is given.
    pub(crate) fn run(&self, flags: &Flags) -> distribute::Result<()> {
        let (what, compared, is_chief) = match self.batch_sweep {
            true => self.sweep(flags)?,
            false => compare(flags)?,
        };
        if !is_chief {
            return Ok(());
        }
        println!("\n{what:>14}  steps  training time  samples/s  test accuracy");
        for (value, Outcome { steps, training_time, examples_per_s, accuracy }) in &compared {
            let (seconds, accuracy) = (training_time.as_secs_f64(), 100.0 * accuracy);
            println!("{value:>14}  {steps:>5}  {seconds:>11.1} s  {examples_per_s:>9.0}  {accuracy:>11.2} %");
        }
        let Some(path) = &self.plot else { return Ok(()) };
        let points = |of: fn(&Outcome) -> f64| compared.iter().map(|(at, outcome)| (*at as f64, of(outcome))).collect();
        let panels = [
            Panel { label: "samples/s", points: points(|outcome| outcome.examples_per_s) },
            Panel { label: "test accuracy, %", points: points(|outcome| 100.0 * outcome.accuracy) },
        ];
        std::fs::write(path, draw(&format!("mnist: {what}"), &panels))
            .map_err(|error| Error::program(format!("{} cannot be written: {error}", path.display())))
    }

    /// Trains under one strategy with several global batches.
    fn sweep(&self, flags: &Flags) -> distribute::Result<Comparison> {
        let strategy = choose(flags)?;
        let train = |batch| {
            let flags = Flags { batch, ..flags.clone() };
            Ok((batch, strategy.report_failure(train(&strategy, &flags))?))
        };
        let compared = self.batches.iter().copied().map(train).collect::<distribute::Result<_>>()?;
        Ok(("global batch", compared, strategy.is_chief()))
    }
}

/// The quantity that is varied, its values with their results, and whether this process reports them.
type Comparison = (&'static str, Vec<(usize, Outcome)>, bool);

/// Trains on growing numbers of devices with one global batch.
fn compare(flags: &Flags) -> distribute::Result<Comparison> {
    let devices = &flags.placement.devices;
    if distribute::cluster::Membership::from_env()?.is_some() {
        let problem = "--compare-one-and-many builds strategies of one replica and of several in one process, and this \
                       is one of several processes; start it alone, with --devices CPU:0,CPU:1";
        return Err(Error::program(problem));
    }
    if devices.len() < 2 {
        let device = &devices[0];
        let problem = format!("--compare-one-and-many has no second replica on {device}; give --devices CPU:0,CPU:1");
        return Err(Error::program(problem));
    }
    // Flags that do not fit several devices are an error before the first training.
    choose(flags)?;
    let powers = std::iter::successors(Some(1), |replicas| Some(2 * replicas));
    let counts = powers.take_while(|replicas| *replicas < devices.len()).chain([devices.len()]);
    let train = |replicas: usize| {
        let mut flags = flags.clone();
        flags.placement.devices.truncate(replicas);
        Ok((replicas, train(&choose(&flags)?, &flags)?))
    };
    Ok(("replicas", counts.map(train).collect::<distribute::Result<_>>()?, true))
}
