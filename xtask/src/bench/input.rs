//! `cargo xtask bench input`: records and bytes a second of pipelines over files, against tf.data and torch's
//! DataLoader.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use distribute::input::read::{Csv, Example, Feature, Lines, Parquet, ReadOptions, TfRecordWriter, TfRecords, columns};
use distribute::input::{AUTOTUNE, Array, Dataset, FileShard, Parallel};
use serde::{Deserialize, Serialize};

use super::peers::{TENSORFLOW, TORCH, printed};
use super::processes::Children;
use super::spread::spread;
use crate::error::text;

#[derive(Args)]
pub(crate) struct Flags {
    /// Records of each kind of file.
    #[arg(long, default_value_t = 200_000)]
    records: usize,
    /// Rounds; each measures everything once, in turns.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Also run tf.data and torch's DataLoader on the same files, where they are installed in target/peers.
    #[arg(long)]
    compare: bool,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
}

/// A pipeline over one kind of files.
struct Case {
    name: &'static str,
    /// A description in words.
    does: &'static str,
    suffix: &'static str,
    run: fn(&[PathBuf]) -> Result<usize, String>,
}

/// Longest time of one run of a peer's pipelines.
const LIMIT: Duration = Duration::from_secs(1800);

const FILES: usize = 4;
const FLOATS: usize = 128;
const COLUMNS: usize = 16;
const BATCH: usize = 64;
const BUFFER: usize = 10_000;

const CASES: &[Case] = &[
    Case { name: "tfrecord", does: "read", suffix: ".tfrecord", run: records },
    Case { name: "example", does: "read, shuffle, decode, batch", suffix: ".tfrecord", run: examples },
    Case { name: "text", does: "read", suffix: ".csv", run: lines },
    Case { name: "csv", does: "read, shuffle, batch", suffix: ".csv", run: rows },
    Case { name: "parquet", does: "read, shuffle, batch", suffix: ".parquet", run: table },
];

#[derive(Serialize)]
struct Row<'a> {
    bench: &'a str,
    pipeline: &'a str,
    does: &'a str,
    records_per_s: f64,
    bytes_per_s: f64,
    /// How many times slower each peer is.
    peers: Vec<(String, f64)>,
}

/// A peer's line.
#[derive(Deserialize)]
struct Line {
    case: String,
    seconds: f64,
    records: usize,
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let folder = PathBuf::from(format!("target/bench-input-{}", std::process::id()));
    let _remove = Remove(folder.clone());
    fs::create_dir_all(&folder).map_err(text)?;
    write(&folder, flags.records)?;
    let peers: Vec<Peer> = if flags.compare { Peer::installed() } else { Vec::new() };
    let mut ours: Vec<Vec<f64>> = CASES.iter().map(|_| Vec::new()).collect();
    let mut theirs: Vec<Vec<Vec<f64>>> = peers.iter().map(|_| CASES.iter().map(|_| Vec::new()).collect()).collect();
    for _ in 0..flags.rounds {
        for (case, seconds) in CASES.iter().zip(&mut ours) {
            let paths = files(&folder, case.suffix)?;
            let began = Instant::now();
            let seen = (case.run)(&paths)?;
            seconds.push(began.elapsed().as_secs_f64());
            if seen != flags.records {
                return Err(format!("{} saw {seen} of {} records", case.name, flags.records));
            }
        }
        for (peer, seconds) in peers.iter().zip(&mut theirs) {
            for line in peer.run(&folder)? {
                if line.records != flags.records {
                    return Err(format!("{} saw {} of {} records", peer.name, line.records, flags.records));
                }
                if let Some(at) = CASES.iter().position(|case| case.name == line.case) {
                    seconds[at].push(line.seconds);
                }
            }
        }
    }
    if !flags.json {
        let names: String = peers.iter().map(|peer| format!(" {:>22}", peer.name)).collect();
        println!("{:<10} {:<30} {:>12} {:>10}{names}", "files", "pipeline", "records/s", "MB/s");
    }
    for (at, case) in CASES.iter().enumerate() {
        let seconds = spread(ours[at].clone()).0;
        let mut bytes = 0;
        for path in files(&folder, case.suffix)? {
            bytes += fs::metadata(path).map_err(text)?.len();
        }
        let ratio = |times: &[Vec<f64>]| spread(times[at].clone()).0 / seconds;
        let peers = peers.iter().zip(&theirs).map(|(peer, times)| (peer.name.to_owned(), ratio(times))).collect();
        let (records_per_s, bytes_per_s) = (flags.records as f64 / seconds, bytes as f64 / seconds);
        let row = Row { bench: "input", pipeline: case.name, does: case.does, records_per_s, bytes_per_s, peers };
        if flags.json {
            println!("{}", serde_json::to_string(&row).map_err(text)?);
            continue;
        }
        let faster = |(_, ratio): &(String, f64)| match ratio.is_nan() {
            true => format!(" {:>22}", "has no reader"),
            false => format!(" {:>13.1}× as fast", ratio),
        };
        let peers: String = row.peers.iter().map(faster).collect();
        println!("{:<10} {:<30} {records_per_s:>12.0} {:>10.0}{peers}", case.name, case.does, bytes_per_s / 1e6);
    }
    Ok(())
}

fn records(paths: &[PathBuf]) -> Result<usize, String> {
    count(&Dataset::from_files(paths).read(TfRecords, several()), |_| 1)
}

fn lines(paths: &[PathBuf]) -> Result<usize, String> {
    // Less the header of each file.
    Ok(count(&Dataset::from_files(paths).read(Lines, several()), |_| 1)? - paths.len())
}

