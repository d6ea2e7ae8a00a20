//! Predicts high incomes from a table: `cargo run --release -p distribute --features estimator
//! --example estimator_linear`
//!
//! A linear model of buckets and categories, or with `--dnn` a model with hidden layers. The table is generated from a
//! seed, written to CSV files, and read back. With TF_CONFIG for several tasks, chief and workers train, and the
//! evaluator evaluates.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt")]

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use distribute::cluster::{ClusterResolver, Membership, TfConfigResolver};
use distribute::estimator::{
    Categorical, DnnClassifier, EvalSpec, FeatureColumns, Labels, LinearClassifier, Numeric, RunConfig, TrainSpec,
    train_and_evaluate,
};
use distribute::input::read::{Csv, ReadOptions};
use distribute::input::{BoxError, Column, Features};
use distribute::prelude::*;
use distribute::train::preemption::TerminationConfig;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::Deserialize;

/// Trains and evaluates a classifier of people.
#[derive(Parser)]
struct Flags {
    /// Uses a model with hidden layers.
    #[arg(long)]
    dnn: bool,
    /// Devices of this process, such as CPU:0,CPU:1.
    #[arg(long, value_delimiter = ',', default_value = "CPU:0")]
    devices: Vec<String>,
    /// Folder for checkpoints and event files, which all tasks must be able to read. Default: a folder that is removed
    /// at the end.
    #[arg(long)]
    model_dir: Option<PathBuf>,
    /// Steps of training.
    #[arg(long, default_value_t = 1000)]
    max_steps: u64,
    /// Steps between checkpoints.
    #[arg(long, default_value_t = 200)]
    save_steps: u64,
    /// Seconds between evaluations.
    #[arg(long, default_value_t = 0)]
    throttle: u64,
}

/// A row of the table.
#[derive(Deserialize)]
struct Person {
    age: f32,
    hours: f32,
    education: String,
    occupation: String,
    income: String,
}

const EDUCATION: [&str; 4] = ["school", "college", "bachelor", "doctorate"];
const OCCUPATION: [&str; 5] = ["clerk", "craft", "manager", "sales", "service"];
const INCOME: [&str; 2] = ["<=50K", ">50K"];

fn main() -> ExitCode {
    distribute::init_logging();
    distribute::exit(run(&Flags::parse()))
}

fn run(flags: &Flags) -> distribute::Result<()> {
    let folder = tempfile::tempdir().map_err(distribute::Error::program)?;
    let [train, test] = [("train.csv", 8000, 1), ("test.csv", 2000, 2)].map(|file| drawn(folder.path(), file));
    let (train, test) = (train?, test?);
    let strategy = match Membership::from_env()? {
        Some(_) => MultiWorkerMirroredStrategy::builder().devices(flags.devices.clone()).build()?,
        None => MirroredStrategy::builder().devices(flags.devices.clone()).build()?,
    };
    let config = RunConfig::new(flags.model_dir.clone().unwrap_or_else(|| folder.path().join("model")))
        .train_distribute(&strategy)
        .save_checkpoints_steps(flags.save_steps)
        .stop_on(TerminationConfig::default());
    let estimator = if flags.dnn {
        let model = DnnClassifier::new(&dense_columns(), [32, 16]).label_vocabulary(INCOME);
        model.build(|model| Adam::new(3e-3).build(model), config)?
    } else {
        let model = LinearClassifier::new(&columns()).label_vocabulary(INCOME);
        model.build(|model| Adam::new(0.02).build(model), config)?
    };

    let forever = || Ok(people(&train).shuffle(8000, 42).batch(128).repeat_forever().prefetch(AUTOTUNE));
    let spec = TrainSpec::new(forever).max_steps(flags.max_steps);
    let eval = EvalSpec::new(|| Ok(people(&test).batch(500)));
    let eval = eval.start_delay(Duration::ZERO).throttle(Duration::from_secs(flags.throttle));
    let scores = train_and_evaluate(&estimator, &spec, &eval)?;
    if let Some(scores) = &scores {
        scores.iter().for_each(|(name, value)| println!("{name:16} {value:.4}"));
    }

    let first = || Ok(people(&test).take(5).map(|(features, _)| Ok(features)).batch(5));
    let predictions = estimator.predict(first)?;
    let chances = predictions["probabilities"].to_vec2::<f32>()?;
    if strategy.is_chief() {
        let task = TfConfigResolver::from_env()?.task().map_or_else(String::new, |task| format!("{task}: "));
        for (person, chances) in people(&test).take(5).iter().zip(chances) {
            let (features, income) = person?;
            let seen =
                ["age", "education", "occupation"].map(|name| features.column(name).map(shown).unwrap_or_default());
            println!("{task}{}: {} was given {:.2} for >50K", seen.join(", "), shown(&income), chances[1]);
        }
    }
    Ok(())
}

