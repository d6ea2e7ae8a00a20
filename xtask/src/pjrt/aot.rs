//! Compiles programs for TPUs that are not there, and prints what the compiler tells of them.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use comfy_table::{CellAlignment, Table, presets};
use distribute_device::pjrt::{Attributes, CompileOptions, Plugin, Search, Topology, Value};

use super::{collectives, groups, sample};
use crate::error::text;

/// Slices that stand for the generations of TPUs: the name that users know, and that of libtpu.
const TOPOLOGIES: [(&str, &str); 6] = [
    ("v2-8", "v2:2x2"),
    ("v3-8", "v3:2x2"),
    ("v4 2x2x2", "v4:2x2x2"),
    ("v5e 2x4", "v5e:2x4"),
    ("v5p 2x2x1", "v5p:2x2x1"),
    ("v6e 4x4", "v6e:4x4"),
];

/// Longest time until libtpu is ready, and of one compilation.
const PATIENCE: Duration = Duration::from_secs(120);

/// A program to compile.
enum Source {
    /// The step of data-parallel training, built for each number of replicas.
    Sample,
    File {
        path: PathBuf,
        text: String,
    },
}

/// Compiles all programs for all topologies whose names contain `only`; fails after all if some cannot be compiled, do
/// not fit a device's memory, or, if they are `training`, do not reduce gradients or update variables in place.
pub(super) fn run(libtpu: &Path, files: &[PathBuf], only: Option<&str>, training: bool) -> Result<(), String> {
    let sources = sources(files)?;
    let chosen: Vec<_> =
        TOPOLOGIES.into_iter().filter(|(name, _)| only.is_none_or(|only| name.contains(only))).collect();
    if chosen.is_empty() {
        let names = TOPOLOGIES.map(|(name, _)| name).join(", ");
        return Err(format!("{:?} is a part of no topology's name; there are {names}", only.unwrap_or_default()));
    }
    let plugin = Plugin::open(&Search::file(libtpu), Instant::now() + PATIENCE).map_err(text)?;
    let versions = plugin.stablehlo_versions().map_err(text)?;
    println!("{}, PJRT {}{}", plugin.path().display(), plugin.version(), stablehlo(versions.as_ref()));
    let mut failed = Vec::new();
    for source in &sources {
        println!("\n{}", source.name());
        let mut table = table();
        for (shown, name) in &chosen {
            match compile(&plugin, name, source, training) {
                Ok(Compiled { cells, note }) => {
                    table.add_row([vec![(*shown).to_owned()], cells].concat());
                    note.iter().for_each(|note| println!("{shown}: {note}"));
                }
                Err(problem) => failed.push(format!("{} for {shown}: {}", source.name(), one_line(&problem))),
            }
        }
        if !table.is_empty() {
            println!("{table}");
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("these were not compiled:\n  {}", failed.join("\n  "))),
    }
}

fn sources(files: &[PathBuf]) -> Result<Vec<Source>, String> {
    let file = |path: &PathBuf| {
        let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Source::File { path: path.clone(), text })
    };
    match files {
        [] => Ok(vec![Source::Sample]),
        files => files.iter().map(file).collect(),
    }
}

impl Source {
    fn name(&self) -> String {
        match self {
            Source::Sample => "a step of data-parallel training (784-128-10, 32 examples for each replica)".to_owned(),
            Source::File { path, .. } => path.display().to_string(),
        }
    }

    /// Returns the program for a number of replicas, and what was changed.
    fn program(&self, replicas: usize) -> Result<(String, Option<String>), String> {
        match self {
            Source::Sample => Ok((sample::step(replicas).map_err(text)?.text().to_owned(), None)),
            Source::File { text, .. } => {
                let changed = groups::with_replicas(text, replicas)?;
                let from = groups::replicas(text)?;
                let note = (from != replicas).then(|| format!("changed from {from} replicas to {replicas}"));
                Ok((changed, note))
            }
        }
    }
}

/// The cells of a compiled program's row behind its topology, and a note on it.
struct Compiled {
    cells: Vec<String>,
    note: Option<String>,
}