fn examples(paths: &[PathBuf]) -> Result<usize, String> {
    let decode = |record: Vec<u8>| {
        let example = Example::decode(&record)?;
        let label = example.int64s("label")?.first().copied().ok_or("an empty label")?;
        Ok((Array::from(example.floats("x")?.to_vec()), Array::scalar(label)))
    };
    let data = Dataset::from_files(paths).read(TfRecords, several()).shuffle(BUFFER, 42);
    count(&data.map_and_batch(BATCH, Parallel::cores(), decode).prefetch(AUTOTUNE), |(_, labels)| labels.shape()[0])
}

fn rows(paths: &[PathBuf]) -> Result<usize, String> {
    let data = Dataset::from_files(paths).read(Csv::<Vec<f32>>::new(), several()).map(|row| Ok(Array::from(row)));
    count(&data.shuffle(BUFFER, 42).batch(BATCH).prefetch(AUTOTUNE), |batch| batch.shape()[0])
}

fn table(paths: &[PathBuf]) -> Result<usize, String> {
    let names: Arc<[String]> = (0..COLUMNS).map(|column| format!("c{column}")).collect();
    let read = Parquet::new().batch_size(8192);
    let batches = Dataset::<FileShard>::from_files(paths).read(read, ReadOptions::default());
    let rows = batches.map(move |batch| Ok(columns(&batch, &names.iter().map(String::as_str).collect::<Vec<_>>())?));
    let data = rows.unbatch().shuffle(BUFFER, 42).batch(BATCH).prefetch(AUTOTUNE);
    count(&data, |batch| batch.shape()[0])
}

fn several() -> ReadOptions {
    ReadOptions::default().cycle(FILES).block(16)
}

fn count<T: Send + 'static>(data: &Dataset<T>, rows: impl Fn(&T) -> usize) -> Result<usize, String> {
    data.iter().try_fold(0, |sum, item| Ok(sum + rows(&item.map_err(text)?)))
}

/// Writes the same numbers in every form.
fn write(folder: &Path, records: usize) -> Result<(), String> {
    use distribute::input::read::arrow::{ArrayRef, ArrowWriter, Float32Array, RecordBatch};
    for file in 0..FILES {
        let range = records * file / FILES..records * (file + 1) / FILES;
        let mut writer = TfRecordWriter::new(create(folder, file, ".tfrecord")?);
        for record in range.clone() {
            let x = (0..FLOATS).map(|at| number(record, at)).collect();
            let label = Feature::Int64(vec![(record % 10) as i64]);
            writer.write(&Example::from([("x", Feature::Float(x)), ("label", label)]).encode()).map_err(text)?;
        }
        writer.finish().map_err(text)?;
        let mut csv = std::io::BufWriter::new(create(folder, file, ".csv")?);
        let names: Vec<String> = (0..COLUMNS).map(|column| format!("c{column}")).collect();
        writeln!(csv, "{}", names.join(",")).map_err(text)?;
        for record in range.clone() {
            let row: Vec<String> = (0..COLUMNS).map(|column| number(record, column).to_string()).collect();
            writeln!(csv, "{}", row.join(",")).map_err(text)?;
        }
        csv.flush().map_err(text)?;
        let column =
            |at: usize| -> ArrayRef { Arc::new(Float32Array::from_iter_values(range.clone().map(|r| number(r, at)))) };
        let batch =
            RecordBatch::try_from_iter(names.iter().enumerate().map(|(at, name)| (name, column(at)))).map_err(text)?;
        let mut writer = ArrowWriter::try_new(create(folder, file, ".parquet")?, batch.schema(), None).map_err(text)?;
        writer.write(&batch).map_err(text)?;
        writer.close().map_err(text)?;
    }
    Ok(())
}

fn number(record: usize, at: usize) -> f32 {
    ((record * 7919 + at * 104_729) % 1009) as f32 / 1009.0
}

fn create(folder: &Path, file: usize, suffix: &str) -> Result<File, String> {
    File::create(folder.join(format!("{file}{suffix}"))).map_err(text)
}

fn files(folder: &Path, suffix: &str) -> Result<Vec<PathBuf>, String> {
    Ok((0..FILES).map(|file| folder.join(format!("{file}{suffix}"))).collect())
}

/// Removes the files, whatever happens.
struct Remove(PathBuf);

impl Drop for Remove {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Who is compared with.
struct Peer {
    name: &'static str,
    python: PathBuf,
    script: &'static str,
}

impl Peer {
    fn installed() -> Vec<Peer> {
        let known = [
            ("tf.data", TENSORFLOW, "xtask/peers/tf_data.py"),
            ("torch DataLoader", TORCH, "xtask/peers/torch_data.py"),
        ];
        let mut peers = Vec::new();
        for (name, python, script) in known {
            if python.is_installed() {
                peers.push(Peer { name, python: python.interpreter(), script });
            } else {
                println!("skipped: {name} is not installed ({})", python.set_up());
            }
        }
        peers
    }

    fn run(&self, folder: &Path) -> Result<Vec<Line>, String> {
        let mut command = Command::new(&self.python);
        command.arg(self.script).arg(folder).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let children = Children(vec![command.spawn().map_err(text)?]);
        printed(self.name, children, LIMIT, |printed| {
            let lines: Vec<Line> = printed.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
            if lines.is_empty() { Err("it printed nothing".to_owned()) } else { Ok(lines) }
        })
    }
}
