//! The memory that a training needs, computed from the tensors of a checkpoint.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::error::Error;

/// The longest header of a file that is read, as in the format's own readers.
const MAX_HEADER: u64 = 100_000_000;

/// The file that is written last, without which a folder is not a checkpoint.
const MANIFEST: &str = "manifest.json";

/// Returns the checkpoint at a path: a file of tensors, the folder of a checkpoint, or the newest one in a folder of
/// checkpoints.
pub(crate) fn checkpoint_at(path: &Path) -> Option<PathBuf> {
    let is_tensors = |path: &Path| path.extension().is_some_and(|extension| extension == "safetensors");
    if path.is_file() {
        return is_tensors(path).then(|| path.to_owned());
    }
    if path.join(MANIFEST).is_file() {
        return Some(path.to_owned());
    }
    let entries = fs::read_dir(path).ok()?.filter_map(Result::ok).map(|entry| entry.path());
    entries.filter(|folder| folder.join(MANIFEST).is_file()).max()
}

/// Describes the memory that a replica needs to train the model of a checkpoint, under several strategies.
pub(crate) fn explain(checkpoint: &Path, replicas: u64) -> Result<String, Error> {
    let (model, state) = tensors(checkpoint)?;
    if model.is_empty() {
        let problem = "it has no tensors of a model".to_owned();
        return Err(Error::Checkpoint { path: checkpoint.to_owned(), problem });
    }
    let needs = Needs::of(&model, &state);
    let mut text = format!(
        "{}: {} variables, of which {} are trained; {}\n\n",
        checkpoint.display(),
        model.len(),
        needs.trained,
        if needs.is_state_saved { "optimizer state as saved" } else { "optimizer state of Adam" },
    );
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(["each of several replicas keeps", "parameters", "gradients", "state", "together"]);
    for (strategy, [parameters, gradients, state]) in needs.rows(replicas) {
        let sizes =
            [parameters, gradients, state, parameters + gradients + state].map(|bytes| Bytes(bytes).to_string());
        table.add_row([strategy].into_iter().chain(sizes));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let lines = table.to_string();
    for line in lines.lines() {
        // Writing to a text does not fail.
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text.push_str("\nwithout activations, which depend on the batch; the log of a training names its peak\n");
    Ok(text)
}

/// A tensor of a file: its name, its type and the length of its elements in bytes.
struct Stored {
    name: String,
    dtype: Dtype,
    elements: u64,
    bytes: u64,
}

/// The bytes that training one copy of a model needs.
struct Needs {
    /// The number of trained variables.
    trained: usize,
    parameters: u64,
    gradients: u64,
    state: u64,
    is_state_saved: bool,
}

impl Needs {
    fn of(model: &[Stored], state: &[Stored]) -> Needs {
        let with_state: BTreeSet<&str> = state.iter().filter_map(|slot| Some(slot.name.rsplit_once('/')?.0)).collect();
        let is_statistic =
            |tensor: &Stored| ["running_mean", "running_var"].iter().any(|name| tensor.name.ends_with(name));
        let is_trained = |tensor: &&Stored| match with_state.is_empty() {
            true => !is_statistic(tensor),
            false => with_state.contains(tensor.name.as_str()),
        };
        let trained: Vec<&Stored> = model.iter().filter(is_trained).collect();
        // Two numbers for each element, in f32 or f64, and a copy in f32 of what has 16 bits.
        let of_adam = |tensor: &&Stored| match tensor.dtype {
            Dtype::F64 => 16 * tensor.elements,
            Dtype::F16 | Dtype::BF16 => 12 * tensor.elements,
            _ => 8 * tensor.elements,
        };
        let saved: u64 = state.iter().map(|slot| slot.bytes).sum();
        Needs {
            trained: trained.len(),
            parameters: model.iter().map(|tensor| tensor.bytes).sum(),
            gradients: trained.iter().map(|tensor| tensor.bytes).sum(),
            state: if state.is_empty() { trained.iter().map(of_adam).sum() } else { saved },
            is_state_saved: !state.is_empty(),
        }
    }

    /// Returns the bytes of parameters, gradients and state of each replica, by strategy.
    fn rows(&self, replicas: u64) -> [(String, [u64; 3]); 4] {
        let Needs { parameters, gradients, state, .. } = *self;
        let part = |bytes: u64| bytes.div_ceil(replicas);
        [
            ("Mirrored, MultiWorkerMirrored".to_owned(), [parameters, gradients, state]),
            (format!("the same with zero1, {replicas} replicas"), [parameters, gradients, part(state)]),
            (format!("FullySharded, {replicas} replicas"), [parameters, part(gradients), part(state)]),
            (
                format!("FullySharded with all layers in Sharded blocks, {replicas} replicas"),
                [part(parameters), part(gradients), part(state)],
            ),
        ]
    }
}

/// Returns the tensors of a checkpoint's model, and those of its optimizer.
fn tensors(checkpoint: &Path) -> Result<(Vec<Stored>, Vec<Stored>), Error> {
    let refuse = |path: &Path, problem: String| Error::Checkpoint { path: path.to_owned(), problem };
    if checkpoint.is_file() {
        let model = header(checkpoint).map_err(|problem| refuse(checkpoint, problem))?;
        return Ok((model, Vec::new()));
    }
    let entries = fs::read_dir(checkpoint).map_err(|error| refuse(checkpoint, error.to_string()))?;
    let (mut model, mut state) = (Vec::new(), Vec::new());
    for entry in entries {
        let path = entry.map_err(|error| refuse(checkpoint, error.to_string()))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let group = match name.strip_suffix(".safetensors") {
            Some("model") => &mut model,
            Some("optimizer") => &mut state,
            // Files of a group that has several.
            Some(part) if part.starts_with("model-") => &mut model,
            Some(part) if part.starts_with("optimizer-") => &mut state,
            _ => continue,
        };
        group.extend(header(&path).map_err(|problem| refuse(&path, problem))?);
    }
    Ok((model, state))
}

/// Reads the header of a file of tensors.
fn header(path: &Path) -> Result<Vec<Stored>, String> {
    let read = || -> io::Result<Result<Vec<u8>, String>> {
        let mut file = File::open(path)?;
        let mut len = [0; 8];
        file.read_exact(&mut len)?;
        let len = u64::from_le_bytes(len);
        if len > MAX_HEADER {
            return Ok(Err(format!("its header has {len} bytes; expected at most {MAX_HEADER}")));
        }
        let mut header = Vec::new();
        file.take(len).read_to_end(&mut header)?;
        Ok(Ok(header))
    };
    let header = read().map_err(|error| error.to_string())??;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| error.to_string())?;
    let stored = |(name, info): (String, &TensorInfo)| Stored {
        name,
        dtype: info.dtype,
        elements: info.shape.iter().map(|extent| *extent as u64).product(),
        bytes: (info.data_offsets.1 - info.data_offsets.0) as u64,
    };
    Ok(metadata.tensors().into_iter().map(stored).collect())
}

/// Displays a size in the largest unit of which there is one at least.
struct Bytes(u64);

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let units = [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        match units.into_iter().find(|(unit, _)| self.0 >= *unit) {
            Some((unit, name)) => write!(f, "{:.1} {name}", self.0 as f64 / unit as f64),
            None => write!(f, "{} B", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::TensorView;

    use super::*;

    fn write(path: &Path, tensors: &[(&str, Dtype, usize)]) {
        let bytes: Vec<Vec<u8>> = tensors.iter().map(|(_, dtype, len)| vec![0; len * dtype.bitsize() / 8]).collect();
        let views = tensors.iter().zip(&bytes).map(|((name, dtype, len), bytes)| {
            ((*name).to_owned(), TensorView::new(*dtype, vec![*len], bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    /// Returns the sizes of a row of the table.
    fn row(text: &str, begin: &str) -> Vec<String> {
        let line = text.lines().find(|line| line.trim_start().starts_with(begin)).unwrap_or_else(|| panic!("{text}"));
        let words: Vec<&str> = line.split_whitespace().collect();
        words[words.len() - 8..].chunks(2).map(|size| size.join(" ")).collect()
    }

    #[test]
    fn a_checkpoint_is_divided_as_strategies_divide_it() {
        let root = tempfile::tempdir().unwrap();
        for (name, len) in [("step-00000001", 8), ("step-00000002", 1024)] {
            let folder = root.path().join(name);
            fs::create_dir(&folder).unwrap();
            write(&folder.join("model-00001-of-00002.safetensors"), &[("fc.weight", Dtype::F32, len)]);
            write(&folder.join("model-00002-of-00002.safetensors"), &[("norm.running_mean", Dtype::F32, 256)]);
            let slots = [("fc.weight/m", Dtype::F32, len), ("fc.weight/v", Dtype::F32, len)];
            write(&folder.join("optimizer.safetensors"), &slots);
            fs::write(folder.join(MANIFEST), "{}").unwrap();
        }
        // One that is being written.
        fs::create_dir(root.path().join("step-00000003")).unwrap();
        let newest = checkpoint_at(root.path()).unwrap();
        assert_eq!(newest, root.path().join("step-00000002"));
        assert_eq!(checkpoint_at(&newest).unwrap(), newest);
        let text = explain(&newest, 4).unwrap();
        assert!(text.contains("2 variables, of which 1 are trained; optimizer state as saved"), "{text}");
        assert_eq!(row(&text, "Mirrored"), ["5.0 KiB", "4.0 KiB", "8.0 KiB", "17.0 KiB"]);
        assert_eq!(row(&text, "the same with zero1"), ["5.0 KiB", "4.0 KiB", "2.0 KiB", "11.0 KiB"]);
        assert_eq!(row(&text, "FullySharded, 4"), ["5.0 KiB", "1.0 KiB", "2.0 KiB", "8.0 KiB"]);
        assert_eq!(row(&text, "FullySharded with"), ["1.2 KiB", "1.0 KiB", "2.0 KiB", "4.2 KiB"]);
    }

    #[test]
    fn a_model_alone_gets_the_state_of_adam() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pretrained.safetensors");
        write(&path, &[("w", Dtype::BF16, 100), ("norm.running_var", Dtype::F32, 10)]);
        assert_eq!(checkpoint_at(&path).unwrap(), path);
        let text = explain(&path, 2).unwrap();
        assert!(text.contains("of which 1 are trained; optimizer state of Adam"), "{text}");
        assert_eq!(row(&text, "Mirrored"), ["240 B", "200 B", "1.2 KiB", "1.6 KiB"]);
    }

    #[test]
    fn what_is_no_checkpoint_is_told_in_words() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(checkpoint_at(folder.path()), None);
        let path = folder.path().join("model.safetensors");
        for (bytes, told) in [(&[255; 16][..], "expected at most 100000000"), (&[4, 0], "failed to fill")] {
            fs::write(&path, bytes).unwrap();
            let error = explain(&path, 2).unwrap_err().to_string();
            assert!(error.contains("model.safetensors") && error.contains(told), "{error}");
        }
        fs::write(&path, [4, 0, 0, 0, 0, 0, 0, 0, b'{']).unwrap();
        assert!(explain(&path, 2).is_err());
        fs::remove_file(&path).unwrap();
        fs::write(folder.path().join(MANIFEST), "{}").unwrap();
        let error = explain(folder.path(), 2).unwrap_err().to_string();
        assert!(error.contains("it has no tensors of a model"), "{error}");
    }
}