/// The columns of the linear model: a weight for each bucket, category, and pair of age and occupation.
fn columns() -> FeatureColumns {
    let age = Numeric::new("age").bucketized([25.0, 30.0, 35.0, 40.0, 45.0, 50.0, 55.0, 60.0]);
    let occupation = Categorical::hash_bucket("occupation", 50);
    FeatureColumns::new()
        .with(age.clone())
        .with(Numeric::new("hours").normalizer(|hours| (hours - 40.0) / 10.0))
        .with(Categorical::vocabulary("education", EDUCATION))
        .with(occupation)
        .with(Categorical::crossed([age.into(), "occupation".into()], 200))
}

/// The columns of the deep model: numbers and embeddings.
fn dense_columns() -> FeatureColumns {
    FeatureColumns::new()
        .with(Numeric::new("age").normalizer(|age| (age - 40.0) / 15.0))
        .with(Numeric::new("hours").normalizer(|hours| (hours - 40.0) / 10.0))
        .with(Categorical::vocabulary("education", EDUCATION).indicator())
        .with(Categorical::hash_bucket("occupation", 50).embedding(4))
}

/// Reads the rows of a file as features and labels.
fn people(path: &Path) -> Dataset<(Features, Labels)> {
    Dataset::from_files([path]).read(Csv::<Person>::new(), ReadOptions::default()).map(|person| {
        let features = Features::new([
            ("age", Column::from(person.age)),
            ("hours", Column::from(person.hours)),
            ("education", Column::from(person.education)),
            ("occupation", Column::from(person.occupation)),
        ])?;
        Ok::<_, BoxError>((features, Column::from(person.income)))
    })
}

/// Writes a generated table of people and returns its path.
fn drawn(folder: &Path, (file, count, seed): (&str, usize, u64)) -> distribute::Result<PathBuf> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut unit = || (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    let mut table = "age,hours,education,occupation,income\n".to_owned();
    for _ in 0..count {
        let (age, hours) = (18.0 + 52.0 * unit(), 20.0 + 40.0 * unit());
        let (education, occupation) = ((4.0 * unit()) as usize, (5.0 * unit()) as usize);
        // Incomes are highest in middle age; those of managers grow with age.
        let seniority = if occupation == 2 { (age - 30.0) / 12.0 } else { 0.0 };
        let score = 1.2 * education as f64 + (hours - 40.0) / 8.0 - ((age - 48.0) / 14.0).powi(2) + seniority - 1.6;
        let rich = 1.0 / (1.0 + (-2.0 * score).exp()) > unit();
        let (education, occupation) = (EDUCATION[education], OCCUPATION[occupation]);
        writeln!(table, "{age:.0},{hours:.0},{education},{occupation},{}", INCOME[usize::from(rich)])
            .map_err(distribute::Error::program)?;
    }
    let path = folder.join(file);
    std::fs::write(&path, table).map_err(distribute::Error::program)?;
    Ok(path)
}

/// Formats the value of one example.
fn shown(column: &Column) -> String {
    match column {
        Column::Numbers(number) => number.item().map(f32::to_string),
        Column::Integers(number) => number.item().map(i64::to_string),
        Column::Texts(text) => text.item().cloned(),
    }
    .unwrap_or_default()
}
