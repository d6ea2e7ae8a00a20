//! `cargo xtask bench accuracy`: results of the examples over some seeds, next to those of the same programs in torch.

use std::path::Path;
use std::time::Duration;

use clap::{Args, ValueEnum};
use distribute_testkit::{Job, Outcome};
use serde::Deserialize;

use super::peers::TORCH;
use super::spread::spread;
use crate::error::text;
use crate::launched;
use crate::source;

#[derive(Args)]
pub(crate) struct Flags {
    /// Programs.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "resnet,char-lm")]
    program: Vec<Program>,
    /// Seeds of each program.
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// Passes over the data.
    #[arg(long, default_value_t = 8)]
    epochs: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Program {
    /// ResNet-20 of half the published width on 2,000 drawn pictures of 32 × 32: the percentage of 500 others that it
    /// names.
    Resnet,
    /// The transformer on the project's documentation, at most 200 steps per pass: bits per character of what it has
    /// not seen.
    CharLm,
}

impl Program {
    fn name(self) -> &'static str {
        match self {
            Program::Resnet => "resnet",
            Program::CharLm => "char_lm",
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Program::Resnet => "% of pictures named",
            Program::CharLm => "bits per character",
        }
    }

    /// Returns the number behind these words in what the example prints.
    fn result(self, printed: &str) -> Option<f64> {
        let words = match self {
            Program::Resnet => "test accuracy",
            Program::CharLm => "bits per character",
        };
        let (_, behind) = printed.rsplit_once(words)?;
        behind.split_whitespace().next()?.trim_end_matches(',').parse().ok()
    }
}

/// Settings that are the same in both libraries.
struct Setting<'a> {
    program: Program,
    seed: u64,
    epochs: u32,
    /// The folder of pictures, which the first run of the example writes.
    pictures: &'a Path,
    texts: &'a [String],
}

impl Setting<'_> {
    /// Runs the example under a strategy: on two devices of one process, or by two processes.
    fn ours(&self, programs: &Path, by_workers: bool) -> Result<f64, String> {
        let example = programs.join("examples").join(self.program.name());
        let job = match by_workers {
            true => Job::builder(programs.join("distribute")).args(["run", "--workers", "2", "--"]).arg(example),
            false => Job::builder(example).args(["--devices", "CPU:0,CPU:1"]),
        };
        let job = job.args(["--seed", &self.seed.to_string(), "--epochs", &self.epochs.to_string()]);
        let job = match self.program {
            Program::Resnet => {
                let job = job.args(["--width", WIDTH, "--batch", BATCH_OF_PICTURES]);
                let job = match self.pictures.exists() {
                    true => job.arg("--data"),
                    false => job.args(["--size", "32", "--images", "2000", "--save"]),
                };
                job.arg(self.pictures)
            }
            Program::CharLm => {
                let job = job.args(["--steps", STEPS, "--batch", BATCH_OF_WINDOWS, "--sample", "0"]);
                job.arg("--text").args(self.texts)
            }
        };
        let outcome = job.start().map_err(text)?.wait(0, LIMIT).map_err(text)?;
        let printed = format!("{}{}", outcome.stdout, outcome.stderr);
        let result = self.program.result(&printed).filter(|_| outcome.success());
        result.ok_or_else(|| {
            let Outcome { code, signal, .. } = outcome;
            format!("{} ended with code {code:?}, signal {signal:?} and printed:\n{printed}", self.program.name())
        })
    }

    /// Runs torch's program; `None` where torch is not installed.
    fn torch(&self) -> Result<Option<f64>, String> {
        #[derive(Deserialize)]
        struct Line {
            result: f64,
        }
        let (seed, epochs) = (self.seed.to_string(), self.epochs.to_string());
        let mut arguments = vec![self.program.name().to_owned(), seed, epochs];
        match self.program {
            Program::Resnet => {
                arguments.extend([WIDTH.to_owned(), BATCH_OF_PICTURES.to_owned()]);
                arguments.push(self.pictures.display().to_string());
            }
            Program::CharLm => {
                arguments.extend([STEPS.to_owned(), BATCH_OF_WINDOWS.to_owned()]);
                arguments.extend(self.texts.iter().cloned());
            }
        }
        let read = |printed: &str| -> Result<Line, String> { serde_json::from_str(printed).map_err(text) };
        let line = TORCH.run("xtask/peers/torch_accuracy.py", 1, &arguments, LIMIT, read)?;
        Ok(line.map(|line| line.result))
    }
}

/// Longest time of one training.
const LIMIT: Duration = Duration::from_secs(3 * 3600);

const WIDTH: &str = "8";
const BATCH_OF_PICTURES: &str = "32";
const STEPS: &str = "200";
const BATCH_OF_WINDOWS: &str = "16";

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    if !TORCH.is_installed() {
        println!("skipped: torch is not installed ({})", TORCH.set_up());
    }
    let folder = tempfile::tempdir().map_err(text)?;
    let pictures = folder.path().join("pictures");
    let texts: Vec<String> =
        source::files(Path::new("docs"), "md")?.into_iter().map(|path| path.display().to_string()).collect();
    for program in &flags.program {
        let programs = launched::build(program.name())?;
        println!("{}, {}: median, least and most of {} seeds", program.name(), program.unit(), flags.seeds);
        let mut results: [Vec<f64>; 3] = Default::default();
        for seed in 1..=flags.seeds {
            let setting = Setting { program: *program, seed, epochs: flags.epochs, pictures: &pictures, texts: &texts };
            results[0].push(setting.ours(&programs, false)?);
            results[1].push(setting.ours(&programs, true)?);
            results[2].extend(setting.torch()?);
        }
        let names = ["Mirrored, 2 devices", "MultiWorkerMirrored, 2 workers", "torch, one process"];
        for (name, results) in names.into_iter().zip(results).filter(|(_, results)| !results.is_empty()) {
            let (middle, least, most) = spread(results);
            println!("{name:<32} {middle:>8.3} {least:>8.3} {most:>8.3}");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read_from_what_examples_print() {
        assert_eq!(Program::Resnet.result("…\ntest accuracy 95.60 %\n"), Some(95.6));
        assert_eq!(Program::CharLm.result("  bits per character   1.942, of text"), Some(1.942));
        assert_eq!(Program::CharLm.result("nothing"), None);
    }
}