fn compile(plugin: &Plugin, topology: &str, source: &Source, training: bool) -> Result<Compiled, String> {
    let topology = Topology::create(plugin, topology, &[]).map_err(text)?;
    let devices = topology.devices();
    let (program, note) = source.program(devices.len())?;
    let options =
        CompileOptions::new(devices.len(), 1).with_assignment(devices.iter().map(|device| vec![device.id]).collect());
    let began = Instant::now();
    let compiled = topology.compile(program, &options, began + PATIENCE).map_err(text)?;
    let took = began.elapsed();
    let memory = compiled.memory_stats().map_err(text)?;
    let cost = compiled.cost_analysis().map_err(text)?;
    let found = collectives::counts(&compiled.optimized().map_err(text)?)?;
    let found: Vec<String> = found.iter().map(|(name, count)| format!("{count} {name}")).collect();
    let device_memory = devices.first().and_then(|device| device_memory(&device.attributes));
    if training && found.is_empty() {
        return Err("it reduces no gradients: the compiled program has no collective".to_owned());
    }
    if training && memory.alias_bytes == 0 {
        return Err("it updates no variable in place: no output is in the memory of an argument".to_owned());
    }
    let needed = memory.argument_bytes + memory.output_bytes - memory.alias_bytes + memory.temp_bytes;
    if device_memory.is_some_and(|bytes| needed > bytes) {
        return Err(format!("it needs {needed} bytes of a device, which has {}", device_memory.unwrap_or_default()));
    }
    Ok(Compiled {
        cells: vec![
            devices.len().to_string(),
            format!("{:.2}", took.as_secs_f64()),
            memory.argument_bytes.to_string(),
            memory.output_bytes.to_string(),
            memory.alias_bytes.to_string(),
            memory.temp_bytes.to_string(),
            device_memory
                .map_or("not told".to_owned(), |bytes| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))),
            flops(&cost).map_or("not told".to_owned(), |flops| format!("{flops:.3e}")),
            if found.is_empty() { "none".to_owned() } else { found.join(", ") },
        ],
        note,
    })
}

fn table() -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(HEADER);
    for column in table.column_iter_mut().skip(1).take(HEADER.len() - 2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

const HEADER: [&str; 10] = [
    "topology",
    "devices",
    "s",
    "argument bytes",
    "output bytes",
    "alias bytes",
    "temp bytes",
    "memory of a device",
    "flops",
    "collectives",
];

/// Joins the lines of the compiler's message.
fn one_line(message: &str) -> String {
    message.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

/// Formats the versions of StableHLO that a plugin reads.
fn stablehlo(versions: Option<&(Vec<i64>, Vec<i64>)>) -> String {
    let version = |numbers: &[i64]| numbers.iter().map(i64::to_string).collect::<Vec<_>>().join(".");
    versions
        .map_or_else(String::new, |(oldest, newest)| format!(", StableHLO {} to {}", version(oldest), version(newest)))
}

/// Returns the bytes of a device's memory, if its description tells them.
fn device_memory(attributes: &Attributes) -> Option<i64> {
    attributes.get("device_memory_bytes_limit")?.as_integer()
}

/// Returns the floating-point operations of a replica, if the compiler estimates them.
fn flops(cost: &Attributes) -> Option<f64> {
    match cost.get("flops")? {
        Value::Float(flops) => Some(f64::from(*flops)),
        other => other.as_integer().map(|flops| flops as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_changed_to_the_number_of_devices_and_the_change_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("step.mlir");
        std::fs::write(&path, sample::step(2).unwrap().text()).unwrap();
        let sources = sources(&[path]).unwrap();
        let (same, none) = sources[0].program(2).unwrap();
        assert_eq!((same.as_str(), none), (sample::step(2).unwrap().text(), None));
        let (changed, note) = sources[0].program(16).unwrap();
        assert!(changed.contains("mhlo.num_replicas = 16 : i32") && !changed.contains("[[0, 1]]"), "{changed}");
        assert_eq!(note.as_deref(), Some("changed from 2 replicas to 16"));
        let problem = super::sources(&[folder.path().join("absent.mlir")]).err().unwrap();
        assert!(problem.contains("absent.mlir: No such file"), "{problem}");
    }

    #[test]
    fn facts_that_are_not_told_are_none() {
        let attributes = Attributes::from([
            ("flops".to_owned(), Value::Float(2.5)),
            ("device_memory_bytes_limit".to_owned(), Value::Integer(1 << 34)),
        ]);
        assert_eq!((flops(&attributes), device_memory(&attributes)), (Some(2.5), Some(1 << 34)));
        assert_eq!((flops(&Attributes::new()), device_memory(&Attributes::new())), (None, None));
        assert_eq!(stablehlo(Some(&(vec![0, 9, 0], vec![1, 13, 3]))), ", StableHLO 0.9.0 to 1.13.3");
        assert_eq!(one_line("a\n\n  b\n"), "a; b");
    }

    #[test]
    fn an_unknown_topology_is_refused_before_libtpu_is_opened() {
        let problem = run(Path::new("/no/such/libtpu.so"), &[], Some("v9"), false).unwrap_err();
        assert!(problem.contains("\"v9\" is a part of no topology's name; there are v2-8, v3-8"), "{problem}");
    }
}
